//! A hostile NVMe/TCP host, and a running `exports_nvme_tcp`, over its socket.
//!
//! The host authenticates or attempts it ([`authentication`]). Or it connects an admin queue and an
//! I/O queue, with any digests, or sends anything from the start. Then it mixes valid commands with
//! changed ones, requested and unrequested data, and random bytes. At the end it closes its side
//! and reads the answers. Whatever it sends, nothing may panic, the target must disconnect, and no
//! resource of the connections may remain. As long as the host has sent only commands with valid
//! boundaries, each must be answered once.

mod authentication;

use crate::input::Input;
use drivers::mem::{MemDevice, Options};
use exports::Export;
use exports_nvme_tcp::{Access, Address, Config, NamespaceConfig, Nqn, NvmeTcp};
use nvme::fabrics::property::{Configuration, PropertySet, offset};
use nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData};
use nvme::lba_status::{Action, GetLbaStatus};
use nvme::tcp::{
    C2hData, COMMON_BYTES, CapsuleCmd, CapsuleResp, DataDigest, Framing, H2cData, IC_BYTES, IcReq, PduType,
    R2t, Side,
};
use nvme::{Command, CompletionEntry, Sgl, Status, SubmissionEntry};
use reactor::{CoreConfig, Cores};
use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

const SUBSYSTEM: &str = "nqn.2014-08.org.example:fuzz";
const DEVICE_BYTES: u64 = 1 << 20;
/// Fewer than a queue has entries.
const MAX_ACTIONS: u16 = 48;
/// Timeout for every operation of the target.
const DEADLINE: Duration = Duration::from_secs(15);

/// The targets that all inputs share. Their cores are dropped last: they outlive the exports.
struct Server {
    export: NvmeTcp,
    /// A target that requires authentication.
    wary: NvmeTcp,
    _cores: Cores,
}

fn server() -> &'static Mutex<Server> {
    static SERVER: OnceLock<Mutex<Server>> = OnceLock::new();
    SERVER.get_or_init(|| {
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).expect("two cores");
        let device = Arc::new(MemDevice::new(&Options::new(DEVICE_BYTES)).expect("a small disk"));
        let nqn = Nqn::new(SUBSYSTEM).expect("a name");
        let config = Config { queues: 4, ..Config::new(Address::Tcp("127.0.0.1:0".into()), nqn) };
        let namespaces = [NamespaceConfig { device, uuid: None }];
        let start = |config| NvmeTcp::start(&namespaces, cores.all(), config).expect("an export");
        let access = Access { auth: Some(authentication::asked()), ..Access::default() };
        let wary = start(Config { access, ..config.clone() });
        Mutex::new(Server { export: start(config), wary, _cores: cores })
    })
}

/// Runs one input.
///
/// # Panics
/// When the target violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let server = server().lock().expect("inputs come one after the other");
    let address = server.export.address();
    let setup = input.u8();
    let (header_digest, data_digest) = (setup & 1 != 0, setup & 2 != 0);
    if (192..224).contains(&setup) {
        authentication::play(server.wary.address(), setup, &mut input);
    } else if setup < 224 {
        let mut admin = Host::initialized(address, header_digest, data_digest);
        let controller = admin.connect(0, 64, ANY_CONTROLLER);
        admin.enable();
        let mut io = Host::initialized(address, header_digest, data_digest);
        io.connect(1, 64, controller);
        let is_admin = setup & 4 != 0;
        let host = if is_admin { &mut admin } else { &mut io };
        for id in 0..MAX_ACTIONS {
            if input.is_empty() {
                break;
            }
            host.act(id, is_admin, &mut input);
        }
        host.listen();
    } else {
        let mut host = Host::over(address);
        if setup & 8 != 0 {
            host = Host::initialized(address, header_digest, data_digest);
        }
        host.is_sound = false;
        while !input.is_empty() {
            let noise = input.bytes(64).to_vec();
            host.send(&noise);
        }
        host.listen();
    }
    let start = Instant::now();
    while server.export.stats().clients() + server.wary.stats().clients() > 0 {
        assert!(start.elapsed() < DEADLINE, "something of the connections is left");
        std::thread::yield_now();
    }
}

struct Host {
    stream: TcpStream,
    framing: Framing,
    /// Commands without an answer.
    asked: HashSet<u16>,
    /// All commands so far had valid boundaries.
    is_sound: bool,
}

impl Host {
    fn over(address: &str) -> Host {
        Host::on(TcpStream::connect(address).expect("the target listens"))
    }

    fn on(stream: TcpStream) -> Host {
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket of ours");
        Host { stream, framing: Framing::default(), asked: HashSet::new(), is_sound: true }
    }

    fn initialized(address: &str, header_digest: bool, data_digest: bool) -> Host {
        Host::over(address).initialize(header_digest, data_digest)
    }

    fn initialize(mut self, header_digest: bool, data_digest: bool) -> Host {
        let host = &mut self;
        host.send(&IcReq { align_bytes: 4, header_digest, data_digest, max_r2t: 1 }.encode());
        host.stream.read_exact(&mut [0; IC_BYTES]).expect("the target answers");
        host.framing = Framing { header_digest, data_digest, align_bytes: 4 };
        self
    }

    fn connect(&mut self, queue_id: u16, entries: u32, controller_id: u16) -> u16 {
        let attributes = Connect::NO_FLOW_CONTROL;
        let connect = Connect { record_format: 0, queue_id, entries, attributes, keep_alive_ms: 0 };
        let name = |text| Nqn::new(text).expect("a name");
        let data = ConnectData {
            host_id: [1; 16],
            controller_id,
            subsystem: name(SUBSYSTEM),
            host: name("nqn.2014-08.org.example:host"),
        };
        self.command(&connect.entry(900, Sgl::InCapsule { offset: 0, len: 1024 }), &data.encode());
        self.completion().result as u16
    }

    fn enable(&mut self) {
        let value = Configuration::ENABLED.encode().into();
        self.command(&PropertySet { bytes: 4, offset: offset::CC, value }.entry(901), &[]);
        self.completion();
    }

    fn completion(&mut self) -> CompletionEntry {
        let mut bytes = [0; 28];
        let len = self.framing.front_bytes(PduType::CapsuleResp, false);
        self.stream.read_exact(&mut bytes[..len]).expect("the target answers");
        let entry = CapsuleResp::parse(bytes.first_chunk().expect("long enough"));
        let entry = CompletionEntry::parse(&entry.entry);
        assert_eq!(entry.status, Status::SUCCESS);
        entry
    }

    fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes); // the target may have disconnected
    }

    fn command(&mut self, entry: &SubmissionEntry, data: &[u8]) {
        let mut front = [0; 128];
        let capsule = CapsuleCmd { entry: entry.encode(), data_len: data.len() as u32 };
        let len = capsule.encode(&self.framing, &mut front);
        self.pdu(&front[..len], data);
    }

    fn pdu(&mut self, front: &[u8], data: &[u8]) {
        let mut bytes = [front, data].concat();
        if self.framing.data_digest && !data.is_empty() {
            let mut digest = DataDigest::new();
            digest.update(data);
            bytes.extend(digest.to_bytes());
        }
        self.send(&bytes);
    }

    fn act(&mut self, id: u16, is_admin: bool, input: &mut Input<'_>) {
        let lba = u64::from(input.u16() % 2050);
        match input.below(16) {
            0..=3 if is_admin => {
                let cns = input.u8() & 0x1f;
                self.ask(&Command::identify(input.u8().into(), cns, 0), id, 4096);
            }
            4..=7 if is_admin => {
                let bytes = 4 * (1 + u32::from(input.u16()));
                let page = input.one_of(&[1, 2, 3, 4, 5, 0x70, 0x99]);
                self.ask(&Command::get_log_page(0, page, 0, bytes), id, bytes);
            }
            0..=3 => {
                let blocks = 1 + u32::from(input.u8() & 63);
                self.ask(&Command::read(1, lba, blocks), id, blocks * 512);
            }
            4..=7 => {
                let data = vec![input.u8(); 512 * (1 + input.below(8))];
                let command = Command::write(1, lba, data.len() as u32 / 512, input.u8() & 1 != 0);
                let len = data.len() as u32;
                self.asked.insert(id);
                self.command(&SubmissionEntry::new(&command, id, Sgl::InCapsule { offset: 0, len }), &data);
            }
            8 | 9 => {
                // Any command with a valid boundary.
                let cdw = [(); 6].map(|()| input.u32());
                let command = Command { opcode: input.u8(), nsid: u32::from(input.u8() & 3), cdw };
                self.asked.insert(id);
                let len = input.u32() & 0xffff;
                let sgl = input.one_of(&[
                    Sgl::None,
                    Sgl::Transport { len },
                    Sgl::InCapsule { offset: 0, len },
                    Sgl::InCapsule { offset: 8, len },
                ]);
                // The command may wait for data, or for an event.
                self.is_sound &= !is_admin && !matches!(sgl, Sgl::Transport { .. });
                self.command(&SubmissionEntry::new(&command, id, sgl), &[]);
            }
            10 | 11 => {
                self.is_sound = false;
                let blocks = 1 + u32::from(input.u8());
                let command = Command::write(1, lba % 1024, blocks, false);
                let sgl = Sgl::Transport { len: blocks * 512 };
                self.command(&SubmissionEntry::new(&command, id, sgl), &[]);
            }
            12 | 13 => {
                self.is_sound = false;
                let data = input.bytes(64).to_vec();
                let header = H2cData {
                    command_id: (input.u8() & 63).into(),
                    tag: (input.u8() & 3).into(),
                    offset: input.u32() & 0x1ff,
                    len: data.len() as u32,
                    is_last: input.u8() & 1 != 0,
                };
                let mut front = [0; 128];
                let len = header.encode(&self.framing, &mut front);
                self.pdu(&front[..len], &data);
            }
            14 => {
                self.is_sound = false;
                let bytes = input.bytes(96).to_vec();
                self.send(&bytes);
            }
            15 if is_admin => {
                let action = input.one_of(&[Action::Allocated, Action::Scan, Action::Tracked]);
                let (blocks, bytes) = (input.u16() % 2050, 4 * (1 + u64::from(input.u16())));
                let get = GetLbaStatus { action, lba, blocks, bytes };
                self.ask(&get.command(1), id, bytes as u32);
            }
            _ => {
                // A valid PDU with one changed byte.
                self.is_sound = false;
                let mut front = [0; 128];
                let entry = SubmissionEntry::new(&Command::read(1, lba, 1), id, Sgl::Transport { len: 512 });
                let capsule = CapsuleCmd { entry: entry.encode(), data_len: 0 };
                let len = capsule.encode(&self.framing, &mut front);
                let at = input.below(len);
                front[at] = input.u8();
                self.send(&front[..len]);
            }
        }
    }

    fn ask(&mut self, command: &Command, id: u16, room: u32) {
        self.asked.insert(id);
        self.command(&SubmissionEntry::new(command, id, Sgl::Transport { len: room }), &[]);
    }

    /// Reads until the end of the stream.
    fn listen(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write); // the target may have disconnected
        let mut said = Vec::new();
        let end = self.stream.read_to_end(&mut said);
        if !self.is_sound {
            let is_late = end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
            assert!(!is_late, "the target does not disconnect");
            return;
        }
        end.expect("the target answers and hangs up");
        let mut rest = &said[..];
        while let Some(common) = rest.first_chunk::<COMMON_BYTES>() {
            let frame = self.framing.accept(common, Side::Controller).expect("a PDU");
            let (pdu, next) = rest.split_at(frame.len as usize);
            frame.check_header_digest(pdu).expect("its digest");
            let header = pdu.first_chunk().expect("long enough");
            let ended = match frame.kind {
                PduType::CapsuleResp => {
                    Some(CompletionEntry::parse(&CapsuleResp::parse(header).entry).command_id)
                }
                PduType::C2hData => {
                    let data = C2hData::parse(header, &frame).expect("data");
                    data.is_success.then_some(data.command_id)
                }
                PduType::R2t => panic!("{:?} for data that came", R2t::parse(header)),
                kind => panic!("{kind:?} for commands that are in order"),
            };
            if let Some(id) = ended {
                assert!(self.asked.remove(&id), "an answer to nothing, or a second one: command {id}");
            }
            rest = next;
        }
        assert!(self.asked.is_empty(), "commands without an answer: {:?}", self.asked);
    }
}
