//! A virtqueue on the core that serves it.
//!
//! ```text
//!   kick fd ─► poll: wake a slot per request ─► slot: pop ─► execute ─► push_used ┐
//!                                                       ▲─────────────────────────┘
//!   call fd ◄─ flush: publish all used entries since the last time
//! ```
//!
//! A *slot* is a task that serves one request at a time and pops the next one itself. Slots are
//! created on demand and never destroyed while the ring runs. Over a device that completes at once,
//! one slot serves whole batches. Over others, one slot is woken for each request that waits.

use super::request::{Disk, DiskConfig};
use super::signal::{Call, ErrorEvent, Interrupt};
use exports::{Error, QueueStats};
use reactor::{Core, CoreRef, ServingSlots, Source, SourceHandle, current};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use virtio::blk::ParseError;
use virtio::device::{Chain, RingError, RingState, VirtQueue};

/// Requests that one slot completes without waiting before it yields: the core then publishes them
/// and polls other sources.
const BATCH: u32 = 64;

/// Everything a core needs to serve a ring.
pub(crate) struct RingParts {
    pub(crate) ring: VirtQueue,
    pub(crate) size: u16,
    pub(crate) disk: DiskConfig,
    pub(crate) kick: Option<Arc<OwnedFd>>,
    pub(crate) call: Option<Call>,
    /// Signalled when the ring stops because of an error.
    pub(crate) err: Option<ErrorEvent>,
    /// The guest may have more memory than is mapped: the owner of `err` maps it and restarts the
    /// ring.
    pub(crate) may_have_more_memory: bool,
    pub(crate) stats: Arc<QueueStats>,
    /// The export's name and the queue's number, for logs.
    pub(crate) name: String,
    pub(crate) index: usize,
}

thread_local! {
    /// The rings of this core, by number, so that control messages find them.
    static SERVED: RefCell<HashMap<u64, Rc<Served>>> = RefCell::default();
}

/// The control side's handle of a ring that a core serves.
pub(crate) struct Serving {
    core: CoreRef,
    id: u64,
}

impl Serving {
    /// Starts the ring on `core`.
    pub(crate) fn start(core: &CoreRef, parts: RingParts) -> Result<Serving, Error> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        core.call(move |core| {
            let served = Served::start(core, parts)?;
            SERVED.with_borrow_mut(|all| all.insert(id, served));
            Ok::<_, Error>(())
        })??;
        Ok(Serving { core: core.clone(), id })
    }

    /// Stops the ring: no new request is popped, and those in flight are completed and published.
    pub(crate) fn stop(self) -> Result<RingState, Error> {
        let id = self.id;
        Ok(self.core.block_on(move |_| async move {
            let served = SERVED.with_borrow_mut(|all| all.remove(&id)).expect("a ring is stopped once");
            served.stop().await
        })?)
    }

    /// The ring's current position; it keeps running.
    pub(crate) fn state(&self) -> Result<RingState, Error> {
        let id = self.id;
        let state = move |served: &HashMap<u64, Rc<Served>>| served[&id].ring.borrow().state();
        Ok(self.core.call(move |_| SERVED.with_borrow(state))?)
    }

    /// Replaces the interrupt, and raises it once: an interrupt through the old one may be lost.
    ///
    /// # Errors
    /// When the core cannot open the new one. Then the ring has none.
    pub(crate) fn set_call(&self, call: Option<Call>) -> Result<(), Error> {
        let id = self.id;
        self.core.call(move |_| {
            let served = SERVED.with_borrow(|all| all.get(&id).cloned());
            let Some(served) = served else { return Ok(()) };
            // The old one is dropped first: the new one takes its ring.
            served.call.take();
            served.call.replace(open_call(call)?);
            served.interrupt();
            Ok(())
        })?
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// No new request is popped; slots end when they are done.
    Stopping,
    /// The guest corrupted the ring: it stops until it is set up again.
    Broken,
}

/// A ring of this core.
struct Served {
    ring: RefCell<VirtQueue>,
    disk: Disk,
    state: Cell<State>,
    /// Whether used entries wait to be published.
    is_dirty: Cell<bool>,
    /// Losses of guest memory in this process that were checked.
    losses: Cell<usize>,
    /// Whether this guest has lost memory.
    has_lost: Cell<bool>,
    /// Whether the device completed the last request at once: a single slot is enough.
    is_inline: Cell<bool>,
    slots: ServingSlots,
    max_slots: usize,
    handle: OnceCell<SourceHandle>,
    weak: std::rc::Weak<Served>,
    kick: Option<Arc<OwnedFd>>,
    call: RefCell<Option<Box<dyn Interrupt>>>,
    err: Option<ErrorEvent>,
    may_have_more_memory: bool,
    stats: Arc<QueueStats>,
    name: String,
    index: usize,
}

impl Served {
    fn start(core: &Core, parts: RingParts) -> Result<Rc<Served>, Error> {
        let disk = Disk::open(parts.disk)?;
        let call = open_call(parts.call)?;
        let served = Rc::new_cyclic(|weak| Served {
            ring: RefCell::new(parts.ring),
            disk,
            state: Cell::new(State::Running),
            // The first poll publishes: a predecessor may have died before it could interrupt.
            is_dirty: Cell::new(true),
            losses: Cell::new(0),
            has_lost: Cell::new(false),
            is_inline: Cell::new(true),
            slots: ServingSlots::new(parts.size.into()),
            max_slots: parts.size.into(),
            handle: OnceCell::new(),
            weak: weak.clone(),
            kick: parts.kick,
            call: RefCell::new(call),
            err: parts.err,
            may_have_more_memory: parts.may_have_more_memory,
            stats: parts.stats,
            name: parts.name,
            index: parts.index,
        });
        let source: Rc<dyn Source> = served.clone();
        let _ = served.handle.set(core.register(&source));
        Ok(served)
    }

    async fn stop(self: Rc<Self>) -> RingState {
        self.state.set(State::Stopping);
        self.slots.wake_all();
        self.slots.all_ended().await;
        self.publish();
        self.ring.borrow().state()
    }

    /// The task of a slot.
    async fn serve(self: Rc<Self>, slot: u32) {
        let mut chain = Chain::default();
        let mut batch = 0;
        loop {
            let next = Next { served: &self, slot, chain: &mut chain, batch: &mut batch };
            if !next.await {
                break;
            }
            let written = self.execute(&chain, &mut batch).await;
            match written {
                Ok(written) => {
                    self.ring.borrow_mut().push_used(&mut chain, written);
                    self.is_dirty.set(true);
                    self.handle().activate();
                }
                Err(error) => {
                    self.ring.borrow_mut().abandon(&mut chain);
                    self.break_ring(&error);
                }
            }
        }
        self.slots.end();
    }

    /// Executes a request, and records whether the device completed it at once.
    async fn execute(&self, chain: &Chain, batch: &mut u32) -> Result<u32, ParseError> {
        let mut request = std::pin::pin!(self.disk.execute(chain, &self.stats));
        let mut is_first_poll = true;
        poll_fn(|cx| {
            let written = request.as_mut().poll(cx);
            if std::mem::replace(&mut is_first_poll, false) {
                self.is_inline.set(written.is_ready());
                if written.is_pending() {
                    *batch = 0;
                }
            }
            written
        })
        .await
    }

    fn handle(&self) -> &SourceHandle {
        self.handle.get().expect("set before any slot runs")
    }

    fn start_slot(&self, slot: u32) {
        let served = self.weak.upgrade().expect("the caller holds a reference");
        current().spawn(served.serve(slot));
    }

    /// Stops a ring that the guest corrupted, and signals its error event.
    #[cold]
    fn break_ring(&self, error: &dyn std::error::Error) {
        if self.state.replace(State::Broken) == State::Running {
            tracing::warn!(export = self.name, queue = self.index, %error, "ring stopped by an error");
            self.signal_error();
        }
    }

    /// Handles a chain that cannot be popped: either the guest corrupted the ring, or the chain
    /// lies in unmapped memory.
    #[cold]
    fn fail_pop(&self, error: &RingError) {
        if !(self.may_have_more_memory && matches!(error, RingError::OutsideMemory { .. })) {
            return self.break_ring(error);
        }
        if self.state.replace(State::Broken) == State::Running {
            tracing::debug!(export = self.name, queue = self.index, %error, "ring waits for memory");
            self.signal_error();
        }
    }

    fn signal_error(&self) {
        if let Some(Err(error)) = self.err.as_ref().map(ErrorEvent::signal) {
            tracing::warn!(export = self.name, queue = self.index, %error, "cannot signal the ring's error event");
        }
    }

    fn publish(&self) {
        if self.is_dirty.replace(false) && !self.has_lost_memory() && self.ring.borrow_mut().publish() {
            self.interrupt();
        }
    }

    /// Whether memory of the guest was lost. Data may then have been written to zero pages that the
    /// guest does not have, so no request may be reported as completed any more.
    fn has_lost_memory(&self) -> bool {
        let losses = virtio::memory_losses();
        if self.losses.replace(losses) != losses && self.ring.borrow().memory().is_lost() {
            self.has_lost.set(true);
            self.break_ring(&RingError::MemoryLost);
        }
        self.has_lost.get()
    }

    fn interrupt(&self) {
        if let Some(call) = &mut *self.call.borrow_mut() {
            self.stats.count_interrupt();
            call.raise();
        }
    }
}

impl Source for Served {
    fn flush(&self) {
        self.publish();
    }

    fn poll(&self) -> usize {
        if self.state.get() != State::Running {
            return 0;
        }
        let wanted = if self.is_inline.get() { 1 } else { self.max_slots };
        let available = self.ring.borrow().available_hint(wanted);
        self.slots.wake_for(available, |slot| self.start_slot(slot));
        available
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.kick.as_ref().map(|fd| fd.as_raw_fd())
    }

    fn arm(&self) -> bool {
        match self.state.get() {
            // A ring without a kick must be polled.
            State::Running => self.kick.is_some() && !self.ring.borrow_mut().enable_notifications(),
            State::Stopping | State::Broken => true,
        }
    }

    fn disarm(&self) {
        self.ring.borrow_mut().disable_notifications();
    }
}

/// Waits for the next chain; returns `false` when the slot is to end.
struct Next<'a> {
    served: &'a Served,
    slot: u32,
    chain: &'a mut Chain,
    /// Requests completed since the slot last waited.
    batch: &'a mut u32,
}

impl Future for Next<'_> {
    type Output = bool;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool> {
        let Next { served, slot, chain, batch } = self.get_mut();
        if !served.slots.may_look(*slot) {
            return Poll::Pending;
        }
        match served.state.get() {
            State::Running if **batch < BATCH => {}
            State::Running => {
                **batch = 0;
                served.slots.look_again(*slot, cx.waker());
                return Poll::Pending;
            }
            State::Stopping => return Poll::Ready(false),
            State::Broken => return served.wait(cx, *slot, batch),
        }
        match served.ring.borrow_mut().pop(chain) {
            Ok(true) => {
                **batch += 1;
                return Poll::Ready(true);
            }
            Ok(false) => {}
            Err(error) => served.fail_pop(&error),
        }
        served.wait(cx, *slot, batch)
    }
}

impl Served {
    fn wait(&self, cx: &Context<'_>, slot: u32, batch: &mut u32) -> Poll<bool> {
        *batch = 0;
        self.slots.wait(slot, cx.waker());
        Poll::Pending
    }
}

/// Opens an interrupt on the calling core.
fn open_call(call: Option<Call>) -> Result<Option<Box<dyn Interrupt>>, Error> {
    let failed = |source| Error::System { action: "prepare a queue's call event", source };
    call.map(Call::open).transpose().map_err(failed)
}
