//! The server is killed with SIGKILL with requests in flight, repeatedly. A VMM that keeps the
//! in-flight region reconnects, and every request is completed exactly once.
//!
//! The server is this test binary itself, run again with [`SERVER`] in its environment.

mod common;

use common::{GUEST_BASE, QueueMemory, Request, SlowDevice, Vmm, eventfd, pair};
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores, PollWindow};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio::blk::{Header, VIRTIO_BLK_T_OUT};
use virtio::driver::{BlkQueue, BlkQueueConfig, Buffer, RingConfig, SharedArea};

/// Names the directory with socket and disk in the environment of a server.
const SERVER: &str = "RECONNECT_TEST_SERVER";
const USER_BASE: u64 = 0x7e00_0000_0000;
const DISK_BYTES: u64 = 1 << 20;
const RING: u16 = 32;
/// Requests kept in flight.
const DEPTH: u16 = 16;
/// Guest address of the requests' data.
const DATA: u64 = 1 << 20;
const BLOCK: u32 = 512;

#[test]
fn server_process() {
    let Some(dir) = std::env::var_os(SERVER).map(PathBuf::from) else { return };
    let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
    let cores = Cores::start(&[core]).unwrap();
    let device = Arc::new(SlowDevice::reopen(&dir.join("disk")).slow(500_000));
    let _export = VhostUserBlk::start(device, cores.all(), Config::new(dir.join("sock"))).unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(1)); // until SIGKILL
    }
}

struct Server(Child);

impl Server {
    fn start(dir: &Path) -> Server {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "server_process"])
            .env(SERVER, dir)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A VMM that outlives its back end.
struct Survivor {
    memory: QueueMemory,
    queue: BlkQueue,
    kick: OwnedFd,
    call: OwnedFd,
    features: u64,
    is_packed: bool,
    /// Answer and file of GET_INFLIGHT_FD.
    inflight: Option<(Vec<u8>, OwnedFd)>,
    vmm: Option<Vmm>,
    /// The current write of each slot: block and version.
    writes: Vec<Option<(u64, u64)>>,
    /// The last version of each block that was acknowledged or is in flight.
    versions: Vec<u64>,
    completed: u64,
}

impl Survivor {
    fn new(is_packed: bool, event_idx: bool) -> Survivor {
        let memory = QueueMemory::new(4 << 20);
        let ring = RingConfig { size: RING, packed: is_packed, event_idx };
        let config = BlkQueueConfig { ring, indirect: true, max_segments: 4 };
        let area = SharedArea { base: memory.base, guest_addr: GUEST_BASE, len: config.memory_len() };
        // SAFETY: the memory lives as long as the queue, and the part is its alone.
        let queue = unsafe { BlkQueue::new(config, area) };
        let mut features = virtio::VHOST_USER_F_PROTOCOL_FEATURES
            | virtio::VIRTIO_F_VERSION_1
            | virtio::VIRTIO_F_INDIRECT_DESC
            | virtio::blk::VIRTIO_BLK_F_FLUSH;
        for (is_on, bit) in
            [(is_packed, virtio::VIRTIO_F_RING_PACKED), (event_idx, virtio::VIRTIO_F_EVENT_IDX)]
        {
            features |= if is_on { bit } else { 0 };
        }
        Survivor {
            memory,
            queue,
            kick: eventfd(),
            call: eventfd(),
            features,
            is_packed,
            inflight: None,
            vmm: None,
            writes: vec![None; DEPTH.into()],
            versions: vec![0; (DISK_BYTES / u64::from(BLOCK)) as usize],
            completed: 0,
        }
    }

    /// Connects (again) the way QEMU does.
    fn connect(&mut self, socket: &Path) {
        let start = Instant::now();
        let stream = loop {
            match std::os::unix::net::UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let vmm = Vmm { socket: stream };
        vmm.send(Request::SetOwner, &[], &[]);
        let offered = vmm.ask_u64(Request::GetFeatures);
        assert_eq!(self.features & !offered, 0);
        vmm.send(Request::SetProtocolFeatures, &[1 | 1 << 3 | 1 << 9 | 1 << 12], &[]);
        vmm.send(Request::SetFeatures, &[self.features], &[]);
        let (description, file) = self.inflight.get_or_insert_with(|| {
            vmm.send(Request::GetInflightFd, &[0, 0, 1 | u64::from(RING) << 16], &[]);
            let (description, file) = vmm.receive(Request::GetInflightFd);
            (description, file.expect("a file comes with the answer"))
        });
        vmm.send_bytes(Request::SetInflightFd, 1, description, &[file.as_raw_fd()]);
        let memory = [1, GUEST_BASE, self.memory.len, USER_BASE, 0];
        vmm.send(Request::SetMemTable, &memory, &[self.memory.fd.as_raw_fd()]);
        vmm.send(Request::SetVringNum, &[pair(0, RING.into())], &[]);
        let layout = self.queue.ring_layout();
        // QEMU knows the used index of a split ring from the ring, and of a packed one what it knew
        // at first.
        let used_idx = self.memory.read(GUEST_BASE + layout.device as u64 + 2, 2);
        let base = match self.is_packed {
            true => 0x8000_8000,
            false => u16::from_le_bytes([used_idx[0], used_idx[1]]).into(),
        };
        vmm.send(Request::SetVringBase, &[pair(0, base)], &[]);
        let at = |offset: usize| USER_BASE + offset as u64;
        let addresses = [0, at(layout.descriptors), at(layout.device), at(layout.driver), 0];
        vmm.send(Request::SetVringAddr, &addresses, &[]);
        vmm.send(Request::SetVringCall, &[0], &[self.call.as_raw_fd()]);
        vmm.send(Request::SetVringKick, &[0], &[self.kick.as_raw_fd()]);
        assert!(vmm.send_acked(Request::SetVringEnable, &[pair(0, 1)], &[]));
        self.vmm = Some(vmm);
    }

    /// Writes the next version of a block with a free slot.
    fn submit(&mut self, slot: u16, seed: u64) {
        let blocks = self.versions.len() as u64;
        let mut block = seed % blocks;
        // Two writes to one block at once would have no order.
        while self.writes.iter().flatten().any(|&(busy, _)| busy == block) {
            block = (block + 1) % blocks;
        }
        let version = self.versions[block as usize] + 1;
        self.versions[block as usize] = version;
        self.writes[usize::from(slot)] = Some((block, version));
        let data = GUEST_BASE + DATA + u64::from(slot) * 4096;
        self.memory.write(data, &contents(block, version));
        let header = Header { kind: VIRTIO_BLK_T_OUT, ioprio: 0, sector: block };
        self.queue.push_single(slot, header, Buffer { addr: data, len: BLOCK }, false).unwrap();
    }

    fn publish(&mut self) {
        if self.queue.publish() {
            // SAFETY: writes 8 bytes of a live value.
            unsafe { libc::write(self.kick.as_raw_fd(), (&raw const ONE).cast(), 8) };
        }
    }

    /// Takes completions; which slots are free now.
    fn reap(&mut self) -> Vec<u16> {
        let mut free = Vec::new();
        // A completion that comes twice breaks the ring: its slot is not in flight.
        let count = self.queue.reap(|slot, status| {
            assert_eq!(status, 0, "slot {slot}");
            free.push(slot);
        });
        self.completed += count.unwrap() as u64;
        for &slot in &free {
            assert!(self.writes[usize::from(slot)].take().is_some());
        }
        free
    }

    /// Keeps every slot busy for a while.
    fn work(&mut self, time: Duration, seed: &mut u64) {
        let start = Instant::now();
        while start.elapsed() < time {
            for slot in self.reap() {
                *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                self.submit(slot, *seed >> 33);
            }
            self.publish();
            std::thread::yield_now();
        }
    }

    fn drain(&mut self) {
        let start = Instant::now();
        while self.writes.iter().any(Option::is_some) {
            self.reap();
            assert!(start.elapsed() < Duration::from_secs(60), "lost: {:?}", self.writes);
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

static ONE: u64 = 1;

fn contents(block: u64, version: u64) -> Vec<u8> {
    [block, version].iter().cycle().take(64).flat_map(|word| word.to_le_bytes()).collect()
}

fn survive_kills(is_packed: bool, event_idx: bool) {
    let dir = tempfile::tempdir().unwrap();
    let disk = std::fs::File::create_new(dir.path().join("disk")).unwrap();
    for block in 0..DISK_BYTES / u64::from(BLOCK) {
        disk.write_all_at(&contents(block, 0), block * u64::from(BLOCK)).unwrap();
    }
    let disk = std::fs::File::open(dir.path().join("disk")).unwrap();
    let mut survivor = Survivor::new(is_packed, event_idx);
    let mut seed = 7 + u64::from(is_packed);
    for slot in 0..DEPTH {
        survivor.submit(slot, seed + u64::from(slot) * 31);
    }
    for round in 0..12u64 {
        let server = Server::start(dir.path());
        survivor.connect(&dir.path().join("sock"));
        survivor.publish();
        survivor.work(Duration::from_micros(2_000 + 3_777 * round), &mut seed);
        drop(server);
        // Completions published before the kill count; slots are filled again while no server runs.
        for slot in survivor.reap() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            survivor.submit(slot, seed >> 33);
        }
        survivor.publish();
    }
    let _server = Server::start(dir.path());
    survivor.connect(&dir.path().join("sock"));
    survivor.drain();
    assert!(survivor.completed > 100, "only {} completed", survivor.completed);
    for (block, &version) in survivor.versions.iter().enumerate() {
        let mut bytes = vec![0; BLOCK as usize];
        disk.read_exact_at(&mut bytes, block as u64 * u64::from(BLOCK)).unwrap();
        assert_eq!(bytes, contents(block as u64, version), "block {block}");
    }
    // Now an orderly stop: the ring stops at its position, and a session without the region
    // continues there.
    let vmm = survivor.vmm.take().unwrap();
    let answer = vmm.ask(Request::GetVringBase, &[0]);
    let base = u32::from_ne_bytes(answer[4..8].try_into().unwrap());
    assert_eq!(base, survivor.queue.ring().base());
}

#[test]
fn a_split_ring_survives_the_death_of_its_server() {
    survive_kills(false, true);
}

#[test]
fn a_packed_ring_survives_the_death_of_its_server() {
    survive_kills(true, true);
}

#[test]
fn rings_without_event_index_survive_the_death_of_their_server() {
    survive_kills(false, false);
    survive_kills(true, false);
}
