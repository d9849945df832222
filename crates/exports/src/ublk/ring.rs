//! The io_uring of one queue, on the core that serves it.
//!
//! Its completions wait for the core to enter the kernel (deferred task work), so a request never
//! interrupts the core. A flag in shared memory shows that some are waiting. Polling such a ring's
//! own descriptor does not wake the core. So the core watches an eventfd instead, which the kernel
//! signals only while the ring is armed.

use crate::Error;
use io_uring::{IoUring, cqueue, squeue};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{Ordering, fence};

/// `IORING_ENTER_GETEVENTS`: also runs deferred task work.
const ENTER_GETEVENTS: u32 = 1;

/// A ring owned by the thread that created it.
pub(super) struct Ring {
    uring: IoUring,
    /// Entries that wait for [`Ring::submit`].
    unsubmitted: u32,
}

impl Ring {
    /// Creates a ring for `entries` commands, which signals `event` while it is armed.
    pub(super) fn new(entries: u32, event: &OwnedFd) -> Result<Ring, Error> {
        let failed = |source| Error::System { action: "set an io_uring up", source };
        let uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .dontfork()
            .build(entries)
            .map_err(failed)?;
        uring.submitter().register_eventfd(event.as_raw_fd()).map_err(failed)?;
        let mut ring = Ring { uring, unsubmitted: 0 };
        ring.disarm();
        Ok(ring)
    }

    /// Registers `file` as fixed file 0.
    pub(super) fn register(&self, file: RawFd) -> io::Result<()> {
        self.uring.submitter().register_files(&[file])
    }

    /// Releases the file immediately: closing the ring would release it some time later.
    pub(super) fn unregister(&self) {
        let _ = self.uring.submitter().unregister_files(); // none is registered
    }

    /// Queues an entry for the next [`Ring::submit`].
    ///
    /// # Safety
    /// All memory that the entry points at must stay valid until the kernel has completed it.
    #[inline]
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: by contract.
        let result = unsafe { self.uring.submission().push(entry) };
        result.expect("the ring has room for one command of every tag");
        self.unsubmitted += 1;
    }

    /// Whether an entry waits for [`Ring::submit`].
    #[inline]
    pub(super) fn has_unsubmitted(&self) -> bool {
        self.unsubmitted > 0
    }

    /// Submits queued entries and lets the kernel post deferred completions. Entries that cannot be
    /// submitted now stay for the next call.
    #[inline]
    pub(super) fn submit(&mut self) {
        // SAFETY: no mask is passed; what the entries point at is valid by the contract of `push`.
        let result = unsafe {
            self.uring.submitter().enter::<libc::sigset_t>(self.unsubmitted, 0, ENTER_GETEVENTS, None)
        };
        match result {
            Ok(submitted) => self.unsubmitted -= submitted as u32,
            Err(error) => check(&error),
        }
    }

    /// Enters the kernel if completions wait for that.
    #[inline]
    pub(super) fn look(&mut self) {
        if self.is_held_back() {
            self.submit();
        }
    }

    /// Reaps completions. A result shorter than `room` means that no more are waiting.
    #[inline]
    pub(super) fn take<'a>(&mut self, room: &'a mut [MaybeUninit<cqueue::Entry>]) -> &'a [cqueue::Entry] {
        self.uring.completion().fill(room)
    }

    /// Enables the event. Returns `false` when a completion may be waiting already.
    pub(super) fn arm(&mut self) -> bool {
        self.uring.completion().enable_eventfd();
        // The kernel adds work and then reads the flag; this side sets the flag and then looks for
        // work.
        fence(Ordering::SeqCst);
        !self.is_held_back() && self.uring.completion().is_empty()
    }

    /// Disables the event: the ring is polled.
    pub(super) fn disarm(&mut self) {
        self.uring.completion().disable_eventfd();
    }

    #[inline]
    fn is_held_back(&mut self) -> bool {
        self.unsubmitted > 0 || self.uring.submission().taskrun()
    }
}

/// Interrupted, or a temporary lack of resources: the next turn tries again.
#[cold]
fn check(error: &io::Error) {
    let is_passing =
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM));
    // The ring is ours and every entry well-formed, so no request can cause any other error.
    assert!(is_passing, "io_uring_enter: {error}");
}
