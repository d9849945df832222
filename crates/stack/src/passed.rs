//! Devices of another process, each at the other end of a connection that this process was given.
//!
//! The other process serves vhost-user-blk. It reaches memory of this process only where
//! [`share_buffers`] or [`block::Device::map_region`] say so.

use block::{Device, DeviceError, MemoryRegion};
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::{Choice, Frontend, Options, Session, VirtioBlk};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Entries of each virtqueue.
const QUEUE_SIZE: u16 = 128;
/// How long the other process may take to answer a control message.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The memory of [`share_buffers`].
static BUFFERS: OnceLock<MemoryRegion> = OnceLock::new();

/// A device of another process.
pub struct PassedDevice {
    /// The device.
    pub device: Arc<dyn Device>,
    session: Arc<Session>,
}

impl PassedDevice {
    /// The device called `name` over a connection to a process that serves it with at least
    /// `queues` virtqueues; the device reaches `buffers`.
    ///
    /// # Errors
    /// When the other process does not answer, or serves something else.
    pub fn open(
        name: &str,
        connection: UnixStream,
        queues: u16,
        buffers: &MemoryRegion,
    ) -> Result<PassedDevice, DeviceError> {
        let failed = |error: io::Error| DeviceError::new(name, "cannot use the connection").because(error);
        let frontend = Frontend::new(connection, TIMEOUT).map_err(failed)?;
        // A connection that has ended is not made again: nothing has to be kept for that.
        let options = Options { inflight: Choice::Off, ..Options::new(name) };
        let session = Session::negotiate(name, frontend, &options)?;
        session.start(queues, QUEUE_SIZE)?;
        let device = VirtioBlk::over(session.clone());
        device.map_region(buffers)?;
        Ok(PassedDevice { device: Arc::new(device), session })
    }

    /// Whether the other process has ended the connection. Every request fails from then on.
    pub fn is_gone(&self) -> bool {
        self.session.is_gone()
    }
}

/// Has the buffers of all cores lie in memory that other processes can be given: `bytes` at most,
/// of which pages exist as long as buffers use them. Before the first core starts, and once a
/// process.
///
/// # Errors
/// When the system refuses the memory, or there is such memory already.
pub fn share_buffers(bytes: usize) -> io::Result<MemoryRegion> {
    let memory = SharedMemory::of_huge_pages(bytes)?;
    let buffers = memory.hold_buffers();
    let buffers = buffers.ok_or_else(|| io::Error::other("the buffers lie in shared memory already"))?;
    Ok(*BUFFERS.get_or_init(|| buffers))
}

/// The memory with the buffers of all cores, if [`share_buffers`] has made it. A
/// [`DevicePlan`](crate::DevicePlan) that opens a device on a vhost-user server registers it.
pub fn shared_buffers() -> Option<&'static MemoryRegion> {
    BUFFERS.get()
}
