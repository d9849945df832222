//! The configuration space of virtio-blk: virtio 1.3, section 5.2.4.

/// The device's configuration space. Fields without their feature bit are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfigSpace {
    /// Size of the device in sectors of 512 bytes.
    pub capacity: u64,
    /// Longest segment in bytes (SIZE_MAX).
    pub size_max: u32,
    /// Largest number of data segments in a request (SEG_MAX).
    pub seg_max: u32,
    /// Cylinders (GEOMETRY).
    pub cylinders: u16,
    /// Heads (GEOMETRY).
    pub heads: u8,
    /// Sectors a track (GEOMETRY).
    pub sectors: u8,
    /// Logical block size in bytes (BLK_SIZE).
    pub blk_size: u32,
    /// Logical blocks in a physical block, as an exponent of 2 (TOPOLOGY).
    pub physical_block_exp: u8,
    /// The first aligned logical block (TOPOLOGY).
    pub alignment_offset: u8,
    /// Suggested minimum I/O size in logical blocks (TOPOLOGY).
    pub min_io_size: u16,
    /// Suggested optimal I/O size in logical blocks (TOPOLOGY).
    pub opt_io_size: u32,
    /// 1 when the volatile cache is on; the driver writes it (CONFIG_WCE).
    pub writeback: u8,
    /// Number of queues (MQ).
    pub num_queues: u16,
    /// Longest discard range in sectors (DISCARD).
    pub max_discard_sectors: u32,
    /// Largest number of ranges in a discard (DISCARD).
    pub max_discard_seg: u32,
    /// Alignment of discard ranges in sectors (DISCARD).
    pub discard_sector_alignment: u32,
    /// Longest write-zeroes range in sectors (WRITE_ZEROES).
    pub max_write_zeroes_sectors: u32,
    /// Largest number of ranges in a write zeroes (WRITE_ZEROES).
    pub max_write_zeroes_seg: u32,
    /// 1 when a write zeroes may deallocate (WRITE_ZEROES).
    pub write_zeroes_may_unmap: u8,
    /// Longest secure-erase range in sectors (SECURE_ERASE).
    pub max_secure_erase_sectors: u32,
    /// Largest number of ranges in a secure erase (SECURE_ERASE).
    pub max_secure_erase_seg: u32,
    /// Alignment of secure-erase ranges in sectors (SECURE_ERASE).
    pub secure_erase_sector_alignment: u32,
}

impl ConfigSpace {
    /// Bytes up to `secure_erase_sector_alignment`, the last field before those of zoned devices.
    pub const BYTES: usize = 72;
    /// Offset of [`ConfigSpace::writeback`], the only byte that a driver may write.
    pub const WRITEBACK_OFFSET: usize = 32;

    /// The configuration space as the driver reads it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut put =
            |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(0, &self.capacity.to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(16, &self.cylinders.to_le_bytes());
        put(18, &[self.heads, self.sectors]);
        put(20, &self.blk_size.to_le_bytes());
        put(24, &[self.physical_block_exp, self.alignment_offset]);
        put(26, &self.min_io_size.to_le_bytes());
        put(28, &self.opt_io_size.to_le_bytes());
        put(32, &[self.writeback]);
        put(34, &self.num_queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &self.max_discard_seg.to_le_bytes());
        put(44, &self.discard_sector_alignment.to_le_bytes());
        put(48, &self.max_write_zeroes_sectors.to_le_bytes());
        put(52, &self.max_write_zeroes_seg.to_le_bytes());
        put(56, &[self.write_zeroes_may_unmap]);
        put(60, &self.max_secure_erase_sectors.to_le_bytes());
        put(64, &self.max_secure_erase_seg.to_le_bytes());
        put(68, &self.secure_erase_sector_alignment.to_le_bytes());
        bytes
    }

    /// Decodes a configuration space; bytes missing at its end read as 0.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let byte = |offset: usize| bytes.get(offset).copied().unwrap_or(0);
        let u16_at = |offset| u16::from_le_bytes(std::array::from_fn(|i| byte(offset + i)));
        let u32_at = |offset| u32::from_le_bytes(std::array::from_fn(|i| byte(offset + i)));
        ConfigSpace {
            capacity: u64::from_le_bytes(std::array::from_fn(byte)),
            size_max: u32_at(8),
            seg_max: u32_at(12),
            cylinders: u16_at(16),
            heads: byte(18),
            sectors: byte(19),
            blk_size: u32_at(20),
            physical_block_exp: byte(24),
            alignment_offset: byte(25),
            min_io_size: u16_at(26),
            opt_io_size: u32_at(28),
            writeback: byte(32),
            num_queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_seg: u32_at(40),
            discard_sector_alignment: u32_at(44),
            max_write_zeroes_sectors: u32_at(48),
            max_write_zeroes_seg: u32_at(52),
            write_zeroes_may_unmap: byte(56),
            max_secure_erase_sectors: u32_at(60),
            max_secure_erase_seg: u32_at(64),
            secure_erase_sector_alignment: u32_at(68),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_space_reads_back_as_it_was_written() {
        let mut bytes: Vec<u8> = (1..=ConfigSpace::BYTES as u8).collect();
        for padding in [33, 57, 58, 59] {
            bytes[padding] = 0;
        }
        let config = ConfigSpace::from_bytes(&bytes);
        assert_eq!(config.to_bytes()[..], bytes);
        assert_eq!((config.writeback, config.num_queues), (33, 0x2423));
        assert_eq!(bytes[ConfigSpace::WRITEBACK_OFFSET], config.writeback);
        assert_eq!(ConfigSpace::from_bytes(&bytes[..8]).seg_max, 0);
        assert_eq!(ConfigSpace::from_bytes(&bytes[..8]).capacity, config.capacity);
    }
}
