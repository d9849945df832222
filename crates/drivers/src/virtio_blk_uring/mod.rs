//! Disks of the kernel's virtio-blk driver by pass-through: commands go through io_uring directly
//! to that driver, bypassing the kernel's block layer. The module `virtio_blk_uring` of `kernel/`
//! makes the nodes, such as `/dev/vdac0`.
//!
//! ```text
//!   VirtioBlkUring ── open_channel ──► QueueChannel<VirtioBlkUringQueue>     one ring per core
//!     file     VirtioBlkUringFile: the open node, queues for the C API
//!     facts    ioctl VIRTBLK_GET_INFO ─► facts (the limits of disk and kernel)
//!     queue    the commands of `passthrough`'s queue ─► operation (state machine: long requests,
//!              zeroes, durable writes)
//! ```
//!
//! The disk is not protected: writes overwrite a file system that the kernel has mounted from it,
//! and caches of the kernel do not notice. Source: `kernel/include/uapi/linux/virtio_blk_uring.h`,
//! and virtio 1.3, section 5.2.

pub mod blkio;
mod error;
mod facts;
mod file;
pub mod kind;
mod operation;
mod queue;
#[cfg(test)]
mod uapi_tests;

pub use crate::passthrough::MAX_ENTRIES;
pub use error::OpenError;
pub use facts::{DiskFacts, RangeLimits};
pub use file::VirtioBlkUringFile;
pub use queue::VirtioBlkUringQueue;

use crate::io_uring::MAX_QUEUE_DEPTH;
use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion, SharedLimits};
use reactor::QueueChannel;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// Options of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Its node, such as `/dev/vdac0`.
    pub path: PathBuf,
    /// Refuse writes, and open for reading only.
    pub read_only: bool,
    /// Requests in flight on each channel.
    pub queue_depth: u32,
    /// Poll the disk for completions, if it has queues for that.
    pub iopoll: bool,
    /// Register memory with the kernel, so that it need not be pinned for every request. Pinned
    /// memory is permanently in use and cannot move, as with
    /// [`crate::io_uring::Options::fixed_buffers`].
    pub fixed_buffers: bool,
}

impl Options {
    /// Reads and writes of `path`, 128 at a time.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options { path: path.into(), read_only: false, queue_depth: 128, iopoll: false, fixed_buffers: false }
    }
}

/// A virtio-blk disk of this machine as a block device.
pub struct VirtioBlkUring {
    name: String,
    file: VirtioBlkUringFile,
    limits: Arc<SharedLimits>,
    queue_depth: u32,
    is_polled: bool,
}

impl VirtioBlkUring {
    /// Opens the disk that `options` name.
    ///
    /// # Errors
    /// When the path is not the node of a disk, or may not be used; the message gives the reason.
    pub fn open(options: &Options) -> Result<VirtioBlkUring, DeviceError> {
        let name = format!("virtio-blk-uring:{}", options.path.display());
        let refuse = |message: String| DeviceError::new(&name, message);
        if !(1..=MAX_QUEUE_DEPTH).contains(&options.queue_depth) {
            return Err(refuse(format!("queue_depth={}: 1 to {MAX_QUEUE_DEPTH}", options.queue_depth)));
        }
        let file = VirtioBlkUringFile::open(&options.path, options.read_only, options.fixed_buffers)
            .map_err(|error| refuse("cannot be opened".into()).because(error))?;
        let can_poll = file.facts().can_poll;
        if options.iopoll && !can_poll {
            let path = options.path.display();
            tracing::warn!(%path, "the disk has no poll queues (virtio_blk.poll_queues): using interrupts");
        }
        let limits = file.limits();
        tracing::info!(device = name, capacity = limits.capacity, block_size = limits.block_size, "opened");
        Ok(VirtioBlkUring {
            name,
            file,
            limits: SharedLimits::new(limits),
            queue_depth: options.queue_depth,
            is_polled: options.iopoll && can_poll,
        })
    }

    /// Creates a queue with its own ring, for a caller that drives it. Only the calling thread may
    /// use it.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn open_queue(&self) -> Result<VirtioBlkUringQueue, DeviceError> {
        self.file
            .open_queue_of_thread(self.queue_depth, self.is_polled)
            .map_err(|e| DeviceError::new(&self.name, "cannot set up io_uring").because(e))
    }
}

impl Device for VirtioBlkUring {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(QueueChannel::open(self.open_queue()?, self.limits.clone()))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        let capacity = self
            .file
            .capacity()
            .map_err(|e| DeviceError::new(&self.name, "cannot read the disk's size").because(e))?;
        self.limits.set_capacity(capacity);
        Ok(self.limits.get())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.file.map_region(region);
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.file.unmap_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(&self.name))
    }
}
