//! A virtio-blk device that another process serves over vhost-user: the client side.
//!
//! ```text
//!   VirtioBlk (Device) ── open_channel() ──► QueueChannel ─► VirtioBlkQueue ─► virtio::driver ─► rings
//!      │ control                                                                                  │ shared
//!   Session: features, memory, virtqueues ─► Frontend ── Unix socket ──►  server  ◄── memory ─────┘
//!      └─ Listener thread: the end of the connection, changes of the configuration
//! ```
//!
//! Every channel has a virtqueue of its own, so there are at most as many as the server has queues. Memory must be
//! shared with the server ([`Device::map_region`], [`crate::shared_memory`]); a request whose memory is not fails
//! with `Invalid`. When the server vanishes every request ends with `DeviceGone`. Polled, a queue makes no system
//! call; armed, it wakes up by an eventfd.
//!
//! Source: VIRTIO 1.3, 5.2; QEMU, docs/interop/vhost-user.rst.

mod frontend;
mod limits;
mod link;
mod options;
mod queue;
mod regions;
mod session;
#[cfg(test)]
mod tests;

pub use frontend::{Frontend, FrontendError, FrontendReq, Reply};
pub use options::{Choice, Options};
pub use queue::VirtioBlkQueue;
pub use regions::{Region, Regions};
pub use session::{Facts, Session};

use block::{Channel, Device, DeviceError, Limits, MemoryRegion, SharedLimits};
use reactor::QueueChannel;
use std::rc::Rc;
use std::sync::Arc;

/// A block device behind a vhost-user socket.
pub struct VirtioBlk {
    session: Arc<Session>,
    limits: Arc<SharedLimits>,
}

impl VirtioBlk {
    /// Connects to the server and negotiates.
    ///
    /// # Errors
    /// When nobody listens, or the server lacks something that the options ask for.
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
