//! After a crash: what the log holds is brought to the members.
//!
//! ```text
//!   scan: each lane on each member ─► choose: not below the tail, not superseded, on all live targets ─► replay
//! ```
//!
//! One lane after the other, so memory is bounded by a lane of some members and by one stripe.
//!
//! # Units that cannot be read
//!
//! A unit of 4 KiB that its member cannot read holds no entry, and an entry that runs over one does not exist. Unlike
//! an entry that is torn, such an entry may have been durable. A member is a *suspect* of a lane when it has an
//! unreadable unit there that may have held an entry at or above the lane's tail: the ring of a member is written in the
//! order of the sequences, so a unit between two entries of it is harmless when the later of both is not above the tail.
//! For suspects the rules are:
//!
//! - An entry that lacks a copy on a suspect, but has one on another live target, is replayed, and the suspect's parity is
//!   computed from all data. If the entry was incomplete its write had not begun, and replay changes nothing.
//! - Some stripe may have been written under an entry that is hidden on every live target. So parity of the whole array is
//!   made again (the caller marks it). That needs all data of the stripe. It is there as long as missing members and
//!   suspects of a group are together at most as many as it has parities; beyond that the caller refuses the start.
//! - A hidden entry may be the one that supersedes another. Redo data is written only to stripes that lack a data strip,
//!   and there some live target is no suspect. Where a data strip of a whole group turns out to be unreadable and every live
//!   target is a suspect, the entry is not replayed: the region is open, and the blocks are errors until they are written.
//!
//! A scrub reads the log, too, and has unreadable units written anew while the array runs (`array/log_check.rs`).
//!
//! One risk is left: with members missing, and as many suspects as there are parities besides, a stripe whose parities are
//! all of these may have open parity until it is made again. A further loss there before that reads what parity says.

use super::checksum::{Checksum, Key};
use super::replay::{Replayed, Replayer, Transfer, transfer_each};
use crate::log::Nonce;
use crate::log::entry::{HEADER_BYTES, Header, UNIT, Write};
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, Consistency};
use block::{Channel, IoError};
use reactor::{Buffer, BufferPool, MAX_BUFFER};
use serde::Serialize;
use std::collections::BTreeSet;
use std::rc::Rc;

/// Bytes of lanes that are in memory at a time, if one is not longer.
const SCAN_BYTES: usize = 32 << 20;
/// Bytes of buffers: for a scan, or for a stripe of 64 members with the longest strips and their entries.
const MEMORY: usize = 128 << 20;

/// A member as recovery uses it.
#[derive(Clone)]
pub struct RecoveryMember {
    /// The member.
    pub channel: Rc<dyn Channel>,
    /// Where its log begins, in bytes.
    pub log_offset: u64,
    /// Where its data begins, in bytes.
    pub data_offset: u64,
}

/// What recovery works on.
pub struct Recovery<'a> {
    /// The array.
    pub config: &'a ArrayConfig,
    /// The nonce under which the entries were written, from the superblock.
    pub nonce: Nonce,
    /// Each slot's member, when it is there.
    pub members: &'a [Option<RecoveryMember>],
    /// Whether the member of a slot holds valid data of a stripe. `false` for one that is out or not there; for one that
    /// is being rebuilt, whether the stripe lies below its durable cursor.
    pub is_live: &'a dyn Fn(u64, usize) -> bool,
    /// Entries of stripes below this one are void: their bytes have another shape by now. 0 for most arrays.
    pub first_stripe: u64,
    /// Ranges that an earlier [`RecoverError::NotNoted`] named and the caller has noted durably.
    pub noted: &'a [BadRange],
}

/// Bytes that an unacknowledged write has left unreadable: they fail until they are written again. Parity of the rows
/// stands for zeroes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRange {
    /// The stripe.
    pub stripe: u64,
    /// The data strip.
    pub strip: usize,
    /// First byte in the strip.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// What recovery found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries of this assembly, copies counted once.
    pub entries: u64,
    /// Replayed.
    pub replayed: u64,
    /// Below their lane's tail, or of stripes that have another shape by now.
    pub stale: u64,
    /// Followed by another of the same rows.
    pub superseded: u64,
    /// Not on all live targets: their writes had not begun.
    pub incomplete: u64,
    /// Of stripes that have lost more members than parity stands for; nothing was done.
    pub lost: u64,
    /// Stripes in which something was replayed, some of them more than once. A member that is out may have missed those
    /// writes before the region map could say so.
    pub stripes: Vec<u64>,
    /// Ranges that cannot be read until they are written again. All of them are noted.
    pub bad: Vec<BadRange>,
    /// The highest sequence of any lane.
    pub highest_sequence: u64,
    /// Units of the log that their members cannot read. They are to be rewritten once a new nonce is durable.
    pub unreadable: Vec<UnreadableUnit>,
    /// Slots whose unreadable units may have held entries of writes that were in flight. See the module.
    pub suspects: BTreeSet<usize>,
}

/// A unit of 4 KiB of a member's log that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadableUnit {
    /// The member's slot.
    pub slot: usize,
    /// The lane.
    pub lane: u16,
    /// First byte in the lane.
    pub position: u32,
}

/// Why recovery stopped. It can be called again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    /// Blocks are lost. Their rows are as they were: the caller notes the blocks durably, and hands
    /// them back as [`Recovery::noted`] in the next try.
    #[error("{} ranges of blocks are lost and not noted as bad", ranges.len())]
    NotNoted {
        /// The blocks.
        ranges: Vec<BadRange>,
    },
    /// A member failed: it must be made "out" before the next try.
    #[error("member {slot} failed during recovery: {error}")]
    Member {
        /// Its slot.
        slot: usize,
        /// What it said.
        error: IoError,
    },
    /// Two different entries have one sequence: no array writes that.
    #[error("log lane {lane} holds two different entries with sequence {sequence}")]
    Inconsistent {
        /// The lane.
        lane: u16,
        /// The sequence.
        sequence: u64,
    },
}

impl Recovery<'_> {
    /// The member of a slot when it is there and holds valid data of the stripe.
    pub(super) fn live(&self, stripe: u64, slot: usize) -> Option<&RecoveryMember> {
        let member = self.members.get(slot)?.as_ref()?;
        (self.is_live)(stripe, slot).then_some(member)
    }
}

/// Replays the log of all lanes. When it returns, every stripe is consistent; the log must then be used under a new
/// nonce only.
///
/// # Errors
/// See [`RecoverError`].
pub async fn recover(context: &Recovery<'_>) -> Result<Report, RecoverError> {
    let config = context.config;
    let mut report = Report::default();
    if config.consistency == Consistency::None || config.geometry.data == 1 {
        return Ok(report); // there is no log; mirrors write nothing to theirs
    }
    let lane_bytes = config.lane_bytes as usize;
    let replayer = Replayer::new(context, BufferPool::new(MEMORY.max(2 * lane_bytes)));
    let mut not_noted: Vec<BadRange> = Vec::new();
    for lane in 0..config.lanes {
        let scanned = scan(context, replayer.key(), lane, replayer.buffers()).await?;
        for entry in choose(context, lane, scanned, &mut report)? {
            // Later entries of a stripe wait for the next try, too: they follow the one that waits.
            if not_noted.iter().any(|range| range.stripe == entry.write.stripe) {
                continue;
            }
            match replayer.replay(&entry).await? {
                Replayed::Done(bad) => {
                    report.replayed += 1;
                    report.stripes.push(entry.write.stripe);
                    report.bad.extend(bad);
                }
                Replayed::NotNoted(ranges) => not_noted.extend(ranges),
                Replayed::Lost => report.lost += 1,
            }
        }
    }
    if !not_noted.is_empty() {
        return Err(RecoverError::NotNoted { ranges: not_noted });
    }
    Ok(report)
}

/// A write that the log holds and that recovery would replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PendingWrite {
    /// The log's lane.
    pub lane: u16,
    /// Its number in the lane.
    pub sequence: u64,
    /// The stripe.
    pub stripe: u64,
    /// First byte in each strip.
    pub offset: u32,
    /// Bytes of each strip.
    pub len: u32,
    /// The data strips that are written.
    pub strips: Vec<usize>,
    /// Whether the log has the new data as well, not only what parity needs.
    pub has_data: bool,
    /// The slots whose members hold a copy.
    pub slots: Vec<usize>,
}

/// What [`recover`] would replay, in its order, and what it would find. Nothing is written.
///
/// # Errors
/// See [`RecoverError`].
pub async fn list(context: &Recovery<'_>) -> Result<(Vec<PendingWrite>, Report), RecoverError> {
    let config = context.config;
    let (mut pending, mut report) = (Vec::new(), Report::default());
    if config.consistency == Consistency::None {
        return Ok((pending, report));
    }
    let buffers = BufferPool::new(MEMORY.max(2 * config.lane_bytes as usize));
    let key = Key::new(&context.nonce);
    for lane in 0..config.lanes {
        let scanned = scan(context, &key, lane, &buffers).await?;
        for Chosen { write, copies, .. } in choose(context, lane, scanned, &mut report)? {
            let Write { stripe, offset, len, modified, has_redo, .. } = write;
            pending.push(PendingWrite {
                lane,
                sequence: copies[0].sequence,
                stripe,
                offset,
                len,
                strips: (0..config.geometry.data).filter(|strip| modified >> strip & 1 == 1).collect(),
                has_data: has_redo,
                slots: copies.iter().map(|copy| usize::from(copy.slot)).collect(),
            });
        }
    }
    Ok((pending, report))
}

/// The stripes of writes that may have been under way when a member wrote to its log last, as it alone tells. Recovery
/// does not hear of them when the member is not there.
///
/// # Errors
/// When the member cannot be read, or not where it may hold such a write.
pub async fn unfinished(
    config: &ArrayConfig,
    nonce: Nonce,
    slot: usize,
    member: RecoveryMember,
) -> Result<Vec<u64>, RecoverError> {
    let mut stripes = Vec::new();
    if config.consistency == Consistency::None {
        return Ok(stripes);
    }
    let mut members: Vec<Option<RecoveryMember>> = (0..slot).map(|_| None).collect();
    members.push(Some(member));
    let context =
        Recovery { config, nonce, members: &members, is_live: &|_, _| true, first_stripe: 0, noted: &[] };
    let (buffers, key) = (BufferPool::new(MEMORY.max(2 * config.lane_bytes as usize)), Key::new(&nonce));
    for lane in 0..config.lanes {
        let scanned = scan(&context, &key, lane, &buffers).await?;
        if !scanned.suspects().is_empty() {
            return Err(RecoverError::Member { slot, error: IoError::Medium });
        }
        let (tail, entries) = (scanned.tail(), scanned.entries);
        let is_open = |entry: &Header| entry.sequence >= tail;
        stripes.extend(entries.into_iter().filter(is_open).filter_map(|entry| Some(entry.write?.stripe)));
    }
    Ok(stripes)
}

/// A lane of all members that are there.
#[derive(Default)]
struct Scanned {
    /// The valid entries, in any order.
    entries: Vec<Header>,
    /// The units that cannot be read.
    unreadable: Vec<UnreadableUnit>,
}

impl Scanned {
    /// Every entry of the lane with a lower sequence was retired.
    fn tail(&self) -> u64 {
        self.entries.iter().map(|entry| entry.tail).max().unwrap_or(0)
    }

    /// Slots with an unreadable unit that may have held an entry at or above the tail.
    fn suspects(&self) -> BTreeSet<usize> {
        let tail = self.tail();
        let is_suspect = |unit: &&UnreadableUnit| {
            let own = || self.entries.iter().filter(|entry| usize::from(entry.slot) == unit.slot);
            // Of entries that run over the end of the lane, too, the beginning counts. What is in between is a ring.
            let before = own().filter(|entry| entry.position < unit.position).max_by_key(|e| e.position);
            let before = before.or_else(|| own().max_by_key(|entry| entry.position));
            let after = own().filter(|entry| entry.position > unit.position).min_by_key(|e| e.position);
            let after = after.or_else(|| own().min_by_key(|entry| entry.position));
            let is_between_retired = matches!(
                (before, after),
                (Some(before), Some(after)) if before.sequence < after.sequence && after.sequence <= tail
            );
            !is_between_retired
        };
        self.unreadable.iter().filter(is_suspect).map(|unit| unit.slot).collect()
    }
}

/// Reads a lane of all members that are there.
async fn scan(
    context: &Recovery<'_>,
    key: &Key,
    lane: u16,
    buffers: &BufferPool,
) -> Result<Scanned, RecoverError> {
    let lane_bytes = context.config.lane_bytes as usize;
    let at_once = (SCAN_BYTES / lane_bytes).clamp(1, block::MAX_JOINED);
    let members: Vec<(usize, &RecoveryMember)> =
        context.members.iter().enumerate().filter_map(|(slot, m)| Some((slot, m.as_ref()?))).collect();
    let mut scanned = Scanned::default();
    for members in members.chunks(at_once) {
        let mut images: Vec<Image> = Vec::new();
        for _ in members {
            images.push(Image::new(lane_bytes, buffers).await);
        }
        let lane_at = |member: &RecoveryMember| member.log_offset + u64::from(lane) * lane_bytes as u64;
        for part in 0..lane_bytes.div_ceil(MAX_BUFFER) {
            let at = part * MAX_BUFFER;
            let reads = members.iter().zip(&mut images).map(|((slot, member), image)| {
                let bytes = image.parts[part].as_mut_slice();
                Transfer::read(*slot, member, lane_at(member) + at as u64, bytes)
            });
            let results = transfer_each(&reads.collect::<Vec<_>>()).await;
            for ((member, image), result) in members.iter().zip(&mut images).zip(results) {
                let (slot, member) = *member;
                match result {
                    Ok(()) => {}
                    Err(error) if is_unreadable(error) => {
                        image.read_units(slot, member, lane_at(member), part).await?;
                    }
                    Err(error) => return Err(RecoverError::Member { slot, error }),
                }
            }
        }
        for ((slot, _), image) in members.iter().zip(&images) {
            find_entries(context, key, (lane, *slot), image, &mut scanned.entries);
            let units = image.unreadable.iter().map(|at| UnreadableUnit { slot: *slot, lane, position: *at });
            scanned.unreadable.extend(units);
        }
    }
    Ok(scanned)
}

/// Whether an error is about the place that was read, not about the member.
pub(super) fn is_unreadable(error: IoError) -> bool {
    matches!(error, IoError::Medium | IoError::Corrupt)
}

fn find_entries(
    context: &Recovery<'_>,
    key: &Key,
    (lane, slot): (u16, usize),
    image: &Image,
    found: &mut Vec<Header>,
) {
    let config = context.config;
    for position in (0..config.lane_bytes).step_by(UNIT as usize) {
        if image.unreadable.contains(&position) {
            continue;
        }
        let Some(header) = Header::decode(image.from(position as usize), config) else { continue };
        let is_ours = header.nonce == context.nonce
            && header.array == config.uuid
            && (header.lane, usize::from(header.slot), header.position) == (lane, slot, position);
        if is_ours
            && image.is_readable(&header, config)
            && image.payload_checksum(&header, config, key) == header.payload_checksum
        {
            found.push(header);
        }
    }
}

/// An entry that is to be replayed, with a copy for each live target.
pub(super) struct Chosen {
    pub write: Write,
    pub copies: Vec<Header>,
    /// Every live target is a suspect: the entry may have been superseded by one that cannot be read.
    pub is_uncertain: bool,
}

/// What of a lane's entries is replayed, in the order of their sequences.
fn choose(
    context: &Recovery<'_>,
    lane: u16,
    scanned: Scanned,
    report: &mut Report,
) -> Result<Vec<Chosen>, RecoverError> {
    let (tail, suspects) = (scanned.tail(), scanned.suspects());
    let Scanned { entries: mut copies, unreadable } = scanned;
    report.unreadable.extend(unreadable);
    copies.sort_by_key(|copy| copy.sequence);
    let mut chosen: Vec<Chosen> = Vec::new();
    // From the newest on, so that those which supersede an entry have been seen.
    let mut newer: Vec<&Write> = Vec::new();
    for same in copies.chunk_by(|a, b| a.sequence == b.sequence).rev() {
        let Header { sequence, ref write, .. } = same[0];
        report.highest_sequence = report.highest_sequence.max(sequence);
        let is_same = |copy: &Header| match (write, &copy.write) {
            (Some(a), Some(b)) => a.is_copy_of(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        if !same.iter().all(is_same) {
            return Err(RecoverError::Inconsistent { lane, sequence });
        }
        let Some(write) = write else { continue };
        report.entries += 1;
        let is_moved = write.stripe < context.first_stripe && !mutant::is(Mutant::OldLogReplayed);
        if is_moved || sequence < tail && !mutant::is(Mutant::NoTailRule) {
            report.stale += 1;
            continue;
        }
        let is_superseded = newer.iter().any(|newer| newer.overlaps(write));
        newer.push(write);
        if is_superseded && !mutant::is(Mutant::NoTailRule) {
            report.superseded += 1;
            continue;
        }
        match live_copies(context, write, same, &suspects) {
            Some(copies) => {
                let is_suspect = |copy: &Header| suspects.contains(&usize::from(copy.slot));
                // Then no live target is left that could show a later entry of the same rows.
                let is_uncertain = !suspects.is_empty() && copies.iter().all(is_suspect);
                chosen.push(Chosen::new(write, copies, is_uncertain));
            }
            None => report.incomplete += 1,
        }
    }
    chosen.reverse();
    report.suspects.extend(suspects);
    Ok(chosen)
}

impl Chosen {
    /// A write whose targets are the parities that have a copy: parity of the others is computed from all data.
    fn new(write: &Write, copies: Vec<Header>, is_uncertain: bool) -> Chosen {
        let held = copies.iter().filter_map(|copy| copy.write.as_ref());
        let targets = match mutant::is(Mutant::ReplayOnAnyParity) {
            false => held.fold(0, |mask, write| mask | 1 << write.parity),
            true => write.targets,
        };
        Chosen { write: Write { targets, ..write.clone() }, copies, is_uncertain }
    }
}

/// The copies on the entry's live targets, when all of those have one that may be expected to.
fn live_copies(
    context: &Recovery<'_>,
    write: &Write,
    copies: &[Header],
    suspects: &BTreeSet<usize>,
) -> Option<Vec<Header>> {
    let geometry = &context.config.geometry;
    let mut held = Vec::new();
    for parity in (0..geometry.parity).filter(|parity| write.targets >> parity & 1 == 1) {
        let slot = geometry.member(write.stripe, geometry.data + parity);
        if context.live(write.stripe, slot).is_none() {
            continue;
        }
        match copies.iter().find(|copy| usize::from(copy.slot) == slot) {
            Some(copy) => held.push(copy.clone()),
            None if suspects.contains(&slot) || mutant::is(Mutant::ReplayOnAnyParity) => {}
            None => return None,
        }
    }
    (!held.is_empty()).then_some(held)
}

/// A lane of one member in memory, in parts of [`MAX_BUFFER`] bytes.
struct Image {
    parts: Vec<Buffer>,
    /// Positions of the units that the member cannot read.
    unreadable: BTreeSet<u32>,
}

impl Image {
    async fn new(bytes: usize, buffers: &BufferPool) -> Image {
        let mut parts = Vec::new();
        for at in (0..bytes).step_by(MAX_BUFFER) {
            parts.push(buffers.take(MAX_BUFFER.min(bytes - at)).await);
        }
        Image { parts, unreadable: BTreeSet::new() }
    }

    /// Reads a part unit by unit, and notes the units that cannot be read. `lane_at`: where the lane begins on the
    /// member.
    async fn read_units(
        &mut self,
        slot: usize,
        member: &RecoveryMember,
        lane_at: u64,
        part: usize,
    ) -> Result<(), RecoverError> {
        let first = (part * MAX_BUFFER) as u32;
        let units = self.parts[part].as_mut_slice().chunks_mut(UNIT as usize);
        let reads = units
            .zip((first..).step_by(UNIT as usize))
            .map(|(unit, position)| Transfer::read(slot, member, lane_at + u64::from(position), unit));
        let results = transfer_each(&reads.collect::<Vec<_>>()).await;
        for (result, position) in results.into_iter().zip((first..).step_by(UNIT as usize)) {
            match result {
                Ok(()) => {}
                Err(error) if is_unreadable(error) => drop(self.unreadable.insert(position)),
                Err(error) => return Err(RecoverError::Member { slot, error }),
            }
        }
        Ok(())
    }

    /// Whether every unit of an entry could be read.
    fn is_readable(&self, header: &Header, config: &ArrayConfig) -> bool {
        let entry = u64::from(header.position)..;
        let units = entry.step_by(UNIT as usize).map(|at| (at % u64::from(config.lane_bytes)) as u32);
        let count = header.entry_bytes(config.geometry.data) / u64::from(UNIT);
        units.take(count as usize).all(|position| !self.unreadable.contains(&position))
    }

    /// The bytes from `at` on that lie in one part; not less than a header when `at` is a multiple of [`UNIT`].
    fn from(&self, at: usize) -> &[u8] {
        &self.parts[at / MAX_BUFFER].as_slice()[at % MAX_BUFFER..]
    }

    fn payload_checksum(&self, header: &Header, config: &ArrayConfig, key: &Key) -> u32 {
        let lane_bytes = config.lane_bytes as usize;
        let mut checksum = Checksum::new(key);
        for (at, mut left) in header.write.iter().flat_map(|write| write.payload_parts(config.geometry.data))
        {
            let mut at = (header.position as usize + HEADER_BYTES + at) % lane_bytes;
            while left > 0 {
                let part = self.from(at);
                let len = part.len().min(left);
                checksum.add(&part[..len]);
                left -= len;
                at = (at + len) % lane_bytes;
            }
            checksum.end();
        }
        checksum.finish()
    }
}
