//! A handwritten target: one subsystem, one namespace in memory, and a hook for protocol
//! violations.

use nvme::command::{
    BlockRange, admin, cns, dataset_management, event, feature, log_page, opcode, parse_deallocate_range,
};
use nvme::fabrics::auth::parse_len;
use nvme::fabrics::property::{Capabilities, ControllerStatus, PropertyGet, PropertySet, Version, offset};
use nvme::fabrics::{Connect, ConnectData, ConnectResponse, FabricsType, InvalidParameter};
use nvme::identify::controller_data::{oncs, sgls};
use nvme::identify::lists::{NamespaceId, encode_descriptors, encode_namespaces};
use nvme::identify::{ControllerData, ControllerType, NamespaceData};
use nvme::tcp::{
    C2hData, CapsuleCmd, CapsuleResp, DataDigest, Frame, Framing, H2cData, IcReq, IcResp, MAX_FRONT,
    MAX_PEER_FRONT, PduType, R2t, Side, TermReq,
};
use nvme::{CompletionEntry, Sgl, Status, SubmissionEntry};
use nvme_auth::HostKeys;
use nvme_auth::controller::Outcome;
use nvme_auth::response::Parties;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const NQN: &str = "nqn.2014-08.org.example:disk";
pub const SIZE: usize = 16 << 20;

/// The properties of the target.
#[derive(Clone)]
pub struct Traits {
    pub block_shift: u8,
    pub max_transfer_exponent: u8,
    pub capsule_units: u32,
    pub max_h2c_data: u32,
    pub align_bytes: u8,
    pub commands: u16,
    pub has_cache: bool,
    pub uses_success: bool,
    pub refuses_digests: bool,
    pub nguid: u8,
}

impl Default for Traits {
    fn default() -> Traits {
        Traits {
            block_shift: 9,
            max_transfer_exponent: 5,
            capsule_units: 4 + 512,
            max_h2c_data: 16 << 10,
            align_bytes: 4,
            commands: oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES,
            has_cache: true,
            uses_success: true,
            refuses_digests: false,
            nguid: 7,
        }
    }
}

/// Changes a message to a host.
pub type Change = fn(Vec<u8>) -> Vec<u8>;

/// The target's secrets, and changes of its messages.
#[derive(Clone)]
pub struct Secrets {
    pub keys: Arc<HostKeys>,
    pub change: Change,
}

/// Sees every I/O command first. Returns `true` if it handled the command.
pub type Hook = Box<dyn FnMut(&mut Client, &SubmissionEntry) -> io::Result<bool> + Send>;

pub struct State {
    pub traits: Mutex<Traits>,
    pub disk: Mutex<Vec<u8>>,
    pub blocks: AtomicU64,
    pub seen: Mutex<Vec<SubmissionEntry>>,
    pub hook: Mutex<Option<Hook>>,
    pub is_silent: AtomicBool,
    pub terminations: Mutex<Vec<TermReq>>,
    pub connections: AtomicU32,
    /// The current discovery log, and the next ones: each read of the log's start switches to the
    /// next.
    pub logs: Mutex<VecDeque<Vec<u8>>>,
    /// The required authentication, if any.
    pub secrets: Mutex<Option<Secrets>>,
    /// Number of authenticated queues.
    pub proofs: AtomicU32,
    streams: Mutex<Vec<TcpStream>>,
    /// The admin connection and its event request.
    events: Mutex<Option<(TcpStream, Framing, u16)>>,
}

pub struct Target {
    pub address: String,
    pub state: Arc<State>,
    is_closed: Arc<AtomicBool>,
    listener: Mutex<Option<JoinHandle<()>>>,
}

impl Target {
    pub fn start(traits: Traits) -> Target {
        Target::at("127.0.0.1:0", traits)
    }

    /// A target at an address that was in use before.
    pub fn at(address: &str, traits: Traits) -> Target {
        let listener = TcpListener::bind(address).unwrap();
        let state = Arc::new(State {
            blocks: AtomicU64::new((SIZE >> traits.block_shift) as u64),
            traits: Mutex::new(traits),
            disk: Mutex::new(vec![0; SIZE * 2]),
            seen: Mutex::default(),
            hook: Mutex::new(None),
            is_silent: AtomicBool::new(false),
            terminations: Mutex::default(),
            connections: AtomicU32::new(0),
            logs: Mutex::default(),
            secrets: Mutex::default(),
            proofs: AtomicU32::new(0),
            streams: Mutex::default(),
            events: Mutex::default(),
        });
        let address = listener.local_addr().unwrap().to_string();
        let is_closed = Arc::new(AtomicBool::new(false));
        let (of_target, of_listener) = (state.clone(), is_closed.clone());
        let listener = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if of_listener.load(Ordering::SeqCst) {
                    return;
                }
                stream.set_nodelay(true).unwrap();
                state.streams.lock().unwrap().push(stream.try_clone().unwrap());
                state.connections.fetch_add(1, Ordering::SeqCst);
                let state = state.clone();
                std::thread::spawn(move || {
                    let end = stream.try_clone().unwrap();
                    let _ = Client::serve(stream, &state);
                    let _ = end.shutdown(Shutdown::Both);
                });
            }
        });
        Target { address, state: of_target, is_closed, listener: Mutex::new(Some(listener)) }
    }

    pub fn hook(&self, hook: impl FnMut(&mut Client, &SubmissionEntry) -> io::Result<bool> + Send + 'static) {
        *self.state.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Ends every connection.
    pub fn cut(&self) {
        for stream in self.state.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends every connection and stops listening.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        if let Some(listener) = self.listener.lock().unwrap().take() {
            let _ = TcpStream::connect(&self.address);
            listener.join().unwrap();
        }
        self.cut();
    }

    /// Changes the namespace's size and reports it, as soon as an event request is outstanding.
    pub fn resize(&self, bytes: usize) {
        let shift = self.state.traits.lock().unwrap().block_shift;
        self.state.blocks.store((bytes >> shift) as u64, Ordering::SeqCst);
        let start = Instant::now();
        let (mut stream, framing, id) = loop {
            let outstanding = self.state.events.lock().unwrap().take();
            match outstanding {
                Some(request) => break request,
                None => assert!(start.elapsed() < super::LONG, "no event request is outstanding"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let mut entry = CompletionEntry::new(id, Status::SUCCESS);
        entry.result = event::Event::NAMESPACE_ATTRIBUTES.encode().into();
        let mut bytes = [0; MAX_FRONT];
        let len = CapsuleResp { entry: entry.encode() }.encode(&framing, &mut bytes);
        stream.write_all(&bytes[..len]).unwrap();
    }

    pub fn opcodes(&self) -> Vec<u8> {
        self.state.seen.lock().unwrap().iter().map(|entry| entry.opcode).collect()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.close();
    }
}

pub struct Client {
    stream: TcpStream,
    pub state: Arc<State>,
    pub framing: Framing,
    to_receive: Framing,
    is_admin: bool,
    is_enabled: bool,
    proof: Option<(nvme_auth::Controller, Change)>,
    /// Commands received while waiting for data.
    backlog: VecDeque<(SubmissionEntry, Vec<u8>)>,
}

impl Client {
    fn serve(mut stream: TcpStream, state: &Arc<State>) -> io::Result<()> {
        let mut header = [0; 128];
        stream.read_exact(&mut header)?;
        let wanted = IcReq::parse(&header).unwrap();
        let traits = state.traits.lock().unwrap().clone();
        let granted = IcResp {
            align_bytes: traits.align_bytes,
            header_digest: wanted.header_digest && !traits.refuses_digests,
            data_digest: wanted.data_digest && !traits.refuses_digests,
            max_h2c_data: traits.max_h2c_data,
        };
        stream.write_all(&granted.encode())?;
        let framing = |align_bytes| Framing {
            header_digest: granted.header_digest,
            data_digest: granted.data_digest,
            align_bytes,
        };
        let mut client = Client {
            stream,
            state: state.clone(),
            framing: framing(wanted.align_bytes),
            to_receive: framing(traits.align_bytes),
            is_admin: false,
            is_enabled: false,
            proof: None,
            backlog: VecDeque::new(),
        };
        loop {
            let (entry, data) = match client.backlog.pop_front() {
                Some(command) => command,
                None => {
                    let (frame, front) = client.front()?;
                    client.capsule(&frame, &front)?
                }
            };
            client.command(&entry, data)?;
        }
    }

    /// Receives a command, or the end of the stream.
    fn capsule(&mut self, frame: &Frame, front: &[u8]) -> io::Result<(SubmissionEntry, Vec<u8>)> {
        match frame.kind {
            PduType::CapsuleCmd => {}
            PduType::H2cTermReq => {
                let request = TermReq::parse(front.first_chunk().unwrap());
                self.state.terminations.lock().unwrap().push(request);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            other => panic!("{other:?} from the host"),
        }
        let capsule = CapsuleCmd::parse(front.first_chunk().unwrap(), frame);
        let data = self.data(frame)?;
        let entry = SubmissionEntry::parse(&capsule.entry);
        assert_eq!(entry.flags, nvme::entry::FLAG_SGL);
        Ok((entry, data))
    }

    fn front(&mut self) -> io::Result<(Frame, Vec<u8>)> {
        let mut front = vec![0; MAX_PEER_FRONT];
        self.stream.read_exact(&mut front[..8])?;
        let frame = self.to_receive.accept(front.first_chunk().unwrap(), Side::Host).unwrap();
        self.stream.read_exact(&mut front[8..frame.front_bytes()])?;
        frame.check_header_digest(&front).unwrap();
        Ok((frame, front))
    }

    fn data(&mut self, frame: &Frame) -> io::Result<Vec<u8>> {
        let mut data = vec![0; frame.data_len as usize];
        self.stream.read_exact(&mut data)?;
        if frame.has_data_digest {
            let mut digest = [0; 4];
            self.stream.read_exact(&mut digest)?;
            assert_eq!(digest, digest_of(&data));
        }
        Ok(data)
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    pub fn respond(&mut self, id: u16, status: Status, result: u64) -> io::Result<()> {
        let entry = CompletionEntry { result, ..CompletionEntry::new(id, status) };
        let mut bytes = [0; MAX_FRONT];
        let len = CapsuleResp { entry: entry.encode() }.encode(&self.framing, &mut bytes);
        self.send(&bytes[..len])
    }

    /// Sends data for a command, as it is.
    pub fn data_pdu(&mut self, data: &C2hData, bytes: &[u8], digest: [u8; 4]) -> io::Result<()> {
        let mut message = vec![0; MAX_FRONT];
        let front = data.encode(&self.framing, &mut message);
        message.truncate(front);
        message.extend(bytes);
        if self.framing.data_digest {
            message.extend(digest);
        }
        self.send(&message)
    }

    /// Sends data in two PDUs and success.
    pub fn succeed_with(&mut self, id: u16, bytes: &[u8]) -> io::Result<()> {
        let uses_success = self.state.traits.lock().unwrap().uses_success;
        let half = (bytes.len() / 2) & !3;
        for (offset, part) in [(0, &bytes[..half]), (half, &bytes[half..])] {
            let is_last = offset + part.len() == bytes.len();
            let data = C2hData {
                command_id: id,
                offset: offset as u32,
                len: part.len() as u32,
                is_last,
                is_success: is_last && uses_success,
            };
            self.data_pdu(&data, part, digest_of(part))?;
        }
        if uses_success { Ok(()) } else { self.respond(id, Status::SUCCESS, 0) }
    }

    pub fn r2t(&mut self, command_id: u16, offset: u32, len: u32) -> io::Result<()> {
        let mut bytes = [0; MAX_FRONT];
        let pdu = R2t { command_id, tag: 0x77, offset, len };
        let len = pdu.encode(&self.framing, &mut bytes);
        self.send(&bytes[..len])
    }

    /// Requests all data of a command in two parts.
    fn fetch(&mut self, id: u16, len: u32) -> io::Result<Vec<u8>> {
        let mut data = Vec::new();
        let half = (len / 2) & !3;
        for part in [half, len - half] {
            if part == 0 {
                continue;
            }
            self.r2t(id, data.len() as u32, part)?;
            let end = data.len() + part as usize;
            while data.len() < end {
                let (frame, front) = self.front()?;
                if frame.kind != PduType::H2cData {
                    let command = self.capsule(&frame, &front)?;
                    self.backlog.push_back(command);
                    continue;
                }
                let pdu = H2cData::parse(front.first_chunk().unwrap(), &frame).unwrap();
                assert_eq!((pdu.command_id, pdu.tag, pdu.offset as usize), (id, 0x77, data.len()));
                assert!(pdu.len <= self.state.traits.lock().unwrap().max_h2c_data);
                data.extend(self.data(&frame)?);
                assert_eq!(pdu.is_last, data.len() == end);
            }
        }
        Ok(data)
    }

    fn command(&mut self, entry: &SubmissionEntry, data: Vec<u8>) -> io::Result<()> {
        if self.state.is_silent.load(Ordering::SeqCst) {
            return Ok(());
        }
        match FabricsType::of(entry) {
            Some(kind) => self.fabrics(kind, entry, &data),
            None if self.is_admin => self.admin(entry),
            None => {
                self.state.seen.lock().unwrap().push(*entry);
                let mut hook = self.state.hook.lock().unwrap().take();
                let is_done = match &mut hook {
                    Some(hook) => hook(self, entry),
                    None => Ok(false),
                };
                let mut place = self.state.hook.lock().unwrap();
                if place.is_none() {
                    *place = hook;
                }
                drop(place);
                if is_done? { Ok(()) } else { self.io(entry, data) }
            }
        }
    }

    fn fabrics(&mut self, kind: FabricsType, entry: &SubmissionEntry, data: &[u8]) -> io::Result<()> {
        let id = entry.command_id;
        match kind {
            FabricsType::Connect => {
                let connect = Connect::parse(&entry.cdw);
                let data = ConnectData::parse(data.try_into().unwrap()).unwrap();
                if data.subsystem.as_str() != NQN && !data.subsystem.is_discovery() {
                    let wrong = InvalidParameter::SUBSYSTEM.result();
                    return self.respond(id, Status::CONNECT_INVALID_PARAMETERS, wrong);
                }
                self.is_admin = connect.queue_id == 0;
                assert_eq!(data.controller_id, if self.is_admin { 0xffff } else { 5 });
                let secrets = self.state.secrets.lock().unwrap().clone();
                let parties = Parties { host: data.host, subsystem: data.subsystem };
                self.proof = secrets.map(|Secrets { keys, change }| {
                    (nvme_auth::Controller::new(parties, keys, Arc::default()), change)
                });
                let needs_authentication = self.proof.is_some();
                let response = ConnectResponse { controller_id: 5, needs_authentication };
                self.respond(id, Status::SUCCESS, response.result())
            }
            FabricsType::AuthenticationSend => {
                let (talk, _) = self.proof.as_mut().unwrap();
                talk.take(data).unwrap();
                self.note_proof();
                self.respond(id, Status::SUCCESS, 0)
            }
            FabricsType::AuthenticationReceive => {
                let (talk, change) = self.proof.as_mut().unwrap();
                let message = change(talk.owed().unwrap().to_vec());
                talk.deliver();
                self.note_proof();
                assert_eq!(parse_len(&entry.cdw), Some(entry.sgl.len()));
                self.succeed_with(id, &message)
            }
            _ if self.proof.is_some() => panic!("{kind:?} before the host has authenticated"),
            FabricsType::PropertyGet => {
                let value = match PropertyGet::parse(&entry.cdw).unwrap().offset {
                    offset::CAP => Capabilities {
                        max_entries: 128,
                        is_contiguous: true,
                        ready_timeout_ms: 500,
                        command_sets: 1,
                        min_page_bytes: 4096,
                        max_page_bytes: 4096,
                    }
                    .encode(),
                    offset::VS => Version::V2_0.encode().into(),
                    offset::CSTS => {
                        ControllerStatus { is_ready: self.is_enabled, ..Default::default() }.encode().into()
                    }
                    other => panic!("register {other:#x}"),
                };
                self.respond(id, Status::SUCCESS, value)
            }
            FabricsType::PropertySet => {
                let set = PropertySet::parse(&entry.cdw).unwrap();
                assert_eq!(set.offset, offset::CC);
                self.is_enabled = set.value & 1 != 0;
                self.respond(id, Status::SUCCESS, 0)
            }
            _ => self.respond(id, Status::INVALID_OPCODE, 0),
        }
    }

    fn note_proof(&mut self) {
        if self.proof.as_ref().unwrap().0.outcome() == Outcome::Authenticated {
            self.state.proofs.fetch_add(1, Ordering::SeqCst);
            self.proof = None;
        }
    }

    fn admin(&mut self, entry: &SubmissionEntry) -> io::Result<()> {
        let id = entry.command_id;
        match entry.opcode {
            admin::IDENTIFY => match self.identify(entry.cdw[0] as u8, entry.nsid) {
                Some(data) => self.succeed_with(id, data.as_slice()),
                None => self.respond(id, Status::INVALID_FIELD, 0),
            },
            admin::GET_LOG_PAGE => {
                let bytes = 4 * ((entry.cdw[0] >> 16) as usize + 1);
                if entry.cdw[0] as u8 != log_page::DISCOVERY {
                    return self.succeed_with(id, &vec![0; bytes]);
                }
                let mut logs = self.state.logs.lock().unwrap();
                if entry.cdw[2] == 0 && logs.len() > 1 {
                    logs.pop_front();
                }
                let mut part = logs[0][entry.cdw[2] as usize..].to_vec();
                drop(logs);
                part.resize(bytes, 0);
                self.succeed_with(id, &part)
            }
            admin::SET_FEATURES => match entry.cdw[0] as u8 {
                feature::NUMBER_OF_QUEUES => self.respond(id, Status::SUCCESS, 0x3_0003),
                feature::ASYNC_EVENT_CONFIGURATION => self.respond(id, Status::SUCCESS, 0),
                _ => self.respond(id, Status::INVALID_FIELD, 0),
            },
            admin::ASYNC_EVENT_REQUEST => {
                let stream = self.stream.try_clone()?;
                *self.state.events.lock().unwrap() = Some((stream, self.framing, id));
                Ok(())
            }
            admin::KEEP_ALIVE => self.respond(id, Status::SUCCESS, 0),
            _ => self.respond(id, Status::INVALID_OPCODE, 0),
        }
    }

    fn identify(&self, cns: u8, nsid: u32) -> Option<Box<[u8; 4096]>> {
        let traits = self.state.traits.lock().unwrap().clone();
        Some(Box::new(match cns {
            cns::CONTROLLER => ControllerData {
                max_transfer_exponent: traits.max_transfer_exponent,
                controller_id: 5,
                version: Version::V2_0.encode(),
                async_events: event::CONFIG_NAMESPACE_ATTRIBUTES,
                controller_type: ControllerType::Io,
                submission_exponents: 0x66,
                completion_exponents: 0x44,
                max_commands: 64,
                namespaces: 1,
                commands: traits.commands,
                volatile_cache: traits.has_cache.into(),
                sgls: sgls::SUPPORTED | sgls::OFFSET | sgls::TRANSPORT,
                command_capsule_units: traits.capsule_units,
                response_capsule_units: 1,
                ..ControllerData::default()
            }
            .encode(),
            cns::NAMESPACE if nsid != 1 => [0; 4096],
            cns::NAMESPACE => {
                let blocks = self.state.blocks.load(Ordering::SeqCst);
                NamespaceData {
                    blocks,
                    capacity: blocks,
                    used: blocks,
                    deallocation: 0b1001,
                    nguid: [traits.nguid; 16],
                    block_shift: traits.block_shift,
                    ..NamespaceData::default()
                }
                .encode()
            }
            cns::ACTIVE_NAMESPACES => encode_namespaces([1], nsid),
            cns::DESCRIPTORS => encode_descriptors(&[NamespaceId::Nguid([traits.nguid; 16])]),
            _ => return None,
        }))
    }

    fn io(&mut self, entry: &SubmissionEntry, data: Vec<u8>) -> io::Result<()> {
        let id = entry.command_id;
        let shift = self.state.traits.lock().unwrap().block_shift;
        let range = BlockRange::parse(&entry.cdw);
        let start = (range.lba << shift) as usize;
        let place = start..start + ((range.blocks as usize) << shift);
        let has_range = matches!(entry.opcode, opcode::READ | opcode::WRITE | opcode::WRITE_ZEROES);
        if has_range && place.end as u64 > self.state.blocks.load(Ordering::SeqCst) << shift {
            return self.respond(id, Status::LBA_OUT_OF_RANGE, 0);
        }
        let data = match entry.sgl {
            Sgl::Transport { len } if len > 0 && entry.opcode != opcode::READ => self.fetch(id, len)?,
            _ => data,
        };
        match entry.opcode {
            opcode::READ => {
                let bytes = self.state.disk.lock().unwrap()[place].to_vec();
                return self.succeed_with(id, &bytes);
            }
            opcode::WRITE => {
                assert_eq!(data.len(), place.len());
                self.state.disk.lock().unwrap()[place].copy_from_slice(&data);
            }
            opcode::WRITE_ZEROES => self.state.disk.lock().unwrap()[place].fill(0),
            opcode::DATASET_MANAGEMENT => {
                assert_eq!(dataset_management(&entry.cdw), (1, true));
                let (lba, blocks) = parse_deallocate_range(data.as_slice().try_into().unwrap());
                let start = (lba << shift) as usize;
                self.state.disk.lock().unwrap()[start..start + ((blocks as usize) << shift)].fill(0);
            }
            opcode::FLUSH => {}
            _ => return self.respond(id, Status::INVALID_OPCODE, 0),
        }
        self.respond(id, Status::SUCCESS, 0)
    }
}

pub fn digest_of(data: &[u8]) -> [u8; 4] {
    let mut digest = DataDigest::new();
    digest.update(data);
    digest.to_bytes()
}
