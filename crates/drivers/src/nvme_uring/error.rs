//! The reasons why a namespace cannot be used.

use super::admin::AdminError;
use std::io;

/// The reason why a namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path cannot be opened.
    #[error(transparent)]
    Open(io::Error),
    /// The file is of another kind.
    #[error("the path is {0}, not the character device of an NVMe namespace (such as /dev/ng0n1)")]
    NotNvme(&'static str),
    /// The kernel lets only administrators access the controller.
    #[error("the process must have the capability CAP_SYS_ADMIN to talk to an NVMe controller")]
    NotPermitted(#[source] io::Error),
    /// A mandatory command failed.
    #[error("cannot {what} the namespace: {error}")]
    Admin {
        /// The failed action.
        what: &'static str,
        /// The error.
        #[source]
        error: AdminError,
    },
    /// The namespace was reformatted while it was open.
    #[error("block size changed from {was} to {now} bytes since the namespace was opened")]
    FormatChanged {
        /// Block size when it was opened.
        was: u32,
        /// Block size now.
        now: u32,
    },
    /// The controller returned invalid or unsupported data.
    #[error(transparent)]
    Malformed(#[from] nvme::Malformed),
}

impl OpenError {
    /// The equivalent Linux error number (positive), for C callers.
    pub fn to_errno(&self) -> i32 {
        match self {
            OpenError::Open(error) | OpenError::NotPermitted(error) => errno(error),
            OpenError::NotNvme(_) => libc::EINVAL,
            OpenError::Admin { error: AdminError::Kernel(error), .. } => errno(error),
            OpenError::Admin { error: AdminError::Controller(_), .. } => libc::EIO,
            OpenError::Malformed(_) | OpenError::FormatChanged { .. } => libc::ENOTSUP,
        }
    }

    /// Converts the error of the first ioctl, which only namespaces support.
    pub(super) fn of_first_call(error: io::Error) -> OpenError {
        match error.raw_os_error() {
            Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => OpenError::NotNvme("a different device"),
            _ => OpenError::of_admin("find", error.into()),
        }
    }

    pub(super) fn of_admin(what: &'static str, error: AdminError) -> OpenError {
        match error {
            AdminError::Kernel(e) if matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
                OpenError::NotPermitted(e)
            }
            error => OpenError::Admin { what, error },
        }
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_command_says_which_capability_is_missing() {
        let refused = AdminError::from(io::Error::from_raw_os_error(libc::EACCES));
        let error = OpenError::of_admin("identify", refused);
        assert_eq!(error.to_errno(), libc::EACCES);
        assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}");
        let refused = AdminError::Controller(nvme::Status::new(2));
        let error = OpenError::of_admin("identify", refused);
        assert_eq!(
            error.to_string(),
            "cannot identify the namespace: the controller answers NVMe status 0/02"
        );
    }
}
