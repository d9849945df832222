//! A connection on the core that serves it.
//!
//! ```text
//!             ┌── poll: recvmsg ─► Protocol::next ─► todo ─► slot: Protocol::serve ─┐
//!   socket ───┤                                                                     │
//!             └── flush: sendmsg ◄───────────── Link: Outbox ◄─────────────────────┘
//! ```
//!
//! A *slot* is a task that serves one request at a time; over a device that completes at once one
//! slot serves whole batches. A request counts from the moment it is taken until its reply is with
//! the kernel, and so does its memory.
//!
//! ```text
//!   Open ──leave, end of stream──► Leaving ─┐   (no more is read; pending requests are answered)
//!     ├────export stops──────────► Closing ─┼─► gone, once every pending request is answered
//!     └────broken───────────────► Broken ───┘   (replies are discarded; requests in flight end)
//! ```

use super::Store;
use super::link::{Link, Parts, State};
use crate::Error;
use ::stream::{Received, Wire};
use reactor::{Core, ServingSlots, Source, current};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::RawFd;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

/// Requests that one slot completes without waiting before it yields: the core then sends replies
/// and polls other sources.
const BATCH: u32 = 64;
/// The same limit in bytes: the client reads one reply while the next is made.
const BATCH_BYTES: usize = 128 << 10;
/// Receives from one socket per turn of the core, so that other connections get their turn.
const RECEIVES: usize = 4;

/// Longest header of a request of any protocol: behind long data, a connection receives only this.
pub const MAX_REQUEST_HEADER: usize = 128;

/// The protocol of a connection: turns bytes into requests and serves them.
pub trait Protocol: Sized + 'static {
    /// A parsed request, which counts towards the limit.
    type Job: 'static;

    /// Receives once; expected request data goes straight into its buffer.
    ///
    /// # Errors
    /// An error of recvmsg(2) or TLS.
    fn receive(&self, wire: &mut Wire) -> io::Result<Received>;

    /// Parses what was received until it finds something to do. `is_closing`: the export stops, and
    /// no new request may begin.
    fn next(&self, link: &Link, is_closing: bool) -> Found<Self::Job>;

    /// Bytes of data of a request.
    fn weight(job: &Self::Job) -> usize;

    /// Executes and answers a request.
    fn serve(&self, job: Self::Job, link: &Link) -> impl Future<Output = ()>;

    /// Abandons requests that were not received completely. `is_closing`: more bytes may follow;
    /// otherwise none will.
    fn give_up(&self, link: &Link, is_closing: bool);

    /// Requests that count but do not delay the end of the connection: their clients still owe data
    /// that will be discarded.
    fn unfinished(&self) -> usize;
}

/// The outcome of [`Protocol::next`].
pub enum Found<J> {
    /// More bytes.
    NeedsBytes,
    /// A slot for one more request, and memory for its data.
    NeedsRoom,
    /// A complete request.
    Job(J),
    /// Input that was handled at once.
    Done,
    /// The client leaves, or was asked to leave.
    Leave,
    /// The stream violates the protocol and cannot be parsed any further.
    ProtocolError(String),
}

/// A connection that this core serves.
pub struct Connection<P: Protocol> {
    link: Link,
    protocol: P,
    /// Whether the reader waits for bytes rather than for room.
    wants_bytes: Cell<bool>,
    todo: RefCell<VecDeque<P::Job>>,
    /// Whether slots are to end.
    is_over: Cell<bool>,
    /// Whether the device completed the last request at once: a single slot is enough.
    is_inline: Cell<bool>,
    slots: ServingSlots,
    weak: Weak<Connection<P>>,
}

/// A connection of any protocol.
pub trait Serving {
    /// Refuses new requests. The connection ends once earlier requests have been answered.
    fn stop(&self);
    /// Waits until the connection has ended.
    fn gone(&self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
}

impl<P: Protocol> Connection<P> {
    /// Starts serving, with at most `max_requests` at a time.
    pub fn start(
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

    /// Runs the connection until nothing of it is left on the core.
    pub async fn live(self: &Rc<Self>) {
        self.link.until(|| self.link.state() != State::Open).await;
        let is_answered = || self.is_answered();
        while !self.link.until_patiently(is_answered).await {
            self.disconnect("the client does not read its replies");
        }
        self.is_over.set(true);
        self.slots.wake_all();
        self.slots.all_ended().await;
        self.link.wire().close();
        let (export, peer) = self.link.names();
        tracing::info!(export, peer, "client disconnected");
        self.link.go_to(State::Gone);
    }

    /// Whether every request that counts has been answered and no other can follow.
    fn is_answered(&self) -> bool {
        self.link.state() != State::Open && self.link.requests() <= self.protocol.unfinished()
    }

    /// Disconnects a client after a protocol error or a timeout, and logs the reason.
    #[cold]
    fn disconnect(&self, reason: &str) {
        let (export, peer) = self.link.names();
        tracing::warn!(export, peer, reason, "client disconnected by the export");
        self.break_off();
    }

    /// The connection failed without an orderly end.
    #[cold]
    fn lose(&self, error: &io::Error) {
        let (export, peer) = self.link.names();
        tracing::info!(export, peer, %error, "client connection lost");
        self.break_off();
    }

    fn break_off(&self) {
        if self.link.break_off() {
            self.protocol.give_up(&self.link, false);
        }
    }

    /// Receives and parses. Returns the number of steps done.
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

    /// Parses requests until bytes or room are lacking. Returns how many were handled.
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

    /// The client sends no more.
    fn leave(&self) {
        self.wants_bytes.set(false);
        self.protocol.give_up(&self.link, false);
        self.link.go_to(State::Leaving);
    }

    /// Receives once. Returns `None` when no data was available, else whether the socket is
    /// drained.
    fn receive(&self) -> Option<bool> {
        let received = self.protocol.receive(&mut self.link.wire());
        if self.link.wire().owes() {
            // TLS may have a response of its own to send.
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

    /// The task of a slot.
    async fn serve(self: Rc<Self>, slot: u32) {
        let mut batch = Batch::default();
        while let Some(job) = (Next { connection: &self, slot, batch: &mut batch }).await {
            self.execute(job, &mut batch).await;
        }
        self.slots.end();
    }

    /// Executes a request, and records whether the device completed it at once.
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
        let connection = self.weak.upgrade().expect("the caller holds a reference");
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
        // Parses what has been received so far, so that those requests are answered.
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

/// Requests that a slot has completed since it last waited.
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

/// Waits for the next request; returns `None` when the slot is to end.
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
