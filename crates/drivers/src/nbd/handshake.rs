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
use super::wire::{
    FLAG_CAN_MULTI_CONN, FLAG_READ_ONLY, FLAG_ROTATIONAL, FLAG_SEND_FAST_ZERO, FLAG_SEND_FLUSH,
    FLAG_SEND_FUA, FLAG_SEND_TRIM, FLAG_SEND_WRITE_ZEROES, Replies,
};
use crate::stream::StreamError;
use crate::stream::connect::Stream;
use std::io;

/// `NBDMAGIC` and the magic that follows it: of options, or of old servers without options.
const GREETING: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OLD_STYLE: u64 = 0x0000_4202_8186_1253;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const FLAG_FIXED_NEWSTYLE: u16 = 1;
const FLAG_NO_ZEROES: u16 = 2;

const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERR: u32 = 1 << 31;
const REP_ERR_UNSUP: u32 = REP_ERR + 1;
const REP_ERR_TLS_REQD: u32 = REP_ERR + 5;
const REP_ERR_UNKNOWN: u32 = REP_ERR + 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The context of block status that tells data from holes.
const ALLOCATION: &[u8] = b"base:allocation";

/// Longest reply to an option; strings have at most 4096 bytes.
const MAX_REPLY: u32 = 16 << 10;
/// Maximum replies to one option.
const MAX_REPLIES: usize = 64;
/// Maximum length of a server's text in a message.
const MAX_TEXT: usize = 200;

/// Payload that every server supports, in bytes.
const DEFAULT_MAX_PAYLOAD: u32 = 32 << 20;

/// An option, by its number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Opt {
    ExportName = 1,
    StartTls = 5,
    Go = 7,
    StructuredReply = 8,
    SetMetaContext = 10,
    ExtendedHeaders = 11,
}

impl Opt {
    fn name(self) -> &'static str {
        match self {
            Opt::ExportName => "NBD_OPT_EXPORT_NAME",
            Opt::StartTls => "NBD_OPT_STARTTLS",
            Opt::Go => "NBD_OPT_GO",
            Opt::StructuredReply => "NBD_OPT_STRUCTURED_REPLY",
            Opt::SetMetaContext => "NBD_OPT_SET_META_CONTEXT",
            Opt::ExtendedHeaders => "NBD_OPT_EXTENDED_HEADERS",
        }
    }
}

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
        let [min, preferred, max] = sizes.unwrap_or([512, 4096, DEFAULT_MAX_PAYLOAD]);
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
        let max_payload = max.min(DEFAULT_MAX_PAYLOAD) & !(min_block - 1);
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
    stream: &mut Stream<'_, '_>,
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
    for (wanted, opt) in
        [(Replies::Extended, Opt::ExtendedHeaders), (Replies::Structured, Opt::StructuredReply)]
    {
        if wanted <= *richest && replies == Replies::Simple && is_granted(stream, opt)? {
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
fn start_tls(stream: &mut Stream<'_, '_>, session: tls::Session) -> Result<(), OpenError> {
    ask(stream, Opt::StartTls, &[])?;
    let reply = Reply::read(stream, Opt::StartTls)?;
    match reply.kind {
        REP_ACK if reply.data.is_empty() => Ok(stream.secure(session)?),
        kind if kind & REP_ERR != 0 => Err(OpenError::NoTls(reply.text())),
        kind => Err(OpenError::Protocol(format!("the server answers NBD_OPT_STARTTLS with {kind:#x}"))),
    }
}

/// Requests an optional feature. Returns whether the server grants it.
fn is_granted(stream: &mut Stream<'_, '_>, opt: Opt) -> Result<bool, OpenError> {
    ask(stream, opt, &[])?;
    let reply = Reply::read(stream, opt)?;
    match reply.kind {
        REP_ACK => Ok(true),
        REP_ERR_TLS_REQD => Err(reply.refusal(opt, "")),
        kind if kind & REP_ERR != 0 => Ok(false),
        kind => Err(OpenError::Protocol(format!("the server answers {} with {kind:#x}", opt.name()))),
    }
}

/// Selects `base:allocation`. Returns its identifier, or `None` if the server does not have it.
fn set_context(stream: &mut Stream<'_, '_>, export: &str) -> Result<Option<u32>, OpenError> {
    let mut data = string(export.as_bytes());
    // One context is requested.
    data.extend(1u32.to_be_bytes());
    data.extend(string(ALLOCATION));
    ask(stream, Opt::SetMetaContext, &data)?;
    let mut context = None;
    for _ in 0..MAX_REPLIES {
        let reply = Reply::read(stream, Opt::SetMetaContext)?;
        match reply.kind {
            REP_META_CONTEXT if reply.data.get(4..) == Some(ALLOCATION) => context = reply.be32(0),
            REP_META_CONTEXT => {
                return Err(OpenError::Protocol(
                    "the server selects a context that was not requested".into(),
                ));
            }
            REP_ACK => return Ok(context),
            kind if kind & REP_ERR != 0 => return Ok(None),
            kind => {
                let option = Opt::SetMetaContext.name();
                return Err(OpenError::Protocol(format!("the server answers {option} with {kind:#x}")));
            }
        }
    }
    Err(OpenError::Protocol("the server selected too many contexts".into()))
}

/// `NBD_OPT_GO`. Returns `None` if the server does not support it.
fn go(stream: &mut Stream<'_, '_>, export: &str, replies: Replies) -> Result<Option<Facts>, OpenError> {
    let mut data = string(export.as_bytes());
    // One kind of information is requested.
    data.extend(1u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    ask(stream, Opt::Go, &data)?;
    let (mut about, mut sizes) = (None, None);
    for _ in 0..MAX_REPLIES {
        let reply = Reply::read(stream, Opt::Go)?;
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
            kind if kind & REP_ERR != 0 => return Err(reply.refusal(Opt::Go, export)),
            kind => return Err(OpenError::Protocol(format!("the server answers NBD_OPT_GO with {kind:#x}"))),
        }
    }
    Err(OpenError::Protocol("the server sent too much information about the export".into()))
}

/// `NBD_OPT_EXPORT_NAME`, which a server refuses by disconnecting.
fn by_name(
    stream: &mut Stream<'_, '_>,
    export: &str,
    replies: Replies,
    has_zeroes: bool,
) -> Result<Facts, OpenError> {
    ask(stream, Opt::ExportName, export.as_bytes())?;
    let size = number(stream).map_err(|error| match error {
        OpenError::Stream(StreamError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            OpenError::NoExport { export: export.to_owned(), text: " (it disconnected)".into() }
        }
        error => error,
    })?;
    let mut flags = [0; 2];
    stream.read(&mut flags)?;
    if has_zeroes {
        stream.read(&mut [0; 124])?;
    }
    Facts::new(size, u16::from_be_bytes(flags), replies, None)
}

fn ask(stream: &mut Stream<'_, '_>, opt: Opt, data: &[u8]) -> Result<(), OpenError> {
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend((opt as u32).to_be_bytes());
    message.extend((data.len() as u32).to_be_bytes());
    message.extend(data);
    Ok(stream.write(&message)?)
}

/// A string in the data of an option: its length, and its bytes.
fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text].concat()
}

fn number(stream: &mut Stream<'_, '_>) -> Result<u64, OpenError> {
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
    fn read(stream: &mut Stream<'_, '_>, opt: Opt) -> Result<Reply, OpenError> {
        let mut header = [0; 20];
        stream.read(&mut header)?;
        let header = Reply { kind: 0, data: header.to_vec() };
        let (magic, about) = (header.be64(0).unwrap_or(0), header.be32(8).unwrap_or(0));
        let (kind, len) = (header.be32(12).unwrap_or(0), header.be32(16).unwrap_or(0));
        if magic != OPTION_REPLY_MAGIC || about != opt as u32 {
            let message =
                format!("the server answers {} with a reply {magic:#x} to option {about}", opt.name());
            return Err(OpenError::Protocol(message));
        }
        if len > MAX_REPLY {
            return Err(OpenError::Protocol(format!("the server answers {} with {len} bytes", opt.name())));
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
    fn refusal(&self, opt: Opt, export: &str) -> OpenError {
        let text = self.text();
        match self.kind {
            REP_ERR_TLS_REQD => OpenError::TlsRequired(text),
            REP_ERR_UNKNOWN => OpenError::NoExport { export: export.to_owned(), text },
            reply => OpenError::Refused { option: opt.name(), reply, text },
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
