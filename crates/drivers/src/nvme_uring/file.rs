//! Opens a namespace with clear error messages, and creates queues for callers that drive them.

use super::error::OpenError;
use super::facts::NamespaceFacts;
use super::queue::{NamespaceCommands, NvmeQueue};
use crate::passthrough::node::{self, NodeError};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

/// An open namespace.
#[derive(Clone)]
pub struct NvmeFile {
    shared: Arc<NamespaceCommands>,
}

impl NvmeFile {
    /// Opens the namespace whose character device is at `path`.
    ///
    /// # Errors
    /// When it is not a namespace, may not be used, or is not supported.
    pub fn open(path: &Path, read_only: bool) -> Result<NvmeFile, OpenError> {
        let file = node::open(path, read_only).map_err(|error| match error {
            NodeError::Kind(kind) => OpenError::NotNvme(kind),
            NodeError::Open(error) => OpenError::Open(error),
        })?;
        let facts = NamespaceFacts::of(&file)?;
        Ok(NvmeFile { shared: Arc::new(NamespaceCommands { file, facts }) })
    }

    /// Takes over an open namespace; returns `fd` with an error.
    pub fn from_fd(fd: OwnedFd) -> Result<NvmeFile, (OpenError, OwnedFd)> {
        let file = File::from(fd);
        let facts = file.metadata().map_err(OpenError::Open).and_then(|metadata| {
            node::check(&metadata).map_err(OpenError::NotNvme)?;
            NamespaceFacts::of(&file)
        });
        match facts {
            Ok(facts) => Ok(NvmeFile { shared: Arc::new(NamespaceCommands { file, facts }) }),
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
    /// An error of `io_uring_setup(2)`: `EINVAL` for 0 or more than [`super::MAX_ENTRIES`] entries,
    /// or before Linux 5.19; `EPERM` where io_uring is forbidden; `ENOMEM`.
    pub fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<NvmeQueue> {
        NvmeQueue::open(self.shared.clone(), depth, is_polled)
    }

    /// The same for a single thread, which is cheaper.
    pub(super) fn open_queue_of_thread(&self, depth: u32, is_polled: bool) -> io::Result<NvmeQueue> {
        NvmeQueue::open_of_thread(self.shared.clone(), depth, is_polled)
    }
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
        for (path, what) in [("/dev", "a directory"), ("/dev/null", "a different device")] {
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
}
