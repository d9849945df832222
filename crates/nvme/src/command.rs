//! Commands (Base 3.3.3.1): opcode, namespace, and the six command dwords that depend on the
//! opcode. The transport adds identifier and data pointer.

use crate::wire::{u16_at, u32_at, u64_at};
use crate::{MAX_BLOCKS, MAX_RANGES};

/// Opcodes of the NVM command set (NVM 3.2) and of the zoned one (ZNS 3.4).
pub mod opcode {
    /// NVM 3.2 Flush (Base 7.1).
    pub const FLUSH: u8 = 0x00;
    /// NVM 3.2.6.
    pub const WRITE: u8 = 0x01;
    /// NVM 3.2.4.
    pub const READ: u8 = 0x02;
    /// NVM 3.2.8.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// NVM 3.2.3.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// ZNS 3.4.3.
    pub const ZONE_MANAGEMENT_SEND: u8 = 0x79;
    /// ZNS 3.4.2.
    pub const ZONE_MANAGEMENT_RECEIVE: u8 = 0x7a;
    /// ZNS 3.4.1.
    pub const ZONE_APPEND: u8 = 0x7d;
    /// NVM 3.2.1.
    pub const COMPARE: u8 = 0x05;
    /// NVM 3.2.7.
    pub const VERIFY: u8 = 0x0c;
    /// Base 7.3.
    pub const RESERVATION_REGISTER: u8 = 0x0d;
    /// Base 7.5.
    pub const RESERVATION_REPORT: u8 = 0x0e;
    /// Base 7.2.
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    /// Base 7.4.
    pub const RESERVATION_RELEASE: u8 = 0x15;
    /// NVM 3.2.2.
    pub const COPY: u8 = 0x19;
}

/// Opcodes of admin commands (Base 5).
pub mod admin {
    /// Base 5.16.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Base 5.17.
    pub const IDENTIFY: u8 = 0x06;
    /// Base 5.1.
    pub const ABORT: u8 = 0x08;
    /// Base 5.27.
    pub const SET_FEATURES: u8 = 0x09;
    /// Base 5.15.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Base 5.2.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    /// Base 5.18.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// NVM 4.2.1.
    pub const GET_LBA_STATUS: u8 = 0x86;
}

/// Features by their identifier (Base 5.27.1).
pub mod feature {
    /// How commands of several queues take turns.
    pub const ARBITRATION: u8 = 0x01;
    /// The power state: bits 4:0 of its value.
    pub const POWER_MANAGEMENT: u8 = 0x02;
    /// The temperature at which an event is reported, in kelvin: bits 15:0 of its value.
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    /// The time in which a controller tries to recover from errors (NVM 4.1.3.2).
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// Whether the volatile write cache is on: bit 0 of its value.
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    /// Number of I/O queues of each kind, counted from 0: submission in bits 15:0, completion in
    /// 31:16.
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    /// Whether writes need not be atomic beyond power loss: bit 0 of its value (NVM 4.1.3.4).
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    /// Reported events; see [`super::event`].
    pub const ASYNC_EVENT_CONFIGURATION: u8 = 0x0b;
    /// Keep-alive timeout in milliseconds.
    pub const KEEP_ALIVE_TIMER: u8 = 0x0f;
    /// LBA Status Information Attributes (NVM 4.1.3.3): the shortest intervals of reports (bits
    /// 15:0) and of polls (31:16), in units of 100 ms.
    pub const LBA_STATUS_INFORMATION: u8 = 0x15;
    /// The behavior that the host supports: [`HOST_BEHAVIOR_BYTES`] of data.
    pub const HOST_BEHAVIOR_SUPPORT: u8 = 0x16;
    /// Bytes of the data of Host Behavior Support.
    pub const HOST_BEHAVIOR_BYTES: usize = 512;
    /// Number of behaviors, each of which has a byte at the start of that data: advanced command
    /// retry, extended telemetry, and further LBA formats.
    pub const HOST_BEHAVIORS: usize = 3;
    /// Identifier of the host.
    pub const HOST_IDENTIFIER: u8 = 0x81;
    /// Reservation events that are not reported.
    pub const RESERVATION_NOTIFICATION_MASK: u8 = 0x82;
    /// Whether reservations survive power loss.
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
}

/// Log pages by their identifier (Base 5.16.1).
pub mod log_page {
    /// Errors of commands.
    pub const ERROR_INFORMATION: u8 = 0x01;
    /// Health of the medium.
    pub const SMART: u8 = 0x02;
    /// Firmware slots.
    pub const FIRMWARE_SLOT: u8 = 0x03;
    /// Namespaces whose identify data changed: up to 1024 identifiers.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// Supported commands and their effects.
    pub const COMMAND_EFFECTS: u8 = 0x05;
    /// States of namespace groups on this path.
    pub const ASYMMETRIC_ACCESS: u8 = 0x0c;
    /// Ranges with potentially unrecoverable blocks (NVM 4.1.4.5).
    pub const LBA_STATUS_INFORMATION: u8 = 0x0e;
    /// Subsystems that a discovery controller knows.
    pub const DISCOVERY: u8 = 0x70;
    /// Reservation events.
    pub const RESERVATION_NOTIFICATION: u8 = 0x80;
}

/// Asynchronous events (Base 5.2): their configuration and their content.
pub mod event {
    /// Configuration: report changed namespaces.
    pub const CONFIG_NAMESPACE_ATTRIBUTES: u32 = 1 << 8;
    /// Configuration: report changed access states.
    pub const CONFIG_ASYMMETRIC_ACCESS: u32 = 1 << 11;
    /// Configuration: report potentially unrecoverable blocks.
    pub const CONFIG_LBA_STATUS: u32 = 1 << 13;
    /// Configuration: report a changed discovery log.
    pub const CONFIG_DISCOVERY_LOG: u32 = 1 << 31;

    /// An event, encoded in dword 0 of the completion.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Event {
        /// Error 0, health 1, notice 2, I/O command set 6, vendor 7.
        pub kind: u8,
        /// The event within this kind.
        pub info: u8,
        /// The log page with details.
        pub log_page: u8,
    }

    impl Event {
        /// A notice that namespaces changed.
        pub const NAMESPACE_ATTRIBUTES: Event =
            Event { kind: 2, info: 0x00, log_page: super::log_page::CHANGED_NAMESPACES };
        /// A notice that access states changed.
        pub const ASYMMETRIC_ACCESS: Event =
            Event { kind: 2, info: 0x03, log_page: super::log_page::ASYMMETRIC_ACCESS };
        /// A notice that a reservation log entry is available.
        pub const RESERVATION: Event =
            Event { kind: 6, info: 0x00, log_page: super::log_page::RESERVATION_NOTIFICATION };
        /// A notice that the discovery log changed.
        pub const DISCOVERY_LOG: Event = Event { kind: 2, info: 0xf0, log_page: super::log_page::DISCOVERY };

        /// Reads dword 0.
        pub const fn parse(dword: u32) -> Event {
            Event { kind: dword as u8 & 7, info: (dword >> 8) as u8, log_page: (dword >> 16) as u8 }
        }

        /// Writes dword 0.
        pub const fn encode(self) -> u32 {
            self.kind as u32 | (self.info as u32) << 8 | (self.log_page as u32) << 16
        }
    }
}

/// The structure that Identify returns: CNS (Base 5.17, figure "CNS values").
pub mod cns {
    /// Identify Namespace of the NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespaces above an identifier.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace Identification Descriptor list.
    pub const DESCRIPTORS: u8 = 0x03;
    /// Identify Namespace of a command set.
    pub const COMMAND_SET_NAMESPACE: u8 = 0x05;
    /// Identify Controller of a command set.
    pub const COMMAND_SET_CONTROLLER: u8 = 0x06;
    /// Active namespaces of a command set.
    pub const COMMAND_SET_ACTIVE_NAMESPACES: u8 = 0x07;
    /// Combinations of command sets that can be used together.
    pub const COMMAND_SETS: u8 = 0x1c;
}

/// Force unit access, in dword 12 of a write or write zeroes.
const FUA: u32 = 1 << 30;
/// Deallocate, in dword 12 of a write zeroes.
const DEAC: u32 = 1 << 25;
/// Deallocate, in dword 11 of a dataset management.
const AD: u32 = 1 << 2;
/// Select all zones, in dword 13 of a zone management send.
const SELECT_ALL: u32 = 1 << 8;
/// Count the transferred descriptors, not the existing ones, in dword 13 of a zone management
/// receive.
const PARTIAL_REPORT: u32 = 1 << 16;

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The opcode.
    pub opcode: u8,
    /// The namespace; 0 for none.
    pub nsid: u32,
    /// Command dwords 10 to 15.
    pub cdw: [u32; 6],
}

/// A change of a zone's state: Zone Send Action (ZNS 3.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ZoneSendAction {
    /// To closed.
    Close = 1,
    /// To full.
    Finish = 2,
    /// To explicitly opened.
    Open = 3,
    /// To empty.
    Reset = 4,
}

impl Command {
    const fn new(opcode: u8, nsid: u32) -> Command {
        Command { opcode, nsid, cdw: [0; 6] }
    }

    /// Reads an identify structure of command set `csi`.
    pub const fn identify(nsid: u32, cns: u8, csi: u8) -> Command {
        let cdw = [cns as u32, (csi as u32) << 24, 0, 0, 0, 0];
        Command { opcode: admin::IDENTIFY, nsid, cdw }
    }

    /// Reads the current value of a feature; dword 0 of the completion has it.
    pub const fn get_features(fid: u8) -> Command {
        Command { opcode: admin::GET_FEATURES, nsid: 0, cdw: [fid as u32, 0, 0, 0, 0, 0] }
    }

    /// Sets a feature to the value in dword 11, until the next reset. Dword 0 of the completion has
    /// the granted value.
    pub const fn set_features(fid: u8, value: u32) -> Command {
        Command { opcode: admin::SET_FEATURES, nsid: 0, cdw: [fid as u32, value, 0, 0, 0, 0] }
    }

    /// Restarts the keep-alive timer.
    pub const fn keep_alive() -> Command {
        Command::new(admin::KEEP_ALIVE, 0)
    }

    /// Completes at the next asynchronous event.
    pub const fn async_event_request() -> Command {
        Command::new(admin::ASYNC_EVENT_REQUEST, 0)
    }

    /// Reads the first `bytes` (a multiple of 4) of a log page, of command set `csi`.
    pub const fn get_log_page(nsid: u32, lid: u8, csi: u8, bytes: u32) -> Command {
        let dwords = bytes / 4 - 1;
        let cdw = [lid as u32 | dwords << 16, dwords >> 16, 0, 0, (csi as u32) << 24, 0];
        Command { opcode: admin::GET_LOG_PAGE, nsid, cdw }
    }

    /// As [`Command::get_log_page`], from `offset` (a multiple of 4 bytes) on.
    pub const fn get_log_page_from(nsid: u32, lid: u8, offset: u64, bytes: u32) -> Command {
        let mut command = Command::get_log_page(nsid, lid, 0, bytes);
        command.cdw[2] = offset as u32;
        command.cdw[3] = (offset >> 32) as u32;
        command
    }

    /// Reads `blocks` from `lba` on.
    ///
    /// # Panics
    /// With no blocks, or more than [`MAX_BLOCKS`].
    pub fn read(nsid: u32, lba: u64, blocks: u32) -> Command {
        Command::on_blocks(opcode::READ, nsid, lba, blocks, 0)
    }

    /// Writes `blocks` from `lba` on; with `fua` they are durable when it completes.
    ///
    /// # Panics
    /// As [`Command::read`].
    pub fn write(nsid: u32, lba: u64, blocks: u32, fua: bool) -> Command {
        Command::on_blocks(opcode::WRITE, nsid, lba, blocks, if fua { FUA } else { 0 })
    }

    /// Makes `blocks` from `lba` on read as zeroes. With `deallocate` the controller may free their
    /// space.
    ///
    /// # Panics
    /// As [`Command::read`].
    pub fn write_zeroes(nsid: u32, lba: u64, blocks: u32, fua: bool, deallocate: bool) -> Command {
        let flags = if fua { FUA } else { 0 } | if deallocate { DEAC } else { 0 };
        Command::on_blocks(opcode::WRITE_ZEROES, nsid, lba, blocks, flags)
    }

    /// Makes all completed writes durable.
    pub const fn flush(nsid: u32) -> Command {
        Command::new(opcode::FLUSH, nsid)
    }

    /// Deallocates `ranges` ranges, whose list ([`deallocate_range`]) is the command's data.
    ///
    /// # Panics
    /// With no ranges, or more than [`MAX_RANGES`].
    pub fn deallocate(nsid: u32, ranges: u32) -> Command {
        assert!((1..=MAX_RANGES).contains(&ranges), "{ranges} ranges");
        Command { cdw: [ranges - 1, AD, 0, 0, 0, 0], ..Command::new(opcode::DATASET_MANAGEMENT, nsid) }
    }

    /// Copies `ranges` ranges of the namespace to the blocks from `lba` on, one after the other.
    /// The command's data lists them ([`copy_range`]). With `fua` the blocks are durable when it
    /// completes.
    ///
    /// # Panics
    /// With no ranges, or more than [`MAX_RANGES`].
    pub fn copy(nsid: u32, lba: u64, ranges: u32, fua: bool) -> Command {
        assert!((1..=MAX_RANGES).contains(&ranges), "{ranges} ranges");
        Command::on_blocks(opcode::COPY, nsid, lba, ranges, if fua { FUA } else { 0 })
    }

    /// Changes the state of the zone that starts at `lba`.
    pub const fn manage_zone(nsid: u32, lba: u64, action: ZoneSendAction) -> Command {
        let cdw = [lba as u32, (lba >> 32) as u32, 0, action as u32, 0, 0];
        Command { opcode: opcode::ZONE_MANAGEMENT_SEND, nsid, cdw }
    }

    /// Changes the state of all zones in which `action` is allowed.
    pub const fn manage_all_zones(nsid: u32, action: ZoneSendAction) -> Command {
        let cdw = [0, 0, 0, action as u32 | SELECT_ALL, 0, 0];
        Command { opcode: opcode::ZONE_MANAGEMENT_SEND, nsid, cdw }
    }

    /// Reports zones from the one that contains `lba` on, as many as fit into `bytes` (a multiple
    /// of 4, at least [`crate::zns::REPORT_HEADER_BYTES`]).
    pub const fn report_zones(nsid: u32, lba: u64, bytes: u32) -> Command {
        let cdw = [lba as u32, (lba >> 32) as u32, bytes / 4 - 1, PARTIAL_REPORT, 0, 0];
        Command { opcode: opcode::ZONE_MANAGEMENT_RECEIVE, nsid, cdw }
    }

    fn on_blocks(opcode: u8, nsid: u32, lba: u64, blocks: u32, flags: u32) -> Command {
        assert!((1..=MAX_BLOCKS).contains(&blocks), "{blocks} blocks");
        let cdw = [lba as u32, (lba >> 32) as u32, (blocks - 1) | flags, 0, 0, 0];
        Command { opcode, nsid, cdw }
    }
}

/// The dwords of a read, write, compare, verify or write zeroes, as a target parses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks, 1 to [`MAX_BLOCKS`].
    pub blocks: u32,
    /// The blocks must be durable when the command ends.
    pub fua: bool,
    /// A write zeroes may free their space.
    pub deallocate: bool,
}

impl BlockRange {
    /// Parses command dwords 10 to 12. The caller checks whether the range lies in the namespace.
    pub const fn parse(cdw: &[u32; 6]) -> BlockRange {
        BlockRange {
            lba: cdw[0] as u64 | (cdw[1] as u64) << 32,
            blocks: (cdw[2] & 0xffff) + 1,
            fua: cdw[2] & FUA != 0,
            deallocate: cdw[2] & DEAC != 0,
        }
    }
}

/// Parses the dwords of a dataset management command: the number of ranges, and whether to
/// deallocate them (otherwise its attributes are hints).
pub const fn dataset_management(cdw: &[u32; 6]) -> (u32, bool) {
    ((cdw[0] & 0xff) + 1, cdw[1] & AD != 0)
}

/// Parses one range of a dataset management command: first block and number, which may be 0.
pub fn parse_deallocate_range(range: &[u8; 16]) -> (u64, u32) {
    (u64_at(range, 8), u32_at(range, 4))
}

/// One range of [`Command::deallocate`] (NVM 3.2.3): context attributes 0, length, first block.
pub fn deallocate_range(lba: u64, blocks: u32) -> [u8; 16] {
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&blocks.to_le_bytes());
    range[8..].copy_from_slice(&lba.to_le_bytes());
    range
}

/// Bytes of a source range of a copy, in format 0.
pub const COPY_RANGE_BYTES: usize = 32;

/// The dwords of a copy, as a target parses them (NVM 3.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// First block of the destination.
    pub lba: u64,
    /// Number of source ranges, 1 to [`MAX_RANGES`].
    pub ranges: u32,
    /// Format of their descriptors; 0 has [`COPY_RANGE_BYTES`].
    pub format: u8,
    /// The blocks must be durable when the command ends.
    pub fua: bool,
}

impl Copy {
    /// Parses command dwords 10 to 12.
    pub const fn parse(cdw: &[u32; 6]) -> Copy {
        Copy {
            lba: cdw[0] as u64 | (cdw[1] as u64) << 32,
            ranges: (cdw[2] & 0xff) + 1,
            format: (cdw[2] >> 8) as u8 & 0xf,
            fua: cdw[2] & FUA != 0,
        }
    }
}

/// Parses a source range of a copy, in format 0: first block, and number of blocks from 1 on.
pub fn parse_copy_range(range: &[u8; COPY_RANGE_BYTES]) -> (u64, u32) {
    (u64_at(range, 8), u32::from(u16_at(range, 16)) + 1)
}

/// One range of [`Command::copy`], in format 0, without protection information.
///
/// # Panics
/// With no blocks, or more than [`MAX_BLOCKS`].
pub fn copy_range(lba: u64, blocks: u32) -> [u8; COPY_RANGE_BYTES] {
    assert!((1..=MAX_BLOCKS).contains(&blocks), "{blocks} blocks");
    let mut range = [0; COPY_RANGE_BYTES];
    range[8..16].copy_from_slice(&lba.to_le_bytes());
    range[16..18].copy_from_slice(&((blocks - 1) as u16).to_le_bytes());
    range
}

#[cfg(test)]
mod tests {
    use super::*;

    const LBA: u64 = 0x0123_4567_89ab_cdef;

    #[test]
    fn block_counts_are_sent_from_zero_and_addresses_in_two_halves() {
        let read = Command::read(7, LBA, 1);
        assert_eq!((read.opcode, read.nsid), (0x02, 7));
        assert_eq!(read.cdw, [0x89ab_cdef, 0x0123_4567, 0, 0, 0, 0]);
        assert_eq!(Command::read(7, 0, 1 << 16).cdw[2], 0xffff);
        let write = Command::write(7, LBA, 8, true);
        assert_eq!((write.opcode, write.cdw[2]), (0x01, 0x4000_0007));
        assert_eq!(Command::write(7, LBA, 8, false).cdw[2], 7);
    }

    #[test]
    fn write_zeroes_deallocates_only_when_it_may() {
        assert_eq!(Command::write_zeroes(1, 0, 2, false, false).cdw[2], 1);
        assert_eq!(Command::write_zeroes(1, 0, 2, true, true).cdw[2], 0x4200_0001);
        assert_eq!(Command::write_zeroes(1, 0, 2, false, true).opcode, 0x08);
    }

    #[test]
    fn a_deallocation_counts_its_ranges_from_zero() {
        let command = Command::deallocate(1, 256);
        assert_eq!((command.opcode, command.cdw), (0x09, [0xff, 4, 0, 0, 0, 0]));
        let range = deallocate_range(LBA, 0x1122_3344);
        assert_eq!(range[..4], [0; 4]);
        assert_eq!(range[4..8], [0x44, 0x33, 0x22, 0x11]);
        assert_eq!(range[8..], [0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01]);
    }

    #[test]
    fn a_target_reads_what_a_host_wrote() {
        let range = BlockRange { lba: LBA, blocks: 1 << 16, fua: true, deallocate: true };
        assert_eq!(BlockRange::parse(&Command::write_zeroes(1, LBA, 1 << 16, true, true).cdw), range);
        let plain = BlockRange { blocks: 3, fua: false, deallocate: false, ..range };
        assert_eq!(BlockRange::parse(&Command::read(1, LBA, 3).cdw), plain);
        assert_eq!(parse_deallocate_range(&deallocate_range(LBA, 77)), (LBA, 77));
        assert_eq!(dataset_management(&Command::deallocate(1, 256).cdw), (256, true));
        assert_eq!(dataset_management(&[0; 6]), (1, false));
        let copy = Copy { lba: LBA, ranges: 256, format: 0, fua: true };
        assert_eq!(Copy::parse(&Command::copy(1, LBA, 256, true).cdw), copy);
        assert_eq!(Copy::parse(&[0, 0, 0x0000_0f00, 0, 0, 0]).format, 0xf);
        assert_eq!(parse_copy_range(&copy_range(LBA, 1 << 16)), (LBA, 1 << 16));
    }

    #[test]
    fn a_copy_counts_its_ranges_and_their_blocks_from_zero() {
        let command = Command::copy(7, LBA, 2, false);
        assert_eq!((command.opcode, command.nsid), (0x19, 7));
        assert_eq!(command.cdw, [0x89ab_cdef, 0x0123_4567, 1, 0, 0, 0]);
        let range = copy_range(LBA, 0x1122);
        assert_eq!(range[..8], [0; 8]);
        assert_eq!(range[8..16], [0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01]);
        assert_eq!((&range[16..18], &range[18..]), (&[0x21, 0x11][..], &[0; 14][..]));
    }

    #[test]
    fn an_event_has_its_kind_and_its_log_page() {
        use event::Event;
        assert_eq!(Event::NAMESPACE_ATTRIBUTES.encode(), 0x04_0002);
        assert_eq!(Event::parse(0x70_f002), Event::DISCOVERY_LOG);
        assert_eq!(Event::parse(Event::ASYMMETRIC_ACCESS.encode()), Event::ASYMMETRIC_ACCESS);
        assert_eq!(Command::set_features(feature::NUMBER_OF_QUEUES, 0x3_0003).cdw[..2], [7, 0x3_0003]);
        assert_eq!(Command::keep_alive().opcode, 0x18);
    }

    #[test]
    fn zone_commands_name_the_zone_and_the_action() {
        let open = Command::manage_zone(3, LBA, ZoneSendAction::Open);
        assert_eq!((open.opcode, open.cdw), (0x79, [0x89ab_cdef, 0x0123_4567, 0, 3, 0, 0]));
        assert_eq!(Command::manage_all_zones(3, ZoneSendAction::Reset).cdw, [0, 0, 0, 0x104, 0, 0]);
        let report = Command::report_zones(3, LBA, 64 + 64);
        assert_eq!((report.opcode, report.cdw), (0x7a, [0x89ab_cdef, 0x0123_4567, 31, 0x1_0000, 0, 0]));
    }

    #[test]
    fn admin_commands_say_which_structure_and_command_set() {
        assert_eq!(Command::identify(1, cns::COMMAND_SET_NAMESPACE, 2).cdw, [5, 2 << 24, 0, 0, 0, 0]);
        assert_eq!(Command::get_features(feature::VOLATILE_WRITE_CACHE).cdw[0], 6);
        let log = Command::get_log_page(!0, log_page::COMMAND_EFFECTS, 2, 4096);
        assert_eq!(log.cdw, [5 | 1023 << 16, 0, 0, 0, 2 << 24, 0]);
        assert_eq!(Command::flush(9), Command { opcode: 0, nsid: 9, cdw: [0; 6] });
    }

    #[test]
    #[should_panic(expected = "65537 blocks")]
    fn more_blocks_than_the_field_counts_are_a_bug() {
        let _ = Command::read(1, 0, (1 << 16) + 1);
    }
}
