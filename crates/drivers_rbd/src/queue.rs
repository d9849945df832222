//! The operations of one core on an image.
//!
//! ```text
//!   push ─► rbd_aio_readv, … ─► librbd's threads ─► ended() ─► CompletionRing ─► reap
//! ```
//!
//! librbd submits each operation at once, so `kick` has nothing to do. It copies the data of writes
//! before its functions return; reads fill the caller's memory, and the list of segments is read
//! again at their end.

use super::error::{error_of, result_of};
use super::image::{ImageHandle, Operation};
use super::library::{Completion, Library};
use block::{Flags, HostRole, IoError, IoResult, Op, Queue, Request, Segment, SharedRole};
use drivers::direct::{DirectQueue, ZoneRequest, sleep_on_event};
use reactor::CompletionRing;
use std::ffi::c_void;
use std::io;
use std::os::fd::RawFd;
use std::ptr::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The state that all queues of an open image share.
pub(super) struct RbdShared {
    pub(super) name: String,
    pub(super) image: ImageHandle,
    /// Whether completed writes may be in the cache of this process.
    pub(super) is_cached: bool,
    /// Set with the first request that failed because the cluster has shut this client out.
    pub(super) is_shut_out: AtomicBool,
    /// The role of this host, if the image is also served by others.
    pub(super) role: Option<Arc<SharedRole>>,
}

impl RbdShared {
    /// Reports once that the cluster refuses this client.
    #[cold]
    fn report_gone(&self) {
        if !self.is_shut_out.swap(true, Ordering::Relaxed) {
            tracing::error!(
                device = self.name,
                "requests fail: the image was removed, another client has its lock, or the cluster has \
                 blocklisted this client"
            );
        }
        if let Some(role) = &self.role {
            role.set(HostRole::Fenced);
        }
    }
}

/// The operations of one core on an image. Dropping it waits until they have ended, as long as the
/// cluster takes for them.
pub struct RbdQueue {
    shared: Arc<RbdShared>,
    ring: Box<CompletionRing>,
    places: Box<[Place]>,
    slots: Box<[Slot]>,
    /// Number of operations that were started.
    started: u64,
}

/// The argument of a slot's callbacks.
struct Place {
    library: *const Library,
    ring: *const CompletionRing,
    slot: u32,
}

/// The request of a slot.
#[derive(Default)]
struct Slot {
    /// The list that librbd uses; kept for the next request.
    segments: Vec<Segment>,
    /// Bytes that a read must return.
    read_len: u64,
    /// Whether a flush follows: a write with FUA into a cache.
    must_flush: bool,
}

// SAFETY: the pointers lead to the queue's own ring, to functions, and to memory of requests, which
// any thread may use.
unsafe impl Send for RbdQueue {}

/// Called by librbd when an operation has ended.
unsafe extern "C" fn ended(completion: Completion, argument: *mut c_void) {
    let place: *const Place = argument.cast_const().cast();
    // SAFETY: the argument is a place of a queue, which waits for this callback.
    let Place { library, ring, slot } = unsafe { place.read() };
    // SAFETY: the table of functions lives for ever, and the completion is that of this operation.
    let result = unsafe {
        let result = ((*library).rbd_aio_get_return_value)(completion);
        ((*library).rbd_aio_release)(completion);
        result
    };
    // SAFETY: the queue waits until the ring has counted this call.
    unsafe { CompletionRing::post(ring, slot, result as i64) };
}

impl RbdQueue {
    /// A queue for `depth` operations in flight.
    pub(super) fn new(shared: Arc<RbdShared>, depth: u32) -> io::Result<RbdQueue> {
        let ring = Box::new(CompletionRing::new(depth)?);
        let library = shared.image.table();
        let place = |slot| Place { library, ring: from_ref(&*ring), slot };
        Ok(RbdQueue {
            places: (0..depth).map(place).collect(),
            slots: (0..depth).map(|_| Slot::default()).collect(),
            started: 0,
            shared,
            ring,
        })
    }

    /// Starts an operation of a slot.
    ///
    /// # Safety
    /// As [`Queue::push`].
    unsafe fn start(&mut self, slot: u32, operation: Operation<'_>) -> IoResult {
        let argument = from_ref(&self.places[slot as usize]).cast_mut().cast();
        // SAFETY: the lists of reads belong to their slots. Drop keeps places and ring until all
        // callbacks have left them.
        let started = unsafe { self.shared.image.start(operation, ended, argument) };
        if let Err(errno) = started {
            return Err(self.reported(error_of(errno)));
        }
        self.started += 1;
        Ok(())
    }

    /// Starts a request, whatever the role of this host.
    ///
    /// # Safety
    /// As [`Queue::push`].
    pub(super) unsafe fn submit(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        let is_thick = req.flags.contains(Flags::NO_UNMAP);
        if req.op == Op::WriteZeroes && is_thick && req.flags.contains(Flags::NO_FALLBACK) {
            // librbd writes such zeroes as data.
            return Err(IoError::Unsupported);
        }
        let state = &mut self.slots[slot as usize];
        state.segments.clear();
        state.segments.extend(req.data.iter());
        state.read_len = if req.op == Op::Read { req.len } else { 0 };
        let may_need_flush = matches!(req.op, Op::Write | Op::WriteZeroes);
        state.must_flush = self.shared.is_cached && req.is_fua() && may_need_flush;
        let segments = std::mem::take(&mut state.segments);
        let operation = match req.op {
            Op::Read => Operation::Read(&segments, offset),
            Op::Write => Operation::Write(&segments, offset),
            Op::Discard => Operation::Discard { offset, len: req.len },
            Op::WriteZeroes => Operation::WriteZeroes { offset, len: req.len, is_thick },
            Op::Flush => Operation::Flush,
        };
        // SAFETY: by the contract of this function.
        let result = unsafe { self.start(slot, operation) };
        // Moving the vector leaves its elements where librbd reads them.
        self.slots[slot as usize].segments = segments;
        result
    }

    fn reported(&self, error: IoError) -> IoError {
        if error == IoError::DeviceGone {
            self.shared.report_gone();
        }
        error
    }

    /// Handles the end of a slot's operation. Returns the result of its request, or `None` if a
    /// flush was started.
    fn conclude(&mut self, slot: u32, value: i64) -> Option<IoResult> {
        let state = &mut self.slots[slot as usize];
        let (read_len, must_flush) = (state.read_len, std::mem::take(&mut state.must_flush));
        match result_of(value) {
            Err(error) => Some(Err(self.reported(error))),
            // The image shrank.
            Ok(()) if (value as u64) < read_len => Some(Err(IoError::OutOfRange)),
            // SAFETY: a flush uses no memory.
            Ok(()) if must_flush => unsafe { self.start(slot, Operation::Flush) }.err().map(Err),
            Ok(()) => Some(Ok(())),
        }
    }
}

impl Queue for RbdQueue {
    fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        match (&self.shared.role, req.op) {
            (Some(role), Op::Flush) if role.get() == HostRole::Standby => {
                // Completed writes are on all replicas; librbd would ask for the lock.
                self.slots[slot as usize].read_len = 0;
                self.started += 1;
                // SAFETY: the queue's own ring.
                unsafe { CompletionRing::post(from_ref(&*self.ring), slot, 0) };
                Ok(())
            }
            (Some(role), op) if op != Op::Flush && !role.is_active() => Err(IoError::DeviceGone),
            // SAFETY: by the contract of this function.
            _ => unsafe { self.submit(slot, req, offset) },
        }
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let mut count = 0;
        while let Some((slot, value)) = self.ring.pop() {
            if let Some(result) = self.conclude(slot, value) {
                count += 1;
                done(slot, result);
            }
        }
        count
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.ring.event_fd())
    }

    fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

impl DirectQueue for RbdQueue {
    fn wait(
        &mut self,
        _at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        sleep_on_event(self, timeout, signal_mask)
    }

    unsafe fn push_zone(&mut self, _slot: u32, _req: ZoneRequest) -> IoResult {
        Err(IoError::Unsupported)
    }
}

impl Drop for RbdQueue {
    fn drop(&mut self) {
        // Mostly the end of a callback whose completion was reaped already.
        let mut pause = Duration::ZERO;
        while self.ring.returned() < self.started {
            std::thread::sleep(pause);
            pause = (pause + Duration::from_micros(10)).min(Duration::from_millis(1));
        }
    }
}
