//! The refusal of a fabrics command.

use nvme::Status;
use nvme::fabrics::InvalidParameter;

/// The reason why a Connect was refused: status and dword 0 of the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status.
    pub status: Status,
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
}

impl Refusal {
    /// The parameter that is invalid, if the status names one. For logs.
    pub fn parameter(&self) -> Option<InvalidParameter> {
        let has_parameter = self.status == Status::CONNECT_INVALID_PARAMETERS;
        has_parameter.then(|| InvalidParameter::parse(self.result))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_parameter_that_is_invalid() {
        let named = |refusal: Refusal| refusal.parameter().map(|parameter| parameter.to_string());
        assert_eq!(named(InvalidParameter::HOST.into()), Some("the host's name".into()));
        assert_eq!(named(InvalidParameter::QUEUE_SIZE.into()), Some("the queue size".into()));
        assert_eq!(named(Status::CONNECT_CONTROLLER_BUSY.into()), None);
    }
}
