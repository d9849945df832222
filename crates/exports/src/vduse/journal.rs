//! The file that remembers what is in flight, so that a server can go on where another one died.
//!
//! The kernel keeps the device and its virtqueues, but not what was taken out of them: that stands in an in-flight
//! region as vhost-user has it, in a file of the server's. It lives as long as the device: a file of a device that was
//! made anew is emptied first. Whoever serves has it locked.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use virtio::inflight::InflightRegion;

/// Opens and locks the file, and makes it if need be. It may be there and belong to a device of another shape.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let failed = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(failed)?;
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            failed(io::Error::new(io::ErrorKind::ResourceBusy, "another process uses it"))
        }
        TryLockError::Error(error) => failed(error),
    })?;
    Ok(file)
}

/// The region for a device that is new: nothing is in flight.
pub(super) fn start(
    file: &File,
    num_queues: u16,
    queue_size: u16,
    is_packed: bool,
) -> io::Result<InflightRegion> {
    file.set_len(0)?;
    file.set_len(InflightRegion::size(num_queues, queue_size, is_packed))?;
    map(file, num_queues, queue_size, is_packed)
}

/// The region that a predecessor has left.
///
/// # Errors
/// When it is too short for this shape: then it is of another device, or none was there.
pub(super) fn map(
    file: &File,
    num_queues: u16,
    queue_size: u16,
    is_packed: bool,
) -> io::Result<InflightRegion> {
    let fd: OwnedFd = file.try_clone()?.into();
    InflightRegion::map(fd, 0, file.metadata()?.len(), num_queues, queue_size, is_packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_uses_the_file_and_finds_what_was_left_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let file = open(&path).unwrap();
        assert!(map(&file, 2, 64, false).unwrap_err().to_string().contains("0 bytes"));
        start(&file, 2, 64, false).unwrap();
        map(&file, 2, 64, false).unwrap();
        assert!(map(&file, 4, 64, false).is_err());
        let again = OpenOptions::new().read(true).open(&path).unwrap();
        assert!(matches!(again.try_lock(), Err(TryLockError::WouldBlock)));
        drop(file);
        map(&open(&path).unwrap(), 2, 64, false).unwrap();
    }
}
