//! One core's rings over one file.

use super::entry::{Target, rw_flags};
use super::extents::Queries;
use super::image_lock::ImageFile;
use super::inline;
use super::operation::{Backing, Next, Operation, Step, Ways};
use super::tail::Tail;
use crate::direct::{DirectQueue, ZoneRequest};
use crate::fixed::{FixedBuffers, Regions};
use crate::ring::Ring;
use crate::zeroes::zero_segments;
use block::{Flags, IoError, IoResult, Op, Queue, Request, StatusReport, StatusStart};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Completions taken from a ring at once.
const BATCH: usize = 32;

/// Selects one of a queue's rings.
#[derive(Clone, Copy)]
enum RingKind {
    Main,
    Side,
}

/// The state that all queues of a device share.
pub(super) struct Shared {
    pub file: Arc<ImageFile>,
    pub backing: Backing,
    /// Whether the page cache has lost a write. The kernel reports that only once, to one caller,
    /// but later flushes must not claim that all data is durable.
    pub has_lost_writes: AtomicBool,
    /// Regions to register with each ring; `None` when buffers are not registered.
    pub regions: Option<Regions>,
    /// The end of a regular file inside a block.
    pub tail: Tail,
    /// Queries of block status.
    pub queries: Queries,
}

/// The submission and completion rings of one core.
///
/// Transfers use `main`. A ring that is polled for completions supports nothing else, so all other
/// operations use `side` then.
pub struct UringQueue {
    main: Ring,
    side: Option<Ring>,
    operations: Box<[Operation]>,
    target: Target,
    ways: Ways,
    buffers: Option<FixedBuffers>,
    /// Operations that completed without the kernel, for the next `reap`.
    ended: Vec<(u32, IoResult)>,
    /// Whether a request has queued its next step since the last kick.
    has_gone_on: bool,
    shared: Arc<Shared>,
}

impl UringQueue {
    /// Creates rings for `depth` requests over the shared file, each with `ring`, given its depth
    /// and whether it is polled.
    pub(super) fn new(
        shared: Arc<Shared>,
        depth: u32,
        is_polled: bool,
        ring: fn(u32, bool) -> io::Result<Ring>,
    ) -> io::Result<UringQueue> {
        let main = ring(depth, is_polled)?;
        let side = if is_polled { Some(ring(depth, false)?) } else { None };
        let fd = shared.file.as_raw_fd();
        let is_registered = [Some(&main), side.as_ref()]
            .into_iter()
            .flatten()
            .all(|ring| ring.uring.submitter().register_files(&[fd]).is_ok());
        let buffers = shared.regions.as_ref().and_then(|_| FixedBuffers::new(&main.uring));
        Ok(UringQueue {
            main,
            side,
            operations: (0..depth).map(|_| Operation::idle()).collect(),
            target: Target { backing: shared.backing, fd, is_registered, zeroes: zero_segments() },
            ways: Ways::all(),
            buffers,
            ended: Vec::with_capacity(depth as usize),
            has_gone_on: false,
            shared,
        })
    }

    /// Queues the current step of `slot`. Every slot has at most one entry in a ring, and the ring
    /// has room for all slots.
    fn issue(&mut self, slot: u32) {
        let operation = &mut self.operations[slot as usize];
        let fd = operation.other_fd.unwrap_or(self.target.fd);
        if self.target.backing.is_in_memory
            && let Some(answer) = inline::transfer(fd, operation, rw_flags(operation))
        {
            if let Some(result) = self.answered(slot, answer) {
                self.ended.push((slot, result));
            }
            return;
        }
        // A polled ring has no requests through the page cache, and another ring does not know its
        // buffers.
        let is_direct = operation.other_fd.is_none();
        let buffers = self.buffers.as_ref().filter(|_| is_direct);
        let entry = self.target.entry(operation, buffers).user_data(u64::from(slot));
        let is_transfer = is_direct && matches!(operation.step, Step::Transfer | Step::WriteZeroes);
        let ring = match &mut self.side {
            Some(side) if !is_transfer => side,
            _ => &mut self.main,
        };
        // SAFETY: the caller's memory stays valid by the contract of `Queue::push`; lists of our
        // own live in the slot, and stay unchanged until the kernel has answered.
        unsafe { ring.push(&entry) };
    }

    /// Starts a request that extends beyond the end of the file.
    #[cold]
    unsafe fn push_tail(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        let req = self.shared.tail.clip(req, offset)?;
        let operation = &mut self.operations[slot as usize];
        // SAFETY: by the contract of this function; it is a part of the caller's request.
        unsafe { operation.begin(&req, offset, &self.ways, &self.target.backing) }?;
        operation.other_fd = self.shared.tail.fd().filter(|_| self.target.backing.is_direct);
        self.issue_first(slot);
        Ok(())
    }

    /// Issues the first step of a request that is not plain.
    #[inline(never)]
    fn issue_first(&mut self, slot: u32) {
        let operation = &self.operations[slot as usize];
        if operation.len == 0 && operation.op != Op::Flush {
            self.ended.push((slot, Ok(())));
        } else {
            self.issue(slot);
        }
    }

    /// Handles one result of the kernel. Returns the request's result if it was the last.
    #[inline(always)]
    fn answered(&mut self, slot: u32, answer: i32) -> Option<IoResult> {
        let operation = &mut self.operations[slot as usize];
        if answer == operation.plain_answer {
            return Some(Ok(()));
        }
        self.looked_at(slot, answer)
    }

    /// Handles a result that is not plain.
    #[inline(never)]
    fn looked_at(&mut self, slot: u32, answer: i32) -> Option<IoResult> {
        let operation = &mut self.operations[slot as usize];
        match operation.complete(answer, &mut self.ways, &self.target.backing) {
            Next::Issue => {
                self.issue(slot);
                self.has_gone_on = true;
                None
            }
            Next::Finished(result) => Some(self.judge(slot, result)),
        }
    }

    /// Reaps all completions of one ring. Returns how many requests ended.
    #[inline]
    fn reap_ring(&mut self, kind: RingKind, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let mut room = [const { MaybeUninit::uninit() }; BATCH];
        let mut count = 0;
        loop {
            let ring = match kind {
                RingKind::Main => &mut self.main,
                RingKind::Side => self.side.as_mut().expect("only asked for where there is one"),
            };
            let answers = ring.take(&mut room);
            for answer in answers {
                let slot = answer.user_data() as u32;
                if let Some(result) = self.answered(slot, answer.result()) {
                    done(slot, result);
                    count += 1;
                }
            }
            if answers.len() < BATCH {
                return count;
            }
        }
    }

    /// For tests: behaves like a file system that can neither punch holes nor zero a range.
    #[cfg(test)]
    pub(super) fn refuse_holes(&mut self) {
        (self.ways.punch_hole, self.ways.zero_range) = (false, false);
    }

    fn rings(&mut self) -> impl Iterator<Item = &mut Ring> {
        std::iter::once(&mut self.main).chain(&mut self.side)
    }

    #[inline]
    fn judge(&self, slot: u32, result: IoResult) -> IoResult {
        let operation = &self.operations[slot as usize];
        self.shared.judge(operation.op, operation.flags, result)
    }
}

impl Shared {
    /// The result that the caller of a request gets. After the page cache has lost a write, every
    /// later flush fails, on every core.
    #[inline]
    pub(super) fn judge(&self, op: Op, flags: Flags, result: IoResult) -> IoResult {
        if op != Op::Flush && !flags.contains(Flags::FUA) {
            return result;
        }
        self.judge_durability(op, result)
    }

    #[inline(never)]
    fn judge_durability(&self, op: Op, result: IoResult) -> IoResult {
        let is_direct = self.backing.is_direct && self.tail.fd().is_none();
        if is_direct || op == Op::Read {
            return result;
        }
        if matches!(result, Err(IoError::Medium | IoError::NoSpace | IoError::DeviceGone)) {
            if !self.has_lost_writes.swap(true, Ordering::Relaxed) {
                tracing::error!(error = ?result, "page cache lost writes: every flush fails from now on");
            }
            return result;
        }
        if self.has_lost_writes.load(Ordering::Relaxed) { Err(IoError::Medium) } else { result }
    }
}

impl Queue for UringQueue {
    fn depth(&self) -> u32 {
        self.operations.len() as u32
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        if let (Some(buffers), Some(regions)) = (&mut self.buffers, &self.shared.regions) {
            buffers.update(&self.main.uring, regions);
        }
        if req.op.is_modifying() && offset.saturating_add(req.len) > self.shared.tail.end() {
            // SAFETY: by the contract of this function.
            return unsafe { self.push_tail(slot, req, offset) };
        }
        // SAFETY: by the contract of this function.
        if self.target.backing.is_in_memory && unsafe { inline::transfer_one(self.target.fd, req, offset) } {
            self.ended.push((slot, Ok(())));
            return Ok(());
        }
        let operation = &mut self.operations[slot as usize];
        // SAFETY: by the contract of this function.
        unsafe { operation.begin(req, offset, &self.ways, &self.target.backing) }?;
        match operation.plain() {
            Some(segment) if self.buffers.is_none() && !self.target.backing.is_in_memory => {
                let entry = self.target.plain_entry(operation, segment).user_data(u64::from(slot));
                // SAFETY: as in `issue`.
                unsafe { self.main.push(&entry) };
            }
            _ => self.issue_first(slot),
        }
        Ok(())
    }

    unsafe fn push_status<'a>(
        &mut self,
        _: u32,
        report: &'a StatusReport,
        offset: u64,
        len: u64,
    ) -> StatusStart<'a> {
        if self.target.backing.is_block_device {
            return StatusStart::data(report, len);
        }
        let Shared { queries, file, backing, .. } = &*self.shared;
        StatusStart::Apart(queries.ask(file, backing.block_size, report, offset, len))
    }

    #[inline]
    fn kick(&mut self) {
        if self.main.has_unsubmitted() {
            self.main.submit();
        }
        if let Some(side) = self.side.as_mut().filter(|side| side.has_unsubmitted()) {
            side.submit();
        }
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let mut count = 0;
        while let Some((slot, result)) = self.ended.pop() {
            done(slot, result);
            count += 1;
        }
        self.main.look();
        count += self.reap_ring(RingKind::Main, done);
        if let Some(side) = &mut self.side {
            side.look();
            count += self.reap_ring(RingKind::Side, done);
        }
        // Requests with several steps have queued their next one.
        if self.has_gone_on {
            self.has_gone_on = false;
            self.kick();
        }
        count
    }

    fn event_fd(&self) -> Option<RawFd> {
        // A polled ring raises no events, but `arm` prevents sleep while it works.
        Some(self.side.as_ref().unwrap_or(&self.main).event_fd())
    }

    fn arm(&mut self) -> bool {
        let mut is_quiet = self.ended.is_empty();
        for ring in self.rings() {
            is_quiet &= ring.arm();
        }
        is_quiet
    }

    fn disarm(&mut self) {
        self.rings().for_each(Ring::disarm);
    }
}

impl DirectQueue for UringQueue {
    fn wait(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        if let Some(side) = &mut self.side
            && side.in_flight > 0
        {
            // A thread cannot wait for two rings at once; this one polls anyway.
            self.kick();
            return Ok(());
        }
        if !self.ended.is_empty() || self.main.in_flight == 0 {
            self.kick();
            return Ok(());
        }
        // A request may have several results, so at least this many completions follow.
        self.main.wait_for(at_least.min(self.main.in_flight), timeout, signal_mask)
    }

    unsafe fn push_zone(&mut self, _: u32, _: ZoneRequest) -> IoResult {
        Err(IoError::Unsupported)
    }
}

// SAFETY: the pointers in slots and rings are the requests' memory, which belongs to no thread.
// Rings bound to one thread are used by their core alone (`reactor::QueueChannel` is not `Send`).
unsafe impl Send for UringQueue {}

impl Drop for UringQueue {
    /// Waits for requests in flight: closing a ring does not, and their memory is about to be
    /// reused.
    fn drop(&mut self) {
        while self.rings().any(|ring| ring.in_flight > 0) {
            self.rings().filter(|ring| ring.in_flight > 0).for_each(|ring| ring.wait());
            self.reap(&mut |_, _| {});
        }
        // A closed ring releases its files some time later. The next program that opens the device
        // must not find it claimed or locked.
        for ring in self.rings() {
            let _ = ring.uring.submitter().unregister_files();
        }
    }
}
