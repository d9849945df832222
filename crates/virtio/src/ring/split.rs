//! A view of a split ring.

use super::{DESC_BYTES, MAX_QUEUE_SIZE, SplitDescriptor};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A split virtqueue in memory.
#[derive(Clone, Copy, Debug)]
pub struct SplitRing {
    size: u16,
    desc: *mut u8,
    avail: *mut u8,
    used: *mut u8,
}

impl SplitRing {
    /// Bytes of the descriptor table; it is aligned to 16.
    pub const fn desc_bytes(size: u16) -> usize {
        DESC_BYTES * size as usize
    }

    /// Bytes of the available ring with `used_event`; it is aligned to 2.
    pub const fn avail_bytes(size: u16) -> usize {
        6 + 2 * size as usize
    }

    /// Bytes of the used ring with `avail_event`; it is aligned to 4.
    pub const fn used_bytes(size: u16) -> usize {
        6 + 8 * size as usize
    }

    /// A view of the ring whose three areas start at these addresses; `size` is a power of two.
    ///
    /// # Safety
    /// The areas are mapped, readable and writable while the view or a copy of it is used, and
    /// aligned. This process holds only references to atomics in them.
    ///
    /// # Panics
    /// When the size or an alignment is not as described.
    pub unsafe fn new(size: u16, desc: *mut u8, avail: *mut u8, used: *mut u8) -> Self {
        assert!(size.is_power_of_two() && size <= MAX_QUEUE_SIZE, "split ring of {size} entries");
        assert!(
            desc.addr().is_multiple_of(16) && avail.addr().is_multiple_of(2) && used.addr().is_multiple_of(4)
        );
        SplitRing { size, desc, avail, used }
    }

    /// Entries of the ring.
    #[inline]
    pub const fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    const fn at(&self, index: u16) -> usize {
        (index & (self.size - 1)) as usize
    }

    /// Address of descriptor `index` (modulo the size).
    #[inline]
    pub const fn desc_ptr(&self, index: u16) -> *mut u8 {
        self.desc.wrapping_add(DESC_BYTES * self.at(index))
    }

    /// Reads descriptor `index` (modulo the size).
    #[inline]
    pub fn desc(&self, index: u16) -> SplitDescriptor {
        // SAFETY: inside the table by the modulo, mapped by the contract of `new`.
        unsafe { SplitDescriptor::load(self.desc_ptr(index)) }
    }

    /// Writes descriptor `index` (modulo the size).
    #[inline]
    pub fn set_desc(&self, index: u16, desc: SplitDescriptor) {
        let [first, second] = desc.to_words();
        let at = self.desc_ptr(index);
        // SAFETY: as in `desc`; the table is aligned to 16.
        unsafe {
            AtomicU64::from_ptr(at.cast()).store(first, Ordering::Relaxed);
            AtomicU64::from_ptr(at.add(8).cast()).store(second, Ordering::Relaxed);
        }
    }

    /// `avail.flags`.
    #[inline]
    pub fn avail_flags(&self) -> &AtomicU16 {
        // SAFETY: the area is mapped and aligned by the contract of `new`.
        unsafe { AtomicU16::from_ptr(self.avail.cast()) }
    }

    /// `avail.idx`: the number of chains that the driver has made available, modulo 2^16.
    #[inline]
    pub fn avail_idx(&self) -> &AtomicU16 {
        // SAFETY: as in `avail_flags`.
        unsafe { AtomicU16::from_ptr(self.avail.add(2).cast()) }
    }

    /// `avail.ring[index]`, modulo the size.
    #[inline]
    pub fn avail_entry(&self, index: u16) -> &AtomicU16 {
        // SAFETY: as in `avail_flags`; inside the ring by the modulo.
        unsafe { AtomicU16::from_ptr(self.avail.add(4 + 2 * self.at(index)).cast()) }
    }

    /// `used_event`: the driver wants an interrupt when the used index passes it.
    #[inline]
    pub fn used_event(&self) -> &AtomicU16 {
        // SAFETY: as in `avail_flags`; it follows the ring.
        unsafe { AtomicU16::from_ptr(self.avail.add(4 + 2 * self.size as usize).cast()) }
    }

    /// `used.flags`.
    #[inline]
    pub fn used_flags(&self) -> &AtomicU16 {
        // SAFETY: as in `avail_flags`.
        unsafe { AtomicU16::from_ptr(self.used.cast()) }
    }

    /// `used.idx`: the number of chains that the device has used, modulo 2^16.
    #[inline]
    pub fn used_idx(&self) -> &AtomicU16 {
        // SAFETY: as in `avail_flags`.
        unsafe { AtomicU16::from_ptr(self.used.add(2).cast()) }
    }

    /// `used.ring[index]` (modulo the size): the chain's head, and the number of bytes that the
    /// device wrote.
    #[inline]
    pub fn used_entry(&self, index: u16) -> (&AtomicU32, &AtomicU32) {
        let at = self.used.wrapping_add(self.used_entry_offset(index));
        // SAFETY: as in `avail_flags`; inside the ring by the modulo.
        unsafe { (AtomicU32::from_ptr(at.cast()), AtomicU32::from_ptr(at.add(4).cast())) }
    }

    /// Offset of entry `index` (modulo the size) in the used ring, in bytes.
    #[inline]
    pub const fn used_entry_offset(&self, index: u16) -> usize {
        4 + 8 * self.at(index)
    }

    /// `avail_event`: the device wants a notification when the available index passes it.
    #[inline]
    pub fn avail_event(&self) -> &AtomicU16 {
        // SAFETY: as in `avail_flags`; it follows the ring.
        unsafe { AtomicU16::from_ptr(self.used.add(4 + 8 * self.size as usize).cast()) }
    }
}
