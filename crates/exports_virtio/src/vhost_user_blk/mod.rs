//! A block device for virtual machines: vhost-user-blk.
//!
//! ```text
//!   VMM ──Unix socket──► control thread ── messages ──► core 0: virtqueue 0, 2  ─► channel ─► device
//!                        (Session, Ring)           └──► core 1: virtqueue 1, 3  ─► channel ─► device
//!   guest memory ◄────────────────────── data, in place ──────────────────────────────┘
//! ```
//!
//! The export has one control thread, which accepts one client at a time and serves its messages.
//! It keeps the state of each ring ([`rings`]). A complete ring is handed to the core that it is
//! mapped to, which serves it until the thread takes it back (`virtio_blk`). The mapping may change
//! at any time: the queue is drained, moved and restarted.
//!
//! Over a block device of this host the kernel can serve the rings instead of the cores
//! ([`DataPlane`], [`kernel`]). The session and its messages are the same.
//!
//! An error of a guest stops its ring; an error of a VMM ends its connection. Other clients are not
//! affected.
//!
//! Source of truth: the vhost-user specification (QEMU docs/interop/vhost-user.rst) and virtio 1.3,
//! 5.2.

mod config_change;
mod control;
mod data_plane;
mod descriptors;
mod features;
mod kernel;
mod plane;
mod protocol;
mod rings;
mod session;
mod socket;

pub use rings::MAX_QUEUE_SIZE;

use block::{Device, Limits};
use control::Control;
use exports::{DataPlane, Error, Export, Stats, check_cores};
use reactor::CoreRef;
use session::Session;
use socket::Endpoint;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Maximum virtqueues of one export.
pub const MAX_QUEUES: u16 = 64;

/// The side that connects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketMode {
    /// The export listens and VMMs connect.
    #[default]
    Listen,
    /// A VMM listens; the export connects, and reconnects whenever the connection ends.
    Connect,
}

/// Files that a VMM may share as memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryFiles {
    /// Files in memory: memfd, tmpfs, hugetlbfs.
    #[default]
    Ram,
    /// Any file that can be mapped. A VMM whose file system does not answer a page fault blocks the
    /// core that serves it.
    Any,
}

/// The device node through which the kernel serves rings.
pub const KERNEL_DATA_PLANE: &str = kernel::PATH;

/// Configuration of a vhost-user-blk export.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// The side that connects.
    pub mode: SocketMode,
    /// Permission bits of a socket that the export listens on.
    pub permissions: u32,
    /// Number of virtqueues, up to [`MAX_QUEUES`].
    pub num_queues: u16,
    /// Largest expected ring, up to [`MAX_QUEUE_SIZE`]: bounds the segments of a request that the
    /// guest is offered.
    pub queue_size: u16,
    /// The reply to GET_ID: at most 20 bytes.
    pub serial: String,
    /// Refuse writes even if the device accepts them.
    pub read_only: bool,
    /// Initial state of the write cache. A guest may switch it; while it is off, every write is
    /// durable before it completes.
    pub writeback: bool,
    /// Files that may hold guest memory, in-flight region and dirty log.
    pub memory: MemoryFiles,
    /// The server of the rings.
    pub data_plane: DataPlane,
    /// The core of each queue (index into the list given to [`VhostUserBlk::start`]); further
    /// queues repeat the list. Empty: every core in turn.
    pub core_map: Vec<usize>,
}

impl Config {
    /// A listening socket, one queue, cache on.
    pub fn new(socket: impl Into<PathBuf>) -> Config {
        Config {
            socket: socket.into(),
            mode: SocketMode::Listen,
            permissions: 0o600,
            num_queues: 1,
            queue_size: 256,
            serial: String::new(),
            read_only: false,
            writeback: true,
            memory: MemoryFiles::Ram,
            data_plane: DataPlane::User,
            core_map: Vec::new(),
        }
    }

    fn check(&self, cores: usize) -> Result<(), Error> {
        let fault = if !(1..=MAX_QUEUES).contains(&self.num_queues) {
            format!("{} queues: want 1 to {MAX_QUEUES}", self.num_queues)
        } else if !(4..=MAX_QUEUE_SIZE).contains(&self.queue_size) || !self.queue_size.is_power_of_two() {
            format!("queue size {}: want a power of two, 4 to {MAX_QUEUE_SIZE}", self.queue_size)
        } else if self.serial.len() > virtio::blk::ID_BYTES {
            format!("serial {:?}: want at most {} bytes", self.serial, virtio::blk::ID_BYTES)
        } else {
            return check_cores(&self.core_map, cores);
        };
        Err(Error::Config(fault))
    }
}

/// A running export. Dropping it removes the socket.
pub struct VhostUserBlk {
    session: Arc<Mutex<Session>>,
    stats: Arc<Stats>,
    control: Option<Control>,
}

impl VhostUserBlk {
    /// Starts to export `device`. Clients may connect once this returns.
    ///
    /// # Errors
    /// When the configuration is invalid, the kernel must serve the rings and cannot, or the system
    /// refuses the socket or the thread.
    pub fn start(device: Arc<dyn Device>, cores: &[CoreRef], config: Config) -> Result<VhostUserBlk, Error> {
        config.check(cores.len())?;
        let endpoint = Endpoint::open(&config)?;
        VhostUserBlk::serve(device, cores, config, endpoint, None)
    }

    /// Exports `device` to the client at the other end of `connection`, and to no other. A ring
    /// that breaks ends the connection. The socket of `config` is only its name; it is neither made
    /// nor removed.
    ///
    /// # Errors
    /// When the configuration is impossible, or a descriptor or thread is refused.
    pub fn start_connected(
        device: Arc<dyn Device>,
        cores: &[CoreRef],
        config: Config,
        connection: UnixStream,
    ) -> Result<VhostUserBlk, Error> {
        config.check(cores.len())?;
        let failed = |source| Error::System { action: "duplicate a connection", source };
        let same = connection.try_clone().map_err(failed)?;
        VhostUserBlk::serve(device, cores, config, Endpoint::Connected(Some(connection)), Some(same))
    }

    fn serve(
        device: Arc<dyn Device>,
        cores: &[CoreRef],
        config: Config,
        endpoint: Endpoint,
        connection: Option<UnixStream>,
    ) -> Result<VhostUserBlk, Error> {
        let stats = Arc::new(Stats::new(config.num_queues.into()));
        let opener = kernel::opener();
        let session = Session::new(device, cores.to_vec(), config, stats.clone(), connection, opener)?;
        let session = Arc::new(Mutex::new(session));
        let control = Control::start(session.clone(), stats.clone(), endpoint)?;
        Ok(VhostUserBlk { session, stats, control: Some(control) })
    }

    /// Moves `queue` to another core, with or without I/O in flight. Returns when it has moved.
    /// Must not be called on a core.
    ///
    /// # Errors
    /// When the queue or core does not exist, or the core cannot open the device.
    pub fn remap_queue(&self, queue: u16, core: usize) -> Result<(), Error> {
        lock(&self.session).remap(queue, core)
    }

    /// Whether the kernel serves the rings, or will serve those of the next client.
    pub fn is_in_kernel(&self) -> bool {
        lock(&self.session).plane.is_in_kernel()
    }
}

impl Export for VhostUserBlk {
    fn stats(&self) -> &Stats {
        // A session that drains its rings counts at the end of that.
        if let Ok(mut session) = self.session.try_lock() {
            session.count_in_kernel();
        }
        &self.stats
    }

    fn notify_resize(&self) -> Limits {
        lock(&self.session).notify_resize()
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        lock(&self.session).remap_all(cores)
    }

    fn set_data_plane(&self, data_plane: DataPlane) -> Result<(), Error> {
        lock(&self.session).set_data_plane(data_plane)
    }
}

impl Drop for VhostUserBlk {
    fn drop(&mut self) {
        if let Some(control) = self.control.take() {
            control.stop();
        }
    }
}

fn lock(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    session.lock().expect("the control thread does not panic")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_configuration_names_the_value() {
        let refused = |config: Config| config.check(2).expect_err("impossible").to_string();
        assert!(refused(Config { num_queues: 65, ..Config::new("s") }).contains("65 queues"));
        assert!(refused(Config { queue_size: 2048, ..Config::new("s") }).contains("2048"));
        assert!(refused(Config { core_map: vec![0, 2], ..Config::new("s") }).contains("core 2"));
        assert!(refused(Config { serial: "x".repeat(21), ..Config::new("s") }).contains("20 bytes"));
        Config::new("s").check(1).unwrap();
    }
}
