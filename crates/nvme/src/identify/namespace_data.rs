//! The structure of Identify Namespace, which a target encodes and a host parses.

use crate::wire::{array_at, put, u16_at, u32_at, u64_at};
use crate::{IDENTIFY_BYTES, IdentifyData};

/// Bits of [`NamespaceData::features`] (NSFEAT).
pub mod nsfeat {
    /// Space is allocated on write (thin).
    pub const THIN: u8 = 1;
    /// NAWUN, NAWUPF and NACWU apply to this namespace.
    pub const ATOMICS: u8 = 1 << 1;
    /// Reads of deallocated blocks can fail with an error.
    pub const DEALLOCATED_ERROR: u8 = 1 << 2;
    /// NGUID and EUI64 are never reused.
    pub const UNIQUE_IDS: u8 = 1 << 3;
    /// NPWG, NPWA, NPDG, NPDA and NOWS are valid.
    pub const PREFERENCES: u8 = 1 << 4;
}

/// Bits of [`NamespaceData::deallocation`] (DLFEAT).
pub mod dlfeat {
    /// Deallocated blocks read as zeroes (value 1 of bits 2:0).
    pub const READS_ZEROES: u8 = 1;
    /// A write zeroes may deallocate.
    pub const WRITE_ZEROES: u8 = 1 << 3;
}

/// The fields of Identify Namespace (NVM 4.1.5.1), with only the format in use.
/// [`super::Namespace`] is the short form. All other fields are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceData {
    /// NSZE: blocks.
    pub blocks: u64,
    /// NCAP: blocks that can be in use at once.
    pub capacity: u64,
    /// NUSE: blocks that are in use.
    pub used: u64,
    /// NSFEAT; [`nsfeat`].
    pub features: u8,
    /// NMIC: bit 0: several controllers can have the namespace.
    pub paths: u8,
    /// RESCAP: supported reservations; 0 for none.
    pub reservations: u8,
    /// DLFEAT; [`dlfeat`].
    pub deallocation: u8,
    /// NAWUN: blocks of the longest write that is atomic in normal operation, counted from 0.
    pub atomic_blocks: u16,
    /// NAWUPF: blocks of the longest write that is atomic at a power failure, counted from 0.
    pub atomic_power_fail_blocks: u16,
    /// NOIOB: boundary that transfers should not cross, in blocks; 0 for none.
    pub optimal_boundary_blocks: u16,
    /// NPWG: preferred write granularity in blocks, counted from 0.
    pub write_granularity: u16,
    /// NPWA: preferred write alignment, likewise.
    pub write_alignment: u16,
    /// NPDG: preferred deallocate granularity, likewise.
    pub deallocate_granularity: u16,
    /// NPDA: preferred deallocate alignment, likewise.
    pub deallocate_alignment: u16,
    /// NOWS: optimal write size, likewise.
    pub optimal_write: u16,
    /// MSSRL: longest source range of a copy, in blocks.
    pub copy_range_blocks: u16,
    /// MCL: limit of the blocks of a copy.
    pub copy_blocks: u32,
    /// MSRC: limit of the source ranges of a copy, counted from 0.
    pub copy_ranges: u8,
    /// ANAGRPID: the group that determines its access state; 0 for none.
    pub ana_group: u32,
    /// NSATTR bit 0: the namespace refuses writes at present.
    pub is_write_protected: bool,
    /// NGUID; all zero for none.
    pub nguid: [u8; 16],
    /// EUI64; all zero for none.
    pub eui64: [u8; 8],
    /// LBADS of LBAF0: block size as a power of two, at least 9.
    pub block_shift: u8,
}

impl NamespaceData {
    /// Reads the structure, as a target with one format writes it.
    pub fn parse(data: &IdentifyData) -> NamespaceData {
        NamespaceData {
            blocks: u64_at(data, 0),
            capacity: u64_at(data, 8),
            used: u64_at(data, 16),
            features: data[24],
            paths: data[30],
            reservations: data[31],
            deallocation: data[33],
            atomic_blocks: u16_at(data, 34),
            atomic_power_fail_blocks: u16_at(data, 36),
            optimal_boundary_blocks: u16_at(data, 46),
            write_granularity: u16_at(data, 64),
            write_alignment: u16_at(data, 66),
            deallocate_granularity: u16_at(data, 68),
            deallocate_alignment: u16_at(data, 70),
            optimal_write: u16_at(data, 72),
            copy_range_blocks: u16_at(data, 74),
            copy_blocks: u32_at(data, 76),
            copy_ranges: data[80],
            ana_group: u32_at(data, 92),
            is_write_protected: data[99] & 1 != 0,
            nguid: array_at(data, 104),
            eui64: array_at(data, 120),
            block_shift: data[130],
        }
    }

    /// Writes the structure: one format, number 0, without metadata.
    pub fn encode(&self) -> IdentifyData {
        let mut data = [0; IDENTIFY_BYTES];
        put(&mut data, 0, self.blocks.to_le_bytes());
        put(&mut data, 8, self.capacity.to_le_bytes());
        put(&mut data, 16, self.used.to_le_bytes());
        data[24] = self.features;
        data[30] = self.paths;
        data[31] = self.reservations;
        data[33] = self.deallocation;
        put(&mut data, 34, self.atomic_blocks.to_le_bytes());
        put(&mut data, 36, self.atomic_power_fail_blocks.to_le_bytes());
        put(&mut data, 46, self.optimal_boundary_blocks.to_le_bytes());
        put(&mut data, 64, self.write_granularity.to_le_bytes());
        put(&mut data, 66, self.write_alignment.to_le_bytes());
        put(&mut data, 68, self.deallocate_granularity.to_le_bytes());
        put(&mut data, 70, self.deallocate_alignment.to_le_bytes());
        put(&mut data, 72, self.optimal_write.to_le_bytes());
        put(&mut data, 74, self.copy_range_blocks.to_le_bytes());
        put(&mut data, 76, self.copy_blocks.to_le_bytes());
        data[80] = self.copy_ranges;
        put(&mut data, 92, self.ana_group.to_le_bytes());
        data[99] = self.is_write_protected.into();
        put(&mut data, 104, self.nguid);
        put(&mut data, 120, self.eui64);
        data[130] = self.block_shift;
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Namespace;
    use proptest::prelude::*;

    #[test]
    fn a_host_parses_the_structure_of_a_target() {
        let data = NamespaceData {
            blocks: 0x1_0000_0000,
            capacity: 0x1_0000_0000,
            features: nsfeat::THIN | nsfeat::PREFERENCES,
            deallocation: dlfeat::READS_ZEROES | dlfeat::WRITE_ZEROES,
            write_granularity: 7,
            deallocate_granularity: 15,
            optimal_write: 31,
            copy_range_blocks: 0x1122,
            copy_blocks: 0x3344_5566,
            copy_ranges: 255,
            is_write_protected: true,
            block_shift: 12,
            nguid: [7; 16],
            ..NamespaceData::default()
        };
        let bytes = data.encode();
        assert_eq!(bytes[24..27], [0b1_0001, 0, 0]);
        assert_eq!(bytes[128..132], [0, 0, 12, 0]);
        assert_eq!(bytes[72..82], [31, 0, 0x22, 0x11, 0x66, 0x55, 0x44, 0x33, 255, 0]);
        assert_eq!(bytes[103..121], [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
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
        assert_eq!(Namespace::parse(&bytes), Ok(expected));
    }

    proptest! {
        #[test]
        fn any_structure_that_is_read_is_written_the_same(seed in proptest::collection::vec(any::<u8>(), 4096)) {
            let namespace = NamespaceData::parse(&seed.try_into().unwrap());
            prop_assert_eq!(NamespaceData::parse(&namespace.encode()), namespace);
        }
    }
}
