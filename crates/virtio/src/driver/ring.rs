//! One virtqueue as its driver sees it, whatever its layout.

use super::SharedArea;
use super::packed::PackedDriver;
use super::split::SplitDriver;
use crate::ring::{MAX_QUEUE_SIZE, PackedRing, SplitRing};

/// One segment of a descriptor chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A chain that the device has finished with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What the chain was added with.
    pub token: u16,
    /// Bytes that the device says it has written.
    pub len: u32,
}

/// The device wrote something into the ring that cannot be. The ring is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingBroken {
    /// More used entries than chains in flight.
    UsedIndex(u16),
    /// A used entry names a chain that is not in flight.
    UnknownId(u32),
}

impl std::fmt::Display for RingBroken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RingBroken::UsedIndex(index) => {
                write!(f, "used index {index} is ahead of what was made available")
            }
            RingBroken::UnknownId(id) => write!(f, "used entry names chain {id}, which is not in flight"),
        }
    }
}

impl std::error::Error for RingBroken {}

/// What a ring is made of.
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

/// Where a ring's three areas lie in its memory, in bytes from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// The descriptor table (split) or ring (packed).
    pub descriptors: usize,
    /// What the driver writes: available ring, or driver event suppression.
    pub driver: usize,
    /// What the device writes: used ring, or device event suppression.
    pub device: usize,
    /// All of it.
    pub len: usize,
}

impl RingLayout {
    /// The layout of a ring in memory that starts at a page. Areas with different writers never share a pair of
    /// cache lines, and no entry lies in two pages: QEMU (10.0 for one) writes the second half of such a used entry
    /// to the page behind the first in its own memory, whatever page an emulated IOMMU has put there.
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

/// The driver's side of one virtqueue. A *token* names a chain while it is in flight: any number below the
/// ring's size that is not in use.
pub enum Ring {
    /// Split layout.
    Split(SplitDriver),
    /// Packed layout.
    Packed(PackedDriver),
}

impl Ring {
    /// A ring with nothing in it, in `memory`, which is made of zeroes first. Interrupts are off.
    ///
    /// # Panics
    /// When the size is none the layout allows, or `memory` is shorter than [`RingLayout`] says or not aligned
    /// to 16 bytes (with an IOMMU between, it starts at a page).
    ///
    /// # Safety
    /// `memory` is valid and nobody but the device touches it while the ring lives.
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
        // SAFETY: the memory is ours by the contract, long enough, and the areas are aligned as it is.
        unsafe {
            memory.base.write_bytes(0, layout.len);
            if packed {
                Ring::Packed(PackedDriver::new(PackedRing::new(size, desc, driver, device), config.event_idx))
            } else {
                Ring::Split(SplitDriver::new(SplitRing::new(size, desc, driver, device), config.event_idx))
            }
        }
    }

    /// Adds a chain that is one descriptor with an indirect table of `table_len` bytes at `table_addr`.
    ///
    /// In a split ring the descriptor is the one numbered `token`, which is written only when it differs from
    /// what its last use left there: give each token a table of its own and the device keeps the descriptor
    /// in its cache. A split ring takes either indirect chains or plain ones, never both.
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

    /// Adds a chain of plain descriptors: the first `readable` for the device to read, the rest to write.
    /// `false` when the ring has not enough of them left now.
    ///
    /// # Panics
    /// When `token` is in flight or not below the size, or the chain is empty.
    pub fn add_chain(&mut self, token: u16, chain: &[Buffer], readable: usize) -> bool {
        match self {
            Ring::Split(ring) => ring.add_chain(token, chain, readable),
            Ring::Packed(ring) => ring.add_chain(token, chain, readable),
        }
    }

    /// Makes everything added since the last call visible to the device. Whether it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.publish(),
            Ring::Packed(ring) => ring.publish(),
        }
    }

    /// The next chain that the device has finished with.
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

    /// Whether [`Ring::poll`] has a chain or an error.
    #[inline]
    pub fn has_used(&self) -> bool {
        match self {
            Ring::Split(ring) => ring.has_used(),
            Ring::Packed(ring) => ring.has_used(),
        }
    }

    /// Asks for an interrupt with the next used chain. `false` when there is one already.
    pub fn arm(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.arm(),
            Ring::Packed(ring) => ring.arm(),
        }
    }

    /// Asks for no interrupts. Some may still come.
    pub fn disarm(&mut self) {
        match self {
            Ring::Split(ring) => ring.disarm(),
            Ring::Packed(ring) => ring.disarm(),
        }
    }

    /// Chains that the device has not finished with.
    pub fn in_flight(&self) -> u16 {
        match self {
            Ring::Split(ring) => ring.in_flight(),
            Ring::Packed(ring) => ring.in_flight(),
        }
    }

    /// Where a device that takes this ring over starts, in the form of vhost-user's `SET_VRING_BASE`: at the
    /// first chain that has not come back yet (split: entries are found again through the in-flight region).
    pub fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.base(),
            Ring::Packed(ring) => ring.base(),
        }
    }
}
