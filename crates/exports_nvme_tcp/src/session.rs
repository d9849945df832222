//! An NVMe/TCP connection after its handshake: PDUs to and from a queue of the target.

use crate::reading::{Command, Found as Read, Reader, Rejected};
use crate::socket::Socket;
use crate::transfers::{Ended, Transfers};
use crate::{IN_CAPSULE_BYTES, data_digest};
use ::stream::{Received, Wire};
use exports::stream::{Found, Link, Memory, Protocol, ReplyPart};
use exports::{ConnectionStats, DataMemory, Error};
use nvme::tcp::{
    C2hData, CapsuleResp, DIGEST_BYTES, Framing, HEADER_BYTES, MAX_TERMINATION_BYTES, R2t, Side, TermReq,
};
use nvme::{CompletionEntry, Sgl, Status};
use nvme_target::{Admission, Answer, Connection, Failure, Queue, Transport};
use socket2::SockRef;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

/// Maximum bytes of a rejected PDU in a termination PDU.
const REJECTED_BYTES: usize = 64;

/// One queue of a controller, and its connection.
pub(crate) struct Session {
    queue: Queue,
    /// The framing of sent PDUs.
    framing: Framing,
    reader: RefCell<Reader>,
    transfers: RefCell<Transfers>,
    /// As other threads see the connection: the controller has a weak reference.
    _socket: Arc<Socket>,
}

/// The values that a handshake has negotiated.
pub(crate) struct Agreed {
    pub(crate) admission: Admission,
    /// The framing of received and sent PDUs.
    pub(crate) framing: (Framing, Framing),
    /// The head of the submission queue.
    pub(crate) head: u16,
}

/// A session with its link, as the queue uses both.
struct TcpTransport<'a> {
    session: &'a Session,
    link: &'a Link,
}

impl Session {
    /// Opens the queue on the calling core. `early` was received during the handshake.
    pub(crate) fn open(agreed: Agreed, early: &[u8], socket: Arc<Socket>) -> Result<Session, Error> {
        let Agreed { admission, framing: (incoming, framing), head } = agreed;
        let weak: Weak<Socket> = Arc::downgrade(&socket);
        let connection: Weak<dyn Connection> = weak;
        Ok(Session {
            queue: Queue::open(admission, head, &connection)?,
            framing,
            reader: RefCell::new(Reader::new(incoming, early)),
            transfers: RefCell::default(),
            _socket: socket,
        })
    }

    /// Sends the answer to a command.
    #[inline]
    fn answer(&self, Answer { completion, data }: Answer<Memory>, link: &Link) {
        let Some(mut memory) = data else {
            return link.send(ReplyPart::last(None, |to| self.encode(&completion, to)));
        };
        let (command_id, len) = (completion.command_id, memory.len());
        // The data PDU implies success if the host does not use the head of the queue.
        let is_success = !self.queue.has_flow_control() && completion.result == 0;
        let front = C2hData { command_id, offset: 0, len: len as u32, is_last: true, is_success };
        let digest = self.framing.data_digest.then(|| data_digest(&mut memory, 0, len));
        let front = |to: &mut [u8; exports::stream::MAX_FRONT]| front.encode(&self.framing, to);
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

const _: () = assert!(HEADER_BYTES + REJECTED_BYTES <= exports::stream::MAX_FRONT);

impl Transport for TcpTransport<'_> {
    type Memory = Memory;

    const IN_CAPSULE_BYTES: u32 = IN_CAPSULE_BYTES;

    #[inline]
    fn stats(&self) -> &ConnectionStats {
        self.link.stats()
    }

    fn is_broken(&self) -> bool {
        self.link.is_broken()
    }

    fn is_secured(&self) -> bool {
        self.link.is_secured()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        SockRef::from(self.link.socket()).local_addr().ok().and_then(|address| address.as_socket())
    }

    #[inline]
    fn memory(&self, len: usize) -> impl Future<Output = Memory> {
        self.link.memory(len)
    }

    fn uncounted(&self, len: usize) -> Memory {
        self.link.uncounted(len)
    }

    fn scratch(&self) -> impl Future<Output = impl Sized> {
        self.link.scratch()
    }

    async fn fetch(&self, command_id: u16, len: usize) -> Result<Memory, Failure> {
        let TcpTransport { session, link } = self;
        let memory = link.memory(len).await;
        let tag = session.transfers.borrow_mut().begin(command_id, memory);
        let request = R2t { command_id, tag, offset: 0, len: len as u32 };
        link.send(ReplyPart::new(None, |to| request.encode(&session.framing, to)));
        match poll_fn(|cx| session.transfers.borrow_mut().poll(tag, cx)).await {
            Ended::Whole { memory, is_intact: true } => Ok(memory),
            Ended::Whole { is_intact: false, .. } => Err(Status::TRANSIENT_TRANSPORT_ERROR.into()),
            Ended::GivenUp => Err(Failure::Gone),
        }
    }
}

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
                self.queue.hear();
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
        match self.queue.execute(command, &TcpTransport { session: self, link }).await {
            Some(answer) => self.answer(answer, link),
            None => link.drop_request(),
        }
    }

    fn give_up(&self, link: &Link, _is_closing: bool) {
        self.reader.borrow_mut().give_up(&mut self.transfers.borrow_mut(), link);
        self.queue.end();
    }

    fn unfinished(&self) -> usize {
        0
    }
}
