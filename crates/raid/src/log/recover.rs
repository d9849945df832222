//! Recovery after a crash: replays the entries of the log to the members.
//!
//! ```text
//!   scan: each lane on each member ─► choose: not below the tail, not superseded, on all live targets ─► replay
//! ```
//!
//! Recovery handles one lane after the other, so memory is bounded by a lane of some members and by
//! one stripe.
//!
//! # Units that cannot be read
//!
//! A unit of 4 KiB that its member cannot read holds no entry, and an entry that covers such a unit
//! does not exist. Unlike a torn entry, such an entry may have been durable. A member is a
//! *suspect* of a lane if an unreadable unit of it there may have held an entry at or above the
//! lane's tail. The ring of a member is written in the order of the sequences. So a unit between
//! two entries is harmless if the later of both is not above the tail. For suspects the rules are:
//!
//! - An entry that lacks a copy on a suspect, but has one on another live target, is replayed;
//!   recovery computes the suspect's parity from all data. If the entry was incomplete, its write
//!   had not begun, and replay changes nothing.
//! - Some stripe may have been written under an entry that is hidden on every live target. So the
//!   caller marks the parity of the whole array for resync. This needs all data of each stripe. The
//!   data exists while missing members and suspects of a group are together at most as many as its
//!   parities; beyond that the caller refuses the start. If suspects that are being rebuilt are the
//!   reason, their rebuild starts over instead.
//! - A hidden entry may supersede another. Redo data is written only to stripes that lack a data
//!   strip, and there some live target is no suspect. In a complete group a data strip may turn out
//!   to be unreadable while every live target is a suspect. Then the entry is not replayed: the
//!   parity of the region stays inconsistent, and reads of the blocks fail until they are written.
//!
//! A scrub reads the log, too, and rewrites unreadable units while the array runs
//! (`array/log_check.rs`).
//!
//! One risk remains: members are missing, and the suspects are as many as the parities. A stripe
//! whose parities are all on suspects may then have wrong parity until the resync. Another loss
//! before that reads wrong data from this parity.

use super::checksum::{Checksum, Key};
use super::recovery::{BadRange, Chosen, RecoverError, Recovery, RecoveryMember, is_unreadable};
use super::replay::{Replayed, Replayer, Transfer, transfer_each};
use crate::log::Nonce;
use crate::log::entry::{HEADER_BYTES, Header, UNIT, Write};
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, Consistency};
use block::IoError;
use reactor::{Buffer, BufferPool, MAX_BUFFER};
use serde::Serialize;
use std::collections::BTreeSet;

/// Most bytes of lanes in memory at a time, unless one lane is longer.
const SCAN_BYTES: usize = 32 << 20;
/// Bytes of buffers: for a scan, or for a stripe of 64 members with the longest strips and their
/// entries.
const MEMORY: usize = 128 << 20;

/// The result of recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries of this assembly; copies count once.
    pub entries: u64,
    /// Entries that were replayed.
    pub replayed: u64,
    /// Entries below their lane's tail, or of stripes that a reshape has moved.
    pub stale: u64,
    /// Entries followed by another of the same rows.
    pub superseded: u64,
    /// Entries that are not on all live targets: their writes had not begun.
    pub incomplete: u64,
    /// Entries of stripes that have lost more members than they have parities; recovery skips them.
    pub lost: u64,
    /// Stripes with replayed entries; a stripe may occur more than once. A failed member may have
    /// missed these writes before the write-intent bitmap recorded it.
    pub stripes: Vec<u64>,
    /// Ranges that cannot be read until they are written again. All of them are noted.
    pub bad: Vec<BadRange>,
    /// The highest sequence of any lane.
    pub highest_sequence: u64,
    /// Units of the log that their members cannot read. The caller rewrites them once a new nonce
    /// is durable.
    pub unreadable: Vec<UnreadableUnit>,
    /// Slots whose unreadable units may have held entries of writes that were in flight. See the
    /// module.
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

/// Replays the log of all lanes. Afterwards every stripe is consistent, and the log may be used
/// only under a new nonce.
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
            // Later entries of the stripe also wait for the next try: they follow the one that
            // waits.
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

/// A write in the log that recovery would replay.
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
    /// Whether the log contains the new data as well, not only the inputs of parity.
    pub has_data: bool,
    /// The slots whose members hold a copy.
    pub slots: Vec<usize>,
}

/// Lists the entries that [`recover`] would replay, in its order, with its report. Nothing is
/// written.
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

/// The stripes of writes that may have been in flight when a member last wrote to its log, from
/// this member's log alone. If the member is absent, recovery does not see these writes.
///
/// # Errors
/// If the member cannot be read, or if an unreadable unit may hold such a write.
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

/// One lane, read from all members that are present.
#[derive(Default)]
struct Scanned {
    /// The valid entries, in any order.
    entries: Vec<Header>,
    /// The units that cannot be read.
    unreadable: Vec<UnreadableUnit>,
}

impl Scanned {
    /// The tail: every entry of the lane with a lower sequence was retired.
    fn tail(&self) -> u64 {
        self.entries.iter().map(|entry| entry.tail).max().unwrap_or(0)
    }

    /// Slots with an unreadable unit that may have held an entry at or above the tail.
    fn suspects(&self) -> BTreeSet<usize> {
        let tail = self.tail();
        let is_suspect = |unit: &&UnreadableUnit| {
            let own = || self.entries.iter().filter(|entry| usize::from(entry.slot) == unit.slot);
            // The start position counts, also for entries that wrap at the end of the lane. The
            // space between is a ring.
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

/// Reads one lane from all members that are present.
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
            find_entries(context, key, (lane, *slot), image, &mut scanned.entries)?;
            let units = image.unreadable.iter().map(|at| UnreadableUnit { slot: *slot, lane, position: *at });
            scanned.unreadable.extend(units);
        }
    }
    Ok(scanned)
}

fn find_entries(
    context: &Recovery<'_>,
    key: &Key,
    (lane, slot): (u16, usize),
    image: &Image,
    found: &mut Vec<Header>,
) -> Result<(), RecoverError> {
    let config = context.config;
    for position in (0..config.lane_bytes).step_by(UNIT as usize) {
        if image.unreadable.contains(&position) {
            continue;
        }
        let bytes = image.from(position as usize);
        if let Some(found) = Header::later_version(bytes, context.nonce, config.uuid) {
            return Err(RecoverError::Version { slot, found });
        }
        let Some(header) = Header::decode(bytes, config) else { continue };
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
    Ok(())
}

/// Chooses the entries of a lane to replay, in the order of their sequences.
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
    // From the newest on, so that the entries that supersede another are seen first.
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
                // Then no live target could show a later entry of the same rows.
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
    /// A write whose targets are the parities with a copy: the other parities are computed from all
    /// data.
    fn new(write: &Write, copies: Vec<Header>, is_uncertain: bool) -> Chosen {
        let held = copies.iter().filter_map(|copy| copy.write.as_ref());
        let targets = match mutant::is(Mutant::ReplayOnAnyParity) {
            false => held.fold(0, |mask, write| mask | 1 << write.parity),
            true => write.targets,
        };
        Chosen { write: Write { targets, ..write.clone() }, copies, is_uncertain }
    }
}

/// The copies on the entry's live targets, if every target that must have one has one.
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

    /// Reads a part unit by unit, and notes the units that cannot be read. `lane_at` is the start
    /// of the lane on the member.
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

    /// The bytes from `at` to the end of their part; at least a header if `at` is a multiple of
    /// [`UNIT`].
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
