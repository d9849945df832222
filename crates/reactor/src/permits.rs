//! A counting semaphore for one core, first come first served. Requests wait on it for a slot or
//! for memory.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

struct Waiter {
    /// 0 once the waiter's future was dropped.
    units: usize,
    waker: Waker,
}

/// A number of units that tasks of one core take and return. Waiters are served in order, even if a
/// later one requests less.
pub struct Permits {
    free: Cell<usize>,
    /// Ticket of the first waiter in line; every earlier ticket has been served.
    first: Cell<u64>,
    line: RefCell<VecDeque<Waiter>>,
}

impl Permits {
    /// `units` free units.
    pub fn new(units: usize) -> Permits {
        Permits { free: Cell::new(units), first: Cell::new(0), line: RefCell::default() }
    }

    /// Takes `units` if they are free and no task waits.
    #[inline]
    pub fn try_acquire(&self, units: usize) -> bool {
        let is_possible = self.free.get() >= units && self.line.borrow().is_empty();
        if is_possible {
            self.free.set(self.free.get() - units);
        }
        is_possible
    }

    /// Waits for `units`. The caller owns them when the future ends, and returns them with
    /// [`Permits::release`]. A request for more units than exist waits for ever.
    pub fn acquire(&self, units: usize) -> Acquire<'_> {
        Acquire { permits: self, units, ticket: None }
    }

    /// Returns `units` and serves the waiters.
    #[inline]
    pub fn release(&self, units: usize) {
        self.free.set(self.free.get() + units);
        if !self.line.borrow().is_empty() {
            self.serve();
        }
    }

    /// Runs `work` with `units`, which it waits for and returns at its end.
    pub async fn during<R>(&self, units: usize, work: impl Future<Output = R>) -> R {
        self.acquire(units).await;
        let result = work.await;
        self.release(units);
        result
    }

    /// Number of waiters.
    pub fn waiting(&self) -> usize {
        self.line.borrow().len()
    }

    #[cold]
    fn serve(&self) {
        let mut line = self.line.borrow_mut();
        while let Some(waiter) = line.front() {
            if waiter.units > self.free.get() {
                return;
            }
            self.free.set(self.free.get() - waiter.units);
            waiter.waker.wake_by_ref();
            line.pop_front();
            self.first.set(self.first.get() + 1);
        }
    }
}

/// The future of [`Permits::acquire`].
pub struct Acquire<'a> {
    permits: &'a Permits,
    units: usize,
    ticket: Option<u64>,
}

impl Future for Acquire<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let permits = self.permits;
        let Some(ticket) = self.ticket else {
            if permits.try_acquire(self.units) {
                return Poll::Ready(());
            }
            let mut line = permits.line.borrow_mut();
            self.ticket = Some(permits.first.get() + line.len() as u64);
            line.push_back(Waiter { units: self.units, waker: cx.waker().clone() });
            return Poll::Pending;
        };
        if ticket < permits.first.get() {
            self.ticket = None;
            return Poll::Ready(());
        }
        permits.line.borrow_mut()[(ticket - permits.first.get()) as usize].waker.clone_from(cx.waker());
        Poll::Pending
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        if ticket < self.permits.first.get() {
            self.permits.release(self.units);
            return;
        }
        let place = (ticket - self.permits.first.get()) as usize;
        self.permits.line.borrow_mut()[place].units = 0;
        self.permits.serve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(future: &mut Acquire<'_>) -> bool {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_small_request_does_not_overtake_a_large_one() {
        let permits = Permits::new(4);
        assert!(permits.try_acquire(3));
        let (mut large, mut small) = (permits.acquire(4), permits.acquire(1));
        assert!(!poll(&mut large) && !poll(&mut small));
        assert!(!permits.try_acquire(1), "a request waits");
        permits.release(3);
        assert!(poll(&mut large) && !poll(&mut small));
        permits.release(4);
        assert!(poll(&mut small));
    }

    #[test]
    fn a_dropped_waiter_blocks_no_other_and_loses_no_unit() {
        let permits = Permits::new(1);
        assert!(permits.try_acquire(1));
        let (mut first, mut second, mut third) = (permits.acquire(1), permits.acquire(1), permits.acquire(1));
        assert!(!poll(&mut first) && !poll(&mut second) && !poll(&mut third));
        drop(first);
        permits.release(1);
        drop(second); // was served, but not polled since
        assert!(poll(&mut third));
        permits.release(1);
        assert!(permits.try_acquire(1) && permits.waiting() == 0);
    }
}
