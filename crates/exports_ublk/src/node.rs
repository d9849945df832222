//! The nodes `/dev/ublkcN`: a device is served over its node and, if it is unprivileged, controlled
//! through it.

use exports::Error;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Timeout for the node of a new device to appear, and to be given to the user that created the
/// device.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval.
const STEP: Duration = Duration::from_millis(20);

/// The node of device `id`.
pub(super) fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// Opens the node, which only one process at a time can do.
pub(super) fn try_open(id: u32) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(node(id))
}

/// Opens the node, waiting for it to appear.
pub(super) fn open_node(id: u32) -> Result<File, Error> {
    patiently(id, try_open, |error| error.kind() == io::ErrorKind::NotFound)
}

/// Waits until this process may open the node: udev gives it to the user that created the device.
pub(super) fn wait_for_node(id: u32) -> Result<(), Error> {
    let is_passing =
        |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied);
    patiently(id, may_open, is_passing)
}

fn may_open(id: u32) -> io::Result<()> {
    let path = CString::new(node(id).into_os_string().into_vec()).expect("its name has no zero byte");
    let mode = libc::R_OK | libc::W_OK;
    // SAFETY: the path lives, and nothing is written.
    match unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), mode, libc::AT_EACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn patiently<T>(
    id: u32,
    attempt: impl Fn(u32) -> io::Result<T>,
    is_passing: impl Fn(&io::Error) -> bool,
) -> Result<T, Error> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match attempt(id) {
            Ok(done) => return Ok(done),
            Err(error) if is_passing(&error) && Instant::now() < deadline => std::thread::sleep(STEP),
            Err(source) => {
                let is_denied = source.kind() == io::ErrorKind::PermissionDenied;
                let hint = if is_denied { " (no udev rule grants access to it)" } else { "" };
                return Err(Error::Ublk {
                    what: format!("cannot open {}{hint}", node(id).display()),
                    source,
                });
            }
        }
    }
}
