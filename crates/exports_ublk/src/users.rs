//! Flushes the caches of a disk's users before the disk is removed.
//!
//! With user recovery the driver fails every request from the moment that a device is stopping.
//! Data that file systems and the page cache have not written by then would be lost. So they are
//! asked to write it first.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// `BLKFLSBUF`: writes the cached data of a mounted file system, or else of the page cache, to a
/// block device.
const BLKFLSBUF: libc::c_ulong = 0x1261;

/// Makes the users of disk `id` and of its partitions write their cached data.
pub(super) fn flush(id: u32) {
    for node in nodes(id) {
        // Without a node (in a container) the disk cannot be mounted by that name either.
        let Ok(file) = open(&node, 0) else { continue };
        // SAFETY: the command takes no pointer.
        if unsafe { libc::ioctl(file.as_raw_fd(), BLKFLSBUF, 0) } != 0 {
            let error = std::io::Error::last_os_error();
            tracing::warn!(node = %node.display(), %error, "cache flush of the removed disk failed");
        }
        drop(file);
        if let Err(error) = open(&node, libc::O_EXCL)
            && error.raw_os_error() == Some(libc::EBUSY)
        {
            tracing::warn!(node = %node.display(), "disk removed while in use: mounted, or claimed by another program");
        }
    }
}

/// The nodes of a disk and its partitions.
fn nodes(id: u32) -> Vec<PathBuf> {
    let disk = format!("ublkb{id}");
    let entries = std::fs::read_dir(format!("/sys/block/{disk}")).into_iter().flatten().flatten();
    let is_partition = |name: &OsString| {
        name.to_str().and_then(|name| name.strip_prefix(&disk)).is_some_and(|rest| rest.starts_with('p'))
    };
    let partitions = entries.map(|entry| entry.file_name()).filter(is_partition);
    partitions.chain([OsString::from(&disk)]).map(|name| PathBuf::from("/dev").join(name)).collect()
}

fn open(node: &PathBuf, flags: i32) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | flags).open(node)
}
