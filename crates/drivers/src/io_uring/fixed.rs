//! Buffers registered with a ring: the kernel pins their pages once instead of for every request.
//!
//! The device keeps the list of regions. Each queue updates its own ring before it looks up a
//! buffer, so an unregistered region is never used again.

use block::{MemoryRegion, Segment};
use io_uring::IoUring;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum buffers of one ring.
const MAX_BUFFERS: usize = 256;
/// Longest buffer that the kernel registers.
const MAX_BUFFER_LEN: usize = 1 << 30;

/// The regions registered with a device.
#[derive(Default)]
pub(super) struct Regions {
    /// Grows with every change.
    generation: AtomicU64,
    list: Mutex<Vec<MemoryRegion>>,
}

impl Regions {
    pub fn add(&self, region: &MemoryRegion) {
        self.change(|list| list.push(*region));
    }

    pub fn remove(&self, region: &MemoryRegion) {
        self.change(|list| {
            if let Some(at) = list.iter().position(|r| r == region) {
                list.swap_remove(at);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Vec<MemoryRegion>)) {
        change(&mut self.list.lock().expect("no panic while changed"));
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// The buffers of one ring.
pub(super) struct FixedBuffers {
    generation: u64,
    /// By index in the ring: first byte and length; 0 for a free entry.
    table: Vec<(usize, usize)>,
}

impl FixedBuffers {
    /// Prepares `ring` for buffers; `None` if the kernel cannot (before Linux 5.19).
    pub fn new(ring: &IoUring) -> Option<FixedBuffers> {
        ring.submitter().register_buffers_sparse(MAX_BUFFERS as u32).ok()?;
        Some(FixedBuffers { generation: 0, table: vec![(0, 0); MAX_BUFFERS] })
    }

    /// Registers new regions and unregisters removed ones.
    #[inline]
    pub fn update(&mut self, ring: &IoUring, regions: &Regions) {
        let generation = regions.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.generation = generation;
            let wanted: Vec<_> =
                regions.list.lock().expect("no panic while changed").iter().flat_map(pieces).collect();
            self.replace(ring, &wanted);
        }
    }

    fn replace(&mut self, ring: &IoUring, wanted: &[(usize, usize)]) {
        for index in 0..self.table.len() {
            if self.table[index].1 != 0 && !wanted.contains(&self.table[index]) {
                self.set(ring, index, (0, 0));
            }
        }
        for buffer in wanted {
            let Some(free) = self.table.iter().position(|b| b.1 == 0) else { return };
            if !self.table.contains(buffer) {
                self.set(ring, free, *buffer);
            }
        }
    }

    fn set(&mut self, ring: &IoUring, index: usize, buffer: (usize, usize)) {
        let iovec = libc::iovec { iov_base: buffer.0 as *mut libc::c_void, iov_len: buffer.1 };
        // SAFETY: the owner of the region keeps it mapped until it is unregistered. The kernel pins
        // the pages, so even later use would not touch other memory.
        let result = unsafe { ring.submitter().register_buffers_update(index as u32, &[iovec], None) };
        self.table[index] = match result {
            Ok(()) => buffer,
            Err(error) => {
                // RLIMIT_MEMLOCK is reached, or the memory cannot be pinned: unregistered buffers
                // work as well.
                tracing::debug!(%error, len = buffer.1, "buffer not registered with io_uring");
                (0, 0)
            }
        };
    }

    /// The buffer that holds all of `segment`.
    #[inline]
    pub fn index_of(&self, segment: &Segment) -> Option<u16> {
        let addr = segment.base.addr();
        let holds = |(start, len): &(usize, usize)| {
            addr.checked_sub(*start).is_some_and(|skip| skip < *len && segment.len <= *len - skip)
        };
        self.table.iter().position(holds).map(|index| index as u16)
    }
}

/// A region in pieces that the kernel accepts.
fn pieces(region: &MemoryRegion) -> impl Iterator<Item = (usize, usize)> {
    let (addr, len) = (region.addr, region.len);
    (0..len).step_by(MAX_BUFFER_LEN).map(move |skip| (addr + skip, (len - skip).min(MAX_BUFFER_LEN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(addr: usize, len: usize) -> MemoryRegion {
        MemoryRegion { addr, len, fd: None, fd_offset: 0 }
    }

    #[test]
    fn a_region_beyond_the_limit_of_the_kernel_is_registered_in_pieces() {
        let all: Vec<_> = pieces(&region(4096, (2 << 30) + 8192)).collect();
        assert_eq!(all, [(4096, 1 << 30), (4096 + (1 << 30), 1 << 30), (4096 + (2 << 30), 8192)]);
    }

    #[test]
    fn only_a_segment_wholly_inside_a_buffer_uses_it() {
        let buffers = FixedBuffers { generation: 0, table: vec![(0, 0), (4096, 8192)] };
        let index = |addr: usize, len| buffers.index_of(&Segment { base: addr as *mut u8, len });
        assert_eq!(index(4096, 8192), Some(1));
        assert_eq!(index(8192, 4096), Some(1));
        assert_eq!(index(8192, 4097), None);
        assert_eq!(index(4095, 2), None);
        assert_eq!(index(12288, 1), None);
    }

    #[test]
    fn a_region_that_was_taken_back_is_not_used_again() {
        let Ok(ring) = IoUring::new(4) else { return eprintln!("skipped: no io_uring here") };
        let Some(mut buffers) = FixedBuffers::new(&ring) else {
            return eprintln!("skipped: no sparse table");
        };
        let regions = Regions::default();
        let memory = vec![0u8; 1 << 16];
        let region = region(memory.as_ptr().addr(), memory.len());
        regions.add(&region);
        buffers.update(&ring, &regions);
        let segment = Segment { base: memory.as_ptr().cast_mut(), len: 512 };
        assert_eq!(buffers.index_of(&segment), Some(0));
        regions.remove(&region);
        buffers.update(&ring, &regions);
        assert_eq!(buffers.index_of(&segment), None);
    }
}
