//! A queue for one thread at a time: any number of requests in flight, polled or waited for.

use super::Buffer;
use super::request::{Memory, Operation, Payload, Request};
use super::shared::Shared;
use super::slots::{Owner, Slots, Token};
use crate::raw::{self, ReqFlags};
use crate::{Error, IoQueue, Result};
use block::{Op, Segment};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// Most completions that are fetched from below at a time.
const BATCH: usize = 64;

/// A queue of a device. Dropping it waits for what is in flight.
///
/// Requests are enqueued without limit; how many are in flight at the device is bounded by its own
/// properties (`num-entries`, `queue-size`). Those in flight at the same time are carried out in
/// any order.
///
/// ```
/// # fn main() -> blkio::Result<()> {
/// # let file = tempfile::NamedTempFile::new().unwrap();
/// # file.as_file().set_len(1 << 20).unwrap();
/// # let path = file.path().to_str().unwrap();
/// use blkio::Request;
///
/// let device = blkio::Builder::new("io_uring")?.set("path", path)?.start()?;
/// let mut queue = device.queue(0)?;
/// for block in 0..8 {
///     let mut buffer = device.buffer(4096)?;
///     buffer.fill(block as u8);
///     queue.submit(Request::write(block * 4096, buffer).fua());
/// }
/// for completion in queue.wait(8)? {
///     completion.result?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Queue {
    /// `None` once it has failed permanently.
    raw: Option<Box<IoQueue>>,
    pub(super) slots: Slots,
    pub(super) has_unsubmitted: bool,
    wants_events: bool,
    /// Tasks whose requests have ended.
    pub(super) wakers: Vec<Waker>,
    pub(super) device: Arc<Shared>,
    index: i32,
    is_poll: bool,
    /// Added after the start: to be removed again.
    is_added: bool,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The token that [`Queue::submit`] returned.
    pub token: Token,
    /// Whether it was carried out.
    pub result: Result<()>,
    /// The request's memory.
    pub memory: Memory,
}

impl Completion {
    /// The buffer of a plain read or write.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self.memory {
            Memory::One(buffer) => Some(buffer),
            _ => None,
        }
    }
}

/// The completions that a queue holds; those that are not taken stay there.
pub struct Completions<'a> {
    slots: &'a mut Slots,
}

impl Iterator for Completions<'_> {
    type Item = Completion;

    fn next(&mut self) -> Option<Completion> {
        let (token, result, memory) = self.slots.next_listed()?;
        Some(Completion { token, result, memory })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.slots.listed(), Some(self.slots.listed()))
    }
}

impl ExactSizeIterator for Completions<'_> {}

impl Queue {
    pub(super) fn new(
        device: Arc<Shared>,
        raw: Box<IoQueue>,
        index: i32,
        is_poll: bool,
        is_added: bool,
    ) -> Queue {
        Queue {
            raw: Some(raw),
            slots: Slots::default(),
            has_unsubmitted: false,
            wants_events: false,
            wakers: Vec::new(),
            device,
            index,
            is_poll,
            is_added,
        }
    }

    /// Enqueues a request, which owns its memory from now on. It goes to the device with the next
    /// call that asks for completions, together with all others.
    pub fn submit<P: Payload>(&mut self, request: Request<P>) -> Token {
        self.begin(request, Owner::List)
    }

    /// Submits what was enqueued and returns the completions that there are already.
    ///
    /// # Errors
    /// When the queue itself fails; completions are not lost.
    pub fn poll(&mut self) -> Result<Completions<'_>> {
        self.reap_all()?;
        Ok(Completions { slots: &mut self.slots })
    }

    /// Submits what was enqueued and waits for at least `min` completions, or for all if there are
    /// fewer requests.
    ///
    /// # Errors
    /// When the queue itself fails; completions are not lost.
    pub fn wait(&mut self, min: usize) -> Result<Completions<'_>> {
        self.wait_listed(min, None)?;
        Ok(Completions { slots: &mut self.slots })
    }

    /// As [`Queue::wait`], but after `timeout` returns what there is: fewer than `min`, perhaps
    /// none.
    ///
    /// # Errors
    /// As [`Queue::wait`].
    pub fn wait_timeout(&mut self, min: usize, mut timeout: Duration) -> Result<Completions<'_>> {
        match self.wait_listed(min, Some(&mut timeout)) {
            Err(error) if error.errno() == libc::ETIME => self.reap_all()?,
            result => result?,
        }
        Ok(Completions { slots: &mut self.slots })
    }

    /// How many requests of [`Queue::submit`] were not returned as completions yet.
    pub fn outstanding(&self) -> usize {
        self.slots.listed_in_flight() + self.slots.listed()
    }

    /// Returns a descriptor for event loops; `None` for a poll queue. Once events are
    /// [enabled](Queue::enable_events), it becomes readable when [`Queue::poll`] needs to be called
    /// again.
    pub fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.raw.as_ref()?.completion_fd()?;
        // SAFETY: the descriptor is open as long as the raw queue, which is not closed while `self`
        // is borrowed.
        Some(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Switches events on the completion descriptor on or off, for requests in flight too.
    /// [`Queue::poll`] consumes them.
    pub fn enable_events(&mut self, enable: bool) {
        self.wants_events = enable && !self.is_poll;
        if let Some(raw) = &mut self.raw {
            raw.set_completion_fd_enabled(enable);
        }
    }

    pub(super) fn begin<P: Payload>(&mut self, request: Request<P>, owner: Owner) -> Token {
        let Request { operation, flags, payload } = request;
        let token = self.slots.insert(payload.into_memory(), owner);
        match operation {
            Operation::Transfer(op, offset) => {
                let memory = self.slots.transfer_memory(token);
                // SAFETY: the slot owns the memory until the raw queue has returned its completion,
                // or is gone.
                unsafe { self.transfer(token, op, offset, memory, flags) };
            }
            Operation::Range(op, offset, len) => {
                self.start(token, |raw, id| raw.operate(op, offset, len, id, flags));
            }
            Operation::ReportZones(offset) => {
                let (zones, max) = self.slots.zone_memory(token);
                // SAFETY: as above.
                self.start(token, |raw, id| unsafe { raw.report_zones(offset, zones, max, id, flags) });
            }
            Operation::ManageZones(action, offset) => {
                self.start(token, |raw, id| raw.manage_zones(action, offset, id, flags));
            }
        }
        token
    }

    /// Starts a read or write of memory that is not the queue's.
    ///
    /// # Safety
    /// The memory stays valid, and for a read unused by others, until the slot's request has ended
    /// or [`Queue::close`] has returned.
    pub(super) unsafe fn begin_borrowed(
        &mut self,
        op: Op,
        offset: u64,
        segments: impl IntoIterator<Item = Segment>,
        owner: Owner,
    ) -> Token {
        let token = self.slots.insert(Memory::None, owner);
        let memory = self.slots.borrowed_memory(token, segments);
        // SAFETY: by contract; the list of segments is the slot's.
        unsafe { self.transfer(token, op, offset, memory, ReqFlags(0)) };
        token
    }

    /// # Safety
    /// As [`IoQueue::transfer`].
    unsafe fn transfer(&mut self, token: Token, op: Op, offset: u64, memory: raw::Memory, flags: ReqFlags) {
        // SAFETY: by contract.
        self.start(token, |raw, id| unsafe { raw.transfer(op, offset, memory, id, flags) });
    }

    #[inline]
    fn start(&mut self, token: Token, start: impl FnOnce(&mut IoQueue, usize)) {
        match &mut self.raw {
            Some(raw) => {
                self.has_unsubmitted = true;
                start(raw, token.slot as usize);
            }
            None => {
                self.slots.end(token.slot, Err(closed()));
            }
        }
    }

    fn wait_listed(&mut self, min: usize, mut timeout: Option<&mut Duration>) -> Result<()> {
        loop {
            let missing = min.saturating_sub(self.slots.listed()).min(self.slots.listed_in_flight());
            if missing == 0 {
                return self.reap_all();
            }
            self.reap(missing.min(BATCH), timeout.as_deref_mut())?;
        }
    }

    /// Takes what has ended, without waiting.
    pub(super) fn reap_all(&mut self) -> Result<()> {
        if self.wants_events
            && let Some(fd) = self.completion_fd()
        {
            let mut counter = 0u64;
            // SAFETY: eight bytes of our own; the descriptor does not block.
            unsafe { libc::read(fd.as_raw_fd(), (&raw mut counter).cast(), 8) };
        }
        while self.reap(0, None)? == BATCH {}
        Ok(())
    }

    /// Submits, waits for `min` ends of requests and notes up to [`BATCH`]; returns how many.
    pub(super) fn reap(&mut self, min: usize, timeout: Option<&mut Duration>) -> Result<usize> {
        let Some(raw) = &mut self.raw else { return Ok(0) };
        let mut batch = [MaybeUninit::<raw::Completion>::uninit(); BATCH];
        self.has_unsubmitted = false;
        let count = raw.do_io(&mut batch, min, timeout, None)?;
        for completion in &batch[..count] {
            // SAFETY: `do_io` filled in so many.
            let completion = unsafe { completion.assume_init_ref() };
            let result =
                if completion.ret >= 0 { Ok(completion.ret as u32) } else { Err(failure(completion)) };
            self.wakers.extend(self.slots.end(completion.user_data as u32, result));
        }
        Ok(count)
    }

    /// Waits until the token's request has ended; when the queue fails, it is closed and the
    /// request ends thereby.
    pub(super) fn wait_for(&mut self, token: Token) {
        while !self.slots.has_ended(token) {
            if self.reap(1, None).is_err() {
                self.close();
            }
        }
    }

    /// Waits until no request of a scope is in flight.
    pub(super) fn wait_for_scoped(&mut self) {
        while self.slots.has_scoped() {
            if self.reap(1, None).is_err() {
                self.close();
            }
        }
    }

    /// Closes a queue that has failed. No memory is in use by the device afterwards, and every
    /// request has ended.
    pub(super) fn close(&mut self) {
        drop(self.raw.take());
        self.wakers.extend(self.slots.end_all(&closed()));
    }

    fn drain(&mut self) -> Result<()> {
        while self.slots.in_flight() > 0 {
            self.reap(1, None)?;
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let drained = self.drain();
        let mut raw = self.raw.take();
        if let Some(raw) = &mut raw {
            raw.set_completion_fd_enabled(false);
        }
        // Dropping the raw queue here waits for the device; the slots and their memory go later.
        let raw = raw.filter(|_| drained.is_ok() && !self.is_added);
        self.device.instance().take_back(self.index, self.is_poll, raw);
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("index", &self.index)
            .field("in_flight", &self.slots.in_flight())
            .finish()
    }
}

#[cold]
fn failure(completion: &raw::Completion) -> Error {
    let message = if completion.error_msg.is_null() {
        "the request failed".into()
    } else {
        // SAFETY: a message is valid while its queue lives, which has just returned it.
        unsafe { CStr::from_ptr(completion.error_msg) }.to_string_lossy()
    };
    Error::new(-completion.ret, message)
}

#[cold]
fn closed() -> Error {
    Error::new(libc::ENODEV, "the queue has failed and is closed")
}
