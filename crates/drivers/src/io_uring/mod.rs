//! Regular files and block devices of this host, through io_uring.
//!
//! ```text
//!   UringDevice ── open_channel ──► QueueChannel<UringQueue>          one ring per core
//!     open     file, exclusive claim or lock, error messages
//!     claim    the claim of a block device, which can be lent to the kernel
//!     image_lock  the bytes of a file that writers lock, QEMU's among them
//!     limits   statx, /sys/dev/block
//!     channel  the queue, and registered buffers of an export's ring
//!     queue    slots and rings ─► operation  (state machine: short transfers, fallbacks, syncs)
//!                              ─► entry      (its step as a submission entry)
//!     tail     the end of a file inside a block
//!     extents  its data and holes (block status)
//!     inline   files in memory, which need no ring
//! ```
//!
//! A queue makes one system call for everything submitted in a turn, and polls for completions in
//! user memory. Source: `io_uring_enter(2)`, `io_uring_setup(2)`, `fallocate(2)`, `open(2)`.

pub mod blkio;
mod channel;
mod claim;
mod entry;
mod extents;
mod file;
mod image_lock;
mod inline;
pub mod kind;
mod limits;
mod open;
mod operation;
mod queue;
mod tail;

pub use file::{MAX_ENTRIES, UringFile, probe};
pub use image_lock::ImageFile;
pub use limits::FileFacts;
pub use queue::UringQueue;

use crate::ring::Ring;
use crate::sysfs::Sysfs;
use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion, SharedLimits};
use channel::UringChannel;
use claim::Disk;
use queue::Shared;
use reactor::QueueChannel;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Maximum requests in flight on one channel.
pub const MAX_QUEUE_DEPTH: u32 = 4096;

/// The reason why a file is refused whose last block needs a second descriptor ([`tail::Tail`]).
const TAIL_NEEDS_DESCRIPTOR: &str =
    "cannot open the file a second time, which its partial last block requires";

/// Options for a file or block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The file or block device.
    pub path: PathBuf,
    /// Bypass the page cache.
    pub direct: bool,
    /// Refuse writes, and open for reading only.
    pub read_only: bool,
    /// Open for writing even if another program has, and let others do the same.
    pub share: bool,
    /// Refuse a file that another program has open for writing, and keep writers out while it is
    /// open, with `read_only`, too. Other readers may share it. Errors do not recommend `share`.
    pub refuse_writers: bool,
    /// Requests in flight on each channel.
    pub queue_depth: u32,
    /// Poll the drive for completions, if it has queues for that and I/O is direct.
    pub iopoll: bool,
    /// Register memory with the kernel, so that direct I/O need not pin it for every request.
    /// Pinned memory is permanently in use and cannot move: a guest cannot release any (no balloon,
    /// no overcommit). So this is off by default.
    pub fixed_buffers: bool,
    /// Logical block size in bytes; default: the smallest that works.
    pub block_size: Option<u32>,
}

impl Options {
    /// Buffered reads and writes of `path`, 128 at a time.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            path: path.into(),
            direct: false,
            read_only: false,
            share: false,
            refuse_writers: false,
            queue_depth: 128,
            iopoll: false,
            fixed_buffers: false,
            block_size: None,
        }
    }

    fn device_name(&self) -> String {
        format!("io_uring:{}", self.path.display())
    }
}

/// A regular file or block device of this host.
pub struct UringDevice {
    name: String,
    limits: Arc<SharedLimits>,
    shared: Arc<Shared>,
    queue_depth: u32,
    is_polled: bool,
    /// `None` for a regular file.
    disk: Option<Arc<Disk>>,
}

impl UringDevice {
    /// Opens the device.
    ///
    /// # Errors
    /// When it cannot be opened or claimed, is not a file or block device, or is too small. The
    /// message names the reason and an option that helps.
    pub fn open(options: &Options) -> Result<UringDevice, DeviceError> {
        let name = options.device_name();
        if !(1..=MAX_QUEUE_DEPTH).contains(&options.queue_depth) {
            let message = format!("queue_depth={}: 1 to {MAX_QUEUE_DEPTH}", options.queue_depth);
            return Err(DeviceError::new(name, message));
        }
        let (file, claim) = open::open(options)?;
        let (limits, backing, tail) = limits::inspect(&file, options)?;
        let is_polled = options.iopoll && can_poll(&file, options);
        let regions = options.fixed_buffers.then(Default::default);
        tracing::info!(device = name, capacity = limits.capacity, block_size = limits.block_size, "opened");
        let is_disk = backing.is_block_device && options.direct;
        let shared = Arc::new(Shared {
            file: Arc::new(file),
            backing,
            has_lost_writes: AtomicBool::new(false),
            regions,
            tail,
            queries: Default::default(),
        });
        let disk = is_disk.then(|| Arc::new(Disk::new(&name, &options.path, shared.clone(), claim)));
        Ok(UringDevice {
            name,
            limits: SharedLimits::new(limits),
            shared,
            queue_depth: options.queue_depth,
            is_polled,
            disk,
        })
    }

    /// Lets other open files of the same image be written, which this device, opened with
    /// `read_only` and `refuse_writers`, has refused so far.
    pub fn allow_writers(&self) -> WritersAllowed {
        self.shared.file.allow_writers();
        WritersAllowed { name: self.name.clone(), shared: self.shared.clone(), is_kept: false }
    }

    /// Opens a queue with its own rings, for a caller that drives it. Only the calling thread may
    /// use it.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn open_queue(&self) -> Result<UringQueue, DeviceError> {
        UringQueue::new(self.shared.clone(), self.queue_depth, self.is_polled, Ring::new)
            .map_err(|e| DeviceError::new(&self.name, "cannot set up io_uring").because(e))
    }
}

/// As long as this lives, other open files of an image that is read may be written.
pub struct WritersAllowed {
    name: String,
    shared: Arc<Shared>,
    is_kept: bool,
}

impl WritersAllowed {
    /// Allows them for as long as the device is open: another device of this process keeps other
    /// programs out.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for WritersAllowed {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Err(conflict) = self.shared.file.refuse_writers() {
            let name = &self.name;
            tracing::error!(
                device = name,
                ?conflict,
                "a file that is read here is open for writing elsewhere"
            );
        }
    }
}

/// Whether the drive can be polled for completions; if not, interrupts are used.
fn can_poll(file: &std::fs::File, options: &Options) -> bool {
    let drive = file.metadata().ok().and_then(|m| Sysfs::of(if m.rdev() != 0 { m.rdev() } else { m.dev() }));
    let is_able = options.direct && drive.is_some_and(|d| d.has_poll_queues());
    if !is_able {
        tracing::warn!(
            path = %options.path.display(),
            "iopoll=on needs direct=on and a drive with poll queues: using interrupts"
        );
    }
    is_able
}

impl Device for UringDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let (queue, limits) = (self.open_queue()?, self.limits.clone());
        match self.takes_registered() {
            true => Ok(UringChannel::open(queue, limits, self.shared.clone())),
            false => Ok(QueueChannel::open(queue, limits)),
        }
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        let size = limits::size(&self.shared.file)
            .map_err(|e| DeviceError::new(&self.name, "cannot read the device's size").because(e))?;
        let Shared { file, backing, tail, .. } = &*self.shared;
        let operation::Backing { is_block_device, block_size, .. } = *backing;
        tail.set_size(file, backing, size, self.limits.fixed().read_only)
            .map_err(|e| DeviceError::new(&self.name, TAIL_NEEDS_DESCRIPTOR).because(e))?;
        self.limits.set_capacity(limits::capacity(size, is_block_device, block_size));
        Ok(self.limits.get())
    }

    fn resize(&self, bytes: u64) -> Result<Limits, DeviceError> {
        let fixed = self.limits.fixed();
        if self.shared.backing.is_block_device || fixed.read_only {
            return Err(DeviceError::new(&self.name, "the size is fixed"));
        }
        if !bytes.is_multiple_of(fixed.block_size.into()) {
            let message = format!("size {bytes}: no multiple of the block size {}", fixed.block_size);
            return Err(DeviceError::new(&self.name, message));
        }
        self.shared.file.set_len(bytes).map_err(|e| {
            DeviceError::new(&self.name, format!("cannot set the size to {bytes}")).because(e)
        })?;
        self.refresh()
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        if let Some(regions) = &self.shared.regions {
            regions.add(region);
        }
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        if let Some(regions) = &self.shared.regions {
            regions.remove(region);
        }
    }

    /// Not if the drive is polled, which the export's ring cannot do, nor in memory, where a
    /// copy is shorter than a worker thread's turn.
    fn takes_registered(&self) -> bool {
        !self.is_polled && !self.shared.backing.is_in_memory
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        match &self.disk {
            Some(disk) => Ok(disk.clone()),
            None if self.shared.backing.is_block_device => {
                Err(DeviceError::new(&self.name, "open through the page cache (direct=on is needed)"))
            }
            None => Err(DeviceError::new(&self.name, "a regular file, not a block device")),
        }
    }
}

#[cfg(test)]
mod tests;
