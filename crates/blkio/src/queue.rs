//! One queue: every request gets an op slot of the rings below or waits in line for one, and comes
//! back as a completion.
//!
//! ```text
//!   enqueue ─► check ─► slot ─► DirectQueue::push        do_io: waiting line ─► kick / wait ─► reap ─► completions
//!                 └─► no slot free: waiting line
//! ```

use crate::rules::{Refusal, Rules};
use crate::segments::Memory;
use crate::{Error, Result};
use block::{Data, Flags, IoError, IoResult, Op, Request, Segment};
use drivers::direct::{DirectQueue, Zone, ZoneAction, ZoneRequest};
use std::collections::VecDeque;
use std::ffi::{CStr, c_char};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Request flags, with the values of `blkio.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReqFlags(pub u32);

impl ReqFlags {
    /// `BLKIO_REQ_FUA`: durable when complete.
    pub const FUA: ReqFlags = ReqFlags(1);
    /// `BLKIO_REQ_NO_UNMAP`: zeroes must stay allocated.
    pub const NO_UNMAP: ReqFlags = ReqFlags(2);
    /// `BLKIO_REQ_NO_FALLBACK`: zeroes must not be written as data.
    pub const NO_FALLBACK: ReqFlags = ReqFlags(4);

    /// The engine's flags for `op`.
    #[inline]
    fn for_op(self, op: Op) -> std::result::Result<Flags, Refusal> {
        if self.0 == 0 {
            return Ok(Flags::NONE);
        }
        if self.0 & !7 != 0 {
            return Err(Refusal::UnknownFlags);
        }
        let allowed = block::Limits::flags_of(op);
        let mut flags = Flags::NONE;
        for (bit, flag, refusal) in [
            (ReqFlags::FUA, Flags::FUA, Refusal::Fua),
            (ReqFlags::NO_UNMAP, Flags::NO_UNMAP, Refusal::NoUnmap),
            (ReqFlags::NO_FALLBACK, Flags::NO_FALLBACK, Refusal::NoFallback),
        ] {
            if self.0 & bit.0 == 0 {
                continue;
            }
            if !allowed.contains(flag) {
                return Err(refusal);
            }
            flags = flags.with(flag);
        }
        Ok(flags)
    }
}

/// The end of a request, laid out as `struct blkio_completion` of `blkio.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The caller's value from the request.
    pub user_data: usize,
    /// Why it failed, or null. Valid while the queue lives.
    pub error_msg: *const c_char,
    /// 0, a negative errno, or the number of zones reported.
    pub ret: i32,
    reserved: [u32; 3],
}

impl Completion {
    fn ended(user_data: usize, ret: i32) -> Completion {
        Completion { user_data, error_msg: std::ptr::null(), ret, reserved: [0; 3] }
    }

    fn failed(user_data: usize, errno: i32, message: &CStr) -> Completion {
        Completion { error_msg: message.as_ptr(), ..Completion::ended(user_data, -errno) }
    }
}

/// A request for blocks.
#[derive(Clone, Copy)]
struct Transfer {
    op: Op,
    flags: Flags,
    offset: u64,
    len: u64,
    memory: Memory,
    user_data: usize,
}

/// A request that found no slot.
enum Waiting {
    Transfer(Transfer),
    Zone(ZoneRequest, usize),
}

/// A request in flight.
#[derive(Clone, Copy)]
struct Slot {
    user_data: usize,
    /// The only segment of a request without a list of its own.
    segment: Segment,
    /// How many zones were reported.
    reported: u32,
}

/// A queue of a started instance. One thread uses it at a time.
pub struct IoQueue {
    rings: Box<dyn DirectQueue>,
    rules: Arc<Rules>,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    waiting: VecDeque<Waiting>,
    /// Ended, but not yet returned.
    done: VecDeque<Completion>,
    is_poll: bool,
    /// Whether the program waits for the completion descriptor.
    wants_events: bool,
    /// An event was raised for completions that the program has not taken all since: it is to come
    /// for more.
    is_announced: bool,
}

// SAFETY: the pointers in it are memory of requests, which belongs to whoever uses the queue, on
// any thread.
unsafe impl Send for IoQueue {}

impl IoQueue {
    pub(crate) fn new(rings: Box<dyn DirectQueue>, rules: Arc<Rules>, is_poll: bool) -> IoQueue {
        let depth = rings.depth();
        let idle =
            Slot { user_data: 0, segment: Segment { base: std::ptr::null_mut(), len: 0 }, reported: 0 };
        IoQueue {
            rings,
            rules,
            slots: vec![idle; depth as usize].into(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            done: VecDeque::new(),
            is_poll,
            wants_events: false,
            is_announced: false,
        }
    }

    /// Returns the descriptor that becomes readable when [`IoQueue::do_io`] needs to be called
    /// again; `None` for a poll queue.
    pub fn completion_fd(&self) -> Option<RawFd> {
        if self.is_poll { None } else { self.rings.event_fd() }
    }

    /// Switches events on the completion descriptor on or off, for requests in flight too.
    pub fn set_completion_fd_enabled(&mut self, enable: bool) {
        if self.is_poll {
            return;
        }
        self.wants_events = enable;
        self.is_announced = false;
        if enable {
            self.arm(false);
        } else {
            self.rings.disarm();
        }
    }

    /// How many requests have not been returned as completions yet.
    pub fn outstanding(&self) -> usize {
        self.in_flight() + self.waiting.len() + self.done.len()
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Enqueues a read or write of the memory at byte `offset`.
    ///
    /// # Safety
    /// Memory, and the list that describes it, stay valid until the completion has been returned,
    /// or the queue is gone; a read's memory is not used by others until then.
    // Inlined into the C functions, where operation and kind of memory are constants.
    #[inline(always)]
    pub unsafe fn transfer(
        &mut self,
        op: Op,
        offset: u64,
        memory: Memory,
        user_data: usize,
        flags: ReqFlags,
    ) {
        debug_assert!(op.has_data());
        // SAFETY: by contract.
        match unsafe { self.check_transfer(op, offset, &memory, flags) } {
            Ok((flags, len)) => {
                let transfer = Transfer { op, flags, offset, len, memory, user_data };
                // SAFETY: by contract.
                unsafe { self.enqueue(transfer) };
            }
            Err(refusal) => self.refuse(user_data, refusal),
        }
    }

    /// # Safety
    /// As [`IoQueue::transfer`].
    #[inline(always)]
    unsafe fn check_transfer(
        &self,
        op: Op,
        offset: u64,
        memory: &Memory,
        flags: ReqFlags,
    ) -> std::result::Result<(Flags, u64), Refusal> {
        // SAFETY: by contract.
        let len = unsafe { self.rules.check_memory(memory)? };
        let flags = flags.for_op(op)?;
        self.rules.check_transfer(op, offset, len)?;
        Ok((flags, len))
    }

    /// Enqueues a write zeroes or discard of `len` bytes, or a flush (with offset and length 0).
    pub fn operate(&mut self, op: Op, offset: u64, len: u64, user_data: usize, flags: ReqFlags) {
        assert!(!op.has_data(), "{op:?} needs memory");
        let checked = flags.for_op(op).and_then(|flags| {
            self.rules.check_range_op(op, offset, len)?;
            Ok(Transfer { op, flags, offset, len, memory: Memory::None, user_data })
        });
        match checked {
            // SAFETY: there is no memory.
            Ok(transfer) => unsafe { self.enqueue(transfer) },
            Err(refusal) => self.refuse(user_data, refusal),
        }
    }

    /// Enqueues a report of up to `max` zones, from the one at `offset` on.
    ///
    /// # Safety
    /// `zones` has room for `max` zones until the completion has been returned, or the queue is
    /// gone.
    pub unsafe fn report_zones(
        &mut self,
        offset: u64,
        zones: *mut Zone,
        max: u32,
        user_data: usize,
        flags: ReqFlags,
    ) {
        let refusal = match flags.for_op(Op::Flush) {
            Err(refusal) => Some(refusal),
            Ok(_) if zones.is_null() && max > 0 => Some(Refusal::NullMemory),
            Ok(_) => None,
        };
        match refusal {
            Some(refusal) => self.refuse(user_data, refusal),
            None => {
                let reported = std::ptr::null_mut();
                // SAFETY: by contract.
                unsafe { self.enqueue_zone(ZoneRequest::Report { offset, zones, max, reported }, user_data) };
            }
        }
    }

    /// Enqueues a change of the zone at `offset`, or of all zones.
    pub fn manage_zones(
        &mut self,
        action: ZoneAction,
        offset: Option<u64>,
        user_data: usize,
        flags: ReqFlags,
    ) {
        let checked = flags.for_op(Op::Flush).and_then(|_| self.rules.check_writable());
        match checked {
            Err(refusal) => self.refuse(user_data, refusal),
            Ok(()) => {
                let request =
                    offset.map_or(ZoneRequest::ManageAll(action), |at| ZoneRequest::Manage(action, at));
                // SAFETY: there is no memory.
                unsafe { self.enqueue_zone(request, user_data) };
            }
        }
    }

    /// Submits what was enqueued, waits for at least `min` completions and fills in up to
    /// `out.len()`; returns how many. `timeout` is reduced by the time that passed. `signal_mask`
    /// is the thread's while it sleeps.
    ///
    /// # Errors
    /// `EINVAL` when `min` is more than `out` has room for or than there are requests, `ETIME`,
    /// `EINTR` (only with a `signal_mask`), `ENOTSUP` for a mask on a poll queue. No completion is
    /// lost.
    pub fn do_io(
        &mut self,
        out: &mut [MaybeUninit<Completion>],
        min: usize,
        timeout: Option<&mut Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> Result<usize> {
        if min > 0 || signal_mask.is_some() {
            self.check_call(out.len(), min, signal_mask.is_some())?;
        }
        if self.wants_events {
            self.rings.disarm();
        }
        let time = timeout.as_deref().map(|timeout| (Instant::now(), *timeout));
        let result = self.run(out, min, time.as_ref(), signal_mask);
        if let (Some(timeout), Some((start, _))) = (timeout, time) {
            *timeout = timeout.saturating_sub(start.elapsed());
        }
        if self.wants_events {
            let room = out.len();
            self.arm(result.as_ref().is_ok_and(|count| *count < room));
        }
        result
    }

    #[inline]
    fn check_call(&self, max: usize, min: usize, has_mask: bool) -> Result<()> {
        if min > max || min > self.outstanding() || (has_mask && self.is_poll) {
            return Err(self.wrong_call(max, min, has_mask));
        }
        Ok(())
    }

    #[cold]
    fn wrong_call(&self, max: usize, min: usize, has_mask: bool) -> Error {
        if has_mask && self.is_poll {
            let message = "blkioq_do_io_interruptible() is not supported on poll queues";
            return Error::new(libc::ENOTSUP, message);
        }
        let outstanding = self.outstanding();
        let message = if min > max {
            format!("min_completions ({min}) is larger than max_completions ({max})")
        } else {
            format!("min_completions ({min}) is larger than outstanding requests ({outstanding})")
        };
        Error::new(libc::EINVAL, message)
    }

    #[inline(always)]
    fn run(
        &mut self,
        out: &mut [MaybeUninit<Completion>],
        min: usize,
        time: Option<&(Instant, Duration)>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> Result<usize> {
        let mut count = 0;
        loop {
            if !self.waiting.is_empty() {
                self.start_waiting();
            }
            if !self.done.is_empty() {
                count = self.take_done(out, count);
            }
            if count >= min {
                self.rings.kick();
                count = self.reap(out, count);
            } else {
                let left = time.map(|(start, timeout)| timeout.saturating_sub(start.elapsed()));
                let waited = self.rings.wait((min - count) as u32, left, signal_mask);
                count = self.reap(out, count);
                if let Err(error) = waited
                    && count < min
                    // Only who gave a mask asked to be interrupted.
                    && (signal_mask.is_some() || error.raw_os_error() != Some(libc::EINTR))
                {
                    return Err(self.not_enough(&out[..count], &error));
                }
            }
            // Requests that ended just now may have made room for those that wait.
            if count >= min && (self.waiting.is_empty() || self.free.is_empty()) {
                return Ok(count);
            }
        }
    }

    /// # Safety
    /// As [`IoQueue::transfer`].
    #[inline(always)]
    unsafe fn enqueue(&mut self, transfer: Transfer) {
        let slot = if self.waiting.is_empty() { self.free.pop() } else { None };
        match slot {
            // SAFETY: by contract.
            Some(slot) => unsafe { self.push(slot, &transfer) },
            None => self.wait_in_line(transfer),
        }
    }

    #[cold]
    fn wait_in_line(&mut self, transfer: Transfer) {
        self.waiting.push_back(Waiting::Transfer(transfer));
    }

    /// # Safety
    /// As [`IoQueue::report_zones`].
    unsafe fn enqueue_zone(&mut self, request: ZoneRequest, user_data: usize) {
        let slot = if self.waiting.is_empty() { self.free.pop() } else { None };
        match slot {
            // SAFETY: by contract.
            Some(slot) => unsafe { self.push_zone(slot, request, user_data) },
            None => self.waiting.push_back(Waiting::Zone(request, user_data)),
        }
    }

    /// # Safety
    /// As [`IoQueue::transfer`].
    #[inline(always)]
    unsafe fn push(&mut self, slot: u32, transfer: &Transfer) {
        let place = &mut self.slots[slot as usize];
        place.user_data = transfer.user_data;
        // By contract it stays valid; a segment in the slot stays there until the slot is free.
        let data = match transfer.memory {
            Memory::None | Memory::List(_, 0) => Data::none(),
            Memory::One(segment) => {
                place.segment = segment;
                // SAFETY: see above.
                unsafe { Data::one(&place.segment) }
            }
            // SAFETY: see above.
            Memory::List(list, count) => unsafe { Data::new(std::slice::from_raw_parts(list, count)) },
        };
        let Transfer { op, flags, offset, len, .. } = *transfer;
        // SAFETY: as above.
        let pushed = unsafe { self.rings.push(slot, &Request { op, flags, len, data }, offset) };
        self.pushed(slot, pushed);
    }

    /// # Safety
    /// As [`IoQueue::report_zones`].
    unsafe fn push_zone(&mut self, slot: u32, request: ZoneRequest, user_data: usize) {
        let place = &mut self.slots[slot as usize];
        place.user_data = user_data;
        place.reported = 0;
        let request = match request {
            ZoneRequest::Report { offset, zones, max, .. } => {
                ZoneRequest::Report { offset, zones, max, reported: &raw mut place.reported }
            }
            other => other,
        };
        // SAFETY: by contract; slots do not move.
        let pushed = unsafe { self.rings.push_zone(slot, request) };
        self.pushed(slot, pushed);
    }

    #[inline]
    fn pushed(&mut self, slot: u32, result: IoResult) {
        if let Err(error) = result {
            self.ended_at_once(slot, error);
        }
    }

    #[cold]
    fn ended_at_once(&mut self, slot: u32, error: IoError) {
        self.free.push(slot);
        self.done.push_back(failed(&self.slots[slot as usize], error, &self.rules));
    }

    #[cold]
    fn refuse(&mut self, user_data: usize, refusal: Refusal) {
        let completion =
            Completion::failed(user_data, self.rules.errno(refusal), self.rules.message(refusal));
        self.done.push_back(completion);
    }

    /// Gives free slots to requests that wait for one.
    #[cold]
    fn start_waiting(&mut self) {
        while !self.waiting.is_empty() {
            let Some(slot) = self.free.pop() else { return };
            match self.waiting.pop_front().expect("it is not empty") {
                // SAFETY: by the contract under which it was enqueued.
                Waiting::Transfer(transfer) => unsafe { self.push(slot, &transfer) },
                // SAFETY: as above.
                Waiting::Zone(request, user_data) => unsafe { self.push_zone(slot, request, user_data) },
            }
        }
    }

    #[cold]
    fn take_done(&mut self, out: &mut [MaybeUninit<Completion>], mut count: usize) -> usize {
        while count < out.len() {
            let Some(completion) = self.done.pop_front() else { break };
            out[count].write(completion);
            count += 1;
        }
        count
    }

    #[inline]
    fn reap(&mut self, out: &mut [MaybeUninit<Completion>], mut count: usize) -> usize {
        let IoQueue { rings, slots, free, done, rules, .. } = self;
        rings.reap(&mut |slot, result| {
            free.push(slot);
            let place = &mut slots[slot as usize];
            let completion = completion(place, result, rules);
            place.reported = 0;
            match out.get_mut(count) {
                Some(place) => {
                    place.write(completion);
                    count += 1;
                }
                None => done.push_back(completion),
            }
        });
        count
    }

    /// The error of a wait; what was filled in is kept for the next call.
    #[cold]
    fn not_enough(&mut self, filled: &[MaybeUninit<Completion>], error: &io::Error) -> Error {
        for completion in filled.iter().rev() {
            // SAFETY: filled in by this call.
            self.done.push_front(unsafe { completion.assume_init_read() });
        }
        Error::os("blkioq_do_io()", error)
    }

    /// Asks for events, and raises one, once, if completions are ready already. A program with an
    /// event takes all completions, as later ones may share it. `has_taken_all`: as far as the
    /// program knows.
    fn arm(&mut self, has_taken_all: bool) {
        let is_pending = !self.rings.arm() || !self.done.is_empty();
        if is_pending
            && (has_taken_all || !self.is_announced)
            && let Some(fd) = self.rings.event_fd()
        {
            // SAFETY: eight bytes of our own. It fails only when the counter is full: then it is
            // readable.
            unsafe { libc::write(fd, (&raw const ONE_EVENT).cast(), 8) };
        }
        self.is_announced = is_pending;
    }
}

static ONE_EVENT: u64 = 1;

#[inline]
fn completion(slot: &Slot, result: IoResult, rules: &Rules) -> Completion {
    match result {
        Ok(()) => Completion::ended(slot.user_data, slot.reported as i32),
        Err(error) => failed(slot, error, rules),
    }
}

#[cold]
fn failed(slot: &Slot, error: IoError, rules: &Rules) -> Completion {
    Completion::failed(slot.user_data, error.to_errno(), rules.device_message(error))
}
