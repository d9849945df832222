//! The driver side of one virtqueue of either layout.

use super::SharedArea;
use super::chain::{Buffer, RingBroken, Used};
use super::packed::PackedDriver;
use super::split::SplitDriver;
use crate::ring::{MAX_QUEUE_SIZE, PackedRing, SplitRing};

/// Configuration of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingConfig {
    /// Entries. A power of two for a split ring.
    pub size: u16,
    /// Packed layout.
    pub packed: bool,
    /// `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
}

/// The smallest page of an IOMMU, in bytes.
pub(super) const PAGE: usize = 4096;

/// Offsets of a ring's three areas in its memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// The descriptor table (split) or ring (packed).
    pub descriptors: usize,
    /// Area that the driver writes: available ring, or driver event suppression.
    pub driver: usize,
    /// Area that the device writes: used ring, or device event suppression.
    pub device: usize,
    /// Length of all areas.
    pub len: usize,
}

impl RingLayout {
    /// The layout of a ring in memory that starts at a page. Areas with different writers never
    /// share a pair of cache lines, and no entry spans two pages. QEMU (10.0 for one) writes the
    /// second half of such a used entry to the following page of its own memory, whatever page an
    /// emulated IOMMU has mapped there.
    pub fn new(size: u16, packed: bool) -> RingLayout {
        let (driver_len, device_len) = match packed {
            true => (PackedRing::EVENT_BYTES, PackedRing::EVENT_BYTES),
            false => (SplitRing::avail_bytes(size), SplitRing::used_bytes(size)),
        };
        let driver = SplitRing::desc_bytes(size).next_multiple_of(128);
        let mut device = (driver + driver_len).next_multiple_of(128);
        if device % PAGE + device_len > PAGE {
            // Entries of 8 bytes follow 4 bytes of flags and index.
            device = device.next_multiple_of(PAGE) + if device_len > PAGE { 4 } else { 0 };
        }
        RingLayout { descriptors: 0, driver, device, len: (device + device_len).next_multiple_of(128) }
    }
}

/// The driver side of one virtqueue. A *token* identifies a chain in flight: any unused number
/// below the ring's size.
pub enum Ring {
    /// Split layout.
    Split(SplitDriver),
    /// Packed layout.
    Packed(PackedDriver),
}

impl Ring {
    /// An empty ring in `memory`, which is zeroed first. Interrupts are off.
    ///
    /// # Panics
    /// When the layout does not allow the size, or `memory` is shorter than [`RingLayout`] requires
    /// or not aligned to 16 bytes (to a page with an IOMMU).
    ///
    /// # Safety
    /// `memory` is valid, and only the device touches it while the ring lives.
    pub unsafe fn new(config: RingConfig, memory: SharedArea) -> Ring {
        let RingConfig { size, packed, .. } = config;
        assert!(
            (1..=MAX_QUEUE_SIZE).contains(&size) && (packed || size.is_power_of_two()),
            "queue size {size}"
        );
        let layout = RingLayout::new(size, packed);
        assert!(memory.len >= layout.len, "{memory:?} is too short for {layout:?}");
        let area = |offset| memory.base.wrapping_add(offset);
        let (desc, driver, device) = (area(layout.descriptors), area(layout.driver), area(layout.device));
        // SAFETY: the memory is ours by the contract and long enough, and the areas are aligned
        // with it.
        unsafe {
            memory.base.write_bytes(0, layout.len);
            if packed {
                Ring::Packed(PackedDriver::new(PackedRing::new(size, desc, driver, device), config.event_idx))
            } else {
                Ring::Split(SplitDriver::new(SplitRing::new(size, desc, driver, device), config.event_idx))
            }
        }
    }

    /// Adds a chain that is one descriptor with an indirect table of `table_len` bytes at
    /// `table_addr`.
    ///
    /// In a split ring the descriptor number is `token`, and it is written only when it differs
    /// from its last use. With one table for each token, the device keeps the descriptor in its
    /// cache. A split ring accepts either indirect chains or plain ones, never both.
    ///
    /// # Panics
    /// When `token` is in flight or not below the size.
    #[inline]
    pub fn add_indirect(&mut self, token: u16, table_addr: u64, table_len: u32) {
        match self {
            Ring::Split(ring) => ring.add_indirect(token, table_addr, table_len),
            Ring::Packed(ring) => ring.add_indirect(token, table_addr, table_len),
        }
    }

    /// Adds a chain of plain descriptors: the device reads the first `readable` and writes the
    /// rest. Returns `false` when the ring has too few free descriptors.
    ///
    /// # Panics
    /// When `token` is in flight or not below the size, or the chain is empty.
    pub fn add_chain(&mut self, token: u16, chain: &[Buffer], readable: usize) -> bool {
        match self {
            Ring::Split(ring) => ring.add_chain(token, chain, readable),
            Ring::Packed(ring) => ring.add_chain(token, chain, readable),
        }
    }

    /// Makes all chains visible to the device that were added since the last call. Returns whether
    /// the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.publish(),
            Ring::Packed(ring) => ring.publish(),
        }
    }

    /// Returns the next chain that the device has completed.
    ///
    /// # Errors
    /// When the device broke the ring, now or before.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Used>, RingBroken> {
        match self {
            Ring::Split(ring) => ring.poll(),
            Ring::Packed(ring) => ring.poll(),
        }
    }

    /// Whether [`Ring::poll`] would return a chain or an error.
    #[inline]
    pub fn has_used(&self) -> bool {
        match self {
            Ring::Split(ring) => ring.has_used(),
            Ring::Packed(ring) => ring.has_used(),
        }
    }

    /// Asks for an interrupt with the next used chain. Returns `false` when one is already used.
    pub fn arm(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.arm(),
            Ring::Packed(ring) => ring.arm(),
        }
    }

    /// Asks for no interrupts. Some may still arrive.
    pub fn disarm(&mut self) {
        match self {
            Ring::Split(ring) => ring.disarm(),
            Ring::Packed(ring) => ring.disarm(),
        }
    }

    /// Number of chains that the device has not completed.
    pub fn in_flight(&self) -> u16 {
        match self {
            Ring::Split(ring) => ring.in_flight(),
            Ring::Packed(ring) => ring.in_flight(),
        }
    }

    /// Start position for a device that takes this ring over, in the form of vhost-user's
    /// `SET_VRING_BASE`. It is the first chain that the device has not returned (split: the
    /// in-flight region lists the entries).
    pub fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.base(),
            Ring::Packed(ring) => ring.base(),
        }
    }
}
