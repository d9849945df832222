//! The drivers by name: what each asks of its user, and how its facts become properties.

mod freestone;
mod io_uring;
mod nbd;
mod virtio_blk;

use crate::driver::Driver;
use crate::property::Properties;
use crate::{Error, Region, Result};
use block::MemoryRegion;
use drivers::virtio_blk::TransportKind;
use std::os::fd::RawFd;

/// The driver called `name`.
///
/// # Errors
/// `ENOENT` when there is none, `ENOSYS` when this system lacks what it needs.
pub(crate) fn create(name: &str) -> Result<Box<dyn Driver>> {
    match name {
        "freestone" => Ok(Box::new(freestone::Freestone::new())),
        "io_uring" => Ok(Box::new(io_uring::IoUring::new()?)),
        "nbd" => Ok(Box::new(nbd::Nbd::new()?)),
        "virtio-blk-vfio-pci" => Ok(Box::new(virtio_blk::VirtioBlk::new(TransportKind::VfioPci))),
        "virtio-blk-vhost-user" => Ok(Box::new(virtio_blk::VirtioBlk::new(TransportKind::VhostUser))),
        "virtio-blk-vhost-vdpa" => Ok(Box::new(virtio_blk::VirtioBlk::new(TransportKind::VhostVdpa))),
        _ => Err(Error::new(libc::ENOENT, format!("unknown driver '{name}'"))),
    }
}

/// What the properties `path` and `fd` name.
enum Source {
    Path(String),
    Fd(RawFd),
}

/// Exactly one of `path` and `fd`.
///
/// # Errors
/// `EINVAL` for both or none.
fn source(properties: &Properties) -> Result<Source> {
    match (properties.str("path"), properties.int("fd")) {
        ("", -1) => Err(Error::new(libc::EINVAL, "one of the properties path and fd must be set")),
        ("", fd) => Ok(Source::Fd(fd)),
        (path, -1) => Ok(Source::Path(path.to_owned())),
        (path, fd) => {
            let message = format!("path ({path}) and fd ({fd}) cannot be set at the same time");
            Err(Error::new(libc::EINVAL, message))
        }
    }
}

/// A region as devices know it.
fn memory_region(region: &Region) -> MemoryRegion {
    let Region { addr, len, fd, fd_offset, .. } = *region;
    let fd: Option<RawFd> = (fd >= 0).then_some(fd);
    MemoryRegion { addr, len, fd, fd_offset: if fd.is_some() { fd_offset as u64 } else { 0 } }
}
