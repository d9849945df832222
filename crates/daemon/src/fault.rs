//! Why something is not done.

use crate::state::StateError;
use block::DeviceError;
use graph::array::ArrayError;
use graph::spec::SpecError;
use reactor::CoreStopped;
use serving::create::CreationError;
use volume::{NameError, PoolError};

/// What kind of fault it is: for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked for makes no sense.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// What was named cannot be opened.
    Unopened,
    /// There is one already.
    Exists,
    /// Somebody uses it.
    InUse,
    /// There is not as much room.
    NoRoom,
    /// It is not what the caller thinks it is.
    Stale,
    /// It is there, but does not run.
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
pub struct Fault {
    /// What kind it is.
    pub kind: Kind,
    /// A sentence.
    pub detail: String,
}

impl Fault {
    /// A fault of a kind.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Fault {
        Fault { kind, detail: detail.into() }
    }

    /// What was asked for makes no sense.
    pub fn invalid(detail: impl Into<String>) -> Fault {
        Fault::new(Kind::Invalid, detail)
    }

    /// There is no `what` called `name`.
    pub fn not_found(what: &str, name: &str) -> Fault {
        Fault::new(Kind::NotFound, format!("there is no {what} {name:?}"))
    }

    /// The same fault with the name of its object in front.
    #[must_use]
    pub fn about(self, name: &str) -> Fault {
        Fault { detail: format!("{name}: {}", self.detail), ..self }
    }

    /// Something fails.
    pub fn failed(detail: impl ToString) -> Fault {
        Fault::new(Kind::Failed, detail.to_string())
    }
}

impl From<PoolError> for Fault {
    fn from(error: PoolError) -> Fault {
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
        Fault::new(kind, error.to_string())
    }
}

impl From<NameError> for Fault {
    fn from(error: NameError) -> Fault {
        Fault::invalid(error.to_string())
    }
}

impl From<SpecError> for Fault {
    fn from(error: SpecError) -> Fault {
        Fault::invalid(error.to_string())
    }
}

impl From<DeviceError> for Fault {
    fn from(error: DeviceError) -> Fault {
        Fault::new(Kind::Unopened, format!("device {error}"))
    }
}

impl From<CreationError> for Fault {
    fn from(error: CreationError) -> Fault {
        match error {
            CreationError::Nonsense(..) | CreationError::Spec(_) => Fault::invalid(error.to_string()),
            CreationError::Create(..) => Fault::new(Kind::InUse, error.to_string()),
            CreationError::Device(_) => Fault::new(Kind::Unopened, error.to_string()),
        }
    }
}

impl From<ArrayError> for Fault {
    fn from(error: ArrayError) -> Fault {
        Fault::new(Kind::Unavailable, error.to_string())
    }
}

impl From<StateError> for Fault {
    fn from(error: StateError) -> Fault {
        match error {
            StateError::Full { .. } => Fault::new(Kind::NoRoom, error.to_string()),
            error => Fault::failed(error),
        }
    }
}

impl From<serving::Error> for Fault {
    fn from(error: serving::Error) -> Fault {
        Fault::failed(error)
    }
}

impl From<CoreStopped> for Fault {
    fn from(error: CoreStopped) -> Fault {
        Fault::failed(error)
    }
}

impl From<exports::Error> for Fault {
    fn from(error: exports::Error) -> Fault {
        match error {
            exports::Error::Config(fault) => Fault::invalid(fault),
            error => Fault::failed(error),
        }
    }
}
