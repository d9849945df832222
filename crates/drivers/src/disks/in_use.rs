//! Use of disks that the kernel knows: mounts, swap space, and devices that hold others.

use super::{Host, names_in};
use crate::drive::sysfs_facts::text;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The mounts of this process.
const MOUNTS: &str = "/proc/self/mountinfo";
/// The swap space of the host.
const SWAPS: &str = "/proc/swaps";
/// Bytes that are read at once.
const STEP: usize = 64 << 10;
/// Longest table that is read. A host with ten thousand containers has less.
const MAX_TABLE: usize = 64 << 20;
/// Where the source of a mount stands after the separator: type, source, options (proc(5)).
const SOURCE: usize = 1;

/// A use of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// A file system is mounted at this directory.
    Mounted(String),
    /// Swap space.
    Swap,
    /// A block device of the kernel holds it: an md array, a device mapper volume.
    Holder(String),
    /// A partition table with these partitions.
    Partitions(Vec<String>),
    /// The disk of the partition, as a whole, has this use.
    OfDisk(String, Box<Use>),
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Use::Mounted(directory) => write!(f, "mounted at {directory}"),
            Use::Swap => f.write_str("used as swap space"),
            Use::Holder(name) => write!(f, "used by {name}"),
            Use::Partitions(names) => write!(f, "partition table: {}", names.join(", ")),
            Use::OfDisk(disk, whole) => write!(f, "{disk}: {whole}"),
        }
    }
}

/// The kernel's tables of mounts and swap space. They stay open, because a sandbox closes `/proc`.
#[derive(Debug, Default)]
pub struct Tables {
    mounts: Option<File>,
    swaps: Option<File>,
}

impl Tables {
    /// Opens the tables. Without one, its uses are unknown.
    pub fn open() -> Tables {
        Tables { mounts: File::open(MOUNTS).ok(), swaps: File::open(SWAPS).ok() }
    }

    /// Tables with this content, for tests.
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub fn at(mounts: &Path, swaps: &Path) -> io::Result<Tables> {
        Ok(Tables { mounts: Some(File::open(mounts)?), swaps: Some(File::open(swaps)?) })
    }
}

/// The content of a table as it is now.
fn content(table: Option<&File>) -> String {
    let mut bytes = Vec::new();
    while let Some(file) = table.filter(|_| bytes.len() < MAX_TABLE) {
        let len = bytes.len();
        bytes.resize(len + STEP, 0);
        let read = file.read_at(&mut bytes[len..], len as u64).unwrap_or(0);
        bytes.truncate(len + read);
        if read == 0 {
            break;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The uses in the tables: by device number and by name.
pub struct Uses {
    by_number: BTreeMap<String, Use>,
    by_name: BTreeMap<String, Use>,
}

impl Uses {
    /// Reads the tables.
    pub fn new(host: &Host, tables: &Tables) -> Uses {
        let mut uses = Uses { by_number: BTreeMap::new(), by_name: BTreeMap::new() };
        for line in content(tables.mounts.as_ref()).lines() {
            uses.mount(host, line);
        }
        for line in content(tables.swaps.as_ref()).lines().skip(1) {
            let path = line.split_whitespace().next().map(|path| PathBuf::from(unescaped(path)));
            if let Some(name) = path.and_then(|path| host.name_of(&path)) {
                uses.by_name.insert(name, Use::Swap);
            }
        }
        uses
    }

    /// Notes a mount. The first one of a device counts. A file system over several devices, such as
    /// Btrfs, has a number of its own and names one of them as its source.
    fn mount(&mut self, host: &Host, line: &str) -> Option<()> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(2);
        let (number, directory) = (fields.next()?, fields.nth(1)?);
        let shown = unescaped(directory).escape_debug().to_string();
        self.by_number.entry(number.into()).or_insert_with(|| Use::Mounted(shown.clone()));
        let source = PathBuf::from(unescaped(file_system.split(' ').nth(SOURCE)?));
        self.by_name.entry(host.name_of(&source)?).or_insert(Use::Mounted(shown));
        Some(())
    }

    /// The uses of the disk of this name, whose directory in sysfs is `place`.
    pub fn of(&self, name: &str, place: &Path) -> Vec<Use> {
        let by_number = text(&place.join("dev")).and_then(|number| self.by_number.get(&number));
        let known = by_number.or_else(|| self.by_name.get(name)).cloned();
        let mut holders = names_in(&place.join("holders")).unwrap_or_default();
        holders.sort();
        let holders = holders.iter().map(|holder| {
            let volume = text(&place.join("holders").join(holder).join("dm/name"));
            Use::Holder(volume.map_or(holder.clone(), |volume| format!("{holder} ({volume})")))
        });
        known.into_iter().chain(holders).collect()
    }
}

/// A path of a table, in which blanks and backslashes are octal: `\040`.
fn unescaped(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let octal = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => bytes.extend(std::iter::once(byte).chain(part.bytes().skip(3))),
            None => bytes.extend(std::iter::once(b'\\').chain(part.bytes())),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
