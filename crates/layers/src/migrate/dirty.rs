//! The ranges of a device that must be copied, or copied again.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Marks of the ranges whose present content the copy lacks: a bit for each range of fixed size.
/// At first all are marked.
///
/// A channel marks the range of a write after the write has ended. The copier takes a range and
/// reads it afterwards. So a write that the copier has missed, whole or in part, ends after the
/// range was taken, and marks it again.
#[derive(Debug)]
pub struct Dirty {
    words: Vec<AtomicU64>,
    chunk: u64,
    capacity: u64,
    chunks: AtomicUsize,
}

impl Dirty {
    /// Marks all of `capacity` bytes, in ranges of `chunk` bytes.
    ///
    /// # Panics
    /// If `chunk` is not a power of two.
    pub fn new(capacity: u64, chunk: u64) -> Dirty {
        assert!(chunk.is_power_of_two(), "chunks of {chunk} bytes");
        let chunks = capacity.div_ceil(chunk);
        let word = |number: u64| {
            let bits = (chunks - number * 64).min(64);
            AtomicU64::new(u64::MAX >> (64 - bits))
        };
        let words = (0..chunks.div_ceil(64)).map(word).collect();
        Dirty { words, chunk, capacity, chunks: AtomicUsize::new(chunks as usize) }
    }

    /// Upper limit of the bytes that must be copied.
    pub fn bytes(&self) -> u64 {
        self.capacity.min(self.chunks.load(Ordering::Relaxed) as u64 * self.chunk)
    }

    /// Bytes of the device.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Marks the range of a write that has ended, also of a failed one.
    pub(super) fn mark(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.capacity);
        if offset >= end {
            return; // the device refused it
        }
        for chunk in offset / self.chunk..end.div_ceil(self.chunk) {
            let (word, bit) = ((chunk / 64) as usize, 1u64 << (chunk % 64));
            // Release: the copier that takes the mark sees the data of the write.
            if self.words[word].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                self.chunks.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Takes the first marked range at or after byte `from` and clears its mark. `None` if no range
    /// up to the end is marked.
    pub fn take(&self, from: u64) -> Option<Range<u64>> {
        let first = from.div_ceil(self.chunk);
        for word in (first / 64) as usize..self.words.len() {
            let mut bits = self.words[word].load(Ordering::Relaxed);
            if word as u64 == first / 64 {
                bits &= u64::MAX << (first % 64);
            }
            if bits == 0 {
                continue;
            }
            let bit = u64::from(bits.trailing_zeros());
            self.words[word].fetch_and(!(1 << bit), Ordering::AcqRel);
            self.chunks.fetch_sub(1, Ordering::Relaxed);
            let start = (word as u64 * 64 + bit) * self.chunk;
            return Some(start..self.capacity.min(start + self.chunk));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_range_is_taken_once_and_again_after_a_write() {
        let dirty = Dirty::new(200 * 4096 + 512, 4096);
        assert_eq!(dirty.bytes(), 200 * 4096 + 512);
        let mut from = 0;
        let mut bytes = 0;
        while let Some(chunk) = dirty.take(from) {
            assert_eq!(chunk.start, from);
            bytes += chunk.end - chunk.start;
            from = chunk.end;
        }
        assert_eq!((bytes, dirty.bytes()), (200 * 4096 + 512, 0));
        dirty.mark(4095, 2);
        dirty.mark(4095, 1);
        dirty.mark(200 * 4096, 512);
        dirty.mark(200 * 4096 + 512, 4096);
        dirty.mark(u64::MAX, 4096);
        assert_eq!(dirty.bytes(), 3 * 4096);
        assert_eq!(dirty.take(4096), Some(4096..8192));
        assert_eq!(dirty.take(8192), Some(200 * 4096..200 * 4096 + 512));
        assert_eq!((dirty.take(8192), dirty.take(0), dirty.take(0)), (None, Some(0..4096), None));
    }

    #[test]
    fn every_capacity_has_each_of_its_ranges_once() {
        for capacity in (1..200).map(|chunks| chunks * 512) {
            let dirty = Dirty::new(capacity, 512);
            let mut taken = BTreeSet::new();
            while let Some(chunk) = dirty.take(0) {
                assert!(taken.insert(chunk.start));
            }
            assert_eq!(taken.len() as u64, capacity / 512);
        }
    }
}
