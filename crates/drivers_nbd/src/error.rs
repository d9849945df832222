//! Errors of opening an export.

use super::options::MAX_CONNECTIONS;
use drivers::stream::StreamError;
use nbd::client::HandshakeError;
use std::io;

/// The reason why an export, or a connection to it, could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The options are invalid.
    #[error("{0}")]
    Options(String),
    /// No connection to the server, or it failed during the handshake.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The server refuses, or violates the protocol.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The export cannot be used as a block device, or not with these options.
    #[error("the export cannot be used: {0}")]
    Export(String),
    /// The export of a further connection differs from that of the first one.
    #[error("the export cannot be used: the export changed from {0}")]
    Changed(String),
    /// All connections that the server allows are in use.
    #[error("{}", in_use(.0))]
    AllInUse(u32),
    /// The operating system refused a resource.
    #[error("no queue: {0}")]
    System(#[source] io::Error),
}

fn in_use(connections: &u32) -> String {
    if *connections == 1 {
        return "the only connection is in use: the server does not allow more (CAN_MULTI_CONN)".into();
    }
    format!("all {connections} connections are in use (connections=1 to {MAX_CONNECTIONS})")
}

impl OpenError {
    /// The closest Linux error number (positive), for C callers.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::Options(_) => libc::EINVAL,
            OpenError::Stream(error) => error.errno(),
            OpenError::Handshake(error) => match error {
                HandshakeError::Protocol(_) => libc::EPROTO,
                HandshakeError::TlsRequired(_) | HandshakeError::NoTls(_) => libc::EPROTONOSUPPORT,
                HandshakeError::NoExport { .. } => libc::ENOENT,
                HandshakeError::Refused { .. } => libc::EACCES,
                HandshakeError::Payload(_) => libc::ENOTSUP,
            },
            OpenError::Export(_) | OpenError::Changed(_) => libc::ENOTSUP,
            OpenError::AllInUse(_) => libc::EBUSY,
            OpenError::System(error) => error.raw_os_error().unwrap_or(libc::ENOMEM),
        }
    }
}
