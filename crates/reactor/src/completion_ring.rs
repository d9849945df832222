//! Completions that the threads of a foreign library deliver to the queue of one core.
//!
//! ```text
//!   library's threads: post ─► ring ─► pop: the core, whenever it polls
//!                        └───► event, only while the core is armed
//! ```
//!
//! No thread waits: the ring has a place for every operation in flight.
//!
//! A thread may still execute the end of `post` after the core has popped its completion. So the
//! owner frees the ring only after [`CompletionRing::returned`] has counted all posts.

use crate::doorbell::Doorbell;
use crate::sync::{AtomicBool, AtomicU64, fence, is_broken};
use crossbeam_queue::ArrayQueue;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// The completions of one queue: slots, and results as the library returned them.
pub struct CompletionRing {
    ring: ArrayQueue<(u32, i64)>,
    event: Doorbell,
    is_armed: AtomicBool,
    /// Number of posts that have ended.
    returned: AtomicU64,
}

impl CompletionRing {
    /// A ring for `depth` operations in flight.
    ///
    /// # Errors
    /// If the operating system refuses an eventfd.
    pub fn new(depth: u32) -> io::Result<CompletionRing> {
        Ok(CompletionRing::with(depth, Doorbell::open()?))
    }

    fn with(depth: u32, event: Doorbell) -> CompletionRing {
        CompletionRing {
            ring: ArrayQueue::new(depth as usize),
            event,
            is_armed: AtomicBool::default(),
            returned: AtomicU64::default(),
        }
    }

    /// Delivers a completion, and raises the event if the core is armed. Called on any thread.
    ///
    /// # Safety
    /// `ring` is valid until [`CompletionRing::returned`] has counted this call.
    ///
    /// # Panics
    /// If more completions arrive than operations can be in flight.
    pub unsafe fn post(ring: *const CompletionRing, slot: u32, result: i64) {
        // SAFETY: the call that counts below has not happened yet.
        unsafe { &*ring }.deliver(slot, result);
        // SAFETY: valid until the addition; no reference to the ring outlives it.
        unsafe { (*ring).returned.fetch_add(1, Ordering::Release) };
    }

    fn deliver(&self, slot: u32, result: i64) {
        self.ring.push((slot, result)).expect("a place for each operation in flight");
        // Either the core finds the completion when it looks once more, or this thread finds that
        // the core is armed.
        if !is_broken("a thread puts a fence between its completion and its look") {
            fence(Ordering::SeqCst);
        }
        if self.is_armed.load(Ordering::Relaxed) && self.is_armed.swap(false, Ordering::Relaxed) {
            self.event.ring();
        }
    }

    /// Takes the oldest completion.
    #[inline]
    pub fn pop(&self) -> Option<(u32, i64)> {
        self.ring.pop()
    }

    /// Requests the event at the next completion. `false` means that one is in the ring already.
    pub fn arm(&self) -> bool {
        // Changed by read-modify-write only: loom treats a plain store to such a flag as unordered.
        self.is_armed.swap(true, Ordering::Relaxed);
        if !is_broken("a core that arms the ring puts a fence before its last look") {
            fence(Ordering::SeqCst);
        }
        self.ring.is_empty()
    }

    /// Cancels [`CompletionRing::arm`].
    pub fn disarm(&self) {
        self.is_armed.swap(false, Ordering::Relaxed);
    }

    /// The event, an eventfd that does not block.
    pub fn event_fd(&self) -> RawFd {
        self.event.fd()
    }

    /// Number of posts so far whose threads have left the ring.
    pub fn returned(&self) -> u64 {
        self.returned.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn is_raised(ring: &CompletionRing) -> bool {
        let mut counter = 0u64;
        // SAFETY: eight bytes of our own.
        unsafe { libc::read(ring.event_fd(), (&raw mut counter).cast(), 8) == 8 }
    }

    fn post(ring: &CompletionRing, slot: u32) {
        // SAFETY: the reference outlives the call.
        unsafe { CompletionRing::post(ring, slot, 0) };
    }

    #[test]
    fn only_an_armed_ring_raises_its_event_and_only_once() {
        let ring = CompletionRing::new(4).unwrap();
        post(&ring, 0);
        assert!(!is_raised(&ring) && !ring.arm(), "a completion is waiting");
        ring.disarm();
        assert_eq!((ring.pop(), ring.pop()), (Some((0, 0)), None));
        assert!(ring.arm());
        post(&ring, 1);
        assert!(is_raised(&ring));
        post(&ring, 2);
        assert!(!is_raised(&ring));
        assert_eq!(ring.returned(), 3);
    }

    #[test]
    fn every_completion_of_many_threads_arrives_once() {
        let ring = Arc::new(CompletionRing::new(64).unwrap());
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let ring = ring.clone();
                std::thread::spawn(move || (0..16).for_each(|i| post(&ring, thread * 16 + i)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut slots: Vec<_> = std::iter::from_fn(|| ring.pop()).map(|(slot, _)| slot).collect();
        slots.sort_unstable();
        assert_eq!((slots, ring.returned()), ((0..64).collect(), 64));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::{model, must_fail};
    use loom::thread;
    use std::sync::Arc;

    /// Two threads deliver a completion each; the core sleeps while it finds none.
    fn completions() {
        let bell = Doorbell::of_model();
        let ring = Arc::new(CompletionRing::with(2, bell.clone()));
        let threads = [0, 1].map(|slot| {
            let ring = ring.clone();
            // SAFETY: the clone outlives the call.
            thread::spawn(move || unsafe { CompletionRing::post(&*ring, slot, 0) })
        });
        let mut taken = 0;
        while taken < 2 {
            if ring.pop().is_some() {
                taken += 1;
                continue;
            }
            if ring.arm() {
                bell.wait();
            }
            ring.disarm();
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(ring.returned(), 2);
    }

    #[test]
    fn no_completion_is_left_to_a_core_that_sleeps() {
        model(completions);
        must_fail("a thread puts a fence between its completion and its look", completions);
        must_fail("a core that arms the ring puts a fence before its last look", completions);
    }
}
