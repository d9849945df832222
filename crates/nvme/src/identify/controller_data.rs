//! The structure of Identify Controller, which a target encodes and a host parses.

use crate::fabrics::property::Version;
use crate::fabrics::{Nqn, NqnError};
use crate::wire::{array_at, put, put_text, text_at, u16_at, u32_at};
use crate::{IDENTIFY_BYTES, IdentifyData};

/// Bits of [`ControllerData::admin_commands`] (OACS).
pub mod oacs {
    /// Get LBA Status, with the actions that report potentially unrecoverable blocks.
    pub const GET_LBA_STATUS: u16 = 1 << 9;
}

/// Bits of AOCS, in Identify Controller of the NVM command set (NVM 1.1, 4.1.5.4).
pub mod aocs {
    /// Get LBA Status, with the action that reports allocated blocks.
    pub const ALLOCATED_LBAS: u16 = 1;
}

/// Bits of [`ControllerData::commands`] (ONCS).
pub mod oncs {
    /// Compare.
    pub const COMPARE: u16 = 1;
    /// Dataset management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// Features with a saved value.
    pub const SAVE_FEATURES: u16 = 1 << 4;
    /// Reservations.
    pub const RESERVATIONS: u16 = 1 << 5;
    /// Verify.
    pub const VERIFY: u16 = 1 << 7;
    /// Copy.
    pub const COPY: u16 = 1 << 8;
}

/// Bits of [`ControllerData::attributes`] (CTRATT).
pub mod ctratt {
    /// Host identifiers have 16 bytes.
    pub const LONG_HOST_ID: u32 = 1;
    /// Any command restarts the keep-alive timer, not only Keep Alive.
    pub const TRAFFIC_BASED_KEEP_ALIVE: u32 = 1 << 6;
}

/// Bits of [`ControllerData::async_events`] (OAES), which are those of the configuration too.
pub mod oaes {
    pub use crate::command::event::{
        CONFIG_ASYMMETRIC_ACCESS as ASYMMETRIC_ACCESS, CONFIG_DISCOVERY_LOG as DISCOVERY_LOG,
        CONFIG_LBA_STATUS as LBA_STATUS, CONFIG_NAMESPACE_ATTRIBUTES as NAMESPACE_ATTRIBUTES,
    };
}

/// Bits of [`ControllerData::sgls`] (SGLS).
pub mod sgls {
    /// SGLs are supported, without alignment.
    pub const SUPPORTED: u32 = 1;
    /// The keyed data block descriptor, used by RDMA.
    pub const KEYED: u32 = 1 << 2;
    /// Data can lie at an offset of the capsule.
    pub const OFFSET: u32 = 1 << 20;
    /// The transport data block descriptor, used by NVMe/TCP.
    pub const TRANSPORT: u32 = 1 << 21;
}

/// Bits of [`ControllerData::paths`] (CMIC).
pub mod cmic {
    /// The subsystem can have several ports.
    pub const PORTS: u8 = 1;
    /// The subsystem can have several controllers.
    pub const CONTROLLERS: u8 = 1 << 1;
    /// Asymmetric access is reported.
    pub const ASYMMETRIC_ACCESS: u8 = 1 << 3;
}

/// CNTRLTYPE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ControllerType {
    /// From before 1.4, or reserved.
    #[default]
    NotReported,
    /// With namespaces.
    Io,
    /// With a discovery log.
    Discovery,
    /// Without namespaces and discovery log.
    Administrative,
}

impl ControllerType {
    const fn parse(byte: u8) -> ControllerType {
        match byte {
            1 => ControllerType::Io,
            2 => ControllerType::Discovery,
            3 => ControllerType::Administrative,
            _ => ControllerType::NotReported,
        }
    }
}

/// Bytes of the NQN field and where it is.
const NQN: std::ops::Range<usize> = 768..1024;

/// The fields of Identify Controller (Base 5.17.2.1). [`super::Controller`] is the short form for
/// reads and writes. All other fields are 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerData {
    /// VID: PCI vendor.
    pub vendor_id: u16,
    /// SSVID: PCI subsystem vendor.
    pub subsystem_vendor_id: u16,
    /// SN: serial number, up to 20 ASCII characters.
    pub serial: String,
    /// MN: model, up to 40 ASCII characters.
    pub model: String,
    /// FR: firmware revision, up to 8 ASCII characters.
    pub firmware: String,
    /// RAB: arbitration burst, as exponent.
    pub arbitration_burst: u8,
    /// IEEE: OUI of the vendor, least significant byte first.
    pub ieee_oui: [u8; 3],
    /// CMIC: several paths; [`cmic`].
    pub paths: u8,
    /// MDTS: longest transfer, as exponent over CAP.MPSMIN; 0: unlimited.
    pub max_transfer_exponent: u8,
    /// CNTLID.
    pub controller_id: u16,
    /// VER.
    pub version: u32,
    /// OAES: supported events; [`oaes`].
    pub async_events: u32,
    /// CTRATT; [`ctratt`].
    pub attributes: u32,
    /// CNTRLTYPE.
    pub controller_type: ControllerType,
    /// OACS: optional admin commands; [`oacs`].
    pub admin_commands: u16,
    /// ACL: limit of concurrent aborts, counted from 0.
    pub abort_limit: u8,
    /// AERL: limit of concurrent asynchronous event requests, counted from 0.
    pub async_event_limit: u8,
    /// FRMW: firmware slots; bit 0: the first is read-only; bits 3:1: number of slots.
    pub firmware_slots: u8,
    /// LPA: bit 2: logs can be read from an offset.
    pub log_attributes: u8,
    /// ELPE: entries of the error log, counted from 0.
    pub error_log_entries: u8,
    /// KAS: granularity of the keep-alive timer in units of 100 ms; 0 for none.
    pub keep_alive_granularity: u16,
    /// ANATT: longest transition between access states, in seconds.
    pub ana_transition_s: u8,
    /// ANACAP: supported access states.
    pub ana_capabilities: u8,
    /// ANAGRPMAX: largest group identifier.
    pub ana_group_max: u32,
    /// NANAGRPID: number of groups.
    pub ana_groups: u32,
    /// SQES: required (3:0) and largest (7:4) submission entry as exponents; 0x66.
    pub submission_exponents: u8,
    /// CQES: likewise of completion entries; 0x44.
    pub completion_exponents: u8,
    /// MAXCMD: limit of commands in flight on a queue.
    pub max_commands: u16,
    /// NN: largest namespace identifier.
    pub namespaces: u32,
    /// ONCS: optional commands; [`oncs`].
    pub commands: u16,
    /// FUSES: bit 0 is compare and write.
    pub fused: u16,
    /// VWC: bit 0: the controller has a volatile write cache; bits 2:1 are 3 if a flush may name
    /// all namespaces.
    pub volatile_cache: u8,
    /// AWUN: blocks of the longest write that is atomic in normal operation, counted from 0.
    pub atomic_blocks: u16,
    /// AWUPF: blocks of the longest write that is atomic at a power failure, counted from 0.
    pub atomic_power_fail_blocks: u16,
    /// ACWU: blocks of the longest atomic compare and write, counted from 0.
    pub atomic_compare_blocks: u16,
    /// OCFS: supported formats of the source ranges of a copy, a bit each.
    pub copy_formats: u16,
    /// SGLS; [`sgls`].
    pub sgls: u32,
    /// MNAN: limit of namespaces at a time; 0 for NN.
    pub max_allowed_namespaces: u32,
    /// SUBNQN: the subsystem's name; empty for none.
    pub subsystem: String,
    /// IOCCSZ: bytes of an I/O command capsule in units of 16; at least 4.
    pub command_capsule_units: u32,
    /// IORCSZ: bytes of an I/O response capsule in units of 16; at least 1.
    pub response_capsule_units: u32,
    /// ICDOFF: start of the data in a capsule, after the entry, in units of 16.
    pub in_capsule_offset_units: u16,
    /// FCATT: bit 0: controllers are static.
    pub fabrics_attributes: u8,
    /// MSDBD: limit of data descriptors of a command; 0: unlimited.
    pub max_data_descriptors: u8,
}

impl ControllerData {
    /// Parses the structure. Text that is not UTF-8 is replaced.
    pub fn parse(data: &IdentifyData) -> ControllerData {
        ControllerData {
            vendor_id: u16_at(data, 0),
            subsystem_vendor_id: u16_at(data, 2),
            serial: text_at(data, 4, 20),
            model: text_at(data, 24, 40),
            firmware: text_at(data, 64, 8),
            arbitration_burst: data[72],
            ieee_oui: array_at(data, 73),
            paths: data[76],
            max_transfer_exponent: data[77],
            controller_id: u16_at(data, 78),
            version: u32_at(data, 80),
            async_events: u32_at(data, 92),
            attributes: u32_at(data, 96),
            controller_type: ControllerType::parse(data[111]),
            admin_commands: u16_at(data, 256),
            abort_limit: data[258],
            async_event_limit: data[259],
            firmware_slots: data[260],
            log_attributes: data[261],
            error_log_entries: data[262],
            keep_alive_granularity: u16_at(data, 320),
            ana_transition_s: data[342],
            ana_capabilities: data[343],
            ana_group_max: u32_at(data, 344),
            ana_groups: u32_at(data, 348),
            submission_exponents: data[512],
            completion_exponents: data[513],
            max_commands: u16_at(data, 514),
            namespaces: u32_at(data, 516),
            commands: u16_at(data, 520),
            fused: u16_at(data, 522),
            volatile_cache: data[525],
            atomic_blocks: u16_at(data, 526),
            atomic_power_fail_blocks: u16_at(data, 528),
            atomic_compare_blocks: u16_at(data, 532),
            copy_formats: u16_at(data, 534),
            sgls: u32_at(data, 536),
            max_allowed_namespaces: u32_at(data, 540),
            subsystem: text_at(data, NQN.start, NQN.len()),
            command_capsule_units: u32_at(data, 1792),
            response_capsule_units: u32_at(data, 1796),
            in_capsule_offset_units: u16_at(data, 1800),
            fabrics_attributes: data[1802],
            max_data_descriptors: data[1803],
        }
    }

    /// Encodes the structure. Text that is too long is cut off.
    pub fn encode(&self) -> IdentifyData {
        let mut data = [0; IDENTIFY_BYTES];
        self.put_identity(&mut data);
        self.put_admin(&mut data);
        self.put_commands(&mut data);
        put_text(&mut data, NQN.start, NQN.len(), &self.subsystem, 0);
        put(&mut data, 1792, self.command_capsule_units.to_le_bytes());
        put(&mut data, 1796, self.response_capsule_units.to_le_bytes());
        put(&mut data, 1800, self.in_capsule_offset_units.to_le_bytes());
        data[1802] = self.fabrics_attributes;
        data[1803] = self.max_data_descriptors;
        data
    }

    fn put_identity(&self, data: &mut IdentifyData) {
        put(data, 0, self.vendor_id.to_le_bytes());
        put(data, 2, self.subsystem_vendor_id.to_le_bytes());
        put_text(data, 4, 20, &self.serial, b' ');
        put_text(data, 24, 40, &self.model, b' ');
        put_text(data, 64, 8, &self.firmware, b' ');
        data[72] = self.arbitration_burst;
        put(data, 73, self.ieee_oui);
        data[76] = self.paths;
        data[77] = self.max_transfer_exponent;
        put(data, 78, self.controller_id.to_le_bytes());
        put(data, 80, self.version.to_le_bytes());
        put(data, 92, self.async_events.to_le_bytes());
        put(data, 96, self.attributes.to_le_bytes());
        data[111] = self.controller_type as u8;
    }

    fn put_admin(&self, data: &mut IdentifyData) {
        put(data, 256, self.admin_commands.to_le_bytes());
        data[258] = self.abort_limit;
        data[259] = self.async_event_limit;
        data[260] = self.firmware_slots;
        data[261] = self.log_attributes;
        data[262] = self.error_log_entries;
        put(data, 320, self.keep_alive_granularity.to_le_bytes());
        data[342] = self.ana_transition_s;
        data[343] = self.ana_capabilities;
        put(data, 344, self.ana_group_max.to_le_bytes());
        put(data, 348, self.ana_groups.to_le_bytes());
    }

    fn put_commands(&self, data: &mut IdentifyData) {
        data[512] = self.submission_exponents;
        data[513] = self.completion_exponents;
        put(data, 514, self.max_commands.to_le_bytes());
        put(data, 516, self.namespaces.to_le_bytes());
        put(data, 520, self.commands.to_le_bytes());
        put(data, 522, self.fused.to_le_bytes());
        data[525] = self.volatile_cache;
        put(data, 526, self.atomic_blocks.to_le_bytes());
        put(data, 528, self.atomic_power_fail_blocks.to_le_bytes());
        put(data, 532, self.atomic_compare_blocks.to_le_bytes());
        put(data, 534, self.copy_formats.to_le_bytes());
        put(data, 536, self.sgls.to_le_bytes());
        put(data, 540, self.max_allowed_namespaces.to_le_bytes());
    }

    /// VER as a version.
    pub const fn version(&self) -> Version {
        Version::parse(self.version)
    }

    /// SUBNQN as a name.
    ///
    /// # Errors
    /// If the field is not a name.
    pub fn subsystem(&self) -> Result<Nqn, NqnError> {
        Nqn::new(&self.subsystem)
    }

    /// Bytes of data that fit into an I/O command capsule after its entry and ICDOFF.
    pub const fn in_capsule_bytes(&self) -> u32 {
        let before = 64 + 16 * self.in_capsule_offset_units as u32;
        self.command_capsule_units.saturating_mul(16).saturating_sub(before)
    }
}

/// Identify Controller of the NVM command set (NVM 1.1, 4.1.5.4), without limits beyond MDTS.
/// `admin_commands` is AOCS: optional admin commands; [`aocs`].
pub fn encode_nvm(admin_commands: u16) -> IdentifyData {
    let mut data = [0; IDENTIFY_BYTES];
    put(&mut data, 18, admin_commands.to_le_bytes());
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CommandLimits, Controller};
    use proptest::prelude::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let controller = ControllerData {
            vendor_id: 0x1b36,
            serial: "0123".into(),
            model: "Freestone".into(),
            firmware: "longer than it may be".into(),
            max_transfer_exponent: 5,
            controller_id: 0x0102,
            version: Version::V2_0.encode(),
            attributes: ctratt::LONG_HOST_ID | ctratt::TRAFFIC_BASED_KEEP_ALIVE,
            controller_type: ControllerType::Io,
            async_event_limit: 3,
            keep_alive_granularity: 10,
            namespaces: 1024,
            commands: oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES,
            volatile_cache: 1,
            sgls: sgls::SUPPORTED | sgls::OFFSET | sgls::TRANSPORT,
            subsystem: "nqn.2014-08.org.example:disk".into(),
            command_capsule_units: 4 + 512,
            response_capsule_units: 1,
            max_data_descriptors: 1,
            ..ControllerData::default()
        };
        let data = controller.encode();
        assert_eq!(data[..8], [0x36, 0x1b, 0, 0, b'0', b'1', b'2', b'3']);
        assert_eq!((data[23], data[24], data[63]), (b' ', b'F', b' '));
        assert_eq!(data[64..72], *b"longer t");
        assert_eq!(data[77..84], [5, 2, 1, 0, 0, 2, 0]);
        assert_eq!((data[96], data[111], data[259], data[320]), (0x41, 1, 3, 10));
        assert_eq!(data[516..526], [0, 4, 0, 0, 12, 0, 0, 0, 0, 1]);
        assert_eq!(data[536..540], [1, 0, 0x30, 0]);
        assert_eq!((&data[768..772], data[796]), (&b"nqn."[..], 0));
        assert_eq!(data[1792..1804], [4, 2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(controller.in_capsule_bytes(), 8192);
        assert_eq!(controller.subsystem().unwrap().as_str(), controller.subsystem);
        let short = Controller::parse(&data);
        assert_eq!(short.max_transfer, Some(128 << 10));
        assert!(short.has_dataset_management && short.has_write_zeroes && short.has_volatile_cache);
    }

    #[test]
    fn the_structure_of_the_nvm_command_set_has_no_limits() {
        let data = encode_nvm(aocs::ALLOCATED_LBAS);
        assert_eq!((data[18], CommandLimits::parse(&data)), (1, CommandLimits::default()));
    }

    proptest! {
        #[test]
        fn any_structure_that_is_read_is_written_the_same(seed in proptest::collection::vec(any::<u8>(), 4096)) {
            let data: IdentifyData = seed.try_into().unwrap();
            let mut controller = ControllerData::parse(&data);
            controller.serial = "serial".into();
            controller.model = "model".into();
            controller.firmware = "1.0".into();
            controller.subsystem = "nqn.a".into();
            let _ = controller.in_capsule_bytes();
            prop_assert_eq!(ControllerData::parse(&controller.encode()), controller);
        }
    }
}
