//! Mounts of this machine.

use super::file_system;
use crate::capability::Mount;
use crate::fault::{Fault, Result};
use rustix::fs::StatVfs;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;
use tonic::Code;

/// How long a file system may take to write its data back.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(30);

/// Room of a file system: bytes or inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Free for users.
    pub available: i64,
    /// In all.
    pub total: i64,
    /// In use.
    pub used: i64,
}

/// Mounts. Calls for one path come one at a time, and may be repeated.
pub trait Mounts: Send + Sync {
    /// Mounts a device, which gets a file system first if it is proved empty.
    ///
    /// # Errors
    /// When it has other content, or another device is mounted there.
    fn mount_device(&self, device: &Path, path: &Path, mount: &Mount, read_only: bool) -> Result<()>;

    /// Makes, or checks and grows, the file system of a device for a guest that mounts it. A file
    /// system is made only on a device that is proved empty, and grows to the size of the device.
    ///
    /// # Errors
    /// When the device has other content, or a program fails.
    fn prepare(&self, device: &Path, fs_type: &str) -> Result<()>;

    /// Shows a directory, or a block device, at another path, which is made.
    ///
    /// # Errors
    /// When the system refuses.
    fn bind(&self, source: &Path, target: &Path, is_block: bool, read_only: bool) -> Result<()>;

    /// Ends the mount at a path, if there is one.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` while it is in use, `DEADLINE_EXCEEDED` when its data cannot be
    /// written.
    fn unmount(&self, path: &Path) -> Result<()>;

    /// Takes the mount at a path away at once; it ends when it is not in use any more.
    ///
    /// # Errors
    /// When the system refuses.
    fn unmount_lazily(&self, path: &Path) -> Result<()>;

    /// Removes an empty directory or a file at which nothing is mounted, if it exists.
    ///
    /// # Errors
    /// When the system refuses.
    fn remove(&self, path: &Path) -> Result<()>;

    /// Whether something is mounted at a path.
    ///
    /// # Errors
    /// When the system cannot be asked.
    fn is_mounted(&self, path: &Path) -> Result<bool>;

    /// The paths at which a block device is mounted.
    ///
    /// # Errors
    /// When the system cannot be asked.
    fn of_device(&self, device: &Path) -> Result<Vec<PathBuf>>;

    /// The bytes and inodes of the file system at a path.
    ///
    /// # Errors
    /// `NOT_FOUND` without the path.
    fn usage(&self, path: &Path) -> Result<[Usage; 2]>;

    /// Grows the file system of a device, mounted at a path, to the size of the device.
    ///
    /// # Errors
    /// When the program fails.
    fn grow(&self, device: &Path, path: &Path, fs_type: &str) -> Result<()>;
}

/// The mounts of the process's mount namespace.
pub struct LinuxMounts;

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    device: u64,
    path: PathBuf,
}

impl Mounts for LinuxMounts {
    fn mount_device(&self, device: &Path, path: &Path, mount: &Mount, read_only: bool) -> Result<()> {
        let number = fs::metadata(device).map_err(|error| Fault::of_file(device, error))?.rdev();
        if let Some(entry) = mounted()?.into_iter().rev().find(|entry| entry.path == path) {
            return match entry.device == number {
                true => Ok(()),
                false => {
                    Err(Fault::precondition(format!("{}: another disk is mounted there", path.display())))
                }
            };
        }
        let (mut flags, mut data) = options(&mount.flags);
        if read_only {
            if file_system::found(device)?.as_deref() != Some(&mount.fs_type) {
                let detail =
                    format!("{}: it has no {}, and may not be written", device.display(), mount.fs_type);
                return Err(Fault::precondition(detail));
            }
            flags |= MountFlags::RDONLY;
            // A reader must not replay the journal either.
            data.push(if mount.fs_type == "xfs" { "norecovery" } else { "noload" }.to_owned());
        } else {
            file_system::prepare(device, &mount.fs_type)?;
        }
        let data = CString::new(data.join(",")).map_err(|_| Fault::invalid("mount_flags: a zero byte"))?;
        fs::create_dir_all(path).map_err(|error| Fault::of_file(path, error))?;
        let done = rustix::mount::mount(device, path, mount.fs_type.as_str(), flags, data.as_c_str());
        done.map_err(|error| {
            let flags = mount.flags.join(",");
            Fault::internal(format!("{}: mount of {} with {flags:?}: {error}", path.display(), mount.fs_type))
        })
    }

    fn prepare(&self, device: &Path, fs_type: &str) -> Result<()> {
        file_system::prepare(device, fs_type)?;
        file_system::grow_unmounted(device, fs_type)
    }

    fn bind(&self, source: &Path, target: &Path, is_block: bool, read_only: bool) -> Result<()> {
        if !self.is_mounted(target)? {
            let parent = target.parent().unwrap_or(target);
            fs::create_dir_all(parent).map_err(|error| Fault::of_file(parent, error))?;
            match is_block {
                true => drop(File::create(target).map_err(|error| Fault::of_file(target, error))?),
                false => fs::create_dir_all(target).map_err(|error| Fault::of_file(target, error))?,
            }
            rustix::mount::mount_bind(source, target).map_err(|error| Fault::of_file(target, error))?;
        }
        if read_only {
            let flags = MountFlags::BIND | MountFlags::RDONLY;
            rustix::mount::mount_remount(target, flags, c"")
                .map_err(|error| Fault::of_file(target, error))?;
        }
        Ok(())
    }

    fn unmount(&self, path: &Path) -> Result<()> {
        while self.is_mounted(path)? {
            let (done, answer) = mpsc::channel();
            let from = path.to_owned();
            // A disk that does not answer keeps the thread, and not the call.
            std::thread::spawn(move || {
                let _ = done.send(rustix::mount::unmount(&from, UnmountFlags::NOFOLLOW));
            });
            match answer.recv_timeout(UNMOUNT_TIMEOUT) {
                Ok(Ok(()) | Err(Errno::INVAL | Errno::NOENT)) => {}
                Ok(Err(Errno::BUSY)) => {
                    return Err(Fault::precondition(format!("{}: it is in use", path.display())));
                }
                Ok(Err(error)) => return Err(Fault::of_file(path, error)),
                Err(_) => {
                    let detail =
                        format!("{}: not unmounted after {} s", path.display(), UNMOUNT_TIMEOUT.as_secs());
                    return Err(Fault::new(Code::DeadlineExceeded, detail));
                }
            }
        }
        Ok(())
    }

    fn unmount_lazily(&self, path: &Path) -> Result<()> {
        match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
            Err(error) => Err(Fault::of_file(path, error)),
        }
    }

    fn remove(&self, path: &Path) -> Result<()> {
        remove(path)
    }

    fn is_mounted(&self, path: &Path) -> Result<bool> {
        Ok(mounted()?.iter().any(|entry| entry.path == path))
    }

    fn of_device(&self, device: &Path) -> Result<Vec<PathBuf>> {
        let number = match fs::metadata(device) {
            Ok(found) => found.rdev(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Fault::of_file(device, error)),
        };
        Ok(mounted()?.into_iter().filter(|entry| entry.device == number).map(|entry| entry.path).collect())
    }

    fn usage(&self, path: &Path) -> Result<[Usage; 2]> {
        usage(path)
    }

    fn grow(&self, device: &Path, path: &Path, fs_type: &str) -> Result<()> {
        file_system::grow(device, path, fs_type)
    }
}

/// The result of a removal, without the error of something that is absent.
pub(super) fn gone(path: &Path, result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Fault::of_file(path, error)),
        _ => Ok(()),
    }
}

/// Removes an empty directory or a file, if it exists.
pub(super) fn remove(path: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    gone(path, removed)
}

/// The bytes and inodes of the file system at a path.
pub(super) fn usage(path: &Path) -> Result<[Usage; 2]> {
    let found = rustix::fs::statvfs(path).map_err(|error| match error {
        Errno::NOENT => Fault::not_found(format!("{}: {error}", path.display())),
        _ => Fault::of_file(path, error),
    })?;
    let StatVfs { f_frsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_favail, .. } = found;
    let number = |count: u64, unit: u64| i64::try_from(count.saturating_mul(unit)).unwrap_or(i64::MAX);
    let usage = |available: u64, total: u64, free: u64, unit: u64| Usage {
        available: number(available, unit),
        total: number(total, unit),
        used: number(total.saturating_sub(free), unit),
    };
    Ok([usage(f_bavail, f_blocks, f_bfree, f_frsize), usage(f_favail, f_files, f_ffree, 1)])
}

/// The mounts, in the order in which they were made.
fn mounted() -> Result<Vec<Entry>> {
    const FILE: &str = "/proc/self/mountinfo";
    let bytes = fs::read(FILE).map_err(|error| Fault::of_file(Path::new(FILE), error))?;
    Ok(bytes.split(|byte| *byte == b'\n').filter_map(entry).collect())
}

/// Parses a line: number, parent, MAJOR:MINOR, root, path, ….
fn entry(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let path = PathBuf::from(OsString::from_vec(unescaped(fields.nth(1)?)));
    Some(Entry { device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?), path })
}

/// A path without the octal escapes of spaces and the like.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| byte == b'\\');
        let escaped = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(character) => {
                path.push(character);
                rest = &after[3..];
            }
            None => {
                path.push(byte);
                rest = after;
            }
        }
    }
    path
}

/// Mount options as flags of the system call, and the rest for the file system.
fn options(words: &[String]) -> (MountFlags, Vec<String>) {
    let mut flags = MountFlags::empty();
    let mut data = Vec::new();
    for word in words.iter().flat_map(|words| words.split(',')) {
        match word {
            "" | "defaults" | "rw" | "suid" | "dev" | "exec" | "async" | "atime" => {}
            "ro" => flags |= MountFlags::RDONLY,
            "nosuid" => flags |= MountFlags::NOSUID,
            "nodev" => flags |= MountFlags::NODEV,
            "noexec" => flags |= MountFlags::NOEXEC,
            "sync" => flags |= MountFlags::SYNCHRONOUS,
            "dirsync" => flags |= MountFlags::DIRSYNC,
            "noatime" => flags |= MountFlags::NOATIME,
            "nodiratime" => flags |= MountFlags::NODIRATIME,
            "relatime" => flags |= MountFlags::RELATIME,
            "strictatime" => flags |= MountFlags::STRICTATIME,
            "lazytime" => flags |= MountFlags::LAZYTIME,
            other => data.push(other.to_owned()),
        }
    }
    (flags, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mountinfo_are_read_with_their_escapes() {
        let line = br"36 35 259:3 / /var/lib/a\040b\134c rw,noatime shared:1 - ext4 /dev/nvme0n1 rw";
        let device = rustix::fs::makedev(259, 3);
        assert_eq!(entry(line), Some(Entry { device, path: r"/var/lib/a b\c".into() }));
        for broken in [&b""[..], b"36 35", b"36 35 x / /a", br"1 2 3:4"] {
            assert_eq!(entry(broken), None);
        }
        assert_eq!(unescaped(br"a\04"), br"a\04");
    }

    #[test]
    fn the_root_is_mounted_and_a_new_directory_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert!(LinuxMounts.is_mounted(Path::new("/")).unwrap());
        assert!(!LinuxMounts.is_mounted(folder.path()).unwrap());
        LinuxMounts.unmount(folder.path()).unwrap();
        LinuxMounts.unmount(Path::new("/nonexistent/path")).unwrap();
    }

    #[test]
    fn options_are_split_into_flags_and_words_of_the_file_system() {
        let words = ["noatime,discard".to_owned(), "defaults".to_owned(), "data=ordered".to_owned()];
        let (flags, data) = options(&words);
        assert_eq!(flags, MountFlags::NOATIME);
        assert_eq!(data, ["discard", "data=ordered"]);
    }

    #[test]
    fn a_directory_with_files_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("file"), "data").unwrap();
        assert!(remove(&target).is_err());
        fs::remove_file(target.join("file")).unwrap();
        remove(&target).unwrap();
        remove(&target).unwrap();
        assert!(!target.exists());
    }

    #[test]
    fn usage_of_a_path_that_is_gone_is_not_found() {
        let folder = tempfile::tempdir().unwrap();
        assert!(usage(folder.path()).unwrap()[0].total > 0);
        assert_eq!(usage(&folder.path().join("gone")).unwrap_err().code, Code::NotFound);
    }
}
