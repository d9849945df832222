//! The devices below a disk: the image's file, and those that the image names.

use crate::entry::SUBCLUSTERS;
use crate::image::Image;
use block::{Device, DeviceError, Limits, MemoryRegion};
use std::sync::Arc;

/// Devices that an image needs in addition to its own file.
#[derive(Clone, Default)]
pub struct Others {
    /// Serves clusters that the image does not have.
    pub backing: Option<Arc<dyn Device>>,
    /// The external data file.
    pub data_file: Option<Arc<dyn Device>>,
}

/// A device that is missing would read as zeroes, and one too many would be ignored.
pub(crate) fn check_others(image: &Image, others: &Others) -> Result<(), String> {
    let header = &image.header;
    match (&header.backing_file, &others.backing) {
        (Some(name), None) => return Err(format!("the backing file {name:?} is not open")),
        (None, Some(device)) => {
            return Err(format!("no backing file is named: {} is unused", device.name()));
        }
        _ => {}
    }
    match (header.has_data_file(), &others.data_file) {
        (true, None) => {
            let name = header.data_file.as_deref().unwrap_or_default();
            Err(format!("the data file {name:?} is not open"))
        }
        (false, Some(device)) => Err(format!("no external data file is named: {} is unused", device.name())),
        _ => Ok(()),
    }
}

/// The limits of a disk that is only read, as its image and the devices below allow.
pub(crate) fn limits(image: &Image, others: &Others) -> Result<Limits, String> {
    let mut limits = image.device.limits();
    for other in [&others.backing, &others.data_file].into_iter().flatten() {
        let other = other.limits();
        limits.block_size = limits.block_size.max(other.block_size);
        limits.physical_block_size = limits.physical_block_size.max(other.physical_block_size);
        limits.memory_alignment = limits.memory_alignment.max(other.memory_alignment);
        limits.max_transfer = limits.max_transfer.min(other.max_transfer);
        limits.max_segments = limits.max_segments.min(other.max_segments);
        limits.rotational |= other.rotational;
    }
    let block_size = u64::from(limits.block_size);
    let parts = if image.header.has_extended_l2() { SUBCLUSTERS } else { 1 };
    let unit = image.header.cluster_size() / parts;
    if unit < block_size {
        return Err(format!(
            "clusters or subclusters of {unit} bytes are smaller than the blocks of {block_size} bytes below"
        ));
    }
    limits.capacity = image.size & !(block_size - 1);
    if limits.capacity == 0 {
        return Err(format!("size {}: less than a block of {block_size} bytes", image.size));
    }
    limits.max_transfer &= !(limits.block_size - 1);
    (limits.max_discard, limits.max_write_zeroes) = (0, 0);
    (limits.read_only, limits.volatile_cache) = (true, false);
    Ok(limits)
}

/// Registers memory with every device, or with none.
pub(crate) fn each_mapped<'a>(
    children: impl Iterator<Item = &'a Arc<dyn Device>>,
    region: &MemoryRegion,
) -> Result<(), DeviceError> {
    let mut mapped = Vec::new();
    for child in children {
        if let Err(error) = child.map_region(region) {
            mapped.iter().for_each(|child: &&Arc<dyn Device>| child.unmap_region(region));
            return Err(error);
        }
        mapped.push(child);
    }
    Ok(())
}
