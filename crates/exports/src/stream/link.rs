//! The part of a connection that its protocol uses: sending, memory, and the end of the connection.

use super::budget::{Account, FRAGMENT, Purpose, Room};
use super::{ConnectionSlot, Memory, Outbox, ReplyPart, Store};
use crate::Error;
use crate::stats::ConnectionStats;
use ::stream::{Readiness, Wire, disconnect};
use reactor::{Permits, SourceHandle, current};
use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// Timeout of a closing connection whose client reads no byte of its replies.
const PATIENCE_NS: u64 = 5_000_000_000;

/// Everything a core needs to serve a connection of any protocol.
pub struct Parts {
    /// The socket, with or without TLS.
    pub wire: Wire,
    /// The peer's name, for logs.
    pub peer: String,
    /// The export's name, for logs.
    pub export: Arc<str>,
    /// Its counters.
    pub stats: ConnectionStats,
    /// Its slot.
    pub slot: ConnectionSlot,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    Leaving,
    Closing,
    Broken,
    Gone,
}

/// The result of [`Link::grant`].
pub enum Grant {
    /// Granted, with memory if the request has data.
    Whole(Option<Memory>),
    /// Granted without memory: the budget is used up and the data moves in fragments.
    InFragments,
    /// Refused for now: another request has to end first.
    NoRoom,
}

/// A permit to use the connection's scratch memory.
pub struct Scratch<'a>(&'a Permits);

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.0.release(1);
    }
}

/// The sending side of a connection, and its limits.
pub struct Link {
    // Declared before the socket that it watches, so that it is dropped first.
    pub(super) readiness: Readiness,
    socket: Arc<OwnedFd>,
    wire: RefCell<Wire>,
    peer: String,
    export: Arc<str>,
    store: Store,
    pub(super) outbox: RefCell<Outbox>,
    max_requests: usize,
    /// Granted requests whose replies the kernel has not taken yet.
    requests: Cell<usize>,
    /// The memory that its requests use.
    account: Rc<Account>,
    /// Orders the requests that wait for memory or reply in fragments.
    turn: Permits,
    scratch: Permits,
    /// Replies that wait while a reply that must not be interrupted is sent in fragments.
    held_back: RefCell<Option<Vec<ReplyPart>>>,
    state: Cell<State>,
    pub(super) handle: OnceCell<SourceHandle>,
    /// Tasks that wait for a state change of the connection.
    watchers: RefCell<Vec<Waker>>,
    _slot: ConnectionSlot,
    /// Last: the client counts as connected until its connection is gone.
    stats: ConnectionStats,
}

impl Link {
    pub(super) fn new(parts: Parts, store: Store, max_requests: usize) -> Result<Link, Error> {
        let failed = |source| Error::System { action: "watch a client's socket", source };
        let Parts { wire, peer, export, stats, mut slot } = parts;
        let account = Account::new(slot.take_reserved());
        Ok(Link {
            readiness: Readiness::new(wire.fd()).map_err(failed)?,
            socket: wire.socket().clone(),
            wire: RefCell::new(wire),
            peer,
            export,
            stats,
            store,
            outbox: RefCell::default(),
            max_requests,
            requests: Cell::new(0),
            account,
            turn: Permits::new(1),
            scratch: Permits::new(1),
            held_back: RefCell::default(),
            state: Cell::new(State::Open),
            handle: OnceCell::new(),
            watchers: RefCell::default(),
            _slot: slot,
        })
    }

    /// The connection's socket.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Whether the connection has TLS.
    pub fn is_secured(&self) -> bool {
        self.wire.borrow().is_secured()
    }

    /// The socket and its TLS session.
    #[inline]
    pub(super) fn wire(&self) -> RefMut<'_, Wire> {
        self.wire.borrow_mut()
    }

    /// Whether replies or TLS records wait to be sent.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        !self.outbox.borrow().is_empty() || self.wire.borrow().owes()
    }

    /// Its counters.
    #[inline]
    pub fn stats(&self) -> &ConnectionStats {
        &self.stats
    }

    /// The export's name and the client's, for logs.
    pub fn names(&self) -> (&str, &str) {
        (&self.export, &self.peer)
    }

    /// Counts a request against the limits and allocates `data` bytes for it (0: no memory). A
    /// granted request counts until it is answered.
    #[inline]
    pub fn grant(&self, data: usize) -> Grant {
        // A request without data does not queue behind those that wait for memory.
        if self.requests.get() >= self.max_requests {
            return Grant::NoRoom;
        }
        let mut memory = None;
        if data > 0 {
            match self.account.charge(Purpose::Request, Store::cost(data)) {
                Room::Yes(charge) => memory = Some(self.store.take_charged(data, charge)),
                Room::Later => return Grant::NoRoom,
                Room::Never => {
                    self.requests.set(self.requests.get() + 1);
                    return Grant::InFragments;
                }
            }
        }
        self.requests.set(self.requests.get() + 1);
        Grant::Whole(memory)
    }

    /// Waits for `len` bytes of memory, at most as much as a connection may have. Waiters are
    /// served in order. A connection without requests gets its minimum even when the budget is used
    /// up.
    #[inline]
    pub async fn memory(&self, len: usize) -> Memory {
        let cost = Store::cost(len);
        self.turn.acquire(1).await;
        let room = poll_fn(|cx| self.account.poll_charge(Purpose::Request, cost, cx)).await;
        self.turn.release(1);
        match room {
            Room::Yes(charge) => self.store.take_charged(len, charge),
            Room::Later | Room::Never => self.store.take(len),
        }
    }

    /// Memory for data that arrives with a command. Returns `None` while earlier commands use up
    /// the limit.
    #[inline]
    pub fn capsule(&self, len: usize) -> Option<Memory> {
        self.charged(Purpose::Capsule, len)
    }

    /// Memory for a fragment of a long incoming request. Returns `None` until the previous fragment
    /// has been stored.
    pub fn fragment_in(&self, len: usize) -> Option<Memory> {
        self.charged(Purpose::FragmentIn, len)
    }

    #[inline]
    fn charged(&self, purpose: Purpose, len: usize) -> Option<Memory> {
        match self.account.charge(purpose, Store::cost(len)) {
            Room::Yes(charge) => Some(self.store.take_charged(len, charge)),
            Room::Later | Room::Never => None,
        }
    }

    /// Waits for the turn to reply in fragments, which ends with [`Link::end_fragments`].
    /// `is_whole`: other replies are held back until then.
    pub async fn begin_fragments(&self, is_whole: bool) {
        self.turn.acquire(1).await;
        if is_whole {
            *self.held_back.borrow_mut() = Some(Vec::new());
        }
    }

    /// Waits until the previous fragment has been sent, and returns memory for one of at most
    /// [`FRAGMENT`] bytes.
    pub async fn fragment_out(&self, len: usize) -> Memory {
        let cost = Store::cost(len.min(FRAGMENT));
        match poll_fn(|cx| self.account.poll_charge(Purpose::FragmentOut, cost, cx)).await {
            Room::Yes(charge) => self.store.take_charged(len.min(FRAGMENT), charge),
            Room::Later | Room::Never => unreachable!("a fragment is always released"),
        }
    }

    /// Sends a fragment of the current reply.
    pub fn send_fragment(&self, reply: ReplyPart) {
        let held_back = self.held_back.take();
        self.send(reply);
        *self.held_back.borrow_mut() = held_back;
    }

    /// Ends the current reply and sends those that were held back.
    pub fn end_fragments(&self) {
        let held_back = self.held_back.take();
        held_back.into_iter().flatten().for_each(|reply| self.send(reply));
        self.turn.release(1);
    }

    /// Whether the connection is broken: replies are discarded.
    pub fn is_broken(&self) -> bool {
        matches!(self.state.get(), State::Broken | State::Gone)
    }

    /// Disconnects a client when the protocol has no way to report `reason`. Data sent afterwards
    /// is lost.
    #[cold]
    pub fn cut(&self, reason: &str) {
        let (export, peer) = self.names();
        tracing::warn!(export, peer, reason, "client disconnected by the export");
        disconnect(&self.socket);
    }

    /// Schedules another parse: memory was released without a reply.
    pub fn look_again(&self) {
        self.handle().activate();
    }

    /// Waits for the connection's scratch memory.
    pub async fn scratch(&self) -> Scratch<'_> {
        self.scratch.acquire(1).await;
        Scratch(&self.scratch)
    }

    /// Allocates memory that is not charged: the caller bounds it in another way.
    #[inline]
    pub fn uncounted(&self, len: usize) -> Memory {
        self.store.take(len)
    }

    /// Sends a reply. The request ends once the kernel has taken its last part.
    #[inline]
    pub fn send(&self, reply: ReplyPart) {
        if self.state.get() == State::Broken {
            self.forget(reply);
            self.wake_watchers();
            return;
        }
        if let Some(held_back) = self.held_back.borrow_mut().as_mut() {
            return held_back.push(reply);
        }
        self.outbox.borrow_mut().push(reply);
        self.handle().activate();
    }

    /// Sends a final message that counts as a request, so that the connection stays open until it
    /// is sent.
    pub fn say_last(&self, mut reply: ReplyPart) {
        self.requests.set(self.requests.get() + 1);
        reply.is_last = true;
        self.send(reply);
    }

    /// Ends a request without a reply.
    #[inline]
    pub fn drop_request(&self) {
        self.requests.set(self.requests.get() - 1);
        if self.state.get() != State::Open {
            self.wake_watchers();
        }
    }

    /// Releases a reply that was sent or discarded.
    #[inline]
    fn forget(&self, reply: ReplyPart) {
        drop(reply.data);
        self.requests.set(self.requests.get() - usize::from(reply.is_last));
    }

    #[inline]
    pub(super) fn state(&self) -> State {
        self.state.get()
    }

    #[inline]
    pub(super) fn requests(&self) -> usize {
        self.requests.get()
    }

    #[inline]
    pub(super) fn handle(&self) -> &SourceHandle {
        self.handle.get().expect("set before anything runs")
    }

    pub(super) fn go_to(&self, state: State) {
        self.state.set(state);
        self.wake_watchers();
    }

    fn wake_watchers(&self) {
        for waker in self.watchers.take() {
            waker.wake();
        }
    }

    /// Waits until `is_so` returns true.
    pub(super) async fn until(&self, is_so: impl Fn() -> bool) {
        poll_fn(|cx| {
            if is_so() {
                return Poll::Ready(());
            }
            let mut watchers = self.watchers.borrow_mut();
            if !watchers.iter().any(|waker| waker.will_wake(cx.waker())) {
                watchers.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Waits until `is_so` returns true, as long as the client reads its replies. Returns `false`
    /// when it reads none for the timeout.
    pub(super) async fn until_patiently(&self, is_so: impl Fn() -> bool) -> bool {
        while !is_so() {
            let sent = self.wire.borrow().sent();
            let is_done = self.until_or_late(&is_so).await;
            if !is_done && !self.outbox.borrow().is_empty() && self.wire.borrow().sent() == sent {
                return false;
            }
        }
        true
    }

    async fn until_or_late(&self, is_so: impl Fn() -> bool) -> bool {
        let mut time = pin!(current().sleep(PATIENCE_NS));
        let mut done = pin!(self.until(is_so));
        poll_fn(|cx| {
            if done.as_mut().poll(cx).is_ready() {
                return Poll::Ready(true);
            }
            time.as_mut().poll(cx).map(|()| false)
        })
        .await
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// An error of sendmsg(2).
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut outbox = self.outbox.borrow_mut();
        let mut wire = self.wire.borrow_mut();
        if outbox.is_empty() && !wire.owes() {
            return Ok(());
        }
        let result = outbox.send(&mut wire, |reply| self.forget(reply));
        let is_empty = outbox.is_empty();
        drop((outbox, wire));
        if is_empty && self.state.get() != State::Open {
            self.wake_watchers();
        }
        result
    }

    /// Marks the connection as broken. Returns `false` when it was already.
    pub(super) fn break_off(&self) -> bool {
        if self.is_broken() {
            return false;
        }
        self.go_to(State::Broken);
        disconnect(&self.socket);
        self.outbox.borrow_mut().clear(|reply| self.forget(reply));
        if let Some(held_back) = self.held_back.borrow_mut().as_mut() {
            held_back.drain(..).for_each(|reply| self.forget(reply));
        }
        self.wake_watchers();
        true
    }
}
