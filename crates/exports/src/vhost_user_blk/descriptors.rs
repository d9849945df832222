//! Which descriptors of a VMM are taken: eventfds for events, files in memory for what is mapped.
//!
//! A descriptor of a file system in user space (FUSE) stands for calls to a process that may be the VMM itself. It is
//! recognized without any call that asks the file system, and it is closed by a thread of its own: `close(2)` waits for
//! the file system too.

use super::MemoryFiles;
use crate::Error;
use reactor::PeerEvent;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Descriptors of all clients that threads of their own close at a time.
const MAX_CLOSING: usize = 64;

static CLOSING: AtomicUsize = AtomicUsize::new(0);

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

/// A descriptor that is to be mapped. A page of any other file than one in memory may take its file system as long as
/// it likes, and the core that touches the page waits for that.
pub(super) fn memory(what: &str, file: File, allowed: MemoryFiles) -> Result<File, Error> {
    // Files of memfd, tmpfs and hugetlbfs have seals, no other file has. The call asks no file system.
    // SAFETY: a plain call on a descriptor of ours.
    let is_memory = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) } >= 0;
    if is_memory || allowed == MemoryFiles::Any {
        return Ok(file);
    }
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let name = name.map_or_else(|_| "a file".to_owned(), |path| path.display().to_string());
    close_apart(file);
    Err(Error::protocol(format!(
        "{what} refused: {name} is no memfd and lies neither on tmpfs nor on hugetlbfs (memory=any allows other files)"
    )))
}

/// Closes a descriptor of unknown kind without waiting for that. Beyond [`MAX_CLOSING`] the client's own control thread
/// waits.
fn close_apart(file: File) {
    if CLOSING.fetch_add(1, Ordering::Relaxed) >= MAX_CLOSING {
        CLOSING.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    let close = move || {
        drop(file);
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    };
    if std::thread::Builder::new().name("close".into()).stack_size(64 << 10).spawn(close).is_err() {
        // The closure is gone, and the file with it.
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    }
}
