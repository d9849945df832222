//! The content of virtio-blk buffers: virtio 1.3, section 5.2.
//!
//! ```text
//!   readable:  header 16 B │ data of a write, or ranges of a discard / write zeroes
//!   writable:  data of a read, or the identity │ status 1 B
//! ```
//!
//! The borders between these parts may lie anywhere in the descriptors: a header may be split over
//! two, and the status may share a buffer with the data. [`parse`] looks at bytes, never at
//! descriptors.

mod config;
mod request;

pub use config::ConfigSpace;
pub use request::{BlkRequest, Command, ParseError, Ranges, Status, parse};

use block::{IoError, IoResult};

/// Feature bit: [`ConfigSpace::size_max`] is valid.
pub const VIRTIO_BLK_F_SIZE_MAX: u64 = 1 << 1;
/// Feature bit: [`ConfigSpace::seg_max`] is valid.
pub const VIRTIO_BLK_F_SEG_MAX: u64 = 1 << 2;
/// Feature bit: the geometry is valid.
pub const VIRTIO_BLK_F_GEOMETRY: u64 = 1 << 4;
/// Feature bit: the device is read-only.
pub const VIRTIO_BLK_F_RO: u64 = 1 << 5;
/// Feature bit: [`ConfigSpace::blk_size`] is valid.
pub const VIRTIO_BLK_F_BLK_SIZE: u64 = 1 << 6;
/// Feature bit: the device has a volatile cache and a flush command.
pub const VIRTIO_BLK_F_FLUSH: u64 = 1 << 9;
/// Feature bit: the topology fields are valid.
pub const VIRTIO_BLK_F_TOPOLOGY: u64 = 1 << 10;
/// Feature bit: the driver may switch the cache with [`ConfigSpace::writeback`].
pub const VIRTIO_BLK_F_CONFIG_WCE: u64 = 1 << 11;
/// Feature bit: [`ConfigSpace::num_queues`] is valid.
pub const VIRTIO_BLK_F_MQ: u64 = 1 << 12;
/// Feature bit: discard, and its fields.
pub const VIRTIO_BLK_F_DISCARD: u64 = 1 << 13;
/// Feature bit: write zeroes, and its fields.
pub const VIRTIO_BLK_F_WRITE_ZEROES: u64 = 1 << 14;
/// Feature bit: secure erase, and its fields.
pub const VIRTIO_BLK_F_SECURE_ERASE: u64 = 1 << 16;

/// Request type: read.
pub const VIRTIO_BLK_T_IN: u32 = 0;
/// Request type: write.
pub const VIRTIO_BLK_T_OUT: u32 = 1;
/// Request type: flush.
pub const VIRTIO_BLK_T_FLUSH: u32 = 4;
/// Request type: read the identity.
pub const VIRTIO_BLK_T_GET_ID: u32 = 8;
/// Request type: discard.
pub const VIRTIO_BLK_T_DISCARD: u32 = 11;
/// Request type: write zeroes.
pub const VIRTIO_BLK_T_WRITE_ZEROES: u32 = 13;
/// Request type: secure erase.
pub const VIRTIO_BLK_T_SECURE_ERASE: u32 = 14;

/// Status: done.
pub const VIRTIO_BLK_S_OK: u8 = 0;
/// Status: failed.
pub const VIRTIO_BLK_S_IOERR: u8 = 1;
/// Status: the device does not support the request.
pub const VIRTIO_BLK_S_UNSUPP: u8 = 2;

/// Bytes of the identity that GET_ID returns; a shorter one ends with a zero byte.
pub const ID_BYTES: usize = 20;
/// Bytes of a request's header.
pub const HEADER_BYTES: usize = 16;
/// Bytes of one range of a discard, write zeroes or secure erase.
pub const RANGE_BYTES: usize = 16;
/// Bytes of a sector, the unit of capacity and positions, whatever the block size.
pub const SECTOR_BYTES: u64 = 512;
/// Largest number of ranges in one discard or write zeroes. Linux uses at most 256
/// (MAX_DISCARD_SEGMENTS), and one request cannot keep a core busy for long.
pub const MAX_RANGES: usize = 256;

/// Flag of a write-zeroes range: it may be deallocated. Reserved for a discard.
pub const RANGE_F_UNMAP: u32 = 1;

/// The first 16 bytes of every request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// `VIRTIO_BLK_T_*`.
    pub kind: u32,
    /// Priority; ignored here.
    pub ioprio: u32,
    /// First sector of a read or write, in [`SECTOR_BYTES`].
    pub sector: u64,
}

impl Header {
    /// The header as bytes in memory.
    #[inline]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let word = u128::from(self.kind) | u128::from(self.ioprio) << 32 | u128::from(self.sector) << 64;
        word.to_le_bytes()
    }

    /// Decodes a header from memory.
    #[inline]
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let word = u128::from_le_bytes(bytes);
        Header { kind: word as u32, ioprio: (word >> 32) as u32, sector: (word >> 64) as u64 }
    }
}

/// One range of a discard, write zeroes or secure erase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub num_sectors: u32,
    /// [`RANGE_F_UNMAP`]; other bits are reserved and answered with UNSUPP.
    pub flags: u32,
}

impl Range {
    /// The range as bytes in memory.
    pub fn to_bytes(self) -> [u8; RANGE_BYTES] {
        let word =
            u128::from(self.sector) | u128::from(self.num_sectors) << 64 | u128::from(self.flags) << 96;
        word.to_le_bytes()
    }

    /// Decodes a range from memory.
    pub fn from_bytes(bytes: [u8; RANGE_BYTES]) -> Self {
        let word = u128::from_le_bytes(bytes);
        Range { sector: word as u64, num_sectors: (word >> 64) as u32, flags: (word >> 96) as u32 }
    }
}

/// The status byte that reports a result to the driver.
#[inline]
pub fn status(result: IoResult) -> u8 {
    match result {
        Ok(()) => VIRTIO_BLK_S_OK,
        Err(IoError::Unsupported) => VIRTIO_BLK_S_UNSUPP,
        Err(
            IoError::OutOfRange
            | IoError::Misaligned
            | IoError::Invalid
            | IoError::ReadOnly
            | IoError::NoSpace
            | IoError::Medium
            | IoError::Corrupt
            | IoError::TimedOut
            | IoError::DeviceGone
            | IoError::NoMemory
            | IoError::TooManyActiveZones
            | IoError::TooManyOpenZones,
        ) => VIRTIO_BLK_S_IOERR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unsupported_operation_is_reported_as_such() {
        assert_eq!(status(Ok(())), VIRTIO_BLK_S_OK);
        assert_eq!(status(Err(IoError::Unsupported)), VIRTIO_BLK_S_UNSUPP);
        assert_eq!(status(Err(IoError::Medium)), VIRTIO_BLK_S_IOERR);
    }
}
