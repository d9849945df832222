//! Reads that a channel cannot send directly to a member.

use super::request::{Caller, StripeRequest};
use super::scratch::Scratch;
use super::spare::{Checks, Place};
use super::steps::of_tag;
use super::stop::Stop;
use super::stripe_owner::StripeOwner;
use crate::stripe::plan::{Strips, ones};
use block::{IoError, IoResult};
use std::ops::Range;

impl StripeOwner {
    /// Reads a part of a strip that cannot simply be read where the request came in: from its
    /// member if that works now, otherwise computed from the others. Blocks that a live member
    /// could not read are written again.
    pub async fn read(&self, stripe: u64, strip: usize, offset: u32, data: block::Data<'_>) -> IoResult {
        let inside = self.enter().await;
        if !self.owns(stripe) {
            drop(inside);
            // SAFETY: the request completes after this future does.
            let data = unsafe { Caller::new(data) };
            return Box::pin(self.on_owner(StripeRequest::Read { stripe, strip, offset, data })).await;
        }
        let len = data.len() as u32;
        let geometry = &self.shared.config.geometry;
        let _rows = self.locks.lock(stripe, offset..offset + len).await;
        let _memory = self.grant(geometry.group_members() + 1, len as usize).await;
        let work = async |scratch: &mut Scratch, rows: &Range<u32>, unreadable: &mut u64| {
            let part = data.part((rows.start - offset) as usize, rows.len());
            self.try_read(scratch, stripe, strip, rows.start, part, unreadable).await
        };
        self.by_halves(offset..offset + len, 0, work).await
    }

    async fn try_read(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strip: usize,
        offset: u32,
        data: block::Data<'_>,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        self.shared.common.check_frozen()?;
        let len = data.len() as u32;
        // Now that the rows are locked: it may have been given up since the request was looked at.
        self.shared.check_bad(stripe, strip, offset, len)?;
        let strips = self.strips(stripe, *unreadable);
        if strips.readable >> strip & 1 == 1 {
            self.read_strips(scratch, stripe, offset, len, 1 << strip, unreadable).await?;
            self.settle_copies(scratch, &strips, stripe, strip, offset).await?;
            data.copy_from(scratch.bytes(strip));
            return Ok(());
        }
        if !self.shared.can_compute(stripe) {
            return Err(Stop::Error(IoError::Medium));
        }
        self.halve_around(&strips, len)?;
        let place = Place { stripe, offset, len };
        self.compute(scratch, place, strip, &strips, unreadable, Checks::One).await?;
        self.settle_copies(scratch, &strips, stripe, strip, offset).await?;
        data.copy_from(scratch.bytes(strip));
        if strips.live >> strip & 1 == 1 && !self.shared.common.is_read_only {
            self.correct(scratch, stripe, strip, offset).await?;
        }
        Ok(())
    }

    /// In a mirror whose copies may differ after a crash, data that was just read goes to the other
    /// copies before the read ends. No later read finds older data, whichever copy is left.
    async fn settle_copies(
        &self,
        scratch: &mut Scratch,
        strips: &Strips,
        stripe: u64,
        strip: usize,
        offset: u32,
    ) -> Result<(), Stop> {
        if strips.data > 1 || strips.is_synced {
            return Ok(());
        }
        let segment = scratch.old[0].as_ref().expect("just read").segment();
        scratch.batch.clear();
        for other in ones(strips.live & !(1 << strip)) {
            // SAFETY: the buffer is in the scratch, which stays untouched until the batch has run.
            unsafe { self.add_writes(scratch, stripe, other, offset, segment) };
        }
        scratch.batch.run().await;
        let failed: Vec<(u32, IoError)> = scratch.batch.failures().collect();
        for (tag, error) in failed {
            let (slot, role) = of_tag(tag);
            self.shared.member_failed(slot, role, error).await?;
        }
        // A copy that began to fail before has not got it, and must not be asked again.
        Ok(self.wait_until_out(stripe).await?)
    }
}
