//! A negotiated vhost-user session: features, memory, virtqueues.
//!
//! This is the level below [`super::VirtioBlk`] for those who want virtqueues without a reactor (benchmarks, the
//! C API) or a server under test to see more than well-formed requests.

use super::frontend::{Frontend, FrontendError, FrontendReq};
use super::limits;
use super::link::{Link, Listener};
use super::options::{Choice, Options};
use super::queue::{Events, QueueTraits, VirtioBlkQueue};
use super::regions::{Region, Regions, free_guest_addr};
use crate::shared_memory::SharedMemory;
use block::{DeviceError, Limits, MemoryRegion};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use virtio::blk::{ConfigSpace, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ};
use virtio::driver::{BlkQueue, BlkQueueConfig, RingConfig, SharedArea};
use virtio::ring::MAX_QUEUE_SIZE;
use virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED};
use vmm_sys_util::eventfd::EventFd;

/// What is taken of the vhost-user protocol whenever the server has it.
const WELCOME: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIGURE_MEM_SLOTS);
/// Most regions in one `SET_MEM_TABLE`: what every server takes.
const TABLE_REGIONS: usize = 8;
/// Fewest entries of a ring: room for one request of a header, data and a status.
const MIN_RING_SIZE: u16 = 4;
/// Both positions of a packed ring at the start: slot 0, wrap counter 1.
const PACKED_START: u32 = 0x8000_8000;

/// The memory in which the server notes what is in flight.
#[derive(Debug)]
struct Inflight {
    file: File,
    /// Size, offset, queues and queue size, as the server said them.
    description: Vec<u8>,
}

/// What a session has of the transport's nature, for those who set it up by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Most virtqueues.
    pub max_queues: u16,
    /// Most entries of a virtqueue.
    pub max_queue_size: u16,
    /// Most data segments that the device takes in one request. Longer lists are cut by the queue.
    pub max_segments: u32,
    /// Longest data segment that the device takes; `u32::MAX` where it does not say. Longer ones are cut.
    pub max_segment_len: u32,
    /// Most memory regions that can be added.
    pub max_regions: u64,
    /// What addresses and lengths of memory regions are multiples of, in bytes.
    pub region_alignment: u64,
    /// Whether memory regions need a file.
    pub needs_region_fd: bool,
    /// Whether pages of memory regions may be pinned while the device knows them.
    pub may_pin_regions: bool,
}

/// What exists once the virtqueues' number and size are fixed.
struct Started {
    queue_config: BlkQueueConfig,
    /// Most requests in flight of one queue.
    depth: u16,
    rings: SharedMemory,
    /// Which virtqueues are in use.
    queues: Mutex<Vec<bool>>,
    inflight: Option<Inflight>,
}

impl Started {
    /// Takes the first virtqueue that is not in use.
    fn reserve(&self) -> Result<u16, String> {
        let mut queues = self.queues();
        match queues.iter().position(|is_used| !is_used) {
            Some(i) => {
                queues[i] = true;
                Ok(i as u16)
            }
            None => Err(format!("all {} virtqueues are in use", queues.len())),
        }
    }

    fn release(&self, index: u16) {
        self.queues()[usize::from(index)] = false;
    }

    fn queues(&self) -> MutexGuard<'_, Vec<bool>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session with a vhost-user-blk server.
pub struct Session {
    name: String,
    link: Arc<Link>,
    features: u64,
    protocol: Protocol,
    facts: Facts,
    limits: Limits,
    regions: Regions,
    started: OnceLock<Started>,
    /// Last, so that it outlives nothing it listens for.
    _listener: Listener,
}

impl Session {
    /// Connects, negotiates, and starts with the queues that the options ask for.
    ///
    /// # Errors
    /// When nobody listens, or the server lacks something that the options ask for.
    pub fn open(options: &Options) -> Result<Arc<Session>, DeviceError> {
        let session = Session::connect(options)?;
        session.start(options.queues, options.queue_size)?;
        Ok(session)
    }

    /// Connects and negotiates. Virtqueues can be had after [`Session::start`].
    ///
    /// # Errors
    /// When nobody listens, or the server lacks something that the options ask for.
    pub fn connect(options: &Options) -> Result<Arc<Session>, DeviceError> {
        let name = format!("virtio_blk:{}", options.path.display());
        let error = |message: &str| DeviceError::new(&name, message);
        let frontend =
            connect(&options.path, options.timeout_ms).map_err(|e| error("cannot connect").because(e))?;
        Session::negotiate(&name, frontend, options)
    }

    /// Negotiates over a connection that is there already.
    ///
    /// # Errors
    /// As [`Session::connect`].
    pub fn negotiate(
        name: &str,
        mut frontend: Frontend,
        options: &Options,
    ) -> Result<Arc<Session>, DeviceError> {
        let failed = |e: FrontendError| DeviceError::new(name, "the vhost-user handshake failed").because(e);
        let wrong = |message: String| DeviceError::new(name, message);
        let broken = |e: std::io::Error| DeviceError::new(name, "no resources for the session").because(e);
        frontend.send(FrontendReq::SET_OWNER, &[], &[]).map_err(failed)?;
        let offered = frontend.call(FrontendReq::GET_FEATURES, &[], &[]).map_err(failed)?.u64_at(0);
        let features = options.choose(offered).map_err(wrong)?;
        let protocol = negotiate_protocol(&mut frontend, options.inflight).map_err(failed)?;
        if !protocol.contains(Protocol::CONFIG) {
            return Err(wrong("the server shows no configuration space".into()));
        }
        if options.inflight == Choice::On && !protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Err(wrong("the server has no in-flight memory".into()));
        }
        let served =
            count(&mut frontend, FrontendReq::GET_QUEUE_NUM, protocol, Protocol::MQ, 1).map_err(failed)?;
        let slots = Protocol::CONFIGURE_MEM_SLOTS;
        let max_regions =
            count(&mut frontend, FrontendReq::GET_MAX_MEM_SLOTS, protocol, slots, TABLE_REGIONS as u64)
                .map_err(failed)?;
        let backend = match protocol.contains(Protocol::BACKEND_REQ) {
            true => Some(give_channel(&mut frontend, options.timeout_ms).map_err(broken)?.map_err(failed)?),
            false => None,
        };
        let link = Arc::new(Link::new(name.to_owned(), frontend));
        let config = link.read_config().map_err(failed)?;
        let limits = limits::limits(features, &config).map_err(wrong)?;
        let has_mq = features & VIRTIO_BLK_F_MQ != 0 && config.num_queues > 0;
        let served = served.min(if has_mq { config.num_queues.into() } else { 1 }).max(1) as u16;
        link.frontend().send(FrontendReq::SET_FEATURES, &features.to_le_bytes(), &[]).map_err(failed)?;
        let facts = Facts {
            max_queues: served,
            // No message of the protocol says what the server takes.
            max_queue_size: MAX_QUEUE_SIZE,
            max_segments: limits::device_seg_max(features, &config),
            max_segment_len: limits::size_max(features, &config),
            // One of them is for the rings.
            max_regions: max_regions.saturating_sub(1),
            region_alignment: 1,
            needs_region_fd: true,
            // Nobody knows what the server does with them.
            may_pin_regions: true,
        };
        let listener = Listener::start(link.clone(), backend).map_err(broken)?;
        Ok(Arc::new(Session {
            name: name.to_owned(),
            link,
            features,
            protocol,
            facts,
            limits,
            regions: Regions::default(),
            started: OnceLock::new(),
            _listener: listener,
        }))
    }

    /// Fixes how many virtqueues there are (0: all that the server has) and how many entries each has: a power
    /// of two. None of them runs yet.
    ///
    /// # Errors
    /// When the server has not as many, the size is none that a ring has, or the session has been started.
    pub fn start(&self, queues: u16, queue_size: u16) -> Result<(), DeviceError> {
        let wrong = |message: String| DeviceError::new(&self.name, message);
        let Facts { max_queues, max_queue_size, .. } = self.facts;
        if queues > max_queues {
            return Err(wrong(format!("{queues} queues wanted, the server has {max_queues}")));
        }
        if !queue_size.is_power_of_two() || queue_size > max_queue_size {
            let message = format!("queue size {queue_size} is not a power of two up to {max_queue_size}");
            return Err(wrong(message));
        }
        let num_queues = if queues == 0 { max_queues } else { queues };
        // A request is three descriptors, and no chain is longer than its ring.
        let size = queue_size.max(MIN_RING_SIZE);
        let inflight = match self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            true => {
                let shared = share_inflight(&mut self.link.frontend(), num_queues, size);
                Some(shared.map_err(|e| self.error("no in-flight memory", e))?)
            }
            false => None,
        };
        let queue_config = BlkQueueConfig {
            ring: RingConfig {
                size,
                packed: self.features & VIRTIO_F_RING_PACKED != 0,
                event_idx: self.features & VIRTIO_F_EVENT_IDX != 0,
            },
            indirect: self.features & VIRTIO_F_INDIRECT_DESC != 0,
            max_segments: limits::seg_max(self.facts.max_segments, size),
        };
        let rings = SharedMemory::new(queue_config.memory_len() * usize::from(num_queues))
            .map_err(|e| self.error("no memory for the virtqueues", e))?;
        let region = rings.region();
        let queues = Mutex::new(vec![false; num_queues.into()]);
        let depth = queue_config.depth().min(queue_size);
        if self.started.set(Started { queue_config, depth, rings, queues, inflight }).is_err() {
            return Err(wrong("the session has been started already".into()));
        }
        self.add_region(&region)
    }

    /// `virtio_blk:` and the socket's path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The virtio features in use.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The vhost-user protocol features in use.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// What the device and the way to it allow.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// How many virtqueues there are; none before [`Session::start`].
    pub fn num_queues(&self) -> u16 {
        self.started.get().map_or(0, |started| started.queues().len() as u16)
    }

    /// The limits at the time of the negotiation.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The configuration space as it was last read.
    pub fn config(&self) -> ConfigSpace {
        self.link.config()
    }

    /// Reads the configuration space again; the capacity in it, in bytes.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn refresh(&self) -> Result<u64, DeviceError> {
        let config = self.link.read_config().map_err(|e| self.error("cannot read the configuration", e))?;
        Ok(limits::capacity(&config, self.limits.block_size))
    }

    /// Whether the server has vanished.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.link.is_gone()
    }

    /// The connection, for messages that nothing here sends.
    pub fn frontend(&self) -> MutexGuard<'_, Frontend> {
        self.link.frontend()
    }

    /// The in-flight memory and its description as `GET_INFLIGHT_FD` gave it, where it was negotiated.
    pub fn inflight(&self) -> Option<(&File, &[u8])> {
        let inflight = self.started.get()?.inflight.as_ref()?;
        Some((&inflight.file, &inflight.description[..]))
    }

    /// The regions that the server knows.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Ends the connection. Everything in flight ends with an error.
    pub fn shutdown(&self) {
        self.link.frontend().shutdown();
    }

    /// Calls `call`, on another thread, with the new capacity in bytes when the server says that it changed.
    pub fn on_capacity(&self, call: impl Fn(u64) + Send + 'static) {
        let block_size = self.limits.block_size;
        self.link.set_on_config(Box::new(move |config| call(limits::capacity(config, block_size))));
    }

    /// Makes memory known to the server. A region that it knows already is left as it is.
    ///
    /// # Errors
    /// When the region has no file, the server has no room for it, or does not answer.
    pub fn add_region(&self, memory: &MemoryRegion) -> Result<(), DeviceError> {
        let wrong = |message: &str| DeviceError::new(&self.name, format!("{message} ({memory:x?})"));
        let mut list = self.regions.lock();
        if list.iter().any(|r| r.memory == *memory) {
            return Ok(());
        }
        if memory.fd.is_none() {
            return Err(wrong("memory that no file backs cannot be shared with the server"));
        }
        if memory.len == 0 || overlaps(&list, memory) {
            return Err(wrong("the region is empty or overlaps another"));
        }
        let limit = self.facts.max_regions + 1;
        if list.len() as u64 >= limit {
            return Err(wrong(&format!("the server takes no more than {limit} regions")));
        }
        let guest_addr = free_guest_addr(&list, memory.len).ok_or_else(|| wrong("the region is too long"))?;
        list.push(Region { memory: *memory, guest_addr });
        let result = match self.has_slots() {
            true => self.send_region(FrontendReq::ADD_MEM_REG, list[list.len() - 1]),
            false => self.send_table(&list),
        };
        if let Err(e) = result {
            list.pop();
            return Err(self.error("the server did not take a memory region", e));
        }
        self.regions.publish();
        Ok(())
    }

    /// Takes memory back. Unknown memory is ignored.
    pub fn remove_region(&self, memory: &MemoryRegion) {
        let mut list = self.regions.lock();
        let Some(i) = list.iter().position(|r| r.memory == *memory) else { return };
        let region = list.remove(i);
        self.regions.publish();
        let result = match self.has_slots() {
            true => self.send_region(FrontendReq::REM_MEM_REG, region),
            false => self.send_table(&list),
        };
        if let Err(error) = result {
            tracing::warn!(device = %self.name, %error, "the server did not give a memory region back");
        }
    }

    /// Starts the first virtqueue that is not in use. It raises an event for completions.
    ///
    /// # Errors
    /// When all are in use, the session has not been started, or the server fails.
    pub fn start_queue(self: &Arc<Self>) -> Result<VirtioBlkQueue, DeviceError> {
        self.take_queue(false)
    }

    /// As [`Session::start_queue`], for a queue without events: whoever waits for it spins.
    ///
    /// # Errors
    /// As [`Session::start_queue`].
    pub fn start_poll_queue(self: &Arc<Self>) -> Result<VirtioBlkQueue, DeviceError> {
        self.take_queue(true)
    }

    fn take_queue(self: &Arc<Self>, is_polled: bool) -> Result<VirtioBlkQueue, DeviceError> {
        let Some(started) = self.started.get() else {
            return Err(DeviceError::new(&self.name, "the session has not been started"));
        };
        let index = started.reserve().map_err(|message| DeviceError::new(&self.name, message))?;
        self.start_queue_at(started, index, is_polled).inspect_err(|_| started.release(index))
    }

    fn start_queue_at(
        self: &Arc<Self>,
        started: &Started,
        index: u16,
        is_polled: bool,
    ) -> Result<VirtioBlkQueue, DeviceError> {
        let new_event = || EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        let no_event = |e| self.error("no event for a virtqueue", e);
        let (kick, call) = (new_event().map_err(no_event)?, new_event().map_err(no_event)?);
        let memory = self.ring_memory(started, index)?;
        // SAFETY: the queue keeps the session and so the memory alive; the part belongs to this virtqueue,
        // which nobody else uses until the queue is dropped.
        let queue = unsafe { BlkQueue::new(started.queue_config, memory) };
        self.link.add_call(index, call.try_clone().map_err(no_event)?);
        let base = if started.queue_config.ring.packed { PACKED_START } else { 0 };
        let told = self.tell_queue(index, &queue, base, &kick, &call);
        if told.is_err() || self.is_gone() {
            self.link.remove_call(index);
        }
        told.map_err(|e| self.error(&format!("virtqueue {index} did not start"), e))?;
        if self.is_gone() {
            return Err(DeviceError::new(&self.name, "the server is gone"));
        }
        let events = Events { kick, call, is_polled };
        Ok(VirtioBlkQueue::new(queue, self.clone(), index, started.depth, events))
    }

    /// The part of the rings' memory that belongs to virtqueue `index`.
    fn ring_memory(&self, started: &Started, index: u16) -> Result<SharedArea, DeviceError> {
        let region = started.rings.region();
        let guest_addr = self.regions.lock().iter().find(|r| r.memory == region).map(|r| r.guest_addr);
        let Some(guest_addr) = guest_addr else {
            return Err(DeviceError::new(&self.name, "the rings are not known to the server"));
        };
        let area = SharedArea { base: started.rings.base(), guest_addr, len: started.rings.len() };
        let len = started.queue_config.memory_len();
        Ok(area.part(usize::from(index) * len, len))
    }

    fn tell_queue(
        &self,
        index: u16,
        queue: &BlkQueue,
        base: u32,
        kick: &EventFd,
        call: &EventFd,
    ) -> Result<(), FrontendError> {
        let mut frontend = self.frontend();
        let layout = queue.ring_layout();
        let start = queue.memory().base.addr() as u64;
        let mut addresses = pair(index, 0);
        for address in
            [start + layout.descriptors as u64, start + layout.device as u64, start + layout.driver as u64, 0]
        {
            addresses.extend_from_slice(&address.to_le_bytes());
        }
        let number = u64::from(index).to_le_bytes();
        frontend.send(FrontendReq::SET_VRING_NUM, &pair(index, queue.config().ring.size.into()), &[])?;
        frontend.send(FrontendReq::SET_VRING_BASE, &pair(index, base), &[])?;
        frontend.send(FrontendReq::SET_VRING_ADDR, &addresses, &[])?;
        frontend.send(FrontendReq::SET_VRING_CALL, &number, &[call.as_raw_fd()])?;
        frontend.send(FrontendReq::SET_VRING_KICK, &number, &[kick.as_raw_fd()])?;
        frontend.send(FrontendReq::SET_VRING_ENABLE, &pair(index, 1), &[])
    }

    /// Stops a virtqueue; the server has let go of its memory afterwards.
    pub(super) fn stop_queue(&self, index: u16) {
        self.link.remove_call(index);
        if !self.is_gone() {
            let mut frontend = self.frontend();
            let stopped = frontend
                .send(FrontendReq::SET_VRING_ENABLE, &pair(index, 0), &[])
                .and_then(|()| frontend.call(FrontendReq::GET_VRING_BASE, &pair(index, 0), &[]));
            if let Err(error) = stopped {
                tracing::debug!(device = %self.name, queue = index, %error, "a virtqueue was not stopped in order");
            }
        }
        if let Some(started) = self.started.get() {
            started.release(index);
        }
    }

    pub(super) fn queue_traits(&self) -> QueueTraits {
        let config = self.link.config();
        QueueTraits {
            has_flush: self.features & VIRTIO_BLK_F_FLUSH != 0,
            is_write_back: limits::is_write_back(self.features, &config),
            has_discard: self.limits.max_discard > 0,
            has_write_zeroes: self.limits.max_write_zeroes > 0,
            may_unmap: config.write_zeroes_may_unmap != 0,
            size_max: limits::size_max(self.features, &config),
            block_size: self.limits.block_size,
        }
    }

    fn has_slots(&self) -> bool {
        self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS)
    }

    fn send_region(&self, request: FrontendReq, region: Region) -> Result<(), FrontendError> {
        let fd = region.memory.fd.filter(|_| request == FrontendReq::ADD_MEM_REG);
        let mut payload = vec![0; 8];
        describe(&mut payload, region);
        self.send_memory(request, &payload, fd.as_slice())
    }

    fn send_table(&self, list: &[Region]) -> Result<(), FrontendError> {
        let mut payload = (list.len() as u64).to_le_bytes().to_vec();
        for region in list {
            describe(&mut payload, *region);
        }
        let fds: Vec<RawFd> = list.iter().filter_map(|r| r.memory.fd).collect();
        self.send_memory(FrontendReq::SET_MEM_TABLE, &payload, &fds)
    }

    fn send_memory(&self, request: FrontendReq, payload: &[u8], fds: &[RawFd]) -> Result<(), FrontendError> {
        let mut frontend = self.frontend();
        frontend.send(request, payload, fds)?;
        if !self.protocol.contains(Protocol::REPLY_ACK) {
            // Requests may come by a ring before the message is read: any reply says that it was.
            frontend.call(FrontendReq::GET_FEATURES, &[], &[])?;
        }
        Ok(())
    }

    fn error(
        &self,
        message: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> DeviceError {
        DeviceError::new(&self.name, message).because(source)
    }
}

fn connect(path: &Path, timeout_ms: u64) -> std::io::Result<Frontend> {
    Frontend::connect(path, Duration::from_millis(timeout_ms.max(1)))
}

fn negotiate_protocol(frontend: &mut Frontend, inflight: Choice) -> Result<Protocol, FrontendError> {
    let offered = frontend.call(FrontendReq::GET_PROTOCOL_FEATURES, &[], &[])?.u64_at(0);
    let welcome = if inflight == Choice::Off { WELCOME } else { WELCOME | Protocol::INFLIGHT_SHMFD };
    let protocol = Protocol::from_bits_truncate(offered) & welcome;
    frontend.send(FrontendReq::SET_PROTOCOL_FEATURES, &protocol.bits().to_le_bytes(), &[])?;
    frontend.set_protocol(protocol);
    Ok(protocol)
}

/// A number that the server tells when `feature` is in use.
fn count(
    frontend: &mut Frontend,
    request: FrontendReq,
    protocol: Protocol,
    feature: Protocol,
    otherwise: u64,
) -> Result<u64, FrontendError> {
    if !protocol.contains(feature) {
        return Ok(otherwise);
    }
    let reply = frontend.call(request, &[], &[])?;
    Ok(reply.u64_at(0))
}

/// Gives the server a channel for its own messages; our end of it.
fn give_channel(
    frontend: &mut Frontend,
    timeout_ms: u64,
) -> std::io::Result<Result<UnixStream, FrontendError>> {
    let (ours, theirs) = UnixStream::pair()?;
    // A message that does not end must not keep the listening thread for ever.
    ours.set_read_timeout(Some(Duration::from_millis(timeout_ms.max(1))))?;
    ours.set_write_timeout(Some(Duration::from_millis(timeout_ms.max(1))))?;
    let sent = frontend.send(FrontendReq::SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]);
    Ok(sent.map(|()| ours))
}

/// Asks the server for in-flight memory and hands it back, as a front end does after the first connection.
fn share_inflight(frontend: &mut Frontend, queues: u16, size: u16) -> Result<Inflight, FrontendError> {
    let mut wish = vec![0; 24];
    wish[16..18].copy_from_slice(&queues.to_le_bytes());
    wish[18..20].copy_from_slice(&size.to_le_bytes());
    let request = FrontendReq::GET_INFLIGHT_FD;
    let reply = frontend.call(request, &wish, &[])?;
    let Some(file) = reply.file.filter(|_| reply.payload.len() >= 20) else {
        return Err(FrontendError::BadReply { request, what: "no memory".into() });
    };
    frontend.send(FrontendReq::SET_INFLIGHT_FD, &reply.payload, &[file.as_raw_fd()])?;
    Ok(Inflight { file, description: reply.payload })
}

/// Appends a region as `SET_MEM_TABLE` and `ADD_MEM_REG` have it.
fn describe(payload: &mut Vec<u8>, region: Region) {
    let memory = region.memory;
    for field in [region.guest_addr, memory.len as u64, memory.addr as u64, memory.fd_offset] {
        payload.extend_from_slice(&field.to_le_bytes());
    }
}

fn pair(index: u16, value: u32) -> Vec<u8> {
    [u32::from(index).to_le_bytes(), value.to_le_bytes()].concat()
}

fn overlaps(list: &[Region], memory: &MemoryRegion) -> bool {
    let end = memory.addr.saturating_add(memory.len);
    list.iter().any(|r| memory.addr < r.memory.addr + r.memory.len && r.memory.addr < end)
}
