//! A hostile NVMe/TCP target, and the host in `drivers_nvme_tcp`, in one thread, step by step.
//!
//! The target may report anything about its controller and namespace; then it mixes valid answers
//! with changed ones and random bytes. Whatever it sends, memory outside requests must stay
//! unchanged, every request must end exactly once, and nothing may panic.

use crate::input::Input;
use block::{Data, Flags, Queue, Request, Segment};
use drivers_nvme_tcp::{Address, Nqn, NvmeTcpQueue, Options, Session};
use nvme::entry::{COMPLETION_BYTES, SUBMISSION_BYTES};
use nvme::identify::{ControllerData, NamespaceData};
use nvme::tcp::{C2hData, CapsuleResp, DataDigest, Framing, MAX_FRONT, R2t};
use nvme::{CompletionEntry, SubmissionEntry};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

const SLOTS: usize = 4;
/// Memory of one slot, followed by as many bytes that must stay unchanged.
const BUFFER: usize = 16384;
const UNTOUCHED: u8 = 0x5a;
const MAX_ACTIONS: usize = 64;

/// Runs one input.
///
/// # Panics
/// When the host violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    ours.set_nonblocking(true).expect("a socket of ours");
    theirs.set_nonblocking(true).expect("a socket of ours");
    let name = Nqn::new("nqn.2014-08.org.example:fuzz").expect("a name");
    let mut options = Options::new(Address::Unix("/".into()), name);
    options.queue_depth = SLOTS as u32;
    options.host_id = Some([1; 16]);
    (options.header_digest, options.data_digest) = (input.u8() % 4 == 1, input.u8() % 4 == 1);
    let (controller, namespace) = describe(&mut input);
    let Ok(queue) = Session::detached(ours.into(), &options, &controller, &namespace) else { return };
    let (header_digest, data_digest) = (options.header_digest, options.data_digest);
    let framing = Framing { header_digest, data_digest, ..Framing::default() };
    let mut target = Target { stream: theirs, framing, asked: Vec::new(), rest: Vec::new() };
    Play { queue, memory: vec![UNTOUCHED; 2 * SLOTS * BUFFER], busy: [false; SLOTS], segments: Vec::new() }
        .go(&mut target, &mut input);
}

/// The controller's Identify data, valid or not.
fn describe(input: &mut Input<'_>) -> (nvme::IdentifyData, nvme::IdentifyData) {
    let controller = ControllerData {
        max_transfer_exponent: input.one_of(&[0, 1, 2, 255]),
        commands: input.one_of(&[0xc, 0, 8]),
        volatile_cache: 1,
        command_capsule_units: input.one_of(&[4, 4 + 64, 4 + 512, 0, u32::MAX]),
        max_commands: input.one_of(&[0, 1, 64]),
        ..ControllerData::default()
    };
    let namespace = NamespaceData {
        blocks: input.one_of(&[1 << 20, 8, u64::MAX]),
        features: input.u8(),
        deallocation: input.u8(),
        block_shift: input.one_of(&[9, 9, 9, 12, 64]),
        nguid: [1; 16],
        ..NamespaceData::default()
    };
    let (mut controller, mut namespace) = (controller.encode(), namespace.encode());
    for _ in 0..input.below(4) {
        controller[usize::from(input.u16()) % 4096] = input.u8();
        namespace[usize::from(input.u16()) % 4096] = input.u8();
    }
    (controller, namespace)
}

struct Target {
    stream: UnixStream,
    framing: Framing,
    /// The last commands received.
    asked: Vec<SubmissionEntry>,
    /// Bytes of an incomplete PDU.
    rest: Vec<u8>,
}

impl Target {
    fn send(&mut self, bytes: &[u8]) {
        // A full socket or a disconnected host ends the exchange.
        let _ = self.stream.write(bytes);
    }

    /// Receives PDUs by their length and stores commands.
    fn listen(&mut self) {
        let mut piece = vec![0; 64 << 10];
        while let Ok(count) = self.stream.read(&mut piece)
            && count > 0
        {
            self.rest.extend(&piece[..count]);
        }
        let mut bytes = &self.rest[..];
        while let Some(len) = bytes.get(4..8) {
            let len = u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize;
            let Some(pdu) = bytes.get(..len) else { break };
            if pdu[0] == 4 {
                let entry: &[u8; SUBMISSION_BYTES] = pdu[8..72].try_into().expect("a command");
                self.asked.push(SubmissionEntry::parse(entry));
            }
            bytes = &bytes[len..];
        }
        self.rest = bytes.to_vec();
        let keep = self.asked.len().saturating_sub(8);
        self.asked.drain(..keep);
    }

    /// Sends an answer to one of the last commands, valid or slightly changed.
    fn answer(&mut self, input: &mut Input<'_>) {
        let mut id = 0;
        let mut len = 4096;
        if !self.asked.is_empty() {
            let at = input.below(self.asked.len());
            (id, len) = (self.asked[at].command_id, self.asked[at].sgl.len());
        }
        let mut offset = 0;
        match input.below(16) {
            0 => id ^= 1 << (input.u8() % 16),
            1 => offset = u32::from(input.u8()) * 512,
            2 => len = u32::from(input.u16()),
            3 => (offset, len) = (len / 2, len / 2),
            4 => len /= 2,
            _ => {}
        }
        let mut bytes = vec![0; MAX_FRONT];
        let front = match input.below(8) {
            0..=2 => {
                let flags = input.u8();
                let (is_last, is_success) = (flags & 3 != 0, flags & 1 != 0);
                let len = len.min(2 * BUFFER as u32);
                let data = C2hData { command_id: id, offset, len, is_last, is_success };
                let front = data.encode(&self.framing, &mut bytes);
                bytes.truncate(front);
                bytes.resize(front + len as usize, 2);
                if self.framing.data_digest && len > 0 {
                    let mut digest = DataDigest::new();
                    digest.update(&bytes[front..]);
                    bytes.extend(digest.to_bytes());
                }
                bytes.len()
            }
            3 | 4 => R2t { command_id: id, tag: input.u16(), offset, len }.encode(&self.framing, &mut bytes),
            5 | 6 => {
                let status = nvme::Status::new(if input.u8() < 192 { 0 } else { input.u16() });
                let entry = CompletionEntry::new(id, status);
                CapsuleResp { entry: entry.encode() }.encode(&self.framing, &mut bytes)
            }
            _ => {
                let mut entry = [0; COMPLETION_BYTES];
                for (to, from) in entry.iter_mut().zip(input.bytes(COMPLETION_BYTES)) {
                    *to = *from;
                }
                CapsuleResp { entry }.encode(&self.framing, &mut bytes)
            }
        };
        bytes.truncate(front);
        if input.u8() < 8 {
            let at = input.below(bytes.len().min(80));
            bytes[at] ^= input.u8();
        }
        // A part may be missing: at the end of the connection, or replaced by the next PDU.
        let cut = if input.u8() < 8 { input.below(bytes.len()) } else { bytes.len() };
        self.send(&bytes[..cut]);
    }
}

/// The host's side.
struct Play {
    queue: NvmeTcpQueue,
    memory: Vec<u8>,
    /// Slots in flight.
    busy: [bool; SLOTS],
    segments: Vec<Box<[Segment]>>,
}

impl Play {
    fn go(mut self, target: &mut Target, input: &mut Input<'_>) {
        for _ in 0..MAX_ACTIONS {
            if input.is_empty() {
                break;
            }
            match input.below(8) {
                0..=2 => self.push(input),
                3 => {
                    self.queue.kick();
                    target.listen();
                }
                4 | 5 => target.answer(input),
                6 => {
                    let bytes = input.bytes(32).to_vec();
                    target.send(&bytes);
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
        let _ = target.stream.shutdown(Shutdown::Both);
        // The first call detects the end; the second, that no reconnection follows.
        self.reap();
        self.reap();
        self.check();
        assert!(!self.busy.contains(&true), "requests that never end: {:?}", self.busy);
    }

    fn push(&mut self, input: &mut Input<'_>) {
        let slots = SLOTS.min(self.queue.depth() as usize);
        let Some(slot) = self.busy[..slots].iter().position(|is_busy| !is_busy) else { return };
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
            0..=2 => Request::read(data),
            3 | 4 => Request::write(data, flags),
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
