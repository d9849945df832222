//! What the upkeep of an array (`crate::jobs`) does to it: one stripe, one commit at a time.

use super::Array;
use super::boundary::Shape;
use super::fill::{Before, Filled, FilledSlots, Wanted};
use super::latency::Samples;
use super::members::{Members, Which};
use super::owner::Owner;
use super::remote::LocalFuture;
use super::scrub::ScrubResult;
use crate::Uuid;
use crate::metadata::region_map::{NEED_SYNC, OPEN, STALE};
use crate::metadata::{Maintenance, MemberFailures, Reason, Table};
use block::{IoError, IoResult};
use std::rc::Rc;
use std::sync::Arc;

impl Array {
    /// The members, as all cores see them.
    pub fn members(&self) -> &Arc<Members> {
        &self.shared.members
    }

    /// Whether the data of a slot's group is lost if another of its members fails.
    pub fn is_unprotected(&self, slot: usize) -> bool {
        self.shared.is_unprotected(slot)
    }

    /// What foreground requests take.
    pub fn samples(&self) -> &Samples {
        &self.shared.samples
    }

    /// An identity for a new member. On a core: in the simulator the core's randomness makes it.
    pub fn new_uuid(&self) -> Uuid {
        Uuid::from_random(self.shared.new_nonce())
    }

    /// Nanoseconds since 1970. On a core.
    pub fn wall_ns(&self) -> u64 {
        self.shared.wall_ns()
    }

    /// Fills one stripe of a slot that is being filled, on the stripe's owner. Stripes may be filled in any order
    /// inside the window from the slot's cursor on, which counts steps of the walk
    /// ([`crate::Geometry::stripe_at_step`]).
    ///
    /// # Errors
    /// When the stripe cannot be read, or the device cannot be written.
    pub async fn fill_stripe(&self, slot: usize, stripe: u64) -> IoResult {
        let wanted = vec![Wanted { slot, before: Before::Anything }];
        let filled = self.fill_step(self.config().geometry.step_of(stripe), wanted).await?;
        filled.into_iter().try_for_each(|(_, filled)| filled.map(drop))
    }

    /// Fills the stripe at a step of the walk ([`crate::Geometry::stripe_at_step`]) on the incoming devices of some slots
    /// of its group. When a device could not be written, its slot is not being filled any more.
    ///
    /// # Errors
    /// When the stripe's owner cannot be reached. Each slot has a result of its own.
    pub async fn fill_step(&self, step: u64, wanted: Vec<Wanted>) -> Result<FilledSlots, IoError> {
        let walk = self.crossing().map(|crossing| crossing.walk());
        let place = walk.map(|walk| walk.stripe(step));
        let (shape, stripe) = place.unwrap_or((Shape::New, self.config().geometry.stripe_at_step(step)));
        if shape == Shape::New {
            let fill = move |owner: Rc<Owner>| async move { owner.fill(stripe, wanted).await };
            return self.on_owner(stripe, move |owner| Box::pin(fill(owner))).await;
        }
        let old = self.owner().old.clone().ok_or(IoError::Invalid)?;
        // Members that have come with the new shape hold nothing of the old one.
        let members = old.shared.config.geometry.members();
        let (wanted, others): (Vec<Wanted>, Vec<Wanted>) =
            wanted.into_iter().partition(|wanted| wanted.slot < members);
        let mut filled = match old.owns(stripe) {
            _ if wanted.is_empty() => FilledSlots::new(),
            true => old.fill(stripe, wanted).await?,
            false => {
                let fill = move |owner: Rc<Owner>| async move { owner.fill(stripe, wanted).await };
                old.forward(stripe, move |owner| Box::pin(fill(owner))).await?
            }
        };
        filled.extend(others.into_iter().map(|wanted| (wanted.slot, Ok(Filled::Skipped))));
        Ok(filled)
    }

    /// Steps of the walk that fills a slot. While the array changes its shape, it goes over the stripes of the new shape
    /// that hold what is moved, and those of the old one that hold the rest.
    pub fn fill_steps(&self) -> u64 {
        let walk = self.crossing().map(|crossing| crossing.walk().steps());
        walk.unwrap_or(self.config().geometry.stripes())
    }

    /// Every stripe before step `cursor` of the walk is filled.
    pub fn advance(&self, slot: usize, cursor: u64) {
        self.shared.members.advance(slot, cursor);
    }

    /// Remembers durably that every stripe before the slot's cursor is filled.
    ///
    /// # Errors
    /// What the commit says.
    pub async fn checkpoint(&self, slot: usize) -> IoResult {
        self.checkpoint_all(&[slot]).await
    }

    /// Remembers durably, in one commit, that every stripe before the cursors of some slots is filled.
    ///
    /// # Errors
    /// What the commit says.
    pub async fn checkpoint_all(&self, slots: &[usize]) -> IoResult {
        let cursor = |slot: &usize| (*slot, self.shared.members.cursor(*slot));
        let cursors: Vec<(usize, u64)> = slots.iter().map(cursor).collect();
        self.owner();
        self.shared.at_home(move |home| Box::pin(async move { home.checkpoint(&cursors).await })).await
    }

    /// The slot is full: its device is live from now on.
    ///
    /// # Errors
    /// What the commit says; [`IoError::Invalid`] when it is not being filled.
    pub async fn finish_filling(&self, slot: usize, uuid: Uuid) -> IoResult {
        if !self.shared.members.is_filling(slot) {
            return Err(IoError::Invalid);
        }
        self.owner();
        self.shared.at_home(move |home| Box::pin(async move { home.finish_filling(slot, uuid).await })).await
    }

    /// Lets the device go that fills a slot. What it holds of the array is void.
    ///
    /// # Errors
    /// What the commit says.
    pub async fn stop_filling(&self, slot: usize) -> IoResult {
        self.owner();
        self.shared.take_out(slot, Which::Incoming, Reason::Removed).await
    }

    /// Lets former members go: their slots are empty for everybody, and they can still be re-added. On a core.
    ///
    /// # Errors
    /// What the commit says. A slot that is filled by then is left alone.
    pub async fn remove(&self, slots: Vec<usize>) -> IoResult {
        self.note(move |table| {
            for slot in &slots {
                let _ = crate::admin::edit::remove(table, *slot); // it has come back meanwhile
            }
        })
        .await
    }

    /// Compares parity with data in one stripe, and makes it fit if told. On a core.
    ///
    /// # Errors
    /// When the stripe cannot be read or written.
    pub async fn scrub_stripe(&self, stripe: u64, is_repairing: bool) -> Result<ScrubResult, IoError> {
        self.on_owner(stripe, move |owner| Box::pin(async move { owner.scrub(stripe, is_repairing).await }))
            .await
    }

    /// The bits of the region map for a stripe; see [`crate::metadata::region_map`].
    pub fn region_bits(&self, stripe: u64) -> u8 {
        self.shared.region(stripe)
    }

    /// How many regions have all of `bits`.
    pub fn count_regions(&self, bits: u8) -> u64 {
        self.shared.regions.count(bits)
    }

    /// Clears bits of a region, in memory; members learn of it with the next write of the map. What is in sync is not
    /// open any more.
    pub fn clear_region(&self, region: u64, bits: u8) {
        let open = if bits & NEED_SYNC != 0 { OPEN } else { 0 };
        self.shared.regions.clear(region, bits | open);
    }

    /// Lanes that every live member's log has room for.
    pub fn log_lanes(&self) -> u16 {
        let (members, config) = (&self.shared.members, &self.shared.config);
        let own = (0..members.count()).filter_map(|slot| members.attached(slot)[0].clone());
        config.lanes_in(own.map(|own| own.layout))
    }

    /// A member that is out may lack these stripes: their regions are marked, durably.
    ///
    /// # Errors
    /// When the array cannot go on without members that fail.
    pub async fn mark_stale(&self, stripes: Vec<u64>) -> IoResult {
        let owner = self.owner();
        for stripe in stripes {
            owner.set_region(stripe, STALE).await?;
        }
        Ok(())
    }

    /// Writes what was cleared of the region map to the members.
    ///
    /// # Errors
    /// When the array cannot go on without members that fail.
    pub async fn settle_regions(&self) -> IoResult {
        let settle = move |owner: Rc<Owner>| async move {
            while let Err(MemberFailures(failures)) = owner.shared.regions.settle(&*owner).await {
                owner.members_failed(failures).await?;
            }
            Ok(())
        };
        self.on_owner(0, move |owner| Box::pin(settle(owner))).await
    }

    /// Choices of an operator about the upkeep.
    pub fn maintenance(&self) -> Maintenance {
        self.shared.look_at_table(|table| table.maintenance)
    }

    /// Makes choices about the upkeep durable. They hold from then on. On a core.
    ///
    /// # Errors
    /// What the commit says.
    pub async fn set_maintenance(&self, maintenance: Maintenance) -> IoResult {
        self.note(move |table| table.maintenance = maintenance).await
    }

    /// Whether a scheduled scrub may run now: see [`Table::allows_scheduled_scrub`]. On a core.
    pub fn allows_scheduled_scrub(&self) -> bool {
        let now_ns = self.wall_ns();
        self.shared.members.is_healthy()
            && self.shared.look_at_table(|table| table.allows_scheduled_scrub(now_ns))
    }

    /// Whether a scheduled scrub is due, and may run now. On a core.
    pub fn is_scrub_due(&self) -> bool {
        let now_ns = self.wall_ns();
        let is_due = |table: &Table| table.next_scrub_ns(now_ns).is_some_and(|due_ns| due_ns <= now_ns);
        self.shared.look_at_table(is_due) && self.allows_scheduled_scrub()
    }

    /// Commits a change of the table that concerns no member, e.g. how far a scrub is.
    ///
    /// # Errors
    /// What the commit says.
    pub async fn note(&self, change: impl Fn(&mut Table) + Send + 'static) -> IoResult {
        self.owner();
        self.shared.at_home(move |home| Box::pin(async move { home.note(change).await })).await
    }

    async fn on_owner<R, W>(&self, stripe: u64, work: W) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: FnOnce(Rc<Owner>) -> LocalFuture<Result<R, IoError>> + Clone + Send + 'static,
    {
        let owner = self.owner();
        match owner.owns(stripe) {
            true => work(owner).await,
            false => owner.forward(stripe, work).await,
        }
    }
}
