//! Why an export could not be opened.

use super::options::MAX_CONNECTIONS;
use crate::stream::StreamError;
use std::io;

/// Why an export could not be opened, or a connection to it not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
    /// No connection to the server, or it failed while both sides agreed on how to talk.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The other side does not speak the protocol, or breaks it.
    #[error("not a usable NBD server: {0}")]
    Protocol(String),
    /// The server wants encryption, and nobody told us to use it.
    #[error("the server demands TLS (tls=require or nbds://){0}")]
    TlsRequired(String),
    /// Encryption is wanted, and the server has none.
    #[error("the server has no TLS, without which it is not to be used{0}")]
    NoTls(String),
    /// The server has no such export.
    #[error("the server has no export {export:?}{text}")]
    NoExport {
        /// Its name.
        export: String,
        /// What the server says, in brackets, or nothing.
        text: String,
    },
    /// The server refuses.
    #[error("the server refuses {option} with error {reply:#x}{text}")]
    Refused {
        /// What was asked for.
        option: &'static str,
        /// The protocol's number for why.
        reply: u32,
        /// What the server says, in brackets, or nothing.
        text: String,
    },
    /// The export cannot be used as a block device, or not as the options want.
    #[error("the export cannot be used: {0}")]
    Export(String),
    /// Every connection that the server allows is in use.
    #[error("{}", in_use(.0))]
    AllInUse(u32),
    /// The operating system refuses a resource.
    #[error("no queue: {0}")]
    System(#[source] io::Error),
}

fn in_use(connections: &u32) -> String {
    if *connections == 1 {
        return "its one connection is in use; the server must allow more (CAN_MULTI_CONN)".into();
    }
    format!("all {connections} connections are in use (connections=1 to {MAX_CONNECTIONS})")
}

impl OpenError {
    /// The Linux error number (positive) that says about the same to a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::Options(_) => libc::EINVAL,
            OpenError::Stream(error) => error.errno(),
            OpenError::Protocol(_) => libc::EPROTO,
            OpenError::TlsRequired(_) | OpenError::NoTls(_) => libc::EPROTONOSUPPORT,
            OpenError::NoExport { .. } => libc::ENOENT,
            OpenError::Refused { .. } => libc::EACCES,
            OpenError::Export(_) => libc::ENOTSUP,
            OpenError::AllInUse(_) => libc::EBUSY,
            OpenError::System(error) => error.raw_os_error().unwrap_or(libc::ENOMEM),
        }
    }
}
