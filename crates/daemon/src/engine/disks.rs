//! Block devices of the host: what may become a device of the daemon or a member of an array.
//!
//! The kernel's tables come first. The content of a disk is read only where they know no use, on
//! threads that nothing waits for longer than [`WAIT`].

use super::background::{Answer, Reads};
use super::drives::path_of;
use super::{Engine, Live};
use crate::api_error::ApiError;
use api::{Disk, DiskTransport, DiskUse, DiskUseKind};
use block::IoError;
use stack::kinds::device::disks::{self, Host, Tables, Transport, Use};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// How long a request waits for the contents of disks.
const WAIT: Duration = Duration::from_secs(3);
/// Use of a disk whose content was not read in time, because others were.
const NOT_YET: &str = "not read yet: ask again";
/// Between two looks at answers.
const LOOK: Duration = Duration::from_millis(5);

/// A disk whose content is read. Another size or generation is another disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    node: PathBuf,
    generation: Option<u64>,
    size_bytes: u64,
    block_bytes: u32,
}

/// The content of a disk: its use, if it has one or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content(Option<(DiskUseKind, String)>);

impl Content {
    fn unreadable(reason: impl Into<String>) -> Content {
        Content(Some((DiskUseKind::Unknown, reason.into())))
    }
}

impl Answer for Content {
    const THREAD: &'static str = "disk";
    /// Requests that follow each other closely, such as those of several pages, read once.
    const PERIOD: Duration = Duration::from_secs(5);
    const LIMIT: Duration = Duration::from_secs(2);
    const MAX_READS: usize = 8;

    fn unknown(reason: String) -> Content {
        Content::unreadable(reason)
    }

    fn late(_last: Option<Content>, reason: String) -> Content {
        Content::unreadable(reason)
    }
}

/// The contents of disks.
pub(super) type Contents = Reads<Candidate, Content>;

/// Reads the places of a disk at which a format may have a signature.
fn read(disk: Candidate) -> Content {
    let shown = disk.node.display();
    match probe(&disk) {
        Ok(found) if found.is_empty() => Content(None),
        Ok(found) if found.signatures.is_empty() => Content::unreadable(found.to_string()),
        Ok(found) => Content(Some((DiskUseKind::Signature, found.to_string()))),
        Err(error) => Content::unreadable(format!("{shown}: {error}")),
    }
}

fn probe(disk: &Candidate) -> Result<signatures::Findings, String> {
    let file = disks::open(&disk.node).map_err(|error| error.to_string())?;
    let read = async |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        let done = file.read_exact_at(&mut bytes, offset);
        let errno =
            |error: std::io::Error| error.raw_os_error().map_or(IoError::OutOfRange, IoError::from_errno);
        done.map(|()| bytes).map_err(errno)
    };
    let found = pin!(signatures::probe(disk.size_bytes, disk.block_bytes, read));
    match found.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(found) => found.map_err(|error| error.to_string()),
        Poll::Pending => unreachable!("reads of a file never wait for a waker"),
    }
}

impl Candidate {
    fn of(disk: &disks::Disk) -> Candidate {
        Candidate {
            node: disk.node.clone(),
            generation: disk.generation,
            size_bytes: disk.size_bytes,
            block_bytes: disk.logical_block_bytes,
        }
    }
}

/// The disks of `host`, with their use here: `users` has those that the daemon uses, by their names
/// in the kernel.
fn list(
    host: &Host,
    tables: &Tables,
    users: &BTreeMap<String, String>,
    contents: &Contents,
) -> std::io::Result<Vec<Disk>> {
    let disks = host.disks(tables)?;
    let own = |name: &str| users.get(name).map(|user| format!("used by {user}"));
    let own_use = |disk: &disks::Disk| {
        let whole = disk.partition_of.as_deref();
        own(&disk.name).or_else(|| whole.and_then(|name| Some(format!("{name}: {}", own(name)?))))
    };
    let is_unused = |disk: &&disks::Disk| disk.uses.is_empty() && own_use(disk).is_none();
    let candidates: BTreeSet<Candidate> = disks.iter().filter(is_unused).map(Candidate::of).collect();
    let limit = Instant::now() + WAIT;
    let now = loop {
        let now = Instant::now();
        contents.look(&candidates, now, read);
        if now >= limit || candidates.iter().all(|disk| contents.current(disk, now).is_some()) {
            break now;
        }
        std::thread::sleep(LOOK);
    };
    let in_api = |disk: disks::Disk| {
        let own = own_use(&disk).map(|text| DiskUse { kind: DiskUseKind::Freestone, text });
        let mut uses: Vec<DiskUse> = own.into_iter().chain(disk.uses.iter().map(kernel_use)).collect();
        if uses.is_empty() {
            let content = contents.current(&Candidate::of(&disk), now);
            let content = content.unwrap_or_else(|| Content::unreadable(NOT_YET));
            uses.extend(content.0.map(|(kind, text)| DiskUse { kind, text }));
        }
        described(disk, uses)
    };
    Ok(disks.into_iter().map(in_api).collect())
}

fn described(disk: disks::Disk, uses: Vec<DiskUse>) -> Disk {
    Disk {
        name: disk.name,
        path: disk.path.display().to_string(),
        partition_of: disk.partition_of,
        size_bytes: disk.size_bytes,
        logical_block_bytes: disk.logical_block_bytes,
        physical_block_bytes: disk.physical_block_bytes,
        is_rotational: disk.is_rotational,
        transport: disk.transport.map(transport),
        model: disk.model,
        serial: disk.serial,
        read_only: disk.read_only,
        is_free: uses.is_empty() && !disk.read_only,
        uses,
    }
}

fn kernel_use(known: &Use) -> DiskUse {
    DiskUse { kind: kind(known), text: known.to_string() }
}

fn kind(known: &Use) -> DiskUseKind {
    match known {
        Use::Mounted(_) => DiskUseKind::Mounted,
        Use::Swap => DiskUseKind::Swap,
        Use::Holder(_) => DiskUseKind::Holder,
        Use::Partitions(_) => DiskUseKind::Partitions,
        Use::OfDisk(_, whole) => kind(whole),
    }
}

fn transport(transport: Transport) -> DiskTransport {
    match transport {
        Transport::Nvme => DiskTransport::Nvme,
        Transport::NvmeTcp => DiskTransport::NvmeTcp,
        Transport::NvmeRdma => DiskTransport::NvmeRdma,
        Transport::NvmeFc => DiskTransport::NvmeFc,
        Transport::Virtio => DiskTransport::Virtio,
        Transport::Sata => DiskTransport::Sata,
        Transport::Sas => DiskTransport::Sas,
        Transport::Usb => DiskTransport::Usb,
        Transport::Iscsi => DiskTransport::Iscsi,
        Transport::Fc => DiskTransport::Fc,
        Transport::Mmc => DiskTransport::Mmc,
    }
}

impl Live {
    /// The paths of devices, members and spares, and of disks that exports are, with the user of
    /// each: `device scratch`. An array that does not run uses the devices of its last run.
    fn users_of_paths(&self) -> Vec<(PathBuf, String)> {
        let devices =
            self.state.devices.iter().map(|device| (device.spec.clone(), format!("device {}", device.name)));
        let members = self.state.arrays.iter().flat_map(|record| {
            let members = match self.arrays.get(&record.name) {
                Some(array) => array.texts_of_members(),
                None => record.devices.clone(),
            };
            members.into_iter().map(|member| (member, format!("array {}", record.name)))
        });
        let used = devices.chain(members).filter_map(|(text, user)| Some((path_of(&text)?, user)));
        let exports = self
            .exports
            .iter()
            .filter_map(|(name, export)| Some((export.as_ref().ok()?.node()?, format!("export {name}"))));
        used.chain(exports).collect()
    }
}

impl Engine {
    /// The block devices of the host. Waits for their contents, but not for long.
    ///
    /// # Errors
    /// When sysfs cannot be read.
    pub fn disks(&self) -> Result<Vec<Disk>, ApiError> {
        let host = Host::default();
        let users = self.live().users_of_paths();
        let by_name = |(path, user): (PathBuf, String)| Some((host.name_of(Path::new(&path))?, user));
        let users = users.into_iter().filter_map(by_name).collect();
        let disks = list(&host, self.confined.tables(), &users, &self.contents);
        disks.map_err(|error| ApiError::failed(format!("the disks of this host cannot be listed: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, OpenOptions};

    const MIB: u64 = 1 << 20;

    /// A host whose disks are files of 1 MiB.
    struct Fake(tempfile::TempDir, Contents);

    impl Fake {
        fn new(disks: &[&str]) -> Fake {
            let fake = Fake(tempfile::tempdir().unwrap(), Contents::default());
            fs::create_dir_all(fake.path("dev")).unwrap();
            fs::write(fake.path("mounts"), "27 1 8:1 / /srv rw - ext4 /dev/root rw\n").unwrap();
            fs::write(fake.path("swaps"), "Filename\n").unwrap();
            for (i, name) in disks.iter().enumerate() {
                fake.attributes(&format!("{name}/"), &format!("8:{}", 16 * i));
                File::create(fake.path("dev").join(name)).unwrap().set_len(MIB).unwrap();
            }
            fake
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn attributes(&self, place: &str, number: &str) {
            let place = self.path("sys/block").join(place);
            fs::create_dir_all(&place).unwrap();
            let attributes = [("dev", number), ("size", "2048"), ("ro", "0")];
            attributes.iter().for_each(|(name, text)| fs::write(place.join(name), text).unwrap());
        }

        fn write(&self, disk: &str, offset: u64, bytes: &[u8]) {
            let file = OpenOptions::new().write(true).open(self.path("dev").join(disk)).unwrap();
            file.write_all_at(bytes, offset).unwrap();
        }

        fn list(&self, users: &[(&str, &str)]) -> Vec<Disk> {
            let users = users.iter().map(|(name, user)| ((*name).into(), (*user).into())).collect();
            let tables = Tables::at(&self.path("mounts"), &self.path("swaps")).unwrap();
            let host = Host::at(self.path("sys"), self.path("dev"));
            // A machine that is busy may need more time than a request waits.
            loop {
                let disks = list(&host, &tables, &users, &self.1).unwrap();
                if !disks.iter().flat_map(|disk| &disk.uses).any(|item| item.text == NOT_YET) {
                    return disks;
                }
            }
        }
    }

    /// The kinds and texts of the uses of a disk.
    fn uses_of(disk: &Disk) -> Vec<(&str, &str)> {
        disk.uses.iter().map(|item| (item.kind.name(), item.text.as_str())).collect()
    }

    /// A name, whether the disk is free, and its uses.
    type Shown<'a> = (&'a str, bool, Vec<(&'a str, &'a str)>);

    fn uses(disks: &[Disk]) -> Vec<Shown<'_>> {
        disks.iter().map(|disk| (disk.name.as_str(), disk.is_free, uses_of(disk))).collect()
    }

    #[test]
    fn a_disk_is_free_without_any_use_and_content() {
        let fake = Fake::new(&["sda", "sdb", "sdc", "sdd", "sde"]);
        fake.attributes("sda/sda1", "8:1");
        fs::write(fake.path("sys/block/sda/sda1/partition"), "1").unwrap();
        // Neither is read: their uses are known.
        fs::remove_file(fake.path("dev/sda")).unwrap();
        fs::remove_file(fake.path("dev/sdb")).unwrap();
        fake.write("sdc", 0, b"XFSB");
        fs::write(fake.path("sys/block/sde/ro"), "1").unwrap();
        assert_eq!(
            uses(&fake.list(&[("sdb", "device scratch")])),
            [
                ("sda", false, vec![("partitions", "partition table: sda1")]),
                ("sda1", false, vec![("mounted", "mounted at /srv")]),
                ("sdb", false, vec![("freestone", "used by device scratch")]),
                ("sdc", false, vec![("signature", "XFS at byte 0")]),
                ("sdd", true, vec![]),
                ("sde", false, vec![]),
            ]
        );
    }

    #[test]
    fn a_partition_of_a_disk_in_use_is_in_use() {
        let fake = Fake::new(&["sda"]);
        fake.attributes("sda/sda1", "8:1");
        fs::write(fake.path("sys/block/sda/sda1/partition"), "1").unwrap();
        fs::write(fake.path("mounts"), "").unwrap();
        let disks = fake.list(&[("sda", "array data")]);
        assert_eq!(disks[1].uses[0].text, "sda: used by array data");
        assert_eq!(disks[1].partition_of.as_deref(), Some("sda"));
    }

    #[test]
    fn a_disk_that_cannot_be_read_has_an_unknown_use_with_the_reason() {
        let fake = Fake::new(&["sda", "sdb", "sdc"]);
        fs::remove_file(fake.path("dev/sda")).unwrap();
        File::create(fake.path("dev/sdb")).unwrap();
        let disks = fake.list(&[]);
        let node = |name: &str| fake.path("dev").join(name).display().to_string();
        let missing = format!("{}: No such file or directory (os error 2)", node("sda"));
        let short = format!("{}: beyond the end of the device", node("sdb"));
        assert_eq!(
            uses(&disks),
            [
                ("sda", false, vec![("unknown", missing.as_str())]),
                ("sdb", false, vec![("unknown", short.as_str())]),
                ("sdc", true, vec![]),
            ]
        );
    }

    #[test]
    fn a_disk_that_hangs_does_not_hang_the_list() {
        let fake = Fake::new(&["sda", "sdb"]);
        let node = fake.path("dev/sda");
        let hung = Candidate { node, generation: None, size_bytes: MIB, block_bytes: 512 };
        let never = |_: Candidate| loop {
            std::thread::sleep(Duration::from_secs(3600));
        };
        fake.1.look(&BTreeSet::from([hung]), Instant::now(), never);
        let expected =
            [("sda", false, vec![("unknown", "the drive has not answered for 2 s")]), ("sdb", true, vec![])];
        assert_eq!(uses(&fake.list(&[])), expected);
        assert_eq!(uses(&fake.list(&[])), expected, "and again at once");
    }
}
