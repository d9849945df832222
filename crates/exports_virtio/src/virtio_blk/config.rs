//! The device information that a guest reads: feature bits and the configuration space.

use block::Limits;
use virtio::blk::{
    ConfigSpace, SECTOR_BYTES, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};

/// Maximum segments of a request: fits a ring of 128 entries with header and status. The size of
/// the guest's ring is unknown when it asks, and 128 is the default of VMMs.
const MAX_SEGMENTS: u16 = 126;
/// Descriptors of a request that carry no data.
const FRAME_DESCRIPTORS: u16 = 2;
/// Minimum segment size offered to a guest: Linux requires a page.
const LEAST_SEGMENT_BYTES: u32 = 4096;
/// Maximum ranges of one discard or write zeroes; they are executed one after the other.
const MAX_RANGES: u32 = 32;

/// Size of the readable configuration space; bytes beyond the fields read as 0.
pub(crate) const SPACE_BYTES: usize = 256;

/// Properties of a disk that do not come from its device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Virtqueues.
    pub(crate) num_queues: u16,
    /// Largest expected ring.
    pub(crate) queue_size: u16,
    /// Refuse writes even if the device accepts them.
    pub(crate) read_only: bool,
}

/// The offered feature bits, without those of the transport.
pub(crate) fn features(offer: Offer, limits: &Limits) -> u64 {
    let mut bits = virtio::VIRTIO_F_VERSION_1
        | virtio::VIRTIO_F_INDIRECT_DESC
        | virtio::VIRTIO_F_EVENT_IDX
        | virtio::VIRTIO_F_RING_PACKED
        | VIRTIO_BLK_F_SEG_MAX
        | VIRTIO_BLK_F_SIZE_MAX
        | VIRTIO_BLK_F_BLK_SIZE
        | VIRTIO_BLK_F_TOPOLOGY
        | VIRTIO_BLK_F_FLUSH
        | VIRTIO_BLK_F_CONFIG_WCE
        | VIRTIO_BLK_F_MQ;
    if is_read_only(offer, limits) {
        return bits | VIRTIO_BLK_F_RO;
    }
    if limits.max_discard >= SECTOR_BYTES {
        bits |= VIRTIO_BLK_F_DISCARD;
    }
    if limits.max_write_zeroes >= SECTOR_BYTES {
        bits |= VIRTIO_BLK_F_WRITE_ZEROES;
    }
    bits
}

/// Whether device or export refuse writes.
pub(crate) fn is_read_only(offer: Offer, limits: &Limits) -> bool {
    offer.read_only || limits.read_only
}

/// The current configuration space.
pub(crate) fn space(offer: Offer, limits: &Limits, is_writeback: bool) -> ConfigSpace {
    let block = u64::from(limits.block_size);
    let physical = u64::from(limits.physical_block_size).max(block);
    let (seg_max, size_max) = segment_limits(offer, limits);
    let mut space = ConfigSpace {
        capacity: limits.capacity / SECTOR_BYTES,
        size_max,
        seg_max,
        blk_size: limits.block_size,
        physical_block_exp: (physical / block).ilog2() as u8,
        min_io_size: u16::try_from(physical / block).unwrap_or(u16::MAX),
        opt_io_size: limits.optimal_io_size / limits.block_size,
        writeback: is_writeback.into(),
        num_queues: offer.num_queues,
        ..ConfigSpace::default()
    };
    if is_read_only(offer, limits) {
        return space;
    }
    if limits.max_discard >= SECTOR_BYTES {
        space.max_discard_sectors = range_sectors(limits.max_discard, block);
        space.max_discard_seg = MAX_RANGES;
        space.discard_sector_alignment =
            (u64::from(limits.discard_alignment).max(block) / SECTOR_BYTES) as u32;
    }
    if limits.max_write_zeroes >= SECTOR_BYTES {
        space.max_write_zeroes_sectors = range_sectors(limits.max_write_zeroes, block);
        space.max_write_zeroes_seg = MAX_RANGES;
        space.write_zeroes_may_unmap = (limits.max_discard > 0).into();
    }
    space
}

/// Maximum number and size of the segments of a request: together at most the longest transfer of
/// the device.
fn segment_limits(offer: Offer, limits: &Limits) -> (u32, u32) {
    let most = limits.max_segments.min(offer.queue_size - FRAME_DESCRIPTORS).clamp(1, MAX_SEGMENTS);
    let seg_max = u32::from(most).min(limits.max_transfer / LEAST_SEGMENT_BYTES).max(1);
    let size_max = limits.max_transfer / seg_max / LEAST_SEGMENT_BYTES * LEAST_SEGMENT_BYTES;
    (seg_max, size_max.max(LEAST_SEGMENT_BYTES))
}

/// Longest range in 512-byte sectors, a multiple of the block size.
fn range_sectors(max_bytes: u64, block: u64) -> u32 {
    let max_bytes = max_bytes.min(u64::from(u32::MAX) * SECTOR_BYTES);
    (max_bytes / block * block / SECTOR_BYTES) as u32
}

/// `size` bytes of the configuration space from `offset` on; `None` beyond [`SPACE_BYTES`].
pub(crate) fn read_space(space: &ConfigSpace, offset: u32, size: u32) -> Option<Vec<u8>> {
    let end = offset.checked_add(size).filter(|&end| end as usize <= SPACE_BYTES)?;
    let mut bytes = [0; SPACE_BYTES];
    bytes[..ConfigSpace::BYTES].copy_from_slice(&space.to_bytes());
    Some(bytes[offset as usize..end as usize].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFER: Offer = Offer { num_queues: 1, queue_size: 256, read_only: false };

    #[test]
    fn a_read_only_export_offers_nothing_that_writes() {
        let offer = Offer { read_only: true, ..OFFER };
        let limits = Limits::new(1 << 20);
        let bits = features(offer, &limits);
        assert_ne!(bits & VIRTIO_BLK_F_RO, 0);
        assert_eq!(bits & (VIRTIO_BLK_F_DISCARD | VIRTIO_BLK_F_WRITE_ZEROES), 0);
        assert_eq!(space(offer, &limits, true).max_discard_seg, 0);
    }

    #[test]
    fn limits_appear_in_the_units_of_the_specification() {
        let limits = Limits {
            block_size: 4096,
            physical_block_size: 16384,
            optimal_io_size: 65536,
            discard_alignment: 8192,
            max_discard: u64::MAX,
            ..Limits::new(1 << 30)
        };
        let space = space(Offer { num_queues: 4, ..OFFER }, &limits, false);
        assert_eq!((space.capacity, space.blk_size, space.num_queues), (1 << 21, 4096, 4));
        assert_eq!((space.physical_block_exp, space.min_io_size, space.opt_io_size), (2, 4, 16));
        assert_eq!((space.discard_sector_alignment, space.max_discard_sectors), (16, !7));
        assert_eq!((space.seg_max, space.size_max, space.writeback), (126, 2080 * 4096, 0));
    }

    #[test]
    fn a_small_ring_or_device_bounds_the_segments() {
        let seg_max = |queue_size, max_segments| {
            let offer = Offer { queue_size, ..OFFER };
            space(offer, &Limits { max_segments, ..Limits::new(4096) }, true).seg_max
        };
        assert_eq!((seg_max(4, 1024), seg_max(64, 1024), seg_max(1024, 1024)), (2, 62, 126));
        assert_eq!((seg_max(64, 16), seg_max(64, 0)), (16, 1));
    }

    #[test]
    fn the_longest_request_of_a_guest_is_one_that_the_device_takes() {
        let longest = |max_transfer| {
            let space = space(OFFER, &Limits { max_transfer, ..Limits::new(4096) }, true);
            (space.seg_max, space.size_max)
        };
        assert_eq!(longest(128 << 10), (32, 4096));
        assert_eq!(longest(1 << 20), (126, 8192));
        assert_eq!(longest(512), (1, 4096));
    }

    #[test]
    fn any_window_of_the_first_256_bytes_can_be_read() {
        let space = ConfigSpace { capacity: 0x0102_0304, ..ConfigSpace::default() };
        let all = read_space(&space, 0, 256).unwrap();
        assert_eq!((&all[..4], all.len()), (&[4, 3, 2, 1][..], 256));
        assert_eq!(read_space(&space, 1, 2).unwrap(), [3, 2]);
        assert_eq!(read_space(&space, 250, 6).unwrap(), [0; 6]);
        assert!(read_space(&space, 250, 7).is_none() && read_space(&space, u32::MAX, 2).is_none());
    }
}
