//! Locks on rows of stripes, for one core. Overlapping ranges are locked in order of the requests.
//!
//! An operation that changes rows locks them exclusively. An operation that computes lost strips
//! from others shares the lock with other readers. Requests on other rows of the same stripe do not
//! wait.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Empty lists that are kept for reuse.
const SPARE_LISTS: usize = 256;

/// Locks on rows.
#[derive(Default)]
pub struct RowLocks {
    stripes: RefCell<HashMap<u64, Vec<Claim>, BuildHasherDefault<StripeHasher>>>,
    spare: RefCell<Vec<Vec<Claim>>>,
    next_id: Cell<u64>,
}

/// A lock that is held or waited for. Claims are in order of arrival.
struct Claim {
    id: u64,
    rows: Range<u32>,
    is_shared: bool,
    is_held: bool,
    waker: Option<Waker>,
}

impl Claim {
    fn conflicts(&self, other: &Claim) -> bool {
        let overlap = self.rows.start < other.rows.end && other.rows.start < self.rows.end;
        overlap && !(self.is_shared && other.is_shared)
    }
}

impl RowLocks {
    /// Locks bytes `rows` of every strip of a stripe exclusively.
    pub fn lock(&self, stripe: u64, rows: Range<u32>) -> Lock<'_> {
        self.claim(stripe, rows, false)
    }

    /// Locks rows against changes, together with other readers.
    pub fn lock_shared(&self, stripe: u64, rows: Range<u32>) -> Lock<'_> {
        self.claim(stripe, rows, true)
    }

    /// Number of locks that are held or waited for.
    pub fn len(&self) -> usize {
        self.stripes.borrow().values().map(Vec::len).sum()
    }

    /// Whether no lock is held or waited for.
    pub fn is_empty(&self) -> bool {
        self.stripes.borrow().is_empty()
    }

    fn claim(&self, stripe: u64, rows: Range<u32>, is_shared: bool) -> Lock<'_> {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        let mut stripes = self.stripes.borrow_mut();
        let claims =
            stripes.entry(stripe).or_insert_with(|| self.spare.borrow_mut().pop().unwrap_or_default());
        let mut claim = Claim { id, rows, is_shared, is_held: false, waker: None };
        claim.is_held = !claims.iter().any(|earlier| earlier.conflicts(&claim));
        let is_held = claim.is_held;
        claims.push(claim);
        Lock { guard: Some(RowGuard { locks: self, stripe, id }), is_held }
    }

    fn release(&self, stripe: u64, id: u64) {
        let mut stripes = self.stripes.borrow_mut();
        let Entry::Occupied(mut of_stripe) = stripes.entry(stripe) else {
            unreachable!("the claim is there until now")
        };
        let claims = of_stripe.get_mut();
        claims.retain(|claim| claim.id != id);
        if claims.is_empty() {
            let list = of_stripe.remove();
            let mut spare = self.spare.borrow_mut();
            if spare.len() < SPARE_LISTS {
                spare.push(list);
            }
            return;
        }
        for i in 0..claims.len() {
            if !claims[i].is_held && !claims[..i].iter().any(|earlier| earlier.conflicts(&claims[i])) {
                claims[i].is_held = true;
                if let Some(waker) = claims[i].waker.take() {
                    waker.wake();
                }
            }
        }
    }
}

/// The future of a lock.
pub struct Lock<'a> {
    guard: Option<RowGuard<'a>>,
    /// Whether it was held at once.
    is_held: bool,
}

impl<'a> Future for Lock<'a> {
    type Output = RowGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RowGuard<'a>> {
        if self.is_held {
            return Poll::Ready(self.guard.take().expect("not polled after its end"));
        }
        let guard = self.guard.as_ref().expect("not polled after its end");
        let mut stripes = guard.locks.stripes.borrow_mut();
        let claims = stripes.get_mut(&guard.stripe).expect("the claim is there until it is released");
        let claim = claims.iter_mut().find(|claim| claim.id == guard.id).expect("as above");
        if !claim.is_held {
            claim.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        drop(stripes);
        Poll::Ready(self.guard.take().expect("just seen"))
    }
}

/// Locked rows; dropping it unlocks them.
pub struct RowGuard<'a> {
    locks: &'a RowLocks,
    stripe: u64,
    id: u64,
}

impl Drop for RowGuard<'_> {
    fn drop(&mut self) {
        self.locks.release(self.stripe, self.id);
    }
}

/// Spreads stripe numbers by one multiplication.
#[derive(Default)]
pub struct StripeHasher(u64);

impl Hasher for StripeHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn poll<'a>(lock: &mut Lock<'a>) -> Option<RowGuard<'a>> {
        match Pin::new(lock).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => None,
        }
    }

    #[test]
    fn overlapping_rows_are_served_in_their_order_and_others_at_once() {
        let locks = RowLocks::default();
        let first = poll(&mut locks.lock(7, 0..10)).unwrap();
        let mut second = locks.lock(7, 5..15);
        let mut third = locks.lock(7, 12..20);
        assert!(poll(&mut second).is_none());
        assert!(poll(&mut third).is_none(), "it came after one that it overlaps with");
        assert!(poll(&mut locks.lock(7, 20..30)).is_some());
        assert!(poll(&mut locks.lock(8, 0..10)).is_some());
        drop(first);
        let second = poll(&mut second).unwrap();
        assert!(poll(&mut third).is_none());
        drop(second);
        assert!(poll(&mut third).is_some());
        drop(third);
        assert!(locks.is_empty());
    }

    #[test]
    fn readers_share_and_a_writer_waits_for_them() {
        let locks = RowLocks::default();
        let one = poll(&mut locks.lock_shared(1, 0..4)).unwrap();
        let two = poll(&mut locks.lock_shared(1, 0..4)).unwrap();
        let mut writer = locks.lock(1, 0..1);
        let mut late = locks.lock_shared(1, 0..4);
        drop(one);
        assert!(poll(&mut writer).is_none());
        drop(two);
        assert!(poll(&mut late).is_none(), "a reader does not overtake a writer");
        drop(poll(&mut writer).unwrap());
        assert!(poll(&mut late).is_some());
    }

    #[test]
    fn a_lock_that_is_given_up_lets_the_next_one_in() {
        let locks = Rc::new(RowLocks::default());
        let held = poll(&mut locks.lock(1, 0..4)).unwrap();
        let given_up = locks.lock(1, 0..4);
        let mut next = locks.lock(1, 0..4);
        drop(given_up);
        assert!(poll(&mut next).is_none());
        drop(held);
        assert!(poll(&mut next).is_some());
    }
}
