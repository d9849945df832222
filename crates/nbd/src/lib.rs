//! The wire format of the NBD protocol, for both sides: the driver `nbd`, the export `nbd`, and the
//! fuzzers between them. All numbers are big-endian. Pure: no socket, no memory of its own.
//!
//! | module | content |
//! |---|---|
//! | [`handshake`] | magics, options, replies to options, transmission flags |
//! | [`client`] | the handshake of a client, as a state machine |
//! | [`request`] | commands, their flags, the header of a request |
//! | [`reply`] | the header of a reply or of a part of it |
//! | [`error`] | error numbers, and the [`block::IoError`] that each stands for |
//!
//! Source: the NBD protocol, `doc/proto.md` of the NBD project.

#![forbid(unsafe_code)]

pub mod client;
pub mod error;
pub mod handshake;
pub mod reply;
pub mod request;

/// The form of requests and replies, from the plainest to the richest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Replies {
    /// An error number, followed by the data of a read. This form holds until another is
    /// negotiated.
    #[default]
    Simple,
    /// Parts: data, holes, errors.
    Structured,
    /// Structured, with 64-bit lengths in both directions.
    Extended,
}

impl Replies {
    /// Length of a request's header in bytes.
    #[inline]
    pub const fn header_len(self) -> usize {
        if matches!(self, Replies::Extended) { request::MAX_HEADER } else { 28 }
    }

    /// Length of the descriptor of an extent in bytes.
    pub const fn descriptor_len(self) -> usize {
        if matches!(self, Replies::Extended) { 16 } else { 8 }
    }
}

/// The number of two bytes at `at`.
///
/// # Panics
/// When `bytes` ends before; so do the next two.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

/// The number of four bytes at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The number of eight bytes at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
