//! Properties of a disk, as the module reports them.

use super::error::OpenError;
use crate::passthrough::transfer::{MAX_IOVECS, TransferLimits};
use crate::shared_memory::page_size;
use block::Limits;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use virtio::blk::{SECTOR_BYTES, VIRTIO_BLK_F_FLUSH};

/// `VIRTBLK_GET_INFO`: `_IOR('V', 0xB0, struct virtblk_info)`.
pub(super) const GET_INFO: libc::c_ulong = 0x80a0_56b0;

/// `VIRTBLK_INFO_READ_ONLY`.
pub(super) const INFO_READ_ONLY: u32 = 1;
/// `VIRTBLK_INFO_WRITE_CACHE`.
pub(super) const INFO_WRITE_CACHE: u32 = 2;
/// `VIRTBLK_INFO_POLL`.
pub(super) const INFO_POLL: u32 = 4;

/// Longest request; longer than a command, so it is split.
const MAX_TRANSFER: u32 = 1 << 30;
/// Longest discard and write zeroes, split likewise.
const MAX_COMMAND: u64 = 1 << 40;
/// Largest block size that is accepted.
const MAX_BLOCK_SIZE: u32 = 64 << 10;
/// Maximum ranges of one command that are used: 4 KiB of them.
const MAX_RANGES: u32 = 256;

/// `struct virtblk_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Info {
    pub capacity: u64,
    pub features: u64,
    pub flags: u32,
    pub block_bytes: u32,
    pub physical_block_bytes: u32,
    pub optimal_io_bytes: u32,
    pub buffer_align: u32,
    pub max_bytes: u32,
    pub max_segments: u32,
    pub max_segment_bytes: u32,
    pub max_discard_sectors: u32,
    pub max_discard_ranges: u32,
    pub discard_align_sectors: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_write_zeroes_ranges: u32,
    pub queues: u32,
    pub poll_queues: u32,
    pub serial: [u8; 20],
    pub reserved: [u32; 16],
}

const _: () = assert!(size_of::<Info>() == 160);

impl Info {
    /// Asks the module.
    fn of(file: &File) -> io::Result<Info> {
        let mut info = Info::default();
        // SAFETY: the structure has the size that the number of the ioctl says, and lives through
        // the call.
        match unsafe { libc::ioctl(file.as_raw_fd(), GET_INFO, &raw mut info) } {
            0 => Ok(info),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The limits of a discard or of write zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Longest range in logical blocks.
    pub blocks: u32,
    /// Maximum ranges of one command.
    pub ranges: u32,
}

/// The properties of a disk. Sizes are in bytes unless the name says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFacts {
    /// Size.
    pub capacity: u64,
    /// Size of a logical block, as a power of two.
    pub block_shift: u32,
    /// Size of a physical block, a power of two.
    pub physical_block_size: u32,
    /// The preferred I/O size; 0 when unknown.
    pub optimal_io: u32,
    /// Alignment of every memory segment's address and length, a power of two.
    pub memory_alignment: u32,
    /// Whether the disk refuses writes.
    pub is_read_only: bool,
    /// Whether the disk has a flush command.
    pub has_flush: bool,
    /// Whether completed writes may be lost without a flush.
    pub needs_flush: bool,
    /// Longest transfer of one command, a multiple of the block. Longer requests are split.
    pub max_transfer: u32,
    /// Maximum memory pages of one command.
    pub max_pages: u32,
    /// Limits of a discard; `None` without the command.
    pub discard: Option<RangeLimits>,
    /// Discards of this size, at its multiples, are effective. A power of two.
    pub discard_alignment: u32,
    /// Limits of write zeroes; `None` without the command.
    pub write_zeroes: Option<RangeLimits>,
    /// Whether the disk has queues that can be polled for completions.
    pub can_poll: bool,
    /// Number of queues that raise interrupts.
    pub queues: u32,
    /// The identity that the disk reports, padded with zeroes.
    pub serial: [u8; 20],
}

impl DiskFacts {
    /// Queries the properties of the disk of `file`.
    ///
    /// # Errors
    /// When it is not a disk's node, or reports a property that cannot be.
    pub(super) fn of(file: &File) -> Result<DiskFacts, OpenError> {
        DiskFacts::from_info(&Info::of(file).map_err(OpenError::of_info)?, page_size() as u32)
    }

    /// The properties in `info`, on a kernel with pages of `page` bytes.
    pub(super) fn from_info(info: &Info, page: u32) -> Result<DiskFacts, OpenError> {
        let refuse = |property, value: u32, expected| {
            Err(OpenError::Malformed { property, value: value.into(), expected })
        };
        let block = info.block_bytes;
        if !block.is_power_of_two() || !(512..=MAX_BLOCK_SIZE).contains(&block) {
            return refuse("a block size of", block, "a power of two from 512 to 65536");
        }
        let alignment = info.buffer_align.max(1);
        if !alignment.is_power_of_two() || alignment > block {
            return refuse("a memory alignment of", alignment, "a power of two, at most the block size");
        }
        if info.max_bytes < block || info.max_segments == 0 {
            let max_bytes = if info.max_segments == 0 { 0 } else { info.max_bytes };
            return refuse("a longest transfer of", max_bytes, "one block or more");
        }
        let segments_of_page = page.div_ceil(info.max_segment_bytes.clamp(1, page));
        let discard_unit = (info.discard_align_sectors).saturating_mul(SECTOR_BYTES as u32);
        let power_of_two = |size: u32, least: u32| {
            if size.is_power_of_two() { size.max(least) } else { least }
        };
        let discard_alignment = power_of_two(discard_unit, block);
        let blocks_of_sectors = |sectors: u32, unit: u32| {
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            let whole = if bytes >= unit.into() { bytes - bytes % u64::from(unit) } else { bytes };
            (whole / u64::from(block)) as u32
        };
        let ranges = |blocks: u32, ranges: u32| {
            let ranges = ranges.clamp(1, MAX_RANGES);
            (blocks > 0).then_some(RangeLimits { blocks, ranges })
        };
        Ok(DiskFacts {
            capacity: info.capacity.saturating_mul(SECTOR_BYTES) & !(u64::from(block) - 1),
            block_shift: block.ilog2(),
            physical_block_size: power_of_two(info.physical_block_bytes, block),
            optimal_io: info.optimal_io_bytes,
            memory_alignment: alignment,
            is_read_only: info.flags & INFO_READ_ONLY != 0,
            has_flush: info.features & VIRTIO_BLK_F_FLUSH != 0,
            needs_flush: info.flags & INFO_WRITE_CACHE != 0,
            max_transfer: info.max_bytes.min(MAX_TRANSFER) & !(block - 1),
            max_pages: (info.max_segments / segments_of_page).max(1),
            discard: ranges(
                blocks_of_sectors(info.max_discard_sectors, discard_alignment),
                info.max_discard_ranges,
            ),
            discard_alignment,
            write_zeroes: ranges(
                blocks_of_sectors(info.max_write_zeroes_sectors, block),
                info.max_write_zeroes_ranges,
            ),
            can_poll: info.flags & INFO_POLL != 0,
            queues: info.queues,
            serial: info.serial,
        })
    }

    /// Size of a logical block.
    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// The limits of one command, on a kernel with pages of `page` bytes.
    #[inline]
    pub(super) fn transfer_limits(&self, page: usize) -> TransferLimits {
        let DiskFacts { block_shift, max_transfer, max_pages, .. } = *self;
        TransferLimits { block_shift, max_transfer, max_pages, page }
    }

    /// The limits of a device over the disk; `read_only` refuses all writes.
    pub fn limits(&self, read_only: bool) -> Limits {
        let whole_blocks = |len: u64| len & !(u64::from(self.block_size()) - 1);
        Limits {
            block_size: self.block_size(),
            physical_block_size: self.physical_block_size,
            optimal_io_size: self.optimal_io,
            memory_alignment: self.memory_alignment,
            max_transfer: MAX_TRANSFER,
            max_segments: MAX_IOVECS as u16,
            max_discard: if self.discard.is_some() { whole_blocks(MAX_COMMAND) } else { 0 },
            discard_alignment: self.discard_alignment,
            max_write_zeroes: whole_blocks(MAX_COMMAND),
            read_only: read_only || self.is_read_only,
            volatile_cache: self.needs_flush,
            // A flush follows the write.
            native_fua: false,
            ..Limits::new(self.capacity)
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A disk of 1 MiB with blocks of 512 bytes and short commands.
    pub const SMALL: DiskFacts = DiskFacts {
        capacity: 1 << 20,
        block_shift: 9,
        physical_block_size: 512,
        optimal_io: 0,
        memory_alignment: 512,
        is_read_only: false,
        has_flush: true,
        needs_flush: true,
        max_transfer: 16 << 10,
        max_pages: 4,
        discard: Some(RangeLimits { blocks: 100, ranges: 2 }),
        discard_alignment: 512,
        write_zeroes: Some(RangeLimits { blocks: 32, ranges: 1 }),
        can_poll: false,
        queues: 1,
        serial: [0; 20],
    };

    const INFO: Info = Info {
        capacity: 2049,
        features: VIRTIO_BLK_F_FLUSH,
        flags: INFO_WRITE_CACHE | INFO_POLL,
        block_bytes: 1024,
        physical_block_bytes: 4096,
        optimal_io_bytes: 65536,
        buffer_align: 512,
        max_bytes: 130_000,
        max_segments: 126,
        max_segment_bytes: u32::MAX,
        max_discard_sectors: 201,
        max_discard_ranges: 4,
        discard_align_sectors: 16,
        max_write_zeroes_sectors: 7,
        max_write_zeroes_ranges: 1,
        queues: 2,
        poll_queues: 1,
        serial: *b"serial\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        reserved: [0; 16],
    };

    #[test]
    fn facts_are_whole_blocks_and_powers_of_two() {
        let facts = DiskFacts::from_info(&INFO, 4096).unwrap();
        assert_eq!((facts.capacity, facts.block_size()), (1 << 20, 1024));
        assert_eq!((facts.max_transfer, facts.max_pages), (126 << 10, 126));
        assert_eq!(facts.discard, Some(RangeLimits { blocks: 96, ranges: 4 }), "multiples of 8 KiB");
        assert_eq!(facts.write_zeroes, Some(RangeLimits { blocks: 3, ranges: 1 }));
        assert!(facts.can_poll && facts.needs_flush && facts.has_flush && !facts.is_read_only);
        let limits = facts.limits(false);
        assert_eq!((limits.memory_alignment, limits.discard_alignment), (512, 8192));
        assert!(!limits.read_only && facts.limits(true).read_only);
    }

    #[test]
    fn a_small_segment_of_the_device_leaves_fewer_pages() {
        let facts = |max_segment_bytes| {
            DiskFacts::from_info(&Info { max_segment_bytes, ..INFO }, 4096).unwrap().max_pages
        };
        assert_eq!([facts(4096), facts(4095), facts(512), facts(0)], [126, 63, 15, 1]);
    }

    #[test]
    fn a_disk_without_a_command_or_a_cache_says_so() {
        let poor = Info {
            features: 0,
            flags: INFO_READ_ONLY,
            max_discard_sectors: 0,
            max_write_zeroes_sectors: 1,
            ..INFO
        };
        let facts = DiskFacts::from_info(&poor, 4096).unwrap();
        assert_eq!((facts.discard, facts.write_zeroes), (None, None), "half a block is none");
        let limits = facts.limits(false);
        assert!(limits.read_only && !limits.volatile_cache && limits.max_discard == 0);
    }

    #[test]
    fn properties_that_cannot_be_are_refused_by_value() {
        let refused = |info: Info| DiskFacts::from_info(&info, 4096).unwrap_err().to_string();
        for block_bytes in [0, 1, 513, 1 << 17] {
            let message = refused(Info { block_bytes, ..INFO });
            assert!(message.contains(&format!("block size of {block_bytes}:")), "{message}");
        }
        assert!(refused(Info { buffer_align: 2048, ..INFO }).contains("memory alignment of 2048"));
        assert!(refused(Info { max_bytes: 1023, ..INFO }).contains("longest transfer of 1023"));
        assert!(refused(Info { max_segments: 0, ..INFO }).contains("longest transfer of 0"));
        let wild = Info { capacity: u64::MAX, discard_align_sectors: u32::MAX, ..INFO };
        let facts = DiskFacts::from_info(&wild, 4096).unwrap();
        assert_eq!((facts.capacity % 1024, facts.discard_alignment), (0, 1024));
    }
}
