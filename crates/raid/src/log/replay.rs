//! Replaying one entry: parity of its rows is made to fit the data, or data and parity are written
//! from the log.
//!
//! A stripe of which every data strip can be read needs nothing of the entry but its place: parity
//! is computed from the data as it is. So no entry that is stale, because the one that supersedes
//! it cannot be read, brings old data back to it. Only a stripe that lacks data strips takes
//! partial parity and new data from the log.
//!
//! Replay can be interrupted and repeated, with fewer members too: parity fits the data at each end
//! of it.
//!
//! Replay gives up no more than it must, and not before the caller has noted it. Rows of which a
//! strip cannot be read or computed are halved down to single blocks. An unreadable sector costs
//! one block, and nothing where the parity of its row is right. Replay writes rows that lose a
//! block only when [`Recovery::noted`] has the block. Otherwise a power loss would make the zeroes
//! that stand for it valid.

use super::checksum::{Checksum, Key};
use super::recovery::{BadRange, Chosen, RecoverError, Recovery, RecoveryMember, is_unreadable};
use crate::Code;
use crate::config::MAX_PARITY;
use crate::log::entry::{HEADER_BYTES, Header, Write};
use arrayvec::ArrayVec;
use block::{Channel, Data, Flags, IoError, IoFuture, IoResult, Op, Request, Segment};
use reactor::{Buffer, BufferPool};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::task::Poll;

/// The result of replaying an entry.
pub(super) enum Replayed {
    /// Its rows are consistent; these ranges of data strips are lost, and noted.
    Done(Vec<BadRange>),
    /// These ranges of data strips are lost, and not noted yet: their rows are as they were.
    NotNoted(Vec<BadRange>),
    /// More members are missing than parity stands for.
    Lost,
}

/// Replays entries.
pub(super) struct Replayer<'a> {
    context: &'a Recovery<'a>,
    code: Code,
    key: Key,
    buffers: BufferPool,
}

/// Rows of one entry in memory.
struct Rows<'a> {
    write: &'a Write,
    /// The bytes of each strip of the write that these rows have.
    part: Range<u32>,
    /// Each data strip that is known: a modified one, or any of a full stripe.
    data: Vec<Option<Buffer>>,
    /// Live targets: parity, its entry with the partial, the parity strip.
    parity: ArrayVec<(usize, Buffer, Buffer), MAX_PARITY>,
    /// Live parities that were not targets.
    skipped: ArrayVec<(usize, Buffer), MAX_PARITY>,
    /// Strips that their live members cannot read: taken for missing, and rewritten.
    unreadable: u64,
    /// All data and parity of the write is on the members, as far as it can be read.
    is_new: bool,
}

impl Rows<'_> {
    fn len(&self) -> usize {
        self.part.len()
    }

    /// First byte in each strip.
    fn offset(&self) -> u32 {
        self.write.offset + self.part.start
    }

    /// Whether these are all rows of the write, for which the header's checksums stand.
    fn is_whole(&self) -> bool {
        self.part == (0..self.write.len)
    }
}

impl<'a> Replayer<'a> {
    pub fn new(context: &'a Recovery<'a>, buffers: BufferPool) -> Replayer<'a> {
        Replayer { context, code: context.config.code(), key: Key::new(&context.nonce), buffers }
    }

    pub fn key(&self) -> &Key {
        &self.key
    }

    pub fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Makes the rows of an entry consistent. A strip that its member cannot read counts as
    /// missing, in as few rows as possible.
    pub async fn replay(&self, entry: &Chosen) -> Result<Replayed, RecoverError> {
        let (mut bad, mut not_noted, mut is_lost) = (Vec::new(), Vec::new(), false);
        let whole = 0..entry.write.len;
        let (mut parts, mut is_new) = (vec![whole.clone()], false);
        while let Some(part) = parts.pop() {
            match self.replay_part(entry, &part, is_new).await? {
                Some(Replayed::Done(ranges)) => join(&mut bad, ranges),
                Some(Replayed::NotNoted(ranges)) => join(&mut not_noted, ranges),
                Some(Replayed::Lost) => is_lost = true,
                None => {
                    if part == whole {
                        is_new = self.is_new_by_blocks(entry).await?;
                    }
                    let block = self.context.config.block_size;
                    let middle = part.start + (part.len() as u32 / block).div_ceil(2) * block;
                    parts.extend([middle..part.end, part.start..middle]);
                }
            }
        }
        Ok(match (is_lost, not_noted.is_empty()) {
            (_, false) => Replayed::NotNoted(not_noted),
            (true, true) => Replayed::Lost,
            (false, true) => Replayed::Done(bad),
        })
    }

    /// Makes some rows of an entry consistent. `None` when fewer rows at a time may lose less:
    /// nothing was written then.
    async fn replay_part(
        &self,
        entry: &Chosen,
        part: &Range<u32>,
        is_new: bool,
    ) -> Result<Option<Replayed>, RecoverError> {
        let is_block = part.len() as u32 <= self.context.config.block_size;
        // In the rows next to an unreadable block all data may be readable, and parity old.
        let is_new = |unreadable| is_new && (is_block || unreadable == 0);
        let work = async |unreadable| self.try_replay(entry, part, unreadable, is_new(unreadable)).await;
        let (replayed, unreadable) = self.without_unreadable(entry, work).await?;
        let may_halve = unreadable != 0 && !is_block;
        let is_short = matches!(replayed, Replayed::Lost | Replayed::NotNoted(_));
        Ok((!is_short || !may_halve).then_some(replayed))
    }

    /// Repeats work on an entry without the strips that turn out to be unreadable. Returns its
    /// result, and these strips.
    async fn without_unreadable<R>(
        &self,
        entry: &Chosen,
        work: impl AsyncFn(u64) -> Result<R, RecoverError>,
    ) -> Result<(R, u64), RecoverError> {
        let mut unreadable = 0;
        loop {
            match work(unreadable).await {
                Err(RecoverError::Member { slot, error }) if is_unreadable(error) => {
                    let geometry = &self.context.config.geometry;
                    let strip = geometry.strip_on(entry.write.stripe, slot);
                    let strip = strip.filter(|strip| unreadable >> strip & 1 == 0);
                    unreadable |= 1 << strip.ok_or(RecoverError::Member { slot, error })?;
                }
                result => return Ok((result?, unreadable)),
            }
        }
    }

    /// Whether a full stripe's data is new where each unreadable block is computed from parity of
    /// its row. The header's checksums are of whole strips, which may be unreadable in different
    /// rows.
    async fn is_new_by_blocks(&self, entry: &Chosen) -> Result<bool, RecoverError> {
        let (write, data) = (&entry.write, self.context.config.geometry.data);
        if !write.is_full(data) || write.has_redo || entry.is_uncertain {
            return Ok(false);
        }
        let block = self.context.config.block_size;
        let mut strips = vec![Vec::new(); data];
        for start in (0..write.len).step_by(block as usize) {
            let part = start..start + block;
            let work = async |unreadable| {
                let mut rows = self.rows(entry, &part, unreadable, true);
                self.read_copies(&mut rows, entry).await?;
                Ok(self.find_data(&mut rows).await?.is_empty().then_some(rows.data))
            };
            let (Some(found), _) = self.without_unreadable(entry, work).await? else { return Ok(false) };
            let found = strips.iter_mut().zip(found.iter().flatten());
            found.for_each(|(strip, buffer)| strip.extend_from_slice(buffer.as_slice()));
        }
        Ok((0..data).all(|strip| self.has_checksum(write, strip, &strips[strip])))
    }

    fn rows<'w>(&self, entry: &'w Chosen, part: &Range<u32>, unreadable: u64, is_new: bool) -> Rows<'w> {
        let data = (0..self.context.config.geometry.data).map(|_| None).collect();
        let (parity, skipped) = (ArrayVec::new(), ArrayVec::new());
        Rows { write: &entry.write, part: part.clone(), data, parity, skipped, unreadable, is_new }
    }

    async fn read_copies(&self, rows: &mut Rows<'_>, entry: &Chosen) -> Result<(), RecoverError> {
        for copy in &entry.copies {
            let held = self.read_entry(copy).await?;
            let parity = self.buffers.take(rows.len()).await;
            rows.parity.push((usize::from(copy.write.as_ref().map_or(0, |w| w.parity)), held, parity));
        }
        Ok(())
    }

    async fn try_replay(
        &self,
        entry: &Chosen,
        part: &Range<u32>,
        unreadable: u64,
        is_new: bool,
    ) -> Result<Replayed, RecoverError> {
        let (write, geometry) = (&entry.write, &self.context.config.geometry);
        let strips = geometry.group_members();
        let missing = (0..strips).filter(|strip| self.live(write.stripe, *strip).is_none()).count();
        if missing > geometry.parity {
            return Ok(Replayed::Lost);
        }
        let mut rows = self.rows(entry, part, unreadable, is_new);
        if (0..geometry.data).all(|strip| self.readable(&rows, strip).is_some()) {
            self.encode(&mut rows).await?;
            self.write_rows(&rows).await?;
            return Ok(Replayed::Done(Vec::new()));
        }
        if entry.is_uncertain {
            return Ok(Replayed::Done(Vec::new()));
        }
        self.read_copies(&mut rows, entry).await?;
        let mut bad = Vec::new();
        if write.has_redo {
            self.take_redo(&mut rows).await;
        } else {
            let lost = self.find_data(&mut rows).await?;
            if !lost.is_empty() {
                bad = bad_ranges(&rows, &lost);
                if !bad.iter().all(|range| self.is_noted(range)) {
                    return Ok(Replayed::NotNoted(bad));
                }
                self.give_up(&mut rows, &lost).await;
            }
        }
        self.compute_parity(&mut rows);
        if !self.compute_skipped(&mut rows).await? {
            return Ok(Replayed::Lost);
        }
        self.write_rows(&rows).await?;
        Ok(Replayed::Done(bad))
    }

    /// Reads or computes the modified strips. Returns those that are lost.
    async fn find_data(&self, rows: &mut Rows<'_>) -> Result<Vec<usize>, RecoverError> {
        let lost = self.read_data(rows).await?;
        let is_found = lost.is_empty() || self.derive(rows, &lost).await?;
        Ok(if is_found { Vec::new() } else { lost })
    }

    /// The member of a strip, when it is live.
    fn live(&self, stripe: u64, strip: usize) -> Option<(usize, &RecoveryMember)> {
        let slot = self.context.config.geometry.member(stripe, strip);
        Some((slot, self.context.live(stripe, slot)?))
    }

    /// The member of a strip, when it is live and can read the strip.
    fn readable(&self, rows: &Rows<'_>, strip: usize) -> Option<(usize, &RecoveryMember)> {
        self.live(rows.write.stripe, strip).filter(|_| rows.unreadable >> strip & 1 == 0)
    }

    /// Computes every live parity from the data as it is on the members.
    async fn encode(&self, rows: &mut Rows<'_>) -> Result<(), RecoverError> {
        let at = self.position(rows);
        let (write, geometry) = (rows.write, &self.context.config.geometry);
        for strip in 0..geometry.data {
            rows.data[strip] = Some(self.buffers.take(rows.len()).await);
        }
        let reads = rows.data.iter_mut().enumerate().filter_map(|(strip, buffer)| {
            let (slot, member) = self.live(write.stripe, strip)?;
            Some(Transfer::read(slot, member, member.data_offset + at, buffer.as_mut()?.as_mut_slice()))
        });
        transfer_all(reads.collect()).await?;
        for parity in 0..geometry.parity {
            if self.live(write.stripe, geometry.data + parity).is_none() {
                continue;
            }
            let mut buffer = self.buffers.take(rows.len()).await;
            buffer.as_mut_slice().fill(0);
            for (strip, source) in rows.data.iter().enumerate() {
                let source = source.as_ref().expect("just read").as_slice();
                self.code.update(&[(strip, source)], &mut [(parity, buffer.as_mut_slice())]);
            }
            rows.skipped.push((parity, buffer));
        }
        // Data stays as it is.
        rows.data.iter_mut().for_each(|strip| *strip = None);
        Ok(())
    }

    /// Reads a copy of an entry again, whole.
    async fn read_entry(&self, copy: &Header) -> Result<Buffer, RecoverError> {
        let config = self.context.config;
        let slot = usize::from(copy.slot);
        let member = self.context.members[slot].as_ref().expect("the entry was read from it");
        let bytes = copy.entry_bytes(config.geometry.data) as usize;
        let lane_at = member.log_offset + u64::from(copy.lane) * u64::from(config.lane_bytes);
        let mut buffer = self.buffers.take(bytes).await;
        let before_end = bytes.min((config.lane_bytes - copy.position) as usize);
        let (first, second) = buffer.as_mut_slice().split_at_mut(before_end);
        let mut reads = vec![Transfer::read(slot, member, lane_at + u64::from(copy.position), first)];
        if !second.is_empty() {
            reads.push(Transfer::read(slot, member, lane_at, second));
        }
        transfer_all(reads).await.map_err(|error| match error {
            RecoverError::Member { slot, error } if is_unreadable(error) => RecoverError::Log { slot, error },
            error => error,
        })?;
        let mut checksum = Checksum::new(&self.key);
        for (at, len) in copy.write.iter().flat_map(|write| write.payload_parts(config.geometry.data)) {
            checksum.add(&buffer.as_slice()[HEADER_BYTES + at..][..len]);
            checksum.end();
        }
        if checksum.finish() != copy.payload_checksum {
            return Err(RecoverError::Log { slot, error: IoError::Corrupt });
        }
        Ok(buffer)
    }

    /// New data comes from the log.
    async fn take_redo(&self, rows: &mut Rows<'_>) {
        let data = self.context.config.geometry.data;
        for strip in strips_of(rows.write.modified) {
            let mut buffer = self.buffers.take(rows.len()).await;
            let at = HEADER_BYTES + rows.write.redo_at(data, strip) as usize + rows.part.start as usize;
            buffer.as_mut_slice().copy_from_slice(&rows.parity[0].1.as_slice()[at..at + rows.len()]);
            rows.data[strip] = Some(buffer);
        }
    }

    /// Reads the modified strips as they are; returns those whose members are missing, or cannot
    /// read them.
    async fn read_data(&self, rows: &mut Rows<'_>) -> Result<Vec<usize>, RecoverError> {
        let at = self.position(rows);
        let write = rows.write;
        let mut lost = Vec::new();
        for strip in strips_of(write.modified) {
            match self.readable(rows, strip) {
                Some(_) => rows.data[strip] = Some(self.buffers.take(rows.len()).await),
                None => lost.push(strip),
            }
        }
        // Only readable strips have a buffer.
        let reads = rows.data.iter_mut().enumerate().filter_map(|(strip, buffer)| {
            let (slot, member) = self.live(write.stripe, strip)?;
            Some(Transfer::read(slot, member, member.data_offset + at, buffer.as_mut()?.as_mut_slice()))
        });
        transfer_all(reads.collect()).await?;
        Ok(lost)
    }

    /// Computes lost strips from parity as it is on the members. For a full stripe that is right
    /// only when everything else is new: the header's checksums tell. `false` when they do not
    /// match.
    async fn derive(&self, rows: &mut Rows<'_>, lost: &[usize]) -> Result<bool, RecoverError> {
        let at = self.position(rows);
        let (write, data) = (rows.write, self.context.config.geometry.data);
        let unreadable = rows.unreadable >> data;
        let can_be_read = |parity: usize| unreadable >> parity & 1 == 0;
        let reads = rows.parity.iter_mut().filter(|(parity, ..)| can_be_read(*parity)).filter_map(
            |(parity, _, buffer)| {
                let (slot, member) = self.live(write.stripe, data + *parity)?;
                Some(Transfer::read(slot, member, member.data_offset + at, buffer.as_mut_slice()))
            },
        );
        transfer_all(reads.collect()).await?;
        // Parity without the unmodified strips is the parity of a stripe with zeroes there.
        for (_, entry, buffer) in &mut rows.parity {
            let partial = partial_of(write, &rows.part, entry, data);
            buffer.as_mut_slice().iter_mut().zip(partial).for_each(|(parity, partial)| *parity ^= partial);
        }
        let mut derived: Vec<Buffer> = Vec::new();
        for _ in lost {
            derived.push(self.buffers.take(rows.len()).await);
        }
        let zeroes = vec![0; rows.len()];
        let held: Vec<usize> =
            rows.parity.iter().map(|(parity, ..)| *parity).filter(|parity| can_be_read(*parity)).collect();
        // Any of the parities will do; for a full stripe those that were written in time.
        for first in 0..held.len().saturating_sub(lost.len() - 1) {
            let used = held[first..first + lost.len()].iter().fold(0u64, |mask, j| mask | 1 << (data + j));
            let known = (0..data).filter(|i| !lost.contains(i)).fold(used, |mask, i| mask | 1 << i);
            let Ok(decoder) = self.code.decoder(lost, known) else { continue };
            let sources: Vec<&[u8]> =
                decoder.sources().iter().map(|strip| rows.source(*strip, &zeroes)).collect();
            let mut targets: Vec<&mut [u8]> = derived.iter_mut().map(Buffer::as_mut_slice).collect();
            decoder.decode(&sources, &mut targets);
            if !write.is_full(data) || rows.is_new || rows.is_whole() && self.is_new(write, lost, &derived) {
                lost.iter().zip(derived).for_each(|(strip, buffer)| rows.data[*strip] = Some(buffer));
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether strips have the checksums that the header gives for new data.
    fn is_new(&self, write: &Write, strips: &[usize], data: &[Buffer]) -> bool {
        strips.iter().zip(data).all(|(strip, buffer)| self.has_checksum(write, *strip, buffer.as_slice()))
    }

    fn has_checksum(&self, write: &Write, strip: usize, bytes: &[u8]) -> bool {
        let place = (write.modified & ((1 << strip) - 1)).count_ones() as usize;
        write.checksums.get(place) == Some(&Checksum::of(&self.key, bytes))
    }

    /// Zeroes stand for what is lost, so that parity protects the other strips again.
    async fn give_up(&self, rows: &mut Rows<'_>, lost: &[usize]) {
        for strip in lost {
            let mut buffer = self.buffers.take(rows.len()).await;
            buffer.as_mut_slice().fill(0);
            rows.data[*strip] = Some(buffer);
        }
    }

    /// Whether the caller has noted a range, durably.
    fn is_noted(&self, range: &BadRange) -> bool {
        let BadRange { stripe, strip, offset, len } = *range;
        let has = |noted: &BadRange| {
            (noted.stripe, noted.strip) == (stripe, strip)
                && noted.offset <= offset
                && noted.offset + noted.len >= offset + len
        };
        self.context.noted.iter().any(has)
    }

    /// Parity = partial + Σ c·(modified strips).
    fn compute_parity(&self, rows: &mut Rows<'_>) {
        let data = self.context.config.geometry.data;
        for (parity, entry, buffer) in &mut rows.parity {
            match partial_of(rows.write, &rows.part, entry, data) {
                [] => buffer.as_mut_slice().fill(0),
                partial => buffer.as_mut_slice().copy_from_slice(partial),
            }
            for (strip, source) in rows.data.iter().enumerate() {
                if let Some(source) = source {
                    self.code.update(&[(strip, source.as_slice())], &mut [(*parity, buffer.as_mut_slice())]);
                }
            }
        }
    }

    /// Parity on a live member that the write skipped: it was failing then, and power failed before
    /// it was "out". Computed from all data of the rows; `false` when that cannot be had.
    async fn compute_skipped(&self, rows: &mut Rows<'_>) -> Result<bool, RecoverError> {
        let (write, geometry) = (rows.write, &self.context.config.geometry);
        for parity in (0..geometry.parity).filter(|parity| write.targets >> parity & 1 == 0) {
            if self.live(write.stripe, geometry.data + parity).is_some() {
                rows.skipped.push((parity, self.buffers.take(rows.len()).await));
            }
        }
        if rows.skipped.is_empty() {
            return Ok(true);
        }
        let at = self.position(rows);
        let mut others: Vec<(usize, Buffer)> = Vec::new();
        let mut lost: Vec<usize> = Vec::new();
        for strip in (0..geometry.data).filter(|strip| rows.data[*strip].is_none()) {
            match self.readable(rows, strip) {
                Some(_) => others.push((strip, self.buffers.take(rows.len()).await)),
                None => lost.push(strip),
            }
        }
        let reads = others.iter_mut().filter_map(|(strip, buffer)| {
            let (slot, member) = self.live(write.stripe, *strip)?;
            Some(Transfer::read(slot, member, member.data_offset + at, buffer.as_mut_slice()))
        });
        transfer_all(reads.collect()).await?;
        let mut all: Vec<Option<&Buffer>> = rows.data.iter().map(Option::as_ref).collect();
        others.iter().for_each(|(strip, buffer)| all[*strip] = Some(buffer));
        let mut found: Vec<Buffer> = Vec::new();
        if !lost.is_empty() {
            let parities = rows.parity.iter().map(|(j, ..)| geometry.data + j);
            let known = (0..geometry.data).filter(|strip| all[*strip].is_some()).chain(parities);
            let Ok(decoder) = self.code.decoder(&lost, known.fold(0, |mask, strip| mask | 1 << strip)) else {
                return Ok(false);
            };
            for _ in &lost {
                found.push(self.buffers.take(rows.len()).await);
            }
            let source = |strip: &usize| match strip.checked_sub(geometry.data) {
                None => all[*strip].expect("known").as_slice(),
                Some(_) => rows.source(*strip, &[]),
            };
            let sources: Vec<&[u8]> = decoder.sources().iter().map(source).collect();
            let mut targets: Vec<&mut [u8]> = found.iter_mut().map(Buffer::as_mut_slice).collect();
            decoder.decode(&sources, &mut targets);
        }
        lost.iter().zip(&found).for_each(|(strip, buffer)| all[*strip] = Some(buffer));
        for (parity, target) in &mut rows.skipped {
            target.as_mut_slice().fill(0);
            for (strip, source) in
                all.iter().enumerate().filter_map(|(strip, source)| Some((strip, (*source)?)))
            {
                self.code.update(&[(strip, source.as_slice())], &mut [(*parity, target.as_mut_slice())]);
            }
        }
        Ok(true)
    }

    /// Writes parity, data that came from the log, and strips that could not be read to the live
    /// members.
    async fn write_rows(&self, rows: &Rows<'_>) -> Result<(), RecoverError> {
        let at = self.position(rows);
        let (write, data) = (rows.write, self.context.config.geometry.data);
        let parity = rows.parity.iter().map(|(parity, _, buffer)| (data + parity, Some(buffer)));
        let skipped = rows.skipped.iter().map(|(parity, buffer)| (data + parity, Some(buffer)));
        let is_written = |strip: usize| write.has_redo || rows.unreadable >> strip & 1 == 1;
        let known = rows.data.iter().map(Option::as_ref).enumerate();
        let redo = known.filter(|(strip, _)| is_written(*strip));
        let writes = parity.chain(skipped).chain(redo).filter_map(|(strip, buffer)| {
            let (slot, member) = self.live(write.stripe, strip)?;
            Some(Transfer::write(slot, member, member.data_offset + at, buffer?.as_slice()))
        });
        transfer_all(writes.collect()).await
    }

    /// Where rows lie in the data of each member.
    fn position(&self, rows: &Rows<'_>) -> u64 {
        self.context.config.geometry.member_offset(rows.write.stripe) + u64::from(rows.offset())
    }
}

impl Rows<'_> {
    /// The decoder's input for a strip: known data, parity, or zeroes for a strip that was not
    /// modified.
    fn source<'s>(&'s self, strip: usize, zeroes: &'s [u8]) -> &'s [u8] {
        match strip.checked_sub(self.data.len()) {
            None => self.data[strip].as_ref().map_or(zeroes, Buffer::as_slice),
            Some(parity) => {
                let held = self.parity.iter().find(|(j, ..)| *j == parity);
                held.map_or(zeroes, |(_, _, buffer)| buffer.as_slice())
            }
        }
    }
}

/// The partial parity of some rows in an entry; nothing for a full stripe.
fn partial_of<'e>(write: &Write, part: &Range<u32>, entry: &'e Buffer, data: usize) -> &'e [u8] {
    match write.is_full(data) {
        true => &[],
        false => &entry.as_slice()[HEADER_BYTES + part.start as usize..][..part.len()],
    }
}

/// The ranges of the rows in the `lost` strips.
fn bad_ranges(rows: &Rows<'_>, lost: &[usize]) -> Vec<BadRange> {
    let (stripe, offset, len) = (rows.write.stripe, rows.offset(), rows.part.len() as u32);
    lost.iter().map(|strip| BadRange { stripe, strip: *strip, offset, len }).collect()
}

/// Adds ranges of later rows; those that touch a range become one with it.
fn join(ranges: &mut Vec<BadRange>, more: Vec<BadRange>) {
    for range in more {
        let touches = |r: &&mut BadRange| r.strip == range.strip && r.offset + r.len == range.offset;
        match ranges.iter_mut().find(touches) {
            Some(before) => before.len += range.len,
            None => ranges.push(range),
        }
    }
}

fn strips_of(mask: u64) -> impl Iterator<Item = usize> {
    (0..64).filter(move |strip| mask >> strip & 1 == 1)
}

/// A request to one member, and the memory it works on.
pub(super) struct Transfer<'a> {
    slot: usize,
    channel: &'a dyn Channel,
    op: Op,
    offset: u64,
    segment: Segment,
    memory: std::marker::PhantomData<&'a mut [u8]>,
}

impl<'a> Transfer<'a> {
    pub fn read(slot: usize, member: &'a RecoveryMember, offset: u64, target: &'a mut [u8]) -> Transfer<'a> {
        let segment = Segment { base: target.as_mut_ptr(), len: target.len() };
        Transfer {
            slot,
            channel: &*member.channel,
            op: Op::Read,
            offset,
            segment,
            memory: Default::default(),
        }
    }

    pub fn write(slot: usize, member: &'a RecoveryMember, offset: u64, source: &'a [u8]) -> Transfer<'a> {
        // A write only reads from the segment.
        let segment = Segment { base: source.as_ptr().cast_mut(), len: source.len() };
        Transfer {
            slot,
            channel: &*member.channel,
            op: Op::Write,
            offset,
            segment,
            memory: Default::default(),
        }
    }
}

/// Runs transfers side by side, waits for all, and names the first member that failed. Writes are
/// durable then.
pub(super) async fn transfer_all(transfers: Vec<Transfer<'_>>) -> Result<(), RecoverError> {
    for (transfer, result) in transfers.iter().zip(transfer_each(&transfers).await) {
        result.map_err(|error| RecoverError::Member { slot: transfer.slot, error })?;
    }
    Ok(())
}

/// Runs transfers side by side and returns the end of each. Writes are durable then.
pub(super) async fn transfer_each(transfers: &[Transfer<'_>]) -> Vec<IoResult> {
    let mut ends = Vec::with_capacity(transfers.len());
    for transfers in transfers.chunks(block::MAX_JOINED) {
        let requests: Vec<Request<'_>> = transfers.iter().map(Transfer::request).collect();
        let mut futures: Vec<IoFuture<'_>> =
            transfers.iter().zip(&requests).map(|(t, request)| t.channel.submit(request, t.offset)).collect();
        let mut results: Vec<Option<IoResult>> = vec![None; futures.len()];
        poll_fn(|cx| {
            for (future, result) in
                futures.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none())
            {
                if let Poll::Ready(end) = Pin::new(future).poll(cx) {
                    *result = Some(end);
                }
            }
            if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        ends.extend(results.into_iter().flatten());
    }
    ends
}

impl Transfer<'_> {
    fn request(&self) -> Request<'_> {
        // SAFETY: the transfer borrows its memory, for a read exclusively, and lives until
        // `transfer_all` has waited for the request's end; a future that is dropped earlier ends
        // the process.
        let data = unsafe { Data::one(&self.segment) };
        match self.op {
            Op::Write => Request::write(data, Flags::FUA),
            _ => Request::read(data),
        }
    }
}
