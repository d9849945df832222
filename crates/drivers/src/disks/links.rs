//! Device nodes and the symbolic links to them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Beginnings of links that only programs can read. Others contain model and serial number, or the
/// name of a volume.
const OPAQUE: [&str; 10] = [
    "wwn-",
    "nvme-eui.",
    "nvme-nvme.",
    "nvme-uuid.",
    "scsi-0",
    "scsi-3",
    "dm-uuid-",
    "md-uuid-",
    "lvm-pv-uuid-",
    "nvme-nqn.",
];

/// The best link to each block device below `/dev/disk/by-id`.
pub struct Links(BTreeMap<String, PathBuf>);

impl Links {
    /// Reads the links. A host without udev has none.
    pub fn read(nodes: &Path) -> Links {
        let mut best: BTreeMap<String, (Rank, PathBuf)> = BTreeMap::new();
        let directory = nodes.join("disk/by-id");
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let Some(link) = entry.file_name().into_string().ok().filter(|link| is_plain(link)) else {
                continue;
            };
            let Some(name) = kernel_name(nodes, &path) else { continue };
            let rank = rank(link);
            if best.get(&name).is_none_or(|(known, _)| rank < *known) {
                best.insert(name, (rank, path));
            }
        }
        Links(best.into_iter().map(|(name, (_, path))| (name, path)).collect())
    }

    /// The link to the device of this name.
    pub fn of(&self, name: &str) -> Option<PathBuf> {
        self.0.get(name).cloned()
    }
}

/// The order of links to one device, the best first: readable, short.
type Rank = (bool, usize, String);

fn rank(link: String) -> Rank {
    (OPAQUE.iter().any(|beginning| link.starts_with(beginning)), link.len(), link)
}

fn is_plain(link: &str) -> bool {
    link.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The kernel's name of the block device whose node, or a link to it, is at `path` below `nodes`.
/// A character device for pass-through to a disk (`ng0n1`, `vdac0`) has the name of that disk.
pub fn kernel_name(nodes: &Path, path: &Path) -> Option<String> {
    let node = path.canonicalize().ok()?;
    let name = node.strip_prefix(nodes.canonicalize().ok()?).ok()?.to_str()?;
    // The kernel writes the slash in cciss/c0d0 as an exclamation mark.
    let name = name.replace('/', "!");
    let namespace = name.strip_prefix("ng").filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let disk = name.strip_suffix("c0").filter(|disk| disk.starts_with("vd"));
    Some(match (namespace, disk) {
        (Some(namespace), _) => format!("nvme{namespace}"),
        (_, Some(disk)) => disk.into(),
        _ => name,
    })
}
