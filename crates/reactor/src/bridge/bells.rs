//! Wake-ups between the two sides of a bridge: an eventfd for each side, written to only while that
//! side waits.

use crate::doorbell::Doorbell;
use crate::ring::Padded;
use crate::sync::{AtomicBool, AtomicU64, fence, is_broken};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// The caller does not wait.
const NEVER: u64 = u64::MAX;

/// The state that both sides share, in addition to the rings.
pub(super) struct Bells {
    core: Doorbell,
    caller: Doorbell,
    /// The core has stopped polling its rings; the next request must wake it.
    core_waits: Padded<AtomicBool>,
    /// Total of published completions at which the core must wake the caller.
    caller_waits_for: Padded<AtomicU64>,
    /// The core has ended and completes nothing more.
    is_gone: AtomicBool,
}

impl Bells {
    pub(super) fn new() -> io::Result<Bells> {
        Ok(Bells::with(Doorbell::open()?, Doorbell::open()?))
    }

    fn with(core: Doorbell, caller: Doorbell) -> Bells {
        Bells {
            core,
            caller,
            core_waits: Padded::default(),
            caller_waits_for: Padded(AtomicU64::new(NEVER)),
            is_gone: AtomicBool::new(false),
        }
    }

    pub(super) fn core_fd(&self) -> RawFd {
        self.core.fd()
    }

    pub(super) fn caller_fd(&self) -> RawFd {
        self.caller.fd()
    }

    /// From now on a request wakes the core. The core looks for requests once more after this call.
    pub(super) fn arm_core(&self) {
        // Both flags change by read-modify-write only: loom treats a plain store to such a flag as
        // unordered.
        self.core_waits.0.swap(true, Ordering::Relaxed);
        if !is_broken("a side that goes to sleep puts a fence before its last look") {
            fence(Ordering::SeqCst);
        }
    }

    pub(super) fn disarm_core(&self) {
        self.core_waits.0.swap(false, Ordering::Relaxed);
    }

    /// Wakes the core if it waits. Called after requests were published.
    #[inline]
    pub(super) fn wake_core(&self) {
        // Either the core finds the requests when it looks once more, or this thread finds that the
        // core waits.
        fence(Ordering::SeqCst);
        if self.core_waits.0.load(Ordering::Relaxed) && self.core_waits.0.swap(false, Ordering::Relaxed) {
            self.core.ring();
        }
    }

    /// From now on the core wakes the caller once it has published `count` completions in total.
    /// The caller looks for them once more after this call.
    pub(super) fn arm_caller(&self, count: u64) {
        self.caller_waits_for.0.swap(count, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn disarm_caller(&self) {
        self.caller_waits_for.0.swap(NEVER, Ordering::Relaxed);
    }

    /// Wakes the caller if it waits for `count` completions or fewer, the total published so far.
    #[inline]
    pub(super) fn wake_caller(&self, count: u64) {
        if !is_broken("a core that wakes the caller puts a fence before its look") {
            fence(Ordering::SeqCst);
        }
        let wanted = self.caller_waits_for.0.load(Ordering::Relaxed);
        let change = |to| {
            self.caller_waits_for.0.compare_exchange(wanted, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if count >= wanted && change(NEVER) {
            self.caller.ring();
        }
    }

    /// Marks the core as ended. A thread that reads the mark sees all that the core published
    /// before.
    pub(super) fn say_goodbye(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.caller.ring();
    }

    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::ring::{Consumer, ring};
    use crate::sync::{model, must_fail};
    use loom::thread;
    use std::sync::Arc;

    fn pop_or_sleep(
        from: &mut Consumer<u32>,
        doorbell: &Doorbell,
        arm: impl Fn(u64),
        disarm: impl Fn(),
    ) -> u32 {
        loop {
            if let Some(value) = from.pop() {
                return value;
            }
            arm(from.taken() + 1);
            if from.available() == 0 {
                doorbell.wait();
            }
            disarm();
        }
    }

    /// A caller with room for one request sends two, one after the other. Each side sleeps while it
    /// has no work.
    fn requests_and_completions() {
        let (core_bell, caller_bell) = (Doorbell::of_model(), Doorbell::of_model());
        let bells = Arc::new(Bells::with(core_bell.clone(), caller_bell.clone()));
        let ((mut requests, mut incoming), (mut outgoing, mut completions)) =
            (ring::<u32>(1), ring::<u32>(1));
        let core = {
            let bells = bells.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    let arm = |_| bells.arm_core();
                    let value = pop_or_sleep(&mut incoming, &core_bell, arm, || bells.disarm_core());
                    // SAFETY: the caller has popped the previous completion.
                    unsafe { outgoing.push(!value) };
                    outgoing.publish();
                    bells.wake_caller(outgoing.published());
                }
            })
        };
        for value in 0..2 {
            // SAFETY: the previous request has completed.
            unsafe { requests.push(value) };
            requests.publish();
            bells.wake_core();
            let arm = |count| bells.arm_caller(count);
            let answer = pop_or_sleep(&mut completions, &caller_bell, arm, || bells.disarm_caller());
            assert_eq!(answer, !value);
        }
        core.join().unwrap();
    }

    #[test]
    fn no_request_and_no_completion_is_lost_or_read_early() {
        model(requests_and_completions);
        must_fail("values are published with release", requests_and_completions);
        must_fail("a side that goes to sleep puts a fence before its last look", requests_and_completions);
        must_fail("a core that wakes the caller puts a fence before its look", requests_and_completions);
    }
}
