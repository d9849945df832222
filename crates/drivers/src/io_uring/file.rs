//! A file or block device for callers that drive its queues themselves, such as the C API.
//!
//! Unlike a [`super::UringDevice`] it claims and locks nothing, has no block size unless the kernel
//! requires one, and lets a regular file grow.

use super::UringQueue;
use super::image_lock::ImageFile;
use super::limits::{self, FileFacts};
use super::open::check_kind;
use super::queue::Shared;
use super::tail::Tail;
use crate::ring::Ring;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Maximum entries of an io_uring (`IORING_MAX_ENTRIES`).
pub const MAX_ENTRIES: u32 = 32768;

/// An open file or block device.
pub struct UringFile {
    shared: Arc<Shared>,
    facts: FileFacts,
}

impl UringFile {
    /// Opens the file or block device at `path`.
    ///
    /// # Errors
    /// An error of `open(2)`; `EINVAL` if it is neither a file nor a block device.
    pub fn open(path: &Path, is_direct: bool, read_only: bool) -> io::Result<UringFile> {
        // Opening a pipe would block, and opening a device may have side effects: check the type
        // first.
        check_kind(std::fs::metadata(path)?.file_type())
            .map_err(|what| io::Error::new(io::ErrorKind::InvalidInput, what))?;
        let flags = libc::O_CLOEXEC | if is_direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(path)?;
        UringFile::new(file)
    }

    /// Takes over an open file or block device; returns `fd` with an error.
    ///
    /// # Errors
    /// `EINVAL` if it is neither a file nor a block device; an error of the system when it cannot
    /// be queried.
    pub fn from_fd(fd: OwnedFd) -> Result<UringFile, (io::Error, OwnedFd)> {
        let file = File::from(fd);
        let facts = file.metadata().and_then(|metadata| {
            check_kind(metadata.file_type())
                .map_err(|what| io::Error::new(io::ErrorKind::InvalidInput, what))?;
            FileFacts::of(&file)
        });
        match facts {
            Ok(facts) => Ok(UringFile::over(file, facts)),
            Err(error) => Err((error, file.into())),
        }
    }

    fn new(file: File) -> io::Result<UringFile> {
        let facts = FileFacts::of(&file)?;
        Ok(UringFile::over(file, facts))
    }

    fn over(file: File, facts: FileFacts) -> UringFile {
        let backing = facts.backing(&file, facts.offset_alignment);
        let (has_lost_writes, tail) = (AtomicBool::new(false), Tail::none());
        let file = Arc::new(ImageFile::unlocked(file));
        let queries = Default::default();
        let shared = Shared { file, backing, has_lost_writes, regions: None, tail, queries };
        UringFile { shared: Arc::new(shared), facts }
    }

    /// The properties of the file.
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// The open file's descriptor.
    pub fn fd(&self) -> RawFd {
        self.shared.file.as_raw_fd()
    }

    /// The current size in bytes.
    ///
    /// # Errors
    /// When the size cannot be queried.
    pub fn capacity(&self) -> io::Result<u64> {
        limits::size(&self.shared.file)
    }

    /// Maximum segments of one request.
    pub fn max_segments(&self) -> usize {
        super::operation::MAX_IOVECS
    }

    /// Opens a queue with its own rings for `depth` requests. It may move between threads.
    ///
    /// # Errors
    /// An error of `io_uring_setup(2)`: `EINVAL` for 0 or more than [`MAX_ENTRIES`] entries,
    /// `EPERM` where io_uring is forbidden, `ENOMEM`.
    pub fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<UringQueue> {
        if !(1..=MAX_ENTRIES).contains(&depth) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        UringQueue::new(self.shared.clone(), depth, is_polled, Ring::for_any_thread)
    }
}

/// Checks whether this process may use io_uring.
///
/// # Errors
/// An error of `io_uring_setup(2)`: `ENOSYS` if the kernel does not support it, `EPERM` if it is
/// forbidden.
pub fn probe() -> io::Result<()> {
    <Ring>::for_any_thread(1, false).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::DirectQueue;
    use block::{Data, Flags, Queue, Request, Segment};
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    /// Waits for the next completion.
    fn ended(queue: &mut UringQueue) -> (u32, block::IoResult) {
        let mut all = Vec::new();
        while all.is_empty() {
            queue.wait(1, Some(Duration::from_secs(10)), None).unwrap();
            queue.reap(&mut |slot, result| all.push((slot, result)));
        }
        assert_eq!(all.len(), 1);
        all[0]
    }

    #[test]
    fn bytes_beyond_the_end_read_as_zeroes_and_writes_make_the_file_grow() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, b"seven b").unwrap();
        let file = UringFile::open(&path, false, false).unwrap();
        assert_eq!((file.capacity().unwrap(), file.facts().offset_alignment), (7, 1));
        let mut queue = file.open_queue(4, false).unwrap();
        let mut memory = [1u8; 10];
        let list = [Segment { base: memory.as_mut_ptr(), len: 10 }];
        // SAFETY: memory and list outlive the queue's work, which is waited for.
        unsafe { queue.push(0, &Request::read(Data::new(&list)), 3).unwrap() };
        assert_eq!(ended(&mut queue), (0, Ok(())));
        assert_eq!(&memory, b"en b\0\0\0\0\0\0");
        // SAFETY: as above.
        unsafe { queue.push(1, &Request::write(Data::new(&list), Flags::NONE), 7).unwrap() };
        assert_eq!(ended(&mut queue), (1, Ok(())));
        assert_eq!(std::fs::read(&path).unwrap().len(), 17);
    }

    #[test]
    fn a_queue_may_be_handed_to_another_thread_with_requests_in_flight() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all_at(&[7; 4096], 0).unwrap();
        let file = UringFile::from_fd(file.into()).map_err(|(e, _)| e).unwrap();
        let mut queue = file.open_queue(4, false).unwrap();
        let memory: &'static mut [u8; 4096] = Box::leak(Box::new([0; 4096]));
        let list: &'static [Segment] =
            Box::leak(Box::new([Segment { base: memory.as_mut_ptr(), len: 4096 }]));
        // SAFETY: both live forever.
        unsafe { queue.push(2, &Request::read(Data::new(list)), 0).unwrap() };
        queue.kick();
        std::thread::spawn(move || {
            assert_eq!(ended(&mut queue), (2, Ok(())));
        })
        .join()
        .unwrap();
        // SAFETY: the read has ended.
        assert_eq!(unsafe { *list[0].base }, 7);
    }

    #[test]
    fn a_descriptor_that_is_not_a_file_is_returned_with_the_error() {
        let (pipe, _write) = std::io::pipe().unwrap();
        let fd = OwnedFd::from(pipe);
        let number = fd.as_raw_fd();
        let (error, fd) = UringFile::from_fd(fd).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(fd.as_raw_fd(), number);
        assert!(UringFile::open(Path::new("/dev/null"), false, false).is_err());
    }
}
