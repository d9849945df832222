//! Facts of a drive of this host: model, serial number, firmware, size, address, health.
//!
//! ```text
//!   path ─► device number ─► sysfs: the drive's directory ─► facts    names and numbers of the kernel
//!                                                        └─► hwmon    temperature
//!        └─► NVMe node: Get Log Page, SMART / Health                  wear, spare, errors, warnings
//! ```
//!
//! Sources: `Documentation/ABI/stable/sysfs-block` and `Documentation/hwmon` of the kernel, SPC-4
//! for the Unit Serial Number page, and [`nvme::health_log`].
//!
//! A read may wait for the drive, and a drive that hangs never answers: callers read on a thread
//! that nothing waits for.

pub(crate) mod sysfs_facts;

use crate::nvme_uring::{AdminError, health_log};
use crate::passthrough::node::kind_of;
use crate::sysfs::ROOT;
use nvme::HealthLog;
use std::fs::{Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use sysfs_facts::SysfsFacts;

/// A drive. Values that the kernel or the drive does not tell are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drive {
    /// Model.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// Revision of the firmware.
    pub firmware: Option<String>,
    /// Size in bytes.
    pub size_bytes: Option<u64>,
    /// Address: of the PCI function, SCSI device (host:channel:target:lun) or virtio device.
    pub address: Option<String>,
    /// Temperature in degrees Celsius.
    pub temperature_celsius: Option<i32>,
    /// The health log of an NVMe drive.
    pub health: Option<HealthLog>,
    /// Reason why facts or the health log are absent.
    pub reason: Option<String>,
}

impl Drive {
    /// A drive of which nothing is known.
    pub fn unknown(reason: impl Into<String>) -> Drive {
        Drive { reason: Some(reason.into()), ..Drive::default() }
    }
}

/// Reads the facts of the drive at `path`, a block device or the character device of an NVMe
/// namespace. Waits for the drive. Needs `CAP_SYS_ADMIN` for the health log.
pub fn read(path: &Path) -> Drive {
    read_below(Path::new(ROOT), path)
}

fn read_below(root: &Path, path: &Path) -> Drive {
    let shown = path.display();
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return Drive::unknown(format!("{shown}: {error}")),
    };
    let Some(place) = sysfs_place(root, &metadata) else {
        return Drive::unknown(format!("{shown} is {}, not a drive", kind_of(&metadata)));
    };
    let Some(facts) = SysfsFacts::read(&place) else {
        return Drive::unknown(format!("{shown} is no hardware drive: sysfs has no device of it"));
    };
    let temperature_celsius = facts.temperature();
    let drive = Drive { temperature_celsius, ..facts.drive };
    if !facts.is_nvme {
        let reason = "only NVMe drives have a health log here";
        return Drive { reason: Some(reason.into()), ..drive };
    }
    match read_health(path) {
        Ok(log) => with_health(drive, log),
        Err(reason) => Drive { reason: Some(reason), ..drive },
    }
}

/// The directory of a node in sysfs: of a drive or of a part of one.
fn sysfs_place(root: &Path, metadata: &Metadata) -> Option<PathBuf> {
    let (kind, device) = (metadata.file_type(), metadata.rdev());
    match () {
        () if kind.is_block_device() => {
            Some(root.join(format!("dev/block/{}:{}", libc::major(device), libc::minor(device))))
        }
        () if kind.is_char_device() => crate::sysfs::block_device_of(root, device),
        () => None,
    }
}

/// The health log of the NVMe drive whose node is at `path`, or why there is none.
fn read_health(path: &Path) -> Result<HealthLog, String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path);
    let file = file.map_err(|error| format!("no health log: {}: {error}", path.display()))?;
    health_log(&file).map_err(|error| match error {
        AdminError::Kernel(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            "no health log: reading it takes CAP_SYS_ADMIN".into()
        }
        error => format!("no health log: {error}"),
    })
}

/// Adds what a health log says.
fn with_health(drive: Drive, log: HealthLog) -> Drive {
    const ZERO_CELSIUS_K: i32 = 273;
    let reported = (log.temperature_k != 0).then(|| i32::from(log.temperature_k) - ZERO_CELSIUS_K);
    Drive { temperature_celsius: reported.or(drive.temperature_celsius), health: Some(log), ..drive }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_no_drive_has_a_reason() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("disk.img");
        std::fs::write(&file, b"x").unwrap();
        let reason = |path: &Path| {
            let drive = read_below(root.path(), path);
            assert_eq!(drive, Drive::unknown(drive.reason.clone().unwrap()));
            drive.reason.unwrap()
        };
        assert_eq!(reason(&file), format!("{} is a regular file, not a drive", file.display()));
        assert_eq!(reason(Path::new("/dev/null")), "/dev/null is a character device, not a drive");
        assert_eq!(reason(Path::new("/nonexistent")), "/nonexistent: No such file or directory (os error 2)");
    }

    #[test]
    fn the_health_log_of_a_node_that_has_none_is_refused_with_the_reason() {
        assert_eq!(
            read_health(Path::new("/dev/null")).unwrap_err(),
            "no health log: Inappropriate ioctl for device (os error 25)"
        );
        let missing = read_health(Path::new("/nonexistent")).unwrap_err();
        assert!(missing.starts_with("no health log: /nonexistent: No such file"), "{missing}");
    }

    #[test]
    fn the_temperature_of_the_log_counts_before_that_of_the_kernel() {
        let drive = Drive { temperature_celsius: Some(30), ..Drive::default() };
        let log = HealthLog { temperature_k: 314, used_percent: 3, ..HealthLog::default() };
        let known = with_health(drive.clone(), log);
        assert_eq!((known.temperature_celsius, known.health), (Some(41), Some(log)));
        let silent = HealthLog { temperature_k: 0, ..log };
        assert_eq!(with_health(drive, silent).temperature_celsius, Some(30));
    }
}
