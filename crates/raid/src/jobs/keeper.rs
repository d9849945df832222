//! The keeper: looks what is to be done, does the most urgent, looks again.

use super::contradictions::Reported;
use super::scrub::Scrub;
use super::spares::Incoming;
use super::status::{JOB, Kind, Log, Progress};
use super::throttle::{Pace, Throttle};
use super::{Options, Shared, State};
use crate::Uuid;
use crate::array::members::{Attached, SlotState};
use crate::array::{Array, Before};
use crate::metadata::intent_bitmap::NEED_SYNC;
use block::{Channel, IoError};
use reactor::{Core, Sleep};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// How often an idle keeper, or one that does nothing urgent, looks whether a member has failed.
pub(super) const LOOK_NS: u64 = 100_000_000;

/// See the module.
pub(super) struct Keeper {
    pub shared: Arc<Shared>,
    pub core: Core,
    /// Slots that could not be filled, with the state that each had then. The keeper leaves such a
    /// slot alone until its state or something else changes.
    blocked: HashMap<usize, SlotState>,
    /// The scrub that is under way.
    pub scrub: Option<Scrub>,
    /// How fast jobs may go.
    pub throttle: RefCell<Throttle>,
    /// The slot that a rebuild fills now.
    pub rebuilding: Cell<Option<usize>>,
    /// The group of that slot has no redundancy left.
    is_unprotected: Cell<bool>,
    /// When each slot's read errors were last reported.
    pub warned: RefCell<HashMap<usize, u64>>,
    /// The last event about contradictions.
    pub contradictions: Cell<Reported>,
    /// Regions could not be synced, and are left alone until something changes.
    pub is_sync_blocked: bool,
    /// The reshape could not continue, and is left alone until something changes.
    pub is_reshape_blocked: bool,
}

/// A device that fills a slot.
#[derive(Clone)]
pub(super) struct Filler {
    pub uuid: Uuid,
    pub before: Before,
    /// The device, while a live member is copied onto it.
    pub copy: Option<Attached>,
}

/// Keeps an array until its handle is gone.
pub(super) async fn keep(shared: Arc<Shared>, channel: Rc<dyn Channel>) {
    let mut keeper = Keeper::new(shared.clone());
    keeper.resume_scrub();
    while !keeper.must_end() {
        if shared.look(|state| std::mem::take(&mut state.log.is_stale)) {
            keeper.blocked.clear();
            (keeper.is_reshape_blocked, keeper.is_sync_blocked) = (false, false);
        }
        keeper.end_detached();
        keeper.report_contradictions();
        if !keeper.step().await {
            keeper.rest().await;
        }
    }
    drop(channel);
    shared.change(|state| state.has_ended = true);
}

impl Keeper {
    /// A keeper on the current core that does nothing yet.
    pub fn new(shared: Arc<Shared>) -> Keeper {
        let core = reactor::current();
        let throttle = RefCell::new(Throttle::new(shared.options.pace, core.now_ns()));
        Keeper {
            shared,
            core,
            blocked: HashMap::new(),
            scrub: None,
            is_sync_blocked: false,
            is_reshape_blocked: false,
            throttle,
            rebuilding: Cell::new(None),
            is_unprotected: Cell::new(false),
            warned: RefCell::default(),
            contradictions: Cell::default(),
        }
    }

    pub fn array(&self) -> &Arc<Array> {
        &self.shared.array
    }

    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    fn must_end(&self) -> bool {
        self.shared.look(|state| state.is_stopping) || self.array().is_frozen()
    }

    /// Whether a job must stop here: nothing may run.
    pub fn must_stop(&self) -> bool {
        self.must_end() || self.shared.look(|state| state.is_paused)
    }

    /// Whether something more urgent than a sync or a scrub can be done.
    pub fn is_urgent(&self) -> bool {
        let can_fill =
            |slot: &usize| self.array().members().is_filling(*slot) || self.shared.has_device(*slot);
        let mut empty = self.shared.empty_slots().into_iter().filter(|slot| !self.is_blocked(*slot));
        empty.any(|slot| can_fill(&slot))
            || self.given_slot().is_some()
            || !self.detached_slots().is_empty()
            || self.can_replace_over_budget()
    }

    /// Does one thing; whether there was one.
    async fn step(&mut self) -> bool {
        if self.must_stop() {
            return false;
        }
        if self.array().is_reshaping() {
            return self.work_on_reshape().await;
        }
        if self.fill_empty().await {
            return true;
        }
        let members = self.array().members().clone();
        let slots = self.array().config().geometry.members();
        if let Some(slot) = (0..slots).find(|slot| members.is_filling(*slot) && !self.is_blocked(*slot)) {
            self.fill(vec![slot]).await;
            return true;
        }
        if let Some((slot, incoming)) =
            self.given_slot().and_then(|slot| Some((slot, self.shared.take_given(slot)?)))
        {
            self.start_filling(slot, incoming).await;
            return true;
        }
        if self.replace_over_budget().await {
            return true;
        }
        if !self.is_sync_blocked && self.array().count_regions(NEED_SYNC) > 0 {
            self.resync().await;
            return true;
        }
        self.scrub_on().await
    }

    pub(super) async fn start_filling(&mut self, slot: usize, incoming: Incoming) {
        let Incoming { attached, uuid, before } = incoming.clone();
        let name = attached.device.name().to_owned();
        let members = self.array().members().clone();
        let was_empty = members.state(slot) == SlotState::Out;
        match self.array().start_filling(slot, uuid, attached.clone()).await {
            Ok(()) => {
                let copy = (!was_empty).then_some(attached);
                self.shared.look(|state| state.filling.insert(slot, Filler { uuid, before, copy }));
                self.event(format!("{name} is to be filled as slot {slot}"));
            }
            Err(_) if !was_empty && !members.is_live(slot) => self.rebuild_instead(slot, uuid, attached),
            Err(error) => {
                self.event(format!("{name} cannot become slot {slot}: {error:?}"));
                // The array has grown, or moves a window: nothing is wrong with the device.
                if matches!(error, IoError::NoSpace | IoError::Invalid) {
                    self.give_back(slot, incoming);
                }
            }
        }
        // Not earlier: at every moment the device is known to be in use.
        self.shared.look(|state| state.starting = None);
    }

    /// Whether a slot could not be filled, and nothing has changed since.
    pub fn is_blocked(&self, slot: usize) -> bool {
        self.blocked.get(&slot) == Some(&self.array().members().state(slot))
    }

    /// Leaves a slot alone until something changes.
    pub fn block(&mut self, slot: usize) {
        self.blocked.insert(slot, self.array().members().state(slot));
    }

    /// Forgets the devices that the array has detached while nothing was filling their slots.
    fn end_detached(&self) {
        self.detached_slots().into_iter().for_each(|slot| self.end_filler(slot));
    }

    /// Slots whose devices were filling them, and have been detached by the array.
    fn detached_slots(&self) -> Vec<usize> {
        let members = self.array().members();
        let mut slots: Vec<usize> = self.shared.look(|state| state.filling.keys().copied().collect());
        slots.retain(|slot| !members.is_filling(*slot));
        slots.sort_unstable();
        slots
    }

    /// Forgets the device that was filling a slot, and that the array has detached. When the member
    /// failed that was copied, its slot is rebuilt onto the device of the copy.
    pub fn end_filler(&self, slot: usize) {
        match self.shared.look(|state| state.filling.get(&slot).cloned()) {
            Some(Filler { uuid, copy: Some(attached), .. }) if !self.array().members().is_live(slot) => {
                self.rebuild_instead(slot, uuid, attached);
            }
            Some(_) => self.event(format!("the device that was filling slot {slot} has failed")),
            None => {}
        }
        // Not earlier: a copy is known to be in use until it waits for its slot.
        self.shared.look(|state| state.filling.remove(&slot));
    }

    /// Gives a slot the device onto which its failed member was being copied. The device lacks
    /// writes that came after the failure, so the rebuild begins at the start.
    fn rebuild_instead(&self, slot: usize, uuid: Uuid, attached: Attached) {
        let name = attached.device.name().to_owned();
        self.event(format!("slot {slot}: its member failed while it was copied: {name} is rebuilt instead"));
        self.give_back(slot, Incoming { attached, uuid, before: Before::Anything });
    }

    /// Lets a device wait for a slot, or for any slot when another device waits for that one. A
    /// former member belongs to its own slot only.
    fn give_back(&self, slot: usize, incoming: Incoming) {
        self.shared.look(|state| match state.given.iter().any(|(other, _)| *other == slot) {
            false => state.given.push((slot, incoming)),
            true if incoming.before != Before::Member => state.dedicated.push(incoming),
            true => {}
        });
    }

    /// A slot that a device was given for.
    fn given_slot(&self) -> Option<usize> {
        let slots = |state: &mut State| state.given.iter().map(|(slot, _)| *slot).collect::<Vec<_>>();
        self.shared.look(slots).into_iter().find(|slot| !self.is_blocked(*slot))
    }

    /// Waits for a request, or until it is time to look again.
    async fn rest(&self) {
        let wakers = self.shared.look(|state| {
            state.log.is_at_rest = true;
            if !state.is_paused {
                state.log.running.clear();
            }
            std::mem::take(&mut state.wakers)
        });
        wakers.into_iter().for_each(std::task::Waker::wake);
        self.array().samples().watch(false);
        let mut timer = self.core.sleep(LOOK_NS);
        std::future::poll_fn(|cx| {
            let is_stale = self.shared.look(|state| {
                if !state.log.is_stale {
                    state.wakers.push(cx.waker().clone());
                }
                state.log.is_stale
            });
            if is_stale { Poll::Ready(()) } else { Pin::new(&mut timer).poll(cx) }
        })
        .await;
        self.shared.look(|state| state.log.is_at_rest = false);
    }

    /// Remembers that something happened.
    pub fn event(&self, text: String) {
        self.event_of(JOB, text);
    }

    /// Remembers that something happened, under a word of its own.
    pub fn event_of(&self, what: &'static str, text: String) {
        tracing::info!(array = self.array().config().name, what, "{text}");
        let at_ns = self.array().wall_ns();
        self.shared.look(|state| state.log.event(at_ns, what, text));
    }

    /// Changes what the keeper tells.
    pub fn log<R>(&self, change: impl FnOnce(&mut Log) -> R) -> R {
        self.shared.look(|state| change(&mut state.log))
    }

    /// Reports the progress of a job that runs alone.
    pub fn show(&self, kind: Kind, slot: Option<usize>, done_bytes: u64, bytes_per_s: u64) {
        self.log(|log| log.running.clear());
        self.show_too(kind, slot, done_bytes, bytes_per_s);
    }

    /// Adds a job to those that run.
    pub fn show_too(&self, kind: Kind, slot: Option<usize>, done_bytes: u64, bytes_per_s: u64) {
        let geometry = &self.array().config().geometry;
        let total_bytes = geometry.group_stripes * u64::from(geometry.strip_bytes);
        let left = total_bytes.saturating_sub(done_bytes);
        let eta_s = (bytes_per_s > 0).then(|| left / bytes_per_s);
        let is_urgent = self.pace().is_urgent;
        let progress = Progress { kind, slot, done_bytes, total_bytes, bytes_per_s, eta_s, is_urgent };
        self.log(|log| log.running.push(progress));
    }

    /// Whether a stripe may be begun now; otherwise the time to ask again. `is_work`: whether it
    /// takes any.
    pub fn begin_stripe(&self, is_work: bool) -> Result<(), Sleep> {
        if !is_work {
            return Ok(());
        }
        self.begin(u64::from(self.array().config().geometry.strip_bytes))
    }

    /// Notes whether the rebuild that runs is urgent.
    pub fn look_at_redundancy(&self) {
        let is_unprotected = |slot| self.array().is_unprotected(slot);
        self.is_unprotected.set(self.rebuilding.get().is_some_and(is_unprotected));
    }

    /// The pace that an operator set. Without one, a rebuild of a group without redundancy is
    /// urgent.
    fn pace(&self) -> Pace {
        let usual = self.options().pace;
        let is_urgent = usual.is_urgent || self.is_unprotected.get();
        self.shared.look(|state| state.pace).unwrap_or(Pace { is_urgent, ..usual })
    }

    /// Whether work on so many bytes of each member may begin now; otherwise the time to ask again.
    pub fn begin(&self, bytes: u64) -> Result<(), Sleep> {
        let now_ns = self.core.now_ns();
        let mut throttle = self.throttle.borrow_mut();
        if throttle.is_due(now_ns) {
            let samples = self.array().samples();
            self.look_at_redundancy();
            throttle.set_pace(self.pace());
            throttle.look(now_ns, &samples.take());
            samples.watch(true);
            self.warn_of_read_errors();
            self.report_contradictions();
        }
        throttle.begin(now_ns, bytes).map_err(|at| self.core.sleep(at.saturating_sub(now_ns)))
    }

    /// Stripes that a job has in flight.
    pub fn window(&self) -> usize {
        let geometry = &self.array().config().geometry;
        let stripe = geometry.group_members() * geometry.strip_bytes as usize;
        (self.options().window_bytes / stripe).clamp(1, MOST_STRIPES)
    }
}

/// Stripes in flight at most: each is looked at whenever one ends.
const MOST_STRIPES: usize = 32;

impl Shared {
    /// Reads the state, or changes parts of it that no task waits for.
    pub(super) fn look<R>(&self, look: impl FnOnce(&mut State) -> R) -> R {
        look(&mut self.lock())
    }
}
