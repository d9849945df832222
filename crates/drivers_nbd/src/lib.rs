//! An export of an NBD server, over TCP or a Unix socket: the client side.
//!
//! ```text
//!   NbdDevice ── open_channel() ──► QueueChannel ─► NbdQueue ── one connection each ──►  server
//!      │ control                            Outbox: sendmsg(2), many requests
//!   Session: address, handshake, facts      Inbox:  recvmsg(2), many replies, data in place
//! ```
//!
//! The driver negotiates the richest form of replies that the server supports. These are extended
//! headers (64-bit ranges), structured replies (holes, errors in the middle of a read) or simple
//! ones. Every channel has its own connection if the server allows that (`CAN_MULTI_CONN`);
//! otherwise there is one channel.
//!
//! A server is not trusted. A protocol violation ends the connection, and every request in flight
//! with `DeviceGone`. With TLS configured, the driver uses the server only through TLS, and only if
//! its certificate or key is trusted.
//!
//! When the server vanishes, requests end in the same way, or wait for the reconnect delay and are
//! sent again. On TCP that is noticed within a minute. A server that continues to execute requests
//! of a lost connection can mix them up with newer ones: it has to drain them.
//!
//! The size is that of the last connection: the protocol has no message that announces or queries
//! it while requests are served. A connection that replaces a lost one, or that
//! [`block::Device::refresh`] makes, shows a size that has grown. An export that has shrunk is
//! refused.
//!
//! Source: <https://github.com/NetworkBlockDevice/nbd>, doc/proto.md and doc/uri.md; extended
//! headers: its branch `extension-ext-header`.

pub mod blkio;
mod coverage;
mod error;
mod handshake;
pub mod kind;
mod operation;
mod options;
mod queue;
mod reconnect;
mod session;
#[cfg(test)]
mod tests;

pub use drivers::stream::{Address, Cancel, StreamError};
pub use error::OpenError;
pub use nbd::Replies;
pub use nbd::client::{Facts, HandshakeError};
pub use options::{DEFAULT_PORT, MAX_CONNECTIONS, MAX_QUEUE_DEPTH, Options, Tls};
pub use queue::NbdQueue;
pub use session::Session;

use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion};
use reactor::QueueChannel;
use std::rc::Rc;
use std::sync::Arc;

/// A block device behind an NBD server.
pub struct NbdDevice {
    session: Arc<Session>,
}

impl NbdDevice {
    /// Connects to the server and opens the export.
    ///
    /// # Errors
    /// When no server listens, or the export does not exist or cannot be used.
    pub fn open(options: &Options) -> Result<NbdDevice, DeviceError> {
        let session = Session::open(options, &Cancel::never());
        session.map(NbdDevice::over).map_err(|error| DeviceError::new(options.name(), error.to_string()))
    }

    /// Creates the device over an existing session.
    pub fn over(session: Arc<Session>) -> NbdDevice {
        NbdDevice { session }
    }

    /// The session of the device.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Device for NbdDevice {
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
