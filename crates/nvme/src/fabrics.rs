//! Fabrics commands (Base 6): a host connects queues to a controller and accesses its registers.
//!
//! All of them have [`OPCODE`], and a type ([`FabricsType`]) in the lowest byte of the namespace
//! identifier's dword. [`auth`] has the messages of authentication, [`property`] the registers,
//! [`discovery`] the log page of a discovery controller.

pub mod auth;
pub mod discovery;
pub mod nqn;
pub mod property;

pub use nqn::{Nqn, NqnError};

use crate::entry::{CompletionEntry, FLAG_SGL, Sgl, SubmissionEntry};
use crate::wire::{array_at, put, u16_at};

/// The opcode of every fabrics command.
pub const OPCODE: u8 = 0x7f;
/// Bytes of [`ConnectData`].
pub const CONNECT_DATA_BYTES: usize = 1024;
/// A controller that the subsystem chooses (dynamic model).
pub const ANY_CONTROLLER: u16 = 0xffff;
/// Smallest number of entries of an admin queue (Base 6.3: SQSIZE is at least 31).
pub const MIN_ADMIN_ENTRIES: u16 = 32;

/// Bytes of the fields for names in connect data.
const NQN_BYTES: usize = 256;
const SUBSYSTEM_AT: usize = 256;
const HOST_AT: usize = 512;

/// The type of a fabrics command (Base 6, FCTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FabricsType {
    /// Sets a register.
    PropertySet = 0x00,
    /// Creates a queue; for the admin queue also a controller.
    Connect = 0x01,
    /// Reads a register.
    PropertyGet = 0x04,
    /// Sends a message of the host's authentication.
    AuthenticationSend = 0x05,
    /// Receives a message of the controller's authentication.
    AuthenticationReceive = 0x06,
    /// Deletes an I/O queue.
    Disconnect = 0x08,
}

impl FabricsType {
    /// The type of an entry, if it is a fabrics command of a known type.
    pub const fn of(entry: &SubmissionEntry) -> Option<FabricsType> {
        if entry.opcode != OPCODE {
            return None;
        }
        Some(match entry.nsid as u8 {
            0x00 => FabricsType::PropertySet,
            0x01 => FabricsType::Connect,
            0x04 => FabricsType::PropertyGet,
            0x05 => FabricsType::AuthenticationSend,
            0x06 => FabricsType::AuthenticationReceive,
            0x08 => FabricsType::Disconnect,
            _ => return None,
        })
    }

    /// The entry of a command of this type.
    const fn entry(self, command_id: u16, sgl: Sgl, cdw: [u32; 6]) -> SubmissionEntry {
        SubmissionEntry { opcode: OPCODE, flags: FLAG_SGL, command_id, nsid: self as u32, sgl, cdw }
    }
}

/// Connect (Base 6.3): creates a queue pair. Its data is [`ConnectData`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Format of the command and its data; 0 is the only one.
    pub record_format: u16,
    /// Number of the queue: 0 is the admin queue, which creates a controller.
    pub queue_id: u16,
    /// Entries of the submission queue; at least 2.
    pub entries: u32,
    /// Connect attributes: bit 2 disables submission queue flow control, bits 1:0 are the priority.
    pub attributes: u8,
    /// Keep-alive timeout in milliseconds, on the admin queue; 0 for none.
    pub keep_alive_ms: u32,
}

impl Connect {
    /// In [`Connect::attributes`]: the host ignores the submission queue head.
    pub const NO_FLOW_CONTROL: u8 = 1 << 2;

    /// Reads the command's dwords.
    pub const fn parse(cdw: &[u32; 6]) -> Connect {
        Connect {
            record_format: cdw[0] as u16,
            queue_id: (cdw[0] >> 16) as u16,
            entries: (cdw[1] & 0xffff) + 1,
            attributes: (cdw[1] >> 16) as u8,
            keep_alive_ms: cdw[2],
        }
    }

    /// The entry, with 1024 bytes of data that `sgl` describes.
    ///
    /// # Panics
    /// With no entries or more than 65536.
    pub const fn entry(&self, command_id: u16, sgl: Sgl) -> SubmissionEntry {
        assert!(self.entries >= 1 && self.entries <= 1 << 16);
        let queue = self.record_format as u32 | (self.queue_id as u32) << 16;
        let size = (self.entries - 1) | (self.attributes as u32) << 16;
        FabricsType::Connect.entry(command_id, sgl, [queue, size, self.keep_alive_ms, 0, 0, 0])
    }
}

/// A parameter that a controller refuses (Base 6.3, "Connect Invalid Parameters").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidParameter {
    /// Its first byte (IPO).
    pub offset: u16,
    /// The parameter is in the data, not in the entry (IATTR).
    pub in_data: bool,
}

impl InvalidParameter {
    /// The record format.
    pub const RECORD_FORMAT: InvalidParameter = InvalidParameter { offset: 40, in_data: false };
    /// The queue identifier.
    pub const QUEUE_ID: InvalidParameter = InvalidParameter { offset: 42, in_data: false };
    /// The size of the queue.
    pub const QUEUE_SIZE: InvalidParameter = InvalidParameter { offset: 44, in_data: false };
    /// The keep-alive timeout.
    pub const KEEP_ALIVE: InvalidParameter = InvalidParameter { offset: 48, in_data: false };
    /// The host identifier.
    pub const HOST_ID: InvalidParameter = InvalidParameter { offset: 0, in_data: true };
    /// The controller identifier.
    pub const CONTROLLER_ID: InvalidParameter = InvalidParameter { offset: 16, in_data: true };
    /// The subsystem's name.
    pub const SUBSYSTEM: InvalidParameter = InvalidParameter { offset: SUBSYSTEM_AT as u16, in_data: true };
    /// The host's name.
    pub const HOST: InvalidParameter = InvalidParameter { offset: HOST_AT as u16, in_data: true };

    /// Reads dword 0 of the completion.
    pub const fn parse(result: u64) -> InvalidParameter {
        InvalidParameter { offset: result as u16, in_data: result & 1 << 16 != 0 }
    }

    /// Writes dword 0 of the completion.
    pub const fn result(self) -> u64 {
        self.offset as u64 | if self.in_data { 1 << 16 } else { 0 }
    }
}

impl std::fmt::Display for InvalidParameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            InvalidParameter::QUEUE_ID => f.write_str("the queue identifier"),
            InvalidParameter::QUEUE_SIZE => f.write_str("the queue size"),
            InvalidParameter::KEEP_ALIVE => f.write_str("the keep-alive timeout"),
            InvalidParameter::HOST_ID => f.write_str("the host identifier"),
            InvalidParameter::CONTROLLER_ID => f.write_str("the controller identifier"),
            InvalidParameter::SUBSYSTEM => f.write_str("the subsystem's name"),
            InvalidParameter::HOST => f.write_str("the host's name"),
            InvalidParameter { offset, in_data: true } => write!(f, "byte {offset} of the connect data"),
            InvalidParameter { offset, in_data: false } => write!(f, "byte {offset} of the command"),
        }
    }
}

/// The completion of a Connect that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectResponse {
    /// The controller.
    pub controller_id: u16,
    /// The host must authenticate before other commands (AUTHREQ is not 0).
    pub needs_authentication: bool,
}

impl ConnectResponse {
    /// Reads dword 0 of the completion.
    pub const fn parse(entry: &CompletionEntry) -> ConnectResponse {
        let dword = entry.result as u32;
        ConnectResponse { controller_id: dword as u16, needs_authentication: dword >> 16 != 0 }
    }

    /// Encodes dword 0 of the completion. If authentication is needed, it is NVMe in-band
    /// authentication.
    pub const fn result(self) -> u64 {
        self.controller_id as u64 | if self.needs_authentication { 1 << 17 } else { 0 }
    }
}

/// The data of a Connect: the names of host and subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// The host's identifier: a UUID, usually.
    pub host_id: [u8; 16],
    /// The controller, or [`ANY_CONTROLLER`].
    pub controller_id: u16,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host.
    pub host: Nqn,
}

impl ConnectData {
    /// Reads the data.
    ///
    /// # Errors
    /// If a name is invalid: the parameter for the completion.
    pub fn parse(data: &[u8; CONNECT_DATA_BYTES]) -> Result<ConnectData, InvalidParameter> {
        let field = |at: usize| &data[at..at + NQN_BYTES];
        Ok(ConnectData {
            host_id: array_at(data, 0),
            controller_id: u16_at(data, 16),
            subsystem: Nqn::parse_any_field(field(SUBSYSTEM_AT)).map_err(|_| InvalidParameter::SUBSYSTEM)?,
            host: Nqn::parse_field(field(HOST_AT)).map_err(|_| InvalidParameter::HOST)?,
        })
    }

    /// Writes the data.
    pub fn encode(&self) -> [u8; CONNECT_DATA_BYTES] {
        let mut data = [0; CONNECT_DATA_BYTES];
        put(&mut data, 0, self.host_id);
        put(&mut data, 16, self.controller_id.to_le_bytes());
        self.subsystem.put(&mut data, SUBSYSTEM_AT, NQN_BYTES);
        self.host.put(&mut data, HOST_AT, NQN_BYTES);
        data
    }
}

/// Disconnect (Base 6.4): deletes the I/O queue on which it is sent.
pub const fn disconnect(command_id: u16) -> SubmissionEntry {
    FabricsType::Disconnect.entry(command_id, Sgl::None, [0; 6])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nqn(text: &str) -> Nqn {
        Nqn::new(text).unwrap()
    }

    #[test]
    fn a_connect_has_the_layout_of_the_specification() {
        let connect = Connect {
            record_format: 0,
            queue_id: 3,
            entries: 128,
            attributes: Connect::NO_FLOW_CONTROL,
            keep_alive_ms: 0x1_0000,
        };
        let entry = connect.entry(9, Sgl::InCapsule { offset: 0, len: 1024 });
        let bytes = entry.encode();
        assert_eq!(bytes[..8], [0x7f, 0x40, 9, 0, 1, 0, 0, 0]);
        assert_eq!(bytes[40..52], [0, 0, 3, 0, 127, 0, 4, 0, 0, 0, 1, 0]);
        assert_eq!(FabricsType::of(&entry), Some(FabricsType::Connect));
        assert_eq!(Connect::parse(&SubmissionEntry::parse(&bytes).cdw), connect);
        assert_eq!(FabricsType::of(&disconnect(1)), Some(FabricsType::Disconnect));
        assert_eq!(FabricsType::of(&SubmissionEntry { opcode: 2, ..entry }), None);
        assert_eq!(FabricsType::of(&SubmissionEntry { nsid: 7, ..entry }), None);
    }

    #[test]
    fn connect_data_names_host_and_subsystem_and_refuses_what_is_no_name() {
        let wanted = ConnectData {
            host_id: [7; 16],
            controller_id: ANY_CONTROLLER,
            subsystem: nqn("nqn.2014-08.org.example:disk"),
            host: nqn("nqn.2014-08.org.example:host"),
        };
        let mut data = wanted.encode();
        assert_eq!(data[..18], [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0xff, 0xff]);
        assert_eq!(data[18..256], [0; 238]);
        assert_eq!(data[256..260], *b"nqn.");
        assert_eq!(data[284], 0);
        assert_eq!(data[512 + 28], 0);
        assert_eq!(ConnectData::parse(&data), Ok(wanted));
        data[512] = b'x';
        assert_eq!(ConnectData::parse(&data), Err(InvalidParameter::HOST));
        data[256..512].fill(b'n');
        assert_eq!(ConnectData::parse(&data), Err(InvalidParameter::SUBSYSTEM));
        assert_eq!(InvalidParameter::SUBSYSTEM.result(), 0x1_0100);
        assert_eq!(InvalidParameter::parse(0x1_0100), InvalidParameter::SUBSYSTEM);
    }

    #[test]
    fn a_completion_of_connect_names_the_controller() {
        let entry = CompletionEntry::new(1, crate::Status::SUCCESS);
        let response = ConnectResponse { controller_id: 0x1234, needs_authentication: false };
        let entry = CompletionEntry { result: response.result(), ..entry };
        assert_eq!(ConnectResponse::parse(&entry), response);
        let entry = CompletionEntry { result: 0x2_1234, ..entry };
        assert!(ConnectResponse::parse(&entry).needs_authentication);
    }

    proptest! {
        #[test]
        fn any_connect_is_read_as_it_was_written(
            (record_format, queue_id, attributes, keep_alive_ms) in any::<(u16, u16, u8, u32)>(), entries in 1u32..=1 << 16,
        ) {
            let connect = Connect { record_format, queue_id, entries, attributes, keep_alive_ms };
            prop_assert_eq!(Connect::parse(&connect.entry(1, Sgl::None).cdw), connect);
        }

        #[test]
        fn any_data_is_read_or_refused(seed in proptest::collection::vec(any::<u8>(), 1024), fix in any::<bool>()) {
            let mut data: [u8; 1024] = seed.try_into().unwrap();
            if fix {
                data[256..270].copy_from_slice(b"nqn.2014-08.o\0");
                data[512..526].copy_from_slice(b"nqn.2014-08.h\0");
            }
            prop_assert_eq!(ConnectData::parse(&data).is_ok(), fix);
        }
    }
}
