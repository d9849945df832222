//! The kinds of virtio-blk devices, one for each transport.

use super::{Choice, Options, TransportKind, VirtioBlk};
use block::{Device, DeviceError};
use drivers::kind::{DeviceConfig, RECONNECT_DELAY, RegionUse};
#[cfg(feature = "sandbox")]
use sandbox::{Access, Profile};
use spec::{ID, Kind, Spec, SpecError, Switch, Value, key};
#[cfg(feature = "sandbox")]
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

/// The kind of disks behind a vhost-user socket.
pub static VHOST_USER: Kind = Kind {
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

/// The kind of disks on the kernel's vDPA bus.
pub static VHOST_VDPA: Kind = Kind {
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

/// The kind of disks that are PCI functions.
pub static VFIO_PCI: Kind = Kind {
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

/// The disk behind a vhost-user socket of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse_vhost_user(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    parse(spec, TransportKind::VhostUser)
}

/// The disk on the vDPA bus of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse_vhost_vdpa(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    parse(spec, TransportKind::VhostVdpa)
}

/// The PCI function of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse_vfio_pci(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    parse(spec, TransportKind::VfioPci)
}

fn parse(spec: &Spec, transport: TransportKind) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let mut options = Options::with(transport, spec.require::<PathBuf>("path")?);
    options.queues = spec.get_or("queues", options.queues)?;
    options.queue_size = spec.get_or("queue-size", options.queue_size)?;
    if transport != TransportKind::VhostVdpa {
        options.packed = spec.get_or("packed", Tristate::default())?.0;
    }
    options.event_idx = spec.get_or("event-idx", Tristate::default())?.0;
    options.indirect = spec.get_or("indirect", Tristate::default())?.0;
    if transport == TransportKind::VhostUser {
        options.inflight = spec.get_or("inflight", Tristate::default())?.0;
        options.reconnect_delay_s = spec.get_or("reconnect-delay", options.reconnect_delay_s)?;
    }
    options.timeout_ms = spec.get_or("timeout-ms", options.timeout_ms)?;
    Ok(Box::new(options))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(VirtioBlk::open(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        match self.transport {
            TransportKind::VhostUser => profile.connect_to(&self.path),
            TransportKind::VhostVdpa => {
                profile.allow(&self.path, Access::ReadWrite);
                profile.lock_memory();
            }
            TransportKind::VfioPci => {
                profile.allow("/dev/vfio/vfio", Access::ReadWrite);
                let group = self.path.join("iommu_group").read_link().ok();
                if let Some(number) = group.as_deref().and_then(Path::file_name) {
                    profile.allow(Path::new("/dev/vfio").join(number), Access::ReadWrite);
                }
                profile.lock_memory();
            }
        }
    }

    /// The other side decides.
    fn make_read_only(&mut self) {}

    fn regions(&self) -> RegionUse {
        // An IOMMU translates only what does not move.
        RegionUse { are_needed: true, are_pinned: self.transport != TransportKind::VhostUser }
    }
}

#[derive(Default)]
struct Tristate(Choice);

impl Value for Tristate {
    fn expected() -> String {
        "auto, on or off".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Tristate(match (text, Switch::parse(text)) {
            ("auto", _) => Choice::Auto,
            (_, Some(Switch(true))) => Choice::On,
            (_, Some(Switch(false))) => Choice::Off,
            (_, None) => return None,
        }))
    }
}
