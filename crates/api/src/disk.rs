//! Block devices of the host, from which devices and arrays are made.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A block device of the daemon's host: a disk, a partition, or a volume of the kernel. Values that
/// the kernel does not tell are null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Name in the kernel: `sda`. Another disk may have it after a start of the host.
    pub name: String,
    /// Path for new devices and members: the link in `/dev/disk/by-id` that stays, else the node.
    pub path: String,
    /// The disk that it is a partition of.
    pub partition_of: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Logical block size in bytes.
    pub logical_block_bytes: u32,
    /// Physical block size in bytes.
    pub physical_block_bytes: u32,
    /// Whether it has rotating media.
    pub is_rotational: bool,
    /// How it is attached.
    pub transport: Option<DiskTransport>,
    /// Model; of a partition, that of its disk.
    pub model: Option<String>,
    /// Serial number; of a partition, that of its disk.
    pub serial: Option<String>,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// Whether it has no use and takes writes, so that it may become a device or a member.
    pub is_free: bool,
    /// Its uses, and reasons why its use is unknown.
    pub uses: Vec<DiskUse>,
}

/// A use of a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskUse {
    /// The kind of use.
    pub kind: DiskUseKind,
    /// A few words: `mounted at /srv`.
    pub text: String,
}

words! {
    /// Kind of use of a block device.
    DiskUseKind {
        /// A device of this daemon, a member or spare of one of its arrays, or the disk that one
        /// of its exports is.
        Freestone = "freestone",
        /// A file system is mounted.
        Mounted = "mounted",
        /// Swap space.
        Swap = "swap",
        /// Another block device of the kernel holds it, such as an md array or an LVM volume.
        Holder = "holder",
        /// It has a partition table.
        Partitions = "partitions",
        /// It has a signature of a file system, a partition table, an array or a disk image.
        Signature = "signature",
        /// Its content cannot be read.
        Unknown = "unknown",
    }
}

words! {
    /// How a block device is attached.
    DiskTransport {
        /// NVMe over PCI Express.
        Nvme = "nvme",
        /// NVMe over TCP.
        NvmeTcp = "nvme-tcp",
        /// NVMe over RDMA.
        NvmeRdma = "nvme-rdma",
        /// NVMe over Fibre Channel.
        NvmeFc = "nvme-fc",
        /// A virtual disk.
        Virtio = "virtio",
        /// ATA.
        Sata = "sata",
        /// Serial Attached SCSI, with SAS or SATA disks.
        Sas = "sas",
        /// USB.
        Usb = "usb",
        /// iSCSI.
        Iscsi = "iscsi",
        /// SCSI over Fibre Channel.
        Fc = "fc",
        /// An SD card or eMMC.
        Mmc = "mmc",
    }
}
