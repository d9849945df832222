//! Devices: the leaves of a graph.

use super::qcow2::{self, QCOW2};
use super::raid::RAID;
use super::restart_log::RestartLogs;
use super::{ID, READ_ONLY};
use crate::passed::shared_buffers;
use crate::spec::{Key, Kind, Role, Spec, SpecError, Switch, Value, key};
use base::Size;
use base::Uuid;
use block::{Device, DeviceError, SharedRole};
use drivers::virtio_blk::TransportKind;
use drivers::{io_uring, mem, nbd, null, nvme_tcp, nvme_uring, rbd, virtio_blk, virtio_blk_uring};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a device cannot be a member of an array.
pub const OUT_OF_REACH: &str = "it can only use registered memory, and an array has its own";

/// Every kind of device. All but `raid` are leaves.
pub const KINDS: &[&Kind] = &[
    &IO_URING,
    &MEM,
    &NBD,
    &NULL,
    &NVME_TCP,
    &NVME_URING,
    &QCOW2,
    &RBD,
    &VIRTIO_BLK,
    &VIRTIO_BLK_VDPA,
    &VIRTIO_BLK_PCI,
    &VIRTIO_BLK_URING,
    &RAID,
];

static IO_URING: Kind = Kind {
    name: "io_uring",
    about: "a regular file or block device of this host",
    keys: &[
        key("path", "PATH", "the file or block device"),
        key("direct", "on|off", "bypass the page cache [off]"),
        READ_ONLY,
        key("share", "on|off", "open for writing even if another process has it open for writing [off]"),
        key("queue-depth", "N", "requests in flight on each core [128]"),
        key("poll", "on|off", "poll the drive for completions, if it can [off]"),
        key("fixed-buffers", "on|off", "register memory with the kernel; pins guest memory [off]"),
        key("block-size", "SIZE", "logical block size [the smallest that works]"),
        ID,
    ],
};

static MEM: Kind = Kind {
    name: "mem",
    about: "a sparse RAM disk, lost when the program ends",
    keys: &[
        key("size", "SIZE", "bytes"),
        key("block-size", "SIZE", "logical block size [512]"),
        READ_ONLY,
        ID,
    ],
};

const RECONNECT_DELAY: Key =
    key("reconnect-delay", "S", "time that requests wait for a lost server, in seconds; 0: none [0]");

static NBD: Kind = Kind {
    name: "nbd",
    about: "an export of an NBD server",
    keys: &[
        key(
            "uri",
            "URI",
            "nbd[s]://HOST[:PORT]/EXPORT or nbd[s]+unix:///EXPORT?socket=PATH; or the next four",
        ),
        key("host", "HOST", "the server's name or address"),
        key("port", "N", "the server's port [10809]"),
        key("path", "PATH", "the server's Unix socket"),
        key("export", "NAME", "the export [the server's default]"),
        key("tls", "off|require", "whether TLS is required [require, with one of the next four]"),
        key(
            "tls-certificates",
            "DIR",
            "directory of ca-cert.pem [the system's CAs], client-cert.pem, client-key.pem",
        )
        .read(),
        key("tls-psk", "FILE", "lines IDENTITY:HEXKEY, keys shared with the server").read(),
        key("tls-username", "NAME", "identity to use from tls-psk [the only one]"),
        key("tls-hostname", "NAME", "host name in the server's certificate [host=, or localhost]"),
        READ_ONLY,
        key("connections", "N", "most connections, one for each core; 0: as many as the server allows [0]"),
        key("queue-depth", "N", "requests in flight on each connection [128]"),
        key("replies", "simple|structured|extended", "richest form of replies to negotiate [extended]"),
        key("timeout-ms", "N", "connection timeout [10000]"),
        RECONNECT_DELAY,
        ID,
    ],
};

static NULL: Kind = Kind {
    name: "null",
    about: "discards writes; reads leave memory unchanged: to measure layers and exports, or to model a drive",
    keys: &[
        key("size", "SIZE", "bytes [1T]"),
        key("block-size", "SIZE", "logical block size [512]"),
        key("latency-us", "N", "duration of each request in microseconds [0]"),
        key("iops", "N", "most requests a second, all cores together; 0: no limit [0]"),
        key("bandwidth", "SIZE", "most bytes a second, all cores together; 0: no limit [0]"),
        key("zero", "on|off", "reads return zeroes [off]"),
        READ_ONLY,
        ID,
    ],
};

static NVME_TCP: Kind = Kind {
    name: "nvme-tcp",
    about: "a namespace of an NVMe/TCP target",
    keys: &[
        key("address", "HOST[:PORT]", "address of the target; IPv6 as [ADDR]:PORT [port 4420]"),
        key("nqn", "NQN", "the subsystem"),
        key("nsid", "N", "the namespace [the first]"),
        key("hostnqn", "NQN", "the host's name [/etc/nvme/hostnqn, or one made of hostid]"),
        key("hostid", "UUID", "the host's identifier [/etc/nvme/hostid, or a new one]"),
        key(
            "dhchap-key",
            "FILE",
            "file with the host's secret, for targets that require authentication (DHHC-1:…)",
        )
        .read(),
        key("dhchap-ctrl-key", "FILE", "file with the target's secret, to authenticate the target as well")
            .read(),
        READ_ONLY,
        key("queues", "N", "most I/O queues, one for each core; 0: as many as the target allows [0]"),
        key("queue-depth", "N", "requests in flight on each queue [128]"),
        key("hdgst", "on|off", "header digests [off]"),
        key("ddgst", "on|off", "data digests [off]"),
        key("kato", "S", "keep-alive timeout in seconds; 0: none [5]"),
        key("timeout-ms", "N", "connection timeout [10000]"),
        key("io-timeout", "S", "command timeout in seconds, after which the connection is closed [30]"),
        key("reconnect-delay", "S", "longest pause between reconnection attempts, in seconds [10]"),
        key(
            "ctrl-loss-tmo",
            "S",
            "time without connection after which requests fail, in seconds; 0: immediately [600]",
        ),
        ID,
    ],
};

static NVME_URING: Kind = Kind {
    name: "nvme_uring",
    about: "an NVMe namespace without the kernel's block layer; needs CAP_SYS_ADMIN",
    keys: &[
        key("path", "PATH", "its character device, such as /dev/ng0n1"),
        READ_ONLY,
        key("queue-depth", "N", "requests in flight on each core [128]"),
        key("poll", "on|off", "poll the controller for completions, if it can [off]"),
        ID,
    ],
};

pub(super) const CEPH_CONF: Key = key("conf", "PATH", "Ceph's configuration file [/etc/ceph/ceph.conf]");
pub(super) const CEPH_USER: Key = key("user", "NAME", "the Ceph user, without \"client.\" [admin]");
pub(super) const CEPH_TIMEOUT: Key =
    key("timeout-ms", "N", "timeout of connecting to the monitors, rounded up to seconds [10000]");

static RBD: Kind = Kind {
    name: "rbd",
    about: "an image of a Ceph cluster; needs the package librbd1",
    keys: &[
        key("pool", "NAME", "the pool"),
        key("image", "NAME", "the image"),
        key("namespace", "NAME", "the namespace of the image in its pool [the default one]"),
        key("snapshot", "NAME", "the snapshot to read instead of the image"),
        CEPH_CONF,
        CEPH_USER,
        key("exclusive", "on|off", "hold the image's exclusive lock [on, if the image has this feature]"),
        key("force", "on|off", "break the exclusive lock of another client and blocklist this client [off]"),
        key("lock-file", "PATH", "file that lets a successor of a killed process take the lock at once"),
        key(
            "standby",
            "on|off",
            "wait while another host has the lock and take over when it ends; for exports over nvme-tcp [off]",
        ),
        key("cache", "on|off", "cache writes in this process until a flush [off]"),
        READ_ONLY,
        key("queue-depth", "N", "requests in flight on each core [128]"),
        CEPH_TIMEOUT,
        ID,
    ],
};

static VIRTIO_BLK: Kind = Kind {
    name: "virtio-blk-vhost-user",
    about: "a disk that another process serves over a vhost-user socket",
    keys: &[
        key("path", "PATH", "the server's socket"),
        key("queues", "N", "virtqueues to use, one for each channel [all]"),
        key("queue-size", "N", "entries of each virtqueue, a power of two [128]"),
        key("packed", "auto|on|off", "packed rings instead of split ones [auto: off]"),
        key("event-idx", "auto|on|off", "exact suppression of notifications [auto]"),
        key("indirect", "auto|on|off", "indirect descriptors [auto]"),
        key("inflight", "auto|on|off", "in-flight memory that survives a restart of the server [auto]"),
        key("timeout-ms", "N", "timeout of control messages [10000]"),
        RECONNECT_DELAY,
        ID,
    ],
};

static VIRTIO_BLK_VDPA: Kind = Kind {
    name: "virtio-blk-vhost-vdpa",
    about: "a disk on the kernel's vDPA bus",
    keys: &[
        key("path", "PATH", "the character device, /dev/vhost-vdpa-N"),
        key("queues", "N", "virtqueues to use, one for each channel [all]"),
        key("queue-size", "N", "entries of each virtqueue, a power of two [128]"),
        key("event-idx", "auto|on|off", "exact suppression of notifications [auto]"),
        key("indirect", "auto|on|off", "indirect descriptors [auto]"),
        key("timeout-ms", "N", "timeout of a reset, and of a virtqueue that stops without request [10000]"),
        ID,
    ],
};

static VIRTIO_BLK_PCI: Kind = Kind {
    name: "virtio-blk-vfio-pci",
    about: "a virtio disk that is a PCI function bound to vfio-pci",
    keys: &[
        key("path", "PATH", "its directory, /sys/bus/pci/devices/0000:00:01.0"),
        key("queues", "N", "virtqueues to use, one for each channel [all]"),
        key("queue-size", "N", "entries of each virtqueue, a power of two [128]"),
        key("packed", "auto|on|off", "packed rings instead of split ones [auto: off]"),
        key("event-idx", "auto|on|off", "exact suppression of notifications [auto]"),
        key("indirect", "auto|on|off", "indirect descriptors [auto]"),
        key("timeout-ms", "N", "timeout of a reset [10000]"),
        ID,
    ],
};

static VIRTIO_BLK_URING: Kind = Kind {
    name: "virtio-blk-uring",
    about: "a virtio disk of this machine without the kernel's block layer; needs the module virtio_blk_uring",
    keys: &[
        key("path", "PATH", "its character device, such as /dev/vdac0"),
        READ_ONLY,
        key("queue-depth", "N", "requests in flight on each core [128]"),
        key("poll", "on|off", "poll the disk for completions, if it can [off]"),
        key("fixed-buffers", "on|off", "register memory with the kernel; pins guest memory [off]"),
        ID,
    ],
};

/// A device to be opened: everything that can be checked without opening it has been.
#[derive(Clone, Debug)]
pub enum DeviceConfig {
    /// A file or block device.
    IoUring(io_uring::Options),
    /// A RAM disk.
    Mem(mem::Options),
    /// An export of an NBD server.
    Nbd(nbd::Options),
    /// Nothing.
    Null(null::Options),
    /// A namespace of an NVMe/TCP target.
    NvmeTcp(nvme_tcp::Options),
    /// An NVMe namespace.
    NvmeUring(nvme_uring::Options),
    /// A disk image.
    Qcow2(qcow2::Options),
    /// An image of a Ceph cluster.
    Rbd(rbd::Options),
    /// A virtio disk: behind a vhost-user socket, on the vDPA bus, or a PCI function.
    VirtioBlk(virtio_blk::Options),
    /// A disk of the kernel's virtio-blk driver.
    VirtioBlkUring(virtio_blk_uring::Options),
}

/// An open device, and the role of this host for it.
pub type WithRole = (Arc<dyn Device>, Option<Arc<SharedRole>>);

/// Default size of a null device.
const NULL_SIZE: u64 = 1 << 40;

impl DeviceConfig {
    /// The device that `text` describes, and its name if it has one.
    ///
    /// # Errors
    /// When the specification is invalid.
    pub fn parse(text: &str) -> Result<(DeviceConfig, Option<String>), SpecError> {
        let spec = Spec::parse(Role::Device, KINDS, text)?;
        let config = match spec.kind() {
            "io_uring" => DeviceConfig::IoUring(io_uring_options(&spec)?),
            "mem" => {
                let Size(size) = spec.require("size")?;
                DeviceConfig::Mem(mem::Options {
                    block_size: block_size(&spec)?.unwrap_or(512),
                    read_only: is_on(&spec, "readonly")?,
                    ..mem::Options::new(size)
                })
            }
            "nbd" => DeviceConfig::Nbd(nbd_options(&spec)?),
            "null" => DeviceConfig::Null(null_options(&spec)?),
            "nvme-tcp" => DeviceConfig::NvmeTcp(nvme_tcp_options(&spec)?),
            "nvme_uring" => DeviceConfig::NvmeUring(nvme_uring::Options {
                read_only: is_on(&spec, "readonly")?,
                queue_depth: spec.get_or("queue-depth", io_uring::Options::new("").queue_depth)?,
                iopoll: is_on(&spec, "poll")?,
                ..nvme_uring::Options::new(spec.require::<PathBuf>("path")?)
            }),
            "qcow2" => DeviceConfig::Qcow2(qcow2::Options::parse(&spec)?),
            "rbd" => DeviceConfig::Rbd(rbd_options(&spec)?),
            "virtio-blk-vhost-user" => virtio_blk(&spec, TransportKind::VhostUser)?,
            "virtio-blk-vhost-vdpa" => virtio_blk(&spec, TransportKind::VhostVdpa)?,
            "virtio-blk-vfio-pci" => virtio_blk(&spec, TransportKind::VfioPci)?,
            "virtio-blk-uring" => DeviceConfig::VirtioBlkUring(virtio_blk_uring::Options {
                read_only: is_on(&spec, "readonly")?,
                queue_depth: spec.get_or("queue-depth", virtio_blk_uring::Options::new("").queue_depth)?,
                iopoll: is_on(&spec, "poll")?,
                fixed_buffers: is_on(&spec, "fixed-buffers")?,
                ..virtio_blk_uring::Options::new(spec.require::<PathBuf>("path")?)
            }),
            "raid" => return Err(spec.refuse("an array cannot stand here: it has members of its own")),
            kind => unreachable!("{kind} stands in no table"),
        };
        Ok((config, spec.get("id")?))
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(self.open_with_role()?.0)
    }

    /// Opens the device, and returns the role of this host for it, if other hosts serve it too.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn open_with_role(&self) -> Result<WithRole, DeviceError> {
        let device: Arc<dyn Device> = match self {
            DeviceConfig::IoUring(options) => Arc::new(io_uring::UringDevice::open(options)?),
            DeviceConfig::Mem(options) => Arc::new(mem::MemDevice::new(options)?),
            DeviceConfig::Nbd(options) => Arc::new(nbd::NbdDevice::open(options)?),
            DeviceConfig::Null(options) => Arc::new(null::NullDevice::new(options)?),
            DeviceConfig::NvmeTcp(options) => Arc::new(nvme_tcp::NvmeTcpDevice::open(options)?),
            DeviceConfig::NvmeUring(options) => Arc::new(nvme_uring::NvmeDevice::open(options)?),
            DeviceConfig::Qcow2(options) => options.open()?,
            DeviceConfig::Rbd(options) => {
                let device = rbd::RbdDevice::open(options)?;
                let role = device.role().cloned();
                return Ok((Arc::new(device), role));
            }
            DeviceConfig::VirtioBlk(options) => Arc::new(virtio_blk::VirtioBlk::open(options)?),
            DeviceConfig::VirtioBlkUring(options) => {
                Arc::new(virtio_blk_uring::VirtioBlkUring::open(options)?)
            }
        };
        Ok((device, None))
    }

    /// Opens the device, and returns its image if it is one in the format qcow2 that is written.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn open_with_image(&self) -> Result<qcow2::Opened, DeviceError> {
        match self {
            DeviceConfig::Qcow2(options) => options.open_parts(),
            other => Ok(qcow2::Opened::plain(other.open()?)),
        }
    }

    /// Whether the device waits while another host uses it.
    pub fn is_standby(&self) -> bool {
        matches!(self, DeviceConfig::Rbd(options) if options.standby)
    }

    /// The image that the device opens, if Freestone can create and grow it.
    pub fn image(&self) -> Option<Image<'_>> {
        match self {
            DeviceConfig::Rbd(options) => Some(Image(options)),
            DeviceConfig::IoUring(_)
            | DeviceConfig::Mem(_)
            | DeviceConfig::Nbd(_)
            | DeviceConfig::Null(_)
            | DeviceConfig::NvmeTcp(_)
            | DeviceConfig::NvmeUring(_)
            | DeviceConfig::Qcow2(_)
            | DeviceConfig::VirtioBlk(_)
            | DeviceConfig::VirtioBlkUring(_) => None,
        }
    }

    /// Whether requests may only use memory that is registered with the device and lies in a file.
    pub fn needs_regions(&self) -> bool {
        match self {
            DeviceConfig::VirtioBlk(_) => true,
            DeviceConfig::IoUring(_)
            | DeviceConfig::Mem(_)
            | DeviceConfig::Nbd(_)
            | DeviceConfig::Null(_)
            | DeviceConfig::NvmeTcp(_)
            | DeviceConfig::NvmeUring(_)
            | DeviceConfig::Qcow2(_)
            | DeviceConfig::Rbd(_)
            | DeviceConfig::VirtioBlkUring(_) => false,
        }
    }

    /// Whether requests may only use memory that another process maps, and that nothing pins.
    pub fn maps_memory(&self) -> bool {
        self.needs_regions() && !self.pins_regions()
    }

    /// Whether the device reaches none of the buffers of the cores.
    pub fn lacks_buffers(&self) -> bool {
        self.maps_memory() && shared_buffers().is_none()
    }

    /// Registers the buffers of the cores, if they lie in shared memory and the device needs that.
    ///
    /// # Errors
    /// When the other process refuses the memory.
    pub fn share_buffers_with(&self, device: &dyn Device) -> Result<(), DeviceError> {
        shared_buffers().filter(|_| self.maps_memory()).map_or(Ok(()), |buffers| device.map_region(buffers))
    }

    /// Whether requests may only use memory that is pinned.
    pub fn pins_all_memory(&self) -> bool {
        self.needs_regions() && self.pins_regions()
    }

    /// Whether registered memory is pinned until it is unregistered.
    pub fn pins_regions(&self) -> bool {
        match self {
            DeviceConfig::IoUring(options) => options.fixed_buffers,
            DeviceConfig::VirtioBlkUring(options) => options.fixed_buffers,
            // An IOMMU translates only what does not move.
            DeviceConfig::VirtioBlk(options) => options.transport != TransportKind::VhostUser,
            DeviceConfig::Mem(_)
            | DeviceConfig::Nbd(_)
            | DeviceConfig::Null(_)
            | DeviceConfig::NvmeTcp(_)
            | DeviceConfig::NvmeUring(_)
            | DeviceConfig::Qcow2(_)
            | DeviceConfig::Rbd(_) => false,
        }
    }

    /// Has the device opened for reading only, as far as its kind can.
    pub fn make_read_only(&mut self) {
        match self {
            DeviceConfig::IoUring(options) => options.read_only = true,
            DeviceConfig::Mem(options) => options.read_only = true,
            DeviceConfig::Nbd(options) => options.read_only = true,
            DeviceConfig::Null(options) => options.read_only = true,
            DeviceConfig::NvmeTcp(options) => options.read_only = true,
            DeviceConfig::NvmeUring(options) => options.read_only = true,
            DeviceConfig::Rbd(options) => options.make_read_only(),
            DeviceConfig::Qcow2(options) => options.read_only = true,
            // The server decides.
            DeviceConfig::VirtioBlk(_) => {}
            DeviceConfig::VirtioBlkUring(options) => options.read_only = true,
        }
    }

    /// Has an image keep no restart log, unless one is asked for.
    pub fn drop_restart_log(&mut self) {
        if let DeviceConfig::Qcow2(options) = self
            && options.restart_logs == RestartLogs::Runtime
        {
            options.restart_logs = RestartLogs::Off;
        }
    }
}

/// An image of a Ceph cluster.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a>(&'a rbd::Options);

impl Image<'_> {
    /// Creates the image with `size` bytes.
    ///
    /// # Errors
    /// When it exists, or the cluster refuses it.
    pub fn create(self, size: u64) -> Result<(), DeviceError> {
        rbd::create(self.0, size)
    }

    /// Makes the image larger, also while it is open.
    ///
    /// # Errors
    /// When it is larger than `size`, or the cluster refuses it.
    pub fn grow(self, size: u64) -> Result<(), DeviceError> {
        rbd::grow(self.0, size)
    }
}

fn io_uring_options(spec: &Spec) -> Result<io_uring::Options, SpecError> {
    let mut options = io_uring::Options::new(spec.require::<PathBuf>("path")?);
    options.direct = is_on(spec, "direct")?;
    options.read_only = is_on(spec, "readonly")?;
    options.share = is_on(spec, "share")?;
    options.queue_depth = spec.get_or("queue-depth", options.queue_depth)?;
    options.iopoll = is_on(spec, "poll")?;
    options.fixed_buffers = is_on(spec, "fixed-buffers")?;
    options.block_size = block_size(spec)?;
    Ok(options)
}

fn nbd_options(spec: &Spec) -> Result<nbd::Options, SpecError> {
    let mut options = match (spec.get::<String>("uri")?, spec.get::<PathBuf>("path")?, spec.get("host")?) {
        (Some(uri), None, None) => nbd::Options::from_uri(&uri).map_err(|why| spec.refuse(why))?,
        (None, Some(path), None) => nbd::Options::new(nbd::Address::Unix(path)),
        (None, None, Some(host)) => {
            nbd::Options::new(nbd::Address::Tcp { host, port: spec.get_or("port", nbd::DEFAULT_PORT)? })
        }
        _ => return Err(spec.refuse("one of uri=, path= and host= is needed")),
    };
    if spec.get::<u16>("port")?.is_some() && spec.get::<String>("host")?.is_none() {
        return Err(spec.refuse("port= belongs to host="));
    }
    if let Some(export) = spec.get("export")? {
        if spec.get::<String>("uri")?.is_some() {
            return Err(spec.refuse("export= and uri= both name the export"));
        }
        options.export = export;
    }
    if let Some(tls) = nbd_tls(spec)? {
        options.tls = Some(tls);
    }
    options.read_only = is_on(spec, "readonly")?;
    options.connections = spec.get_or("connections", options.connections)?;
    options.queue_depth = spec.get_or("queue-depth", options.queue_depth)?;
    options.replies = spec.get_or("replies", Replies::default())?.0;
    options.timeout_ms = spec.get_or("timeout-ms", options.timeout_ms)?;
    options.reconnect_delay_s = spec.get_or("reconnect-delay", options.reconnect_delay_s)?;
    Ok(options)
}

/// Certificates and keys are read at once: later there may be no way to them.
fn nbd_tls(spec: &Spec) -> Result<Option<nbd::Tls>, SpecError> {
    let [certificates, keys] = [spec.get::<PathBuf>("tls-certificates")?, spec.get("tls-psk")?];
    let [username, host] = [spec.get::<String>("tls-username")?, spec.get("tls-hostname")?];
    let has_any = certificates.is_some() || keys.is_some() || username.is_some() || host.is_some();
    let is_wanted = spec.get("tls")?.map_or(has_any, |Required(is_required)| is_required);
    if (is_wanted || has_any) && spec.get::<String>("uri")?.is_some() {
        return Err(spec.refuse("TLS options with uri= belong into the URI: nbds:// and its parameters"));
    }
    if !is_wanted {
        return Ok(None);
    }
    let tls = nbd::Tls::new(certificates.as_deref(), keys.as_deref(), username.as_deref(), host);
    tls.map(Some).map_err(|why| spec.refuse(format!("TLS: {why}")))
}

/// Whether there is a choice but to use it.
struct Required(bool);

impl Value for Required {
    fn expected() -> String {
        "off or require".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "off" => Some(Required(false)),
            "require" => Some(Required(true)),
            _ => None,
        }
    }
}

#[derive(Default)]
struct Replies(nbd::Replies);

impl Value for Replies {
    fn expected() -> String {
        "simple, structured or extended".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Replies(match text {
            "simple" => nbd::Replies::Simple,
            "structured" => nbd::Replies::Structured,
            "extended" => nbd::Replies::Extended,
            _ => return None,
        }))
    }
}

fn nvme_tcp_options(spec: &Spec) -> Result<nvme_tcp::Options, SpecError> {
    let Host(address) = spec.require("address")?;
    let Name(nqn) = spec.require("nqn")?;
    let defaults = nvme_tcp::Options::new(address, nqn);
    Ok(nvme_tcp::Options {
        nsid: spec.get("nsid")?,
        host_nqn: spec.get("hostnqn")?.map(|Name(nqn)| nqn),
        host_id: spec.get("hostid")?.map(|Uuid(id)| id),
        key: secret(spec, "dhchap-key")?,
        controller_key: secret(spec, "dhchap-ctrl-key")?,
        read_only: is_on(spec, "readonly")?,
        queues: spec.get_or("queues", defaults.queues)?,
        queue_depth: spec.get_or("queue-depth", defaults.queue_depth)?,
        header_digest: is_on(spec, "hdgst")?,
        data_digest: is_on(spec, "ddgst")?,
        keep_alive_s: spec.get_or("kato", defaults.keep_alive_s)?,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
        io_timeout_s: spec.get_or("io-timeout", defaults.io_timeout_s)?,
        reconnect_delay_s: spec.get_or("reconnect-delay", defaults.reconnect_delay_s)?,
        loss_timeout_s: spec.get_or("ctrl-loss-tmo", defaults.loss_timeout_s)?,
        ..defaults
    })
}

/// The secret in the file that a key names. It is read now: later on, in a sandbox, it cannot be.
pub(super) fn secret(spec: &Spec, name: &str) -> Result<Option<nvme_tcp::Key>, SpecError> {
    let path: Option<String> = spec.get(name)?;
    let key = path.map(|path| nvme_tcp::Key::read(Path::new(&path))).transpose();
    key.map_err(|error| spec.refuse(format!("{name}: {error}")))
}

struct Host(nvme_tcp::Address);

impl Value for Host {
    fn expected() -> String {
        "HOST, HOST:PORT or [IPV6]:PORT".into()
    }

    fn parse(text: &str) -> Option<Self> {
        nvme_tcp::parse_address(text).ok().map(Host)
    }
}

pub(super) struct Name(pub(super) nvme_tcp::Nqn);

impl Value for Name {
    fn expected() -> String {
        "an NVMe name, which starts with \"nqn.\"".into()
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().map(Name)
    }
}

fn null_options(spec: &Spec) -> Result<null::Options, SpecError> {
    let Size(size) = spec.get_or("size", Size(NULL_SIZE))?;
    Ok(null::Options {
        block_size: block_size(spec)?.unwrap_or(512),
        read_only: is_on(spec, "readonly")?,
        zero: is_on(spec, "zero")?,
        latency_ns: u64::from(spec.get_or::<u32>("latency-us", 0)?) * 1000,
        iops: spec.get_or("iops", 0)?,
        bandwidth: spec.get_or("bandwidth", Size(0))?.0,
        ..null::Options::new(size)
    })
}

fn rbd_options(spec: &Spec) -> Result<rbd::Options, SpecError> {
    let defaults = rbd::Options::new(spec.require::<String>("pool")?, spec.require::<String>("image")?);
    let options = rbd::Options {
        namespace: spec.get_or("namespace", defaults.namespace)?,
        snapshot: spec.get("snapshot")?,
        conf: spec.get("conf")?,
        user: spec.get_or("user", defaults.user)?,
        exclusive: spec.get("exclusive")?.map(|Switch(is_on)| is_on),
        force: is_on(spec, "force")?,
        lock_file: spec.get("lock-file")?,
        standby: is_on(spec, "standby")?,
        cache: is_on(spec, "cache")?,
        read_only: is_on(spec, "readonly")?,
        queue_depth: spec.get_or("queue-depth", defaults.queue_depth)?,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
        ..defaults
    };
    options.check().map_err(|why| spec.refuse(why))?;
    Ok(options)
}

fn virtio_blk(spec: &Spec, transport: TransportKind) -> Result<DeviceConfig, SpecError> {
    let mut options = virtio_blk::Options::with(transport, spec.require::<PathBuf>("path")?);
    options.queues = spec.get_or("queues", options.queues)?;
    options.queue_size = spec.get_or("queue-size", options.queue_size)?;
    if transport != TransportKind::VhostVdpa {
        options.packed = spec.get_or("packed", Choice::default())?.0;
    }
    options.event_idx = spec.get_or("event-idx", Choice::default())?.0;
    options.indirect = spec.get_or("indirect", Choice::default())?.0;
    if transport == TransportKind::VhostUser {
        options.inflight = spec.get_or("inflight", Choice::default())?.0;
        options.reconnect_delay_s = spec.get_or("reconnect-delay", options.reconnect_delay_s)?;
    }
    options.timeout_ms = spec.get_or("timeout-ms", options.timeout_ms)?;
    Ok(DeviceConfig::VirtioBlk(options))
}

#[derive(Default)]
struct Choice(virtio_blk::Choice);

impl Value for Choice {
    fn expected() -> String {
        "auto, on or off".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Choice(match (text, Switch::parse(text)) {
            ("auto", _) => virtio_blk::Choice::Auto,
            (_, Some(Switch(true))) => virtio_blk::Choice::On,
            (_, Some(Switch(false))) => virtio_blk::Choice::Off,
            (_, None) => return None,
        }))
    }
}

fn is_on(spec: &Spec, key: &str) -> Result<bool, SpecError> {
    Ok(spec.get_or(key, Switch(false))?.0)
}

fn block_size(spec: &Spec) -> Result<Option<u32>, SpecError> {
    let Some(Size(size)) = spec.get("block-size")? else { return Ok(None) };
    // Drivers know which powers of two they take; here it only has to fit.
    match u32::try_from(size) {
        Ok(size) => Ok(Some(size)),
        Err(_) => Err(spec.refuse(format!("block-size={size}: at most 64K"))),
    }
}

#[cfg(test)]
mod tests;
