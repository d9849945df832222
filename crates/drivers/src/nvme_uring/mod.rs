//! NVMe namespaces by pass-through: commands go through io_uring directly to the controller,
//! bypassing the kernel's block layer.
//!
//! ```text
//!   NvmeDevice ── open_channel ──► QueueChannel<NvmeQueue>            one ring per core
//!     file     NvmeFile: the open character device, error messages, queues for the C API
//!     admin    ioctls: identify, features, logs  ─► facts (what controller and kernel take)
//!     queue    the commands of `passthrough`'s queue ─► operation (state machine: long requests,
//!              zeroes, zone reports)
//! ```
//!
//! The namespace is not protected: writes overwrite a file system that the kernel has mounted from
//! it, as with the device node itself. Source: `drivers/nvme/host/ioctl.c` and
//! `include/uapi/linux/nvme_ioctl.h` of Linux, and the specifications that the crate `nvme` names.

mod admin;
pub mod blkio;
mod error;
mod facts;
mod file;
pub mod kind;
mod operation;
mod queue;

pub use crate::passthrough::MAX_ENTRIES;
pub use admin::AdminError;
pub(crate) use admin::health_log;
pub use error::OpenError;
pub use facts::{NamespaceFacts, ZoneFacts};
pub use file::NvmeFile;
pub use queue::NvmeQueue;

use crate::io_uring::MAX_QUEUE_DEPTH;
use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion, SharedLimits};
use reactor::QueueChannel;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// Options of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Its character device, such as `/dev/ng0n1`.
    pub path: PathBuf,
    /// Refuse writes.
    pub read_only: bool,
    /// Requests in flight on each channel.
    pub queue_depth: u32,
    /// Poll the controller for completions, if it has queues for that.
    pub iopoll: bool,
}

impl Options {
    /// Reads and writes of `path`, 128 at a time.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options { path: path.into(), read_only: false, queue_depth: 128, iopoll: false }
    }
}

/// An NVMe namespace as a block device.
pub struct NvmeDevice {
    name: String,
    file: NvmeFile,
    limits: Arc<SharedLimits>,
    queue_depth: u32,
    is_polled: bool,
}

impl NvmeDevice {
    /// Opens the namespace that `options` name.
    ///
    /// # Errors
    /// When it is not an NVMe namespace, may not be used or is not supported; the message gives the
    /// reason. A zoned namespace can only be opened for reading: a block device is written in any
    /// order.
    pub fn open(options: &Options) -> Result<NvmeDevice, DeviceError> {
        let name = format!("nvme_uring:{}", options.path.display());
        let refuse = |message: String| DeviceError::new(&name, message);
        if !(1..=MAX_QUEUE_DEPTH).contains(&options.queue_depth) {
            return Err(refuse(format!("queue_depth={}: 1 to {MAX_QUEUE_DEPTH}", options.queue_depth)));
        }
        let path = options.path.display();
        let file = NvmeFile::open(&options.path, options.read_only)
            .map_err(|error| refuse("cannot be opened".into()).because(error))?;
        let facts = *file.facts();
        if facts.zones.is_some() && !options.read_only {
            return Err(refuse(format!(
                "{path} is zoned: as a block device it can only be read (readonly=on)"
            )));
        }
        if options.iopoll && !facts.can_poll {
            tracing::warn!(%path, "the controller has no poll queues (nvme.poll_queues): using interrupts");
        }
        let limits = facts.limits(options.read_only);
        tracing::info!(device = name, capacity = limits.capacity, block_size = limits.block_size, "opened");
        Ok(NvmeDevice {
            name,
            file,
            limits: SharedLimits::new(limits),
            queue_depth: options.queue_depth,
            is_polled: options.iopoll && facts.can_poll,
        })
    }

    /// The open namespace file.
    pub fn file(&self) -> &NvmeFile {
        &self.file
    }

    /// Creates a queue with its own ring, for a caller that drives it. Only the calling thread may
    /// use it.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn open_queue(&self) -> Result<NvmeQueue, DeviceError> {
        self.file
            .open_queue_of_thread(self.queue_depth, self.is_polled)
            .map_err(|e| DeviceError::new(&self.name, "cannot set up io_uring").because(e))
    }
}

impl Device for NvmeDevice {
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
            .map_err(|e| DeviceError::new(&self.name, "cannot read the namespace's size").because(e))?;
        self.limits.set_capacity(capacity);
        Ok(self.limits.get())
    }

    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}
