//! The failure of a command.

use block::IoError;
use nvme::Status;

/// The failure of a command.
pub enum Failure {
    /// The command completes with this status.
    Status(Status),
    /// A status with dwords 0 and 1 of the completion.
    Detailed {
        /// The status.
        status: Status,
        /// The dwords.
        result: u64,
    },
    /// The connection is broken: no completion can be sent.
    Gone,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        Failure::Status(status)
    }
}

impl From<IoError> for Failure {
    fn from(error: IoError) -> Failure {
        Failure::Status(Status::of(error))
    }
}
