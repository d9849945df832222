//! Checks the descriptors of a VMM: eventfds for events, memory files for mappings.
//!
//! Calls on a file of a user-space file system (FUSE) wait for a process that may be the VMM
//! itself. Such a descriptor is recognized without a call to the file system. A separate thread
//! closes it, since `close(2)` also waits for the file system.

use super::MemoryFiles;
use exports::Error;
use reactor::PeerEvent;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of descriptors, of all clients, that separate threads close at the same time.
const MAX_CLOSING: usize = 64;

static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// Checks an event descriptor of a ring. Anything but an eventfd is refused.
pub(super) fn event(index: u8, what: &str, file: Option<File>) -> Result<Option<Arc<OwnedFd>>, Error> {
    let Some(file) = file else { return Ok(None) };
    let fault = match std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        Ok(link) if link.as_os_str().as_encoded_bytes().starts_with(b"anon_inode:[eventfd") => None,
        Ok(link) => Some(link.display().to_string()),
        // Without /proc the kernel's own check of an eventfd decides.
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

/// Checks a descriptor to be mapped. A page fault on a file that is not in memory may block the
/// core for as long as its file system likes.
pub(super) fn memory(what: &str, file: File, allowed: MemoryFiles) -> Result<File, Error> {
    // Only files of memfd, tmpfs and hugetlbfs have seals. The call does not reach a user-space
    // file system.
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

/// Closes a descriptor of unknown kind on another thread. Beyond [`MAX_CLOSING`] the client's own
/// control thread closes it and may block.
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
        // The closure has been dropped, and the file with it.
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    }
}
