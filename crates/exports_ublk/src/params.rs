//! The disk's parameters: the device's limits in the driver's units.

use super::Config;
use super::config::MIN_IO;
use super::uapi::{BasicParams, DiscardParams, Params, SECTOR_BYTES, attribute, param};
use block::Limits;
use exports::Error;

/// Largest logical block that the driver supports: a page.
const MAX_BLOCK: u32 = 4096;
/// The driver's own alignment of memory.
const MIN_ALIGNMENT: u32 = 4;

/// The parameters of a disk over a device with these limits, whose requests are at most `max_io`
/// bytes long. `is_registered`: the device gets the kernel's buffers, which must be aligned as its
/// memory.
pub(super) fn of(limits: &Limits, config: &Config, max_io: u32, is_registered: bool) -> Params {
    let is_read_only = config.read_only || limits.read_only;
    let physical = limits.physical_block_size.max(limits.block_size);
    // The driver requires powers of two: the largest one that divides the device's optimal length.
    let optimal_shift =
        limits.optimal_io_size.checked_ilog2().map_or(0, |_| limits.optimal_io_size.trailing_zeros());
    let set = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    let basic = BasicParams {
        attrs: set(is_read_only, attribute::READ_ONLY)
            | set(limits.rotational, attribute::ROTATIONAL)
            | set(limits.volatile_cache, attribute::VOLATILE_CACHE)
            | set(limits.volatile_cache && limits.native_fua, attribute::FUA),
        logical_bs_shift: limits.block_size.ilog2() as u8,
        physical_bs_shift: physical.ilog2() as u8,
        io_opt_shift: optimal_shift.max(physical.ilog2()) as u8,
        io_min_shift: physical.ilog2() as u8,
        max_sectors: max_io / SECTOR_BYTES as u32,
        dev_sectors: limits.capacity / SECTOR_BYTES,
        ..BasicParams::default()
    };
    let discard = if is_read_only { None } else { discard(limits) };
    Params {
        len: Params::BYTES as u32,
        types: param::BASIC | discard.map_or(0, |_| param::DISCARD) | set(is_registered, param::DMA_ALIGN),
        basic,
        discard: discard.unwrap_or_default(),
        dma_alignment: if is_registered { limits.memory_alignment.max(MIN_ALIGNMENT) - 1 } else { 0 },
        ..Params::default()
    }
}

/// The alignment that the kernel's buffers of a disk with these parameters have.
pub(super) fn memory_alignment(params: &Params) -> u32 {
    if params.types & param::DMA_ALIGN == 0 { MIN_ALIGNMENT } else { params.dma_alignment.saturating_add(1) }
}

fn discard(limits: &Limits) -> Option<DiscardParams> {
    let block = u64::from(limits.block_size);
    let sectors = |max_bytes: u64| {
        let max_bytes = max_bytes.min(u64::from(u32::MAX) * SECTOR_BYTES);
        (max_bytes / block * block / SECTOR_BYTES) as u32
    };
    let discard = DiscardParams {
        discard_granularity: limits.discard_alignment.max(limits.block_size),
        max_discard_sectors: sectors(limits.max_discard),
        max_write_zeroes_sectors: sectors(limits.max_write_zeroes),
        max_discard_segments: u16::from(sectors(limits.max_discard) > 0),
        ..DiscardParams::default()
    };
    (discard.max_discard_sectors > 0 || discard.max_write_zeroes_sectors > 0).then_some(discard)
}

/// The longest request: the configured value, as far as the device supports it.
pub(super) fn max_io(limits: &Limits, config: &Config) -> Result<u32, Error> {
    let refuse = |fault: String| Err(Error::Config(fault));
    if limits.block_size > MAX_BLOCK {
        return refuse(format!("block size {} bytes: ublk supports at most {MAX_BLOCK}", limits.block_size));
    }
    if limits.max_transfer < MIN_IO {
        return refuse(format!(
            "the device supports requests of at most {} bytes: ublk needs {MIN_IO}",
            limits.max_transfer
        ));
    }
    Ok(config.max_io.min(limits.max_transfer / MIN_IO * MIN_IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_appear_in_the_units_of_the_driver() {
        let limits = Limits {
            block_size: 4096,
            physical_block_size: 16384,
            optimal_io_size: 192 << 10,
            discard_alignment: 8192,
            max_discard: u64::MAX,
            max_write_zeroes: 1 << 20,
            volatile_cache: true,
            ..Limits::new(1 << 30)
        };
        let params = of(&limits, &Config::default(), 512 << 10, false);
        let BasicParams { logical_bs_shift, physical_bs_shift, io_opt_shift, io_min_shift, .. } =
            params.basic;
        assert_eq!((logical_bs_shift, physical_bs_shift, io_opt_shift, io_min_shift), (12, 14, 16, 14));
        assert_eq!((params.basic.max_sectors, params.basic.dev_sectors), (1024, 1 << 21));
        assert_eq!(params.basic.attrs, attribute::VOLATILE_CACHE | attribute::FUA);
        assert_eq!((params.types, params.len), (param::BASIC | param::DISCARD, 120));
        let discard = params.discard;
        assert_eq!((discard.discard_granularity, discard.discard_alignment), (8192, 0));
        assert_eq!((discard.max_discard_sectors, discard.max_discard_segments), (!7, 1));
        assert_eq!(discard.max_write_zeroes_sectors, 2048);
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let config = Config { read_only: true, ..Config::default() };
        let params = of(&Limits::new(1 << 20), &config, 4096, false);
        assert_eq!((params.types, params.basic.attrs), (param::BASIC, attribute::READ_ONLY));
        assert_eq!(params.discard, DiscardParams::default());
    }

    #[test]
    fn an_unsupported_operation_is_not_offered() {
        let limits =
            Limits { max_discard: 0, native_fua: false, volatile_cache: true, ..Limits::new(1 << 20) };
        let params = of(&limits, &Config::default(), 4096, false);
        assert_eq!((params.discard.max_discard_sectors, params.discard.max_discard_segments), (0, 0));
        assert_ne!(params.discard.max_write_zeroes_sectors, 0);
        assert_eq!(params.basic.attrs, attribute::VOLATILE_CACHE);
        let nothing = Limits { max_write_zeroes: 0, ..limits };
        assert_eq!(of(&nothing, &Config::default(), 4096, false).types, param::BASIC);
    }

    #[test]
    fn buffers_of_the_kernel_are_aligned_as_the_device_requires() {
        let with = |memory_alignment, is_registered| {
            let limits = Limits { memory_alignment, ..Limits::new(1 << 20) };
            of(&limits, &Config::default(), 4096, is_registered)
        };
        let params = with(512, true);
        assert_eq!((params.types & param::DMA_ALIGN, params.dma_alignment), (param::DMA_ALIGN, 511));
        assert_eq!(memory_alignment(&params), 512);
        assert_eq!(with(1, true).dma_alignment, 3);
        assert_eq!((with(512, false).types & param::DMA_ALIGN, memory_alignment(&with(512, false))), (0, 4));
    }

    #[test]
    fn the_longest_request_is_one_that_the_device_takes() {
        let with = |max_transfer| Limits { max_transfer, ..Limits::new(1 << 20) };
        let config = Config::default();
        assert_eq!(max_io(&with(1 << 30), &config).unwrap(), 512 << 10);
        assert_eq!(max_io(&with(70_000), &config).unwrap(), 69_632);
        assert!(max_io(&with(512), &config).unwrap_err().to_string().contains("at most 512 bytes"));
        let large = Limits { block_size: 8192, ..Limits::new(1 << 20) };
        assert!(max_io(&large, &config).unwrap_err().to_string().contains("8192"));
    }
}
