//! Filling slots: a rebuild from the others, the resync of a former member, a copy of a live one.
//!
//! Empty slots of one group are filled in one pass, which reads the other members once for all of
//! them. A device that comes while a pass runs joins it as long as little of the walk is done
//! ([`EARLY`]). Later, the pass ends first: the group has some redundancy sooner than if both were
//! filled together.

use super::keeper::{Filler, Keeper};
use super::pump::Pump;
use super::status::{Kind, Meter};
use crate::Uuid;
use crate::array::members::{SlotState, WINDOW};
use crate::array::{Before, Filled, FilledSlots, Wanted};
use crate::metadata::intent_bitmap::{NEED_SYNC, STALE};
use block::{IoError, IoResult};
use std::collections::BTreeSet;

/// The part of a walk that may lie between slots that are filled in one pass: a sixteenth.
const EARLY: u64 = 16;

/// The end of a step or of a checkpoint.
enum Ended {
    Step(u64, Result<FilledSlots, IoError>),
    Checkpoint(IoResult),
}

/// A slot, and the device that fills it.
struct Filling {
    slot: usize,
    uuid: Uuid,
    before: Before,
}

/// The progress of a pass.
struct Fill {
    /// The slots that it fills, all of one group. Those whose devices fail leave the list.
    slots: Vec<Filling>,
    /// Slots whose devices have failed.
    gone: Vec<usize>,
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
    /// When it was looked last whether a device has come that can join.
    looked_ns: u64,
    can_grow: bool,
    error: Option<IoError>,
}

impl Keeper {
    /// Works on empty slots of the groups that have lost most first; whether there was anything to
    /// do.
    pub(super) async fn fill_empty(&mut self) -> bool {
        let size = self.array().config().geometry.group_members();
        let mut seen = usize::MAX;
        for slot in self.shared.empty_slots() {
            let group = slot / size;
            if std::mem::replace(&mut seen, group) == group {
                continue;
            }
            for slot in self.waiting_slots(group) {
                if let Some(incoming) = self.shared.take_device(slot) {
                    self.start_filling(slot, incoming).await;
                    return true;
                }
            }
            let slots = self.slots_of_pass(group);
            if !slots.is_empty() {
                self.fill(slots).await;
                return true;
            }
        }
        false
    }

    /// Whether a slot is to be filled before the next window of a reshape: the next failure of a
    /// member would lose data.
    pub(super) fn must_fill_first(&self) -> bool {
        let is_waiting = |slot: &usize| {
            !self.is_blocked(*slot) && self.shared.has_device(*slot) && self.array().is_unprotected(*slot)
        };
        self.shared.empty_slots().iter().any(is_waiting)
    }

    /// Empty slots of a group that may take a device now. While a pass has come far there are none:
    /// it ends first.
    fn waiting_slots(&self, group: usize) -> Vec<usize> {
        let (members, filling) = (self.array().members(), self.filling_slots(group));
        let is_late = filling.iter().any(|slot| members.cursor(*slot) > self.early_steps());
        let is_empty = |slot: &usize| {
            !is_late
                && members.state(*slot) == SlotState::Out
                && !members.is_filling(*slot)
                && !self.is_blocked(*slot)
        };
        self.array().members().group_slots_of(group).filter(is_empty).collect()
    }

    /// Empty slots of a group that have a device which fills them.
    fn filling_slots(&self, group: usize) -> Vec<usize> {
        let members = self.array().members();
        let is_filled =
            |slot: &usize| members.is_filling(*slot) && !members.is_live(*slot) && !self.is_blocked(*slot);
        members.group_slots_of(group).filter(is_filled).collect()
    }

    /// Slots that the next pass over a group fills. Former members come first, which lack little.
    /// Of the others it takes the one that has come furthest, and those that are not far behind.
    fn slots_of_pass(&self, group: usize) -> Vec<usize> {
        let members = self.array().members();
        let mut slots = self.filling_slots(group);
        self.shared.look(|state| {
            let filler = |slot: &usize| state.filling.get(slot);
            let is_returning =
                |slot: &usize| filler(slot).is_some_and(|filler| filler.before == Before::Member);
            if slots.iter().any(is_returning) {
                slots.retain(is_returning);
            }
        });
        let furthest = slots.iter().map(|slot| members.cursor(*slot)).max().unwrap_or(0);
        slots.retain(|slot| members.cursor(*slot) + self.early_steps() >= furthest);
        slots
    }

    fn early_steps(&self) -> u64 {
        self.array().config().geometry.stripes() / EARLY
    }

    /// Fills slots of one group that have devices to be filled, until they are full, all devices
    /// fail, or the job must stop.
    pub(super) async fn fill(&mut self, slots: Vec<usize>) {
        let slots: Vec<Filling> = slots.into_iter().map(|slot| self.filling_of(slot)).collect();
        let Some(first) = slots.first() else { return };
        let members = self.array().members().clone();
        let kind = match (members.is_live(first.slot), first.before) {
            (true, _) => Kind::Replace,
            (false, Before::Member) => Kind::PartialResync,
            (false, _) => Kind::Rebuild,
        };
        let cursor = slots.iter().map(|filling| members.cursor(filling.slot)).min().unwrap_or(0);
        self.rebuilding.set((kind != Kind::Replace).then_some(first.slot));
        let now_ns = self.core.now_ns();
        let mut fill = Fill {
            slots,
            gone: Vec::new(),
            kind,
            next: cursor,
            cursor,
            done: BTreeSet::new(),
            is_checkpointing: false,
            checkpoint_ns: now_ns,
            checkpoint_cursor: cursor,
            looked_ns: now_ns,
            can_grow: false,
            error: None,
        };
        self.look_at_redundancy();
        self.run_fill(&mut fill).await;
        self.rebuilding.set(None);
        self.look_at_redundancy();
        self.end_fill(fill).await;
    }

    /// The member that fills a slot, perhaps since an earlier keeper.
    fn filling_of(&self, slot: usize) -> Filling {
        let array = self.array();
        let new = || {
            let members = array.members();
            let [_, incoming] = members.attached(slot);
            // The device may just have been detached: then its UUID is of no use.
            let uuid = members.incoming_uuid(slot).unwrap_or(array.table().members[slot].uuid);
            Filler { uuid, before: Before::Anything, copy: incoming.filter(|_| members.is_live(slot)) }
        };
        self.shared.look(|state| {
            let Filler { uuid, before, .. } = state.filling.entry(slot).or_insert_with(new);
            Filling { slot, uuid: *uuid, before: *before }
        })
    }

    async fn run_fill(&self, fill: &mut Fill) {
        let array = self.array().clone();
        let geometry = array.config().geometry;
        let strip_bytes = u64::from(geometry.strip_bytes);
        let Some(group) = fill.slots.first().map(|filling| filling.slot / geometry.group_members()) else {
            return;
        };
        let is_ours = |step: u64| geometry.group(geometry.stripe_at_step(step)) == group;
        let (steps, window) = (array.fill_steps(), self.window());
        let mut meter = Meter::new(self.core.now_ns(), geometry.step_offset(fill.cursor));
        let mut pump = Pump::new();
        loop {
            let mut timer = None;
            let must_stop = self.must_stop_fill(fill, group);
            while !must_stop && pump.len() < window && fill.next < steps.min(fill.cursor + WINDOW) {
                let step = fill.next;
                let wanted = if is_ours(step) { self.wanted(fill, step) } else { Vec::new() };
                if wanted.is_empty() {
                    fill.done.insert(step);
                    fill.next += 1;
                    continue;
                }
                if let Err(sleep) = self.begin_stripe(self.is_work(step, &wanted)) {
                    timer = Some(sleep);
                    break;
                }
                fill.next += 1;
                let array = array.clone();
                pump.push(async move { Ended::Step(step, array.fill_step(step, wanted).await) });
            }
            self.advance(fill);
            let now_ns = self.core.now_ns();
            let done_bytes = geometry.step_offset(fill.cursor);
            self.show_fill(fill, meter.rate(now_ns, done_bytes));
            if !must_stop && self.is_checkpoint_due(fill, now_ns, strip_bytes / geometry.groups as u64) {
                (fill.is_checkpointing, fill.checkpoint_ns) = (true, now_ns);
                fill.checkpoint_cursor = fill.cursor;
                let (array, slots) = (array.clone(), fill.list());
                pump.push(async move { Ended::Checkpoint(array.checkpoint_all(&slots).await) });
            }
            if pump.len() == 0 && (must_stop || fill.next == steps) {
                return;
            }
            match pump.next(timer).await {
                Some(Ended::Step(step, Ok(filled))) => self.note_step(fill, step, filled),
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

    fn must_stop_fill(&self, fill: &mut Fill, group: usize) -> bool {
        let now_ns = self.core.now_ns();
        if now_ns - fill.looked_ns >= super::keeper::LOOK_NS {
            fill.looked_ns = now_ns;
            let has_device = |slot: &usize| self.shared.has_device(*slot);
            fill.can_grow = fill.kind != Kind::Replace && self.waiting_slots(group).iter().any(has_device);
        }
        fill.error.is_some()
            || fill.slots.is_empty()
            || fill.can_grow
            || self.must_stop()
            || self.is_given_up(fill)
    }

    /// Slots that lack a step.
    fn wanted(&self, fill: &Fill, step: u64) -> Vec<Wanted> {
        let members = self.array().members();
        let lacks = |filling: &&Filling| members.cursor(filling.slot) <= step;
        let wanted = fill.slots.iter().filter(lacks);
        wanted.map(|filling| Wanted { slot: filling.slot, before: filling.before }).collect()
    }

    /// A guess, for the throttle: what counts is decided under the stripe's lock.
    fn is_work(&self, step: u64, wanted: &[Wanted]) -> bool {
        let bits = self.array().region_bits(self.array().config().geometry.stripe_at_step(step));
        wanted.iter().any(|wanted| wanted.before != Before::Member || bits & (STALE | NEED_SYNC) != 0)
    }

    /// Moves the cursors over the steps that are done.
    fn advance(&self, fill: &mut Fill) {
        while fill.cursor < fill.next && fill.done.remove(&fill.cursor) {
            fill.cursor += 1;
        }
        let members = self.array().members();
        for slot in fill.slots.iter().map(|filling| filling.slot) {
            if fill.error.is_none() && members.is_filling(slot) && members.cursor(slot) < fill.cursor {
                self.array().advance(slot, fill.cursor);
            }
        }
    }

    /// Notes what became of a step. A slot whose device has failed leaves the pass.
    fn note_step(&self, fill: &mut Fill, step: u64, filled: FilledSlots) {
        for (slot, result) in filled {
            match result {
                Ok(filled) => self.count(filled),
                Err(_) if !self.array().members().is_filling(slot) => {
                    let count = fill.slots.len();
                    fill.slots.retain(|filling| filling.slot != slot);
                    if fill.slots.len() < count {
                        fill.gone.push(slot);
                    }
                }
                Err(error) => fill.error = fill.error.or(Some(error)),
            }
        }
        if fill.error.is_none() {
            fill.done.insert(step);
        }
    }

    fn is_checkpoint_due(&self, fill: &Fill, now_ns: u64, stripe_bytes: u64) -> bool {
        let moved = fill.cursor - fill.checkpoint_cursor;
        let is_due = now_ns - fill.checkpoint_ns >= self.options().checkpoint_ns
            || moved * stripe_bytes >= self.options().checkpoint_bytes;
        fill.kind != Kind::Replace && !fill.is_checkpointing && moved > 0 && is_due
    }

    /// Whether a replacement was cancelled.
    fn is_given_up(&self, fill: &Fill) -> bool {
        fill.kind == Kind::Replace && self.shared.look(|state| state.is_cancelled)
    }

    /// Tells how far each slot is.
    fn show_fill(&self, fill: &Fill, bytes_per_s: u64) {
        let (members, geometry) = (self.array().members(), &self.array().config().geometry);
        self.log(|log| log.running.clear());
        for slot in fill.slots.iter().map(|filling| filling.slot) {
            let done_bytes = geometry.step_offset(members.cursor(slot));
            self.show_too(fill.kind, Some(slot), done_bytes, bytes_per_s);
        }
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
        for slot in &fill.gone {
            self.end_filler(*slot);
        }
        let array = self.array().clone();
        let is_full = fill.cursor == array.fill_steps();
        if fill.error.is_none() && !is_full && !self.is_given_up(&fill) {
            if fill.kind != Kind::Replace && !fill.slots.is_empty() && !array.is_frozen() {
                let _ = array.checkpoint_all(&fill.list()).await; // lost progress is made again
            }
            return;
        }
        for filling in &fill.slots {
            self.end_slot(&fill, filling).await;
        }
    }

    async fn end_slot(&mut self, fill: &Fill, filling: &Filling) {
        let array = self.array().clone();
        let slot = filling.slot;
        if !array.members().is_filling(slot) {
            return self.end_filler(slot);
        }
        if self.is_given_up(fill) {
            self.shared.look(|state| {
                state.is_cancelled = false;
                state.filling.remove(&slot);
            });
            array.read_errors().reset(slot); // else the next spare replaces the member
            let result = array.stop_filling(slot).await;
            return self.event(format!("the replacement of slot {slot} was given up: {result:?}"));
        }
        if let Some(error) = fill.error {
            self.block(slot);
            return self.event(format!("slot {slot} cannot be filled: {error:?}"));
        }
        match array.finish_filling(slot, filling.uuid).await {
            Ok(()) => {
                self.shared.look(|state| state.filling.remove(&slot));
                self.is_sync_blocked = false;
                self.log(|log| log.totals.jobs += 1);
                self.event(format!("slot {slot} is full"));
                let _ = array.settle_regions().await; // the next write of the map does as well
            }
            Err(_) if !array.members().is_filling(slot) => self.end_filler(slot),
            Err(error) => {
                self.block(slot);
                self.event(format!("slot {slot} is full and cannot become live: {error:?}"));
            }
        }
    }
}

impl Fill {
    fn list(&self) -> Vec<usize> {
        self.slots.iter().map(|filling| filling.slot).collect()
    }
}
