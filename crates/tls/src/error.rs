//! What can be wrong with secrets, and with what a peer says.

#[cfg(feature = "openssl")]
use openssl::error::ErrorStack;
use std::io;
#[cfg(feature = "openssl")]
use std::path::Path;
use std::path::PathBuf;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read, or other users have access to it.
    #[error(transparent)]
    File(#[from] secrets::Error),
    /// A file is not what it should be.
    #[error("{}: {fault}", path.display())]
    Content {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        fault: String,
    },
    /// The TLS library refuses a setting.
    #[error("TLS cannot be set up: {0}")]
    Library(String),
    /// This was built without the feature `openssl`.
    #[error("this build has no TLS")]
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

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The two sides do not agree, or do not trust each other.
    #[error("the TLS handshake failed: {0}")]
    Handshake(String),
    /// What came is not of this session.
    #[error("TLS: {0}")]
    Broken(String),
    /// The stream ended without a word: the peer died, or somebody between cut it.
    #[error("the connection ended without TLS's goodbye")]
    Truncated,
    /// The peer makes us answer, and takes no answers.
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

/// What the library says, for people.
#[cfg(feature = "openssl")]
pub(crate) fn reasons(stack: &ErrorStack) -> String {
    let mut reasons: Vec<&str> = stack.errors().iter().filter_map(|error| error.reason()).collect();
    reasons.dedup();
    if reasons.is_empty() { "the library does not say why".into() } else { reasons.join(", ") }
}
