//! The export under test, its disk, and all descriptors that clients may send.

use crate::guest::Guest;
use crate::memfd::Memfd;
use block::{
    Channel, Device, DeviceError, IoFuture, KernelBacking, Limits, MemoryRegion, Request, StatusReport,
};
use drivers::mem::{MemDevice, Options};
use exports::Export;
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores};
use std::cell::Cell;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Queues of the export.
pub const QUEUES: u16 = 2;
/// Bytes of the disk.
const DISK_BYTES: u64 = 1 << 20;
/// Timeout for every operation. Generous, because machines are busy and a hang never ends.
pub const DEADLINE: Duration = Duration::from_secs(10);
/// Guest addresses of the second queue's memory start here.
const SECOND_BASE: u64 = 1 << 40;
/// Largest number of io_urings: each of four threads has one and keeps 16 for events, and the
/// queues use some.
const MOST_RINGS: usize = 4 * 17 + 2 * QUEUES as usize;
/// Number of inputs between two checks of the process's memory map, and the number of lines by
/// which it may grow afterwards.
const INPUTS_PER_LOOK: u64 = 512;
const MAP_SLACK: usize = 256;

/// Descriptors of the kinds a client may send. They stay open, so that only the export's
/// descriptors change the count.
pub struct Toys {
    /// Memory for the guest of each queue.
    pub guests: [Guest; QUEUES as usize],
    /// A page of memory.
    pub small: Memfd,
    /// A file larger than the machine's memory.
    pub sparse: OwnedFd,
    /// Kick, call and error of each queue.
    pub events: [[OwnedFd; 3]; QUEUES as usize],
    /// Descriptors that are neither memory nor events: two ends of a pipe, of a socket, a device, a
    /// folder.
    pub others: Vec<OwnedFd>,
    /// An event whose counter is full.
    pub full: OwnedFd,
}

pub struct Server {
    /// Path of the export's socket.
    pub socket: PathBuf,
    /// The running export; the operator of the test moves its queues.
    pub export: VhostUserBlk,
    /// Descriptors for clients.
    pub toys: Toys,
    fds: usize,
    mappings: usize,
    inputs: u64,
    map_lines: usize,
    _cores: Cores,
    _dir: OwnedFd,
}

impl Server {
    /// Starts the export, on a socket in the folder for temporary files.
    pub fn start() -> Server {
        // Through a descriptor, because the path of a socket must be short.
        let path = std::env::temp_dir().join(format!("fuzz-messages.{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for the socket");
        let dir = OwnedFd::from(std::fs::File::open(&path).expect("the folder was just made"));
        let socket = PathBuf::from(format!("/proc/self/fd/{}/export", dir.as_raw_fd()));
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).expect("two cores");
        let disk = Arc::new(Disk(MemDevice::new(&Options::new(DISK_BYTES)).expect("a memory disk")));
        let config = Config { num_queues: QUEUES, serial: "fuzz".into(), ..Config::new(&socket) };
        let export = VhostUserBlk::start(disk, cores.all(), config).expect("an export");
        let mut server = Server {
            socket,
            export,
            toys: Toys::new(),
            fds: 0,
            mappings: 0,
            inputs: 0,
            map_lines: 0,
            _cores: cores,
            _dir: dir,
        };
        super::behaved::check(&mut server);
        server.wait("the first client to be gone", |server| !server.export.stats().is_connected());
        (server.fds, server.mappings) = (open_fds(), crate::guard::live_mappings());
        server
    }

    /// Connects to the export.
    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).expect("the export listens")
    }

    /// Asserts that the process has as many descriptors and mappings as before the input.
    pub fn check_nothing_left(&mut self) {
        self.wait("the client to be gone", |server| !server.export.stats().is_connected());
        let (fds, mappings) = (self.fds, self.mappings);
        let is_same = |_: &Server| open_fds() == fds && crate::guard::live_mappings() == mappings;
        let start = Instant::now();
        while !is_same(self) {
            let now = (open_fds(), crate::guard::live_mappings());
            assert!(
                start.elapsed() < DEADLINE,
                "descriptors and mappings: {now:?}, were {fds} and {mappings}"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
        self.inputs += 1;
        if self.inputs.is_multiple_of(INPUTS_PER_LOOK) {
            let lines = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count());
            let first = if self.map_lines == 0 { lines } else { self.map_lines };
            assert!(lines <= first + MAP_SLACK, "{lines} mappings, {first} after {INPUTS_PER_LOOK} inputs");
            self.map_lines = first;
        }
    }

    fn wait(&self, what: &str, is_done: impl Fn(&Server) -> bool) {
        let start = Instant::now();
        while !is_done(self) {
            assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Number of open descriptors without rings: each thread keeps some for the events of later
/// clients.
///
/// # Panics
/// When the process has more rings than its threads may keep.
fn open_fds() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("this process").flatten();
    let is_ring =
        |path: &Path| std::fs::read_link(path).is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]");
    let (rings, others): (Vec<_>, Vec<_>) = files.map(|file| file.path()).partition(|path| is_ring(path));
    assert!(rings.len() <= MOST_RINGS, "{} rings", rings.len());
    others.len()
}

impl Toys {
    fn new() -> Toys {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let open = |path| OwnedFd::from(std::fs::File::open(path).expect("it is there on every Linux"));
        let others =
            vec![reader.into(), writer.into(), one.into(), other.into(), open("/dev/zero"), open("/proc")];
        // SAFETY: a fresh descriptor, of a file that is only extended.
        let sparse = unsafe {
            let fd = OwnedFd::from_raw_fd(libc::memfd_create(c"sparse".as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(fd.as_raw_fd(), 1 << 36), 0);
            fd
        };
        Toys {
            guests: [Guest::new(0), Guest::new(SECOND_BASE)],
            small: Memfd::new(4096),
            sparse,
            events: std::array::from_fn(|_| std::array::from_fn(|_| eventfd(0))),
            others,
            full: eventfd(u64::MAX - 1),
        }
    }

    /// A descriptor of any kind.
    pub fn any(&self, which: u8) -> RawFd {
        let which = usize::from(which);
        let queue = which / 16 % usize::from(QUEUES);
        match which % 16 {
            0 | 1 => self.guests[queue].file().fd().as_raw_fd(),
            2 => self.small.fd().as_raw_fd(),
            3 => self.sparse.as_raw_fd(),
            4 => self.full.as_raw_fd(),
            5..8 => self.events[queue][which % 16 - 5].as_raw_fd(),
            other => self.others[other % self.others.len()].as_raw_fd(),
        }
    }
}

fn eventfd(count: u64) -> OwnedFd {
    // SAFETY: a fresh descriptor, and a write of eight live bytes.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        assert!(fd >= 0, "eventfd: {}", std::io::Error::last_os_error());
        let fd = OwnedFd::from_raw_fd(fd);
        if count > 0 {
            assert_eq!(libc::write(fd.as_raw_fd(), (&raw const count).cast(), 8), 8);
        }
        fd
    }
}

/// A memory disk that delays some requests, so that rings are taken back with requests in flight.
struct Disk(MemDevice);

/// Interval of delayed requests.
const WAIT_EVERY: u32 = 3;
/// Delay in nanoseconds: a few turns of a core.
const WAIT_NS: u64 = 30_000;

impl Device for Disk {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn limits(&self) -> Limits {
        Limits { volatile_cache: true, ..self.0.limits() }
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(DiskChannel { child: self.0.open_channel()?, requests: Cell::new(0) }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.0.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.0.unmap_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

struct DiskChannel {
    child: Rc<dyn Channel>,
    requests: Cell<u32>,
}

impl Channel for DiskChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.requests.set(self.requests.get().wrapping_add(1));
        if !self.requests.get().is_multiple_of(WAIT_EVERY) {
            return self.child.submit(req, offset);
        }
        IoFuture::new(async move {
            reactor::current().sleep(WAIT_NS).await;
            self.child.submit(req, offset).await
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}
