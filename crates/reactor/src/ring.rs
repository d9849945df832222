//! A ring from one thread to another. It does not check whether it is full: its users bound the
//! number of values in it. It does not drop the values that are left in it.

use crate::sync::{AtomicU64, UnsafeCell, is_broken};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Keeps the data that one thread writes off the cache lines of the other thread's data. Two lines
/// long, because processors fetch lines in pairs.
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Padded<T>(pub(crate) T);

struct Ring<T> {
    cells: Box<[UnsafeCell<MaybeUninit<T>>]>,
    /// Total of values published.
    tail: Padded<AtomicU64>,
}

// SAFETY: the one producer writes a cell before it publishes it, and the one consumer reads it
// afterwards. By the contract of `Producer::push` the producer writes it again only after that
// read.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    fn cell(&self, position: u64) -> &UnsafeCell<MaybeUninit<T>> {
        &self.cells[position as usize & (self.cells.len() - 1)]
    }
}

/// Both ends of a ring for `capacity` values, rounded up to a power of two.
pub(crate) fn ring<T: Send>(capacity: u32) -> (Producer<T>, Consumer<T>) {
    let cells = (0..capacity.next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
    let ring = Arc::new(Ring { cells, tail: Padded::default() });
    (Producer { ring: ring.clone(), next: 0, published: 0 }, Consumer { ring, next: 0, seen: 0 })
}

/// The writing end of a ring.
pub(crate) struct Producer<T> {
    ring: Arc<Ring<T>>,
    next: u64,
    published: u64,
}

impl<T: Send> Producer<T> {
    /// Adds a value; the consumer sees it after the next [`Producer::publish`].
    ///
    /// # Safety
    /// The ring holds fewer values than its capacity. This thread knows that from data that the
    /// consumer published after it had popped values.
    #[inline]
    pub(crate) unsafe fn push(&mut self, value: T) {
        // SAFETY: by contract the read of the cell's last value happened before this write.
        self.ring.cell(self.next).with_mut(|cell| unsafe { (*cell).write(value) });
        self.next += 1;
    }

    /// Makes the added values visible to the consumer; returns whether any were new.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        let is_new = self.published != self.next;
        if is_new {
            self.published = self.next;
            let order = match is_broken("values are published with release") {
                false => Ordering::Release,
                true => Ordering::Relaxed,
            };
            self.ring.tail.0.store(self.next, order);
        }
        is_new
    }

    /// Total of values published.
    #[inline]
    pub(crate) fn published(&self) -> u64 {
        self.published
    }
}

/// The reading end of a ring.
pub(crate) struct Consumer<T> {
    ring: Arc<Ring<T>>,
    next: u64,
    seen: u64,
}

impl<T: Send> Consumer<T> {
    /// Removes the oldest value.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<T> {
        if self.next == self.seen && self.available() == 0 {
            return None;
        }
        // SAFETY: the producer wrote the cell before it published it, and writes it again only
        // after it has learned of this read, the only one of this value.
        let value = self.ring.cell(self.next).with(|cell| unsafe { (*cell).assume_init_read() });
        self.next += 1;
        Some(value)
    }

    /// Number of values that can be popped.
    #[inline]
    pub(crate) fn available(&mut self) -> usize {
        self.seen = self.ring.tail.0.load(Ordering::Acquire);
        (self.seen - self.next) as usize
    }

    /// Total of values popped.
    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_out_once_and_in_order_while_both_ends_work() {
        const COUNT: u64 = 200_000;
        let (mut there, mut here) = ring::<u64>(5);
        let (mut back, mut answers) = ring::<u64>(5);
        let echo = std::thread::spawn(move || {
            let mut expected = 0;
            while expected < COUNT {
                while let Some(value) = here.pop() {
                    assert_eq!(value, expected);
                    expected += 1;
                    // SAFETY: each answer is for one value, and at most five have no answer.
                    unsafe { back.push(!value) };
                }
                if !back.publish() {
                    std::thread::yield_now();
                }
            }
        });
        let (mut sent, mut answered) = (0, 0);
        while answered < COUNT {
            while sent < COUNT && sent - answered < 5 {
                // SAFETY: fewer than five have no answer yet.
                unsafe { there.push(sent) };
                sent += 1;
            }
            there.publish();
            match answers.pop() {
                Some(value) => {
                    assert_eq!(value, !answered);
                    answered += 1;
                }
                None => std::thread::yield_now(),
            }
        }
        echo.join().unwrap();
        assert!(answers.pop().is_none());
    }

    #[test]
    fn nothing_is_seen_before_it_is_published() {
        let (mut there, mut here) = ring::<u8>(1);
        assert!(!there.publish());
        // SAFETY: the ring is empty.
        unsafe { there.push(7) };
        assert_eq!((here.available(), here.pop()), (0, None));
        assert!(there.publish() && !there.publish());
        assert_eq!((here.available(), here.pop(), here.pop()), (1, Some(7), None));
        assert_eq!((there.published(), here.taken()), (1, 1));
    }
}
