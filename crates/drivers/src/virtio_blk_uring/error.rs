//! The reasons why a disk cannot be used.

use crate::passthrough::node::NodeError;
use std::io;
use std::path::Path;

/// The module's directory in sysfs while it is loaded.
const MODULE: &str = "/sys/module/virtio_blk_uring";

/// The reason why a disk cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path cannot be opened.
    #[error(transparent)]
    Open(io::Error),
    /// The path does not exist, and nothing makes such nodes.
    #[error("{0}; the kernel module virtio_blk_uring, which makes the nodes of disks, is not loaded")]
    NoModule(#[source] io::Error),
    /// The path does not exist, and the module may not have been asked for it.
    #[error("{0}; the parameter disks of the module virtio_blk_uring names the disks that have a node")]
    NoNode(#[source] io::Error),
    /// The file is of another kind.
    #[error("the path is {0}, not the pass-through node of a virtio-blk disk (such as /dev/vdac0)")]
    NotDisk(&'static str),
    /// The disk cannot be written, but is opened for writing.
    #[error("the disk is read-only, and is opened for writing")]
    ReadOnly,
    /// The disk does not report its properties.
    #[error("cannot learn the properties of the disk: {0}")]
    Info(#[source] io::Error),
    /// The module reports a property that cannot be.
    #[error("the disk reports {property} {value}: must be {expected}")]
    Malformed {
        /// The property.
        property: &'static str,
        /// Its value.
        value: u64,
        /// The values that are accepted.
        expected: &'static str,
    },
    /// The disk has another block size than when it was opened.
    #[error("block size changed from {was} to {now} bytes since the disk was opened")]
    FormatChanged {
        /// Block size when it was opened.
        was: u32,
        /// Block size now.
        now: u32,
    },
}

impl OpenError {
    /// The equivalent Linux error number (positive), for C callers.
    pub fn to_errno(&self) -> i32 {
        match self {
            OpenError::Open(error)
            | OpenError::NoModule(error)
            | OpenError::NoNode(error)
            | OpenError::Info(error) => error.raw_os_error().unwrap_or(libc::EIO),
            OpenError::NotDisk(_) => libc::EINVAL,
            OpenError::ReadOnly => libc::EROFS,
            OpenError::Malformed { .. } | OpenError::FormatChanged { .. } => libc::ENOTSUP,
        }
    }

    /// Adds the likely reason to the failure to open a path.
    pub(super) fn of_node(error: NodeError) -> OpenError {
        match error {
            NodeError::Kind(kind) => OpenError::NotDisk(kind),
            NodeError::Open(error) => OpenError::of_open(error, Path::new(MODULE).exists()),
        }
    }

    fn of_open(error: io::Error, is_loaded: bool) -> OpenError {
        match error.raw_os_error() {
            Some(libc::ENOENT) if !is_loaded => OpenError::NoModule(error),
            Some(libc::ENOENT) => OpenError::NoNode(error),
            Some(libc::EROFS) => OpenError::ReadOnly,
            _ => OpenError::Open(error),
        }
    }

    /// Converts the error of the ioctl, which only the nodes of disks support.
    pub(super) fn of_info(error: io::Error) -> OpenError {
        match error.raw_os_error() {
            Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => OpenError::NotDisk("a different device"),
            _ => OpenError::Info(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_node_is_explained_by_a_missing_module() {
        let missing = || io::Error::from_raw_os_error(libc::ENOENT);
        let error = OpenError::of_open(missing(), false);
        assert!(
            error.to_string().contains("virtio_blk_uring, which makes the nodes of disks, is not loaded")
        );
        assert_eq!(error.to_errno(), libc::ENOENT);
        let error = OpenError::of_open(missing(), true);
        assert!(error.to_string().contains("the parameter disks of the module"), "{error}");
        assert_eq!(error.to_errno(), libc::ENOENT);
        assert_eq!(
            OpenError::of_open(io::Error::from_raw_os_error(libc::EROFS), true).to_errno(),
            libc::EROFS
        );
    }
}
