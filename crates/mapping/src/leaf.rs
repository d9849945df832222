//! A leaf: 512 entries of a table.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Entries of a leaf.
pub const ENTRIES: usize = 512;

/// 512 entries of a table, 4 KiB. Every core reads them, and only the leaf's owner changes them.
pub struct Leaf {
    entries: [AtomicU64; ENTRIES],
    /// Whether an entry was read since the owner looked last.
    is_used: AtomicBool,
}

impl Leaf {
    pub(crate) fn new() -> Leaf {
        Leaf { entries: [const { AtomicU64::new(0) }; ENTRIES], is_used: AtomicBool::new(true) }
    }

    /// The entry in a slot, with everything that its writer did before it set the entry.
    ///
    /// # Panics
    /// If `slot` is not below [`ENTRIES`].
    #[inline]
    pub fn get(&self, slot: usize) -> u64 {
        self.entries[slot].load(Ordering::Acquire)
    }

    /// Sets the entry in a slot. A format calls it for a leaf that it loads, which no other core
    /// has.
    ///
    /// # Panics
    /// If `slot` is not below [`ENTRIES`].
    pub fn set(&self, slot: usize, entry: u64) {
        self.entries[slot].store(entry, Ordering::Release);
    }

    /// Notes that the leaf is in use. It writes to the leaf at most once between two looks of the
    /// owner.
    #[inline]
    pub(crate) fn note_use(&self) {
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the leaf was used since the last look.
    pub(crate) fn take_use(&self) -> bool {
        self.is_used.swap(false, Ordering::Relaxed)
    }
}
