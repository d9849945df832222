//! The split layout: a descriptor table, a ring of heads the driver fills, a ring of heads the
//! device fills.
//!
//! The driver keeps everything it needs later in its own memory: the device could change the shared
//! tables.

use super::chain::{Buffer, RingBroken, Used};
use crate::ring::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, SplitDescriptor, SplitRing,
    USED_F_NO_NOTIFY, barrier, need_event,
};
use std::sync::atomic::Ordering;

/// The driver's private state of one descriptor.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// The indirect table of the shared descriptor; length 0: none.
    table_addr: u64,
    table_len: u32,
    /// For the head of a chain in flight: its token.
    token: u16,
    /// For the head of a chain in flight: its number of descriptors. 0: not in flight.
    count: u16,
}

/// The driver's side of a split ring.
pub struct SplitDriver {
    ring: SplitRing,
    event_idx: bool,
    /// Index of the next chain in the available ring (free running, as all indexes here).
    avail_idx: u16,
    /// Available index published to the device.
    published: u16,
    /// Next used entry to read.
    used_idx: u16,
    /// The device's index when it was last read.
    used_seen: u16,
    entries: Box<[Entry]>,
    /// Free descriptors of plain chains; the last is taken first.
    free: Vec<u16>,
    /// The descriptor after this one in a plain chain.
    next: Box<[u16]>,
    broken: Option<RingBroken>,
}

// SAFETY: the view leads to memory that is valid while the ring lives, on any thread (contract of
// `Ring::new`).
unsafe impl Send for SplitDriver {}

impl SplitDriver {
    /// The driver side of `ring`, whose memory is zeroed.
    pub(super) fn new(ring: SplitRing, event_idx: bool) -> SplitDriver {
        let size = ring.size();
        let mut driver = SplitDriver {
            ring,
            event_idx,
            avail_idx: 0,
            published: 0,
            used_idx: 0,
            used_seen: 0,
            entries: vec![Entry::default(); usize::from(size)].into(),
            free: (0..size).rev().collect(),
            next: vec![0; usize::from(size)].into(),
            broken: None,
        };
        driver.disarm();
        driver
    }

    #[inline]
    pub(super) fn add_indirect(&mut self, token: u16, table_addr: u64, table_len: u32) {
        let entry = &mut self.entries[usize::from(token)];
        assert!(entry.count == 0, "chain {token} is in flight");
        if entry.table_addr != table_addr || entry.table_len != table_len {
            let descriptor =
                SplitDescriptor { addr: table_addr, len: table_len, flags: DESC_F_INDIRECT, next: 0 };
            self.ring.set_desc(token, descriptor);
        }
        *entry = Entry { table_addr, table_len, token, count: 1 };
        self.make_available(token);
    }

    pub(super) fn add_chain(&mut self, token: u16, chain: &[Buffer], readable: usize) -> bool {
        assert!(token < self.ring.size() && !chain.is_empty(), "chain {token} of {}", chain.len());
        if self.free.len() < chain.len() {
            return false;
        }
        let taken = self.free.len() - chain.len();
        let head = self.free[taken];
        for (i, buffer) in chain.iter().enumerate() {
            let index = self.free[taken + i];
            let next = self.free.get(taken + i + 1).copied();
            let mut flags = if i < readable { 0 } else { DESC_F_WRITE };
            if next.is_some() {
                flags |= DESC_F_NEXT;
            }
            let next = next.unwrap_or(0);
            self.next[usize::from(index)] = next;
            self.ring.set_desc(index, SplitDescriptor { addr: buffer.addr, len: buffer.len, flags, next });
        }
        self.free.truncate(taken);
        self.entries[usize::from(head)] = Entry { token, count: chain.len() as u16, ..Entry::default() };
        self.make_available(head);
        true
    }

    #[inline]
    fn make_available(&mut self, head: u16) {
        self.ring.avail_entry(self.avail_idx).store(head, Ordering::Relaxed);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.avail_idx);
        if old == new {
            return false;
        }
        self.published = new;
        barrier::write();
        self.ring.avail_idx().store(new, Ordering::Release);
        // The device must see the index before the driver checks whether the device sleeps;
        // otherwise both would wait.
        barrier::full();
        if self.event_idx {
            need_event(self.ring.avail_event().load(Ordering::Relaxed), new, old)
        } else {
            self.ring.used_flags().load(Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
        }
    }

    #[inline]
    pub(super) fn poll(&mut self) -> Result<Option<Used>, RingBroken> {
        if self.used_idx == self.used_seen && !self.look()? {
            return Ok(None);
        }
        let (id, len) = self.ring.used_entry(self.used_idx);
        let (id, len) = (id.load(Ordering::Relaxed), len.load(Ordering::Relaxed));
        let Some(entry) = self.entries.get_mut(id as usize).filter(|entry| entry.count != 0) else {
            return Err(self.break_down(RingBroken::UnknownId(id)));
        };
        let token = entry.token;
        let count = std::mem::take(&mut entry.count);
        if entry.table_len == 0 {
            self.release(id as u16, count);
        }
        self.used_idx = self.used_idx.wrapping_add(1);
        Ok(Some(Used { token, len }))
    }

    /// Reads the device's index. Returns whether a chain is new.
    #[inline]
    fn look(&mut self) -> Result<bool, RingBroken> {
        let used_idx = self.ring.used_idx().load(Ordering::Acquire);
        if used_idx == self.used_idx && self.broken.is_none() {
            return Ok(false);
        }
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        if used_idx.wrapping_sub(self.used_idx) > self.published.wrapping_sub(self.used_idx) {
            return Err(self.break_down(RingBroken::UsedIndex(used_idx)));
        }
        barrier::read();
        self.used_seen = used_idx;
        Ok(true)
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.broken.is_some() || self.ring.used_idx().load(Ordering::Acquire) != self.used_idx
    }

    #[cold]
    fn break_down(&mut self, broken: RingBroken) -> RingBroken {
        self.broken = Some(broken);
        self.used_seen = self.used_idx;
        broken
    }

    fn release(&mut self, head: u16, count: u16) {
        let mut index = head;
        for _ in 0..count {
            self.free.push(index);
            index = self.next[usize::from(index)];
        }
    }

    pub(super) fn arm(&mut self) -> bool {
        if self.event_idx {
            self.ring.used_event().store(self.used_idx, Ordering::Relaxed);
        } else {
            self.ring.avail_flags().store(0, Ordering::Relaxed);
        }
        // The event request must be visible before the last check.
        barrier::full();
        !self.has_used()
    }

    pub(super) fn disarm(&mut self) {
        if !self.event_idx {
            self.ring.avail_flags().store(AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
            return;
        }
        // An event index that was passed asks for one interrupt in 65,536 entries. Usually the
        // device has passed the last requested index by now, and the cache line need not move
        // between the processors again.
        let is_wish_open =
            self.ring.used_event().load(Ordering::Relaxed) == self.used_idx && !self.has_used();
        if is_wish_open {
            self.ring.used_event().store(self.used_idx.wrapping_sub(1), Ordering::Relaxed);
        }
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.avail_idx.wrapping_sub(self.used_idx)
    }

    pub(super) fn base(&self) -> u32 {
        self.ring.used_idx().load(Ordering::Acquire).into()
    }
}
