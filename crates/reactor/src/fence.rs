//! Waits until earlier requests have ended, on all cores.
//!
//! NVMe reservations need it for writes. A host that loses the right to write may have writes in
//! flight, on any core. The host that preempted it must get its reply only after those have ended:
//! otherwise an old write could overwrite a newer one. So each core counts the requests of an
//! object in epochs. A closed [`Gate`] begins a new epoch. It is done once the old epoch, and those
//! before it, have no requests left. A request pays no more than a counter of its own core.

use crate::remote::{CoreRef, NotSent};
use crate::yield_now;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

thread_local! {
    /// The gates of this core, by the number of their object.
    static GATES: RefCell<HashMap<u64, Weak<Gate>>> = RefCell::default();
}

/// Returns a number for an object whose requests are counted, unique in this process.
pub fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Counts the requests of one core to one object.
#[derive(Default)]
pub struct Gate {
    epoch: RefCell<Rc<Epoch>>,
}

/// A request in flight, until this is dropped.
pub struct Running {
    _epoch: Rc<Epoch>,
}

/// The requests that passed between two closings of the gate; each holds a reference.
#[derive(Default)]
struct Epoch {
    /// The next epoch, which ends after this one.
    next: OnceCell<Rc<Epoch>>,
    /// The hold to release when this epoch ends.
    _waits: OnceCell<Arc<Hold>>,
}

impl Gate {
    /// Returns the calling core's gate of an object.
    pub fn of(object: u64) -> Rc<Gate> {
        GATES.with_borrow_mut(|gates| {
            gates.retain(|_, gate| gate.strong_count() > 0);
            let open = gates.get(&object).and_then(Weak::upgrade);
            open.unwrap_or_else(|| {
                let gate = Rc::new(Gate::default());
                gates.insert(object, Rc::downgrade(&gate));
                gate
            })
        })
    }

    /// Counts a request, until the result is dropped.
    #[inline]
    pub fn pass(&self) -> Running {
        Running { _epoch: self.epoch.borrow().clone() }
    }

    /// Keeps `hold` until all requests that passed so far have ended.
    pub fn close(&self, hold: Arc<Hold>) {
        let mut epoch = self.epoch.borrow_mut();
        if Rc::strong_count(&epoch) == 1 {
            return; // nothing is on its way
        }
        let next = Rc::<Epoch>::default();
        let old = std::mem::replace(&mut *epoch, next.clone());
        let is_first = old.next.set(next).is_ok() && old._waits.set(hold).is_ok();
        debug_assert!(is_first, "an epoch ends once");
    }
}

/// Waits until every request to an object that passed a gate of one of the cores has ended. Must
/// run on a core.
pub async fn wait(object: u64, cores: &[CoreRef]) {
    let (hold, released) = hold();
    for core in cores {
        let hold = hold.clone();
        let mut message: Box<dyn FnOnce(&crate::Core) + Send> = Box::new(move |_| {
            let gate = GATES.with_borrow(|gates| gates.get(&object).and_then(Weak::upgrade));
            if let Some(gate) = gate {
                gate.close(hold);
            }
        });
        // Two cores that wait for room in each other's inbox would deadlock.
        while let Err(NotSent::Full(back)) = core.try_run(message) {
            message = back;
            yield_now().await;
        }
    }
    drop(hold);
    released.await;
}

/// A waiter waits while any clone of its hold exists; clones may move between threads.
pub struct Hold(Arc<Mutex<Waiting>>);

#[derive(Default)]
struct Waiting {
    is_over: bool,
    waker: Option<Waker>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut waiting = lock(&self.0);
        waiting.is_over = true;
        waiting.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// Returns a hold to clone, and a future that ends when all clones have been dropped.
pub fn hold() -> (Arc<Hold>, impl Future<Output = ()>) {
    let waiting = Arc::<Mutex<Waiting>>::default();
    let released = waiting.clone();
    let wait = poll_fn(move |cx| {
        let mut waiting = lock(&released);
        if waiting.is_over {
            return Poll::Ready(());
        }
        waiting.waker = Some(cx.waker().clone());
        Poll::Pending
    });
    (Arc::new(Hold(waiting)), wait)
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_released(hold: &Arc<Hold>) -> bool {
        lock(&hold.0).is_over
    }

    /// Closes the gate, and returns a function that reports whether that is done.
    fn close(gate: &Gate) -> impl Fn() -> bool {
        let (hold, _) = hold();
        let waiting = hold.0.clone();
        assert!(!is_released(&hold));
        gate.close(hold);
        move || lock(&waiting).is_over
    }

    #[test]
    fn a_gate_waits_for_what_has_passed_and_for_nothing_later() {
        let gate = Gate::default();
        assert!(close(&gate)(), "nothing is on its way");
        let (one, two) = (gate.pass(), gate.pass());
        let is_done = close(&gate);
        let late = gate.pass();
        drop(one);
        assert!(!is_done());
        drop(two);
        assert!(is_done());
        drop(late);
    }

    #[test]
    fn a_later_close_waits_for_all_earlier_requests() {
        let gate = Gate::default();
        let one = gate.pass();
        let first = close(&gate);
        let two = gate.pass();
        let second = close(&gate);
        let third = close(&gate);
        drop(two);
        assert!(!first() && !second() && !third(), "the first request is still on its way");
        drop(one);
        assert!(first() && second() && third());
        assert!(close(&gate)());
    }

    #[test]
    fn queues_of_a_core_share_a_gate() {
        let (one, other) = (Gate::of(u64::MAX), Gate::of(u64::MAX - 1));
        assert!(Rc::ptr_eq(&one, &Gate::of(u64::MAX)) && !Rc::ptr_eq(&one, &other));
        let request = one.pass();
        drop(one);
        drop(request);
    }
}
