//! How a disk is attached, by the directory of its device in sysfs.

use crate::drive::sysfs_facts::SysfsFacts;

/// How a disk is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// An NVMe drive of this host, over PCI Express.
    Nvme,
    /// NVMe over TCP.
    NvmeTcp,
    /// NVMe over RDMA.
    NvmeRdma,
    /// NVMe over Fibre Channel.
    NvmeFc,
    /// A virtual disk.
    Virtio,
    /// Serial ATA, or an older ATA.
    Sata,
    /// Serial Attached SCSI.
    Sas,
    /// USB.
    Usb,
    /// iSCSI.
    Iscsi,
    /// SCSI over Fibre Channel.
    Fc,
    /// An SD card or eMMC.
    Mmc,
}

/// Beginnings of names of directories, of which a number follows, and their transports. The first
/// that fits counts: a SATA disk of a SAS controller is attached by SAS, and USB adapters have any
/// kind of disk.
const DIRECTORIES: [(&str, Transport); 7] = [
    ("usb", Transport::Usb),
    ("session", Transport::Iscsi),
    ("rport-", Transport::Fc),
    ("end_device-", Transport::Sas),
    ("ata", Transport::Sata),
    ("mmc", Transport::Mmc),
    ("virtio", Transport::Virtio),
];

impl Transport {
    /// The transport of a drive. `None` if it is none of these.
    pub(super) fn of(facts: &SysfsFacts) -> Option<Transport> {
        if facts.is_nvme {
            return match facts.nvme_transport().as_deref() {
                Some("pcie") => Some(Transport::Nvme),
                Some("tcp") => Some(Transport::NvmeTcp),
                Some("rdma") => Some(Transport::NvmeRdma),
                Some("fc") => Some(Transport::NvmeFc),
                _ => None,
            };
        }
        let names: Vec<&str> = facts.device().iter().filter_map(|name| name.to_str()).collect();
        let is_in = |beginning: &str| {
            let number = |name: &&str| name.strip_prefix(beginning).and_then(|rest| rest.bytes().next());
            names.iter().filter_map(number).any(|byte| byte.is_ascii_digit())
        };
        DIRECTORIES.iter().find(|(beginning, _)| is_in(beginning)).map(|(_, transport)| *transport)
    }
}
