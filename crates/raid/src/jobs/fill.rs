//! Filling a slot: a rebuild from the others, the resync of a former member, a copy of a live one.

use super::keeper::Keeper;
use super::pump::Pump;
use super::status::{Kind, Meter};
use crate::Uuid;
use crate::array::members::WINDOW;
use crate::array::{Before, Filled};
use crate::metadata::region_map::{NEED_SYNC, STALE};
use block::{IoError, IoResult};
use std::collections::BTreeSet;

/// What has ended.
enum Ended {
    Step(u64, Result<Filled, IoError>),
    Checkpoint(IoResult),
}

/// Where a fill is.
struct Fill {
    slot: usize,
    uuid: Uuid,
    before: Before,
    kind: Kind,
    /// The next step of the walk over all stripes ([`crate::Geometry::stripe_at_step`]) to begin.
    next: u64,
    /// Every step below is done.
    cursor: u64,
    /// Steps above the cursor that are done.
    done: BTreeSet<u64>,
    is_checkpointing: bool,
    checkpoint_ns: u64,
    checkpoint_cursor: u64,
    error: Option<IoError>,
}

impl Keeper {
    /// Fills a slot that has a device to be filled, until it is full, the device fails, or the job must stop.
    pub(super) async fn fill(&mut self, slot: usize) {
        let (uuid, before) = self.who_fills(slot);
        let members = self.array().members().clone();
        let kind = match (members.is_live(slot), before) {
            (true, _) => Kind::Replace,
            (false, Before::Member) => Kind::PartialResync,
            (false, _) => Kind::Rebuild,
        };
        let cursor = members.cursor(slot);
        let mut fill = Fill {
            slot,
            uuid,
            before,
            kind,
            next: cursor,
            cursor,
            done: BTreeSet::new(),
            is_checkpointing: false,
            checkpoint_ns: self.core.now_ns(),
            checkpoint_cursor: cursor,
            error: None,
        };
        self.rebuilding.set((kind != Kind::Replace).then_some(slot));
        self.look_at_redundancy();
        self.run_fill(&mut fill).await;
        self.rebuilding.set(None);
        self.look_at_redundancy();
        self.end_fill(fill).await;
    }

    /// The member that fills a slot; known from its table when an earlier keeper has begun.
    fn who_fills(&mut self, slot: usize) -> (Uuid, Before) {
        if let Some(who) = self.filling.get(&slot) {
            return *who;
        }
        let table = self.array().table();
        let who = (table.members[slot].uuid, Before::Anything);
        self.filling.insert(slot, who);
        who
    }

    async fn run_fill(&self, fill: &mut Fill) {
        let array = self.array().clone();
        let geometry = array.config().geometry;
        let strip_bytes = u64::from(geometry.strip_bytes);
        let group = fill.slot / geometry.group_members();
        let is_ours = |step: u64| geometry.group(geometry.stripe_at_step(step)) == group;
        let before = fill.before;
        // A guess, for the throttle: what counts is decided under the stripe's lock.
        let is_work = |stripe: u64| {
            let bits = array.region_bits(stripe);
            before != Before::Member || bits & (STALE | NEED_SYNC) != 0
        };
        let (slot, window) = (fill.slot, self.window());
        let mut meter = Meter::new(self.core.now_ns(), geometry.step_offset(fill.cursor));
        let mut pump = Pump::new();
        loop {
            let mut timer = None;
            let must_stop = fill.error.is_some() || self.must_stop() || self.is_given_up(fill);
            while !must_stop
                && pump.len() < window
                && fill.next < geometry.stripes().min(fill.cursor + WINDOW)
            {
                let (step, stripe) = (fill.next, geometry.stripe_at_step(fill.next));
                let is_work = is_ours(step) && is_work(stripe);
                if let Err(sleep) = self.begin_stripe(is_work) {
                    timer = Some(sleep);
                    break;
                }
                fill.next += 1;
                if is_ours(step) {
                    let array = array.clone();
                    pump.push(
                        async move { Ended::Step(step, array.fill_stripe_of(slot, stripe, before).await) },
                    );
                }
            }
            while fill.cursor < fill.next && (!is_ours(fill.cursor) || fill.done.remove(&fill.cursor)) {
                fill.cursor += 1;
            }
            if fill.error.is_none() && array.members().is_filling(slot) {
                array.advance(slot, fill.cursor);
            }
            let done_bytes = geometry.step_offset(fill.cursor);
            let now_ns = self.core.now_ns();
            self.show(fill.kind, Some(slot), done_bytes, meter.rate(now_ns, done_bytes));
            if !must_stop && self.is_checkpoint_due(fill, now_ns, strip_bytes / geometry.groups as u64) {
                (fill.is_checkpointing, fill.checkpoint_ns) = (true, now_ns);
                fill.checkpoint_cursor = fill.cursor;
                let array = array.clone();
                pump.push(async move { Ended::Checkpoint(array.checkpoint(slot).await) });
            }
            if pump.len() == 0 && (must_stop || fill.next == geometry.stripes()) {
                return;
            }
            match pump.next(timer).await {
                Some(Ended::Step(step, Ok(filled))) => {
                    fill.done.insert(step);
                    self.count(filled);
                }
                Some(Ended::Step(_, Err(error))) => fill.error = fill.error.or(Some(error)),
                Some(Ended::Checkpoint(result)) => {
                    fill.is_checkpointing = false;
                    fill.error = fill.error.or(result.err());
                }
                None => {}
            }
            reactor::yield_now().await;
        }
    }

    fn is_checkpoint_due(&self, fill: &Fill, now_ns: u64, stripe_bytes: u64) -> bool {
        let moved = fill.cursor - fill.checkpoint_cursor;
        let is_due = now_ns - fill.checkpoint_ns >= self.options().checkpoint_ns
            || moved * stripe_bytes >= self.options().checkpoint_bytes;
        fill.kind != Kind::Replace && !fill.is_checkpointing && moved > 0 && is_due
    }

    /// Whether somebody has called a replacement off.
    fn is_given_up(&self, fill: &Fill) -> bool {
        fill.kind == Kind::Replace && self.shared.look(|state| state.is_cancelled)
    }

    fn count(&self, filled: Filled) {
        self.log(|log| match filled {
            Filled::Written => log.totals.filled += 1,
            Filled::Zeroed => log.totals.zeroed += 1,
            Filled::Skipped => log.totals.skipped += 1,
            Filled::Bad => log.totals.bad += 1,
        });
    }

    async fn end_fill(&mut self, fill: Fill) {
        let array = self.array().clone();
        let (slot, is_full) = (fill.slot, fill.cursor == array.config().geometry.stripes());
        if !array.members().is_filling(slot) {
            self.filling.remove(&slot);
            return self.event(format!("the device that was filling slot {slot} has failed"));
        }
        if self.is_given_up(&fill) {
            self.shared.look(|state| state.is_cancelled = false);
            self.filling.remove(&slot);
            array.read_errors().reset(slot); // else the next spare replaces the member
            let result = array.stop_filling(slot).await;
            return self.event(format!("the replacement of slot {slot} was given up: {result:?}"));
        }
        if let Some(error) = fill.error {
            self.blocked.insert(slot);
            return self.event(format!("slot {slot} cannot be filled: {error:?}"));
        }
        if !is_full {
            if fill.kind != Kind::Replace && !array.is_frozen() {
                let _ = array.checkpoint(slot).await; // what is lost is done again
            }
            return;
        }
        match array.finish_filling(slot, fill.uuid).await {
            Ok(()) => {
                self.filling.remove(&slot);
                self.is_sync_blocked = false;
                self.log(|log| log.totals.jobs += 1);
                self.event(format!("slot {slot} is full"));
                let _ = array.settle_regions().await; // the next write of the map does as well
            }
            Err(error) => {
                self.blocked.insert(slot);
                self.event(format!("slot {slot} is full and cannot become live: {error:?}"));
            }
        }
    }
}
