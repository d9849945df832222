//! One I/O queue, on one connection at a time.
//!
//! ```text
//!   push ─► Operation ─► pump ─► Outbox     kick ─► one sendmsg(2) for all
//!   reap ◄─ Operation ◄─ PDUs ◄─ Inbox ◄─ recvmsg(2), data straight to the caller
//!                └─ R2T: pump again
//! ```
//!
//! A command identifier holds the slot and a generation number, so that no completion counts twice.
//! A request ends only after its last byte was sent, even when the controller answers earlier:
//! until then its memory is still in use. With data digests, received data goes through the inbox:
//! a digest over memory that others may write to proves nothing.
//!
//! Without a connection requests wait. The connection thread makes another one, or reports that
//! there will be none.

use super::error::{OpenError, Violation};
use super::facts::Facts;
use super::link::{terminated, termination};
use super::operation::{Next, Operation, Pending};
use super::options::{MAX_QUEUE_DEPTH, Options};
use super::queue_mailbox::{Connection, QueueEvents};
use super::session::{Lease, Session};
use ::stream::{Inbox, Received, Wakeup, Wire, abort, disconnect};
use block::{Data, IoError, IoResult, Queue, Request};
use drivers::direct::{DirectQueue, ZoneRequest, poll_any};
use drivers::stream::{Cancel, Outbox};
use nvme::tcp::{
    C2hData, COMMON_BYTES, CapsuleCmd, CapsuleResp, DIGEST_BYTES, DataDigest, Frame, H2cData, HEADER_BYTES,
    MAX_FRONT, PduType, R2t, Side,
};
use nvme::{CompletionEntry, IdentifyData, Status, SubmissionEntry};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum receives in one [`Queue::reap`]: a target that sends without pause must not delay other
/// work.
const MAX_RECEIVES: usize = 64;
/// Headers to be sent for data that R2Ts requested, beyond one header and one digest per request.
const MORE_HEADERS: u32 = 64;
/// Headers and digests of one PDU.
const HEADERS_EACH: usize = 2;
/// Bits of a command identifier that name the slot; the others hold the generation.
const SLOT_BITS: u32 = MAX_QUEUE_DEPTH.trailing_zeros();

/// The next expected bytes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// The header of a PDU.
    Front,
    /// Data of a read, from byte `at` of its command on; then its digest.
    Data { slot: u32, at: usize, left: usize, is_success: bool, has_digest: bool },
    /// The digest of the received data.
    Digest { slot: u32, is_success: bool },
}

/// A queue of a controller.
pub struct NvmeTcpQueue {
    lease: Lease,
    connection: Option<Connection>,
    facts: Facts,
    outbox: Outbox<MAX_FRONT>,
    inbox: Inbox,
    wakeup: Wakeup,
    operations: Box<[Operation]>,
    /// Slots with data to send, in order; some may have none any more.
    todo: VecDeque<u32>,
    due: Due,
    /// Digest of the data being received.
    digest: DataDigest,
    /// Slots that have been answered, but not sent completely.
    held: Vec<u32>,
    /// Completions for [`Queue::reap`].
    ended: Vec<(u32, IoResult)>,
    in_flight: u32,
    /// The reason why there will be no connection any more.
    dead: Option<Arc<str>>,
}

// SAFETY: the pointers in it belong to requests, whose memory any thread may use, and to buffers of
// its own.
unsafe impl Send for NvmeTcpQueue {}

impl Session {
    /// Creates the queue of a session without a controller, over a socket that accepts commands at
    /// once. The caller supplies the controller's structures; digests follow the options, and
    /// nothing reconnects. For tests and fuzzers that play the target.
    ///
    /// # Errors
    /// When the structures or the options are invalid.
    pub fn detached(
        socket: OwnedFd,
        options: &Options,
        controller: &IdentifyData,
        namespace: &IdentifyData,
    ) -> Result<NvmeTcpQueue, OpenError> {
        let (lease, wakeup) = Session::lease_detached(socket, options, controller, namespace)?;
        Ok(NvmeTcpQueue::new(lease, wakeup))
    }

    /// Starts a queue with its own connection, which blocks as [`Session::open`] does.
    ///
    /// # Errors
    /// When all queues are in use, the target refuses, or the timeout expires.
    pub fn start_queue(self: &Arc<Self>, cancel: &Cancel) -> Result<NvmeTcpQueue, OpenError> {
        self.start_queue_of(self.queue_depth(), cancel)
    }

    /// As [`Session::start_queue`], for another number of requests: 1 to
    /// [`super::MAX_QUEUE_DEPTH`], or less if the controller supports less.
    pub fn start_queue_of(self: &Arc<Self>, depth: u32, cancel: &Cancel) -> Result<NvmeTcpQueue, OpenError> {
        let (lease, wakeup) = self.lease(depth, cancel)?;
        Ok(NvmeTcpQueue::new(lease, wakeup))
    }
}

impl NvmeTcpQueue {
    fn new(lease: Lease, wakeup: Wakeup) -> NvmeTcpQueue {
        let (depth, facts) = (lease.mailbox.depth, *lease.session().facts());
        let mut queue = NvmeTcpQueue {
            lease,
            connection: None,
            facts,
            outbox: Outbox::new(depth * HEADERS_EACH as u32 + MORE_HEADERS),
            inbox: Inbox::new(HEADER_BYTES + DIGEST_BYTES, &[]),
            wakeup,
            operations: (0..depth).map(|_| Operation::idle()).collect(),
            todo: VecDeque::with_capacity(depth as usize),
            due: Due::Front,
            digest: DataDigest::new(),
            held: Vec::with_capacity(depth as usize),
            ended: Vec::with_capacity(depth as usize),
            in_flight: 0,
            dead: None,
        };
        queue.hear();
        queue
    }

    /// The session of this queue.
    pub fn session(&self) -> &Arc<Session> {
        self.lease.session()
    }

    /// The reason why the connection was lost permanently, if so: every request then ends with
    /// [`IoError::DeviceGone`].
    pub fn lost(&self) -> Option<&str> {
        self.dead.as_deref()
    }

    /// Whether the queue is connected now.
    pub fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Handles events of the connection thread.
    #[cold]
    fn hear(&mut self) {
        let QueueEvents { is_lost, connection, dead, is_tick } = self.lease.mailbox.take_events();
        if is_lost {
            self.disconnect();
        }
        if let Some(connection) = connection {
            self.adopt(connection);
        }
        if is_tick {
            self.tick();
        }
        if let Some(why) = dead {
            self.disconnect();
            self.dead = Some(why);
            for slot in 0..self.operations.len() as u32 {
                if self.operations[slot as usize].is_busy {
                    self.end(slot, Err(IoError::DeviceGone));
                }
            }
        }
    }

    /// Continues over a new connection, with the commands that were in flight.
    fn adopt(&mut self, connection: Connection) {
        self.facts = connection.facts;
        self.connection = Some(connection);
        if let Err(error) = self.wakeup.renew() {
            self.lose(&error);
            return;
        }
        self.pump();
        self.send();
    }

    /// Handles the timeout tick, once per second.
    fn tick(&mut self) {
        let most = self.lease.shared().options.io_timeout_s;
        let mut is_late = false;
        for (slot, operation) in self.operations.iter_mut().enumerate() {
            if operation.is_busy && operation.is_later {
                operation.is_later = false;
                operation.pending = Pending::Command;
                self.todo.push_back(slot as u32);
            } else if operation.is_busy && operation.is_out {
                operation.age += 1;
                is_late |= operation.age > most;
            }
        }
        if is_late {
            self.lose(&format_args!("a command was not answered within {most} s"));
        }
        self.pump();
        self.send();
    }

    /// Encodes pending commands and data, as far as there is room.
    #[inline]
    fn pump(&mut self) {
        let Some(connection) = &self.connection else { return };
        let framing = connection.terms.to_send;
        while self.outbox.has_room(HEADERS_EACH)
            && let Some(slot) = self.todo.pop_front()
        {
            let operation = &mut self.operations[slot as usize];
            let (offset, len) = match operation.pending {
                Pending::Nothing => continue,
                Pending::Command => {
                    let (command, sgl) = operation.issue(&self.facts);
                    let id = operation.generation() << SLOT_BITS | slot as u16;
                    let in_capsule = match sgl {
                        nvme::Sgl::InCapsule { len, .. } => len,
                        _ => 0,
                    };
                    let entry = SubmissionEntry::new(&command, id, sgl).encode();
                    let capsule = CapsuleCmd { entry, data_len: in_capsule };
                    self.outbox.push_header(|to| capsule.encode(&framing, to));
                    (0, in_capsule)
                }
                Pending::Data { tag, offset, left } => {
                    let len = left.min(connection.terms.max_h2c_data);
                    let is_last = len == left;
                    let command_id = operation.generation() << SLOT_BITS | slot as u16;
                    let data = H2cData { command_id, tag, offset, len, is_last };
                    self.outbox.push_header(|to| data.encode(&framing, to));
                    operation.pending = match is_last {
                        true => Pending::Nothing,
                        false => Pending::Data { tag, offset: offset + len, left: left - len },
                    };
                    (offset, len)
                }
            };
            if len > 0 {
                operation.pieces(offset, len, |piece| self.outbox.push(piece));
                if framing.data_digest {
                    let digest = operation.digest(offset, len);
                    self.outbox.push_header(|to| {
                        to[..DIGEST_BYTES].copy_from_slice(&digest);
                        DIGEST_BYTES
                    });
                }
            }
            operation.sent_at = self.outbox.queued();
            if operation.pending != Pending::Nothing {
                self.todo.push_back(slot);
            }
        }
    }

    /// Sends as much as the socket takes.
    #[inline]
    fn send(&mut self) {
        while let Some(connection) = &mut self.connection
            && (!self.outbox.is_empty() || connection.wire.owes())
        {
            let before = self.outbox.sent();
            if let Err(error) = connection.wire.send(&mut self.outbox) {
                // Completions that the controller sent before it disconnected count.
                let _ = self.receive();
                self.lose(&error);
                return;
            }
            if !self.held.is_empty() {
                self.conclude_held();
            }
            self.pump();
            if self.outbox.sent() == before {
                return;
            }
        }
    }

    /// Receives as much as the socket has.
    fn receive(&mut self) -> Result<(), Lost> {
        for _ in 0..MAX_RECEIVES {
            let Some(connection) = &mut self.connection else { return Ok(()) };
            let data = match self.due {
                Due::Data { slot, at, left, has_digest: false, .. } => {
                    self.operations[slot as usize].target(at, left)
                }
                _ => Data::none(),
            };
            let (direct, is_drained) = match self.inbox.receive(&mut connection.wire, data)? {
                Received::Bytes { direct, is_drained } => (direct, is_drained),
                Received::Nothing => return Ok(()),
                Received::End => return Err(Lost::Closed),
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
    fn digest(&mut self) -> Result<(), Lost> {
        loop {
            let unread = self.inbox.unread();
            match self.due {
                Due::Front => {
                    if !self.front()? {
                        return Ok(());
                    }
                }
                Due::Data { slot, at, left, has_digest, .. } => {
                    let len = left.min(unread.len());
                    if len == 0 {
                        return Ok(());
                    }
                    if has_digest {
                        self.digest.update(&unread[..len]);
                    }
                    self.operations[slot as usize].target(at, len).copy_from(&unread[..len]);
                    self.inbox.consume(len);
                    self.advance(len)?;
                }
                Due::Digest { slot, is_success } => {
                    let Some(found) = unread.first_chunk::<DIGEST_BYTES>() else { return Ok(()) };
                    if *found != self.digest.to_bytes() {
                        self.operations[slot as usize].corrupt();
                    }
                    self.inbox.consume(DIGEST_BYTES);
                    self.due = Due::Front;
                    self.arrived(slot, is_success)?;
                }
            }
        }
    }

    /// Handles the header of a PDU, if it is complete.
    #[inline]
    fn front(&mut self) -> Result<bool, Lost> {
        let (unread, connection) = (self.inbox.unread(), &self.connection);
        let (Some(common), Some(connection)) = (unread.first_chunk::<COMMON_BYTES>(), connection) else {
            return Ok(false);
        };
        let frame = connection.terms.to_receive.accept(common, Side::Controller).map_err(Violation::from)?;
        if unread.len() < frame.front_bytes() {
            return Ok(false);
        }
        frame.check_header_digest(unread).map_err(Violation::from)?;
        let header = *unread.first_chunk::<HEADER_BYTES>().expect("no header is shorter");
        self.inbox.consume(frame.front_bytes());
        self.accept(&frame, &header)?;
        Ok(true)
    }

    /// Handles a header.
    #[inline]
    fn accept(&mut self, frame: &Frame, header: &[u8; HEADER_BYTES]) -> Result<(), Violation> {
        match frame.kind {
            PduType::C2hData => {
                let data = C2hData::parse(header, frame)?;
                let slot = self.slot_of(data.command_id)?;
                let at = self.operations[slot as usize].expect(&data)?;
                let left = data.len as usize;
                let (is_success, has_digest) = (data.is_success, frame.has_data_digest);
                self.inbox.expect(if has_digest { 0 } else { left });
                self.digest = DataDigest::new();
                self.due = Due::Data { slot, at, left, is_success, has_digest };
                Ok(())
            }
            PduType::CapsuleResp => {
                let end = CompletionEntry::parse(&CapsuleResp::parse(header).entry);
                let slot = self.slot_of(end.command_id)?;
                if self.operations[slot as usize].sends() {
                    self.inbox.expect(0);
                }
                self.answered(slot, end.status, end.do_not_retry)
            }
            PduType::R2t => {
                let r2t = R2t::parse(header)?;
                let slot = self.slot_of(r2t.command_id)?;
                self.operations[slot as usize].want(&r2t)?;
                self.todo.push_back(slot);
                Ok(())
            }
            PduType::C2hTermReq => Err(terminated(header)),
            other => Err(Violation::Unexpected(other)),
        }
    }

    /// Counts `len` received bytes of the expected data.
    fn advance(&mut self, len: usize) -> Result<(), Violation> {
        let Due::Data { slot, at, left, is_success, has_digest } = self.due else { return Ok(()) };
        if left > len {
            self.due = Due::Data { slot, at: at + len, left: left - len, is_success, has_digest };
            return Ok(());
        }
        if has_digest {
            self.due = Due::Digest { slot, is_success };
            return Ok(());
        }
        self.due = Due::Front;
        self.arrived(slot, is_success)
    }

    /// Handles completely received data of a PDU.
    #[inline]
    fn arrived(&mut self, slot: u32, is_success: bool) -> Result<(), Violation> {
        if is_success { self.answered(slot, Status::SUCCESS, false) } else { Ok(()) }
    }

    #[inline]
    fn slot_of(&self, command_id: u16) -> Result<u32, Violation> {
        let slot = command_id & ((1 << SLOT_BITS) - 1);
        match self.operations.get(usize::from(slot)) {
            Some(operation)
                if operation.is_out && operation.generation() << SLOT_BITS | slot == command_id =>
            {
                Ok(slot.into())
            }
            _ => Err(Violation::Command(command_id)),
        }
    }

    /// Handles the completion of a slot's command.
    #[inline]
    fn answered(&mut self, slot: u32, status: Status, do_not_retry: bool) -> Result<(), Violation> {
        let operation = &mut self.operations[slot as usize];
        operation.answer(status, do_not_retry)?;
        if self.outbox.sent() < operation.sent_at {
            self.held.push(slot);
        } else {
            self.conclude(slot);
        }
        Ok(())
    }

    /// Continues a slot whose command was sent and answered.
    #[inline]
    fn conclude(&mut self, slot: u32) {
        match self.operations[slot as usize].conclude() {
            Next::Issue => self.todo.push_back(slot),
            Next::IssueLater => {}
            Next::End(result) => self.end(slot, result),
        }
    }

    #[inline]
    fn end(&mut self, slot: u32, result: IoResult) {
        self.operations[slot as usize].is_busy = false;
        self.ended.push((slot, result));
        self.in_flight -= 1;
        self.lease.mailbox.in_flight.store(self.in_flight, Ordering::Relaxed);
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

    /// Aborts the connection, and notifies the connection thread unless it knows.
    #[cold]
    fn lose(&mut self, why: &dyn std::fmt::Display) {
        if self.connection.is_none() {
            return;
        }
        self.disconnect();
        let is_known = self.lease.mailbox.is_lost();
        if !is_known {
            tracing::debug!(device = %self.session().name(), %why, "queue connection lost");
            self.lease.shared().report_lost(why.to_string());
        }
    }

    /// Resets everything that was in flight.
    #[cold]
    fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            abort(connection.wire.socket());
        }
        self.outbox.clear();
        self.inbox.clear();
        self.due = Due::Front;
        self.todo.clear();
        // The memory of these requests is not in use any more.
        self.conclude_held();
        self.todo.clear();
        for slot in 0..self.operations.len() as u32 {
            let operation = &mut self.operations[slot as usize];
            if !operation.is_busy {
                continue;
            }
            if operation.start_over() {
                self.todo.push_back(slot);
            } else {
                self.end(slot, Err(IoError::TimedOut));
            }
        }
    }

    /// Aborts the connection because the controller violated the protocol or disconnected.
    #[cold]
    fn break_off(&mut self, why: &Lost) {
        if let (Lost::Violation(violation), Some(connection)) = (why, &mut self.connection) {
            tracing::error!(device = %self.lease.session().name(), %violation, "target violated the protocol");
            if self.outbox.is_empty() {
                let unread = self.inbox.unread();
                let header = &unread[..unread.len().min(HEADER_BYTES)];
                connection.wire.say(&termination(violation, header));
            }
        }
        self.lose(why);
    }
}

impl Queue for NvmeTcpQueue {
    fn depth(&self) -> u32 {
        self.operations.len() as u32
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        if self.dead.is_some() {
            return Err(IoError::DeviceGone);
        }
        // SAFETY: by the contract of this function.
        let has_begun = unsafe { self.operations[slot as usize].begin(req, offset, &self.facts)? };
        if !has_begun {
            self.ended.push((slot, Ok(())));
            return Ok(());
        }
        self.in_flight += 1;
        self.lease.mailbox.in_flight.store(self.in_flight, Ordering::Relaxed);
        self.todo.push_back(slot);
        Ok(())
    }

    #[inline]
    fn kick(&mut self) {
        self.pump();
        self.send();
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        if self.lease.mailbox.has_events() {
            self.hear();
        }
        if self.connection.is_some() {
            self.kick();
            if let Err(why) = self.receive() {
                self.break_off(&why);
            }
            self.kick();
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
        if !self.ended.is_empty() || self.lease.mailbox.has_events() {
            return false;
        }
        match &self.connection {
            Some(Connection { wire, .. }) => {
                let wants_room = !self.outbox.is_empty() || wire.owes();
                !wire.has_more() && self.wakeup.arm(wire.fd(), wants_room)
            }
            // The connection thread raises the event by itself.
            None => true,
        }
    }

    fn disarm(&mut self) {
        self.wakeup.disarm();
    }
}

impl DirectQueue for NvmeTcpQueue {
    /// Sleeps on the socket and on the event of the connection thread, which costs less than to arm
    /// one for both.
    fn wait(
        &mut self,
        _at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        self.kick();
        if !self.ended.is_empty() || self.lease.mailbox.has_events() {
            return Ok(());
        }
        let wire = self.connection.as_ref().map(|connection| &connection.wire);
        if wire.is_some_and(Wire::has_more) {
            return Ok(());
        }
        let socket = wire.map_or(-1, Wire::fd);
        let room = if self.outbox.is_empty() && !wire.is_some_and(Wire::owes) { 0 } else { libc::POLLOUT };
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let event = self.wakeup.event_fd();
        let mut wanted = [entry(socket, libc::POLLIN | room), entry(event, libc::POLLIN)];
        poll_any(&mut wanted, timeout, signal_mask)?;
        if wanted[1].revents != 0 {
            self.wakeup.lower();
        }
        Ok(())
    }

    unsafe fn push_zone(&mut self, _slot: u32, _req: ZoneRequest) -> IoResult {
        Err(IoError::Unsupported)
    }
}

impl Drop for NvmeTcpQueue {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.wire.close();
            // The wakeup's ring releases the socket some time later; the target should be notified
            // now.
            disconnect(connection.wire.socket());
        }
    }
}

/// The reason why a connection was lost.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the target closed the connection")]
    Closed,
}
