//! The handshake of a client. Pure: bytes in, bytes out.
//!
//! ```text
//!   greeting ─► STARTTLS (if wanted) ─► EXTENDED_HEADERS ─► STRUCTURED_REPLY (if unknown)
//!     ─► SET_META_CONTEXT ─► GO ─► requests
//!                            └► EXPORT_NAME, for servers without GO
//! ```
//!
//! The caller reads exactly as many bytes as the handshake needs. So it receives neither the first
//! record of TLS nor a reply to a request too early.
//!
//! Source: the NBD protocol, "Handshake", "Option types", "Option reply types", "Size constraints".

use crate::handshake::{
    BASE_ALLOCATION, FLAG_CAN_MULTI_CONN, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, FLAG_READ_ONLY,
    FLAG_ROTATIONAL, FLAG_SEND_FAST_ZERO, FLAG_SEND_FLUSH, FLAG_SEND_FUA, FLAG_SEND_TRIM,
    FLAG_SEND_WRITE_ZEROES, GREETING, INFO_BLOCK_SIZE, INFO_EXPORT, MAX_PAYLOAD, OLD_STYLE, OPT_EXPORT_NAME,
    OPT_EXTENDED_HEADERS, OPT_GO, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, PADDING, REP_ACK, REP_ERR, REP_ERR_TLS_REQD, REP_ERR_UNKNOWN, REP_ERR_UNSUP,
    REP_INFO, REP_META_CONTEXT, option_name,
};
use crate::{Replies, u16_at, u32_at, u64_at};

/// Bytes of a server's greeting, before its flags.
const GREETING_BYTES: usize = 16;
/// Bytes of the header of a reply to an option.
const REPLY_BYTES: usize = 20;
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

    fn new(
        size: u64,
        flags: u16,
        replies: Replies,
        sizes: Option<[u32; 3]>,
    ) -> Result<Facts, HandshakeError> {
        let [min, preferred, max] = sizes.unwrap_or([512, 4096, MAX_PAYLOAD]);
        let is_sound = min.is_power_of_two()
            && min <= 65536
            && preferred.is_power_of_two()
            && preferred >= min
            && max >= min;
        if !is_sound {
            return Err(HandshakeError::Protocol(format!(
                "invalid block sizes: minimum {min}, preferred {preferred}, maximum {max}"
            )));
        }
        let min_block = min.max(512);
        // Longer requests would delay others without a benefit.
        let max_payload = max.min(MAX_PAYLOAD) & !(min_block - 1);
        if max_payload == 0 {
            return Err(HandshakeError::Payload(max));
        }
        Ok(Facts { size, replies, min_block, preferred_block: preferred.max(min_block), max_payload, flags })
    }
}

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The server does not speak NBD, or violates the protocol.
    #[error("not a usable NBD server: {0}")]
    Protocol(String),
    /// The server requires TLS, which is not configured.
    #[error("the server demands TLS (tls=require or nbds://){0}")]
    TlsRequired(String),
    /// TLS is configured, and the server does not support it.
    #[error("the server does not support TLS, which is required{0}")]
    NoTls(String),
    /// The server has no export of this name.
    #[error("the server has no export {export:?}{text}")]
    NoExport {
        /// The requested name.
        export: String,
        /// The server's text, in brackets, or empty.
        text: String,
    },
    /// The server refused an option.
    #[error("the server refuses {option} with error {reply:#x}{text}")]
    Refused {
        /// The refused option.
        option: &'static str,
        /// The protocol's error number.
        reply: u32,
        /// The server's text, in brackets, or empty.
        text: String,
    },
    /// The server accepts no request that is as long as a block.
    #[error("the export cannot be used: maximum payload of {0} bytes is less than a block")]
    Payload(u32),
}

/// The result of the negotiation: requests can follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The properties of the export.
    pub facts: Facts,
    /// The identifier of `base:allocation`; `None` if the server does not have it.
    pub context: Option<u32>,
}

/// The next action of the caller, after it has sent everything that it got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Reads exactly this many bytes, for the next [`Handshake::advance`].
    Read(usize),
    /// Performs the TLS handshake. All later data goes through TLS, and the next
    /// [`Handshake::advance`] gets no bytes.
    StartTls,
    /// Ends the handshake.
    Agree(Agreed),
}

/// The handshake of one connection.
#[derive(Debug)]
pub struct Handshake {
    export: String,
    /// The richest form of replies to ask for.
    richest: Replies,
    wants_tls: bool,
    /// Whether padding follows the reply to `NBD_OPT_EXPORT_NAME`.
    has_zeroes: bool,
    replies: Replies,
    context: Option<u32>,
    /// The option that was asked last.
    asked: Asked,
    state: State,
}

/// The bytes that the handshake waits for.
#[derive(Clone, Copy, Debug)]
enum State {
    /// None: nothing was read yet.
    New,
    Greeting,
    Flags,
    ReplyHeader,
    ReplyData {
        kind: u32,
    },
    /// None: TLS is to be established.
    Tls,
    /// The size of the export that was chosen by name.
    Size,
    /// The flags of this export, and perhaps padding.
    Rest {
        size: u64,
    },
}

/// An option, and what its replies said so far.
#[derive(Clone, Copy, Debug)]
enum Asked {
    StartTls,
    /// An optional form of requests and replies.
    Form(Replies),
    Context {
        found: Option<u32>,
        replies: usize,
    },
    Go {
        about: Option<(u64, u16)>,
        sizes: Option<[u32; 3]>,
        replies: usize,
    },
}

impl Asked {
    fn option(self) -> u32 {
        match self {
            Asked::StartTls => OPT_STARTTLS,
            Asked::Form(Replies::Extended) => OPT_EXTENDED_HEADERS,
            Asked::Form(_) => OPT_STRUCTURED_REPLY,
            Asked::Context { .. } => OPT_SET_META_CONTEXT,
            Asked::Go { .. } => OPT_GO,
        }
    }
}

impl Handshake {
    /// A handshake that chooses `export` and asks for replies of a form up to `richest`. With
    /// `wants_tls`, a server without TLS is refused.
    pub fn new(export: &str, richest: Replies, wants_tls: bool) -> Handshake {
        Handshake {
            export: export.to_owned(),
            richest,
            wants_tls,
            has_zeroes: true,
            replies: Replies::Simple,
            context: None,
            asked: Asked::StartTls,
            state: State::New,
        }
    }

    /// Takes the bytes that the last step has read (none at first), and adds those that the server
    /// gets to `to_send`.
    ///
    /// # Errors
    /// When the server refuses, or violates the protocol. Nothing is to be sent then.
    ///
    /// # Panics
    /// When `received` has another length than the last [`Step`].
    pub fn advance(&mut self, received: &[u8], to_send: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        match self.state {
            State::New => Ok(self.read(State::Greeting, GREETING_BYTES)),
            State::Greeting => self.greeted(u64_at(received, 0), u64_at(received, 8)),
            State::Flags => self.flagged(u16_at(received, 0), to_send),
            State::ReplyHeader => self.replied(received, to_send),
            State::ReplyData { kind } => self.take(Reply { kind, data: received }, to_send),
            State::Tls => Ok(self.ask_form(Replies::Extended, to_send)),
            State::Size => {
                let rest = 2 + if self.has_zeroes { PADDING } else { 0 };
                Ok(self.read(State::Rest { size: u64_at(received, 0) }, rest))
            }
            State::Rest { size } => self.agree(size, u16_at(received, 0), None),
        }
    }

    /// The meaning of the end of the stream before the next bytes, if it has one.
    pub fn end(&self) -> Option<HandshakeError> {
        // A server refuses a name by disconnecting.
        let is_refusal = matches!(self.state, State::Size);
        is_refusal.then(|| HandshakeError::NoExport {
            export: self.export.clone(),
            text: " (it disconnected)".into(),
        })
    }

    fn read(&mut self, state: State, len: usize) -> Step {
        self.state = state;
        Step::Read(len)
    }

    fn greeted(&mut self, greeting: u64, style: u64) -> Result<Step, HandshakeError> {
        match (greeting, style) {
            (GREETING, OPTION_MAGIC) => Ok(self.read(State::Flags, 2)),
            (GREETING, OLD_STYLE) => Err(HandshakeError::Protocol(
                "the server supports only the handshake from before 2009".into(),
            )),
            _ => Err(HandshakeError::Protocol(format!("invalid greeting {greeting:#x} {style:#x}"))),
        }
    }

    fn flagged(&mut self, flags: u16, to_send: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        let known = flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        self.has_zeroes = known & FLAG_NO_ZEROES == 0;
        let is_fixed = known & FLAG_FIXED_NEWSTYLE != 0;
        if !is_fixed && self.wants_tls {
            return Err(HandshakeError::NoTls(
                " (the server supports only the handshake from before 2011)".into(),
            ));
        }
        to_send.extend(u32::from(known).to_be_bytes());
        Ok(match (is_fixed, self.wants_tls) {
            (false, _) => self.choose_by_name(to_send),
            (true, true) => self.ask(Asked::StartTls, &[], to_send),
            (true, false) => self.ask_form(Replies::Extended, to_send),
        })
    }

    /// Sends an option.
    fn ask(&mut self, asked: Asked, data: &[u8], to_send: &mut Vec<u8>) -> Step {
        self.asked = asked;
        encode_option(asked.option(), data, to_send);
        self.read(State::ReplyHeader, REPLY_BYTES)
    }

    /// Asks for a form of replies, or for the next plainer one that the caller wants.
    fn ask_form(&mut self, form: Replies, to_send: &mut Vec<u8>) -> Step {
        match form.min(self.richest) {
            Replies::Simple => self.ask_go(to_send),
            form => self.ask(Asked::Form(form), &[], to_send),
        }
    }

    /// Selects `base:allocation`.
    fn ask_context(&mut self, to_send: &mut Vec<u8>) -> Step {
        let mut data = string(self.export.as_bytes());
        // One context is requested.
        data.extend(1u32.to_be_bytes());
        data.extend(string(BASE_ALLOCATION.as_bytes()));
        self.ask(Asked::Context { found: None, replies: 0 }, &data, to_send)
    }

    fn ask_go(&mut self, to_send: &mut Vec<u8>) -> Step {
        let mut data = string(self.export.as_bytes());
        // One kind of information is requested.
        data.extend(1u16.to_be_bytes());
        data.extend(INFO_BLOCK_SIZE.to_be_bytes());
        self.ask(Asked::Go { about: None, sizes: None, replies: 0 }, &data, to_send)
    }

    /// `NBD_OPT_EXPORT_NAME`, for servers without `NBD_OPT_GO`.
    fn choose_by_name(&mut self, to_send: &mut Vec<u8>) -> Step {
        encode_option(OPT_EXPORT_NAME, self.export.as_bytes(), to_send);
        self.read(State::Size, 8)
    }

    /// Checks the header of a reply to the last option.
    fn replied(&mut self, header: &[u8], to_send: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        let option = self.asked.option();
        let (magic, about, kind, len) =
            (u64_at(header, 0), u32_at(header, 8), u32_at(header, 12), u32_at(header, 16));
        if magic != OPTION_REPLY_MAGIC || about != option {
            return Err(answered(option, &format!("a reply {magic:#x} to option {about}")));
        }
        if len > MAX_REPLY {
            return Err(answered(option, &format!("{len} bytes")));
        }
        if len == 0 {
            return self.take(Reply { kind, data: &[] }, to_send);
        }
        Ok(self.read(State::ReplyData { kind }, len as usize))
    }

    /// Takes a complete reply to the last option.
    fn take(&mut self, reply: Reply<'_>, to_send: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        let (option, kind) = (self.asked.option(), reply.kind);
        let is_error = kind & REP_ERR != 0;
        match self.asked {
            Asked::StartTls => match kind {
                REP_ACK if reply.data.is_empty() => {
                    self.state = State::Tls;
                    Ok(Step::StartTls)
                }
                _ if is_error => Err(HandshakeError::NoTls(reply.text())),
                _ => Err(answered(option, &format!("{kind:#x}"))),
            },
            Asked::Form(form) => match kind {
                REP_ACK => {
                    self.replies = form;
                    Ok(self.ask_context(to_send))
                }
                REP_ERR_TLS_REQD => Err(reply.refusal(option, "")),
                _ if is_error && form == Replies::Extended => Ok(self.ask_form(Replies::Structured, to_send)),
                _ if is_error => Ok(self.ask_go(to_send)),
                _ => Err(answered(option, &format!("{kind:#x}"))),
            },
            Asked::Context { found, replies } => match kind {
                REP_META_CONTEXT if reply.data.get(4..) != Some(BASE_ALLOCATION.as_bytes()) => Err(
                    HandshakeError::Protocol("the server selects a context that was not requested".into()),
                ),
                REP_META_CONTEXT if replies + 1 == MAX_REPLIES => {
                    Err(HandshakeError::Protocol("the server selected too many contexts".into()))
                }
                REP_META_CONTEXT => {
                    self.asked = Asked::Context { found: Some(u32_at(reply.data, 0)), replies: replies + 1 };
                    Ok(self.read(State::ReplyHeader, REPLY_BYTES))
                }
                REP_ACK => {
                    self.context = found;
                    Ok(self.ask_go(to_send))
                }
                _ if is_error => Ok(self.ask_go(to_send)),
                _ => Err(answered(option, &format!("{kind:#x}"))),
            },
            Asked::Go { mut about, mut sizes, replies } => match kind {
                REP_INFO => {
                    let data = reply.data;
                    match (data.first_chunk().map(|kind| u16::from_be_bytes(*kind)), data.len()) {
                        (Some(INFO_EXPORT), 12) => about = Some((u64_at(data, 2), u16_at(data, 10))),
                        (Some(INFO_BLOCK_SIZE), 14) => sizes = Some([2, 6, 10].map(|at| u32_at(data, at))),
                        (Some(kind @ (INFO_EXPORT | INFO_BLOCK_SIZE)), len) => {
                            return Err(HandshakeError::Protocol(format!(
                                "information {kind} has {len} bytes"
                            )));
                        }
                        _ => {}
                    }
                    if replies + 1 == MAX_REPLIES {
                        return Err(HandshakeError::Protocol(
                            "the server sent too much information about the export".into(),
                        ));
                    }
                    self.asked = Asked::Go { about, sizes, replies: replies + 1 };
                    Ok(self.read(State::ReplyHeader, REPLY_BYTES))
                }
                REP_ACK => {
                    let Some((size, flags)) = about else {
                        return Err(HandshakeError::Protocol(
                            "the server sent no information about the export".into(),
                        ));
                    };
                    self.agree(size, flags, sizes)
                }
                REP_ERR_UNSUP if self.replies == Replies::Extended => Err(HandshakeError::Protocol(
                    "the server supports extended headers, but not NBD_OPT_GO".into(),
                )),
                REP_ERR_UNSUP => Ok(self.choose_by_name(to_send)),
                _ if is_error => Err(reply.refusal(option, &self.export)),
                _ => Err(answered(option, &format!("{kind:#x}"))),
            },
        }
    }

    fn agree(&self, size: u64, flags: u16, sizes: Option<[u32; 3]>) -> Result<Step, HandshakeError> {
        let facts = Facts::new(size, flags, self.replies, sizes)?;
        Ok(Step::Agree(Agreed { facts, context: self.context }))
    }
}

fn encode_option(option: u32, data: &[u8], to_send: &mut Vec<u8>) {
    to_send.extend(OPTION_MAGIC.to_be_bytes());
    to_send.extend(option.to_be_bytes());
    to_send.extend((data.len() as u32).to_be_bytes());
    to_send.extend(data);
}

/// A string in the data of an option: its length, and its bytes.
fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text].concat()
}

/// The error of an answer that the protocol does not allow.
fn answered(option: u32, with: &str) -> HandshakeError {
    HandshakeError::Protocol(format!("the server answers {} with {with}", option_name(option)))
}

/// A server's reply to an option.
struct Reply<'a> {
    kind: u32,
    data: &'a [u8],
}

impl Reply<'_> {
    /// The server's text, in brackets, or empty.
    fn text(&self) -> String {
        if self.data.is_empty() {
            return String::new();
        }
        let text: String = String::from_utf8_lossy(self.data).trim().chars().take(MAX_TEXT).collect();
        // The text ends up on terminals and in logs.
        format!(" ({})", text.escape_debug())
    }

    /// The error that this reply stands for.
    fn refusal(&self, option: u32, export: &str) -> HandshakeError {
        let text = self.text();
        match self.kind {
            REP_ERR_TLS_REQD => HandshakeError::TlsRequired(text),
            REP_ERR_UNKNOWN => HandshakeError::NoExport { export: export.to_owned(), text },
            reply => HandshakeError::Refused { option: option_name(option), reply, text },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;
    const FLAGS: u16 = 0x0d6d;

    /// The bytes that the client has sent, and how its handshake ended.
    type Played = (Vec<u8>, Result<Agreed, HandshakeError>);

    /// A server that says all of `said`, whatever the client sends.
    fn play(mut handshake: Handshake, said: &[u8]) -> Played {
        let (mut sent, mut at, mut received) = (Vec::new(), 0, Vec::new());
        loop {
            match handshake.advance(&received, &mut sent) {
                Err(error) => return (sent, Err(error)),
                Ok(Step::Agree(agreed)) => {
                    assert_eq!(at, said.len(), "bytes behind the handshake were not read");
                    return (sent, Ok(agreed));
                }
                Ok(Step::StartTls) => received.clear(),
                Ok(Step::Read(len)) => {
                    let Some(next) = said.get(at..at + len) else {
                        let end = HandshakeError::Protocol("end of stream".into());
                        return (sent, Err(handshake.end().unwrap_or(end)));
                    };
                    received = next.to_vec();
                    at += len;
                }
            }
        }
    }

    fn greeting(flags: u16) -> Vec<u8> {
        [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
    }

    fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let header = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &header, data].concat()
    }

    fn about_export(size: u64, flags: u16) -> Vec<u8> {
        answer(OPT_GO, REP_INFO, &[&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat())
    }

    fn about_blocks(blocks: [u32; 3]) -> Vec<u8> {
        answer(OPT_GO, REP_INFO, &[&[0, 3][..], &blocks.map(u32::to_be_bytes).concat()].concat())
    }

    fn option(option: u32, data: &[u8]) -> Vec<u8> {
        let mut encoded = Vec::new();
        encode_option(option, data, &mut encoded);
        encoded
    }

    /// The export "disk" with simple replies, from the answer to `NBD_OPT_GO` on.
    fn asked(answer: &[u8]) -> Result<Agreed, HandshakeError> {
        let handshake = Handshake::new("disk", Replies::Simple, false);
        let (sent, result) = play(handshake, &[&greeting(3), answer].concat());
        let go = option(OPT_GO, b"\0\0\0\x04disk\0\x01\0\x03");
        assert_eq!(sent, [&3u32.to_be_bytes()[..], &go].concat());
        result
    }

    fn go() -> Vec<u8> {
        [about_export(SIZE, FLAGS), about_blocks([4096, 65536, 100_000]), answer(OPT_GO, REP_ACK, &[])]
            .concat()
    }

    #[test]
    fn every_form_of_replies_is_negotiated_and_the_next_plainer_one_without_it() {
        let context = [&7u32.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
        let chosen = [
            answer(OPT_SET_META_CONTEXT, REP_META_CONTEXT, &context),
            answer(OPT_SET_META_CONTEXT, REP_ACK, &[]),
            go(),
        ]
        .concat();
        let yes = |option| answer(option, REP_ACK, &[]);
        let no = |option| answer(option, REP_ERR_UNSUP, b"what?");
        let cases = [
            (Replies::Extended, [yes(OPT_EXTENDED_HEADERS), chosen.clone()].concat(), Replies::Extended),
            (
                Replies::Extended,
                [no(OPT_EXTENDED_HEADERS), yes(OPT_STRUCTURED_REPLY), chosen.clone()].concat(),
                Replies::Structured,
            ),
            (
                Replies::Extended,
                [no(OPT_EXTENDED_HEADERS), no(OPT_STRUCTURED_REPLY), go()].concat(),
                Replies::Simple,
            ),
            (Replies::Structured, [yes(OPT_STRUCTURED_REPLY), chosen].concat(), Replies::Structured),
            (Replies::Simple, go(), Replies::Simple),
        ];
        for (richest, said, replies) in cases {
            let said = [greeting(3), said].concat();
            let agreed = play(Handshake::new("", richest, false), &said).1.unwrap();
            let facts = Facts {
                size: SIZE,
                replies,
                min_block: 4096,
                preferred_block: 65536,
                max_payload: 98304,
                flags: FLAGS,
            };
            let context = (replies != Replies::Simple).then_some(7);
            assert_eq!(agreed, Agreed { facts, context });
        }
    }

    #[test]
    fn a_greeting_that_is_none_is_refused() {
        for (said, why) in [
            (&b"SSH-2.0-OpenSSH_9.2 "[..], "invalid greeting"),
            (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53", "before 2009"),
        ] {
            let (sent, result) = play(Handshake::new("", Replies::Extended, false), said);
            let error = result.unwrap_err();
            assert!(matches!(&error, HandshakeError::Protocol(text) if text.contains(why)), "{error}");
            assert!(sent.is_empty());
        }
    }

    #[test]
    fn a_server_that_says_no_is_quoted() {
        let error = asked(&answer(OPT_GO, REP_ERR_TLS_REQD, b"use TLS\x1b[2J")).unwrap_err();
        assert!(matches!(error, HandshakeError::TlsRequired(_)), "{error}");
        assert!(error.to_string().ends_with(r"demands TLS (tls=require or nbds://) (use TLS\u{1b}[2J)"));
        let error = asked(&answer(OPT_GO, REP_ERR_UNKNOWN, &[])).unwrap_err();
        assert_eq!(error.to_string(), "the server has no export \"disk\"");
        let error = asked(&answer(OPT_GO, REP_ERR + 2, b"not you")).unwrap_err();
        assert_eq!(error.to_string(), "the server refuses NBD_OPT_GO with error 0x80000002 (not you)");
    }

    #[test]
    fn tls_may_be_demanded_from_the_first_option_on() {
        let said = [greeting(3), answer(OPT_EXTENDED_HEADERS, REP_ERR_TLS_REQD, &[])].concat();
        let error = play(Handshake::new("", Replies::Extended, false), &said).1.unwrap_err();
        assert!(matches!(error, HandshakeError::TlsRequired(_)), "{error}");
    }

    #[test]
    fn a_client_that_requires_tls_does_not_continue_without_it() {
        let secured = |said: &[u8]| {
            let (sent, result) = play(Handshake::new("secret", Replies::Extended, true), said);
            let is_told = sent.windows(6).any(|part| part == b"secret");
            (is_told, result.map_err(|error| error.to_string()))
        };
        let error = "the server does not support TLS, which is required";
        for (said, text) in [
            (greeting(2), format!("{error} (the server supports only the handshake from before 2011)")),
            ([greeting(3), answer(5, REP_ERR_UNSUP, b"what?")].concat(), format!("{error} (what?)")),
            ([greeting(3), answer(5, REP_ERR + 2, &[])].concat(), error.into()),
            (
                [greeting(3), answer(5, REP_INFO, &[])].concat(),
                "not a usable NBD server: the server answers NBD_OPT_STARTTLS with 0x3".into(),
            ),
            (
                [greeting(3), answer(5, REP_ACK, b"?")].concat(),
                "not a usable NBD server: the server answers NBD_OPT_STARTTLS with 0x1".into(),
            ),
        ] {
            assert_eq!(secured(&said), (false, Err(text)));
        }
        let no = answer(OPT_EXTENDED_HEADERS, REP_ERR_UNSUP, &[]);
        let nor = answer(OPT_STRUCTURED_REPLY, REP_ERR_UNSUP, &[]);
        let (is_told, result) = secured(&[greeting(3), answer(5, REP_ACK, &[]), no, nor, go()].concat());
        assert!(is_told && result.is_ok());
    }

    #[test]
    fn invalid_information_about_the_export_is_refused() {
        let ack = answer(OPT_GO, REP_ACK, &[]);
        for (said, why) in [
            (ack.clone(), "no information about the export"),
            (answer(6, REP_ACK, &[]), "to option 6"),
            (answer(OPT_GO, 2, &[]), "answers NBD_OPT_GO with 0x2"),
            (answer(OPT_GO, REP_INFO, &[0, 0, 1]), "information 0 has 3 bytes"),
            (answer(OPT_GO, REP_INFO, &vec![9; 20000]), "with 20000 bytes"),
            (answer(OPT_GO, REP_INFO, &[0, 1, b'x']).repeat(MAX_REPLIES), "too much information"),
        ] {
            let error = asked(&said).unwrap_err();
            assert!(matches!(&error, HandshakeError::Protocol(text) if text.contains(why)), "{error}");
        }
        for blocks in
            [[0, 512, 512], [3, 512, 512], [1 << 17, 1 << 17, 1 << 20], [512, 256, 512], [512, 4096, 256]]
        {
            let error = asked(&[about_export(SIZE, 1), about_blocks(blocks), ack.clone()].concat());
            let error = error.unwrap_err();
            assert!(error.to_string().contains("invalid block sizes"), "{error}");
        }
        let error = asked(&[about_export(SIZE, 1), about_blocks([1, 256, 256]), ack].concat()).unwrap_err();
        assert!(matches!(error, HandshakeError::Payload(256)), "{error}");
    }

    #[test]
    fn contexts_that_were_not_requested_are_refused() {
        let start = [greeting(3), answer(OPT_EXTENDED_HEADERS, REP_ACK, &[])].concat();
        let context = [&7u32.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
        for (data, count, why) in [
            (&b"\0\0\0\x07base:other"[..], 1, "was not requested"),
            (&context, MAX_REPLIES, "too many contexts"),
        ] {
            let said = answer(OPT_SET_META_CONTEXT, REP_META_CONTEXT, data).repeat(count);
            let said = [start.clone(), said].concat();
            let error = play(Handshake::new("", Replies::Extended, false), &said).1.unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn an_old_server_is_asked_by_name() {
        // With and without the padding; a server that supports options, but not this one.
        for (flags, is_fixed) in [(0, false), (2, false), (3, true), (1, true)] {
            let mut said = greeting(flags);
            if is_fixed {
                for option in [OPT_EXTENDED_HEADERS, OPT_STRUCTURED_REPLY, OPT_GO] {
                    said.extend(answer(option, REP_ERR_UNSUP, &[]));
                }
            }
            let refused = said.len();
            said.extend(SIZE.to_be_bytes());
            said.extend(FLAGS.to_be_bytes());
            said.extend(vec![0; if flags & 2 == 0 { PADDING } else { 0 }]);
            let handshake = || Handshake::new("old", Replies::Extended, false);
            let (sent, agreed) = play(handshake(), &said);
            assert_eq!(sent[..4], u32::from(flags).to_be_bytes());
            assert!(sent.ends_with(&option(OPT_EXPORT_NAME, b"old")));
            let Agreed { facts, context } = agreed.unwrap();
            assert_eq!((facts.replies, facts.size, facts.min_block), (Replies::Simple, SIZE, 512));
            assert_eq!((facts.flags, context), (FLAGS, None));
            let error = play(handshake(), &said[..refused]).1.unwrap_err();
            assert_eq!(error.to_string(), "the server has no export \"old\" (it disconnected)");
        }
    }

    #[test]
    fn a_stream_that_ends_elsewhere_is_no_refusal() {
        let said = [greeting(3), go()].concat();
        for len in 0..said.len() {
            let error = play(Handshake::new("", Replies::Simple, false), &said[..len]).1.unwrap_err();
            assert_eq!(error.to_string(), "not a usable NBD server: end of stream", "{len} bytes");
        }
    }

    #[test]
    fn no_bytes_panic() {
        let mut seed = 1u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % below
        };
        let context = [&7u32.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
        let sound = [
            greeting(3),
            answer(OPT_STARTTLS, REP_ACK, &[]),
            answer(OPT_EXTENDED_HEADERS, REP_ACK, &[]),
            answer(OPT_SET_META_CONTEXT, REP_META_CONTEXT, &context),
            answer(OPT_SET_META_CONTEXT, REP_ACK, &[]),
            go(),
        ]
        .concat();
        for _ in 0..20_000 {
            let mut said = sound.clone();
            for _ in 0..1 + random(4) {
                let at = random(said.len());
                said[at] = random(256) as u8;
            }
            said.truncate(random(said.len() + 1));
            let mut handshake = Handshake::new("x", Replies::Extended, true);
            let (mut received, mut rest) = (Vec::new(), &said[..]);
            while let Ok(step) = handshake.advance(&received, &mut Vec::new()) {
                let len = match step {
                    Step::Agree(_) => break,
                    Step::StartTls => 0,
                    Step::Read(len) => len,
                };
                assert!(len <= MAX_REPLY as usize);
                let Some((next, behind)) = rest.split_at_checked(len) else { break };
                (received, rest) = (next.to_vec(), behind);
            }
        }
    }
}
