//! The wire format: magics, numbers, request headers, reply headers. All numbers are big-endian.

use block::IoError;

/// `NBDMAGIC` and `IHAVEOPT`, the server's greeting.
pub(super) const GREETING: u64 = 0x4e42_444d_4147_4943;
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags of either side.
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub(super) const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Options.
pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_STARTTLS: u32 = 5;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;
pub(super) const OPT_EXTENDED_HEADERS: u32 = 11;

/// Replies to options.
pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
const REP_ERR: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = REP_ERR + 1;
pub(super) const REP_ERR_INVALID: u32 = REP_ERR + 3;
pub(super) const REP_ERR_TLS_REQD: u32 = REP_ERR + 5;
pub(super) const REP_ERR_UNKNOWN: u32 = REP_ERR + 6;
pub(super) const REP_ERR_TOO_BIG: u32 = REP_ERR + 9;
pub(super) const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERR + 10;

/// Information types of NBD_OPT_INFO and NBD_OPT_GO.
pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_NAME: u16 = 1;
pub(super) const INFO_DESCRIPTION: u16 = 2;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags.
pub(super) const FLAG_HAS_FLAGS: u16 = 1;
pub(super) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(super) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(super) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(super) const FLAG_ROTATIONAL: u16 = 1 << 4;
pub(super) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(super) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const FLAG_SEND_DF: u16 = 1 << 7;
pub(super) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const FLAG_SEND_CACHE: u16 = 1 << 10;
pub(super) const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Command flags.
pub(super) const CMD_FLAG_FUA: u16 = 1;
pub(super) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const CMD_FLAG_DF: u16 = 1 << 2;
pub(super) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(super) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// Only with extended headers: the length is that of a payload that follows.
pub(super) const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

const REPLY_FLAG_DONE: u16 = 1;
const TYPE_NONE: u16 = 0;
const TYPE_OFFSET_DATA: u16 = 1;
const TYPE_BLOCK_STATUS: u16 = 5;
const TYPE_BLOCK_STATUS_EXT: u16 = 6;
const TYPE_ERROR: u16 = 0x8001;

/// Longest read and write that every server must accept.
pub(super) const MAX_PAYLOAD: u32 = 32 << 20;

/// The form of requests and replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    /// An error number, followed by the data of a read.
    #[default]
    Simple,
    /// Chunks that name their type.
    Structured,
    /// Structured, with 64-bit lengths in both directions.
    Extended,
}

impl Form {
    /// Length of a request header in bytes.
    #[inline]
    pub(super) const fn header_len(self) -> usize {
        if matches!(self, Form::Extended) { 32 } else { 28 }
    }

    /// Length of the descriptor of an extent in bytes.
    pub(super) const fn descriptor_len(self) -> usize {
        if matches!(self, Form::Extended) { 16 } else { 8 }
    }
}

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    /// A command that this server does not know.
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
    /// Parses the header at the front of `bytes`, which hold at least [`Form::header_len`] bytes.
    ///
    /// # Errors
    /// The magic, if it is not that of a request.
    #[inline]
    pub(super) fn parse(bytes: &[u8], form: Form) -> Result<Header, u32> {
        let expected = if form == Form::Extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let magic = u32_at(bytes, 0);
        if magic != expected {
            return Err(magic);
        }
        Ok(Header {
            flags: u16_at(bytes, 4),
            command: Command::of(u16_at(bytes, 6)),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            len: if form == Form::Extended { u64_at(bytes, 24) } else { u32_at(bytes, 24).into() },
        })
    }
}

/// The content of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Success without data.
    Done,
    /// All of a read's data, which follows.
    Data { len: u32 },
    /// `len` bytes of a read's data, from `at` of it on, which follow. Not in simple replies.
    Fragment { at: u64, len: u32, is_last: bool },
    /// The status of `extents` ranges in a metadata context, whose descriptors follow.
    Status { context: u32, extents: u32, is_last: bool },
    /// An error.
    Failed(Refusal),
}

/// Encodes the header of a reply to `header`'s request into `to`. Returns its length.
#[inline]
pub(super) fn encode_reply(form: Form, header: &Header, content: Content, to: &mut [u8]) -> usize {
    let mut out = Out { to, len: 0 };
    if form == Form::Simple {
        let number = if let Content::Failed(refusal) = content { refusal.number } else { 0 };
        out.u32(SIMPLE_REPLY_MAGIC).u32(number).u64(header.cookie);
        return out.len;
    }
    let is_extended = form == Form::Extended;
    let (kind, len) = match content {
        Content::Done => (TYPE_NONE, 0),
        Content::Data { len } | Content::Fragment { len, .. } => (TYPE_OFFSET_DATA, u64::from(len) + 8),
        Content::Status { extents, .. } => {
            let descriptors = u64::from(extents) * form.descriptor_len() as u64;
            if is_extended {
                (TYPE_BLOCK_STATUS_EXT, 8 + descriptors)
            } else {
                (TYPE_BLOCK_STATUS, 4 + descriptors)
            }
        }
        Content::Failed(refusal) => (TYPE_ERROR, 6 + refusal.text.len() as u64),
    };
    out.u32(if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC });
    let has_more =
        matches!(content, Content::Fragment { is_last: false, .. } | Content::Status { is_last: false, .. });
    out.u16(if has_more { 0 } else { REPLY_FLAG_DONE }).u16(kind).u64(header.cookie);
    if is_extended {
        out.u64(header.offset).u64(len);
    } else {
        out.u32(len as u32);
    }
    match content {
        Content::Done => {}
        Content::Data { .. } => drop(out.u64(header.offset)),
        Content::Fragment { at, .. } => drop(out.u64(header.offset + at)),
        Content::Status { context, extents, .. } if is_extended => drop(out.u32(context).u32(extents)),
        Content::Status { context, .. } => drop(out.u32(context)),
        Content::Failed(refusal) => {
            out.u32(refusal.number).u16(refusal.text.len() as u16).bytes(refusal.text.as_bytes());
        }
    }
    out.len
}

/// The identifier of the metadata context at a place of the export's list.
pub(super) fn context_id(place: usize) -> u32 {
    place as u32 + 1
}

/// An error: the protocol's number, and text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) number: u32,
    pub(super) text: &'static str,
}

impl Refusal {
    pub(super) const fn invalid(text: &'static str) -> Refusal {
        Refusal { number: EINVAL, text }
    }
}

pub(super) const EPERM: u32 = 1;
const EIO: u32 = 5;
const ENOMEM: u32 = 12;
pub(super) const EINVAL: u32 = 22;
pub(super) const ENOSPC: u32 = 28;
pub(super) const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

/// The server shuts down.
pub(super) const SHUTDOWN: Refusal = Refusal { number: ESHUTDOWN, text: "the server shuts down" };

/// Maps a device error to the protocol. `is_write`: the request would have stored data.
pub(super) fn refusal_of(error: IoError, is_write: bool) -> Refusal {
    let (number, text) = match error {
        IoError::OutOfRange if is_write => (ENOSPC, "beyond the end of the device"),
        IoError::OutOfRange => (EINVAL, "beyond the end of the device"),
        IoError::Misaligned => (EINVAL, "not a multiple of the block size"),
        IoError::Invalid => (EINVAL, "malformed request"),
        IoError::ReadOnly => (EPERM, "device is read-only"),
        IoError::Unsupported => (ENOTSUP, "not supported by the device"),
        IoError::NoSpace => (ENOSPC, "no space left in the backing store"),
        IoError::Medium => (EIO, "medium error"),
        IoError::Corrupt => (EIO, "damaged data or metadata"),
        IoError::TimedOut => (EIO, "timed out"),
        IoError::DeviceGone => (ESHUTDOWN, "device is gone"),
        IoError::NoMemory => (ENOMEM, "out of memory"),
        IoError::TooManyActiveZones => (EIO, "too many active zones"),
        IoError::TooManyOpenZones => (EIO, "too many open zones"),
    };
    Refusal { number, text }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
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

    const HEADER: Header = Header {
        command: Command::Read,
        flags: 1,
        cookie: 0x1122_3344_5566_7788,
        offset: 0x1000,
        len: 0x200,
    };
    const COOKIE: [u8; 8] = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88];

    fn encode(form: Form, content: Content) -> Vec<u8> {
        let mut to = [0xee; 120];
        let len = encode_reply(form, &HEADER, content, &mut to);
        assert!(to[len..].iter().all(|byte| *byte == 0xee));
        to[..len].to_vec()
    }

    #[test]
    fn request_headers_are_read_as_the_protocol_lays_them_out() {
        let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 1, 0, 0];
        bytes.extend(COOKIE);
        bytes.extend([0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0]);
        assert_eq!(bytes.len(), Form::Simple.header_len());
        assert_eq!(Header::parse(&bytes, Form::Structured), Ok(HEADER));
        bytes.extend([0; 4]);
        assert_eq!(Header::parse(&bytes, Form::Extended), Err(0x2560_9513));
        bytes[..4].copy_from_slice(&[0x21, 0xe4, 0x1c, 0x71]);
        bytes[24..].copy_from_slice(&[0, 0, 0, 0, 0, 0, 2, 0]);
        assert_eq!(bytes.len(), Form::Extended.header_len());
        assert_eq!(Header::parse(&bytes, Form::Extended), Ok(HEADER));
        assert_eq!(Header::parse(&bytes, Form::Simple), Err(0x21e4_1c71));
        let known = (0..9).map(Command::of).filter(|command| !matches!(command, Command::Unknown(_)));
        assert_eq!(known.count(), 8);
    }

    #[test]
    fn simple_replies_are_an_error_number_and_a_cookie() {
        let refusal = refusal_of(IoError::OutOfRange, true);
        for (content, number) in
            [(Content::Done, 0), (Content::Data { len: 9 }, 0), (Content::Failed(refusal), 28)]
        {
            let bytes = encode(Form::Simple, content);
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
        assert_eq!(encode(Form::Structured, Content::Done), front(0, 0));
        let data = [front(1, 0x208), vec![0, 0, 0, 0, 0, 0, 0x10, 0]].concat();
        assert_eq!(encode(Form::Structured, Content::Data { len: 0x200 }), data);
        let mut piece = [front(1, 0x108), vec![0, 0, 0, 0, 0, 0, 0x11, 0]].concat();
        let content = |is_last| Content::Fragment { at: 0x100, len: 0x100, is_last };
        assert_eq!(encode(Form::Structured, content(true)), piece);
        piece[5] = 0; // more chunks follow
        assert_eq!(encode(Form::Structured, content(false)), piece);
        let mut status = [front(5, 20), vec![0, 0, 0, 1]].concat();
        let content = |is_last| Content::Status { context: 1, extents: 2, is_last };
        assert_eq!(encode(Form::Structured, content(true)), status);
        status[5] = 0; // more chunks follow
        assert_eq!(encode(Form::Structured, content(false)), status);
        let refusal = Refusal::invalid("no");
        let error = [front(0x8001, 8), vec![0, 0, 0, 22, 0, 2, b'n', b'o']].concat();
        assert_eq!(encode(Form::Structured, Content::Failed(refusal)), error);
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
        assert_eq!(encode(Form::Extended, Content::Done), front(0, 0));
        let data = [front(1, 0x208), vec![0, 0, 0, 0, 0, 0, 0x10, 0]].concat();
        assert_eq!(encode(Form::Extended, Content::Data { len: 0x200 }), data);
        let mut status = front(6, 40);
        status.extend([0, 0, 0, 1, 0, 0, 0, 2]);
        let content = Content::Status { context: 1, extents: 2, is_last: true };
        assert_eq!(encode(Form::Extended, content), status);
    }

    #[test]
    fn every_refusal_fits_the_front_of_a_reply() {
        let errors =
            [IoError::OutOfRange, IoError::NoSpace, IoError::Misaligned, IoError::TooManyActiveZones];
        for refusal in errors.map(|error| refusal_of(error, false)).into_iter().chain([SHUTDOWN]) {
            assert!(encode(Form::Extended, Content::Failed(refusal)).len() < 120);
        }
    }
}
