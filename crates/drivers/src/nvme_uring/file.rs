//! Opens a namespace with clear error messages, and creates queues for callers that drive them.

use super::admin::AdminError;
use super::facts::NamespaceFacts;
use super::queue::{NvmeQueue, Shared};
use crate::ring::Ring;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// Maximum entries of an io_uring (`IORING_MAX_ENTRIES`).
pub const MAX_ENTRIES: u32 = 32768;

/// The reason why a namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path cannot be opened.
    #[error(transparent)]
    Open(io::Error),
    /// The file is of another kind.
    #[error("it is {0}, not the character device of an NVMe namespace (such as /dev/ng0n1)")]
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
    #[error("its block size changed from {was} to {now} bytes since it was opened")]
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
            Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => OpenError::NotNvme("another device"),
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

/// An open namespace.
#[derive(Clone)]
pub struct NvmeFile {
    shared: Arc<Shared>,
}

impl NvmeFile {
    /// Opens the namespace whose character device is at `path`.
    ///
    /// # Errors
    /// When it is not a namespace, may not be used, or is not supported.
    pub fn open(path: &Path, read_only: bool) -> Result<NvmeFile, OpenError> {
        // Opening a pipe would block, and opening a device may have side effects: check the type
        // first.
        check_kind(&std::fs::metadata(path).map_err(OpenError::Open)?)?;
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_CLOEXEC)
            .open(path)
            .map_err(OpenError::Open)?;
        let facts = NamespaceFacts::of(&file)?;
        Ok(NvmeFile { shared: Arc::new(Shared { file, facts }) })
    }

    /// Takes over an open namespace; returns `fd` with an error.
    pub fn from_fd(fd: OwnedFd) -> Result<NvmeFile, (OpenError, OwnedFd)> {
        let file = File::from(fd);
        let facts = file.metadata().map_err(OpenError::Open).and_then(|metadata| {
            check_kind(&metadata)?;
            NamespaceFacts::of(&file)
        });
        match facts {
            Ok(facts) => Ok(NvmeFile { shared: Arc::new(Shared { file, facts }) }),
            Err(error) => Err((error, file.into())),
        }
    }

    /// The properties of the namespace when it was opened.
    pub fn facts(&self) -> &NamespaceFacts {
        &self.shared.facts
    }

    /// The open file's descriptor.
    pub fn fd(&self) -> RawFd {
        self.shared.file.as_raw_fd()
    }

    /// The current size of the namespace in bytes.
    ///
    /// # Errors
    /// When the query fails, or the format has changed.
    pub fn capacity(&self) -> Result<u64, OpenError> {
        let now = NamespaceFacts::of(&self.shared.file)?;
        let was = self.facts().block_size();
        if now.block_size() != was {
            return Err(OpenError::FormatChanged { was, now: now.block_size() });
        }
        Ok(now.capacity)
    }

    /// Creates a queue with its own ring for `depth` requests. It may move between threads.
    ///
    /// # Errors
    /// An error of `io_uring_setup(2)`: `EINVAL` for 0 or more than [`MAX_ENTRIES`] entries, or
    /// before Linux 5.19; `EPERM` where io_uring is forbidden; `ENOMEM`.
    pub fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<NvmeQueue> {
        if !(1..=MAX_ENTRIES).contains(&depth) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        NvmeQueue::new(self.shared.clone(), depth, Ring::for_any_thread(depth, is_polled)?)
    }

    /// The same for a single thread, which is cheaper.
    pub(super) fn open_queue_of_thread(&self, depth: u32, is_polled: bool) -> io::Result<NvmeQueue> {
        NvmeQueue::new(self.shared.clone(), depth, Ring::new(depth, is_polled)?)
    }
}

fn check_kind(metadata: &std::fs::Metadata) -> Result<(), OpenError> {
    Err(OpenError::NotNvme(match metadata.file_type() {
        k if k.is_char_device() => return Ok(()),
        k if k.is_block_device() => "a block device",
        k if k.is_file() => "a regular file",
        k if k.is_dir() => "a directory",
        k if k.is_fifo() => "a pipe",
        k if k.is_socket() => "a socket",
        _ => "a special file",
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_that_is_not_a_namespace_is_returned_with_the_error() {
        let refusal = |path: &str| {
            let error = NvmeFile::open(Path::new(path), false).err().expect("must not open");
            (error.to_errno(), error.to_string())
        };
        assert_eq!(refusal("/nonexistent").0, libc::ENOENT);
        for (path, what) in [("/dev", "a directory"), ("/dev/null", "another device")] {
            let (errno, message) = refusal(path);
            assert_eq!(errno, libc::EINVAL);
            assert!(message.contains(what) && message.contains("NVMe namespace"), "{path}: {message}");
        }
        let fd = OwnedFd::from(File::open("/dev/null").unwrap());
        let number = fd.as_raw_fd();
        let (error, fd) = NvmeFile::from_fd(fd).err().unwrap();
        assert!(matches!(error, OpenError::NotNvme(_)));
        assert_eq!(fd.as_raw_fd(), number);
    }

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
