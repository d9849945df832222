//! The wire formats of NVMe: commands of a host and answers of a controller. No transport, no
//! system call.
//!
//! | module | content |
//! |---|---|
//! | [`command`] | the commands that Freestone sends and serves, as command dwords |
//! | [`entry`] | submission and completion queue entries, data descriptors |
//! | [`health_log`] | health of a controller and its media |
//! | [`identify`] | properties of controllers and namespaces |
//! | [`zns`] | properties of zoned namespaces, and zone reports |
//! | [`lba_status`] | which blocks of a namespace are allocated |
//! | [`reservation`] | reservations of a namespace that several hosts share |
//! | [`status`] | status codes, and the [`block::IoError`] each stands for |
//! | [`fabrics`] | Connect, properties, names, discovery |
//! | [`tcp`] | the PDUs of NVMe/TCP, both sides |
//!
//! This crate checks all input of the other side, once; invalid input is an error.
//!
//! Source: NVM Express Base Specification 2.0 ("Base"), NVM Command Set Specification 1.0 ("NVM"),
//! Zoned Namespace Command Set Specification 1.1 ("ZNS"), TCP Transport Specification 1.0 ("TCP").

#![forbid(unsafe_code)]

pub mod access_state;
pub mod command;
pub mod entry;
pub mod fabrics;
pub mod health_log;
pub mod identify;
pub mod lba_status;
pub mod reservation;
pub mod status;
pub mod tcp;
pub mod zns;

mod wire;

pub use access_state::AccessState;
pub use command::Command;
pub use entry::{CompletionEntry, Sgl, SubmissionEntry};
pub use health_log::HealthLog;
pub use identify::{CommandLimits, CommandSet, Controller, Namespace};
pub use status::Status;

/// Bytes of every identify structure (Base 5.17).
pub const IDENTIFY_BYTES: usize = 4096;
/// The data that a controller returns for Identify.
pub type IdentifyData = [u8; IDENTIFY_BYTES];
/// Smallest memory page of a controller (CAP.MPSMIN = 0, Base 3.1.3.1). It is the unit of transfer
/// limits where the real page size is not available; the limits are then too low at worst.
pub const MIN_PAGE_BYTES: u32 = 4096;
/// Limit of blocks of one read, write or write zeroes: the field has 16 bits and counts from 0.
pub const MAX_BLOCKS: u32 = 1 << 16;
/// Limit of ranges of one dataset management command: the field has 8 bits and counts from 0.
pub const MAX_RANGES: u32 = 256;

/// Data of a controller is invalid, or describes a namespace that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The format in use is not one of those that the namespace has.
    #[error("the namespace uses LBA format {index} but has {count}")]
    NoSuchFormat {
        /// The format in use.
        index: usize,
        /// Number of formats.
        count: usize,
    },
    /// The format's block size is not supported.
    #[error("LBA format {index} has blocks of 2^{shift} bytes; 2^9 to 2^16 are supported")]
    BlockSize {
        /// The format in use.
        index: usize,
        /// Its `LBADS`.
        shift: u8,
    },
    /// Blocks carry metadata.
    #[error(
        "LBA format {index} has {bytes} bytes of metadata in each block; only formats without are supported"
    )]
    Metadata {
        /// The format in use.
        index: usize,
        /// Its `MS`.
        bytes: u16,
    },
    /// The namespace has more than 2^64 bytes.
    #[error("the namespace has {0} blocks, more than can be addressed")]
    Size(u64),
    /// The namespace uses another command set.
    #[error("the namespace uses command set {0:#04x}; only NVM (0x00) and zoned (0x02) are supported")]
    CommandSet(u8),
    /// The zone size is 0, or longer than can be addressed.
    #[error("the namespace has zones of {0} blocks")]
    ZoneSize(u64),
    /// A zone report does not describe the requested zones.
    #[error("zone report: {what} is {value:#x}")]
    Report {
        /// The invalid field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}
