//! What a session needs of the way to its device.
//!
//! | transport | the device | told by | doorbell |
//! |---|---|---|---|
//! | [`super::vhost_user`] | another process | messages over a Unix socket | eventfd |
//! | [`super::vhost_vdpa`] | whatever the kernel's vDPA bus has | ioctls of `/dev/vhost-vdpa-N` | eventfd |
//! | [`super::vfio_pci`] | a PCI function behind an IOMMU | its registers | a register |

use super::regions::Region;
use crate::shared_memory::SharedMemory;
use reactor::PeerEvent;
use std::ops::RangeInclusive;
use std::sync::Arc;
use virtio::blk::ConfigSpace;
use virtio::driver::{BlkQueue, SharedArea};
use vmm_sys_util::eventfd::EventFd;

/// Why a step failed. The session says which step of which device it was.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A failure, and what was tried.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Tried {
    /// What was tried, and what with.
    pub what: String,
    /// What came of it.
    pub source: std::io::Error,
}

/// What a transport allows, whatever the device behind it.
#[derive(Clone, Debug)]
pub struct Traits {
    /// Most virtqueues.
    pub max_queues: u16,
    /// Most entries of a virtqueue.
    pub max_queue_size: u16,
    /// Most memory regions, that of the rings included.
    pub max_regions: u64,
    /// What addresses and lengths of memory regions are multiples of, in bytes: a power of two.
    pub region_alignment: u64,
    /// Whether memory regions need a file.
    pub needs_region_fd: bool,
    /// Whether the device can be given these addresses, by which it calls our memory.
    pub addresses: Vec<RangeInclusive<u64>>,
    /// Virtqueues are set up before the device runs and stay: they cannot be started or stopped one by one.
    pub starts_together: bool,
}

/// A virtqueue that is to be started.
pub struct NewQueue<'a> {
    /// Its number.
    pub index: u16,
    /// Its rings, at the start of their memory.
    pub queue: &'a BlkQueue,
    /// What is written when a request has been used.
    pub call: &'a EventFd,
    /// The rings of all virtqueues.
    pub rings: &'a Arc<SharedMemory>,
}

impl NewQueue<'_> {
    /// How far into the memory of all rings the areas of [`NewQueue::areas`] lie.
    pub fn offsets(&self) -> [usize; 3] {
        self.areas().map(|area| area.base.addr() - self.rings.base().addr())
    }

    /// Where descriptors, driver area and device area lie: here, and as the device calls them.
    pub fn areas(&self) -> [SharedArea; 3] {
        let (layout, memory) = (self.queue.ring_layout(), self.queue.memory());
        [layout.descriptors, layout.driver, layout.device].map(|at| memory.part(at, memory.len - at))
    }
}

/// A virtqueue that runs.
pub struct RunningQueue {
    /// Tells the device that there is something in it.
    pub doorbell: Doorbell,
    /// Whether the device writes to its call event; without, it can only be polled.
    pub has_event: bool,
}

/// What tells a device that there is something in a virtqueue.
pub enum Doorbell {
    /// An event that the kernel alone reads.
    Event(EventFd),
    /// An event that another process has, too.
    Shared(Box<PeerEvent>),
    /// A register of the device.
    Register(super::vfio_pci::DoorbellRegister),
}

impl Doorbell {
    /// Rings it.
    #[inline]
    pub fn ring(&mut self) {
        match self {
            // Fails only when the counter is full, and then the device has been woken often enough.
            Doorbell::Event(event) => drop(event.write(1)),
            Doorbell::Shared(event) => event.signal(),
            Doorbell::Register(register) => register.ring(),
        }
    }
}

/// The way to a device. Methods may be called from any thread; each keeps order by itself.
pub trait Transport: Send + Sync {
    /// What the transport allows.
    fn traits(&self) -> &Traits;

    /// Reads the configuration space.
    fn read_config(&self) -> Result<ConfigSpace, Failure>;

    /// Gives the device the features that are to be used. Comes once, before all that follows.
    fn set_features(&self, features: u64) -> Result<(), Failure>;

    /// Number and size of the virtqueues are known now. Comes once.
    fn prepare(&self, queues: u16, ring_size: u16) -> Result<(), Failure>;

    /// Makes memory known to the device; `all` includes it. The device knows it when this returns.
    fn map(&self, region: Region, all: &[Region]) -> Result<(), Failure>;

    /// Takes memory back; `rest` is what remains. The device has let go of it when this returns.
    fn unmap(&self, region: Region, rest: &[Region]) -> Result<(), Failure>;

    /// Starts a virtqueue. Where they start together it is set up and runs after [`Transport::run`].
    fn start_queue(&self, queue: NewQueue<'_>) -> Result<RunningQueue, Failure>;

    /// Lets the device run, where virtqueues start together.
    fn run(&self) -> Result<(), Failure>;

    /// Stops a virtqueue, where they do not start together. The device has let go of its memory when this
    /// returns.
    fn stop_queue(&self, index: u16) -> Result<(), Failure>;

    /// Ends it all: the device lets go of all memory, and everybody learns that it is gone.
    fn shutdown(&self);
}
