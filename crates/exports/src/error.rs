//! Why an export could not be started, or a client's session ended.

use block::DeviceError;
use reactor::CoreStopped;
use std::io;
use std::path::PathBuf;

/// What went wrong on the control side of an export. The message carries its causes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration asks for what the export cannot do.
    #[error("{0}")]
    Config(String),
    /// The socket cannot be used.
    #[error("cannot {action} socket {}: {source}", path.display())]
    Socket {
        /// The socket's path.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The operating system refused something.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The kernel's ublk driver refused something.
    #[error("{what}: {source}")]
    Ublk {
        /// What cannot be done, and to which device.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// The device refused something.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A core has ended while the export still used it.
    #[error(transparent)]
    Core(#[from] CoreStopped),
    /// The client asked for something that the protocol or this export does not allow.
    #[error("{0}")]
    Protocol(String),
    /// Something that the client brought cannot be used: its memory, rings, shared regions.
    #[error("{what}: {source}")]
    Client {
        /// What cannot be used, with its values.
        what: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    pub(crate) fn protocol(message: impl Into<String>) -> Error {
        Error::Protocol(message.into())
    }

    pub(crate) fn client(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        Error::Client { what: what.into(), source: source.into() }
    }
}

impl From<Error> for vhost::vhost_user::Error {
    fn from(error: Error) -> Self {
        vhost::vhost_user::Error::ReqHandlerError(io::Error::other(error))
    }
}
