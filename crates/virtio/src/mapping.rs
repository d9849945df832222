//! Shared mappings of files that another process handed over.

use crate::truncation;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A part of a file, mapped shared and writable until the value is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    mapped_len: usize,
    /// Offset of the requested range in the mapping: files on hugetlbfs map only whole huge pages.
    lead: usize,
    len: usize,
    /// Place in the table of watched mappings.
    watch: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; users order the accesses to its
// bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives out only the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`.
    ///
    /// A regular file (memfd included) must be long enough now: an access beyond its end would
    /// raise SIGBUS. It can still be truncated later ([`truncation`]); only a memfd sealed against
    /// shrinking cannot.
    ///
    /// # Errors
    /// `InvalidInput` when the range is empty, overflows or exceeds the file; `QuotaExceeded` when
    /// the process watches as many mappings as it can; else the system's error.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Mapping> {
        let end =
            offset.checked_add(len).filter(|&end| len > 0 && end <= i64::MAX as u64).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("a range of {len} bytes at {offset} of a file"),
                )
            })?;
        if let Some(size) = file_size(fd)?
            && size < end
        {
            let text = format!("the file has {size} bytes, the mapping needs {end}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let page = page_size(fd)?;
        let start = offset / page * page;
        let mapped_len = (end - start).next_multiple_of(page) as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), mapped_len, protection, flags, fd.as_raw_fd(), start as i64)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base: NonNull<u8> =
            NonNull::new(base.cast()).expect("mmap without MAP_FIXED never maps address 0");
        let watch = truncation::watch(base.addr().get(), mapped_len, page as usize).inspect_err(|_| {
            // SAFETY: exactly what was mapped above; there is no pointer into it yet.
            unsafe { libc::munmap(base.as_ptr().cast(), mapped_len) };
        })?;
        Ok(Mapping { base, mapped_len, lead: (offset - start) as usize, len: len as usize, watch })
    }

    /// First byte of the requested range.
    pub(crate) fn addr(&self) -> *mut u8 {
        self.base.as_ptr().wrapping_add(self.lead)
    }

    /// Whether the file was truncated and private zeroes replace a part of it.
    pub(crate) fn is_lost(&self) -> bool {
        truncation::is_lost(self.watch)
    }

    /// Length of the requested range in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        truncation::forget(self.watch);
        // SAFETY: exactly what `new` mapped; a user that still accesses the bytes breaks the
        // owner's contract.
        let result = unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped_len) };
        debug_assert_eq!(result, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// The size of a regular file; `None` for others (a device), whose size is not meaningful.
fn file_size(fd: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    // SAFETY: all-zero is a valid `stat`, and `fstat` fills it.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` outlives the call.
    if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((stat.st_mode & libc::S_IFMT == libc::S_IFREG).then_some(stat.st_size as u64))
}

/// Alignment of offset and length of a mapping of this file.
fn page_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: all-zero is a valid `statfs`, and `fstatfs` fills it.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` outlives the call.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), &mut stat) } < 0 {
        return Err(io::Error::last_os_error());
    }
    if stat.f_type == libc::HUGETLBFS_MAGIC && stat.f_bsize > 0 {
        return Ok(stat.f_bsize as u64);
    }
    // SAFETY: reads a constant of the system.
    Ok(unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64)
}

/// An anonymous file of `len` zero bytes, sealed against shrinking and growing: mapping it cannot
/// end in SIGBUS. `name` appears in /proc.
pub(crate) fn sealed_file(name: &std::ffi::CStr, len: u64) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor.
    let fd = unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: plain calls on our own descriptor.
    let is_ok = unsafe {
        libc::ftruncate(fd.as_raw_fd(), len as i64) == 0
            && libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) == 0
    };
    if is_ok { Ok(fd) } else { Err(io::Error::last_os_error()) }
}
