//! The keeper: looks what is to be done, does the most urgent, looks again.

use super::contradictions::Reported;
use super::scrub::Scrub;
use super::spares::Incoming;
use super::status::{JOB, Kind, Log, Progress};
use super::throttle::{Pace, Throttle};
use super::{Options, Shared, State};
use crate::Uuid;
use crate::array::{Array, Before};
use crate::metadata::region_map::NEED_SYNC;
use block::Channel;
use reactor::{Core, Sleep};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
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
    /// Who is being filled, as far as this keeper started it.
    pub filling: HashMap<usize, (Uuid, Before)>,
    /// Slots that could not be filled and are left alone until something changes.
    pub blocked: HashSet<usize>,
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
    /// Regions cannot be synced before members come back.
    pub is_sync_blocked: bool,
    /// The change of shape could not go on, and is left alone until something changes.
    pub is_reshape_blocked: bool,
}

/// Keeps an array until its handle is gone.
pub(super) async fn keep(shared: Arc<Shared>, channel: Rc<dyn Channel>) {
    let core = reactor::current();
    let throttle = RefCell::new(Throttle::new(shared.options.pace, core.now_ns()));
    let mut keeper = Keeper {
        shared: shared.clone(),
        core,
        filling: HashMap::new(),
        blocked: HashSet::new(),
        scrub: None,
        is_sync_blocked: false,
        is_reshape_blocked: false,
        throttle,
        rebuilding: Cell::new(None),
        is_unprotected: Cell::new(false),
        warned: RefCell::default(),
        contradictions: Cell::default(),
    };
    keeper.resume_scrub();
    while !keeper.must_end() {
        if shared.look(|state| std::mem::take(&mut state.log.is_stale)) {
            keeper.blocked.clear();
            keeper.is_reshape_blocked = false;
        }
        keeper.report_contradictions();
        if !keeper.step().await {
            keeper.rest().await;
        }
    }
    drop(channel);
    shared.change(|state| state.has_ended = true);
}

impl Keeper {
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
        let mut empty = self.shared.empty_slots().into_iter().filter(|slot| !self.blocked.contains(slot));
        empty.any(|slot| can_fill(&slot))
            || self.shared.look(|state| !state.given.is_empty())
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
        if let Some(slot) = (0..slots).find(|slot| members.is_filling(*slot) && !self.blocked.contains(slot))
        {
            self.fill(vec![slot]).await;
            return true;
        }
        let given = self.shared.look(|state| state.given.first().map(|(slot, _)| *slot));
        if let Some((slot, incoming)) = given.and_then(|slot| Some((slot, self.shared.take_given(slot)?))) {
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
        let Incoming { attached, uuid, before } = incoming;
        let name = attached.device.name().to_owned();
        match self.array().start_filling(slot, uuid, attached).await {
            Ok(()) => {
                self.filling.insert(slot, (uuid, before));
                self.event(format!("{name} is to be filled as slot {slot}"));
            }
            Err(error) => self.event(format!("{name} cannot become slot {slot}: {error:?}")),
        }
    }

    /// Waits until somebody wants something, or it is time to look again.
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

    /// Whether a stripe may be begun now; otherwise the time to ask again. `is_work`: whether it takes any.
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

    /// The pace that an operator set. Without one, a rebuild of a group without redundancy is urgent.
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
    /// Looks at the state, or changes what nobody waits for.
    pub(super) fn look<R>(&self, look: impl FnOnce(&mut State) -> R) -> R {
        look(&mut self.lock())
    }
}
