//! Buffers in shared memory: one range for all cores, so that a device in another process reaches
//! all buffers.
//!
//! A buddy allocator hands out blocks whose size is a power of two. A free block has no pages, so
//! its content is zero. Blocks are taken and returned only when a pool grows or shrinks, so one
//! lock serves all cores.

use block::MemoryRegion;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The memory that holds the buffers of all cores, once [`hold_buffers`] has set it.
static ARENA: OnceLock<Arena> = OnceLock::new();

/// Bytes of addresses reserved for each byte of buffers. In the worst case each of the nine sizes
/// has held all bytes in turn and left blocks that do not merge. A process that runs out of these
/// addresses ends as if it were out of memory.
pub(crate) const SPREAD: usize = 10;
/// Takes all further buffers of this process from the `len` bytes at `base`. Returns `false` and
/// changes nothing if an earlier call has set such memory.
///
/// # Safety
/// The memory is a shared mapping of zeroes that nothing else uses, and it stays mapped until the
/// process ends.
pub unsafe fn hold_buffers(base: NonNull<u8>, len: usize) -> bool {
    ARENA.set(Arena::new(base, len)).is_ok()
}

/// Whether the buffers of all cores lie in this memory.
pub fn has_buffers(memory: &MemoryRegion) -> bool {
    arena().is_some_and(|arena| (arena.base.addr().get(), arena.len) == (memory.addr, memory.len))
}

/// The memory that holds the buffers of all cores, if [`hold_buffers`] has set it.
pub(crate) fn arena() -> Option<&'static Arena> {
    ARENA.get()
}

/// Memory handed out in blocks. See the module.
pub(crate) struct Arena {
    base: NonNull<u8>,
    len: usize,
    blocks: Mutex<Blocks>,
}

// SAFETY: the memory belongs to the process; a block is used by its owner alone.
unsafe impl Send for Arena {}
// SAFETY: as above; the list of free blocks is behind a lock.
unsafe impl Sync for Arena {}

impl Arena {
    fn new(base: NonNull<u8>, len: usize) -> Arena {
        Arena { base, len, blocks: Mutex::new(Blocks { len, ..Blocks::default() }) }
    }

    /// A zeroed block of `size` bytes (a power of two up to `largest`), aligned to its size within
    /// the memory. `None` if no block of that size is free.
    pub(crate) fn take(&self, size: usize, largest: usize) -> Option<NonNull<u8>> {
        let offset = self.blocks.lock().unwrap_or_else(PoisonError::into_inner).take(size, largest)?;
        // SAFETY: a block lies inside the memory.
        Some(unsafe { self.base.add(offset) })
    }

    /// Frees a block of [`Arena::take`] and its pages. Returns `false` if the block does not lie in
    /// this memory.
    pub(crate) fn give_back(&self, block: NonNull<u8>, size: usize, largest: usize) -> bool {
        let offset = block.addr().get().wrapping_sub(self.base.addr().get());
        if offset >= self.len {
            return false;
        }
        // SAFETY: the block is ours, whole, and unused from now on.
        unsafe {
            if libc::madvise(block.as_ptr().cast(), size, libc::MADV_REMOVE) != 0 {
                block.write_bytes(0, size); // smaller than a page of this memory
            }
        }
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).give_back(offset, size, largest);
        true
    }
}

/// The free blocks: size and offset.
#[derive(Default)]
struct Blocks {
    /// By size first, so that the lowest block of a size is found at once.
    free: BTreeSet<(usize, usize)>,
    /// Bytes from the start that have been in use at some time.
    touched: usize,
    len: usize,
}

impl Blocks {
    fn take(&mut self, size: usize, largest: usize) -> Option<usize> {
        let fit = self.free.range((size, 0)..).next().copied();
        let (mut found, offset) = match fit {
            Some(block) => {
                self.free.remove(&block);
                block
            }
            None => {
                let offset = self.touched;
                self.touched = offset.checked_add(largest).filter(|end| *end <= self.len)?;
                (largest, offset)
            }
        };
        while found > size {
            found /= 2;
            self.free.insert((found, offset + found));
        }
        Some(offset)
    }

    fn give_back(&mut self, mut offset: usize, mut size: usize, largest: usize) {
        while size < largest && self.free.remove(&(size, offset ^ size)) {
            offset &= !size;
            size *= 2;
        }
        let is_new = self.free.insert((size, offset));
        assert!(is_new, "{size} bytes at {offset} were free already");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: usize = 1 << 20;

    #[test]
    fn blocks_do_not_overlap_and_grow_together_again() {
        let mut blocks = Blocks { len: 4 * LARGEST, ..Blocks::default() };
        let sizes = [4096, LARGEST, 8192, 4096, LARGEST / 2, 65536, 4096, LARGEST];
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for size in sizes {
            let offset = blocks.take(size, LARGEST).unwrap();
            assert_eq!(offset % size, 0);
            assert!(taken.iter().all(|(at, len)| offset + size <= *at || at + len <= offset), "{offset}");
            taken.push((offset, size));
        }
        // Three are touched and one is not.
        assert_eq!(blocks.touched, 3 * LARGEST);
        for (offset, size) in taken {
            blocks.give_back(offset, size, LARGEST);
        }
        assert_eq!(blocks.free, BTreeSet::from([0, 1, 2].map(|block| (LARGEST, block * LARGEST))));
        for _ in 0..4 {
            assert!(blocks.take(LARGEST, LARGEST).is_some());
        }
        assert!(blocks.take(4096, LARGEST).is_none(), "the memory has an end");
    }

    #[test]
    fn a_block_that_comes_again_is_zeroed() {
        let len = 2 * LARGEST;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which stays to the end of the process.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        let arena = Arena::new(NonNull::new(base.cast()).unwrap(), len);
        let block = arena.take(4096, LARGEST).unwrap();
        // SAFETY: the block is ours.
        unsafe { block.write_bytes(7, 4096) };
        assert!(arena.give_back(block, 4096, LARGEST));
        let again = arena.take(4096, LARGEST).unwrap();
        assert_eq!(again, block);
        // SAFETY: as before.
        assert!(unsafe { std::slice::from_raw_parts(again.as_ptr(), 4096) }.iter().all(|byte| *byte == 0));
        let mut elsewhere = 0u8;
        assert!(!arena.give_back(NonNull::from(&mut elsewhere), 4096, LARGEST));
    }
}
