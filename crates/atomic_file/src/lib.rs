//! Atomic replacement of files. After a kill or a power loss a file has its old or its new content;
//! after [`replace`] returned, the new content.
//!
//! ```text
//!   write NAME.new ─ sync it ─ (copy NAME to the backup) ─ rename NAME.new to NAME ─ sync the folder
//! ```
//!
//! POSIX promises that a rename within a folder is atomic. It promises nothing about the order in
//! which changes without a sync reach the disk; the tests take that at its word.

#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// The system calls that replacing a file takes, in one folder.
pub trait Folder {
    /// Reads a file: its first `most` bytes. `None` when no file has this name.
    ///
    /// # Errors
    /// When the system refuses.
    fn read(&self, name: &str, most: u64) -> io::Result<Option<Vec<u8>>>;

    /// Makes a file of these bytes, or overwrites one.
    ///
    /// # Errors
    /// When the system refuses, or the name is that of a link.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes a file's content durable.
    ///
    /// # Errors
    /// When the system call fails. The durable content is unknown then.
    fn sync(&self, name: &str) -> io::Result<()>;

    /// Gives the file `from` the name `to` as well, which is free.
    ///
    /// # Errors
    /// When the system refuses.
    fn link(&self, from: &str, to: &str) -> io::Result<()>;

    /// Gives the file `from` the name `to`, which no other has afterwards.
    ///
    /// # Errors
    /// When the system refuses.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a name.
    ///
    /// # Errors
    /// When the system refuses, or there is no such name.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes the names durable.
    ///
    /// # Errors
    /// When the system call fails. The durable content is unknown then.
    fn sync_names(&self) -> io::Result<()>;
}

/// A folder of the file system, whose files get these permission bits.
#[derive(Clone, Debug)]
pub struct SystemFolder {
    path: PathBuf,
    mode: u32,
    /// User and group of the files; `None`: those of the process.
    owner: Option<(u32, u32)>,
}

impl SystemFolder {
    /// The folder at `path`, for files with the permission bits `mode`.
    pub fn new(path: &Path, mode: u32) -> SystemFolder {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        SystemFolder { path: path.into(), mode, owner: None }
    }

    /// The same folder, for files with the owner, group and permission bits of `former`.
    #[must_use]
    pub fn like(self, former: &fs::Metadata) -> SystemFolder {
        SystemFolder { mode: former.mode() & 0o777, owner: Some((former.uid(), former.gid())), ..self }
    }
}

impl Folder for SystemFolder {
    fn read(&self, name: &str, most: u64) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.path.join(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        // Only the process may read the file before it has its owner.
        let mode = if self.owner.is_some() { self.mode & 0o600 } else { self.mode };
        options.write(true).create(true).truncate(true).mode(mode).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(self.path.join(name))?;
        file.write_all(bytes)?;
        if let Some((user, group)) = self.owner {
            fchown(&file, Some(user), Some(group))?;
            file.set_permissions(Permissions::from_mode(self.mode))?;
        }
        Ok(())
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        File::open(self.path.join(name))?.sync_all()
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        fs::hard_link(self.path.join(from), self.path.join(to))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

/// Gives the file `name` the content `bytes`, durably; what it had before stays under the name
/// `backup`, if one is given. Names with `.new` behind them are used on the way, and may be left
/// over.
///
/// # Errors
/// When that fails; then the file is as it was, or as it shall be.
pub fn replace(folder: &dyn Folder, name: &str, bytes: &[u8], backup: Option<&str>) -> io::Result<()> {
    let new = format!("{name}.new");
    folder.write(&new, bytes)?;
    folder.sync(&new)?;
    if let Some(backup) = backup {
        keep(folder, name, backup)?;
    }
    folder.rename(&new, name)?;
    folder.sync_names()
}

/// Copies the file `name`, if there is one, to `backup`. It is no second name of the same file: a
/// crash before `name` is replaced would leave both on the same sectors, of which one may become
/// bad.
fn keep(folder: &dyn Folder, name: &str, backup: &str) -> io::Result<()> {
    // An unreadable file does not replace its backup.
    let Ok(Some(bytes)) = folder.read(name, u64::MAX) else { return Ok(()) };
    let new = format!("{backup}.new");
    folder.write(&new, &bytes)?;
    folder.sync(&new)?;
    folder.rename(&new, backup)
}

/// Gives the file `name`, if there is one, the name `aside` as well.
fn put_aside(folder: &dyn Folder, name: &str, aside: &str) -> io::Result<()> {
    let new = format!("{aside}.new");
    accept(ErrorKind::NotFound, folder.remove(&new))?;
    match folder.link(name, &new) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        // When the two are one file already, renaming leaves both names.
        linked => linked.and_then(|()| folder.rename(&new, aside)),
    }
}

/// The parsed content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meaning<T> {
    /// A value.
    Value(T),
    /// A later version of the program has written them, in this format.
    Later(u64),
    /// They are damaged, in words.
    Damaged(String),
}

/// Result of [`recover`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovered<T> {
    /// There is no file.
    None,
    /// The file is whole.
    Current(T),
    /// The file was damaged, as `damage` says: it has the content of its backup again.
    Previous {
        /// The value of the backup.
        value: T,
        /// Error of the file.
        damage: String,
    },
}

/// Why a file cannot be recovered.
#[derive(Debug)]
pub enum RecoverError {
    /// The system refuses something with the file of this name.
    Io(String, io::Error),
    /// A later version of the program has written the file of this name, in this format.
    Later(String, u64),
    /// The file is damaged, and its backup does not help.
    Damaged {
        /// Error of the file.
        error: String,
        /// Error of the backup.
        backup: String,
    },
}

/// Reads the file `name` that [`replace`] wrote: its first `most` bytes. When it is damaged, it
/// stays under the name `aside`, and gets the content of `backup`. The backup stays as it is: until
/// the file is whole again, it is the only one that is.
///
/// # Errors
/// When neither can be used, or the system refuses something. Then the backup is as it was.
pub fn recover<T>(
    folder: &dyn Folder,
    [name, backup, aside]: [&str; 3],
    most: u64,
    decode: impl Fn(&[u8]) -> Meaning<T>,
) -> Result<Recovered<T>, RecoverError> {
    let io = |name: &str| {
        let name = name.to_owned();
        move |error| RecoverError::Io(name, error)
    };
    let Some(bytes) = folder.read(name, most).map_err(io(name))? else { return Ok(Recovered::None) };
    let damage = match decode(&bytes) {
        Meaning::Value(value) => return Ok(Recovered::Current(value)),
        Meaning::Later(format) => return Err(RecoverError::Later(name.into(), format)),
        Meaning::Damaged(error) => error,
    };
    let damaged = |backup: String| RecoverError::Damaged { error: damage.clone(), backup };
    let Some(before) = folder.read(backup, most).map_err(io(backup))? else {
        return Err(damaged("there is none".into()));
    };
    let value = match decode(&before) {
        Meaning::Value(value) => value,
        Meaning::Later(format) => return Err(RecoverError::Later(backup.into(), format)),
        Meaning::Damaged(error) => return Err(damaged(error)),
    };
    put_aside(folder, name, aside).and_then(|()| folder.sync_names()).map_err(io(aside))?;
    replace(folder, name, &before, None).map_err(io(name))?;
    Ok(Recovered::Previous { value, damage })
}

/// Removes the file `name`, durably. There may be none.
///
/// # Errors
/// When that fails; then it may be there or not.
pub fn remove(folder: &dyn Folder, name: &str) -> io::Result<()> {
    accept(ErrorKind::NotFound, folder.remove(name))?;
    folder.sync_names()
}

fn accept(kind: ErrorKind, result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == kind => Ok(()),
        result => result,
    }
}
