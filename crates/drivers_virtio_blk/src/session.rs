//! A negotiated session with a device: features, memory and virtqueues, independent of the
//! transport.
//!
//! Programs without a reactor (benchmarks, the C API) use this level directly, and so do tests that
//! send malformed requests to a server.

use super::failure::Failure;
use super::limits;
use super::options::{Options, TransportKind};
use super::parts::{Parts, QueueTraits};
use super::peer::{Peer, lock};
use super::regions::{Region, Regions, free_guest_addr};
use super::transport::{NewQueue, Transport};
use super::vfio_pci::VfioPci;
use super::vhost_user::{Frontend, VhostUser};
use super::vhost_vdpa::VhostVdpa;
use block::{DeviceError, Limits, MemoryRegion};
use drivers::shared_memory::SharedMemory;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use virtio::blk::{ConfigSpace, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ};
use virtio::driver::{BlkQueue, BlkQueueConfig, RingConfig, SharedArea};
use virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED};
use vmm_sys_util::eventfd::EventFd;

/// Smallest number of entries of a ring: room for one request of a header, data and a status.
const MIN_RING_SIZE: u16 = 4;

/// Limits of a device and its transport, for callers that set up a session themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Largest number of virtqueues.
    pub max_queues: u16,
    /// Largest number of entries of a virtqueue.
    pub max_queue_size: u16,
    /// Largest number of data segments in one request. The queue splits longer lists.
    pub max_segments: u32,
    /// Length of the longest data segment; `u32::MAX` if the device does not report it. The queue
    /// splits longer ones.
    pub max_segment_len: u32,
    /// Largest number of memory regions.
    pub max_regions: u64,
    /// Alignment of addresses and lengths of memory regions, in bytes.
    pub region_alignment: u64,
    /// Whether memory regions need a file.
    pub needs_region_fd: bool,
    /// Whether pages of memory regions may be pinned while the device knows them.
    pub may_pin_regions: bool,
}

/// State once the number and size of the virtqueues are fixed.
struct Started {
    queue_config: BlkQueueConfig,
    /// Largest number of requests in flight of one queue.
    depth: u16,
    rings: Arc<SharedMemory>,
    queues: Mutex<Vec<Slot>>,
}

/// State of a virtqueue in its session.
enum Slot {
    /// Stopped.
    Stopped,
    /// Running without a user.
    Idle(Box<Parts>),
    /// In use.
    InUse,
}

/// A session with a virtio-blk device.
pub struct Session {
    name: String,
    peer: Arc<Peer>,
    /// Declared before the rings, which are dropped once the device has released them.
    transport: Box<dyn Transport>,
    features: u64,
    facts: Facts,
    limits: Limits,
    timeout: Duration,
    regions: Regions,
    started: OnceLock<Started>,
}

impl Session {
    /// Connects, negotiates, and starts with the queues that the options ask for.
    ///
    /// # Errors
    /// When no device is found, or it lacks a feature that the options require.
    pub fn open(options: &Options) -> Result<Arc<Session>, DeviceError> {
        let session = Session::connect(options)?;
        session.start(options.queues, options.queue_size)?;
        Ok(session)
    }

    /// Connects and negotiates. Virtqueues are available after [`Session::start`].
    ///
    /// # Errors
    /// When no device is found, or it lacks a feature that the options require.
    pub fn connect(options: &Options) -> Result<Arc<Session>, DeviceError> {
        let name = options.name();
        let failed = |e: Failure| DeviceError::new(&name, "cannot connect").because(e);
        match options.transport {
            TransportKind::VhostUser => {
                let frontend = Frontend::connect(&options.path, options.timeout());
                Session::negotiate(&name, frontend.map_err(|e| failed(e.into()))?, options)
            }
            TransportKind::VhostVdpa => {
                let peer = Peer::new(name.clone());
                let vdpa = VhostVdpa::open(peer.clone(), options).map_err(failed)?;
                let offered = vdpa.offered();
                Session::over(peer, Box::new(vdpa), offered, options)
            }
            TransportKind::VfioPci => {
                let peer = Peer::new(name.clone());
                let pci = VfioPci::open(peer.clone(), options).map_err(failed)?;
                let offered = pci.offered();
                Session::over(peer, Box::new(pci), offered, options)
            }
        }
    }

    /// Negotiates over an existing vhost-user connection.
    ///
    /// # Errors
    /// As [`Session::connect`].
    pub fn negotiate(name: &str, frontend: Frontend, options: &Options) -> Result<Arc<Session>, DeviceError> {
        let peer = Peer::new(name.to_owned());
        let server = VhostUser::new(peer.clone(), frontend, options)
            .map_err(|e| DeviceError::new(name, "the vhost-user handshake failed").because(e))?;
        let offered = server.offered();
        Session::over(peer, Box::new(server), offered, options)
    }

    /// Agrees on the features with a device that a transport has found.
    fn over(
        peer: Arc<Peer>,
        transport: Box<dyn Transport>,
        offered: u64,
        options: &Options,
    ) -> Result<Arc<Session>, DeviceError> {
        let name = peer.name().to_owned();
        let wrong = |message: String| DeviceError::new(&name, message);
        let failed = |e: Failure| DeviceError::new(&name, "device setup failed").because(e);
        let features = options.choose(offered).map_err(wrong)?;
        transport.set_features(features).map_err(failed)?;
        let config = transport.read_config().map_err(failed)?;
        peer.set_config(config);
        let limits = limits::limits(features, &config).map_err(wrong)?;
        let has_mq = features & VIRTIO_BLK_F_MQ != 0 && config.num_queues > 0;
        let traits = transport.traits();
        let facts = Facts {
            max_queues: traits.max_queues.min(if has_mq { config.num_queues } else { 1 }).max(1),
            max_queue_size: traits.max_queue_size,
            max_segments: limits::device_seg_max(features, &config),
            max_segment_len: limits::size_max(features, &config),
            // One region is for the rings.
            max_regions: traits.max_regions.saturating_sub(1),
            region_alignment: traits.region_alignment,
            needs_region_fd: traits.needs_region_fd,
            // An IOMMU needs pinned pages, and a server may pin them too.
            may_pin_regions: true,
        };
        let (regions, timeout, started) = (Regions::default(), options.timeout(), OnceLock::new());
        let session = Session { name, peer, transport, features, facts, limits, timeout, regions, started };
        Ok(Arc::new(session))
    }

    /// Fixes the number of virtqueues (0: all that the device has) and their entries: a power of
    /// two. Must be called before any virtqueue is in use.
    ///
    /// # Errors
    /// When the device has fewer queues, it does not support the size, or the session has already
    /// been started.
    pub fn start(&self, queues: u16, queue_size: u16) -> Result<(), DeviceError> {
        let wrong = |message: String| DeviceError::new(&self.name, message);
        let Facts { max_queues, max_queue_size, .. } = self.facts;
        if queues > max_queues {
            return Err(wrong(format!("{queues} queues: the device has {max_queues}")));
        }
        if !queue_size.is_power_of_two() || queue_size > max_queue_size {
            let message = format!("queue size {queue_size}: must be a power of two up to {max_queue_size}");
            return Err(wrong(message));
        }
        let num_queues = if queues == 0 { max_queues } else { queues };
        let queue_config = self.queue_config(queue_size)?;
        let parts = usize::from(num_queues) * self.ring_parts();
        let rings =
            SharedMemory::aligned(queue_config.memory_len() * parts, self.transport.traits().own_alignment)
                .map_err(|e| self.error("no memory for the virtqueues", e))?;
        let region = rings.region();
        let started = Started {
            queue_config,
            depth: queue_config.depth().min(queue_size),
            rings: Arc::new(rings),
            queues: Mutex::new((0..num_queues).map(|_| Slot::Stopped).collect()),
        };
        if self.started.set(started).is_err() {
            return Err(wrong("the session has already been started".into()));
        }
        // A partial start is unusable.
        self.start_device(&region, num_queues, queue_config.ring.size).inspect_err(|_| self.shutdown())
    }

    fn start_device(&self, rings: &MemoryRegion, queues: u16, ring_size: u16) -> Result<(), DeviceError> {
        let failed = |e| self.error("the device did not start", e);
        self.transport.prepare(queues, ring_size).map_err(failed)?;
        self.add_region(rings)?;
        if self.transport.traits().starts_together {
            self.start_all(queues)?;
        }
        Ok(())
    }

    fn queue_config(&self, queue_size: u16) -> Result<BlkQueueConfig, DeviceError> {
        // A request needs three descriptors, and no chain is longer than its ring.
        let size = queue_size.max(MIN_RING_SIZE);
        if size > self.facts.max_queue_size {
            return Err(DeviceError::new(
                &self.name,
                format!("queue size {queue_size}: too small for a request"),
            ));
        }
        Ok(BlkQueueConfig {
            ring: RingConfig {
                size,
                packed: self.features & VIRTIO_F_RING_PACKED != 0,
                event_idx: self.features & VIRTIO_F_EVENT_IDX != 0,
            },
            indirect: self.features & VIRTIO_F_INDIRECT_DESC != 0,
            max_segments: limits::seg_max(self.facts.max_segments, size),
        })
    }

    fn start_all(&self, num_queues: u16) -> Result<(), DeviceError> {
        let Some(started) = self.started.get() else { return Ok(()) };
        for index in 0..num_queues {
            let parts = self.make_queue(started, index)?;
            started.put(index, Slot::Idle(Box::new(parts)));
        }
        self.transport.run().map_err(|e| self.error("the device did not start", e))
    }

    /// The device's kind and path: `virtio_blk:/run/disk.sock`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The virtio features in use.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Limits of the device and its transport.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Number of virtqueues; 0 before [`Session::start`].
    pub fn num_queues(&self) -> u16 {
        self.started.get().map_or(0, |started| lock(&started.queues).len() as u16)
    }

    /// The limits when the session was negotiated.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The configuration space as it was last read.
    pub fn config(&self) -> ConfigSpace {
        self.peer.config()
    }

    /// Reads the configuration space again and returns its capacity in bytes.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn refresh(&self) -> Result<u64, DeviceError> {
        let read = self.transport.read_config();
        let config = read.map_err(|e| self.error("cannot read the configuration", e))?;
        self.peer.set_config(config);
        Ok(limits::capacity(&config, self.limits.block_size))
    }

    /// Whether the device is lost.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.peer.is_gone()
    }

    /// The reason why the device is lost and does not return.
    pub fn lost(&self) -> Option<String> {
        self.peer.lost()
    }

    /// The regions that the device knows.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Shuts the device down. Every request in flight ends with an error.
    pub fn shutdown(&self) {
        self.transport.shutdown();
    }

    /// Sets a callback for capacity changes that the device reports. It runs on another thread and
    /// receives the new capacity in bytes.
    pub fn on_capacity(&self, call: impl Fn(u64) + Send + 'static) {
        let block_size = self.limits.block_size;
        self.peer.set_on_config(Box::new(move |config| call(limits::capacity(config, block_size))));
    }

    /// Makes memory known to the device. A region that it knows already is unchanged.
    ///
    /// # Errors
    /// When the region does not meet the transport's requirements ([`Facts`]), or the device
    /// refuses it.
    pub fn add_region(&self, memory: &MemoryRegion) -> Result<(), DeviceError> {
        let wrong = |message: &str| DeviceError::new(&self.name, format!("{message} ({memory:x?})"));
        let traits = self.transport.traits();
        let _change = self.regions.begin_change();
        let list = self.regions.lock();
        if list.iter().any(|r| r.memory == *memory) {
            return Ok(());
        }
        if memory.fd.is_none() && traits.needs_region_fd {
            return Err(wrong("memory that no file backs cannot be shared with the device"));
        }
        if memory.len == 0 || overlaps(&list, memory) {
            return Err(wrong("the region is empty or overlaps another"));
        }
        let alignment = traits.region_alignment;
        if !(memory.addr as u64 | memory.len as u64).is_multiple_of(alignment) {
            return Err(wrong(&format!("the region is not aligned to {alignment} bytes")));
        }
        let limit = traits.max_regions;
        if list.len() as u64 >= limit {
            return Err(wrong(&format!("the device allows {limit} regions")));
        }
        let guest_addr = free_guest_addr(&list, memory.len, &traits.addresses)
            .ok_or_else(|| wrong("the device has no addresses for a region of this length"))?;
        drop(list);
        let region = Region { memory: *memory, guest_addr };
        self.transport
            .map(region)
            .map_err(|e| self.error(&format!("the device refused a memory region ({memory:x?})"), e))?;
        self.regions.add(region);
        Ok(())
    }

    /// Removes memory. Unknown memory is ignored.
    pub fn remove_region(&self, memory: &MemoryRegion) {
        let _change = self.regions.begin_change();
        let mut list = self.regions.lock();
        let Some(i) = list.iter().position(|r| r.memory == *memory) else { return };
        let region = list.remove(i);
        drop(list);
        self.regions.publish();
        if let Err(error) = self.transport.unmap(region) {
            tracing::warn!(device = %self.name, %error, "memory region not released by the device");
        }
    }

    /// Takes the first virtqueue that is not in use, and its depth.
    pub(super) fn take_queue(&self, is_polled: bool) -> Result<(Parts, u16), DeviceError> {
        let wrong = |message: String| DeviceError::new(&self.name, message);
        let Some(started) = self.started.get() else {
            return Err(wrong("the session is not started".into()));
        };
        if self.is_gone() || self.peer.is_late() {
            return Err(self.lost_error());
        }
        let (index, idle) = started.take(is_polled).map_err(wrong)?;
        let parts = match idle {
            Some(parts) => *parts,
            None => self.make_queue(started, index).inspect_err(|_| started.put(index, Slot::Stopped))?,
        };
        Ok((parts, started.depth))
    }

    fn make_queue(&self, started: &Started, index: u16) -> Result<Parts, DeviceError> {
        let no_event = |e| self.error("no event for a virtqueue", e);
        let call = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(no_event)?;
        let memory = self.ring_memory(started, index, 0)?;
        let spare = self.transport.traits().reconnects.then(|| self.ring_memory(started, index, 1));
        let spare = spare.transpose()?;
        // SAFETY: the queue keeps the session and so the memory alive. The part belongs to this
        // virtqueue, which has no other user until the queue is returned.
        let queue = unsafe { BlkQueue::new(started.queue_config, memory) };
        let mailbox = self.peer.add_queue(index, &call).map_err(no_event)?;
        let rings = &started.rings;
        let new = NewQueue { index, queue: &queue, spare, call: &call, mailbox: &mailbox, rings };
        let running = self.transport.start_queue(new);
        if running.is_err() || self.is_gone() {
            self.peer.remove_queue(index);
        }
        if self.is_gone() {
            return Err(self.lost_error());
        }
        let running = running.map_err(|e| self.error(&format!("virtqueue {index} did not start"), e))?;
        let (doorbell, has_event) = (running.doorbell, running.has_event);
        Ok(Parts { queue, index, doorbell, call, has_event, mailbox })
    }

    /// Number of parts of the rings' memory for each virtqueue: while a queue still uses one, the
    /// next server gets rings in the other.
    fn ring_parts(&self) -> usize {
        if self.transport.traits().reconnects { 2 } else { 1 }
    }

    /// The part `part` of the rings' memory that belongs to virtqueue `index`.
    fn ring_memory(&self, started: &Started, index: u16, part: usize) -> Result<SharedArea, DeviceError> {
        let region = started.rings.region();
        let guest_addr = self.regions.lock().iter().find(|r| r.memory == region).map(|r| r.guest_addr);
        let Some(guest_addr) = guest_addr else {
            return Err(DeviceError::new(&self.name, "the device does not know the rings"));
        };
        let area = SharedArea { base: started.rings.base(), guest_addr, len: started.rings.len() };
        let len = started.queue_config.memory_len();
        Ok(area.part((usize::from(index) * self.ring_parts() + part) * len, len))
    }

    /// Timeout for control operations of the device.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether virtqueues keep running without a user.
    pub(super) fn keeps_queues(&self) -> bool {
        self.transport.traits().starts_together
    }

    /// Returns a virtqueue without a user. The device has released the requests' memory, or does so
    /// now.
    pub(super) fn give_back(&self, parts: Parts) {
        let index = parts.index;
        let slot = if self.keeps_queues() {
            Slot::Idle(Box::new(parts))
        } else {
            self.peer.remove_queue(index);
            if let Err(error) = self.transport.stop_queue(index) {
                tracing::debug!(device = %self.name, queue = index, %error, "virtqueue not stopped cleanly");
            }
            Slot::Stopped
        };
        if let Some(started) = self.started.get() {
            started.put(index, slot);
        }
    }

    pub(super) fn queue_traits(&self) -> QueueTraits {
        let config = self.peer.config();
        QueueTraits {
            has_flush: self.features & VIRTIO_BLK_F_FLUSH != 0,
            is_write_back: limits::is_write_back(self.features, &config),
            has_discard: self.limits.max_discard > 0,
            has_write_zeroes: self.limits.max_write_zeroes > 0,
            size_max: self.facts.max_segment_len,
            block_size: self.limits.block_size,
            reconnects: self.transport.traits().reconnects,
        }
    }

    /// Records that the device has completed a request since it returned.
    pub(super) fn note_progress(&self) {
        self.peer.note_progress();
    }

    /// The error of a request to a lost device.
    fn lost_error(&self) -> DeviceError {
        let why = self.lost().map_or(String::new(), |why| format!(": {why}"));
        DeviceError::new(&self.name, format!("the device is lost{why}"))
    }

    fn error(&self, message: &str, source: impl Into<Failure>) -> DeviceError {
        DeviceError::new(&self.name, message).because(source)
    }
}

impl Started {
    /// Takes the first unused virtqueue that has an event, or any unused one if `is_polled`.
    fn take(&self, is_polled: bool) -> Result<(u16, Option<Box<Parts>>), String> {
        let mut queues = lock(&self.queues);
        let is_fit = |slot: &Slot| match slot {
            Slot::Stopped => true,
            Slot::Idle(parts) => is_polled || parts.has_event,
            Slot::InUse => false,
        };
        let Some(i) = queues.iter().position(is_fit) else {
            return Err(match queues.iter().any(|slot| !matches!(slot, Slot::InUse)) {
                true => "the device has no interrupts for more virtqueues than are in use".into(),
                false => format!("all {} virtqueues are in use", queues.len()),
            });
        };
        match std::mem::replace(&mut queues[i], Slot::InUse) {
            Slot::Idle(parts) => Ok((i as u16, Some(parts))),
            Slot::Stopped | Slot::InUse => Ok((i as u16, None)),
        }
    }

    fn put(&self, index: u16, slot: Slot) {
        lock(&self.queues)[usize::from(index)] = slot;
    }
}

fn overlaps(list: &[Region], memory: &MemoryRegion) -> bool {
    let end = memory.addr.saturating_add(memory.len);
    list.iter().any(|r| memory.addr < r.memory.addr + r.memory.len && r.memory.addr < end)
}
