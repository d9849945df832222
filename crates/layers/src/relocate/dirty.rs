//! What is to be copied, and copied again.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Parts of a device that a copy does not have, or not as they are now: a bit for each chunk. All of them at first.
///
/// Whoever writes marks what it has written when that has ended; whoever copies takes a chunk and reads it then. So a write that
/// a copy has missed, whole or in part, ends after the chunk was taken, and the chunk is to be copied again.
#[derive(Debug)]
pub struct Dirty {
    words: Vec<AtomicU64>,
    chunk: u64,
    capacity: u64,
    chunks: AtomicUsize,
}

impl Dirty {
    /// All of `capacity` bytes, in chunks of `chunk`.
    ///
    /// # Panics
    /// When a chunk is no power of two.
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

    /// Bytes that are to be copied; at most as many.
    pub fn bytes(&self) -> u64 {
        self.capacity.min(self.chunks.load(Ordering::Relaxed) as u64 * self.chunk)
    }

    /// A write has ended, well or not.
    pub(super) fn mark(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.capacity);
        if offset >= end {
            return; // it was refused
        }
        for chunk in offset / self.chunk..end.div_ceil(self.chunk) {
            let (word, bit) = ((chunk / 64) as usize, 1u64 << (chunk % 64));
            // What was written is seen by whoever takes the chunk.
            if self.words[word].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                self.chunks.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The first chunk at or after byte `from` that is to be copied, which is taken for copied from now on. `None` when
    /// there is none up to the end.
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
    fn all_is_taken_once_and_what_was_written_again() {
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
    fn every_size_has_every_chunk_once() {
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
