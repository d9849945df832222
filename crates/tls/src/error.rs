//! Errors of secrets, and of the peer's messages.

#[cfg(feature = "openssl")]
use openssl::error::ErrorStack;
use std::io;
#[cfg(feature = "openssl")]
use std::path::Path;
use std::path::PathBuf;

/// Why a configuration cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read, or other users have access to it.
    #[error(transparent)]
    File(#[from] secrets::Error),
    /// The content of a file is invalid.
    #[error("{}: {fault}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason.
        fault: String,
    },
    /// The TLS library refuses a setting.
    #[error("TLS cannot be set up: {0}")]
    Library(String),
    /// This was built without the feature `openssl`.
    #[error("TLS is not part of this build")]
    Absent,
}

#[cfg(feature = "openssl")]
impl Error {
    pub(crate) fn content(path: &Path, fault: impl Into<String>) -> Error {
        Error::Content { path: path.to_owned(), fault: fault.into() }
    }
}

#[cfg(feature = "openssl")]
impl From<ErrorStack> for Error {
    fn from(stack: ErrorStack) -> Error {
        Error::Library(reasons(&stack))
    }
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The sides do not agree, or do not trust each other.
    #[error("the TLS handshake failed: {0}")]
    Handshake(String),
    /// The bytes received do not belong to this session.
    #[error("TLS: {0}")]
    Broken(String),
    /// The stream ended without a close notification: the peer died, or the connection was cut.
    #[error("the connection ended without TLS's goodbye")]
    Truncated,
    /// The peer causes answers and does not receive them.
    #[error("TLS: the peer takes no answers, and {0} bytes of them wait")]
    Flood(usize),
}

impl From<SessionError> for io::Error {
    fn from(error: SessionError) -> io::Error {
        let kind = match error {
            SessionError::Truncated => io::ErrorKind::ConnectionAborted,
            SessionError::Handshake(_) | SessionError::Broken(_) | SessionError::Flood(_) => {
                io::ErrorKind::InvalidData
            }
        };
        io::Error::new(kind, error)
    }
}

/// Returns the library's reasons as text for users.
#[cfg(feature = "openssl")]
pub(crate) fn reasons(stack: &ErrorStack) -> String {
    let mut reasons: Vec<&str> = stack.errors().iter().filter_map(|error| error.reason()).collect();
    reasons.dedup();
    if reasons.is_empty() { "the library does not say why".into() } else { reasons.join(", ") }
}
