//! The parts that all leaf drivers share, and the leaves of this host. A leaf is a device that does
//! not stand on another device. The other leaves are crates of their own: `drivers_nbd`,
//! `drivers_nvme_tcp`, `drivers_rbd`, `drivers_virtio_blk`.
//!
//! | module | backed by |
//! |---|---|
//! | [`null`] | nothing: reads and writes complete at once, or with the latency of a modelled drive |
//! | [`mem`] | this process's memory: a sparse RAM disk |
//! | [`io_uring`] | a regular file or a block device of this host |
//! | [`nvme_uring`] | an NVMe namespace, with commands passed through to the controller |
//! | [`virtio_blk_uring`] | a disk of the kernel's virtio-blk driver, with commands passed through to it |
//!
//! [`drive`] reads facts and health of the drives of this host; [`disks`] lists its block devices.
//!
//! Drivers never depend on each other, nor on layers or exports.
//!
//! A file as a device:
//!
//! ```
//! use block::{Device, Flags, Op};
//! use drivers::io_uring::{Options, UringDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tempfile::NamedTempFile::new()?;
//! file.as_file().set_len(1 << 20)?;
//! let device = UringDevice::open(&Options { queue_depth: 16, ..Options::new(file.path()) })?;
//! assert_eq!(device.limits().capacity, 1 << 20);
//! reactor::run(async move {
//!     let channel = device.open_channel().unwrap();
//!     let mut buffer = reactor::current().buffers().take(4096).await;
//!     buffer.as_mut_slice().fill(7);
//!     let (_, written) = buffer.transfer(&*channel, Op::Write, Flags::FUA, 8192).await;
//!     assert_eq!(written, Ok(()));
//! });
//! assert_eq!(std::fs::read(file.path())?[8192..12288], [7; 4096]);
//! # Ok(())
//! # }
//! ```

pub mod bare_queue;
pub mod blkio;
mod bridge;
pub mod direct;
pub mod disks;
pub mod drive;
mod fixed;
pub mod io_uring;
pub mod kind;
pub mod mem;
pub mod null;
pub mod nvme_uring;
mod passthrough;
mod ring;
pub mod shared_buffer;
pub mod shared_memory;
pub mod stream;
mod sysfs;
#[cfg(feature = "testing")]
pub mod test_queue;
pub mod virtio_blk_uring;
pub mod work;
pub mod zeroes;

use block::{DeviceError, Limits};

/// Checks the configured size and block size, and returns the limits of a device without a medium.
fn plain_limits(device: &str, size: u64, block_size: u32) -> Result<Limits, DeviceError> {
    if !block_size.is_power_of_two() || !(512..=65536).contains(&block_size) {
        let message = format!("block_size={block_size}: want a power of two from 512 to 65536");
        return Err(DeviceError::new(device, message));
    }
    if size < u64::from(block_size) {
        let message = format!("size={size}: less than one block of {block_size} bytes");
        return Err(DeviceError::new(device, message));
    }
    let capacity = size & !(u64::from(block_size) - 1);
    Ok(Limits {
        block_size,
        physical_block_size: block_size.max(4096),
        discard_alignment: block_size.max(4096),
        max_transfer: (1 << 30) & !(block_size - 1),
        ..Limits::new(capacity)
    })
}
