//! Files that hold keys and tokens, and keyrings of the kernel ([`keyring`]).
//!
//! Every reader of such a file goes through [`read`] or [`read_text`]. They refuse a file that
//! other users of the machine have access to, that is no regular file, or that is too long. The
//! content is erased from memory when it is dropped. An error
//! names the file and the line number and quotes no content: the path may come from a caller
//! without access to the file.
//!
//! Access: the owner and, for reading, the group of the file (modes such as 600, 400 and 640). The
//! group is for a service with a user of its own: `root:freestone`, mode 640.

#![deny(unsafe_code)]

pub mod keyring;
mod passed;

pub use passed::{ReadFile, from_passed, noting};

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Permission bits that a secret file must not have: the group may not change it, other users have
/// no access.
const REFUSED_BITS: u32 = 0o027;

/// Why a file cannot be used. No variant holds content of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refuses to open or read it.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is a directory, a pipe or a device.
    #[error("{}: not a regular file", .0.display())]
    NotRegular(PathBuf),
    /// Other users have access.
    #[error("{}: other users have access to this secret file (mode {mode:03o}): want 600, or 640", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is too long.
    #[error("{}: longer than {limit} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit, in bytes.
        limit: u64,
    },
    /// It is not UTF-8.
    #[error("{}: not text", .0.display())]
    NotText(PathBuf),
}

/// Reads a secret file of at most `limit` bytes.
///
/// # Errors
/// See [`Error`].
pub fn read(path: &Path, limit: u64) -> Result<Zeroizing<Vec<u8>>, Error> {
    if let Some(passed) = passed::find(path, limit) {
        return passed;
    }
    let (file, mode) = open(path)?;
    if mode & REFUSED_BITS != 0 {
        return Err(Error::Exposed { path: path.to_owned(), mode });
    }
    read_open(path, file, limit)
}

/// As [`read`], for text.
///
/// # Errors
/// See [`Error`].
pub fn read_text(path: &Path, limit: u64) -> Result<Zeroizing<String>, Error> {
    let bytes = read(path, limit)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| Error::NotText(path.to_owned()))?;
    Ok(Zeroizing::new(text.to_owned()))
}

/// Reads a file such as a certificate, which other users may read, of at most `limit` bytes.
///
/// # Errors
/// See [`Error`].
pub fn read_public(path: &Path, limit: u64) -> Result<Zeroizing<Vec<u8>>, Error> {
    if let Some(passed) = passed::find(path, limit) {
        return passed;
    }
    let (file, _) = open(path)?;
    read_open(path, file, limit)
}

/// Writes a secret file with mode 600. Existing content is replaced.
///
/// # Errors
/// When the file cannot be created or written.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.write_all(content.as_ref())
}

/// Opens a regular file and returns its permission bits. The mode is that of the open file, not of
/// the path.
fn open(path: &Path) -> Result<(File, u32), Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    // A pipe without a writer would block the caller.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    match metadata.is_file() {
        true => Ok((file, metadata.permissions().mode() & 0o7777)),
        false => Err(Error::NotRegular(path.to_owned())),
    }
}

fn read_open(path: &Path, file: File, limit: u64) -> Result<Zeroizing<Vec<u8>>, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let len = file.metadata().map_err(failed)?.len();
    // Room for all of it at once: a buffer that grows leaves copies behind in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(len.min(limit) as usize + 1));
    file.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > limit {
        true => Err(Error::TooLong { path: path.to_owned(), limit }),
        false => {
            passed::note(path, &bytes);
            Ok(bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn a_secret_file_that_other_users_have_access_to_is_refused_by_name_and_mode() {
        for mode in [0o600, 0o400, 0o640, 0o440, 0o700] {
            let (_folder, path) = file(b"canary", mode);
            assert_eq!(&**read(&path, 10).unwrap(), b"canary", "{mode:o}");
            assert_eq!(&**read_text(&path, 10).unwrap(), "canary", "{mode:o}");
        }
        for mode in [0o644, 0o604, 0o602, 0o601, 0o620, 0o660] {
            let (_folder, path) = file(b"canary", mode);
            let said = read(&path, 10).unwrap_err().to_string();
            assert!(
                said.contains(&format!("/key: other users have access to this secret file (mode {mode:o})")),
                "{said}"
            );
            assert_eq!(&**read_public(&path, 10).unwrap(), b"canary", "{mode:o}");
        }
    }

    #[test]
    fn an_error_names_the_file_and_quotes_nothing() {
        let (folder, path) = file(b"canary\xff", 0o600);
        assert!(read_text(&path, 10).unwrap_err().to_string().ends_with("/key: not text"));
        assert!(read(&path, 6).unwrap_err().to_string().ends_with("/key: longer than 6 bytes"));
        assert_eq!(read(&path, 7).unwrap().len(), 7);
        for error in [read_text(&path, 10).unwrap_err(), read(&path, 6).unwrap_err()] {
            assert!(!format!("{error:?}").contains("canary"));
        }
        let missing = read(&folder.path().join("none"), 1).unwrap_err().to_string();
        assert!(missing.contains("/none: No such file"), "{missing}");
    }

    #[test]
    fn a_path_that_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), Path::new("/dev/zero")] {
            assert!(matches!(read(path, 10), Err(Error::NotRegular(_))), "{path:?}");
        }
        // Without a writer, opening a pipe for reading waits for one.
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(matches!(read(&pipe, 10), Err(Error::NotRegular(_))));
    }
}
