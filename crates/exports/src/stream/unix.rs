//! Unix sockets: binding, taking over a stale path, and removing it.

use super::passed;
use crate::Error;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Clients that may wait to be accepted.
const BACKLOG: libc::c_int = 128;

/// A listening socket that owns its path.
pub struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    /// `None`: another process made the socket, and removes it.
    _claim: Option<SocketPath>,
}

impl UnixSocket {
    /// Binds `path`, or takes the socket that was passed for it. A stale socket file is replaced;
    /// anything else stays and is an error.
    pub fn bind(path: &Path, permissions: u32) -> Result<UnixSocket, Error> {
        let failed = |action| move |source| Error::Socket { path: path.into(), action, source };
        if let Some(socket) = passed::take(&path.display().to_string()) {
            return Ok(UnixSocket { listener: socket.into(), path: path.into(), _claim: None });
        }
        SocketPath::free(path).map_err(failed("take over"))?;
        let (listener, claim) = listen(path, permissions, None).map_err(failed("listen on"))?;
        listener.set_nonblocking(true).map_err(failed("listen on"))?;
        Ok(UnixSocket { listener, path: path.into(), _claim: Some(claim) })
    }

    /// The socket itself, which does not block.
    pub fn socket(&self) -> &UnixListener {
        &self.listener
    }

    /// The path that it listens at.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The path of a socket that this process has bound. Dropping it removes the socket, unless another
/// file has replaced it.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    /// Device and inode of the socket file.
    identity: (u64, u64),
}

impl SocketPath {
    /// Removes a socket that refuses connections: its process has ended. A path that does not exist
    /// is fine, too.
    ///
    /// # Errors
    /// When a process listens there, or the path is not a socket: a file, a directory, a symbolic
    /// link. They stay.
    pub fn free(path: &Path) -> io::Result<()> {
        let file = match std::fs::symlink_metadata(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if !file.file_type().is_socket() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is not a socket"));
        }
        match UnixStream::connect(path) {
            Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "the socket is in use by another process")),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
            Err(error) => Err(error),
        }
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        let is_ours =
            std::fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if is_ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`, which must not exist ([`SocketPath::free`]), with permission bits and an
/// optional group. No client can connect before both are set.
///
/// # Errors
/// When `path` exists or is too long for a socket, or the system refuses a step.
pub fn listen(path: &Path, permissions: u32, group: Option<u32>) -> io::Result<(UnixListener, SocketPath)> {
    let socket = bind_closed(path)?;
    let file = std::fs::symlink_metadata(path)?;
    let claim = SocketPath { path: path.into(), identity: (file.dev(), file.ino()) };
    if group.is_some() {
        std::os::unix::fs::lchown(path, None, group)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(permissions))?;
    // SAFETY: a plain system call on a descriptor that we own.
    if unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((UnixListener::from(socket), claim))
}

/// A stream socket bound to `path` that does not listen yet, which the standard library cannot
/// make.
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
    // SAFETY: the new descriptor is ours alone; `address` is a live sockaddr_un of the size that is
    // given.
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
        let error = UnixSocket::bind(&path, 0o600).err().expect("another process listens");
        assert!(error.to_string().contains("in use by another process"), "{error}");
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_is_not_a_socket_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "data").unwrap();
        std::fs::create_dir(path("directory")).unwrap();
        drop(UnixListener::bind(path("stale")).unwrap());
        // A link to a stale socket is not ours to remove.
        std::os::unix::fs::symlink(path("stale"), path("link")).unwrap();
        for name in ["file", "directory", "link"] {
            let error = UnixSocket::bind(&path(name), 0o600).err().expect(name).to_string();
            assert!(error.contains(&format!("/{name}")) && error.contains("not a socket"), "{error}");
            assert!(std::fs::symlink_metadata(path(name)).is_ok(), "{name}");
        }
        assert_eq!(std::fs::read(path("file")).unwrap(), b"data");
    }

    #[test]
    fn a_file_that_appears_after_the_look_is_not_replaced() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(listen(file.path(), 0o600, None).unwrap_err().kind(), io::ErrorKind::AddrInUse);
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
