//! How the two sides of a bridge wake each other: an eventfd each, written to only while its owner asked for it.

use super::ring::Padded;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Nobody wants to be woken.
const NEVER: u64 = u64::MAX;

/// What both sides share beside the rings.
pub(super) struct Bells {
    core: OwnedFd,
    caller: OwnedFd,
    /// The core has left its rings and is to be woken at the next request.
    core_waits: Padded<AtomicBool>,
    /// The caller is to be woken when so many completions have been published in all.
    caller_waits_for: Padded<AtomicU64>,
    /// The core has ended without answering.
    is_gone: AtomicBool,
}

impl Bells {
    pub(super) fn new() -> io::Result<Bells> {
        Ok(Bells {
            core: event_fd()?,
            caller: event_fd()?,
            core_waits: Padded::default(),
            caller_waits_for: Padded(AtomicU64::new(NEVER)),
            is_gone: AtomicBool::new(false),
        })
    }

    pub(super) fn core_fd(&self) -> RawFd {
        self.core.as_raw_fd()
    }

    pub(super) fn caller_fd(&self) -> RawFd {
        self.caller.as_raw_fd()
    }

    /// From now on the core is woken by requests. It looks for some once more after this.
    pub(super) fn arm_core(&self) {
        self.core_waits.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn disarm_core(&self) {
        self.core_waits.0.store(false, Ordering::Relaxed);
    }

    /// Called after requests were published.
    #[inline]
    pub(super) fn wake_core(&self) {
        // Either the core sees the requests when it looks once more, or we see that it waits.
        fence(Ordering::SeqCst);
        if self.core_waits.0.load(Ordering::Relaxed) && self.core_waits.0.swap(false, Ordering::Relaxed) {
            ring(&self.core);
        }
    }

    /// From now on the caller is woken once `count` completions have been published in all. It looks for
    /// them once more after this.
    pub(super) fn arm_caller(&self, count: u64) {
        self.caller_waits_for.0.store(count, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn disarm_caller(&self) {
        self.caller_waits_for.0.store(NEVER, Ordering::Relaxed);
    }

    /// Called after completions were published, `count` in all by now.
    #[inline]
    pub(super) fn wake_caller(&self, count: u64) {
        fence(Ordering::SeqCst);
        let wanted = self.caller_waits_for.0.load(Ordering::Relaxed);
        let change = |to| {
            self.caller_waits_for.0.compare_exchange(wanted, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if count >= wanted && change(NEVER) {
            ring(&self.caller);
        }
    }

    /// The core ends. Whatever it published before is seen by who learns of this.
    pub(super) fn say_goodbye(&self) {
        self.is_gone.store(true, Ordering::Release);
        ring(&self.caller);
    }

    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }
}

fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes an event readable. That fails only when its counter is full, and then it is.
#[cold]
fn ring(event: &OwnedFd) {
    let one = 1u64;
    // SAFETY: writes 8 bytes from a live variable.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}
