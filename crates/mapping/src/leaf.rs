//! A leaf: 512 entries of a table.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Entries of a leaf.
pub const ENTRIES: usize = 512;

/// Stands for the first entry of a pair while both change.
const CHANGING: u64 = u64::MAX;

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
    /// has, or for one that [`crate::View::loaded`] returns.
    ///
    /// # Panics
    /// If `slot` is not below [`ENTRIES`].
    pub fn set(&self, slot: usize, entry: u64) {
        self.entries[slot].store(entry, Ordering::Release);
    }

    /// The entries in a slot and the next one, which change together; `None` while they do.
    ///
    /// # Panics
    /// As [`Leaf::get`].
    #[inline]
    pub fn get_pair(&self, slot: usize) -> Option<(u64, u64)> {
        let first = self.get(slot);
        // A second entry that is newer than `first` comes with a change of the first one.
        let second = self.get(slot + 1);
        (first != CHANGING && first == self.get(slot)).then_some((first, second))
    }

    /// Sets the entries in a slot and the next one. No core sees one of them without the other. A
    /// format calls it as [`Leaf::set`].
    ///
    /// # Panics
    /// As [`Leaf::get`].
    pub fn set_pair(&self, slot: usize, first: u64, second: u64) {
        let is_same = self.get(slot) == first;
        if !is_same {
            self.set(slot, CHANGING);
        }
        self.set(slot + 1, second);
        if !is_same {
            self.set(slot, first);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn no_thread_reads_half_of_a_pair() {
        const CHANGES: u64 = 200_000;
        let (leaf, read) = (Leaf::new(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=CHANGES {
                    leaf.set_pair(6, number, number * 2);
                    leaf.set_pair(6, number, number * 2 + 1);
                }
            });
            scope.spawn(|| {
                let mut last = (0, 0);
                while last.0 < CHANGES {
                    let Some(pair) = leaf.get_pair(6) else { continue };
                    assert!(pair.0 == pair.1 / 2, "{pair:?}");
                    assert!(pair >= last, "{pair:?} after {last:?}");
                    last = pair;
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        assert!(read.load(Ordering::Relaxed) > 0);
    }
}
