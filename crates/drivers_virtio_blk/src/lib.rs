//! Driver for virtio-blk devices.
//!
//! ```text
//!   VirtioBlk (Device) ── open_channel() ──► QueueChannel ─► VirtioBlkQueue ─► virtio::driver ─► rings
//!      │ control                                                                                  │ shared
//!   Session: features, memory, virtqueues ─► Transport ── socket, ioctls, registers ──►  device ◄─┘
//!      └─ Listener thread: the end of the device, changes of its configuration
//! ```
//!
//! The device is another process ([`TransportKind::VhostUser`]), a device of the kernel's vDPA bus
//! ([`TransportKind::VhostVdpa`]) or a PCI function ([`TransportKind::VfioPci`]). Only the
//! [`transport`]s differ.
//!
//! Every channel has its own virtqueue, so the device's queues limit the number of channels. The
//! device must know the memory of a request ([`Device::map_region`], [`drivers::shared_memory`]);
//! otherwise the request fails with `Invalid`. When the device is lost, every request ends with
//! `DeviceGone`. A polled queue makes no system call; an armed one is woken through an eventfd.
//!
//! Source: VIRTIO 1.3, 5.2.

pub mod blkio;
mod doorbell;
mod failure;
pub mod kind;
mod limits;
mod options;
mod parts;
mod peer;
mod queue;
mod regions;
mod session;
#[cfg(test)]
mod tests;
mod transport;
mod vfio_pci;
mod vhost_user;
mod vhost_vdpa;

pub use options::{Choice, Options, TransportKind};
pub use queue::VirtioBlkQueue;
pub use regions::{Region, Regions};
pub use session::{Facts, Session};
pub use vhost_user::{Frontend, FrontendError, FrontendReq, Reply};

use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion, SharedLimits};
use reactor::QueueChannel;
use std::rc::Rc;
use std::sync::Arc;

/// A virtio-blk device as a block device.
pub struct VirtioBlk {
    session: Arc<Session>,
    limits: Arc<SharedLimits>,
}

impl VirtioBlk {
    /// Connects to the device and negotiates.
    ///
    /// # Errors
    /// When no device is found, or it lacks a feature that the options require.
    pub fn open(options: &Options) -> Result<VirtioBlk, DeviceError> {
        Ok(VirtioBlk::over(Session::open(options)?))
    }

    /// A device over an existing session.
    pub fn over(session: Arc<Session>) -> VirtioBlk {
        let limits = SharedLimits::new(session.limits().clone());
        let shared = limits.clone();
        session.on_capacity(move |capacity| shared.set_capacity(capacity));
        VirtioBlk { session, limits }
    }

    /// The underlying session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Device for VirtioBlk {
    fn name(&self) -> &str {
        self.session.name()
    }

    fn limits(&self) -> Limits {
        self.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(QueueChannel::open(self.session.start_queue()?, self.limits.clone()))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.limits.set_capacity(self.session.refresh()?);
        Ok(self.limits.get())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.session.add_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.session.remove_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}
