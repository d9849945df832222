//! A connection on the core that serves it.
//!
//! ```text
//!             ┌── poll: recvmsg ─► Reader ─► todo ─► slot: execute ─┐
//!   socket ───┤                       └─ refusals ──────────┐      │
//!             └── flush: sendmsg ◄─ Outbox ◄────────────────┴──────┘
//! ```
//!
//! A *slot* is a task that serves one request at a time; over a device that completes at once one slot serves whole
//! batches. A request counts from the moment it is taken until its reply is with the kernel, and so does its memory.
//!
//! ```text
//!   Open ──DISC, end of stream──► Leaving ─┐   (no more is read; what is there is answered)
//!     ├────export stops─────────► Closing ─┼─► gone, when nothing is left to be answered
//!     └────broken──────────────► Broken ───┘   (nobody listens; what is in flight ends)
//! ```

use super::job::Job;
use super::reading::{Found, Reader, Room};
use super::request::Rules;
use super::wire::{Content, Header, encode_reply, refusal_of};
use crate::stats::Connected;
use crate::stream::{Memory, Outbox, Parcel, Readiness, Received, Seat, Store};
use crate::target::Target;
use crate::{Error, QueueStats};
use block::Device;
use reactor::{Core, ServingSlots, Source, SourceHandle, current};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

/// Memory that one connection may have: one request of the longest kind, or 256 of 128 KiB.
pub(super) const BUDGET: usize = 32 << 20;
/// Requests of one connection that are not answered yet; more than any client has in flight to good effect.
const MAX_REQUESTS: usize = 512;
/// Requests that one slot completes without waiting before it lets the core send the replies and look elsewhere.
const BATCH: u32 = 64;
/// The same in bytes: the client takes one reply while the next is made.
const BATCH_BYTES: u64 = 128 << 10;
/// Times that one turn of the core receives from one socket: others want theirs.
const RECEIVES: usize = 4;
/// How long a client that leaves, or is left, may take no byte of its replies.
const PATIENCE_NS: u64 = 5_000_000_000;

/// What a core needs to serve a connection.
pub(super) struct Parts {
    pub(super) socket: OwnedFd,
    pub(super) peer: String,
    /// What came behind the handshake.
    pub(super) early: Vec<u8>,
    pub(super) rules: Rules,
    pub(super) device: Arc<dyn Device>,
    pub(super) capacity: Arc<AtomicU64>,
    pub(super) stats: Arc<QueueStats>,
    /// The export's name, for logs.
    pub(super) export: Arc<str>,
    pub(super) seat: Seat,
    pub(super) connected: Connected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Leaving,
    Closing,
    Broken,
    Gone,
}

/// A connection that this core serves.
pub(super) struct Connection {
    // Before the socket, which it watches.
    readiness: Readiness,
    socket: OwnedFd,
    rules: Rules,
    target: Target,
    capacity: Arc<AtomicU64>,
    stats: Arc<QueueStats>,
    store: Store,
    reader: RefCell<Reader>,
    /// The reader waits for bytes, not for room.
    wants_bytes: Cell<bool>,
    todo: RefCell<VecDeque<Job>>,
    outbox: RefCell<Outbox>,
    /// Requests taken whose replies the kernel has not.
    requests: Cell<usize>,
    budget: Cell<usize>,
    state: Cell<State>,
    /// Slots are to end.
    is_over: Cell<bool>,
    /// The device has completed the last request at once: a single slot is enough.
    is_inline: Cell<bool>,
    slots: ServingSlots,
    handle: OnceCell<SourceHandle>,
    weak: Weak<Connection>,
    /// Who waits for the connection's life to go on.
    watchers: RefCell<Vec<Waker>>,
    export: Arc<str>,
    peer: String,
    _seat: Seat,
    _connected: Connected,
}

impl Connection {
    /// Begins to serve.
    pub(super) fn start(core: &Core, parts: Parts, store: Store) -> Result<Rc<Connection>, Error> {
        let failed = |source| Error::System { action: "watch a client's socket", source };
        let target = Target::open(parts.device, parts.rules.is_read_only)?;
        let readiness = Readiness::new(parts.socket.as_raw_fd()).map_err(failed)?;
        let connection = Rc::new_cyclic(|weak| Connection {
            readiness,
            socket: parts.socket,
            rules: parts.rules,
            target,
            capacity: parts.capacity,
            stats: parts.stats,
            store,
            reader: RefCell::new(Reader::new(&parts.early)),
            wants_bytes: Cell::new(true),
            todo: RefCell::default(),
            outbox: RefCell::default(),
            requests: Cell::new(0),
            budget: Cell::new(BUDGET),
            state: Cell::new(State::Open),
            is_over: Cell::new(false),
            is_inline: Cell::new(true),
            slots: ServingSlots::new(MAX_REQUESTS),
            handle: OnceCell::new(),
            weak: weak.clone(),
            watchers: RefCell::default(),
            export: parts.export,
            peer: parts.peer,
            _seat: parts.seat,
            _connected: parts.connected,
        });
        let source: Rc<dyn Source> = connection.clone();
        let _ = connection.handle.set(core.register(&source));
        Ok(connection)
    }

    /// The connection's life: ends when nothing of it is left on the core.
    pub(super) async fn live(self: &Rc<Self>) {
        self.until(|| self.state.get() != State::Open).await;
        while !self.is_answered() {
            let sent = self.outbox.borrow().sent();
            let is_answered = self.wait_a_while().await;
            let outbox = self.outbox.borrow();
            let is_stuck = !is_answered && !outbox.is_empty() && outbox.sent() == sent;
            drop(outbox);
            if is_stuck {
                self.hang_up("it does not take its replies");
            }
        }
        self.is_over.set(true);
        self.slots.wake_all();
        self.slots.all_ended().await;
        tracing::info!(export = &*self.export, peer = self.peer, "client disconnected");
        self.go_to(State::Gone);
    }

    /// Refuses what comes from now on; the connection ends when what came before has been answered.
    pub(super) fn stop(&self) {
        if self.state.get() != State::Open {
            return;
        }
        self.go_to(State::Closing);
        self.give_up(true);
        // What has come so far hears about it.
        self.read();
        self.handle().activate();
    }

    /// Waits until nothing of the connection is left.
    pub(super) async fn gone(&self) {
        self.until(|| self.state.get() == State::Gone).await;
    }

    /// Whether every request that counts has been answered, and no other will.
    fn is_answered(&self) -> bool {
        let skipping = usize::from(self.reader.borrow().is_skipping());
        self.state.get() != State::Open && self.requests.get() <= skipping
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
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

    /// Waits until everything is answered, at most as long as clients have patience. Whether it is.
    async fn wait_a_while(&self) -> bool {
        let mut time = pin!(current().sleep(PATIENCE_NS));
        let mut answered = pin!(self.until(|| self.is_answered()));
        poll_fn(|cx| {
            if answered.as_mut().poll(cx).is_ready() {
                return Poll::Ready(true);
            }
            time.as_mut().poll(cx).map(|()| false)
        })
        .await
    }

    fn go_to(&self, state: State) {
        self.state.set(state);
        self.wake_watchers();
    }

    fn wake_watchers(&self) {
        for waker in self.watchers.take() {
            waker.wake();
        }
    }

    /// Hangs up on a client that leaves no other way.
    #[cold]
    fn hang_up(&self, reason: &str) {
        tracing::warn!(export = &*self.export, peer = self.peer, reason, "hung up on a client");
        self.break_off();
    }

    /// The client is gone without a word.
    #[cold]
    fn lose(&self, error: &io::Error) {
        tracing::info!(export = &*self.export, peer = self.peer, %error, "client lost");
        self.break_off();
    }

    /// Nobody listens any more.
    fn break_off(&self) {
        if matches!(self.state.get(), State::Broken | State::Gone) {
            return;
        }
        self.go_to(State::Broken);
        // SAFETY: a plain system call on a descriptor that we own.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
        self.give_up(false);
        self.outbox.borrow_mut().clear(|parcel| self.forget(parcel.data));
        self.wake_watchers();
    }

    /// Gives up a request that has not come whole.
    fn give_up(&self, is_closing: bool) {
        let given_up = self.reader.borrow_mut().give_up(&self.rules, is_closing);
        self.release(given_up.memory);
        self.requests.set(self.requests.get() - usize::from(given_up.is_forgotten));
    }

    /// A request is over and answered.
    fn forget(&self, memory: Option<Memory>) {
        self.release(memory);
        self.requests.set(self.requests.get() - 1);
    }

    fn release(&self, memory: Option<Memory>) {
        if let Some(memory) = memory {
            self.budget.set(self.budget.get() + Store::cost(memory.len()));
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
        while matches!(self.state.get(), State::Open | State::Closing) {
            let is_closing = self.state.get() == State::Closing;
            let capacity = self.capacity.load(Ordering::Relaxed);
            let next = self.reader.borrow_mut().next(&self.rules, capacity, is_closing, self);
            match next {
                Found::NeedsBytes => {
                    self.wants_bytes.set(true);
                    return count;
                }
                Found::NeedsRoom => return count,
                Found::Job(job) => self.todo.borrow_mut().push_back(job),
                Found::Answer(header, content) => {
                    if let Content::Failed(_) = content {
                        self.stats.count_failure();
                    }
                    self.answer(&header, content, None);
                }
                Found::Leave => self.go_to(State::Leaving),
                Found::Nonsense(reason) => self.hang_up(&reason),
            }
            count += 1;
        }
        count
    }

    /// Receives once. `None` when nothing came; else whether that was all there is.
    fn receive(&self) -> Option<bool> {
        let mut reader = self.reader.borrow_mut();
        let socket = self.socket.as_raw_fd();
        match reader.with_due(|inbox, due| inbox.receive(socket, due)) {
            Ok(Received::Bytes { direct, is_drained }) => {
                reader.note_due(direct);
                Some(is_drained)
            }
            Ok(Received::Nothing) => None,
            Ok(Received::End) => {
                drop(reader);
                self.wants_bytes.set(false);
                self.give_up(false);
                self.go_to(State::Leaving);
                None
            }
            Err(error) => {
                drop(reader);
                self.wants_bytes.set(false);
                self.lose(&error);
                None
            }
        }
    }

    #[inline]
    fn answer(&self, header: &Header, content: Content, data: Option<Memory>) {
        if self.state.get() == State::Broken {
            self.forget(data);
            self.wake_watchers();
            return;
        }
        let form = self.rules.form;
        let parcel = Parcel::new(data, |to| encode_reply(form, header, content, to));
        self.outbox.borrow_mut().push(parcel);
    }

    fn send(&self) {
        let mut outbox = self.outbox.borrow_mut();
        if outbox.is_empty() {
            return;
        }
        let result = outbox.send(self.socket.as_raw_fd(), |parcel| self.forget(parcel.data));
        let is_empty = outbox.is_empty();
        drop(outbox);
        if let Err(error) = result {
            self.lose(&error);
        }
        if is_empty && self.state.get() != State::Open {
            self.wake_watchers();
        }
    }

    /// A slot's life.
    async fn serve(self: Rc<Self>, slot: u32) {
        let mut batch = Batch::default();
        while let Some(job) = (Next { connection: &self, slot, batch: &mut batch }).await {
            let result = self.execute(&job, &mut batch).await;
            let Job { header, memory } = job;
            let is_read = header.command == super::wire::Command::Read;
            let (content, data) = match result {
                Ok(()) if is_read => (Content::Data { len: header.len as u32 }, memory),
                Ok(()) => {
                    self.release(memory);
                    (Content::Done, None)
                }
                Err(error) => {
                    self.release(memory);
                    (Content::Failed(refusal_of(error, !is_read)), None)
                }
            };
            self.answer(&header, content, data);
            self.handle().activate();
        }
        self.slots.end();
    }

    /// Carries a request out, and notes whether the device lets us wait.
    async fn execute(&self, job: &Job, batch: &mut Batch) -> block::IoResult {
        let mut request = pin!(job.execute(&self.target, &self.rules, &self.stats));
        let mut is_first_poll = true;
        poll_fn(|cx| {
            let result = request.as_mut().poll(cx);
            if std::mem::replace(&mut is_first_poll, false) {
                self.is_inline.set(result.is_ready());
                if result.is_pending() {
                    *batch = Batch::default();
                }
            }
            result
        })
        .await
    }

    fn handle(&self) -> &SourceHandle {
        self.handle.get().expect("set before anything runs")
    }

    fn start_slot(&self, slot: u32) {
        let connection = self.weak.upgrade().expect("somebody calls us");
        current().spawn(connection.serve(slot));
    }
}

impl Room for Connection {
    #[inline]
    fn grant(&self, data: usize) -> Option<Option<Memory>> {
        let cost = Store::cost(data);
        if self.requests.get() >= MAX_REQUESTS || cost > self.budget.get() {
            return None;
        }
        self.requests.set(self.requests.get() + 1);
        self.budget.set(self.budget.get() - cost);
        Some((data > 0).then(|| self.store.take(data)))
    }
}

impl Source for Connection {
    fn flush(&self) {
        self.send();
    }

    fn poll(&self) -> usize {
        let found = self.read();
        let waiting = self.todo.borrow().len();
        let wanted = if self.is_inline.get() { waiting.min(1) } else { waiting };
        self.slots.wake_for(wanted, |slot| self.start_slot(slot));
        found + waiting
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.readiness.event_fd())
    }

    fn arm(&self) -> bool {
        self.readiness.watch(self.wants_bytes.get(), !self.outbox.borrow().is_empty())
    }

    fn disarm(&self) {
        self.readiness.ignore();
    }
}

/// What a slot has done since it last waited for anything.
#[derive(Default)]
struct Batch {
    requests: u32,
    bytes: u64,
}

impl Batch {
    fn add(&mut self, job: &Job) {
        self.requests += 1;
        self.bytes += job.memory.as_ref().map_or(0, |memory| memory.len() as u64);
    }

    fn is_full(&self) -> bool {
        self.requests >= BATCH || self.bytes >= BATCH_BYTES
    }
}

/// Waits for the next request; `None` when the slot is to end.
struct Next<'a> {
    connection: &'a Connection,
    slot: u32,
    batch: &'a mut Batch,
}

impl Future for Next<'_> {
    type Output = Option<Job>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Job>> {
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
            batch.add(&job);
            return Poll::Ready(Some(job));
        }
        **batch = Batch::default();
        connection.slots.wait(*slot, cx.waker());
        Poll::Pending
    }
}
