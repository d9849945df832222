//! Opening a namespace so that what goes wrong is said in words, and queues for callers that drive them themselves.

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

/// Most entries of an io_uring (`IORING_MAX_ENTRIES`).
pub const MAX_ENTRIES: u32 = 32768;

/// Why a namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path cannot be opened.
    #[error(transparent)]
    Open(io::Error),
    /// It is something else.
    #[error("it is {0}, not the character device of an NVMe namespace (such as /dev/ng0n1)")]
    NotNvme(&'static str),
    /// The kernel lets only administrators talk to the controller.
    #[error("the process must have the capability CAP_SYS_ADMIN to talk to an NVMe controller")]
    NotPermitted(#[source] io::Error),
    /// A command that every controller knows failed.
    #[error("cannot {what} the namespace: {error}")]
    Admin {
        /// What was to be done.
        what: &'static str,
        /// Why it failed.
        #[source]
        error: AdminError,
    },
    /// The namespace was formatted anew while it was open.
    #[error("it had blocks of {was} bytes when it was opened and has blocks of {now} bytes now")]
    FormatChanged {
        /// Block size when it was opened.
        was: u32,
        /// Block size now.
        now: u32,
    },
    /// What the controller said makes no sense, or cannot be served.
    #[error(transparent)]
    Malformed(#[from] nvme::Malformed),
}

impl OpenError {
    /// The Linux error number (positive) that says the same to a C caller.
    pub fn to_errno(&self) -> i32 {
        match self {
            OpenError::Open(error) | OpenError::NotPermitted(error) => errno(error),
            OpenError::NotNvme(_) => libc::EINVAL,
            OpenError::Admin { error: AdminError::Kernel(error), .. } => errno(error),
            OpenError::Admin { error: AdminError::Controller(_), .. } => libc::EIO,
            OpenError::Malformed(_) | OpenError::FormatChanged { .. } => libc::ENOTSUP,
        }
    }

    /// What the first call of a namespace said, which only namespaces know.
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
    /// When it is none, may not be used, or cannot be served.
    pub fn open(path: &Path, read_only: bool) -> Result<NvmeFile, OpenError> {
        // Opening a pipe would wait, opening a device may do anything: look first.
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

    /// Takes an open namespace over; `fd` is given back with the error.
    ///
    /// # Errors
    /// As [`NvmeFile::open`].
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

    /// What was known about the namespace when it was opened.
    pub fn facts(&self) -> &NamespaceFacts {
        &self.shared.facts
    }

    /// The open file's descriptor.
    pub fn fd(&self) -> RawFd {
        self.shared.file.as_raw_fd()
    }

    /// Bytes in the namespace now.
    ///
    /// # Errors
    /// When it cannot be asked, or its format has changed.
    pub fn capacity(&self) -> Result<u64, OpenError> {
        let now = NamespaceFacts::of(&self.shared.file)?;
        let was = self.facts().block_size();
        if now.block_size() != was {
            return Err(OpenError::FormatChanged { was, now: now.block_size() });
        }
        Ok(now.capacity)
    }

    /// A ring of its own with room for `depth` requests. Threads may hand the queue to each other.
    ///
    /// # Errors
    /// What `io_uring_setup(2)` says: `EINVAL` for more entries than [`MAX_ENTRIES`], none, or before Linux
    /// 5.19; `EPERM` where io_uring is forbidden; `ENOMEM`.
    pub fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<NvmeQueue> {
        if !(1..=MAX_ENTRIES).contains(&depth) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        NvmeQueue::new(self.shared.clone(), depth, Ring::for_any_thread(depth, is_polled)?)
    }

    /// The same for one thread alone, which makes it cheaper.
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
    fn what_is_no_namespace_is_named_and_comes_back() {
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
