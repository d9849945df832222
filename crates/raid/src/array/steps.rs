//! Steps that reads, writes, fills and scrubs of a stripe have in common.

use super::members::{MemberRole, SlotState};
use super::scratch::Scratch;
use super::stop::{ReadFailure, Stop, read_failure};
use super::stripe_owner::StripeOwner;
use crate::metadata::intent_bitmap::{NEED_SYNC, STALE, WRITTEN};
use crate::mutant::{self, Mutant};
use crate::stripe::plan::{Strips, ones};
use arrayvec::ArrayVec;
use block::{Flags, IoError, IoResult, Op};
use std::ops::Range;

/// Parts of some rows that wait while one of them is halved: 32 bits are halved 32 times at most.
const MAX_PARTS: usize = 33;

impl StripeOwner {
    /// Returns the strips of a stripe that can be written and read.
    pub fn strips(&self, stripe: u64, unreadable: u64) -> Strips {
        let geometry = &self.shared.config.geometry;
        let live = self.shared.members.live_strips(stripe);
        Strips {
            data: geometry.data,
            parity: geometry.parity,
            live,
            readable: live & !unreadable,
            is_synced: self.shared.region(stripe) & NEED_SYNC == 0,
        }
    }

    /// A member that should be there has no channel: its device went away before this core had
    /// opened it.
    pub(super) async fn gone(&self, stripe: u64, strip: usize) -> IoResult {
        let members = &self.shared.members;
        let slot = members.geometry().member(stripe, strip);
        let role = members.role(slot);
        if role == MemberRole::Current || members.is_filling(slot) {
            self.shared.member_failed(slot, role, IoError::DeviceGone).await?;
        }
        Ok(())
    }

    /// Reads strips into `scratch.old` and `scratch.parity`.
    pub(super) async fn read_strips(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        offset: u32,
        len: u32,
        mask: u64,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        scratch.batch.clear();
        for strip in ones(mask) {
            let place = scratch.strip_mut(strip);
            if place.is_none() {
                *place = Some(self.buffer(len).await);
            }
            let segment = place.as_ref().expect("just set").segment();
            let Some((_, _, member)) = self.reader(stripe, strip) else {
                self.gone(stripe, strip).await?;
                return Err(Stop::Again);
            };
            let position = self.position(&member, stripe, offset);
            // SAFETY: the buffer is in the scratch, which stays untouched until the batch has run.
            unsafe {
                scratch.batch.add(strip as u32, member.channel, Op::Read, Flags::NONE, segment, position)
            };
        }
        scratch.batch.run().await;
        let mut failed = Vec::new();
        for (strip, error) in scratch.batch.failures() {
            match read_failure(error) {
                ReadFailure::Medium => *unreadable |= 1 << strip,
                ReadFailure::Fatal(error) => failed.push((strip as usize, error)),
            }
            self.shared.common.count_read_error();
        }
        let is_complete = scratch.batch.failures().next().is_none();
        for (strip, error) in failed {
            if let Some((slot, role, _)) = self.reader(stripe, strip) {
                self.shared.member_failed(slot, role, error).await?;
            }
        }
        if is_complete { Ok(()) } else { Err(Stop::Again) }
    }

    /// Before a sync, parity may contradict strips that can be read: only blocks that cannot be
    /// read are computed from it.
    ///
    /// # Errors
    /// [`Stop::Halve`] when a live strip has an unreadable block among several.
    pub(super) fn halve_around(&self, strips: &Strips, len: u32) -> Result<(), Stop> {
        let has_unreadable = strips.live & !strips.readable != 0;
        let is_open = strips.data > 1 && !strips.is_synced;
        match has_unreadable && is_open && len > self.shared.config.block_size {
            true => Err(Stop::Halve),
            false => Ok(()),
        }
    }

    /// Works on some rows of a stripe, which the caller holds. Where fewer rows at a time need less
    /// of what cannot be read, `work` gets them in halves: strips may be unreadable in different
    /// rows. `unreadable`: strips that are known to be unreadable somewhere.
    pub(super) async fn by_halves(
        &self,
        rows: Range<u32>,
        unreadable: u64,
        work: impl AsyncFn(&mut Scratch, &Range<u32>, &mut u64) -> Result<(), Stop>,
    ) -> IoResult {
        let mut parts = ArrayVec::<(Range<u32>, u64), MAX_PARTS>::from_iter([(rows, unreadable)]);
        while let Some((part, mut unreadable)) = parts.pop() {
            let mut scratch = self.scratch();
            let result = loop {
                match work(&mut scratch, &part, &mut unreadable).await {
                    Err(Stop::Again) => {}
                    result => break result,
                }
            };
            self.recycle(scratch);
            let block_size = self.shared.config.block_size;
            let may_halve = unreadable != 0 && part.len() as u32 > block_size;
            match result {
                Ok(()) => {}
                Err(error) if may_halve && matches!(error, Stop::Halve | Stop::Error(IoError::Medium)) => {
                    let middle = part.start + halved(part.len() as u32, block_size);
                    parts.extend([(middle..part.end, 0), (part.start..middle, 0)]);
                }
                Err(Stop::Error(error)) => return Err(error),
                Err(Stop::Again | Stop::Halve | Stop::TooLarge | Stop::Moved) => {
                    return Err(IoError::Invalid);
                }
            }
        }
        Ok(())
    }

    /// Waits until every live member knows of those that this stripe's writes skip.
    pub(super) async fn wait_until_out(&self, stripe: u64) -> IoResult {
        let members = &self.shared.members;
        let is_known = |slot| members.state(slot) != SlotState::Failing && !members.is_leaving(slot);
        match members.group_slots(stripe).all(is_known) || mutant::is(Mutant::AckBeforeMemberOut) {
            true => Ok(()),
            false => Box::pin(self.put_out(stripe)).await,
        }
    }

    async fn put_out(&self, stripe: u64) -> IoResult {
        for slot in self.shared.members.group_slots(stripe) {
            if self.shared.members.state(slot) == SlotState::Failing {
                self.shared.member_failed(slot, MemberRole::Current, IoError::DeviceGone).await?;
            }
            if self.shared.members.is_leaving(slot) {
                self.shared.member_failed(slot, MemberRole::Replacement, IoError::DeviceGone).await?;
            }
        }
        Ok(())
    }

    /// Writes what was computed to the member that could not read it.
    pub(super) async fn repair(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strip: usize,
        offset: u32,
    ) -> Result<(), Stop> {
        let segment = scratch.strip(strip).as_ref().expect("computed before").segment();
        scratch.batch.clear();
        // SAFETY: as in `read_strips`.
        unsafe { self.add_writes(scratch, stripe, strip, offset, segment) };
        scratch.batch.run().await;
        self.shared.common.count_repair();
        let failed: Vec<(u32, IoError)> = scratch.batch.failures().collect();
        for (tag, error) in failed {
            let (slot, role) = of_tag(tag);
            self.set_region(stripe, WRITTEN | STALE).await?; // it lacks what was computed
            self.shared.member_failed(slot, role, error).await?;
        }
        Ok(())
    }

    /// Writes a computed strip to the member that could not read it, and counts the error if that
    /// succeeds.
    pub(super) async fn correct(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strip: usize,
        offset: u32,
    ) -> Result<(), Stop> {
        let is_own = self.is_read_from_own(stripe, strip);
        self.repair(scratch, stripe, strip, offset).await?;
        if is_own {
            self.count_answered(stripe, 1 << strip);
        }
        Ok(())
    }

    /// Counts read errors that did not stop a write or a fill, which used the other members
    /// instead.
    pub(super) fn count_answered(&self, stripe: u64, unreadable: u64) {
        for strip in ones(unreadable) {
            let slot = self.shared.config.geometry.member(stripe, strip);
            if self.is_read_from_own(stripe, strip) && self.shared.members.is_live(slot) {
                self.shared.common.read_errors.note(slot, self.shared.common.wall_ns());
            }
        }
    }

    fn is_read_from_own(&self, stripe: u64, strip: usize) -> bool {
        self.reader(stripe, strip).is_some_and(|(_, role, _)| role == MemberRole::Current)
    }

    /// Adds writes of a part of a strip to the batch: to its member, and to the device that fills
    /// its slot.
    ///
    /// # Safety
    /// As for [`Batch::add`](super::batch::Batch::add).
    pub(super) unsafe fn add_writes(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strip: usize,
        offset: u32,
        segment: block::Segment,
    ) {
        let slot = self.shared.config.geometry.member(stripe, strip);
        for role in self.shared.members.takers(slot, stripe) {
            let Some(member) = self.channels.get(slot, role) else { continue };
            let position = self.position(&member, stripe, offset);
            let tag = tag_of(slot, role);
            // SAFETY: by contract.
            unsafe { scratch.batch.add(tag, member.channel, Op::Write, Flags::FUA, segment, position) };
        }
    }
}

/// Half of `len` bytes in whole blocks.
pub(super) fn halved(len: u32, block_size: u32) -> u32 {
    len.div_ceil(2).next_multiple_of(block_size)
}

/// A device of a slot as the tag of a request in a batch.
pub(super) fn tag_of(slot: usize, role: MemberRole) -> u32 {
    (slot * 2 + role as usize) as u32
}

/// The device of a tag.
pub(super) fn of_tag(tag: u32) -> (usize, MemberRole) {
    (tag as usize / 2, if tag & 1 == 0 { MemberRole::Current } else { MemberRole::Replacement })
}
