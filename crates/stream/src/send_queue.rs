//! The bytes that a connection sends.

use block::Segment;

/// Maximum segments of one system call: the kernel's limit.
pub const MAX_SEGMENTS: usize = 1024;

/// Bytes to be sent, in order.
///
/// # Safety
/// The memory of [`SendQueue::segments`] can be read until the next call of any method.
pub unsafe trait SendQueue {
    /// The next bytes, in segments. Those after the first [`MAX_SEGMENTS`] wait for a later call.
    /// Empty when nothing is to be sent.
    fn segments(&mut self) -> &[Segment];

    /// Removes the first `len` bytes: the socket has them.
    fn advance(&mut self, len: usize);
}
