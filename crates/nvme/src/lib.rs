//! NVMe as it goes over the wire: what a host asks and how a controller answers. No transport, no system call.
//!
//! | module | what it holds |
//! |---|---|
//! | [`command`] | the commands that Freestone sends and serves, as command dwords |
//! | [`entry`] | submission and completion queue entries, data descriptors |
//! | [`identify`] | what controllers and namespaces say about themselves |
//! | [`zns`] | the same for zoned namespaces, and zone reports |
//! | [`reservation`] | who may use a namespace that several hosts share |
//! | [`status`] | status codes, and the [`block::IoError`] each stands for |
//! | [`fabrics`] | Connect, properties, names, discovery |
//! | [`tcp`] | the PDUs of NVMe/TCP, both sides |
//!
//! Everything that the other side says is foreign: it is checked here, once, and what makes no sense is an error.
//!
//! Truth: NVM Express Base Specification 2.0 ("Base"), NVM Command Set Specification 1.0 ("NVM"), Zoned Namespace
//! Command Set Specification 1.1 ("ZNS"), TCP Transport Specification 1.0 ("TCP").

#![forbid(unsafe_code)]

pub mod command;
pub mod entry;
pub mod fabrics;
pub mod identify;
pub mod reservation;
pub mod status;
pub mod tcp;
pub mod zns;

mod wire;

pub use command::Command;
pub use entry::{CompletionEntry, Sgl, SubmissionEntry};
pub use identify::{CommandLimits, CommandSet, Controller, Namespace};
pub use status::Status;

/// Bytes of every identify structure (Base 5.17).
pub const IDENTIFY_BYTES: usize = 4096;
/// What a controller returns to Identify.
pub type IdentifyData = [u8; IDENTIFY_BYTES];
/// Smallest memory page that a controller can have (CAP.MPSMIN = 0, Base 3.1.3.1): the unit of its transfer
/// limits where the real one cannot be learnt, and then on the safe side.
pub const MIN_PAGE_BYTES: u32 = 4096;
/// Most blocks of one read, write or write zeroes: the field has 16 bits and counts from 0.
pub const MAX_BLOCKS: u32 = 1 << 16;
/// Most ranges of one dataset management command: the field has 8 bits and counts from 0.
pub const MAX_RANGES: u32 = 256;

/// What a controller said makes no sense, or cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The format in use is not one of those that the namespace has.
    #[error("the namespace uses LBA format {index} but has {count}")]
    NoSuchFormat {
        /// The format in use.
        index: usize,
        /// Formats there are.
        count: usize,
    },
    /// The format's blocks have a size that nobody can serve.
    #[error("LBA format {index} has blocks of 2^{shift} bytes; 2^9 to 2^16 can be served")]
    BlockSize {
        /// The format in use.
        index: usize,
        /// Its `LBADS`.
        shift: u8,
    },
    /// Blocks carry metadata.
    #[error(
        "LBA format {index} has {bytes} bytes of metadata in each block; only formats without are served"
    )]
    Metadata {
        /// The format in use.
        index: usize,
        /// Its `MS`.
        bytes: u16,
    },
    /// More bytes than 64 bits count.
    #[error("the namespace has {0} blocks, more than can be addressed")]
    Size(u64),
    /// The namespace speaks another command set.
    #[error("the namespace uses command set {0:#04x}; only NVM (0x00) and zoned (0x02) can be served")]
    CommandSet(u8),
    /// Zones without a length, or longer than can be addressed.
    #[error("the namespace has zones of {0} blocks")]
    ZoneSize(u64),
    /// A zone report that does not describe the zones that were asked for.
    #[error("zone report: {what} is {value:#x}")]
    Report {
        /// Which field.
        what: &'static str,
        /// What it holds.
        value: u64,
    },
}
