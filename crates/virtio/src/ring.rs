//! The layout of virtqueues in shared memory: virtio 1.3, sections 2.7 (split) and 2.8 (packed).
//!
//! ```text
//! split
//!   descriptor table  16 B × size
//!   avail             flags idx ring[size] used_event
//!   used              flags idx ring[size]{id,len} avail_event
//! packed
//!   descriptor ring   16 B × size
//!   driver, device    event suppression, 4 B each
//! ```
//!
//! Both sides use [`SplitRing`] and [`PackedRing`] as views. Every access is atomic and at most 8
//! bytes long, so that the other side may write at any time. The caller chooses the memory order,
//! since it knows which store publishes what.

pub mod barrier;
mod packed;
mod split;

pub use packed::{EventSuppression, PackedPosition, PackedRing};
pub use split::SplitRing;

use std::sync::atomic::{AtomicU64, Ordering};

/// The chain continues in the descriptor `next` (split) or in the following slot (packed).
pub const DESC_F_NEXT: u16 = 1;
/// The device writes this buffer; otherwise it reads it.
pub const DESC_F_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;
/// Packed: the driver's wrap counter when it made the descriptor available.
pub const PACKED_DESC_F_AVAIL: u16 = 1 << 7;
/// Packed: the device's wrap counter when it used the descriptor, the inverse of AVAIL before that.
pub const PACKED_DESC_F_USED: u16 = 1 << 15;

/// Split, `avail.flags`: the driver wants no interrupt (a hint, without EVENT_IDX).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// Split, `used.flags`: the device wants no notification (a hint, without EVENT_IDX).
pub const USED_F_NO_NOTIFY: u16 = 1;

/// Packed, event suppression: always notify.
pub const EVENT_F_ENABLE: u16 = 0;
/// Packed, event suppression: never notify.
pub const EVENT_F_DISABLE: u16 = 1;
/// Packed, event suppression: notify when a given slot is reached (only with EVENT_IDX).
pub const EVENT_F_DESC: u16 = 2;

/// Bytes of one descriptor, in rings and in indirect tables, split or packed.
pub const DESC_BYTES: usize = 16;
/// Largest number of entries of a queue.
pub const MAX_QUEUE_SIZE: u16 = 1 << 15;
/// Largest number of memory segments in one chain: the 1024 of a request (`IOV_MAX` of Linux, which
/// devices offer in `seg_max`), a header and a status byte.
pub const MAX_SEGMENTS: usize = 1024 + 2;

/// Whether the step from `old` to `new` passes `event`, so that the other side wants a
/// notification; all three count modulo 2^16 (2.7.10).
#[inline]
pub const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A descriptor of a split ring or of its indirect tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitDescriptor {
    /// Guest address of the buffer.
    pub addr: u64,
    /// Bytes in the buffer.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// The next descriptor of the chain with [`DESC_F_NEXT`].
    pub next: u16,
}

/// A descriptor of a packed ring or of its indirect tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDescriptor {
    /// Guest address of the buffer.
    pub addr: u64,
    /// Bytes in the buffer; in a used descriptor the bytes that the device wrote.
    pub len: u32,
    /// The driver's identifier of the buffer; valid in the last descriptor of a chain.
    pub id: u16,
    /// `DESC_F_*` and `PACKED_DESC_F_*`.
    pub flags: u16,
}

impl SplitDescriptor {
    /// Reads the 16 bytes at `at`, each once. Any alignment.
    ///
    /// # Safety
    /// The bytes are mapped.
    #[inline]
    pub unsafe fn load(at: *const u8) -> Self {
        // SAFETY: by contract.
        let (addr, rest) = unsafe { load_words(at) };
        SplitDescriptor { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    /// The two little-endian words of the descriptor.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [self.addr, self.len as u64 | (self.flags as u64) << 32 | (self.next as u64) << 48]
    }
}

impl PackedDescriptor {
    /// Reads the 16 bytes at `at`, each once. Any alignment.
    ///
    /// # Safety
    /// The bytes are mapped.
    #[inline]
    pub unsafe fn load(at: *const u8) -> Self {
        // SAFETY: by contract.
        let (addr, rest) = unsafe { load_words(at) };
        PackedDescriptor { addr, len: rest as u32, id: (rest >> 32) as u16, flags: (rest >> 48) as u16 }
    }

    /// The two little-endian words of the descriptor.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [self.addr, self.len as u64 | (self.id as u64) << 32 | (self.flags as u64) << 48]
    }
}

/// # Safety
/// 16 bytes at `at` are mapped.
#[inline]
unsafe fn load_words(at: *const u8) -> (u64, u64) {
    if at.addr().is_multiple_of(8) {
        // SAFETY: mapped by contract and aligned.
        unsafe {
            let first = AtomicU64::from_ptr(at.cast_mut().cast());
            let second = AtomicU64::from_ptr(at.cast_mut().add(8).cast());
            return (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed));
        }
    }
    // SAFETY: as above; volatile, so that no byte is read twice.
    let bytes: [u8; 16] = std::array::from_fn(|i| unsafe { at.add(i).read_volatile() });
    let word = |from| u64::from_le_bytes(std::array::from_fn(|i| bytes[from + i]));
    (word(0), word(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_wanted_exactly_when_the_step_passes_it() {
        for old in [0u16, 1, 100, 65_530, u16::MAX] {
            for step in 0..40u16 {
                for event in 0..60u16 {
                    let event = old.wrapping_sub(10).wrapping_add(event);
                    let passed = (0..step).any(|i| old.wrapping_add(i) == event);
                    assert_eq!(
                        need_event(event, old.wrapping_add(step), old),
                        passed,
                        "{old} {step} {event}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_descriptor_reads_the_same_at_any_alignment() {
        let split = SplitDescriptor { addr: 0x1122_3344_5566_7788, len: 7, flags: 3, next: 0xabcd };
        let packed = PackedDescriptor { addr: 0x8877, len: u32::MAX, id: 9, flags: 0x8080 };
        for shift in 0..16 {
            for (words, is_split) in [(split.to_words(), true), (packed.to_words(), false)] {
                let mut bytes = [0u8; 48];
                let start = bytes.as_ptr().align_offset(16) + shift;
                bytes[start..start + 8].copy_from_slice(&words[0].to_le_bytes());
                bytes[start + 8..start + 16].copy_from_slice(&words[1].to_le_bytes());
                let at = bytes[start..].as_ptr();
                // SAFETY: 16 bytes follow `start`.
                let got = unsafe { (SplitDescriptor::load(at), PackedDescriptor::load(at)) };
                match is_split {
                    true => assert_eq!(got.0, split),
                    false => assert_eq!(got.1, packed),
                }
            }
        }
    }
}
