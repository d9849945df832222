//! A disk of the local kernel: `/dev/ublkbN`.
//!
//! ```text
//!   file system, container ─► /dev/ublkb0 ─► kernel: one queue a processor
//!                                                │ io_uring commands, data copied by the kernel
//!   caller ──────── control ─► cores: ◄──────────┴─ queue 0, 2  ─► channel ─► device
//!      (Control, Claim)                           └ queue 1, 3  ─► channel ─► device
//! ```
//!
//! The export has no thread of its own. Starting and stopping run on the caller's ([`control`],
//! `device`), data on the cores (`queue`). Each queue of the disk is one io_uring on the core that
//! serves it.
//!
//! # When the server leaves
//! A server that is stopped may leave its disk to the next one ([`Export::hand_over`]). The driver
//! makes new requests wait, those in flight are completed, and the rings are closed. A disk moves
//! to other cores in the same way, from one process to itself. This requires a driver with the
//! quiesce command (Linux 6.16). With older drivers a disk ends with its server, unless the server
//! is killed.
//!
//! # When the server dies
//! The driver keeps the disk, its requests wait, and the next server with the same number takes it
//! over (`takeover`). It gets the requests of the dead server again, so a write may be executed
//! twice. The successor repeats them before its first answer. Both write the same bytes to the same
//! place, and neither write was acknowledged before. So no reader can rely on the data in between.
//! The same holds for discard and write zeroes, and a repeated flush covers no less.
//!
//! This needs two guarantees of the layers below. A device executes a request by its own bytes
//! alone: no request appends to existing data. And a device cannot be opened again before the last
//! write of the dead server has ended. The lock of a served file lasts as long as the kernel uses
//! the file, so a successor gets the lock afterwards.
//! Source of truth: `Documentation/block/ublk.rst` and `include/uapi/linux/ublk_cmd.h` of Linux.

mod config;
mod control;
mod descriptors;
mod device;
mod identity;
mod node;
mod params;
mod queue;
mod request;
mod serving;
mod takeover;
mod uapi;
mod user_copy;
mod users;

pub use config::{Begin, Config, DataPath, MAX_IO, MAX_QUEUES, MIN_IO, Recovery};
pub use control::{Control, DeviceInfo, Features};

use block::{Device, Limits};
use device::{Claim, complain};
use exports::{Error, Export, Stats, check_cores, queue_cores};
use node::{node, open_node, try_open, wait_for_node};
use queue::QueueParts;
use reactor::CoreRef;
use serving::Serving;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uapi::feature;

/// A running export. Dropping it asks the disk's users to write their cached data, then removes the
/// disk, unless it was handed over.
pub struct Ublk {
    device: Arc<dyn Device>,
    cores: Vec<CoreRef>,
    config: Config,
    claim: Claim,
    stats: Arc<Stats>,
    running: Mutex<Running>,
}

/// The running queues of a disk.
struct Running {
    queues: Vec<Serving>,
    /// See [`Config::core_map`].
    map: Vec<usize>,
    /// Whether the queues have ended or are about to: another device may then have the disk's
    /// number.
    is_ending: Arc<AtomicBool>,
}

impl Ublk {
    /// Creates a disk over `device`, or takes one over whose server died. The disk is usable once
    /// this returns. Blocks while the kernel reads the partition table, which the cores serve: must
    /// not be called on a core.
    ///
    /// # Errors
    /// When the configuration is invalid, the kernel refuses a step, or the existing disk cannot be
    /// used. Then a new disk is deleted, and an existing one waits as before.
    pub fn start(device: Arc<dyn Device>, cores: &[CoreRef], config: Config) -> Result<Ublk, Error> {
        config.check(cores.len())?;
        let mut control = Control::open()?;
        let claim = Claim::make(&mut control, &*device, &config)?;
        let stats = Arc::new(Stats::new(claim.device.queues().into()));
        let running = serve(&mut control, &device, cores, &config.core_map, &config, &claim, &stats)?;
        tracing::info!("{}", device::describe(&claim));
        let (cores, running) = (cores.to_vec(), Mutex::new(running));
        let ublk = Ublk { device, cores, config, claim, stats, running };
        if ublk.claim.is_recovered {
            ublk.notify_resize(); // it may have grown meanwhile
        }
        Ok(ublk)
    }

    /// The number of the disk, `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.claim.id()
    }

    /// Whether the disk existed and waited for a server.
    pub fn is_recovered(&self) -> bool {
        self.claim.is_recovered
    }

    /// The disk's parameters; the kernel may have reduced the configured values.
    pub fn info(&self) -> &DeviceInfo {
        &self.claim.device
    }

    /// How the data of the disk's requests reached the device at the start.
    pub fn data_path(&self) -> DataPath {
        self.claim.data_path(&*self.device, &self.config)
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a disk again after leaving it, on the cores of `map`.
    fn resume(&self, control: &mut Control, map: &[usize]) -> Result<Running, Error> {
        let claim = Claim { is_recovered: true, ..self.claim.clone() };
        serve(control, &self.device, &self.cores, map, &self.config, &claim, &self.stats)
    }
}

/// Serves the queues of a disk and starts it.
///
/// # Errors
/// When a step fails. Then a new disk is deleted, and an existing one waits as before.
fn serve(
    control: &mut Control,
    device: &Arc<dyn Device>,
    cores: &[CoreRef],
    map: &[usize],
    config: &Config,
    claim: &Claim,
    stats: &Arc<Stats>,
) -> Result<Running, Error> {
    let mut running = Running { queues: Vec::new(), map: map.to_vec(), is_ending: Arc::default() };
    let started = prepare(&mut running, device, cores, config, claim, stats)
        .and_then(|()| fetch(control, &running.queues, claim))
        .and_then(|()| claim.start(control));
    let Err(error) = started else { return Ok(running) };
    running.is_ending.store(true, Ordering::Relaxed);
    let end = if claim.is_recovered { Serving::leave } else { Serving::stop };
    claim.cancel(control);
    running.queues.into_iter().for_each(end);
    claim.give_up(control);
    Err(error)
}

/// Leaves the disk to the next server, or to this one.
fn leave(control: &mut Control, claim: &Claim, running: &mut Running) {
    running.is_ending.store(true, Ordering::Relaxed);
    device::quiesce_for_successor(control, claim.id());
    running.queues.drain(..).for_each(Serving::leave);
}

/// Prepares every core for its queues.
fn prepare(
    running: &mut Running,
    device: &Arc<dyn Device>,
    cores: &[CoreRef],
    config: &Config,
    claim: &Claim,
    stats: &Arc<Stats>,
) -> Result<(), Error> {
    let connected = Arc::new(stats.connect());
    let map = queue_cores(&running.map, claim.device.queues(), cores.len());
    for (index, core) in (0..).zip(map) {
        let parts = QueueParts {
            device: device.clone(),
            is_read_only: config.read_only,
            index,
            depth: claim.device.queue_size(),
            max_io: claim.device.max_io(),
            path: claim.data_path(&**device, config),
            stats: stats.queues[usize::from(index)].clone(),
            connected: connected.clone(),
            is_ending: running.is_ending.clone(),
            name: format!("ublk:{}", claim.id()),
        };
        running.queues.push(Serving::prepare(&cores[core], parts)?);
    }
    Ok(())
}

/// Fetches the first requests of every queue. Only the queues hold the file: the device's number is
/// free when the last of them has closed it.
fn fetch(control: &mut Control, queues: &[Serving], claim: &Claim) -> Result<(), Error> {
    let file = Arc::new(claim.open(control)?);
    queues.iter().try_for_each(|queue| queue.fetch(file.clone()))
}

impl Export for Ublk {
    fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Changes the size of the disk if the kernel supports it (Linux 6.16); otherwise its users
    /// keep the old size.
    fn notify_resize(&self) -> Limits {
        let (limits, before) = (self.device.limits(), self.claim.device.capacity());
        let as_before = Limits { capacity: before, ..limits.clone() };
        if self.running().is_ending.load(Ordering::Relaxed) {
            return as_before; // another device may have its number by now
        }
        if !self.claim.features.has(feature::UPDATE_SIZE) {
            if limits.capacity != before {
                let (id, now) = (self.id(), limits.capacity);
                tracing::warn!(
                    id,
                    before,
                    now,
                    "disk size unchanged: the kernel cannot resize a disk in use"
                );
            }
            return as_before;
        }
        let updated = Control::open().and_then(|mut control| control.update_size(self.id(), limits.capacity));
        match updated {
            Ok(()) => limits,
            Err(error) => {
                tracing::warn!(%error, "disk size unchanged");
                as_before
            }
        }
    }

    /// The kernel accepts a queue's commands from one thread only, so the disk is left and taken
    /// over: a pause of about 100 ms.
    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        check_cores(cores, self.cores.len())?;
        let (id, mut running) = (self.id(), self.running());
        if running.is_ending.load(Ordering::Relaxed) {
            return Err(Error::Config(format!("ublk: /dev/ublkb{id} has been removed")));
        }
        if !self.claim.can_be_left() {
            let why = "which takes Linux 6.16 and recovery=reissue";
            return Err(Error::Config(format!("ublk: /dev/ublkb{id} cannot move to other cores, {why}")));
        }
        let mut control = Control::open()?;
        leave(&mut control, &self.claim, &mut running);
        let moved = self.resume(&mut control, cores).map(|moved| *running = moved);
        if moved.is_err() {
            // Restores the previous cores; if that fails, the disk's requests wait.
            *running = self.resume(&mut control, &running.map)?;
        }
        moved
    }

    fn hand_over(&self) {
        let mut running = self.running();
        if running.is_ending.load(Ordering::Relaxed) || !self.claim.can_be_left() {
            return;
        }
        match Control::open() {
            Ok(mut control) => {
                users::flush(self.id());
                leave(&mut control, &self.claim, &mut running);
                tracing::info!("/dev/ublkb{}: waits for the next server", self.id());
            }
            Err(error) => complain(Err(error)),
        }
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        let mut running = self.running();
        // Once the disk has been removed, another device may have its number.
        let has_ended = running.is_ending.swap(true, Ordering::Relaxed);
        let mut control = match Control::open() {
            Ok(control) => Some(control).filter(|_| !has_ended),
            Err(error) => {
                tracing::warn!(%error, "disk left behind: it could not be removed");
                None
            }
        };
        if let Some(control) = &mut control {
            device::stop(control, self.claim.id());
        }
        running.queues.drain(..).for_each(Serving::stop);
        if let Some(control) = &mut control {
            complain(control.leave(self.claim.id()));
        }
    }
}
