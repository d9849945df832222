//! A virtio-blk device, driven from this process.
//!
//! ```text
//!   VirtioBlk (Device) ── open_channel() ──► QueueChannel ─► VirtioBlkQueue ─► virtio::driver ─► rings
//!      │ control                                                                                  │ shared
//!   Session: features, memory, virtqueues ─► Transport ── socket, ioctls, registers ──►  device ◄─┘
//!      └─ Listener thread: the end of the device, changes of its configuration
//! ```
//!
//! The device is another process ([`TransportKind::VhostUser`]), a device of the kernel's vDPA bus
//! ([`TransportKind::VhostVdpa`]) or a PCI function ([`TransportKind::VfioPci`]); only [`transport`]s know.
//!
//! Every channel has a virtqueue of its own, so there are at most as many as the device has queues. Memory must be
//! known to the device ([`Device::map_region`], [`crate::shared_memory`]); a request whose memory is not fails
//! with `Invalid`. When the device goes away every request ends with `DeviceGone`. Polled, a queue makes no system
//! call; armed, it wakes up by an eventfd.
//!
//! Source: VIRTIO 1.3, 5.2.

mod limits;
mod options;
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

use block::{Channel, Device, DeviceError, Limits, MemoryRegion, SharedLimits};
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
    /// When there is no device, or it lacks something that the options ask for.
    pub fn open(options: &Options) -> Result<VirtioBlk, DeviceError> {
        Ok(VirtioBlk::over(Session::open(options)?))
    }

    /// The device over a session that is there already.
    pub fn over(session: Arc<Session>) -> VirtioBlk {
        let limits = SharedLimits::new(session.limits().clone());
        let shared = limits.clone();
        session.on_capacity(move |capacity| shared.set_capacity(capacity));
        VirtioBlk { session, limits }
    }

    /// The session below.
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
}
