//! In-flight tracking of a packed ring: `QueueRegionPacked` and `DescStatePacked`.
//!
//! ```text
//!   header  features u64 │ version u16 │ desc_num u16 │ free_head u16 │ old_free_head u16
//!           │ used_idx u16 │ old_used_idx u16 │ used_wrap u8 │ old_used_wrap u8 │ padding 7 B, rounded up to 32
//!   entry   inflight u8 │ padding u8 │ next u16 │ last u16 │ num u16 │ counter u64 │ id u16 │ flags u16 │ len u32 │ addr u64
//! ```
//!
//! The driver may overwrite a descriptor's slot as soon as another chain has been used there, so
//! the entries hold copies. Free entries form a list; a chain takes as many as it has descriptors.
//!
//! The specification stores the fields of a step one by one. Here the fields that belong together
//! share one aligned word and are stored at once, which leaves fewer partial states. Recovery as
//! specified accepts these states, and the reverse holds too.

use super::{InflightQueue, Part};
use crate::device::RingError;
use crate::ring::{PACKED_DESC_F_AVAIL, PACKED_DESC_F_USED, PackedDescriptor, PackedPosition, PackedRing};
use std::sync::atomic::Ordering;

const BYTES: usize = 32;

/// Keeps the region of a packed ring up to date.
#[derive(Debug)]
pub(crate) struct PackedTracker {
    part: Part,
    counter: u64,
    free_head: u16,
    used: PackedPosition,
    /// Entries of the chain that is being popped: the first, and the next one to fill.
    chain: (u16, u16),
    /// Number of entries of that chain, and the last of them.
    filled: (u16, u16),
}

/// A chain that a dead device left behind.
#[derive(Debug)]
pub(crate) struct RecoveredChain {
    pub entries: (u16, u16),
    pub descriptors: Vec<PackedDescriptor>,
}

/// State that a dead device left behind.
#[derive(Debug)]
pub(crate) struct RecoveredPacked {
    /// Slot of the next used descriptor.
    pub used: PackedPosition,
    /// Chains to resubmit, the oldest last.
    pub chains: Vec<RecoveredChain>,
}

impl PackedTracker {
    /// Takes the region over for `ring`, whose next used descriptor goes to `used`. Returns `None`
    /// with the tracker if the region was unused. Otherwise the position in the region is
    /// authoritative.
    pub(crate) fn attach(
        queue: InflightQueue,
        ring: &PackedRing,
        used: PackedPosition,
    ) -> Result<(PackedTracker, Option<RecoveredPacked>), RingError> {
        let part = queue.for_ring(ring.size(), true)?;
        let mut tracker =
            PackedTracker { part, counter: 0, free_head: 0, used, chain: (0, 0), filled: (0, 0) };
        if !tracker.part.is_initialised::<BYTES>()? {
            for entry in 0..tracker.part.desc_num {
                tracker.set_inflight(entry, 0);
                tracker.set_next(entry, entry + 1);
            }
            tracker.store_free_head(0, 0);
            tracker.store_used(used, used);
            tracker.part.set_initialised::<BYTES>();
            return Ok((tracker, None));
        }
        tracker.settle_last_batch(ring)?;
        tracker.clear_free_entries();
        let chains = tracker.collect(ring.size())?;
        Ok((tracker, Some(chains)))
    }

    /// Determines whether the last batch was published, and commits or discards it in the region.
    fn settle_last_batch(&mut self, ring: &PackedRing) -> Result<(), RingError> {
        let free_head = self.part.header::<BYTES, 12, u16>();
        let old_free_head = self.part.header::<BYTES, 14, u16>();
        let [used, old] = self.load_used();
        if used.slot >= ring.size() || old.slot >= ring.size() {
            return Err(RingError::InflightCorrupt { what: "used_idx is outside the ring" });
        }
        let is_published = used != old && {
            let flags = ring.flags(old.slot).load(Ordering::Acquire);
            flags & (PACKED_DESC_F_AVAIL | PACKED_DESC_F_USED) != old.avail_flags()
        };
        if is_published {
            self.free_head = free_head;
            self.used = used;
        } else {
            withdraw_flags(ring, old, used);
            self.free_head = old_free_head;
            self.used = old;
        }
        self.store_free_head(self.free_head, self.free_head);
        self.store_used(self.used, self.used);
        Ok(())
    }

    fn clear_free_entries(&self) {
        let mut entry = self.free_head;
        for _ in 0..self.part.desc_num {
            if entry >= self.part.desc_num {
                break;
            }
            self.set_inflight(entry, 0);
            entry = self.part.get::<BYTES, 2, u16>(entry);
        }
    }

    fn collect(&mut self, size: u16) -> Result<RecoveredPacked, RingError> {
        let part = &self.part;
        let mut found: Vec<(u64, u16)> = (0..part.desc_num)
            .filter(|&entry| part.get::<BYTES, 0, u8>(entry) == 1)
            .map(|entry| (part.get::<BYTES, 8, u64>(entry), entry))
            .collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        self.counter = found.first().map_or(0, |&(newest, _)| newest.wrapping_add(1));
        let mut slots = 0;
        let mut chains = Vec::with_capacity(found.len());
        for &(_, first) in &found {
            let num = part.get::<BYTES, 6, u16>(first);
            slots += usize::from(num);
            if num == 0 || slots > usize::from(size) {
                return Err(RingError::InflightCorrupt {
                    what: "more descriptors in flight than the ring has",
                });
            }
            chains.push(self.chain_at(first, num)?);
        }
        Ok(RecoveredPacked { used: self.used, chains })
    }

    fn chain_at(&self, first: u16, num: u16) -> Result<RecoveredChain, RingError> {
        let part = &self.part;
        let mut descriptors = Vec::with_capacity(usize::from(num));
        let mut last = first;
        for i in 0..num {
            if i > 0 {
                let next = part.get::<BYTES, 2, u16>(last);
                last = part.checked(next, "a chain leaves the table")?;
            }
            descriptors.push(PackedDescriptor {
                addr: part.get::<BYTES, 24, u64>(last),
                len: part.get::<BYTES, 20, u32>(last),
                id: part.get::<BYTES, 16, u16>(last),
                flags: part.get::<BYTES, 18, u16>(last),
            });
        }
        Ok(RecoveredChain { entries: (first, last), descriptors })
    }

    /// Begins a chain; its descriptors follow.
    #[inline]
    pub(crate) fn begin(&mut self) {
        self.chain = (self.free_head, self.free_head);
        self.filled = (0, self.free_head);
    }

    /// Adds one descriptor to that chain. It takes effect with [`PackedTracker::popped`].
    #[inline]
    pub(crate) fn descriptor(&mut self, desc: PackedDescriptor) -> Result<(), RingError> {
        let entry = self.part.checked(self.chain.1, "the free list leaves the table")?;
        let words = [u64::from(desc.id) | u64::from(desc.flags) << 16 | u64::from(desc.len) << 32, desc.addr];
        self.part.set::<BYTES, 16, u64>(entry, words[0]);
        self.part.set::<BYTES, 24, u64>(entry, words[1]);
        self.filled = (self.filled.0 + 1, entry);
        self.chain.1 = self.part.get::<BYTES, 2, u16>(entry);
        Ok(())
    }

    /// Records the chain as popped and returns its first and last entry. Nothing may fail after
    /// this call.
    #[inline]
    pub(crate) fn popped(&mut self) -> (u16, u16) {
        let ((first, free_head), (num, last)) = (self.chain, self.filled);
        self.part.set::<BYTES, 4, u16>(first, last);
        self.part.set::<BYTES, 6, u16>(first, num);
        self.part.set::<BYTES, 8, u64>(first, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.set_inflight(first, 1);
        self.free_head = free_head;
        self.store_free_head(free_head, free_head);
        (first, last)
    }

    /// Records that these chains (their first and last entries) are about to be published; the next
    /// batch goes to `used`.
    #[inline]
    pub(crate) fn publishing(&mut self, batch: impl Iterator<Item = (u16, u16)>, used: PackedPosition) {
        let old_free_head = self.free_head;
        for (first, last) in batch {
            self.set_next(last, self.free_head);
            self.free_head = first;
        }
        self.store_free_head(self.free_head, old_free_head);
        self.store_used(used, self.used);
        self.used = used;
    }

    /// Records that these chains were published.
    #[inline]
    pub(crate) fn published(&mut self, batch: impl Iterator<Item = (u16, u16)>) {
        batch.for_each(|(first, _)| self.set_inflight(first, 0));
        self.store_free_head(self.free_head, self.free_head);
        self.store_used(self.used, self.used);
    }

    #[inline]
    fn set_inflight(&self, entry: u16, value: u8) {
        self.part.set::<BYTES, 0, u8>(entry, value);
    }

    #[inline]
    fn set_next(&self, entry: u16, next: u16) {
        self.part.set::<BYTES, 2, u16>(entry, next);
    }

    #[inline]
    fn store_free_head(&self, free_head: u16, old_free_head: u16) {
        self.part.set_header::<BYTES, 12, u32>(u32::from(free_head) | u32::from(old_free_head) << 16);
    }

    #[inline]
    fn store_used(&self, used: PackedPosition, old: PackedPosition) {
        let slots = u64::from(used.slot) | u64::from(old.slot) << 16;
        let wraps = u64::from(used.wrap) | u64::from(old.wrap) << 8;
        self.part.set_header::<BYTES, 16, u64>(slots | wraps << 32);
    }

    fn load_used(&self) -> [PackedPosition; 2] {
        let word = self.part.header::<BYTES, 16, u64>();
        [
            PackedPosition { slot: word as u16, wrap: word >> 32 & 0xff != 0 },
            PackedPosition { slot: (word >> 16) as u16, wrap: word >> 40 & 0xff != 0 },
        ]
    }
}

/// Makes slots after `from` and before `to` look available again. A device that died while
/// publishing a batch marked some of them as used, and the driver would accept them once the slot
/// before them is used. The driver reads none of them before.
fn withdraw_flags(ring: &PackedRing, from: PackedPosition, to: PackedPosition) {
    if from == to {
        return;
    }
    let mut position = from.advanced(1, ring.size());
    while position != to && position.slot != from.slot {
        crate::crash_point::crash_point();
        ring.flags(position.slot).store(position.avail_flags(), Ordering::Release);
        position = position.advanced(1, ring.size());
    }
}
