//! The memory in which the kernel describes the requests of one queue.

use super::uapi::{Descriptor, MAX_QUEUE_DEPTH};
use exports::Error;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

/// A queue's descriptors, one per tag, mapped read-only from `/dev/ublkcN`.
pub(super) struct Descriptors {
    memory: NonNull<Descriptor>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    /// Maps the descriptors of `queue`, which has `depth` tags.
    pub(super) fn map(file: &File, queue: u16, depth: u16) -> Result<Descriptors, Error> {
        // SAFETY: no pointer is passed.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let in_pages = |depth: u16| (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page);
        let bytes = in_pages(depth);
        let offset = usize::from(queue) * in_pages(MAX_QUEUE_DEPTH);
        // SAFETY: a new mapping, which nothing else refers to.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if memory == libc::MAP_FAILED {
            let what = format!("ublk: the descriptors of queue {queue} cannot be mapped");
            return Err(Error::Ublk { what, source: io::Error::last_os_error() });
        }
        let memory = NonNull::new(memory.cast()).expect("the kernel maps nothing at address 0");
        Ok(Descriptors { memory, bytes, depth })
    }

    /// Reads the request of `tag`, which the kernel has handed over.
    #[inline]
    pub(super) fn read(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        // SAFETY: inside the mapping, which has one for each tag. The kernel writes to it, so it is
        // read as volatile; it does so before it hands the request over, and not again until the
        // answer.
        unsafe { self.memory.add(tag.into()).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with these bounds.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}
