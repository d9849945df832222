//! The facts of a drive in sysfs.

use super::Drive;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest attribute that is read; those of drives have less than 100 bytes.
const MAX_ATTRIBUTE: u64 = 4096;
/// Longest text that is reported.
const MAX_TEXT: usize = 128;
/// Unit of `size`, for any block size.
pub const SECTOR_BYTES: u64 = 512;
/// Header of the Unit Serial Number page: device type, page code, length (SPC-4 7.8.18).
const VPD_HEADER: usize = 4;
const VPD_SERIAL_PAGE: u8 = 0x80;

/// Facts of a drive that the kernel keeps in sysfs.
pub struct SysfsFacts {
    pub drive: Drive,
    /// Whether it is an NVMe namespace.
    pub is_nvme: bool,
    /// The directory of its device.
    device: PathBuf,
}

impl SysfsFacts {
    /// Reads the directory of a block device, or of a partition, whose drive counts. `None` if it
    /// belongs to no device: a loop device, or a volume of the kernel. Asks the kernel alone.
    pub fn read(place: &Path) -> Option<SysfsFacts> {
        let place = place.canonicalize().ok()?;
        let place = if place.join("partition").exists() { place.parent()?.to_owned() } else { place };
        let device = place.join("device").canonicalize().ok()?;
        let serial = || text(&device.join("serial")).or_else(|| vpd_serial(&device.join("vpd_pg80")));
        let number = |path: PathBuf| text(&path)?.parse::<u64>().ok();
        let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
        let drive = Drive {
            model: text(&device.join("model")),
            serial: serial().or_else(|| text(&place.join("serial"))),
            firmware: text(&device.join("firmware_rev")).or_else(|| text(&device.join("rev"))),
            size_bytes: number(place.join("size")).and_then(|sectors| sectors.checked_mul(SECTOR_BYTES)),
            address: address(&device).or_else(|| name(&device)),
            ..Drive::default()
        };
        Some(SysfsFacts { drive, is_nvme: name(&place)?.starts_with("nvme"), device })
    }

    /// The temperature in degrees Celsius. Waits for the drive.
    pub fn temperature(&self) -> Option<i32> {
        controllers(&self.device).iter().find_map(|place| temperature(place))
    }

    /// The transport of an NVMe controller as the kernel names it: `pcie`, `tcp`.
    pub fn nvme_transport(&self) -> Option<String> {
        controllers(&self.device).iter().find_map(|place| text(&place.join("transport")))
    }

    /// The directory of the drive's device, without symbolic links.
    pub fn device(&self) -> &Path {
        &self.device
    }
}

/// The directories of a drive's controllers. A namespace that Linux may reach over several paths
/// belongs to a subsystem, which has them. Any other device is its own.
fn controllers(device: &Path) -> Vec<PathBuf> {
    let is_subsystem =
        device.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("nvme-subsys"));
    if !is_subsystem {
        return vec![device.to_owned()];
    }
    let entries = std::fs::read_dir(device).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut controllers: Vec<PathBuf> = entries.filter(|place| place.join("address").exists()).collect();
    controllers.sort();
    controllers
}

/// The addresses of a drive's controllers: `0000:01:00.0`.
fn address(device: &Path) -> Option<String> {
    let addresses: Vec<String> =
        controllers(device).iter().filter_map(|place| text(&place.join("address"))).collect();
    plain(addresses.join(", ").as_bytes())
}

/// The content of an attribute.
fn content(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_ATTRIBUTE).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The text of an attribute, which a drive's firmware may have chosen.
pub fn text(path: &Path) -> Option<String> {
    plain(&content(path)?)
}

/// Printable ASCII, which is all that drives may use, without blanks around it. `None` if there is
/// none.
fn plain(bytes: &[u8]) -> Option<String> {
    let text = bytes.iter().copied().map(char::from);
    let text: String = text.filter(|c| *c == ' ' || c.is_ascii_graphic()).take(MAX_TEXT).collect();
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The serial number of a SCSI device.
fn vpd_serial(path: &Path) -> Option<String> {
    let page = content(path)?;
    let header = page.first_chunk::<VPD_HEADER>()?;
    let len = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if header[1] != VPD_SERIAL_PAGE {
        return None;
    }
    plain(page.get(VPD_HEADER..VPD_HEADER + len)?)
}

/// The first temperature of the device's sensors, which is that of the drive.
fn temperature(device: &Path) -> Option<i32> {
    // In the controller's directory (NVMe), or in one for all sensors.
    let entries = [device.to_owned(), device.join("hwmon")].into_iter();
    let mut entries = entries.flat_map(|place| std::fs::read_dir(place).into_iter().flatten().flatten());
    let of_sensor = |entry: std::fs::DirEntry| {
        entry.file_name().to_str()?.strip_prefix("hwmon")?.parse::<u32>().ok()?;
        text(&entry.path().join("temp1_input"))?.parse::<i32>().ok()
    };
    let millidegrees = entries.find_map(of_sensor)?;
    Some(millidegrees.div_euclid(1000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A directory with these files.
    fn put(place: &Path, files: &[(&str, &[u8])]) {
        for (name, bytes) in files {
            let path = place.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }

    fn some(text: &str) -> Option<String> {
        Some(text.into())
    }

    #[test]
    fn an_nvme_drive_has_the_facts_of_its_controller() {
        let root = tempfile::tempdir().unwrap();
        let controller = root.path().join("devices/pci/0000:01:00.0/nvme/nvme0");
        put(
            &controller,
            &[
                ("model", b"Fast Disk 2T                            \n"),
                ("serial", b"S1234   \n"),
                ("firmware_rev", b"1.2\n"),
                ("address", b"0000:01:00.0\n"),
                ("hwmon3/temp1_input", b"41850\n"),
                ("nvme0n1/size", b"8192\n"),
                ("nvme0n1/nvme0n1p1/partition", b"1\n"),
                ("nvme0n1/nvme0n1p1/size", b"1\n"),
            ],
        );
        symlink("..", controller.join("nvme0n1/device")).unwrap();
        let want = Drive {
            model: some("Fast Disk 2T"),
            serial: some("S1234"),
            firmware: some("1.2"),
            size_bytes: Some(4 << 20),
            address: some("0000:01:00.0"),
            ..Drive::default()
        };
        let links = root.path().join("dev/block");
        fs::create_dir_all(&links).unwrap();
        symlink(controller.join("nvme0n1"), links.join("259:0")).unwrap();
        symlink(controller.join("nvme0n1/nvme0n1p1"), links.join("259:1")).unwrap();
        for name in ["259:0", "259:1"] {
            let facts = SysfsFacts::read(&links.join(name)).unwrap();
            assert!(facts.is_nvme);
            assert_eq!(facts.temperature(), Some(41));
            assert_eq!(facts.drive, want);
        }
        assert!(SysfsFacts::read(&links.join("259:2")).is_none());
    }

    #[test]
    fn a_namespace_of_several_paths_has_the_addresses_of_its_controllers() {
        let root = tempfile::tempdir().unwrap();
        let subsystem = root.path().join("nvme-subsys0");
        put(
            &subsystem,
            &[
                ("model", b"Fast\n"),
                ("nvme0/address", b"0000:01:00.0\n"),
                ("nvme1/address", b"0000:02:00.0\n"),
                ("nvme1/hwmon4/temp1_input", b"50000\n"),
                ("nvme0n1/size", b"2\n"),
            ],
        );
        symlink("..", subsystem.join("nvme0n1/device")).unwrap();
        let facts = SysfsFacts::read(&subsystem.join("nvme0n1")).unwrap();
        assert!(facts.is_nvme && facts.drive.model == some("Fast"));
        let temperature = facts.temperature();
        assert_eq!((facts.drive.address, temperature), (some("0000:01:00.0, 0000:02:00.0"), Some(50)));
    }

    #[test]
    fn a_scsi_disk_has_its_serial_number_in_a_page() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("0:0:1:0");
        put(
            &device,
            &[
                ("model", "DISK \x07\u{202e}X     \n".as_bytes()),
                ("rev", b"A1\n"),
                ("vpd_pg80", b"\0\x80\0\x08  WX-42 "),
                ("hwmon/hwmon7/temp1_input", b"-1500\n"),
                ("block/sda/size", b"2\n"),
            ],
        );
        symlink("../..", device.join("block/sda/device")).unwrap();
        let facts = SysfsFacts::read(&device.join("block/sda")).unwrap();
        assert!(!facts.is_nvme);
        assert_eq!(facts.temperature(), Some(-2));
        let drive = facts.drive;
        assert_eq!((drive.model, drive.serial), (some("DISK X"), some("WX-42")));
        assert_eq!((drive.firmware, drive.address), (some("A1"), some("0:0:1:0")));
        assert_eq!(drive.size_bytes, Some(1024));
        for page in [&b"\0\x80\0\x09  WX-42 "[..], b"\0\x83\0\x01A", b"\0\x80", b"\0\x80\0\x02  "] {
            put(&device, &[("vpd_pg80", page)]);
            assert_eq!(SysfsFacts::read(&device.join("block/sda")).unwrap().drive.serial, None);
        }
    }

    #[test]
    fn a_virtual_block_device_has_no_facts() {
        let root = tempfile::tempdir().unwrap();
        put(root.path(), &[("loop0/size", b"2\n")]);
        assert!(SysfsFacts::read(&root.path().join("loop0")).is_none());
    }
}
