//! The header of a reply, as a server sends it.

use super::{
    EXTENDED_MAGIC, FLAG_DONE, SIMPLE_MAGIC, STRUCTURED_MAGIC, TYPE_DATA, TYPE_ERROR, TYPE_NONE, TYPE_STATUS,
    TYPE_STATUS_EXTENDED,
};
use crate::Replies;
use crate::error::Refusal;
use crate::request::Header;

/// The content of a reply that a server sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Success without data.
    Done,
    /// All of a read's data, which follows.
    Data {
        /// Its length in bytes.
        len: u32,
    },
    /// `len` bytes of a read's data, from `at` of it on, which follow. Not in simple replies.
    Fragment {
        /// Offset in the read.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// Whether the reply ends with it.
        is_last: bool,
    },
    /// The status of `extents` ranges in a metadata context, whose descriptors follow.
    Status {
        /// The context's identifier.
        context: u32,
        /// Number of descriptors.
        extents: u32,
        /// Whether the reply ends with it.
        is_last: bool,
    },
    /// An error.
    Failed(Refusal),
}

/// Encodes the header of a reply to `header`'s request into `to`. Returns its length.
#[inline]
pub fn encode(replies: Replies, header: &Header, reply: Reply, to: &mut [u8]) -> usize {
    let mut out = Out { to, len: 0 };
    if replies == Replies::Simple {
        let number = if let Reply::Failed(refusal) = reply { refusal.number } else { 0 };
        out.u32(SIMPLE_MAGIC).u32(number).u64(header.cookie);
        return out.len;
    }
    let is_extended = replies == Replies::Extended;
    let (kind, len) = match reply {
        Reply::Done => (TYPE_NONE, 0),
        Reply::Data { len } | Reply::Fragment { len, .. } => (TYPE_DATA, u64::from(len) + 8),
        Reply::Status { extents, .. } => {
            let descriptors = u64::from(extents) * replies.descriptor_len() as u64;
            if is_extended { (TYPE_STATUS_EXTENDED, 8 + descriptors) } else { (TYPE_STATUS, 4 + descriptors) }
        }
        Reply::Failed(refusal) => (TYPE_ERROR, 6 + refusal.text.len() as u64),
    };
    out.u32(if is_extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC });
    let has_more =
        matches!(reply, Reply::Fragment { is_last: false, .. } | Reply::Status { is_last: false, .. });
    out.u16(if has_more { 0 } else { FLAG_DONE }).u16(kind).u64(header.cookie);
    if is_extended {
        out.u64(header.offset).u64(len);
    } else {
        out.u32(len as u32);
    }
    match reply {
        Reply::Done => {}
        Reply::Data { .. } => drop(out.u64(header.offset)),
        Reply::Fragment { at, .. } => drop(out.u64(header.offset + at)),
        Reply::Status { context, extents, .. } if is_extended => drop(out.u32(context).u32(extents)),
        Reply::Status { context, .. } => drop(out.u32(context)),
        Reply::Failed(refusal) => {
            out.u32(refusal.number).u16(refusal.text.len() as u16).bytes(refusal.text.as_bytes());
        }
    }
    out.len
}

/// Numbers, one after the other.
struct Out<'a> {
    to: &'a mut [u8],
    len: usize,
}

impl Out<'_> {
    #[inline]
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.to[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        self
    }

    #[inline]
    fn u16(&mut self, number: u16) -> &mut Self {
        self.bytes(&number.to_be_bytes())
    }

    #[inline]
    fn u32(&mut self, number: u32) -> &mut Self {
        self.bytes(&number.to_be_bytes())
    }

    #[inline]
    fn u64(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{SHUTDOWN, refusal_of};
    use crate::request::Command;
    use block::IoError;

    const HEADER: Header = Header {
        command: Command::Read,
        flags: 1,
        cookie: 0x1122_3344_5566_7788,
        offset: 0x1000,
        len: 0x200,
    };
    const COOKIE: [u8; 8] = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88];

    fn encode(replies: Replies, reply: Reply) -> Vec<u8> {
        let mut to = [0xee; 120];
        let len = super::encode(replies, &HEADER, reply, &mut to);
        assert!(to[len..].iter().all(|byte| *byte == 0xee));
        to[..len].to_vec()
    }

    #[test]
    fn simple_replies_are_an_error_number_and_a_cookie() {
        let refusal = refusal_of(IoError::OutOfRange, true);
        for (content, number) in [(Reply::Done, 0), (Reply::Data { len: 9 }, 0), (Reply::Failed(refusal), 28)]
        {
            let bytes = encode(Replies::Simple, content);
            assert_eq!(bytes[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, number]);
            assert_eq!(bytes[8..], COOKIE);
        }
    }

    #[test]
    fn structured_replies_say_what_they_bring() {
        let front = |kind: u16, len: u32| {
            let mut bytes = vec![0x66, 0x8e, 0x33, 0xef, 0, 1];
            bytes.extend(kind.to_be_bytes());
            bytes.extend(COOKIE);
            bytes.extend(len.to_be_bytes());
            bytes
        };
        assert_eq!(encode(Replies::Structured, Reply::Done), front(0, 0));
        let data = [front(1, 0x208), vec![0, 0, 0, 0, 0, 0, 0x10, 0]].concat();
        assert_eq!(encode(Replies::Structured, Reply::Data { len: 0x200 }), data);
        let mut piece = [front(1, 0x108), vec![0, 0, 0, 0, 0, 0, 0x11, 0]].concat();
        let content = |is_last| Reply::Fragment { at: 0x100, len: 0x100, is_last };
        assert_eq!(encode(Replies::Structured, content(true)), piece);
        piece[5] = 0; // more chunks follow
        assert_eq!(encode(Replies::Structured, content(false)), piece);
        let mut status = [front(5, 20), vec![0, 0, 0, 1]].concat();
        let content = |is_last| Reply::Status { context: 1, extents: 2, is_last };
        assert_eq!(encode(Replies::Structured, content(true)), status);
        status[5] = 0; // more chunks follow
        assert_eq!(encode(Replies::Structured, content(false)), status);
        let refusal = Refusal::invalid("no");
        let error = [front(0x8001, 8), vec![0, 0, 0, 22, 0, 2, b'n', b'o']].concat();
        assert_eq!(encode(Replies::Structured, Reply::Failed(refusal)), error);
    }

    #[test]
    fn extended_replies_repeat_the_offset_and_have_long_lengths() {
        let front = |kind: u16, len: u64| {
            let mut bytes = vec![0x6e, 0x8a, 0x27, 0x8c, 0, 1];
            bytes.extend(kind.to_be_bytes());
            bytes.extend(COOKIE);
            bytes.extend([0, 0, 0, 0, 0, 0, 0x10, 0]);
            bytes.extend(len.to_be_bytes());
            bytes
        };
        assert_eq!(encode(Replies::Extended, Reply::Done), front(0, 0));
        let data = [front(1, 0x208), vec![0, 0, 0, 0, 0, 0, 0x10, 0]].concat();
        assert_eq!(encode(Replies::Extended, Reply::Data { len: 0x200 }), data);
        let mut status = front(6, 40);
        status.extend([0, 0, 0, 1, 0, 0, 0, 2]);
        let content = Reply::Status { context: 1, extents: 2, is_last: true };
        assert_eq!(encode(Replies::Extended, content), status);
    }

    #[test]
    fn every_refusal_fits_the_front_of_a_reply() {
        let errors =
            [IoError::OutOfRange, IoError::NoSpace, IoError::Misaligned, IoError::TooManyActiveZones];
        for refusal in errors.map(|error| refusal_of(error, false)).into_iter().chain([SHUTDOWN]) {
            assert!(encode(Replies::Extended, Reply::Failed(refusal)).len() < 120);
        }
    }
}
