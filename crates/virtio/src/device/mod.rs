//! The device side of virtqueues, which serves requests.
//!
//! ```text
//!   guest:  avail ──► pop ──► Chain ──► (the device works) ──► push_used ──► publish ──► interrupt?
//!                      │                                          │             │
//!                      └────────── in-flight region, dirty log ───┴─────────────┘
//! ```
//!
//! A [`VirtQueue`] is owned by one core at a time and may move between cores. Used entries become
//! visible in batches, with [`VirtQueue::publish`]: one store, at most one interrupt.
//!
//! Nothing is prefetched ahead of a pop. The driver may still be writing those cache lines, and
//! taking them from its core gained nothing in the exchange between two cores
//! (`speed_between_cores`).
//!
//! Whatever the driver does, a queue returns chains inside guest memory or a [`RingError`]. It
//! never panics and never touches other memory.

mod chain;
mod common;
mod error;
mod packed;
mod split;
#[cfg(test)]
mod tests;

pub use crate::ring::MAX_SEGMENTS;
pub use chain::Chain;
pub use error::RingError;

use crate::dirty_log::DirtyLog;
use crate::inflight::InflightQueue;
use crate::memory::GuestMemory;
use crate::ring::PackedPosition;
use common::Common;
use packed::PackedQueue;
use split::SplitQueue;
use std::sync::Arc;

/// Addresses of the three areas of a ring in the front-end's process ([`crate::memory`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAreas {
    /// Descriptor table (split) or descriptor ring (packed).
    pub descriptors: u64,
    /// Available ring (split) or driver event suppression (packed).
    pub driver: u64,
    /// Used ring (split) or device event suppression (packed).
    pub device: u64,
}

/// Progress of a ring, which vhost calls its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingState {
    /// A split ring; its used index lies in the ring itself.
    Split {
        /// The next entry of the available ring, modulo 2^16.
        next_avail: u16,
    },
    /// A packed ring.
    Packed {
        /// Next slot to pop.
        avail: PackedPosition,
        /// Next slot to use.
        used: PackedPosition,
    },
}

impl RingState {
    /// Decodes the state of SET_VRING_BASE.
    pub fn from_vring_base(base: u32, is_packed: bool) -> Self {
        match is_packed {
            false => RingState::Split { next_avail: base as u16 },
            true => RingState::Packed {
                avail: PackedPosition::from_bits(base as u16),
                used: PackedPosition::from_bits((base >> 16) as u16),
            },
        }
    }

    /// Encodes the state for GET_VRING_BASE.
    pub fn to_vring_base(self) -> u32 {
        match self {
            RingState::Split { next_avail } => u32::from(next_avail),
            RingState::Packed { avail, used } => u32::from(avail.to_bits()) | u32::from(used.to_bits()) << 16,
        }
    }
}

/// The dirty log of a queue.
#[derive(Clone, Debug)]
pub struct QueueLog {
    /// The bitmap of all queues.
    pub log: Arc<DirtyLog>,
    /// Guest address of the used ring when writes to it are logged (VHOST_VRING_F_LOG). For a
    /// packed ring only its presence matters: the ring's own guest addresses are used.
    pub used_addr: Option<u64>,
}

/// Configuration of a [`VirtQueue`].
#[derive(Debug)]
pub struct QueueConfig {
    /// Entries; a power of two for a split ring.
    pub size: u16,
    /// Addresses of the ring.
    pub areas: RingAreas,
    /// Initial position, and the layout of the ring.
    pub state: RingState,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Region that tracks requests in flight.
    pub inflight: Option<InflightQueue>,
    /// Log of writes to guest memory.
    pub log: Option<QueueLog>,
}

/// The device side of a virtqueue.
#[derive(Debug)]
pub struct VirtQueue {
    ring: Ring,
}

#[derive(Debug)]
enum Ring {
    Split(SplitQueue),
    Packed(PackedQueue),
}

/// Evaluates the same expression for either layout.
macro_rules! either {
    ($self:expr, $queue:ident => $call:expr) => {
        match $self {
            Ring::Split($queue) => $call,
            Ring::Packed($queue) => $call,
        }
    };
}

impl VirtQueue {
    /// Takes a ring over. Notifications are enabled.
    ///
    /// If the in-flight region was used before, the ring continues at the position stored there,
    /// whatever [`QueueConfig::state`] is. The chains that were in flight are popped first, in
    /// their old order.
    ///
    /// # Errors
    /// When the size or an area is invalid, or the in-flight region does not match the ring.
    pub fn new(config: QueueConfig) -> Result<VirtQueue, RingError> {
        let ring = match config.state {
            RingState::Split { next_avail } => Ring::Split(SplitQueue::new(config, next_avail)?),
            RingState::Packed { avail, used } => Ring::Packed(PackedQueue::new(config, avail, used)?),
        };
        let mut queue = VirtQueue { ring };
        let _ = queue.enable_notifications(); // the caller polls a new queue once
        Ok(queue)
    }

    /// Fills `chain` with the next available chain; `false` when none is available, or the driver
    /// should see used chains first: after [`VirtQueue::publish`] there may be more. Chains that
    /// were in flight when the device's predecessor died come first.
    ///
    /// # Errors
    /// When the driver violates the specification. The ring is unusable then: every later call
    /// returns the same error.
    ///
    /// # Panics
    /// When `chain` is in flight.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        assert!(!chain.is_in_flight(), "chain {} is popped while it is in flight", chain.id);
        chain.clear();
        let result = either!(&mut self.ring, q => q.pop(chain));
        if result.is_err() {
            chain.clear();
        }
        result
    }

    /// Returns a chain as used; `written` is the number of bytes of its writable part that the
    /// device filled. The driver sees it after [`VirtQueue::publish`].
    ///
    /// # Panics
    /// When `chain` is not in flight, or belongs to another queue.
    #[inline]
    pub fn push_used(&mut self, chain: &mut Chain, written: u32) {
        either!(&mut self.ring, q => q.push_used(chain, written));
    }

    /// Returns a chain without using it, for a queue that is about to be dropped. The driver keeps
    /// waiting for it, and a successor that takes over the in-flight region pops it again.
    ///
    /// # Panics
    /// As [`VirtQueue::push_used`].
    pub fn abandon(&mut self, chain: &mut Chain) {
        self.common_mut().take_back(chain);
    }

    /// Makes all chains visible that were pushed since the last call. Returns `true` when the
    /// driver wants an interrupt.
    ///
    /// On a ring taken over from a predecessor the first call always returns `true`: the
    /// predecessor may have died between publishing and interrupting.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(&mut self.ring, q => q.publish())
    }

    /// Whether a chain is available: a hint, one load.
    #[inline]
    pub fn has_available(&self) -> bool {
        either!(&self.ring, q => q.has_available())
    }

    /// Estimated number of available chains, at most `limit`: a hint for how many tasks to wake.
    pub fn available_hint(&self, limit: usize) -> usize {
        either!(&self.ring, q => q.available_hint(limit))
    }

    /// Asks the driver to send no notifications, because the queue is polled. The driver may send
    /// some anyway.
    pub fn disable_notifications(&mut self) {
        either!(&mut self.ring, q => q.disable_notifications());
    }

    /// Asks the driver for a notification when it makes a chain available. Returns `true` when one
    /// became available before the driver could see the request: pop again.
    #[must_use = "work that arrived meanwhile is announced by no other call"]
    pub fn enable_notifications(&mut self) -> bool {
        either!(&mut self.ring, q => q.enable_notifications())
    }

    /// Progress of the ring. A successor without in-flight region can continue here once nothing is
    /// in flight and everything is published.
    pub fn state(&self) -> RingState {
        either!(&self.ring, q => q.state())
    }

    /// The index of a split ring's used area, if every chain that was popped is published there:
    /// another server can continue from this position. `None` for a packed ring, and while chains
    /// of a predecessor or of this queue are in flight.
    pub fn idle_position(&self) -> Option<u16> {
        match &self.ring {
            Ring::Split(queue) => queue.idle_position(),
            Ring::Packed(_) => None,
        }
    }

    /// Number of chains popped and not returned.
    pub fn in_flight(&self) -> u16 {
        self.common().in_flight()
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        self.common().memory()
    }

    /// Replaces the guest's memory. Chains in flight keep the memory they were popped with until
    /// the last of them is returned; `areas` are the ring's in the new memory.
    ///
    /// # Errors
    /// When the ring does not lie in the new memory; then nothing changes.
    pub fn set_memory(&mut self, memory: Arc<GuestMemory>, areas: RingAreas) -> Result<(), RingError> {
        either!(&mut self.ring, q => q.set_memory(memory, areas))
    }

    /// Starts or stops logging. Chains in flight are logged when they are returned.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        self.common_mut().log = log;
    }

    fn common(&self) -> &Common {
        either!(&self.ring, q => &q.common)
    }

    fn common_mut(&mut self) -> &mut Common {
        either!(&mut self.ring, q => &mut q.common)
    }
}
