//! The reader of a connection: parses PDUs into commands and data.
//!
//! ```text
//!   Front ─┬─► CapsuleCmd ─┬──────────────────────► a command
//!          │               └─► Data ─► Digest ────► a command with its data
//!          └─► H2CData ──────► Data ─► Digest ────► part of a transfer that the export requested
//! ```
//!
//! A command takes an entry of its queue; the host may use as many as were negotiated. The reader
//! never waits for something that needs more of the stream. Data is requested only when there is
//! memory. In-capsule data waits for memory only while completely received commands hold the memory
//! reserved for it.

use crate::transfers::Transfers;
use crate::{IN_CAPSULE_BYTES, MAX_H2C_DATA, data_digest};
use ::stream::Inbox;
use block::Data;
use exports::DataMemory;
use exports::stream::{Grant, Link, MAX_REQUEST_HEADER, Memory};
use nvme::SubmissionEntry;
use nvme::tcp::{
    COMMAND_BYTES, COMMON_BYTES, CapsuleCmd, DIGEST_BYTES, Fatal, FatalStatus, Frame, Framing, H2cData,
    HEADER_BYTES, PduType, Side, TermReq,
};

/// A command with its data in memory of the connection.
pub(crate) type Command = nvme_target::Command<Memory>;

/// The recipient of data.
enum Owner {
    Command(SubmissionEntry),
    Transfer(u16),
}

/// Data that is being received.
struct Payload {
    owner: Owner,
    memory: Memory,
    /// Offset in the memory, length, and bytes received so far.
    start: usize,
    len: usize,
    received: usize,
    has_digest: bool,
}

enum State {
    Front,
    /// After a command, before the memory for its data.
    Capsule(SubmissionEntry, Frame),
    Data(Payload),
    Digest(Payload),
}

/// The outcome of [`Reader::next`].
pub(crate) enum Found {
    NeedsBytes,
    /// Memory that earlier commands use.
    NeedsRoom,
    Command(Command),
    /// Data of a transfer was received.
    Part,
    /// The host terminates the connection, with a reason.
    Terminated(TermReq),
}

/// An unrecoverable protocol error: the status for the host, and the start of the rejected PDU.
pub(crate) struct Rejected {
    pub(crate) fatal: Fatal,
    pub(crate) pdu: Vec<u8>,
}

/// The reader of one connection.
pub(crate) struct Reader {
    inbox: Inbox,
    framing: Framing,
    state: State,
}

impl Reader {
    /// Creates a reader for PDUs with this framing; `early` was received during the handshake.
    pub(crate) fn new(framing: Framing, early: &[u8]) -> Reader {
        Reader { inbox: Inbox::new(MAX_REQUEST_HEADER, early), framing, state: State::Front }
    }

    /// Parses received bytes until it finds something to do.
    pub(crate) fn next(&mut self, transfers: &mut Transfers, link: &Link) -> Result<Found, Rejected> {
        loop {
            match std::mem::replace(&mut self.state, State::Front) {
                State::Front => match self.front(transfers, link)? {
                    Some(found) => return Ok(found),
                    None => continue,
                },
                State::Capsule(entry, frame) => match link.capsule(frame.data_len as usize) {
                    Some(memory) => {
                        self.state = State::Data(Payload::new(Owner::Command(entry), memory, 0, &frame));
                    }
                    None => {
                        self.state = State::Capsule(entry, frame);
                        return Ok(Found::NeedsRoom);
                    }
                },
                State::Data(mut payload) => {
                    let unread = self.inbox.unread();
                    let len = unread.len().min(payload.len - payload.received);
                    payload.memory.fill(payload.start + payload.received, &unread[..len]);
                    self.inbox.consume(len);
                    payload.received += len;
                    if payload.received < payload.len {
                        self.state = State::Data(payload);
                        return Ok(Found::NeedsBytes);
                    }
                    if !payload.has_digest {
                        return Ok(finish(payload, true, transfers));
                    }
                    self.state = State::Digest(payload);
                }
                State::Digest(mut payload) => {
                    let Some(expected) = self.inbox.unread().first_chunk::<DIGEST_BYTES>().copied() else {
                        self.state = State::Digest(payload);
                        return Ok(Found::NeedsBytes);
                    };
                    self.inbox.consume(DIGEST_BYTES);
                    let is_intact = data_digest(&mut payload.memory, payload.start, payload.len) == expected;
                    return Ok(finish(payload, is_intact, transfers));
                }
            }
        }
    }

    /// Parses a PDU up to its data. Returns `None` when data follows.
    fn front(&mut self, transfers: &mut Transfers, link: &Link) -> Result<Option<Found>, Rejected> {
        let unread = self.inbox.unread();
        let Some(common) = unread.first_chunk::<COMMON_BYTES>() else { return Ok(Some(Found::NeedsBytes)) };
        let reject =
            |fatal: Fatal| Rejected { fatal, pdu: unread[..unread.len().min(COMMAND_BYTES)].to_vec() };
        let frame = self.framing.accept(common, Side::Host).map_err(reject)?;
        let (longest, fatal) = match frame.kind {
            PduType::H2cData => (MAX_H2C_DATA, Fatal::new(FatalStatus::LimitExceeded)),
            _ => (IN_CAPSULE_BYTES, Fatal::field(4)),
        };
        if frame.data_len > longest {
            return Err(reject(fatal));
        }
        let Some(front) = unread.get(..frame.front_bytes()) else { return Ok(Some(Found::NeedsBytes)) };
        frame.check_header_digest(front).map_err(reject)?;
        let found = match frame.kind {
            PduType::CapsuleCmd => {
                let header = front.first_chunk::<COMMAND_BYTES>().expect("as long as its kind");
                let entry = SubmissionEntry::parse(&CapsuleCmd::parse(header, &frame).entry);
                if !matches!(link.grant(0), Grant::Whole(_)) {
                    // The host exceeds the size of the queue.
                    return Err(reject(Fatal::new(FatalStatus::Sequence)));
                }
                if frame.data_len == 0 {
                    Some(Found::Command(Command { entry, data: None, is_intact: true }))
                } else {
                    self.state = State::Capsule(entry, frame);
                    None
                }
            }
            PduType::H2cData => {
                let header = front.first_chunk::<HEADER_BYTES>().expect("as long as its kind");
                let data = H2cData::parse(header, &frame).map_err(reject)?;
                let memory = transfers.expect(&data).map_err(reject)?;
                let owner = Owner::Transfer(data.tag);
                self.state = State::Data(Payload::new(owner, memory, data.offset as usize, &frame));
                None
            }
            PduType::H2cTermReq => {
                let header = front.first_chunk::<HEADER_BYTES>().expect("as long as its kind");
                Some(Found::Terminated(TermReq::parse(header)))
            }
            _ => return Err(reject(Fatal::new(FatalStatus::Sequence))),
        };
        self.inbox.consume(frame.front_bytes());
        Ok(found)
    }

    /// Passes the buffer for the next bytes to `receive`, if it is known.
    pub(crate) fn with_due<R>(&mut self, receive: impl FnOnce(&mut Inbox, Data<'_>) -> R) -> R {
        match &self.state {
            State::Data(Payload { memory, start, len, received, .. }) => {
                // SAFETY: the memory is ours until it goes with its payload, which is after this
                // call.
                let data = unsafe { memory.data() };
                receive(&mut self.inbox, data.part(start + received, len - received))
            }
            _ => receive(&mut self.inbox, Data::none()),
        }
    }

    /// Counts `len` bytes of expected data as received.
    pub(crate) fn note_due(&mut self, len: usize) {
        if let State::Data(payload) = &mut self.state {
            payload.received += len;
        }
    }

    /// The stream has ended. Releases incomplete data: a transfer gets its memory back and ends,
    /// and an incomplete command is dropped.
    pub(crate) fn give_up(&mut self, transfers: &mut Transfers, link: &Link) {
        match std::mem::replace(&mut self.state, State::Front) {
            State::Front => {}
            State::Capsule(..) => link.drop_request(),
            State::Data(payload) | State::Digest(payload) => match payload.owner {
                Owner::Command(_) => link.drop_request(),
                Owner::Transfer(tag) => transfers.give_back(tag, payload.memory),
            },
        }
        transfers.end();
    }
}

impl Payload {
    fn new(owner: Owner, memory: Memory, start: usize, frame: &Frame) -> Payload {
        let (len, has_digest) = (frame.data_len as usize, frame.has_data_digest);
        Payload { owner, memory, start, len, received: 0, has_digest }
    }
}

/// Handles completely received data.
fn finish(payload: Payload, is_intact: bool, transfers: &mut Transfers) -> Found {
    match payload.owner {
        Owner::Command(entry) => Found::Command(Command { entry, data: Some(payload.memory), is_intact }),
        Owner::Transfer(tag) => {
            transfers.arrive(tag, payload.memory, payload.len, is_intact);
            Found::Part
        }
    }
}
