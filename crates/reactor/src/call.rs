//! Calls from one core to another, in memory that serves one call after the other.
//!
//! ```text
//!   calling core                                  called core
//!   Call::run ─── request ───► inbox (CoreRef) ─► CallRequest::start ─► a task
//!       ▲                                                                 │
//!       └───── the task is woken ◄── answer, or none ◄── Reply, dropped ◄─┘
//! ```
//!
//! A call is in two hands: [`Call`] is the caller's, and the message on its way, later the
//! [`Reply`], is the called core's. Claims, each with a model (`cfg(loom)`, `call/models.rs`):
//!
//! * One hand at a time has the content: a flag passes it on, and the answer passes it back.
//! * A caller that waits is woken by its answer. It leaves its task, and then looks at the flag
//!   again; the called core moves the flag, and then takes the task.
//! * A late wake of an earlier answer may reach the task of the next call, and takes it away. That
//!   task is polled, finds no answer, and leaves itself again.
//!
//! A core that ends drops its messages and its tasks, and with them the called hands: each of these
//! calls ends without an answer.

use crate::core::Core;
use crate::remote::{CoreRef, CoreStopped, Deliver, Refused};
use crate::sync::{AtomicBool, UnsafeCell, is_broken};
use crate::task::WaitingTask;
use std::future::{Future, poll_fn};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

/// A request of a core to another one.
pub trait CallRequest: Send + Sized + 'static {
    /// The answer.
    type Answer: Send + 'static;

    /// Whether the request arrives after all messages that were sent to its core before. One that
    /// need not takes the route between the two cores, which costs less.
    const IS_ORDERED: bool;

    /// Begins to carry out the request, on the called core. It ends when `reply` is used.
    fn start(self, core: &Core, reply: Reply<Self>);
}

/// The memory of a call: it serves one call at a time, and allocates once.
pub struct Call<Q: CallRequest>(Arc<Slot<Q>>);

/// The called core's hand of a call. Dropped without an answer, it ends the call as one to a core
/// that has ended.
pub struct Reply<Q: CallRequest>(Option<Arc<Slot<Q>>>);

/// The fields that an answer changes come first, in as few cache lines as possible.
#[repr(C)]
struct Slot<Q: CallRequest> {
    /// Whether the called core's hand has the content.
    is_called: AtomicBool,
    caller: WaitingTask,
    content: UnsafeCell<Content<Q>>,
}

/// The number of the variant comes first, next to a short answer.
#[repr(u8)]
enum Content<Q: CallRequest> {
    Empty,
    Request(Q),
    Answer(Result<Q::Answer, CoreStopped>),
}

// SAFETY: only the hand that has the content accesses it, as the flag says. Request and answer are
// `Send`.
unsafe impl<Q: CallRequest> Sync for Slot<Q> {}
// SAFETY: as above.
unsafe impl<Q: CallRequest> Send for Slot<Q> {}

impl<Q: CallRequest> Default for Call<Q> {
    fn default() -> Call<Q> {
        Call(Arc::new(Slot {
            is_called: AtomicBool::new(false),
            caller: WaitingTask::default(),
            content: UnsafeCell::new(Content::Empty),
        }))
    }
}

impl<Q: CallRequest> Call<Q> {
    /// Carries out a request on another core, and returns its answer. Waits while the core's inbox
    /// is full, and lets the other tasks of this core run meanwhile.
    ///
    /// # Errors
    /// If the core has ended, or ends before it answers.
    ///
    /// # Panics
    /// If an earlier future of this call was dropped before the call had ended.
    pub fn run<'a>(
        &'a mut self,
        core: &'a CoreRef,
        request: Q,
    ) -> impl Future<Output = Result<Q::Answer, CoreStopped>> + 'a {
        // The request goes into the call's memory at once, and is not a part of the future.
        self.fill(request);
        async move {
            while let Err(refused) = self.try_send(core) {
                if let Refused::Stopped = refused {
                    self.clear();
                    return Err(CoreStopped);
                }
                crate::yield_now().await;
            }
            poll_fn(|cx| self.poll_answer(cx)).await
        }
    }

    /// Whether the called core still works on the request.
    pub fn is_under_way(&self) -> bool {
        self.0.is_called.load(Ordering::Acquire)
    }

    fn fill(&mut self, request: Q) {
        assert!(!self.is_under_way(), "a call serves one request at a time");
        // SAFETY: this is the only hand.
        drop(unsafe { self.0.exchange(Content::Request(request)) });
    }

    fn clear(&mut self) {
        // SAFETY: the request was not sent, so the called core has no hand in this call.
        drop(unsafe { self.0.exchange(Content::Empty) });
    }

    fn try_send(&mut self, core: &CoreRef) -> Result<(), Refused> {
        // The called core has no hand in a call that was not sent.
        let sent = core.try_deliver(self.hand_over(), Q::IS_ORDERED);
        sent.inspect_err(|_| self.0.is_called.store(false, Ordering::Relaxed))
    }

    /// Makes the called core's hand, to be sent there by a queue that orders memory.
    fn hand_over(&mut self) -> Arc<Slot<Q>> {
        self.0.is_called.store(true, Ordering::Relaxed);
        self.0.clone()
    }

    fn poll_answer(&self, cx: &mut Context<'_>) -> Poll<Result<Q::Answer, CoreStopped>> {
        if self.is_under_way() {
            self.0.caller.set(cx.waker());
            if is_broken("a caller looks again after it has left its task") || self.is_under_way() {
                return Poll::Pending;
            }
        }
        // SAFETY: the flag says that the called core's hand is no more.
        match unsafe { self.0.exchange(Content::Empty) } {
            Content::Answer(answer) => Poll::Ready(answer),
            Content::Empty | Content::Request(_) => unreachable!("a call that was made has an answer"),
        }
    }
}

impl<Q: CallRequest> Slot<Q> {
    /// Takes the content and puts another in its place.
    ///
    /// # Safety
    /// The hand that this is called for has the content.
    unsafe fn exchange(&self, content: Content<Q>) -> Content<Q> {
        // SAFETY: by contract nothing else accesses the cell.
        self.content.with_mut(|place| unsafe { mem::replace(&mut *place, content) })
    }

    /// The request, when the called core's hand has arrived.
    fn accept(self: Arc<Self>) -> (Q, Reply<Q>) {
        // SAFETY: this is the called core's hand, on its way until now.
        match unsafe { self.exchange(Content::Empty) } {
            Content::Request(request) => (request, Reply(Some(self))),
            Content::Empty | Content::Answer(_) => unreachable!("a call brings a request"),
        }
    }

    /// Gives the content back with an answer. Called by the called core's hand, which ends here.
    fn answer(&self, answer: Result<Q::Answer, CoreStopped>) {
        // SAFETY: the called core's hand has the content until the flag moves.
        drop(unsafe { self.exchange(Content::Answer(answer)) });
        match is_broken("an answer is released with its flag") {
            false => self.is_called.store(false, Ordering::Release),
            true => self.is_called.store(false, Ordering::Relaxed),
        }
        self.caller.wake();
    }
}

impl<Q: CallRequest> Deliver for Slot<Q> {
    fn arrive(self: Arc<Self>, core: &Core) {
        let (request, reply) = self.accept();
        request.start(core, reply);
    }

    fn lose(&self) {
        self.answer(Err(CoreStopped));
    }
}

impl<Q: CallRequest> Reply<Q> {
    /// Answers the call.
    pub fn send(mut self, answer: Q::Answer) {
        if let Some(slot) = self.0.take() {
            slot.answer(Ok(answer));
        }
    }
}

impl<Q: CallRequest> Drop for Reply<Q> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.answer(Err(CoreStopped));
        }
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests;
