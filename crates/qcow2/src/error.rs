//! The error of opening, checking and changing an image.

use block::IoError;

/// Why an image cannot be opened, checked or changed. `Display` names image, part and value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{image}: {problem}")]
pub struct Error {
    /// The name of the image's device.
    pub image: String,
    /// The reason.
    pub problem: Problem,
}

impl Error {
    pub(crate) fn new(image: &str, problem: Problem) -> Error {
        Error { image: image.to_owned(), problem }
    }
}

/// The reason of an [`Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Another format, or none.
    #[error("no qcow2 image: {0}")]
    NotQcow2(String),
    /// A valid image with a feature that this crate does not support.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// The image contradicts its format, or exceeds a limit.
    #[error("{0}")]
    Invalid(String),
    /// The image cannot be opened as it was requested.
    #[error("{0}")]
    Refused(String),
    /// A part of the image cannot be read.
    #[error("cannot read {part} at byte {offset}: {error}")]
    Io {
        /// The part, e.g. `the L1 table`.
        part: &'static str,
        /// Its first byte in the file.
        offset: u64,
        /// The device's error.
        error: IoError,
    },
    /// A part of the image cannot be written.
    #[error("cannot write {part} at byte {offset}: {error}")]
    Write {
        /// The part, e.g. `the L1 table`.
        part: &'static str,
        /// Its first byte in the file.
        offset: u64,
        /// The device's error.
        error: IoError,
    },
}

/// An [`Problem::Invalid`] with this text.
pub(crate) fn invalid(text: impl Into<String>) -> Problem {
    Problem::Invalid(text.into())
}

/// An [`Problem::Unsupported`] with this text.
pub(crate) fn unsupported(text: impl Into<String>) -> Problem {
    Problem::Unsupported(text.into())
}
