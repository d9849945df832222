//! What a protocol has of a connection: the socket's way out, memory, and how it ends.

use super::{Memory, Outbox, Parcel, Readiness, Seat, Store, Wire};
use crate::stats::Connected;
use crate::{Error, QueueStats};
use reactor::{Permits, SourceHandle, current};
use std::cell::{Cell, OnceCell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// Memory that one connection may have: one request of the longest kind, or 256 of 128 KiB.
const BUDGET: usize = 32 << 20;
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
    pub(crate) seat: Seat,
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
    /// Bytes that its requests may still take.
    budget: Permits,
    state: Cell<State>,
    pub(super) handle: OnceCell<SourceHandle>,
    /// Who waits for the connection's life to go on.
    watchers: RefCell<Vec<Waker>>,
    _seat: Seat,
    _connected: Connected,
}

impl Link {
    pub(super) fn new(parts: Parts, store: Store, max_requests: usize) -> Result<Link, Error> {
        let failed = |source| Error::System { action: "watch a client's socket", source };
        let Parts { wire, peer, export, stats, seat, connected } = parts;
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
            budget: Permits::new(BUDGET),
            state: Cell::new(State::Open),
            handle: OnceCell::new(),
            watchers: RefCell::default(),
            _seat: seat,
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

    /// A request was taken, and `data` bytes of memory go with it (none for no bytes); `None`, and it was not, while
    /// there is no room. It counts until it is answered.
    #[inline]
    pub(crate) fn grant(&self, data: usize) -> Option<Option<Memory>> {
        // One without data does not stand in line behind those that wait for memory.
        let is_full = self.requests.get() >= self.max_requests;
        if is_full || data > 0 && !self.budget.try_acquire(Store::cost(data)) {
            return None;
        }
        self.requests.set(self.requests.get() + 1);
        Some((data > 0).then(|| self.store.take(data)))
    }

    /// Waits for memory for `len` bytes, at most what a connection may have; in the order of asking.
    pub(crate) async fn memory(&self, len: usize) -> Memory {
        self.budget.acquire(Store::cost(len)).await;
        self.store.take(len)
    }

    /// Memory is not needed any more.
    #[inline]
    pub(crate) fn release(&self, memory: Option<Memory>) {
        if let Some(memory) = memory {
            let cost = Store::cost(memory.len());
            drop(memory);
            self.budget.release(cost);
        }
    }

    /// Memory that does not count: of those who bound it otherwise. Not to be released, but dropped.
    pub(crate) fn uncounted(&self, len: usize) -> Memory {
        self.store.take(len)
    }

    /// Sends a parcel. With the last of a request's the request is over when the client has it.
    #[inline]
    pub(crate) fn send(&self, parcel: Parcel) {
        if self.state.get() == State::Broken {
            self.forget(parcel);
            self.wake_watchers();
            return;
        }
        self.outbox.borrow_mut().push(parcel);
        self.handle().activate();
    }

    /// Sends the last thing that there is to say: the connection does not end before.
    pub(crate) fn say_last(&self, mut parcel: Parcel) {
        self.requests.set(self.requests.get() + 1);
        parcel.is_last = true;
        self.send(parcel);
    }

    /// A request is over and will not be answered.
    pub(crate) fn drop_request(&self) {
        self.requests.set(self.requests.get() - 1);
        if self.state.get() != State::Open {
            self.wake_watchers();
        }
    }

    /// A parcel has gone out, or nowhere.
    fn forget(&self, parcel: Parcel) {
        self.release(parcel.data);
        self.requests.set(self.requests.get() - usize::from(parcel.is_last));
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
        let result = outbox.send(&self.wire, |parcel| self.forget(parcel));
        let is_empty = outbox.is_empty();
        drop(outbox);
        if is_empty && self.state.get() != State::Open {
            self.wake_watchers();
        }
        result
    }

    /// Nobody listens any more. `false` when that was known.
    pub(super) fn break_off(&self) -> bool {
        if matches!(self.state.get(), State::Broken | State::Gone) {
            return false;
        }
        self.go_to(State::Broken);
        // SAFETY: a plain system call on a descriptor that we own.
        unsafe { libc::shutdown(self.wire.fd(), libc::SHUT_RDWR) };
        self.outbox.borrow_mut().clear(|parcel| self.forget(parcel));
        self.wake_watchers();
        true
    }
}
