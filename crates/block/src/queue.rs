//! The interface of a leaf driver.

use crate::{Data, IoFuture, IoResult, Request, StatusReport};
use std::os::fd::RawFd;

/// A leaf's submission and completion rings. The reactor owns the op slots, the wakers and the
/// line of waiting requests, so a driver does not deal with futures. The C API drives the same
/// trait with `user_data` in place of a waker. One thread uses a queue at a time.
pub trait Queue {
    /// Largest number of operations in flight. Fixed while the queue lives.
    fn depth(&self) -> u32;

    /// Puts one operation in the ring. `slot` is unused and less than `depth()`; the completion
    /// carries it.
    ///
    /// The request has passed [`crate::Limits::check`]. An `Err` ends the operation at once: its
    /// slot is free again and no completion follows.
    ///
    /// # Safety
    /// The request's [`crate::Data`] obeys the contract of [`crate::Data::new`] until the
    /// completion has been reaped. The `Request` itself may be dropped after the call.
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult;

    /// Whether the device reaches the memory of a request, or no copy in the buffers of the core
    /// could help. The default is the answer of a leaf that takes any memory.
    #[inline]
    fn reaches(&mut self, _data: &Data<'_>) -> bool {
        true
    }

    /// Starts a query of block status: see [`crate::Channel::block_status`]. `slot` is as in
    /// [`Queue::push`]. The range has passed [`crate::Limits::check_range`], and is not empty. The
    /// default is the answer of a leaf that does not know where it has data.
    ///
    /// # Safety
    /// The report stays valid until the completion of a query that is [`StatusStart::InRing`] has
    /// been reaped.
    unsafe fn push_status<'a>(
        &mut self,
        slot: u32,
        report: &'a StatusReport,
        offset: u64,
        len: u64,
    ) -> StatusStart<'a> {
        let _ = (slot, offset);
        StatusStart::data(report, len)
    }

    /// Rings the doorbell once for all operations pushed since the last call.
    fn kick(&mut self);

    /// Calls `done` once for each completed operation and returns their number; never blocks.
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize;

    /// File descriptor that becomes readable at a completion after [`Queue::arm`]; `None` for a
    /// queue that can only be polled. The reactor never reads from it.
    fn event_fd(&self) -> Option<RawFd>;

    /// Requests an event at the next completion. `false` means that some may be ready now: the
    /// caller reaps again.
    fn arm(&mut self) -> bool;

    /// Cancels [`Queue::arm`]: the caller polls again, and events may cease.
    fn disarm(&mut self);
}

/// The start of a query of block status in a [`Queue`].
pub enum StatusStart<'a> {
    /// The query is in the ring, and its slot completes as that of an operation does.
    InRing,
    /// The slot is free again. The future completes when the report has the answer.
    Apart(IoFuture<'a>),
}

impl StatusStart<'_> {
    /// The answer of a device that does not know where it has data.
    pub fn data(report: &StatusReport, len: u64) -> Self {
        StatusStart::Apart(report.answer_data(len))
    }
}
