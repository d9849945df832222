//! Get LBA Status: the command, and the list that it returns (NVM 1.1, 4.2.1).
//!
//! Revision 1.0 has the two actions that report potentially unrecoverable blocks. Revision 1.1 adds
//! the action that reports allocated ones.

use crate::command::{Command, admin};
use crate::wire::{put, u32_at, u64_at};

/// Bytes of a list before its first descriptor.
pub const HEADER_BYTES: usize = 8;
/// Bytes of each descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;
/// Bytes of the LBA Status Information log page without entries (NVM 4.1.4.5).
pub const LOG_HEADER_BYTES: usize = 16;

/// CMPC: the list is full, and more blocks of the range may belong into it.
const INCOMPLETE: u8 = 1;
/// CMPC: the list contains all blocks of the range that belong into it.
const COMPLETE: u8 = 2;
/// LBARS: at least one block of the descriptor is allocated.
const ALLOCATED: u8 = 2;
/// Blocks of the longest descriptor: the field has 32 bits and counts from 0.
const MAX_DESCRIPTOR_BLOCKS: u64 = 1 << 32;

/// The blocks that a list reports: ATYPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    /// Blocks that are not deallocated.
    Allocated = 0x02,
    /// Potentially unrecoverable blocks, also those that a scan finds.
    Scan = 0x10,
    /// Potentially unrecoverable blocks that the controller knows.
    Tracked = 0x11,
}

impl Action {
    fn parse(number: u8) -> Option<Action> {
        [Action::Allocated, Action::Scan, Action::Tracked].into_iter().find(|action| *action as u8 == number)
    }
}

/// The dwords of a Get LBA Status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetLbaStatus {
    /// The blocks that the list reports.
    pub action: Action,
    /// First block of the range.
    pub lba: u64,
    /// Number of blocks; 0 for all blocks up to the end of the namespace.
    pub blocks: u16,
    /// Limit of bytes of the list, a multiple of 4.
    pub bytes: u64,
}

impl GetLbaStatus {
    /// Parses command dwords 10 to 13. `None` if the action is unknown. The caller checks whether
    /// the range lies in the namespace.
    pub fn parse(cdw: &[u32; 6]) -> Option<GetLbaStatus> {
        Some(GetLbaStatus {
            action: Action::parse((cdw[3] >> 24) as u8)?,
            lba: u64::from(cdw[0]) | u64::from(cdw[1]) << 32,
            blocks: cdw[3] as u16,
            bytes: (u64::from(cdw[2]) + 1) * 4,
        })
    }

    /// The command.
    ///
    /// # Panics
    /// If `bytes` is not a multiple of 4, is 0 or exceeds 2^34.
    pub fn command(&self, nsid: u32) -> Command {
        let is_valid = self.bytes.is_multiple_of(4) && (4..=1 << 34).contains(&self.bytes);
        assert!(is_valid, "{} bytes", self.bytes);
        let range = u32::from(self.blocks) | (self.action as u32) << 24;
        let cdw = [self.lba as u32, (self.lba >> 32) as u32, (self.bytes / 4 - 1) as u32, range, 0, 0];
        Command { opcode: admin::GET_LBA_STATUS, nsid, cdw }
    }
}

/// Blocks with one status, from `lba` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// The LBA Status Descriptor List of allocated blocks. A list without descriptors is that of every
/// action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LbaStatusList {
    /// The ranges, in order.
    pub ranges: Vec<LbaRange>,
    /// Whether no further block of the requested range is allocated.
    pub is_complete: bool,
}

impl LbaStatusList {
    /// An empty list that is complete.
    pub const fn new() -> LbaStatusList {
        LbaStatusList { ranges: Vec::new(), is_complete: true }
    }

    /// Appends blocks, which follow those of the list. Blocks that adjoin the last range extend it.
    /// A list of `limit` descriptors that cannot take the blocks is incomplete from then on.
    pub fn push(&mut self, range: LbaRange, limit: usize) {
        let LbaRange { mut lba, mut blocks } = range;
        if let Some(last) = self.ranges.last_mut().filter(|last| last.lba + last.blocks == lba) {
            let more = blocks.min(MAX_DESCRIPTOR_BLOCKS - last.blocks);
            last.blocks += more;
            (lba, blocks) = (lba + more, blocks - more);
        }
        while blocks > 0 && self.is_complete {
            self.is_complete = self.ranges.len() < limit;
            if self.is_complete {
                let some = blocks.min(MAX_DESCRIPTOR_BLOCKS);
                self.ranges.push(LbaRange { lba, blocks: some });
                (lba, blocks) = (lba + some, blocks - some);
            }
        }
    }

    /// Encodes the list.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = vec![0; HEADER_BYTES + self.ranges.len() * DESCRIPTOR_BYTES];
        put(&mut data, 0, (self.ranges.len() as u32).to_le_bytes());
        data[4] = if self.is_complete { COMPLETE } else { INCOMPLETE };
        for (descriptor, range) in data[HEADER_BYTES..].chunks_exact_mut(DESCRIPTOR_BYTES).zip(&self.ranges) {
            put(descriptor, 0, range.lba.to_le_bytes());
            put(descriptor, 8, ((range.blocks - 1) as u32).to_le_bytes());
            descriptor[13] = ALLOCATED;
        }
        data
    }

    /// Parses a list. `None` if it is shorter than its header says.
    pub fn parse(data: &[u8]) -> Option<LbaStatusList> {
        let (header, descriptors) = data.split_at_checked(HEADER_BYTES)?;
        let len = (u32_at(header, 0) as usize).checked_mul(DESCRIPTOR_BYTES)?;
        let range = |descriptor: &[u8]| LbaRange {
            lba: u64_at(descriptor, 0),
            blocks: u64::from(u32_at(descriptor, 8)) + 1,
        };
        let descriptors = descriptors.get(..len)?.chunks_exact(DESCRIPTOR_BYTES);
        Some(LbaStatusList { ranges: descriptors.map(range).collect(), is_complete: header[4] == COMPLETE })
    }
}

impl Default for LbaStatusList {
    fn default() -> Self {
        LbaStatusList::new()
    }
}

/// The LBA Status Information log page of a controller that knows no potentially unrecoverable
/// block (NVM 4.1.4.5).
pub fn empty_log() -> [u8; LOG_HEADER_BYTES] {
    let mut page = [0; LOG_HEADER_BYTES];
    put(&mut page, 0, (LOG_HEADER_BYTES as u32).to_le_bytes());
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(lba: u64, blocks: u64) -> LbaRange {
        LbaRange { lba, blocks }
    }

    #[test]
    fn fields_lie_where_the_specification_has_them() {
        let get = GetLbaStatus { action: Action::Tracked, lba: 0x1_2345_6789, blocks: 0x42, bytes: 56 };
        let command = get.command(3);
        assert_eq!((command.opcode, command.nsid), (0x86, 3));
        assert_eq!(command.cdw, [0x2345_6789, 1, 13, 0x1100_0042, 0, 0]);
        assert_eq!(GetLbaStatus::parse(&[0, 0, u32::MAX, 2 << 24, 0, 0]).unwrap().bytes, 1 << 34);
        for action in [0, 1, 3, 0x0f, 0x12, 0xff] {
            assert_eq!(GetLbaStatus::parse(&[0, 0, 1, action << 24, 0, 0]), None);
        }
        let list = LbaStatusList { ranges: vec![range(0x1_0000_0002, 3)], is_complete: false };
        assert_eq!(list.encode(), [1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0, 0]);
        assert_eq!(LbaStatusList::new().encode(), [0, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(empty_log(), [16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_truncated_list_is_refused() {
        let list = LbaStatusList { ranges: vec![range(1, 1), range(3, 1)], is_complete: true }.encode();
        assert!((0..list.len()).all(|len| LbaStatusList::parse(&list[..len]).is_none()));
        assert_eq!(LbaStatusList::parse(&[list, vec![0; 5]].concat()).unwrap().ranges.len(), 2);
    }

    #[test]
    fn a_full_list_takes_only_blocks_that_adjoin_its_last_range() {
        let mut list = LbaStatusList::new();
        for (lba, blocks) in [(0, 8), (8, 8), (32, 1), (33, 7), (64, 1), (65, 1)] {
            list.push(range(lba, blocks), 2);
        }
        assert_eq!(list, LbaStatusList { ranges: vec![range(0, 16), range(32, 8)], is_complete: false });
        let mut list = LbaStatusList::new();
        list.push(range(0, 1), 0);
        assert_eq!(list, LbaStatusList { ranges: vec![], is_complete: false });
    }

    #[test]
    fn a_range_that_no_descriptor_can_hold_takes_several() {
        let mut list = LbaStatusList::new();
        list.push(range(7, MAX_DESCRIPTOR_BLOCKS - 1), 9);
        list.push(range(MAX_DESCRIPTOR_BLOCKS + 6, MAX_DESCRIPTOR_BLOCKS + 2), 9);
        let parts = [MAX_DESCRIPTOR_BLOCKS, MAX_DESCRIPTOR_BLOCKS, 1];
        assert!(list.ranges.iter().map(|range| range.blocks).eq(parts) && list.is_complete);
        assert_eq!(LbaStatusList::parse(&list.encode()), Some(list));
    }

    proptest! {
        #[test]
        fn commands_and_lists_are_read_as_they_were_written(
            lba: u64, blocks: u16, dwords in 1..=1_u64 << 32, action in 0..3_usize, is_complete: bool,
            ranges in prop::collection::vec((any::<u64>(), 1..=1_u64 << 32), 0..4),
        ) {
            let action = [Action::Allocated, Action::Scan, Action::Tracked][action];
            let get = GetLbaStatus { action, lba, blocks, bytes: dwords * 4 };
            prop_assert_eq!(GetLbaStatus::parse(&get.command(1).cdw), Some(get));
            let ranges = ranges.into_iter().map(|(lba, blocks)| range(lba, blocks)).collect();
            let list = LbaStatusList { ranges, is_complete };
            prop_assert_eq!(LbaStatusList::parse(&list.encode()), Some(list));
        }
    }
}
