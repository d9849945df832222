//! A block device: [`Device`] as all cores share it, [`Channel`] as one core uses it.

use crate::{DirtyBitmap, IoFuture, Limits, Request, StatusReport};
use std::os::fd::{BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

/// The access of one core to a block device. Not `Send`: a channel is used and dropped on its core,
/// so it needs no locks.
///
/// The implementor accepts any request at any time. It checks range, alignment and permission
/// itself (see [`Limits::check`]), splits or copies where its own limits require that, and queues
/// requests while it is full. The caller keeps request, memory and channel alive until the future
/// has completed.
pub trait Channel {
    /// Starts `req` at byte `offset` of the device (ignored for a flush).
    ///
    /// A leaf starts the request at once, a layer at the latest with the future's first poll. A
    /// caller that wants several requests in flight polls all their futures ([`crate::join_all`]).
    ///
    /// A started request cannot be cancelled. Dropping its future before it has completed is a bug
    /// and ends the process, because the device might still write into memory that is used again.
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a>;

    /// Appends the status of the range's first bytes to `report`: which of them hold data, and
    /// which read as zeroes. `report` has room for an extent. Offset and length are multiples of
    /// the block size, and so is every extent. The answer may end before the range does, but covers
    /// a block at least.
    ///
    /// An answer of [`crate::Status::ZERO`] is true at some moment between the call and the
    /// completion: it misses no write that completed before the call. A device that is not certain
    /// answers [`crate::Status::DATA`].
    ///
    /// A query that is dropped before it has completed may end the process, as a request does.
    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a>;
}

/// A block device as all cores share it: identity, limits, control. Never on the data path.
pub trait Device: Send + Sync {
    /// A name, e.g. `io_uring:disk.img`, for log lines and errors. Exports derive a disk's identity
    /// from it, so it is the same each time the device is opened.
    fn name(&self) -> &str;

    /// The limits now; the capacity may change later.
    fn limits(&self) -> Limits;

    /// Opens this device's channel on the calling core, which must run a reactor.
    ///
    /// # Errors
    /// If the operating system refuses a resource, or the device is gone.
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError>;

    /// Reads the size of the backing store again, after it grew or shrank. Layers refresh their
    /// children first. Open channels use the new capacity from their next request on.
    ///
    /// # Errors
    /// If the size of the backing store cannot be read.
    fn refresh(&self) -> Result<Limits, DeviceError>;

    /// Grows or shrinks the backing store to `bytes`, a multiple of the block size, for a format
    /// whose file is as long as its content. New bytes read as zeroes. Open channels use the new
    /// capacity from their next request on. May wait for the operating system.
    ///
    /// # Errors
    /// If the store has a fixed size, as most have, or has no room.
    fn resize(&self, _bytes: u64) -> Result<Limits, DeviceError> {
        Err(DeviceError::new(self.name(), "the size is fixed"))
    }

    /// Registers memory that requests will point into, before the first such request. Layers
    /// forward the call; a device that needs no registration does nothing.
    ///
    /// # Errors
    /// If the device cannot register the region (no fd for a device in another process, too many
    /// regions, …).
    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError>;

    /// Removes a region that [`Device::map_region`] registered. No request may point into it any
    /// more.
    fn unmap_region(&self, region: &MemoryRegion);

    /// Whether requests may carry registered buffers ([`crate::Data::registered`]). The device then
    /// uses their bytes by operations of their ring only, on the core that submitted the request. A
    /// layer forwards the call only if neither it nor a layer below ever looks at bytes, copies
    /// them, or hands requests to other cores.
    ///
    /// The answer may change while channels are open, and a device may be unable to execute a
    /// single request. The request then fails with [`crate::IoError::Unsupported`], and its caller
    /// repeats it with memory.
    fn takes_registered(&self) -> bool {
        false
    }

    /// The dirty bitmaps of the device, as they are now; their bits change with later writes. A
    /// layer forwards the call only if it changes neither offsets nor content.
    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        Vec::new()
    }

    /// The block device of this host's kernel that has exactly the bytes of this device in one
    /// range, so that the kernel can serve requests without this process. A layer forwards the call
    /// only if it changes nothing about a request but its offset, and needs to see none.
    ///
    /// # Errors
    /// If there is none; the message names the device and the reason
    /// ([`DeviceError::not_in_kernel`]).
    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError>;
}

/// A block device of this host's kernel, as its driver has it open.
pub trait KernelBacking: Send + Sync {
    /// A descriptor of the block device; read-only if the driver opened it so.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The range of the block device that has the bytes.
    fn extent(&self) -> KernelExtent;

    /// Gives up the driver's exclusive claim, so that the kernel can hold the disk instead. The
    /// driver's channels keep working.
    ///
    /// # Errors
    /// If the disk is lent already: one holder at a time.
    fn lend(&self) -> Result<(), DeviceError>;

    /// Claims the disk for the driver again, after [`KernelBacking::lend`] has succeeded and the
    /// kernel has let the disk go.
    ///
    /// # Errors
    /// If another program has claimed the disk meanwhile, or the disk cannot be opened any more.
    /// The driver then has no claim, and the disk may be lent again.
    fn take_back(&self) -> Result<(), DeviceError>;
}

/// A range of a block device of this host's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelExtent {
    /// First byte on the block device.
    pub start: u64,
    /// Length in bytes. `None`: up to the end of the block device, and growing with it.
    pub len: Option<u64>,
}

impl KernelExtent {
    /// The whole block device.
    pub const WHOLE: KernelExtent = KernelExtent { start: 0, len: None };

    /// The part of this range from byte `start` on; `len` bytes, or up to its end. The caller has
    /// checked that it is inside.
    ///
    /// ```
    /// let part = block::KernelExtent::WHOLE.part(4096, Some(1 << 20)).part(512, None);
    /// assert_eq!(part, block::KernelExtent { start: 4608, len: Some((1 << 20) - 512) });
    /// ```
    #[must_use]
    pub fn part(self, start: u64, len: Option<u64>) -> KernelExtent {
        let rest = self.len.map(|whole| whole.saturating_sub(start));
        KernelExtent { start: self.start + start, len: len.or(rest) }
    }
}

/// Memory that requests point into: one mapping of this process, and the file behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// First byte in this process.
    pub addr: usize,
    /// Length in bytes.
    pub len: usize,
    /// The file that backs it, for devices in another process. The caller keeps it open while
    /// mapped.
    pub fd: Option<RawFd>,
    /// Byte of that file at which the region starts.
    pub fd_offset: u64,
}

/// Why a control operation on a device failed. The message names the object and the value.
#[derive(Debug)]
pub struct DeviceError {
    device: String,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl DeviceError {
    /// An error of `device` (its name). `message` names the value and the reason.
    pub fn new(device: impl Into<String>, message: impl Into<String>) -> Self {
        DeviceError { device: device.into(), message: message.into(), source: None }
    }

    /// The answer of a device to [`Device::kernel_backing`] whose requests need this process.
    pub fn not_in_kernel(device: impl Into<String>) -> Self {
        DeviceError::new(device, "no block device of this host's kernel")
    }

    /// The same error, caused by `source`.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }
}

impl std::fmt::Display for DeviceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.device, self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|s| s as _)
    }
}
