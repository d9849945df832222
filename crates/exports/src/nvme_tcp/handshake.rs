//! What is said with a host until its queue exists: ICReq and ICResp, then a Connect and its response, then whatever
//! proves who the host is.
//!
//! Source: NVMe/TCP Transport Specification 1.0, 3.2 (initialization); Base Specification 2.0, 6.3 (Connect).

use super::authentication::{Answer, Authentication};
use super::ports::Port;
use super::subsystem::{Admission, Refusal, Subsystem};
use super::{ADMIN_MINIMUM, IN_CAPSULE_BYTES, IO_MINIMUM, MAX_H2C_DATA};
use crate::stream::{Applicant, ConnectionSlot, ConnectionSlots, Handshake, HandshakeStep, NoSlot, Origin};
use nvme::fabrics::{
    CONNECT_DATA_BYTES, Connect, ConnectData, ConnectResponse, FabricsType, InvalidParameter, Nqn,
};
use nvme::tcp::{
    C2hData, COMMAND_BYTES, COMMON_BYTES, CapsuleCmd, CapsuleResp, DIGEST_BYTES, DataDigest, Fatal,
    FatalStatus, Frame, Framing, IC_BYTES, IcReq, IcResp, MAX_FRONT, MAX_TERMINATION_BYTES, PduType, Side,
    TermReq,
};
use nvme::{CompletionEntry, Sgl, Status, SubmissionEntry};
use nvme_auth::tls_key::named_by;
use std::sync::Arc;

/// The first byte of a connection that begins with TLS (RFC 8446, 5.1); that of an ICReq is 0.
const TLS_HANDSHAKE: u8 = 0x16;

/// A talk with one newcomer.
pub(super) struct NvmeHandshake {
    subsystem: Arc<Subsystem>,
    /// Where the host came.
    port: Arc<Port>,
    /// Whose key a newcomer has that speaks TLS: host, and subsystem that it has the key for.
    proven: Option<(Nqn, Nqn)>,
    /// Agreed once the ICReq has come: how we are spoken to, and how we speak.
    framing: Option<(Framing, Framing)>,
    admission: Option<Admission>,
    /// What the host has to prove, once it is known who it says it is.
    authentication: Option<Authentication>,
    /// Where the controller is in the submission queue.
    head: u16,
    peer: Box<str>,
    origin: Origin,
    slots: Arc<ConnectionSlots>,
    /// The place of the queue, once its host has proven what it has to.
    slot: Option<ConnectionSlot>,
}

/// What was agreed.
pub(super) struct Agreed {
    pub(super) admission: Admission,
    /// How PDUs look that come, and that go.
    pub(super) framing: (Framing, Framing),
    /// Where the controller is in the submission queue.
    pub(super) head: u16,
}

/// How a talk ends badly: the host is told, and the log.
struct Rejected {
    fatal: Fatal,
    /// The PDU that is complained about.
    pdu: Vec<u8>,
}

impl NvmeHandshake {
    pub(super) fn new(
        subsystem: Arc<Subsystem>,
        port: Arc<Port>,
        slots: Arc<ConnectionSlots>,
        peer: &str,
        origin: Origin,
    ) -> NvmeHandshake {
        NvmeHandshake {
            subsystem,
            port,
            proven: None,
            framing: None,
            admission: None,
            authentication: None,
            head: 0,
            peer: peer.into(),
            origin,
            slots,
            slot: None,
        }
    }

    /// What was agreed, once the talk has come to [`HandshakeStep::Serve`], and the queue's place: discovery has none.
    pub(super) fn agreed(self) -> Option<(Agreed, Option<ConnectionSlot>)> {
        let agreed = Agreed { admission: self.admission?, framing: self.framing?, head: self.head };
        Some((agreed, self.slot))
    }

    fn next(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), Rejected> {
        let is_new = self.framing.is_none() && self.proven.is_none();
        if let (true, Some(security), Some(first)) = (is_new, &self.subsystem.tls, input.first()) {
            if *first == TLS_HANDSHAKE {
                return Ok((0, HandshakeStep::Secured));
            }
            if security.is_required {
                let (export, peer) = (&*self.subsystem.export, &*self.peer);
                tracing::warn!(export, peer, "a host comes without TLS, which is required");
                return Ok((0, HandshakeStep::Leave));
            }
        }
        let Some(common) = input.first_chunk::<COMMON_BYTES>() else { return Ok((0, HandshakeStep::More)) };
        let incoming = self.framing.map_or(Framing::default(), |(incoming, _)| incoming);
        let reject = |fatal: Fatal| Rejected { fatal, pdu: input[..input.len().min(COMMAND_BYTES)].to_vec() };
        let frame = incoming.accept(common, Side::Host).map_err(reject)?;
        let expected = if self.framing.is_some() { PduType::CapsuleCmd } else { PduType::IcReq };
        if frame.kind != expected {
            return Err(reject(Fatal::new(FatalStatus::Sequence)));
        }
        if frame.data_len > IN_CAPSULE_BYTES {
            return Err(reject(Fatal::field(4)));
        }
        let Some(pdu) = input.get(..frame.len as usize) else { return Ok((0, HandshakeStep::More)) };
        frame.check_header_digest(pdu).map_err(reject)?;
        let step = match pdu.first_chunk::<IC_BYTES>() {
            Some(header) if expected == PduType::IcReq => {
                self.initialize(&IcReq::parse(header).map_err(reject)?, output);
                HandshakeStep::More
            }
            _ => self.command(pdu, &frame, output),
        };
        Ok((pdu.len(), step))
    }

    fn initialize(&mut self, request: &IcReq, output: &mut Vec<u8>) {
        let IcReq { header_digest, data_digest, align_bytes, .. } = *request;
        let incoming = Framing { header_digest, data_digest, ..Framing::default() };
        self.framing = Some((incoming, Framing { align_bytes, ..incoming }));
        let response = IcResp {
            align_bytes: incoming.align_bytes,
            header_digest,
            data_digest,
            max_h2c_data: MAX_H2C_DATA,
        };
        output.extend(response.encode());
    }

    /// Answers a command: the first has to be a Connect, what may follow is what proves who the host is.
    fn command(&mut self, pdu: &[u8], frame: &Frame, output: &mut Vec<u8>) -> HandshakeStep {
        let header = pdu.first_chunk::<COMMAND_BYTES>().expect("the frame was accepted");
        let entry = SubmissionEntry::parse(&CapsuleCmd::parse(header, frame).entry);
        let data = &pdu[frame.data_offset..][..frame.data_len as usize];
        let is_intact = !frame.has_data_digest || data_digest(data) == pdu[pdu.len() - DIGEST_BYTES..];
        let (result, step) = match (is_intact, &mut self.authentication) {
            (false, _) => (Err(Status::TRANSIENT_TRANSPORT_ERROR.into()), HandshakeStep::Leave),
            (true, Some(authentication)) => match authentication.command(&entry, data) {
                (Ok(answer), HandshakeStep::Serve) => match self.begin() {
                    Ok(()) => (Ok(answer), HandshakeStep::Serve),
                    Err(refusal) => (Err(refusal), HandshakeStep::Leave),
                },
                other => other,
            },
            (true, None) => match self.connect(&entry, data) {
                Ok(admission) => self.welcome(admission),
                Err(refusal) => {
                    let status = refusal.status;
                    tracing::info!(export = &*self.subsystem.export, %status, "a host may not connect");
                    (Err(refusal), HandshakeStep::Leave)
                }
            },
        };
        self.answer(entry.command_id, result, output);
        step
    }

    /// A host may have a queue, though it may have to prove that it is that host.
    fn welcome(&mut self, admission: Admission) -> (Result<Answer, Refusal>, HandshakeStep) {
        let controller = &admission.membership.controller;
        self.authentication = Authentication::required(controller, admission.queue_id, &self.peer);
        let (controller_id, needs_authentication) = (controller.id, self.authentication.is_some());
        let (is_discovery, host) = (controller.is_discovery, controller.host.nqn.clone());
        let result = ConnectResponse { controller_id, needs_authentication }.result();
        self.admission = Some(admission);
        let connected = match (is_discovery, needs_authentication) {
            (true, _) => Ok(()),
            (false, false) => self.take_slot(self.proven.is_some()),
            // The place is taken when the host has proven itself; without one it need not begin.
            (false, true) => self.slots.check(self.applicant(host.as_str(), true), &self.peer),
        };
        if connected.is_err() {
            self.admission = None;
            return (Err(Status::CONNECT_CONTROLLER_BUSY.into()), HandshakeStep::Leave);
        }
        (
            Ok(Answer::Result(result)),
            if needs_authentication { HandshakeStep::More } else { HandshakeStep::Serve },
        )
    }

    fn applicant<'a>(&self, host: &'a str, is_proven: bool) -> Applicant<'a> {
        Applicant { origin: self.origin, host: Some(host), is_proven }
    }

    /// Takes the place of the queue that was admitted.
    fn take_slot(&mut self, is_proven: bool) -> Result<(), NoSlot> {
        let Some(admission) = &self.admission else { return Ok(()) };
        let host = &admission.membership.controller.host.nqn;
        let minimum = if admission.queue_id == 0 { ADMIN_MINIMUM } else { IO_MINIMUM };
        self.slot = Some(self.slots.take(self.applicant(host.as_str(), is_proven), minimum, &self.peer)?);
        Ok(())
    }

    /// The host has proven itself: its queue gets its place, and is one of the controller's.
    fn begin(&mut self) -> Result<(), Refusal> {
        self.take_slot(true).map_err(|_| Status::CONNECT_CONTROLLER_BUSY)?;
        self.admission.as_mut().map_or(Ok(()), |admission| admission.membership.join())
    }

    /// Tells the host how a command ended.
    fn answer(&mut self, command_id: u16, result: Result<Answer, Refusal>, output: &mut Vec<u8>) {
        let (_, framing) = self.framing.expect("initialized before");
        let mut completion = CompletionEntry::new(command_id, Status::SUCCESS);
        if let Some(admission) = &self.admission {
            self.head = (self.head + 1) % admission.entries;
            completion.sq_id = admission.queue_id;
            completion.sq_head = if admission.has_flow_control { self.head } else { 0xffff };
        }
        let mut bytes = [0; MAX_FRONT];
        match result {
            Ok(Answer::Result(result)) => completion.result = result,
            Ok(Answer::Data(data)) => {
                let len = data.len() as u32; // a message of authentication
                let front = C2hData { command_id, offset: 0, len, is_last: true, is_success: false };
                let front = front.encode(&framing, &mut bytes);
                output.extend(&bytes[..front]);
                output.extend(&data);
                if framing.data_digest {
                    output.extend(data_digest(&data));
                }
            }
            Err(Refusal { status, result }) => {
                completion.status = status;
                completion.result = result;
            }
        }
        let len = CapsuleResp { entry: completion.encode() }.encode(&framing, &mut bytes);
        output.extend(&bytes[..len]);
    }

    fn connect(&self, entry: &SubmissionEntry, data: &[u8]) -> Result<Admission, Refusal> {
        if FabricsType::of(entry) != Some(FabricsType::Connect) {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        let is_whole =
            matches!(entry.sgl, Sgl::InCapsule { offset: 0, len } if len as usize == CONNECT_DATA_BYTES);
        let data = data.first_chunk::<CONNECT_DATA_BYTES>().filter(|_| is_whole);
        let data = data.ok_or(Status::INVALID_SGL_LENGTH)?;
        let parsed: Result<ConnectData, InvalidParameter> = ConnectData::parse(data);
        if self.subsystem.failures.are_too_many(&self.peer) {
            return Err(Status::CONNECT_CONTROLLER_BUSY.into());
        }
        let data = parsed?;
        self.check_proof(&data)?;
        self.subsystem.connect(&self.port, &Connect::parse(&entry.cdw), &data)
    }
}

impl NvmeHandshake {
    /// Whether a newcomer may say that it is this host: one that has a key has shown it.
    fn check_proof(&self, data: &ConnectData) -> Result<(), Refusal> {
        let has_key = |host| self.subsystem.tls.as_ref().is_some_and(|security| security.keys.have(host));
        let is_right = match &self.proven {
            Some((host, subsystem)) => *host == data.host && *subsystem == data.subsystem,
            // In the clear anybody may ask what there is.
            None => data.subsystem.is_discovery() || !has_key(&data.host),
        };
        if is_right {
            return Ok(());
        }
        let (export, host, is_tls) = (&*self.subsystem.export, data.host.as_str(), self.proven.is_some());
        tracing::warn!(export, host, is_tls, "a host has not shown the key for its name and this subsystem");
        Err(Status::CONNECT_INVALID_HOST.into())
    }
}

fn data_digest(data: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut digest = DataDigest::new();
    digest.update(data);
    digest.to_bytes()
}

impl Handshake for NvmeHandshake {
    fn secured(&mut self, identity: Option<&str>) {
        self.proven = identity.and_then(named_by);
    }

    fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), String> {
        let mut used = 0;
        loop {
            let (len, step) = match self.next(&input[used..], output) {
                Ok(progress) => progress,
                Err(Rejected { fatal, pdu }) => {
                    tracing::warn!(export = &*self.subsystem.export, %fatal, "hung up on a newcomer");
                    let mut bytes = [0; MAX_TERMINATION_BYTES];
                    let len = TermReq::encode(fatal, Side::Controller, &pdu, &mut bytes);
                    output.extend(&bytes[..len]);
                    return Ok((used, HandshakeStep::Leave));
                }
            };
            used += len;
            if step != HandshakeStep::More || len == 0 {
                return Ok((used, step));
            }
        }
    }
}
