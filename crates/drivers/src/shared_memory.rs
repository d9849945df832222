//! Memory that can be shared with a device in another process: a memfd and its mapping.

use block::{MemoryRegion, Segment};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Zeroed shared memory, allocated on first access. A process that gets its descriptor cannot
/// truncate the file.
#[derive(Debug)]
pub struct SharedMemory {
    base: *mut u8,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread; its users coordinate access to its
// bytes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; a shared reference only provides raw pointers and copies bytes, as for guest
// memory.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Allocates `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn new(len: usize) -> io::Result<SharedMemory> {
        let len = len.max(1).next_multiple_of(page_size() as usize);
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string.
        let fd = check(unsafe { libc::memfd_create(c"freestone-shared".as_ptr(), flags) })?;
        // SAFETY: a new descriptor with no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: no pointers are passed.
        check(unsafe { libc::ftruncate(fd.as_raw_fd(), len as i64) })?;
        // SAFETY: as above.
        check(unsafe {
            libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)
        })?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(SharedMemory { base: base.cast(), len, fd })
    }

    /// First byte; aligned to a page.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: the memory has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The whole memory, for [`block::Device::map_region`].
    pub fn region(&self) -> MemoryRegion {
        MemoryRegion { addr: self.base.addr(), len: self.len, fd: Some(self.fd.as_raw_fd()), fd_offset: 0 }
    }

    /// Takes all further buffers of this process from this memory, until the process ends. Returns
    /// the memory as devices register it, or `None` if other memory holds the buffers already.
    pub fn hold_buffers(self) -> Option<MemoryRegion> {
        let memory = std::mem::ManuallyDrop::new(self);
        let base = std::ptr::NonNull::new(memory.base)?;
        // SAFETY: a shared mapping of zeroes that was ours alone, and that is never unmapped.
        unsafe { reactor::hold_buffers(base, memory.len) }.then(|| memory.region())
    }

    /// The `len` bytes from `offset` on, for a request.
    ///
    /// # Panics
    /// When the range is outside the memory.
    pub fn segment(&self, offset: usize, len: usize) -> Segment {
        Segment { base: self.at(offset, len), len }
    }

    /// Copies bytes from `offset` on into `target`.
    ///
    /// # Panics
    /// When the range is outside the memory.
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: the range lies in the mapping (`at`) and the target is ours; a device may race
        // with the copy, which then holds any mix of its bytes.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }

    /// Copies `source` to `offset`.
    ///
    /// # Panics
    /// When the range is outside the memory.
    pub fn write(&self, offset: usize, source: &[u8]) {
        let target = self.at(offset, source.len());
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset}+{len} of {}", self.len);
        self.base.wrapping_add(offset)
    }
}

impl AsRawFd for SharedMemory {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` created; later use of the bytes would violate the
        // contract of its request.
        let result = unsafe { libc::munmap(self.base.cast(), self.len) };
        debug_assert_eq!(result, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// Size of a page in bytes.
pub fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_are_read_back_and_the_file_cannot_shrink() {
        let memory = SharedMemory::new(5000).unwrap();
        assert_eq!(memory.len(), 8192);
        memory.write(4090, b"across a page");
        let mut got = [0; 13];
        memory.read(4090, &mut got);
        assert_eq!(&got, b"across a page");
        assert_eq!(memory.segment(4090, 13).base, memory.base().wrapping_add(4090));
        // SAFETY: no pointers are passed.
        assert_eq!(unsafe { libc::ftruncate(memory.as_raw_fd(), 0) }, -1);
    }

    #[test]
    #[should_panic(expected = "8190+3 of 8192")]
    fn a_segment_beyond_the_end_is_refused() {
        SharedMemory::new(8192).unwrap().segment(8190, 3);
    }
}
