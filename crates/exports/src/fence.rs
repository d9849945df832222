//! Waiting until what was admitted before has ended, on any core.
//!
//! Reservations of NVMe need it: a host that loses the right to write may have writes on their way, on any core. Whoever took the right from it must
//! not be told so before those have ended: a write that came later would be lost under one that is older. So each core
//! counts the writes of a namespace in epochs. A [`Gate`] that is closed begins a new epoch, and is done when the old
//! one, and those before it, have no writes left. Nothing of this costs a write more than a counter of its own core.

use reactor::{CoreRef, NotSent, yield_now};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

thread_local! {
    /// The gates of this core, by the number of their namespace.
    static GATES: RefCell<HashMap<u64, Weak<Gate>>> = RefCell::default();
}

/// The number of something whose writes are counted, which nothing else in this program has.
pub(crate) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Where the writes of one core to one namespace pass.
#[derive(Default)]
pub(crate) struct Gate {
    epoch: RefCell<Rc<Epoch>>,
}

/// A write on its way.
pub(crate) struct Running {
    _epoch: Rc<Epoch>,
}

/// Writes that have passed since the gate was closed the last time: as many as hold it.
#[derive(Default)]
struct Epoch {
    /// The next one is over after this one.
    next: OnceCell<Rc<Epoch>>,
    /// Who waits for its end.
    _waits: OnceCell<Arc<Hold>>,
}

impl Gate {
    /// The calling core's gate of a namespace.
    pub(crate) fn of(namespace: u64) -> Rc<Gate> {
        GATES.with_borrow_mut(|gates| {
            gates.retain(|_, gate| gate.strong_count() > 0);
            let open = gates.get(&namespace).and_then(Weak::upgrade);
            open.unwrap_or_else(|| {
                let gate = Rc::new(Gate::default());
                gates.insert(namespace, Rc::downgrade(&gate));
                gate
            })
        })
    }

    /// A write passes; it has ended when what is returned is dropped.
    #[inline]
    pub(crate) fn pass(&self) -> Running {
        Running { _epoch: self.epoch.borrow().clone() }
    }

    /// Keeps `hold` until all that has passed has ended.
    fn close(&self, hold: Arc<Hold>) {
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

/// Waits until every write to a namespace that has passed a gate of one of the cores has ended. On a core.
pub(crate) async fn wait_for_writes(namespace: u64, cores: &[CoreRef]) {
    let (hold, released) = hold();
    for core in cores {
        let hold = hold.clone();
        let mut message: Box<dyn FnOnce(&reactor::Core) + Send> = Box::new(move |_| {
            let gate = GATES.with_borrow(|gates| gates.get(&namespace).and_then(Weak::upgrade));
            if let Some(gate) = gate {
                gate.close(hold);
            }
        });
        // Two cores that wait for room in each other's inbox would wait for ever.
        while let Err(NotSent::Full(back)) = core.try_run(message) {
            message = back;
            yield_now().await;
        }
    }
    drop(hold);
    released.await;
}

/// Something waits as long as there is one of these; from any thread.
pub(crate) struct Hold(Arc<Mutex<Waiting>>);

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

/// A hold, to be cloned as often as need be, and the end of all clones.
pub(crate) fn hold() -> (Arc<Hold>, impl Future<Output = ()>) {
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

    /// Closes the gate, and returns a look at whether that is done.
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
    fn who_closes_later_waits_for_everything_before() {
        let gate = Gate::default();
        let one = gate.pass();
        let first = close(&gate);
        let two = gate.pass();
        let second = close(&gate);
        let third = close(&gate);
        drop(two);
        assert!(!first() && !second() && !third(), "the first write is still on its way");
        drop(one);
        assert!(first() && second() && third());
        assert!(close(&gate)());
    }

    #[test]
    fn queues_of_a_core_share_a_gate() {
        let (one, other) = (Gate::of(u64::MAX), Gate::of(u64::MAX - 1));
        assert!(Rc::ptr_eq(&one, &Gate::of(u64::MAX)) && !Rc::ptr_eq(&one, &other));
        let write = one.pass();
        drop(one);
        drop(write);
    }
}
