//! A virtual machine monitor and its guest, as a virtio-fs device sees them: a front end of
//! vhost-user, memory, and split virtqueues (virtio 1.2 section 2.7).

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Limit of every wait.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Descriptors of a virtqueue.
pub const QUEUE_SIZE: u16 = 16;
/// Most virtqueues of a monitor.
const MAX_QUEUES: u64 = 256;
/// Memory of the guest, in bytes. Addresses from here on are nowhere.
pub const MEMORY: u64 = 32 << 20;
/// Memory of a virtqueue: its rings, and from [`BUFFERS`] on a buffer for each descriptor.
const QUEUE_MEMORY: u64 = 0x2_0000;
const BUFFERS: u64 = 0x4000;
/// Bytes of a buffer.
pub const BUFFER: u64 = 0x1000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Operations of FUSE (`include/uapi/linux/fuse.h`).
pub const LOOKUP: u32 = 1;
pub const FORGET: u32 = 2;
pub const READ: u32 = 15;
pub const WRITE_FILE: u32 = 16;
pub const INIT: u32 = 26;
pub const CREATE: u32 = 35;
pub const DESTROY: u32 = 38;

/// A descriptor, virtio 1.2 section 2.7.5.
pub type Descriptor = (u64, u32, u16, u16);

/// A guest with its monitor.
pub struct Guest {
    pub frontend: Frontend,
    memory: GuestMemoryMmap,
    queues: Vec<Queue>,
    unique: u64,
}

#[derive(Default)]
struct Queue {
    kick: Option<EventFd>,
    available: u16,
    used: u16,
}

impl Guest {
    /// A guest of the device at the other end, with `queues` virtqueues, which run.
    pub fn connect(stream: UnixStream, queues: usize) -> Guest {
        let mut guest = Guest::connect_unchecked(stream);
        guest.queues.resize_with(queues, Queue::default);
        (0..queues).for_each(|queue| guest.start(queue));
        guest
    }

    /// A guest without virtqueues, whose monitor takes every number for a virtqueue's.
    pub fn connect_unchecked(stream: UnixStream) -> Guest {
        let file = tempfile::tempfile().unwrap();
        file.set_len(MEMORY).unwrap();
        let range = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file, 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let mut frontend = Frontend::from_stream(stream, MAX_QUEUES);
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        frontend.set_features(features).unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::MQ));
        // An acknowledgment of each message: errors are seen.
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let region = memory.iter().next().unwrap();
        let info = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        frontend.set_mem_table(&[info]).unwrap();
        Guest { frontend, memory, queues: Vec::new(), unique: 0 }
    }

    fn start(&mut self, queue: usize) {
        let kick = EventFd::new(0).unwrap();
        self.try_start(queue, &kick).unwrap();
        self.queues[queue].kick = Some(kick);
    }

    /// Starts a virtqueue with an empty ring.
    pub fn try_start(&self, queue: usize, kick: &EventFd) -> vhost::Result<()> {
        let host = self.memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let base = host + queue as u64 * QUEUE_MEMORY;
        let config = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: base,
            used_ring_addr: base + USED,
            avail_ring_addr: base + AVAIL,
            log_addr: None,
        };
        let mut frontend = self.frontend.clone();
        frontend.set_vring_num(queue, QUEUE_SIZE)?;
        frontend.set_vring_base(queue, 0)?;
        frontend.set_vring_addr(queue, &config)?;
        frontend.set_vring_call(queue, &EventFd::new(0).unwrap())?;
        frontend.set_vring_kick(queue, kick)?;
        frontend.set_vring_enable(queue, true)
    }

    /// The address of a descriptor's buffer.
    pub fn buffer(&self, queue: usize, index: u16) -> u64 {
        queue as u64 * QUEUE_MEMORY + BUFFERS + u64::from(index) * BUFFER
    }

    pub fn put(&self, bytes: &[u8], address: u64) {
        self.memory.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    /// Writes the descriptor table from its beginning.
    pub fn describe(&self, queue: usize, descriptors: &[Descriptor]) {
        for (index, (address, len, flags, next)) in descriptors.iter().enumerate() {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&len.to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&next.to_le_bytes());
            self.put(&bytes, queue as u64 * QUEUE_MEMORY + index as u64 * 16);
        }
    }

    /// Makes the chain that begins with the first descriptor available, without a notification.
    pub fn offer(&mut self, queue: usize) {
        let ring = queue as u64 * QUEUE_MEMORY + AVAIL;
        let slot = u64::from(self.queues[queue].available % QUEUE_SIZE);
        self.put(&[0, 0], ring + 4 + 2 * slot);
        self.set_available(queue, self.queues[queue].available.wrapping_add(1));
    }

    /// Sets the index of the available ring.
    pub fn set_available(&mut self, queue: usize, index: u16) {
        self.queues[queue].available = index;
        self.put(&index.to_le_bytes(), queue as u64 * QUEUE_MEMORY + AVAIL + 2);
    }

    pub fn kick(&self, queue: usize) {
        self.queues[queue].kick.as_ref().unwrap().write(1).unwrap();
    }

    /// Waits for the next used chain; returns the length that it was returned with.
    #[track_caller]
    pub fn wait(&mut self, queue: usize) -> u32 {
        let ring = queue as u64 * QUEUE_MEMORY + USED;
        let deadline = Instant::now() + PATIENCE;
        let index = || self.memory.read_obj::<u16>(GuestAddress(ring + 2)).unwrap();
        while index() == self.queues[queue].used {
            assert!(Instant::now() < deadline, "queue {queue} is not served");
            std::thread::sleep(Duration::from_millis(1));
        }
        let slot = u64::from(self.queues[queue].used % QUEUE_SIZE);
        self.queues[queue].used = self.queues[queue].used.wrapping_add(1);
        self.memory.read_obj::<u32>(GuestAddress(ring + 4 + 8 * slot + 4)).unwrap()
    }

    /// Offers a request, whose answer goes to the second buffer.
    pub fn send(&mut self, queue: usize, operation: u32, node: u64, body: &[u8]) {
        self.unique += 1;
        let request = request(operation, self.unique, node, body);
        let [first, second] = [self.buffer(queue, 0), self.buffer(queue, 1)];
        self.put(&request, first);
        self.put(&[0xff; BUFFER as usize], second);
        self.describe(queue, &[(first, request.len() as u32, NEXT, 1), (second, BUFFER as u32, WRITE, 0)]);
        self.offer(queue);
    }

    /// Waits for the answer to [`Guest::send`]: its data, or its error number.
    #[track_caller]
    pub fn answer(&mut self, queue: usize) -> Result<Vec<u8>, i32> {
        let len = self.wait(queue) as usize;
        let mut answer = vec![0; len];
        self.memory.read_slice(&mut answer, GuestAddress(self.buffer(queue, 1))).unwrap();
        assert!(len >= 16, "an answer of {len} bytes");
        let error = i32::from_le_bytes(answer[4..8].try_into().unwrap());
        assert_eq!(u32::from_le_bytes(answer[..4].try_into().unwrap()) as usize, len);
        match error {
            0 => Ok(answer.split_off(16)),
            error => Err(-error),
        }
    }

    /// Sends a request, and waits for its answer.
    #[track_caller]
    pub fn ask(&mut self, queue: usize, operation: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.send(queue, operation, node, body);
        self.kick(queue);
        self.answer(queue)
    }

    /// Begins a session.
    #[track_caller]
    pub fn init(&mut self, queue: usize) {
        let answer = self.ask(queue, INIT, 0, &init()).expect("FUSE_INIT fails");
        assert_eq!(answer[..4], 7u32.to_le_bytes());
    }
}

/// A request of FUSE.
pub fn request(operation: u32, unique: u64, node: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((40 + body.len() as u32).to_le_bytes());
    bytes.extend(operation.to_le_bytes());
    bytes.extend(unique.to_le_bytes());
    bytes.extend(node.to_le_bytes());
    bytes.extend([0; 16]); // as root
    bytes.extend(body);
    bytes
}

/// The body of FUSE_INIT: version 7.38, no features.
pub fn init() -> Vec<u8> {
    [7, 38, 0, 0].iter().flat_map(|number: &u32| number.to_le_bytes()).collect()
}

/// The body of FUSE_CREATE, for a file with this name, to be written and read.
pub fn create(name: &str) -> Vec<u8> {
    let numbers = [0o2, 0o100_644, 0, 0];
    let mut body: Vec<u8> = numbers.iter().flat_map(|number: &u32| number.to_le_bytes()).collect();
    body.extend(name.as_bytes());
    body.push(0);
    body
}

/// The body of FUSE_READ and FUSE_WRITE, at the beginning of the file.
pub fn transfer(handle: u64, len: usize) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(handle.to_le_bytes());
    body.extend(0u64.to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend([0; 20]);
    body
}
