//! What a leaf driver writes.

use crate::{IoResult, Request};
use std::os::fd::RawFd;

/// A leaf's submission and completion rings. The reactor owns the op slots, the wakers and the waiting line,
/// so a driver knows nothing about futures; the C API drives the same trait with `user_data` in place of a
/// waker. One thread uses a queue at a time.
pub trait Queue {
    /// How many operations can be in flight. Fixed while the queue lives.
    fn depth(&self) -> u32;

    /// Puts one operation in the ring. `slot < depth()`, unused at the moment, comes back in its completion.
    ///
    /// The request has passed [`crate::Limits::check`]. An `Err` ends the operation at once: its slot is free
    /// again and no completion follows.
    ///
    /// # Safety
    /// The request's [`crate::Data`] obeys the contract of [`crate::Data::new`] until the completion has been
    /// reaped. The `Request` itself may go away when this returns.
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult;

    /// Rings the doorbell once for everything pushed since the last call.
    fn kick(&mut self);

    /// Hands over finished operations, each once; never blocks. Returns how many there were.
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize;

    /// What becomes readable at a completion once [`Queue::arm`] was called; `None` for a queue that can only
    /// be polled. The reactor never reads from it.
    fn event_fd(&self) -> Option<RawFd>;

    /// Asks for an event at the next completion. `false` means that some may be ready now: reap again.
    fn arm(&mut self) -> bool;

    /// Takes the wish of [`Queue::arm`] back: the queue is polled again, events may cease.
    fn disarm(&mut self);
}
