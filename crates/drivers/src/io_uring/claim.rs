//! The exclusive claim of a block device, which can be lent to the kernel for as long as
//! `/dev/vhost-blk` serves the disk.
//!
//! A claim belongs to an open file: the kernel refuses a second holder (`EBUSY`), also its own. The
//! file of the claim therefore is not the one that requests use. It can be closed while channels
//! are open. A disk that is open through the page cache is never lent.

use super::queue::Shared;
use block::{DeviceError, KernelBacking, KernelExtent};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Claims the block device at `path`: other programs cannot claim or mount it.
pub(super) fn claim(path: &Path) -> io::Result<File> {
    // Without O_CREAT, O_EXCL claims a block device.
    OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC | libc::O_EXCL).open(path)
}

/// Whether two open block devices are one.
pub(super) fn is_same_disk(one: &File, other: &File) -> io::Result<bool> {
    Ok(one.metadata()?.rdev() == other.metadata()?.rdev())
}

/// A block device that is open as a whole.
pub(super) struct Disk {
    name: String,
    path: PathBuf,
    shared: Arc<Shared>,
    hold: Mutex<Hold>,
}

/// The present holder of the disk.
struct Hold {
    claim: Option<File>,
    /// Whether the disk is claimed when it is not lent.
    is_exclusive: bool,
    is_lent: bool,
}

impl Disk {
    pub(super) fn new(name: &str, path: &Path, shared: Arc<Shared>, claim: Option<File>) -> Disk {
        let hold = Hold { is_exclusive: claim.is_some(), claim, is_lent: false };
        Disk { name: name.to_owned(), path: path.to_owned(), shared, hold: Mutex::new(hold) }
    }

    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims the same disk that is open.
    fn claim_again(&self) -> io::Result<File> {
        let claim = claim(&self.path)?;
        if !is_same_disk(&claim, &self.shared.file)? {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the path names another disk now"));
        }
        Ok(claim)
    }
}

impl KernelBacking for Disk {
    fn fd(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }

    fn extent(&self) -> KernelExtent {
        KernelExtent::WHOLE
    }

    fn lend(&self) -> Result<(), DeviceError> {
        let mut hold = self.hold();
        if hold.is_lent {
            return Err(DeviceError::new(&self.name, "disk lent to the kernel already, for another export"));
        }
        hold.is_lent = true;
        hold.claim = None;
        Ok(())
    }

    fn take_back(&self) -> Result<(), DeviceError> {
        let mut hold = self.hold();
        hold.is_lent = false;
        if hold.is_exclusive && hold.claim.is_none() {
            let failed = |error| DeviceError::new(&self.name, "cannot claim the disk again").because(error);
            hold.claim = Some(self.claim_again().map_err(failed)?);
        }
        Ok(())
    }
}
