//! Chapter "Stripes and parity" of the format document: places, and what must agree.

use crate::device::Source;
use crate::math::Field;
use crate::superblock::Superblock;
use crate::{Findings, Member};
use std::io;

/// Rows of a strip that are compared at a time.
const ROW: usize = 4096;
/// Lines about parity before the rest is only counted.
const MOST_LINES: u64 = 100;

/// The members of an array by slot, `None` where one is missing or not live.
pub struct Array<'a> {
    pub name: String,
    pub table: &'a Superblock,
    pub members: Vec<Option<&'a Member>>,
}

impl Array<'_> {
    /// Group and row of a stripe.
    fn place(&self, stripe: u64) -> (usize, u64) {
        let mut begin = vec![0; self.table.groups()];
        let mut first = 0;
        for zone in self.table.zones() {
            let count = zone.rows * zone.groups as u64;
            if stripe < first + count {
                let (group, row) =
                    ((stripe - first) % zone.groups as u64, (stripe - first) / zone.groups as u64);
                let group = zone.first_group + group as usize;
                return (group, begin[group] + row);
            }
            begin[zone.first_group..zone.first_group + zone.groups]
                .iter_mut()
                .for_each(|row| *row += zone.rows);
            first += count;
        }
        let groups = self.table.groups() as u64;
        (((stripe - first) % groups) as usize, begin[0] + (stripe - first) / groups)
    }

    /// The slot that holds a strip of a row of a group: data 0 to k - 1, parity from k on.
    fn slot(&self, group: usize, row: u64, strip: usize) -> usize {
        let (k, m) = (self.table.k(), self.table.m());
        let n = k + m;
        let first_parity = n - 1 - (row % n as u64) as usize;
        let turn = if strip < k { m + strip } else { strip - k };
        group * n + (first_parity + turn) % n
    }

    /// Compares parity of every stripe that was written and is in sync; returns how many.
    pub fn check(&self, regions: &[u8], bad: &[u64], findings: &mut Findings) -> u64 {
        let (field, table) = (Field::new(), self.table);
        let (k, n) = (table.k(), table.k() + table.m());
        let mut compared = 0;
        for stripe in 0..table.rows() * table.groups() as u64 {
            let (group, row) = self.place(stripe);
            let bits = regions[(row * table.strip() / table.region_bytes()) as usize];
            if bits & 1 == 0 || bits & 4 != 0 || bad.contains(&stripe) {
                continue;
            }
            let holders: Option<Vec<&Member>> =
                (0..n).map(|s| self.members[self.slot(group, row, s)]).collect();
            let Some(holders) = holders else { continue };
            let mut strips = Vec::new();
            for member in &holders {
                let at = member.block.data_offset() + row * table.strip();
                match member.device.read(at, table.strip() as usize) {
                    Ok(bytes) => strips.push(bytes),
                    Err(error) => findings.add(&member.name, "data", at, error.to_string()),
                }
            }
            if strips.len() < n {
                continue;
            }
            compared += 1;
            // The sum of the stored and the computed parity: zero when they match.
            for (j, parity) in (k..n).enumerate() {
                let (data, rest) = strips.split_at_mut(parity);
                let data = &data[..k];
                data.iter().enumerate().for_each(|(i, data)| {
                    field.add(field.coefficient(table.matrix(), k, j, i), data, &mut rest[0]);
                });
            }
            for offset in (0..table.strip() as usize).step_by(ROW) {
                let syndromes: Vec<&[u8]> =
                    strips[k..].iter().map(|strip| &strip[offset..offset + ROW]).collect();
                if syndromes.iter().all(|syndrome| syndrome.iter().all(|byte| *byte == 0)) {
                    continue;
                }
                let culprit = culprit(&field, table, &syndromes);
                let within = row * table.strip() + offset as u64;
                let (name, at, why) = match culprit.map(|strip| (strip, holders[strip])) {
                    Some((strip, member)) => {
                        let why = format!("stripe {stripe}: strip {strip} does not fit the others");
                        (&member.name, member.block.data_offset() + within, why)
                    }
                    None => {
                        let why = format!("stripe {stripe}, group {group}: data and parity do not agree");
                        (&self.name, within, why)
                    }
                };
                findings.add_some(name, "parity", at, why, MOST_LINES);
            }
        }
        compared
    }
}

/// The one strip without which the others agree; of two parities at least.
fn culprit(field: &Field, table: &Superblock, syndromes: &[&[u8]]) -> Option<usize> {
    let is_zero = |syndrome: &&[u8]| syndrome.iter().all(|byte| *byte == 0);
    if syndromes.len() < 2 {
        return None;
    }
    let wrong: Vec<usize> = (0..syndromes.len()).filter(|j| !is_zero(&syndromes[*j])).collect();
    if let [j] = wrong[..] {
        return Some(table.k() + j);
    }
    let k = table.k();
    let c = |j: usize, i: usize| field.coefficient(table.matrix(), k, j, i);
    let explains = |i: &usize| {
        (1..syndromes.len()).all(|j| {
            let pairs = syndromes[0].iter().zip(syndromes[j]);
            pairs.clone().all(|(a, b)| field.multiply(c(j, *i), *a) == field.multiply(c(0, *i), *b))
        })
    };
    let mut found = (0..k).filter(explains);
    found.next().filter(|_| found.next().is_none())
}

impl Source for Array<'_> {
    fn bytes(&self) -> u64 {
        self.table.rows() * self.table.groups() as u64 * self.table.k() as u64 * self.table.strip()
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let (k, strip) = (self.table.k() as u64, self.table.strip());
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = offset + bytes.len() as u64;
            let (number, within) = (at / strip, at % strip);
            let (group, row) = self.place(number / k);
            let strips =
                (number % k) as usize..if k == 1 { 1 + self.table.m() } else { (number % k) as usize + 1 };
            let mut holders = strips.filter_map(|s| self.members[self.slot(group, row, s)]);
            let missing = || io::Error::other(format!("offset {at} lies on a missing member"));
            let member = holders.next().ok_or_else(missing)?;
            let count = (strip - within).min((len - bytes.len()) as u64) as usize;
            bytes.extend(member.device.read(member.block.data_offset() + row * strip + within, count)?);
        }
        Ok(bytes)
    }
}
