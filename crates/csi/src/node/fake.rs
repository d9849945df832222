//! A backend for tests without kernel modules and privileges: files and directories.

use super::backend::{Attachment, NodeBackend};
use super::mounts::{Mounts, Usage, gone, usage};
use super::record::Record;
use crate::capability::Mount;
use crate::fault::{Fault, Result};
use crate::ids::fingerprint;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Disks are files in a directory.
pub struct Fake {
    folder: PathBuf,
    host_nqn: String,
}

impl Fake {
    /// A backend with its disks below `state_dir`, for the node called `name`.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn new(state_dir: &Path, name: &str, host_nqn: Option<&str>) -> Result<Fake> {
        let host_nqn =
            host_nqn.map_or_else(|| format!("nqn.2026-01.io.freestone:fake-{name}"), str::to_owned);
        Ok(Fake { folder: made(state_dir.join("disks"))?, host_nqn })
    }

    fn disk(&self, uuid: &str) -> PathBuf {
        self.folder.join(&fingerprint(uuid)[..32])
    }
}

fn made(folder: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&folder).map_err(|error| Fault::of_file(&folder, error))?;
    Ok(folder)
}

impl NodeBackend for Fake {
    fn host_nqn(&self) -> &str {
        &self.host_nqn
    }

    fn attach(&self, attachment: &Attachment) -> Result<PathBuf> {
        let path = self.disk(&attachment.uuid);
        let options = File::options().create(true).append(true).open(&path);
        options.map_err(|error| Fault::of_file(&path, error))?;
        Ok(path)
    }

    fn find(&self, record: &Record) -> Result<Option<PathBuf>> {
        Ok(Some(self.disk(&record.uuid)).filter(|path| path.exists()))
    }

    fn detach(&self, record: &Record) -> Result<()> {
        let path = self.disk(&record.uuid);
        gone(&path, fs::remove_file(&path))
    }

    fn size(&self, device: &Path) -> Result<u64> {
        fs::metadata(device).map(|found| found.len()).map_err(|error| Fault::of_file(device, error))
    }

    fn wait_for_size(&self, device: &Path, required: u64) -> Result<u64> {
        let size = self.size(device)?.max(required);
        let disk = File::options().write(true).open(device);
        disk.and_then(|disk| disk.set_len(size)).map_err(|error| Fault::of_file(device, error))?;
        Ok(size)
    }
}

/// A mount is a file that names its source.
pub struct FakeMounts {
    folder: PathBuf,
}

impl FakeMounts {
    /// Mounts whose files are below `state_dir`.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn new(state_dir: &Path) -> Result<FakeMounts> {
        Ok(FakeMounts { folder: made(state_dir.join("mounts"))? })
    }

    fn entry(&self, path: &Path) -> PathBuf {
        self.folder.join(&fingerprint(&path.display().to_string())[..32])
    }

    fn note(&self, source: &Path, path: &Path) -> Result<()> {
        let entry = self.entry(path);
        fs::write(&entry, source.display().to_string()).map_err(|error| Fault::of_file(&entry, error))
    }
}

impl Mounts for FakeMounts {
    fn mount_device(&self, device: &Path, path: &Path, _: &Mount, _: bool) -> Result<()> {
        made(path.to_owned())?;
        self.note(device, path)
    }

    fn prepare(&self, _: &Path, _: &str) -> Result<()> {
        Ok(())
    }

    fn bind(&self, source: &Path, target: &Path, is_block: bool, _: bool) -> Result<()> {
        match is_block {
            true => drop(File::create(target).map_err(|error| Fault::of_file(target, error))?),
            false => drop(made(target.to_owned())?),
        }
        self.note(source, target)
    }

    fn unmount(&self, path: &Path) -> Result<()> {
        let entry = self.entry(path);
        gone(&entry, fs::remove_file(&entry))
    }

    fn unmount_lazily(&self, path: &Path) -> Result<()> {
        self.unmount(path)
    }

    fn remove(&self, path: &Path) -> Result<()> {
        super::mounts::remove(path)
    }

    fn is_mounted(&self, path: &Path) -> Result<bool> {
        Ok(self.entry(path).exists())
    }

    fn of_device(&self, _: &Path) -> Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }

    fn usage(&self, path: &Path) -> Result<[Usage; 2]> {
        usage(path)
    }

    fn grow(&self, _: &Path, _: &Path, _: &str) -> Result<()> {
        Ok(())
    }
}
