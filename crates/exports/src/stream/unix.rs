//! A Unix socket that is listened on: taking a path over, and leaving it.

use crate::Error;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Clients that wait to be accepted.
const BACKLOG: libc::c_int = 128;

/// A listening socket that owns its path.
pub(crate) struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file: what is removed at the end is ours.
    identity: (u64, u64),
}

impl UnixSocket {
    /// Takes `path`. A socket file that nobody listens on any more is replaced; anything else is left alone.
    pub(crate) fn bind(path: &Path, permissions: u32) -> Result<UnixSocket, Error> {
        remove_stale(path)?;
        let failed = |source| Error::Socket { path: path.into(), action: "listen on", source };
        let socket = bind_closed(path).map_err(failed)?;
        // Nobody can connect between bind and listen: there is no moment with the wrong permissions.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(permissions)).map_err(failed)?;
        // SAFETY: a plain system call on a descriptor that we own.
        if unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } != 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        let listener = UnixListener::from(socket);
        listener.set_nonblocking(true).map_err(failed)?;
        let file = std::fs::symlink_metadata(path).map_err(failed)?;
        Ok(UnixSocket { listener, path: path.into(), identity: (file.dev(), file.ino()) })
    }

    /// The socket itself, which does not block.
    pub(crate) fn socket(&self) -> &UnixListener {
        &self.listener
    }

    /// The path that it owns.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let is_ours =
            std::fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if is_ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Socket { path: path.into(), action: "take over", source };
    let file = match std::fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !file.file_type().is_socket() {
        return Err(failed(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "a file that is not a socket is there",
        )));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(failed(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"))),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}

/// A stream socket bound to `path` that does not listen yet, which the standard library cannot make.
fn bind_closed(path: &Path) -> io::Result<OwnedFd> {
    // SAFETY: plain data, valid when zeroed.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = <OsStr as OsStrExt>::as_bytes(path.as_os_str());
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let message = format!("a socket path has at most {} bytes", address.sun_path.len() - 1);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    for (target, byte) in address.sun_path.iter_mut().zip(bytes) {
        *target = *byte as libc::c_char;
    }
    // SAFETY: the new descriptor is ours alone; `address` is a live sockaddr_un of the size that is given.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = OwnedFd::from_raw_fd(fd);
        let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        if libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let first = UnixSocket::bind(&path, 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = UnixSocket::bind(&path, 0o600).err().expect("somebody listens");
        assert!(error.to_string().contains("another process listens"), "{error}");
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(UnixSocket::bind(file.path(), 0o600).is_err());
        assert!(file.path().exists());
    }

    #[test]
    fn a_path_that_was_taken_over_is_not_removed_by_its_former_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = UnixSocket::bind(&path, 0o600).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = UnixSocket::bind(&path, 0o600).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_is_too_long_is_named_in_the_error() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        let error = UnixSocket::bind(&path, 0o600).err().expect("too long").to_string();
        assert!(error.contains("at most 107 bytes"), "{error}");
    }
}
