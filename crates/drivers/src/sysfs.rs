//! Properties of a drive in sysfs (`Documentation/ABI/stable/sysfs-block` of the kernel).

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where sysfs is mounted.
pub(crate) const ROOT: &str = "/sys";

/// The block device of an NVMe namespace by the number of its character device: `nvme0n1` of
/// `ng0n1`.
pub(crate) fn block_device_of(root: &Path, device: u64) -> Option<PathBuf> {
    let link = format!("dev/char/{}:{}", libc::major(device), libc::minor(device));
    let target = std::fs::read_link(root.join(link)).ok()?;
    let name = target.file_name()?.to_str()?.strip_prefix("ng")?;
    Some(root.join(format!("class/block/nvme{name}")))
}

/// The properties in `/sys/dev/block/MAJOR:MINOR/queue`.
pub(crate) struct Sysfs(PathBuf);

impl Sysfs {
    /// The drive with device number `device`, or the drive of that partition. `None` if there is
    /// none (the file system has no drive, or several).
    pub fn of(device: u64) -> Option<Sysfs> {
        let (major, minor) = (libc::major(device), libc::minor(device));
        let entry = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        [entry.join("queue"), entry.join("../queue")].into_iter().find(|p| p.is_dir()).map(Sysfs)
    }

    /// The drive of the NVMe namespace whose character device is open.
    pub fn of_namespace(file: &File) -> Option<Sysfs> {
        let drive = block_device_of(Path::new(ROOT), file.metadata().ok()?.rdev())?;
        Some(Sysfs(drive.join("queue"))).filter(|queue| queue.0.is_dir())
    }

    pub fn number<N: FromStr>(&self, attribute: &str) -> Option<N> {
        self.text(attribute)?.parse().ok()
    }

    pub fn text(&self, attribute: &str) -> Option<String> {
        Some(std::fs::read_to_string(self.0.join(attribute)).ok()?.trim().to_owned())
    }

    /// Whether the drive has queues that can be polled for completions.
    pub fn has_poll_queues(&self) -> bool {
        self.number("io_poll") == Some(1u8)
    }
}
