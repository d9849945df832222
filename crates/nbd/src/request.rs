//! Requests: commands, their flags, the header. Source: the NBD protocol, "Request message",
//! "Command flags", "Request types"; its extension "extended headers".

use crate::{Replies, u16_at, u32_at, u64_at};

const MAGIC: u32 = 0x2560_9513;
const EXTENDED_MAGIC: u32 = 0x21e4_1c71;

/// Length of the longest header in bytes.
pub const MAX_HEADER: usize = 32;

/// Command flag: forced unit access.
pub const CMD_FLAG_FUA: u16 = 1;
/// Command flag: write zeroes keeps the blocks allocated.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// Command flag: the reply of a read is not fragmented.
pub const CMD_FLAG_DF: u16 = 1 << 2;
/// Command flag: one extent suffices.
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// Command flag: write zeroes is refused where it would be slow.
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// Command flag, only with extended headers: the length is that of a payload that follows.
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read data.
    Read,
    /// Write the data that follows.
    Write,
    /// End the connection.
    Disconnect,
    /// Make completed writes durable.
    Flush,
    /// Discard.
    Trim,
    /// Read into the server's cache.
    Cache,
    /// Write zeroes.
    WriteZeroes,
    /// Describe extents.
    BlockStatus,
    /// A number without a command.
    Unknown(u16),
}

impl Command {
    fn of(number: u16) -> Command {
        match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            number => Command::Unknown(number),
        }
    }

    #[inline]
    fn number(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disconnect => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::Cache => 5,
            Command::WriteZeroes => 6,
            Command::BlockStatus => 7,
            Command::Unknown(number) => number,
        }
    }
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The command.
    pub command: Command,
    /// Its flags.
    pub flags: u16,
    /// The client's name for the request, which the reply repeats.
    pub cookie: u64,
    /// Offset on the export in bytes.
    pub offset: u64,
    /// Length in bytes. Fits 32 bits unless headers are extended.
    pub len: u64,
}

impl Header {
    /// The announcement of an orderly disconnect.
    pub const DISCONNECT: Header =
        Header { command: Command::Disconnect, flags: 0, cookie: 0, offset: 0, len: 0 };

    /// Encodes the header into `to`, a write with [`CMD_FLAG_PAYLOAD_LEN`] where headers are
    /// extended. Returns its length.
    ///
    /// # Panics
    /// When the length needs extended headers and they are not negotiated.
    #[inline]
    pub fn encode(&self, replies: Replies, to: &mut [u8; MAX_HEADER]) -> usize {
        let is_extended = replies == Replies::Extended;
        let (magic, mut flags) = (if is_extended { EXTENDED_MAGIC } else { MAGIC }, self.flags);
        if is_extended && self.command == Command::Write {
            flags |= CMD_FLAG_PAYLOAD_LEN;
        }
        to[..4].copy_from_slice(&magic.to_be_bytes());
        to[4..6].copy_from_slice(&flags.to_be_bytes());
        to[6..8].copy_from_slice(&self.command.number().to_be_bytes());
        to[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        to[16..24].copy_from_slice(&self.offset.to_be_bytes());
        if is_extended {
            to[24..].copy_from_slice(&self.len.to_be_bytes());
        } else {
            let len = u32::try_from(self.len).expect("longer requests are cut before");
            to[24..28].copy_from_slice(&len.to_be_bytes());
        }
        replies.header_len()
    }

    /// Parses the header at the front of `bytes`, which hold at least [`Replies::header_len`]
    /// bytes.
    ///
    /// # Errors
    /// The magic, if it is not that of a request.
    #[inline]
    pub fn parse(bytes: &[u8], replies: Replies) -> Result<Header, u32> {
        let is_extended = replies == Replies::Extended;
        let magic = u32_at(bytes, 0);
        if magic != if is_extended { EXTENDED_MAGIC } else { MAGIC } {
            return Err(magic);
        }
        Ok(Header {
            flags: u16_at(bytes, 4),
            command: Command::of(u16_at(bytes, 6)),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            len: if is_extended { u64_at(bytes, 24) } else { u32_at(bytes, 24).into() },
        })
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
        let mut bytes = [0xee; MAX_HEADER];
        assert_eq!(header.encode(Replies::Structured, &mut bytes), 28);
        let common = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
        assert_eq!(bytes[8..24], common);
        assert_eq!(bytes[24..], [0, 0, 0x20, 0, 0xee, 0xee, 0xee, 0xee]);
        assert_eq!(Header::parse(&bytes[..28], Replies::Simple), Ok(header));
        assert_eq!(Header::parse(&bytes, Replies::Extended), Err(MAGIC));
        assert_eq!(header.encode(Replies::Extended, &mut bytes), 32);
        assert_eq!(bytes[..8], [0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1]);
        assert_eq!(bytes[8..24], common);
        assert_eq!(bytes[24..], [0, 0, 0, 0, 0, 0, 0x20, 0]);
        let flags = CMD_FLAG_FUA | CMD_FLAG_PAYLOAD_LEN;
        assert_eq!(Header::parse(&bytes, Replies::Extended), Ok(Header { flags, ..header }));
        assert_eq!(Header::parse(&bytes, Replies::Simple), Err(EXTENDED_MAGIC));
    }

    #[test]
    fn eight_numbers_are_commands() {
        let known = (0..9).map(Command::of).filter(|command| !matches!(command, Command::Unknown(_)));
        assert_eq!(known.count(), 8);
        assert!((0..u16::MAX).all(|number| Command::of(number).number() == number));
    }
}
