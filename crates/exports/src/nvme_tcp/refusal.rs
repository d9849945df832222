//! The refusal of a fabrics command.

use nvme::Status;
use nvme::fabrics::InvalidParameter;

/// The reason why a Connect was refused: status and dword 0 of the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: Status,
    pub(super) result: u64,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Refusal {
        Refusal { status, result: 0 }
    }
}

impl From<InvalidParameter> for Refusal {
    fn from(parameter: InvalidParameter) -> Refusal {
        Refusal { status: Status::CONNECT_INVALID_PARAMETERS, result: parameter.result() }
    }
}
