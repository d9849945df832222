//! Opens a disk with clear error messages, and creates queues for callers that drive them.

use super::error::OpenError;
use super::facts::DiskFacts;
use super::queue::{DiskCommands, VirtioBlkUringQueue};
use crate::fixed::Regions;
use crate::passthrough::node;
use block::{Limits, MemoryRegion};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

/// An open disk.
#[derive(Clone)]
pub struct VirtioBlkUringFile {
    shared: Arc<DiskCommands>,
    /// Whether it is open for reading only.
    is_read_only: bool,
}

impl VirtioBlkUringFile {
    /// Opens the disk whose node is at `path`. With `fixed_buffers` the memory of
    /// [`VirtioBlkUringFile::map_region`] is registered with the kernel.
    ///
    /// # Errors
    /// When the path is not the node of a disk, or may not be used.
    pub fn open(path: &Path, read_only: bool, fixed_buffers: bool) -> Result<VirtioBlkUringFile, OpenError> {
        let file = node::open(path, read_only).map_err(OpenError::of_node)?;
        let facts = DiskFacts::of(&file)?;
        if facts.is_read_only && !read_only {
            return Err(OpenError::ReadOnly);
        }
        Ok(VirtioBlkUringFile::new(file, facts, read_only, fixed_buffers))
    }

    /// Takes over an open disk; returns `fd` with an error.
    pub fn from_fd(fd: OwnedFd, fixed_buffers: bool) -> Result<VirtioBlkUringFile, (OpenError, OwnedFd)> {
        let file = File::from(fd);
        let facts = file.metadata().map_err(OpenError::Open).and_then(|metadata| {
            node::check(&metadata).map_err(OpenError::NotDisk)?;
            Ok((DiskFacts::of(&file)?, is_read_only(&file).map_err(OpenError::Open)?))
        });
        match facts {
            Ok((facts, read_only)) => Ok(VirtioBlkUringFile::new(file, facts, read_only, fixed_buffers)),
            Err(error) => Err((error, file.into())),
        }
    }

    fn new(file: File, facts: DiskFacts, is_read_only: bool, fixed_buffers: bool) -> VirtioBlkUringFile {
        let regions = fixed_buffers.then(Regions::default);
        VirtioBlkUringFile { shared: Arc::new(DiskCommands { file, facts, regions }), is_read_only }
    }

    /// The properties of the disk when it was opened.
    pub fn facts(&self) -> &DiskFacts {
        &self.shared.facts
    }

    /// The limits of the disk when it was opened.
    pub fn limits(&self) -> Limits {
        self.facts().limits(self.is_read_only)
    }

    /// The open file's descriptor.
    pub fn fd(&self) -> RawFd {
        self.shared.file.as_raw_fd()
    }

    /// The current size of the disk in bytes.
    ///
    /// # Errors
    /// When the query fails, or the block size has changed.
    pub fn capacity(&self) -> Result<u64, OpenError> {
        let now = DiskFacts::of(&self.shared.file)?;
        let was = self.facts().block_size();
        if now.block_size() != was {
            return Err(OpenError::FormatChanged { was, now: now.block_size() });
        }
        Ok(now.capacity)
    }

    /// Registers memory with all queues, before their next request.
    pub fn map_region(&self, region: &MemoryRegion) {
        if let Some(regions) = &self.shared.regions {
            regions.add(region);
        }
    }

    /// Takes memory back. A queue unpins it before its next request.
    pub fn unmap_region(&self, region: &MemoryRegion) {
        if let Some(regions) = &self.shared.regions {
            regions.remove(region);
        }
    }

    /// Creates a queue with its own ring for `depth` requests. It may move between threads.
    ///
    /// # Errors
    /// An error of `io_uring_setup(2)`: `EINVAL` for 0 or more than [`super::MAX_ENTRIES`] entries;
    /// `EPERM` where io_uring is forbidden; `ENOMEM`.
    pub fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<VirtioBlkUringQueue> {
        VirtioBlkUringQueue::open(self.shared.clone(), depth, is_polled)
    }

    /// The same for a single thread, which is cheaper.
    pub(super) fn open_queue_of_thread(
        &self,
        depth: u32,
        is_polled: bool,
    ) -> io::Result<VirtioBlkUringQueue> {
        VirtioBlkUringQueue::open_of_thread(self.shared.clone(), depth, is_polled)
    }
}

fn is_read_only(file: &File) -> io::Result<bool> {
    // SAFETY: no pointer is passed.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(flags & libc::O_ACCMODE == libc::O_RDONLY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_no_node_is_refused_with_its_kind() {
        let refusal = |path: &Path| {
            let error = VirtioBlkUringFile::open(path, false, false).err().expect("must not open");
            (error.to_errno(), error.to_string())
        };
        let regular = tempfile::NamedTempFile::new().unwrap();
        for (path, kind) in [
            (regular.path(), "a regular file"),
            (Path::new("/dev"), "a directory"),
            (Path::new("/dev/null"), "a different device"),
        ] {
            let (errno, message) = refusal(path);
            assert_eq!(errno, libc::EINVAL);
            assert!(message.contains(kind) && message.contains("/dev/vdac0"), "{path:?}: {message}");
        }
        assert_eq!(refusal(Path::new("/nonexistent")).0, libc::ENOENT);
    }

    #[test]
    fn a_block_device_is_refused_as_one() {
        use std::os::unix::fs::FileTypeExt;
        let is_block_device =
            |path: &Path| std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device());
        let devices = std::fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap().path());
        let Some(path) = devices.into_iter().find(|path| is_block_device(path)) else {
            return eprintln!("skipped: no block device here");
        };
        let error = VirtioBlkUringFile::open(&path, true, false).err().expect("must not open");
        assert!(error.to_string().contains("the path is a block device"), "{error}");
    }

    #[test]
    fn a_descriptor_that_is_not_a_disk_is_returned_with_the_error() {
        let fd = OwnedFd::from(File::open("/dev/null").unwrap());
        let number = fd.as_raw_fd();
        let (error, fd) = VirtioBlkUringFile::from_fd(fd, false).err().unwrap();
        assert!(matches!(error, OpenError::NotDisk("a different device")));
        assert_eq!(fd.as_raw_fd(), number);
    }
}
