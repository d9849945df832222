//! What a protocol has of a connection: the socket's way out, memory, and how it ends.

use super::budget::{Account, PIECE, Purpose, Room};
use super::wire::disconnect;
use super::{ConnectionSlot, Memory, Outbox, Readiness, ReplyPart, Store, Wire};
use crate::stats::Connected;
use crate::{Error, QueueStats};
use reactor::{Permits, SourceHandle, current};
use std::cell::{Cell, OnceCell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// How long a client that leaves, or is left, may take no byte of its replies.
const PATIENCE_NS: u64 = 5_000_000_000;

/// What a core needs to serve a connection, of any protocol.
pub(crate) struct Parts {
    pub(crate) wire: Wire,
    /// Who it is, for logs.
    pub(crate) peer: String,
    /// The export's name, for logs.
    pub(crate) export: Arc<str>,
    pub(crate) stats: Arc<QueueStats>,
    pub(crate) slot: ConnectionSlot,
    pub(crate) connected: Connected,
}

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    Leaving,
    Closing,
    Broken,
    Gone,
}

/// Whether a request was taken.
pub(crate) enum Grant {
    /// With its memory, if it has data.
    Whole(Option<Memory>),
    /// Without memory: its data goes in pieces, since the budget is used up.
    InPieces,
    /// Not yet: something else has to end first.
    NoRoom,
}

/// The turn to use memory beside that of requests.
pub(crate) struct Scratch<'a>(&'a Permits);

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.0.release(1);
    }
}

/// The way to the client.
pub(crate) struct Link {
    // Before the socket, which it watches.
    pub(super) readiness: Readiness,
    wire: Wire,
    peer: String,
    export: Arc<str>,
    stats: Arc<QueueStats>,
    store: Store,
    pub(super) outbox: RefCell<Outbox>,
    max_requests: usize,
    /// Requests taken whose replies the kernel has not.
    requests: Cell<usize>,
    /// What its requests hold.
    account: Rc<Account>,
    /// Whose turn it is to wait for memory, and to reply in pieces.
    turn: Permits,
    scratch: Permits,
    /// Replies that wait for the end of one that goes in pieces, if that must not be interrupted.
    held_back: RefCell<Option<Vec<ReplyPart>>>,
    state: Cell<State>,
    pub(super) handle: OnceCell<SourceHandle>,
    /// Who waits for the connection's life to go on.
    watchers: RefCell<Vec<Waker>>,
    _slot: ConnectionSlot,
    _connected: Connected,
}

impl Link {
    pub(super) fn new(parts: Parts, store: Store, max_requests: usize) -> Result<Link, Error> {
        let failed = |source| Error::System { action: "watch a client's socket", source };
        let Parts { wire, peer, export, stats, mut slot, connected } = parts;
        let account = Account::new(slot.take_reserved());
        Ok(Link {
            readiness: Readiness::new(wire.fd()).map_err(failed)?,
            wire,
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
            _connected: connected,
        })
    }

    /// The connection's socket.
    pub(crate) fn socket(&self) -> &OwnedFd {
        self.wire.socket()
    }

    /// The way to and from the client.
    #[inline]
    pub(super) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Whether something waits to be sent.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        !self.outbox.borrow().is_empty() || self.wire.owes()
    }

    /// What is counted of it.
    #[inline]
    pub(crate) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// The export's name and the client's, for logs.
    pub(crate) fn names(&self) -> (&str, &str) {
        (&self.export, &self.peer)
    }

    /// A request was taken, and `data` bytes of memory go with it (none for no bytes), if there is room. It counts until it
    /// is answered.
    #[inline]
    pub(crate) fn grant(&self, data: usize) -> Grant {
        // One without data does not stand in line behind those that wait for memory.
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
                    return Grant::InPieces;
                }
            }
        }
        self.requests.set(self.requests.get() + 1);
        Grant::Whole(memory)
    }

    /// Waits for memory for `len` bytes, at most what a connection may have; in the order of asking. A connection that
    /// holds nothing gets it even if the budget is used up: of requests that are no longer than its minimum.
    pub(crate) async fn memory(&self, len: usize) -> Memory {
        let cost = Store::cost(len);
        self.turn.acquire(1).await;
        let room = poll_fn(|cx| self.account.poll_charge(Purpose::Request, cost, cx)).await;
        self.turn.release(1);
        match room {
            Room::Yes(charge) => self.store.take_charged(len, charge),
            Room::Later | Room::Never => self.store.take(len),
        }
    }

    /// Memory for data that comes with a command; `None` while earlier commands hold what there is.
    pub(crate) fn capsule(&self, len: usize) -> Option<Memory> {
        self.charged(Purpose::Capsule, len)
    }

    /// Memory for a piece of a long request that comes; `None` while the last piece has not been stored.
    pub(crate) fn piece_in(&self, len: usize) -> Option<Memory> {
        self.charged(Purpose::PieceIn, len)
    }

    fn charged(&self, purpose: Purpose, len: usize) -> Option<Memory> {
        match self.account.charge(purpose, Store::cost(len)) {
            Room::Yes(charge) => Some(self.store.take_charged(len, charge)),
            Room::Later | Room::Never => None,
        }
    }

    /// Waits for the turn to reply in pieces; it ends with [`Link::end_pieces`]. With `is_whole` no other reply is sent
    /// meanwhile: those of others wait.
    pub(crate) async fn begin_pieces(&self, is_whole: bool) {
        self.turn.acquire(1).await;
        if is_whole {
            *self.held_back.borrow_mut() = Some(Vec::new());
        }
    }

    /// Waits until the last piece has gone, and takes memory for one of at most [`PIECE`] bytes.
    pub(crate) async fn piece_out(&self, len: usize) -> Memory {
        let cost = Store::cost(len.min(PIECE));
        match poll_fn(|cx| self.account.poll_charge(Purpose::PieceOut, cost, cx)).await {
            Room::Yes(charge) => self.store.take_charged(len.min(PIECE), charge),
            Room::Later | Room::Never => unreachable!("a piece comes back"),
        }
    }

    /// Sends a piece of the reply whose turn it is.
    pub(crate) fn send_piece(&self, reply: ReplyPart) {
        let held_back = self.held_back.take();
        self.send(reply);
        *self.held_back.borrow_mut() = held_back;
    }

    /// The reply whose turn it was has ended: others go.
    pub(crate) fn end_pieces(&self) {
        let held_back = self.held_back.take();
        held_back.into_iter().flatten().for_each(|reply| self.send(reply));
        self.turn.release(1);
    }

    /// Whether nobody listens any more.
    pub(crate) fn is_broken(&self) -> bool {
        matches!(self.state.get(), State::Broken | State::Gone)
    }

    /// Disconnects a client that cannot be told otherwise. What is sent after this does not arrive.
    #[cold]
    pub(crate) fn cut(&self, reason: &str) {
        let (export, peer) = self.names();
        tracing::warn!(export, peer, reason, "client disconnected");
        disconnect(self.wire.socket());
    }

    /// The core is to look for requests again: memory has come back without a reply.
    pub(crate) fn look_again(&self) {
        self.handle().activate();
    }

    /// Waits for the turn to use memory beside that of requests, as much as the connection's minimum has for it.
    pub(crate) async fn scratch(&self) -> Scratch<'_> {
        self.scratch.acquire(1).await;
        Scratch(&self.scratch)
    }

    /// Memory that does not count: of those who bound it otherwise.
    pub(crate) fn uncounted(&self, len: usize) -> Memory {
        self.store.take(len)
    }

    /// Sends a reply. With the last of a request's the request is over when the client has it.
    #[inline]
    pub(crate) fn send(&self, reply: ReplyPart) {
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

    /// Sends the last thing that there is to say: the connection does not end before.
    pub(crate) fn say_last(&self, mut reply: ReplyPart) {
        self.requests.set(self.requests.get() + 1);
        reply.is_last = true;
        self.send(reply);
    }

    /// A request is over and will not be answered.
    pub(crate) fn drop_request(&self) {
        self.requests.set(self.requests.get() - 1);
        if self.state.get() != State::Open {
            self.wake_watchers();
        }
    }

    /// A reply has gone out, or nowhere.
    fn forget(&self, reply: ReplyPart) {
        drop(reply.data);
        self.requests.set(self.requests.get() - usize::from(reply.is_last));
    }

    pub(super) fn state(&self) -> State {
        self.state.get()
    }

    pub(super) fn requests(&self) -> usize {
        self.requests.get()
    }

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

    /// Waits until it is so.
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

    /// Waits until it is so while the client takes what there is for it. `false` when it has taken nothing for a while.
    pub(super) async fn until_patiently(&self, is_so: impl Fn() -> bool) -> bool {
        while !is_so() {
            let sent = self.outbox.borrow().sent();
            let is_done = self.until_or_late(&is_so).await;
            let outbox = self.outbox.borrow();
            if !is_done && !outbox.is_empty() && outbox.sent() == sent {
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

    /// Sends what waits, as much as the socket takes.
    ///
    /// # Errors
    /// What sendmsg(2) says.
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut outbox = self.outbox.borrow_mut();
        if outbox.is_empty() && !self.wire.owes() {
            return Ok(());
        }
        let result = outbox.send(&self.wire, |reply| self.forget(reply));
        let is_empty = outbox.is_empty();
        drop(outbox);
        if is_empty && self.state.get() != State::Open {
            self.wake_watchers();
        }
        result
    }

    /// Nobody listens any more. `false` when that was known.
    pub(super) fn break_off(&self) -> bool {
        if self.is_broken() {
            return false;
        }
        self.go_to(State::Broken);
        disconnect(self.wire.socket());
        self.outbox.borrow_mut().clear(|reply| self.forget(reply));
        if let Some(held_back) = self.held_back.borrow_mut().as_mut() {
            held_back.drain(..).for_each(|reply| self.forget(reply));
        }
        self.wake_watchers();
        true
    }
}
