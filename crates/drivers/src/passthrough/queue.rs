//! One ring over one device.

use super::commands::{Commands, Next, Target};
use crate::direct::{DirectQueue, ZoneRequest};
use crate::fixed::FixedBuffers;
use crate::ring::{Answer, FIXED_FILE, Ring};
use crate::shared_memory::page_size;
use block::{IoError, IoResult, Queue, Request};
use io_uring::squeue;
use io_uring::squeue::EntryMarker;
use io_uring::types::Fd;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// Maximum entries of an io_uring (`IORING_MAX_ENTRIES`).
pub const MAX_ENTRIES: u32 = 32768;

/// Maximum completions reaped at once.
const BATCH: usize = 16;

/// Commands that stay in the ring while the kernel temporarily refuses more.
const FEW: u32 = 32;

/// The submission and completion ring of one core or thread. Every slot has at most one command in
/// the ring.
///
/// All commands of a polled device use the same ring, unlike those of files: flushes, discards and
/// zone management complete in the same queue of the device.
pub struct CommandQueue<C: Commands> {
    ring: Ring<C::Entry, C::Answer>,
    operations: Box<[C::Operation]>,
    /// Operations that completed without the kernel, for the next `reap`.
    ended: Vec<(u32, IoResult)>,
    /// Slots whose command found the ring full or was temporarily refused, and later ones.
    waiting: VecDeque<u32>,
    /// Number of commands that the ring may hold now.
    room: u32,
    /// Whether the device is file 0 of the ring.
    is_registered: bool,
    buffers: Option<FixedBuffers>,
    page: usize,
    commands: Arc<C>,
}

impl<C: Commands> CommandQueue<C> {
    /// Creates a queue with its own ring for `depth` requests. It may move between threads.
    ///
    /// # Errors
    /// An error of `io_uring_setup(2)`: `EINVAL` for 0 or more than [`MAX_ENTRIES`] entries, or
    /// where the kernel has no pass-through commands; `EPERM` where io_uring is forbidden;
    /// `ENOMEM`.
    pub(crate) fn open(commands: Arc<C>, depth: u32, is_polled: bool) -> io::Result<CommandQueue<C>> {
        if !(1..=MAX_ENTRIES).contains(&depth) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(CommandQueue::new(commands, depth, Ring::for_any_thread(depth, is_polled)?))
    }

    /// The same for the calling thread alone, which is cheaper.
    pub(crate) fn open_of_thread(
        commands: Arc<C>,
        depth: u32,
        is_polled: bool,
    ) -> io::Result<CommandQueue<C>> {
        Ok(CommandQueue::new(commands, depth, Ring::new(depth, is_polled)?))
    }

    fn new(commands: Arc<C>, depth: u32, ring: Ring<C::Entry, C::Answer>) -> CommandQueue<C> {
        let fd = commands.file().as_raw_fd();
        CommandQueue {
            is_registered: ring.uring.submitter().register_files(&[fd]).is_ok(),
            buffers: commands.regions().and_then(|_| FixedBuffers::new(&ring.uring)),
            ring,
            operations: (0..depth).map(|_| C::idle()).collect(),
            ended: Vec::with_capacity(depth as usize),
            waiting: VecDeque::with_capacity(depth as usize),
            room: commands.room(),
            page: page_size() as usize,
            commands,
        }
    }

    /// Queues the next command of `slot`. An error ends the request.
    #[inline]
    fn issue(&mut self, slot: u32) -> IoResult {
        let (fd, flags) = match self.is_registered {
            true => (Fd(0), FIXED_FILE),
            false => (Fd(self.commands.file().as_raw_fd()), squeue::Flags::empty()),
        };
        let target = Target { fd, flags, buffers: self.buffers.as_ref(), page: self.page };
        let mut entry = self.commands.entry(&mut self.operations[slot as usize], &target)?;
        entry.set_user_data(slot.into());
        // SAFETY: the caller's memory stays valid by the contract of `Queue::push`; lists and
        // memory of our own live in the slot, and stay unchanged until the kernel has answered.
        unsafe { self.ring.push(&entry) };
        Ok(())
    }

    /// Starts the operation in `slot` according to `begun`.
    #[inline]
    fn start(&mut self, slot: u32, begun: Result<bool, IoError>) -> IoResult {
        if begun? {
            if self.waiting.is_empty() && self.ring.in_flight < self.room {
                return self.issue(slot);
            }
            self.waiting.push_back(slot);
            return Ok(());
        }
        self.ended.push((slot, Ok(())));
        Ok(())
    }

    /// Handles one completion. Returns the request's result if it was the last.
    #[inline]
    fn answered(&mut self, slot: u32, answer: i32) -> Option<IoResult> {
        match self.commands.complete(&mut self.operations[slot as usize], answer) {
            Next::Issue => self.issue(slot).err().map(Err),
            Next::IssueLater => {
                self.room = FEW;
                self.waiting.push_back(slot);
                None
            }
            Next::Finished(result) => Some(result),
        }
    }

    /// Issues waiting commands, as far as there is room.
    #[cold]
    fn issue_waiting(&mut self) {
        while self.ring.in_flight < self.room
            && let Some(slot) = self.waiting.pop_front()
        {
            if let Err(error) = self.issue(slot) {
                self.ended.push((slot, Err(error)));
            }
        }
        if self.waiting.is_empty() {
            self.room = self.commands.room();
        }
    }
}

impl<C: Commands> Queue for CommandQueue<C> {
    fn depth(&self) -> u32 {
        self.operations.len() as u32
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        if let (Some(buffers), Some(regions)) = (&mut self.buffers, self.commands.regions()) {
            buffers.update(&self.ring.uring, regions);
        }
        // SAFETY: by the contract of this function.
        let begun = unsafe { self.commands.begin(&mut self.operations[slot as usize], req, offset) };
        self.start(slot, begun)
    }

    #[inline]
    fn kick(&mut self) {
        if !self.waiting.is_empty() {
            self.issue_waiting();
        }
        if self.ring.has_unsubmitted() {
            self.ring.submit();
        }
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let mut count = 0;
        while let Some((slot, result)) = self.ended.pop() {
            done(slot, result);
            count += 1;
        }
        self.ring.look();
        let mut goes_on = false;
        let mut room = [const { MaybeUninit::uninit() }; BATCH];
        loop {
            let answers = self.ring.take(&mut room);
            for answer in answers {
                let slot = answer.user_data() as u32;
                match self.answered(slot, answer.result()) {
                    Some(result) => {
                        done(slot, result);
                        count += 1;
                    }
                    None => goes_on = true,
                }
            }
            if answers.len() < BATCH {
                break;
            }
        }
        if goes_on || !self.waiting.is_empty() {
            self.kick();
        }
        count
    }

    fn event_fd(&self) -> Option<RawFd> {
        // A polled ring raises no events, but `arm` prevents sleep while it works.
        Some(self.ring.event_fd())
    }

    fn arm(&mut self) -> bool {
        self.ring.arm() && self.ended.is_empty()
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

impl<C: Commands> DirectQueue for CommandQueue<C> {
    fn wait(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        if !self.waiting.is_empty() {
            self.issue_waiting();
        }
        if !self.ended.is_empty() || self.ring.in_flight == 0 {
            self.kick();
            return Ok(());
        }
        // A request may need several commands, so at least this many completions follow.
        self.ring.wait_for(at_least.min(self.ring.in_flight), timeout, signal_mask)
    }

    unsafe fn push_zone(&mut self, slot: u32, req: ZoneRequest) -> IoResult {
        // SAFETY: by the contract of this function.
        let begun = unsafe { self.commands.begin_zone(&mut self.operations[slot as usize], req) };
        self.start(slot, begun)
    }
}

// SAFETY: the pointers in slots and ring are the requests' memory, which belongs to no thread. A
// ring bound to one thread is used by its core alone (`reactor::QueueChannel` is not `Send`).
unsafe impl<C: Commands> Send for CommandQueue<C> {}

impl<C: Commands> Drop for CommandQueue<C> {
    /// Waits for requests in flight: closing a ring does not, and their memory is about to be
    /// reused.
    fn drop(&mut self) {
        while self.ring.in_flight > 0 {
            self.ring.wait();
            self.reap(&mut |_, _| {});
        }
        // A closed ring releases its files some time later.
        let _ = self.ring.uring.submitter().unregister_files();
    }
}
