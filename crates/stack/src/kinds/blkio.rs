//! The table of the kinds that are drivers of the C library, of which each states its own.

use drivers::blkio::DriverKind;
use drivers::{io_uring, nvme_uring, virtio_blk_uring};

/// Every kind that is a driver of the library; the library adds those that it makes of stacks.
pub static DRIVERS: [&DriverKind; 9] = [
    &io_uring::blkio::DRIVER,
    &drivers_nbd::blkio::DRIVER,
    &drivers_nvme_tcp::blkio::DRIVER,
    &nvme_uring::blkio::DRIVER,
    &drivers_rbd::blkio::DRIVER,
    &virtio_blk_uring::blkio::DRIVER,
    &drivers_virtio_blk::blkio::VFIO_PCI,
    &drivers_virtio_blk::blkio::VHOST_USER,
    &drivers_virtio_blk::blkio::VHOST_VDPA,
];
