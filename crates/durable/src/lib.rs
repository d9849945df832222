//! Files that are replaced as a whole: whenever the program is killed or power is lost, there is the old content or the
//! new, and once [`replace`] has returned it is the new.
//!
//! ```text
//!   write NAME.new ─ sync it ─ (link NAME to the backup's name) ─ rename NAME.new to NAME ─ sync the folder
//! ```
//!
//! POSIX promises that a rename within a folder is atomic, and nothing about the order in which what was not synced
//! reaches the disk; the tests take that at its word.

#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The system calls that replacing a file takes, in one folder.
pub trait Folder {
    /// Makes a file of these bytes, or overwrites one.
    ///
    /// # Errors
    /// When the system refuses.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes a file's content durable.
    ///
    /// # Errors
    /// When the system refuses: then nobody knows what is durable.
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
    /// When the system refuses: then nobody knows what is durable.
    fn sync_names(&self) -> io::Result<()>;
}

/// A folder of the file system, whose files get these permission bits.
#[derive(Clone, Debug)]
pub struct SystemFolder {
    path: PathBuf,
    mode: u32,
}

impl SystemFolder {
    /// The folder at `path`, for files with the permission bits `mode`.
    pub fn new(path: &Path, mode: u32) -> SystemFolder {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        SystemFolder { path: path.into(), mode }
    }
}

impl Folder for SystemFolder {
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(self.mode);
        options.open(self.path.join(name))?.write_all(bytes)
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

/// Gives the file `name` the content `bytes`, durably; what it had before stays under the name `backup`, if one is
/// given. Names with `.new` behind them are used on the way, and may be left over.
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

/// Gives the file `name`, if there is one, the name `backup` as well.
fn keep(folder: &dyn Folder, name: &str, backup: &str) -> io::Result<()> {
    let new = format!("{backup}.new");
    accept(ErrorKind::NotFound, folder.remove(&new))?;
    match folder.link(name, &new) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        // When the two are one file already, renaming leaves both names.
        linked => linked.and_then(|()| folder.rename(&new, backup)),
    }
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
