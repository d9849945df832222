//! The errors of librbd, each mapped once.

use block::{DeviceError, IoError, IoResult};
use std::io;

/// The result of a request for the value that librbd returned: a negative errno, or the number of
/// bytes read.
pub(super) fn result_of(value: i64) -> IoResult {
    match i32::try_from(value) {
        Ok(value) if value < 0 => Err(error_of(value.saturating_neg())),
        _ => Ok(()),
    }
}

/// The error for an errno (positive) of a request.
pub(super) fn error_of(errno: i32) -> IoError {
    match errno {
        // The image or its pool was removed.
        libc::ENOENT => IoError::DeviceGone,
        // Another client has the exclusive lock.
        libc::EROFS => IoError::DeviceGone,
        // ESHUTDOWN, the cluster's answer to a client that it has blocklisted, is among these.
        errno => IoError::from_errno(errno),
    }
}

/// Why an image could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// An option is invalid, or a library is missing.
    #[error("{0}")]
    Refused(String),
    /// A call of librados or librbd failed.
    #[error("cannot {action}: {error}")]
    Call { action: String, error: io::Error },
}

impl OpenError {
    /// The error of `device`; that of the library is its cause.
    pub(super) fn of(self, device: String) -> DeviceError {
        match self {
            OpenError::Refused(message) => DeviceError::new(device, message),
            OpenError::Call { action, error } => {
                DeviceError::new(device, format!("cannot {action}")).because(error)
            }
        }
    }
}

/// Turns the result of a call, a negative errno or success, into an error with the attempted
/// action.
pub(super) fn check(result: i32, action: impl FnOnce() -> String) -> Result<(), OpenError> {
    if result >= 0 {
        return Ok(());
    }
    Err(OpenError::Call { action: action(), error: io::Error::from_raw_os_error(result.saturating_neg()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_errno_of_a_cluster_has_its_error() {
        let errors = [
            (libc::ESHUTDOWN, IoError::DeviceGone),
            (libc::ENOENT, IoError::DeviceGone),
            (libc::EROFS, IoError::DeviceGone),
            (libc::ETIMEDOUT, IoError::TimedOut),
            (libc::ENOSPC, IoError::NoSpace),
            (libc::EDQUOT, IoError::NoSpace),
            (libc::ENOMEM, IoError::NoMemory),
            (libc::EIO, IoError::Medium),
        ];
        for (errno, error) in errors {
            assert_eq!(result_of(-i64::from(errno)), Err(error), "{errno}");
        }
        assert_eq!((result_of(0), result_of(4096)), (Ok(()), Ok(())));
    }
}
