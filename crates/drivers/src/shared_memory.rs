//! Memory that can be shared with a device in another process: a memfd and its mapping.

use block::{MemoryRegion, Segment};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Bytes of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;

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
        SharedMemory::aligned(len, 1)
    }

    /// Allocates `len` bytes, rounded up to a multiple of [`HUGE_PAGE`] at such an address: some
    /// servers of vhost-user take only such memory (SPDK). Pages exist once they are used.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn of_huge_pages(len: usize) -> io::Result<SharedMemory> {
        SharedMemory::aligned(len, HUGE_PAGE)
    }

    /// Allocates `len` bytes, rounded up to a multiple of `alignment` (a power of two) and whole
    /// pages, at an address of this alignment.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn aligned(len: usize, alignment: usize) -> io::Result<SharedMemory> {
        let alignment = alignment.max(page_size() as usize);
        let Some(len) = len.max(1).checked_next_multiple_of(alignment) else {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        };
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
        let base = map_aligned(fd.as_raw_fd(), len, alignment)?;
        Ok(SharedMemory { base, len, fd })
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

/// Maps `len` bytes of `fd` at an address of the alignment, which is a multiple of the page size.
fn map_aligned(fd: RawFd, len: usize, alignment: usize) -> io::Result<*mut u8> {
    let excess = alignment - page_size() as usize;
    let Some(reserved) = len.checked_add(excess) else {
        return Err(io::Error::from_raw_os_error(libc::ENOMEM));
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start: *mut u8 = start.cast();
    let before = start.addr().next_multiple_of(alignment) - start.addr();
    let base = start.wrapping_add(before);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: replaces a part of the reserved addresses, which are ours.
    let mapped =
        unsafe { libc::mmap(base.cast(), len, protection, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0) };
    let error = (mapped == libc::MAP_FAILED).then(io::Error::last_os_error);
    let kept = if error.is_some() { 0 } else { len };
    // SAFETY: the rest of the reserved addresses. An empty range is refused and changes nothing.
    unsafe {
        libc::munmap(start.cast(), before);
        libc::munmap(base.wrapping_add(kept).cast(), reserved - before - kept);
    }
    error.map_or(Ok(base), Err)
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
    fn memory_of_huge_pages_has_whole_ones() {
        for len in [1, 4096, HUGE_PAGE, HUGE_PAGE + 1] {
            let memory = SharedMemory::of_huge_pages(len).unwrap();
            assert_eq!(memory.len(), len.next_multiple_of(HUGE_PAGE));
            assert_eq!(memory.base().addr() % HUGE_PAGE, 0);
            memory.write(memory.len() - 1, &[1]);
            let file = std::fs::File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).unwrap();
            assert_eq!(file.metadata().unwrap().len(), memory.len() as u64);
        }
        assert!(SharedMemory::of_huge_pages(usize::MAX).is_err());
        assert!(SharedMemory::of_huge_pages(1 << 62).is_err());
    }

    #[test]
    #[should_panic(expected = "8190+3 of 8192")]
    fn a_segment_beyond_the_end_is_refused() {
        SharedMemory::new(8192).unwrap().segment(8190, 3);
    }
}
