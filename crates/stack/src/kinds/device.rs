//! The table of all kinds of devices: the leaves of a graph, images, arrays.

use super::qcow2;
use super::raid::RAID;
use crate::passed::shared_buffers;
use block::{Device, DeviceError};
pub use drivers::kind::{DeviceConfig, RemoteImage, WithRole};
pub use drivers::{disks, drive};
use drivers::{io_uring, mem, null, nvme_uring, virtio_blk_uring};
use spec::{Entry, Kind, Role, SpecError};
use std::sync::Arc;

/// Why requests with buffers of the cores cannot use a device.
pub const OUT_OF_REACH: &str = "it can only use registered memory, which the buffers are not";

/// Every kind of device. Its crate, or its folder in the crate `drivers`, has the rest; those that
/// are made of other devices or files have a file in this folder.
const TABLE: &[Entry<Box<dyn DeviceConfig>>; 13] = &[
    Entry { kind: &io_uring::kind::KIND, parse: io_uring::kind::parse },
    Entry { kind: &mem::kind::KIND, parse: mem::kind::parse },
    Entry { kind: &drivers_nbd::kind::KIND, parse: drivers_nbd::kind::parse },
    Entry { kind: &null::kind::KIND, parse: null::kind::parse },
    Entry { kind: &drivers_nvme_tcp::kind::KIND, parse: drivers_nvme_tcp::kind::parse },
    Entry { kind: &nvme_uring::kind::KIND, parse: nvme_uring::kind::parse },
    Entry { kind: &qcow2::KIND, parse: qcow2::parse },
    Entry { kind: &drivers_rbd::kind::KIND, parse: drivers_rbd::kind::parse },
    Entry { kind: &drivers_virtio_blk::kind::VHOST_USER, parse: drivers_virtio_blk::kind::parse_vhost_user },
    Entry { kind: &drivers_virtio_blk::kind::VHOST_VDPA, parse: drivers_virtio_blk::kind::parse_vhost_vdpa },
    Entry { kind: &drivers_virtio_blk::kind::VFIO_PCI, parse: drivers_virtio_blk::kind::parse_vfio_pci },
    Entry { kind: &virtio_blk_uring::kind::KIND, parse: virtio_blk_uring::kind::parse },
    // `StackPlan` has the members of an array.
    Entry {
        kind: &RAID,
        parse: |spec| Err(spec.refuse("an array cannot stand here: it has members of its own")),
    },
];

/// The names and keys of the kinds.
pub const KINDS: &[&Kind] = &spec::kinds(TABLE);

/// The device that `text` describes, and its name if it has one.
///
/// # Errors
/// When the text is invalid.
pub fn parse(text: &str) -> Result<(Box<dyn DeviceConfig>, Option<String>), SpecError> {
    let (spec, config) = spec::parse(Role::Device, TABLE, text)?;
    Ok((config, spec.get("id")?))
}

/// Opens a device, described by `text`, for requests with buffers of the cores, which are
/// registered with it if it needs that.
///
/// # Errors
/// When it cannot reach the buffers: then it was not opened. Errors of the driver; when the other
/// process refuses the memory.
pub fn open(text: &str, config: &dyn DeviceConfig) -> Result<Arc<dyn Device>, DeviceError> {
    if lacks_buffers(config) || config.pins_all_memory() {
        let hint = if config.maps_memory() { " (freestoned: see --share-buffers)" } else { "" };
        return Err(DeviceError::new(text, format!("{OUT_OF_REACH}{hint}")));
    }
    let device = config.open()?;
    share_buffers(config, &*device)?;
    Ok(device)
}

/// As [`open`], and returns its image if it is one in the format qcow2 that is written.
///
/// # Errors
/// As [`open`].
pub fn open_with_image(text: &str, config: &dyn DeviceConfig) -> Result<qcow2::Opened, DeviceError> {
    match config.options::<qcow2::Options>() {
        Some(options) => options.open_parts(),
        None => Ok(qcow2::Opened::plain(open(text, config)?)),
    }
}

/// Whether a device reaches none of the buffers of the cores.
pub fn lacks_buffers(config: &dyn DeviceConfig) -> bool {
    config.maps_memory() && shared_buffers().is_none()
}

/// The second half of [`open`].
///
/// # Errors
/// When the other process refuses the memory.
pub(crate) fn share_buffers(config: &dyn DeviceConfig, device: &dyn Device) -> Result<(), DeviceError> {
    shared_buffers().filter(|_| config.maps_memory()).map_or(Ok(()), |buffers| device.map_region(buffers))
}
