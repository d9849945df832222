//! One connection as a device queue.
//!
//! ```text
//!   push ─► Outbox     kick ─► one sendmsg(2) for all
//!   reap ◄─ Operation ◄─ reply::decode ◄─ Inbox ◄─ recvmsg(2), data straight to the caller
//! ```
//!
//! A request may be sent to the server several times from its slot. A request that is too long for
//! the server is split into parts. A flush follows a write with FUA if the server has no FUA. A
//! cookie holds the slot and a generation number, so that no reply counts twice. A request ends
//! only after its last byte was sent, even when the server answers earlier: until then its memory
//! is still in use.
//!
//! With a reconnect delay requests wait while there is no connection, and start again on the next
//! one.

use super::error::OpenError;
use super::operation::{Next, Operation, Traits};
use super::reconnect::{Attempts, Events};
use super::session::{Connection, Lease, Session};
use ::stream::{Inbox, Received, Wakeup, Wire, abort, disconnect};
use block::{Data, IoError, IoFuture, IoResult, Op, Queue, Request, Segment, StatusReport, StatusStart};
use drivers::direct::{DirectQueue, ZoneRequest, poll_events};
use drivers::stream::{Cancel, Outbox};
use nbd::Replies;
use nbd::error::ESHUTDOWN;
use nbd::reply::{Content, Front, MAX_FRONT, Violation, decode, extent};
use nbd::request::{Command, Header, MAX_HEADER};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum receives in one [`Queue::reap`]: a server that sends without pause must not delay other
/// work.
const MAX_RECEIVES: usize = 64;

/// The data that is sent if the server cannot write zeroes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The next expected bytes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// The header of a reply.
    Front,
    /// Data of a read, from byte `at` of it on.
    Data { slot: u32, at: usize, left: usize, is_last: bool },
    /// Descriptors of the extents in a block status.
    Status { slot: u32, left: usize, is_last: bool },
    /// Bytes to discard.
    Skip { left: usize },
}

/// A connection to an export. Dropping it disconnects from the server in an orderly way.
pub struct NbdQueue {
    wire: Wire,
    lease: Lease,
    traits: Traits,
    replies: Replies,
    /// The identifier of `base:allocation` on this connection.
    context: Option<u32>,
    outbox: Outbox<MAX_HEADER>,
    inbox: Inbox,
    wakeup: Wakeup,
    operations: Box<[Operation]>,
    due: Due,
    /// Slots that have been answered, but not sent completely.
    held: Vec<u32>,
    /// Completions for [`Queue::reap`].
    ended: Vec<(u32, IoResult)>,
    /// Whether the server announced its shutdown: it gets no more requests.
    is_closing: bool,
    /// Attempts to reconnect, while there is no connection.
    attempts: Option<Attempts>,
    /// When the connection was lost, until a request is answered again.
    outage: Option<Instant>,
    /// Whether the outage has lasted longer than requests wait.
    is_late: bool,
    /// The reason why the connection was lost permanently.
    lost: Option<Box<str>>,
}

// SAFETY: the pointers in it belong to requests, whose memory any thread may use, and to buffers of
// its own.
unsafe impl Send for NbdQueue {}

impl Session {
    /// Starts a queue with its own connection. All but the first one connect, which blocks as
    /// [`Session::open`] does.
    ///
    /// # Errors
    /// As [`Session::open`]; when all connections are in use; when the export has changed.
    pub fn start_queue(self: &Arc<Self>, cancel: &Cancel) -> Result<NbdQueue, OpenError> {
        self.start_queue_of(self.queue_depth(), cancel)
    }

    /// As [`Session::start_queue`], for another number of requests: 1 to
    /// [`super::MAX_QUEUE_DEPTH`].
    pub fn start_queue_of(self: &Arc<Self>, depth: u32, cancel: &Cancel) -> Result<NbdQueue, OpenError> {
        let (connection, lease) = self.take_connection(depth, cancel)?;
        NbdQueue::new(connection, lease, depth).map_err(OpenError::System)
    }
}

impl NbdQueue {
    fn new(connection: Connection, lease: Lease, depth: u32) -> io::Result<NbdQueue> {
        let facts = *lease.session().facts();
        let Connection { wire, context } = connection;
        Ok(NbdQueue {
            wire,
            traits: Traits::new(&facts),
            replies: facts.replies,
            context,
            outbox: Outbox::new(depth),
            inbox: Inbox::new(MAX_FRONT, &[]),
            wakeup: Wakeup::new()?,
            operations: (0..depth).map(|_| Operation::idle()).collect(),
            due: Due::Front,
            held: Vec::with_capacity(depth as usize),
            ended: Vec::with_capacity(depth as usize),
            is_closing: false,
            attempts: None,
            outage: None,
            is_late: false,
            lost: None,
            lease,
        })
    }

    /// The session of this queue.
    pub fn session(&self) -> &Arc<Session> {
        self.lease.session()
    }

    /// The reason why the connection was lost permanently, if it was: every request then ends with
    /// [`IoError::DeviceGone`].
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Whether the queue is connected now.
    #[inline]
    pub fn is_connected(&self) -> bool {
        self.lost.is_none() && self.attempts.is_none()
    }

    /// Whether the queue reconnects.
    fn reconnects(&self) -> bool {
        !self.session().reconnect_delay().is_zero()
    }

    /// Whether new requests fail.
    #[inline]
    fn refuses(&self) -> bool {
        self.lost.is_some() || self.is_late || (self.is_closing && !self.reconnects())
    }

    fn fd(&self) -> RawFd {
        self.wire.fd()
    }

    /// Queues the next part of a slot's request in the outbox.
    #[inline]
    fn issue(&mut self, slot: u32) {
        let operation = &mut self.operations[slot as usize];
        let generation = operation.begin_part(&self.traits);
        let cookie = u64::from(generation) << 32 | u64::from(slot);
        let header = Header {
            command: operation.command,
            flags: operation.flags,
            cookie,
            offset: operation.offset,
            len: operation.part,
        };
        let replies = self.replies;
        self.outbox.push_header(|to| header.encode(replies, to));
        if operation.command == Command::Write {
            if operation.writes_zeroes {
                let mut left = operation.part as usize;
                while left > 0 {
                    let len = left.min(ZEROES.len());
                    // The outbox only reads it.
                    self.outbox.push(Segment { base: ZEROES.as_ptr().cast_mut(), len });
                    left -= len;
                }
            } else {
                operation.data.part(0, operation.part as usize).iter().for_each(|s| self.outbox.push(s));
            }
        }
        operation.sent_at = self.outbox.queued();
    }

    /// Handles the last reply to a slot's part.
    #[inline]
    fn answered(&mut self, slot: u32) -> Result<(), Violation> {
        let operation = &mut self.operations[slot as usize];
        operation.answer()?;
        if self.is_closing && operation.met_shutdown() && self.reconnects() {
            return Ok(()); // it waits for the next connection
        }
        self.outage = None;
        let operation = &mut self.operations[slot as usize];
        if self.outbox.sent() < operation.sent_at {
            self.held.push(slot);
        } else {
            self.conclude(slot);
        }
        Ok(())
    }

    /// Continues a slot whose part was sent and answered.
    #[inline]
    fn conclude(&mut self, slot: u32) {
        match self.operations[slot as usize].conclude(&mut self.traits) {
            Next::Issue => self.issue(slot),
            Next::End(result) => self.end(slot, result),
        }
    }

    #[inline]
    fn end(&mut self, slot: u32, result: IoResult) {
        self.operations[slot as usize].is_busy = false;
        self.ended.push((slot, result));
    }

    #[cold]
    fn conclude_held(&mut self) {
        let mut i = 0;
        while let Some(slot) = self.held.get(i).copied() {
            if self.outbox.sent() < self.operations[slot as usize].sent_at {
                i += 1;
            } else {
                self.held.swap_remove(i);
                self.conclude(slot);
            }
        }
    }

    /// Sends as much as the socket takes.
    #[inline]
    fn send(&mut self) {
        if !self.is_connected() {
            return;
        }
        while !self.outbox.is_empty() || self.wire.owes() {
            let before = self.outbox.sent();
            if let Err(error) = self.wire.send(&mut self.outbox) {
                // Completions that the server sent before it disconnected count.
                let _ = self.receive();
                self.break_off(&error.into());
                return;
            }
            if !self.held.is_empty() {
                self.conclude_held();
            }
            if self.outbox.sent() == before {
                return;
            }
        }
    }

    /// Receives as much as the socket has.
    fn receive(&mut self) -> Result<(), Lost> {
        for _ in 0..MAX_RECEIVES {
            let data = match self.due {
                Due::Data { slot, at, left, .. } => self.operations[slot as usize].data.part(at, left),
                Due::Front | Due::Status { .. } | Due::Skip { .. } => Data::none(),
            };
            let (direct, is_drained) = match self.inbox.receive(&mut self.wire, data)? {
                Received::Bytes { direct, is_drained } => (direct, is_drained),
                Received::Nothing => return Ok(()),
                Received::End => return Err(Violation::Closed.into()),
            };
            if direct > 0 {
                self.advance(direct)?;
            }
            self.digest()?;
            if is_drained {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Parses the received bytes.
    fn digest(&mut self) -> Result<(), Violation> {
        loop {
            let unread = self.inbox.unread();
            let used = match self.due {
                Due::Front => match decode(unread, self.replies)? {
                    Some((front, len)) => {
                        self.inbox.consume(len);
                        self.accept(front)?;
                        continue;
                    }
                    None => return Ok(()),
                },
                Due::Data { slot, at, left, .. } => {
                    let len = left.min(unread.len());
                    self.operations[slot as usize].data.part(at, len).copy_from(&unread[..len])
                }
                Due::Status { slot, left, .. } => {
                    let unit = self.replies.descriptor_len();
                    let len = left.min(unread.len()) / unit * unit;
                    for descriptor in unread[..len].chunks_exact(unit) {
                        let (len, status) = extent(descriptor, self.replies);
                        self.operations[slot as usize].describe(len, status, self.traits.block)?;
                    }
                    len
                }
                Due::Skip { left } => left.min(unread.len()),
            };
            if used == 0 {
                return Ok(());
            }
            self.inbox.consume(used);
            self.advance(used)?;
        }
    }

    /// Counts `len` received bytes of the expected data.
    fn advance(&mut self, len: usize) -> Result<(), Violation> {
        self.due = match self.due {
            Due::Data { slot, left, is_last, .. } | Due::Status { slot, left, is_last } if left == len => {
                self.due = Due::Front;
                return if is_last { self.answered(slot) } else { Ok(()) };
            }
            Due::Data { slot, at, left, is_last } => {
                Due::Data { slot, at: at + len, left: left - len, is_last }
            }
            Due::Status { slot, left, is_last } => Due::Status { slot, left: left - len, is_last },
            Due::Skip { left } if left > len => Due::Skip { left: left - len },
            Due::Skip { .. } | Due::Front => Due::Front,
        };
        Ok(())
    }

    /// Handles the header of a reply.
    #[inline]
    fn accept(&mut self, front: Front) -> Result<(), Violation> {
        let slot = self.slot_of(front.cookie)?;
        let operation = &mut self.operations[slot as usize];
        if front.request_offset.is_some_and(|offset| offset != operation.offset) {
            return Err(Violation::Mismatch);
        }
        let is_read = operation.command == Command::Read;
        match front.content {
            Content::Simple { .. } if is_read && self.replies != Replies::Simple => {
                return Err(Violation::Mismatch);
            }
            Content::Data { .. } | Content::Hole { .. } if !is_read => return Err(Violation::Mismatch),
            Content::Simple { error: 0 } if is_read => {
                let left = operation.expect_all()?;
                self.inbox.expect(left);
                self.due = Due::Data { slot, at: 0, left, is_last: true };
                return Ok(());
            }
            Content::Data { offset, len } => {
                let at = operation.cover(offset, len)?;
                let left = len as usize;
                self.inbox.expect(left);
                self.due = Due::Data { slot, at, left, is_last: front.is_last };
                return Ok(());
            }
            Content::Hole { offset, len } => {
                let at = operation.cover(offset, len)?;
                operation.data.part(at, len as usize).fill(0);
            }
            Content::Status { context, len } => {
                if operation.command != Command::BlockStatus || self.context != Some(context) {
                    return Err(Violation::Mismatch);
                }
                self.inbox.expect(0);
                self.due = Due::Status { slot, left: len as usize, is_last: front.is_last };
                return Ok(());
            }
            Content::Simple { error } => self.failed(slot, error),
            Content::Error { error, rest } => {
                self.failed(slot, error);
                self.due = if rest > 0 { Due::Skip { left: rest as usize } } else { Due::Front };
            }
            Content::Nothing => {}
        }
        if !is_read {
            self.inbox.expect(0);
        }
        if front.is_last { self.answered(slot) } else { Ok(()) }
    }

    /// Records a slot's first error.
    #[inline]
    fn failed(&mut self, slot: u32, error: u32) {
        let operation = &mut self.operations[slot as usize];
        if operation.error == 0 {
            operation.error = error;
        }
        self.is_closing |= error == ESHUTDOWN;
    }

    #[inline]
    fn slot_of(&self, cookie: u64) -> Result<u32, Violation> {
        let (slot, generation) = (cookie as u32, (cookie >> 32) as u32);
        match self.operations.get(slot as usize) {
            Some(operation) if operation.awaits(generation) => Ok(slot),
            _ => Err(Violation::Cookie(cookie)),
        }
    }

    /// Ends the connection: the server is gone or violated the protocol. Requests in flight wait
    /// for another connection, or end.
    #[cold]
    fn break_off(&mut self, why: &Lost) {
        if !self.is_connected() {
            return;
        }
        abort(self.wire.socket());
        self.outbox.clear();
        self.inbox.clear();
        self.due = Due::Front;
        self.is_closing = false;
        if !self.reconnects() || !why.is_passing() {
            return self.give_up(&why.to_string());
        }
        tracing::warn!(device = %self.session().name(), %why, "connection lost: reconnecting");
        let since = *self.outage.get_or_insert_with(Instant::now);
        let event = self.wakeup.share_event();
        match event.and_then(|event| Attempts::start(self.lease.session(), event, since)) {
            Ok(attempts) => self.attempts = Some(attempts),
            Err(error) => return self.give_up(&error.to_string()),
        }
        self.start_over();
        // A server may accept connections and refuse requests for ever.
        if since.elapsed() >= self.session().reconnect_delay() {
            self.fail_all();
        }
    }

    /// Prepares the requests in flight for another connection. Their memory is not in use any more.
    fn start_over(&mut self) {
        while let Some(slot) = self.held.pop() {
            if let Next::End(result) = self.operations[slot as usize].conclude(&mut self.traits) {
                self.end(slot, result);
            }
        }
        for slot in 0..self.operations.len() as u32 {
            let operation = &mut self.operations[slot as usize];
            if operation.is_busy && !operation.start_over() {
                self.end(slot, Ok(()));
            }
        }
    }

    /// Ends all requests until there is a connection.
    fn fail_all(&mut self) {
        self.is_late = true;
        for slot in 0..self.operations.len() as u32 {
            if self.operations[slot as usize].is_busy {
                self.end(slot, Err(IoError::DeviceGone));
            }
        }
    }

    /// Ends everything: there will be no connection any more.
    fn give_up(&mut self, why: &str) {
        tracing::error!(device = %self.session().name(), %why, "connection lost");
        self.lost = Some(why.into());
        self.attempts = None;
        self.held.clear();
        self.fail_all();
    }

    /// Handles events of the attempts to reconnect.
    #[cold]
    fn hear(&mut self) {
        let events = self.attempts.as_ref().filter(|attempts| attempts.has_events());
        let Some(Events { connection, is_late, dead }) = events.map(Attempts::take_events) else { return };
        if is_late {
            self.fail_all();
        }
        if let Some(why) = dead {
            self.give_up(&why);
        } else if let Some(connection) = connection {
            self.adopt(connection);
        }
    }

    /// Continues over a new connection, with the requests that wait.
    fn adopt(&mut self, connection: Connection) {
        (self.wire, self.context) = (connection.wire, connection.context);
        (self.attempts, self.is_late) = (None, false);
        if let Err(error) = self.wakeup.renew() {
            return self.break_off(&error.into());
        }
        for slot in 0..self.operations.len() as u32 {
            if self.operations[slot as usize].is_busy {
                self.issue(slot);
            }
        }
    }
}

impl Queue for NbdQueue {
    fn depth(&self) -> u32 {
        self.operations.len() as u32
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        if self.is_late {
            self.hear();
        }
        if self.refuses() {
            return Err(IoError::DeviceGone);
        }
        if (req.len == 0 && req.op != Op::Flush) || (req.op == Op::Flush && !self.traits.has_flush) {
            self.ended.push((slot, Ok(())));
            return Ok(());
        }
        // SAFETY: by the contract of this function.
        unsafe { self.operations[slot as usize].begin(req, offset, &self.traits)? };
        if self.is_connected() {
            self.issue(slot);
        }
        Ok(())
    }

    unsafe fn push_status<'a>(
        &mut self,
        slot: u32,
        report: &'a StatusReport,
        offset: u64,
        len: u64,
    ) -> StatusStart<'a> {
        if self.context.is_none() {
            return StatusStart::data(report, len);
        }
        if self.refuses() {
            return StatusStart::Apart(IoFuture::ready(Err(IoError::DeviceGone)));
        }
        if !self.is_connected() {
            return StatusStart::data(report, len);
        }
        // SAFETY: by the contract of this function.
        unsafe { self.operations[slot as usize].begin_status(report, offset, len, &self.traits) };
        self.issue(slot);
        StatusStart::InRing
    }

    #[inline]
    fn kick(&mut self) {
        self.send();
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        if self.attempts.is_some() {
            self.hear();
        }
        if self.is_connected() {
            self.send();
            if let Err(why) = self.receive() {
                self.break_off(&why);
            }
            if self.is_closing && self.reconnects() {
                self.break_off(&Lost::ShutDown);
            }
            self.send();
        }
        let count = self.ended.len();
        for (slot, result) in self.ended.drain(..) {
            done(slot, result);
        }
        count
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.wakeup.event_fd())
    }

    fn arm(&mut self) -> bool {
        if !self.ended.is_empty() || self.lost.is_some() {
            return self.ended.is_empty();
        }
        if let Some(attempts) = &self.attempts {
            // Their thread raises the event by itself.
            return !attempts.has_events();
        }
        let wants_room = !self.outbox.is_empty() || self.wire.owes();
        !self.wire.has_more() && self.wakeup.arm(self.wire.fd(), wants_room)
    }

    fn disarm(&mut self) {
        self.wakeup.disarm();
    }
}

impl DirectQueue for NbdQueue {
    /// Sleeps on the socket itself, which costs one system call less than its eventfd.
    fn wait(
        &mut self,
        _at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        self.kick();
        if let Some(attempts) = &self.attempts {
            if self.ended.is_empty() && !attempts.has_events() {
                poll_events(self.wakeup.event_fd(), libc::POLLIN, timeout, signal_mask)?;
                self.wakeup.lower();
            }
            return Ok(());
        }
        if !self.ended.is_empty() || self.wire.has_more() {
            return Ok(());
        }
        let room = if self.outbox.is_empty() && !self.wire.owes() { 0 } else { libc::POLLOUT };
        poll_events(self.fd(), libc::POLLIN | room, timeout, signal_mask)
    }

    unsafe fn push_zone(&mut self, _slot: u32, _req: ZoneRequest) -> IoResult {
        Err(IoError::Unsupported)
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        if self.is_connected() && self.outbox.is_empty() {
            let replies = self.replies;
            self.outbox.push_header(|to| Header::DISCONNECT.encode(replies, to));
            // Best effort; the server sees the end of the connection in any case.
            let _ = self.wire.send(&mut self.outbox);
            self.wire.close();
        }
        // The wakeup's ring releases the socket some time later; the server should be notified now.
        disconnect(self.wire.socket());
    }
}

/// The reason why a connection was lost.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the server shuts down")]
    ShutDown,
}

impl Lost {
    /// Whether the server may serve another connection as before.
    fn is_passing(&self) -> bool {
        matches!(self, Lost::Io(_) | Lost::ShutDown | Lost::Violation(Violation::Closed))
    }
}
