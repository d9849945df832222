//! The io_uring of one queue, on the core that serves it.
//!
//! Its completions wait for the core to enter the kernel (deferred task work), so a request never interrupts the
//! core; a flag in shared memory says that there is something. Who polls such a ring's own descriptor is not woken,
//! so the core watches an eventfd instead, which the kernel signals only while the ring is armed.

use crate::Error;
use io_uring::{IoUring, cqueue, squeue};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{Ordering, fence};

/// `IORING_ENTER_GETEVENTS`: runs the work that waits for us, too.
const ENTER_GETEVENTS: u32 = 1;

/// A ring that belongs to the thread that made it.
pub(super) struct Ring {
    uring: IoUring,
    /// Entries that wait for [`Ring::submit`].
    unsubmitted: u32,
}

impl Ring {
    /// A ring with room for `entries` commands, which signals `event` while it is armed.
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

    /// Lets entries name `file` as fixed file 0.
    pub(super) fn register(&self, file: RawFd) -> io::Result<()> {
        self.uring.submitter().register_files(&[file])
    }

    /// Lets go of the file at once: a ring that is closed does so some time later.
    pub(super) fn unregister(&self) {
        let _ = self.uring.submitter().unregister_files(); // none is registered
    }

    /// Puts an entry into the ring, for the next [`Ring::submit`].
    ///
    /// # Safety
    /// What the entry points at stays valid until the kernel is done with it.
    #[inline]
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: by contract.
        let result = unsafe { self.uring.submission().push(entry) };
        result.expect("the ring has room for one command of every tag");
        self.unsubmitted += 1;
    }

    /// Whether anything in the ring waits for [`Ring::submit`].
    #[inline]
    pub(super) fn has_unsubmitted(&self) -> bool {
        self.unsubmitted > 0
    }

    /// Submits what is in the ring and lets the kernel post what it holds back. What could not be submitted now stays
    /// for the next call.
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

    /// Takes completions. Fewer than there is room for: there are no more.
    #[inline]
    pub(super) fn take<'a>(&mut self, room: &'a mut [MaybeUninit<cqueue::Entry>]) -> &'a [cqueue::Entry] {
        self.uring.completion().fill(room)
    }

    /// Asks for an event; `false` when there may be a completion already.
    pub(super) fn arm(&mut self) -> bool {
        self.uring.completion().enable_eventfd();
        // The kernel adds work and then looks at the flag; we set the flag and then look for work.
        fence(Ordering::SeqCst);
        !self.is_held_back() && self.uring.completion().is_empty()
    }

    /// Stops events: the ring is polled.
    pub(super) fn disarm(&mut self) {
        self.uring.completion().disable_eventfd();
    }

    #[inline]
    fn is_held_back(&mut self) -> bool {
        self.unsubmitted > 0 || self.uring.submission().taskrun()
    }
}

/// Interrupted, or short of something for the moment: the next turn tries again.
#[cold]
fn check(error: &io::Error) {
    let is_passing =
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM));
    // The ring is ours and every entry well-formed, so nothing else can be a property of one request.
    assert!(is_passing, "io_uring_enter: {error}");
}
