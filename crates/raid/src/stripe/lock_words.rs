//! Locks on rows that any core takes without a message: a word for each of some stripes.
//!
//! ```text
//!   bits 63..32: operations of the stripe's owner     bits 31..0: rows that are locked
//! ```
//!
//! A write on any core sets the bits of its rows ([`LockWords::try_lock`]). The owner of the stripe
//! counts each of its operations, which have locks of their own
//! ([`RowLocks`](super::rows::RowLocks)), and starts them when no bit is set. While one is counted,
//! no bit can be set. So an operation of the owner waits only for the writes in flight.
//!
//! Several stripes may share a word. They exclude each other without need, which costs time only.

use super::hasher::StripeHasher;
use std::hash::Hasher;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// Words of an array. Many more than writes are in flight, and 128 KiB of memory.
const WORDS: usize = 1 << 14;
/// Parts of a strip that have a bit.
const BITS: u32 = 32;
/// The bits of rows.
const ROWS: u64 = u32::MAX as u64;
/// One operation of an owner.
const OPERATION: u64 = 1 << 32;

/// Lock words of an array, for all cores.
pub struct LockWords {
    words: Box<[AtomicU64]>,
    /// Bytes of a strip behind each bit.
    bytes_per_bit: u32,
    /// Operations of owners that wait until no bit of a word is set. Rare: a write of another kind
    /// has to be in flight in the same stripe.
    waiting: Mutex<Vec<(usize, Waker)>>,
}

/// Rows that are locked; dropping it unlocks them.
pub struct LockedRows<'a> {
    words: &'a LockWords,
    word: usize,
    bits: u64,
}

impl LockWords {
    /// Words for strips of a size, all free.
    pub fn new(strip_bytes: u32) -> LockWords {
        LockWords {
            words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(),
            bytes_per_bit: strip_bytes.div_ceil(BITS),
            waiting: Mutex::default(),
        }
    }

    /// The word of a stripe.
    pub fn of(&self, stripe: u64) -> usize {
        let mut hasher = StripeHasher::default();
        hasher.write_u64(stripe);
        hasher.finish() as usize % WORDS
    }

    fn bits(&self, rows: &Range<u32>) -> u64 {
        if rows.is_empty() {
            return 0;
        }
        let (first, last) = (rows.start / self.bytes_per_bit, (rows.end - 1) / self.bytes_per_bit);
        (ROWS >> (BITS - 1 - (last - first))) << first
    }

    /// Locks bytes `rows` of every strip of a stripe; `None` if they are locked, or the stripe's
    /// owner works on it.
    #[inline]
    pub fn try_lock(&self, stripe: u64, rows: Range<u32>) -> Option<LockedRows<'_>> {
        let (word, bits) = (self.of(stripe), self.bits(&rows));
        let lock = |value: u64| (value & bits == 0 && value < OPERATION).then_some(value | bits);
        let is_locked = || self.words[word].fetch_update(Ordering::Acquire, Ordering::Relaxed, lock).is_ok();
        (bits == 0 || is_locked()).then(|| LockedRows { words: self, word, bits })
    }

    /// Counts an operation of the owner of a word's stripe.
    pub fn enter(&self, word: usize) {
        self.words[word].fetch_add(OPERATION, Ordering::Relaxed);
    }

    /// Ready when no row of a word is locked. The caller has entered.
    pub fn poll_free(&self, word: usize, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_free(word) {
            return Poll::Ready(());
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.iter().any(|(at, waker)| *at == word && waker.will_wake(cx.waker())) {
            waiting.push((word, cx.waker().clone()));
        }
        // A write that did not see the waker has cleared its bits before.
        if self.is_free(word) { Poll::Ready(()) } else { Poll::Pending }
    }

    fn is_free(&self, word: usize) -> bool {
        self.words[word].load(Ordering::Acquire) & ROWS == 0
    }

    /// Ends what [`LockWords::enter`] has counted.
    pub fn leave(&self, word: usize) {
        self.words[word].fetch_sub(OPERATION, Ordering::Release);
    }

    #[cold]
    fn wake(&self, word: usize) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let woken: Vec<_> = waiting.extract_if(.., |(at, _)| *at == word).collect();
        drop(waiting);
        woken.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

impl Drop for LockedRows<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.bits == 0 {
            return;
        }
        let before = self.words.words[self.word].fetch_and(!self.bits, Ordering::AcqRel);
        if before >= OPERATION && before & ROWS == self.bits {
            self.words.wake(self.word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRIP: u32 = 64 << 10;

    #[test]
    fn rows_are_locked_in_parts_of_a_strip() {
        let words = LockWords::new(STRIP);
        let first = words.try_lock(7, 0..4096).unwrap();
        assert!(words.try_lock(7, 2048..4096).is_none());
        assert!(words.try_lock(7, 4095..8192).is_none());
        let second = words.try_lock(7, 4096..STRIP).unwrap();
        assert!(words.try_lock(8, 0..STRIP).is_some(), "another stripe has another word");
        assert!(words.try_lock(7, 0..STRIP).is_none());
        drop((first, second));
        assert!(words.try_lock(7, 0..STRIP).is_some());
        assert!(words.try_lock(7, STRIP - 1..STRIP).is_some());
    }

    #[test]
    fn strips_of_any_size_fit_a_word() {
        for strip in [4096, 12 << 10, 20 << 10, 1 << 20, 1 << 31] {
            let words = LockWords::new(strip);
            let whole = words.try_lock(0, 0..strip).unwrap();
            assert!(words.try_lock(0, strip - 512..strip).is_none(), "strips of {strip} bytes");
            drop(whole);
            let last = words.try_lock(0, strip - 512..strip).unwrap();
            assert!(words.try_lock(0, 0..512).is_some(), "strips of {strip} bytes");
            drop(last);
        }
    }
}
