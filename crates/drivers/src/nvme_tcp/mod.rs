//! A namespace of an NVMe/TCP target: the host side.
//!
//! ```text
//!   NvmeTcpDevice ── open_channel() ──► QueueChannel ─► NvmeTcpQueue ── one connection each ──►  target
//!      │ control                                           ▲ connections, by its QueueMailbox            │
//!   Session: address, facts ──── keeper, one thread ───────┴──────── admin queue ────────────────┘
//! ```
//!
//! Every channel has an I/O queue of its own. Short writes travel in their command's capsule, longer ones when the
//! controller asks for them (R2T); what is read goes from the socket straight into the caller's memory.
//!
//! When a connection is lost, requests wait while the keeper connects again with growing pauses, and what was under
//! way goes to the new connection once more; after the loss timeout requests fail with `DeviceGone`. A command that
//! was lost five times fails with `TimedOut`, and so does one that a controller never answers: its connection is
//! given up each time.
//!
//! A target is not trusted: whatever breaks the protocol ends the connection. Where it wants to know who the host is,
//! every queue proves that when it connects, and may ask for the same (`authentication`). There is no encryption.
//!
//! A namespace that grows is noticed when the controller reports it, or with [`block::Device::refresh`].
//!
//! Truth: NVM Express TCP Transport Specification 1.0, Base Specification 2.0 section 6.

mod authentication;
mod connection_thread;
mod controller;
mod discovery;
mod error;
mod facts;
mod link;
mod operation;
mod options;
mod queue;
mod queue_mailbox;
mod session;
#[cfg(test)]
mod tests;

pub use crate::stream::{Address, Cancel, StreamError};
pub use discovery::discover;
pub use error::{OpenError, Violation};
pub use facts::Facts;
pub use nvme::fabrics::Nqn;
pub use nvme::fabrics::discovery::DiscoveryEntry;
pub use nvme_auth::Key;
pub use options::{
    DEFAULT_PORT, DISCOVERY_PORT, MAX_QUEUE_DEPTH, MAX_QUEUES, Options, parse_address, parse_address_at,
    parse_uuid,
};
pub use queue::NvmeTcpQueue;
pub use session::Session;

use block::{Channel, Device, DeviceError, Limits, MemoryRegion};
use reactor::QueueChannel;
use std::rc::Rc;
use std::sync::Arc;

/// A block device that is a namespace of an NVMe/TCP target.
pub struct NvmeTcpDevice {
    session: Arc<Session>,
}

impl NvmeTcpDevice {
    /// Connects to the controller and looks at the namespace.
    ///
    /// # Errors
    /// When there is no target, no such namespace, or it cannot be used.
    pub fn open(options: &Options) -> Result<NvmeTcpDevice, DeviceError> {
        let session = Session::open(options, &Cancel::never());
        session.map(NvmeTcpDevice::over).map_err(|error| DeviceError::new(options.name(), error.to_string()))
    }

    /// The device over a session that is there already.
    pub fn over(session: Arc<Session>) -> NvmeTcpDevice {
        NvmeTcpDevice { session }
    }

    /// The session below.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Device for NvmeTcpDevice {
    fn name(&self) -> &str {
        self.session.name()
    }

    fn limits(&self) -> Limits {
        self.session.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        match self.session.start_queue(&Cancel::never()) {
            Ok(queue) => Ok(QueueChannel::open(queue, self.session.shared_limits().clone())),
            Err(error) => Err(DeviceError::new(self.name(), error.to_string())),
        }
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        match self.session.refresh(&Cancel::never()) {
            Ok(()) => Ok(self.limits()),
            Err(error) => Err(DeviceError::new(self.name(), error.to_string())),
        }
    }

    fn map_region(&self, _region: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _region: &MemoryRegion) {}
}
