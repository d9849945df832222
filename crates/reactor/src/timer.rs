//! Timers of one core.

use crate::Core;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

#[derive(Default)]
struct Slot {
    /// Equals that of the heap entry while the timer runs; the next use of the slot has another
    /// number.
    sequence: u64,
    waker: Option<Waker>,
}

#[derive(Default)]
struct State {
    /// (deadline, sequence, slot): equal deadlines fire in the order they were set.
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    next_sequence: u64,
}

/// The timers of one core. Allocates only when more run at a time than before.
#[derive(Default)]
pub(crate) struct Timers(RefCell<State>);

impl Timers {
    /// Wakes the tasks whose deadline is at most `now_ns`; returns their number.
    pub(crate) fn fire(&self, now_ns: u64) -> usize {
        let mut fired = 0;
        loop {
            let waker = {
                let state = &mut *self.0.borrow_mut();
                let Some(Reverse((deadline, sequence, slot))) = state.heap.peek().copied() else { break };
                let is_live = state.slots[slot].sequence == sequence;
                if is_live && deadline > now_ns {
                    break;
                }
                state.heap.pop();
                if is_live { state.slots[slot].waker.take() } else { None }
            };
            if let Some(waker) = waker {
                waker.wake();
                fired += 1;
            }
        }
        fired
    }

    /// Deadline of the next timer.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.0.borrow().heap.peek().map(|Reverse((deadline, _, _))| *deadline)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().heap.is_empty()
    }

    fn set(&self, deadline: u64, waker: &Waker) -> usize {
        let state = &mut *self.0.borrow_mut();
        let slot = state.free.pop().unwrap_or_else(|| {
            state.slots.push(Slot::default());
            state.slots.len() - 1
        });
        state.next_sequence += 1;
        state.slots[slot] = Slot { sequence: state.next_sequence, waker: Some(waker.clone()) };
        state.heap.push(Reverse((deadline, state.next_sequence, slot)));
        slot
    }

    fn clear(&self, slot: usize) {
        let state = &mut *self.0.borrow_mut();
        state.slots[slot] = Slot::default();
        state.free.push(slot);
    }
}

/// The future of [`Core::sleep`].
pub struct Sleep {
    core: Core,
    deadline_ns: u64,
    slot: Option<usize>,
}

impl Sleep {
    pub(crate) fn new(core: Core, deadline_ns: u64) -> Sleep {
        Sleep { core, deadline_ns, slot: None }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let timers = this.core.timers();
        match this.slot {
            None if this.core.now_ns() >= this.deadline_ns => return Poll::Ready(()),
            None => this.slot = Some(timers.set(this.deadline_ns, cx.waker())),
            Some(slot) => match &mut timers.0.borrow_mut().slots[slot].waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => return Poll::Ready(()),
            },
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.core.timers().clear(slot);
        }
    }
}
