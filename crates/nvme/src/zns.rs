//! Zoned namespaces: their properties (ZNS 4.1.5) and the reports of their zones (ZNS 3.4.2).

use crate::identify::{Namespace, pages};
use crate::wire::{u32_at, u64_at};
use crate::{IdentifyData, Malformed};

/// Bytes before the first descriptor of a zone report.
pub const REPORT_HEADER_BYTES: usize = 64;
/// Bytes of each descriptor.
pub const DESCRIPTOR_BYTES: usize = 64;

/// Properties of a zoned namespace, from Identify Namespace of that command set (ZNS 4.1.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonedNamespace {
    /// Size of a zone in blocks.
    pub zone_blocks: u64,
    /// Limit of zones that are open or closed at a time; 0: unlimited.
    pub max_active: u32,
    /// Limit of zones that are open at a time; 0: unlimited.
    pub max_open: u32,
}

impl ZonedNamespace {
    /// Parses the structure of the namespace with the properties `namespace`.
    ///
    /// # Errors
    /// If the zone size is 0, or longer than can be addressed.
    pub fn parse(data: &IdentifyData, namespace: &Namespace) -> Result<ZonedNamespace, Malformed> {
        // A namespace has at most 64 formats, so this ends at byte 3840.
        let zone_blocks = u64_at(data, 2816 + 16 * namespace.format);
        if zone_blocks == 0 || zone_blocks > u64::MAX >> 1 >> namespace.block_shift {
            return Err(Malformed::ZoneSize(zone_blocks));
        }
        Ok(ZonedNamespace {
            zone_blocks,
            // Both count from 0; all ones mean no limit.
            max_active: u32_at(data, 4).wrapping_add(1),
            max_open: u32_at(data, 8).wrapping_add(1),
        })
    }
}

/// Longest zone append in bytes (ZASL of Identify Controller of the zoned command set, ZNS
/// 4.1.5.2), computed with pages of the smallest size. `None`: the limit of transfers applies.
pub fn append_limit(data: &IdentifyData) -> Option<u32> {
    pages(data[0])
}

/// A zone's state (ZNS 2.1.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ZoneState {
    /// No block is written.
    Empty = 0x1,
    /// Opened by a write.
    ImplicitlyOpened = 0x2,
    /// Opened by command.
    ExplicitlyOpened = 0x3,
    /// Written in part, not open.
    Closed = 0x4,
    /// Can only be read.
    ReadOnly = 0xd,
    /// Can only be read or reset.
    Full = 0xe,
    /// Cannot be used.
    Offline = 0xf,
}

impl ZoneState {
    fn from_bits(bits: u8) -> Option<ZoneState> {
        use ZoneState::{Closed, Empty, ExplicitlyOpened, Full, ImplicitlyOpened, Offline, ReadOnly};
        [Empty, ImplicitlyOpened, ExplicitlyOpened, Closed, ReadOnly, Full, Offline]
            .into_iter()
            .find(|state| *state as u8 == bits)
    }

    /// Whether the zone has a next block to write, so that its write pointer is valid.
    pub const fn is_writable(self) -> bool {
        use ZoneState::{Closed, Empty, ExplicitlyOpened, ImplicitlyOpened};
        matches!(self, Empty | ImplicitlyOpened | ExplicitlyOpened | Closed)
    }
}

/// One zone of a report. All sizes are blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneDescriptor {
    /// First block.
    pub start: u64,
    /// Number of blocks that can hold data.
    pub capacity: u64,
    /// The next block to write; the zone's end if it cannot be written.
    pub write_pointer: u64,
    /// Its state.
    pub state: ZoneState,
    /// The device recommends a reset.
    pub is_reset_recommended: bool,
}

/// Number of descriptors after the header of a report.
///
/// # Errors
/// If `report` is shorter than a header, or too short for that number.
pub fn report_count(report: &[u8]) -> Result<usize, Malformed> {
    let room = report.len().saturating_sub(REPORT_HEADER_BYTES) / DESCRIPTOR_BYTES;
    let value = u64_of(report, 0).unwrap_or(0);
    match usize::try_from(value) {
        Ok(count) if count <= room => Ok(count),
        _ => Err(Malformed::Report { what: "the number of zones", value }),
    }
}

/// Parses descriptor `index` of a report, which must be that of the zone at block `start`. Zones
/// are `zone_blocks` long.
///
/// # Errors
/// If it describes another zone, or has invalid fields.
pub fn report_zone(
    report: &[u8],
    index: usize,
    start: u64,
    zone_blocks: u64,
) -> Result<ZoneDescriptor, Malformed> {
    let wrong = |what, value| Malformed::Report { what, value };
    let at = REPORT_HEADER_BYTES + DESCRIPTOR_BYTES * index;
    let field = |skip| u64_of(report, at + skip).ok_or(wrong("the length", report.len() as u64));
    let (flags, capacity, first, pointer) = (field(0)?, field(8)?, field(16)?, field(24)?);
    if flags & 0xf != 2 {
        return Err(wrong("the zone type", flags & 0xf)); // 2: sequential write required, the only one
    }
    if first != start {
        return Err(wrong("the zone start", first));
    }
    if capacity > zone_blocks {
        return Err(wrong("the zone capacity", capacity));
    }
    let state = flags >> 12 & 0xf;
    let state = ZoneState::from_bits(state as u8).ok_or(wrong("the zone state", state))?;
    let end = start.checked_add(zone_blocks).ok_or(wrong("the zone start", first))?;
    let write_pointer = if state.is_writable() { pointer } else { end };
    if !(start..=end).contains(&write_pointer) {
        return Err(wrong("the write pointer", pointer));
    }
    let is_reset_recommended = flags >> 16 & 1 << 2 != 0;
    Ok(ZoneDescriptor { start, capacity, write_pointer, state, is_reset_recommended })
}

fn u64_of(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn report(zones: &[[u64; 4]]) -> Vec<u8> {
        let mut report = vec![0; REPORT_HEADER_BYTES];
        report[..8].copy_from_slice(&(zones.len() as u64).to_le_bytes());
        for fields in zones {
            report.extend(fields.iter().flat_map(|f| f.to_le_bytes()));
            report.extend([0; 32]);
        }
        report
    }

    /// Type sequential write required, `state`, attributes.
    fn flags(state: u64, attributes: u64) -> u64 {
        2 | state << 12 | attributes << 16
    }

    #[test]
    fn a_report_is_read_zone_by_zone() {
        let report = report(&[[flags(2, 4), 60, 128, 130], [flags(0xe, 1), 60, 192, u64::MAX]]);
        assert_eq!(report_count(&report), Ok(2));
        let first = ZoneDescriptor {
            start: 128,
            capacity: 60,
            write_pointer: 130,
            state: ZoneState::ImplicitlyOpened,
            is_reset_recommended: true,
        };
        assert_eq!(report_zone(&report, 0, 128, 64), Ok(first));
        let second = report_zone(&report, 1, 192, 64).unwrap();
        assert_eq!((second.state, second.write_pointer), (ZoneState::Full, 256));
        assert!(!second.is_reset_recommended);
    }

    #[test]
    fn a_report_of_other_zones_than_requested_is_refused() {
        let what = |zone: [u64; 4], start| match report_zone(&report(&[zone]), 0, start, 64) {
            Err(Malformed::Report { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(what([flags(1, 0), 64, 64, 64], 0), "the zone start");
        assert_eq!(what([flags(1, 0), 65, 0, 0], 0), "the zone capacity");
        assert_eq!(what([flags(1, 0), 64, 0, 65], 0), "the write pointer");
        assert_eq!(what([flags(5, 0), 64, 0, 0], 0), "the zone state");
        assert_eq!(what([1 | 1 << 12, 64, 0, 0], 0), "the zone type");
        assert_eq!(what([flags(1, 0), 64, u64::MAX, 0], u64::MAX), "the zone start");
        assert!(report_zone(&report(&[]), 0, 0, 64).is_err());
        let mut long = report(&[[flags(1, 0), 64, 0, 0]]);
        long[0] = 2;
        assert!(report_count(&long).is_err());
    }

    #[test]
    fn zones_of_the_format_in_use_are_meant_and_limits_count_from_zero() {
        let mut data = [0; 4096];
        let mut namespace = Namespace {
            blocks: 0,
            block_shift: 12,
            format: 3,
            is_write_protected: false,
            zeroes_by_deallocating: false,
            preferred_write_blocks: 1,
            preferred_deallocate_blocks: 1,
            optimal_write_blocks: 0,
        };
        data[2816 + 48..][..8].copy_from_slice(&4096u64.to_le_bytes());
        data[4..8].fill(0xff);
        data[8] = 13;
        let zoned = ZonedNamespace::parse(&data, &namespace).unwrap();
        assert_eq!(zoned, ZonedNamespace { zone_blocks: 4096, max_active: 0, max_open: 14 });
        namespace.format = 0;
        assert_eq!(ZonedNamespace::parse(&data, &namespace), Err(Malformed::ZoneSize(0)));
        assert_eq!(append_limit(&data), None);
        data[0] = 5;
        assert_eq!(append_limit(&data), Some(128 << 10));
    }

    proptest! {
        #[test]
        fn any_report_is_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..400), start in any::<u64>(), len in 1u64..u64::MAX,
        ) {
            let _ = report_count(&bytes);
            for index in 0..8 {
                if let Ok(zone) = report_zone(&bytes, index, start, len) {
                    prop_assert!(zone.start == start && zone.write_pointer - start <= len);
                }
            }
        }

        #[test]
        fn any_write_pointer_in_the_zone_is_kept(start in 0u64..1 << 40, len in 1u64..1 << 30, at in any::<u64>()) {
            let pointer = start + at % (len + 1);
            let report = report(&[[flags(4, 0), len, start, pointer]]);
            prop_assert_eq!(report_zone(&report, 0, start, len).unwrap().write_pointer, pointer);
        }
    }
}
