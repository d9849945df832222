//! Properties of a drive in sysfs (`Documentation/ABI/stable/sysfs-block` of the kernel).

use std::path::PathBuf;
use std::str::FromStr;

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

    /// The drive with this name, for example `nvme0n1`.
    pub fn of_name(name: &str) -> Option<Sysfs> {
        Some(Sysfs(PathBuf::from(format!("/sys/class/block/{name}/queue")))).filter(|queue| queue.0.is_dir())
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
