//! Signatures: finds what a device holds before something overwrites it.
//!
//! `table` is the one list of formats. Every command that makes an array, a member, a spare or a
//! pool asks [`probe`], and so does a benchmark that writes. The crate does no I/O: the caller
//! passes a function that reads.
//!
//! A block that cannot be read may hold a signature. [`Findings`] reports it like one: the caller
//! refuses the device.

#![forbid(unsafe_code)]

mod judge;
mod table;

use block::IoError;
use std::fmt;
use std::ops::Range;
pub use table::{FREESTONE_ARRAY, FREESTONE_POOL};
use table::{RULES, Rule};

/// Bytes that are read at once. Every device takes a transfer of this length.
const STEP: u64 = 64 << 10;
/// Bytes of the smallest read: a failed step is read again in units of this length.
const UNIT: u64 = 4096;
/// Unreadable blocks that a message names; the rest is counted.
const NAMED: usize = 3;

/// A signature on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The format that it belongs to.
    pub kind: &'static str,
    /// Bytes from the device's beginning to the signature.
    pub offset: u64,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.kind, self.offset)
    }
}

/// All that stands against overwriting a device. It displays as a list: "XFS at byte 0, an
/// unreadable block at byte 4096".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The signatures, the first of each format.
    pub signatures: Vec<Signature>,
    /// Offsets in bytes of blocks that may hold a signature and cannot be read.
    pub unreadable: Vec<u64>,
}

impl Findings {
    /// Whether every place was read and none has a signature.
    pub fn is_empty(&self) -> bool {
        self.signatures.is_empty() && self.unreadable.is_empty()
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let signatures = self.signatures.iter().map(Signature::to_string);
        let blocks = self.unreadable.iter().take(NAMED).map(|at| format!("an unreadable block at byte {at}"));
        let rest = self.unreadable.len().saturating_sub(NAMED);
        let rest = (rest > 0).then(|| format!("{rest} more unreadable blocks"));
        f.write_str(&signatures.chain(blocks).chain(rest).collect::<Vec<_>>().join(", "))
    }
}

/// Looks for signatures on a device of `capacity` bytes.
///
/// `read` reads a range of whole blocks (offset and length in bytes) of at most 64 KiB or one
/// block, if that is longer.
///
/// # Errors
/// The error of a read, unless it concerns single blocks ([`IoError::Medium`],
/// [`IoError::Corrupt`]).
pub async fn probe<R>(capacity: u64, block_size: u32, read: R) -> Result<Findings, IoError>
where
    R: AsyncFn(u64, usize) -> Result<Vec<u8>, IoError>,
{
    let unit = u64::from(block_size).max(UNIT);
    let mut pieces = Vec::new();
    for range in places_to_read(capacity, unit) {
        pieces.push(Piece::read(range, unit, &read).await?);
    }
    Ok(Device { capacity, pieces }.findings())
}

/// Everything that the rules look at, in whole units, ascending and without overlap. Gaps shorter
/// than a step are filled.
fn places_to_read(capacity: u64, unit: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = RULES
        .iter()
        .flat_map(|rule| rule.ranges(capacity))
        .map(|range| range.start / unit * unit..range.end.next_multiple_of(unit).min(capacity))
        .collect();
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end + STEP => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// A range of the device.
struct Piece {
    offset: u64,
    /// Its bytes: zeroes where it is unreadable.
    bytes: Vec<u8>,
    unreadable: Vec<Range<u64>>,
}

impl Piece {
    async fn read<R>(range: Range<u64>, unit: u64, read: &R) -> Result<Piece, IoError>
    where
        R: AsyncFn(u64, usize) -> Result<Vec<u8>, IoError>,
    {
        let mut piece = Piece { offset: range.start, bytes: Vec::new(), unreadable: Vec::new() };
        for part in parts(range, STEP.max(unit)) {
            match read(part.start, (part.end - part.start) as usize).await {
                Ok(bytes) => piece.bytes.extend(bytes),
                Err(IoError::Medium | IoError::Corrupt) => piece.read_units(part, unit, read).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(piece)
    }

    /// Reads again, unit by unit, a part of which some blocks are unreadable.
    async fn read_units<R>(&mut self, part: Range<u64>, unit: u64, read: &R) -> Result<(), IoError>
    where
        R: AsyncFn(u64, usize) -> Result<Vec<u8>, IoError>,
    {
        for block in parts(part, unit) {
            let len = (block.end - block.start) as usize;
            match read(block.start, len).await {
                Ok(bytes) => self.bytes.extend(bytes),
                Err(IoError::Medium | IoError::Corrupt) => {
                    self.bytes.resize(self.bytes.len() + len, 0);
                    self.unreadable.push(block);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn has(&self, range: &Range<u64>) -> bool {
        self.offset <= range.start && range.end <= self.offset + self.bytes.len() as u64
    }
}

fn parts(range: Range<u64>, len: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(len as usize).map(move |at| at..(at + len).min(end))
}

/// The parts of a device that the rules look at.
struct Device {
    capacity: u64,
    pieces: Vec<Piece>,
}

impl Device {
    fn findings(&self) -> Findings {
        let mut findings = Findings::default();
        for rule in RULES {
            if rule.is_last_resort && !findings.signatures.is_empty() {
                continue;
            }
            self.apply(rule, &mut findings);
        }
        findings.unreadable.sort_unstable();
        findings
    }

    /// Adds what a rule finds: the first signature, and every unreadable block in its way.
    fn apply(&self, rule: &Rule, findings: &mut Findings) {
        for range in rule.ranges(self.capacity) {
            let piece = self.pieces.iter().find(|piece| piece.has(&range)).expect("all places were read");
            let is_in = |block: &&Range<u64>| block.start < range.end && range.start < block.end;
            if let Some(block) = piece.unreadable.iter().find(is_in) {
                if !findings.unreadable.contains(&block.start) {
                    findings.unreadable.push(block.start);
                }
                continue;
            }
            let start = (range.start - piece.offset) as usize;
            let bytes = &piece.bytes[start..start + (range.end - range.start) as usize];
            let is_known = findings.signatures.iter().any(|other| other.kind == rule.kind);
            if !is_known && rule.test.holds(bytes) {
                findings.signatures.push(Signature { kind: rule.kind, offset: range.start });
            }
        }
    }
}

#[cfg(test)]
mod tests;
