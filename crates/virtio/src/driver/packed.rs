//! The packed layout: one ring of descriptors that both sides write, and two event suppression
//! words.
//!
//! The device owns a descriptor once its flags carry the driver's wrap counter, and returns it by
//! writing the flags again. The flags of the first descriptor of a batch are written last, which
//! publishes the batch.

use super::chain::{Buffer, RingBroken, Used};
use crate::ring::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE,
    EventSuppression, PACKED_DESC_F_AVAIL, PACKED_DESC_F_USED, PackedPosition, PackedRing, barrier,
};
use std::sync::atomic::Ordering;

/// The driver's side of a packed ring.
pub struct PackedDriver {
    ring: PackedRing,
    event_idx: bool,
    /// Slot of the next descriptor.
    avail: PackedPosition,
    /// Slot of the next used entry.
    used: PackedPosition,
    /// First descriptor of the unpublished batch: its slot and its flags.
    batch: Option<(u16, u16)>,
    /// Slot up to which the device was notified.
    published: u16,
    free: u16,
    chains: u16,
    /// Number of descriptors of the chain with this token; 0: not in flight.
    counts: Box<[u16]>,
    broken: Option<RingBroken>,
}

// SAFETY: the view leads to memory that is valid while the ring lives, on any thread (contract of
// `Ring::new`).
unsafe impl Send for PackedDriver {}

impl PackedDriver {
    /// The driver side of `ring`, whose memory is zeroed.
    pub(super) fn new(ring: PackedRing, event_idx: bool) -> PackedDriver {
        let size = ring.size();
        let mut driver = PackedDriver {
            ring,
            event_idx,
            avail: PackedPosition::START,
            used: PackedPosition::START,
            batch: None,
            published: 0,
            free: size,
            chains: 0,
            counts: vec![0; usize::from(size)].into(),
            broken: None,
        };
        driver.disarm();
        driver
    }

    #[inline]
    pub(super) fn add_indirect(&mut self, token: u16, table_addr: u64, table_len: u32) {
        let count = &mut self.counts[usize::from(token)];
        assert!(*count == 0, "chain {token} is in flight");
        // Chains do not outnumber tokens, nor tokens descriptors.
        assert!(self.free > 0, "ring is full");
        *count = 1;
        self.write(token, Buffer { addr: table_addr, len: table_len }, DESC_F_INDIRECT);
        self.free -= 1;
        self.chains += 1;
    }

    pub(super) fn add_chain(&mut self, token: u16, chain: &[Buffer], readable: usize) -> bool {
        assert!(self.counts[usize::from(token)] == 0, "chain {token} is in flight");
        assert!(!chain.is_empty(), "chain {token} is empty");
        if usize::from(self.free) < chain.len() {
            return false;
        }
        for (i, buffer) in chain.iter().enumerate() {
            let mut flags = if i < readable { 0 } else { DESC_F_WRITE };
            if i + 1 < chain.len() {
                flags |= DESC_F_NEXT;
            }
            self.write(token, *buffer, flags);
        }
        self.counts[usize::from(token)] = chain.len() as u16;
        self.free -= chain.len() as u16;
        self.chains += 1;
        true
    }

    #[inline]
    fn write(&mut self, id: u16, buffer: Buffer, flags: u16) {
        let slot = self.avail.slot;
        let flags = flags | self.avail.avail_flags();
        self.ring.set_desc(slot, buffer.addr, buffer.len, id);
        match self.batch {
            None => self.batch = Some((slot, flags)),
            Some(_) => self.ring.flags(slot).store(flags, Ordering::Release),
        }
        self.avail = self.avail.advanced(1, self.ring.size());
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let Some((slot, flags)) = self.batch.take() else { return false };
        barrier::write();
        self.ring.flags(slot).store(flags, Ordering::Release);
        let old = std::mem::replace(&mut self.published, self.avail.slot);
        // The device must see the descriptor before the driver checks whether the device sleeps;
        // otherwise both would wait.
        barrier::full();
        let wish = EventSuppression::from_word(self.ring.device_event().load(Ordering::Relaxed));
        wish.wants_event(self.ring.size(), old, self.avail.slot, self.avail.wrap)
    }

    #[inline]
    pub(super) fn poll(&mut self) -> Result<Option<Used>, RingBroken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        if !self.is_used() {
            return Ok(None);
        }
        barrier::read();
        let descriptor = self.ring.desc(self.used.slot);
        let Some(count) = self.counts.get_mut(usize::from(descriptor.id)).filter(|count| **count != 0) else {
            let broken = RingBroken::UnknownId(descriptor.id.into());
            self.broken = Some(broken);
            return Err(broken);
        };
        let count = std::mem::take(count);
        self.used = self.used.advanced(count, self.ring.size());
        self.free += count;
        self.chains -= 1;
        Ok(Some(Used { token: descriptor.id, len: descriptor.len }))
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.broken.is_some() || self.is_used()
    }

    /// Whether the device has written the next used entry.
    #[inline]
    fn is_used(&self) -> bool {
        let flags = self.ring.flags(self.used.slot).load(Ordering::Acquire);
        flags & (PACKED_DESC_F_AVAIL | PACKED_DESC_F_USED) == self.used.used_flags()
    }

    pub(super) fn arm(&mut self) -> bool {
        let flags = if self.event_idx { EVENT_F_DESC } else { EVENT_F_ENABLE };
        let wish = EventSuppression { slot_and_wrap: self.used.to_bits(), flags };
        self.ring.driver_event().store(wish.to_word(), Ordering::Relaxed);
        // The event request must be visible before the last check.
        barrier::full();
        !self.has_used()
    }

    pub(super) fn disarm(&mut self) {
        let wish = EventSuppression { slot_and_wrap: 0, flags: EVENT_F_DISABLE };
        self.ring.driver_event().store(wish.to_word(), Ordering::Relaxed);
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.chains
    }

    pub(super) fn base(&self) -> u32 {
        let used = u32::from(self.used.to_bits());
        used | used << 16
    }
}
