//! Files for the restart logs of images: `DIR/images/DEVICE-INODE/restart-log`, or
//! `DIR/images/DEVICE/restart-log` of an image on a block device.
//!
//! An image keeps its log under each of its names, and a server opens the directory of no other
//! image. See [`qcow2::RestartLog`].

use base::Uuid;
use block::DeviceError;
use qcow2::{Header, RESTART_RECORDS, RestartLog};
#[cfg(feature = "sandbox")]
use sandbox::{Access, Profile};
use spec::Value;
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Says when the machine was started.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The file's name.
const NAME: &str = "restart-log";
/// Rights by which others than the owner change a directory.
const OTHERS_WRITE: u32 = 0o022;

/// Which restart log an image has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RestartLogs {
    /// One in [`runtime_directory`], if it can be made there.
    #[default]
    Runtime,
    /// One in this directory.
    In(PathBuf),
    /// None.
    Off,
}

/// `$XDG_RUNTIME_DIR/freestone`, or `/run/freestone` for users without such a directory: for files
/// that are of use until the machine is started again.
pub fn runtime_directory() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("freestone"),
        None => PathBuf::from("/run/freestone"),
    }
}

impl RestartLogs {
    /// The directory of all logs.
    fn root(&self) -> Option<PathBuf> {
        match self {
            RestartLogs::Runtime => Some(runtime_directory().join("images")),
            RestartLogs::In(directory) => Some(directory.join("images")),
            RestartLogs::Off => None,
        }
    }

    /// The directory of an image's log.
    fn directory(&self, image: &Path) -> Option<PathBuf> {
        let root = self.root()?;
        let file = std::fs::metadata(image).ok()?;
        Some(root.join(match file.file_type().is_block_device() {
            true => format!("{:x}", file.rdev()),
            false => format!("{:x}-{:x}", file.dev(), file.ino()),
        }))
    }

    /// Keeps what the log of an image needs. Its directory is made.
    #[cfg(feature = "sandbox")]
    pub(super) fn keep(&self, image: &Path, profile: &mut Profile) {
        if let Some(directory) = self.directory(image) {
            profile.make_directory(&directory);
            profile.allow(directory, Access::Files);
            profile.allow(BOOT_ID, Access::Read);
        }
    }

    /// Keeps what the logs of all images need, also of later ones.
    #[cfg(feature = "sandbox")]
    pub fn keep_all(&self, profile: &mut Profile) {
        if let Some(root) = self.root() {
            profile.make_directory(&root);
            profile.allow(root, Access::Files);
            profile.allow(BOOT_ID, Access::Read);
        }
    }

    /// The log of an image that this process has locked.
    ///
    /// # Errors
    /// When the user has named the directory, and no log can be made there.
    pub(super) fn open(&self, image: &Path) -> Result<Option<RestartLog>, DeviceError> {
        let Some(directory) = self.directory(image) else { return Ok(None) };
        let path = directory.join(NAME);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        match (made.and_then(|()| open(&directory, true)), self) {
            (Ok(log), _) => Ok(Some(log)),
            (Err(error), RestartLogs::Runtime) => {
                let (image, log) = (image.display(), path.display());
                tracing::warn!(%image, %log, %error, "no restart log: a kill of the server loses writes that were not flushed");
                Ok(None)
            }
            (Err(error), _) => {
                Err(DeviceError::new(path.display().to_string(), "cannot open the restart log")
                    .because(error))
            }
        }
    }
}

/// Refuses an image with writes that only its log has, as a server that was killed leaves it.
///
/// # Errors
/// When there are such writes, or the log cannot be read.
pub fn check_restored(image: &Path, header: &Header) -> Result<(), DeviceError> {
    let Some(directory) = RestartLogs::Runtime.directory(image) else { return Ok(()) };
    let log = match open(&directory, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        log => log,
    };
    let (name, path) = (image.display().to_string(), directory.join(NAME));
    let path = path.display();
    let clusters = log.and_then(|log| log.clusters_of(header));
    let clusters = clusters.map_err(|error| {
        DeviceError::new(&name, format!("cannot read the restart log {path}")).because(error)
    })?;
    match clusters {
        0 => Ok(()),
        count => Err(DeviceError::new(
            name,
            format!(
                "the server was killed, and the restart log {path} has writes to {count} clusters that the image \
                 lacks: serve the image again first, or remove the log"
            ),
        )),
    }
}

/// Opens the log in a directory.
fn open(directory: &Path, may_create: bool) -> io::Result<RestartLog> {
    if std::fs::metadata(directory)?.mode() & OTHERS_WRITE != 0 {
        let text = format!("{}: others can write to the directory", directory.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(may_create).truncate(false).mode(0o600);
    let file = options.open(directory.join(NAME))?;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, format!("{BOOT_ID}: no UUID"));
    let Uuid(start_of_machine) = Uuid::parse(std::fs::read_to_string(BOOT_ID)?.trim()).ok_or_else(invalid)?;
    let Uuid([a, b, c, d, ..]) = Uuid::random()?;
    Ok(RestartLog::new(file, start_of_machine, u32::from_le_bytes([a, b, c, d]), RESTART_RECORDS))
}

impl Value for RestartLogs {
    fn expected() -> String {
        "none or a directory".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => None,
            "none" => Some(RestartLogs::Off),
            directory => Some(RestartLogs::In(directory.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_log_belongs_to_the_file_and_not_to_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (image, link) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(&image, "x").unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let logs = RestartLogs::In(folder.path().join("logs"));
        assert!(logs.open(&image).unwrap().is_some());
        assert_eq!(logs.directory(&image), logs.directory(&link));
        assert!(RestartLogs::Off.open(&image).unwrap().is_none());
    }

    #[test]
    fn a_directory_that_others_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a");
        std::fs::write(&image, "x").unwrap();
        let logs = RestartLogs::In(folder.path().into());
        let directory = logs.directory(&image).unwrap();
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o777)).unwrap();
        let error = logs.open(&image).err().unwrap().to_string();
        assert!(error.contains("cannot open the restart log"), "{error}");
    }
}
