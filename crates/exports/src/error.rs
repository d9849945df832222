//! Errors of starting an export, and of a client's session.

use block::DeviceError;
use reactor::CoreStopped;
use std::io;
use std::path::PathBuf;

/// An error on the control path of an export. Its message includes the causes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration asks for something that the export does not support.
    #[error("{0}")]
    Config(String),
    /// The socket cannot be used.
    #[error("cannot {action} socket {}: {source}", path.display())]
    Socket {
        /// The socket's path.
        path: PathBuf,
        /// The failed action.
        action: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The operating system refused a step.
    #[error("cannot {action}: {source}")]
    System {
        /// The failed action.
        action: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The kernel's ublk driver refused a command.
    #[error("{what}: {source}")]
    Ublk {
        /// The failed action and its device.
        what: String,
        /// The error of the driver.
        source: io::Error,
    },
    /// The device refused a step.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A core has stopped while the export still used it.
    #[error(transparent)]
    Core(#[from] CoreStopped),
    /// The client violated the protocol or exceeded a limit of this export.
    #[error("{0}")]
    Protocol(String),
    /// A resource of the client cannot be used: its memory, rings, shared regions.
    #[error("{what}: {source}")]
    Client {
        /// The resource, with its values.
        what: String,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// [`Error::Protocol`].
    pub fn protocol(message: impl Into<String>) -> Error {
        Error::Protocol(message.into())
    }

    /// [`Error::Client`].
    pub fn client(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        Error::Client { what: what.into(), source: source.into() }
    }
}

// Here, because the crate of the servers owns neither of the two types.
impl From<Error> for vhost::vhost_user::Error {
    fn from(error: Error) -> Self {
        vhost::vhost_user::Error::ReqHandlerError(io::Error::other(error))
    }
}
