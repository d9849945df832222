//! Memory regions, as programs describe them.

use std::os::fd::RawFd;

/// A memory region, laid out as `struct blkio_mem_region` of `blkio.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First byte.
    pub addr: usize,
    /// Length in bytes.
    pub len: usize,
    /// Reserved: 0.
    pub iova: u64,
    /// Where in `fd` the region starts, in bytes.
    pub fd_offset: i64,
    /// The file that backs it; -1 when there is none.
    pub fd: RawFd,
    /// Reserved: 0.
    pub flags: u32,
}

impl Region {
    /// Whether two regions have bytes in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        self.addr < other.addr + other.len && other.addr < self.addr + self.len
    }
}
