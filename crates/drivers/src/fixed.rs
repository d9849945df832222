//! Buffers registered with a ring: the kernel pins their pages once instead of for every request.
//!
//! The device keeps the list of regions. Each queue updates its own ring before it looks up a
//! buffer, so an unregistered region is never used again.

use block::{MemoryRegion, Segment};
use io_uring::{IoUring, Submitter, cqueue, squeue};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum buffers of one ring.
const MAX_BUFFERS: usize = 256;
/// Longest buffer that the kernel registers.
const MAX_BUFFER_LEN: usize = 1 << 30;

/// The regions registered with a device.
#[derive(Default)]
pub struct Regions {
    /// Grows with every change.
    generation: AtomicU64,
    list: Mutex<Vec<Registration>>,
}

/// A region, and its number among all that were ever registered: another region may come to lie at
/// the same address.
#[derive(Clone, Copy)]
struct Registration {
    number: u64,
    region: MemoryRegion,
}

impl Regions {
    pub fn add(&self, region: &MemoryRegion) {
        self.change(|list, number| list.push(Registration { number, region: *region }));
    }

    pub fn remove(&self, region: &MemoryRegion) {
        self.change(|list, _| {
            if let Some(at) = list.iter().position(|r| r.region == *region) {
                list.swap_remove(at);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Registration>, u64)) {
        let mut list = self.list.lock().expect("no panic while changed");
        // Only changed under the lock, so the number is unique.
        change(&mut list, self.generation.load(Ordering::Relaxed));
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn buffers(&self) -> Vec<Buffer> {
        self.list.lock().expect("no panic while changed").iter().flat_map(pieces).collect()
    }
}

/// A part of a region that the kernel accepts as a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Buffer {
    /// Number of the region.
    number: u64,
    addr: usize,
    len: usize,
}

/// The buffers of one ring.
pub struct FixedBuffers {
    generation: u64,
    /// By index in the ring.
    table: Vec<Option<Buffer>>,
}

impl FixedBuffers {
    /// Prepares `ring` for buffers; `None` if the kernel cannot (before Linux 5.19).
    pub fn new<S, C>(ring: &IoUring<S, C>) -> Option<FixedBuffers>
    where
        S: squeue::EntryMarker,
        C: cqueue::EntryMarker,
    {
        ring.submitter().register_buffers_sparse(MAX_BUFFERS as u32).ok()?;
        Some(FixedBuffers { generation: 0, table: Vec::new() })
    }

    /// Registers new regions and unregisters removed ones.
    #[inline]
    pub fn update<S, C>(&mut self, ring: &IoUring<S, C>, regions: &Regions)
    where
        S: squeue::EntryMarker,
        C: cqueue::EntryMarker,
    {
        let generation = regions.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.generation = generation;
            self.replace(&ring.submitter(), &regions.buffers());
        }
    }

    #[cold]
    fn replace(&mut self, ring: &Submitter<'_>, wanted: &[Buffer]) {
        for index in 0..self.table.len() {
            if self.table[index].is_some_and(|buffer| !wanted.contains(&buffer)) {
                self.set(ring, index, None);
            }
        }
        for buffer in wanted {
            if self.table.contains(&Some(*buffer)) {
                continue;
            }
            let free = self.table.iter().position(Option::is_none).unwrap_or(self.table.len());
            if free == MAX_BUFFERS {
                break;
            }
            self.set(ring, free, Some(*buffer));
        }
        while self.table.last() == Some(&None) {
            self.table.pop();
        }
    }

    fn set(&mut self, ring: &Submitter<'_>, index: usize, buffer: Option<Buffer>) {
        let (addr, len) = buffer.map_or((0, 0), |buffer| (buffer.addr, buffer.len));
        let iovec = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len };
        // SAFETY: the owner of the region keeps it mapped until it is unregistered. The kernel pins
        // the pages, so even later use would not touch other memory.
        let result = unsafe { ring.register_buffers_update(index as u32, &[iovec], None) };
        if index == self.table.len() {
            self.table.push(None);
        }
        self.table[index] = match result {
            Ok(()) => buffer,
            Err(error) => {
                // RLIMIT_MEMLOCK is reached, or the memory cannot be pinned: unregistered buffers
                // work as well.
                tracing::debug!(%error, len, "buffer not registered with io_uring");
                None
            }
        };
    }

    /// The buffer that holds all of `segment`.
    #[inline]
    pub fn index_of(&self, segment: &Segment) -> Option<u16> {
        let addr = segment.base.addr();
        let holds = |buffer: &Option<Buffer>| {
            buffer.is_some_and(|Buffer { addr: start, len, .. }| {
                addr.checked_sub(start).is_some_and(|skip| skip < len && segment.len <= len - skip)
            })
        };
        self.table.iter().position(holds).map(|index| index as u16)
    }
}

/// Splits a region into ranges that the kernel accepts.
fn pieces(registration: &Registration) -> impl Iterator<Item = Buffer> {
    let Registration { number, region: MemoryRegion { addr, len, .. } } = *registration;
    (0..len).step_by(MAX_BUFFER_LEN).map(move |skip| Buffer {
        number,
        addr: addr + skip,
        len: (len - skip).min(MAX_BUFFER_LEN),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(addr: usize, len: usize) -> MemoryRegion {
        MemoryRegion { addr, len, fd: None, fd_offset: 0 }
    }

    #[test]
    fn a_region_beyond_the_limit_of_the_kernel_is_registered_in_pieces() {
        let all: Vec<_> = pieces(&Registration { number: 3, region: region(4096, (2 << 30) + 8192) })
            .map(|Buffer { number, addr, len }| (number, addr, len))
            .collect();
        assert_eq!(all, [(3, 4096, 1 << 30), (3, 4096 + (1 << 30), 1 << 30), (3, 4096 + (2 << 30), 8192)]);
    }

    #[test]
    fn only_a_segment_wholly_inside_a_buffer_uses_it() {
        let buffer = Buffer { number: 0, addr: 4096, len: 8192 };
        let buffers = FixedBuffers { generation: 0, table: vec![None, Some(buffer)] };
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

    /// New memory at the address of the old: the ring still pins the pages of the old.
    #[test]
    fn a_region_that_took_the_place_of_another_is_registered_itself() {
        let Ok(ring) = IoUring::new(4) else { return eprintln!("skipped: no io_uring here") };
        let Some(mut buffers) = FixedBuffers::new(&ring) else {
            return eprintln!("skipped: no sparse table");
        };
        let regions = Regions::default();
        let memory = vec![0u8; 1 << 16];
        let region = region(memory.as_ptr().addr(), memory.len());
        regions.add(&region);
        buffers.update(&ring, &regions);
        let first = buffers.table.clone();
        regions.remove(&region);
        regions.add(&region);
        buffers.update(&ring, &regions);
        assert!(buffers.table[0].is_some() && buffers.table != first, "{:?}", buffers.table);
    }
}
