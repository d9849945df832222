//! The device's side of a split ring: virtio 1.3, section 2.7.

use super::chain::{Chain, Translator};
use super::common::{Common, area};
use super::{QueueConfig, RingAreas, RingError, RingState};
use crate::crash_point::crash_point;
use crate::inflight::SplitTracker;
use crate::memory::GuestMemory;
use crate::ring::*;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

#[derive(Debug)]
pub(super) struct SplitQueue {
    ring: SplitRing,
    /// Next entry of the available ring to pop.
    next_avail: u16,
    /// The available index when it was last read: entries before it are available.
    seen_avail: u16,
    /// The used index that the driver sees.
    used_idx: u16,
    /// Heads pushed since then, in order.
    batch: Vec<u16>,
    /// Heads to pop before any from the ring, the next one last.
    resubmit: Vec<u16>,
    /// Whether the driver wanted no interrupt when it last got used entries: it looks at the used
    /// ring by itself.
    is_polled: bool,
    tracker: Option<SplitTracker>,
    pub common: Common,
}

// SAFETY: the ring's pointers lead into guest memory, which `common` keeps mapped, and access is
// atomic.
unsafe impl Send for SplitQueue {}

impl SplitQueue {
    pub fn new(config: QueueConfig, next_avail: u16) -> Result<Self, RingError> {
        let QueueConfig { size, areas, event_idx, indirect, memory, inflight, log, .. } = config;
        let ring = view(&memory, size, areas)?;
        let mut common = Common::new(memory, log, event_idx, indirect);
        let used_idx = ring.used_idx().load(Ordering::Acquire);
        let attached = inflight.map(|queue| SplitTracker::attach(queue, size, used_idx)).transpose()?;
        let (tracker, recovered) = attached.unzip();
        let recovered = recovered.flatten();
        common.must_interrupt = used_idx != 0 || recovered.is_some();
        let (next_avail, resubmit) = match recovered {
            Some(recovered) => (used_idx.wrapping_add(recovered.heads.len() as u16), recovered.heads),
            None => (next_avail, Vec::new()),
        };
        let batch = Vec::with_capacity(usize::from(size));
        Ok(SplitQueue {
            ring,
            next_avail,
            seen_avail: next_avail,
            used_idx,
            batch,
            resubmit,
            is_polled: false,
            tracker,
            common,
        })
    }

    /// See [`super::VirtQueue::idle_position`].
    pub fn idle_position(&self) -> Option<u16> {
        let is_idle = self.resubmit.is_empty() && self.batch.is_empty() && self.common.in_flight() == 0;
        is_idle.then_some(self.used_idx)
    }

    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if !self.resubmit.is_empty() {
            return self.pop_again(chain);
        }
        if self.next_avail == self.seen_avail {
            // A driver that polls waits for the batch, and to read the index takes its cache line
            // from it. Interrupts, on the other hand, are fewer with larger batches.
            if self.is_polled && !self.batch.is_empty() || !self.look()? {
                return Ok(false);
            }
        }
        self.common.check_room(self.ring.size(), self.batch.len() as u16)?;
        let head = self.ring.avail_entry(self.next_avail).load(Ordering::Relaxed);
        self.walk(head, chain)?;
        if let Some(tracker) = &mut self.tracker {
            tracker.popped(head)?;
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        self.common.hand_out(chain);
        Ok(true)
    }

    /// Reads the available index. Returns `false` when no chain is new.
    #[inline]
    fn look(&mut self) -> Result<bool, RingError> {
        let avail_idx = self.ring.avail_idx().load(Ordering::Acquire);
        let ahead = avail_idx.wrapping_sub(self.next_avail);
        if ahead > self.ring.size() {
            let (next_avail, size) = (self.next_avail, self.ring.size());
            return Err(RingError::AvailableJump { avail_idx, next_avail, size });
        }
        self.seen_avail = avail_idx;
        Ok(ahead > 0)
    }

    /// Pops a chain that was in flight when the predecessor died. The region marks it already.
    #[cold]
    fn pop_again(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let head = *self.resubmit.last().expect("the caller has looked");
        self.walk(head, chain)?;
        self.resubmit.pop();
        self.common.hand_out(chain);
        Ok(true)
    }

    /// Collects the buffers of the chain that starts with descriptor `head`.
    #[inline]
    fn walk(&mut self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        let count = self.ring.size();
        if head >= count {
            return Err(RingError::DescriptorOutOfRange { index: head, count });
        }
        chain.id = head;
        let translator = &mut self.common.translator;
        let mut desc = self.ring.desc(head);
        for _ in 0..count {
            if desc.flags & DESC_F_INDIRECT != 0 {
                if !self.common.indirect {
                    return Err(RingError::IndirectNotNegotiated);
                }
                return walk_table(translator, desc, chain);
            }
            translator.append(chain, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            if desc.next >= count {
                return Err(RingError::DescriptorOutOfRange { index: desc.next, count });
            }
            desc = self.ring.desc(desc.next);
        }
        Err(RingError::ChainTooLong { limit: count })
    }

    #[inline]
    pub fn push_used(&mut self, chain: &mut Chain, written: u32) {
        self.common.take_back(chain);
        let index = self.used_idx.wrapping_add(self.batch.len() as u16);
        let (id, len) = self.ring.used_entry(index);
        id.store(u32::from(chain.id), Ordering::Relaxed);
        len.store(written, Ordering::Relaxed);
        self.batch.push(chain.id);
        if self.common.log.is_some() {
            self.common.log_used(self.ring.used_entry_offset(index), 8);
        }
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.batch.is_empty() {
            return std::mem::take(&mut self.common.must_interrupt);
        }
        let old = self.used_idx;
        let new = old.wrapping_add(self.batch.len() as u16);
        if let Some(tracker) = &self.tracker {
            tracker.publishing(&self.batch);
        }
        crash_point();
        self.ring.used_idx().store(new, Ordering::Release);
        self.used_idx = new;
        if let Some(tracker) = &self.tracker {
            tracker.published(&self.batch, new);
        }
        self.batch.clear();
        if self.common.log.is_some() {
            self.common.log_used(0, 4);
        }
        let wants_interrupt = self.wants_interrupt(old, new);
        self.is_polled = !wants_interrupt;
        wants_interrupt
    }

    #[inline]
    fn wants_interrupt(&mut self, old: u16, new: u16) -> bool {
        // The driver writes its event request and then reads the used index; the device does the
        // reverse.
        fence(Ordering::SeqCst);
        let wants = match self.common.event_idx {
            true => need_event(self.ring.used_event().load(Ordering::Relaxed), new, old),
            false => self.ring.avail_flags().load(Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0,
        };
        std::mem::take(&mut self.common.must_interrupt) || wants
    }

    #[inline]
    pub fn has_available(&self) -> bool {
        self.next_avail != self.seen_avail
            || !self.resubmit.is_empty()
            || self.ring.avail_idx().load(Ordering::Relaxed) != self.next_avail
    }

    #[inline]
    pub fn available_hint(&self, limit: usize) -> usize {
        let ahead = self.ring.avail_idx().load(Ordering::Relaxed).wrapping_sub(self.next_avail);
        (self.resubmit.len() + usize::from(ahead)).min(limit)
    }

    pub fn disable_notifications(&mut self) {
        // With EVENT_IDX an outdated event index suppresses notifications.
        if !self.common.event_idx {
            self.ring.used_flags().store(USED_F_NO_NOTIFY, Ordering::Relaxed);
            self.common.log_used(0, 2);
        }
    }

    pub fn enable_notifications(&mut self) -> bool {
        // Without EVENT_IDX the flags decide; with it they must be 0 (2.7.10).
        self.ring.used_flags().store(0, Ordering::Relaxed);
        self.common.log_used(0, 2);
        if self.common.event_idx {
            self.ring.avail_event().store(self.next_avail, Ordering::Relaxed);
            self.common.log_used(SplitRing::used_bytes(self.ring.size()) - 2, 2);
        }
        // The driver writes the available index and then reads our event request; the device does
        // the reverse.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    pub fn state(&self) -> RingState {
        RingState::Split { next_avail: self.next_avail }
    }

    pub fn set_memory(&mut self, memory: Arc<GuestMemory>, areas: RingAreas) -> Result<(), RingError> {
        self.ring = view(&memory, self.ring.size(), areas)?;
        self.common.set_memory(memory);
        Ok(())
    }
}

/// Collects the buffers of an indirect table. The table may be longer than the ring: Linux makes
/// such tables, although the specification forbids them.
#[inline]
fn walk_table(
    translator: &mut Translator,
    table: SplitDescriptor,
    chain: &mut Chain,
) -> Result<(), RingError> {
    if table.flags & DESC_F_NEXT != 0 {
        return Err(RingError::IndirectWithNext);
    }
    let (base, count) = translator.table(table.addr, table.len)?;
    let mut index = 0;
    for _ in 0..count {
        // SAFETY: `index < count`, and `table` found that many descriptors mapped.
        let desc = unsafe { SplitDescriptor::load(base.add(DESC_BYTES * usize::from(index))) };
        if desc.flags & DESC_F_INDIRECT != 0 {
            return Err(RingError::NestedIndirect);
        }
        translator.append(chain, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
        if desc.flags & DESC_F_NEXT == 0 {
            return Ok(());
        }
        index = desc.next;
        if index >= count {
            return Err(RingError::DescriptorOutOfRange { index, count });
        }
    }
    Err(RingError::ChainTooLong { limit: count })
}

fn view(memory: &GuestMemory, size: u16, areas: RingAreas) -> Result<SplitRing, RingError> {
    if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
        return Err(RingError::BadSize { layout: "split", size });
    }
    let desc = area(memory, "descriptor table", areas.descriptors, SplitRing::desc_bytes(size), 16)?;
    let avail = area(memory, "available ring", areas.driver, SplitRing::avail_bytes(size), 2)?;
    let used = area(memory, "used ring", areas.device, SplitRing::used_bytes(size), 4)?;
    // SAFETY: the areas are mapped as long as `memory` is, which the queue keeps; `area` checked
    // alignment.
    Ok(unsafe { SplitRing::new(size, desc, avail, used) })
}
