//! A host made of files.

use super::*;
use std::fs;
use std::os::unix::fs::symlink;

/// Directories in place of sysfs and device nodes, and the tables of a kernel.
struct Fake {
    root: tempfile::TempDir,
    mounts: String,
    swaps: String,
}

impl Fake {
    fn new() -> Fake {
        let fake = Fake {
            root: tempfile::tempdir().unwrap(),
            mounts: "22 27 0:21 / /proc rw,relatime - proc proc rw\n".into(),
            swaps: "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n".into(),
        };
        fs::create_dir_all(fake.root.path().join("sys/block")).unwrap();
        fs::create_dir_all(fake.root.path().join("dev")).unwrap();
        fake
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A disk of 1 MiB below the directory `device`, `a:0` by number.
    fn disk(&self, name: &str, number: &str, device: &str) {
        let place = format!("sys/devices/{device}/block/{name}");
        self.put(&format!("{place}/dev"), &format!("{number}\n"));
        self.put(&format!("{place}/size"), "2048\n");
        self.put(&format!("{place}/ro"), "0\n");
        self.put(&format!("dev/{name}"), "");
        let sys = self.root.path().join("sys");
        symlink(self.root.path().join(&place), sys.join("block").join(name)).unwrap();
        if !device.starts_with("virtual") {
            symlink("../..", self.root.path().join(place).join("device")).unwrap();
        }
    }

    fn attribute(&self, name: &str, attribute: &str, text: &str) {
        self.put(&format!("sys/block/{name}/{attribute}"), text);
    }

    fn partition(&self, disk: &str, name: &str, number: &str) {
        self.attribute(disk, &format!("{name}/partition"), "1\n");
        self.attribute(disk, &format!("{name}/dev"), &format!("{number}\n"));
        self.attribute(disk, &format!("{name}/size"), "8\n");
        self.put(&format!("dev/{name}"), "");
    }

    fn link(&self, link: &str, name: &str) {
        let by_id = self.root.path().join("dev/disk/by-id");
        fs::create_dir_all(&by_id).unwrap();
        symlink(format!("../../{name}"), by_id.join(link)).unwrap();
    }

    fn host(&self) -> Host {
        Host::at(self.root.path().join("sys"), self.root.path().join("dev"))
    }

    fn disks(&self) -> Vec<Disk> {
        self.put("mounts", &self.mounts);
        self.put("swaps", &self.swaps);
        let at = |name: &str| self.root.path().join(name);
        self.host().disks(&Tables::at(&at("mounts"), &at("swaps")).unwrap()).unwrap()
    }

    /// The names of all disks, and their uses as texts.
    fn uses(&self) -> Vec<(String, String)> {
        let texts = |uses: &[Use]| uses.iter().map(Use::to_string).collect::<Vec<_>>().join("; ");
        self.disks().iter().map(|disk| (disk.name.clone(), texts(&disk.uses))).collect()
    }
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(name, uses)| ((*name).into(), (*uses).into())).collect()
}

#[test]
fn a_disk_has_its_stable_path_sizes_and_facts() {
    let fake = Fake::new();
    fake.disk("sda", "8:0", "pci0000:00/ata1/host0/target0:0:0/0:0:0:0");
    for (attribute, text) in [
        ("queue/logical_block_size", "512\n"),
        ("queue/physical_block_size", "4096\n"),
        ("queue/rotational", "1\n"),
        ("diskseq", "7\n"),
        ("device/model", "Big \x1b[31mDisk\u{202e}   \n"),
        ("device/vpd_pg80", "\0\u{1}\0\u{4}S1\n2"),
        ("device/serial", "S\t1\u{7f}2\n"),
    ] {
        fake.attribute("sda", attribute, text);
    }
    for link in ["wwn-0x5000", "scsi-SATA_Big_Disk_S12", "ata-Big_Disk_S12", "scsi-35000"] {
        fake.link(link, "sda");
    }
    let dev = fake.root.path().join("dev");
    let disk = Disk {
        name: "sda".into(),
        node: dev.join("sda"),
        path: dev.join("disk/by-id/ata-Big_Disk_S12"),
        generation: Some(7),
        size_bytes: 1 << 20,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        is_rotational: true,
        transport: Some(Transport::Sata),
        model: Some("Big [31mDisk".into()),
        serial: Some("S12".into()),
        ..Disk::default()
    };
    assert_eq!(fake.disks(), std::slice::from_ref(&disk));
    fake.partition("sda", "sda1", "8:1");
    fake.link("ata-Big_Disk_S12-part1", "sda1");
    let part = Disk {
        name: "sda1".into(),
        node: dev.join("sda1"),
        path: dev.join("disk/by-id/ata-Big_Disk_S12-part1"),
        partition_of: Some("sda".into()),
        size_bytes: 4096,
        ..disk.clone()
    };
    let disk = Disk { uses: vec![Use::Partitions(vec!["sda1".into()])], ..disk };
    assert_eq!(fake.disks(), [disk, part]);
}

#[test]
fn a_disk_without_links_has_its_node_and_disks_are_in_the_order_of_numbers() {
    let fake = Fake::new();
    for (i, name) in ["nvme10n1", "nvme2n1", "sdaa", "sdb", "cciss!c0d0"].into_iter().enumerate() {
        fake.disk(name, &format!("259:{i}"), &format!("pci/{i}"));
    }
    fake.link("odd \u{202e}name", "sdb");
    let disks = fake.disks();
    let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["sdb", "nvme2n1", "nvme10n1", "sdaa", "cciss!c0d0"]);
    assert_eq!(disks[0].path, fake.root.path().join("dev/sdb"));
    assert_eq!(disks[4].node, fake.root.path().join("dev/cciss/c0d0"));
    assert_eq!((disks[0].logical_block_bytes, disks[0].physical_block_bytes), (512, 512));
}

#[test]
fn devices_without_blocks_are_left_out() {
    let fake = Fake::new();
    for (name, number) in [("sr0", "11:0"), ("fd0", "2:0"), ("loop0", "7:0"), ("nvme0c0n1", "259:1")] {
        fake.disk(name, number, &format!("virtual/{name}"));
    }
    fake.attribute("loop0", "size", "0\n");
    fake.attribute("nvme0c0n1", "hidden", "1\n");
    fs::create_dir(fake.root.path().join("sys/block/empty")).unwrap();
    assert_eq!(fake.disks(), []);
    let missing = Host::at("/nonexistent", "/dev").disks(&Tables::default()).unwrap_err();
    assert!(missing.to_string().starts_with("/nonexistent/block: No such file"), "{missing}");
}

#[test]
fn each_use_that_the_kernel_knows_is_found() {
    let mut fake = Fake::new();
    for (i, name) in ["sda", "sdb", "sdc", "sdd", "sde", "sdf"].into_iter().enumerate() {
        fake.disk(name, &format!("8:{}", 16 * i), &format!("pci/{i}"));
    }
    fake.partition("sda", "sda1", "8:1");
    fake.partition("sda", "sda2", "8:2");
    fake.partition("sdd", "sdd1", "8:49");
    let holder = fake.root.path().join("sys/block/sdc/holders/dm-0/dm");
    fs::create_dir_all(&holder).unwrap();
    fs::write(holder.join("name"), "vg-\x07root\n").unwrap();
    fs::create_dir_all(fake.root.path().join("sys/block/sdd/holders/md0")).unwrap();
    fake.mounts += "27 1 8:1 / /srv/my\\040data\\011\u{202e} rw - ext4 /dev/root rw\n";
    fake.mounts += "28 1 8:1 /x /elsewhere rw - ext4 /dev/root rw\n";
    fake.mounts += "29 1 0:40 /sub /srv/pool rw shared:1 - btrfs /dev/sde rw\n";
    fake.mounts += "a line that is cut\n30 1 8:0\n - \n";
    fake.swaps += "/dev/sdb                               partition\t8388604\t\t0\t\t-2\n";
    fake.swaps += "/swap\\040file                          file\t\t8\t\t0\t\t-3\n";
    let expected = pairs(&[
        ("sda", "partition table: sda1, sda2"),
        ("sda1", "mounted at /srv/my data\\t\\u{202e}"),
        ("sda2", ""),
        ("sdb", "used as swap space"),
        ("sdc", "used by dm-0 (vg-root)"),
        ("sdd", "used by md0; partition table: sdd1"),
        ("sdd1", "sdd: used by md0"),
        ("sde", "mounted at /srv/pool"),
        ("sdf", ""),
    ]);
    assert_eq!(fake.uses(), expected);
}

#[test]
fn transports_are_those_of_the_directories_and_of_nvme_controllers() {
    let fake = Fake::new();
    let disks = [
        ("sda", "pci/usb1/1-2/host3/target3:0:0/3:0:0:0", Some(Transport::Usb)),
        ("sdb", "platform/host4/session2/target4:0:0/4:0:0:1", Some(Transport::Iscsi)),
        ("sdc", "pci/host5/rport-5:0-1/target5:0:0/5:0:0:0", Some(Transport::Fc)),
        ("sdd", "pci/host6/port-6:0/end_device-6:0/target6:0:0/6:0:0:0", Some(Transport::Sas)),
        ("sde", "pci/ata12/host7/target7:0:0/7:0:0:0", Some(Transport::Sata)),
        ("mmcblk0", "platform/mmc_host/mmc0/mmc0:0001", Some(Transport::Mmc)),
        ("vda", "pci0000:00/0000:00:02.0/virtio1", Some(Transport::Virtio)),
        ("sdf", "pci/catalog/data0/8:0:0:0", None),
        ("loop0", "virtual", None),
        ("nvme0n1", "pci/nvme/nvme0", Some(Transport::Nvme)),
        ("nvme1n1", "virtual-fabrics/nvme1", Some(Transport::NvmeTcp)),
    ];
    for (i, (name, device, _)) in disks.iter().enumerate() {
        fake.disk(name, &format!("259:{i}"), device);
    }
    fake.attribute("nvme0n1", "device/transport", "pcie\n");
    fake.attribute("nvme1n1", "device/transport", "tcp\n");
    for disk in fake.disks() {
        let (.., transport) = disks.iter().find(|(name, ..)| *name == disk.name).unwrap();
        assert_eq!(disk.transport, *transport, "{}", disk.name);
    }
}

#[test]
fn a_path_below_the_nodes_has_the_name_of_its_block_device() {
    let fake = Fake::new();
    fake.disk("sda", "8:0", "pci/0");
    fake.link("ata-X", "sda");
    for node in ["ng0n1", "vdac0", "cciss/c0d0", "ngx"] {
        fake.put(&format!("dev/{node}"), "");
    }
    let name = |path: &str| fake.host().name_of(Path::new(path));
    assert_eq!(name("/dev/sda").as_deref(), Some("sda"));
    assert_eq!(name("/dev/disk/by-id/ata-X").as_deref(), Some("sda"));
    assert_eq!(name("/dev/ng0n1").as_deref(), Some("nvme0n1"));
    assert_eq!(name("/dev/vdac0").as_deref(), Some("vda"));
    assert_eq!(name("/dev/ngx").as_deref(), Some("ngx"));
    assert_eq!(name("/dev/cciss/c0d0").as_deref(), Some("cciss!c0d0"));
    for path in ["/dev/sdz", "/srv/disk.img", "/dev/../etc/passwd", "sda"] {
        assert_eq!(name(path), None, "{path}");
    }
}

#[test]
fn the_disks_of_this_host_are_listed() {
    let disks = Host::default().disks(&Tables::open()).unwrap();
    for disk in &disks {
        assert!(disk.size_bytes > 0 && disk.logical_block_bytes >= 512, "{disk:?}");
    }
}
