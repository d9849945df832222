//! The drivers by name: what each asks of its user, and how its facts become properties.

mod freestone;
mod io_uring;
mod nbd;
mod nvme;
mod nvme_tcp;
mod rbd;
mod virtio_blk;
mod virtio_blk_uring;

use crate::driver::Driver;
use crate::property::Properties;
use crate::{Error, Region, Result, Value};
use block::{Limits, MemoryRegion};
use drivers::direct::DirectQueue;
use drivers_virtio_blk::TransportKind;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// The driver called `name`.
///
/// # Errors
/// `ENOENT` when there is none, `ENOSYS` when this system lacks what it needs.
pub(crate) fn create(name: &str) -> Result<Box<dyn Driver>> {
    match name {
        "freestone" => Ok(Box::new(freestone::Freestone::new())),
        "io_uring" => Ok(Box::new(io_uring::IoUring::new()?)),
        "nvme-io_uring" => Ok(Box::new(nvme::Nvme::new())),
        "nbd" => Ok(Box::new(nbd::Nbd::new()?)),
        "nvme-tcp" => Ok(Box::new(nvme_tcp::NvmeTcp::new()?)),
        "qcow2" => Ok(Box::new(freestone::Freestone::qcow2())),
        "rbd" => Ok(Box::new(rbd::Rbd::new())),
        "virtio-blk-uring" => Ok(Box::new(virtio_blk_uring::VirtioBlkUring::new())),
        "virtio-blk-vfio-pci" => Ok(Box::new(virtio_blk::VirtioBlk::new(TransportKind::VfioPci))),
        "virtio-blk-vhost-user" => Ok(Box::new(virtio_blk::VirtioBlk::new(TransportKind::VhostUser))),
        "virtio-blk-vhost-vdpa" => Ok(Box::new(virtio_blk::VirtioBlk::new(TransportKind::VhostVdpa))),
        _ => Err(Error::new(libc::ENOENT, format!("unknown driver '{name}'"))),
    }
}

/// The file that the properties `path` and `fd` name.
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

/// States the limits of a device on a network, which asks nothing of memory.
fn state_limits(p: &mut Properties, limits: &Limits) {
    // A limit that is too large for a property is unspecified.
    let int = |value: u32| i32::try_from(value).unwrap_or(0);
    p.put("read-only", limits.read_only);
    p.put("supports-fua-natively", limits.native_fua);
    p.put("flush-needed", limits.volatile_cache);
    p.put("request-alignment", int(limits.block_size));
    p.put("optimal-io-alignment", int(limits.physical_block_size));
    p.put("optimal-io-size", int(limits.optimal_io_size));
    p.put("max-segments", i32::from(limits.max_segments));
    p.put("max-transfer", int(limits.max_transfer));
    p.put("max-discard-len", limits.max_discard);
    p.put("max-write-zeroes-len", limits.max_write_zeroes);
    p.put("discard-alignment", int(limits.discard_alignment));
}

/// A region as devices know it.
fn memory_region(region: &Region) -> MemoryRegion {
    let Region { addr, len, fd, fd_offset, .. } = *region;
    let fd: Option<RawFd> = (fd >= 0).then_some(fd);
    MemoryRegion { addr, len, fd, fd_offset: if fd.is_some() { fd_offset as u64 } else { 0 } }
}

/// Takes the program's descriptor over with `open`, which gives it back with its error; then it is
/// still the program's.
fn take_fd<T>(
    fd: RawFd,
    open: impl FnOnce(OwnedFd) -> std::result::Result<T, (Error, OwnedFd)>,
) -> Result<T> {
    // SAFETY: no pointer is passed.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(Error::new(libc::EBADF, format!("property fd: {fd} is no open file descriptor")));
    }
    // SAFETY: it is open, and the program passed it on with blkio_connect().
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    open(owned).map_err(|(error, owned)| {
        let _ = owned.into_raw_fd();
        error
    })
}

/// Opens a queue whose io_uring has the entries that the program asks for.
fn open_ring<Q: DirectQueue + 'static>(
    p: &Properties,
    open: impl FnOnce(u32) -> io::Result<Q>,
) -> Result<Box<dyn DirectQueue>> {
    let entries = p.int("num-entries");
    let queue = open(entries as u32)
        .map_err(|e| Error::os(&format!("cannot set up an io_uring with num-entries {entries}"), &e))?;
    Ok(Box::new(queue))
}

/// Refuses a time that requests wait for a lost server, in seconds, that cannot be.
fn check_reconnect_delay(seconds: i32) -> Result<()> {
    match seconds {
        0.. => Ok(()),
        _ => Err(Error::new(libc::EINVAL, format!("property reconnect-delay: {seconds} is negative"))),
    }
}

/// Refuses numbers of ring entries that cannot be.
fn check_num_entries(name: &str, value: &Value) -> Result<()> {
    match (name, value) {
        ("num-entries", Value::Int(entries)) if *entries <= 0 => {
            Err(Error::new(libc::EINVAL, format!("property num-entries: {entries} is not positive")))
        }
        _ => Ok(()),
    }
}
