//! Registers of a controller, which fabrics call properties (Base 3.1.3, 6.5, 6.6).

use super::FabricsType;
use crate::entry::{Sgl, SubmissionEntry};

/// Offsets of properties in bytes.
pub mod offset {
    /// [`super::Capabilities`], 8 bytes.
    pub const CAP: u32 = 0x00;
    /// [`super::Version`], 4 bytes.
    pub const VS: u32 = 0x08;
    /// [`super::Configuration`], 4 bytes.
    pub const CC: u32 = 0x14;
    /// [`super::ControllerStatus`], 4 bytes.
    pub const CSTS: u32 = 0x1c;
    /// NVM subsystem reset, 4 bytes.
    pub const NSSR: u32 = 0x20;
    /// Timeouts until the controller is ready, 4 bytes.
    pub const CRTO: u32 = 0x68;
}

/// Property Get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertyGet {
    /// Bytes of the property: 4 or 8.
    pub bytes: u8,
    /// Offset of the property, from [`offset`].
    pub offset: u32,
}

impl PropertyGet {
    /// Reads the command's dwords; `None` for a size that is reserved.
    pub const fn parse(cdw: &[u32; 6]) -> Option<PropertyGet> {
        match size(cdw[0]) {
            Some(bytes) => Some(PropertyGet { bytes, offset: cdw[1] }),
            None => None,
        }
    }

    /// The entry. The completion's result has the value.
    pub const fn entry(&self, command_id: u16) -> SubmissionEntry {
        let cdw = [(self.bytes == 8) as u32, self.offset, 0, 0, 0, 0];
        FabricsType::PropertyGet.entry(command_id, Sgl::None, cdw)
    }
}

/// Property Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertySet {
    /// Bytes of the property: 4 or 8.
    pub bytes: u8,
    /// Offset of the property, from [`offset`].
    pub offset: u32,
    /// The value; a property of 4 bytes has its lower half.
    pub value: u64,
}

impl PropertySet {
    /// Reads the command's dwords; `None` for a size that is reserved.
    pub const fn parse(cdw: &[u32; 6]) -> Option<PropertySet> {
        let value = cdw[2] as u64 | (cdw[3] as u64) << 32;
        match size(cdw[0]) {
            Some(4) => Some(PropertySet { bytes: 4, offset: cdw[1], value: value as u32 as u64 }),
            Some(bytes) => Some(PropertySet { bytes, offset: cdw[1], value }),
            None => None,
        }
    }

    /// The entry.
    pub const fn entry(&self, command_id: u16) -> SubmissionEntry {
        let (low, high) = (self.value as u32, (self.value >> 32) as u32);
        let cdw = [(self.bytes == 8) as u32, self.offset, low, high, 0, 0];
        FabricsType::PropertySet.entry(command_id, Sgl::None, cdw)
    }
}

const fn size(attribute: u32) -> Option<u8> {
    match attribute & 7 {
        0 => Some(4),
        1 => Some(8),
        _ => None,
    }
}

/// CAP: the capabilities of a controller. Only the fields that are used over fabrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// MQES: limit of entries of a queue, 2 to 65536.
    pub max_entries: u32,
    /// CQR: queues must be contiguous; always set over fabrics.
    pub is_contiguous: bool,
    /// TO: how long CSTS.RDY may take, in milliseconds; a multiple of 500, up to 127500.
    pub ready_timeout_ms: u32,
    /// CSS: bit 0 is the NVM command set, bit 6 command sets that Identify names, bit 7 none.
    pub command_sets: u8,
    /// MPSMIN: smallest memory page in bytes, a power of two from 4096 on: the unit of MDTS.
    pub min_page_bytes: u32,
    /// MPSMAX: largest memory page in bytes, likewise.
    pub max_page_bytes: u32,
}

impl Capabilities {
    /// The NVM command set, in `command_sets`.
    pub const NVM: u8 = 1;
    /// Command sets that Identify names, in `command_sets`.
    pub const NAMED_SETS: u8 = 1 << 6;

    /// Reads the register.
    pub const fn parse(value: u64) -> Capabilities {
        Capabilities {
            max_entries: (value as u32 & 0xffff) + 1,
            is_contiguous: value & 1 << 16 != 0,
            ready_timeout_ms: ((value >> 24) as u32 & 0xff) * 500,
            command_sets: (value >> 37) as u8,
            min_page_bytes: 4096 << (value >> 48 & 0xf),
            max_page_bytes: 4096 << (value >> 52 & 0xf),
        }
    }

    /// Writes the register.
    pub const fn encode(&self) -> u64 {
        let timeout = self.ready_timeout_ms.div_ceil(500);
        let timeout = if timeout > 0xff { 0xff } else { timeout };
        (self.max_entries.saturating_sub(1) & 0xffff) as u64
            | (self.is_contiguous as u64) << 16
            | (timeout as u64) << 24
            | (self.command_sets as u64) << 37
            | page_exponent(self.min_page_bytes) << 48
            | page_exponent(self.max_page_bytes) << 52
    }
}

const fn page_exponent(bytes: u32) -> u64 {
    (bytes.trailing_zeros().saturating_sub(12) & 0xf) as u64
}

/// VS, and the VER field of Identify Controller: the version of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u16,
    /// Second number.
    pub minor: u8,
    /// Third number.
    pub tertiary: u8,
}

impl Version {
    /// 1.4.0
    pub const V1_4: Version = Version { major: 1, minor: 4, tertiary: 0 };
    /// 2.0.0
    pub const V2_0: Version = Version { major: 2, minor: 0, tertiary: 0 };

    /// Reads the register.
    pub const fn parse(value: u32) -> Version {
        Version { major: (value >> 16) as u16, minor: (value >> 8) as u8, tertiary: value as u8 }
    }

    /// Writes the register.
    pub const fn encode(self) -> u32 {
        (self.major as u32) << 16 | (self.minor as u32) << 8 | self.tertiary as u32
    }
}

/// CC: the controller's configuration by the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// EN: the controller processes commands; a change from 1 to 0 is a reset.
    pub is_enabled: bool,
    /// CSS: 0 the NVM command set, 6 all that are supported.
    pub command_set: u8,
    /// MPS: memory page size, as exponent over 4096.
    pub page_exponent: u8,
    /// AMS: arbitration.
    pub arbitration: u8,
    /// SHN: 0 no shutdown, 1 a normal one, 2 an abrupt one.
    pub shutdown: u8,
    /// IOSQES: submission queue entry size as exponent; 6.
    pub submission_exponent: u8,
    /// IOCQES: completion queue entry size as exponent; 4.
    pub completion_exponent: u8,
}

impl Configuration {
    /// Enables a controller with the NVM command set.
    pub const ENABLED: Configuration = Configuration {
        is_enabled: true,
        command_set: 0,
        page_exponent: 0,
        arbitration: 0,
        shutdown: 0,
        submission_exponent: 6,
        completion_exponent: 4,
    };

    /// Reads the register.
    pub const fn parse(value: u32) -> Configuration {
        Configuration {
            is_enabled: value & 1 != 0,
            command_set: (value >> 4 & 7) as u8,
            page_exponent: (value >> 7 & 0xf) as u8,
            arbitration: (value >> 11 & 7) as u8,
            shutdown: (value >> 14 & 3) as u8,
            submission_exponent: (value >> 16 & 0xf) as u8,
            completion_exponent: (value >> 20 & 0xf) as u8,
        }
    }

    /// Writes the register.
    pub const fn encode(&self) -> u32 {
        self.is_enabled as u32
            | (self.command_set as u32 & 7) << 4
            | (self.page_exponent as u32 & 0xf) << 7
            | (self.arbitration as u32 & 7) << 11
            | (self.shutdown as u32 & 3) << 14
            | (self.submission_exponent as u32 & 0xf) << 16
            | (self.completion_exponent as u32 & 0xf) << 20
    }
}

/// CSTS: the status of the controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerStatus {
    /// RDY: the controller accepts commands.
    pub is_ready: bool,
    /// CFS: the controller has failed and needs a reset.
    pub is_fatal: bool,
    /// SHST: 0 no shutdown, 1 under way, 2 complete.
    pub shutdown: u8,
}

impl ControllerStatus {
    /// Reads the register.
    pub const fn parse(value: u32) -> ControllerStatus {
        ControllerStatus {
            is_ready: value & 1 != 0,
            is_fatal: value & 2 != 0,
            shutdown: (value >> 2 & 3) as u8,
        }
    }

    /// Writes the register.
    pub const fn encode(&self) -> u32 {
        self.is_ready as u32 | (self.is_fatal as u32) << 1 | (self.shutdown as u32 & 3) << 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn commands_and_registers_are_laid_out_as_the_specification_has_them() {
        let get = PropertyGet { bytes: 8, offset: offset::CAP };
        let bytes = get.entry(2).encode();
        assert_eq!(bytes[..8], [0x7f, 0x40, 2, 0, 4, 0, 0, 0]);
        assert_eq!(bytes[40..48], [1, 0, 0, 0, 0, 0, 0, 0]);
        let set = PropertySet { bytes: 4, offset: offset::CC, value: Configuration::ENABLED.encode().into() };
        let bytes = set.entry(3).encode();
        assert_eq!(
            (bytes[4], &bytes[40..56]),
            (0, &[0, 0, 0, 0, 0x14, 0, 0, 0, 1, 0, 0x46, 0, 0, 0, 0, 0][..])
        );
        assert_eq!(PropertySet::parse(&set.entry(3).cdw), Some(set));
        assert_eq!(PropertyGet::parse(&[2, 0, 0, 0, 0, 0]), None);
        let cap = Capabilities {
            max_entries: 128,
            is_contiguous: true,
            ready_timeout_ms: 15_000,
            command_sets: Capabilities::NVM,
            min_page_bytes: 4096,
            max_page_bytes: 65536,
        };
        assert_eq!(cap.encode(), 0x0040_0020_1e01_007f);
        assert_eq!(Version::V1_4.encode(), 0x1_0400);
        assert_eq!(ControllerStatus { is_ready: true, is_fatal: false, shutdown: 2 }.encode(), 9);
    }

    proptest! {
        #[test]
        fn properties_and_commands_survive_encoding(wide in any::<u64>(), value in any::<u32>()) {
            let cap = Capabilities::parse(wide);
            prop_assert_eq!(Capabilities::parse(cap.encode()), cap);
            let cc = Configuration::parse(value);
            prop_assert_eq!(Configuration::parse(cc.encode()), cc);
            let csts = ControllerStatus::parse(value);
            prop_assert_eq!(ControllerStatus::parse(csts.encode()), csts);
            prop_assert_eq!(Version::parse(value).encode(), value);
            let set = PropertySet { bytes: 8, offset: value, value: wide };
            prop_assert_eq!(PropertySet::parse(&set.entry(1).cdw), Some(set));
            let get = PropertyGet { bytes: 4, offset: value };
            prop_assert_eq!(PropertyGet::parse(&get.entry(1).cdw), Some(get));
        }
    }
}
