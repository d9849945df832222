//! The reader of a connection: parses requests from the stream.
//!
//! ```text
//!   Header ─► Judged ─► (room?) ─┬─► Payload ─► a job ─┐
//!      ▲                         ├─► a job ───────────┤
//!      │                         ├─► Long (fragment?) ─► Payload ─► a job, again and again
//!      │                         └─► Skip ─► a refusal ┤
//!      └─────────────────────────────────────────────────┘
//! ```
//!
//! The reader receives no request without room for it. At the limit of requests or memory it stops,
//! and the client blocks once the socket is full.

use crate::job::{Job, Part};
use crate::long_write::LongWrite;
use crate::request::{Rules, Verdict};
use ::stream::Inbox;
use block::Data;
use exports::DataMemory;
use exports::stream::{Found, Grant, Link, MAX_REQUEST_HEADER};
use nbd::error::SHUTDOWN;
use nbd::reply::Reply;
use nbd::request::Header;

/// The reader's position in the stream.
enum State {
    /// Before a header.
    Header,
    /// After a header, when the request needs memory or an answer.
    Judged(Header, Verdict),
    /// Before the next fragment of a long write.
    Long(LongWrite),
    /// In the payload of a write.
    Payload { job: Job, received: usize },
    /// In payload that is discarded.
    Skip { header: Header, content: Reply, left: u64 },
}

/// A request that is answered without the device.
type Answer = (Header, Reply);

/// The result of [`Reader::give_up`].
pub(crate) struct GivenUp {
    /// Whether a counted request was dropped without a reply.
    pub(crate) is_forgotten: bool,
}

/// The reader of one connection.
pub(crate) struct Reader {
    inbox: Inbox,
    state: State,
}

impl Reader {
    /// Creates a reader; `early` was received during the handshake.
    pub(crate) fn new(early: &[u8]) -> Reader {
        Reader { inbox: Inbox::new(MAX_REQUEST_HEADER, early), state: State::Header }
    }

    /// Parses received bytes until there is a request to execute, or answers one at once.
    /// `is_closing`: refuses every request.
    pub(crate) fn next(
        &mut self,
        rules: &Rules,
        capacity: u64,
        is_closing: bool,
        link: &Link,
    ) -> Result<Found<Job>, Answer> {
        loop {
            match std::mem::replace(&mut self.state, State::Header) {
                State::Header => {
                    let unread = self.inbox.unread();
                    let len = rules.form.header_len();
                    if unread.len() < len {
                        return Ok(Found::NeedsBytes);
                    }
                    let header = match Header::parse(unread, rules.form) {
                        Ok(header) => header,
                        Err(magic) => {
                            return Ok(Found::ProtocolError(format!("invalid request magic {magic:#010x}")));
                        }
                    };
                    self.inbox.consume(len);
                    let verdict = match rules.judge(&header, capacity) {
                        Verdict::Leave => return Ok(Found::Leave),
                        Verdict::Disconnect(reason) => return Ok(Found::ProtocolError(reason.into())),
                        Verdict::Run { .. } | Verdict::Answer { .. } if is_closing => {
                            Verdict::Answer { content: Reply::Failed(SHUTDOWN), skip: rules.payload(&header) }
                        }
                        verdict => verdict,
                    };
                    self.state = State::Judged(header, verdict);
                }
                State::Judged(header, verdict) => {
                    let data = if let Verdict::Run { data } = verdict { data } else { 0 };
                    let has_payload = rules.payload(&header) > 0;
                    let (memory, part) = match link.grant(data) {
                        Grant::Whole(memory) => (memory, Part::Whole),
                        Grant::InFragments if has_payload => {
                            self.state = State::Long(LongWrite::new(header));
                            continue;
                        }
                        Grant::InFragments => (None, Part::LongRead),
                        Grant::NoRoom => {
                            self.state = State::Judged(header, verdict);
                            return Ok(Found::NeedsRoom);
                        }
                    };
                    let job = Job { header, memory, part };
                    match verdict {
                        Verdict::Answer { content, skip: 0 } => return Err((header, content)),
                        Verdict::Answer { content, skip } => {
                            self.state = State::Skip { header, content, left: skip }
                        }
                        _ if has_payload => {
                            let received = rules.blocks(&job.header).head;
                            self.state = State::Payload { job, received };
                        }
                        _ => return Ok(Found::Job(job)),
                    }
                }
                State::Long(write) => {
                    let (fragment, header) = write.next(rules.limits.block_size);
                    let blocks = rules.blocks(&header);
                    let Some(memory) = link.fragment_in(blocks.len) else {
                        self.state = State::Long(write);
                        return Ok(Found::NeedsRoom);
                    };
                    let job = Job { header, memory: Some(memory), part: Part::OfWrite(fragment) };
                    self.state = State::Payload { job, received: blocks.head };
                }
                State::Payload { mut job, mut received } => {
                    let Some(memory) = &mut job.memory else { return Ok(Found::Job(job)) };
                    let end = rules.blocks(&job.header).head + job.header.len as usize;
                    let unread = self.inbox.unread();
                    let len = memory.fill(received, &unread[..unread.len().min(end - received)]);
                    self.inbox.consume(len);
                    received += len;
                    if received == end {
                        if let Part::OfWrite(write) = &job.part
                            && write.left() > 0
                        {
                            self.state = State::Long(write.clone());
                        }
                        return Ok(Found::Job(job));
                    }
                    self.state = State::Payload { job, received };
                    return Ok(Found::NeedsBytes);
                }
                State::Skip { header, content, left } => {
                    let len = left.min(self.inbox.unread().len() as u64);
                    self.inbox.consume(len as usize);
                    if len == left {
                        return Err((header, content));
                    }
                    self.state = State::Skip { header, content, left: left - len };
                    return Ok(Found::NeedsBytes);
                }
            }
        }
    }

    /// The buffer for the next bytes, if they belong to a payload.
    pub(crate) fn with_due<R>(
        &mut self,
        rules: &Rules,
        receive: impl FnOnce(&mut Inbox, Data<'_>) -> R,
    ) -> R {
        match &self.state {
            State::Payload { job: Job { memory: Some(memory), header, .. }, received } => {
                let end = rules.blocks(header).head + header.len as usize;
                // SAFETY: the memory is ours until it goes with its job, which is after this call.
                let data = unsafe { memory.data() };
                receive(&mut self.inbox, data.part(*received, end - received))
            }
            _ => receive(&mut self.inbox, Data::none()),
        }
    }

    /// Counts `len` bytes of payload as received.
    pub(crate) fn note_due(&mut self, len: usize) {
        if let State::Payload { received, .. } = &mut self.state {
            *received += len;
        }
    }

    /// Abandons an incomplete request. `is_closing`: the rest of a write is skipped and the write
    /// refused. Otherwise no more bytes follow.
    pub(crate) fn give_up(&mut self, rules: &Rules, is_closing: bool) -> GivenUp {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Payload { job: Job { header, part, .. }, received } => {
                let end = rules.blocks(&header).head + header.len as usize;
                let (header, rest) = match part {
                    Part::OfWrite(write) => (write.header, write.left()),
                    Part::Whole | Part::LongRead => (header, 0),
                };
                if is_closing {
                    let left = (end - received) as u64 + rest;
                    self.state = State::Skip { header, content: Reply::Failed(SHUTDOWN), left };
                }
                GivenUp { is_forgotten: !is_closing }
            }
            State::Long(write) => {
                if is_closing {
                    let (header, left) = (write.header, write.left());
                    self.state = State::Skip { header, content: Reply::Failed(SHUTDOWN), left };
                }
                GivenUp { is_forgotten: !is_closing }
            }
            State::Judged(header, Verdict::Run { .. }) if is_closing => {
                let skip = rules.payload(&header);
                self.state =
                    State::Judged(header, Verdict::Answer { content: Reply::Failed(SHUTDOWN), skip });
                GivenUp { is_forgotten: false }
            }
            State::Skip { .. } if !is_closing => GivenUp { is_forgotten: true },
            state => {
                self.state = if is_closing { state } else { State::Header };
                GivenUp { is_forgotten: false }
            }
        }
    }

    /// Whether the reader is skipping payload.
    pub(crate) fn is_skipping(&self) -> bool {
        matches!(self.state, State::Skip { .. })
    }
}
