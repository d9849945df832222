//! An NVMe/TCP connection after its handshake: one queue of a controller.

use super::controller::Controller;
use super::reading::{Command, Found as Read, Reader, Rejected};
use super::reservations::Gate;
use super::subsystem::{Admission, Membership};
use super::transfers::{Ended, Transfers};
use super::{MAX_TRANSFER, data_digest};
use crate::Error;
use crate::stream::{Found, Link, Memory, Protocol, ReplyPart};
use crate::target::Target;
use ::stream::{Received, Wire};
use block::IoError;
use nvme::tcp::{
    C2hData, CapsuleResp, DIGEST_BYTES, Framing, HEADER_BYTES, MAX_TERMINATION_BYTES, R2t, Side, TermReq,
};
use nvme::{CompletionEntry, Sgl, Status, SubmissionEntry};
use reactor::current;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// Maximum bytes of a rejected PDU in a termination PDU.
const REJECTED_BYTES: usize = 64;

/// One queue of a controller.
pub(super) struct Session {
    /// Devices, in the order of the namespaces; empty for an admin queue.
    targets: Vec<Target>,
    /// The write counters of the namespaces.
    gates: Vec<Rc<Gate>>,
    queue_id: u16,
    entries: u16,
    /// The head of the submission queue.
    head: Cell<u16>,
    has_flow_control: bool,
    /// The framing of sent PDUs.
    framing: Framing,
    reader: RefCell<Reader>,
    transfers: RefCell<Transfers>,
    membership: Membership,
}

/// The values that a handshake has negotiated.
pub(super) struct Agreed {
    pub(super) admission: Admission,
    /// The framing of received and sent PDUs.
    pub(super) framing: (Framing, Framing),
    /// The head of the submission queue.
    pub(super) head: u16,
}

/// The result of a successful command.
#[derive(Default)]
pub(super) struct Reply {
    /// Dwords 0 and 1 of the completion.
    pub(super) result: u64,
    /// Data for the host.
    pub(super) data: Option<Memory>,
}

/// The failure of a command.
pub(super) enum Failure {
    Status(Status),
    /// A status with dwords 0 and 1 of the completion.
    Detailed {
        status: Status,
        result: u64,
    },
    /// The connection is broken: no completion can be sent.
    Gone,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        Failure::Status(status)
    }
}

impl From<IoError> for Failure {
    fn from(error: IoError) -> Failure {
        Failure::Status(Status::of(error))
    }
}

impl Session {
    /// Opens the queue's devices on the calling core. `early` was received during the handshake.
    pub(super) fn open(agreed: Agreed, early: &[u8], socket: &Weak<OwnedFd>) -> Result<Session, Error> {
        let Agreed { admission, framing: (incoming, framing), head } = agreed;
        let controller = &admission.membership.controller;
        let (mut targets, mut gates) = (Vec::new(), Vec::new());
        if admission.queue_id != 0 {
            for namespace in &controller.subsystem.namespaces {
                targets.push(Target::open(namespace.device.clone(), namespace.is_read_only)?);
                gates.push(namespace.reserved.gate());
            }
        } else {
            current().spawn(listen(Arc::downgrade(controller), socket.clone()));
        }
        Ok(Session {
            targets,
            gates,
            queue_id: admission.queue_id,
            entries: admission.entries,
            head: Cell::new(head),
            has_flow_control: admission.has_flow_control,
            framing,
            reader: RefCell::new(Reader::new(incoming, early)),
            transfers: RefCell::default(),
            membership: admission.membership,
        })
    }

    pub(super) fn controller(&self) -> &Arc<Controller> {
        &self.membership.controller
    }

    /// The devices, in the order of their namespaces.
    pub(super) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The write counter of a namespace.
    pub(super) fn gate(&self, nsid: u32) -> &Gate {
        &self.gates[nsid as usize - 1]
    }

    /// Waits for the `len` bytes of a command's data, and requests them if they were not in the
    /// capsule.
    pub(super) async fn incoming(
        &self,
        command: &mut Command,
        len: usize,
        link: &Link,
    ) -> Result<Memory, Failure> {
        if len > MAX_TRANSFER as usize {
            return Err(Status::INVALID_FIELD.into());
        }
        match command.entry.sgl {
            Sgl::InCapsule { offset: 1.., .. } => Err(Status::INVALID_SGL_OFFSET.into()),
            Sgl::InCapsule { len: said, .. } if said as usize == len => {
                let memory = command.data.take().filter(|memory| memory.len() == len);
                let memory = memory.ok_or(Status::INVALID_SGL_LENGTH)?;
                match command.is_intact {
                    true => Ok(memory),
                    false => Err(Status::TRANSIENT_TRANSPORT_ERROR.into()),
                }
            }
            Sgl::Transport { len: said } if said as usize == len => {
                self.transfer(command.entry.command_id, len, link).await
            }
            Sgl::InCapsule { .. } | Sgl::Transport { .. } => Err(Status::INVALID_SGL_LENGTH.into()),
            Sgl::None | Sgl::Other { .. } => Err(Status::INVALID_SGL_TYPE.into()),
        }
    }

    async fn transfer(&self, command_id: u16, len: usize, link: &Link) -> Result<Memory, Failure> {
        let memory = link.memory(len).await;
        let tag = self.transfers.borrow_mut().begin(command_id, memory);
        let request = R2t { command_id, tag, offset: 0, len: len as u32 };
        link.send(ReplyPart::new(None, |to| request.encode(&self.framing, to)));
        match poll_fn(|cx| self.transfers.borrow_mut().poll(tag, cx)).await {
            Ended::Whole { memory, is_intact: true } => Ok(memory),
            Ended::Whole { is_intact: false, .. } => Err(Status::TRANSIENT_TRANSPORT_ERROR.into()),
            Ended::GivenUp => Err(Failure::Gone),
        }
    }

    /// The size of the host's buffer in bytes.
    pub(super) fn room(entry: &SubmissionEntry) -> Result<usize, Failure> {
        match entry.sgl {
            Sgl::Transport { len } => Ok(len as usize),
            Sgl::None => Ok(0),
            Sgl::InCapsule { .. } | Sgl::Other { .. } => Err(Status::INVALID_SGL_TYPE.into()),
        }
    }

    /// A reply with all of `bytes`, which the host's buffer must take.
    pub(super) async fn reply_with_all(
        &self,
        entry: &SubmissionEntry,
        bytes: &[u8],
        link: &Link,
    ) -> Result<Reply, Failure> {
        if Session::room(entry)? < bytes.len() {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        self.reply_with(entry, bytes, link).await
    }

    /// A reply with as much of `bytes` as the host's buffer takes.
    pub(super) async fn reply_with(
        &self,
        entry: &SubmissionEntry,
        bytes: &[u8],
        link: &Link,
    ) -> Result<Reply, Failure> {
        let len = Session::room(entry)?.min(bytes.len());
        if len == 0 {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        let mut memory = link.memory(len).await;
        memory.fill(0, &bytes[..len]);
        Ok(Reply { data: Some(memory), ..Reply::default() })
    }

    /// Sends the completion of a command that failed.
    fn refuse(&self, command_id: u16, status: Status, result: u64, link: &Link) {
        link.stats().count_failure();
        self.answer(command_id, status, Reply { result, data: None }, link);
    }

    /// Sends the completion of a command.
    fn answer(&self, command_id: u16, status: Status, reply: Reply, link: &Link) {
        let sq_head = match self.has_flow_control {
            true => {
                self.head.set((self.head.get() + 1) % self.entries);
                self.head.get()
            }
            false => 0xffff,
        };
        let completion = CompletionEntry {
            result: reply.result,
            sq_head,
            sq_id: self.queue_id,
            ..CompletionEntry::new(command_id, status)
        };
        let Some(mut memory) = reply.data else {
            return link.send(ReplyPart::last(None, |to| self.encode(&completion, to)));
        };
        let len = memory.len();
        // The data PDU implies success if the host does not use the head of the queue.
        let is_success = !self.has_flow_control && reply.result == 0;
        let front = C2hData { command_id, offset: 0, len: len as u32, is_last: true, is_success };
        let digest = self.framing.data_digest.then(|| data_digest(&mut memory, 0, len));
        let front = |to: &mut [u8; crate::stream::MAX_FRONT]| front.encode(&self.framing, to);
        if is_success && digest.is_none() {
            return link.send(ReplyPart::last(Some(memory), front));
        }
        link.send(ReplyPart::new(Some(memory), front));
        link.send(ReplyPart::last(None, |to| {
            let tail = digest.map_or(0, |digest| {
                to[..DIGEST_BYTES].copy_from_slice(&digest);
                DIGEST_BYTES
            });
            tail + if is_success { 0 } else { self.encode(&completion, &mut to[tail..]) }
        }));
    }

    fn encode(&self, completion: &CompletionEntry, to: &mut [u8]) -> usize {
        CapsuleResp { entry: completion.encode() }.encode(&self.framing, to)
    }

    /// Sends a termination PDU for a protocol error and stops reading.
    #[cold]
    fn terminate(&self, Rejected { fatal, pdu }: &Rejected, link: &Link) {
        let (export, peer) = link.names();
        tracing::warn!(export, peer, %fatal, "host disconnected: protocol error");
        let mut bytes = [0; MAX_TERMINATION_BYTES];
        let pdu = &pdu[..pdu.len().min(REJECTED_BYTES)];
        let len = TermReq::encode(*fatal, Side::Controller, pdu, &mut bytes);
        link.say_last(ReplyPart::new(None, |to| {
            to[..len].copy_from_slice(&bytes[..len]);
            len
        }));
    }
}

const _: () = assert!(HEADER_BYTES + REJECTED_BYTES <= crate::stream::MAX_FRONT);

impl Protocol for Session {
    type Job = Command;

    fn receive(&self, wire: &mut Wire) -> io::Result<Received> {
        let mut reader = self.reader.borrow_mut();
        let received = reader.with_due(|inbox, due| inbox.receive(wire, due))?;
        if let Received::Bytes { direct, .. } = received {
            reader.note_due(direct);
        }
        Ok(received)
    }

    fn next(&self, link: &Link, is_closing: bool) -> Found<Command> {
        if is_closing {
            return Found::Leave;
        }
        let next = self.reader.borrow_mut().next(&mut self.transfers.borrow_mut(), link);
        match next {
            Ok(Read::NeedsBytes) => Found::NeedsBytes,
            Ok(Read::NeedsRoom) => Found::NeedsRoom,
            Ok(Read::Part) => Found::Done,
            Ok(Read::Command(command)) => {
                if self.queue_id == 0 {
                    self.controller().hear();
                }
                Found::Job(command)
            }
            Ok(Read::Terminated(reason)) => {
                let (export, peer) = link.names();
                tracing::warn!(export, peer, %reason, "host terminated its connection");
                Found::Leave
            }
            Err(rejected) => {
                self.terminate(&rejected, link);
                Found::Leave
            }
        }
    }

    #[inline]
    fn weight(command: &Command) -> usize {
        match command.entry.sgl {
            Sgl::InCapsule { len, .. } | Sgl::Transport { len } => len as usize,
            Sgl::None | Sgl::Other { .. } => 0,
        }
    }

    #[inline]
    async fn serve(&self, command: Command, link: &Link) {
        let command_id = command.entry.command_id;
        let result = match self.queue_id {
            0 => self.admin(command, link).await,
            _ => self.io(command, link).await,
        };
        match result {
            Ok(reply) => self.answer(command_id, Status::SUCCESS, reply, link),
            Err(Failure::Status(status)) => self.refuse(command_id, status, 0, link),
            Err(Failure::Detailed { status, result }) => self.refuse(command_id, status, result, link),
            Err(Failure::Gone) => link.drop_request(),
        }
    }

    fn give_up(&self, link: &Link, _is_closing: bool) {
        self.reader.borrow_mut().give_up(&mut self.transfers.borrow_mut(), link);
        if self.queue_id == 0 {
            self.controller().end_events();
        }
    }

    fn unfinished(&self) -> usize {
        0
    }
}

/// Disconnects a controller whose keep-alive timeout has expired. `socket` is that of its admin
/// queue. While it sleeps it keeps neither, nor the devices of an export that has ended.
async fn listen(controller: Weak<Controller>, socket: Weak<OwnedFd>) {
    /// Interval of the check when there is no keep-alive timeout.
    const IDLE_NS: u64 = 1_000_000_000;
    let core = current();
    let mut silent_since = core.now_ns();
    let limit_of = |controller: Arc<Controller>| u64::from(controller.keep_alive_ms()) * 1_000_000;
    while socket.strong_count() > 0 {
        let Some(limit_ns) = controller.upgrade().map(limit_of) else { return };
        core.sleep(if limit_ns == 0 { IDLE_NS } else { (limit_ns / 4).clamp(1_000_000, IDLE_NS) }).await;
        let now = core.now_ns();
        let Some(controller) = controller.upgrade() else { return };
        if controller.take_heard() || limit_ns == 0 {
            silent_since = now;
        } else if now - silent_since > limit_ns {
            let (export, host) = (&*controller.subsystem.export, controller.host.nqn.as_str());
            tracing::warn!(export, host, controller = controller.id, "host disconnected: keep-alive timeout");
            return controller.end();
        }
    }
}
