//! The handshake of a queue: ICReq and ICResp, Connect and its response, then the host's
//! authentication if it is required.
//!
//! Source: NVMe/TCP Transport Specification 1.0, 3.2 (initialization); Base Specification 2.0, 6.3
//! (Connect).

use crate::service::Service;
use crate::session::Agreed;
use crate::{ADMIN_MINIMUM, IN_CAPSULE_BYTES, IO_MINIMUM, MAX_H2C_DATA};
use exports::stream::{Applicant, ConnectionSlot, Handshake, HandshakeStep, NoSlot, Origin};
use nvme::fabrics::{ConnectResponse, Nqn};
use nvme::tcp::{
    C2hData, COMMAND_BYTES, COMMON_BYTES, CapsuleCmd, CapsuleResp, DIGEST_BYTES, DataDigest, Fatal,
    FatalStatus, Frame, Framing, IC_BYTES, IcReq, IcResp, MAX_FRONT, MAX_TERMINATION_BYTES, PduType, Side,
    TermReq,
};
use nvme::{CompletionEntry, Status, SubmissionEntry};
use nvme_auth::access::Proof;
use nvme_auth::tls_key::named_by;
use nvme_target::{Admission, Authentication, Newcomer, PortalTls, Refusal, Response, Step};
use std::sync::Arc;

/// First byte of a connection that starts with TLS (RFC 8446, 5.1); that of an ICReq is 0.
const TLS_HANDSHAKE: u8 = 0x16;

/// The handshake of one newcomer.
pub(crate) struct NvmeHandshake {
    entrance: Arc<Entrance>,
    /// The identity that the newcomer's TLS key proves: the host, and the subsystem of the key.
    proven: Option<(Nqn, Nqn)>,
    /// The framing of received and sent PDUs, negotiated by the ICReq.
    framing: Option<(Framing, Framing)>,
    admission: Option<(Arc<Service>, Admission)>,
    /// The pending authentication, once the host has named itself.
    authentication: Option<Authentication>,
    /// The head of the submission queue.
    head: u16,
    peer: Box<str>,
    origin: Origin,
    /// The queue's slot, once the host has authenticated.
    slot: Option<ConnectionSlot>,
}

/// A port of a portal, where hosts choose a subsystem.
pub(crate) type Entrance = nvme_target::Entrance<Service>;

/// A protocol error, for the host and the log.
struct Rejected {
    fatal: Fatal,
    /// The start of the rejected PDU.
    pdu: Vec<u8>,
}

impl NvmeHandshake {
    pub(crate) fn new(entrance: Arc<Entrance>, peer: &str, origin: Origin) -> NvmeHandshake {
        NvmeHandshake {
            entrance,
            proven: None,
            framing: None,
            admission: None,
            authentication: None,
            head: 0,
            peer: peer.into(),
            origin,
            slot: None,
        }
    }

    /// The chosen subsystem and the negotiated values, once the handshake has reached
    /// [`HandshakeStep::Serve`], and the queue's slot (discovery has none).
    pub(crate) fn agreed(self) -> Option<(Arc<Service>, Agreed, Option<ConnectionSlot>)> {
        let ((service, admission), framing) = (self.admission?, self.framing?);
        let agreed = Agreed { admission, framing, head: self.head };
        Some((service, agreed, self.slot))
    }

    fn next(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), Rejected> {
        let is_new = self.framing.is_none() && self.proven.is_none();
        if let (true, Some(first)) = (is_new, input.first()) {
            let tls = self.entrance.directory.tls();
            if *first == TLS_HANDSHAKE && tls != PortalTls::Off {
                return Ok((0, HandshakeStep::Secured));
            }
            if tls == PortalTls::Required {
                let (export, peer) = (&*self.entrance.portal, &*self.peer);
                tracing::warn!(export, peer, "host refused: it connected without TLS, which is required");
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

    /// Responses a command: a Connect first, then authentication commands.
    fn command(&mut self, pdu: &[u8], frame: &Frame, output: &mut Vec<u8>) -> HandshakeStep {
        let header = pdu.first_chunk::<COMMAND_BYTES>().expect("the frame was accepted");
        let entry = SubmissionEntry::parse(&CapsuleCmd::parse(header, frame).entry);
        let data = &pdu[frame.data_offset..][..frame.data_len as usize];
        let is_intact = !frame.has_data_digest || data_digest(data) == pdu[pdu.len() - DIGEST_BYTES..];
        let (result, step) = match (is_intact, &mut self.authentication) {
            (false, _) => (Err(Status::TRANSIENT_TRANSPORT_ERROR.into()), HandshakeStep::Leave),
            (true, Some(authentication)) => match authentication.command(&entry, data) {
                (Ok(answer), Step::Serve) => match self.begin() {
                    Ok(()) => (Ok(answer), HandshakeStep::Serve),
                    Err(refusal) => (Err(refusal), HandshakeStep::Leave),
                },
                (result, step) => (result, after(step)),
            },
            (true, None) => match self.entrance.connect(self.newcomer(), &entry, data) {
                Ok((service, admission)) => self.welcome(service, admission),
                Err(refusal) => {
                    let (export, peer, status) = (self.name(), &*self.peer, refusal.status);
                    let parameter = refusal.parameter().map(tracing::field::display);
                    tracing::info!(export, peer, %status, parameter, "host refused");
                    (Err(refusal), HandshakeStep::Leave)
                }
            },
        };
        self.answer(entry.command_id, result, output);
        step
    }

    /// Admits a queue; its host may still have to authenticate.
    fn welcome(
        &mut self,
        service: Arc<Service>,
        admission: Admission,
    ) -> (Result<Response, Refusal>, HandshakeStep) {
        let controller = admission.controller();
        let authentication =
            |proof: Proof| Authentication::new(controller, admission.queue_id, &self.peer, proof);
        self.authentication = admission.proof.clone().map(authentication);
        let (controller_id, needs_authentication) = (controller.id, self.authentication.is_some());
        let (is_discovery, host) = (controller.is_discovery, controller.host.nqn.clone());
        let result = ConnectResponse { controller_id, needs_authentication }.result();
        let slots = service.slots[self.entrance.port].clone();
        self.admission = Some((service, admission));
        let connected = match (is_discovery, needs_authentication) {
            (true, _) => Ok(()),
            (false, false) => self.take_slot(self.proven.is_some()),
            // The slot is taken once the host has authenticated. Without a free slot it need not
            // start.
            (false, true) => slots.check(self.applicant(host.as_str(), true), &self.peer),
        };
        if connected.is_err() {
            self.admission = None;
            return (Err(Status::CONNECT_CONTROLLER_BUSY.into()), HandshakeStep::Leave);
        }
        (
            Ok(Response::Result(result)),
            if needs_authentication { HandshakeStep::More } else { HandshakeStep::Serve },
        )
    }

    fn newcomer(&self) -> Newcomer<'_> {
        Newcomer { peer: &self.peer, proven: self.proven.as_ref() }
    }

    fn applicant<'a>(&self, host: &'a str, is_proven: bool) -> Applicant<'a> {
        Applicant { origin: self.origin, host: Some(host), is_proven }
    }

    /// Takes the slot of an admitted queue.
    fn take_slot(&mut self, is_proven: bool) -> Result<(), NoSlot> {
        let Some((service, admission)) = &self.admission else { return Ok(()) };
        let host = &admission.controller().host.nqn;
        let minimum = if admission.queue_id == 0 { ADMIN_MINIMUM } else { IO_MINIMUM };
        let slots = &service.slots[self.entrance.port];
        self.slot = Some(slots.take(self.applicant(host.as_str(), is_proven), minimum, &self.peer)?);
        Ok(())
    }

    /// Admits the queue of an authenticated host: takes its slot and adds it to the controller.
    fn begin(&mut self) -> Result<(), Refusal> {
        self.take_slot(true).map_err(|_| Status::CONNECT_CONTROLLER_BUSY)?;
        self.admission.as_mut().map_or(Ok(()), |(_, admission)| admission.join())
    }

    /// Sends the completion of a command.
    fn answer(&mut self, command_id: u16, result: Result<Response, Refusal>, output: &mut Vec<u8>) {
        let (_, framing) = self.framing.expect("initialized before");
        let mut completion = CompletionEntry::new(command_id, Status::SUCCESS);
        if let Some((_, admission)) = &self.admission {
            self.head = (self.head + 1) % admission.entries;
            completion.sq_id = admission.queue_id;
            completion.sq_head = if admission.has_flow_control { self.head } else { 0xffff };
        }
        let mut bytes = [0; MAX_FRONT];
        match result {
            Ok(Response::Result(result)) => completion.result = result,
            Ok(Response::Data(data)) => {
                let len = data.len() as u32; // an authentication message
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

    /// The name of the export, or of the portal while no subsystem is chosen. For logs.
    fn name(&self) -> &str {
        let export = self.admission.as_ref().map(|(service, _)| &*service.subsystem.export);
        export.unwrap_or(&self.entrance.portal)
    }
}

/// The step of the handshake that follows that of an authentication.
fn after(step: Step) -> HandshakeStep {
    match step {
        Step::More => HandshakeStep::More,
        Step::Serve => HandshakeStep::Serve,
        Step::Leave => HandshakeStep::Leave,
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

    fn is_cancelled(&self) -> bool {
        self.admission.as_ref().is_some_and(|(service, _)| service.is_closed())
    }

    fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), String> {
        let mut used = 0;
        loop {
            let (len, step) = match self.next(&input[used..], output) {
                Ok(progress) => progress,
                Err(Rejected { fatal, pdu }) => {
                    tracing::warn!(export = self.name(), %fatal, "client disconnected: protocol error in the handshake");
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
