//! Operations for the upkeep of an array (`crate::jobs`): one stripe or one commit at a time.

use super::Array;
use super::boundary::Shape;
use super::fill::{Before, Filled, FilledSlots, Wanted};
use super::latency::Samples;
use super::members::{MemberRole, Members};
use super::remote::LocalFuture;
use super::scrub::ScrubResult;
use super::stripe_owner::StripeOwner;
use crate::Uuid;
use crate::metadata::intent_bitmap::{NEED_SYNC, OPEN, STALE};
use crate::metadata::{Maintenance, MemberFailures, Reason, Table};
use block::{IoError, IoResult};
use std::rc::Rc;
use std::sync::Arc;

impl Array {
    /// The members, shared by all cores.
    pub fn members(&self) -> &Arc<Members> {
        &self.shared.members
    }

    /// Whether the data of a slot's group is lost if another of its members fails.
    pub fn is_unprotected(&self, slot: usize) -> bool {
        self.shared.is_unprotected(slot)
    }

    /// Latencies of foreground requests.
    pub fn samples(&self) -> &Samples {
        &self.shared.common.samples
    }

    /// A UUID for a new member. Must run on a core, whose randomness the simulator uses.
    pub fn new_uuid(&self) -> Uuid {
        Uuid::from_random(self.shared.common.new_nonce())
    }

    /// Nanoseconds since 1970. Must run on a core.
    pub fn wall_ns(&self) -> u64 {
        self.shared.common.wall_ns()
    }

    /// Fills one stripe of a slot's incoming device, on the stripe's owner. Stripes may be filled
    /// in any order inside the window from the slot's cursor on, which counts steps of the walk
    /// ([`crate::Geometry::stripe_at_step`]).
    ///
    /// # Errors
    /// If the stripe cannot be read, or the device cannot be written.
    pub async fn fill_stripe(&self, slot: usize, stripe: u64) -> IoResult {
        let wanted = vec![Wanted { slot, before: Before::Anything }];
        let filled = self.fill_step(self.config().geometry.step_of(stripe), wanted).await?;
        filled.into_iter().try_for_each(|(_, filled)| filled.map(drop))
    }

    /// Fills the stripe at a step of the walk ([`crate::Geometry::stripe_at_step`]) on the incoming
    /// devices of some slots of its group. If a device cannot be written, the fill of its slot
    /// ends.
    ///
    /// # Errors
    /// If the stripe's owner cannot be reached. Each slot has its own result.
    pub async fn fill_step(&self, step: u64, wanted: Vec<Wanted>) -> Result<FilledSlots, IoError> {
        let walk = self.router().map(|router| router.walk());
        let place = walk.map(|walk| walk.stripe(step));
        let (shape, stripe) = place.unwrap_or((Shape::New, self.config().geometry.stripe_at_step(step)));
        if shape == Shape::New {
            let fill = move |owner: Rc<StripeOwner>| async move { owner.fill(stripe, wanted).await };
            return self.on_owner(stripe, move |owner| Box::pin(fill(owner))).await;
        }
        let old = self.owner().old.clone().ok_or(IoError::Invalid)?;
        // Members that were added by the reshape have no strips of the old geometry.
        let members = old.shared.config.geometry.members();
        let (wanted, others): (Vec<Wanted>, Vec<Wanted>) =
            wanted.into_iter().partition(|wanted| wanted.slot < members);
        let mut filled = match old.owns(stripe) {
            _ if wanted.is_empty() => FilledSlots::new(),
            true => old.fill(stripe, wanted).await?,
            false => {
                let fill = move |owner: Rc<StripeOwner>| async move { owner.fill(stripe, wanted).await };
                old.forward(stripe, move |owner| Box::pin(fill(owner))).await?
            }
        };
        filled.extend(others.into_iter().map(|wanted| (wanted.slot, Ok(Filled::Skipped))));
        Ok(filled)
    }

    /// Steps of the walk that fills a slot. During a reshape it covers the stripes of the new
    /// geometry with the moved bytes, and those of the old one with the rest.
    pub fn fill_steps(&self) -> u64 {
        let walk = self.router().map(|router| router.walk().steps());
        walk.unwrap_or(self.config().geometry.stripes())
    }

    /// Sets a slot's cursor: every stripe before step `cursor` of the walk is complete.
    pub fn advance(&self, slot: usize, cursor: u64) {
        self.shared.members.advance(slot, cursor);
    }

    /// Durably records that every stripe before the slot's cursor is complete.
    ///
    /// # Errors
    /// An error of the commit.
    pub async fn checkpoint(&self, slot: usize) -> IoResult {
        self.checkpoint_all(&[slot]).await
    }

    /// Durably records, in one commit, that every stripe before the cursors of some slots is
    /// complete.
    ///
    /// # Errors
    /// An error of the commit.
    pub async fn checkpoint_all(&self, slots: &[usize]) -> IoResult {
        let cursor = |slot: &usize| (*slot, self.shared.members.cursor(*slot));
        let cursors: Vec<(usize, u64)> = slots.iter().map(cursor).collect();
        self.owner();
        self.shared
            .on_committer(move |committer| Box::pin(async move { committer.checkpoint(&cursors).await }))
            .await
    }

    /// Makes the incoming device of a complete slot live.
    ///
    /// # Errors
    /// An error of the commit; [`IoError::Invalid`] if the slot has no incoming device.
    pub async fn finish_filling(&self, slot: usize, uuid: Uuid) -> IoResult {
        if !self.shared.members.is_filling(slot) {
            return Err(IoError::Invalid);
        }
        self.owner();
        self.shared
            .on_committer(move |committer| {
                Box::pin(async move { committer.finish_filling(slot, uuid).await })
            })
            .await
    }

    /// Detaches the incoming device of a slot. Its content of the array is void.
    ///
    /// # Errors
    /// An error of the commit.
    pub async fn stop_filling(&self, slot: usize) -> IoResult {
        self.owner();
        self.shared.take_out(slot, MemberRole::Replacement, Reason::Removed).await
    }

    /// Removes former members: their slots become empty, and they can still be re-added. Must run
    /// on a core.
    ///
    /// # Errors
    /// An error of the commit. A slot that has a member again is not changed.
    pub async fn remove(&self, slots: Vec<usize>) -> IoResult {
        self.note(move |table| {
            for slot in &slots {
                let _ = crate::admin::edit::remove(table, *slot); // it was re-added meanwhile
            }
        })
        .await
    }

    /// Compares parity with data in one stripe, and corrects it if `is_repairing`. Must run on a
    /// core.
    ///
    /// # Errors
    /// If the stripe cannot be read or written.
    pub async fn scrub_stripe(&self, stripe: u64, is_repairing: bool) -> Result<ScrubResult, IoError> {
        self.on_owner(stripe, move |owner| Box::pin(async move { owner.scrub(stripe, is_repairing).await }))
            .await
    }

    /// The bits of the write-intent bitmap for a stripe; see [`crate::metadata::intent_bitmap`].
    pub fn region_bits(&self, stripe: u64) -> u8 {
        self.shared.region(stripe)
    }

    /// Number of regions with all of `bits`.
    pub fn count_regions(&self, bits: u8) -> u64 {
        self.shared.common.regions.count(bits)
    }

    /// Clears bits of a region, in memory; members get this with the next write of the bitmap. A
    /// region in sync also loses [`OPEN`].
    pub fn clear_region(&self, region: u64, bits: u8) {
        let open = if bits & NEED_SYNC != 0 { OPEN } else { 0 };
        self.shared.common.regions.clear(region, bits | open);
    }

    /// Lanes that fit in every live member's log.
    pub fn log_lanes(&self) -> u16 {
        let (members, config) = (&self.shared.members, &self.shared.config);
        let own = (0..members.count()).filter_map(|slot| members.attached(slot)[0].clone());
        config.lanes_in(own.map(|own| own.layout))
    }

    /// Durably marks the regions of stripes that failed members may lack.
    ///
    /// # Errors
    /// If the array cannot continue without the members that fail.
    pub async fn mark_stale(&self, stripes: Vec<u64>) -> IoResult {
        let owner = self.owner();
        for stripe in stripes {
            owner.set_region(stripe, STALE).await?;
        }
        Ok(())
    }

    /// Writes cleared bits of the write-intent bitmap to the members.
    ///
    /// # Errors
    /// If the array cannot continue without the members that fail.
    pub async fn settle_regions(&self) -> IoResult {
        let settle = move |owner: Rc<StripeOwner>| async move {
            while let Err(MemberFailures(failures)) = owner.shared.common.regions.settle(&*owner).await {
                owner.members_failed(failures).await?;
            }
            Ok(())
        };
        self.on_owner(0, move |owner| Box::pin(settle(owner))).await
    }

    /// An operator's settings for the upkeep.
    pub fn maintenance(&self) -> Maintenance {
        self.shared.common.look_at_table(|table| table.maintenance)
    }

    /// Makes settings for the upkeep durable; then they apply. Must run on a core.
    ///
    /// # Errors
    /// An error of the commit.
    pub async fn set_maintenance(&self, maintenance: Maintenance) -> IoResult {
        self.note(move |table| table.maintenance = maintenance).await
    }

    /// Whether a scheduled scrub may run now: see [`Table::allows_scheduled_scrub`]. Must run on a
    /// core.
    pub fn allows_scheduled_scrub(&self) -> bool {
        let now_ns = self.wall_ns();
        self.shared.members.is_healthy()
            && self.shared.common.look_at_table(|table| table.allows_scheduled_scrub(now_ns))
    }

    /// Whether a scheduled scrub is due, and may run now. Must run on a core.
    pub fn is_scrub_due(&self) -> bool {
        let now_ns = self.wall_ns();
        let is_due = |table: &Table| table.next_scrub_ns(now_ns).is_some_and(|due_ns| due_ns <= now_ns);
        self.shared.common.look_at_table(is_due) && self.allows_scheduled_scrub()
    }

    /// Commits a change of the table that concerns no member, such as the position of a scrub.
    ///
    /// # Errors
    /// An error of the commit.
    pub async fn note(&self, change: impl Fn(&mut Table) + Send + 'static) -> IoResult {
        self.owner();
        self.shared.on_committer(move |committer| Box::pin(async move { committer.note(change).await })).await
    }

    async fn on_owner<R, W>(&self, stripe: u64, work: W) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: FnOnce(Rc<StripeOwner>) -> LocalFuture<Result<R, IoError>> + Clone + Send + 'static,
    {
        let owner = self.owner();
        match owner.owns(stripe) {
            true => work(owner).await,
            false => owner.forward(stripe, work).await,
        }
    }
}
