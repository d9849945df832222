//! What servers have in common, whether a command line or a daemon's state says what they serve.
//!
//! ```text
//!   text (kind:key=value,…) ─► export (tables of kinds, typed options) ─► a running export
//!   arrays of a graph ─► arrays (kept: rebuilds, scrubs) ◄─ control (a socket for each: freestone array …)
//! ```

#![forbid(unsafe_code)]

pub mod arrays;
pub mod control;
pub mod create;
pub mod export;
pub mod text;

use block::{DeviceError, IoError};
use std::io;
use std::path::PathBuf;

/// Why a server cannot begin or end as it should.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device cannot do what it was asked for; its name is in the message.
    #[error("device {0}")]
    Device(#[from] DeviceError),
    /// A core has ended before its time.
    #[error(transparent)]
    Core(#[from] reactor::CoreStopped),
    /// Nobody can listen at a control socket.
    #[error("control socket {}: {error}", .path.display())]
    ControlSocket {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// An array has something to recover at its next start.
    #[error("array {name}: it cannot be stopped in good order: {error}")]
    Stop {
        /// The array.
        name: String,
        /// Why.
        error: IoError,
    },
}

/// What this host is called.
pub fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}
