//! Opening arrays: members that were named, members that a directory holds.

use crate::kinds::device::{self, DeviceConfig};
use crate::kinds::member::{member, member_at};
use crate::kinds::raid::RaidConfig;
use crate::retry::retry_while;
use block::{Device, DeviceError};
use raid::Uuid;
use raid::admin::open::{Candidate, OpenError, Selection, Wanted, is_of, select};
use raid::array::Array;
use raid::metadata::{Found, Label, ReadError, read_superblock};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Most entries of a directory that are looked at.
const MAX_SCANNED: usize = 4096;

/// An array that was opened, and what was found for it.
#[derive(Clone)]
pub struct Opened {
    /// The array.
    pub array: Arc<Array>,
    /// Spares that it may take: its own, and those of any array. Open for writing, and as their
    /// labels describe them.
    pub spares: Vec<(Arc<dyn Device>, Found)>,
}

/// Why an array cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ArrayError {
    /// A directory cannot be looked at.
    #[error("directory {}: {error}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A directory holds more files than [`MAX_SCANNED`].
    #[error("directory {}: {count} files: at most {MAX_SCANNED} are looked at", .path.display())]
    TooMany {
        /// The directory.
        path: PathBuf,
        /// Files in it.
        count: usize,
    },
    /// The members do not make an array.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The array cannot be started.
    #[error(transparent)]
    Start(#[from] raid::array::StartError),
}

/// The regular files and block devices of a directory, by name.
///
/// # Errors
/// When it cannot be read, or holds more files than [`MAX_SCANNED`].
pub fn disks_in(directory: &Path) -> Result<Vec<PathBuf>, ArrayError> {
    let failed = |error| ArrayError::Directory { path: directory.into(), error };
    let entries = std::fs::read_dir(directory).map_err(failed)?;
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| is_disk(path))
        .collect();
    if paths.len() > MAX_SCANNED {
        return Err(ArrayError::TooMany { path: directory.into(), count: paths.len() });
    }
    paths.sort();
    Ok(paths)
}

/// Opens the members of `array` (a name or UUID) among the regular files and block devices of a
/// directory. All are looked at, for reading only; those that belong to the array are then opened
/// for use.
///
/// # Errors
/// When the directory cannot be read.
pub fn scan(
    directory: &Path,
    array: &str,
    direct: bool,
    read_only: bool,
) -> Result<Vec<Candidate>, ArrayError> {
    let found = |path: PathBuf| {
        let name = path.display().to_string();
        let label = label(&*member_at(&path, false, true))?;
        candidate(name, &label, array, || member_at(&path, direct, read_only))
    };
    Ok(disks_in(directory)?.into_iter().filter_map(found).collect())
}

/// Opens those of the devices (paths or device specifications) that say that they belong to `array`
/// (a name or UUID). All are looked at, for reading only. Devices that cannot be read are ignored.
/// A device with a superblock of a later version is a candidate that cannot be opened.
pub fn find(devices: &[String], array: &str, direct: bool) -> Vec<Candidate> {
    let found = |text: &String| {
        member(text, direct, true).ok()?;
        let config =
            |is_looking: bool| member(text, direct && !is_looking, is_looking).expect("it made sense before");
        match superblock(&*config(true))? {
            Err(ReadError::Bad { error, .. }) if error.is_of_later_version() => {
                let device = Err(DeviceError::new(text.as_str(), error.to_string()));
                Some(Candidate { name: text.clone(), device, is_named: true })
            }
            found => candidate(text.clone(), &found.ok()?, array, || config(false)),
        }
    };
    devices.iter().filter_map(found).collect()
}

/// A device with this label if it belongs to the array; `config` says how it is opened.
fn candidate(
    name: String,
    label: &Label,
    array: &str,
    config: impl FnOnce() -> Box<dyn DeviceConfig>,
) -> Option<Candidate> {
    // A member's superblock has been seen: if it cannot be opened, people must know. A spare may be
    // waiting for another array.
    let is_named = matches!(label, Label::Member(_));
    is_of(label, array).then(|| {
        let device = device::open(&name, &*config());
        Candidate { name, device, is_named }
    })
}

/// The members of arrays in a directory: where each is, and its array's name and UUID. All files
/// and block devices are looked at, for reading only.
///
/// # Errors
/// When the directory cannot be read.
pub fn labels(directory: &Path) -> Result<Vec<(PathBuf, String, Uuid)>, ArrayError> {
    let member = |path: PathBuf| match label(&*member_at(&path, false, true))? {
        Label::Member(superblock) => {
            let config = &superblock.table.config;
            Some((path, config.name.clone(), config.uuid))
        }
        Label::Spare(_) => None,
    };
    Ok(disks_in(directory)?.into_iter().filter_map(member).collect())
}

fn is_disk(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() || found.file_type().is_block_device())
}

/// The superblock of a device; `None` if there is none that can be used.
fn label(config: &dyn DeviceConfig) -> Option<Label> {
    superblock(config)?.ok()
}

/// Reads the superblock of a device; `None` if the device cannot be opened.
fn superblock(config: &dyn DeviceConfig) -> Option<Result<Label, ReadError>> {
    let device = device::open("", config).ok()?;
    reactor::run(async move {
        let channel = device.open_channel().ok()?;
        let found = read_superblock("", &*channel, device.limits().capacity).await;
        Some(found.map(|found| found.label))
    })
}

/// Picks the members of one array among candidates. Runs a core on the calling thread.
///
/// # Errors
/// Says why there is no array, with the devices' names.
pub fn choose(candidates: Vec<Candidate>, wanted: &Wanted) -> Result<Selection, ArrayError> {
    let wanted = wanted.clone();
    Ok(reactor::run(async move { select(candidates, &wanted).await })?)
}

/// Starts an array: what a crash has left is recovered. Runs a core on the calling thread.
///
/// # Errors
/// When members fail, or do not take what the array needs.
pub fn start(selection: Selection) -> Result<Arc<Array>, ArrayError> {
    Ok(reactor::run(async move { selection.start(wall_ns()).await })?)
}

/// Now, in nanoseconds since 1970.
pub fn wall_ns() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |passed| passed.as_nanos() as u64)
}

impl ArrayError {
    /// Whether another process has a member open.
    pub fn is_in_use(&self) -> bool {
        matches!(self, ArrayError::Open(OpenError::InUse(_)))
    }
}

/// Opens what `config` says over the members that `named` opens, each time it is called.
pub(crate) fn open(
    config: &RaidConfig,
    mut named: impl FnMut() -> Vec<Candidate>,
) -> Result<Opened, DeviceError> {
    let what = config.name.as_deref().map_or("raid".into(), |name| format!("raid:{name}"));
    let failed = |error: ArrayError| DeviceError::new(&*what, error.to_string());
    let RaidConfig { run, force, read_only, .. } = *config;
    let wanted = Wanted { array: config.name.clone(), run, force, read_only };
    let selection = retry_while(ArrayError::is_in_use, || {
        let mut candidates = named();
        if let (Some(directory), Some(name)) = (&config.scan, &config.name) {
            candidates.extend(scan(directory, name, config.direct, read_only)?);
        }
        choose(candidates, &wanted)
    })
    .map_err(failed)?;
    for warning in &selection.warnings {
        tracing::warn!(array = selection.name(), "{warning}");
    }
    let shape = &selection.assembly.table.config;
    if !config.snapshot && !shape.is_mirror() {
        let level = shape.level.name();
        let message = format!("snapshot=off is for levels 1 and 10, and {} has level {level}", shape.name);
        return Err(DeviceError::new(&*what, message));
    }
    let (array, spares) = if read_only {
        let array = reactor::run(async move { selection.start_read_only(wall_ns()).await });
        (array.map_err(|error| failed(error.into()))?, Vec::new())
    } else {
        let spares = selection.spares();
        (start(selection).map_err(failed)?, spares)
    };
    array.set_deadlines(config.deadlines);
    array.set_snapshot(config.snapshot);
    Ok(Opened { array, spares })
}
