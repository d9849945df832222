//! An image of a Ceph cluster (RBD), through the libraries of Ceph.
//!
//! ```text
//!   RbdDevice ── open_channel() ──► QueueChannel ─► RbdQueue ─► librbd's threads ──►  OSDs
//!      │ control                                        ▲            │
//!   ClusterHandle ◄── ImageHandle                       └─ CompletionRing: event while a core sleeps
//!   (one a configuration and user)
//! ```
//!
//! librbd is loaded when the first image is opened, so that programs neither are built with Ceph
//! nor require it. Its threads are started from a thread that is bound to no processor: threads
//! inherit that, and would otherwise all use the processor of the core that opened the image.
//!
//! Ceph waits without a limit for a cluster that does not answer, and so do requests, unless the
//! configuration sets `rados_osd_op_timeout`. A client that the cluster has blocklisted gets
//! `DeviceGone`, and none of its writes takes effect.
//!
//! Source: `rbd/librbd.h` and `rados/librados.h` of Ceph 16.

mod admin;
pub mod blkio;
mod cluster;
mod error;
mod host_role;
mod image;
pub mod kind;
mod library;
mod lock;
mod lock_record;
mod names;
mod options;
mod queue;
mod size_watch;
#[cfg(test)]
mod tests;

pub use admin::{FoundImage, FoundPool, create, grow, list};
pub use options::{ClusterOptions, MAX_QUEUE_DEPTH, Options};
pub use queue::RbdQueue;

use block::{
    Channel, Device, DeviceError, HostRole, KernelBacking, Limits, MemoryRegion, SharedLimits, SharedRole,
};
use cluster::ClusterHandle;
use error::OpenError;
use host_role::RoleKeeper;
use image::ImageHandle;
use library::Library;
use queue::RbdShared;
use reactor::QueueChannel;
use size_watch::SizeWatch;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Longest read or write: librbd copies the data of writes.
const MAX_TRANSFER: u32 = 4 << 20;
/// Longest discard or range of zeroes. librbd makes an operation for each object of it at once.
const MAX_RANGE: u64 = 1 << 30;
/// Maximum memory segments of a request: `IOV_MAX`, which librbd refuses to exceed.
const MAX_SEGMENTS: u16 = 1024;

/// An image of a Ceph cluster.
pub struct RbdDevice {
    /// Of a standby.
    _role_keeper: Option<RoleKeeper>,
    /// Images that are only read have none: librbd does not follow them.
    _size_watch: Option<SizeWatch>,
    shared: Arc<RbdShared>,
    limits: Arc<SharedLimits>,
    queue_depth: u32,
}

impl RbdDevice {
    /// Connects to the cluster and opens the image. Blocks while the cluster does not answer, at
    /// most for the timeout until the monitors have.
    ///
    /// # Errors
    /// When Ceph's libraries are not installed, the cluster or the image cannot be used, or another
    /// client has the exclusive lock.
    pub fn open(options: &Options) -> Result<RbdDevice, DeviceError> {
        RbdDevice::open_with(Library::get, options)
    }

    fn open_with(
        library: fn() -> Result<&'static Library, String>,
        options: &Options,
    ) -> Result<RbdDevice, DeviceError> {
        options.check().map_err(|reason| DeviceError::new(options.name(), reason))?;
        let work = {
            let options = options.clone();
            move || open(library, &options)
        };
        let opened = on_unbound_thread(options.name(), work)?;
        let Opened { shared, limits, size_watch, role_keeper } = opened;
        tracing::info!(
            device = shared.name,
            capacity = limits.capacity(),
            object_size = limits.fixed().optimal_io_size,
            "opened"
        );
        let (_size_watch, _role_keeper) = (size_watch, role_keeper);
        Ok(RbdDevice { _role_keeper, _size_watch, shared, limits, queue_depth: options.queue_depth })
    }

    /// The role of this host, if the image was opened with `standby`.
    pub fn role(&self) -> Option<&Arc<SharedRole>> {
        self.shared.role.as_ref()
    }

    /// Opens a queue of the depth in the options, for a caller that drives it from any thread.
    ///
    /// # Errors
    /// When the operating system refuses an eventfd.
    pub fn open_queue(&self) -> Result<RbdQueue, DeviceError> {
        self.open_queue_of(self.queue_depth)
    }

    /// Opens a queue for 1 to [`MAX_QUEUE_DEPTH`] requests in flight.
    ///
    /// # Errors
    /// As [`RbdDevice::open_queue`].
    pub fn open_queue_of(&self, depth: u32) -> Result<RbdQueue, DeviceError> {
        RbdQueue::new(self.shared.clone(), depth)
            .map_err(|error| DeviceError::new(self.name(), "cannot make an eventfd").because(error))
    }
}

/// Calls librbd on a thread that may use every processor: the threads that librbd starts inherit
/// that. `name` is the device or cluster of an error.
fn on_unbound_thread<T: Send + 'static>(
    name: String,
    work: impl FnOnce() -> Result<T, OpenError> + Send + 'static,
) -> Result<T, DeviceError> {
    let run = || {
        reactor::unbind_thread();
        work()
    };
    let thread = match reactor::spawn_thread("rbd-open", run) {
        Ok(thread) => thread,
        Err(error) => return Err(DeviceError::new(name, "cannot start a thread").because(error)),
    };
    thread.join().expect("librbd does not panic").map_err(|error| error.of(name))
}

/// An open image and its limits, and the threads that follow its size and its lock.
struct Opened {
    shared: Arc<RbdShared>,
    limits: Arc<SharedLimits>,
    size_watch: Option<SizeWatch>,
    role_keeper: Option<RoleKeeper>,
}

/// Opens the image. Runs on a thread of its own.
fn open(library: fn() -> Result<&'static Library, String>, options: &Options) -> Result<Opened, OpenError> {
    let library = library().map_err(OpenError::Refused)?;
    let cluster = ClusterHandle::open(library, &options.cluster(), options.cache)?;
    let image = ImageHandle::open(&cluster, options)?;
    let needs_lock = image.prepare_lock(options)?;
    if needs_lock && !options.standby {
        image.take_lock(options)?;
    }
    let (size, object_size) = (image.size()?, image.object_size()?);
    let is_read_only = options.is_read_only();
    let is_cached = image.is_cached()? && !is_read_only;
    if is_cached && options.standby {
        let reason = "standby=on: clients would lose writes in the cache when another host takes over; \
                      set rbd_cache=false for the image and its pool";
        return Err(OpenError::Refused(reason.into()));
    }
    let limits = SharedLimits::new(limits(size, object_size, is_read_only, is_cached)?);
    let is_shut_out = AtomicBool::new(false);
    let role = options.standby.then(|| SharedRole::new(HostRole::Standby));
    let shared = Arc::new(RbdShared { name: options.name(), image, is_cached, is_shut_out, role });
    let size_watch = (!is_read_only).then(|| SizeWatch::start(&shared, &limits)).transpose()?;
    let start = |role| RoleKeeper::start(&shared, role, &limits, options);
    let role_keeper = shared.role.as_ref().map(start).transpose()?;
    Ok(Opened { shared, limits, size_watch, role_keeper })
}

fn limits(size: u64, object_size: u64, is_read_only: bool, is_cached: bool) -> Result<Limits, OpenError> {
    let block = u64::from(Limits::new(0).block_size);
    let capacity = size & !(block - 1);
    if capacity == 0 {
        return Err(OpenError::Refused(format!("size {size} bytes: less than one block of {block}")));
    }
    if capacity < size {
        tracing::warn!(
            "size {size} is not a multiple of {block}: the last {} bytes are not used",
            size - capacity
        );
    }
    let object_size = u32::try_from(object_size).ok().filter(|size| size.is_power_of_two());
    Ok(Limits {
        optimal_io_size: object_size.unwrap_or(0),
        max_transfer: MAX_TRANSFER,
        max_segments: MAX_SEGMENTS,
        max_discard: MAX_RANGE,
        discard_alignment: object_size.unwrap_or(0).max(4096),
        max_write_zeroes: MAX_RANGE,
        read_only: is_read_only,
        volatile_cache: is_cached,
        native_fua: !is_cached,
        ..Limits::new(capacity)
    })
}

impl Device for RbdDevice {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn limits(&self) -> Limits {
        self.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(QueueChannel::open(self.open_queue()?, self.limits.clone()))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        let size = self.shared.image.size();
        let size = size.map_err(|error| error.of(self.shared.name.clone()))?;
        self.limits.set_capacity(size);
        Ok(self.limits.get())
    }

    fn map_region(&self, _region: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _region: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}
