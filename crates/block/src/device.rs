//! A block device: [`Device`] as all cores share it, [`Channel`] as one core uses it.

use crate::{IoFuture, Limits, Request};
use std::os::fd::RawFd;
use std::rc::Rc;

/// A block device as one core sees it. Not `Send`: a channel lives and dies on its core, so it needs no locks.
///
/// The implementor accepts any request at any time: it checks range, alignment and permission itself (see
/// [`Limits::check`]), splits or copies where its own limits ask for it, and lets a request wait when it is
/// full. The caller keeps request, memory and channel alive until the future has completed.
pub trait Channel {
    /// Starts `req` at byte `offset` of the device (ignored for a flush).
    ///
    /// A leaf starts the request now, a layer at the latest with the future's first poll: whoever wants
    /// several in flight polls them all ([`crate::join_all`]). A request that has started cannot be taken
    /// back: dropping its future before it has completed is a bug, and ends the process rather than let a
    /// device write into memory that has changed hands.
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a>;
}

/// A block device as all cores share it: identity, limits, control. Never on the data path.
pub trait Device: Send + Sync {
    /// A name, e.g. `io_uring:disk.img`: log lines and errors carry it, and exports know a disk again by it, so it is the same
    /// whenever the device is opened.
    fn name(&self) -> &str;

    /// What the device promises now.
    fn limits(&self) -> Limits;

    /// Opens this device's channel on the calling core, which must run a reactor.
    ///
    /// # Errors
    /// When the operating system refuses a resource, or the device is gone.
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError>;

    /// Reads the size of the backing store again, after it grew or shrank; layers ask their children first.
    /// Channels that are open see the new capacity with their next request.
    ///
    /// # Errors
    /// When the backing store cannot be asked.
    fn refresh(&self) -> Result<Limits, DeviceError>;

    /// Tells the device about memory that requests will point into, before the first such request. Layers
    /// pass it on; a device that needs no registration does nothing.
    ///
    /// # Errors
    /// When the device cannot take the region (no fd for a device in another process, too many regions, …).
    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError>;

    /// Takes a region back that [`Device::map_region`] was told about. No request may point into it any more.
    fn unmap_region(&self, region: &MemoryRegion);
}

/// Memory that requests point into: one mapping of this process, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// First byte in this process.
    pub addr: usize,
    /// Length in bytes.
    pub len: usize,
    /// The file that backs it, for devices in another process. The caller keeps it open while mapped.
    pub fd: Option<RawFd>,
    /// Where in that file the region starts.
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
    /// An error of `device` (its name) with a sentence that says what and why.
    pub fn new(device: impl Into<String>, message: impl Into<String>) -> Self {
        DeviceError { device: device.into(), message: message.into(), source: None }
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
