//! The wire format of requests: headers, flags, errors. All numbers are big-endian.
//!
//! Source: the NBD protocol, "Request message" and "Values"; its extension "extended headers".

use block::{IoError, Status};

/// Opens a request, with the compact header and with the extended one.
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

/// Longest request header.
pub(super) const MAX_REQUEST_HEADER: usize = 32;

/// The transmission flags that the client uses.
pub(super) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(super) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(super) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(super) const FLAG_ROTATIONAL: u16 = 1 << 4;
pub(super) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(super) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Command flags.
pub(super) const CMD_FLAG_FUA: u16 = 1;
pub(super) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// Only with extended headers: the length is that of the payload that follows.
const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// The request exceeds a limit of the server.
pub(super) const EOVERFLOW: u32 = 75;
/// The server shuts down.
pub(super) const ESHUTDOWN: u32 = 108;

/// The form of requests and replies, from the plainest to the richest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Replies {
    /// An error number, followed by the data of a read.
    Simple,
    /// Parts: data, holes, errors.
    Structured,
    /// Structured, with 64-bit lengths.
    #[default]
    Extended,
}

impl Replies {
    /// Length of the descriptor of an extent in bytes.
    pub(super) fn descriptor_len(self) -> usize {
        if self == Replies::Extended { 16 } else { 8 }
    }

    /// The length and the status in the descriptor of an extent.
    pub(super) fn extent(self, descriptor: &[u8]) -> (u64, Status) {
        let number = |bytes: &[u8]| bytes.iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
        let (len, flags) = descriptor.split_at(self.descriptor_len() / 2);
        (number(len), Status::from_bits(number(flags) as u32))
    }
}

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    Trim = 4,
    WriteZeroes = 6,
    BlockStatus = 7,
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) command: Command,
    pub(super) flags: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    /// Fits 32 bits unless headers are extended.
    pub(super) len: u64,
}

impl Header {
    /// The announcement of an orderly disconnect.
    pub(super) const DISCONNECT: Header =
        Header { command: Command::Disconnect, flags: 0, cookie: 0, offset: 0, len: 0 };

    /// Encodes the header into `to`. Returns its length.
    pub(super) fn encode(&self, replies: Replies, to: &mut [u8; MAX_REQUEST_HEADER]) -> usize {
        let is_extended = replies == Replies::Extended;
        let (magic, mut flags) =
            (if is_extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC }, self.flags);
        if is_extended && self.command == Command::Write {
            flags |= CMD_FLAG_PAYLOAD_LEN;
        }
        to[..4].copy_from_slice(&magic.to_be_bytes());
        to[4..6].copy_from_slice(&flags.to_be_bytes());
        to[6..8].copy_from_slice(&(self.command as u16).to_be_bytes());
        to[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        to[16..24].copy_from_slice(&self.offset.to_be_bytes());
        if is_extended {
            to[24..32].copy_from_slice(&self.len.to_be_bytes());
            return 32;
        }
        let len = u32::try_from(self.len).expect("longer requests are cut before");
        to[24..28].copy_from_slice(&len.to_be_bytes());
        28
    }
}

/// The meaning of the protocol's error number. Unlisted numbers count as `EINVAL`, as the protocol
/// demands.
pub(super) fn error_of(number: u32) -> IoError {
    match number {
        1 => IoError::ReadOnly,             // EPERM
        5 => IoError::Medium,               // EIO
        12 => IoError::NoMemory,            // ENOMEM
        28 => IoError::NoSpace,             // ENOSPC
        95 => IoError::Unsupported,         // ENOTSUP
        ESHUTDOWN => IoError::DeviceGone,   // ESHUTDOWN
        22 | EOVERFLOW => IoError::Invalid, // EINVAL, EOVERFLOW
        _ => IoError::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_laid_out_as_the_protocol_says() {
        let header = Header {
            command: Command::Write,
            flags: CMD_FLAG_FUA,
            cookie: 0x1122_3344_5566_7788,
            offset: 0x0102_0304_0506_0708,
            len: 0x2000,
        };
        let mut bytes = [0xee; MAX_REQUEST_HEADER];
        assert_eq!(header.encode(Replies::Structured, &mut bytes), 28);
        let common = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
        assert_eq!(bytes[8..24], common);
        assert_eq!(bytes[24..], [0, 0, 0x20, 0, 0xee, 0xee, 0xee, 0xee]);
        assert_eq!(header.encode(Replies::Extended, &mut bytes), 32);
        assert_eq!(bytes[..8], [0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1]);
        assert_eq!(bytes[8..24], common);
        assert_eq!(bytes[24..], [0, 0, 0, 0, 0, 0, 0x20, 0]);
    }
}
