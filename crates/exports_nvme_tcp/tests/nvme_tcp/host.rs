//! A host written by hand, which can do everything right or anything wrong.

use nvme::fabrics::property::{Configuration, PropertyGet, PropertySet, offset};
use nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData, Nqn};
use nvme::tcp::{
    C2hData, COMMON_BYTES, CapsuleCmd, CapsuleResp, DataDigest, Frame, Framing, H2cData, IcReq, IcResp,
    PduType, R2t, Side, TermReq,
};
use nvme::{Command, CompletionEntry, Sgl, Status, SubmissionEntry};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

pub const HOST: &str = "nqn.2014-08.org.example:host";
pub const HOST_ID: [u8; 16] = [7; 16];

/// One queue.
pub struct Host {
    pub stream: TcpStream,
    pub address: String,
    pub framing: Framing,
    pub controller: u16,
    /// The identity that it claims.
    identity: (Nqn, [u8; 16]),
    next_id: u16,
    has_flow_control: bool,
}

/// A received PDU.
#[derive(Debug, PartialEq, Eq)]
pub enum Pdu {
    Response(CompletionEntry),
    Data { header: C2hData, data: Vec<u8> },
    R2t(R2t),
    Terminated(TermReq),
}

/// How a command ended: status, result, data.
#[derive(Debug)]
pub struct Done {
    pub status: Status,
    pub result: u64,
    pub data: Vec<u8>,
}

impl Host {
    /// A host that only connects.
    pub fn silent(address: &str) -> Host {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        Host {
            stream,
            address: address.to_owned(),
            framing: Framing::default(),
            controller: 0,
            identity: (Nqn::new(HOST).unwrap(), HOST_ID),
            next_id: 0,
            has_flow_control: false,
        }
    }

    /// A host that has agreed on how PDUs look.
    pub fn initialized(address: &str, header_digest: bool, data_digest: bool) -> Host {
        Host::silent(address).initialize(header_digest, data_digest)
    }

    /// Agrees on how PDUs look.
    pub fn initialize(mut self, header_digest: bool, data_digest: bool) -> Host {
        let request = IcReq { align_bytes: 4, header_digest, data_digest, max_r2t: 1 };
        self.stream.write_all(&request.encode()).unwrap();
        let mut response = [0; 128];
        self.stream.read_exact(&mut response).unwrap();
        let response = IcResp::parse(&response).unwrap();
        assert_eq!((response.header_digest, response.data_digest), (header_digest, data_digest));
        assert_eq!(response.align_bytes, 4);
        self.framing = Framing { header_digest, data_digest, align_bytes: 4 };
        self
    }

    /// The same host with another identity.
    pub fn of(self, identity: (Nqn, [u8; 16])) -> Host {
        Host { identity, ..self }
    }

    /// An admin queue.
    pub fn admin(address: &str, subsystem: &str) -> Host {
        Host::admin_of(address, subsystem, (Nqn::new(HOST).unwrap(), HOST_ID))
    }

    /// An admin queue of a host with this identity.
    pub fn admin_of(address: &str, subsystem: &str, identity: (Nqn, [u8; 16])) -> Host {
        let mut host = Host::initialized(address, false, false).of(identity);
        assert_eq!(host.connect(subsystem, 0, 32, ANY_CONTROLLER, 0).status, Status::SUCCESS);
        host
    }

    /// An I/O queue of this one's controller, with the same digests.
    pub fn io_queue(&self, queue: u16, entries: u32) -> Host {
        self.io_queue_of(crate::server::SUBSYSTEM, queue, entries)
    }

    /// The same of a subsystem with another name.
    pub fn io_queue_of(&self, subsystem: &str, queue: u16, entries: u32) -> Host {
        let io = Host::initialized(&self.address, self.framing.header_digest, self.framing.data_digest);
        let mut io = io.of(self.identity.clone());
        let done = io.connect(subsystem, queue, entries, self.controller, 0);
        assert_eq!(done.status, Status::SUCCESS);
        io
    }

    pub fn connect(
        &mut self,
        subsystem: &str,
        queue_id: u16,
        entries: u32,
        controller_id: u16,
        keep_alive_ms: u32,
    ) -> Done {
        let attributes = Connect::NO_FLOW_CONTROL;
        let connect = Connect { record_format: 0, queue_id, entries, attributes, keep_alive_ms };
        let data = ConnectData {
            host_id: self.identity.1,
            controller_id,
            subsystem: Nqn::of_any(subsystem).unwrap(),
            host: self.identity.0.clone(),
        };
        self.connect_as(&connect, &data)
    }

    pub fn connect_as(&mut self, connect: &Connect, data: &ConnectData) -> Done {
        self.has_flow_control = connect.attributes & Connect::NO_FLOW_CONTROL == 0;
        let id = self.id();
        self.send_with(connect.entry(id, Sgl::InCapsule { offset: 0, len: 1024 }), &data.encode());
        let done = self.finish(id);
        if done.status == Status::SUCCESS {
            self.controller = done.result as u16;
        }
        done
    }

    pub fn id(&mut self) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    /// Sends a command without data in its capsule.
    pub fn send(&mut self, entry: SubmissionEntry) {
        self.send_with(entry, &[]);
    }

    /// Sends a command with data in its capsule.
    pub fn send_with(&mut self, entry: SubmissionEntry, data: &[u8]) {
        let capsule = CapsuleCmd { entry: entry.encode(), data_len: data.len() as u32 };
        let mut front = [0; 128];
        let len = capsule.encode(&self.framing, &mut front);
        self.send_pdu(&front[..len], data);
    }

    /// Sends data that was asked for.
    pub fn send_data(&mut self, header: H2cData, data: &[u8]) {
        let mut front = [0; 128];
        let len = header.encode(&self.framing, &mut front);
        self.send_pdu(&front[..len], data);
    }

    fn send_pdu(&mut self, front: &[u8], data: &[u8]) {
        let mut bytes = [front, data].concat();
        if self.framing.data_digest && !data.is_empty() {
            bytes.extend(digest(data));
        }
        self.stream.write_all(&bytes).unwrap();
    }

    /// The next PDU.
    pub fn receive(&mut self) -> Pdu {
        let mut common = [0; COMMON_BYTES];
        self.stream.read_exact(&mut common).unwrap();
        let frame: Frame = self.framing.accept(&common, Side::Controller).unwrap();
        let mut pdu = vec![0; frame.len as usize];
        pdu[..COMMON_BYTES].copy_from_slice(&common);
        self.stream.read_exact(&mut pdu[COMMON_BYTES..]).unwrap();
        frame.check_header_digest(&pdu).unwrap();
        let header = pdu.first_chunk().unwrap();
        let data = pdu[frame.data_offset..][..frame.data_len as usize].to_vec();
        if frame.has_data_digest {
            assert_eq!(pdu[pdu.len() - 4..], digest(&data));
        }
        match frame.kind {
            PduType::CapsuleResp => Pdu::Response(CompletionEntry::parse(&CapsuleResp::parse(header).entry)),
            PduType::C2hData => Pdu::Data { header: C2hData::parse(header, &frame).unwrap(), data },
            PduType::R2t => Pdu::R2t(R2t::parse(header).unwrap()),
            PduType::C2hTermReq => Pdu::Terminated(TermReq::parse(header)),
            kind => panic!("{kind:?} from a controller"),
        }
    }

    /// Waits for the end of a command, the only one in flight.
    pub fn finish(&mut self, id: u16) -> Done {
        let mut found = Vec::new();
        loop {
            match self.receive() {
                Pdu::Data { header, data } => {
                    assert_eq!((header.command_id, header.offset as usize), (id, found.len()));
                    found.extend(data);
                    if header.is_success {
                        assert!(!self.has_flow_control);
                        return Done { status: Status::SUCCESS, result: 0, data: found };
                    }
                }
                Pdu::Response(entry) => {
                    assert_eq!(entry.command_id, id);
                    return Done { status: entry.status, result: entry.result, data: found };
                }
                other => panic!("{other:?} instead of a response"),
            }
        }
    }

    /// A command, with room for `room` bytes of data.
    pub fn run(&mut self, command: &Command, room: u32) -> Done {
        let id = self.id();
        self.send(SubmissionEntry::new(command, id, Sgl::Transport { len: room }));
        self.finish(id)
    }

    /// Runs a command with data: in its capsule if the data fits, else in parts when the target
    /// requests it.
    pub fn run_with(&mut self, command: &Command, data: &[u8]) -> Done {
        let (id, len) = (self.id(), data.len() as u32);
        if data.len() <= 8192 {
            self.send_with(SubmissionEntry::new(command, id, Sgl::InCapsule { offset: 0, len }), data);
            return self.finish(id);
        }
        self.send(SubmissionEntry::new(command, id, Sgl::Transport { len }));
        let request = match self.receive() {
            Pdu::R2t(request) => request,
            Pdu::Response(entry) => return Done { status: entry.status, result: entry.result, data: vec![] },
            other => panic!("{other:?} instead of an R2T"),
        };
        assert_eq!((request.command_id, request.offset, request.len), (id, 0, len));
        for (i, piece) in data.chunks(100_000).enumerate() {
            let (offset, len) = (i as u32 * 100_000, piece.len() as u32);
            let is_last = offset + len == request.len;
            self.send_data(H2cData { command_id: id, tag: request.tag, offset, len, is_last }, piece);
        }
        self.finish(id)
    }

    pub fn get(&mut self, offset: u32, bytes: u8) -> Done {
        let id = self.id();
        self.send(PropertyGet { bytes, offset }.entry(id));
        self.finish(id)
    }

    pub fn set(&mut self, offset: u32, value: u64) -> Done {
        let id = self.id();
        self.send(PropertySet { bytes: 4, offset, value }.entry(id));
        self.finish(id)
    }

    /// Enables the controller.
    pub fn enable(&mut self) {
        let done = self.set(offset::CC, Configuration::ENABLED.encode().into());
        assert_eq!(done.status, Status::SUCCESS);
        assert_eq!(self.get(offset::CSTS, 4).result, 1);
    }

    pub fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let done = self.run(&Command::read(1, lba, blocks), blocks * 512);
        assert_eq!(done.status, Status::SUCCESS);
        done.data
    }

    pub fn write(&mut self, lba: u64, data: &[u8]) -> Status {
        self.run_with(&Command::write(1, lba, data.len() as u32 / 512, false), data).status
    }

    /// Whether the target has disconnected; discards remaining data.
    pub fn is_disconnected(&mut self) -> bool {
        loop {
            match self.stream.read(&mut [0; 65536]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return true,
                Err(_) => return false,
            }
        }
    }
}

pub fn digest(data: &[u8]) -> [u8; 4] {
    let mut digest = DataDigest::new();
    digest.update(data);
    digest.to_bytes()
}
