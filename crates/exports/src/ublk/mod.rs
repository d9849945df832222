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

use crate::{Error, Export, Stats};
use block::{Device, Limits};
use device::Claim;
use node::{node, open_node, try_open, wait_for_node};
use queue::QueueParts;
use reactor::CoreRef;
use serving::Serving;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uapi::feature;

/// A running export. Dropping it removes the disk: its users are asked to write what they have first.
pub struct Ublk {
    device: Arc<dyn Device>,
    claim: Claim,
    queues: Vec<Serving>,
    stats: Arc<Stats>,
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
        let is_ending = Arc::new(AtomicBool::new(false));
        let mut queues = Vec::new();
        let started = prepare(&mut queues, &device, cores, &config, &claim, &stats, &is_ending)
            .and_then(|()| fetch(&mut control, &queues, &claim))
            .and_then(|()| claim.start(&mut control));
        if let Err(error) = started {
            is_ending.store(true, Ordering::Relaxed);
            claim.cancel(&mut control);
            queues.into_iter().for_each(Serving::stop);
            claim.give_up(&mut control);
            return Err(error);
        }
        tracing::info!("{}", device::describe(&claim));
        let ublk = Ublk { device, claim, queues, stats, is_ending };
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
}

/// Lets every core get ready for its queues.
fn prepare(
    queues: &mut Vec<Serving>,
    device: &Arc<dyn Device>,
    cores: &[CoreRef],
    config: &Config,
    claim: &Claim,
    stats: &Arc<Stats>,
    is_ending: &Arc<AtomicBool>,
) -> Result<(), Error> {
    let connected = Arc::new(stats.connect());
    let map = config.queue_cores(claim.device.queues(), cores.len());
    for (index, core) in (0..).zip(map) {
        let parts = QueueParts {
            device: device.clone(),
            is_read_only: config.read_only,
            index,
            depth: claim.device.queue_size(),
            max_io: claim.device.max_io(),
            stats: stats.queues[usize::from(index)].clone(),
            connected: connected.clone(),
            is_ending: is_ending.clone(),
            name: format!("ublk:{}", claim.id()),
        };
        queues.push(Serving::prepare(&cores[core], parts)?);
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
        if self.is_ending.load(Ordering::Relaxed) {
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
}

impl Drop for Ublk {
    fn drop(&mut self) {
        // Once the disk is gone, its number may be another's.
        let has_ended = self.is_ending.swap(true, Ordering::Relaxed);
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
        self.queues.drain(..).for_each(Serving::stop);
        if let Some(control) = &mut control {
            device::complain(control.leave(self.claim.id()));
        }
    }
}
