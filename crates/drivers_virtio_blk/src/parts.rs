//! A virtqueue as its session keeps it: with or without a user.

use super::doorbell::Doorbell;
use drivers::stream::Mailbox;
use std::sync::Arc;
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
    /// The session reconnects to a lost device, so requests are kept until they end.
    pub(super) reconnects: bool,
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
    /// Events of the device's loss and return, which raise `call`.
    pub(super) mailbox: Arc<QueueMailbox>,
}

/// The mailbox of a queue.
pub(super) type QueueMailbox = Mailbox<QueueEvents>;

/// Pending events of a queue, in the order in which they count.
#[derive(Default)]
pub(super) struct QueueEvents {
    /// The device is lost and does not return.
    pub(super) is_gone: bool,
    /// The reconnect delay has passed: requests fail until the device returns.
    pub(super) is_late: bool,
    /// The device has returned after the other events.
    pub(super) is_back: bool,
    /// Empty rings that the returned device serves instead of the present ones.
    pub(super) renewed: Option<Renewed>,
}

/// Rings that replace those of a queue.
pub(super) struct Renewed {
    /// The rings.
    pub(super) queue: BlkQueue,
    /// Notifies the device.
    pub(super) doorbell: Doorbell,
}
