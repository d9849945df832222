//! A hostile NBD server, and the client in `drivers_nbd`, in one thread, step by step.
//!
//! The server writes to a socket pair before the client reads, so neither side waits for the other.
//! It may send anything during the handshake, or complete it and then mix valid replies with
//! changed ones and random bytes. Whatever it sends, memory outside requests must stay unchanged,
//! every request must end exactly once, and nothing may panic.

use crate::input::Input;
use block::{Data, Flags, Queue, Request, Segment};
use drivers_nbd::{Address, Cancel, NbdQueue, Options, Replies, Session};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

const SLOTS: usize = 4;
/// Memory of one slot, followed by as many bytes that must stay unchanged.
const BUFFER: usize = 4096;
const UNTOUCHED: u8 = 0x5a;
const MAX_ACTIONS: usize = 64;
/// Every transmission flag that the client supports, except read-only.
const FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 11;

/// Runs one input.
///
/// # Panics
/// When the client violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("a socket of ours");
    let mut server = Server { stream: theirs, replies: Replies::Simple, asked: Vec::new() };
    let mut options = Options::new(Address::Unix("/".into()));
    (options.queue_depth, options.timeout_ms) = (SLOTS as u32, 1000);
    options.replies = input.one_of(&[Replies::Simple, Replies::Structured, Replies::Extended]);
    let is_honest = input.u8() < 240;
    if is_honest {
        server.agree(&options, &mut input);
    } else {
        server.send(b"NBDMAGICIHAVEOPT\0\x03");
        while !input.is_empty() {
            server.babble(&mut input);
        }
        let _ = server.stream.shutdown(Shutdown::Write);
    }
    let session = match Session::over(ours.into(), &options, &Cancel::never()) {
        Ok(session) => session,
        Err(_) => return,
    };
    server.replies = session.facts().replies;
    if let Ok(queue) = session.start_queue(&Cancel::never()) {
        server.forget_handshake();
        Play {
            queue,
            memory: vec![UNTOUCHED; 2 * SLOTS * BUFFER],
            busy: [false; SLOTS],
            segments: Vec::new(),
        }
        .go(&mut server, &mut input);
    }
}

/// The server's record of a request.
#[derive(Clone, Copy)]
struct Asked {
    command: u16,
    cookie: u64,
    offset: u64,
    len: u64,
}

struct Server {
    stream: UnixStream,
    replies: Replies,
    asked: Vec<Asked>,
}

impl Server {
    fn send(&mut self, bytes: &[u8]) {
        // A full socket or a disconnected client ends the exchange.
        let _ = self.stream.write(bytes);
    }

    /// Sends the server's whole side of a handshake at once.
    fn agree(&mut self, options: &Options, input: &mut Input<'_>) {
        self.send(b"NBDMAGICIHAVEOPT\0\x03");
        match options.replies {
            Replies::Extended => self.answer(11, 1, &[]),
            Replies::Structured => self.answer(8, 1, &[]),
            Replies::Simple => {}
        }
        let flags = FLAGS ^ (input.u16() & 0x0fec);
        self.answer(7, 3, &[&[0, 0][..], &(1u64 << 20).to_be_bytes(), &flags.to_be_bytes()].concat());
        let most: u32 = input.one_of(&[1024, 4096, 1 << 20]);
        let blocks = [1, 512, most].map(u32::to_be_bytes).concat();
        self.answer(7, 3, &[&[0, 3][..], &blocks].concat());
        self.answer(7, 1, &[]);
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[u8]) {
        let mut reply = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        for number in [option, kind, data.len() as u32] {
            reply.extend(number.to_be_bytes());
        }
        reply.extend(data);
        self.send(&reply);
    }

    /// Sends a reply to an option, or random bytes.
    fn babble(&mut self, input: &mut Input<'_>) {
        if input.u8() < 16 {
            let bytes = input.bytes(64).to_vec();
            return self.send(&bytes);
        }
        let option = input.one_of(&[11, 8, 7, 7, 1]);
        let kind = input.one_of(&[1, 3, 3, 2, 1 << 31 | 1, 1 << 31 | 5, 1 << 31 | 6]);
        let data = input.bytes(20).to_vec();
        self.answer(option, kind, &data);
    }

    /// Discards the client's messages of the handshake.
    fn forget_handshake(&mut self) {
        let mut bytes = [0; 4096];
        while matches!(self.stream.read(&mut bytes), Ok(count) if count > 0) {}
    }

    /// Receives requests: headers by their magic numbers; payloads are skipped by their length.
    fn listen(&mut self) {
        let mut bytes: Vec<u8> = Vec::new();
        let mut piece = vec![0; 64 << 10];
        while let Ok(count) = self.stream.read(&mut piece)
            && count > 0
        {
            bytes.extend(&piece[..count]);
        }
        let mut rest = &bytes[..];
        let is_extended = self.replies == Replies::Extended;
        let header = if is_extended { 32 } else { 28 };
        while rest.len() >= header {
            let number = |from: usize, len: usize| {
                rest[from..from + len].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
            };
            let len = number(24, header - 24);
            let asked =
                Asked { command: number(6, 2) as u16, cookie: number(8, 8), offset: number(16, 8), len };
            let payload = if asked.command == 1 { len as usize } else { 0 };
            rest = rest.get(header + payload..).unwrap_or_default();
            self.asked.push(asked);
        }
        let keep = self.asked.len().saturating_sub(8);
        self.asked.drain(..keep);
    }

    /// Sends a reply to one of the last requests, valid or slightly changed.
    fn reply(&mut self, input: &mut Input<'_>) {
        let nobody = Asked { command: 0, cookie: 0, offset: 0, len: 512 };
        let mut asked = if self.asked.is_empty() {
            nobody
        } else {
            let at = input.below(self.asked.len());
            if input.u8() < 128 { self.asked.remove(at) } else { self.asked[at] }
        };
        match input.below(16) {
            0 => asked.cookie ^= 1 << (input.u8() % 64),
            1 => asked.offset = asked.offset.wrapping_add(input.u64()),
            2 => asked.offset = asked.offset.wrapping_add(u64::from(input.u8())),
            3 => asked.len = u64::from(input.u16()),
            _ => {}
        }
        let len = asked.len.min(8192) as usize;
        if self.replies == Replies::Simple || input.u8() < 8 {
            let error = if input.u8() < 192 { 0 } else { u32::from(input.u8()) };
            let mut bytes = vec![0x67, 0x44, 0x66, 0x98];
            bytes.extend(error.to_be_bytes());
            bytes.extend(asked.cookie.to_be_bytes());
            if asked.command == 0 && error == 0 {
                bytes.extend(vec![1; len]);
            }
            return self.send(&bytes);
        }
        let from = usize::from(input.u8()) * 16 % (len + 1);
        let take = (usize::from(input.u8()) * 64 + 1).min(len - from);
        let at = (asked.offset.wrapping_add(from as u64)).to_be_bytes();
        let (kind, payload) = match input.below(8) {
            0 => (0, Vec::new()),
            1..=3 if asked.command == 0 => (1, [&asked.offset.to_be_bytes()[..], &vec![2; len]].concat()),
            4 => (1, [&at[..], &vec![3; take]].concat()),
            5 => (2, [&at[..], &(take as u32).to_be_bytes()].concat()),
            6 => (0x8001, [&[0, 0, 0, input.u8()][..], &[0, input.u8()], &[b'x'; 16]].concat()),
            7 => (input.u16(), input.bytes(64).to_vec()),
            _ => (0, Vec::new()),
        };
        let is_last = kind == 0 || input.u8() < 160;
        let is_extended = self.replies == Replies::Extended;
        let mut bytes = if is_extended { 0x6e8a_278c_u32 } else { 0x668e_33ef }.to_be_bytes().to_vec();
        bytes.extend(u16::from(is_last).to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(asked.cookie.to_be_bytes());
        if is_extended {
            bytes.extend(asked.offset.to_be_bytes());
            bytes.extend((payload.len() as u64).to_be_bytes());
        } else {
            bytes.extend((payload.len() as u32).to_be_bytes());
        }
        bytes.extend(payload);
        // A part may be missing: at the end of the connection, or replaced by the next message.
        let cut = if input.u8() < 8 { input.below(bytes.len()) } else { bytes.len() };
        self.send(&bytes[..cut]);
    }
}

/// The client's side.
struct Play {
    queue: NbdQueue,
    memory: Vec<u8>,
    /// Slots in flight.
    busy: [bool; SLOTS],
    segments: Vec<Box<[Segment]>>,
}

impl Play {
    fn go(mut self, server: &mut Server, input: &mut Input<'_>) {
        for _ in 0..MAX_ACTIONS {
            if input.is_empty() {
                break;
            }
            match input.below(8) {
                0..=2 => self.push(input),
                3 => {
                    self.queue.kick();
                    server.listen();
                }
                4 | 5 => server.reply(input),
                6 => {
                    let bytes = input.bytes(32).to_vec();
                    server.send(&bytes);
                }
                _ => {
                    if self.queue.arm() {
                        self.queue.disarm();
                    }
                }
            }
            self.reap();
            self.check();
        }
        let _ = server.stream.shutdown(Shutdown::Both);
        self.reap();
        self.check();
        assert!(!self.busy.contains(&true), "requests that never end: {:?}", self.busy);
    }

    fn push(&mut self, input: &mut Input<'_>) {
        let Some(slot) = self.busy.iter().position(|is_busy| !is_busy) else { return };
        let len = 512 * (1 + input.below(BUFFER / 512));
        let offset = 512 * u64::from(input.u8());
        let base = self.memory[2 * slot * BUFFER..].as_mut_ptr();
        let middle = usize::from(input.u16()) % len;
        let list =
            [Segment { base, len: middle }, Segment { base: base.wrapping_add(middle), len: len - middle }];
        self.segments.push(Box::new(list));
        // SAFETY: list and memory live as long as the queue.
        let data = unsafe { Data::new(self.segments.last().expect("just pushed")) };
        let flags = input.one_of(&[Flags::NONE, Flags::FUA, Flags::NO_UNMAP, Flags::NO_FALLBACK]);
        let req = match input.below(8) {
            0..=3 => Request::read(data),
            4 => Request::write(data, flags),
            5 => Request::write_zeroes(len as u64, flags),
            6 => Request::discard(len as u64),
            _ => Request::flush(),
        };
        // SAFETY: as above.
        self.busy[slot] = unsafe { self.queue.push(slot as u32, &req, offset) }.is_ok();
    }

    fn reap(&mut self) {
        let busy = &mut self.busy;
        self.queue.reap(&mut |slot, _| {
            assert!(std::mem::take(&mut busy[slot as usize]), "slot {slot} ended twice");
        });
    }

    /// Asserts that no byte outside the requests' memory has changed.
    fn check(&self) {
        for slot in 0..SLOTS {
            let behind = &self.memory[(2 * slot + 1) * BUFFER..][..BUFFER];
            assert!(behind.iter().all(|byte| *byte == UNTOUCHED), "memory behind slot {slot} was written");
        }
    }
}
