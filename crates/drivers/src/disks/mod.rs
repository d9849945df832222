//! The block devices of this host, as the kernel lists them: disks, their partitions, and the use
//! that the kernel knows of.
//!
//! ```text
//!   /sys/block/NAME ─► sizes, model, serial number, partitions, holders ─► Disk
//!   /dev/disk/by-id ─► path that stays when names change              ─┤
//!   mounts, swaps   ─► use                                            ─┘
//! ```
//!
//! Listing opens no device: a disk without any use here may still have content, and the caller
//! decides whether to read it.
//!
//! Sources: `Documentation/ABI/stable/sysfs-block` of the kernel, proc(5), and the rules
//! `60-persistent-storage` of udev.

mod in_use;
mod links;
mod transport;

pub use in_use::{Tables, Use};
pub use transport::Transport;

use crate::drive::sysfs_facts::{SECTOR_BYTES, SysfsFacts, text};
use crate::sysfs::ROOT;
use links::{Links, kernel_name};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where device nodes are.
const NODES: &str = "/dev";
/// Major numbers of devices that cannot be written block by block: floppy disks, optical drives.
const LEFT_OUT: [&str; 2] = ["2:", "11:"];

/// A block device of the host. Values that the kernel does not tell are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Its name in the kernel.
    pub name: String,
    /// Its node.
    pub node: PathBuf,
    /// A path that stays when names change, else the node.
    pub path: PathBuf,
    /// The disk that it is a partition of.
    pub partition_of: Option<String>,
    /// The kernel's number of this disk; another disk of the same name has another one.
    pub generation: Option<u64>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Logical block size in bytes.
    pub logical_block_bytes: u32,
    /// Physical block size in bytes.
    pub physical_block_bytes: u32,
    /// Whether it has rotating media.
    pub is_rotational: bool,
    /// How it is attached.
    pub transport: Option<Transport>,
    /// Model.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// Its uses.
    pub uses: Vec<Use>,
}

/// The host whose disks are listed.
#[derive(Clone, Debug)]
pub struct Host {
    sysfs: PathBuf,
    nodes: PathBuf,
}

impl Default for Host {
    fn default() -> Host {
        Host { sysfs: ROOT.into(), nodes: NODES.into() }
    }
}

impl Host {
    /// The host whose sysfs and device nodes are in these directories, for tests.
    pub fn at(sysfs: impl Into<PathBuf>, nodes: impl Into<PathBuf>) -> Host {
        Host { sysfs: sysfs.into(), nodes: nodes.into() }
    }

    /// Lists the disks in the order of their names, each before its partitions. Disks without a
    /// medium and hidden paths of NVMe namespaces are left out.
    ///
    /// # Errors
    /// When sysfs cannot be read.
    pub fn disks(&self, tables: &Tables) -> io::Result<Vec<Disk>> {
        let place = self.sysfs.join("block");
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", place.display()));
        let mut names = names_in(&place).map_err(failed)?;
        names.sort_by_key(|name| natural(name));
        let uses = in_use::Uses::new(self, tables);
        let links = Links::read(&self.nodes);
        Ok(names.iter().flat_map(|name| self.with_partitions(name, &uses, &links)).collect())
    }

    /// The kernel's name of the block device at `path`, or of the disk of a pass-through node
    /// there. `None` if the path is not below the directory of device nodes.
    pub fn name_of(&self, path: &Path) -> Option<String> {
        // Only there: any other file may lie on a server that does not answer.
        path.strip_prefix(NODES).ok().and_then(|rest| kernel_name(&self.nodes, &self.nodes.join(rest)))
    }

    fn with_partitions(&self, name: &str, uses: &in_use::Uses, links: &Links) -> Vec<Disk> {
        let place = self.sysfs.join("block").join(name);
        let Some(mut disk) = self.disk(name, &place, None, links) else { return Vec::new() };
        let mut parts: Vec<String> = names_in(&place).unwrap_or_default();
        parts.retain(|part| place.join(part).join("partition").exists());
        parts.sort_by_key(|part| natural(part));
        disk.uses = uses.of(name, &place);
        let in_use = disk.uses.clone();
        let parts: Vec<Disk> = parts
            .iter()
            .filter_map(|part| {
                let place = place.join(part);
                let part = self.disk(part, &place, Some(&disk), links)?;
                let own = uses.of(&part.name, &place);
                // A use of the whole disk is one of all its parts.
                let of_disk = in_use.iter().map(|whole| Use::OfDisk(name.into(), whole.clone().into()));
                Some(Disk { uses: own.into_iter().chain(of_disk).collect(), ..part })
            })
            .collect();
        if !parts.is_empty() {
            disk.uses.push(Use::Partitions(parts.iter().map(|part| part.name.clone()).collect()));
        }
        std::iter::once(disk).chain(parts).collect()
    }

    fn disk(&self, name: &str, place: &Path, whole: Option<&Disk>, links: &Links) -> Option<Disk> {
        let sectors: u64 = number(&place.join("size"))?;
        let device = text(&place.join("dev"))?;
        let is_hidden = number(&place.join("hidden")) == Some(1u8);
        if sectors == 0 || is_hidden || LEFT_OUT.iter().any(|major| device.starts_with(major)) {
            return None;
        }
        let node = self.nodes.join(name.replace('!', "/"));
        let path = links.of(name).unwrap_or_else(|| node.clone());
        let own = Disk {
            name: name.into(),
            path,
            node,
            partition_of: whole.map(|disk| disk.name.clone()),
            size_bytes: sectors.checked_mul(SECTOR_BYTES)?,
            read_only: number(&place.join("ro")) == Some(1u8),
            uses: Vec::new(),
            ..whole.cloned().unwrap_or_default()
        };
        if whole.is_some() {
            return Some(own);
        }
        let facts = SysfsFacts::read(place);
        let queue = place.join("queue");
        let logical = number(&queue.join("logical_block_size")).unwrap_or(SECTOR_BYTES as u32);
        Some(Disk {
            generation: number(&place.join("diskseq")),
            logical_block_bytes: logical,
            physical_block_bytes: number(&queue.join("physical_block_size")).unwrap_or(logical),
            is_rotational: number(&queue.join("rotational")) == Some(1u8),
            transport: facts.as_ref().and_then(Transport::of),
            model: facts.as_ref().and_then(|facts| facts.drive.model.clone()),
            serial: facts.and_then(|facts| facts.drive.serial),
            ..own
        })
    }
}

/// Opens the node of a disk to read its content. It is not claimed, so other programs can use it
/// meanwhile.
///
/// # Errors
/// Those of the kernel.
pub fn open(node: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(node)
}

fn number<N: FromStr>(path: &Path) -> Option<N> {
    text(path)?.parse().ok()
}

/// The names in a directory, as far as they are printable.
fn names_in(place: &Path) -> io::Result<Vec<String>> {
    let names = std::fs::read_dir(place)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter(|name| name.bytes().all(|byte| byte.is_ascii_graphic())).collect())
}

/// The order of names in which a number counts as one: `nvme2n1` before `nvme10n1`, `sdb` before
/// `sdaa`.
fn natural(name: &str) -> Vec<(usize, String)> {
    let parts = name.as_bytes().chunk_by(|one, other| one.is_ascii_digit() == other.is_ascii_digit());
    parts.map(|part| (part.len(), String::from_utf8_lossy(part).into_owned())).collect()
}

#[cfg(test)]
mod tests;
