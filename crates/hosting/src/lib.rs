//! The common part of servers, which a command line or a daemon's state configures.
//!
//! ```text
//!   text (kind:key=value,…) ─► export (tables of kinds, typed options) ─► a running export
//!   arrays of a graph ─► arrays (kept: rebuilds, scrubs) ◄─ control (a socket for each: freestone array …)
//! ```

#![forbid(unsafe_code)]

pub mod arrays;
pub mod attach;
pub mod control;
pub mod create;
pub mod export;
pub mod sandbox_log;
pub mod text;
pub mod vocabulary;

use block::{Device, DeviceError, IoError, MemoryRegion, Request};
use exports::MemoryBudget;
use reactor::CoreRef;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a server cannot begin or end as it should.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device cannot do what it was asked for; its name is in the message.
    #[error("device {0}")]
    Device(#[from] DeviceError),
    /// A core has ended before its time.
    #[error(transparent)]
    Core(#[from] reactor::CoreStopped),
    /// A control socket cannot be made.
    #[error("control socket {}: {error}", .path.display())]
    ControlSocket {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The cache of a device cannot be flushed; its content may be lost.
    #[error("device {name}: cannot flush: {error}")]
    Flush {
        /// The device.
        name: String,
        /// Why.
        error: IoError,
    },
    /// An array has something to recover at its next start.
    #[error("array {name}: cannot stop cleanly: {error}")]
    Stop {
        /// The array.
        name: String,
        /// Why.
        error: IoError,
    },
}

/// Has the buffers of this number of cores, and of network clients, lie in memory that other
/// processes can be given. Before the first core starts, and once a process.
///
/// # Errors
/// When the system refuses the memory.
pub fn share_buffers(cores: usize) -> Result<MemoryRegion, String> {
    let bytes = reactor::shared_memory_for(cores, MemoryBudget::process().bytes());
    stack::passed::share_buffers(bytes)
        .map_err(|error| format!("cannot share {bytes} bytes of memory: {error}"))
}

/// Makes durable what a device holds in its cache.
///
/// # Errors
/// When the device fails.
pub fn flush(device: &Arc<dyn Device>, core: &CoreRef) -> Result<(), Error> {
    if device.limits().read_only {
        return Ok(());
    }
    let device = device.clone();
    core.block_on(move |_| async move {
        let channel = device.open_channel()?;
        let flushed = channel.submit(&Request::flush(), 0).await;
        flushed.map_err(|error| Error::Flush { name: device.name().to_owned(), error })
    })?
}

/// The name of this host, also in a sandbox that hides the files with it.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
