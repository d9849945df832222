//! A disk of this machine's own kernel: `/dev/ublkbN`.
//!
//! ```text
//!   file system, container ─► /dev/ublkb0 ─► kernel: one queue a processor
//!                                                │ io_uring commands, data copied by the kernel
//!   who calls us ── control ─► cores: ◄──────────┴─ queue 0, 2  ─► channel ─► device
//!      (Control, Claim)                           └ queue 1, 3  ─► channel ─► device
//! ```
//!
//! There is no thread of its own: starting and stopping happen on the caller's ([`control`], `device`), data on the
//! cores (`queue`). Each queue of the disk is one io_uring on the core that serves it.
//!
//! # When the server leaves
//! A server that ends in good order may leave its disk to the next one ([`Export::hand_over`]): the driver lets requests
//! wait, those in flight are completed, and the rings are closed. A disk goes to other cores in the same way, from one
//! process to itself. It takes a driver that can be asked for that (Linux 6.16); older ones lose their disks with the
//! server unless it is killed.
//!
//! # When the server dies
//! The driver keeps the disk, its requests wait, and the next server that asks for the same number takes it over
//! (`takeover`). Those that the dead server had are handed out again, so a write may be carried out twice: first by the
//! dead server, and then by its successor, before its first answer. Both write the same bytes to the same place and
//! nobody has been told that either ended, so no reader can rely on what was there between; the same holds for discard
//! and write zeroes, and a flush that is repeated covers no less. Two things must hold for that, and are others' to
//! keep: a device carries a request out by its own bytes alone (no request adds to what is there), and it cannot be
//! opened again before the last write of the dead server has ended: the lock of a file that is served lasts as long as
//! anything in the kernel uses it, so a successor that gets the lock comes after.
//!
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
mod ring;
mod serving;
mod takeover;
mod uapi;
mod users;

pub use config::{Begin, Config, MAX_IO, MAX_QUEUES, MIN_IO, Recovery};
pub use control::{Control, DeviceInfo, Features};

use crate::{Error, Export, Stats, check_cores, queue_cores};
use block::{Device, Limits};
use device::{Claim, complain};
use node::{node, open_node, try_open, wait_for_node};
use queue::QueueParts;
use reactor::CoreRef;
use serving::Serving;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uapi::feature;

/// A running export. Dropping it removes the disk, unless it was handed over: its users are asked to write what they have
/// first.
pub struct Ublk {
    device: Arc<dyn Device>,
    cores: Vec<CoreRef>,
    config: Config,
    claim: Claim,
    stats: Arc<Stats>,
    running: Mutex<Running>,
}

/// The queues of a disk on their cores.
struct Running {
    queues: Vec<Serving>,
    /// See [`Config::core_map`].
    map: Vec<usize>,
    /// They have ended, or are about to: the disk's number may be another's.
    is_ending: Arc<AtomicBool>,
}

impl Ublk {
    /// Makes a disk over `device`, or takes one over whose server died; it can be used when this returns. Waits while
    /// the kernel reads the partition table, which the cores serve: not to be called on one.
    ///
    /// # Errors
    /// When the configuration is impossible, the kernel refuses something, or the disk that is there cannot be had.
    /// Nothing of a new disk is left then, and one that was there waits as before.
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

    /// Whether the disk was there and waited for a server.
    pub fn is_recovered(&self) -> bool {
        self.claim.is_recovered
    }

    /// What the disk was made with: the kernel may have cut what was asked for.
    pub fn info(&self) -> &DeviceInfo {
        &self.claim.device
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves the disk again that was left, on the cores of `map`.
    fn resume(&self, control: &mut Control, map: &[usize]) -> Result<Running, Error> {
        let claim = Claim { is_recovered: true, ..self.claim.clone() };
        serve(control, &self.device, &self.cores, map, &self.config, &claim, &self.stats)
    }
}

/// Serves the queues of a disk, and lets its requests come.
///
/// # Errors
/// When something fails. Nothing of a new disk is left then, and one that was there waits as before.
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

/// Leaves the disk to the next server, or to ourselves.
fn leave(control: &mut Control, claim: &Claim, running: &mut Running) {
    running.is_ending.store(true, Ordering::Relaxed);
    device::quiesce_for_successor(control, claim.id());
    running.queues.drain(..).for_each(Serving::leave);
}

/// Lets every core get ready for its queues.
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
            stats: stats.queues[usize::from(index)].clone(),
            connected: connected.clone(),
            is_ending: running.is_ending.clone(),
            name: format!("ublk:{}", claim.id()),
        };
        running.queues.push(Serving::prepare(&cores[core], parts)?);
    }
    Ok(())
}

/// Lets every queue fetch. The file is theirs alone: the device's number is free when the last of them has let go.
fn fetch(control: &mut Control, queues: &[Serving], claim: &Claim) -> Result<(), Error> {
    let file = Arc::new(claim.open(control)?);
    queues.iter().try_for_each(|queue| queue.fetch(file.clone()))
}

impl Export for Ublk {
    fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The disk changes its size where the kernel can (Linux 6.16); elsewhere its users find the old one.
    fn notify_resize(&self) -> Limits {
        let (limits, before) = (self.device.limits(), self.claim.device.capacity());
        let as_before = Limits { capacity: before, ..limits.clone() };
        if self.running().is_ending.load(Ordering::Relaxed) {
            return as_before; // its number may be another's by now
        }
        if !self.claim.features.has(feature::UPDATE_SIZE) {
            if limits.capacity != before {
                let (id, now) = (self.id(), limits.capacity);
                tracing::warn!(id, before, now, "the kernel cannot change the size of a disk that is in use");
            }
            return as_before;
        }
        let updated = Control::open().and_then(|mut control| control.update_size(self.id(), limits.capacity));
        match updated {
            Ok(()) => limits,
            Err(error) => {
                tracing::warn!(%error, "a disk keeps its size");
                as_before
            }
        }
    }

    /// The kernel takes a queue's commands from one thread only, so the disk is left and taken over: a pause of some 100 ms.
    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        check_cores(cores, self.cores.len())?;
        let (id, mut running) = (self.id(), self.running());
        if running.is_ending.load(Ordering::Relaxed) {
            return Err(Error::Config(format!("ublk: /dev/ublkb{id} has ended")));
        }
        if !self.claim.can_be_left() {
            let why = "which takes Linux 6.16 and recovery=reissue";
            return Err(Error::Config(format!("ublk: /dev/ublkb{id} cannot leave its cores, {why}")));
        }
        let mut control = Control::open()?;
        leave(&mut control, &self.claim, &mut running);
        let moved = self.resume(&mut control, cores).map(|moved| *running = moved);
        if moved.is_err() {
            // As before; or else its requests wait.
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
        // Once the disk is gone, its number may be another's.
        let has_ended = running.is_ending.swap(true, Ordering::Relaxed);
        let mut control = match Control::open() {
            Ok(control) => Some(control).filter(|_| !has_ended),
            Err(error) => {
                tracing::warn!(%error, "a disk is left behind");
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
