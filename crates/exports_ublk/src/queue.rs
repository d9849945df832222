//! One queue of a disk, on the core that serves it.
//!
//! ```text
//!   kernel ─ fetch completes ─► poll: tag is ready ─► slot: read descriptor ─► (write: get data) ─► device
//!     ▲                                                                                               │
//!     └── flush: one io_uring_enter for all answers and fetches of a turn ◄── commit and fetch ◄──────┘
//! ```
//!
//! Every *tag* has one command in the ring. It brings a request, and the command that commits the
//! result fetches the tag's next one. A *slot* is a task that serves one request at a time and
//! takes the next ready tag itself.
//!
//! The kernel copies data into and out of a buffer from the core's pool. The slot holds it only for
//! the duration of the request, so an idle disk has no buffers. For a read, the commit carries the
//! buffer. For a write, the kernel first announces it, and copies when it gets a buffer
//! (`UBLK_F_NEED_GET_DATA`). All of that goes through the ring, in batches.
//!
//! Without a copy ([`DataPath::Registered`]) the kernel registers each request's own buffer
//! with the ring (`UBLK_F_AUTO_BUF_REG`), at the tag's place in its table, until the commit.
//! The device's operations on it go to the same ring ([`SharedRing`]). A request whose bytes
//! the device must look at is repeated with a buffer of the pool, which the server copies by a
//! system call (`UBLK_F_USER_COPY`). Both features are refused to unprivileged disks.

use super::descriptors::Descriptors;
use super::request;
use super::uapi::{
    Descriptor, IoCommand, RESULT_ABORT, RESULT_NEED_GET_DATA, RESULT_OK, buffer_registration, io, op,
};
use super::{DataPath, user_copy};
use block::{Device, IoError, IoResult, Op};
use exports::eventfd::eventfd;
use exports::{Connected, Error, QueueStats, Target};
use io_uring::opcode::UringCmd16;
use io_uring::types::Fixed;
use reactor::{Buffer, BufferPool, Core, ServingSlots, SharedRing, Source, SourceHandle, current};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// Requests that one slot completes without waiting before it yields: the core then submits the
/// answers and polls other sources.
const BATCH: u32 = 64;
/// Timeout for the kernel to end all commands of a stopped disk.
const DRAIN_NS: u64 = 5_000_000_000;
/// Poll interval during that time.
const DRAIN_STEP_NS: u64 = 1_000_000;

/// Everything a core needs to serve a queue.
pub(super) struct QueueParts {
    pub(super) device: Arc<dyn Device>,
    pub(super) is_read_only: bool,
    pub(super) index: u16,
    pub(super) depth: u16,
    /// Longest read or write.
    pub(super) max_io: u32,
    pub(super) path: DataPath,
    pub(super) stats: Arc<QueueStats>,
    /// The disk counts as served while one of its queues holds this.
    pub(super) connected: Arc<Connected>,
    /// Whether the disk is being removed or was removed; shared by all its queues.
    pub(super) is_ending: Arc<AtomicBool>,
    /// The export's name, for logs.
    pub(super) name: String,
}

/// A queue's connection to the kernel.
struct Link {
    ring: Rc<SharedRing>,
    /// The number of the ring, if the device can use the buffers of its table.
    buffers: Option<u32>,
    descriptors: Descriptors,
    /// The ring's fixed file 0, which the kernel holds while it is registered.
    file: Arc<File>,
}

/// The state of a write's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DataState {
    /// Not requested.
    #[default]
    None,
    Asked,
    Copied,
    /// The kernel had no memory to copy with. The tag has another request now, or the same one from
    /// its start.
    Replaced(Arrival),
    /// The disk is being stopped.
    Aborted,
}

/// A tag's request and its announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arrival {
    tag: u16,
    /// Whether it is a write whose data must be requested.
    needs_data: bool,
}

/// A queue of this core.
pub(super) struct Served {
    index: u16,
    depth: u16,
    max_io: u32,
    path: DataPath,
    stats: Arc<QueueStats>,
    name: String,
    target: Target,
    buffers: BufferPool,
    /// `None` before the queue has fetched, and after the disk has ended.
    link: RefCell<Option<Link>>,
    event: OwnedFd,
    ready: RefCell<VecDeque<Arrival>>,
    /// By tag: the state of its write's data, and the waiting task.
    data: Box<[Cell<DataState>]>,
    waiters: Box<[RefCell<Option<Waker>>]>,
    /// Buffers of reads whose commit has not been submitted yet.
    held: RefCell<Vec<Buffer>>,
    /// Tags whose command has not failed permanently.
    tags_left: Cell<u16>,
    connected: RefCell<Option<Arc<Connected>>>,
    is_ending: Arc<AtomicBool>,
    is_stopping: Cell<bool>,
    /// Whether the device completed the last request at once: a single slot is enough.
    is_inline: Cell<bool>,
    slots: ServingSlots,
    handle: OnceCell<Rc<SourceHandle>>,
    weak: Weak<Served>,
}

impl Served {
    /// Prepares everything but the connection to the driver.
    pub(super) fn prepare(core: &Core, parts: QueueParts) -> Result<Rc<Served>, Error> {
        let target = Target::open(parts.device, parts.is_read_only)?;
        let event = eventfd().map_err(|source| Error::System { action: "create an eventfd", source })?;
        let depth = usize::from(parts.depth);
        let served = Rc::new_cyclic(|weak| Served {
            index: parts.index,
            depth: parts.depth,
            max_io: parts.max_io,
            path: parts.path,
            stats: parts.stats,
            name: parts.name,
            target,
            buffers: core.buffers().clone(),
            link: RefCell::new(None),
            event,
            ready: RefCell::new(VecDeque::with_capacity(depth)),
            data: (0..depth).map(|_| Cell::default()).collect(),
            waiters: (0..depth).map(|_| RefCell::default()).collect(),
            held: RefCell::new(Vec::with_capacity(depth)),
            tags_left: Cell::new(0),
            connected: RefCell::new(Some(parts.connected)),
            is_ending: parts.is_ending,
            is_stopping: Cell::new(false),
            is_inline: Cell::new(true),
            slots: ServingSlots::new(depth),
            handle: OnceCell::new(),
            weak: weak.clone(),
        });
        let source: Rc<dyn Source> = served.clone();
        let _ = served.handle.set(Rc::new(core.register(&source)));
        Ok(served)
    }

    /// Fetches the first request of every tag: from now on the queue belongs to this thread.
    pub(super) fn fetch(&self, file: Arc<File>) -> Result<(), Error> {
        let Served { index, depth, .. } = *self;
        let refused = |source| Error::Ublk { what: format!("ublk: queue {index} cannot be served"), source };
        let operations = if self.path == DataPath::Registered { depth } else { 0 };
        let ring = SharedRing::new(depth.into(), operations.into(), &self.event)
            .map_err(|source| Error::System { action: "set an io_uring up", source })?;
        ring.register(file.as_raw_fd()).map_err(refused)?;
        let buffers = self.offer_buffers(&ring);
        let descriptors = Descriptors::map(&file, index, depth)?;
        let link = Link { ring, buffers, descriptors, file };
        for tag in 0..depth {
            self.push_to(&link, io::FETCH_REQ, IoCommand { q_id: index, tag, result: 0, addr: 0 });
        }
        let ring = &link.ring;
        while ring.has_unsubmitted() {
            ring.submit();
        }
        // No request can arrive before the disk is started, so any completion is an error.
        let mut refusal = None;
        ring.reap(&mut |_, result| refusal = Some(std::io::Error::from_raw_os_error(-result)));
        if let Some(error) = refusal {
            ring.unregister();
            return Err(refused(error));
        }
        self.tags_left.set(depth);
        self.link.replace(Some(link));
        self.handle().activate();
        Ok(())
    }

    /// Makes the table for the kernel's buffers. Without it the kernel sends every request to be
    /// copied.
    fn offer_buffers(&self, ring: &Rc<SharedRing>) -> Option<u32> {
        if self.path != DataPath::Registered {
            return None;
        }
        let handle = self.handle.get().expect("set before anything runs").clone();
        let offered = ring.offer_buffers(self.depth, handle);
        offered
            .inspect_err(|error| {
                let Served { name, index, .. } = self;
                tracing::warn!(export = name, queue = index, %error, "the kernel's buffers cannot be used: data are copied");
            })
            .ok()
    }

    /// Ends the queue of a stopped disk. Requests in flight are completed.
    pub(super) async fn stop(self: Rc<Self>) {
        let core = current();
        let deadline = core.now_ns().saturating_add(DRAIN_NS);
        while self.tags_left.get() > 0 && core.now_ns() < deadline {
            core.sleep(DRAIN_STEP_NS).await;
        }
        self.end_slots().await;
        if self.tags_left.get() > 0 {
            let Served { name, index, .. } = &*self;
            tracing::warn!(
                export = name,
                queue = index,
                "queue ended although its disk could not be stopped"
            );
        }
        self.unlink();
    }

    /// Leaves the queue of a quiesced disk to the next server. Requests in flight are completed
    /// first; announced ones go to the next server.
    pub(super) async fn leave(self: Rc<Self>) {
        self.end_slots().await;
        if let Some(Link { ring, .. }) = &*self.link.borrow() {
            while ring.has_unsubmitted() {
                ring.submit();
            }
        }
        // Closing the ring cancels its commands, and the driver keeps their requests.
        self.link.take();
        self.forget();
    }

    async fn end_slots(&self) {
        self.is_stopping.set(true);
        self.slots.wake_all();
        self.slots.all_ended().await;
    }

    /// The task of a slot.
    async fn serve(self: Rc<Self>, slot: u32) {
        let mut batch = 0;
        while let Some(arrival) = (Next { served: &self, slot, batch: &mut batch }).await {
            self.execute(arrival, &mut batch).await;
        }
        self.slots.end();
    }

    /// Executes a request, and records whether the device completed it at once.
    async fn execute(&self, arrival: Arrival, batch: &mut u32) {
        let mut request = std::pin::pin!(self.serve_request(arrival));
        let mut is_first_poll = true;
        poll_fn(|cx| {
            let end = request.as_mut().poll(cx);
            if std::mem::replace(&mut is_first_poll, false) {
                self.is_inline.set(end.is_ready());
                if end.is_pending() {
                    *batch = 0;
                }
            }
            end
        })
        .await;
    }

    async fn serve_request(&self, mut arrival: Arrival) {
        while let Some(instead) = self.serve_once(arrival).await {
            arrival = instead;
        }
    }

    /// Answers a request, or returns the request that the kernel has replaced it with.
    async fn serve_once(&self, Arrival { tag, needs_data }: Arrival) -> Option<Arrival> {
        let descriptor = self.descriptor(tag)?;
        let (result, bytes, read) = match descriptor.op() {
            op::READ if self.path != DataPath::Copy => {
                (self.transfer(Op::Read, tag, &descriptor).await, descriptor.len(), None)
            }
            op::WRITE if self.path != DataPath::Copy => {
                (self.transfer(Op::Write, tag, &descriptor).await, descriptor.len(), None)
            }
            op::READ => {
                let buffer = self.buffer(&descriptor).await;
                let result = request::read(&self.target, &descriptor, &buffer, &self.stats).await;
                (result, descriptor.len(), Some(buffer))
            }
            op::WRITE if needs_data => {
                let buffer = self.buffer(&descriptor).await;
                let descriptor = match self.get_data(tag, &buffer).await {
                    Ok(descriptor) => descriptor,
                    Err(instead) => return instead,
                };
                let result = request::write(&self.target, &descriptor, &buffer, &self.stats).await;
                (result, descriptor.len(), None)
            }
            _ => (request::control(&self.target, &descriptor, &self.stats).await, 0, None),
        };
        if result.is_err() {
            self.stats.count_failure();
        }
        self.commit(tag, request::answer(result, bytes), read);
        None
    }

    /// Reads or writes the kernel's own buffer of `tag` if the device can use it, else a copy.
    async fn transfer(&self, op: Op, tag: u16, descriptor: &Descriptor) -> IoResult {
        let buffers = self.link.borrow().as_ref().and_then(|link| link.buffers);
        if let Some(ring) = buffers.filter(|_| !descriptor.has(op::F_NEED_REG_BUF)) {
            let result = request::registered(&self.target, op, descriptor, (ring, tag), &self.stats).await;
            if result != Err(IoError::Unsupported) {
                return result;
            }
        }
        self.transfer_copy(op, tag, descriptor).await
    }

    /// Reads or writes a buffer of the pool, and copies from or to the kernel's.
    async fn transfer_copy(&self, op: Op, tag: u16, descriptor: &Descriptor) -> IoResult {
        let file = self.link.borrow().as_ref().map(|link| link.file.clone()).ok_or(IoError::DeviceGone)?;
        let mut buffer = self.buffer(descriptor).await;
        if op == Op::Write {
            user_copy::fetch(&file, self.index, tag, buffer.as_mut_slice())?;
            return request::write(&self.target, descriptor, &buffer, &self.stats).await;
        }
        request::read(&self.target, descriptor, &buffer, &self.stats).await?;
        user_copy::deliver(&file, self.index, tag, buffer.as_slice())
    }

    /// A buffer for the whole request; waits while the core's buffers are in use.
    async fn buffer(&self, descriptor: &Descriptor) -> Buffer {
        let (len, most) = (descriptor.len(), u64::from(self.max_io));
        // The kernel knows this limit from the parameters and splits requests accordingly.
        assert!(len <= most, "the kernel sent a request of {len} bytes; at most {most} were allowed");
        self.buffers.take(len as usize).await
    }

    /// Requests the data of the write in `tag`. Returns the request's current descriptor, or as an
    /// error the request that has replaced it, if any.
    async fn get_data(&self, tag: u16, buffer: &Buffer) -> Result<Descriptor, Option<Arrival>> {
        let state = &self.data[usize::from(tag)];
        state.set(DataState::Asked);
        let addr = buffer.segment().base.expose_provenance() as u64;
        if self.push(io::NEED_GET_DATA, IoCommand { q_id: self.index, tag, result: 0, addr }).is_none() {
            state.set(DataState::Aborted);
        }
        poll_fn(|cx| match state.get() {
            DataState::Asked => {
                self.waiters[usize::from(tag)].replace(Some(cx.waker().clone()));
                Poll::Pending
            }
            _ => Poll::Ready(()),
        })
        .await;
        match state.replace(DataState::None) {
            DataState::Copied => match self.descriptor(tag) {
                Some(descriptor) if descriptor.op() == op::WRITE => Ok(descriptor),
                Some(_) => Err(Some(Arrival { tag, needs_data: false })),
                None => Err(None),
            },
            DataState::Replaced(arrival) => Err(Some(arrival)),
            DataState::None | DataState::Asked | DataState::Aborted => Err(None),
        }
    }

    /// Answers the request in `tag` and fetches its next one. `read` holds the data of a read.
    fn commit(&self, tag: u16, result: i32, read: Option<Buffer>) {
        // The kernel requires an address for every read, even without data to copy.
        let addr = read.as_ref().map_or(0, |buffer| buffer.segment().base.expose_provenance() as u64);
        let command = IoCommand { q_id: self.index, tag, result, addr };
        if self.push(io::COMMIT_AND_FETCH_REQ, command).is_some() {
            self.held.borrow_mut().extend(read);
        }
    }

    /// Queues a command for submission at the end of the turn. Returns `None` when the disk has
    /// ended.
    fn push(&self, op: u32, command: IoCommand) -> Option<()> {
        self.push_to(self.link.borrow().as_ref()?, op, command);
        self.handle().activate();
        Some(())
    }

    fn push_to(&self, link: &Link, op: u32, command: IoCommand) {
        let entry = UringCmd16::new(Fixed(0), op).cmd(command.to_bytes());
        let registration = (self.path != DataPath::Copy).then(|| buffer_registration(command.tag));
        let entry = entry.addr(registration).build().user_data(command.tag.into());
        // SAFETY: an address in the command is a buffer's. `get_data` keeps that buffer until
        // the kernel has copied it. `commit` moves it to `held` until the entry is submitted:
        // the kernel copies the data that was read when it takes the entry.
        unsafe { link.ring.push(&entry) };
    }

    fn descriptor(&self, tag: u16) -> Option<Descriptor> {
        Some(self.link.borrow().as_ref()?.descriptors.read(tag))
    }

    fn handle(&self) -> &SourceHandle {
        self.handle.get().expect("set before anything runs")
    }

    fn start_slot(&self, slot: u32) {
        let served = self.weak.upgrade().expect("the caller holds a reference");
        current().spawn(served.serve(slot));
    }

    /// Handles the completion of a tag's command.
    fn note(&self, tag: u16, result: i32) {
        let data = &self.data[usize::from(tag)];
        let is_awaited = data.get() == DataState::Asked;
        match result {
            RESULT_OK if is_awaited => data.set(DataState::Copied),
            RESULT_OK => self.ready.borrow_mut().push_back(Arrival { tag, needs_data: false }),
            RESULT_NEED_GET_DATA if is_awaited => {
                data.set(DataState::Replaced(Arrival { tag, needs_data: true }));
            }
            RESULT_NEED_GET_DATA => self.ready.borrow_mut().push_back(Arrival { tag, needs_data: true }),
            error => {
                if error != RESULT_ABORT {
                    let (error, queue) = (std::io::Error::from_raw_os_error(-error), self.index);
                    tracing::error!(export = self.name, queue, tag, %error, "the kernel refused a queue command");
                }
                self.tags_left.set(self.tags_left.get() - 1);
                if is_awaited {
                    data.set(DataState::Aborted);
                }
            }
        }
        if is_awaited && let Some(waiter) = self.waiters[usize::from(tag)].take() {
            waiter.wake();
        }
    }

    /// Reaps completions. Returns their number.
    fn reap(&self) -> usize {
        let link = self.link.borrow();
        let Some(link) = &*link else { return 0 };
        link.ring.reap(&mut |tag, result| self.note(tag as u16, result))
    }

    /// Releases the device: the disk was stopped, by this process or another. Its number is free
    /// only after that.
    #[cold]
    fn unlink(&self) {
        if let Some(link) = self.link.take() {
            link.ring.unregister();
        }
        self.forget();
    }

    #[cold]
    fn forget(&self) {
        self.held.borrow_mut().clear();
        self.connected.take();
    }
}

impl Source for Served {
    fn flush(&self) {
        let link = self.link.borrow();
        let Some(link) = &*link else { return };
        if link.ring.has_unsubmitted() {
            link.ring.submit();
        }
        if !link.ring.has_unsubmitted() {
            self.held.borrow_mut().clear();
        }
    }

    fn poll(&self) -> usize {
        let completed = self.reap();
        if completed > 0 && self.tags_left.get() == 0 {
            if !self.is_ending.swap(true, Ordering::Relaxed) {
                tracing::warn!(export = self.name, "disk removed by another process: the export has ended");
            }
            self.unlink();
        }
        let waiting = self.ready.borrow().len();
        let wanted = if self.is_inline.get() { waiting.min(1) } else { waiting };
        self.slots.wake_for(wanted, |slot| self.start_slot(slot));
        completed + waiting
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn arm(&self) -> bool {
        self.link.borrow().as_ref().is_none_or(|link| link.ring.arm()) && self.ready.borrow().is_empty()
    }

    fn disarm(&self) {
        if let Some(link) = &*self.link.borrow() {
            link.ring.disarm();
        }
    }
}

/// Waits for the next request; returns `None` when the slot is to end.
struct Next<'a> {
    served: &'a Served,
    slot: u32,
    /// Requests completed since the slot last waited.
    batch: &'a mut u32,
}

impl Future for Next<'_> {
    type Output = Option<Arrival>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Arrival>> {
        let Next { served, slot, batch } = self.get_mut();
        if !served.slots.may_look(*slot) {
            return Poll::Pending;
        }
        if served.is_stopping.get() {
            return Poll::Ready(None);
        }
        if **batch >= BATCH {
            **batch = 0;
            served.slots.look_again(*slot, cx.waker());
            return Poll::Pending;
        }
        if let Some(arrival) = served.ready.borrow_mut().pop_front() {
            **batch += 1;
            return Poll::Ready(Some(arrival));
        }
        **batch = 0;
        served.slots.wait(*slot, cx.waker());
        Poll::Pending
    }
}
