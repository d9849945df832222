//! The handshake: negotiates the form of replies and the export.
//!
//! ```text
//!   greeting ─► STARTTLS (if wanted) ─► EXTENDED_HEADERS ─► STRUCTURED_REPLY (if unknown)
//!     ─► SET_META_CONTEXT ─► GO ─► requests
//!                            └► EXPORT_NAME, for servers without GO
//! ```
//!
//! Source: the NBD protocol, "Handshake", "Option types", "Option reply types", "Size constraints".

use super::error::OpenError;
use super::options::Options;
use crate::stream::StreamError;
use crate::stream::connect::Timed;
use nbd::Replies;
use nbd::handshake::{
    BASE_ALLOCATION, FLAG_CAN_MULTI_CONN, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, FLAG_READ_ONLY,
    FLAG_ROTATIONAL, FLAG_SEND_FAST_ZERO, FLAG_SEND_FLUSH, FLAG_SEND_FUA, FLAG_SEND_TRIM,
    FLAG_SEND_WRITE_ZEROES, GREETING, INFO_BLOCK_SIZE, INFO_EXPORT, MAX_PAYLOAD, OLD_STYLE, OPT_EXPORT_NAME,
    OPT_EXTENDED_HEADERS, OPT_GO, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, PADDING, REP_ACK, REP_ERR, REP_ERR_TLS_REQD, REP_ERR_UNKNOWN, REP_ERR_UNSUP,
    REP_INFO, REP_META_CONTEXT, option_name,
};
use std::io;

/// Longest reply to an option; strings have at most 4096 bytes.
const MAX_REPLY: u32 = 16 << 10;
/// Maximum replies to one option.
const MAX_REPLIES: usize = 64;
/// Maximum length of a server's text in a message.
const MAX_TEXT: usize = 200;

/// The properties of an export, as the server reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Size of the export in bytes.
    pub size: u64,
    /// The negotiated form of replies.
    pub replies: Replies,
    /// Smallest request and alignment in bytes; at least 512.
    pub min_block: u32,
    /// Preferred request size in bytes.
    pub preferred_block: u32,
    /// Longest read or write in bytes.
    pub max_payload: u32,
    /// All transmission flags.
    pub flags: u16,
}

impl Facts {
    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.flags & FLAG_READ_ONLY != 0
    }

    /// Whether the server has a flush, and so a cache.
    pub fn has_flush(&self) -> bool {
        self.flags & FLAG_SEND_FLUSH != 0
    }

    /// Whether writes can be durable when they complete.
    pub fn has_fua(&self) -> bool {
        self.flags & FLAG_SEND_FUA != 0
    }

    /// Whether the medium rotates.
    pub fn is_rotational(&self) -> bool {
        self.flags & FLAG_ROTATIONAL != 0
    }

    /// Whether the server supports trim.
    pub fn has_trim(&self) -> bool {
        self.flags & FLAG_SEND_TRIM != 0
    }

    /// Whether zeroes can be written without sending them.
    pub fn has_write_zeroes(&self) -> bool {
        self.flags & FLAG_SEND_WRITE_ZEROES != 0
    }

    /// Whether the server can report if that is faster than sending them.
    pub fn has_fast_zero(&self) -> bool {
        self.has_write_zeroes() && self.flags & FLAG_SEND_FAST_ZERO != 0
    }

    /// Whether several connections share one cache.
    pub fn can_multi_conn(&self) -> bool {
        self.flags & FLAG_CAN_MULTI_CONN != 0
    }

    fn new(size: u64, flags: u16, replies: Replies, sizes: Option<[u32; 3]>) -> Result<Facts, OpenError> {
        let [min, preferred, max] = sizes.unwrap_or([512, 4096, MAX_PAYLOAD]);
        let is_sound = min.is_power_of_two()
            && min <= 65536
            && preferred.is_power_of_two()
            && preferred >= min
            && max >= min;
        if !is_sound {
            return Err(OpenError::Protocol(format!(
                "invalid block sizes: minimum {min}, preferred {preferred}, maximum {max}"
            )));
        }
        let min_block = min.max(512);
        // Longer requests would delay others without a benefit.
        let max_payload = max.min(MAX_PAYLOAD) & !(min_block - 1);
        if max_payload == 0 {
            return Err(OpenError::Export(format!("maximum payload of {max} bytes is less than a block")));
        }
        Ok(Facts { size, replies, min_block, preferred_block: preferred.max(min_block), max_payload, flags })
    }
}

/// Negotiates with the server as the options demand. Requests can follow on the stream. Returns the
/// properties of the export, and the identifier of `base:allocation`, if the server has it.
///
/// # Errors
/// When the server refuses, violates the protocol, or does not answer in time.
pub(super) fn negotiate(
    stream: &mut Timed<'_, '_>,
    options: &Options,
) -> Result<(Facts, Option<u32>), OpenError> {
    let Options { export, replies: richest, .. } = options;
    let [greeting, style] = [number(stream)?, number(stream)?];
    match (greeting, style) {
        (GREETING, OPTION_MAGIC) => {}
        (GREETING, OLD_STYLE) => {
            return Err(OpenError::Protocol(
                "the server supports only the handshake from before 2009".into(),
            ));
        }
        _ => return Err(OpenError::Protocol(format!("invalid greeting {greeting:#x} {style:#x}"))),
    }
    let mut flags = [0; 2];
    stream.read(&mut flags)?;
    let known = u16::from_be_bytes(flags) & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    stream.write(&u32::from(known).to_be_bytes())?;
    let has_zeroes = known & FLAG_NO_ZEROES == 0;
    if known & FLAG_FIXED_NEWSTYLE == 0 {
        if options.tls.is_some() {
            return Err(OpenError::NoTls(
                " (the server supports only the handshake from before 2011)".into(),
            ));
        }
        return Ok((by_name(stream, export, Replies::Simple, has_zeroes)?, None));
    }
    if let Some(session) = options.session()? {
        start_tls(stream, session)?;
    }
    let mut replies = Replies::Simple;
    for (wanted, option) in
        [(Replies::Extended, OPT_EXTENDED_HEADERS), (Replies::Structured, OPT_STRUCTURED_REPLY)]
    {
        if wanted <= *richest && replies == Replies::Simple && is_granted(stream, option)? {
            replies = wanted;
        }
    }
    let context = if replies == Replies::Simple { None } else { set_context(stream, export)? };
    match go(stream, export, replies)? {
        Some(facts) => Ok((facts, context)),
        None if replies == Replies::Extended => {
            Err(OpenError::Protocol("the server supports extended headers, but not NBD_OPT_GO".into()))
        }
        None => Ok((by_name(stream, export, replies, has_zeroes)?, context)),
    }
}

/// `NBD_OPT_STARTTLS` and the TLS handshake: all following data goes through the session.
/// Everything received in the clear becomes void, except for the greeting.
fn start_tls(stream: &mut Timed<'_, '_>, session: tls::Session) -> Result<(), OpenError> {
    ask(stream, OPT_STARTTLS, &[])?;
    let reply = Reply::read(stream, OPT_STARTTLS)?;
    match reply.kind {
        REP_ACK if reply.data.is_empty() => Ok(stream.secure(session)?),
        kind if kind & REP_ERR != 0 => Err(OpenError::NoTls(reply.text())),
        kind => Err(OpenError::Protocol(format!("the server answers NBD_OPT_STARTTLS with {kind:#x}"))),
    }
}

/// Requests an optional feature. Returns whether the server grants it.
fn is_granted(stream: &mut Timed<'_, '_>, option: u32) -> Result<bool, OpenError> {
    ask(stream, option, &[])?;
    let reply = Reply::read(stream, option)?;
    match reply.kind {
        REP_ACK => Ok(true),
        REP_ERR_TLS_REQD => Err(reply.refusal(option, "")),
        kind if kind & REP_ERR != 0 => Ok(false),
        kind => {
            Err(OpenError::Protocol(format!("the server answers {} with {kind:#x}", option_name(option))))
        }
    }
}

/// Selects `base:allocation`. Returns its identifier, or `None` if the server does not have it.
fn set_context(stream: &mut Timed<'_, '_>, export: &str) -> Result<Option<u32>, OpenError> {
    let mut data = string(export.as_bytes());
    // One context is requested.
    data.extend(1u32.to_be_bytes());
    data.extend(string(BASE_ALLOCATION.as_bytes()));
    ask(stream, OPT_SET_META_CONTEXT, &data)?;
    let mut context = None;
    for _ in 0..MAX_REPLIES {
        let reply = Reply::read(stream, OPT_SET_META_CONTEXT)?;
        match reply.kind {
            REP_META_CONTEXT if reply.data.get(4..) == Some(BASE_ALLOCATION.as_bytes()) => {
                context = reply.be32(0)
            }
            REP_META_CONTEXT => {
                return Err(OpenError::Protocol(
                    "the server selects a context that was not requested".into(),
                ));
            }
            REP_ACK => return Ok(context),
            kind if kind & REP_ERR != 0 => return Ok(None),
            kind => {
                let option = option_name(OPT_SET_META_CONTEXT);
                return Err(OpenError::Protocol(format!("the server answers {option} with {kind:#x}")));
            }
        }
    }
    Err(OpenError::Protocol("the server selected too many contexts".into()))
}

/// `NBD_OPT_GO`. Returns `None` if the server does not support it.
fn go(stream: &mut Timed<'_, '_>, export: &str, replies: Replies) -> Result<Option<Facts>, OpenError> {
    let mut data = string(export.as_bytes());
    // One kind of information is requested.
    data.extend(1u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    ask(stream, OPT_GO, &data)?;
    let (mut about, mut sizes) = (None, None);
    for _ in 0..MAX_REPLIES {
        let reply = Reply::read(stream, OPT_GO)?;
        match reply.kind {
            REP_INFO => match (reply.be16(0), reply.data.len()) {
                (Some(INFO_EXPORT), 12) => about = reply.be64(2).zip(reply.be16(10)),
                (Some(INFO_BLOCK_SIZE), 14) => {
                    sizes = reply.be32(2).zip(reply.be32(6)).zip(reply.be32(10));
                }
                (Some(kind @ (INFO_EXPORT | INFO_BLOCK_SIZE)), len) => {
                    return Err(OpenError::Protocol(format!("information {kind} has {len} bytes")));
                }
                _ => {}
            },
            REP_ACK => {
                let Some((size, flags)) = about else {
                    return Err(OpenError::Protocol(
                        "the server sent no information about the export".into(),
                    ));
                };
                return Facts::new(size, flags, replies, sizes.map(|((a, b), c)| [a, b, c])).map(Some);
            }
            REP_ERR_UNSUP => return Ok(None),
            kind if kind & REP_ERR != 0 => return Err(reply.refusal(OPT_GO, export)),
            kind => return Err(OpenError::Protocol(format!("the server answers NBD_OPT_GO with {kind:#x}"))),
        }
    }
    Err(OpenError::Protocol("the server sent too much information about the export".into()))
}

/// `NBD_OPT_EXPORT_NAME`, which a server refuses by disconnecting.
fn by_name(
    stream: &mut Timed<'_, '_>,
    export: &str,
    replies: Replies,
    has_zeroes: bool,
) -> Result<Facts, OpenError> {
    ask(stream, OPT_EXPORT_NAME, export.as_bytes())?;
    let size = number(stream).map_err(|error| match error {
        OpenError::Stream(StreamError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            OpenError::NoExport { export: export.to_owned(), text: " (it disconnected)".into() }
        }
        error => error,
    })?;
    let mut flags = [0; 2];
    stream.read(&mut flags)?;
    if has_zeroes {
        stream.read(&mut [0; PADDING])?;
    }
    Facts::new(size, u16::from_be_bytes(flags), replies, None)
}

fn ask(stream: &mut Timed<'_, '_>, option: u32, data: &[u8]) -> Result<(), OpenError> {
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend(option.to_be_bytes());
    message.extend((data.len() as u32).to_be_bytes());
    message.extend(data);
    Ok(stream.write(&message)?)
}

/// A string in the data of an option: its length, and its bytes.
fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text].concat()
}

fn number(stream: &mut Timed<'_, '_>) -> Result<u64, OpenError> {
    let mut bytes = [0; 8];
    stream.read(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

/// A server's reply to an option.
struct Reply {
    kind: u32,
    data: Vec<u8>,
}

impl Reply {
    fn read(stream: &mut Timed<'_, '_>, option: u32) -> Result<Reply, OpenError> {
        let mut header = [0; 20];
        stream.read(&mut header)?;
        let header = Reply { kind: 0, data: header.to_vec() };
        let (magic, about) = (header.be64(0).unwrap_or(0), header.be32(8).unwrap_or(0));
        let (kind, len) = (header.be32(12).unwrap_or(0), header.be32(16).unwrap_or(0));
        if magic != OPTION_REPLY_MAGIC || about != option {
            let message = format!(
                "the server answers {} with a reply {magic:#x} to option {about}",
                option_name(option)
            );
            return Err(OpenError::Protocol(message));
        }
        if len > MAX_REPLY {
            return Err(OpenError::Protocol(format!(
                "the server answers {} with {len} bytes",
                option_name(option)
            )));
        }
        let mut data = vec![0; len as usize];
        stream.read(&mut data)?;
        Ok(Reply { kind, data })
    }

    /// The server's text, in brackets, or empty.
    fn text(&self) -> String {
        match &*self.data {
            [] => String::new(),
            data => {
                let text: String = String::from_utf8_lossy(data).trim().chars().take(MAX_TEXT).collect();
                // The text ends up on terminals and in logs.
                format!(" ({})", text.escape_debug())
            }
        }
    }

    /// The error that this reply stands for.
    fn refusal(&self, option: u32, export: &str) -> OpenError {
        let text = self.text();
        match self.kind {
            REP_ERR_TLS_REQD => OpenError::TlsRequired(text),
            REP_ERR_UNKNOWN => OpenError::NoExport { export: export.to_owned(), text },
            reply => OpenError::Refused { option: option_name(option), reply, text },
        }
    }

    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.data.get(at..at + N)?.try_into().ok()
    }

    fn be16(&self, at: usize) -> Option<u16> {
        self.array(at).map(u16::from_be_bytes)
    }

    fn be32(&self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_be_bytes)
    }

    fn be64(&self, at: usize) -> Option<u64> {
        self.array(at).map(u64::from_be_bytes)
    }
}
