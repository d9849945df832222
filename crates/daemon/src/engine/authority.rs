//! The authority of a request over existing objects. It is checked within the change, so that no
//! other change intervenes. The text of a request alone is checked before, in [`crate::rest`].

use crate::api_error::{ApiError, Kind};

/// On whose behalf a change is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authority {
    /// The administrator, or the daemon itself.
    Full,
    /// An operator: no device comes into use, and none is exported as a whole.
    Operator,
    /// A provisioner: only volumes and exports with this label exist.
    Label(String),
}

impl Authority {
    /// The label of something that is made, of which one was `asked` for perhaps.
    pub fn label(&self, asked: Option<&str>) -> Option<String> {
        match self {
            Authority::Full | Authority::Operator => asked.map(str::to_owned),
            Authority::Label(own) => Some(own.clone()),
        }
    }

    /// Whether something with this label may be seen and changed.
    ///
    /// # Errors
    /// With `none`, which says that there is no such thing.
    pub fn check_owns(&self, label: Option<&str>, none: impl FnOnce() -> ApiError) -> Result<(), ApiError> {
        match self {
            Authority::Label(own) if label != Some(own) => Err(none()),
            _ => Ok(()),
        }
    }

    /// Whether all of the device or array `name` may be exported, or copied to a volume.
    ///
    /// # Errors
    /// When it may not; a provisioner gets `none`.
    pub fn check_whole(&self, name: &str, none: impl FnOnce() -> ApiError) -> Result<(), ApiError> {
        match self {
            Authority::Full => Ok(()),
            Authority::Operator => {
                Err(forbidden(format!("{name}: exporting or copying a whole device or array")))
            }
            Authority::Label(_) => Err(none()),
        }
    }

    /// Whether the device or array `name`, which has no volumes yet, may be prepared for them.
    ///
    /// # Errors
    /// When it may not.
    pub fn check_prepares(&self, name: &str) -> Result<(), ApiError> {
        match self {
            Authority::Full | Authority::Operator => Ok(()),
            Authority::Label(_) => {
                let detail = format!("{name}: preparing it for its first volume takes the role operator");
                Err(ApiError::new(Kind::Forbidden, detail))
            }
        }
    }

    /// Whether devices that an array does not know become its members.
    ///
    /// # Errors
    /// When they may not. Nothing has looked whether there are such devices.
    pub fn check_newcomers(&self, newcomers: &[String]) -> Result<(), ApiError> {
        match (self, newcomers) {
            (Authority::Full, _) | (_, []) => Ok(()),
            (_, [first, ..]) => {
                Err(forbidden(format!("{first}: using a device that the array does not know")))
            }
        }
    }
}

fn forbidden(what: String) -> ApiError {
    ApiError::new(Kind::Forbidden, format!("{what} takes the role admin"))
}
