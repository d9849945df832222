//! Options of a virtio-blk device.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;
use virtio::blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio::{
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_ORDER_PLATFORM,
    VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
};

/// Features that are used if the device offers them.
const WELCOME: u64 = VIRTIO_F_VERSION_1
    | VIRTIO_BLK_F_SIZE_MAX
    | VIRTIO_BLK_F_SEG_MAX
    | VIRTIO_BLK_F_RO
    | VIRTIO_BLK_F_BLK_SIZE
    | VIRTIO_BLK_F_FLUSH
    | VIRTIO_BLK_F_TOPOLOGY
    | VIRTIO_BLK_F_MQ
    | VIRTIO_BLK_F_DISCARD
    | VIRTIO_BLK_F_WRITE_ZEROES;

/// Further features for a device that accesses memory by the addresses of an IOMMU rather than of a
/// process.
const WELCOME_OF_PLATFORM: u64 = VIRTIO_F_ACCESS_PLATFORM | VIRTIO_F_ORDER_PLATFORM;

/// Kind of connection to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// Another process, over its vhost-user socket.
    #[default]
    VhostUser,
    /// A device of the kernel's vDPA bus, over `/dev/vhost-vdpa-N`.
    VhostVdpa,
    /// A PCI function that is bound to vfio-pci, by its directory in sysfs.
    VfioPci,
}

/// Whether to use an optional feature of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Choose the best setting that the server offers.
    #[default]
    Auto,
    /// Use the feature; a server without it is an error.
    On,
    /// Do not use the feature.
    Off,
}

/// Options of a virtio-blk device.
#[derive(Clone, Debug)]
pub struct Options {
    /// Kind of connection.
    pub transport: TransportKind,
    /// The server's socket, the vhost-vdpa character device, or the PCI function's directory in
    /// sysfs (`/sys/bus/pci/devices/0000:00:01.0`).
    pub path: PathBuf,
    /// An open vhost-vdpa character device, which is used instead of the path. It is duplicated.
    pub fd: Option<RawFd>,
    /// Number of virtqueues to use; 0: all that the server has.
    pub queues: u16,
    /// Entries of each virtqueue: a power of two, at most the server's limit.
    pub queue_size: u16,
    /// Packed rings instead of split ones.
    pub packed: Choice,
    /// Exact notification suppression.
    pub event_idx: Choice,
    /// Indirect descriptors.
    pub indirect: Choice,
    /// Trust a server that reports its cache as off. Otherwise a server with a flush command is
    /// assumed to have a cache, which is always safe: `qemu-storage-daemon` reports it as off and
    /// leaves it on.
    pub config_wce: Choice,
    /// Memory in which the server tracks requests in flight, so that it can be restarted.
    pub inflight: Choice,
    /// Timeout in milliseconds for the answer to a control message.
    pub timeout_ms: u64,
    /// Time that requests wait for a new connection when the vhost-user server at `path` vanishes,
    /// in seconds; 0: they fail at once, and the session does not reconnect. Other transports
    /// ignore it.
    pub reconnect_delay_s: u32,
}

impl Options {
    /// The defaults for the vhost-user server at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            transport: TransportKind::VhostUser,
            path: path.into(),
            fd: None,
            queues: 0,
            queue_size: 128,
            packed: Choice::Auto,
            event_idx: Choice::Auto,
            indirect: Choice::Auto,
            config_wce: Choice::Auto,
            inflight: Choice::Auto,
            timeout_ms: 10_000,
            reconnect_delay_s: 0,
        }
    }

    /// The defaults for the device that `transport` has at `path`.
    pub fn with(transport: TransportKind, path: impl Into<PathBuf>) -> Options {
        Options { transport, ..Options::new(path) }
    }

    /// The device's name.
    pub(super) fn name(&self) -> String {
        match self.fd {
            Some(fd) => format!("virtio_blk:fd {fd}"),
            None => format!("virtio_blk:{}", self.path.display()),
        }
    }

    /// Timeout for an answer of the device.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.max(1))
    }

    /// Time that requests wait for a new connection.
    pub(super) fn reconnect_delay(&self) -> Duration {
        Duration::from_secs(self.reconnect_delay_s.into())
    }

    /// Chooses features from those `offered`, or returns the missing one as an error.
    pub(super) fn choose(&self, offered: u64) -> Result<u64, String> {
        let is_own_memory = self.transport == TransportKind::VhostUser;
        if offered & VIRTIO_F_VERSION_1 == 0 {
            return Err(format!("the device does not support virtio 1.0 (features {offered:#x})"));
        }
        // Without this feature a PCI function uses physical addresses, and no IOMMU keeps it from
        // foreign memory.
        if self.transport == TransportKind::VfioPci && offered & VIRTIO_F_ACCESS_PLATFORM == 0 {
            return Err(format!(
                "the device does not use the IOMMU's addresses (no VIRTIO_F_ACCESS_PLATFORM in features {offered:#x})"
            ));
        }
        let welcome = if is_own_memory { WELCOME } else { WELCOME | WELCOME_OF_PLATFORM };
        let mut features = welcome & offered;
        for (choice, feature, name, is_best) in [
            (self.packed, VIRTIO_F_RING_PACKED, "packed rings", false),
            (self.event_idx, VIRTIO_F_EVENT_IDX, "event indexes", true),
            (self.indirect, VIRTIO_F_INDIRECT_DESC, "indirect descriptors", true),
            (self.config_wce, VIRTIO_BLK_F_CONFIG_WCE, "switch for its cache", false),
        ] {
            features |= match choice {
                Choice::On if offered & feature == 0 => return Err(format!("the device has no {name}")),
                Choice::On => feature,
                Choice::Auto if is_best => offered & feature,
                Choice::Auto | Choice::Off => 0,
            };
        }
        Ok(features)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_that_must_be_there_and_is_not_is_an_error() {
        let base = VIRTIO_F_VERSION_1;
        let options = Options::new("/x");
        assert_eq!(options.choose(base), Ok(base));
        assert_eq!(options.choose(base | 1 << 63), Ok(base), "unknown features are left alone");
        assert!(options.choose(VIRTIO_F_EVENT_IDX).is_err());
        let packed = Options { packed: Choice::On, ..options.clone() };
        assert_eq!(packed.choose(base), Err("the device has no packed rings".into()));
        assert_eq!(packed.choose(base | VIRTIO_F_RING_PACKED), Ok(base | VIRTIO_F_RING_PACKED));
        let off = Options { indirect: Choice::Off, ..options };
        assert_eq!(
            off.choose(base | VIRTIO_F_INDIRECT_DESC | VIRTIO_F_EVENT_IDX),
            Ok(base | VIRTIO_F_EVENT_IDX)
        );
    }

    #[test]
    fn a_pci_function_that_an_iommu_does_not_hold_is_refused() {
        let base = VIRTIO_F_VERSION_1;
        let pci = Options::with(TransportKind::VfioPci, "/sys/x");
        assert!(pci.choose(base).unwrap_err().contains("ACCESS_PLATFORM"));
        let platform = base | WELCOME_OF_PLATFORM;
        assert_eq!(pci.choose(platform), Ok(platform));
        let vdpa = Options::with(TransportKind::VhostVdpa, "/dev/x");
        assert_eq!((vdpa.choose(base), vdpa.choose(platform)), (Ok(base), Ok(platform)));
        assert_eq!(Options::new("/x").choose(platform), Ok(base), "a process uses memory as we do");
    }
}
