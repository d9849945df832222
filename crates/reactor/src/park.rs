//! How a core sleeps.

use crate::clock::VirtualClock;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// How a core sleeps and learns which sources have an event. The core chooses the tokens, which
/// are small numbers.
pub trait Park {
    /// Watches `fd` for edges of readability until [`Park::unwatch`] or until an event reports the
    /// end of the watch.
    fn watch(&mut self, fd: RawFd, token: u64);
    /// Ends the watch with this token.
    fn unwatch(&mut self, token: u64);
    /// Reports events without waiting: the token, and whether the watch continues.
    fn check(&mut self, event: &mut dyn FnMut(u64, bool));
    /// Sleeps until an event, a wake or `timeout_ns`; `None` sleeps without limit.
    fn wait(&mut self, timeout_ns: Option<u64>, event: &mut dyn FnMut(u64, bool));
    /// The eventfd to which another thread writes 8 bytes to end a sleep. Called once, before the
    /// first wait.
    fn take_wake_fd(&mut self) -> Option<OwnedFd>;
}

/// Sleeps in `io_uring_enter`, with a multishot poll for each fd.
pub struct UringPark {
    ring: IoUring,
    wake_fd: Option<OwnedFd>,
    /// Submissions that did not fit yet.
    backlog: Vec<squeue::Entry>,
}

/// Token of the eventfd that other threads write to.
const WAKE: u64 = u64::MAX;
/// Token of removals, whose completions are ignored.
const REMOVAL: u64 = u64::MAX - 1;
/// Limit of entries that one system call submits. The kernel keeps the watches, so this does not
/// limit them.
const ENTRIES: u32 = 256;

impl UringPark {
    /// A park for the calling thread, which alone may use it.
    ///
    /// # Errors
    /// If the kernel refuses an io_uring or an eventfd.
    pub fn new() -> io::Result<UringPark> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(ENTRIES)
            .or_else(|_| IoUring::new(ENTRIES))?; // before Linux 6.1
        // SAFETY: no pointer is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        let wake_fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        let mut park = UringPark { ring, wake_fd: Some(wake_fd), backlog: Vec::new() };
        park.watch(fd, WAKE);
        Ok(park)
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: polls and removals point to no memory.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.backlog.push(entry);
        }
    }

    /// Submits the backlog until the rest fits into the ring; the next wait submits that rest.
    fn submit_backlog(&mut self) {
        while !self.backlog.is_empty() {
            let _ = self.ring.submit();
            let mut ring = self.ring.submission();
            while let Some(entry) = self.backlog.last() {
                // SAFETY: as in `push`.
                if unsafe { ring.push(entry) }.is_err() {
                    break;
                }
                self.backlog.pop();
            }
        }
    }

    fn report(&mut self, event: &mut dyn FnMut(u64, bool)) {
        let mut is_wake_lost = false;
        for entry in self.ring.completion() {
            let goes_on = io_uring::cqueue::more(entry.flags());
            match entry.user_data() {
                REMOVAL => {}
                WAKE => is_wake_lost = !goes_on,
                token => event(token, goes_on),
            }
        }
        if is_wake_lost && let Some(fd) = self.wake_fd.as_ref().map(AsRawFd::as_raw_fd) {
            self.watch(fd, WAKE);
        }
    }
}

impl Park for UringPark {
    fn watch(&mut self, fd: RawFd, token: u64) {
        let poll = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true);
        self.push(poll.build().user_data(token));
    }

    fn unwatch(&mut self, token: u64) {
        self.push(opcode::PollRemove::new(token).build().user_data(REMOVAL));
    }

    #[inline]
    fn check(&mut self, event: &mut dyn FnMut(u64, bool)) {
        let submission = self.ring.submission();
        // A new watch must reach the kernel even while the core is too busy to sleep.
        let must_enter = submission.taskrun() || !submission.is_empty();
        drop(submission);
        if must_enter {
            self.submit_backlog();
            // Also runs deferred work of the ring.
            let _ = self.ring.submit();
        }
        if !self.ring.completion().is_empty() {
            self.report(event);
        }
    }

    fn wait(&mut self, timeout_ns: Option<u64>, event: &mut dyn FnMut(u64, bool)) {
        self.submit_backlog();
        let time;
        let mut args = SubmitArgs::new();
        if let Some(ns) = timeout_ns {
            time = Timespec::new().sec(ns / 1_000_000_000).nsec((ns % 1_000_000_000) as u32);
            args = args.timespec(&time);
        }
        // An interrupted or timed-out wait is a spurious wake: the core finds no work and sleeps
        // again.
        let _ = self.ring.submitter().submit_with_args(1, &args);
        self.report(event);
    }

    fn take_wake_fd(&mut self) -> Option<OwnedFd> {
        let copy = self.wake_fd.as_ref()?.try_clone();
        copy.ok()
    }
}

/// Sleeps by moving a virtual clock: only timers can end the sleep.
pub struct VirtualPark(pub VirtualClock);

impl Park for VirtualPark {
    fn watch(&mut self, _: RawFd, _: u64) {}
    fn unwatch(&mut self, _: u64) {}
    fn check(&mut self, _: &mut dyn FnMut(u64, bool)) {}

    /// # Panics
    /// If no timer runs: the simulated core would sleep for ever.
    fn wait(&mut self, timeout_ns: Option<u64>, _: &mut dyn FnMut(u64, bool)) {
        self.0.advance(timeout_ns.expect("deadlock: no task is ready and no timer runs"));
    }

    fn take_wake_fd(&mut self) -> Option<OwnedFd> {
        None
    }
}
