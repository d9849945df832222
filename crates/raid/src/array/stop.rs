//! The ways in which a step of a stripe operation ends early.

use crate::mutant::{self, Mutant};
use block::IoError;

/// Why a step ends early.
pub(super) enum Stop {
    /// Fewer rows at a time need less of what cannot be read. Nothing was written.
    Halve,
    /// Start again: what is readable or live has changed.
    Again,
    /// The log takes no entry of this size: the rectangle must be cut.
    TooLarge,
    /// The stripe belongs to another core by now.
    Moved,
    /// The write fails.
    Error(IoError),
}

impl From<IoError> for Stop {
    fn from(error: IoError) -> Stop {
        Stop::Error(error)
    }
}

/// A strip of which something could not be read.
pub(crate) enum ReadFailure {
    /// The blocks are bad; the member may be fine.
    Medium,
    /// The member is gone.
    Fatal(IoError),
}

/// Returns whether an error of a read is the medium's or fails the member.
pub(crate) fn read_failure(error: IoError) -> ReadFailure {
    match error {
        IoError::Medium | IoError::Corrupt if !mutant::is(Mutant::OutForReadError) => ReadFailure::Medium,
        error => ReadFailure::Fatal(error),
    }
}
