//! Errors of opening a namespace, and of its connections.

use super::options::MAX_QUEUES;
use drivers::stream::StreamError;
use nvme::Status;
use nvme::fabrics::InvalidParameter;
use nvme::tcp::{Fatal, PduType};
use nvme_auth::host::Refusal;
use nvme_auth::keyring::NoTlsSecret;
use std::io;

/// The reason why a namespace, or a connection to its subsystem, could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The options are invalid.
    #[error("{0}")]
    Options(String),
    /// No connection to the target, or it failed during the negotiation.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The target violates the protocol.
    #[error("not a usable NVMe/TCP target: {0}")]
    Protocol(#[from] Violation),
    /// The target does not grant a requested option.
    #[error("the target does not grant {0}")]
    NotGranted(&'static str),
    /// The target refuses a parameter of Connect.
    #[error("the target does not accept {0} ({1})")]
    Parameter(InvalidParameter, Status),
    /// The target requires authentication, and the host has no secret.
    #[error("the target requires authentication, but no secret is configured (dhchap-key)")]
    NoKey,
    /// The target must authenticate, but does not start an authentication.
    #[error("the target does not support authentication, so it cannot authenticate itself (dhchap-ctrl-key)")]
    NoProof,
    /// Authentication of the host or the target failed.
    #[error("authentication failed: {0}")]
    Authentication(Refusal),
    /// No TLS with the key: the target has another one, or none for these names, or no TLS.
    #[error("the target does not accept the TLS key of this host ({option}): {error}")]
    Untrusted {
        /// The option that names the key.
        option: &'static str,
        /// The first failure.
        #[source]
        error: StreamError,
    },
    /// The keyring has no key for these names.
    #[error("tls-keyring: {0}")]
    NoTlsSecret(#[from] NoTlsSecret),
    /// The target refused a command.
    #[error("the target refuses {command}: {status}")]
    Refused {
        /// The refused action.
        command: &'static str,
        /// The status of the command.
        status: Status,
    },
    /// The namespace does not exist.
    #[error("the subsystem has no namespace{0}")]
    NoNamespace(String),
    /// The namespace or controller cannot be used.
    #[error("the namespace cannot be used: {0}")]
    Unusable(String),
    /// The controller returned invalid data.
    #[error(transparent)]
    Malformed(#[from] nvme::Malformed),
    /// After the connection was lost, a different namespace took its place.
    #[error("the namespace was replaced by another one")]
    Changed,
    /// All queues that the target allows are in use.
    #[error("all {0} queues are in use (queues=1 to {MAX_QUEUES})")]
    AllInUse(u32),
    /// The connection was lost, and reconnecting timed out.
    #[error("connection lost: {0}")]
    Lost(String),
    /// The operating system refused a resource.
    #[error("no queue: {0}")]
    System(#[source] io::Error),
}

impl OpenError {
    /// The closest Linux error number (positive), for C callers.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::Options(_) => libc::EINVAL,
            OpenError::Stream(error) | OpenError::Untrusted { error, .. } => error.errno(),
            OpenError::Protocol(_) | OpenError::Malformed(_) => libc::EPROTO,
            OpenError::NotGranted(_) | OpenError::Unusable(_) => libc::ENOTSUP,
            OpenError::Parameter(InvalidParameter::SUBSYSTEM, _) | OpenError::NoNamespace(_) => libc::ENOENT,
            OpenError::Parameter(..) | OpenError::Refused { .. } => libc::EACCES,
            OpenError::NoTlsSecret(_) => libc::ENOKEY,
            OpenError::NoKey | OpenError::NoProof | OpenError::Authentication(_) => libc::EACCES,
            OpenError::Changed => libc::ESTALE,
            OpenError::AllInUse(_) => libc::EBUSY,
            OpenError::Lost(_) => libc::ENODEV,
            OpenError::System(error) => error.raw_os_error().unwrap_or(libc::ENOMEM),
        }
    }

    /// Whether retrying is useless.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, OpenError::Changed | OpenError::Options(_))
    }
}

/// A protocol violation of the target, or the end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Malformed PDU.
    #[error("a PDU is malformed ({0})")]
    Header(#[from] Fatal),
    /// A PDU that is not allowed in this state.
    #[error("unexpected PDU of type {0:?}")]
    Unexpected(PduType),
    /// No command has this identifier.
    #[error("a completion without a command: identifier {0:#06x}")]
    Command(u16),
    /// Data, or a request for data, outside the range of the command.
    #[error("{len} bytes at {offset} lie outside their command")]
    Outside {
        /// Offset in the command's data.
        offset: u32,
        /// Length.
        len: u32,
    },
    /// A second request for data before the first was fulfilled.
    #[error("the target requests more data than was negotiated")]
    Limit,
    /// A command succeeded without all of its data.
    #[error("a command ends before all of its data was moved")]
    Incomplete,
    /// A data digest is wrong and the data cannot be requested again.
    #[error("the digest of data does not match")]
    Digest,
    /// The target terminates the connection with a reason.
    #[error("the target terminated the connection: fatal error status {status:#x}, {info:#x}")]
    Terminated {
        /// FES.
        status: u16,
        /// FEI.
        info: u32,
    },
    /// The connection ended.
    #[error("the target closed the connection")]
    Closed,
}
