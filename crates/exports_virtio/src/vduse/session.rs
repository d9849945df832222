//! The state that the driver has set up, and the cores that serve it.
//!
//! All methods run under the session's lock, on the control thread or on a thread that reports a
//! new size. Nothing here is on the data path. The session reads the virtqueues when the driver is
//! ready (`DRIVER_OK`). It also reads them once at the start, since a server that died may have
//! served the device before.
//!
//! The kernel reports memory that is unmapped, not memory that is mapped: the bounce buffers of
//! `virtio_vdpa` appear with the first request. A queue that meets an unmapped address stops, and
//! restarts once the kernel has mapped it.

use super::Config;
use super::char_device::{Ask, CharDevice, InjectIrq, KernelRequest};
use super::journal::{self, Served};
use super::uapi::{VqInfo, VqState};
use crate::virtio_blk::config::{self, Offer};
use crate::virtio_blk::memory::SharedMemory;
use crate::virtio_blk::queue::{RingParts, Serving};
use crate::virtio_blk::request::DiskConfig;
use crate::virtio_blk::signal::{Call, ErrorEvent};
use crate::virtio_blk::virtio_id;
use block::{Device, Limits};
use exports::eventfd::eventfd;
use exports::{Connected, Error, Stats};
use reactor::CoreRef;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio::blk::{ConfigSpace, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio::device::{QueueConfig, RingAreas, RingError, RingState, VirtQueue};
use virtio::inflight::InflightRegion;
use virtio::memory::{GuestMemory, RegionSpec};
use virtio::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_RING_PACKED, status};

/// The offered feature bits. The kernel translates addresses, and accepts no writes to the
/// configuration.
pub(super) fn offered_features(offer: Offer, limits: &Limits) -> u64 {
    config::features(offer, limits) & !VIRTIO_BLK_F_CONFIG_WCE | VIRTIO_F_ACCESS_PLATFORM
}

/// One virtqueue.
struct Queue {
    kick: Arc<OwnedFd>,
    core: usize,
    serving: Option<Serving>,
}

/// See the module.
pub(super) struct Session {
    device: Arc<dyn Device>,
    cores: Vec<CoreRef>,
    config: Config,
    stats: Arc<Stats>,
    kernel: Arc<CharDevice>,
    /// The file that records requests in flight.
    journal: File,
    inflight: Option<Arc<InflightRegion>>,
    queues: Vec<Queue>,
    /// Signalled by a queue that met an unmapped address.
    misses: Arc<OwnedFd>,
    memory: SharedMemory,
    features: u64,
    /// The ready driver, whose virtqueues are served.
    driver: Option<Connected>,
    /// Whether writes must be durable when they complete; every queue reads it.
    is_write_through: Arc<AtomicBool>,
}

impl Session {
    /// Creates a session with the driver of `kernel`, which may run already if `is_taken_over`.
    ///
    /// # Errors
    /// When the device does not match the configuration, or the predecessor's journal cannot be
    /// used.
    pub(super) fn new(
        device: Arc<dyn Device>,
        cores: Vec<CoreRef>,
        config: Config,
        stats: Arc<Stats>,
        kernel: CharDevice,
        journal: File,
        is_taken_over: bool,
    ) -> Result<Session, Error> {
        let queue_cores = exports::queue_cores(&config.core_map, config.num_queues, cores.len());
        let failed = |action| move |source| Error::System { action, source };
        let queues =
            queue_cores.into_iter().map(|core| Ok(Queue { kick: Arc::new(eventfd()?), core, serving: None }));
        let queues = queues.collect::<std::io::Result<Vec<_>>>().map_err(failed("create an eventfd"))?;
        let misses = Arc::new(eventfd().map_err(failed("create an eventfd"))?);
        if !is_taken_over {
            for index in 0..config.num_queues {
                kernel.set_up_queue(index, config.queue_size).map_err(failed("set up a virtqueue"))?;
            }
        }
        let mut session = Session {
            memory: SharedMemory::new(device.clone()),
            device,
            cores,
            config,
            stats,
            kernel: Arc::new(kernel),
            journal,
            inflight: None,
            queues,
            misses,
            features: 0,
            driver: None,
            is_write_through: Arc::new(AtomicBool::new(true)),
        };
        match is_taken_over {
            true => session.take_over()?,
            false => session.empty_journal()?,
        }
        Ok(session)
    }

    pub(super) fn kernel(&self) -> &CharDevice {
        &self.kernel
    }

    /// The descriptor that becomes readable when a queue has met an unmapped address.
    pub(super) fn misses(&self) -> Arc<OwnedFd> {
        self.misses.clone()
    }

    /// Handles a queue that met an unmapped address or was corrupted.
    pub(super) fn look_for_memory(&mut self) -> Result<(), Error> {
        let mut count = [0u8; 8];
        // SAFETY: reads up to 8 bytes into a live local variable.
        unsafe { libc::read(self.misses.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        let known: Vec<_> =
            self.memory.get().regions().map(|region| (region.guest_addr(), region.len())).collect();
        if self.regions()?.iter().map(|region| (region.guest_addr, region.len)).eq(known) {
            tracing::warn!(export = self.config.name, "queue stopped: its memory is not mapped");
            return Ok(());
        }
        self.remap()
    }

    fn regions(&self) -> Result<Vec<RegionSpec>, Error> {
        let regions = self.kernel.regions();
        regions.map_err(|source| Error::System { action: "read the driver's memory map", source })
    }

    /// Continues after a predecessor that died or was stopped.
    fn take_over(&mut self) -> Result<(), Error> {
        if self.kernel.queue(self.config.num_queues).is_ok() {
            return Err(Error::Config(format!(
                "{}: the existing device has more queues than {}",
                self.config.name, self.config.num_queues
            )));
        }
        let mut has_queues = false;
        for index in 0..self.config.num_queues {
            let info = self.info(index)?;
            has_queues |= info.ready != 0;
            if info.num > self.config.queue_size.into() {
                let (num, most) = (info.num, self.config.queue_size);
                return Err(Error::Config(format!(
                    "{}: queue {index} has {num} entries, more than {most}",
                    self.config.name
                )));
            }
        }
        if !has_queues {
            return self.update_space();
        }
        self.read_features()?;
        let (queues, size) = (self.config.num_queues, self.config.queue_size);
        match journal::take_over(&self.journal, self.served(), queues, size, self.is_packed()) {
            Ok(inflight) => {
                self.inflight = Some(Arc::new(inflight));
                self.update_space()?;
                self.run()
            }
            // The predecessor died before it confirmed that the driver is ready: the kernel asks
            // again.
            Err(_) if self.kernel.is_asking() => Ok(()),
            Err(error) => {
                let path = self.config.journal().display().to_string();
                let what =
                    format!("a driver uses the device and {path} cannot be taken over; unbind the driver");
                Err(Error::client(what, error))
            }
        }
    }

    /// Handles a request of the kernel and answers it.
    pub(super) fn handle(&mut self, request: KernelRequest) -> Result<(), Error> {
        let mut state = VqState::default();
        let done = match request.ask {
            Ask::Status(0) => self.reset(),
            Ask::Status(bits) if bits & status::DRIVER_OK != 0 && self.driver.is_none() => self.start(),
            Ask::Status(_) => Ok(()),
            Ask::QueueState(index) => self.queue_state(index).map(|found| state = found),
            Ask::Iotlb => self.remap(),
            Ask::Unknown(kind) => Err(Error::protocol(format!("unknown kernel request {kind}"))),
        };
        let answered = self.kernel.answer(request, done.is_ok(), state);
        done.and(answered.map_err(|source| Error::System { action: "answer the kernel", source }))
    }

    /// Starts serving: the driver is ready.
    fn start(&mut self) -> Result<(), Error> {
        self.read_features()?;
        let (queues, size) = (self.config.num_queues, self.config.queue_size);
        let inflight = journal::start(&self.journal, self.served(), queues, size, self.is_packed())
            .map_err(|source| Error::System { action: "create the journal", source })?;
        self.inflight = Some(Arc::new(inflight));
        self.run()
    }

    /// Serves every virtqueue that the driver has enabled.
    fn run(&mut self) -> Result<(), Error> {
        self.driver = Some(self.stats.connect());
        tracing::info!(export = self.config.name, features = self.features, "driver ready");
        self.remap()
    }

    /// Resets the device: the driver's settings become void.
    fn reset(&mut self) -> Result<(), Error> {
        self.pause();
        if self.driver.take().is_some() {
            tracing::info!(export = self.config.name, "device reset by its driver");
        }
        self.inflight = None;
        self.empty_journal()?;
        self.memory.replace(GuestMemory::default())
    }

    /// Empties the journal: no request is in flight, and no queue runs.
    fn empty_journal(&self) -> Result<(), Error> {
        self.journal.set_len(0).map_err(|source| Error::System { action: "empty the journal", source })
    }

    /// Ends the session and completes requests in flight. A successor may serve the driver again.
    pub(super) fn end(&mut self) {
        self.pause();
        self.driver = None;
        if let Err(error) = self.memory.replace(GuestMemory::default()) {
            tracing::error!(export = self.config.name, %error, "cannot unregister the driver's memory from the device");
        }
    }

    /// Notifies the driver of the device's size.
    pub(super) fn notify_resize(&mut self) -> Limits {
        if let Err(error) = self.update_space() {
            tracing::warn!(export = self.config.name, %error, "driver not notified of the device's new size");
        }
        self.device.limits()
    }

    fn update_space(&self) -> Result<(), Error> {
        // Before the driver is notified: it may use the new range at once.
        if self.inflight.is_some() {
            let noted = journal::note(&self.journal, self.served());
            noted.map_err(|source| Error::System { action: "write the journal", source })?;
        }
        let space = space(self.config.offer(), &self.device.limits());
        let updated = self.kernel.set_config(&space);
        updated.map_err(|source| Error::System { action: "change the configuration space", source })
    }

    fn served(&self) -> Served<'_> {
        Served { name: self.device.name(), capacity: self.device.limits().capacity }
    }

    fn info(&self, index: u16) -> Result<VqInfo, Error> {
        self.kernel
            .queue(index)
            .map_err(|source| Error::System { action: "read the state of a virtqueue", source })
    }

    fn read_features(&mut self) -> Result<(), Error> {
        let features = self.kernel.features();
        self.features = features.map_err(|source| Error::System { action: "read the features", source })?;
        // Virtio 1.3, 5.2.6.2: the cache may be used if the driver can flush it.
        self.is_write_through.store(self.features & VIRTIO_BLK_F_FLUSH == 0, Ordering::Release);
        Ok(())
    }

    fn is_packed(&self) -> bool {
        self.features & VIRTIO_F_RING_PACKED != 0
    }

    /// Takes back every virtqueue, drained. It keeps its position.
    fn pause(&mut self) {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            if let Some(Err(error)) = queue.serving.take().map(Serving::stop) {
                tracing::error!(export = self.config.name, queue = index, %error, "queue lost: its core did not return it");
            }
        }
    }

    /// Restarts the virtqueues with the current address mappings.
    fn remap(&mut self) -> Result<(), Error> {
        if self.driver.is_none() {
            return Ok(());
        }
        self.pause();
        let memory = GuestMemory::map(self.regions()?)
            .map_err(|error| Error::client("memory of the driver", error))?;
        self.memory.replace(memory)?;
        (0..self.config.num_queues).try_for_each(|index| self.serve(index))
    }

    /// Distributes the virtqueues over these cores in turn; empty: over all.
    pub(super) fn serve_on(&mut self, map: &[usize]) -> Result<(), Error> {
        exports::check_cores(map, self.cores.len())?;
        self.pause();
        let queue_cores = exports::queue_cores(map, self.config.num_queues, self.cores.len());
        let before: Vec<usize> = self.queues.iter().map(|queue| queue.core).collect();
        let moved = self.serve_all(&queue_cores);
        if moved.is_err() {
            self.pause();
            self.serve_all(&before)?;
        }
        moved
    }

    /// Serves every virtqueue on its core, if the driver is ready.
    fn serve_all(&mut self, queue_cores: &[usize]) -> Result<(), Error> {
        self.queues.iter_mut().zip(queue_cores).for_each(|(queue, core)| queue.core = *core);
        match self.driver {
            Some(_) => (0..self.config.num_queues).try_for_each(|index| self.serve(index)),
            None => Ok(()),
        }
    }

    /// Serves one virtqueue, if it is ready.
    fn serve(&mut self, index: u16) -> Result<(), Error> {
        let info = self.info(index)?;
        if info.ready == 0 {
            return Ok(());
        }
        let ring = match VirtQueue::new(self.queue_config(index, &info)?) {
            Ok(ring) => ring,
            Err(error @ RingError::BadArea { .. }) => {
                tracing::warn!(export = self.config.name, queue = index, %error, "ring waits for its memory");
                return Ok(());
            }
            Err(error) => return Err(Error::client(format!("queue {index} refused"), error)),
        };
        let place = usize::from(index);
        // The kernel forgets the eventfd with every reset.
        let watched = self.kernel.set_kick(index, &self.queues[place].kick);
        watched.map_err(|source| Error::System { action: "watch a virtqueue", source })?;
        let parts = self.parts(index, ring, info.num as u16);
        self.queues[place].serving = Some(Serving::start(&self.cores[self.queues[place].core], parts)?);
        Ok(())
    }

    fn queue_config(&self, index: u16, info: &VqInfo) -> Result<QueueConfig, Error> {
        let size = u16::try_from(info.num).ok().filter(|size| *size <= self.config.queue_size);
        let size = size
            .ok_or_else(|| Error::protocol(format!("queue {index}: invalid size of {} entries", info.num)))?;
        Ok(QueueConfig {
            size,
            areas: RingAreas {
                descriptors: info.desc_addr,
                driver: info.driver_addr,
                device: info.device_addr,
            },
            state: ring_state(info.state, self.is_packed()),
            event_idx: self.features & virtio::VIRTIO_F_EVENT_IDX != 0,
            indirect: self.features & virtio::VIRTIO_F_INDIRECT_DESC != 0,
            memory: self.memory.get().clone(),
            inflight: self.inflight.as_ref().and_then(|region| region.queue(index)),
            log: None,
        })
    }

    fn parts(&self, index: u16, ring: VirtQueue, size: u16) -> RingParts {
        let place = usize::from(index);
        RingParts {
            ring,
            size,
            disk: DiskConfig {
                device: self.device.clone(),
                id: virtio_id(&self.config.serial),
                is_read_only: self.config.read_only,
                is_write_through: self.is_write_through.clone(),
            },
            kick: Some(self.queues[place].kick.clone()),
            call: Some(Call::Kernel(Box::new(InjectIrq { device: self.kernel.clone(), queue: index }))),
            err: Some(ErrorEvent::Own(self.misses.clone())),
            may_have_more_memory: true,
            stats: self.stats.queues[place].clone(),
            name: self.config.name.clone(),
            index: place,
        }
    }

    /// The position of a virtqueue.
    fn queue_state(&self, index: u32) -> Result<VqState, Error> {
        let queue = self.queues.get(index as usize);
        let queue = queue.ok_or_else(|| {
            Error::protocol(format!(
                "queue {index} does not exist: the device has {} queues",
                self.queues.len()
            ))
        })?;
        match &queue.serving {
            Some(serving) => Ok(vq_state(serving.state()?)),
            None => Ok(self.info(index as u16)?.state),
        }
    }
}

/// The configuration space as a driver reads it.
pub(super) fn space(offer: Offer, limits: &Limits) -> [u8; ConfigSpace::BYTES] {
    config::space(offer, limits, true).to_bytes()
}

/// A ring position in the kernel's format: wrap counter and index.
fn ring_state(state: VqState, is_packed: bool) -> RingState {
    let [avail_wrap, avail, used_wrap, used] = state;
    let base = match is_packed {
        false => u32::from(state[0]),
        true => u32::from(avail | avail_wrap << 15) | u32::from(used | used_wrap << 15) << 16,
    };
    RingState::from_vring_base(base, is_packed)
}

fn vq_state(state: RingState) -> VqState {
    let base = state.to_vring_base();
    let (low, high) = (base as u16, (base >> 16) as u16);
    match state {
        RingState::Split { .. } => [low, 0, 0, 0],
        RingState::Packed { .. } => [low >> 15, low & 0x7fff, high >> 15, high & 0x7fff],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_rings_survive_the_way_to_the_kernel_and_back() {
        for (state, is_packed) in [([7, 0, 0, 0], false), ([1, 300, 0, 299], true), ([0, 0x7fff, 1, 0], true)]
        {
            assert_eq!(vq_state(ring_state(state, is_packed)), state);
        }
    }

    #[test]
    fn the_kernel_takes_the_features_that_are_offered() {
        let offer = Offer { num_queues: 1, queue_size: 256, read_only: false };
        let features = offered_features(offer, &Limits::new(1 << 20));
        assert_eq!(features & VIRTIO_BLK_F_CONFIG_WCE, 0);
        assert_ne!(features & VIRTIO_F_ACCESS_PLATFORM, 0);
        assert_ne!(features & VIRTIO_BLK_F_FLUSH, 0);
    }
}
