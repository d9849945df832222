//! Filling a member: a strip of it is computed from the others', or copied from the member that it
//! replaces. Members of one group that are filled together share what is read of the others.
//!
//! A fill decides what a stripe needs while the stripe's rows are locked: an earlier write shows in
//! the write-intent bitmap, and a later one finds the stripe done. A row that cannot be
//! reconstructed is first noted as bad, durably, and then gets zeroes. It reads as an error until
//! it is written, and its parity is right all the same.

use super::members::MemberRole;
use super::remote::LocalFuture;
use super::request::{Source, WriteRequest};
use super::scratch::{NewData, Scratch, decode, strips_of};
use super::spare::{Checks, Compared, Place};
use super::stop::Stop;
use super::stripe_owner::StripeOwner;
use crate::config::{MAX_GROUP_MEMBERS, ROW_BYTES};
use crate::metadata::intent_bitmap::{NEED_SYNC, STALE, WRITTEN};
use crate::metadata::{BadBlocksError, BadRange, MemberFailures};
use crate::mutant::{self, Mutant};
use crate::stripe::plan::{Strips, ones};
use crate::stripe::rect::Rect;
use arrayvec::ArrayVec;
use block::{Flags, IoError, IoResult, Op, Request};
use std::ops::Range;
use std::rc::Rc;

/// The known content of an incoming device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Before {
    /// Nothing: every stripe is written, with zeroes where nothing was ever written.
    #[default]
    Anything,
    /// It reads as zeroes: stripes of regions where nothing was ever written are left alone.
    Zeroes,
    /// It was this slot's member and lacks only what was written meanwhile: regions marked
    /// [`STALE`](crate::metadata::intent_bitmap::STALE).
    Member,
}

/// The result of filling a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// The strip was computed or copied.
    Written,
    /// Zeroes were written, as the strip was never written.
    Zeroed,
    /// The device holds what it should.
    Skipped,
    /// Some rows cannot be brought back; they are noted as bad.
    Bad,
}

/// A slot whose strip of a stripe is wanted on its incoming device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The slot.
    pub slot: usize,
    /// The known content of its device.
    pub before: Before,
}

/// How filling ended for each slot.
pub type FilledSlots = Vec<(usize, Result<Filled, IoError>)>;

/// A strip that is computed or copied for the incoming device of a slot.
#[derive(Clone, Copy)]
struct Newcomer {
    slot: usize,
    strip: usize,
}

impl StripeOwner {
    /// Fills the strips of a stripe on the incoming devices of some slots of its group, and counts
    /// them as done. The other members are read once for all of them. An incoming device that
    /// cannot be written is detached: its slot is not filled any more, and the others are.
    ///
    /// The error of a slot: its stripe cannot be read for now, or its device cannot be written.
    ///
    /// # Errors
    /// When the stripe's owner cannot be reached.
    pub async fn fill(&self, stripe: u64, wanted: Vec<Wanted>) -> Result<FilledSlots, IoError> {
        let inside = self.enter().await;
        if !self.owns(stripe) {
            drop(inside);
            let work = move |owner: Rc<StripeOwner>| -> LocalFuture<Result<FilledSlots, IoError>> {
                Box::pin(async move { owner.fill(stripe, wanted).await })
            };
            return self.forward(stripe, work).await;
        }
        let geometry = &self.shared.config.geometry;
        let _rows = match mutant::is(Mutant::RebuildWithoutLock) {
            false => Some(self.locks.lock(stripe, 0..geometry.strip_bytes).await),
            true => None,
        };
        let mut filled = FilledSlots::new();
        let mut newcomers: ArrayVec<Newcomer, MAX_GROUP_MEMBERS> = ArrayVec::new();
        for Wanted { slot, before } in wanted {
            let Some(strip) = geometry.strip_on(stripe, slot) else {
                filled.push((slot, Err(IoError::Invalid)));
                continue;
            };
            match self.fill_without_others(stripe, slot, before).await {
                Ok(None) => newcomers.push(Newcomer { slot, strip }),
                Ok(Some(how)) => filled.push((slot, self.done(stripe, slot, how))),
                Err(error) => filled.push((slot, Err(error))),
            }
        }
        if !newcomers.is_empty() {
            self.fill_strips(stripe, &newcomers, &mut filled).await;
        }
        Ok(filled)
    }

    /// Fills a strip that takes nothing from other members; `None` when it does.
    async fn fill_without_others(
        &self,
        stripe: u64,
        slot: usize,
        before: Before,
    ) -> Result<Option<Filled>, IoError> {
        if !self.shared.members.is_filling(slot) {
            return Err(IoError::DeviceGone);
        }
        let bits = self.shared.region(stripe);
        let is_unwritten = bits & (WRITTEN | NEED_SYNC) == 0;
        Ok(match before {
            Before::Member if bits & (STALE | NEED_SYNC) == 0 || mutant::is(Mutant::NoResync) => {
                Some(Filled::Skipped)
            }
            Before::Zeroes if is_unwritten => Some(Filled::Skipped),
            Before::Anything if is_unwritten => {
                self.fill_zeroes(stripe, slot).await?;
                Some(Filled::Zeroed)
            }
            _ => None,
        })
    }

    /// A slot's incoming device holds a stripe, unless it has failed meanwhile.
    fn done(&self, stripe: u64, slot: usize, filled: Filled) -> Result<Filled, IoError> {
        if !self.shared.members.is_filling(slot) {
            return Err(IoError::DeviceGone);
        }
        self.shared.members.set_done(slot, stripe);
        Ok(filled)
    }

    async fn fill_strips(&self, stripe: u64, newcomers: &[Newcomer], filled: &mut FilledSlots) {
        let geometry = &self.shared.config.geometry;
        // Twice: what cannot be brought back is replaced with buffers of its own.
        let buffers = 2 * (geometry.group_members() + 1);
        let _memory = self.grant(buffers, geometry.strip_bytes as usize).await;
        let result = self.fill_rows(stripe, newcomers, 0..geometry.strip_bytes).await;
        for newcomer in newcomers {
            let how = match result {
                Ok(()) => Ok(Filled::Written),
                // One after the other: what is given up for one is written to those that are done.
                Err(IoError::Medium) => self.fill_by_rows(stripe, *newcomer).await,
                Err(error) => Err(error),
            };
            let how = how.and_then(|how| self.done(stripe, newcomer.slot, how));
            filled.push((newcomer.slot, how));
        }
    }

    /// Row by row, and block by block where a row cannot be had: no block is given up for its
    /// neighbour.
    async fn fill_by_rows(&self, stripe: u64, newcomer: Newcomer) -> Result<Filled, IoError> {
        let geometry = &self.shared.config.geometry;
        let (slot, strip, only) = (newcomer.slot, newcomer.strip, [newcomer]);
        if !self.shared.members.is_filling(slot) {
            return Err(IoError::DeviceGone);
        }
        let mut filled = Filled::Written;
        for row in pieces(&(0..geometry.strip_bytes), self.row_step()) {
            match self.fill_rows(stripe, &only, row.clone()).await {
                Err(IoError::Medium) => {}
                result => {
                    result?;
                    continue;
                }
            }
            // Where nothing is known, nothing is known of any of its blocks. Unreadable blocks of
            // other strips are given up one by one.
            let is_unknown = self.is_unknown(stripe, strip) && self.can_be_read(stripe, &row).await?;
            let step = if is_unknown { row.end - row.start } else { self.shared.config.block_size };
            for block in pieces(&row, step) {
                match self.fill_rows(stripe, &only, block.clone()).await {
                    Err(IoError::Medium) => {
                        self.give_up(stripe, newcomer, block).await?;
                        filled = Filled::Bad;
                    }
                    result => result?,
                }
            }
        }
        Ok(filled)
    }

    /// Fills some rows of strips on the devices that still take them.
    async fn fill_rows(&self, stripe: u64, newcomers: &[Newcomer], rows: Range<u32>) -> IoResult {
        let work = async |scratch: &mut Scratch, unreadable: &mut u64| {
            self.try_fill(scratch, stripe, newcomers, rows.clone(), unreadable).await
        };
        self.persist(work).await
    }

    async fn try_fill(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        newcomers: &[Newcomer],
        rows: Range<u32>,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        self.shared.common.check_frozen()?;
        let (offset, len) = (rows.start, rows.end - rows.start);
        let strips = self.strips(stripe, *unreadable);
        let wanted = newcomers.iter().fold(0, |mask, newcomer| mask | 1 << newcomer.strip);
        // A replacement: the old member still answers.
        let (known, lost) = (wanted & strips.readable, wanted & !strips.readable);
        if known != 0 {
            self.read_strips(scratch, stripe, offset, len, known, unreadable).await?;
        }
        if ones(lost).any(|strip| self.is_unknown(stripe, strip)) {
            return Err(Stop::Error(IoError::Medium));
        }
        if let Some(first) = ones(lost).next() {
            // As a degraded read computes it: with every block that can be read.
            self.halve_around(&strips, len)?;
            let place = Place { stripe, offset, len };
            self.compute(scratch, place, first, &strips, unreadable, Checks::All).await?;
            self.compute_beside(scratch, place, first, lost, &strips, unreadable).await?;
        }
        self.write_incoming(scratch, stripe, newcomers, offset).await?;
        self.count_answered(stripe, *unreadable);
        Ok(())
    }

    /// Computes the other lost strips from what was read, and compared, for the first of them.
    async fn compute_beside(
        &self,
        scratch: &mut Scratch,
        place: Place,
        first: usize,
        lost: u64,
        strips: &Strips,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        let Place { stripe, offset, len } = place;
        let rest = lost & !(1 << first);
        if rest == 0 {
            return Ok(());
        }
        let sources = |lost: u64| -> Result<u64, IoError> {
            let decoder = self.decoder(lost, strips.readable)?;
            Ok(decoder.sources().iter().fold(0, |mask, source| mask | 1 << source))
        };
        // Both choose among the same strips: a source of its own is one that the first has no use
        // for.
        let missing = sources(rest)? & !sources(1 << first)?;
        if missing != 0 {
            self.read_strips(scratch, stripe, offset, len, missing, unreadable).await?;
        }
        for strip in ones(rest) {
            if scratch.strip_mut(strip).is_none() {
                *scratch.strip_mut(strip) = Some(self.buffer(len).await);
            }
        }
        decode(&*self.decoder(rest, strips.readable)?, scratch, rest);
        Ok(())
    }

    /// Writes strips in the scratch to the incoming devices of their slots, at the same time. One
    /// that cannot be written is detached, and the others are filled all the same.
    async fn write_incoming(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        newcomers: &[Newcomer],
        offset: u32,
    ) -> IoResult {
        let mut failed: ArrayVec<(usize, IoError), MAX_GROUP_MEMBERS> = ArrayVec::new();
        let is_left =
            |newcomer: &&Newcomer| newcomers.len() == 1 || self.shared.members.is_filling(newcomer.slot);
        scratch.batch.clear();
        for Newcomer { slot, strip } in newcomers.iter().filter(is_left) {
            let Some(member) = self.channels.get(*slot, MemberRole::Replacement) else {
                failed.push((*slot, IoError::DeviceGone));
                continue;
            };
            let segment = scratch.strip(*strip).as_ref().expect("read or computed").segment();
            let position = self.position(&member, stripe, offset);
            // SAFETY: the buffer is in the scratch, which stays untouched until the batch has run.
            unsafe {
                scratch.batch.add(*slot as u32, member.channel, Op::Write, Flags::FUA, segment, position)
            };
        }
        scratch.batch.run().await;
        failed.extend(scratch.batch.failures().map(|(slot, error)| (slot as usize, error)));
        let mut result = Ok(());
        for (slot, error) in failed {
            match self.incoming_failed(slot, error).await {
                IoError::DeviceGone if newcomers.len() > 1 => {}
                error => result = Err(error),
            }
        }
        result
    }

    /// Whether a strip of data that is not there cannot be told by parity.
    fn is_unknown(&self, stripe: u64, strip: usize) -> bool {
        !self.shared.can_compute(stripe) && strip < self.shared.config.geometry.data
    }

    async fn fill_zeroes(&self, stripe: u64, slot: usize) -> IoResult {
        self.shared.common.check_frozen()?;
        let len = self.shared.config.geometry.strip_bytes;
        let Some(member) = self.channels.get(slot, MemberRole::Replacement) else {
            return Err(self.incoming_failed(slot, IoError::DeviceGone).await);
        };
        let position = self.position(&member, stripe, 0);
        let zeroes = Request::write_zeroes(u64::from(len), Flags::FUA);
        let result = match member.channel.submit(&zeroes, position).await {
            Err(IoError::Unsupported | IoError::OutOfRange | IoError::Invalid) => {
                let _memory = self.grant(1, len as usize).await;
                let mut buffer = self.buffer(len).await;
                buffer.as_mut_slice().fill(0);
                buffer.transfer(&*member.channel, Op::Write, Flags::FUA, position).await.1
            }
            result => result,
        };
        match result {
            Ok(()) => Ok(()),
            Err(error) => Err(self.incoming_failed(slot, error).await),
        }
    }

    /// Fails an incoming device that cannot be written. Returns the error that filling ends with:
    /// never [`IoError::Medium`], which would blame a read.
    async fn incoming_failed(&self, slot: usize, error: IoError) -> IoError {
        match self.shared.member_failed(slot, MemberRole::Replacement, error).await {
            Ok(()) => IoError::DeviceGone,
            Err(error) => error,
        }
    }

    /// Notes rows of a stripe that cannot be brought back as bad, puts zeroes there so that parity
    /// fits, and fills the slot with what that comes to. The caller holds the rows.
    async fn give_up(&self, stripe: u64, newcomer: Newcomer, rows: Range<u32>) -> IoResult {
        let strip = newcomer.strip;
        let work = async |scratch: &mut Scratch, unreadable: &mut u64| {
            if self.is_unknown(stripe, strip) {
                *unreadable |= 1 << strip;
            }
            self.try_give_up(scratch, stripe, strip, rows.clone(), unreadable).await?;
            Ok(self.write_incoming(scratch, stripe, &[newcomer], rows.start).await?)
        };
        self.persist(work).await
    }

    /// Notes unreadable blocks of a stripe as bad, and writes zeroes there. For stripes whose
    /// parity a crash has left open: it cannot reconstruct data that a live member cannot read. The
    /// caller holds the rows.
    pub(super) async fn give_up_unreadable(&self, stripe: u64) -> IoResult {
        let strip_bytes = self.shared.config.geometry.strip_bytes;
        for row in pieces(&(0..strip_bytes), self.row_step()) {
            if self.can_be_read(stripe, &row).await? {
                continue;
            }
            for block in pieces(&row, self.shared.config.block_size) {
                let work = async |scratch: &mut Scratch, unreadable: &mut u64| {
                    self.try_give_up(scratch, stripe, 0, block.clone(), unreadable).await
                };
                self.persist(work).await?;
            }
        }
        Ok(())
    }

    /// Notes blocks of some rows as bad that cannot be reconstructed, and writes zeroes there: the
    /// other blocks of the rows can be written then. The caller holds the rows.
    pub(super) async fn give_up_lost(&self, stripe: u64, rows: Range<u32>) -> IoResult {
        let step = self.shared.config.block_size;
        let _memory = self.grant(2 * self.shared.config.geometry.group_members() + 2, step as usize).await;
        for block in pieces(&rows, step) {
            let work = async |scratch: &mut Scratch, unreadable: &mut u64| {
                self.shared.common.check_frozen()?;
                let strips = self.strips(stripe, *unreadable);
                if (strips.readable.count_ones() as usize) < strips.data {
                    return self.try_give_up(scratch, stripe, 0, block.clone(), unreadable).await;
                }
                // Whatever cannot be read shows here.
                let len = block.end - block.start;
                self.read_strips(scratch, stripe, block.start, len, strips.readable, unreadable).await?;
                let place = Place { stripe, offset: block.start, len };
                let compared = Compared { readable: strips.readable, replaced: 0, checks: Checks::All };
                let unknown = self.read_compared(scratch, place, &strips, compared, unreadable).await?;
                match unknown.is_empty() {
                    true => Ok(()),
                    // Either version of what is lost could be the wrong one.
                    false => self.try_give_up(scratch, stripe, 0, block.clone(), unreadable).await,
                }
            };
            self.persist(work).await?;
        }
        Ok(())
    }

    /// Whether all data of some rows of a stripe can be read from the live members.
    async fn can_be_read(&self, stripe: u64, rows: &Range<u32>) -> Result<bool, IoError> {
        let work = async |scratch: &mut Scratch, unreadable: &mut u64| {
            self.shared.common.check_frozen()?;
            let strips = self.strips(stripe, *unreadable);
            let present = strips.live & strips.data_mask();
            let is_readable = present & !strips.readable == 0;
            if is_readable {
                let len = rows.end - rows.start;
                self.read_strips(scratch, stripe, rows.start, len, present, unreadable).await?;
            }
            Ok(is_readable)
        };
        self.persist(work).await
    }

    /// Tries until it does not have to start again.
    async fn persist<R>(
        &self,
        work: impl AsyncFn(&mut Scratch, &mut u64) -> Result<R, Stop>,
    ) -> Result<R, IoError> {
        let (mut scratch, mut unreadable) = (self.scratch(), 0);
        let result = loop {
            match work(&mut scratch, &mut unreadable).await {
                Ok(result) => break Ok(result),
                Err(Stop::Again) => {}
                // The caller goes block by block.
                Err(Stop::Halve) => break Err(IoError::Medium),
                Err(Stop::TooLarge | Stop::Moved) => break Err(IoError::Invalid),
                Err(Stop::Error(error)) => break Err(error),
            }
        };
        self.recycle(scratch);
        result
    }

    /// Bytes of each strip that are looked at by themselves when some of a strip cannot be brought
    /// back.
    fn row_step(&self) -> u32 {
        let geometry = &self.shared.config.geometry;
        ROW_BYTES.min(self.shared.entry_limit(geometry.data)).min(geometry.strip_bytes)
    }

    /// As [`StripeOwner::give_up`]; what the slot is to hold is in the scratch when it ends.
    async fn try_give_up(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strip: usize,
        rows: Range<u32>,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        self.shared.common.check_frozen()?;
        let (offset, len) = (rows.start, rows.end - rows.start);
        let strips = self.strips(stripe, *unreadable);
        self.read_strips(scratch, stripe, offset, len, strips.readable & strips.data_mask(), unreadable)
            .await?;
        let lost = strips.data_mask() & !strips.readable;
        if lost != 0 {
            self.note_bad(self.shared.bad_range(stripe, lost, offset, len)).await?;
            tracing::error!(
                array = self.shared.config.name,
                stripe,
                offset,
                "nothing can bring back strips {:?}: they are bad until they are written",
                ones(lost).collect::<Vec<_>>()
            );
            let (first, last) = (lost.trailing_zeros() as usize, lost.ilog2() as usize);
            let rect = Rect { stripe, first, count: last + 1 - first, offset, len, at: 0 };
            for strip in first..=last {
                let mut buffer = self.buffer(len).await;
                match lost >> strip & 1 == 1 {
                    true => buffer.as_mut_slice().fill(0),
                    false => buffer.as_mut_slice().copy_from_slice(scratch.bytes(strip)),
                }
                scratch.new[strip] = Some(NewData::Copy(buffer));
            }
            let request = WriteRequest { rect, source: Source::Lost, flags: Flags::FUA };
            self.try_write(scratch, &request, unreadable).await?;
        }
        // All data is known now: it was read, or is zeroes.
        for strip in ones(lost) {
            scratch.old[strip] = scratch.new[strip].take().and_then(NewData::into_copy);
        }
        if let Some(j) = strip.checked_sub(strips.data) {
            let mut buffer = self.buffer(len).await;
            let data = strips_of(&scratch.old, strips.data_mask());
            self.shared.code.encode_some(&data, &mut [(j, buffer.as_mut_slice())]);
            scratch.parity[j] = Some(buffer);
        }
        Ok(())
    }

    /// Blocks are bad from now on, durably.
    pub(super) async fn note_bad(&self, range: BadRange) -> IoResult {
        loop {
            match self.shared.common.bad.add(range, self).await {
                Ok(()) => return Ok(()),
                Err(BadBlocksError::Members(MemberFailures(failures))) => {
                    self.members_failed(failures).await?;
                }
                Err(BadBlocksError::Full(_)) => return Err(IoError::NoSpace),
            }
        }
    }
}

/// Divides a range into parts of `step` bytes, of which the last may be shorter.
fn pieces(range: &Range<u32>, step: u32) -> impl Iterator<Item = Range<u32>> {
    let end = range.end;
    (range.start..end).step_by(step as usize).map(move |start| start..end.min(start + step))
}
