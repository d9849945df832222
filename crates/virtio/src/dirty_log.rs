//! The dirty log of live migration: a bitmap in shared memory with one bit for each page of guest
//! memory.
//!
//! The device marks every page of guest memory that it writes (data of reads, status bytes, the
//! used ring) after the write. So a page that was copied too early is copied again. Source:
//! vhost-user specification, "Migration".

use crate::mapping::Mapping;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering, fence};

/// Bytes that one bit represents.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// The bitmap. Every queue marks it; the front-end reads and clears it at any time.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
}

impl DirtyLog {
    /// Maps the bitmap of `len` bytes at `offset` of a file.
    ///
    /// # Errors
    /// When the range lies outside the file or the system refuses.
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<DirtyLog> {
        Ok(DirtyLog { mapping: Mapping::new(fd, offset, len)? })
    }

    /// The bitmap's first byte in this process, for a kernel that marks pages itself.
    pub fn addr(&self) -> *mut u8 {
        self.mapping.addr()
    }

    /// Whether the bitmap has a bit for each page below `end`, a guest address.
    pub fn covers(&self, end: u64) -> bool {
        end.div_ceil(LOG_PAGE_BYTES) <= (self.mapping.len() as u64).saturating_mul(8)
    }

    /// Marks every page that `len` bytes at `guest_addr` touch. Pages beyond the bitmap are
    /// skipped: the front-end sizes it for the memory that it tracks.
    pub fn mark(&self, guest_addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let end = (self.mapping.len() as u64).saturating_mul(8);
        let first = guest_addr / LOG_PAGE_BYTES;
        let last = (guest_addr.saturating_add(len - 1) / LOG_PAGE_BYTES).min(end - 1);
        if first > last {
            return;
        }
        // If a bit is already set after this fence, the front-end that clears it sees the data
        // written before the fence.
        fence(Ordering::SeqCst);
        for index in first / 8..=last / 8 {
            let at = self.mapping.addr().wrapping_add(index as usize);
            // SAFETY: `index` is below the length of the mapping, which lives as long as `self`.
            let byte = unsafe { AtomicU8::from_ptr(at) };
            let from = if index == first / 8 { u8::MAX << (first % 8) } else { u8::MAX };
            let to = if index == last / 8 { u8::MAX >> (7 - last % 8) } else { u8::MAX };
            // A guest may name terabytes: a page that is marked already costs only a load.
            if byte.load(Ordering::Relaxed) & from & to != from & to {
                byte.fetch_or(from & to, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::sealed_file;
    use std::os::fd::AsFd;

    #[test]
    fn exactly_the_touched_pages_are_marked() {
        let fd = sealed_file(c"test", 4096 + 4).unwrap();
        let log = DirtyLog::map(fd.as_fd(), 4096, 4).unwrap();
        let file = std::fs::File::from(fd.try_clone().unwrap());
        let bits = || {
            let mut bytes = [0; 4];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 4096).unwrap();
            u32::from_le_bytes(bytes)
        };
        log.mark(0, 0);
        assert_eq!(bits(), 0);
        log.mark(4095, 2);
        assert_eq!(bits(), 0b11);
        log.mark(8 * 4096, 4096);
        assert_eq!(bits(), 0b1_0000_0011);
        log.mark(31 * 4096, 1 << 40);
        log.mark(32 * 4096, 1);
        log.mark(u64::MAX, u64::MAX);
        assert_eq!(bits(), 0x8000_0103);
        log.mark(10 * 4096, 16 * 4096);
        assert_eq!(bits(), 0x83ff_fd03);
        assert!(DirtyLog::map(fd.as_fd(), 4096, 5).is_err());
    }
}
