//! One virtqueue of a session as a leaf's rings.
//!
//! ```text
//!   push ─► where the data lies for the server ─► BlkQueue          kick ─► publish, eventfd if it sleeps
//!   reap ◄─ status ◄─ BlkQueue
//! ```
//!
//! Some requests go to the server several times in their slot before they are done: a write with FUA is followed
//! by a flush, and what is longer or in more pieces than the server takes goes part by part.

use super::regions::RegionCache;
use super::session::Session;
use super::transport::Doorbell;
use crate::direct::{DirectQueue, Spin, ZoneRequest, sleep_on_event};
use block::{Data, Flags, IoError, IoResult, Op, Queue, Request};
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
use vmm_sys_util::eventfd::EventFd;

/// How often a poll queue looks at its ring before it looks at the clock: some ten microseconds.
const SPINS: u32 = 200;

/// What a queue needs to know of the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueTraits {
    /// There is a flush command.
    pub(super) has_flush: bool,
    /// Writes may sit in a cache.
    pub(super) is_write_back: bool,
    /// There is a discard.
    pub(super) has_discard: bool,
    /// There is a write zeroes.
    pub(super) has_write_zeroes: bool,
    /// Longest segment.
    pub(super) size_max: u32,
    /// Logical block size.
    pub(super) block_size: u32,
}

/// What is left to do for a slot when its request comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing is in flight.
    Idle,
    /// The request is done then.
    Last,
    /// A flush follows.
    ThenFlush,
    /// Another part follows, which [`VirtioBlkQueue::rests`] has.
    ThenRest,
}

/// What a slot still has to ask of the server.
struct Pending {
    slot: u16,
    wire: Wire,
    data: Data<'static>,
    /// The step that comes behind its last part.
    then: Step,
}

// SAFETY: the pointers lead to memory that the request's owner keeps valid for the device until the completion was
// reaped, on whatever thread that is; nothing here reads or writes it.
unsafe impl Send for Pending {}

/// A request as virtio-blk has it.
#[derive(Clone, Copy, Debug)]
enum Wire {
    Transfer(Header),
    Range(u32, Range),
    Flush,
}

/// How far a request came.
enum Issued {
    /// All of it is in the ring.
    Whole,
    /// This many bytes are.
    Part(usize),
    /// Nothing: the ring is full.
    Nothing,
}

/// What a virtqueue is made of while it runs, whoever uses it.
pub(super) struct Parts {
    /// The rings.
    pub(super) queue: BlkQueue,
    /// Its number.
    pub(super) index: u16,
    /// Wakes the device.
    pub(super) doorbell: Doorbell,
    /// Wakes whoever waits for completions.
    pub(super) call: EventFd,
    /// Whether the device writes to `call`.
    pub(super) has_event: bool,
}

/// A virtqueue of a virtio-blk device. Dropping it gives it back to its session, after the device has let go of
/// the memory of requests in flight.
pub struct VirtioBlkQueue {
    /// Here until the queue is dropped.
    parts: ManuallyDrop<Parts>,
    session: Arc<Session>,
    depth: u16,
    is_polled: bool,
    /// How long a wait looks before it sleeps.
    spin: Spin,
    traits: QueueTraits,
    regions: RegionCache,
    steps: Box<[Step]>,
    /// Ended without the server: what [`Queue::reap`] hands over first.
    ready: Vec<(u16, IoResult)>,
    /// Found the ring full; only without indirect descriptors.
    waiting: VecDeque<Pending>,
    /// The next parts of long requests.
    rests: Vec<Pending>,
    /// Slots that came back and go on with their next step.
    to_go_on: Vec<u16>,
    buffers: Vec<Buffer>,
    is_broken: bool,
}

impl VirtioBlkQueue {
    pub(super) fn new(parts: Parts, session: Arc<Session>, depth: u16, is_polled: bool) -> Self {
        let slots = usize::from(depth);
        let max_segments = usize::from(parts.queue.config().max_segments);
        VirtioBlkQueue {
            traits: session.queue_traits(),
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
            to_go_on: Vec::with_capacity(slots),
            buffers: Vec::with_capacity(max_segments),
            is_broken: false,
        }
    }

    /// Which virtqueue of the device this is.
    pub fn index(&self) -> u16 {
        self.parts.index
    }

    /// The session it belongs to.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The virtqueue below, for tests that say things to the server that no request says.
    pub fn virtqueue(&mut self) -> &mut BlkQueue {
        &mut self.parts.queue
    }

    /// Asks the server for the device's identity (serial number) and waits for it; text up to the first zero
    /// byte. The queue must be idle.
    ///
    /// # Errors
    /// What the server answers, or that it does not.
    ///
    /// # Panics
    /// When requests are in flight.
    pub fn read_id(&mut self, timeout: Duration) -> Result<String, IoError> {
        assert!(self.steps.iter().all(|step| *step == Step::Idle), "the queue is not idle");
        if self.is_broken || self.parts.queue.push_get_id(0).is_err() {
            return Err(IoError::DeviceGone);
        }
        self.steps[0] = Step::Last;
        self.kick();
        let start = Instant::now();
        let mut result = None;
        while self.reap(&mut |_, r| result = Some(r)) == 0 {
            if start.elapsed() > timeout {
                // The slot is lost to a request that may still come back: the queue cannot be used any more.
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

    /// The request as it goes over the wire. Nothing: it is done as it is.
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
                // Set whatever the configuration's write_zeroes_may_unmap says: servers deallocate that do not say so
                // (qemu-storage-daemon), and to the others it means nothing.
                let flags = if req.flags.contains(Flags::NO_UNMAP) { 0 } else { RANGE_F_UNMAP };
                Some(Wire::Range(VIRTIO_BLK_T_WRITE_ZEROES, range(flags)))
            }
        }
    }

    /// Puts a request into the ring, or as much of it as the server takes at once.
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

    /// Fills `buffers` with the window's first segments, as many whole blocks as the server takes at once:
    /// none longer than it takes, neighbours in memory joined. Returns how many bytes that are.
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
        // Not one block in as many pieces as the server takes.
        if total == 0 { Err(IoError::Invalid) } else { Ok(total) }
    }

    /// Issues a request and remembers what is left of it; gives it back when the ring is full now.
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

    /// Takes the next step of requests that came back, and starts what found the ring full.
    #[cold]
    fn go_on(&mut self) {
        while let Some(slot) = self.to_go_on.pop() {
            let rest = self.rests.iter().position(|rest| rest.slot == slot);
            let flush = Pending { slot, wire: Wire::Flush, data: Data::none(), then: Step::Last };
            let next = rest.map_or(flush, |i| self.rests.swap_remove(i));
            self.waiting.push_front(next);
        }
        while let Some(next) = self.waiting.pop_front() {
            let slot = next.slot;
            match self.start(next) {
                Ok(None) => {}
                // What came first stays first, or long requests would never find room.
                Ok(Some(again)) => {
                    self.waiting.push_front(again);
                    break;
                }
                Err(error) => self.ready.push((slot, Err(error))),
            }
        }
        self.kick();
    }

    /// Waits until the device has let go of every request, where giving the virtqueue back does not see to that.
    /// A device that does not is taken out of use.
    fn drain(&mut self) {
        if !self.session.keeps_queues() {
            return;
        }
        self.disarm();
        self.kick();
        let start = Instant::now();
        while self.parts.queue.in_flight() > 0 && !self.session.is_gone() {
            if self.parts.queue.reap(|_, _| ()).is_err() || start.elapsed() > self.session.timeout() {
                tracing::error!(device = %self.session.name(), queue = self.parts.index, "requests do not end");
                self.session.shutdown();
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Ends everything in flight: the server is gone, or broke the ring.
    #[cold]
    fn fail_all(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        self.is_broken = true;
        self.waiting.clear();
        self.rests.clear();
        self.to_go_on.clear();
        self.ready.clear();
        let mut count = 0;
        for (slot, step) in self.steps.iter_mut().enumerate() {
            if std::mem::replace(step, Step::Idle) != Step::Idle {
                count += 1;
                done(slot as u32, Err(IoError::DeviceGone));
            }
        }
        count
    }

    /// Whether [`Queue::reap`] has something to hand over.
    fn has_ended(&self) -> bool {
        self.parts.queue.has_used() || !self.ready.is_empty() || self.is_broken || self.session.is_gone()
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

    /// Hands over what ended here, then what the server has finished with.
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
        let (steps, to_go_on) = (&mut self.steps, &mut self.to_go_on);
        let reaped = self.parts.queue.reap(|slot, status| {
            let result = result_of(status);
            let step = &mut steps[usize::from(slot)];
            if *step != Step::Last && result.is_ok() {
                to_go_on.push(slot);
                return;
            }
            *step = Step::Idle;
            done(slot.into(), result);
            count += 1;
        });
        if let Err(broken) = reaped {
            tracing::error!(device = %self.session.name(), queue = self.parts.index, %broken, "the server broke the ring");
            // Whoever breaks one ring is not to be trusted with the others, nor with memory that comes later.
            self.session.shutdown();
            return count + self.fail_all(done);
        }
        if !self.to_go_on.is_empty() || (count > 0 && !self.waiting.is_empty()) {
            self.go_on();
        }
        count
    }
}

impl Queue for VirtioBlkQueue {
    fn depth(&self) -> u32 {
        self.depth.into()
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        if self.is_broken {
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
        let count = self.reap_once(done);
        if count > 0 || !self.session.is_gone() || self.is_broken {
            return count;
        }
        // What the server finished before it vanished is done; the rest is not.
        let count = self.reap_once(done);
        count + self.fail_all(done)
    }

    fn event_fd(&self) -> Option<RawFd> {
        (!self.is_polled).then(|| self.parts.call.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        self.parts.queue.arm() && self.ready.is_empty() && !self.session.is_gone()
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
            // The server may need this very processor.
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
        // SAFETY: nothing uses them any more.
        let parts = unsafe { ManuallyDrop::take(&mut self.parts) };
        self.session.give_back(parts);
    }
}

impl Wire {
    /// The same request without its first `len` bytes.
    fn after(self, len: usize) -> Wire {
        match self {
            Wire::Transfer(header) => {
                Wire::Transfer(Header { sector: header.sector + len as u64 / SECTOR_BYTES, ..header })
            }
            Wire::Range(..) | Wire::Flush => self,
        }
    }
}

/// How far a request came that was pushed; `all` when it is in the ring.
#[inline]
fn issued(pushed: Result<(), PushError>, all: Issued) -> Result<Issued, IoError> {
    match pushed {
        Ok(()) => Ok(all),
        Err(PushError::Full) => Ok(Issued::Nothing),
        Err(PushError::TooManySegments) => Err(IoError::Invalid),
    }
}

/// What a status byte says.
#[inline]
fn result_of(status: u8) -> IoResult {
    match status {
        VIRTIO_BLK_S_OK => Ok(()),
        VIRTIO_BLK_S_UNSUPP => Err(IoError::Unsupported),
        // IOERR and everything that the specification does not know.
        _ => Err(IoError::Medium),
    }
}
