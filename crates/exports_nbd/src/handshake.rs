//! The handshake, up to the choice of an export. Pure: bytes in, bytes out.
//!
//! ```text
//!   Greet ─► Flags ─► Option ◄─► Skip (an option that is too long), List (its answer is sent in parts)
//!                        └─► agreed: EXPORT_NAME or GO      └─► over: ABORT
//! ```
//!
//! Every option is answered and unknown ones are refused, so a client may probe. Only an error that
//! leaves the stream unusable ends the connection.
//!
//! Source: the NBD protocol, "Handshake", "Option types", "Option reply types".

use crate::offer::{MAX_SELECTED, Offer, Selected};
use crate::options::{Contexts, Info, Malformed};
use exports::stream::{Handshake, HandshakeStep};
use nbd::handshake::{self, PADDING};
use nbd::{Replies, u32_at, u64_at};
use std::borrow::Cow;
use std::sync::{Arc, Weak};

/// Longest data of an option: a name and more queries than any known client sends.
const MAX_OPTION: usize = 32 << 10;
/// An option's magic, number and length.
const OPTION_HEADER: usize = 16;

/// Longest part of an export's name that an answer repeats, in characters.
const MAX_REPEATED: usize = 100;

/// The exports that a client may choose from.
pub(crate) trait Catalog: Send + Sync + 'static {
    /// An export.
    type Export: Offered;

    /// The export that a client with this proven identity names so, if it may use one. The empty
    /// name is that of the default export.
    fn find(&self, name: &[u8], identity: Option<&str>) -> Option<Arc<Self::Export>>;

    /// The first export that the client may use, in the order of names, after the one with this
    /// name.
    fn list(&self, after: Option<&str>, identity: Option<&str>) -> Option<Listed>;
}

/// An export in the list of exports.
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) description: String,
}

/// An export as a handshake uses it.
pub(crate) trait Offered: Send + Sync + 'static {
    /// The information for clients.
    fn offer(&self) -> Offer;

    /// Whether it takes no clients any more.
    fn is_closed(&self) -> bool;
}

/// The handshake of one client.
pub(crate) struct NbdHandshake<C: Catalog> {
    exports: Arc<C>,
    tls: Tls,
    state: State,
    pads: bool,
    /// Whether the client supports the fixed handshake: options can be answered.
    is_fixed: bool,
    agreed: Agreed,
    /// The contexts that were last selected.
    selected: Option<Selection<C::Export>>,
    /// The export whose block sizes the client has requested.
    sizes_of: Option<Weak<C::Export>>,
    /// The export that the client has chosen.
    chosen: Option<Arc<C::Export>>,
    /// The identity that the client's TLS key proves.
    identity: Option<Box<str>>,
}

/// Selected contexts. They count for this name and this export: another one of the name may have
/// other contexts. The handshake does not keep the export, which may end.
struct Selection<E> {
    name: Vec<u8>,
    export: Weak<E>,
    selected: Selected,
}

/// The result of the negotiation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) form: Replies,
    /// The contexts of which the client may request block status.
    pub(crate) selected: Selected,
    /// Whether the client requested the block sizes.
    pub(crate) knows_blocks: bool,
}

/// The TLS state of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tls {
    /// Not available.
    Off,
    /// Available; the client may start it.
    Allowed,
    /// The client must start it before any other option.
    Required,
    /// Established.
    InUse,
}

enum State {
    Greet,
    Flags,
    Option,
    /// The remaining bytes of a refused option.
    Skip(usize),
    /// The exports after the one with this name.
    List(Option<String>),
}

/// A refused option: reply type, and text for people.
type Refused = (u32, Cow<'static, str>);

impl<C: Catalog> NbdHandshake<C> {
    pub(crate) fn new(exports: Arc<C>, tls: Tls) -> NbdHandshake<C> {
        NbdHandshake {
            exports,
            tls,
            state: State::Greet,
            pads: true,
            is_fixed: true,
            agreed: Agreed::default(),
            selected: None,
            sizes_of: None,
            chosen: None,
            identity: None,
        }
    }

    /// The identity that the client's TLS key proves, if it has one.
    pub(crate) fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// The export that the client has chosen, unless it takes no clients any more.
    pub(crate) fn chosen(&self) -> Option<Arc<C::Export>> {
        self.chosen.clone().filter(|export| !export.is_closed())
    }

    /// The result, once the handshake has reached [`HandshakeStep::Serve`].
    pub(crate) fn agreed(&self) -> Agreed {
        self.agreed
    }

    fn greet(&mut self, output: &mut Vec<u8>) {
        output.extend(handshake::GREETING.to_be_bytes());
        output.extend(handshake::OPTION_MAGIC.to_be_bytes());
        output.extend((handshake::FLAG_FIXED_NEWSTYLE | handshake::FLAG_NO_ZEROES).to_be_bytes());
        self.state = State::Flags;
    }

    fn take_flags(&mut self, flags: u32) -> Result<(), String> {
        let known = u32::from(handshake::FLAG_FIXED_NEWSTYLE | handshake::FLAG_NO_ZEROES);
        if flags & !known != 0 {
            return Err(format!("unknown handshake flags {flags:#x}"));
        }
        self.is_fixed = flags & u32::from(handshake::FLAG_FIXED_NEWSTYLE) != 0;
        self.pads = flags & u32::from(handshake::FLAG_NO_ZEROES) == 0;
        self.state = State::Option;
        Ok(())
    }

    /// Parses one option if it is complete. Returns its length.
    fn take_option(
        &mut self,
        input: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Option<(usize, HandshakeStep)>, String> {
        if input.len() < OPTION_HEADER {
            return Ok(None);
        }
        let (magic, option, len) = (u64_at(input, 0), u32_at(input, 8), u32_at(input, 12) as usize);
        if magic != handshake::OPTION_MAGIC {
            return Err(format!("invalid option magic {magic:#018x}"));
        }
        if len > MAX_OPTION {
            if option == handshake::OPT_EXPORT_NAME {
                return Err(format!("export name of {len} bytes is too long"));
            }
            refuse(option, &(handshake::REP_ERR_TOO_BIG, "the option is too long".into()), output);
            self.state = State::Skip(len);
            return Ok(Some((OPTION_HEADER, HandshakeStep::More)));
        }
        let Some(data) = input.get(OPTION_HEADER..OPTION_HEADER + len) else { return Ok(None) };
        let step = self.answer(option, data, output)?;
        Ok(Some((OPTION_HEADER + len, step)))
    }

    fn answer(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Result<HandshakeStep, String> {
        if self.tls == Tls::Required && !matches!(option, handshake::OPT_STARTTLS | handshake::OPT_ABORT) {
            if option == handshake::OPT_EXPORT_NAME {
                return Err("NBD_OPT_EXPORT_NAME before STARTTLS: TLS is required".into());
            }
            refuse(option, &(handshake::REP_ERR_TLS_REQD, "TLS is required".into()), output);
            return Ok(HandshakeStep::More);
        }
        if !self.is_fixed && option != handshake::OPT_EXPORT_NAME {
            return Err(format!(
                "option {option} without the fixed handshake: only NBD_OPT_EXPORT_NAME is allowed"
            ));
        }
        let done = match option {
            handshake::OPT_EXPORT_NAME => return self.export_name(data, output),
            handshake::OPT_ABORT => {
                reply(option, handshake::REP_ACK, &[], output);
                return Ok(HandshakeStep::Leave);
            }
            handshake::OPT_LIST => match no_data(data) {
                Ok(()) => {
                    self.state = State::List(None);
                    return Ok(HandshakeStep::More);
                }
                refused => refused,
            },
            handshake::OPT_INFO | handshake::OPT_GO => self.info(option, data, output),
            handshake::OPT_STRUCTURED_REPLY => self.structured_reply(data),
            handshake::OPT_EXTENDED_HEADERS => self.extended_headers(data),
            handshake::OPT_LIST_META_CONTEXT => self.list_contexts(data, output),
            handshake::OPT_SET_META_CONTEXT => self.set_context(data, output),
            handshake::OPT_STARTTLS => self.start_tls(data),
            _ => Err((handshake::REP_ERR_UNSUP, "unknown option".into())),
        };
        match &done {
            Ok(()) => reply(option, handshake::REP_ACK, &[], output),
            Err(refused) => refuse(option, refused, output),
        }
        Ok(match option {
            handshake::OPT_GO if done.is_ok() => HandshakeStep::Serve,
            handshake::OPT_STARTTLS if done.is_ok() => HandshakeStep::Secure,
            _ => HandshakeStep::More,
        })
    }

    /// Resets the negotiation: an attacker in the middle may have sent the earlier options.
    fn start_tls(&mut self, data: &[u8]) -> Result<(), Refused> {
        no_data(data)?;
        match self.tls {
            Tls::Off => Err((handshake::REP_ERR_UNSUP, "the server does not support TLS".into())),
            Tls::InUse => Err((handshake::REP_ERR_INVALID, "TLS is already in use".into())),
            Tls::Allowed | Tls::Required => {
                (self.tls, self.agreed) = (Tls::InUse, Agreed::default());
                (self.selected, self.sizes_of) = (None, None);
                Ok(())
            }
        }
    }

    /// The only option whose refusal ends the connection, and whose reply has its own format.
    fn export_name(&mut self, name: &[u8], output: &mut Vec<u8>) -> Result<HandshakeStep, String> {
        if self.agreed.form == Replies::Extended {
            return Err("NBD_OPT_EXPORT_NAME after extended headers were negotiated".into());
        }
        let Some(export) = self.exports.find(name, self.identity()) else { return Err(unknown(name)) };
        let offer = export.offer();
        self.choose(name, export);
        output.extend(offer.limits.capacity.to_be_bytes());
        output.extend(offer.flags(self.agreed.form).to_be_bytes());
        if self.pads {
            output.extend([0; PADDING]);
        }
        Ok(HandshakeStep::Serve)
    }

    fn choose(&mut self, name: &[u8], export: Arc<C::Export>) {
        let is_it = |other: &Weak<_>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(&export));
        let selection = self.selected.as_ref().filter(|with| with.name == name && is_it(&with.export));
        self.agreed.selected = selection.map_or_else(Selected::default, |with| with.selected);
        self.agreed.knows_blocks = self.sizes_of.as_ref().is_some_and(is_it);
        self.chosen = Some(export);
    }

    /// Appends a part of the list of exports: those after the one with this name. The next part
    /// follows when this one has been sent.
    fn list(&mut self, mut after: Option<String>, output: &mut Vec<u8>) {
        while output.len() <= MAX_OPTION {
            let Some(Listed { name, description }) = self.exports.list(after.as_deref(), self.identity())
            else {
                reply(handshake::OPT_LIST, handshake::REP_ACK, &[], output);
                self.state = State::Option;
                return;
            };
            let len = (name.len() as u32).to_be_bytes();
            reply(
                handshake::OPT_LIST,
                handshake::REP_SERVER,
                &[&len, name.as_bytes(), description.as_bytes()],
                output,
            );
            after = Some(name);
        }
        self.state = State::List(after);
    }

    fn info(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Result<(), Refused> {
        let asked = Info::parse(data).map_err(invalid)?;
        let export = self.find(asked.name)?;
        let offer = export.offer();
        let mut say = |info: u16, parts: &[&[u8]]| {
            let kind = info.to_be_bytes();
            let all = [&[&kind[..]], parts].concat();
            reply(option, handshake::REP_INFO, &all, output);
        };
        let (size, flags) = (offer.limits.capacity, offer.flags(self.agreed.form));
        say(handshake::INFO_EXPORT, &[&size.to_be_bytes(), &flags.to_be_bytes()]);
        if asked.wants(handshake::INFO_NAME) {
            say(handshake::INFO_NAME, &[offer.name.as_bytes()]);
        }
        if asked.wants(handshake::INFO_DESCRIPTION) {
            say(handshake::INFO_DESCRIPTION, &[offer.description.as_bytes()]);
        }
        // Sent unasked as well: a client that does not know this information skips it and need not
        // obey it.
        if asked.wants(handshake::INFO_BLOCK_SIZE) {
            self.sizes_of = Some(Arc::downgrade(&export));
        }
        let [least, preferred, most] = offer.block_sizes().map(u32::to_be_bytes);
        say(handshake::INFO_BLOCK_SIZE, &[&least, &preferred, &most]);
        if option == handshake::OPT_GO {
            self.choose(asked.name, export);
        }
        Ok(())
    }

    fn find(&self, name: &[u8]) -> Result<Arc<C::Export>, Refused> {
        let found = self.exports.find(name, self.identity());
        found.ok_or_else(|| (handshake::REP_ERR_UNKNOWN, unknown(name).into()))
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<(), Refused> {
        no_data(data)?;
        if self.agreed.form == Replies::Extended {
            return Err((
                handshake::REP_ERR_EXT_HEADER_REQD,
                "the client negotiated extended headers".into(),
            ));
        }
        self.agreed.form = Replies::Structured;
        Ok(())
    }

    fn extended_headers(&mut self, data: &[u8]) -> Result<(), Refused> {
        no_data(data)?;
        self.agreed.form = Replies::Extended;
        Ok(())
    }

    fn list_contexts(&self, data: &[u8], output: &mut Vec<u8>) -> Result<(), Refused> {
        let asked = Contexts::parse(data).map_err(invalid)?;
        let offer = self.find(asked.name)?.offer();
        for context in offer.contexts.iter().filter(|context| asked.lists(context)) {
            let parts: [&[u8]; 2] = [&[0; 4], context.as_bytes()];
            reply(handshake::OPT_LIST_META_CONTEXT, handshake::REP_META_CONTEXT, &parts, output);
        }
        Ok(())
    }

    fn set_context(&mut self, data: &[u8], output: &mut Vec<u8>) -> Result<(), Refused> {
        // Even a failed request clears the previous selection.
        self.selected = None;
        let asked = Contexts::parse(data).map_err(invalid)?;
        if self.agreed.form == Replies::Simple {
            let fault = "the client must negotiate structured replies first";
            return Err((handshake::REP_ERR_INVALID, fault.into()));
        }
        let export = self.find(asked.name)?;
        let offer = export.offer();
        let mut selected = Selected::default();
        let contexts = offer.contexts.iter().enumerate();
        contexts.filter(|(_, context)| asked.selects(context)).for_each(|(place, _)| selected.add(place));
        if selected.len() > MAX_SELECTED {
            return Err((handshake::REP_ERR_TOO_BIG, "more than 16 metadata contexts are selected".into()));
        }
        for place in selected.places() {
            let (id, context) = (crate::offer::context_id(place).to_be_bytes(), &offer.contexts[place]);
            let parts: [&[u8]; 2] = [&id, context.as_bytes()];
            reply(handshake::OPT_SET_META_CONTEXT, handshake::REP_META_CONTEXT, &parts, output);
        }
        self.selected =
            Some(Selection { name: asked.name.to_vec(), export: Arc::downgrade(&export), selected });
        Ok(())
    }
}

impl<C: Catalog> Handshake for NbdHandshake<C> {
    fn secured(&mut self, identity: Option<&str>) {
        self.identity = identity.map(Box::from);
    }

    fn is_cancelled(&self) -> bool {
        self.chosen.as_ref().is_some_and(|export| export.is_closed())
    }

    fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), String> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match &mut self.state {
                State::Greet => self.greet(output),
                State::Flags => {
                    if rest.len() < 4 {
                        return Ok((used, HandshakeStep::More));
                    }
                    self.take_flags(u32_at(rest, 0))?;
                    used += 4;
                }
                State::Skip(left) => {
                    let len = rest.len().min(*left);
                    used += len;
                    *left -= len;
                    if *left > 0 {
                        return Ok((used, HandshakeStep::More));
                    }
                    self.state = State::Option;
                }
                State::List(after) => {
                    let after = after.take();
                    self.list(after, output);
                    if output.len() > MAX_OPTION {
                        return Ok((used, HandshakeStep::More));
                    }
                }
                // One answer at a time: it is sent before the next option of a client that does not
                // read.
                State::Option => {
                    let Some((len, step)) = self.take_option(rest, output)? else {
                        return Ok((used, HandshakeStep::More));
                    };
                    used += len;
                    if step != HandshakeStep::More || output.len() > MAX_OPTION {
                        return Ok((used, step));
                    }
                }
            }
        }
    }
}

fn no_data(data: &[u8]) -> Result<(), Refused> {
    if data.is_empty() { Ok(()) } else { Err((handshake::REP_ERR_INVALID, "the option has no data".into())) }
}

fn invalid(malformed: Malformed) -> Refused {
    (handshake::REP_ERR_INVALID, malformed.into())
}

/// The error for a name that no export has which the client may use.
fn unknown(name: &[u8]) -> String {
    match name {
        [] => "no such export: there is no default export, so the client must name one".into(),
        name => {
            let name: String = String::from_utf8_lossy(name).chars().take(MAX_REPEATED).collect();
            format!("no such export: {name:?}")
        }
    }
}

fn refuse(option: u32, (kind, text): &Refused, output: &mut Vec<u8>) {
    reply(option, *kind, &[text.as_bytes()], output);
}

fn reply(option: u32, kind: u32, data: &[&[u8]], output: &mut Vec<u8>) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    output.extend(handshake::OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend((len as u32).to_be_bytes());
    data.iter().for_each(|part| output.extend(*part));
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Limits;
    use nbd::client::{Handshake as Client, Step};
    use nbd::handshake::BASE_ALLOCATION;
    use nbd::u16_at;
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// The exports by name, each with the identity that it is for, if it is for one.
    #[derive(Default)]
    struct Exports {
        exports: BTreeMap<String, (Arc<One>, Option<&'static str>)>,
        default: Option<&'static str>,
    }

    struct One(Offer, AtomicBool);

    impl Offered for One {
        fn offer(&self) -> Offer {
            self.0.clone()
        }

        fn is_closed(&self) -> bool {
            self.1.load(Ordering::Relaxed)
        }
    }

    impl Exports {
        fn add(&mut self, name: &str, identity: Option<&'static str>) -> Arc<One> {
            let mut contexts = vec![BASE_ALLOCATION.to_owned()];
            contexts.extend((1..20).map(|number| format!("qemu:dirty-bitmap:b{number}")));
            let (limits, contexts) = (Limits::new(1 << 20), contexts.into());
            let (name, description) = (name.to_owned(), format!("a {name}"));
            let offer = Offer { name: name.clone(), description, limits, is_read_only: false, contexts };
            let one = Arc::new(One(offer, AtomicBool::new(false)));
            self.exports.insert(name, (one.clone(), identity));
            one
        }
    }

    impl Catalog for Mutex<Exports> {
        type Export = One;

        fn find(&self, name: &[u8], identity: Option<&str>) -> Option<Arc<One>> {
            let exports = self.lock().unwrap();
            let name = if name.is_empty() { exports.default? } else { str::from_utf8(name).ok()? };
            let (export, of) = exports.exports.get(name)?;
            (of.is_none() || *of == identity).then(|| export.clone())
        }

        fn list(&self, after: Option<&str>, identity: Option<&str>) -> Option<Listed> {
            let exports = self.lock().unwrap();
            let mut rest =
                exports.exports.iter().filter(|(name, _)| after.is_none_or(|after| ***name > *after));
            let (name, (export, _)) = rest.find(|(_, (_, of))| of.is_none() || *of == identity)?;
            Some(Listed { name: name.clone(), description: export.0.description.clone() })
        }
    }

    type Tested = NbdHandshake<Mutex<Exports>>;

    fn handshake() -> Tested {
        with(Tls::Off)
    }

    fn with(tls: Tls) -> Tested {
        let mut exports = Exports { default: Some("disk"), ..Exports::default() };
        exports.add("disk", None);
        of(exports, tls)
    }

    fn of(exports: Exports, tls: Tls) -> Tested {
        NbdHandshake::new(Arc::new(Mutex::new(exports)), tls)
    }

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let magic = handshake::OPTION_MAGIC.to_be_bytes();
        [&magic[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    }

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
    }

    /// Returns all replies to a client that sends `input` after its flags, and the result. The
    /// client sends byte by byte, then all at once: the server must reply the same.
    fn exchange(flags: u8, input: &[u8]) -> (Vec<u8>, Result<HandshakeStep, String>) {
        let input = [&[0, 0, 0, flags], input].concat();
        let run = |piece: usize| {
            let (mut handshake, mut output, mut unread, mut at) = (handshake(), Vec::new(), Vec::new(), 0);
            loop {
                let said = output.len();
                match handshake.advance(&unread, &mut output) {
                    Ok((used, HandshakeStep::More)) => {
                        unread.drain(..used);
                        if at == input.len() && output.len() == said {
                            return (output, Ok(HandshakeStep::More));
                        }
                        let end = input.len().min(at + piece);
                        unread.extend(&input[at..end]);
                        at = end;
                    }
                    Ok((used, step)) => {
                        assert!(unread.len() - used + input.len() - at < 8, "bytes are left");
                        return (output, Ok(step));
                    }
                    Err(error) => return (output, Err(error)),
                }
            }
        };
        let (slow, fast) = (run(1), run(input.len()));
        assert_eq!(slow, fast);
        slow
    }

    /// A reply to an option: number, type, data.
    type Reply = (u32, u32, Vec<u8>);

    fn replies(flags: u8, input: &[u8]) -> (Vec<Reply>, Result<HandshakeStep, String>) {
        let (output, step) = exchange(flags, input);
        let mut rest = &output[18..];
        let mut replies = Vec::new();
        while !rest.is_empty() {
            assert_eq!(u64_at(rest, 0), handshake::OPTION_REPLY_MAGIC);
            let len = u32_at(rest, 16) as usize;
            replies.push((u32_at(rest, 8), u32_at(rest, 12), rest[20..20 + len].to_vec()));
            rest = &rest[20 + len..];
        }
        (replies, step)
    }

    /// Returns the reply to a client that has just sent `input`, and the result.
    fn tell(handshake: &mut Tested, input: &[u8]) -> (Vec<u8>, Result<HandshakeStep, String>) {
        let mut output = Vec::new();
        let end = handshake.advance(input, &mut output).map(|(used, step)| {
            assert_eq!(used, input.len());
            step
        });
        (output, end)
    }

    fn answer(number: u32, kind: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        reply(number, kind, &[], &mut bytes);
        bytes.truncate(16);
        bytes
    }

    #[test]
    fn where_tls_is_required_nothing_else_is_answered_before_it() {
        let mut handshake = with(Tls::Required);
        assert_eq!(tell(&mut handshake, &[0, 0, 0, 3]).1, Ok(HandshakeStep::More));
        let go = [string("disk"), vec![0, 0]].concat();
        for number in [
            handshake::OPT_LIST,
            handshake::OPT_INFO,
            handshake::OPT_GO,
            handshake::OPT_STRUCTURED_REPLY,
            10,
            11,
            99,
        ] {
            let (said, end) = tell(&mut handshake, &option(number, &go));
            assert!(said.starts_with(&answer(number, handshake::REP_ERR_TLS_REQD)), "{number}: {said:?}");
            assert!(end == Ok(HandshakeStep::More) && !said.windows(4).any(|bytes| bytes == b"disk"));
        }
        let (said, end) = tell(&mut handshake, &option(handshake::OPT_STARTTLS, b"x"));
        assert!(said.starts_with(&answer(5, handshake::REP_ERR_INVALID)) && end == Ok(HandshakeStep::More));
        let (said, end) = tell(&mut handshake, &option(handshake::OPT_STARTTLS, &[]));
        assert!(said.starts_with(&answer(5, handshake::REP_ACK)) && end == Ok(HandshakeStep::Secure));
        let (said, end) = tell(&mut handshake, &option(handshake::OPT_STARTTLS, &[]));
        assert!(said.starts_with(&answer(5, handshake::REP_ERR_INVALID)) && end == Ok(HandshakeStep::More));
        assert_eq!(tell(&mut handshake, &option(handshake::OPT_GO, &go)).1, Ok(HandshakeStep::Serve));
        let mut handshake = with(Tls::Required);
        assert_eq!(tell(&mut handshake, &[0, 0, 0, 3]).1, Ok(HandshakeStep::More));
        let (said, end) = tell(&mut handshake, &option(handshake::OPT_EXPORT_NAME, b"disk"));
        assert!(said.is_empty() && end.unwrap_err().contains("TLS is required"));
        let mut handshake = with(Tls::Required);
        assert_eq!(tell(&mut handshake, &[0, 0, 0, 3]).1, Ok(HandshakeStep::More));
        assert_eq!(tell(&mut handshake, &option(handshake::OPT_ABORT, &[])).1, Ok(HandshakeStep::Leave));
    }

    #[test]
    fn options_negotiated_in_the_clear_are_void_after_starttls() {
        let mut handshake = with(Tls::Allowed);
        let context = [string("disk"), vec![0, 0, 0, 1], string("base:allocation")].concat();
        let early = [
            vec![0, 0, 0, 3],
            option(handshake::OPT_STRUCTURED_REPLY, &[]),
            option(handshake::OPT_SET_META_CONTEXT, &context),
            option(handshake::OPT_STARTTLS, &[]),
        ];
        assert_eq!(tell(&mut handshake, &early.concat()).1, Ok(HandshakeStep::Secure));
        let go = [string("disk"), vec![0, 0]].concat();
        assert_eq!(tell(&mut handshake, &option(handshake::OPT_GO, &go)).1, Ok(HandshakeStep::Serve));
        assert_eq!(handshake.agreed(), Agreed::default());
        let mut handshake = with(Tls::Off);
        let (said, end) =
            tell(&mut handshake, &[&[0, 0, 0, 3][..], &option(handshake::OPT_STARTTLS, &[])].concat());
        assert!(said.ends_with(b"not support TLS") && end == Ok(HandshakeStep::More));
    }

    #[test]
    fn without_the_fixed_handshake_a_client_may_name_its_export_and_nothing_else() {
        let (output, step) = exchange(0, &option(handshake::OPT_EXPORT_NAME, b"disk"));
        assert_eq!((output.len(), step), (18 + 10 + PADDING, Ok(HandshakeStep::Serve)));
        assert_eq!(output[18..26], (1u64 << 20).to_be_bytes());
        assert!(output[28..].iter().all(|byte| *byte == 0));
        assert_eq!(
            exchange(2, &option(handshake::OPT_EXPORT_NAME, b"")).0.len(),
            18 + 10,
            "no zeroes are wanted"
        );
        for number in [handshake::OPT_LIST, handshake::OPT_GO, 77] {
            assert!(exchange(0, &option(number, &[])).1.unwrap_err().contains("without the fixed handshake"));
        }
    }

    #[test]
    fn the_greeting_comes_first_and_strange_flags_end_it() {
        let (output, step) = exchange(3, &[]);
        assert_eq!((output.as_slice(), step), (&b"NBDMAGICIHAVEOPT\0\x03"[..], Ok(HandshakeStep::More)));
        assert!(exchange(4, &[]).1.unwrap_err().contains("0x4"));
        let wrong = [b"IHAVENOT".to_vec(), vec![0; 8]].concat();
        assert!(exchange(3, &wrong).1.unwrap_err().contains("0x494841"));
    }

    #[test]
    fn a_client_of_old_gets_the_export_by_name_with_zeroes() {
        for (flags, padding) in [(1, 124), (3, 0)] {
            for name in ["", "disk"] {
                let (output, step) = exchange(flags, &option(1, name.as_bytes()));
                assert_eq!(step, Ok(HandshakeStep::Serve));
                let answer = &output[18..];
                assert_eq!(answer.len(), 10 + padding);
                assert_eq!((u64_at(answer, 0), u16_at(answer, 8)), (1 << 20, 0xd6d));
            }
        }
        assert!(exchange(3, &option(1, b"disc")).1.unwrap_err().contains("\"disc\""));
        let extended = [option(11, &[]), option(1, b"")].concat();
        assert!(exchange(3, &extended).1.is_err());
    }

    #[test]
    fn go_tells_what_there_is_and_begins() {
        let data = [string("disk"), vec![0, 3, 0, 1, 0, 2, 0, 99]].concat();
        let (replies, step) = replies(3, &option(7, &data));
        assert_eq!(step, Ok(HandshakeStep::Serve));
        let infos: Vec<_> = replies.iter().map(|(_, kind, data)| (*kind, data.clone())).collect();
        let export = [&[0, 0][..], &(1u64 << 20).to_be_bytes(), &[0x0d, 0x6d]].concat();
        let sizes = vec![0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0];
        let expected = [
            (3, export),
            (3, b"\0\x01disk".to_vec()),
            (3, b"\0\x02a disk".to_vec()),
            (3, sizes),
            (1, Vec::new()),
        ];
        assert_eq!(infos, expected);
    }

    #[test]
    fn info_tells_the_same_and_goes_on() {
        let data = [string(""), vec![0, 0]].concat();
        let (first, step) = replies(3, &option(6, &data));
        assert_eq!((first.len(), step), (3, Ok(HandshakeStep::More)));
        let unknown = [string("nothing"), vec![0, 0]].concat();
        let (replies, step) = replies(3, &[option(7, &unknown), option(6, &data)].concat());
        assert_eq!(step, Ok(HandshakeStep::More));
        assert_eq!((replies[0].1, replies.len()), (handshake::REP_ERR_UNKNOWN, 4));
    }

    #[test]
    fn the_list_has_name_and_description() {
        let (replies, _) = replies(3, &[option(3, &[]), option(3, b"x")].concat());
        assert_eq!(replies[0], (3, 2, [string("disk"), b"a disk".to_vec()].concat()));
        assert_eq!((replies[1].1, replies[2].1), (1, handshake::REP_ERR_INVALID));
    }

    #[test]
    fn unknown_and_malformed_options_are_refused_and_the_talk_goes_on() {
        let input = [
            option(4, b"peek"),
            option(99, &[]),
            option(5, &[]),
            option(7, b"short"),
            option(10, b""),
            option(2, b"bye"),
        ];
        let (replies, step) = replies(3, &input.concat());
        let kinds: Vec<_> = replies.iter().map(|(option, kind, _)| (*option, *kind)).collect();
        let (unsup, invalid) = (handshake::REP_ERR_UNSUP, handshake::REP_ERR_INVALID);
        assert_eq!(kinds, [(4, unsup), (99, unsup), (5, unsup), (7, invalid), (10, invalid), (2, 1)]);
        assert_eq!(step, Ok(HandshakeStep::Leave));
    }

    #[test]
    fn an_option_that_is_too_long_is_skipped() {
        let long = option(7, &vec![0; MAX_OPTION + 1]);
        let (replies, step) = replies(3, &[long, option(3, &[])].concat());
        assert_eq!(
            (replies[0].1, replies[1].1, step),
            (handshake::REP_ERR_TOO_BIG, 2, Ok(HandshakeStep::More))
        );
        assert!(exchange(3, &option(1, &vec![b'x'; MAX_OPTION + 1])).1.is_err());
    }

    fn agree(options: &[Vec<u8>]) -> (Agreed, Vec<u32>) {
        let mut handshake = handshake();
        let (mut output, mut kinds) = (Vec::new(), Vec::new());
        handshake.advance(&[], &mut output).unwrap();
        handshake.advance(&[0, 0, 0, 3], &mut output).unwrap();
        for option in options {
            output.clear();
            handshake.advance(option, &mut output).unwrap();
            let mut rest = &output[..];
            while !rest.is_empty() {
                kinds.push(u32_at(rest, 12));
                rest = &rest[20 + u32_at(rest, 16) as usize..];
            }
        }
        (handshake.agreed(), kinds)
    }

    fn context(name: &str, query: &str) -> Vec<u8> {
        option(10, &[string(name), vec![0, 0, 0, 1], string(query)].concat())
    }

    #[test]
    fn block_sizes_bind_who_has_asked_for_them() {
        let ask = |number, wanted: &[u8]| option(number, &[string("disk"), wanted.to_vec()].concat());
        assert!(!agree(&[ask(handshake::OPT_GO, &[0, 1, 0, 1])]).0.knows_blocks);
        assert!(agree(&[ask(handshake::OPT_GO, &[0, 1, 0, 3])]).0.knows_blocks);
        assert!(
            agree(&[ask(handshake::OPT_INFO, &[0, 1, 0, 3]), ask(handshake::OPT_GO, &[0, 0])]).0.knows_blocks
        );
    }

    #[test]
    fn the_richest_form_wins_and_a_context_counts_for_the_name_it_was_chosen_with() {
        let go = |name: &str| option(7, &[string(name), vec![0, 0]].concat());
        let (structured, extended) = (option(8, &[]), option(11, &[]));
        let (agreed, kinds) = agree(&[context("disk", "base:allocation"), go("disk")]);
        assert_eq!((agreed, kinds[0]), (Agreed::default(), handshake::REP_ERR_INVALID));
        let (agreed, kinds) = agree(&[structured.clone(), context("disk", "base:allocation"), go("disk")]);
        let mut selected = Selected::default();
        selected.add(0);
        assert_eq!(agreed, Agreed { form: Replies::Structured, selected, knows_blocks: false });
        assert_eq!(kinds[..3], [1, 4, 1]);
        let (agreed, kinds) =
            agree(&[extended, structured.clone(), context("disk", "base:allocation"), go("")]);
        let selected = Selected::default();
        assert_eq!(agreed, Agreed { form: Replies::Extended, selected, knows_blocks: false });
        assert_eq!(kinds[1], handshake::REP_ERR_EXT_HEADER_REQD);
        let replaced =
            [structured, context("disk", "base:allocation"), context("disk", "qemu:dirty"), go("disk")];
        assert_eq!(agree(&replaced).0.selected.len(), 0);
    }

    #[test]
    fn the_client_of_the_crate_nbd_comes_to_the_same_agreement() {
        for richest in [Replies::Simple, Replies::Structured, Replies::Extended] {
            let (mut client, mut server) = (Client::new("disk", richest, false), handshake());
            let (mut said, mut heard, mut received) = (Vec::new(), Vec::new(), Vec::new());
            let theirs = loop {
                match client.advance(&received, &mut said).unwrap() {
                    Step::Agree(agreed) => break agreed,
                    Step::StartTls => panic!("TLS is not wanted"),
                    Step::Read(len) => {
                        while heard.len() < len {
                            let before = heard.len();
                            let (used, _) = server.advance(&said, &mut heard).unwrap();
                            assert!(used > 0 || heard.len() > before, "both sides wait");
                            said.drain(..used);
                        }
                        received = heard.drain(..len).collect();
                    }
                }
            };
            let ours = server.agreed();
            assert!(said.is_empty() && heard.is_empty() && ours.knows_blocks);
            assert_eq!((theirs.facts.size, theirs.facts.replies, ours.form), (1 << 20, richest, richest));
            let has_context = richest != Replies::Simple;
            assert_eq!((theirs.context.is_some(), ours.selected.len() == 1), (has_context, has_context));
        }
    }

    #[test]
    fn contexts_are_listed_by_name_by_wildcard_and_without_a_query() {
        let list = |queries: &[&str]| {
            let count = (queries.len() as u32).to_be_bytes().to_vec();
            let data = [string(""), count, queries.iter().flat_map(|query| string(query)).collect()].concat();
            replies(3, &option(9, &data)).0.len() - 1
        };
        assert_eq!((list(&[]), list(&["base:"]), list(&["base:allocation"]), list(&["x:y"])), (20, 1, 1, 0));
        assert_eq!((list(&["qemu:"]), list(&["qemu:dirty-bitmap:b7", "base:"])), (19, 2));
    }

    #[test]
    fn contexts_are_selected_by_name_and_at_most_sixteen() {
        let set = |names: &[String]| {
            let count = (names.len() as u32).to_be_bytes().to_vec();
            let data = [string("disk"), count, names.iter().flat_map(|name| string(name)).collect()].concat();
            let go = option(7, &[string("disk"), vec![0, 0]].concat());
            replies(3, &[option(8, &[]), option(10, &data), go].concat()).0
        };
        let name = |number: usize| format!("qemu:dirty-bitmap:b{number}");
        let found = set(&[name(2), "base:allocation".into(), name(2), name(99), "qemu:".into()]);
        let context = |id: u8, name: &str| {
            (10, handshake::REP_META_CONTEXT, [&[0, 0, 0, id], name.as_bytes()].concat())
        };
        assert_eq!(found[1..4], [context(1, "base:allocation"), context(3, &name(2)), (10, 1, Vec::new())]);
        assert_eq!(set(&(1..17).map(name).collect::<Vec<_>>())[1..18].last().unwrap().1, handshake::REP_ACK);
        assert_eq!(set(&(1..18).map(name).collect::<Vec<_>>())[1].1, handshake::REP_ERR_TOO_BIG);
    }

    fn go(name: &str) -> Vec<u8> {
        option(handshake::OPT_GO, &[string(name), vec![0, 0]].concat())
    }

    #[test]
    fn a_client_chooses_one_of_many_exports_and_must_name_one_where_there_is_no_default() {
        let mut exports = Exports::default();
        let [a, b] = ["a", "b"].map(|name| exports.add(name, None));
        let mut handshake = of(exports, Tls::Off);
        assert_eq!(tell(&mut handshake, &[0, 0, 0, 3]).1, Ok(HandshakeStep::More));
        let (said, _) = tell(&mut handshake, &go(""));
        assert!(said.starts_with(&answer(7, handshake::REP_ERR_UNKNOWN)) && said.ends_with(b"must name one"));
        let (said, _) = tell(&mut handshake, &go("c"));
        assert!(
            said.starts_with(&answer(7, handshake::REP_ERR_UNKNOWN))
                && said.ends_with(b"no such export: \"c\"")
        );
        assert!(handshake.chosen().is_none() && !handshake.is_cancelled());
        assert_eq!(tell(&mut handshake, &go("b")).1, Ok(HandshakeStep::Serve));
        assert!(Arc::ptr_eq(&handshake.chosen().unwrap(), &b));
        a.1.store(true, Ordering::Relaxed);
        assert!(!handshake.is_cancelled(), "another export has ended");
        b.1.store(true, Ordering::Relaxed);
        assert!(handshake.is_cancelled() && handshake.chosen().is_none());
    }

    #[test]
    fn contexts_and_block_sizes_of_one_export_do_not_count_for_another() {
        let mut exports = Exports::default();
        ["a", "b"].iter().for_each(|name| drop(exports.add(name, None)));
        let exports = Arc::new(Mutex::new(exports));
        let sizes = option(handshake::OPT_INFO, &[string("a"), vec![0, 1, 0, 3]].concat());
        let negotiated = [option(8, &[]), context("a", "base:allocation"), sizes];
        let agreed = |name: &str, meanwhile: &dyn Fn()| {
            let mut handshake = NbdHandshake::new(exports.clone(), Tls::Off);
            let said = tell(&mut handshake, &[&[0, 0, 0, 3], &negotiated.concat()[..]].concat());
            assert_eq!(said.1, Ok(HandshakeStep::More));
            meanwhile();
            assert_eq!(tell(&mut handshake, &go(name)).1, Ok(HandshakeStep::Serve));
            (handshake.agreed().selected.len(), handshake.agreed().knows_blocks)
        };
        assert_eq!((agreed("a", &|| ()), agreed("b", &|| ())), ((1, true), (0, false)));
        let replace = || {
            let before = exports.lock().unwrap().exports.remove("a").unwrap().0;
            assert_eq!(Arc::strong_count(&before), 1, "a handshake keeps no export that it has not chosen");
            exports.lock().unwrap().add("a", None);
        };
        assert_eq!(agreed("a", &replace), (0, false), "another export has the name");
    }

    #[test]
    fn a_client_finds_the_exports_for_its_identity_and_no_others() {
        let mut handshake = {
            let mut exports = Exports::default();
            for (name, of) in [("a", Some("alice")), ("b", Some("bob")), ("c", None)] {
                exports.add(name, of);
            }
            of(exports, Tls::Allowed)
        };
        assert_eq!(tell(&mut handshake, &[0, 0, 0, 3]).1, Ok(HandshakeStep::More));
        let listed = |handshake: &mut Tested| {
            let (said, _) = tell(handshake, &option(3, &[]));
            ["a a", "a b", "a c"].map(|text| said.windows(3).any(|bytes| bytes == text.as_bytes()))
        };
        assert_eq!(listed(&mut handshake), [false, false, true]);
        assert_eq!(tell(&mut handshake, &option(handshake::OPT_STARTTLS, &[])).1, Ok(HandshakeStep::Secure));
        handshake.secured(Some("bob"));
        assert_eq!(listed(&mut handshake), [false, true, true]);
        assert!(tell(&mut handshake, &go("a")).0.starts_with(&answer(7, handshake::REP_ERR_UNKNOWN)));
        assert_eq!(tell(&mut handshake, &go("b")).1, Ok(HandshakeStep::Serve));
    }

    #[test]
    fn a_long_list_is_sent_in_parts_and_exports_may_end_meanwhile() {
        let mut exports = Exports::default();
        (0..2000).for_each(|number| drop(exports.add(&format!("export-{number:04}"), None)));
        let exports = Arc::new(Mutex::new(exports));
        let mut handshake = NbdHandshake::new(exports.clone(), Tls::Off);
        let (mut parts, mut output) = (Vec::new(), Vec::new());
        let mut input = [&[0, 0, 0, 3], &option(3, &[])[..], &option(2, &[])[..]].concat();
        loop {
            let (used, step) = handshake.advance(&input, &mut output).unwrap();
            input.drain(..used);
            assert!(output.len() < 2 * MAX_OPTION);
            exports.lock().unwrap().exports.remove("export-1999");
            let is_over = output.is_empty() || step == HandshakeStep::Leave;
            parts.push(std::mem::take(&mut output));
            if is_over {
                break;
            }
        }
        let said = parts.concat();
        assert!(parts.len() > 2);
        let count = |text: &str| said.windows(text.len()).filter(|bytes| *bytes == text.as_bytes()).count();
        assert_eq!((count("a export-"), count("export-1999")), (1999, 0));
        assert!(said.ends_with(&[answer(3, 1), vec![0; 4], answer(2, 1), vec![0; 4]].concat()));
    }
}
