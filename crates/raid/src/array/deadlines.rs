//! Deadlines of reads, and the reads that a core waits for (`hedge.rs`).

use super::latency::Counts;
use reactor::BufferPool;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of reads that a core may wait for with memory of their own, late ones included.
const MEMORY_BYTES: usize = 32 << 20;
/// The adaptive deadline until something is known.
const FIRST_SOFT_NS: u64 = 50_000_000;
/// The least and the longest adaptive deadline.
const SOFT_NS: std::ops::RangeInclusive<u64> = 1_000_000..=1_000_000_000;
/// How many times the median the adaptive deadline is.
const MEDIANS: u64 = 16;
/// Reads from which the median is taken.
pub(super) const READS: u32 = 256;

/// How long a member is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// When a read is also computed from the other members.
    pub soft: Soft,
    /// When a member that still owes the answer to a read has failed, in nanoseconds. Only where
    /// there is a soft deadline.
    pub hard_ns: u64,
}

/// When a read is raced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soft {
    /// Never.
    Never,
    /// When it takes many times what reads usually take.
    Adaptive,
    /// After so many nanoseconds.
    After(u64),
}

impl Deadlines {
    /// The hard deadline unless another is asked for: that of SCSI disks.
    pub const HARD_NS: u64 = 30_000_000_000;
}

impl Default for Deadlines {
    fn default() -> Deadlines {
        Deadlines { soft: Soft::Never, hard_ns: Deadlines::HARD_NS }
    }
}

/// The [`Deadlines`] that all cores share.
pub(crate) struct SharedDeadlines {
    /// 0 for never, `u64::MAX` for adaptive.
    soft_ns: AtomicU64,
    hard_ns: AtomicU64,
}

impl Default for SharedDeadlines {
    fn default() -> SharedDeadlines {
        SharedDeadlines { soft_ns: AtomicU64::new(0), hard_ns: AtomicU64::new(Deadlines::HARD_NS) }
    }
}

impl SharedDeadlines {
    pub fn set(&self, deadlines: Deadlines) {
        let soft_ns = match deadlines.soft {
            Soft::Never => 0,
            Soft::Adaptive => u64::MAX,
            Soft::After(ns) => ns.clamp(1, u64::MAX - 1),
        };
        self.soft_ns.store(soft_ns, Ordering::Relaxed);
        self.hard_ns.store(deadlines.hard_ns, Ordering::Relaxed);
    }

    /// Nanoseconds after which a member that still owes the answer to a read has failed.
    pub fn hard_ns(&self) -> u64 {
        self.hard_ns.load(Ordering::Relaxed)
    }

    /// Whether there is a soft deadline.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.soft_ns.load(Ordering::Relaxed) != 0
    }
}

/// The reads that one core waits for.
pub(crate) struct Waiting {
    counts: RefCell<(u32, Counts)>,
    adaptive_ns: Cell<u64>,
    /// Bytes of memory that reads hold.
    pub bytes: Cell<usize>,
    /// Reads that are raced.
    pub races: Cell<usize>,
    /// Reads past their soft deadline, by slot.
    late: RefCell<Vec<u32>>,
    pub pool: BufferPool,
}

impl Waiting {
    pub fn new(slots: usize) -> Waiting {
        Waiting {
            counts: RefCell::default(),
            adaptive_ns: Cell::new(FIRST_SOFT_NS),
            bytes: Cell::new(0),
            races: Cell::new(0),
            late: RefCell::new(vec![0; slots]),
            // Never waited for: `bytes` stays below.
            pool: BufferPool::new(MEMORY_BYTES),
        }
    }

    /// How long a read is waited for before it is raced, in nanoseconds.
    pub fn soft_ns(&self, deadlines: &SharedDeadlines) -> u64 {
        match deadlines.soft_ns.load(Ordering::Relaxed) {
            0 | u64::MAX => self.adaptive_ns.get(),
            ns => ns,
        }
    }

    /// Whether there is memory for another read, and for racing it.
    pub fn has_room(&self, len: u64) -> bool {
        self.bytes.get() + 2 * buffer_bytes(len as usize) <= MEMORY_BYTES
    }

    /// Whether requests that were given up are still on their way.
    pub fn is_idle(&self) -> bool {
        self.bytes.get() == 0
    }

    /// Whether a slot owes answers that are late.
    pub fn is_late(&self, slot: usize) -> bool {
        self.late.borrow()[slot] > 0
    }

    /// Changes the number of a slot's late answers.
    pub fn change_late(&self, slot: usize, change: i32) {
        let late = &mut self.late.borrow_mut()[slot];
        *late = late.saturating_add_signed(change);
    }

    /// Notes how long a read has taken.
    pub fn note(&self, ns: u64) {
        let (count, counts) = &mut *self.counts.borrow_mut();
        counts.note(ns);
        *count += 1;
        if *count == READS {
            let median = counts.median_ns();
            self.adaptive_ns.set((median * MEDIANS).clamp(*SOFT_NS.start(), *SOFT_NS.end()));
            (*count, *counts) = (0, Counts::default());
        }
    }
}

/// Bytes that a buffer of `len` bytes takes from the pool.
pub(super) fn buffer_bytes(len: usize) -> usize {
    len.next_power_of_two().max(4096)
}
