//! One ring over one namespace.

use super::admin::PassthroughCommand;
use super::facts::{NamespaceFacts, page_bytes};
use super::operation::{Memory, Next, Operation};
use crate::direct::{DirectQueue, ZoneRequest};
use crate::ring::Ring;
use block::{IoError, IoResult, Queue, Request};
use io_uring::opcode::UringCmd80;
use io_uring::types::{Fd, Fixed};
use io_uring::{cqueue, squeue};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// `NVME_URING_CMD_IO`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`.
const CMD_IO: u32 = 0xc048_4e80;
/// `NVME_URING_CMD_IO_VEC`: the same with a list of `iovec`.
const CMD_IO_VEC: u32 = 0xc048_4e81;

/// Maximum completions reaped at once.
const BATCH: usize = 16;

/// Commands of one queue in the ring; more wait in the queue. The controller's own queues hold 1023
/// on Linux, for all users. Commands beyond that go to io_uring's worker threads, which is slow,
/// and on some kernels wrong (see [`Operation::complete`]).
const MOST: u32 = 256;
/// Commands that stay in the ring while the kernel temporarily refuses more.
const FEW: u32 = 32;

/// The state that all queues of a namespace share.
pub(super) struct Shared {
    pub file: File,
    pub facts: NamespaceFacts,
}

/// Pass-through commands need the large entries (`IORING_SETUP_SQE128`, `IORING_SETUP_CQE32`).
pub(super) type LargeRing = Ring<squeue::Entry128, cqueue::Entry32>;

/// The submission and completion ring of one core or thread. Every slot has at most one command in
/// the ring.
///
/// All commands of a polled controller use the same ring, unlike those of files: flushes, discards
/// and zone management complete in the same queue pair.
pub struct NvmeQueue {
    ring: LargeRing,
    operations: Box<[Operation]>,
    /// Operations that completed without the kernel, for the next `reap`.
    ended: Vec<(u32, IoResult)>,
    /// Slots whose command found the ring full or was temporarily refused, and later ones.
    waiting: VecDeque<u32>,
    /// Number of commands that the ring may hold now.
    room: u32,
    is_registered: bool,
    page: usize,
    shared: Arc<Shared>,
}

impl NvmeQueue {
    pub(super) fn new(shared: Arc<Shared>, depth: u32, ring: LargeRing) -> io::Result<NvmeQueue> {
        let fd = shared.file.as_raw_fd();
        Ok(NvmeQueue {
            is_registered: ring.uring.submitter().register_files(&[fd]).is_ok(),
            ring,
            operations: (0..depth).map(|_| Operation::idle()).collect(),
            ended: Vec::with_capacity(depth as usize),
            waiting: VecDeque::with_capacity(depth as usize),
            room: MOST,
            page: page_bytes(),
            shared,
        })
    }

    /// Queues the next command of `slot`. An error ends the request.
    #[inline]
    fn issue(&mut self, slot: u32) -> IoResult {
        let operation = &mut self.operations[slot as usize];
        let (command, memory) = operation.next(&self.shared.facts, self.page)?;
        let (code, addr, len) = match memory {
            Memory::Single(segment) => (CMD_IO, segment.base.expose_provenance(), segment.len),
            Memory::List => {
                (CMD_IO_VEC, operation.iovecs.as_ptr().expose_provenance(), operation.iovecs.len())
            }
        };
        // No command is longer than `max_transfer`, which is below 4 GiB.
        let command = PassthroughCommand::new(&command, addr as u64, len as u32).to_bytes();
        let entry = match self.is_registered {
            true => UringCmd80::new(Fixed(0), code).cmd(command).build(),
            false => UringCmd80::new(Fd(self.shared.file.as_raw_fd()), code).cmd(command).build(),
        };
        // SAFETY: the caller's memory stays valid by the contract of `Queue::push`; lists and
        // memory of our own live in the slot, and stay unchanged until the kernel has answered.
        unsafe { self.ring.push(&entry.user_data(u64::from(slot))) };
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
        match self.operations[slot as usize].complete(answer, &self.shared.facts) {
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
            self.room = MOST;
        }
    }
}

impl Queue for NvmeQueue {
    fn depth(&self) -> u32 {
        self.operations.len() as u32
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        // SAFETY: by the contract of this function.
        let begun = unsafe { self.operations[slot as usize].begin(req, offset, &self.shared.facts) };
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

impl DirectQueue for NvmeQueue {
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
        let begun = unsafe { self.operations[slot as usize].begin_zone(req, &self.shared.facts) };
        self.start(slot, begun)
    }
}

// SAFETY: the pointers in slots and ring are the requests' memory, which belongs to no thread. A
// ring bound to one thread is used by its core alone (`reactor::QueueChannel` is not `Send`).
unsafe impl Send for NvmeQueue {}

impl Drop for NvmeQueue {
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
