//! Errors of calls: a code of CSI, and a sentence that names object and value.

use std::io;
use std::path::Path;
use tonic::{Code, Status};

/// Why a call fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// The code that the orchestrator acts on.
    pub code: Code,
    /// A sentence for people.
    pub message: String,
}

/// The result of a call, or of a part of one.
pub type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    /// A fault with a code.
    pub fn new(code: Code, message: impl Into<String>) -> Fault {
        Fault { code, message: message.into() }
    }

    /// The call itself is wrong.
    pub fn invalid(message: impl Into<String>) -> Fault {
        Fault::new(Code::InvalidArgument, message)
    }

    /// The object does not exist.
    pub fn not_found(message: impl Into<String>) -> Fault {
        Fault::new(Code::NotFound, message)
    }

    /// The state of the object does not permit the call.
    pub fn precondition(message: impl Into<String>) -> Fault {
        Fault::new(Code::FailedPrecondition, message)
    }

    /// The call is to be repeated: another one, or a job, is at work.
    pub fn again(message: impl Into<String>) -> Fault {
        Fault::new(Code::Aborted, message)
    }

    /// The system or a program fails.
    pub fn internal(message: impl Into<String>) -> Fault {
        Fault::new(Code::Internal, message)
    }

    /// The system fails at a file or device.
    pub fn of_file(path: &Path, error: impl Into<io::Error>) -> Fault {
        Fault::internal(format!("{}: {}", path.display(), error.into()))
    }

    /// The same fault with its object in front.
    #[must_use]
    pub fn about(self, object: impl std::fmt::Display) -> Fault {
        Fault { message: format!("{object}: {}", self.message), ..self }
    }
}

/// The one mapping of the daemon's refusals to codes.
impl From<client::Error> for Fault {
    fn from(error: client::Error) -> Fault {
        let code = match &error {
            client::Error::Silent { is_timeout: true, .. } => Code::DeadlineExceeded,
            client::Error::Silent { .. } => Code::Unavailable,
            client::Error::Refused(problem) => code_of(&problem.kind, problem.status),
            client::Error::Status { status, .. } => code_of("", status.as_u16()),
            _ => Code::Internal,
        };
        Fault::new(code, error.to_string())
    }
}

/// The code for a problem of the daemon's API, by its type and, for other types, its HTTP status.
fn code_of(kind: &str, status: u16) -> Code {
    match (kind, status) {
        ("invalid", _) => Code::InvalidArgument,
        ("not-found", _) => Code::NotFound,
        ("exists", _) => Code::AlreadyExists,
        ("in-use" | "cannot-open", _) => Code::FailedPrecondition,
        ("no-room", _) => Code::ResourceExhausted,
        ("stale", _) => Code::Aborted,
        ("unavailable" | "stopping", _) | (_, 502..=504) => Code::Unavailable,
        ("forbidden", _) | (_, 403) => Code::PermissionDenied,
        (_, 401) => Code::Unauthenticated,
        (_, 400 | 413 | 414 | 422) => Code::InvalidArgument,
        _ => Code::Internal,
    }
}

impl From<Fault> for Status {
    fn from(fault: Fault) -> Status {
        Status::new(fault.code, fault.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_of_the_daemon_have_the_codes_that_orchestrators_act_on() {
        let cases = [
            ("no-room", 409, Code::ResourceExhausted),
            ("in-use", 409, Code::FailedPrecondition),
            ("exists", 409, Code::AlreadyExists),
            ("stopping", 503, Code::Unavailable),
            ("failed", 500, Code::Internal),
            ("", 401, Code::Unauthenticated),
            ("", 503, Code::Unavailable),
            ("a-later-type", 422, Code::InvalidArgument),
        ];
        for (kind, status, code) in cases {
            assert_eq!(code_of(kind, status), code, "{kind} {status}");
        }
    }
}
