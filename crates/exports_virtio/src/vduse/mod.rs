//! A block device on the host's vDPA bus: VDUSE.
//!
//! ```text
//!   virtio_vdpa (/dev/vdX) or vhost_vdpa (QEMU, libblkio)
//!        │ vDPA bus
//!   kernel: vduse ──/dev/vduse/NAME──► control thread ── messages ──► core 0: virtqueue 0, 2 ─► channel ─► device
//!        │                              (Session)                └──► core 1: virtqueue 1, 3 ─► channel ─► device
//!        └── virtqueues and data, mapped (IOTLB) ──────────────────────┘
//! ```
//!
//! The virtqueues are those of virtio-blk, so that part is shared with vhost-user-blk
//! (`crate::virtio_blk`). This module has only the kernel's requests ([`session`]) and its
//! interface ([`char_device`], [`uapi`]).
//!
//! The kernel keeps device and virtqueues when their server dies. The next server of the same name
//! takes them over. It repeats the requests that were in flight, which a file records
//! ([`journal`]). A server that is stopped also leaves the device while it is on the bus; `vdpa dev
//! del` removes it from there.
//!
//! Source of truth: Linux, include/uapi/linux/vduse.h and Documentation/userspace-api/vduse.rst;
//! virtio 1.3, 5.2.

mod char_device;
mod control;
#[doc(hidden)] // for the fuzzer (fuzz/)
pub mod journal;
mod session;
mod uapi;

use crate::virtio_blk::config::Offer;
use block::{Device, Limits};
use control::Control;
use exports::{Error, Export, Stats, check_cores};
use reactor::CoreRef;
use session::Session;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Maximum virtqueues of one export.
pub const MAX_QUEUES: u16 = 64;
/// Largest supported ring.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Configuration of a VDUSE export.
#[derive(Clone, Debug)]
pub struct Config {
    /// The device's name: `/dev/vduse/NAME`, and the argument of `vdpa dev add`.
    pub name: String,
    /// Virtqueues, up to [`MAX_QUEUES`].
    pub num_queues: u16,
    /// Largest ring offered to the driver, up to [`MAX_QUEUE_SIZE`].
    pub queue_size: u16,
    /// The reply to GET_ID: at most 20 bytes.
    pub serial: String,
    /// Refuse writes even if the device accepts them.
    pub read_only: bool,
    /// The file that records requests in flight. It must outlive this process, but not a reboot of
    /// the host.
    pub journal: Option<PathBuf>,
    /// The core of each queue (index into the list given to [`Vduse::start`]); further queues
    /// repeat the list. Empty: every core in turn.
    pub core_map: Vec<usize>,
}

impl Config {
    /// One queue of up to 256 entries.
    pub fn new(name: impl Into<String>) -> Config {
        Config {
            name: name.into(),
            num_queues: 1,
            queue_size: 256,
            serial: String::new(),
            read_only: false,
            journal: None,
            core_map: Vec::new(),
        }
    }

    /// The path of the journal: the configured one, or one derived from the name.
    pub fn journal(&self) -> PathBuf {
        let named = || PathBuf::from(format!("/dev/shm/freestone/vduse-{}", self.name));
        self.journal.clone().unwrap_or_else(named)
    }

    fn offer(&self) -> Offer {
        Offer { num_queues: self.num_queues, queue_size: self.queue_size, read_only: self.read_only }
    }

    fn check(&self, cores: usize) -> Result<(), Error> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_name =
            !self.name.starts_with('.') && self.name.chars().all(is_plain) && self.name != "control";
        let fault = if !is_name || !(1..uapi::NAME_MAX).contains(&self.name.len()) {
            format!(
                "name {:?}: want 1 to 255 letters, digits, '-', '_' and '.', and not \"control\"",
                self.name
            )
        } else if !(1..=MAX_QUEUES).contains(&self.num_queues) {
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

/// A running export. Dropping it removes the device. A device on the bus stays, and a successor may
/// take it over.
pub struct Vduse {
    config: Config,
    device: Arc<dyn Device>,
    stats: Arc<Stats>,
    running: Option<(Control, Arc<Mutex<Session>>)>,
}

impl Vduse {
    /// Starts to export `device`. Once this returns it can be added to the bus (`vdpa dev add name
    /// NAME mgmtdev vduse`). If its driver already runs, it continues.
    ///
    /// # Errors
    /// When the configuration is invalid, the kernel has no VDUSE or refuses a step, another
    /// process serves the name, or the existing device differs.
    pub fn start(device: Arc<dyn Device>, cores: &[CoreRef], config: Config) -> Result<Vduse, Error> {
        config.check(cores.len())?;
        let failed = |action| move |source| Error::System { action, source };
        // Locked first: the owner of the file serves the device.
        let journal = journal::open(&config.journal()).map_err(failed("open the journal"))?;
        let control = char_device::Control::open().map_err(failed("open"))?;
        let (limits, offer) = (device.limits(), config.offer());
        let features = session::offered_features(offer, &limits);
        let space = session::space(offer, &limits);
        let is_taken_over = match control.create(&config.name, features, config.num_queues, &space) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => true,
            Err(source) => return Err(failed("create the device")(source)),
        };
        let stats = Arc::new(Stats::new(config.num_queues.into()));
        let started =
            char_device::CharDevice::open(&config.name).map_err(failed("open")).and_then(|kernel| {
                let (device, cores, stats) = (device.clone(), cores.to_vec(), stats.clone());
                let own = config.clone();
                let session = Session::new(device, cores, own, stats, kernel, journal, is_taken_over)?;
                let session = Arc::new(Mutex::new(session));
                let control = Control::start(session.clone(), config.name.clone())?;
                Ok((control, session))
            });
        match started {
            Ok(running) => Ok(Vduse { config, device, stats, running: Some(running) }),
            Err(error) => {
                if !is_taken_over {
                    let _ = control.destroy(&config.name);
                }
                Err(error)
            }
        }
    }
}

impl Export for Vduse {
    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn notify_resize(&self) -> Limits {
        match &self.running {
            Some((_, session)) => lock(session).notify_resize(),
            None => self.device.limits(),
        }
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        match &self.running {
            Some((_, session)) => lock(session).serve_on(cores),
            None => Ok(()),
        }
    }
}

impl Drop for Vduse {
    fn drop(&mut self) {
        let Some((control, session)) = self.running.take() else { return };
        control.stop();
        lock(&session).end();
        // The kernel removes the device only after it has been closed.
        drop(session);
        let name = &self.config.name;
        match char_device::Control::open().and_then(|control| control.destroy(name)) {
            Ok(()) => drop(std::fs::remove_file(self.config.journal())),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                tracing::info!(export = name, "device left on the bus for the next server of this name");
            }
            Err(error) => tracing::warn!(export = name, %error, "device could not be removed"),
        }
    }
}

fn lock(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    session.lock().expect("no holder panics")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_configuration_names_the_value() {
        let refused = |config: Config| config.check(2).expect_err("impossible").to_string();
        for name in ["", "a/b", "..", "control", &"x".repeat(256)] {
            assert!(refused(Config::new(name)).contains(&format!("{name:?}")), "{name}");
        }
        assert!(refused(Config { num_queues: 65, ..Config::new("s") }).contains("65 queues"));
        assert!(refused(Config { queue_size: 2048, ..Config::new("s") }).contains("2048"));
        assert!(refused(Config { serial: "x".repeat(21), ..Config::new("s") }).contains("20 bytes"));
        Config::new("vm1.disk-0_a").check(1).unwrap();
    }
}
