//! Chapters "The write-intent bitmap" and "Bad blocks" of the format document.

use crate::device::{Source, is_zero, u32_at, u64_at};
use crate::math::crc32c_without;
use crate::{Findings, Member};

/// Regions that a page holds.
const REGIONS: u64 = 4032;

/// Checks one structure of which each member has two copies, and returns the newest content.
struct Pair<'a> {
    what: String,
    array: &'a [u8],
    /// The valid content of a copy, or what is wrong with it.
    decode: &'a dyn Fn(&[u8]) -> Result<usize, String>,
}

impl Pair<'_> {
    fn check(
        &self,
        members: &[&Member],
        place: impl Fn(&Member) -> (u64, u64),
        findings: &mut Findings,
    ) -> Option<Vec<u8>> {
        let mut newest: Vec<(&Member, u64, Vec<u8>)> = Vec::new();
        for member in members {
            let (offset, len) = place(member);
            let mut own: Option<(u64, Vec<u8>)> = None;
            for copy in 0..2 {
                let at = offset + copy * len;
                let what = format!("{} copy {copy}", self.what);
                let bytes = match member.device.read(at, len as usize) {
                    Ok(bytes) => bytes,
                    Err(error) => {
                        findings.add(&member.name, &what, at, error.to_string());
                        continue;
                    }
                };
                if is_zero(&bytes) {
                    continue;
                }
                match self.valid(&bytes) {
                    Err(why) => findings.add(&member.name, &what, at, why),
                    Ok((generation, content)) => {
                        if own.as_ref().is_none_or(|(other, _)| *other < generation) {
                            own = Some((generation, content));
                        }
                    }
                }
            }
            let (generation, content) = own.unwrap_or_default();
            newest.push((member, generation, content));
        }
        let best = newest.iter().max_by_key(|(_, generation, _)| *generation)?.clone();
        for (member, generation, content) in &newest {
            if (*generation, content) != (best.1, &best.2) {
                let at = place(member).0;
                let other = &best.0.name;
                let why = format!("generation {generation} differs from generation {} of {other}", best.1);
                findings.add(&member.name, &self.what, at, why);
            }
        }
        (best.1 > 0).then_some(best.2)
    }

    fn valid(&self, bytes: &[u8]) -> Result<(u64, Vec<u8>), String> {
        let used = (self.decode)(bytes)?;
        let (stored, computed) = (u32_at(bytes, 8), crc32c_without(&bytes[..used], 8));
        if stored != computed {
            return Err(format!("checksum {stored:#010x}, computed {computed:#010x}"));
        }
        if &bytes[16..32] != self.array {
            return Err("UUID of another array".into());
        }
        Ok((u64_at(bytes, 32), bytes[64..used].to_vec()))
    }
}

fn magic(bytes: &[u8], expected: &[u8; 8]) -> Result<(), String> {
    if &bytes[..8] == expected { Ok(()) } else { Err(format!("magic {:02x?}", &bytes[..8])) }
}

/// The bits of every region.
pub fn regions(members: &[&Member], findings: &mut Findings) -> Vec<u8> {
    let table = &members[0].block;
    let mut bits = Vec::new();
    for page in 0..table.regions().div_ceil(REGIONS) {
        let decode = |bytes: &[u8]| {
            magic(bytes, b"FrstRmap")?;
            let number = u64::from(u32_at(bytes, 12));
            if number == page { Ok(4096) } else { Err(format!("page number {number}")) }
        };
        let what = format!("write-intent bitmap page {page}");
        let pair = Pair { what: what.clone(), array: table.array(), decode: &decode };
        let place = |member: &Member| (u64_at(&member.block.0, 224) + page * 8192, 4096);
        let found = pair.check(members, place, findings);
        let found = found.unwrap_or_else(|| vec![table.initial_bits(); REGIONS as usize]);
        let here = (table.regions() - page * REGIONS).min(REGIONS) as usize;
        for (i, region) in
            found[..here].iter().enumerate().filter(|(_, bits)| **bits > 31 || **bits & 20 == 16)
        {
            let at = place(members[0]).0;
            findings.add(
                &members[0].name,
                &what,
                at,
                format!("region {i} of the page has bits {region:#04x}"),
            );
        }
        bits.extend_from_slice(&found[..here]);
    }
    bits
}

/// The stripes with bad blocks.
pub fn bad_stripes(members: &[&Member], findings: &mut Findings) -> Vec<u64> {
    let table = &members[0].block;
    let decode = |bytes: &[u8]| {
        magic(bytes, b"FrstRbad")?;
        let count = u32_at(bytes, 12) as usize;
        let used = count.checked_mul(24).map(|len| len + 64).filter(|used| *used <= bytes.len());
        used.ok_or_else(|| format!("{count} ranges"))
    };
    let pair = Pair { what: "bad blocks".into(), array: table.array(), decode: &decode };
    let place = |member: &Member| (u64_at(&member.block.0, 232), u64::from(u32_at(&member.block.0, 240)));
    let found = pair.check(members, place, findings).unwrap_or_default();
    let mut stripes = Vec::new();
    for range in found.chunks_exact(24) {
        let (stripe, strips) = (u64_at(range, 0), u64_at(range, 8));
        let (offset, len) = (u64::from(u32_at(range, 16)), u64::from(u32_at(range, 20)));
        let strips_fit = strips != 0 && strips >> (table.k() + table.m()).min(63) <= 1;
        let fits = stripe < table.rows() * table.groups() as u64 && strips_fit && len > 0;
        if !fits || offset + len > table.strip() {
            let why = format!("range of stripe {stripe}, strips {strips:#x}, offset {offset}, {len} bytes");
            findings.add(&members[0].name, "bad blocks", place(members[0]).0, why);
        }
        stripes.push(stripe);
    }
    stripes
}
