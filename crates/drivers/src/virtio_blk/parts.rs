//! A virtqueue as its session keeps it: with or without a user.

use super::transport::Doorbell;
use virtio::driver::BlkQueue;
use vmm_sys_util::eventfd::EventFd;

/// Properties of the device that a queue needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueTraits {
    /// The device supports flush.
    pub(super) has_flush: bool,
    /// Writes may remain in a cache.
    pub(super) is_write_back: bool,
    /// The device supports discard.
    pub(super) has_discard: bool,
    /// The device supports write zeroes.
    pub(super) has_write_zeroes: bool,
    /// Longest segment.
    pub(super) size_max: u32,
    /// Logical block size.
    pub(super) block_size: u32,
}

/// The parts of a running virtqueue, with or without a user.
pub(super) struct Parts {
    /// The rings.
    pub(super) queue: BlkQueue,
    /// Index of the virtqueue.
    pub(super) index: u16,
    /// Notifies the device.
    pub(super) doorbell: Doorbell,
    /// Wakes the task that waits for completions.
    pub(super) call: EventFd,
    /// Whether the device writes to `call`.
    pub(super) has_event: bool,
}
