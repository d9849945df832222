//! The op slots of a ring: each stands for an operation in flight, and keeps the task that
//! waits for it and its result.

use crate::permits::Permits;
use block::{IoFuture, IoResult, Operation};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

/// The op slots of a ring, the targets of its futures. `R` is the result of an operation.
pub(crate) struct Slots<R: Copy> {
    slots: Box<[Slot<R>]>,
    free: RefCell<Vec<u32>>,
    /// One for each free slot: operations wait for them in line.
    pub(crate) permits: Permits,
}

struct Slot<R: Copy> {
    state: Cell<State<R>>,
    waker: Cell<Option<Waker>>,
    index: u32,
    owner: Cell<*const Slots<R>>,
}

#[derive(Clone, Copy)]
enum State<R> {
    Free,
    InFlight,
    Done(R),
}

impl<R: Copy> Slots<R> {
    pub(crate) fn new(depth: u32) -> Box<Slots<R>> {
        let slot = |index| Slot {
            state: Cell::new(State::Free),
            waker: Cell::new(None),
            index,
            owner: Cell::new(std::ptr::null()),
        };
        let slots = Box::new(Slots {
            slots: (0..depth).map(slot).collect(),
            free: RefCell::new((0..depth).rev().collect()),
            permits: Permits::new(depth as usize),
        });
        for slot in &slots.slots {
            slot.owner.set(&raw const *slots);
        }
        slots
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.borrow().len()
    }

    /// Takes a free slot. The caller holds a permit.
    #[inline]
    pub(crate) fn take_permitted(&self) -> u32 {
        let slot = self.free.borrow_mut().pop().expect("a permit stands for a free slot");
        self.slots[slot as usize].state.set(State::InFlight);
        slot
    }

    #[inline]
    pub(crate) fn give_back(&self, slot: u32) {
        self.slots[slot as usize].state.set(State::Free);
        self.free.borrow_mut().push(slot);
        self.permits.release(1);
    }

    #[inline]
    pub(crate) fn complete(&self, slot: u32, result: R) {
        let Some(slot) = self.slots.get(slot as usize) else {
            tracing::error!(slot, "a queue completed a slot that does not exist");
            return;
        };
        assert!(matches!(slot.state.get(), State::InFlight), "slot {} completed twice", slot.index);
        slot.state.set(State::Done(result));
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
    }

    /// The result of the operation in a slot that the caller has taken.
    pub(crate) fn result(&self, slot: u32) -> SlotResult<'_, R> {
        SlotResult(&self.slots[slot as usize])
    }
}

impl Slots<IoResult> {
    /// The result of the request in a slot that the caller has taken.
    #[inline]
    pub(crate) fn future(&self, slot: u32) -> IoFuture<'_> {
        let operation = NonNull::from(&self.slots[slot as usize]);
        // SAFETY: the slot is taken, so no other future points at it, and it lives as long as
        // `self`.
        unsafe { IoFuture::from_operation(operation) }
    }
}

impl<R: Copy> Drop for Slots<R> {
    fn drop(&mut self) {
        if self.in_flight() > 0 && !std::thread::panicking() {
            die("a channel was dropped while requests were in flight");
        }
    }
}

impl<R: Copy> Slot<R> {
    #[inline]
    fn poll_result(&self, cx: &mut Context<'_>) -> Poll<R> {
        if let State::Done(result) = self.state.get() {
            return Poll::Ready(result);
        }
        self.waker.set(Some(cx.waker().clone()));
        Poll::Pending
    }

    #[inline]
    fn free(&self) {
        if matches!(self.state.get(), State::InFlight) {
            die("a request was dropped before its device had finished with its memory");
        }
        // SAFETY: the owner outlives its slots' futures, which borrow it.
        unsafe { &*self.owner.get() }.give_back(self.index);
    }
}

impl Operation for Slot<IoResult> {
    #[inline]
    fn poll(&self, cx: &mut Context<'_>) -> Poll<IoResult> {
        self.poll_result(cx)
    }

    #[inline]
    fn release(&self, _: NonNull<u8>) {
        self.free();
    }
}

/// The future of [`Slots::result`]. Dropping it frees the slot.
pub(crate) struct SlotResult<'a, R: Copy>(&'a Slot<R>);

impl<R: Copy> Future for SlotResult<'_, R> {
    type Output = R;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R> {
        self.0.poll_result(cx)
    }
}

impl<R: Copy> Drop for SlotResult<'_, R> {
    fn drop(&mut self) {
        self.0.free();
    }
}

/// Ends the process, because a device or another core may still write into memory that is about to
/// be reused.
#[cold]
pub fn die(why: &str) -> ! {
    tracing::error!("{why}");
    eprintln!("freestone: {why}");
    std::process::abort()
}
