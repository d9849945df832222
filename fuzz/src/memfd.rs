//! Memory that the guest maps as a whole and shares in parts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// An anonymous file and a mapping of all of it.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    base: *mut u8,
    len: usize,
}

impl Memfd {
    /// A file of `len` zero bytes.
    pub fn new(len: usize) -> Memfd {
        // SAFETY: a fresh descriptor, and a fresh mapping of as many bytes as the file has.
        unsafe {
            let fd = libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0, "memfd_create: {}", std::io::Error::last_os_error());
            let fd = OwnedFd::from_raw_fd(fd);
            assert_eq!(libc::ftruncate(fd.as_raw_fd(), len as i64), 0);
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let base = libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0);
            assert_ne!(base, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
            Memfd { fd, base: base.cast(), len }
        }
    }

    /// The file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes in the file.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the file has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes at an offset; bytes beyond the end are dropped.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let count = bytes.len().min(self.len.saturating_sub(offset));
        // SAFETY: inside the mapping; other mappings of the file may be in use, as a guest's memory
        // is.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.wrapping_add(offset), count) };
    }

    /// The `N` bytes at an offset.
    ///
    /// # Panics
    /// When they do not lie in the file.
    pub fn read<const N: usize>(&self, offset: usize) -> [u8; N] {
        assert!(offset <= self.len && N <= self.len - offset, "{offset:#x}+{N} of {:#x}", self.len);
        let mut bytes = [0; N];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.base.wrapping_add(offset), bytes.as_mut_ptr(), N) };
        bytes
    }

    /// Makes every byte `byte`.
    pub fn fill(&self, byte: u8) {
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(self.base, byte, self.len) };
    }

    /// Whether the bytes at an offset equal `bytes`. One call: the fuzzer would count each step of
    /// a loop.
    ///
    /// # Panics
    /// When they do not lie in the file.
    pub fn holds(&self, offset: usize, bytes: &[u8]) -> bool {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: inside the mapping, which the only thread does not write meanwhile.
        let own = unsafe { std::slice::from_raw_parts(self.base.add(offset), bytes.len()) };
        own == bytes
    }
}

impl Drop for Memfd {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
