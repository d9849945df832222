//! The interface of a session to its device.
//!
//! | transport | the device | control | doorbell |
//! |---|---|---|---|
//! | [`super::vhost_user`] | another process | messages over a Unix socket | eventfd |
//! | [`super::vhost_vdpa`] | a device of the kernel's vDPA bus | ioctls of `/dev/vhost-vdpa-N` | eventfd |
//! | [`super::vfio_pci`] | a PCI function behind an IOMMU | its registers | a register |

use super::doorbell::Doorbell;
use super::failure::Failure;
use super::parts::QueueMailbox;
use super::regions::Region;
use drivers::shared_memory::SharedMemory;
use std::ops::RangeInclusive;
use std::sync::Arc;
use virtio::blk::ConfigSpace;
use virtio::driver::{BlkQueue, SharedArea};
use vmm_sys_util::eventfd::EventFd;

/// Limits of a transport and its device.
#[derive(Clone, Debug)]
pub struct Traits {
    /// Largest number of virtqueues.
    pub max_queues: u16,
    /// Largest number of entries of a virtqueue.
    pub max_queue_size: u16,
    /// Largest number of memory regions, including that of the rings.
    pub max_regions: u64,
    /// Alignment of addresses and lengths of memory regions, in bytes: a power of two.
    pub region_alignment: u64,
    /// Whether memory regions need a file.
    pub needs_region_fd: bool,
    /// Guest addresses that the device can use for memory of this process.
    pub addresses: Vec<RangeInclusive<u64>>,
    /// Alignment of addresses and lengths of the memory that the session allocates itself, in
    /// bytes: a power of two.
    pub own_alignment: usize,
    /// Virtqueues are set up before the device runs, and cannot be started or stopped individually.
    pub starts_together: bool,
    /// Whether the transport reconnects to a device that was lost.
    pub reconnects: bool,
}

/// A virtqueue to start.
pub struct NewQueue<'a> {
    /// Index of the virtqueue.
    pub index: u16,
    /// Its rings, at the start of their memory.
    pub queue: &'a BlkQueue,
    /// Memory for other rings of the virtqueue, if the transport reconnects.
    pub spare: Option<SharedArea>,
    /// Event that the device signals when a request has been used.
    pub call: &'a EventFd,
    /// Takes the events of the virtqueue.
    pub mailbox: &'a Arc<QueueMailbox>,
    /// The rings of all virtqueues.
    pub rings: &'a Arc<SharedMemory>,
}

impl NewQueue<'_> {
    /// Offsets of the areas of [`NewQueue::areas`] in the memory of all rings.
    pub fn offsets(&self) -> [usize; 3] {
        self.areas().map(|area| area.base.addr() - self.rings.base().addr())
    }

    /// Descriptors, driver area and device area, with the addresses for this process and for the
    /// device.
    pub fn areas(&self) -> [SharedArea; 3] {
        let (layout, memory) = (self.queue.ring_layout(), self.queue.memory());
        [layout.descriptors, layout.driver, layout.device].map(|at| memory.part(at, memory.len - at))
    }
}

/// A running virtqueue.
pub struct RunningQueue {
    /// Notifies the device of available requests.
    pub doorbell: Doorbell,
    /// Whether the device signals its call event; otherwise the queue can only be polled.
    pub has_event: bool,
}

/// Connection to a device. Methods may be called from any thread and synchronize themselves.
pub trait Transport: Send + Sync {
    /// Limits of the transport.
    fn traits(&self) -> &Traits;

    /// Reads the configuration space.
    fn read_config(&self) -> Result<ConfigSpace, Failure>;

    /// Sets the features in use. Called once, before the following methods.
    fn set_features(&self, features: u64) -> Result<(), Failure>;

    /// Sets number and size of the virtqueues. Called once.
    fn prepare(&self, queues: u16, ring_size: u16) -> Result<(), Failure>;

    /// Makes memory known to the device, before it returns.
    fn map(&self, region: Region) -> Result<(), Failure>;

    /// Removes memory. The device has released it when this returns.
    fn unmap(&self, region: Region) -> Result<(), Failure>;

    /// Starts a virtqueue. If virtqueues start together, it is only set up here and runs after
    /// [`Transport::run`].
    fn start_queue(&self, queue: NewQueue<'_>) -> Result<RunningQueue, Failure>;

    /// Starts the device, if virtqueues start together.
    fn run(&self) -> Result<(), Failure>;

    /// Stops a virtqueue, unless virtqueues start together. The device has released its memory when
    /// this returns.
    fn stop_queue(&self, index: u16) -> Result<(), Failure>;

    /// Shuts the device down: it releases all memory, and every queue is notified that it is lost.
    fn shutdown(&self);
}
