//! File systems on block devices: found, made, checked and grown by the programs of the system.

use super::programs::run;
use crate::fault::{Fault, Result};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// Limit of programs that read a little.
const SHORT: Duration = Duration::from_secs(30);
/// Limit of programs that write metadata or check it.
const LONG: Duration = Duration::from_secs(600);
/// A device is empty if this many bytes at its beginning and end are zero.
const EDGE: usize = 1 << 20;

/// Makes sure that a device has a file system of this type, which is made on a device that is
/// proved empty.
///
/// # Errors
/// `INTERNAL` when the device has other content, or a program fails.
pub(super) fn prepare(device: &Path, fs_type: &str) -> Result<()> {
    match found(device)? {
        Some(is) if is == fs_type => check(device, fs_type),
        Some(other) => {
            Err(Fault::internal(format!("{}: it has {other}, and {fs_type} is wanted", device.display())))
        }
        None => {
            prove_empty(device)?;
            make(device, fs_type)
        }
    }
}

/// The format that a device has, by the name that `blkid` gives it.
///
/// # Errors
/// When that cannot be known, which is no proof of emptiness.
pub(super) fn found(device: &Path) -> Result<Option<String>> {
    let arguments = ["-p", "-o", "export"].map(OsStr::new);
    let ended = run("blkid", &[&arguments[..], &[device.as_os_str()]].concat(), SHORT)?;
    match ended.code {
        Some(0) => {
            let value = |key: &str| {
                let mut lines = ended.output.lines();
                lines.find_map(|line| line.strip_prefix(key)).map(str::to_owned)
            };
            let table = value("PTTYPE=").map(|kind| format!("a partition table ({kind})"));
            let kind = value("TYPE=").or(table);
            Ok(Some(kind.unwrap_or_else(|| "content that blkid knows".to_owned())))
        }
        // Nothing found. Any other code means that it could not look, or is not certain.
        Some(2) => Ok(None),
        _ => Err(ended.fault("blkid")),
    }
}

/// Refuses a device whose beginning or end has data, or that another program uses.
fn prove_empty(device: &Path) -> Result<()> {
    let fault = |error: io::Error| Fault::of_file(device, error);
    // An `mkfs` that a killed predecessor has left holds it exclusively.
    let exclusive =
        OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::EXCL.bits() as i32).open(device);
    let mut disk = exclusive.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::BUSY.raw_os_error() => {
            Fault::again(format!("{}: another program uses it", device.display()))
        }
        _ => fault(error),
    })?;
    match has_data(&mut disk).map_err(fault)? {
        Some(offset) => Err(Fault::internal(format!(
            "{}: no format is known, but there is data at {offset}: no file system is made over it",
            device.display()
        ))),
        None => Ok(()),
    }
}

/// The offset of the first byte that is not zero, within the first and last MiB.
fn has_data(disk: &mut File) -> io::Result<Option<u64>> {
    let size = disk.seek(SeekFrom::End(0))?;
    let mut edge = vec![0; EDGE.min(usize::try_from(size).unwrap_or(EDGE))];
    for offset in [0, size - edge.len() as u64] {
        disk.seek(SeekFrom::Start(offset))?;
        disk.read_exact(&mut edge)?;
        if let Some(place) = edge.iter().position(|byte| *byte != 0) {
            return Ok(Some(offset + place as u64));
        }
    }
    Ok(None)
}

/// Makes a file system. A new volume reads as zeroes, so it is not discarded first.
fn make(device: &Path, fs_type: &str) -> Result<()> {
    let (program, options): (&str, &[&str]) = match fs_type {
        "xfs" => ("mkfs.xfs", &["-q", "-K"]),
        _ => ("mkfs.ext4", &["-q", "-m", "0", "-E", "nodiscard"]),
    };
    let arguments: Vec<&OsStr> = options.iter().map(OsStr::new).chain([device.as_os_str()]).collect();
    let ended = run(program, &arguments, LONG)?;
    match ended.code {
        Some(0) => Ok(()),
        _ => Err(ended.fault(program)),
    }
}

/// Repairs what needs no decision. XFS does that when it is mounted.
fn check(device: &Path, fs_type: &str) -> Result<()> {
    if fs_type != "ext4" {
        return Ok(());
    }
    let ended = run("e2fsck", &["-p".as_ref(), device.as_os_str()], LONG)?;
    match ended.code {
        // 1: errors were corrected; 2: so on a mounted root file system.
        Some(0..=2) => Ok(()),
        _ => Err(ended.fault("e2fsck")),
    }
}

/// Grows a mounted file system to the size of its device.
///
/// # Errors
/// When the program fails.
pub(super) fn grow(device: &Path, path: &Path, fs_type: &str) -> Result<()> {
    let (program, argument) = match fs_type {
        "xfs" => ("xfs_growfs", path),
        _ => ("resize2fs", device),
    };
    let ended = run(program, &[argument.as_os_str()], LONG)?;
    match ended.code {
        Some(0) => Ok(()),
        _ => Err(ended.fault(program)),
    }
}

/// Grows an unmounted file system to the size of its device. XFS grows only while it is mounted.
///
/// # Errors
/// When the device cannot be read, or a program fails.
pub(super) fn grow_unmounted(device: &Path, fs_type: &str) -> Result<()> {
    let fault = |error: io::Error| Fault::of_file(device, error);
    let mut disk = File::open(device).map_err(fault)?;
    let size = disk.seek(SeekFrom::End(0)).map_err(fault)?;
    // Less than a block is left over. A larger rest is a last group that is too small to use: the
    // programs below find nothing to do then.
    let is_smaller = |bytes: u64| bytes.saturating_add(64 << 10) < size;
    if fs_type != "ext4" || !is_smaller(ext4_bytes(&mut disk).map_err(fault)?) {
        return Ok(());
    }
    // resize2fs wants this check, which takes as long as there are inodes.
    let ended = run("e2fsck", &["-f".as_ref(), "-p".as_ref(), device.as_os_str()], LONG)?;
    match ended.code {
        Some(0..=2) => grow(device, device, fs_type),
        _ => Err(ended.fault("e2fsck")),
    }
}

/// Size of an ext4, in bytes, by its superblock: `s_blocks_count_lo`, `s_log_block_size`,
/// `s_feature_incompat` and `s_blocks_count_hi` (Linux, Documentation/filesystems/ext4).
fn ext4_bytes(disk: &mut File) -> io::Result<u64> {
    const HAS_64_BITS: u32 = 0x80;
    let mut superblock = [0; 1024];
    disk.seek(SeekFrom::Start(1024))?;
    disk.read_exact(&mut superblock)?;
    let field = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| superblock[at + byte]));
    let high = if field(0x60) & HAS_64_BITS == 0 { 0 } else { field(0x150) };
    let blocks = u64::from(high) << 32 | u64::from(field(0x4));
    let block_bytes = 1024_u64.checked_shl(field(0x18)).unwrap_or_default();
    Ok(blocks.saturating_mul(block_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::PathBuf;

    /// A file of 64 MiB with bytes at an offset: the programs work on files, too.
    fn disk(folder: &Path, content: &[(u64, &[u8])]) -> PathBuf {
        let path = folder.join("disk");
        let mut file = File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        for (offset, bytes) in content {
            file.seek(SeekFrom::Start(*offset)).unwrap();
            file.write_all(bytes).unwrap();
        }
        path
    }

    #[test]
    fn an_empty_disk_gets_a_file_system_that_a_second_call_keeps() {
        let folder = tempfile::tempdir().unwrap();
        let disk = disk(folder.path(), &[]);
        prepare(&disk, "ext4").unwrap();
        // Its UUID, which a second mkfs would change.
        let uuid = || std::fs::read(&disk).unwrap()[1024 + 0x68..][..16].to_owned();
        let before = uuid();
        assert_eq!(found(&disk).unwrap().as_deref(), Some("ext4"));
        prepare(&disk, "ext4").unwrap();
        assert_eq!(uuid(), before);
        assert!(prepare(&disk, "xfs").unwrap_err().message.contains("it has ext4"));
    }

    #[test]
    fn an_unmounted_file_system_grows_with_its_disk() {
        let folder = tempfile::tempdir().unwrap();
        let disk = disk(folder.path(), &[]);
        prepare(&disk, "ext4").unwrap();
        let size = || ext4_bytes(&mut File::open(&disk).unwrap()).unwrap();
        let grown = |bytes: u64| {
            OpenOptions::new().write(true).open(&disk).unwrap().set_len(bytes).unwrap();
            grow_unmounted(&disk, "ext4").map(|()| size())
        };
        assert_eq!(grown(64 << 20), Ok(64 << 20));
        assert_eq!(grown(96 << 20), Ok(96 << 20));
        assert_eq!(grown(96 << 20), Ok(96 << 20));
        assert_eq!(found(&disk).unwrap().as_deref(), Some("ext4"));
    }

    #[test]
    fn data_without_a_known_format_is_kept() {
        for offset in [0, 4096, (64 << 20) - 1] {
            let folder = tempfile::tempdir().unwrap();
            let disk = disk(folder.path(), &[(offset, b"x")]);
            let fault = prepare(&disk, "ext4").unwrap_err();
            assert!(fault.message.contains(&format!("data at {offset}")), "{fault}");
        }
    }

    #[test]
    fn a_partition_table_is_no_emptiness() {
        let folder = tempfile::tempdir().unwrap();
        let disk = disk(folder.path(), &[(446, &[0x80, 0, 1, 0, 0x83, 0, 1, 0, 0, 8]), (510, &[0x55, 0xaa])]);
        assert!(prepare(&disk, "ext4").is_err());
    }

    #[test]
    fn a_disk_that_cannot_be_read_is_not_empty() {
        assert!(prepare(Path::new("/nonexistent/disk"), "ext4").is_err());
    }
}
