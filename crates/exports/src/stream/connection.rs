//! A connection on the core that serves it.
//!
//! ```text
//!             ┌── poll: recvmsg ─► Protocol::next ─► todo ─► slot: Protocol::serve ─┐
//!   socket ───┤                                                                     │
//!             └── flush: sendmsg ◄───────────── Link: Outbox ◄─────────────────────┘
//! ```
//!
//! A *slot* is a task that serves one request at a time; over a device that completes at once one slot serves whole
//! batches. A request counts from the moment it is taken until its reply is with the kernel, and so does its memory.
//!
//! ```text
//!   Open ──leave, end of stream──► Leaving ─┐   (no more is read; what is there is answered)
//!     ├────export stops──────────► Closing ─┼─► gone, when nothing is left to be answered
//!     └────broken───────────────► Broken ───┘   (nobody listens; what is in flight ends)
//! ```

use super::link::{Link, Parts, State};
use super::{Received, Store, Wire};
use crate::Error;
use reactor::{Core, ServingSlots, Source, current};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::RawFd;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

/// Requests that one slot completes without waiting before it lets the core send the replies and look elsewhere.
const BATCH: u32 = 64;
/// The same in bytes: the client takes one reply while the next is made.
const BATCH_BYTES: usize = 128 << 10;
/// Times that one turn of the core receives from one socket: others want theirs.
const RECEIVES: usize = 4;

/// What is spoken on a connection: from bytes to requests, and what becomes of them.
pub(crate) trait Protocol: Sized + 'static {
    /// A request that was understood and counts.
    type Job: 'static;

    /// Receives once, with what is due straight to where it belongs.
    ///
    /// # Errors
    /// What recvmsg(2) says, or TLS.
    fn receive(&self, wire: &Wire) -> io::Result<Received>;

    /// Goes on with what came until there is something to do. `is_closing`: the export stops, nothing new begins.
    fn next(&self, link: &Link, is_closing: bool) -> Found<Self::Job>;

    /// Bytes of data that go with a request.
    fn weight(job: &Self::Job) -> usize;

    /// Carries a request out and answers it.
    fn serve(&self, job: Self::Job, link: &Link) -> impl Future<Output = ()>;

    /// Gives up what has not come whole. With `is_closing` more may come; without, nothing does.
    fn give_up(&self, link: &Link, is_closing: bool);

    /// Requests that count but are not waited for when the connection ends: their clients still owe data that nobody
    /// wants.
    fn unfinished(&self) -> usize;
}

/// What a protocol needs to go on, or has found.
pub(crate) enum Found<J> {
    /// More bytes.
    NeedsBytes,
    /// A place for one more request, and memory for its data.
    NeedsRoom,
    /// A request.
    Job(J),
    /// Something that was dealt with at once.
    Done,
    /// The client takes its leave, or was told to.
    Leave,
    /// The stream makes no sense from here on.
    ProtocolError(String),
}

/// A connection that this core serves.
pub(crate) struct Connection<P: Protocol> {
    link: Link,
    protocol: P,
    /// The reader waits for bytes, not for room.
    wants_bytes: Cell<bool>,
    todo: RefCell<VecDeque<P::Job>>,
    /// Slots are to end.
    is_over: Cell<bool>,
    /// The device has completed the last request at once: a single slot is enough.
    is_inline: Cell<bool>,
    slots: ServingSlots,
    weak: Weak<Connection<P>>,
}

/// A connection, whatever is spoken on it.
pub(crate) trait Serving {
    /// Refuses what comes from now on; the connection ends when what came before has been answered.
    fn stop(&self);
    /// Waits until nothing of the connection is left.
    fn gone(&self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
}

impl<P: Protocol> Connection<P> {
    /// Begins to serve: at most `max_requests` at a time.
    pub(crate) fn start(
        core: &Core,
        parts: Parts,
        store: Store,
        max_requests: usize,
        protocol: P,
    ) -> Result<Rc<Connection<P>>, Error> {
        let link = Link::new(parts, store, max_requests)?;
        let connection = Rc::new_cyclic(|weak| Connection {
            link,
            protocol,
            wants_bytes: Cell::new(true),
            todo: RefCell::default(),
            is_over: Cell::new(false),
            is_inline: Cell::new(true),
            slots: ServingSlots::new(max_requests),
            weak: weak.clone(),
        });
        let source: Rc<dyn Source> = connection.clone();
        let _ = connection.link.handle.set(core.register(&source));
        Ok(connection)
    }

    /// The connection's life: ends when nothing of it is left on the core.
    pub(crate) async fn live(self: &Rc<Self>) {
        self.link.until(|| self.link.state() != State::Open).await;
        let is_answered = || self.is_answered();
        while !self.link.until_patiently(is_answered).await {
            self.disconnect("it does not take its replies");
        }
        self.is_over.set(true);
        self.slots.wake_all();
        self.slots.all_ended().await;
        self.link.wire().close();
        let (export, peer) = self.link.names();
        tracing::info!(export, peer, "client disconnected");
        self.link.go_to(State::Gone);
    }

    /// Whether every request that counts has been answered, and no other will.
    fn is_answered(&self) -> bool {
        self.link.state() != State::Open && self.link.requests() <= self.protocol.unfinished()
    }

    /// Hangs up on a client that leaves no other way.
    #[cold]
    fn disconnect(&self, reason: &str) {
        let (export, peer) = self.link.names();
        tracing::warn!(export, peer, reason, "hung up on a client");
        self.break_off();
    }

    /// The client is gone without a word.
    #[cold]
    fn lose(&self, error: &io::Error) {
        let (export, peer) = self.link.names();
        tracing::info!(export, peer, %error, "client lost");
        self.break_off();
    }

    fn break_off(&self) {
        if self.link.break_off() {
            self.protocol.give_up(&self.link, false);
        }
    }

    /// Receives and understands; how much there was.
    fn read(&self) -> usize {
        let mut found = 0;
        for _ in 0..RECEIVES {
            found += self.understand();
            if !self.wants_bytes.get() {
                break;
            }
            match self.receive() {
                Some(is_drained) => {
                    found += 1;
                    if is_drained {
                        found += self.understand();
                        break;
                    }
                }
                None => break,
            }
        }
        found
    }

    /// Takes requests out of what came, until bytes or room are wanting; how many.
    fn understand(&self) -> usize {
        let mut count = 0;
        self.wants_bytes.set(false);
        while let state @ (State::Open | State::Closing) = self.link.state() {
            match self.protocol.next(&self.link, state == State::Closing) {
                Found::NeedsBytes => {
                    self.wants_bytes.set(true);
                    return count;
                }
                Found::NeedsRoom => return count,
                Found::Job(job) => self.todo.borrow_mut().push_back(job),
                Found::Done => {}
                Found::Leave => self.leave(),
                Found::ProtocolError(reason) => self.disconnect(&reason),
            }
            count += 1;
        }
        count
    }

    /// Nothing more comes.
    fn leave(&self) {
        self.wants_bytes.set(false);
        self.protocol.give_up(&self.link, false);
        self.link.go_to(State::Leaving);
    }

    /// Receives once. `None` when nothing came; else whether that was all there is.
    fn receive(&self) -> Option<bool> {
        let received = self.protocol.receive(self.link.wire());
        if self.link.wire().owes() {
            // TLS has an answer of its own.
            self.link.handle().activate();
        }
        match received {
            Ok(Received::Bytes { is_drained, .. }) => Some(is_drained),
            Ok(Received::Nothing) => None,
            Ok(Received::End) => {
                self.leave();
                None
            }
            Err(error) => {
                self.wants_bytes.set(false);
                self.lose(&error);
                None
            }
        }
    }

    /// A slot's life.
    async fn serve(self: Rc<Self>, slot: u32) {
        let mut batch = Batch::default();
        while let Some(job) = (Next { connection: &self, slot, batch: &mut batch }).await {
            self.execute(job, &mut batch).await;
        }
        self.slots.end();
    }

    /// Carries a request out, and notes whether the device lets us wait.
    async fn execute(&self, job: P::Job, batch: &mut Batch) {
        let mut serving = pin!(self.protocol.serve(job, &self.link));
        let mut is_first_poll = true;
        poll_fn(|cx| {
            let result = serving.as_mut().poll(cx);
            if std::mem::replace(&mut is_first_poll, false) {
                self.is_inline.set(result.is_ready());
                if result.is_pending() {
                    *batch = Batch::default();
                }
            }
            result
        })
        .await;
    }

    fn start_slot(&self, slot: u32) {
        let connection = self.weak.upgrade().expect("somebody calls us");
        current().spawn(connection.serve(slot));
    }
}

impl<P: Protocol> Serving for Connection<P> {
    fn stop(&self) {
        if self.link.state() != State::Open {
            return;
        }
        self.link.go_to(State::Closing);
        self.protocol.give_up(&self.link, true);
        // What has come so far hears about it.
        self.read();
        self.link.handle().activate();
    }

    fn gone(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(self.link.until(|| self.link.state() == State::Gone))
    }
}

impl<P: Protocol> Source for Connection<P> {
    fn flush(&self) {
        if let Err(error) = self.link.flush() {
            self.lose(&error);
        }
    }

    fn poll(&self) -> usize {
        let found = self.read();
        let waiting = self.todo.borrow().len();
        let wanted = if self.is_inline.get() { waiting.min(1) } else { waiting };
        self.slots.wake_for(wanted, |slot| self.start_slot(slot));
        found + waiting
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.link.readiness.event_fd())
    }

    fn arm(&self) -> bool {
        let wants_bytes = self.wants_bytes.get();
        if wants_bytes && self.link.wire().has_more() {
            return false;
        }
        self.link.readiness.watch(wants_bytes, self.link.owes())
    }

    fn disarm(&self) {
        self.link.readiness.ignore();
    }
}

/// What a slot has done since it last waited for anything.
#[derive(Default)]
struct Batch {
    requests: u32,
    bytes: usize,
}

impl Batch {
    fn add(&mut self, bytes: usize) {
        self.requests += 1;
        self.bytes += bytes;
    }

    fn is_full(&self) -> bool {
        self.requests >= BATCH || self.bytes >= BATCH_BYTES
    }
}

/// Waits for the next request; `None` when the slot is to end.
struct Next<'a, P: Protocol> {
    connection: &'a Connection<P>,
    slot: u32,
    batch: &'a mut Batch,
}

impl<P: Protocol> Future for Next<'_, P> {
    type Output = Option<P::Job>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<P::Job>> {
        let Next { connection, slot, batch } = self.get_mut();
        if !connection.slots.may_look(*slot) {
            return Poll::Pending;
        }
        if connection.is_over.get() {
            return Poll::Ready(None);
        }
        if batch.is_full() {
            **batch = Batch::default();
            connection.slots.look_again(*slot, cx.waker());
            return Poll::Pending;
        }
        if let Some(job) = connection.todo.borrow_mut().pop_front() {
            batch.add(P::weight(&job));
            return Poll::Ready(Some(job));
        }
        **batch = Batch::default();
        connection.slots.wait(*slot, cx.waker());
        Poll::Pending
    }
}
