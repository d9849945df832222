//! Limits that follow from a configuration space.

use block::Limits;
use virtio::blk::{
    ConfigSpace, SECTOR_BYTES, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};

/// Longest read or write. A power of two, and so a multiple of every block size.
const MAX_TRANSFER: u32 = 1 << 30;
/// Largest number of segments: unlimited. Copying into fewer would not help, because the server
/// must know the memory of the copy.
const MAX_SEGMENTS: u16 = u16::MAX;
/// Largest number of entries in the tables of a queue's slots together, which are memory that a
/// device may pin: 16 MiB.
const MAX_TABLE_ENTRIES: u32 = 1 << 20;
/// Largest block size that is accepted.
const MAX_BLOCK_SIZE: u32 = 1 << 20;

/// Longest data segment.
pub fn size_max(features: u64, config: &ConfigSpace) -> u32 {
    if features & VIRTIO_BLK_F_SIZE_MAX != 0 && config.size_max > 0 { config.size_max } else { u32::MAX }
}

/// Largest number of data segments in a request according to the device.
pub fn device_seg_max(features: u64, config: &ConfigSpace) -> u32 {
    if features & VIRTIO_BLK_F_SEG_MAX != 0 { config.seg_max.max(1) } else { 1 }
}

/// Largest number of data segments in a chain: limited by the device, the ring's size and, in a
/// large ring, by [`MAX_TABLE_ENTRIES`].
pub fn seg_max(device_seg_max: u32, ring_size: u16) -> u16 {
    let longest = u32::from(ring_size.max(3) - 2);
    let room = MAX_TABLE_ENTRIES / u32::from(ring_size.max(1));
    device_seg_max.min(longest).min(room.max(2)).max(1) as u16
}

/// Bytes of the device, whole blocks only.
pub fn capacity(config: &ConfigSpace, block_size: u32) -> u64 {
    config.capacity.saturating_mul(SECTOR_BYTES) & !(u64::from(block_size) - 1)
}

/// The limits of a device, or the reason why its configuration space is invalid.
pub fn limits(features: u64, config: &ConfigSpace) -> Result<Limits, String> {
    let has = |feature| features & feature != 0;
    let block_size = if has(VIRTIO_BLK_F_BLK_SIZE) { config.blk_size } else { 512 };
    if !block_size.is_power_of_two() || !(512..=MAX_BLOCK_SIZE).contains(&block_size) {
        return Err(format!(
            "block size {block_size} bytes: must be a power of two, 512 to {MAX_BLOCK_SIZE}"
        ));
    }
    let bytes = |sectors: u32| match sectors {
        0 => u64::from(u32::MAX) * SECTOR_BYTES,
        n => u64::from(n) * SECTOR_BYTES,
    };
    let whole_blocks = |len: u64| len & !(u64::from(block_size) - 1);
    let when = |feature, len| if has(feature) { whole_blocks(len) } else { 0 };
    let physical = u64::from(block_size)
        << if has(VIRTIO_BLK_F_TOPOLOGY) { config.physical_block_exp.min(16) } else { 0 };
    let optimal = if has(VIRTIO_BLK_F_TOPOLOGY) { config.opt_io_size.saturating_mul(block_size) } else { 0 };
    Ok(Limits {
        physical_block_size: physical.min(1 << 31) as u32,
        block_size,
        optimal_io_size: optimal,
        memory_alignment: 1,
        // The queue splits requests that exceed the server's limits.
        max_transfer: MAX_TRANSFER,
        max_segments: MAX_SEGMENTS,
        max_discard: when(VIRTIO_BLK_F_DISCARD, bytes(config.max_discard_sectors)),
        discard_alignment: config
            .discard_sector_alignment
            .saturating_mul(SECTOR_BYTES as u32)
            .max(block_size),
        max_write_zeroes: when(VIRTIO_BLK_F_WRITE_ZEROES, bytes(config.max_write_zeroes_sectors)),
        read_only: has(VIRTIO_BLK_F_RO),
        volatile_cache: is_write_back(features, config),
        native_fua: false,
        rotational: false,
        ..Limits::new(capacity(config, block_size))
    })
}

/// Checks that a device with the configuration space `now` can replace the one with `before` while
/// requests are in flight. Its limits must be at least as wide, and it must not have shrunk.
///
/// # Errors
/// The name of the first value that does not fit, with both values.
pub fn check_successor(features: u64, before: &ConfigSpace, now: &ConfigSpace) -> Result<(), String> {
    let (old, new) = (limits(features, before)?, limits(features, now)?);
    let equal = |name: &str, old: u64, new: u64| match old == new {
        true => Ok(()),
        false => Err(format!("{name} changed from {old} to {new}")),
    };
    let at_least = |name: &str, old: u64, new: u64| match old <= new {
        true => Ok(()),
        false => Err(format!("{name} shrank from {old} to {new}")),
    };
    equal("block size", old.block_size.into(), new.block_size.into())?;
    equal("discard alignment", old.discard_alignment.into(), new.discard_alignment.into())?;
    at_least("capacity in bytes", old.capacity, new.capacity)?;
    at_least("longest discard in bytes", old.max_discard, new.max_discard)?;
    at_least("longest write zeroes in bytes", old.max_write_zeroes, new.max_write_zeroes)?;
    let [old_seg, new_seg] = [before, now].map(|config| device_seg_max(features, config).into());
    at_least("number of segments", old_seg, new_seg)?;
    let [old_size, new_size] = [before, now].map(|config| size_max(features, config).into());
    at_least("longest segment in bytes", old_size, new_size)?;
    match new.volatile_cache && !old.volatile_cache {
        true => Err("write cache changed from off to on".into()),
        false => Ok(()),
    }
}

/// Whether writes may remain in a cache until a flush.
pub fn is_write_back(features: u64, config: &ConfigSpace) -> bool {
    features & VIRTIO_BLK_F_FLUSH != 0 && (features & VIRTIO_BLK_F_CONFIG_WCE == 0 || config.writeback != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_without_their_feature_mean_nothing() {
        let config = ConfigSpace {
            capacity: 2048,
            blk_size: 4096,
            size_max: 1,
            seg_max: 7,
            max_discard_sectors: 8,
            max_write_zeroes_sectors: 8,
            opt_io_size: 9,
            ..ConfigSpace::default()
        };
        let plain = limits(0, &config).unwrap();
        assert_eq!((plain.capacity, plain.block_size), (1 << 20, 512));
        assert_eq!((size_max(0, &config), device_seg_max(0, &config)), (u32::MAX, 1));
        assert_eq!((plain.max_discard, plain.max_write_zeroes, plain.optimal_io_size), (0, 0, 0));
        assert!(!plain.volatile_cache && !plain.read_only);
    }

    #[test]
    fn a_successor_may_be_larger_and_not_stricter() {
        const ALL: u64 = !VIRTIO_BLK_F_RO;
        let before = ConfigSpace {
            capacity: 2048,
            blk_size: 4096,
            size_max: 1 << 16,
            seg_max: 64,
            max_discard_sectors: 512,
            discard_sector_alignment: 8,
            max_write_zeroes_sectors: 512,
            num_queues: 4,
            ..ConfigSpace::default()
        };
        let check = |now: &ConfigSpace| check_successor(ALL, &before, now);
        assert_eq!(check(&before), Ok(()));
        let wider = ConfigSpace { capacity: 4096, seg_max: 128, size_max: 1 << 20, ..before };
        assert_eq!(check(&wider), Ok(()));
        let cases = [
            (ConfigSpace { capacity: 1024, ..before }, "capacity in bytes shrank from 1048576 to 524288"),
            (ConfigSpace { blk_size: 512, ..before }, "block size changed from 4096 to 512"),
            (ConfigSpace { blk_size: 3, ..before }, "block size 3 bytes"),
            (ConfigSpace { seg_max: 63, ..before }, "number of segments shrank from 64 to 63"),
            (ConfigSpace { size_max: 1, ..before }, "longest segment in bytes shrank from 65536 to 1"),
            (ConfigSpace { max_discard_sectors: 8, ..before }, "longest discard in bytes shrank from 262144"),
            (ConfigSpace { discard_sector_alignment: 16, ..before }, "discard alignment changed from 4096"),
            (ConfigSpace { max_write_zeroes_sectors: 8, ..before }, "longest write zeroes in bytes shrank"),
            (ConfigSpace { writeback: 1, ..before }, "write cache changed from off to on"),
        ];
        for (now, why) in cases {
            let error = check(&now).unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
    }

    #[test]
    fn nonsense_from_the_server_is_an_error_or_harmless() {
        for blk_size in [0, 1, 513, 1 << 21] {
            let config = ConfigSpace { blk_size, ..ConfigSpace::default() };
            assert!(limits(VIRTIO_BLK_F_BLK_SIZE, &config).is_err());
        }
        let wild = ConfigSpace {
            capacity: u64::MAX,
            physical_block_exp: 255,
            opt_io_size: u32::MAX,
            discard_sector_alignment: u32::MAX,
            seg_max: u32::MAX,
            size_max: u32::MAX,
            blk_size: 4096,
            ..ConfigSpace::default()
        };
        let limits = limits(!VIRTIO_BLK_F_RO, &wild).unwrap();
        assert_eq!(limits.capacity % 4096, 0);
        let device = device_seg_max(u64::MAX, &wild);
        assert_eq!([1, 4, 128, 1024, 32768].map(|size| seg_max(device, size)), [1, 2, 126, 1022, 32]);
    }
}
