//! The choice between the cores and the kernel ([`super::kernel`]) as the server of a client's
//! rings, and its changes.
//!
//! ```text
//!            attach: the disk is free        chains of a dead predecessor
//!   Kernel ◄──────────────────────── waits          are in flight
//!      │                                 ▲  ┌──────────────────────────► Recovering (on the cores)
//!      ▼                                 └──┴◄── retry, by the control thread's timer ─┘
//!   rings start at the index of their used area
//! ```
//!
//! **Takeover.** An instance of `/dev/vhost-blk` whose process was killed completes its requests,
//! publishes them and then lets the disk go. So the disk is taken first, and the position is read
//! from the guest's memory after that: the VMM's own may be older. Chains that a predecessor's
//! *cores* left in flight are in the in-flight region; the cores complete them before the kernel
//! starts. The kernel leaves none there: it completes what it has taken.

use super::kernel::{KernelPlane, Properties, RingSetup, Shared};
use super::plane::{Running, Server, WITHHELD, check, required};
use super::rings::{Addresses, Kick, Ring};
use super::session::Session;
use crate::virtio_blk::virtio_id;
use exports::{DataPlane, Error};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio::device::VirtQueue;

/// Pause between attempts to take a disk that a predecessor still holds.
const RETRY: Duration = Duration::from_millis(20);
/// Longest wait for such a disk when a VMM asks for a ring's position.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

impl Session {
    /// Takes the disk for the kernel. Returns `false` if the caller must start no ring: all wait
    /// for the disk, all have just been started after such a wait, or the cores have taken over.
    ///
    /// # Errors
    /// When the kernel must serve the rings and cannot.
    pub(super) fn attach_disk(&mut self) -> Result<bool, Error> {
        match self.try_attach() {
            Ok(true) if self.plane.is_waiting => {
                self.plane.is_waiting = false;
                self.learn_positions();
                self.resume_all().map(|()| false)
            }
            Ok(is_attached) => {
                if !is_attached && !self.plane.is_waiting {
                    let device = self.device.name();
                    tracing::warn!(export = self.name(), device, "rings wait: the disk has another holder");
                }
                self.plane.is_waiting = !is_attached;
                Ok(is_attached)
            }
            Err(reason) => self.use_cores(reason).map(|()| false),
        }
    }

    /// Reads the position of each ring that waited for the disk. Now nothing else changes it.
    fn learn_positions(&mut self) {
        for index in 0..self.rings.len() {
            let Ring { size, addresses, .. } = &self.rings[index];
            if self.serving[index].is_none()
                && *size != 0
                && addresses.is_some()
                && let Ok(ring) = VirtQueue::new(self.queue_config(index))
                && let Some(position) = ring.idle_position()
            {
                self.rings[index].base = position.into();
            }
        }
    }

    fn try_attach(&mut self) -> Result<bool, Error> {
        if self.plane.instance.is_none() {
            let disk = self.device.kernel_backing()?;
            self.plane.instance = Some(KernelPlane::open(&self.plane.opener, disk, self.config.num_queues)?);
        }
        self.plane.instance.as_mut().expect("made above").attach()
    }

    /// Starts a ring in the kernel, which has the disk. `ring` is its state as a core would see it.
    ///
    /// # Errors
    /// When the kernel must serve the rings and refuses this one.
    pub(super) fn start_in_kernel(&mut self, index: usize, ring: VirtQueue) -> Result<(), Error> {
        let position = ring.idle_position();
        // The in-flight region belongs to one queue at a time.
        drop(ring);
        match position {
            None if !self.is_packed() => self.recover(index),
            _ => match self.try_start(index, position) {
                Ok(()) => {
                    self.serving[index] = Some(Running::InKernel);
                    Ok(())
                }
                Err(reason) => self.use_cores(reason),
            },
        }
    }

    fn try_start(&mut self, index: usize, position: Option<u16>) -> Result<(), Error> {
        let Some(base) = position else {
            return Err(Error::protocol(format!("queue {index} is packed: the kernel serves split rings")));
        };
        let ring = &self.rings[index];
        let Some(Kick::Event(kick)) = &ring.kick else {
            return Err(Error::protocol(format!(
                "queue {index} has no kick event: the kernel polls no rings for so long"
            )));
        };
        let Addresses { descriptors, available, used, used_log } =
            ring.addresses.expect("a ring that wants to run has addresses");
        let log = self.log.as_ref().filter(|_| self.has(virtio::VHOST_F_LOG_ALL));
        let memory = self.memory.get();
        // The ring has been checked to lie in one region for each area.
        let host = |user_addr: u64| memory.translate_user(user_addr, 1).map(|at| at.addr() as u64);
        let (Some(descriptors), Some(available), Some(used)) =
            (host(descriptors), host(available), host(used))
        else {
            return Err(Error::protocol(format!("queue {index} lies outside memory")));
        };
        let shared = Shared {
            features: self.features & !virtio::VHOST_USER_F_PROTOCOL_FEATURES,
            memory,
            log,
            disk: self.properties(),
        };
        let setup = RingSetup {
            size: ring.size,
            base,
            descriptors,
            available,
            used,
            used_log: used_log.filter(|_| log.is_some()),
            kick,
            call: ring.call.as_ref(),
            err: ring.err.as_ref(),
        };
        let instance = self.plane.instance.as_mut().expect("the disk is attached");
        instance.apply(&shared)?;
        instance.start(index, &setup)
    }

    fn properties(&self) -> Properties {
        let space = self.config_space();
        Properties {
            capacity: self.limits().capacity,
            is_read_only: self.config.read_only || self.limits().read_only,
            is_write_through: self.is_write_through.load(Ordering::Acquire),
            max_discard_sectors: space.max_discard_sectors,
            max_write_zeroes_sectors: space.max_write_zeroes_sectors,
            id: virtio_id(&self.config.serial),
        }
    }

    /// Tells the kernel properties of the disk that have changed.
    pub(super) fn configure_kernel(&mut self) {
        if !self.serving.iter().any(|running| matches!(running, Some(Running::InKernel))) {
            return;
        }
        let properties = self.properties();
        if let Some(instance) = &mut self.plane.instance
            && let Err(error) = instance.configure(properties)
        {
            tracing::error!(export = self.name(), %error, "the kernel serves the disk with its former properties");
        }
    }

    /// Continues on the cores, because the kernel cannot serve this client.
    ///
    /// # Errors
    /// `reason`, if the kernel must.
    fn use_cores(&mut self, reason: Error) -> Result<(), Error> {
        if self.config.data_plane == DataPlane::Kernel {
            return Err(required(reason));
        }
        tracing::warn!(export = self.name(), %reason, "data-plane=auto: this process serves the client's rings");
        self.serve_by(Server::Cores)
    }

    /// Has the cores complete what a predecessor has left in flight.
    fn recover(&mut self, index: usize) -> Result<(), Error> {
        tracing::info!(export = self.name(), queue = index, "completing requests of a predecessor first");
        self.serve_by(Server::Recovering)
    }

    /// Moves every running ring to another server: one drain.
    fn serve_by(&mut self, server: Server) -> Result<(), Error> {
        self.pause_all();
        self.plane.server = server;
        if server != Server::Kernel {
            self.plane.instance = None;
            self.plane.is_waiting = false;
        }
        self.resume_all()
    }

    /// The time after which [`Session::retry`] has to be called, if it has to.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        let is_recovering =
            self.plane.server == Server::Recovering && self.serving.iter().any(Option::is_some);
        let mut rings = self.rings.iter().zip(&self.serving);
        let is_waiting =
            self.plane.is_waiting && rings.any(|(ring, running)| ring.wants_to_run() && running.is_none());
        (is_recovering || is_waiting).then_some(RETRY)
    }

    /// Tries again to serve the client in the kernel.
    ///
    /// # Errors
    /// When the kernel must serve the rings and refuses one.
    pub(super) fn retry(&mut self) -> Result<(), Error> {
        match self.plane.server {
            Server::Recovering => self.serve_by(Server::Kernel),
            Server::Kernel => self.resume_all(),
            Server::Cores => Ok(()),
        }
    }

    /// Learns the position of a ring that waits for its disk, before the VMM asks for it.
    pub(super) fn finish_waiting(&mut self, index: usize) {
        if self.serving[index].is_some() || self.rings[index].addresses.is_none() {
            return;
        }
        let start = Instant::now();
        while self.plane.is_waiting {
            match self.attach_disk() {
                Ok(_) if start.elapsed() < LONGEST_WAIT => {}
                refused => {
                    let reason = refused.err().map(|error| error.to_string()).unwrap_or_default();
                    let name = self.name();
                    tracing::error!(
                        export = name,
                        queue = index,
                        reason,
                        "position unknown: the disk is in use"
                    );
                    return;
                }
            }
            if self.plane.is_waiting {
                std::thread::sleep(RETRY);
            }
        }
    }

    /// See [`exports::Export::set_data_plane`].
    pub(super) fn set_data_plane(&mut self, wanted: DataPlane) -> Result<(), Error> {
        let is_possible = match wanted {
            DataPlane::User => Ok(false),
            _ => self.check_kernel().map(|()| true),
        };
        let is_kernel = match is_possible {
            Ok(is_kernel) => is_kernel,
            Err(_) if wanted == DataPlane::Auto => false,
            Err(reason) => return Err(required(reason)),
        };
        let before = (self.config.data_plane, self.plane.server, self.plane.may_use_kernel);
        self.config.data_plane = wanted;
        self.plane.may_use_kernel = is_kernel;
        let server = if is_kernel { Server::Kernel } else { Server::Cores };
        if server == before.1 || (is_kernel && before.1 == Server::Recovering) {
            return Ok(());
        }
        self.serve_by(server).inspect_err(|_| {
            (self.config.data_plane, _, self.plane.may_use_kernel) = before;
            if let Err(error) = self.serve_by(before.1) {
                tracing::error!(export = self.name(), %error, "rings stopped: neither data plane serves them");
            }
        })
    }

    /// Checks that the kernel can serve the device and the present client.
    fn check_kernel(&self) -> Result<(), Error> {
        if self.has(WITHHELD) {
            return Err(Error::Config(
                "the client uses packed rings, which the kernel does not serve".into(),
            ));
        }
        if self.connection.is_some() {
            return Err(Error::Config("the export has a process of its own".into()));
        }
        match &self.plane.instance {
            Some(_) => Ok(()),
            None => check(&self.device, &self.plane.opener, self.config.num_queues),
        }
    }

    /// Adds what the kernel has counted to the export's counters.
    pub(super) fn count_in_kernel(&mut self) {
        let Some(instance) = &mut self.plane.instance else { return };
        for (index, running) in self.serving.iter().enumerate() {
            if let Some(Running::InKernel) = running {
                instance.count(index, &self.stats.queues[index]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
