//! The parity of an array that nobody uses: read, computed again, compared, and repaired when told.
//!
//! Members are read in windows, in parallel. A stripe whose strips do not agree is looked at row by row: with two
//! strips more than needed, the one strip without which the rest agrees is the wrong one and is computed from the
//! others. Otherwise parity is computed from data, as md does: which of them was wrong cannot be known.

use super::join::join_all;
use crate::config::ROW_BYTES;
use crate::parity::Located;
use crate::{ArrayConfig, Code};
use block::{Channel, Flags, IoError, Op};
use reactor::{Buffer, BufferPool, MAX_BUFFER};
use serde::Serialize;
use std::ops::Range;
use std::rc::Rc;

/// Memory that a check uses for what it reads.
const WINDOW_BYTES: usize = 32 * MAX_BUFFER;

/// What the region map says about a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Never written: nothing to compare.
    Nothing,
    /// Parity is to be right.
    InSync,
    /// Parity is known to be old, or may be after a crash: a difference is no fault.
    OutOfSync,
}

/// An array to be checked: what can be reached of it.
pub struct Subject<'a> {
    /// Its shape.
    pub config: &'a ArrayConfig,
    /// Each slot's channel and where data begins on it, in bytes; `None` when the member is missing or out.
    pub members: &'a [Option<(Rc<dyn Channel>, u64)>],
    /// What to expect of a stripe.
    pub expect: &'a dyn Fn(u64) -> Expectation,
}

/// Rows of a stripe that do not agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The stripe.
    pub stripe: u64,
    /// First byte in each strip.
    pub offset: u64,
    /// Bytes in each strip.
    pub len: u64,
    /// The slot of the member that holds the wrong strip, if it can be named.
    pub slot: Option<usize>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was only reported.
    Found,
    /// The wrong strip, or parity, has been written anew.
    Repaired,
    /// Nobody can tell what is right.
    Unrepairable,
    /// The member refused the write.
    Refused,
}

/// What a check has found. Rows are of 4096 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Stripes that were compared.
    pub stripes_checked: u64,
    /// Stripes without redundancy, because members are missing: nothing to compare.
    pub stripes_without_redundancy: u64,
    /// Stripes that were never written.
    pub stripes_unwritten: u64,
    /// Rows that should agree and do not.
    pub rows_different: u64,
    /// Rows in regions whose parity is known to be old, and is.
    pub rows_out_of_sync: u64,
    /// Strips that a member could not read.
    pub strips_unreadable: u64,
    /// Rows written anew.
    pub rows_repaired: u64,
    /// Rows that nobody can repair, or whose member refuses the repair.
    pub rows_unrepairable: u64,
    /// Rows that are still different or unreadable.
    pub rows_wrong: u64,
}

impl Findings {
    /// Whether nothing is wrong (any more).
    pub fn is_clean(&self) -> bool {
        self.rows_wrong == 0
    }
}

/// Who hears of a check's progress.
pub trait Observer {
    /// So many of all stripes have been looked at.
    fn progress(&mut self, done: u64, all: u64);
    /// Rows do not agree.
    fn difference(&mut self, difference: &Difference);
}

/// Checks every stripe; with `repair` makes what is wrong right again where that is possible.
pub async fn verify(subject: &Subject<'_>, repair: bool, observer: &mut dyn Observer) -> Findings {
    let geometry = subject.config.geometry;
    let strip = geometry.strip_bytes as usize;
    let members = geometry.group_members();
    let window = (WINDOW_BYTES / members).min(MAX_BUFFER).max(strip) / strip;
    let mut check = Check {
        subject,
        code: subject.config.code(),
        pool: BufferPool::new(2 * WINDOW_BYTES.max(members * strip)),
        repair,
        findings: Findings::default(),
        scratch: vec![vec![0; strip]; geometry.group_members()],
    };
    let mut done = 0;
    for group in 0..geometry.groups {
        let mut first = 0;
        while first < geometry.group_stripes {
            let count = (window as u64).min(geometry.group_stripes - first);
            check.window(group, first, count, observer).await;
            first += count;
            done += count;
            observer.progress(done, geometry.stripes());
        }
    }
    check.findings
}

struct Check<'a> {
    subject: &'a Subject<'a>,
    code: Code,
    pool: BufferPool,
    repair: bool,
    findings: Findings,
    /// A strip for each strip of a stripe, to compute into.
    scratch: Vec<Vec<u8>>,
}

/// What a member of the group holds of a window: its bytes, and which strips of it could not be read.
struct Column {
    buffer: Buffer,
    unreadable: Vec<bool>,
}

/// What is wrong with some rows of a stripe.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Right,
    /// This strip is wrong.
    Strip(usize),
    /// Parity does not fit data, and nothing says which is wrong.
    Parity,
    /// A data strip is missing and the rest does not agree.
    Unknown,
}

impl Check<'_> {
    async fn window(&mut self, group: usize, first: u64, count: u64, observer: &mut dyn Observer) {
        let geometry = self.subject.config.geometry;
        let stripe_of = |i: u64| geometry.stripe(group, first + i);
        if (0..count).all(|i| (self.subject.expect)(stripe_of(i)) == Expectation::Nothing) {
            self.findings.stripes_unwritten += count;
            return;
        }
        let slots = group * geometry.group_members()..(group + 1) * geometry.group_members();
        let columns = join_all(slots.map(|slot| self.read(slot, first, count))).await;
        for i in 0..count {
            let stripe = stripe_of(i);
            let expectation = (self.subject.expect)(stripe);
            if expectation == Expectation::Nothing {
                self.findings.stripes_unwritten += 1;
                continue;
            }
            self.stripe(stripe, i as usize, &columns, expectation, observer).await;
        }
    }

    /// What a slot holds of `count` stripes of its group from `first` on; strip by strip where the whole cannot be
    /// read.
    async fn read(&self, slot: usize, first: u64, count: u64) -> Option<Column> {
        let (channel, data) = self.subject.members[slot].as_ref()?;
        let strip = u64::from(self.subject.config.geometry.strip_bytes);
        let len = (count * strip) as usize;
        let at = data + first * strip;
        let buffer = self.pool.take(len).await;
        let (mut buffer, result) = buffer.transfer(&**channel, Op::Read, Flags::NONE, at).await;
        let mut unreadable = vec![false; count as usize];
        if result.is_err() {
            for (i, bad) in unreadable.iter_mut().enumerate() {
                let part = self.pool.take(strip as usize).await;
                let (part, result) =
                    part.transfer(&**channel, Op::Read, Flags::NONE, at + i as u64 * strip).await;
                *bad = result.is_err();
                let target = i * strip as usize;
                buffer.as_mut_slice()[target..target + strip as usize].copy_from_slice(part.as_slice());
            }
        }
        Some(Column { buffer, unreadable })
    }

    async fn stripe(
        &mut self,
        stripe: u64,
        row_of_window: usize,
        columns: &[Option<Column>],
        expectation: Expectation,
        observer: &mut dyn Observer,
    ) {
        let geometry = self.subject.config.geometry;
        let bytes = geometry.strip_bytes as usize;
        let mut strips: Vec<Option<&[u8]>> = vec![None; geometry.group_members()];
        let mut unreadable = Vec::new();
        for (s, strip) in strips.iter_mut().enumerate() {
            let column = &columns[geometry.member(stripe, s) % geometry.group_members()];
            match column {
                Some(column) if column.unreadable[row_of_window] => unreadable.push(s),
                Some(column) => *strip = Some(&column.buffer.as_slice()[row_of_window * bytes..][..bytes]),
                None => {}
            }
        }
        self.findings.strips_unreadable += unreadable.len() as u64;
        let present = strips.iter().flatten().count();
        if present < geometry.data {
            let rows = (unreadable.len() * bytes / ROW_BYTES as usize) as u64;
            self.findings.rows_unrepairable += rows;
            self.findings.rows_wrong += rows;
            return;
        }
        let mut verdicts = vec![(0..bytes, Verdict::Right)];
        if present == geometry.data {
            self.findings.stripes_without_redundancy += 1;
        } else {
            self.findings.stripes_checked += 1;
            if !self.code.agree(&strips) {
                verdicts = self.judge(&strips, expectation);
            }
        }
        for (range, verdict) in verdicts {
            match verdict {
                Verdict::Right => {
                    for s in &unreadable {
                        let verdict = Verdict::Strip(*s);
                        self.settle(stripe, &strips, range.clone(), verdict, expectation, observer).await;
                    }
                }
                verdict => {
                    let rows = rows(&range);
                    match expectation {
                        Expectation::OutOfSync => self.findings.rows_out_of_sync += rows,
                        _ => self.findings.rows_different += rows,
                    }
                    self.settle(stripe, &strips, range.clone(), verdict, expectation, observer).await;
                    // A strip that cannot be read is computed from the others: they have to be right first.
                    self.findings.rows_wrong += rows * unreadable.len() as u64;
                    self.findings.rows_unrepairable += rows * unreadable.len() as u64;
                }
            }
        }
    }

    /// What is wrong with each row, neighbours with the same verdict together.
    fn judge(&self, strips: &[Option<&[u8]>], expectation: Expectation) -> Vec<(Range<usize>, Verdict)> {
        let geometry = self.subject.config.geometry;
        let has_all_data = strips[..geometry.data].iter().all(Option::is_some);
        let mut verdicts: Vec<(Range<usize>, Verdict)> = Vec::new();
        for start in (0..geometry.strip_bytes as usize).step_by(ROW_BYTES as usize) {
            let row = start..start + ROW_BYTES as usize;
            let present: Vec<Option<&[u8]>> =
                strips.iter().map(|strip| strip.map(|strip| &strip[row.clone()])).collect();
            let verdict = match self.code.locate(&present) {
                Located::Agreed => Verdict::Right,
                _ if expectation == Expectation::OutOfSync && has_all_data => Verdict::Parity,
                Located::Wrong(strip) => Verdict::Strip(strip),
                Located::Ambiguous if has_all_data => Verdict::Parity,
                Located::Ambiguous => Verdict::Unknown,
            };
            match verdicts.last_mut() {
                Some((range, last)) if *last == verdict => range.end = row.end,
                _ => verdicts.push((row, verdict)),
            }
        }
        verdicts
    }

    /// Computes the strips `wanted` from `sources` into the scratch strips, in their order.
    fn compute(
        &mut self,
        strips: &[Option<&[u8]>],
        sources: &[usize],
        wanted: &[usize],
        range: Range<usize>,
    ) {
        let available = sources.iter().fold(0u64, |mask, s| mask | 1 << s);
        let decoder = self.code.decoder(wanted, available).expect("k strips are there");
        let inputs: Vec<&[u8]> = decoder
            .sources()
            .iter()
            .map(|s| &strips[*s].expect("the decoder uses what is available")[range.clone()])
            .collect();
        let mut outputs: Vec<&mut [u8]> =
            self.scratch[..wanted.len()].iter_mut().map(|strip| &mut strip[..range.len()]).collect();
        decoder.decode(&inputs, &mut outputs);
    }

    /// Repairs rows or only says what is wrong with them.
    async fn settle(
        &mut self,
        stripe: u64,
        strips: &[Option<&[u8]>],
        range: Range<usize>,
        verdict: Verdict,
        expectation: Expectation,
        observer: &mut dyn Observer,
    ) {
        let geometry = self.subject.config.geometry;
        let wanted: Vec<usize> = match verdict {
            Verdict::Right | Verdict::Unknown => Vec::new(),
            Verdict::Strip(s) => vec![s],
            Verdict::Parity => {
                (geometry.data..geometry.group_members()).filter(|s| strips[*s].is_some()).collect()
            }
        };
        let slot = match verdict {
            Verdict::Strip(s) => Some(geometry.member(stripe, s)),
            _ => None,
        };
        let outcome = if verdict == Verdict::Unknown {
            Outcome::Unrepairable
        } else if !self.repair {
            Outcome::Found
        } else {
            let sources: Vec<usize> = (0..strips.len())
                .filter(|s| strips[*s].is_some() && !wanted.contains(s))
                .take(geometry.data)
                .collect();
            self.compute(strips, &sources, &wanted, range.clone());
            match self.write(stripe, &wanted, &range).await {
                Ok(()) => Outcome::Repaired,
                Err(_) => Outcome::Refused,
            }
        };
        let count = rows(&range);
        match outcome {
            Outcome::Repaired => self.findings.rows_repaired += count,
            Outcome::Found => {}
            Outcome::Unrepairable | Outcome::Refused => self.findings.rows_unrepairable += count,
        }
        // What is out of sync is no fault, as long as somebody knows what is right.
        let is_fault = expectation == Expectation::InSync || outcome != Outcome::Found;
        if is_fault && outcome != Outcome::Repaired {
            self.findings.rows_wrong += count;
        }
        let (offset, len) = (range.start as u64, range.len() as u64);
        observer.difference(&Difference { stripe, offset, len, slot, outcome });
    }

    /// Writes the scratch strips, which are those of `wanted` in their order.
    async fn write(&self, stripe: u64, wanted: &[usize], range: &Range<usize>) -> Result<(), IoError> {
        let geometry = self.subject.config.geometry;
        for (s, computed) in wanted.iter().zip(&self.scratch) {
            let slot = geometry.member(stripe, *s);
            let (channel, data) = self.subject.members[slot].as_ref().ok_or(IoError::DeviceGone)?;
            let mut buffer = self.pool.take(range.len()).await;
            buffer.as_mut_slice().copy_from_slice(&computed[..range.len()]);
            let at = data + geometry.member_offset(stripe) + range.start as u64;
            buffer.transfer(&**channel, Op::Write, Flags::FUA, at).await.1?;
        }
        Ok(())
    }
}

fn rows(range: &Range<usize>) -> u64 {
    (range.len() / ROW_BYTES as usize) as u64
}

#[cfg(test)]
mod tests;
