//! The device's side of a packed ring: virtio 1.3, section 2.8.

use super::chain::{Chain, Translator};
use super::common::{Common, area};
use super::{QueueConfig, RingAreas, RingError, RingState};
use crate::crash_point::crash_point;
use crate::inflight::{PackedTracker, RecoveredChain, RecoveredPacked};
use crate::memory::GuestMemory;
use crate::ring::*;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

#[derive(Debug)]
pub(super) struct PackedQueue {
    ring: PackedRing,
    /// Next slot to pop.
    avail: PackedPosition,
    /// Next slot that the driver expects to be used.
    used: PackedPosition,
    /// Slot of the next used descriptor: `used` plus the slots of the batch.
    next_used: PackedPosition,
    /// Chains pushed since the last publish, in order.
    batch: Vec<Used>,
    /// Chains to pop before any from the ring, the next one last.
    resubmit: Vec<RecoveredChain>,
    tracker: Option<PackedTracker>,
    pub common: Common,
}

#[derive(Clone, Copy, Debug)]
struct Used {
    at: PackedPosition,
    /// First and last entry in the in-flight region.
    entries: (u16, u16),
    has_written: bool,
}

impl Used {
    /// WRITE in a used descriptor marks its length as valid.
    #[inline]
    fn flags(&self) -> u16 {
        self.at.used_flags() | if self.has_written { DESC_F_WRITE } else { 0 }
    }
}

// SAFETY: the ring's pointers lead into guest memory, which `common` keeps mapped, and access is
// atomic.
unsafe impl Send for PackedQueue {}

impl PackedQueue {
    pub fn new(config: QueueConfig, avail: PackedPosition, used: PackedPosition) -> Result<Self, RingError> {
        let QueueConfig { size, areas, event_idx, indirect, memory, inflight, log, .. } = config;
        let ring = view(&memory, size, areas)?;
        if let Some(bad) = [avail, used].iter().find(|position| position.slot >= size) {
            return Err(RingError::BadPosition { position: bad.slot, size });
        }
        let mut common = Common::new(memory, log, event_idx, indirect);
        let attached = inflight.map(|queue| PackedTracker::attach(queue, &ring, used)).transpose()?;
        let (tracker, recovered) = attached.unzip();
        let recovered = recovered.flatten();
        common.must_interrupt = used != PackedPosition::START || recovered.is_some();
        let (avail, used, resubmit) = match recovered {
            Some(RecoveredPacked { used, chains }) => {
                let slots = chains.iter().map(|chain| chain.descriptors.len() as u16).sum();
                (used.advanced(slots, size), used, chains)
            }
            None => (avail, used, Vec::new()),
        };
        if avail.slots_since(used, size).is_none() {
            return Err(RingError::BadPosition { position: avail.slot, size });
        }
        let batch = Vec::with_capacity(usize::from(size));
        Ok(PackedQueue { ring, avail, used, next_used: used, batch, resubmit, tracker, common })
    }

    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if !self.resubmit.is_empty() {
            return self.pop_again(chain);
        }
        // Acquire: the driver writes the flags of a chain's first slot last.
        let flags = self.ring.flags(self.avail.slot).load(Ordering::Acquire);
        if !is_available(flags, self.avail) {
            return Ok(false);
        }
        let size = self.ring.size();
        let taken = self.avail.slots_since(self.used, size).unwrap_or(size);
        if taken == size {
            return Err(RingError::TooManyInFlight { size });
        }
        self.walk(size - taken, chain)?;
        chain.entries = self.tracker.as_mut().map_or((0, 0), PackedTracker::popped);
        self.avail = self.avail.advanced(chain.slots, size);
        self.common.hand_out(chain);
        Ok(true)
    }

    /// Collects the buffers of the chain that starts at the next slot and has at most `limit`
    /// descriptors.
    #[inline]
    fn walk(&mut self, limit: u16, chain: &mut Chain) -> Result<(), RingError> {
        if let Some(tracker) = &mut self.tracker {
            tracker.begin();
        }
        let mut position = self.avail;
        for slots in 1..=limit {
            let desc = self.ring.desc(position.slot);
            if let Some(tracker) = &mut self.tracker {
                tracker.descriptor(desc)?;
            }
            if append(&mut self.common, chain, desc)? == IsLast::Yes {
                return finish(chain, desc.id, slots, self.ring.size());
            }
            position = position.advanced(1, self.ring.size());
        }
        Err(RingError::ChainTooLong { limit })
    }

    /// Pops a chain that was in flight when the predecessor died. Its slots may hold other
    /// descriptors by now.
    #[cold]
    fn pop_again(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let recovered = self.resubmit.last().expect("the caller has looked");
        let slots = recovered.descriptors.len();
        for (i, &desc) in recovered.descriptors.iter().enumerate() {
            let is_last = append(&mut self.common, chain, desc)? == IsLast::Yes;
            if is_last != (i + 1 == slots) {
                return Err(RingError::InflightCorrupt { what: "a chain's length" });
            }
            if is_last {
                finish(chain, desc.id, slots as u16, self.ring.size())?;
            }
        }
        chain.entries = recovered.entries;
        self.resubmit.pop();
        self.common.hand_out(chain);
        Ok(true)
    }

    #[inline]
    pub fn push_used(&mut self, chain: &mut Chain, written: u32) {
        self.common.take_back(chain);
        // The slot was popped before, and its former content is no longer needed.
        self.ring.set_used(self.next_used.slot, written, chain.id);
        self.batch.push(Used { at: self.next_used, entries: chain.entries, has_written: written > 0 });
        self.next_used = self.next_used.advanced(chain.slots, self.ring.size());
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some((first, rest)) = self.batch.split_first() else {
            return std::mem::take(&mut self.common.must_interrupt);
        };
        if let Some(tracker) = &mut self.tracker {
            tracker.publishing(self.batch.iter().map(|used| used.entries), self.next_used);
        }
        // The driver reads the slots in order: it sees none of the batch before the first slot.
        // Every store is a release, so that the in-flight region is updated before a crash in
        // between.
        for used in rest {
            crash_point();
            self.ring.flags(used.at.slot).store(used.flags(), Ordering::Release);
        }
        crash_point();
        self.ring.flags(first.at.slot).store(first.flags(), Ordering::Release);
        if let Some(tracker) = &mut self.tracker {
            tracker.published(self.batch.iter().map(|used| used.entries));
        }
        if self.common.log.is_some() {
            let slots = self.batch.iter().map(|used| self.ring.desc_ptr(used.at.slot));
            slots.for_each(|at| self.common.log_ring(at, DESC_BYTES));
        }
        self.batch.clear();
        let old = std::mem::replace(&mut self.used, self.next_used);
        self.wants_interrupt(old)
    }

    #[inline]
    fn wants_interrupt(&mut self, old: PackedPosition) -> bool {
        // The driver writes its event request and then reads the next slot; the device does the
        // reverse.
        fence(Ordering::SeqCst);
        let wish = EventSuppression::from_word(self.ring.driver_event().load(Ordering::Relaxed));
        let wants = match wish.flags {
            EVENT_F_DESC if !self.common.event_idx => true, // invalid: interrupt to be safe
            _ => wish.wants_event(self.ring.size(), old.slot, self.used.slot, self.used.wrap),
        };
        std::mem::take(&mut self.common.must_interrupt) || wants
    }

    #[inline]
    pub fn has_available(&self) -> bool {
        !self.resubmit.is_empty()
            || is_available(self.ring.flags(self.avail.slot).load(Ordering::Relaxed), self.avail)
    }

    #[inline]
    pub fn available_hint(&self, limit: usize) -> usize {
        let (mut count, mut at) = (self.resubmit.len(), self.avail);
        while count < limit {
            let flags = self.ring.flags(at.slot).load(Ordering::Relaxed);
            if !is_available(flags, at) {
                break;
            }
            count += usize::from(flags & DESC_F_NEXT == 0);
            at = at.advanced(1, self.ring.size());
            if at.slot == self.avail.slot {
                break;
            }
        }
        count.min(limit)
    }

    pub fn disable_notifications(&mut self) {
        self.wish(EventSuppression { slot_and_wrap: 0, flags: EVENT_F_DISABLE });
    }

    pub fn enable_notifications(&mut self) -> bool {
        self.wish(match self.common.event_idx {
            true => EventSuppression { slot_and_wrap: self.avail.to_bits(), flags: EVENT_F_DESC },
            false => EventSuppression { slot_and_wrap: 0, flags: EVENT_F_ENABLE },
        });
        // The driver writes a slot's flags and then reads our event request; the device does the
        // reverse.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    fn wish(&self, wish: EventSuppression) {
        self.ring.device_event().store(wish.to_word(), Ordering::Relaxed);
        self.common.log_ring(self.ring.device_event().as_ptr().cast(), PackedRing::EVENT_BYTES);
    }

    pub fn state(&self) -> RingState {
        RingState::Packed { avail: self.avail, used: self.used }
    }

    pub fn set_memory(&mut self, memory: Arc<GuestMemory>, areas: RingAreas) -> Result<(), RingError> {
        self.ring = view(&memory, self.ring.size(), areas)?;
        self.common.set_memory(memory);
        Ok(())
    }
}

#[inline]
fn is_available(flags: u16, at: PackedPosition) -> bool {
    flags & (PACKED_DESC_F_AVAIL | PACKED_DESC_F_USED) == at.avail_flags()
}

#[derive(PartialEq, Eq)]
enum IsLast {
    Yes,
    No,
}

/// Appends the buffer or the indirect table of one descriptor.
#[inline]
fn append(common: &mut Common, chain: &mut Chain, desc: PackedDescriptor) -> Result<IsLast, RingError> {
    if desc.flags & DESC_F_INDIRECT != 0 {
        if !common.indirect {
            return Err(RingError::IndirectNotNegotiated);
        }
        walk_table(&mut common.translator, desc, chain)?;
        return Ok(IsLast::Yes);
    }
    common.translator.append(chain, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
    Ok(if desc.flags & DESC_F_NEXT != 0 { IsLast::No } else { IsLast::Yes })
}

/// Appends all descriptors of an indirect table. Packed tables ignore NEXT (2.8.7).
#[inline]
fn walk_table(
    translator: &mut Translator,
    table: PackedDescriptor,
    chain: &mut Chain,
) -> Result<(), RingError> {
    if table.flags & DESC_F_NEXT != 0 {
        return Err(RingError::IndirectWithNext);
    }
    let (base, count) = translator.table(table.addr, table.len)?;
    for index in 0..usize::from(count) {
        // SAFETY: `table` found `count` descriptors mapped.
        let desc = unsafe { PackedDescriptor::load(base.add(DESC_BYTES * index)) };
        if desc.flags & DESC_F_INDIRECT != 0 {
            return Err(RingError::NestedIndirect);
        }
        translator.append(chain, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
    }
    Ok(())
}

#[inline]
fn finish(chain: &mut Chain, id: u16, slots: u16, size: u16) -> Result<(), RingError> {
    if id >= size {
        return Err(RingError::IdOutOfRange { id, size });
    }
    (chain.id, chain.slots) = (id, slots);
    Ok(())
}

fn view(memory: &GuestMemory, size: u16, areas: RingAreas) -> Result<PackedRing, RingError> {
    if size == 0 || size > MAX_QUEUE_SIZE {
        return Err(RingError::BadSize { layout: "packed", size });
    }
    let desc = area(memory, "descriptor ring", areas.descriptors, PackedRing::desc_bytes(size), 16)?;
    let driver = area(memory, "driver event suppression", areas.driver, PackedRing::EVENT_BYTES, 4)?;
    let device = area(memory, "device event suppression", areas.device, PackedRing::EVENT_BYTES, 4)?;
    // SAFETY: the areas are mapped as long as `memory` is, which the queue keeps; `area` checked
    // alignment.
    Ok(unsafe { PackedRing::new(size, desc, driver, device) })
}
