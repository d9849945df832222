//! Errors of opening an export.

use super::options::MAX_CONNECTIONS;
use crate::stream::StreamError;
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
    /// The server does not speak NBD, or violates the protocol.
    #[error("not a usable NBD server: {0}")]
    Protocol(String),
    /// The server requires TLS, which is not configured.
    #[error("the server demands TLS (tls=require or nbds://){0}")]
    TlsRequired(String),
    /// TLS is configured, and the server does not support it.
    #[error("the server does not support TLS, which is required{0}")]
    NoTls(String),
    /// The server has no export of this name.
    #[error("the server has no export {export:?}{text}")]
    NoExport {
        /// The requested name.
        export: String,
        /// The server's text, in brackets, or empty.
        text: String,
    },
    /// The server refused an option.
    #[error("the server refuses {option} with error {reply:#x}{text}")]
    Refused {
        /// The refused option.
        option: &'static str,
        /// The protocol's error number.
        reply: u32,
        /// The server's text, in brackets, or empty.
        text: String,
    },
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
            OpenError::Protocol(_) => libc::EPROTO,
            OpenError::TlsRequired(_) | OpenError::NoTls(_) => libc::EPROTONOSUPPORT,
            OpenError::NoExport { .. } => libc::ENOENT,
            OpenError::Refused { .. } => libc::EACCES,
            OpenError::Export(_) | OpenError::Changed(_) => libc::ENOTSUP,
            OpenError::AllInUse(_) => libc::EBUSY,
            OpenError::System(error) => error.raw_os_error().unwrap_or(libc::ENOMEM),
        }
    }
}
