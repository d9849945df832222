//! Creates eventfds, with which one thread wakes another.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Returns a new non-blocking eventfd.
///
/// # Errors
/// When the system has no descriptor left.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
        fd if fd < 0 => Err(io::Error::last_os_error()),
        // SAFETY: a fresh descriptor with no other owner.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}
