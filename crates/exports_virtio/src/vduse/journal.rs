//! The file that records requests in flight, so that a server can continue after another one died.
//!
//! The kernel keeps the device and its virtqueues, but not which requests were in flight. These are
//! in an in-flight region in the format of vhost-user, in a file of the server. The file belongs to
//! one device: for a new device it is emptied first. The server holds a lock on it.
//!
//! ```text
//!   0     magic, version, length of the name, capacity, name of the served device; then zeroes
//!   4096  the in-flight region
//! ```
//!
//! So a successor never serves another disk to a running driver.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use virtio::inflight::InflightRegion;

const MAGIC: [u8; 8] = *b"FrstVdus";
const VERSION: u32 = 1;
/// Offset of the in-flight region.
const REGION: u64 = 4096;
/// Offset of the name.
const NAME: usize = 24;

/// The device that the driver uses: its name and size.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its size in bytes.
    pub capacity: u64,
}

impl Served<'_> {
    /// Names that differ only beyond this length count as equal.
    fn name(&self) -> &[u8] {
        &self.name.as_bytes()[..self.name.len().min(REGION as usize - NAME)]
    }
}

/// Opens and locks the file; creates it if needed. An existing file may belong to a device of
/// another shape.
///
/// # Errors
/// When the system refuses a step, or another process uses the file.
pub fn open(path: &Path) -> io::Result<File> {
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
            failed(io::Error::new(io::ErrorKind::ResourceBusy, "the file is in use by another process"))
        }
        TryLockError::Error(error) => failed(error),
    })?;
    Ok(file)
}

/// Creates the region of a new driver, with no request in flight.
///
/// # Errors
/// When the shape is invalid, or the file cannot be written.
pub fn start(
    file: &File,
    served: Served<'_>,
    num_queues: u16,
    queue_size: u16,
    is_packed: bool,
) -> io::Result<InflightRegion> {
    file.set_len(0)?;
    file.set_len(REGION + InflightRegion::size(num_queues, queue_size, is_packed))?;
    note(file, served)?;
    region(file, num_queues, queue_size, is_packed)
}

/// Records the served device.
///
/// # Errors
/// When the file cannot be written.
pub fn note(file: &File, served: Served<'_>) -> io::Result<()> {
    let name = served.name();
    let mut head = vec![0; NAME + name.len()];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&(name.len() as u32).to_le_bytes());
    head[16..24].copy_from_slice(&served.capacity.to_le_bytes());
    head[NAME..].copy_from_slice(name);
    file.write_all_at(&head, 0)
}

/// Returns the region of a predecessor.
///
/// # Errors
/// When it served another device or a larger one, or the file is empty or too short for this shape.
pub fn take_over(
    file: &File,
    served: Served<'_>,
    num_queues: u16,
    queue_size: u16,
    is_packed: bool,
) -> io::Result<InflightRegion> {
    let refused = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    let mut head = vec![0; REGION as usize];
    if file.metadata()?.len() < REGION {
        return refused("the journal is empty".into());
    }
    file.read_exact_at(&mut head, 0)?;
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    if head[..8] != MAGIC || word(8) != VERSION {
        return refused("not a journal of this version".into());
    }
    let len = (word(12) as usize).min(head.len() - NAME);
    let (name, capacity) =
        (&head[NAME..NAME + len], u64::from_le_bytes(std::array::from_fn(|i| head[16 + i])));
    if name != served.name() || served.capacity < capacity {
        return refused(format!(
            "the driver uses {} of {capacity} bytes, but the export serves {} of {}",
            String::from_utf8_lossy(name),
            served.name,
            served.capacity
        ));
    }
    region(file, num_queues, queue_size, is_packed)
}

fn region(file: &File, num_queues: u16, queue_size: u16, is_packed: bool) -> io::Result<InflightRegion> {
    let fd: OwnedFd = file.try_clone()?.into();
    let len = file.metadata()?.len() - REGION;
    InflightRegion::map(fd, REGION, len, num_queues, queue_size, is_packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Served<'static> = Served { name: "mem:a", capacity: 1 << 20 };

    fn refusal(file: &File, served: Served<'_>, num_queues: u16) -> String {
        take_over(file, served, num_queues, 64, false).unwrap_err().to_string()
    }

    #[test]
    fn one_process_uses_the_file_and_finds_what_was_left_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let file = open(&path).unwrap();
        assert_eq!(refusal(&file, DISK, 2), "the journal is empty");
        start(&file, DISK, 2, 64, false).unwrap();
        take_over(&file, DISK, 2, 64, false).unwrap();
        assert!(refusal(&file, DISK, 4).contains("are needed"));
        let again = OpenOptions::new().read(true).open(&path).unwrap();
        assert!(matches!(again.try_lock(), Err(TryLockError::WouldBlock)));
        drop(file);
        take_over(&open(&path).unwrap(), DISK, 2, 64, false).unwrap();
    }

    #[test]
    fn another_disk_or_a_smaller_one_is_not_served_to_a_driver_at_work() {
        let file = tempfile::tempfile().unwrap();
        start(&file, DISK, 1, 64, false).unwrap();
        let said = refusal(&file, Served { name: "mem:b", ..DISK }, 1);
        assert_eq!(said, "the driver uses mem:a of 1048576 bytes, but the export serves mem:b of 1048576");
        take_over(&file, Served { capacity: 2 << 20, ..DISK }, 1, 64, false).unwrap();
        note(&file, Served { capacity: 2 << 20, ..DISK }).unwrap();
        assert!(refusal(&file, DISK, 1).contains("2097152"));
        file.write_all_at(b"x", 0).unwrap();
        assert!(refusal(&file, DISK, 1).contains("not a journal"));
    }
}
