//! A client's session: negotiated features, memory, rings, and the cores that serve them.
//!
//! All methods run under the session's lock, on the control thread or on a thread that remaps a
//! queue. Nothing here is on the data path. A change to a running ring (memory, log, addresses,
//! core, data plane) always takes three steps: drain and take it back, change, restart it at its
//! position.

use super::config_change::BackendChannel;
use super::kernel::Opener;
use super::plane::{Plane, Running};
use super::rings::{Addresses, Kick, Ring};
use super::{Config, features};
use crate::virtio_blk::config::{self, Offer};
use crate::virtio_blk::memory::SharedMemory;
use crate::virtio_blk::queue::{RingParts, Serving};
use crate::virtio_blk::request::DiskConfig;
use crate::virtio_blk::signal::{Call, ErrorEvent};
use crate::virtio_blk::virtio_id;
use block::{Device, Limits};
use exports::{Error, Stats, queue_cores};
use reactor::CoreRef;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use virtio::blk::{ConfigSpace, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio::device::{QueueConfig, QueueLog, RingAreas, RingError, RingState, VirtQueue};
use virtio::dirty_log::DirtyLog;
use virtio::inflight::InflightRegion;
use virtio::memory::GuestMemory;

/// See the module.
pub(super) struct Session {
    pub(super) device: Arc<dyn Device>,
    cores: Vec<CoreRef>,
    pub(super) config: Config,
    pub(super) stats: Arc<Stats>,
    /// The one connection of an export that was given it. A broken ring ends it, because no client
    /// could set the ring up again.
    pub(super) connection: Option<Arc<UnixStream>>,
    /// The core of each queue.
    queue_cores: Vec<usize>,
    pub(super) features: u64,
    protocol_features: u64,
    pub(super) rings: Vec<Ring>,
    /// The running rings.
    pub(super) serving: Vec<Option<Running>>,
    pub(super) plane: Plane,
    pub(super) memory: SharedMemory,
    inflight: Option<Arc<InflightRegion>>,
    pub(super) log: Option<Arc<DirtyLog>>,
    backend_channel: Option<BackendChannel>,
    /// The write cache state that the guest has set.
    is_writeback: bool,
    /// Whether writes must be durable when they complete; every queue reads it.
    pub(super) is_write_through: Arc<AtomicBool>,
}

impl Session {
    /// Creates a session without a client.
    ///
    /// # Errors
    /// When the kernel must serve the rings and cannot.
    pub(super) fn new(
        device: Arc<dyn Device>,
        cores: Vec<CoreRef>,
        config: Config,
        stats: Arc<Stats>,
        connection: Option<UnixStream>,
        opener: Opener,
    ) -> Result<Session, Error> {
        let plane = Plane::choose(&device, &config, connection.is_some(), opener)?;
        let queues = usize::from(config.num_queues);
        let mut session = Session {
            queue_cores: queue_cores(&config.core_map, config.num_queues, cores.len()),
            is_writeback: config.writeback,
            memory: SharedMemory::new(device.clone()),
            device,
            cores,
            config,
            stats,
            connection: connection.map(Arc::new),
            features: 0,
            protocol_features: 0,
            rings: (0..queues).map(|_| Ring::default()).collect(),
            serving: (0..queues).map(|_| None).collect(),
            plane,
            inflight: None,
            log: None,
            backend_channel: None,
            is_write_through: Arc::new(AtomicBool::new(true)),
        };
        session.update_write_through();
        Ok(session)
    }

    /// The export's name in logs: its socket.
    pub(super) fn name(&self) -> String {
        self.config.socket.display().to_string()
    }

    /// Ends the session: drains the rings and releases the memory. The next client starts from
    /// scratch.
    pub(super) fn end(&mut self) {
        // The in-flight region stays as it is: a client that reconnects with it continues from
        // there.
        self.pause_all();
        self.plane.end_client();
        self.rings.fill_with(Ring::default);
        self.memory.replace(GuestMemory::default()).unwrap_or_else(|error| {
            tracing::error!(export = self.name(), %error, "cannot unregister guest memory from the device");
        });
        self.inflight = None;
        self.log = None;
        self.backend_channel = None;
        self.features = 0;
        self.protocol_features = 0;
        self.is_writeback = self.config.writeback;
        self.update_write_through();
    }

    /// RESET_OWNER and RESET_DEVICE: resets every ring to its initial state.
    pub(super) fn reset_rings(&mut self) {
        for index in 0..self.rings.len() {
            self.stop_at(index);
            self.rings[index] = Ring::default();
        }
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn limits(&self) -> Limits {
        self.device.limits()
    }

    fn offer(&self) -> Offer {
        let Config { num_queues, queue_size, read_only, .. } = self.config;
        Offer { num_queues, queue_size, read_only }
    }

    pub(super) fn config_space(&self) -> ConfigSpace {
        config::space(self.offer(), &self.limits(), self.is_writeback)
    }

    pub(super) fn offered_features(&self) -> u64 {
        let features = features::TRANSPORT_FEATURES | config::features(self.offer(), &self.limits());
        features & !self.plane.withheld_features()
    }

    /// SET_FEATURES. While a ring runs, only logging may change.
    pub(super) fn set_features(&mut self, features: u64) -> Result<(), Error> {
        let unknown = features & !self.offered_features();
        if unknown != 0 {
            return Err(Error::protocol(format!("features {unknown:#x} were not offered")));
        }
        let change = features ^ self.features;
        if change & !virtio::VHOST_F_LOG_ALL != 0 && self.serving.iter().any(Option::is_some) {
            return Err(Error::protocol(format!("features {change:#x} changed while a ring runs")));
        }
        if change != 0 {
            self.pause_all();
        }
        self.features = features;
        if features & virtio::VHOST_USER_F_PROTOCOL_FEATURES == 0 {
            self.rings.iter_mut().for_each(|ring| ring.is_enabled = true);
        }
        self.update_write_through();
        self.resume_all()
    }

    pub(super) fn set_protocol_features(&mut self, features: u64) -> Result<(), Error> {
        let unknown = features & !features::protocol_features().bits();
        if unknown != 0 {
            return Err(Error::protocol(format!("protocol features {unknown:#x} were not offered")));
        }
        self.protocol_features = features;
        Ok(())
    }

    pub(super) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub(super) fn is_packed(&self) -> bool {
        self.has(virtio::VIRTIO_F_RING_PACKED)
    }

    pub(super) fn ring(&mut self, index: u32) -> Result<&mut Ring, Error> {
        let count = self.rings.len();
        self.rings.get_mut(index as usize).ok_or_else(|| {
            Error::protocol(format!("queue {index} does not exist: the export has {count} queues"))
        })
    }

    /// Changes a ring's state, then starts, restarts or stops it accordingly.
    pub(super) fn change_ring(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Ring) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.ring(index)?;
        let index = index as usize;
        self.take_back(index);
        change(&mut self.rings[index])?;
        self.settle(index)
    }

    /// SET_VRING_CALL. VMMs often change it on a running ring to mask interrupts, so the ring is
    /// not drained.
    pub(super) fn set_call(
        &mut self,
        index: u32,
        call: Option<Arc<std::os::fd::OwnedFd>>,
    ) -> Result<(), Error> {
        self.ring(index)?.call = call.clone();
        match &self.serving[index as usize] {
            Some(Running::OnCore(serving)) => serving.set_call(call.map(Call::Event)),
            Some(Running::InKernel) => self.plane.set_call(index as usize, call.as_ref()),
            None => Ok(()),
        }
    }

    /// GET_VRING_BASE: stops the ring. Returns its position.
    pub(super) fn stop_ring(&mut self, index: u32) -> Result<u32, Error> {
        self.ring(index)?;
        self.stop_at(index as usize);
        Ok(self.rings[index as usize].base)
    }

    fn stop_at(&mut self, index: usize) {
        self.finish_waiting(index);
        self.take_back(index);
        self.rings[index].stop();
        // No request is in flight and the VMM knows the position, so it may restart the ring at
        // another one.
        if let Some(mut part) = self.inflight.as_ref().and_then(|region| region.queue(index as u16)) {
            part.reset();
        }
    }

    /// SET_CONFIG: the guest switches the write cache, the only writable field.
    pub(super) fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let [value] = bytes else {
            return Err(Error::protocol(format!(
                "{} bytes of configuration written at {offset}",
                bytes.len()
            )));
        };
        if offset as usize != ConfigSpace::WRITEBACK_OFFSET {
            return Err(Error::protocol(format!("configuration written at {offset}, which is read-only")));
        }
        self.is_writeback = *value != 0;
        self.update_write_through();
        Ok(())
    }

    /// Virtio 1.3, 5.2.6.2: the cache may be used if the driver can flush it and has not switched
    /// it off.
    fn update_write_through(&mut self) {
        let may_cache = self.has(VIRTIO_BLK_F_FLUSH)
            && if self.has(VIRTIO_BLK_F_CONFIG_WCE) { self.is_writeback } else { true };
        self.is_write_through.store(!may_cache, Ordering::Release);
        self.configure_kernel();
    }

    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        self.memory.get()
    }

    /// Pauses the rings and restarts them in the new memory.
    pub(super) fn change_memory(&mut self, memory: GuestMemory) -> Result<(), Error> {
        self.pause_all();
        self.memory.replace(memory)?;
        self.resume_all()
    }

    /// SET_INFLIGHT_FD: takes effect with the next start of each ring.
    pub(super) fn set_inflight(&mut self, region: InflightRegion) -> Result<(), Error> {
        self.pause_all();
        self.inflight = Some(Arc::new(region));
        self.resume_all()
    }

    /// SET_LOG_BASE.
    pub(super) fn set_log(&mut self, log: DirtyLog) -> Result<(), Error> {
        self.pause_all();
        self.log = Some(Arc::new(log));
        self.resume_all()
    }

    pub(super) fn set_backend_channel(&mut self, channel: BackendChannel) {
        self.backend_channel = Some(channel);
    }

    /// Notifies the client that the configuration space has changed. Returns the limits that the
    /// client will see.
    pub(super) fn notify_resize(&mut self) -> Limits {
        self.configure_kernel();
        let is_negotiated = self.protocol_features & Protocol::BACKEND_REQ.bits() != 0;
        if let Some(channel) = self.backend_channel.as_ref().filter(|_| is_negotiated)
            && let Err(error) = channel.notify_config_change()
        {
            tracing::warn!(export = self.name(), %error, "client not notified of the device's new size");
        }
        self.limits()
    }

    /// Moves a queue to another core.
    pub(super) fn remap(&mut self, queue: u16, core: usize) -> Result<(), Error> {
        let index = usize::from(queue);
        if index >= self.rings.len() || core >= self.cores.len() {
            let (queues, cores) = (self.rings.len(), self.cores.len());
            let text =
                format!("queue {queue} to core {core}: the export has {queues} queues and {cores} cores");
            return Err(Error::Config(text));
        }
        let before = std::mem::replace(&mut self.queue_cores[index], core);
        self.take_back(index);
        let moved = self.settle(index);
        if moved.is_err() {
            self.queue_cores[index] = before;
            self.settle(index)?;
        }
        moved
    }

    /// Distributes the queues over these cores in turn; empty: over all.
    pub(super) fn remap_all(&mut self, map: &[usize]) -> Result<(), Error> {
        exports::check_cores(map, self.cores.len())?;
        let queue_cores = exports::queue_cores(map, self.rings.len() as u16, self.cores.len());
        for (queue, core) in (0..).zip(queue_cores) {
            if self.queue_cores[usize::from(queue)] != core {
                self.remap(queue, core)?;
            }
        }
        Ok(())
    }

    /// Takes back every running ring, drained.
    pub(super) fn pause_all(&mut self) {
        (0..self.rings.len()).for_each(|index| self.take_back(index));
    }

    /// Restarts every ring that should run, including those that waited for memory.
    pub(super) fn resume_all(&mut self) -> Result<(), Error> {
        (0..self.rings.len()).try_for_each(|index| self.settle(index))
    }

    /// Takes a ring back from its server, drained. It keeps its position.
    fn take_back(&mut self, index: usize) {
        let Some(running) = self.serving[index].take() else { return };
        let base = match running {
            Running::OnCore(serving) => serving.stop().map(RingState::to_vring_base),
            Running::InKernel => self.plane.stop(index, &self.stats.queues[index]),
        };
        match base {
            Ok(base) => self.rings[index].base = base,
            Err(error) => {
                tracing::error!(export = self.name(), queue = index, %error, "queue lost: its server did not return it")
            }
        }
    }

    /// Starts a ring that should run and does not.
    pub(super) fn settle(&mut self, index: usize) -> Result<(), Error> {
        if !self.rings[index].wants_to_run() || self.serving[index].is_some() {
            return Ok(());
        }
        // In this order: a disk that is free has no predecessor that changes the ring.
        if self.plane.is_in_kernel() && !self.attach_disk()? {
            return Ok(());
        }
        let ring = match VirtQueue::new(self.queue_config(index)) {
            Ok(ring) => ring,
            // Its memory may return soon, for example when a larger region replaces one.
            Err(error @ RingError::BadArea { .. }) => {
                tracing::warn!(export = self.name(), queue = index, %error, "ring waits for its memory");
                return Ok(());
            }
            Err(error) => return Err(Error::client(format!("queue {index} refused"), error)),
        };
        if self.plane.is_in_kernel() {
            return self.start_in_kernel(index, ring);
        }
        let core = &self.cores[self.queue_cores[index]];
        self.serving[index] = Some(Running::OnCore(Serving::start(core, self.parts(index, ring))?));
        Ok(())
    }

    pub(super) fn queue_config(&self, index: usize) -> QueueConfig {
        let ring = &self.rings[index];
        let Addresses { descriptors, available, used, used_log } =
            ring.addresses.expect("a ring that wants to run has addresses");
        let log = self.log.clone().filter(|_| self.has(virtio::VHOST_F_LOG_ALL));
        QueueConfig {
            size: ring.size,
            areas: RingAreas { descriptors, driver: available, device: used },
            state: RingState::from_vring_base(ring.base, self.is_packed()),
            event_idx: self.has(virtio::VIRTIO_F_EVENT_IDX),
            indirect: self.has(virtio::VIRTIO_F_INDIRECT_DESC),
            memory: self.memory.get().clone(),
            inflight: self.inflight.as_ref().and_then(|region| region.queue(index as u16)),
            log: log.map(|log| QueueLog { log, used_addr: used_log }),
        }
    }

    fn parts(&self, index: usize, queue: VirtQueue) -> RingParts {
        let ring = &self.rings[index];
        let kick = match &ring.kick {
            Some(Kick::Event(fd)) => Some(fd.clone()),
            Some(Kick::Polled) | None => None,
        };
        RingParts {
            ring: queue,
            size: ring.size,
            disk: DiskConfig {
                device: self.device.clone(),
                id: virtio_id(&self.config.serial),
                is_read_only: self.config.read_only,
                is_write_through: self.is_write_through.clone(),
            },
            kick,
            call: ring.call.clone().map(Call::Event),
            err: match &self.connection {
                Some(connection) => Some(ErrorEvent::Connection(connection.clone())),
                None => ring.err.clone().map(ErrorEvent::Peer),
            },
            may_have_more_memory: false,
            stats: self.stats.queues[index].clone(),
            name: self.name(),
            index,
        }
    }
}
