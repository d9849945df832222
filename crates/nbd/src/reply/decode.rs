//! The header of a reply, as a client receives it.

use super::{
    EXTENDED_MAGIC, FLAG_DONE, IS_ERROR, SIMPLE_MAGIC, STRUCTURED_MAGIC, TYPE_DATA, TYPE_ERROR,
    TYPE_ERROR_OFFSET, TYPE_HOLE, TYPE_NONE, TYPE_STATUS, TYPE_STATUS_EXTENDED,
};
use crate::Replies;
use block::Status;

/// Longest header of a reply: an extended header and a hole.
pub const MAX_FRONT: usize = 32 + 12;
/// Longest text of an error, by the protocol.
const MAX_TEXT: u32 = 4096;
/// Maximum bytes of the descriptors in a reply: more than servers send.
const MAX_DESCRIPTORS: u32 = 32 << 20;
/// Maximum bytes of an error besides its text. Known errors have 8.
const MAX_ERROR_FIELDS: u32 = 4096;

/// The header of a reply or of one part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Front {
    /// The request that it answers.
    pub cookie: u64,
    /// Whether it is the last of its request.
    pub is_last: bool,
    /// The offset of the request, which extended headers repeat.
    pub request_offset: Option<u64>,
    /// Its content.
    pub content: Content,
}

/// The content of a reply, or of one part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A simple reply. The data of a successful read follows.
    Simple {
        /// 0, or the error number.
        error: u32,
    },
    /// No content.
    Nothing,
    /// `len` bytes of data follow.
    Data {
        /// Offset on the export.
        offset: u64,
        /// Length; not 0.
        len: u32,
    },
    /// Zeroes, which are not sent.
    Hole {
        /// Offset on the export.
        offset: u64,
        /// Length; not 0.
        len: u32,
    },
    /// The status of extents in a metadata context. `len` bytes of descriptors follow, a number of
    /// whole ones ([`Replies::descriptor_len`]).
    Status {
        /// The identifier of the context.
        context: u32,
        /// Length of the descriptors; not 0.
        len: u32,
    },
    /// The request fails. `rest` bytes for people follow.
    Error {
        /// The error number; not 0.
        error: u32,
        /// Length of text and fields to skip.
        rest: u32,
    },
}

/// A protocol violation of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Invalid magic.
    #[error("a reply starts with {0:#010x}")]
    Magic(u32),
    /// Unknown type.
    #[error("a reply has a part of type {0:#06x}")]
    Type(u16),
    /// The length does not match the type.
    #[error("a part of type {kind:#06x} is {len} bytes long")]
    Length {
        /// The type.
        kind: u16,
        /// The length.
        len: u64,
    },
    /// The error number is 0, or the text is longer than the part.
    #[error("an error is malformed: number {error}, text of {text} bytes")]
    Error {
        /// The error number.
        error: u32,
        /// The length of the text.
        text: u16,
    },
    /// An empty part that is not the last.
    #[error("an empty part is not the last of its reply")]
    EmptyNotLast,
    /// No request has this cookie.
    #[error("a reply without a request: cookie {0:#x}")]
    Cookie(u64),
    /// The form of the reply does not match its request.
    #[error("a reply does not fit its request")]
    Mismatch,
    /// Data outside of the requested range.
    #[error("a reply of {len} bytes at {offset} lies outside its request")]
    Outside {
        /// Offset on the export.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// The same data twice.
    #[error("a reply repeats {len} bytes at {offset}")]
    Overlap {
        /// Offset on the export.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// A read ended before all of its data was received.
    #[error("a reply ends before all of its data was received")]
    Incomplete,
    /// Extents of no length, or of none at all where some are due.
    #[error("a block status has an empty extent, or none")]
    EmptyExtent,
    /// Too many parts.
    #[error("a reply has too many parts")]
    Scattered,
    /// The connection ended.
    #[error("the server closed the connection")]
    Closed,
}

/// The length and the status in the descriptor of an extent, which has [`Replies::descriptor_len`]
/// bytes.
pub fn extent(descriptor: &[u8], replies: Replies) -> (u64, Status) {
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
    let (len, flags) = descriptor.split_at(replies.descriptor_len() / 2);
    (number(len), Status::from_bits(number(flags) as u32))
}

/// Parses the header of a reply at the start of `bytes`. Returns it and its length, or `None` when
/// more bytes are needed. From a [`Replies::Structured`] server it accepts simple replies as well;
/// the caller knows the request and decides.
///
/// # Errors
/// When no further bytes can complete it to a valid header.
#[inline]
pub fn decode(bytes: &[u8], replies: Replies) -> Result<Option<(Front, usize)>, Violation> {
    let Some(magic) = be32(bytes, 0) else { return Ok(None) };
    match (magic, replies) {
        (SIMPLE_MAGIC, Replies::Simple | Replies::Structured) => Ok(simple(bytes)),
        (STRUCTURED_MAGIC, Replies::Structured) => {
            let Some(len) = be32(bytes, 16) else { return Ok(None) };
            part(bytes, None, len.into(), 20)
        }
        (EXTENDED_MAGIC, Replies::Extended) => {
            let (Some(offset), Some(len)) = (be64(bytes, 16), be64(bytes, 24)) else { return Ok(None) };
            part(bytes, Some(offset), len, 32)
        }
        _ => Err(Violation::Magic(magic)),
    }
}

fn simple(bytes: &[u8]) -> Option<(Front, usize)> {
    let (error, cookie) = (be32(bytes, 4)?, be64(bytes, 8)?);
    let content = Content::Simple { error };
    Some((Front { cookie, is_last: true, request_offset: None, content }, 16))
}

/// Parses a part of a reply with a header of `at` bytes and a payload of `len`.
#[inline]
fn part(
    bytes: &[u8],
    request_offset: Option<u64>,
    len: u64,
    at: usize,
) -> Result<Option<(Front, usize)>, Violation> {
    let (Some(flags), Some(kind), Some(cookie)) = (be16(bytes, 4), be16(bytes, 6), be64(bytes, 8)) else {
        return Ok(None);
    };
    let wrong = Violation::Length { kind, len };
    let Ok(len) = u32::try_from(len) else { return Err(wrong) };
    let is_last = flags & FLAG_DONE != 0;
    let (content, fields) = match kind {
        TYPE_NONE if len != 0 => return Err(wrong),
        TYPE_NONE if !is_last => return Err(Violation::EmptyNotLast),
        TYPE_NONE => (Content::Nothing, 0),
        TYPE_DATA if len < 9 => return Err(wrong),
        TYPE_DATA => {
            let Some(offset) = be64(bytes, at) else { return Ok(None) };
            (Content::Data { offset, len: len - 8 }, 8)
        }
        TYPE_HOLE if len != 12 => return Err(wrong),
        TYPE_HOLE => {
            let (Some(offset), Some(hole)) = (be64(bytes, at), be32(bytes, at + 8)) else { return Ok(None) };
            if hole == 0 {
                return Err(Violation::Length { kind, len: 0 });
            }
            (Content::Hole { offset, len: hole }, 12)
        }
        TYPE_STATUS | TYPE_STATUS_EXTENDED => {
            let is_extended = kind == TYPE_STATUS_EXTENDED;
            if is_extended != request_offset.is_some() {
                return Err(Violation::Type(kind));
            }
            let (fields, unit) = if is_extended { (8, 16) } else { (4, 8) };
            let descriptors = len.checked_sub(fields).filter(|len| *len > 0 && len.is_multiple_of(unit));
            let Some(descriptors) = descriptors.filter(|len| *len <= MAX_DESCRIPTORS) else {
                return Err(wrong);
            };
            let Some(context) = be32(bytes, at) else { return Ok(None) };
            if is_extended {
                let Some(count) = be32(bytes, at + 4) else { return Ok(None) };
                if u64::from(count) * u64::from(unit) != u64::from(descriptors) {
                    return Err(wrong);
                }
            }
            (Content::Status { context, len: descriptors }, fields as usize)
        }
        _ if kind & IS_ERROR == 0 => return Err(Violation::Type(kind)),
        _ => {
            let least = if kind == TYPE_ERROR_OFFSET { 14 } else { 6 };
            if len < least || len > least + MAX_TEXT + MAX_ERROR_FIELDS {
                return Err(wrong);
            }
            let (Some(error), Some(text)) = (be32(bytes, at), be16(bytes, at + 4)) else { return Ok(None) };
            let is_known = matches!(kind, TYPE_ERROR | TYPE_ERROR_OFFSET);
            if error == 0 || u32::from(text) > len - least || (is_known && u32::from(text) > MAX_TEXT) {
                return Err(Violation::Error { error, text });
            }
            (Content::Error { error, rest: len - 6 }, 6)
        }
    };
    Ok(Some((Front { cookie, is_last, request_offset, content }, at + fields)))
}

#[inline]
fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[inline]
fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

#[inline]
fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

#[inline]
fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn structured(flags: u16, kind: u16, len: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = STRUCTURED_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn extended(flags: u16, kind: u16, len: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = EXTENDED_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(4096u64.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn at(offset: u64, tail: &[u8]) -> Vec<u8> {
        [&offset.to_be_bytes(), tail].concat()
    }

    #[test]
    fn every_form_is_read_whole_and_waits_for_its_last_byte() {
        let simple = [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5][..], &7u64.to_be_bytes()].concat();
        let cases = [
            (Replies::Simple, simple.clone(), Content::Simple { error: 5 }, true),
            (Replies::Structured, simple, Content::Simple { error: 5 }, true),
            (Replies::Structured, structured(1, 0, 0, &[]), Content::Nothing, true),
            (
                Replies::Structured,
                structured(0, 1, 520, &at(512, &[])),
                Content::Data { offset: 512, len: 512 },
                false,
            ),
            (
                Replies::Extended,
                extended(1, 2, 12, &at(512, &[0, 1, 0, 0])),
                Content::Hole { offset: 512, len: 65536 },
                true,
            ),
            (
                Replies::Structured,
                structured(1, 0x8001, 9, &[0, 0, 0, 5, 0, 3]),
                Content::Error { error: 5, rest: 3 },
                true,
            ),
            (
                Replies::Structured,
                structured(0, 0x8002, 14, &[0, 0, 0, 5, 0, 0]),
                Content::Error { error: 5, rest: 8 },
                false,
            ),
            (
                Replies::Structured,
                structured(1, 0x9999, 6, &[0, 0, 0, 99, 0, 0]),
                Content::Error { error: 99, rest: 0 },
                true,
            ),
        ];
        for (replies, bytes, content, is_last) in cases {
            for len in 0..bytes.len() {
                assert_eq!(decode(&bytes[..len], replies), Ok(None), "{len} bytes of {content:?}");
            }
            let request_offset = (replies == Replies::Extended).then_some(4096);
            let front = Front { cookie: 7, is_last, request_offset, content };
            assert!(bytes.len() <= MAX_FRONT);
            let more = [&bytes[..], &[1, 2, 3]].concat();
            assert_eq!(decode(&more, replies), Ok(Some((front, bytes.len()))));
        }
    }

    #[test]
    fn an_invalid_reply_is_refused() {
        let simple = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0];
        let refused = |bytes: &[u8], replies| decode(bytes, replies).unwrap_err();
        assert_eq!(refused(&simple, Replies::Extended), Violation::Magic(SIMPLE_MAGIC));
        assert_eq!(refused(&structured(1, 0, 0, &[]), Replies::Simple), Violation::Magic(STRUCTURED_MAGIC));
        assert_eq!(refused(&[0; 4], Replies::Structured), Violation::Magic(0));
        assert_eq!(refused(&structured(0, 0, 0, &[]), Replies::Structured), Violation::EmptyNotLast);
        assert_eq!(refused(&structured(1, 7, 0, &[]), Replies::Structured), Violation::Type(7));
        for (kind, len) in [
            (0, 1),
            (1, 8),
            (1, 0),
            (2, 11),
            (2, 13),
            (0x8001, 5),
            (0x8002, 13),
            (0x8003, 5),
            (0x8001, u32::MAX),
        ] {
            let wrong = Violation::Length { kind, len: len.into() };
            assert_eq!(refused(&structured(1, kind, len, &[]), Replies::Structured), wrong);
        }
        let wrong = Violation::Length { kind: 1, len: 1 << 32 };
        assert_eq!(refused(&extended(1, 1, 1 << 32, &[]), Replies::Extended), wrong);
        let empty_hole = structured(1, 2, 12, &at(0, &[0; 4]));
        assert_eq!(refused(&empty_hole, Replies::Structured), Violation::Length { kind: 2, len: 0 });
        for (number, text) in [(0u8, 0u8), (5, 4)] {
            let bytes = structured(1, 0x8001, 9, &[0, 0, 0, number, 0, text]);
            let wrong = Violation::Error { error: number.into(), text: text.into() };
            assert_eq!(refused(&bytes, Replies::Structured), wrong);
        }
    }
}
