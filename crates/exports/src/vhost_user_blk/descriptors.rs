//! Which descriptors of a VMM are taken: eventfds for events.
//!
//! A descriptor of a file system in user space (FUSE) stands for calls to a process that may be the VMM itself. It is
//! recognized without any call that asks the file system, and it is closed by a thread of its own: `close(2)` waits for
//! the file system too.

use crate::Error;
use reactor::PeerEvent;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// An event descriptor of a ring. Anything but an eventfd is refused.
pub(super) fn event(index: u8, what: &str, file: Option<File>) -> Result<Option<Arc<OwnedFd>>, Error> {
    let Some(file) = file else { return Ok(None) };
    let fault = match std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        Ok(link) if link.as_os_str().as_encoded_bytes().starts_with(b"anon_inode:[eventfd") => None,
        Ok(link) => Some(link.display().to_string()),
        // No /proc here: the kernel says what it takes for an eventfd.
        Err(_) => PeerEvent::new(file.as_fd()).err().map(|error| error.to_string()),
    };
    match fault {
        None => Ok(Some(Arc::new(OwnedFd::from(file)))),
        Some(fault) => {
            close_apart(file);
            Err(Error::protocol(format!("queue {index}: {what} descriptor is {fault}, not an eventfd")))
        }
    }
}

/// Closes a descriptor of unknown kind without waiting for that.
pub(super) fn close_apart(file: impl Into<OwnedFd>) {
    let file = file.into();
    // Without a thread the file is dropped here, by the closure that was not run.
    let _ = std::thread::Builder::new().name("close".into()).stack_size(64 << 10).spawn(move || drop(file));
}
