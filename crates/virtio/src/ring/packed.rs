//! A view of a packed ring, positions in it, and the event requests of both sides.

use super::*;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A packed virtqueue in memory.
#[derive(Clone, Copy, Debug)]
pub struct PackedRing {
    size: u16,
    desc: *mut u8,
    driver_event: *mut u32,
    device_event: *mut u32,
}

impl PackedRing {
    /// Bytes of the descriptor ring; it is aligned to 16.
    pub const fn desc_bytes(size: u16) -> usize {
        DESC_BYTES * size as usize
    }

    /// Bytes of one event suppression area; it is aligned to 4.
    pub const EVENT_BYTES: usize = 4;

    /// A view of the ring whose three areas start at these addresses. Any size up to
    /// [`MAX_QUEUE_SIZE`].
    ///
    /// # Safety
    /// As for [`SplitRing::new`].
    ///
    /// # Panics
    /// When the size or an alignment is not as described.
    pub unsafe fn new(size: u16, desc: *mut u8, driver_event: *mut u8, device_event: *mut u8) -> Self {
        assert!((1..=MAX_QUEUE_SIZE).contains(&size), "packed ring of {size} entries");
        assert!(desc.addr().is_multiple_of(16));
        assert!(driver_event.addr().is_multiple_of(4) && device_event.addr().is_multiple_of(4));
        PackedRing { size, desc, driver_event: driver_event.cast(), device_event: device_event.cast() }
    }

    /// Slots of the ring.
    #[inline]
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Address of slot `slot`.
    ///
    /// # Panics
    /// When no such slot exists.
    #[inline]
    pub fn desc_ptr(&self, slot: u16) -> *mut u8 {
        assert!(slot < self.size);
        self.desc.wrapping_add(DESC_BYTES * slot as usize)
    }

    /// The flags of a slot: their store publishes the slot, their load detects a change. Panics as
    /// `desc_ptr`.
    #[inline]
    pub fn flags(&self, slot: u16) -> &AtomicU16 {
        // SAFETY: `desc_ptr` checked the slot; mapped and aligned by the contract of `new`.
        unsafe { AtomicU16::from_ptr(self.desc_ptr(slot).add(14).cast()) }
    }

    /// Reads a slot. Its flags were loaded with acquire before. Panics as `desc_ptr`.
    #[inline]
    pub fn desc(&self, slot: u16) -> PackedDescriptor {
        // SAFETY: as in `flags`.
        unsafe { PackedDescriptor::load(self.desc_ptr(slot)) }
    }

    /// Writes a slot except its flags. Panics as `desc_ptr`.
    #[inline]
    pub fn set_desc(&self, slot: u16, addr: u64, len: u32, id: u16) {
        // SAFETY: as in `flags`.
        unsafe { AtomicU64::from_ptr(self.desc_ptr(slot).cast()).store(addr, Ordering::Relaxed) };
        self.set_used(slot, len, id);
    }

    /// Writes length and ID of a used descriptor. Panics as `desc_ptr`.
    #[inline]
    pub fn set_used(&self, slot: u16, len: u32, id: u16) {
        let at = self.desc_ptr(slot);
        // SAFETY: as in `flags`.
        unsafe {
            AtomicU32::from_ptr(at.add(8).cast()).store(len, Ordering::Relaxed);
            AtomicU16::from_ptr(at.add(12).cast()).store(id, Ordering::Relaxed);
        }
    }

    /// The interrupts that the driver requests ([`EventSuppression`]).
    #[inline]
    pub fn driver_event(&self) -> &AtomicU32 {
        // SAFETY: mapped and aligned by the contract of `new`.
        unsafe { AtomicU32::from_ptr(self.driver_event) }
    }

    /// The notifications that the device requests ([`EventSuppression`]).
    #[inline]
    pub fn device_event(&self) -> &AtomicU32 {
        // SAFETY: as in `driver_event`.
        unsafe { AtomicU32::from_ptr(self.device_event) }
    }
}

/// A position in a packed ring: a slot and its wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedPosition {
    /// Slot number, below the ring's size.
    pub slot: u16,
    /// Wrap counter: true in the first lap.
    pub wrap: bool,
}

impl PackedPosition {
    /// Initial position of both sides.
    pub const START: PackedPosition = PackedPosition { slot: 0, wrap: true };

    /// The position `slots` (at most `size`) further in a ring of `size` slots.
    #[inline]
    pub const fn advanced(self, slots: u16, size: u16) -> Self {
        let slot = self.slot as u32 + slots as u32;
        match slot >= size as u32 {
            true => PackedPosition { slot: (slot - size as u32) as u16, wrap: !self.wrap },
            false => PackedPosition { slot: slot as u16, wrap: self.wrap },
        }
    }

    /// The number of slots from `earlier` to here; `None` when it is not between 0 and `size`.
    #[inline]
    pub const fn slots_since(self, earlier: Self, size: u16) -> Option<u16> {
        match self.wrap == earlier.wrap {
            true => self.slot.checked_sub(earlier.slot),
            false if self.slot <= earlier.slot => Some(size - (earlier.slot - self.slot)),
            false => None,
        }
    }

    /// The AVAIL and USED flags of a descriptor that is made available here.
    #[inline]
    pub const fn avail_flags(self) -> u16 {
        if self.wrap { PACKED_DESC_F_AVAIL } else { PACKED_DESC_F_USED }
    }

    /// The AVAIL and USED flags of a descriptor that is used here.
    #[inline]
    pub const fn used_flags(self) -> u16 {
        if self.wrap { PACKED_DESC_F_AVAIL | PACKED_DESC_F_USED } else { 0 }
    }

    /// Slot and wrap counter in one number, as in event suppression and vhost's ring base.
    #[inline]
    pub const fn to_bits(self) -> u16 {
        self.slot | (self.wrap as u16) << 15
    }

    /// Decodes the result of [`PackedPosition::to_bits`]. The slot is not checked.
    #[inline]
    pub const fn from_bits(bits: u16) -> Self {
        PackedPosition { slot: bits & 0x7fff, wrap: bits >> 15 == 1 }
    }
}

/// The notifications that one side of a packed ring requests: a slot with its wrap counter and
/// `EVENT_F_*`, in 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSuppression {
    /// Slot number, and the wrap counter in bit 15. Only meaningful with [`EVENT_F_DESC`].
    pub slot_and_wrap: u16,
    /// `EVENT_F_*`.
    pub flags: u16,
}

impl EventSuppression {
    /// The word as it lies in memory.
    #[inline]
    pub const fn to_word(self) -> u32 {
        self.slot_and_wrap as u32 | (self.flags as u32) << 16
    }

    /// Decodes `word`. Reserved flag bits are dropped.
    #[inline]
    pub const fn from_word(word: u32) -> Self {
        EventSuppression { slot_and_wrap: word as u16, flags: (word >> 16) as u16 & 3 }
    }

    /// Whether the writer requests a notification for the step from slot `old` to slot `new` of a
    /// ring with `size` slots. `wrap` is the wrap counter of `new`, and the step is at most one
    /// lap.
    #[inline]
    pub const fn wants_event(self, size: u16, old: u16, new: u16, wrap: bool) -> bool {
        match self.flags {
            EVENT_F_ENABLE => true,
            EVENT_F_DESC => {
                let mut event = self.slot_and_wrap & 0x7fff;
                if (self.slot_and_wrap >> 15 == 1) != wrap {
                    event = event.wrapping_sub(size);
                }
                let old = if new > old { old } else { old.wrapping_sub(size) };
                need_event(event, new, old)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_event_is_wanted_exactly_when_the_step_passes_its_slot() {
        for size in [1u16, 3, 4, 7] {
            for start in 0..size {
                for wrap in [false, true] {
                    let old = PackedPosition { slot: start, wrap };
                    for step in 1..=size {
                        let new = old.advanced(step, size);
                        for ahead in 0..size {
                            let event = old.advanced(ahead, size);
                            let wish =
                                EventSuppression { slot_and_wrap: event.to_bits(), flags: EVENT_F_DESC };
                            let wants = wish.wants_event(size, old.slot, new.slot, new.wrap);
                            assert_eq!(wants, ahead < step, "{size} {old:?} {step} {ahead}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_packed_position_flips_its_counter_with_every_lap() {
        let mut position = PackedPosition::START;
        for lap in 0..3 {
            for slot in 0..5 {
                assert_eq!(position, PackedPosition { slot, wrap: lap % 2 == 0 });
                assert_eq!(PackedPosition::from_bits(position.to_bits()), position);
                position = position.advanced(1, 5);
            }
        }
        assert_eq!(PackedPosition::START.advanced(5, 5), PackedPosition { slot: 0, wrap: false });
    }
}
