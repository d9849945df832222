//! A namespace of an NVMe/TCP target: the host side.
//!
//! ```text
//!   NvmeTcpDevice ── open_channel() ──► QueueChannel ─► NvmeTcpQueue ── one connection each ──►  target
//!      │ control                                           ▲ connections, by its QueueMailbox            │
//!   Session: address, facts ──── connection thread ────────┴──────── admin queue ────────────────┘
//! ```
//!
//! Every channel has its own I/O queue. Short writes travel in their command's capsule, longer ones
//! when the controller requests them (R2T). Read data goes from the socket straight into the
//! caller's memory.
//!
//! When a connection is lost, requests wait while the connection thread reconnects with growing
//! pauses. Commands in flight are sent again over the new connection. After the loss timeout
//! requests fail with `DeviceGone`. A command that was lost five times fails with `TimedOut`. So
//! does a command that a controller never answers: its connection is aborted each time.
//!
//! A target is not trusted: a protocol violation ends the connection. If the target requires
//! authentication, every queue authenticates when it connects, and may demand the same of the
//! target (`authentication`). With a key of TLS every connection is encrypted, and the key proves
//! the names of host and subsystem to each other (`identity`).
//!
//! The device notices that a namespace grows when the controller reports it, or with
//! [`block::Device::refresh`].
//!
//! Source: NVM Express TCP Transport Specification 1.0 (3.6.1 for TLS), Base Specification 2.0
//! section 6.

mod authentication;
pub mod blkio;
mod connect;
mod connection_thread;
mod controller;
mod discovery;
mod error;
mod facts;
mod identity;
pub mod kind;
mod link;
mod operation;
mod options;
mod queue;
mod queue_mailbox;
mod session;
mod shared;
#[cfg(test)]
mod tests;

pub use discovery::discover;
pub use drivers::stream::{Address, Cancel, StreamError};
pub use error::{OpenError, Violation};
pub use facts::Facts;
pub use nvme::fabrics::Nqn;
pub use nvme::fabrics::discovery::DiscoveryEntry;
pub use nvme_auth::{Key, Keyring, TlsKey};
pub use options::{
    DEFAULT_PORT, DISCOVERY_PORT, KeyFiles, MAX_QUEUE_DEPTH, MAX_QUEUES, Options, parse_address,
    parse_address_at,
};
pub use queue::NvmeTcpQueue;
pub use session::Session;

use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion};
use reactor::QueueChannel;
use std::rc::Rc;
use std::sync::Arc;

/// A block device that is a namespace of an NVMe/TCP target.
pub struct NvmeTcpDevice {
    session: Arc<Session>,
}

impl NvmeTcpDevice {
    /// Connects to the controller and opens the namespace.
    ///
    /// # Errors
    /// When there is no target, the namespace does not exist, or it cannot be used.
    pub fn open(options: &Options) -> Result<NvmeTcpDevice, DeviceError> {
        let session = Session::open(options, &Cancel::never());
        session.map(NvmeTcpDevice::over).map_err(|error| DeviceError::new(options.name(), error.to_string()))
    }

    /// Creates the device over an existing session.
    pub fn over(session: Arc<Session>) -> NvmeTcpDevice {
        NvmeTcpDevice { session }
    }

    /// The session of the device.
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

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}
