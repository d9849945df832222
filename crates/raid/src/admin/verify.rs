//! Verifies the parity of an array that is not in use: read, computed again, compared, and repaired
//! on request.
//!
//! Members are read in windows, in parallel. A stripe whose strips do not agree is compared row by
//! row. With two strips more than needed, the one strip without which the rest agrees is the wrong
//! one and is computed from the others. Otherwise parity is computed from data, as md does: which
//! of them was wrong cannot be known.

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

/// The state of a stripe by the write-intent bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Never written: nothing to compare.
    Nothing,
    /// Parity is to be right.
    InSync,
    /// Parity is known to be old, or may be after a crash: a difference is no fault. Data that can
    /// be read is right.
    OutOfSync,
    /// As [`Expectation::OutOfSync`], and parity does not tell what data is.
    Open,
}

/// An array to be checked: what can be reached of it.
pub struct Subject<'a> {
    /// Its shape.
    pub config: &'a ArrayConfig,
    /// Each slot's channel and where data begins on it, in bytes; `None` when the member is missing
    /// or out.
    pub members: &'a [Option<(Rc<dyn Channel>, u64)>],
    /// Returns the state that a stripe should have.
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
    /// The result of its repair.
    pub outcome: Outcome,
}

/// The result of the repair of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was only reported.
    Found,
    /// The wrong strip, or parity, has been rewritten.
    Repaired,
    /// The right content cannot be known.
    Unrepairable,
    /// The member refused the write.
    Refused,
}

/// The findings of a check. Rows are of 4096 bytes.
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
    /// Rows rewritten.
    pub rows_repaired: u64,
    /// Rows that cannot be repaired, or whose member refuses the repair.
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

/// Receives the progress of a check.
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

/// A member's part of a window: its bytes, and for each strip the blocks that could not be read, as
/// offsets in the strip.
struct Column {
    buffer: Buffer,
    unreadable: Vec<Vec<usize>>,
}

/// Bytes of a stripe's strips, and the strips that cannot be read there.
struct Part {
    range: Range<usize>,
    unreadable: Vec<usize>,
}

/// The verdict on some rows of a stripe.
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

    /// Reads a slot's strips of `count` stripes of its group from `first` on: strip by strip where
    /// the whole cannot be read, and block by block where a strip cannot.
    async fn read(&self, slot: usize, first: u64, count: u64) -> Option<Column> {
        let (channel, data) = self.subject.members[slot].as_ref()?;
        let strip = u64::from(self.subject.config.geometry.strip_bytes);
        let len = (count * strip) as usize;
        let at = data + first * strip;
        let buffer = self.pool.take(len).await;
        let (mut buffer, result) = buffer.transfer(&**channel, Op::Read, Flags::NONE, at).await;
        let mut unreadable = vec![Vec::new(); count as usize];
        if result.is_err() {
            let strips = buffer.as_mut_slice().chunks_mut(strip as usize);
            for (i, (bytes, bad)) in strips.zip(&mut unreadable).enumerate() {
                let at = at + i as u64 * strip;
                if self.read_part(&**channel, at, bytes).await.is_ok() {
                    continue;
                }
                let block = self.subject.config.block_size as usize;
                for (start, bytes) in (0..).step_by(block).zip(bytes.chunks_mut(block)) {
                    if self.read_part(&**channel, at + start as u64, bytes).await.is_err() {
                        bad.push(start);
                    }
                }
            }
        }
        Some(Column { buffer, unreadable })
    }

    async fn read_part(&self, channel: &dyn Channel, at: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let part = self.pool.take(bytes.len()).await;
        let (part, result) = part.transfer(channel, Op::Read, Flags::NONE, at).await;
        bytes.copy_from_slice(part.as_slice());
        result
    }

    /// The bytes of a stripe's strips, cut where other strips are unreadable. `bad` says for each
    /// strip which of its blocks are.
    fn parts(&self, bad: &[&[usize]]) -> Vec<Part> {
        let config = self.subject.config;
        let (strip, block) = (config.geometry.strip_bytes as usize, config.block_size as usize);
        if bad.iter().all(|blocks| blocks.is_empty()) {
            return vec![Part { range: 0..strip, unreadable: Vec::new() }];
        }
        let mut parts: Vec<Part> = Vec::new();
        for start in (0..strip).step_by(block) {
            let is_bad = |s: &usize| bad[*s].binary_search(&start).is_ok();
            let unreadable: Vec<usize> = (0..bad.len()).filter(is_bad).collect();
            match parts.last_mut() {
                Some(last) if last.unreadable == unreadable => last.range.end = start + block,
                _ => parts.push(Part { range: start..start + block, unreadable }),
            }
        }
        parts
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
        let mut bad: Vec<&[usize]> = vec![&[]; geometry.group_members()];
        for (s, strip) in strips.iter_mut().enumerate() {
            if let Some(column) = &columns[geometry.member(stripe, s) % geometry.group_members()] {
                *strip = Some(&column.buffer.as_slice()[row_of_window * bytes..][..bytes]);
                bad[s] = &column.unreadable[row_of_window];
            }
        }
        self.findings.strips_unreadable += bad.iter().filter(|blocks| !blocks.is_empty()).count() as u64;
        match strips.iter().flatten().count() {
            present if present > geometry.data => self.findings.stripes_checked += 1,
            present if present == geometry.data => self.findings.stripes_without_redundancy += 1,
            _ => {}
        }
        for part in self.parts(&bad) {
            let mut strips = strips.clone();
            part.unreadable.iter().for_each(|s| strips[*s] = None);
            self.part(stripe, &strips, part, expectation, observer).await;
        }
    }

    /// Some bytes of a stripe whose strips can be read all along, or not at all.
    async fn part(
        &mut self,
        stripe: u64,
        strips: &[Option<&[u8]>],
        part: Part,
        expectation: Expectation,
        observer: &mut dyn Observer,
    ) {
        let geometry = self.subject.config.geometry;
        let Part { range, unreadable } = part;
        let present = strips.iter().flatten().count();
        if present < geometry.data {
            let rows = rows(&range) * unreadable.len() as u64;
            self.findings.rows_unrepairable += rows;
            self.findings.rows_wrong += rows;
            return;
        }
        let is_open = expectation == Expectation::Open && strips[..geometry.data].contains(&None);
        for (range, verdict) in self.judge(strips, range, expectation) {
            match verdict {
                Verdict::Right => {
                    for s in &unreadable {
                        let verdict = if is_open { Verdict::Unknown } else { Verdict::Strip(*s) };
                        self.settle(stripe, strips, range.clone(), verdict, expectation, observer).await;
                    }
                }
                verdict => {
                    let rows = rows(&range);
                    match expectation {
                        Expectation::OutOfSync | Expectation::Open => self.findings.rows_out_of_sync += rows,
                        _ => self.findings.rows_different += rows,
                    }
                    self.settle(stripe, strips, range.clone(), verdict, expectation, observer).await;
                    // A strip that cannot be read is computed from the others: they have to be
                    // right first.
                    self.findings.rows_wrong += rows * unreadable.len() as u64;
                    self.findings.rows_unrepairable += rows * unreadable.len() as u64;
                }
            }
        }
    }

    /// Judges each row; neighbours with the same verdict are one range.
    fn judge(
        &self,
        strips: &[Option<&[u8]>],
        range: Range<usize>,
        expectation: Expectation,
    ) -> Vec<(Range<usize>, Verdict)> {
        let geometry = self.subject.config.geometry;
        let bytes: Vec<Option<&[u8]>> =
            strips.iter().map(|strip| strip.map(|strip| &strip[range.clone()])).collect();
        if self.code.agree(&bytes) {
            return vec![(range, Verdict::Right)];
        }
        let has_all_data = strips[..geometry.data].iter().all(Option::is_some);
        let is_synced = expectation == Expectation::InSync;
        let mut verdicts: Vec<(Range<usize>, Verdict)> = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let row = start..range.end.min((start + 1).next_multiple_of(ROW_BYTES as usize));
            start = row.end;
            let present: Vec<Option<&[u8]>> =
                strips.iter().map(|strip| strip.map(|strip| &strip[row.clone()])).collect();
            let verdict = match self.code.locate(&present) {
                Located::Agreed => Verdict::Right,
                _ if !is_synced && has_all_data => Verdict::Parity,
                Located::Wrong(strip) if !is_synced && strip < geometry.data => Verdict::Unknown,
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
        // A difference where parity is not in sync is an error only if it cannot be repaired.
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

/// The rows that have some of these bytes.
fn rows(range: &Range<usize>) -> u64 {
    (range.end.div_ceil(ROW_BYTES as usize) - range.start / ROW_BYTES as usize) as u64
}

#[cfg(test)]
mod tests;
