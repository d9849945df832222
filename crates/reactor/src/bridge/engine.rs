//! The core's side: a source that wakes slots. Each slot serves one request at a time.

use super::bells::Bells;
use super::{Command, Completion};
use crate::core::{Core, current};
use crate::cores::Cores;
use crate::remote::CoreRef;
use crate::ring::{Consumer, Producer};
use crate::serving_slots::ServingSlots;
use crate::source::{Source, SourceHandle};
use block::{Channel, Device, DeviceError, IoResult, Request};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

/// Requests that one slot completes without a pause before it lets the core publish them and serve
/// other sources.
const BATCH: u32 = 64;

/// The parts of a bridge that move to its core.
pub(super) struct EngineParts {
    pub(super) device: Arc<dyn Device>,
    pub(super) incoming: Consumer<Command>,
    pub(super) outgoing: Producer<Completion>,
    pub(super) bells: Arc<Bells>,
    pub(super) depth: u32,
}

thread_local! {
    /// The bridges that this core serves, by the number that messages carry.
    static SERVED: RefCell<HashMap<u64, Rc<Served>>> = RefCell::default();
}

/// The caller's handle of a bridge that a core serves.
pub(super) struct Engine {
    core: usize,
    id: u64,
}

impl Engine {
    pub(super) fn start(core: &CoreRef, parts: EngineParts) -> Result<Engine, DeviceError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let device = parts.device.clone();
        let started = core.call(move |core| {
            let served = Served::start(core, parts)?;
            SERVED.with_borrow_mut(|all| all.insert(id, served));
            Ok(())
        });
        started.map_err(|e| DeviceError::new(device.name(), "cannot be served").because(e))??;
        Ok(Engine { core: core.index(), id })
    }

    /// Stops the bridge, which must have no requests in flight, and closes the device's channel.
    pub(super) fn stop(&self, cores: &Cores) {
        let id = self.id;
        // A core that has ended has dropped the bridge.
        let _ = cores.get(self.core).block_on(move |_| async move {
            let served = SERVED.with_borrow_mut(|all| all.remove(&id));
            if let Some(served) = served {
                served.is_stopping.set(true);
                served.slots.wake_all();
                served.slots.all_ended().await;
            }
        });
    }
}

/// A bridge that this core serves.
struct Served {
    channel: Rc<dyn Channel>,
    incoming: RefCell<Consumer<Command>>,
    outgoing: RefCell<Producer<Completion>>,
    slots: ServingSlots,
    depth: usize,
    /// The device completed the last request at once, so a single slot is enough.
    is_inline: Cell<bool>,
    is_stopping: Cell<bool>,
    handle: OnceCell<SourceHandle>,
    weak: Weak<Served>,
    bells: Arc<Bells>,
}

impl Served {
    fn start(core: &Core, parts: EngineParts) -> Result<Rc<Served>, DeviceError> {
        let channel = parts.device.open_channel()?;
        let depth = parts.depth as usize;
        let served = Rc::new_cyclic(|weak| Served {
            channel,
            incoming: RefCell::new(parts.incoming),
            outgoing: RefCell::new(parts.outgoing),
            slots: ServingSlots::new(depth),
            depth,
            is_inline: Cell::new(true),
            is_stopping: Cell::new(false),
            handle: OnceCell::new(),
            weak: weak.clone(),
            bells: parts.bells,
        });
        let source: Rc<dyn Source> = served.clone();
        let _ = served.handle.set(core.register(&source));
        Ok(served)
    }

    /// Serves requests in one slot until the bridge stops.
    async fn serve(self: Rc<Self>, slot: u32) {
        let mut batch = 0;
        while let Some(command) = (Next { served: &self, slot, batch: &mut batch }).await {
            let result = self.execute(&command, &mut batch).await;
            // SAFETY: at most `depth` commands have no completion, and each completion belongs to
            // one. The caller pushed this command after it had popped the completion that was in
            // the cell.
            unsafe { self.outgoing.borrow_mut().push(Completion { slot: command.slot, result }) };
            self.handle().activate();
        }
        self.slots.end();
    }

    /// Runs a request, and notes whether the device completed it at once.
    #[inline]
    async fn execute(&self, command: &Command, batch: &mut u32) -> IoResult {
        let Command { op, flags, len, offset, data, .. } = *command;
        let req = Request { op, flags, len, data };
        let mut request = std::pin::pin!(self.channel.submit(&req, offset));
        let mut is_first_poll = true;
        poll_fn(|cx| {
            let result = request.as_mut().poll(cx);
            if std::mem::replace(&mut is_first_poll, false) {
                self.is_inline.set(result.is_ready());
                if result.is_pending() {
                    *batch = 0;
                }
            }
            result
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
}

impl Source for Served {
    fn flush(&self) {
        let mut outgoing = self.outgoing.borrow_mut();
        if outgoing.publish() {
            self.bells.wake_caller(outgoing.published());
        }
    }

    fn poll(&self) -> usize {
        let available = self.incoming.borrow_mut().available();
        if available > 0 {
            let wanted = if self.is_inline.get() { 1 } else { self.depth };
            self.slots.wake_for(available.min(wanted), |slot| self.start_slot(slot));
        }
        available
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.bells.core_fd())
    }

    fn arm(&self) -> bool {
        self.bells.arm_core();
        let is_idle = self.incoming.borrow_mut().available() == 0;
        if !is_idle {
            self.bells.disarm_core();
        }
        is_idle
    }

    fn disarm(&self) {
        self.bells.disarm_core();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.bells.say_goodbye();
    }
}

/// Waits for the next command; `None` when the slot must end.
struct Next<'a> {
    served: &'a Served,
    slot: u32,
    /// Requests completed since the slot last waited.
    batch: &'a mut u32,
}

impl Future for Next<'_> {
    type Output = Option<Command>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Command>> {
        let Next { served, slot, batch } = self.get_mut();
        if !served.slots.may_look(*slot) {
            return Poll::Pending;
        }
        if served.is_stopping.get() {
            return Poll::Ready(None);
        }
        if **batch == BATCH {
            **batch = 0;
            served.slots.look_again(*slot, cx.waker());
            return Poll::Pending;
        }
        let command = served.incoming.borrow_mut().pop();
        if command.is_some() {
            **batch += 1;
            return Poll::Ready(command);
        }
        **batch = 0;
        served.slots.wait(*slot, cx.waker());
        Poll::Pending
    }
}
