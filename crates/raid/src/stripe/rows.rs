//! Locks on rows of stripes, for one core. Overlapping ranges are locked in order of the requests.
//!
//! An operation that changes rows locks them exclusively. An operation that computes lost strips
//! from others shares the lock with other readers. Requests on other rows of the same stripe do not
//! wait.
//!
//! Writes without an entry in the log lock rows in words ([`LockWords`]), on any core. The locks of
//! this core exclude them.

use super::hasher::StripeHasher;
use super::lock_words::LockWords;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Empty lists that are kept for reuse.
const SPARE_LISTS: usize = 256;

/// Locks on rows.
#[derive(Default)]
pub struct RowLocks {
    stripes: RefCell<HashMap<u64, Vec<Claim>, BuildHasherDefault<StripeHasher>>>,
    spare: RefCell<Vec<Vec<Claim>>>,
    next_id: Cell<u64>,
    /// Of an array that logs nothing while it is healthy.
    words: Option<Arc<LockWords>>,
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
    /// Locks of one core of an array with lock words.
    pub fn with_words(words: Arc<LockWords>) -> RowLocks {
        RowLocks { words: Some(words), ..RowLocks::default() }
    }

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
        let word = self.words.as_ref().filter(|_| !rows.is_empty()).map(|words| {
            let word = words.of(stripe);
            words.enter(word);
            word
        });
        let mut stripes = self.stripes.borrow_mut();
        let claims =
            stripes.entry(stripe).or_insert_with(|| self.spare.borrow_mut().pop().unwrap_or_default());
        let mut claim = Claim { id, rows, is_shared, is_held: false, waker: None };
        claim.is_held = !claims.iter().any(|earlier| earlier.conflicts(&claim));
        let is_held = claim.is_held;
        claims.push(claim);
        Lock { guard: Some(RowGuard { locks: self, stripe, id, word }), is_held }
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
    /// Whether this core has granted it.
    is_held: bool,
}

impl<'a> Future for Lock<'a> {
    type Output = RowGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RowGuard<'a>> {
        let this = &mut *self;
        let guard = this.guard.as_ref().expect("not polled after its end");
        if !this.is_held {
            let mut stripes = guard.locks.stripes.borrow_mut();
            let claims = stripes.get_mut(&guard.stripe).expect("the claim is there until it is released");
            let claim = claims.iter_mut().find(|claim| claim.id == guard.id).expect("as above");
            if !claim.is_held {
                claim.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            this.is_held = true;
        }
        if let (Some(words), Some(word)) = (&guard.locks.words, guard.word)
            && words.poll_free(word, cx).is_pending()
        {
            return Poll::Pending;
        }
        Poll::Ready(this.guard.take().expect("just seen"))
    }
}

/// Locked rows; dropping it unlocks them.
pub struct RowGuard<'a> {
    locks: &'a RowLocks,
    stripe: u64,
    id: u64,
    /// The stripe's lock word, which counts this lock.
    word: Option<usize>,
}

impl Drop for RowGuard<'_> {
    fn drop(&mut self) {
        if let (Some(words), Some(word)) = (&self.locks.words, self.word) {
            words.leave(word);
        }
        self.locks.release(self.stripe, self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::task::Wake;

    const STRIP: u32 = 64 << 10;

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

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn the_owner_waits_for_writes_in_flight_and_lets_no_other_one_in() {
        let words = Arc::new(LockWords::new(STRIP));
        let locks = RowLocks::with_words(words.clone());
        let write = words.try_lock(7, 0..4096).unwrap();
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let cx = &mut Context::from_waker(&waker);
        let mut scrub = pin!(locks.lock(7, 32768..STRIP));
        assert!(scrub.as_mut().poll(cx).is_pending());
        assert!(words.try_lock(7, 8192..12288).is_none(), "the owner has been waiting");
        assert!(!woken.0.load(Ordering::SeqCst));
        drop(write);
        assert!(woken.0.load(Ordering::SeqCst));
        let Poll::Ready(guard) = scrub.as_mut().poll(cx) else { panic!("no row is locked") };
        assert!(words.try_lock(7, 0..4096).is_none());
        let mut other = pin!(locks.lock(7, 0..4096));
        assert!(other.as_mut().poll(cx).is_ready(), "operations of the owner have locks of their own");
        drop(guard);
        assert!(words.try_lock(7, 0..4096).is_some());
    }

    #[test]
    fn an_operation_of_the_owner_that_is_given_up_lets_writes_in() {
        let words = Arc::new(LockWords::new(STRIP));
        let locks = RowLocks::with_words(words.clone());
        let write = words.try_lock(7, 0..4096).unwrap();
        drop(locks.lock(7, 0..4096));
        assert!(words.try_lock(7, 4096..8192).is_some());
        drop(write);
        assert!(locks.is_empty());
    }

    /// Threads as writers on other cores, and this one as the owner: what each of them finds while
    /// it holds the rows is what it left there.
    #[test]
    fn threads_exclude_each_other() {
        let words = Arc::new(LockWords::new(STRIP));
        let rows = Arc::new(AtomicU64::new(0));
        let alone = |rows: &AtomicU64, who: u64| {
            assert_eq!(rows.swap(who, Ordering::Relaxed), 0);
            std::hint::spin_loop();
            assert_eq!(rows.swap(0, Ordering::Relaxed), who);
        };
        let is_over = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (1..=2)
            .map(|who| {
                let (words, rows, is_over) = (words.clone(), rows.clone(), is_over.clone());
                std::thread::spawn(move || {
                    let mut count = 0u64;
                    while count < 1000 || !is_over.load(Ordering::Relaxed) {
                        match words.try_lock(7, 0..4096) {
                            Some(_locked) => alone(&rows, who),
                            None => std::thread::yield_now(),
                        }
                        count += 1;
                    }
                })
            })
            .collect();
        struct Unpark(std::thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let locks = RowLocks::with_words(words);
        for _ in 0..2000 {
            let mut lock = pin!(locks.lock(7, 0..STRIP));
            let _guard = loop {
                match lock.as_mut().poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(guard) => break guard,
                    Poll::Pending => std::thread::park(),
                }
            };
            alone(&rows, 3);
        }
        is_over.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    }
}
