//! A block device for virtual machines: vhost-user-blk.
//!
//! ```text
//!   VMM ──Unix socket──► control thread ── messages ──► core 0: virtqueue 0, 2  ─► channel ─► device
//!                        (Session, Ring)           └──► core 1: virtqueue 1, 3  ─► channel ─► device
//!   guest memory ◄────────────────────── data, in place ──────────────────────────────┘
//! ```
//!
//! One control thread an export accepts one client at a time, speaks the protocol with it and keeps what it
//! said about each ring ([`rings`]); a ring that is complete is handed to the core it is mapped to, which
//! serves it until it is taken back (`virtio_blk`). The mapping changes at any time: a queue is drained, moved
//! and goes on.
//!
//! What a guest does wrong ends its ring, what a VMM does wrong ends its connection; others notice nothing.
//!
//! Source of truth: the vhost-user specification (QEMU docs/interop/vhost-user.rst) and virtio 1.3, 5.2.

mod config_change;
mod control;
mod descriptors;
mod features;
mod protocol;
mod rings;
mod session;
mod socket;

pub use rings::MAX_QUEUE_SIZE;

use crate::{Error, Export, Stats, check_cores};
use block::{Device, Limits};
use control::Control;
use reactor::CoreRef;
use session::Session;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Most virtqueues of one export.
pub const MAX_QUEUES: u16 = 64;

/// Who makes the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketMode {
    /// The export listens and VMMs connect.
    #[default]
    Listen,
    /// A VMM listens; the export connects, and connects again whenever the connection ends.
    Connect,
}

/// Which files may hold the memory that a VMM shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryFiles {
    /// Files in memory: memfd, tmpfs, hugetlbfs.
    #[default]
    Ram,
    /// Any file that can be mapped. A VMM whose file system answers no page fault stops the core that serves it.
    Any,
}

/// How an export looks to its clients and which cores serve it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// Who makes the connection.
    pub mode: SocketMode,
    /// Permission bits of a socket that the export listens on.
    pub permissions: u32,
    /// Virtqueues offered, up to [`MAX_QUEUES`].
    pub num_queues: u16,
    /// Largest ring that the guest is expected to use, up to [`MAX_QUEUE_SIZE`]: bounds the segments of a
    /// request that the guest is told of.
    pub queue_size: u16,
    /// What GET_ID answers: at most 20 bytes.
    pub serial: String,
    /// Refuse writes even where the device takes them.
    pub read_only: bool,
    /// Whether the write cache is on at first. A guest may switch it; while it is off, every write is made
    /// durable before it completes.
    pub writeback: bool,
    /// Which files may hold guest memory, in-flight region and dirty log.
    pub memory: MemoryFiles,
    /// The core (index into the list given to [`VhostUserBlk::start`]) that serves each queue; queues beyond
    /// the end start over. Empty: every core in turn.
    pub core_map: Vec<usize>,
}

impl Config {
    /// One queue on a socket that is listened on, cache on.
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
    /// Starts to export `device`; clients may connect when this returns.
    ///
    /// # Errors
    /// When the configuration is impossible, or socket or thread are refused.
    pub fn start(device: Arc<dyn Device>, cores: &[CoreRef], config: Config) -> Result<VhostUserBlk, Error> {
        config.check(cores.len())?;
        let stats = Arc::new(Stats::new(config.num_queues.into()));
        let session = Session::new(device, cores.to_vec(), config.clone(), stats.clone());
        let session = Arc::new(Mutex::new(session));
        let control = Control::start(session.clone(), stats.clone(), &config)?;
        Ok(VhostUserBlk { session, stats, control: Some(control) })
    }

    /// Serves `queue` on another core from now on, with I/O running or not. Returns when it has moved; not to be
    /// called on a core.
    ///
    /// # Errors
    /// When there is no such queue or core, or the core cannot open the device.
    pub fn remap_queue(&self, queue: u16, core: usize) -> Result<(), Error> {
        lock(&self.session).remap(queue, core)
    }
}

impl Export for VhostUserBlk {
    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn notify_resize(&self) -> Limits {
        lock(&self.session).notify_resize()
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        lock(&self.session).remap_all(cores)
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
