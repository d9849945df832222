//! Slots, the tasks that serve the requests of a queue, one request at a time each: which are idle,
//! woken or busy.
//!
//! ```text
//!            wake_for            may_look             (serves requests)
//!   Idle ───────────────► Woken ───────────► Busy ──┐
//!    ▲                      ▲── look_again ──┤ ▲────┘
//!    └─────────────────── wait ──────────────┘
//! ```
//!
//! The queue's source reports how many requests wait ([`ServingSlots::wake_for`]). Slots already
//! woken are counted, so that no slot is woken without need. A stale waker may also wake a slot's
//! task; an idle slot then goes back to sleep.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The slots of one queue, on its core.
pub struct ServingSlots {
    /// States of the slots started so far.
    states: RefCell<Vec<State>>,
    idle: RefCell<Vec<(u32, Waker)>>,
    woken: Cell<usize>,
    max: usize,
    ended: Cell<usize>,
    /// The task that waits for the last slot to end.
    drained: RefCell<Option<Waker>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for work, and is on the idle list.
    Idle,
    /// Was woken and will look for work.
    Woken,
    /// Looks for work or serves a request.
    Busy,
}

impl ServingSlots {
    /// Slots for a queue with up to `max` requests in flight. None is started yet.
    pub fn new(max: usize) -> ServingSlots {
        ServingSlots {
            states: RefCell::default(),
            idle: RefCell::default(),
            woken: Cell::new(0),
            max,
            ended: Cell::new(0),
            drained: RefCell::default(),
        }
    }

    /// Wakes slots until as many look for work as `requests` wait, or all do. `start` starts the
    /// task of a new slot; its argument is the slot's number.
    #[inline]
    pub fn wake_for(&self, requests: usize, mut start: impl FnMut(u32)) {
        for _ in self.woken.get()..requests {
            let idle = self.idle.borrow_mut().pop();
            if let Some((slot, waker)) = idle {
                self.set(slot, State::Woken);
                waker.wake();
            } else {
                let mut states = self.states.borrow_mut();
                if states.len() == self.max {
                    return;
                }
                let slot = states.len() as u32;
                states.push(State::Woken);
                drop(states);
                start(slot);
            }
            self.woken.set(self.woken.get() + 1);
        }
    }

    /// Called by a slot's task each time it runs without a request; returns whether it may look for
    /// one. `false` follows a stale wake: the slot stays idle.
    #[inline]
    pub fn may_look(&self, slot: u32) -> bool {
        match self.states.borrow()[slot as usize] {
            State::Idle => return false,
            State::Busy => return true,
            State::Woken => {}
        }
        self.woken.set(self.woken.get() - 1);
        self.set(slot, State::Busy);
        true
    }

    /// Makes the slot idle, after it has found no request.
    #[inline]
    pub fn wait(&self, slot: u32, waker: &Waker) {
        debug_assert_eq!(self.states.borrow()[slot as usize], State::Busy);
        self.set(slot, State::Idle);
        self.idle.borrow_mut().push((slot, waker.clone()));
    }

    /// Lets other tasks run before the slot looks again.
    #[inline]
    pub fn look_again(&self, slot: u32, waker: &Waker) {
        debug_assert_eq!(self.states.borrow()[slot as usize], State::Busy);
        self.set(slot, State::Woken);
        self.woken.set(self.woken.get() + 1);
        waker.wake_by_ref();
    }

    /// Wakes all idle slots, so that they find that the queue ends.
    pub fn wake_all(&self) {
        let idle = self.idle.take();
        self.woken.set(self.woken.get() + idle.len());
        for (slot, waker) in idle {
            self.set(slot, State::Woken);
            waker.wake();
        }
    }

    /// Called when a slot's task ends.
    pub fn end(&self) {
        self.ended.set(self.ended.get() + 1);
        if self.has_ended()
            && let Some(waker) = self.drained.take()
        {
            waker.wake();
        }
    }

    /// Waits until the tasks of all slots have ended. The caller wakes them all before and starts
    /// no other.
    pub async fn all_ended(&self) {
        poll_fn(|cx| {
            if self.has_ended() {
                return Poll::Ready(());
            }
            self.drained.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    fn has_ended(&self) -> bool {
        self.ended.get() == self.states.borrow().len()
    }

    #[inline]
    fn set(&self, slot: u32, state: State) {
        self.states.borrow_mut()[slot as usize] = state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Two idle slots that have looked once, and a count of their wakes.
    fn waiting() -> (ServingSlots, Arc<Count>) {
        let slots = ServingSlots::new(2);
        let wakes = Arc::new(Count::default());
        let mut made = Vec::new();
        slots.wake_for(5, |slot| made.push(slot));
        assert_eq!(made, [0, 1]);
        for slot in made {
            assert!(slots.may_look(slot));
            slots.wait(slot, &wakes.clone().into());
        }
        (slots, wakes)
    }

    fn no_new_slot(slot: u32) {
        panic!("slot {slot} is one too many");
    }

    #[test]
    fn a_stale_wake_costs_no_later_one() {
        let (slots, wakes) = waiting();
        for _ in 0..3 {
            assert!(!slots.may_look(0) && !slots.may_look(1));
        }
        slots.wake_for(2, no_new_slot);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        assert!(slots.may_look(0) && slots.may_look(1));
    }

    #[test]
    fn a_woken_slot_counts_until_it_has_looked() {
        let (slots, wakes) = waiting();
        slots.wake_for(1, no_new_slot);
        slots.wake_for(1, no_new_slot);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(slots.may_look(1));
        // Slot 1 has looked; a request that waits now is for the other.
        slots.wake_for(1, no_new_slot);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        let waker = wakes.clone().into();
        slots.look_again(1, &waker);
        slots.wake_for(2, no_new_slot);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 3); // its own wake
    }

    #[test]
    fn the_end_is_when_every_slot_has_ended() {
        let (slots, wakes) = waiting();
        slots.wake_all();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        let mut ended = std::pin::pin!(slots.all_ended());
        let waker = Waker::from(wakes.clone());
        let cx = &mut std::task::Context::from_waker(&waker);
        for slot in 0..2 {
            assert!(ended.as_mut().poll(cx).is_pending());
            assert!(slots.may_look(slot));
            slots.end();
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 3);
        assert!(ended.as_mut().poll(cx).is_ready());
    }
}
