//! One virtqueue of a session as a driver's queue.
//!
//! ```text
//!   push ─► the server's addresses of the data ─► BlkQueue          kick ─► publish, eventfd if it sleeps
//!   reap ◄─ status ◄─ BlkQueue
//! ```
//!
//! Some requests are submitted to the server several times in the same slot. A write with FUA is
//! followed by a flush, and a request that exceeds the server's length or segments is split.
//!
//! If the session reconnects, requests stay in the rings while there is no server. The next server
//! either continues these rings, or serves empty ones. Then the queue starts all requests again
//! that were not answered ([`VirtioBlkQueue::adopt`]).

use super::parts::{Parts, QueueTraits, Renewed};
use super::regions::RegionCache;
use super::session::Session;
use block::{Data, DeviceError, Flags, IoError, IoResult, Op, Queue, Request};
use drivers::direct::{DirectQueue, Spin, ZoneRequest, sleep_on_event};
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio::blk::{
    Header, ID_BYTES, RANGE_F_UNMAP, Range, SECTOR_BYTES, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio::driver::{BlkQueue, Buffer, PushError};

/// Number of polls between two looks at the clock: some ten microseconds.
const SPINS: u32 = 200;

/// Next step of a slot when the server completes its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// No request is in flight.
    Idle,
    /// The request is complete.
    Last,
    /// Submit a flush.
    ThenFlush,
    /// Submit the next part, which is in [`VirtioBlkQueue::rests`].
    ThenRest,
}

/// Work of a slot that is not submitted yet.
#[derive(Clone, Copy)]
struct Pending {
    slot: u16,
    wire: Wire,
    data: Data<'static>,
    /// The step after its last part.
    then: Step,
}

// SAFETY: the pointers lead to memory that the request's owner keeps valid for the device until the
// completion is reaped. No code here reads or writes it, on any thread.
unsafe impl Send for Pending {}

/// A request in the form of virtio-blk.
#[derive(Clone, Copy, Debug)]
enum Wire {
    Transfer(Header),
    Range(u32, Range),
    Flush,
}

/// A request as its caller pushed it, and its place in the order of all requests.
type Kept = Option<(u64, Pending)>;

/// Submitted part of a request.
enum Issued {
    /// The whole request is in the ring.
    Whole,
    /// This number of bytes is in the ring.
    Part(usize),
    /// The ring is full.
    Nothing,
}

/// A virtqueue of a virtio-blk device. Dropping it returns it to its session, once the device has
/// released the memory of requests in flight.
pub struct VirtioBlkQueue {
    /// Present until the queue is dropped.
    parts: ManuallyDrop<Parts>,
    session: Arc<Session>,
    depth: u16,
    is_polled: bool,
    /// Time for which a wait polls before it sleeps.
    spin: Spin,
    traits: QueueTraits,
    regions: RegionCache,
    steps: Box<[Step]>,
    /// Results of requests that ended without the server, which [`Queue::reap`] returns first.
    ready: Vec<(u16, IoResult)>,
    /// Requests that found the ring full; only without indirect descriptors.
    waiting: VecDeque<Pending>,
    /// The next parts of long requests.
    rests: Vec<Pending>,
    /// Slots whose request was completed and has a next step.
    to_continue: Vec<u16>,
    buffers: Vec<Buffer>,
    /// The request of each slot, to start it again; empty if the session does not reconnect.
    kept: Box<[Kept]>,
    /// Number of requests that were kept.
    sequence: u64,
    /// Whether requests fail until the device returns.
    is_late: bool,
    /// Whether the device has returned and completed nothing since.
    awaits_progress: bool,
    is_broken: bool,
}

impl Session {
    /// Starts the first virtqueue that is not in use. It signals completions through an event.
    ///
    /// # Errors
    /// When all are in use, the session has not been started, or the device fails.
    pub fn start_queue(self: &Arc<Self>) -> Result<VirtioBlkQueue, DeviceError> {
        VirtioBlkQueue::take(self, false)
    }

    /// As [`Session::start_queue`], for a queue without events: its user polls.
    ///
    /// # Errors
    /// As [`Session::start_queue`].
    pub fn start_poll_queue(self: &Arc<Self>) -> Result<VirtioBlkQueue, DeviceError> {
        VirtioBlkQueue::take(self, true)
    }
}

impl VirtioBlkQueue {
    fn take(session: &Arc<Session>, is_polled: bool) -> Result<VirtioBlkQueue, DeviceError> {
        let (parts, depth) = session.take_queue(is_polled)?;
        Ok(VirtioBlkQueue::new(parts, session.clone(), depth, is_polled))
    }

    fn new(parts: Parts, session: Arc<Session>, depth: u16, is_polled: bool) -> Self {
        let slots = usize::from(depth);
        let max_segments = usize::from(parts.queue.config().max_segments);
        let traits = session.queue_traits();
        VirtioBlkQueue {
            kept: vec![None; if traits.reconnects { slots } else { 0 }].into(),
            sequence: 0,
            is_late: false,
            awaits_progress: false,
            traits,
            parts: ManuallyDrop::new(parts),
            session,
            depth,
            is_polled,
            spin: Spin::new(),
            regions: RegionCache::new(),
            steps: vec![Step::Idle; slots].into(),
            ready: Vec::with_capacity(slots),
            waiting: VecDeque::new(),
            rests: Vec::new(),
            to_continue: Vec::with_capacity(slots),
            buffers: Vec::with_capacity(max_segments),
            is_broken: false,
        }
    }

    /// Index of the virtqueue.
    pub fn index(&self) -> u16 {
        self.parts.index
    }

    /// The session of the virtqueue.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The underlying virtqueue, for tests that send malformed requests to the server.
    pub fn virtqueue(&mut self) -> &mut BlkQueue {
        &mut self.parts.queue
    }

    /// Reads the device's identity (serial number) and waits for the answer. Returns the text up to
    /// the first zero byte. The queue must be idle.
    ///
    /// # Errors
    /// The server's error, or a timeout.
    ///
    /// # Panics
    /// When requests are in flight.
    pub fn read_id(&mut self, timeout: Duration) -> Result<String, IoError> {
        assert!(self.steps.iter().all(|step| *step == Step::Idle), "the queue is not idle");
        if self.is_broken || self.parts.queue.push_get_id(0).is_err() {
            return Err(IoError::DeviceGone);
        }
        self.steps[0] = Step::Last;
        if let Some(kept) = self.kept.first_mut() {
            *kept = None;
        }
        self.kick();
        let start = Instant::now();
        let mut result = None;
        while self.reap(&mut |_, r| result = Some(r)) == 0 {
            if start.elapsed() > timeout {
                // A request that may still complete occupies the slot, so the queue is unusable.
                self.is_broken = true;
                return Err(IoError::TimedOut);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        result.unwrap_or(Err(IoError::DeviceGone))?;
        let id: [u8; ID_BYTES] = self.parts.queue.id(0);
        let text = id.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// The request in the form of virtio-blk. `None`: it needs no request.
    fn wire(&self, req: &Request<'_>, offset: u64) -> Option<Wire> {
        let sector = offset / SECTOR_BYTES;
        let range = |flags| Range { sector, num_sectors: (req.len / SECTOR_BYTES) as u32, flags };
        let transfer = |kind| Some(Wire::Transfer(Header { kind, ioprio: 0, sector }));
        match req.op {
            Op::Flush => self.traits.has_flush.then_some(Wire::Flush),
            _ if req.len == 0 => None,
            Op::Read => transfer(VIRTIO_BLK_T_IN),
            Op::Write => transfer(VIRTIO_BLK_T_OUT),
            Op::Discard => Some(Wire::Range(VIRTIO_BLK_T_DISCARD, range(0))),
            Op::WriteZeroes => {
                // Set whatever the configuration's write_zeroes_may_unmap says. Some servers
                // deallocate without reporting it (qemu-storage-daemon); the others ignore the
                // flag.
                let flags = if req.flags.contains(Flags::NO_UNMAP) { 0 } else { RANGE_F_UNMAP };
                Some(Wire::Range(VIRTIO_BLK_T_WRITE_ZEROES, range(flags)))
            }
        }
    }

    /// Adds a request to the ring, or as much of it as the server accepts at once.
    #[inline]
    fn issue(&mut self, slot: u16, wire: Wire, data: Data<'_>) -> Result<Issued, IoError> {
        let pushed = match wire {
            Wire::Transfer(header) => match data.as_single() {
                Some(segment) if segment.len <= self.traits.size_max as usize => {
                    let addr = self.guest_addr(segment.base, segment.len)?;
                    let buffer = Buffer { addr, len: segment.len as u32 };
                    self.parts.queue.push_single(slot, header, buffer, header.kind == VIRTIO_BLK_T_IN)
                }
                _ => return self.issue_scattered(slot, header, data),
            },
            Wire::Range(kind, range) => self.parts.queue.push_range(slot, kind, range),
            Wire::Flush => self.parts.queue.push(
                slot,
                Header { kind: VIRTIO_BLK_T_FLUSH, ioprio: 0, sector: 0 },
                &[],
                false,
            ),
        };
        issued(pushed, Issued::Whole)
    }

    fn issue_scattered(&mut self, slot: u16, header: Header, data: Data<'_>) -> Result<Issued, IoError> {
        let len = self.gather(data)?;
        let pushed = self.parts.queue.push(slot, header, &self.buffers, header.kind == VIRTIO_BLK_T_IN);
        issued(pushed, if len == data.len() { Issued::Whole } else { Issued::Part(len) })
    }

    #[inline]
    fn guest_addr(&mut self, base: *const u8, len: usize) -> Result<u64, IoError> {
        self.regions.guest_addr(self.session.regions(), base, len).ok_or(IoError::Invalid)
    }

    /// Fills `buffers` with the window's first segments, as many whole blocks as the server accepts
    /// at once. Each segment is within the server's limit, and adjacent memory is joined. Returns
    /// the number of bytes.
    fn gather(&mut self, data: Data<'_>) -> Result<usize, IoError> {
        self.buffers.clear();
        let (most, size_max) =
            (usize::from(self.parts.queue.config().max_segments), u64::from(self.traits.size_max));
        let mut total = 0;
        'segments: for segment in data.iter() {
            let mut addr = self.guest_addr(segment.base, segment.len)?;
            let mut left = segment.len as u64;
            while left > 0 {
                let joins =
                    |b: &&mut Buffer| b.addr + u64::from(b.len) == addr && u64::from(b.len) < size_max;
                let mut len = left.min(size_max);
                if let Some(last) = self.buffers.last_mut().filter(joins) {
                    len = left.min(size_max - u64::from(last.len));
                    last.len += len as u32;
                } else if self.buffers.len() < most {
                    self.buffers.push(Buffer { addr, len: len as u32 });
                } else {
                    break 'segments;
                }
                addr += len;
                left -= len;
                total += len as usize;
            }
        }
        if total == data.len() {
            return Ok(total);
        }
        let mut excess = total as u32 % self.traits.block_size;
        total -= excess as usize;
        while let Some(last) = self.buffers.last_mut().filter(|_| excess > 0) {
            let cut = excess.min(last.len);
            last.len -= cut;
            excess -= cut;
            if last.len == 0 {
                self.buffers.pop();
            }
        }
        // The server's limit of segments does not allow even one block.
        if total == 0 { Err(IoError::Invalid) } else { Ok(total) }
    }

    /// Submits a request and stores the rest of it; returns it when the ring is full.
    #[inline]
    fn start(&mut self, pending: Pending) -> Result<Option<Pending>, IoError> {
        let Pending { slot, wire, data, then } = pending;
        let issued = self.issue(slot, wire, data)?;
        self.steps[usize::from(slot)] = then;
        match issued {
            Issued::Whole => Ok(None),
            Issued::Nothing => Ok(Some(pending)),
            Issued::Part(len) => {
                let rest =
                    Pending { wire: wire.after(len), data: data.part(len, data.len() - len), ..pending };
                self.rests.push(rest);
                self.steps[usize::from(slot)] = Step::ThenRest;
                Ok(None)
            }
        }
    }

    /// Submits the next step of completed requests, then requests that found the ring full.
    #[cold]
    fn continue_slots(&mut self) {
        while let Some(slot) = self.to_continue.pop() {
            let rest = self.rests.iter().position(|rest| rest.slot == slot);
            let flush = Pending { slot, wire: Wire::Flush, data: Data::none(), then: Step::Last };
            let next = rest.map_or(flush, |i| self.rests.swap_remove(i));
            self.waiting.push_front(next);
        }
        while let Some(next) = self.waiting.pop_front() {
            let slot = next.slot;
            match self.start(next) {
                Ok(None) => {}
                // Requests keep their order; otherwise long ones would never find room.
                Ok(Some(again)) => {
                    self.waiting.push_front(again);
                    break;
                }
                Err(error) => self.ready.push((slot, Err(error))),
            }
        }
        self.kick();
    }

    /// Waits until the device has completed every request, unless stopping the virtqueue ensures
    /// that. A device that does not is shut down.
    fn drain(&mut self) {
        if !self.session.keeps_queues() {
            return;
        }
        self.disarm();
        self.kick();
        let start = Instant::now();
        while self.parts.queue.in_flight() > 0 && !self.session.is_gone() {
            if self.parts.queue.reap(|_, _| ()).is_err() || start.elapsed() > self.session.timeout() {
                tracing::error!(device = %self.session.name(), queue = self.parts.index, "requests did not complete in time");
                self.session.shutdown();
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Ends all requests in flight with an error: the device is lost, or the server broke the ring.
    #[cold]
    fn fail_all(&mut self) {
        self.forget_parts();
        for (slot, step) in (0..).zip(&mut self.steps) {
            if std::mem::replace(step, Step::Idle) != Step::Idle {
                self.ready.push((slot, Err(IoError::DeviceGone)));
            }
        }
    }

    /// Forgets the parts of requests that are not submitted yet.
    fn forget_parts(&mut self) {
        self.waiting.clear();
        self.rests.clear();
        self.to_continue.clear();
    }

    /// Handles the events of the device's loss and return.
    #[cold]
    fn hear(&mut self) {
        // Requests that the server completed before it was lost are done.
        let mut ended = Vec::new();
        self.reap_once(&mut |slot, result| ended.push((slot as u16, result)));
        self.ready.append(&mut ended);
        let events = self.parts.mailbox.take();
        self.is_broken |= events.is_gone;
        if self.is_broken {
            return self.fail_all();
        }
        if events.is_late {
            self.is_late = true;
            self.awaits_progress = false;
            self.fail_all();
        }
        if events.is_back {
            self.is_late = false;
            self.awaits_progress = true;
        }
        if let Some(renewed) = events.renewed {
            self.adopt(renewed);
        }
    }

    /// Continues with other rings, in which all requests that were not answered start again, in the
    /// order in which they were pushed. The module [`super::vhost_user`] says why that is correct.
    fn adopt(&mut self, renewed: Renewed) {
        let Renewed { queue, doorbell } = renewed;
        (self.parts.queue, self.parts.doorbell) = (queue, doorbell);
        self.forget_parts();
        let is_busy = |slot: &u16| self.steps[usize::from(*slot)] != Step::Idle;
        let mut slots: Vec<u16> = (0..self.depth).filter(is_busy).collect();
        slots.sort_by_key(|slot| self.kept[usize::from(*slot)].map(|(sequence, _)| sequence));
        for slot in slots {
            match self.kept[usize::from(slot)] {
                Some((_, pending)) => {
                    self.steps[usize::from(slot)] = pending.then;
                    self.waiting.push_back(pending);
                }
                // A query of the identity, whose caller waits only briefly.
                None => self.ready.push((slot, Err(IoError::DeviceGone))),
            }
        }
        self.continue_slots();
    }

    /// Whether [`Queue::reap`] would return a result.
    fn has_ended(&self) -> bool {
        self.parts.queue.has_used()
            || !self.ready.is_empty()
            || self.is_broken
            || self.parts.mailbox.has_events()
    }

    /// As [`VirtioBlkQueue::has_ended`], after spinning for a moment.
    fn has_soon_ended(&self) -> bool {
        for _ in 0..SPINS {
            if self.has_ended() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Returns the results from this queue, then those from the server.
    #[inline]
    fn reap_once(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let mut count = 0;
        for (slot, result) in self.ready.drain(..) {
            self.steps[usize::from(slot)] = Step::Idle;
            done(slot.into(), result);
            count += 1;
        }
        if self.is_broken {
            return count;
        }
        let (steps, to_continue) = (&mut self.steps, &mut self.to_continue);
        let reaped = self.parts.queue.reap(|slot, status| {
            let result = result_of(status);
            let step = &mut steps[usize::from(slot)];
            if *step != Step::Last && result.is_ok() {
                to_continue.push(slot);
                return;
            }
            *step = Step::Idle;
            done(slot.into(), result);
            count += 1;
        });
        if let Err(broken) = reaped {
            tracing::error!(device = %self.session.name(), queue = self.parts.index, %broken, "the server broke the ring");
            // A server that breaks one ring is not trusted with the others, nor with memory added
            // later.
            self.session.shutdown();
            self.is_broken = true;
            self.fail_all();
            return count + self.reap_once(done);
        }
        if !self.to_continue.is_empty() || (count > 0 && !self.waiting.is_empty()) {
            self.continue_slots();
        }
        count
    }
}

impl Queue for VirtioBlkQueue {
    fn depth(&self) -> u32 {
        self.depth.into()
    }

    #[inline]
    fn reaches(&mut self, data: &Data<'_>) -> bool {
        self.regions.reaches(self.session.regions(), data)
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        if self.is_late && self.parts.mailbox.has_events() {
            self.hear();
        }
        if self.is_broken || self.is_late {
            return Err(IoError::DeviceGone);
        }
        let is_missing = match req.op {
            Op::Discard => !self.traits.has_discard,
            Op::WriteZeroes => !self.traits.has_write_zeroes,
            Op::Read | Op::Write | Op::Flush => false,
        };
        if is_missing {
            return Err(IoError::Unsupported);
        }
        let slot = slot as u16;
        let Some(wire) = self.wire(req, offset) else {
            self.steps[usize::from(slot)] = Step::Last;
            self.ready.push((slot, Ok(())));
            return Ok(());
        };
        let then_flush = self.traits.is_write_back && req.is_fua() && req.op.is_modifying();
        let then = if then_flush { Step::ThenFlush } else { Step::Last };
        // SAFETY: the caller keeps the window's list and memory until the completion was reaped.
        let data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        let pending = Pending { slot, wire, data, then };
        if let Some(kept) = self.kept.get_mut(usize::from(slot)) {
            *kept = Some((self.sequence, pending));
            self.sequence += 1;
        }
        if !self.waiting.is_empty() {
            self.steps[usize::from(slot)] = then;
            self.waiting.push_back(pending);
        } else if let Some(pending) = self.start(pending)? {
            self.waiting.push_back(pending);
        }
        Ok(())
    }

    #[inline]
    fn kick(&mut self) {
        if self.parts.queue.publish() {
            self.parts.doorbell.ring();
        }
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let mut count = self.reap_once(done);
        if self.parts.mailbox.has_events() {
            self.hear();
            count += self.reap_once(done);
        }
        if self.awaits_progress && count > 0 {
            self.awaits_progress = false;
            self.session.note_progress();
        }
        count
    }

    fn event_fd(&self) -> Option<RawFd> {
        (!self.is_polled).then(|| self.parts.call.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        self.parts.queue.arm() && self.ready.is_empty() && !self.is_broken && !self.parts.mailbox.has_events()
    }

    fn disarm(&mut self) {
        self.parts.queue.disarm();
    }
}

impl DirectQueue for VirtioBlkQueue {
    fn wait(
        &mut self,
        _at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        self.kick();
        if !self.is_polled {
            let mut spin = std::mem::take(&mut self.spin);
            let has_ended = spin.until(timeout, || self.has_ended());
            self.spin = spin;
            return if has_ended { Ok(()) } else { sleep_on_event(self, timeout, signal_mask) };
        }
        let start = Instant::now();
        while !self.has_soon_ended() {
            if timeout.is_some_and(|timeout| start.elapsed() >= timeout) {
                return Err(io::Error::from_raw_os_error(libc::ETIME));
            }
            // The server may need this processor.
            std::thread::yield_now();
        }
        Ok(())
    }

    unsafe fn push_zone(&mut self, _slot: u32, _req: ZoneRequest) -> IoResult {
        Err(IoError::Unsupported)
    }
}

impl Drop for VirtioBlkQueue {
    fn drop(&mut self) {
        self.drain();
        // SAFETY: the parts are not used afterwards.
        let parts = unsafe { ManuallyDrop::take(&mut self.parts) };
        self.session.give_back(parts);
    }
}

impl Wire {
    /// The rest of the request after its first `len` bytes.
    fn after(self, len: usize) -> Wire {
        match self {
            Wire::Transfer(header) => {
                Wire::Transfer(Header { sector: header.sector + len as u64 / SECTOR_BYTES, ..header })
            }
            Wire::Range(..) | Wire::Flush => self,
        }
    }
}

/// The submitted part of a request; `all` when it is in the ring.
#[inline]
fn issued(pushed: Result<(), PushError>, all: Issued) -> Result<Issued, IoError> {
    match pushed {
        Ok(()) => Ok(all),
        Err(PushError::Full) => Ok(Issued::Nothing),
        Err(PushError::TooManySegments) => Err(IoError::Invalid),
    }
}

/// The result for a status byte.
#[inline]
fn result_of(status: u8) -> IoResult {
    match status {
        VIRTIO_BLK_S_OK => Ok(()),
        VIRTIO_BLK_S_UNSUPP => Err(IoError::Unsupported),
        // IOERR and every status that the specification does not define.
        _ => Err(IoError::Medium),
    }
}
