//! A test server whose behaviour each test configures.

use super::super::vhost_user::{FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, FrontendReq, message, write_all};
use super::super::*;
use block::Data;
use drivers::shared_memory::SharedMemory;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use virtio::blk::*;
use virtio::device::{Chain, QueueConfig, RingAreas, RingState, VirtQueue};
use virtio::inflight::InflightRegion;
use virtio::memory::{GuestMemory, RegionSpec};
use virtio::{
    VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED,
    VIRTIO_F_VERSION_1,
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const MIB: usize = 1 << 20;
pub(super) const DISK: usize = 4 * MIB;

/// Behaviour of the server.
#[derive(Clone, Copy)]
pub(super) struct Character {
    pub(super) features: u64,
    pub(super) protocol: Protocol,
    pub(super) config: ConfigSpace,
    /// Answer requests.
    pub(super) serves: bool,
    /// Write invalid entries into the used ring instead of serving.
    pub(super) lies: bool,
    /// Fill the counters of all events, so that writers block.
    pub(super) fills_events: bool,
    /// Requests to take and never to answer.
    pub(super) holds: Holds,
    /// The message at which to close the connection.
    pub(super) closes_at: Option<FrontendReq>,
    /// The message to answer with other bytes than those expected.
    pub(super) babbles_at: Option<FrontendReq>,
}

/// Requests that a server takes and never answers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    Nothing,
    Flushes,
    All,
}

impl Character {
    pub(super) fn good() -> Character {
        Character {
            features: VIRTIO_F_VERSION_1
                | VHOST_USER_F_PROTOCOL_FEATURES
                | VIRTIO_F_INDIRECT_DESC
                | VIRTIO_F_EVENT_IDX
                | VIRTIO_F_RING_PACKED
                | VIRTIO_BLK_F_SEG_MAX
                | VIRTIO_BLK_F_FLUSH
                | VIRTIO_BLK_F_MQ
                | VIRTIO_BLK_F_DISCARD
                | VIRTIO_BLK_F_WRITE_ZEROES,
            protocol: Protocol::CONFIG
                | Protocol::MQ
                | Protocol::REPLY_ACK
                | Protocol::BACKEND_REQ
                | Protocol::CONFIGURE_MEM_SLOTS,
            config: ConfigSpace {
                capacity: (DISK / 512) as u64,
                seg_max: 8,
                num_queues: 2,
                max_discard_sectors: 1024,
                max_discard_seg: 1,
                max_write_zeroes_sectors: 1024,
                max_write_zeroes_seg: 1,
                write_zeroes_may_unmap: 1,
                ..ConfigSpace::default()
            },
            serves: true,
            lies: false,
            fills_events: false,
            holds: Holds::Nothing,
            closes_at: None,
            babbles_at: None,
        }
    }

    /// As [`Character::good`], and tracks requests in flight.
    pub(super) fn tracking() -> Character {
        let good = Character::good();
        Character { protocol: good.protocol | Protocol::INFLIGHT_SHMFD, ..good }
    }
}

/// Requests received, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// A read or write: kind, sector and lengths of its segments in bytes.
    Transfer(u32, u64, Vec<usize>),
    Flush,
    Range(Range),
}

/// A server on a thread of its own.
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    shared: Shared,
    /// New capacity in sectors to announce.
    pub(super) resize: Arc<Mutex<Option<u64>>>,
    thread: Option<JoinHandle<()>>,
}

/// State that outlives a turn of the server.
#[derive(Clone)]
struct Shared {
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Number of requests that were taken and not answered.
    held: Arc<AtomicUsize>,
    /// The turn that serves; a test counts it up to end a turn.
    turn: Arc<AtomicUsize>,
    resize: Arc<Mutex<Option<u64>>>,
    disk: Arc<Mutex<Vec<u8>>>,
    /// All regions that a client has offered: guest address, length, address, offset in the file.
    regions: Arc<Mutex<Vec<[u64; 4]>>>,
}

impl Shared {
    fn new() -> Shared {
        Shared {
            seen: Arc::default(),
            held: Arc::default(),
            turn: Arc::default(),
            resize: Arc::default(),
            disk: Arc::new(Mutex::new(vec![0; DISK])),
            regions: Arc::default(),
        }
    }
}

impl Server {
    pub(super) fn start(
        character: Character,
        options: &Options,
    ) -> (Server, Result<Arc<Session>, DeviceError>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (stop, shared) = (Arc::new(AtomicBool::new(false)), Shared::new());
        let state = State::new(character, theirs, shared.clone());
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || state.run(&stopped));
        let frontend = Frontend::new(ours, Duration::from_millis(options.timeout_ms)).unwrap();
        let session = Session::negotiate("test", frontend, options).and_then(|session| {
            session.start(options.queues, options.queue_size)?;
            Ok(session)
        });
        (Server { stop, resize: shared.resize.clone(), shared, thread: Some(thread) }, session)
    }

    /// Listens at `path` and serves one client after the other, each as its character says.
    pub(super) fn in_turn(path: &Path, characters: Vec<Character>) -> Server {
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, shared) = (Arc::new(AtomicBool::new(false)), Shared::new());
        let (stopped, kept) = (stop.clone(), shared.clone());
        let thread = std::thread::spawn(move || {
            for (turn, character) in characters.into_iter().enumerate() {
                let stream = loop {
                    match listener.accept() {
                        Ok((stream, _)) => break stream,
                        Err(_) if stopped.load(Ordering::Acquire) => return,
                        Err(_) => std::thread::sleep(Duration::from_millis(1)),
                    }
                };
                kept.turn.fetch_max(turn, Ordering::SeqCst);
                State::new(character, stream, kept.clone()).run(&stopped);
            }
        });
        Server { stop, resize: shared.resize.clone(), shared, thread: Some(thread) }
    }

    /// Ends the present turn: the server closes the connection.
    pub(super) fn end_turn(&self) {
        self.shared.turn.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of requests that the server has taken without answering them.
    pub(super) fn held(&self) -> usize {
        self.shared.held.load(Ordering::SeqCst)
    }

    /// Waits until the server has taken `count` requests without answering them.
    pub(super) fn wait_for_held(&self, count: usize) {
        let start = std::time::Instant::now();
        while self.held() < count {
            assert!(start.elapsed() < Duration::from_secs(60), "requests do not reach the server");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Bytes of the disk.
    pub(super) fn disk(&self, offset: usize, len: usize) -> Vec<u8> {
        self.shared.disk.lock().unwrap()[offset..offset + len].to_vec()
    }

    /// All regions that clients have offered: guest address, length, address, offset in the file.
    pub(super) fn regions(&self) -> Vec<[u64; 4]> {
        self.shared.regions.lock().unwrap().clone()
    }

    pub(super) fn good(character: Character, options: &Options) -> (Server, Arc<Session>, SharedMemory) {
        let (server, session) = Server::start(character, options);
        let (session, memory) = (session.unwrap(), SharedMemory::new(MIB).unwrap());
        session.add_region(&memory.region()).unwrap();
        (server, session, memory)
    }

    pub(super) fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }

    /// Stops the server.
    pub(super) fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// The server's state of one virtqueue.
#[derive(Default)]
struct RingInfo {
    size: u16,
    base: u32,
    areas: Option<RingAreas>,
    call: Option<std::fs::File>,
    queue: Option<VirtQueue>,
}

struct State {
    character: Character,
    stream: UnixStream,
    backend: Option<UnixStream>,
    specs: Vec<(u64, u64, u64, u64, OwnedFd)>,
    memory: Option<Arc<GuestMemory>>,
    inflight: Option<InflightRegion>,
    rings: [RingInfo; 2],
    shared: Shared,
    /// The turn of this connection.
    turn: usize,
    is_closed: bool,
}

impl State {
    fn new(character: Character, stream: UnixStream, shared: Shared) -> State {
        State {
            character,
            stream,
            backend: None,
            specs: Vec::new(),
            memory: None,
            inflight: None,
            rings: Default::default(),
            turn: shared.turn.load(Ordering::SeqCst),
            shared,
            is_closed: false,
        }
    }

    fn is_over(&self, stop: &AtomicBool) -> bool {
        self.is_closed || stop.load(Ordering::Acquire) || self.shared.turn.load(Ordering::SeqCst) != self.turn
    }

    fn run(mut self, stop: &AtomicBool) {
        self.stream.set_nonblocking(true).unwrap();
        while !self.is_over(stop) {
            let mut header = [0; 12];
            let mut fds = [-1; 8];
            match receive(&self.stream, &mut header, &mut fds) {
                Some((0, _)) => return,
                Some((12, fds)) => self.message(header, fds),
                Some((n, _)) => panic!("{n} bytes of a header"),
                None => {}
            }
            let resize = self.shared.resize.lock().unwrap().take();
            if let (Some(sectors), Some(backend)) = (resize, &self.backend) {
                self.character.config.capacity = sectors;
                write_all(backend, &message(2, FLAG_VERSION | FLAG_NEED_REPLY, &[]), &[]).unwrap();
            }
            for i in 0..self.rings.len() {
                self.serve(i);
            }
            std::thread::yield_now();
        }
    }

    fn message(&mut self, header: [u8; 12], fds: Vec<OwnedFd>) {
        let field = |i: usize| u32::from_le_bytes(header[i * 4..i * 4 + 4].try_into().unwrap());
        let (code, flags) = (field(0), field(1));
        let mut payload = vec![0; field(2) as usize];
        self.stream.set_nonblocking(false).unwrap();
        std::io::Read::read_exact(&mut &self.stream, &mut payload).unwrap();
        self.stream.set_nonblocking(true).unwrap();
        let request = FrontendReq::try_from(code).unwrap();
        if self.character.closes_at == Some(request) {
            self.is_closed = true;
            return;
        }
        if self.character.babbles_at == Some(request) {
            let bytes = message(code ^ 1, FLAG_VERSION, &[0xff; 100]);
            let _ = write_all(&self.stream, &bytes, &[]);
            return;
        }
        if request == FrontendReq::GET_INFLIGHT_FD {
            return self.create_inflight(&payload);
        }
        let reply = match request {
            FrontendReq::GET_FEATURES => Some(self.character.features.to_le_bytes().to_vec()),
            FrontendReq::GET_PROTOCOL_FEATURES => Some(self.character.protocol.bits().to_le_bytes().to_vec()),
            FrontendReq::GET_QUEUE_NUM => Some(2u64.to_le_bytes().to_vec()),
            FrontendReq::GET_MAX_MEM_SLOTS => Some(4u64.to_le_bytes().to_vec()),
            FrontendReq::GET_CONFIG if payload.len() > 72 => Some(Vec::new()),
            FrontendReq::GET_CONFIG => {
                Some([&payload[..12], &self.character.config.to_bytes()[..60]].concat())
            }
            FrontendReq::GET_VRING_BASE => Some(payload[..8].to_vec()),
            request => {
                self.set(request, &payload, fds);
                None
            }
        };
        let ack = (flags & FLAG_NEED_REPLY != 0).then(|| vec![0; 8]);
        if let Some(bytes) = reply.or(ack) {
            // The client may be gone.
            let _ = write_all(&self.stream, &message(code, FLAG_VERSION | FLAG_REPLY, &bytes), &[]);
        }
    }

    fn is_packed(&self) -> bool {
        self.character.features & VIRTIO_F_RING_PACKED != 0
    }

    fn create_inflight(&mut self, wish: &[u8]) {
        let number = |at: usize| u16::from_le_bytes([wish[at], wish[at + 1]]);
        let (queues, size) = (number(16), number(18));
        let region = InflightRegion::create(queues, size, self.is_packed()).unwrap();
        let len = InflightRegion::size(queues, size, self.is_packed());
        let answer = [&len.to_le_bytes()[..], &[0; 8], &wish[16..20], &[0; 4]].concat();
        let code = FrontendReq::GET_INFLIGHT_FD as u32;
        let bytes = message(code, FLAG_VERSION | FLAG_REPLY, &answer);
        let _ = write_all(&self.stream, &bytes, &[region.fd().as_raw_fd()]);
    }

    fn take_inflight(&mut self, given: &[u8], file: OwnedFd) {
        let number = |at: usize| u16::from_le_bytes([given[at], given[at + 1]]);
        let len = u64::from_le_bytes(given[..8].try_into().unwrap());
        let region = InflightRegion::map(file, 0, len, number(16), number(18), self.is_packed());
        self.inflight = Some(region.unwrap());
    }

    /// Handles a message without a reply of its own.
    fn set(&mut self, request: FrontendReq, payload: &[u8], mut fds: Vec<OwnedFd>) {
        let at =
            |i: usize| u64::from_le_bytes(std::array::from_fn(|b| payload.get(i + b).copied().unwrap_or(0)));
        if self.character.fills_events
            && matches!(request, FrontendReq::SET_VRING_KICK | FrontendReq::SET_VRING_CALL)
        {
            fds.iter().for_each(fill);
        }
        let index = (at(0) as u32 % 2) as usize;
        let (ring, value) = (&mut self.rings[index], (at(0) >> 32) as u32);
        match request {
            FrontendReq::SET_BACKEND_REQ_FD => self.backend = fds.pop().map(UnixStream::from),
            FrontendReq::ADD_MEM_REG => {
                self.specs.push((at(8), at(16), at(24), at(32), fds.pop().unwrap()));
                self.map();
            }
            FrontendReq::REM_MEM_REG => {
                self.specs.retain(|spec| spec.0 != at(8));
                self.map();
            }
            FrontendReq::SET_MEM_TABLE => {
                let spec = |(i, fd)| (at(8 + i * 32), at(16 + i * 32), at(24 + i * 32), at(32 + i * 32), fd);
                self.specs = fds.drain(..).enumerate().map(spec).collect();
                assert_eq!(at(0), self.specs.len() as u64);
                self.map();
            }
            FrontendReq::SET_VRING_NUM => ring.size = value as u16,
            FrontendReq::SET_VRING_BASE => ring.base = value,
            FrontendReq::SET_VRING_ADDR => {
                ring.areas = Some(RingAreas { descriptors: at(8), device: at(16), driver: at(24) });
            }
            FrontendReq::SET_VRING_CALL => ring.call = fds.pop().map(std::fs::File::from),
            FrontendReq::SET_VRING_ENABLE => {
                self.rings[index].queue = (value == 1).then(|| self.start_ring(index))
            }
            FrontendReq::SET_FEATURES => self.character.features = at(0),
            FrontendReq::SET_INFLIGHT_FD => self.take_inflight(payload, fds.pop().unwrap()),
            _ => {}
        }
    }

    fn map(&mut self) {
        let specs = self.specs.iter().map(|(guest_addr, len, user_addr, fd_offset, fd)| RegionSpec {
            guest_addr: *guest_addr,
            len: *len,
            user_addr: *user_addr,
            fd: fd.try_clone().unwrap(),
            fd_offset: *fd_offset,
        });
        let memory = Arc::new(GuestMemory::map(specs.collect()).unwrap());
        let told = self.specs.iter().map(|(guest, len, user, offset, _)| [*guest, *len, *user, *offset]);
        self.shared.regions.lock().unwrap().extend(told);
        for ring in &mut self.rings {
            if let (Some(queue), Some(areas)) = (&mut ring.queue, ring.areas) {
                queue.set_memory(memory.clone(), areas).unwrap();
            }
        }
        self.memory = Some(memory);
    }

    fn start_ring(&self, ring: usize) -> VirtQueue {
        let features = self.character.features;
        let info = &self.rings[ring];
        VirtQueue::new(QueueConfig {
            size: info.size,
            areas: info.areas.unwrap(),
            state: RingState::from_vring_base(info.base, features & VIRTIO_F_RING_PACKED != 0),
            event_idx: features & VIRTIO_F_EVENT_IDX != 0,
            indirect: features & VIRTIO_F_INDIRECT_DESC != 0,
            memory: self.memory.clone().unwrap(),
            inflight: self.inflight.as_ref().and_then(|region| region.queue(ring as u16)),
            log: None,
        })
        .unwrap()
    }

    fn serve(&mut self, ring: usize) {
        let Character { serves, lies, holds, .. } = self.character;
        let Some(queue) = self.rings[ring].queue.as_mut().filter(|_| serves || lies) else { return };
        let mut count = 0;
        loop {
            let mut chain = Chain::new();
            if !queue.pop(&mut chain).unwrap() {
                break;
            }
            count += 1;
            if lies {
                // One entry of the used ring, with an id that no chain has.
                let device = self.rings[ring].areas.unwrap().device;
                let at = self.memory.as_ref().unwrap().translate_user(device, 16).unwrap();
                // SAFETY: translated; the client reads it as another process would.
                unsafe {
                    at.add(4).cast::<u32>().write_volatile(12345);
                    at.add(2).cast::<u16>().write_volatile(1);
                }
                return;
            }
            let request = parse(&chain).unwrap();
            let is_flush = matches!(request.command, Command::Flush);
            if holds == Holds::All || (holds == Holds::Flushes && is_flush) {
                self.shared.held.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            let status = request.command.serve(&mut self.shared.disk.lock().unwrap(), &self.shared.seen);
            request.status.set(status);
            queue.push_used(&mut chain, 1);
        }
        if count > 0 && queue.publish() {
            std::io::Write::write_all(&mut self.rings[ring].call.as_ref().unwrap(), &1u64.to_ne_bytes())
                .unwrap();
        }
    }
}

/// Execution of a request.
trait Serve {
    fn serve(self, disk: &mut [u8], seen: &Mutex<Vec<Seen>>) -> u8;
}

impl Serve for Command<'_> {
    fn serve(self, disk: &mut [u8], seen: &Mutex<Vec<Seen>>) -> u8 {
        let lens = |data: &Data<'_>| data.iter().map(|s| s.len).collect();
        let mut span = |sector: u64, len: usize| {
            disk.get_mut(sector as usize * 512..sector as usize * 512 + len).map(|s| s.as_mut_ptr_range())
        };
        let what = match &self {
            Command::Read { sector, data } => Seen::Transfer(VIRTIO_BLK_T_IN, *sector, lens(data)),
            Command::Write { sector, data } => Seen::Transfer(VIRTIO_BLK_T_OUT, *sector, lens(data)),
            Command::Flush => Seen::Flush,
            Command::Discard(_) | Command::WriteZeroes(_) => Seen::Range(Range::default()),
            Command::GetId(data) => {
                data.copy_from(b"by hand\0");
                return VIRTIO_BLK_S_OK;
            }
            other => panic!("{other:?}"),
        };
        let what = match (what, self) {
            (_, Command::Discard(mut ranges) | Command::WriteZeroes(mut ranges)) => {
                Seen::Range(ranges.next().unwrap())
            }
            (what, Command::Read { sector, data }) => {
                let Some(span) = span(sector, data.len()) else { return VIRTIO_BLK_S_IOERR };
                // SAFETY: a part of the disk, borrowed for this call.
                data.copy_from(unsafe { std::slice::from_raw_parts(span.start, data.len()) });
                what
            }
            (what, Command::Write { sector, data }) => {
                let Some(span) = span(sector, data.len()) else { return VIRTIO_BLK_S_IOERR };
                // SAFETY: as above.
                data.copy_to(unsafe { std::slice::from_raw_parts_mut(span.start, data.len()) });
                what
            }
            (what, _) => what,
        };
        seen.lock().unwrap().push(what);
        VIRTIO_BLK_S_OK
    }
}

/// Fills an event's counter, so that writers block.
fn fill(event: &OwnedFd) {
    let full = u64::MAX - 1;
    // SAFETY: writes 8 bytes of a live variable, and sets flags.
    unsafe {
        assert_eq!(libc::write(event.as_raw_fd(), (&raw const full).cast(), 8), 8);
        assert_eq!(libc::fcntl(event.as_raw_fd(), libc::F_SETFL, 0), 0);
    }
}

/// Receives bytes and descriptors; `None` when nothing arrived.
fn receive(stream: &UnixStream, bytes: &mut [u8], fds: &mut [RawFd]) -> Option<(usize, Vec<OwnedFd>)> {
    let mut entry = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    // SAFETY: the entry describes `bytes`.
    let (n, count) = unsafe { stream.recv_with_fds(&mut entry, fds) }.ok()?;
    // SAFETY: descriptors that were just received are ours.
    Some((n, fds[..count].iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }).collect()))
}
