//! Why something is not done.

use crate::state::StateError;
use block::DeviceError;
use hosting::create::CreationError;
use reactor::CoreStopped;
use spec::SpecError;
use stack::array::ArrayError;
use std::io::ErrorKind;
use volume::{NameError, PoolError};

/// The kind of an error: for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is invalid.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// The named object cannot be opened.
    Unopened,
    /// There is one already.
    Exists,
    /// It is in use.
    InUse,
    /// There is not as much room.
    NoRoom,
    /// It is not what the caller thinks it is.
    Stale,
    /// It exists, but does not run.
    Unavailable,
    /// It takes another role.
    Forbidden,
    /// A device or the system fails.
    Failed,
}

/// Why something is not done. Nothing has changed, as [`api::Problem`] has it. Names object and
/// value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct ApiError {
    /// Its kind.
    pub kind: Kind,
    /// A sentence.
    pub detail: String,
}

impl ApiError {
    /// A fault of a kind.
    pub fn new(kind: Kind, detail: impl Into<String>) -> ApiError {
        ApiError { kind, detail: detail.into() }
    }

    /// The request is invalid.
    pub fn invalid(detail: impl Into<String>) -> ApiError {
        ApiError::new(Kind::Invalid, detail)
    }

    /// There is no `what` called `name`.
    pub fn not_found(what: &str, name: &str) -> ApiError {
        ApiError::new(Kind::NotFound, format!("no {what} {name:?}"))
    }

    /// The same fault with the name of its object in front.
    #[must_use]
    pub fn about(self, name: &str) -> ApiError {
        ApiError { detail: format!("{name}: {}", self.detail), ..self }
    }

    /// Something fails.
    pub fn failed(detail: impl ToString) -> ApiError {
        ApiError::new(Kind::Failed, detail.to_string())
    }
}

impl From<PoolError> for ApiError {
    fn from(error: PoolError) -> ApiError {
        let kind = match error {
            PoolError::NoVolume(_) => Kind::NotFound,
            PoolError::Taken(_) | PoolError::Exists(..) => Kind::Exists,
            PoolError::InUse(_) => Kind::InUse,
            PoolError::Size(..) | PoolError::TooSmall { .. } => Kind::Invalid,
            PoolError::Full { .. } | PoolError::TooMany(_) => Kind::NoRoom,
            PoolError::Read(..) => Kind::Unavailable,
            PoolError::Device(_)
            | PoolError::Io(..)
            | PoolError::Unsettled { .. }
            | PoolError::Core(_)
            | PoolError::Random(_) => Kind::Failed,
        };
        ApiError::new(kind, error.to_string())
    }
}

impl From<NameError> for ApiError {
    fn from(error: NameError) -> ApiError {
        ApiError::invalid(error.to_string())
    }
}

impl From<SpecError> for ApiError {
    fn from(error: SpecError) -> ApiError {
        ApiError::invalid(error.to_string())
    }
}

impl From<DeviceError> for ApiError {
    fn from(error: DeviceError) -> ApiError {
        ApiError::new(Kind::Unopened, format!("device {error}"))
    }
}

impl From<CreationError> for ApiError {
    fn from(error: CreationError) -> ApiError {
        match error {
            CreationError::Nonsense(..) | CreationError::Spec(_) => ApiError::invalid(error.to_string()),
            CreationError::Create(..) => ApiError::new(Kind::InUse, error.to_string()),
            CreationError::Device(_) => ApiError::new(Kind::Unopened, error.to_string()),
        }
    }
}

impl From<ArrayError> for ApiError {
    fn from(error: ArrayError) -> ApiError {
        ApiError::new(Kind::Unavailable, error.to_string())
    }
}

impl From<StateError> for ApiError {
    fn from(error: StateError) -> ApiError {
        match error {
            StateError::Full { .. } => ApiError::new(Kind::NoRoom, error.to_string()),
            error => ApiError::failed(error),
        }
    }
}

impl From<hosting::Error> for ApiError {
    fn from(error: hosting::Error) -> ApiError {
        ApiError::failed(error)
    }
}

impl From<CoreStopped> for ApiError {
    fn from(error: CoreStopped) -> ApiError {
        ApiError::failed(error)
    }
}

impl From<exports::Error> for ApiError {
    fn from(error: exports::Error) -> ApiError {
        let kind = match &error {
            exports::Error::Config(_) => Kind::Invalid,
            exports::Error::Socket { source, .. } => match source.kind() {
                ErrorKind::AddrInUse => Kind::InUse,
                ErrorKind::AddrNotAvailable => Kind::Invalid,
                // No error of the system: the text is no address, or its name has none.
                _ if source.raw_os_error().is_none() => Kind::Invalid,
                _ => Kind::Failed,
            },
            _ => Kind::Failed,
        };
        ApiError::new(kind, error.to_string())
    }
}
