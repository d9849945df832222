//! Why a namespace could not be opened, and why a connection ends.

use super::options::MAX_QUEUES;
use crate::stream::StreamError;
use nvme::Status;
use nvme::fabrics::InvalidParameter;
use nvme::tcp::{Fatal, PduType};
use nvme_auth::host::Refusal;
use std::io;

/// Why a namespace could not be opened, or a connection to its subsystem not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
    /// No connection to the target, or it failed while both sides agreed on how to talk.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The target breaks the protocol.
    #[error("not a usable NVMe/TCP target: {0}")]
    Protocol(#[from] Violation),
    /// The target does not grant what the options ask for.
    #[error("the target does not grant {0}")]
    NotGranted(&'static str),
    /// The target does not take a parameter of Connect.
    #[error("the target does not accept {0} ({1})")]
    Parameter(InvalidParameter, Status),
    /// The host must prove who it is, and has nothing to do it by.
    #[error("the target wants the host to prove who it is, and there is no secret for that (dhchap-key)")]
    NoKey,
    /// The target shall prove who it is, and does not even ask the host.
    #[error("the target asks for no proof, and so gives none of its own (dhchap-ctrl-key)")]
    NoProof,
    /// Host or target could not prove who they are.
    #[error("authentication: {0}")]
    Authentication(Refusal),
    /// The target refuses a command.
    #[error("the target refuses {command}: {status}")]
    Refused {
        /// What was asked for.
        command: &'static str,
        /// What it says.
        status: Status,
    },
    /// There is no such namespace.
    #[error("the subsystem has no namespace{0}")]
    NoNamespace(String),
    /// The namespace or controller cannot be used.
    #[error("the namespace cannot be used: {0}")]
    Unusable(String),
    /// What it says about itself makes no sense.
    #[error(transparent)]
    Malformed(#[from] nvme::Malformed),
    /// After the connection was lost there is another namespace in its place.
    #[error("the namespace is not the one that was opened")]
    Changed,
    /// Every queue that the target allows is in use.
    #[error("all {0} queues are in use (queues=1 to {MAX_QUEUES})")]
    AllInUse(u32),
    /// The connection is lost, and does not come back.
    #[error("the connection is lost: {0}")]
    Lost(String),
    /// The operating system refuses a resource.
    #[error("no queue: {0}")]
    System(#[source] io::Error),
}

impl OpenError {
    /// The Linux error number (positive) that says about the same to a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::Options(_) => libc::EINVAL,
            OpenError::Stream(error) => error.errno(),
            OpenError::Protocol(_) | OpenError::Malformed(_) => libc::EPROTO,
            OpenError::NotGranted(_) | OpenError::Unusable(_) => libc::ENOTSUP,
            OpenError::Parameter(InvalidParameter::SUBSYSTEM, _) | OpenError::NoNamespace(_) => libc::ENOENT,
            OpenError::Parameter(..) | OpenError::Refused { .. } => libc::EACCES,
            OpenError::NoKey | OpenError::NoProof | OpenError::Authentication(_) => libc::EACCES,
            OpenError::Changed => libc::ESTALE,
            OpenError::AllInUse(_) => libc::EBUSY,
            OpenError::Lost(_) => libc::ENODEV,
            OpenError::System(error) => error.raw_os_error().unwrap_or(libc::ENOMEM),
        }
    }

    /// Whether it is of no use to try again.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, OpenError::Changed | OpenError::Options(_))
    }
}

/// How the target broke the protocol, or that it gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A PDU that cannot be.
    #[error("a PDU is malformed ({0})")]
    Header(#[from] Fatal),
    /// A PDU that cannot come now.
    #[error("a PDU of type {0:?} comes when none can")]
    Unexpected(PduType),
    /// An answer that nobody asked for.
    #[error("an answer to nothing: command {0:#06x}")]
    Command(u16),
    /// Data, or a wish for data, outside of what the command moves.
    #[error("{len} bytes at {offset} lie outside their command")]
    Outside {
        /// Where.
        offset: u32,
        /// How many.
        len: u32,
    },
    /// A second wish for data before the first was met.
    #[error("more data is asked for than was agreed on")]
    Limit,
    /// A command that succeeds without all of its data.
    #[error("a command ends before all of its data was moved")]
    Incomplete,
    /// The digest of data is wrong while nothing may be lost.
    #[error("the digest of data does not match")]
    Digest,
    /// The target ends the connection and says why.
    #[error("the target ends the connection: fatal error status {status:#x}, {info:#x}")]
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
