//! The properties of controllers and namespaces (Base 5.17, NVM 4.1.5), in the short form that a
//! host needs. [`ControllerData`], [`NamespaceData`] and [`lists`] parse and encode all fields that
//! a target fills in.

pub mod controller_data;
pub mod lists;
pub mod namespace_data;

pub use controller_data::{ControllerData, ControllerType};
pub use namespace_data::NamespaceData;

use crate::wire::{u16_at, u32_at, u64_at};
use crate::{IdentifyData, MAX_BLOCKS, MAX_RANGES, MIN_PAGE_BYTES, Malformed};

/// The I/O command set of a namespace (Base 1.5.25).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CommandSet {
    /// Blocks are written in any order.
    Nvm = 0,
    /// As `Nvm`, but zones are written from their start to their end.
    Zoned = 2,
}

impl CommandSet {
    /// The command set of the namespace with the identification descriptors `list` (Base 5.17.2.3).
    /// A descriptor has type, length, two reserved bytes and identifier; the first of length 0 ends
    /// the list. A list without a command set means NVM, the only one before NVMe 2.0.
    ///
    /// # Errors
    /// For any other command set.
    pub fn of_descriptors(list: &IdentifyData) -> Result<CommandSet, Malformed> {
        const TYPE_CSI: u8 = 4;
        let mut rest = list.as_slice();
        while let [kind, len, _, _, tail @ ..] = rest {
            if *len == 0 {
                break;
            }
            if let (TYPE_CSI, Some(csi)) = (*kind, tail.first()) {
                return CommandSet::from_csi(*csi);
            }
            rest = tail.get(usize::from(*len)..).unwrap_or_default();
        }
        Ok(CommandSet::Nvm)
    }

    fn from_csi(csi: u8) -> Result<CommandSet, Malformed> {
        match csi {
            0 => Ok(CommandSet::Nvm),
            2 => Ok(CommandSet::Zoned),
            other => Err(Malformed::CommandSet(other)),
        }
    }

    /// Its identifier in commands.
    pub const fn csi(self) -> u8 {
        self as u8
    }
}

/// Properties of a controller, from Identify Controller (Base 5.17.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Longest transfer of one command in bytes, computed with pages of the smallest size; `None`:
    /// unlimited.
    pub max_transfer: Option<u32>,
    /// The controller supports Dataset Management without limits of its own.
    pub has_dataset_management: bool,
    /// The controller supports Write Zeroes without limits of its own.
    pub has_write_zeroes: bool,
    /// The controller has a volatile write cache; a feature tells whether it is on.
    pub has_volatile_cache: bool,
}

impl Controller {
    /// Reads the structure.
    pub fn parse(data: &IdentifyData) -> Controller {
        let oncs = u16_at(data, 520);
        Controller {
            max_transfer: pages(data[77]),
            has_dataset_management: oncs & 1 << 2 != 0,
            has_write_zeroes: oncs & 1 << 3 != 0,
            has_volatile_cache: data[525] & 1 != 0,
        }
    }
}

/// `2^exponent` of the smallest pages in bytes. `None` (no limit) for 0, and for more than any
/// transfer has.
pub(crate) fn pages(exponent: u8) -> Option<u32> {
    match exponent {
        0 => None,
        _ => MIN_PAGE_BYTES.checked_shl(exponent.into()).filter(|bytes| bytes >> exponent == MIN_PAGE_BYTES),
    }
}

/// Limits of the NVM command set in addition to MDTS, from its Identify Controller (NVM 4.1.5.2).
/// `None` means no limit. A limit implies that the command exists, even if ONCS does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandLimits {
    /// Longest write zeroes in bytes, computed with pages of the smallest size.
    pub write_zeroes_bytes: Option<u32>,
    /// Limit of ranges of one dataset management command.
    pub ranges: Option<u32>,
    /// Limit of blocks of each range.
    pub range_blocks: Option<u32>,
    /// Limit of blocks of all ranges together.
    pub total_blocks: Option<u64>,
}

impl CommandLimits {
    /// Reads the structure.
    pub fn parse(data: &IdentifyData) -> CommandLimits {
        CommandLimits {
            write_zeroes_bytes: pages(data[1]),
            ranges: Some(u32::from(data[3])).filter(|n| *n > 0),
            range_blocks: Some(u32_at(data, 4)).filter(|n| *n > 0),
            total_blocks: Some(u64_at(data, 8)).filter(|n| *n > 0),
        }
    }

    /// Limits of one dataset management command of `controller`; `None` if the controller does not
    /// support the command.
    pub fn deallocation(&self, controller: &Controller) -> Option<Deallocation> {
        if !controller.has_dataset_management && self.range_blocks.is_none() {
            return None;
        }
        let range_blocks = self.range_blocks.unwrap_or(u32::MAX);
        Some(Deallocation {
            ranges: self.ranges.unwrap_or(MAX_RANGES).min(MAX_RANGES),
            range_blocks,
            total_blocks: self.total_blocks.unwrap_or(u64::MAX),
        })
    }

    /// Limit of blocks of one write zeroes command of `controller`; `None` if the controller does
    /// not support the command. Without a limit of its own the command has that of transfers: some
    /// controllers need this, and Linux does the same.
    pub fn zero_blocks(&self, controller: &Controller, block_shift: u32) -> Option<u32> {
        let bytes = match self.write_zeroes_bytes {
            None if !controller.has_write_zeroes => return None,
            None => controller.max_transfer,
            limit => limit,
        };
        Some(bytes.map_or(MAX_BLOCKS, |bytes| (bytes >> block_shift).clamp(1, MAX_BLOCKS)))
    }
}

/// Limits of one dataset management command that deallocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deallocation {
    /// Ranges, 1 to 256.
    pub ranges: u32,
    /// Blocks of each range, at least 1.
    pub range_blocks: u32,
    /// Blocks of all ranges together, at least 1.
    pub total_blocks: u64,
}

/// Properties of a namespace, from Identify Namespace (NVM 4.1.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Size in blocks.
    pub blocks: u64,
    /// Block size as a power of two, 9 to 16.
    pub block_shift: u32,
    /// Index of the format in use, for [`crate::zns::ZonedNamespace::parse`].
    pub format: usize,
    /// The namespace refuses writes at present.
    pub is_write_protected: bool,
    /// A write zeroes that may deallocate does so, and deallocated blocks read as zeroes.
    pub zeroes_by_deallocating: bool,
    /// Aligned writes of this many blocks cost no read; 1 if unknown.
    pub preferred_write_blocks: u32,
    /// Aligned deallocations of this many blocks are effective; 1 if unknown.
    pub preferred_deallocate_blocks: u32,
    /// The fastest write size in blocks; 0 if unknown.
    pub optimal_write_blocks: u32,
}

impl Namespace {
    /// Reads the structure.
    ///
    /// # Errors
    /// If the format is not supported: blocks below 512 bytes or above 64 KiB, or with metadata.
    pub fn parse(data: &IdentifyData) -> Result<Namespace, Malformed> {
        let (format, block_shift) = format(data)?;
        let blocks = u64_at(data, 0);
        if blocks > u64::MAX >> 1 >> block_shift {
            return Err(Malformed::Size(blocks));
        }
        // NSFEAT bit 4: the fields of the preferences below are valid. They count from 0.
        let has_preferences = data[24] & 1 << 4 != 0;
        let preference = |at| if has_preferences { u32::from(u16_at(data, at)) + 1 } else { 1 };
        Ok(Namespace {
            blocks,
            block_shift,
            format,
            is_write_protected: data[99] & 1 != 0,
            // DLFEAT: bit 3 is support of Deallocate in write zeroes, bits 2:0 the content of
            // deallocated blocks.
            zeroes_by_deallocating: data[33] & 0b1111 == 0b1001,
            preferred_write_blocks: preference(64),
            preferred_deallocate_blocks: preference(68),
            optimal_write_blocks: if has_preferences { preference(72) } else { 0 },
        })
    }
}

/// The format in use: its index, and its block size as a power of two.
fn format(data: &IdentifyData) -> Result<(usize, u32), Malformed> {
    let count = usize::from(data[25]) + 1;
    let flbas = usize::from(data[26]);
    // Bits 6:5 are used only if bits 3:0 cannot name all formats.
    let index = if count > 16 { flbas & 0xf | (flbas & 0x60) >> 1 } else { flbas & 0xf };
    if index >= count {
        return Err(Malformed::NoSuchFormat { index, count });
    }
    let at = 128 + 4 * index;
    let (metadata, shift) = (u16_at(data, at), data[at + 2]);
    if metadata != 0 {
        return Err(Malformed::Metadata { index, bytes: metadata });
    }
    if !(9..=16).contains(&shift) {
        return Err(Malformed::BlockSize { index, shift });
    }
    Ok((index, shift.into()))
}

/// Whether the Commands Supported and Effects log (Base 5.16.1.6) lists the I/O command `opcode`.
pub fn supports_io_command(log: &[u8; 4096], opcode: u8) -> bool {
    log[1024 + 4 * usize::from(opcode)] & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A namespace of `blocks` blocks in format 0 of one.
    fn namespace(blocks: u64, shift: u8) -> IdentifyData {
        let mut data = [0; 4096];
        data[..8].copy_from_slice(&blocks.to_le_bytes());
        data[128 + 2] = shift;
        data
    }

    #[test]
    fn size_and_format_are_read_where_the_specification_has_them() {
        let mut data = namespace(0x1_0000_0000, 12);
        data[99] = 1;
        data[33] = 0b1001;
        data[24] = 1 << 4;
        data[64..66].copy_from_slice(&7u16.to_le_bytes());
        data[68..70].copy_from_slice(&15u16.to_le_bytes());
        data[72..74].copy_from_slice(&31u16.to_le_bytes());
        let expected = Namespace {
            blocks: 0x1_0000_0000,
            block_shift: 12,
            format: 0,
            is_write_protected: true,
            zeroes_by_deallocating: true,
            preferred_write_blocks: 8,
            preferred_deallocate_blocks: 16,
            optimal_write_blocks: 32,
        };
        assert_eq!(Namespace::parse(&data), Ok(expected));
    }

    #[test]
    fn the_format_in_use_has_six_bits_when_there_are_many() {
        let mut data = namespace(8, 9);
        data[25] = 39;
        data[26] = 0x40 | 5; // bits 6:5 = 2, so format 37
        data[128 + 4 * 37 + 2] = 12;
        let found = Namespace::parse(&data).unwrap();
        assert_eq!((found.format, found.block_shift), (37, 12));
        data[25] = 15;
        data[128 + 4 * 5 + 2] = 10;
        assert_eq!(Namespace::parse(&data).unwrap().format, 5);
        data[25] = 4;
        assert_eq!(Namespace::parse(&data), Err(Malformed::NoSuchFormat { index: 5, count: 5 }));
    }

    #[test]
    fn formats_that_cannot_be_served_are_named() {
        let mut data = namespace(8, 9);
        data[128] = 8;
        assert_eq!(Namespace::parse(&data), Err(Malformed::Metadata { index: 0, bytes: 8 }));
        assert_eq!(Namespace::parse(&namespace(8, 8)), Err(Malformed::BlockSize { index: 0, shift: 8 }));
        assert_eq!(
            Namespace::parse(&namespace(8, 64)).unwrap_err().to_string(),
            "LBA format 0 has blocks of 2^64 bytes; 2^9 to 2^16 are supported"
        );
        assert_eq!(Namespace::parse(&namespace(u64::MAX, 9)), Err(Malformed::Size(u64::MAX)));
    }

    #[test]
    fn the_command_set_is_found_behind_other_descriptors() {
        let mut list = [0; 4096];
        list[..4].copy_from_slice(&[3, 16, 0, 0]);
        list[20..25].copy_from_slice(&[4, 1, 0, 0, 2]);
        assert_eq!(CommandSet::of_descriptors(&list), Ok(CommandSet::Zoned));
        list[24] = 1;
        assert_eq!(CommandSet::of_descriptors(&list), Err(Malformed::CommandSet(1)));
        list[21] = 0;
        assert_eq!(CommandSet::of_descriptors(&list), Ok(CommandSet::Nvm));
        assert_eq!(CommandSet::of_descriptors(&[0xff; 4096]), Ok(CommandSet::Nvm));
    }

    #[test]
    fn limits_count_in_pages_and_zero_is_none() {
        let mut data = [0; 4096];
        assert_eq!(Controller::parse(&data).max_transfer, None);
        data[77] = 7;
        data[520] = 0b1100;
        data[525] = 1;
        let controller = Controller::parse(&data);
        assert_eq!(controller.max_transfer, Some(512 << 10));
        assert!(controller.has_dataset_management && controller.has_write_zeroes);
        assert!(controller.has_volatile_cache);
        for unlimited in [20, 31, 32, 255] {
            assert_eq!(pages(unlimited), None, "2^{unlimited} pages");
        }
        assert_eq!(pages(19), Some(1 << 31));
    }

    #[test]
    fn a_limit_of_its_own_implies_that_a_command_exists() {
        let none = Controller {
            max_transfer: Some(1 << 20),
            has_dataset_management: false,
            has_write_zeroes: false,
            has_volatile_cache: false,
        };
        let mut data = [0; 4096];
        let limits = CommandLimits::parse(&data);
        assert_eq!((limits.deallocation(&none), limits.zero_blocks(&none, 9)), (None, None));
        data[1] = 4;
        data[3] = 2;
        data[4] = 100;
        data[8] = 150;
        let limits = CommandLimits::parse(&data);
        let expected = Deallocation { ranges: 2, range_blocks: 100, total_blocks: 150 };
        assert_eq!(limits.deallocation(&none), Some(expected));
        assert_eq!(limits.zero_blocks(&none, 12), Some(16));
        let able = Controller { has_write_zeroes: true, has_dataset_management: true, ..none };
        assert_eq!(CommandLimits::default().zero_blocks(&able, 9), Some(2048));
        let any = Controller { max_transfer: None, ..able };
        assert_eq!(CommandLimits::default().zero_blocks(&any, 9), Some(1 << 16));
        let all = CommandLimits::default().deallocation(&able).unwrap();
        assert_eq!((all.ranges, all.range_blocks), (256, u32::MAX));
    }

    #[test]
    fn the_effects_log_has_io_commands_in_its_second_quarter() {
        let mut log = [0; 4096];
        log[1524] = 1;
        assert!(supports_io_command(&log, crate::command::opcode::ZONE_APPEND));
        assert!(!supports_io_command(&log, crate::command::opcode::ZONE_MANAGEMENT_SEND));
        assert!(!supports_io_command(&log, 0xff));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(seed in proptest::collection::vec(any::<u8>(), 512), at in 0usize..8) {
            let mut data = [0; 4096];
            for (i, byte) in data.iter_mut().enumerate() {
                *byte = seed[(i * (at + 1)) % seed.len()];
            }
            let controller = Controller::parse(&data);
            let limits = CommandLimits::parse(&data);
            if let Ok(namespace) = Namespace::parse(&data) {
                prop_assert!((9..=16).contains(&namespace.block_shift));
                prop_assert!(namespace.blocks << namespace.block_shift >> namespace.block_shift == namespace.blocks);
                if let Some(blocks) = limits.zero_blocks(&controller, namespace.block_shift) {
                    prop_assert!((1..=MAX_BLOCKS).contains(&blocks));
                }
            }
            if let Some(d) = limits.deallocation(&controller) {
                prop_assert!((1..=256).contains(&d.ranges) && d.range_blocks > 0 && d.total_blocks > 0);
            }
            let _ = CommandSet::of_descriptors(&data);
        }
    }
}
