//! Kinds of devices as drivers of the C library: the trait of a driver, its properties and errors.
//!
//! Each kind has a file `blkio.rs` with its own properties and a [`DriverKind`], which
//! `stack::kinds::blkio::DRIVERS` lists. The crate `blkio` knows no kind.

mod driver;
mod error;
mod property;
mod region;

pub use driver::{Capacity, Codes, Driver, DriverKind};
pub use error::{Error, Result};
pub use property::{Kind, Properties, Spec, State, Value, Writable, common, wrong_kind};
pub use region::Region;

use crate::direct::DirectQueue;
use block::{Limits, MemoryRegion};
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// The file that the properties `path` and `fd` name.
pub enum Source {
    /// The path of `path`.
    Path(String),
    /// The descriptor of `fd`.
    Fd(RawFd),
}

/// Exactly one of `path` and `fd`.
///
/// # Errors
/// `EINVAL` for both or none.
pub fn source(properties: &Properties) -> Result<Source> {
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
pub fn state_limits(p: &mut Properties, limits: &Limits) {
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
pub fn memory_region(region: &Region) -> MemoryRegion {
    let Region { addr, len, fd, fd_offset, .. } = *region;
    let fd: Option<RawFd> = (fd >= 0).then_some(fd);
    MemoryRegion { addr, len, fd, fd_offset: if fd.is_some() { fd_offset as u64 } else { 0 } }
}

/// Takes the program's descriptor over with `open`, which gives it back with its error; then it is
/// still the program's.
///
/// # Errors
/// `EBADF` for a descriptor that is not open, or the error of `open`.
pub(crate) fn take_fd<T>(
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
///
/// # Errors
/// Names the number of entries that the system refuses.
pub(crate) fn open_ring<Q: DirectQueue + 'static>(
    p: &Properties,
    open: impl FnOnce(u32) -> io::Result<Q>,
) -> Result<Box<dyn DirectQueue>> {
    let entries = p.int("num-entries");
    let queue = open(entries as u32)
        .map_err(|e| Error::os(&format!("cannot set up an io_uring with num-entries {entries}"), &e))?;
    Ok(Box::new(queue))
}

/// Refuses a negative time that requests wait for a lost server, in seconds.
///
/// # Errors
/// `EINVAL` with the value.
pub fn check_reconnect_delay(seconds: i32) -> Result<()> {
    match seconds {
        0.. => Ok(()),
        _ => Err(Error::new(libc::EINVAL, format!("property reconnect-delay: {seconds} is negative"))),
    }
}

/// Refuses a number of ring entries that is not positive.
///
/// # Errors
/// `EINVAL` with the value.
pub(crate) fn check_num_entries(name: &str, value: &Value) -> Result<()> {
    match (name, value) {
        ("num-entries", Value::Int(entries)) if *entries <= 0 => {
            Err(Error::new(libc::EINVAL, format!("property num-entries: {entries} is not positive")))
        }
        _ => Ok(()),
    }
}
