//! The side of a driver: the commands that a request needs.

use crate::direct::ZoneRequest;
use crate::fixed::{FixedBuffers, Regions};
use crate::ring::Answer;
use block::{IoError, IoResult, Request};
use io_uring::squeue;
use io_uring::types::Fd;
use std::fs::File;

/// The commands of one kind of device, and the open device that receives them.
pub trait Commands: Send + Sync + 'static {
    /// An entry of the submission ring.
    type Entry: squeue::EntryMarker;
    /// An entry of the completion ring.
    type Answer: Answer;
    /// One slot of a queue.
    type Operation;

    /// The open character device.
    fn file(&self) -> &File;

    /// Regions to register with each ring; `None` when memory is not registered.
    fn regions(&self) -> Option<&Regions>;

    /// Commands of one queue in the ring; more wait in the queue. Commands that find no room in
    /// the device's own queue go to io_uring's worker threads, which is slow.
    fn room(&self) -> u32;

    /// A slot without a request.
    fn idle() -> Self::Operation;

    /// Starts a request. `Ok(false)`: there is nothing to do, and the request has succeeded.
    ///
    /// # Errors
    /// When the request is malformed or not supported.
    ///
    /// # Safety
    /// As [`block::Queue::push`]: the request's memory stays valid until the operation has
    /// finished.
    unsafe fn begin(
        &self,
        operation: &mut Self::Operation,
        req: &Request<'_>,
        offset: u64,
    ) -> Result<bool, IoError>;

    /// As [`Commands::begin`], for requests that only zoned devices support.
    ///
    /// # Errors
    /// When the device has no zones, or no zone at this offset.
    ///
    /// # Safety
    /// As [`crate::direct::DirectQueue::push_zone`].
    unsafe fn begin_zone(&self, _: &mut Self::Operation, _: ZoneRequest) -> Result<bool, IoError> {
        Err(IoError::Unsupported)
    }

    /// The next command of the operation as an entry of the ring. Its memory stays in place until
    /// the completion.
    ///
    /// # Errors
    /// When no command can express it; the request has ended.
    fn entry(&self, operation: &mut Self::Operation, target: &Target<'_>) -> Result<Self::Entry, IoError>;

    /// Processes the completion of the command.
    fn complete(&self, operation: &mut Self::Operation, answer: i32) -> Next;
}

/// The ring's view of the device and of memory.
pub struct Target<'a> {
    /// The device: a descriptor, or its place in the ring's table of files.
    pub fd: Fd,
    /// Says which of both `fd` is.
    pub flags: squeue::Flags,
    /// The registered memory.
    pub(crate) buffers: Option<&'a FixedBuffers>,
    /// The kernel's page size in bytes.
    pub page: usize,
}

/// The next action after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// [`Commands::entry`] has another command.
    Issue,
    /// Issue the same command again once fewer are in flight.
    IssueLater,
    /// The request has ended.
    Finished(IoResult),
}
