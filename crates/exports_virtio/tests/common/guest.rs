//! A guest with split rings written by hand: any descriptor in any place, and requests the usual
//! way.

use super::vmm::{Request, Vmm, eventfd};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio::blk::{HEADER_BYTES, Header};
use virtio::ring::{DESC_F_NEXT, DESC_F_WRITE, SplitDescriptor, SplitRing};

/// The guest's address of its memory.
pub const GUEST_BASE: u64 = 0x4000_0000;
/// The VMM's address of the guest's memory, which only the export translates.
const USER_BASE: u64 = 0x7e00_0000_0000;
/// Bytes of each ring area, and of what belongs to a queue.
const AREA: u64 = 0x4000;
const QUEUE_BYTES: u64 = 0x1_0000;

/// Protocol features the guest's VMM asks for.
pub const PROTOCOL_FEATURES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 15;

/// The configuration of a guest.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    pub queues: usize,
    pub size: u16,
    /// Features that the guest refuses.
    pub refused_features: u64,
    pub memory: u64,
}

impl Default for GuestConfig {
    fn default() -> Self {
        GuestConfig { queues: 1, size: 16, refused_features: virtio::VIRTIO_F_RING_PACKED, memory: 8 << 20 }
    }
}

/// Guest memory: a memfd that survives the connection.
pub struct QueueMemory {
    pub fd: OwnedFd,
    pub base: *mut u8,
    pub len: u64,
}

impl QueueMemory {
    pub fn new(len: u64) -> QueueMemory {
        // SAFETY: a fresh descriptor and a fresh mapping of all of it.
        unsafe {
            let fd = OwnedFd::from_raw_fd(libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(fd.as_raw_fd(), len as i64), 0);
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let base = libc::mmap(
                std::ptr::null_mut(),
                len as usize,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            );
            assert_ne!(base, libc::MAP_FAILED);
            QueueMemory { fd, base: base.cast(), len }
        }
    }

    pub fn at(&self, guest_addr: u64, len: usize) -> *mut u8 {
        let offset = guest_addr - GUEST_BASE;
        assert!(offset + len as u64 <= self.len);
        self.base.wrapping_add(offset as usize)
    }

    pub fn write(&self, guest_addr: u64, bytes: &[u8]) {
        // SAFETY: inside the mapping; the export may race, as guests' memory is.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(guest_addr, bytes.len()), bytes.len())
        };
    }

    pub fn read(&self, guest_addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.at(guest_addr, len), bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped.
        unsafe { libc::munmap(self.base.cast(), self.len as usize) };
    }
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub addr: u64,
    pub len: u32,
    pub is_writable: bool,
}

/// A request that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    pub head: u16,
    pub status: u64,
    pub data: u64,
}

pub struct Queue {
    pub ring: SplitRing,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub err: OwnedFd,
    pub next_avail: u16,
    pub next_used: u16,
    pub next_desc: u16,
}

/// A guest, its memory and its connection.
pub struct Guest {
    pub vmm: Vmm,
    pub memory: QueueMemory,
    pub queues: Vec<Queue>,
    pub features: u64,
    pub config: GuestConfig,
}

impl Guest {
    /// Connects and starts every queue.
    pub fn boot(path: &Path, config: GuestConfig) -> Guest {
        let guest = Guest::negotiate(path, config);
        guest.send_memory();
        for index in 0..guest.config.queues {
            guest.start_queue(index, 0);
        }
        guest
    }

    /// Connects and chooses features; no memory, no queues yet.
    pub fn negotiate(path: &Path, config: GuestConfig) -> Guest {
        let vmm = Vmm::connect(path);
        let features = handshake(&vmm, config.refused_features);
        let memory = QueueMemory::new(config.memory);
        let queues = (0..config.queues).map(|index| queue(&memory, index, config.size)).collect();
        Guest { vmm, memory, queues, features, config }
    }

    /// Connects again with the same memory and rings; queues are not started.
    pub fn reconnect(&mut self, path: &Path) {
        self.vmm = Vmm::connect(path);
        self.features = handshake(&self.vmm, self.config.refused_features);
        self.send_memory();
    }

    pub fn send_memory(&self) {
        let body = [1, GUEST_BASE, self.memory.len, USER_BASE, 0];
        assert!(self.vmm.send_acked(Request::SetMemTable, &body, &[self.memory.fd.as_raw_fd()]));
    }

    /// Describes and starts a queue at `base`.
    pub fn start_queue(&self, index: usize, base: u16) {
        let queue = &self.queues[index];
        self.describe_queue(index, base);
        self.vmm.send(Request::SetVringCall, &[index as u64], &[queue.call.as_raw_fd()]);
        self.vmm.send(Request::SetVringErr, &[index as u64], &[queue.err.as_raw_fd()]);
        self.vmm.send(Request::SetVringKick, &[index as u64], &[queue.kick.as_raw_fd()]);
        assert!(self.enable_queue(index, true));
    }

    pub fn describe_queue(&self, index: usize, base: u16) {
        self.vmm.send(Request::SetVringNum, &[pair(index, self.config.size.into())], &[]);
        self.vmm.send(Request::SetVringBase, &[pair(index, base.into())], &[]);
        self.send_addresses(index, None);
    }

    pub fn send_addresses(&self, index: usize, log: Option<u64>) {
        let area = |area: u64| USER_BASE + index as u64 * QUEUE_BYTES + area * AREA;
        let flags = u64::from(log.is_some());
        let body = [index as u64 | flags << 32, area(0), area(2), area(1), log.unwrap_or(0)];
        self.vmm.send(Request::SetVringAddr, &body, &[]);
    }

    pub fn used_ring_addr(&self, index: usize) -> u64 {
        GUEST_BASE + index as u64 * QUEUE_BYTES + 2 * AREA
    }

    pub fn enable_queue(&self, index: usize, enable: bool) -> bool {
        self.vmm.send_acked(Request::SetVringEnable, &[pair(index, enable.into())], &[])
    }

    /// GET_VRING_BASE.
    pub fn stop_queue(&self, index: usize) -> u32 {
        let answer = self.vmm.ask(Request::GetVringBase, &[index as u64]);
        u32::from_ne_bytes(answer[4..8].try_into().unwrap())
    }

    /// Guest address of scratch memory that belongs to request `slot` of a queue: 16 KiB each.
    pub fn scratch(&self, index: usize, slot: u16) -> u64 {
        GUEST_BASE + (1 << 20) + (index as u64 * 64 + u64::from(slot) % 64) * 0x4000
    }

    /// Puts a descriptor where a test wants it.
    pub fn set_desc(&self, index: usize, at: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.queues[index].ring.set_desc(at, SplitDescriptor { addr, len, flags, next });
    }

    /// Makes `head` available and kicks.
    pub fn offer(&mut self, index: usize, head: u16) {
        let queue = &mut self.queues[index];
        queue.ring.avail_entry(queue.next_avail).store(head, Ordering::Relaxed);
        queue.next_avail = queue.next_avail.wrapping_add(1);
        queue.ring.avail_idx().store(queue.next_avail, Ordering::SeqCst);
        self.kick(index);
    }

    pub fn kick(&self, index: usize) {
        // SAFETY: writes 8 bytes of a live value.
        unsafe { libc::write(self.queues[index].kick.as_raw_fd(), (&raw const ONE).cast(), 8) };
    }

    /// Submits a chain of buffers.
    pub fn submit_chain(&mut self, index: usize, buffers: &[Buffer]) -> u16 {
        let size = self.config.size;
        let head = self.queues[index].next_desc;
        self.queues[index].next_desc = (head + buffers.len() as u16) % size;
        for (i, buffer) in buffers.iter().enumerate() {
            let at = (head + i as u16) % size;
            let is_last = i + 1 == buffers.len();
            let flags =
                if buffer.is_writable { DESC_F_WRITE } else { 0 } | if is_last { 0 } else { DESC_F_NEXT };
            self.set_desc(index, at, buffer.addr, buffer.len, flags, (at + 1) % size);
        }
        self.offer(index, head);
        head
    }

    /// Submits a request of three buffers: header, data (none when empty), status.
    pub fn submit(&mut self, index: usize, kind: u32, sector: u64, data: Data) -> Io {
        let slot = self.queues[index].next_desc;
        let scratch = self.scratch(index, slot);
        self.memory.write(scratch, &Header { kind, ioprio: 0, sector }.to_bytes());
        self.memory.write(scratch + 64, &[0xff]);
        let data_addr = scratch + 0x1000;
        let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
        let mut buffers = vec![buffer(scratch, HEADER_BYTES as u32, false)];
        match data {
            Data::None => {}
            Data::In(len) => buffers.push(buffer(data_addr, len, true)),
            Data::Out(bytes) => {
                self.memory.write(data_addr, bytes);
                buffers.push(buffer(data_addr, bytes.len() as u32, false));
            }
        }
        buffers.push(buffer(scratch + 64, 1, true));
        let head = self.submit_chain(index, &buffers);
        Io { head, status: scratch + 64, data: data_addr }
    }

    /// The next used entry: head and bytes written.
    pub fn poll_used(&mut self, index: usize) -> Option<(u16, u32)> {
        let queue = &mut self.queues[index];
        if queue.ring.used_idx().load(Ordering::SeqCst) == queue.next_used {
            return None;
        }
        let (id, len) = queue.ring.used_entry(queue.next_used);
        queue.next_used = queue.next_used.wrapping_add(1);
        Some((id.load(Ordering::Relaxed) as u16, len.load(Ordering::Relaxed)))
    }

    /// Waits for the next used entry.
    pub fn wait_used(&mut self, index: usize) -> (u16, u32) {
        let start = Instant::now();
        loop {
            if let Some(used) = self.poll_used(index) {
                return used;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "queue {index}: nothing completes");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Runs one request to its end; its status.
    pub fn run(&mut self, index: usize, kind: u32, sector: u64, data: Data) -> (u8, Io) {
        let io = self.submit(index, kind, sector, data);
        assert_eq!(self.wait_used(index).0, io.head);
        (self.memory.read(io.status, 1)[0], io)
    }

    /// Reads from the device; the request must succeed.
    pub fn read(&mut self, index: usize, sector: u64, len: u32) -> Vec<u8> {
        let (status, io) = self.run(index, virtio::blk::VIRTIO_BLK_T_IN, sector, Data::In(len));
        assert_eq!(status, 0);
        self.memory.read(io.data, len as usize)
    }
}

/// The data of a request.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    None,
    In(u32),
    Out(&'a [u8]),
}

static ONE: u64 = 1;

/// A queue number and a 32-bit value, as many messages have them.
pub fn pair(index: usize, value: u32) -> u64 {
    index as u64 | u64::from(value) << 32
}

fn handshake(vmm: &Vmm, refused: u64) -> u64 {
    vmm.send(Request::SetOwner, &[], &[]);
    let features = vmm.ask_u64(Request::GetFeatures) & !(refused | virtio::VHOST_F_LOG_ALL);
    let protocol = vmm.ask_u64(Request::GetProtocolFeatures) & PROTOCOL_FEATURES;
    vmm.send(Request::SetProtocolFeatures, &[protocol], &[]);
    vmm.send(Request::SetFeatures, &[features], &[]);
    features
}

fn queue(memory: &QueueMemory, index: usize, size: u16) -> Queue {
    let area = |area: u64| memory.base.wrapping_add((index as u64 * QUEUE_BYTES + area * AREA) as usize);
    // SAFETY: the areas lie inside the guest's memory, which lives as long as the guest.
    let ring = unsafe { SplitRing::new(size, area(0), area(1), area(2)) };
    let (kick, call, err) = (eventfd(), eventfd(), eventfd());
    Queue { ring, kick, call, err, next_avail: 0, next_used: 0, next_desc: 0 }
}
