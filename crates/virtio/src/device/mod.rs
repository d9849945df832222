//! The side of virtqueues that serves requests.
//!
//! ```text
//!   guest:  avail ──► pop ──► Chain ──► (the device works) ──► push_used ──► publish ──► interrupt?
//!                      │                                          │             │
//!                      └────────── in-flight region, dirty log ───┴─────────────┘
//! ```
//!
//! A [`VirtQueue`] is owned by one core at a time and may move between cores. Used entries become visible in
//! batches, with [`VirtQueue::publish`]: one store, at most one interrupt.
//!
//! Nothing is prefetched ahead of a pop: the driver may still be writing the lines in question, and taking them
//! away from its core gained nothing in the exchange between two cores (`speed_between_cores`).
//!
//! Whatever the driver does, a queue answers with chains inside guest memory or with a [`RingError`]; it never
//! panics and never touches anything else.

mod chain;
mod common;
mod error;
mod packed;
mod split;
#[cfg(test)]
mod tests;

pub use chain::{Chain, MAX_SEGMENTS};
pub use error::RingError;

use crate::dirty_log::DirtyLog;
use crate::inflight::InflightQueue;
use crate::memory::GuestMemory;
use crate::ring::PackedPosition;
use common::Common;
use packed::PackedQueue;
use split::SplitQueue;
use std::sync::Arc;

/// Where the three areas of a ring lie, as addresses of the front-end's process ([`crate::memory`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAreas {
    /// Descriptor table (split) or descriptor ring (packed).
    pub descriptors: u64,
    /// Available ring (split) or driver event suppression (packed).
    pub driver: u64,
    /// Used ring (split) or device event suppression (packed).
    pub device: u64,
}

/// How far a ring has come: what vhost calls its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingState {
    /// A split ring; its used index lies in the ring itself.
    Split {
        /// The next entry of the available ring, modulo 2^16.
        next_avail: u16,
    },
    /// A packed ring.
    Packed {
        /// The next slot to be popped.
        avail: PackedPosition,
        /// The next slot to be used.
        used: PackedPosition,
    },
}

impl RingState {
    /// The state that SET_VRING_BASE hands over.
    pub fn from_vring_base(base: u32, is_packed: bool) -> Self {
        match is_packed {
            false => RingState::Split { next_avail: base as u16 },
            true => RingState::Packed {
                avail: PackedPosition::from_bits(base as u16),
                used: PackedPosition::from_bits((base >> 16) as u16),
            },
        }
    }

    /// The state as GET_VRING_BASE answers it.
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
    /// Guest address of the used ring when writes to it are to be logged (VHOST_VRING_F_LOG). For a packed ring
    /// only whether it is there counts: the ring's own guest addresses are used.
    pub used_addr: Option<u64>,
}

/// What a [`VirtQueue`] is made from.
#[derive(Debug)]
pub struct QueueConfig {
    /// Entries; a power of two for a split ring.
    pub size: u16,
    /// Where the ring lies.
    pub areas: RingAreas,
    /// Where it goes on, and whether it is split or packed.
    pub state: RingState,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Where requests in flight are remembered.
    pub inflight: Option<InflightQueue>,
    /// Where writes to guest memory are logged.
    pub log: Option<QueueLog>,
}

/// A virtqueue, seen from the device.
#[derive(Debug)]
pub struct VirtQueue {
    ring: Ring,
}

#[derive(Debug)]
enum Ring {
    Split(SplitQueue),
    Packed(PackedQueue),
}

/// Runs the same expression for either ring.
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
    /// When the in-flight region has been used before, the ring goes on where that says, whatever
    /// [`QueueConfig::state`] is, and the chains that were in flight are popped first, in their old order.
    ///
    /// # Errors
    /// When size or areas are impossible, or the in-flight region does not belong to such a ring.
    pub fn new(config: QueueConfig) -> Result<VirtQueue, RingError> {
        let ring = match config.state {
            RingState::Split { next_avail } => Ring::Split(SplitQueue::new(config, next_avail)?),
            RingState::Packed { avail, used } => Ring::Packed(PackedQueue::new(config, avail, used)?),
        };
        let mut queue = VirtQueue { ring };
        let _ = queue.enable_notifications(); // whoever starts a queue looks at it once
        Ok(queue)
    }

    /// Fills `chain` with the next available chain; `false` when there is none. Chains that were in flight when
    /// the device's predecessor died come first.
    ///
    /// # Errors
    /// When the driver breaks the rules. The ring is beyond help then: every later call says the same.
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

    /// Gives a chain back as used; `written` is how many bytes of its writable part the device has filled. The
    /// driver sees it after [`VirtQueue::publish`].
    ///
    /// # Panics
    /// When `chain` is not in flight or not of this queue.
    #[inline]
    pub fn push_used(&mut self, chain: &mut Chain, written: u32) {
        either!(&mut self.ring, q => q.push_used(chain, written));
    }

    /// Gives a chain back without using it: the driver goes on waiting for it, and a successor that takes the
    /// in-flight region over pops it again. For a queue that is to be dropped.
    ///
    /// # Panics
    /// As [`VirtQueue::push_used`].
    pub fn abandon(&mut self, chain: &mut Chain) {
        self.common_mut().take_back(chain);
    }

    /// Makes everything visible that was pushed since the last call. `true` when the driver wants an interrupt.
    ///
    /// On a ring that was taken over from a predecessor the first call is always `true`: that one may have died
    /// between publishing and interrupting.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(&mut self.ring, q => q.publish())
    }

    /// Whether a chain is available: a hint, one load.
    #[inline]
    pub fn has_available(&self) -> bool {
        either!(&self.ring, q => q.has_available())
    }

    /// About how many chains are available, at most `limit`: a hint for how many takers to wake.
    pub fn available_hint(&self, limit: usize) -> usize {
        either!(&self.ring, q => q.available_hint(limit))
    }

    /// Asks the driver for no notifications: the queue is polled from now on. The driver may send some anyway.
    pub fn disable_notifications(&mut self) {
        either!(&mut self.ring, q => q.disable_notifications());
    }

    /// Asks the driver for a notification when it makes a chain available. `true` when one became available
    /// before the driver could know: pop again.
    #[must_use = "work that arrived meanwhile is announced by nobody else"]
    pub fn enable_notifications(&mut self) -> bool {
        either!(&mut self.ring, q => q.enable_notifications())
    }

    /// How far the ring has come. A successor without in-flight region can go on from here once nothing is in
    /// flight and everything is published.
    pub fn state(&self) -> RingState {
        either!(&self.ring, q => q.state())
    }

    /// How many chains have been popped and not given back.
    pub fn in_flight(&self) -> u16 {
        self.common().in_flight()
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        self.common().memory()
    }

    /// The guest's memory has changed. Chains in flight keep the memory they were popped with, until the last of
    /// them has been given back; `areas` are the ring's in the new memory.
    ///
    /// # Errors
    /// When the ring does not lie in the new memory; then nothing has changed.
    pub fn set_memory(&mut self, memory: Arc<GuestMemory>, areas: RingAreas) -> Result<(), RingError> {
        either!(&mut self.ring, q => q.set_memory(memory, areas))
    }

    /// Starts or ends logging. Chains that are in flight are logged when they come back.
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
