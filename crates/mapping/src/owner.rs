//! The owner's side of its leaves: what is loaded, locked, changed, saved and evicted. All of it
//! runs on one core.

use crate::leaf::Leaf;
use crate::mutant::{self, Mutant};
use block::IoError;
use reactor::Permits;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// A leaf at its owner.
pub(crate) struct Owned {
    pub number: u64,
    pub leaf: Arc<Leaf>,
    state: Cell<State>,
    /// Locks of slots that are in use.
    locks: RefCell<HashMap<usize, Rc<Permits>>>,
    /// Slots that have changed since the last save began.
    changed: RefCell<Option<Range<usize>>>,
    /// One save at a time.
    pub saving: Permits,
    /// Tasks that wait for another state.
    waiting: RefCell<Vec<Waker>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// On its way from the disk.
    Loading,
    Ready,
    /// On its way out of all directories.
    Evicting,
    /// Its load failed.
    Failed(IoError),
    /// No longer in the table of leaves.
    Gone,
}

impl Owned {
    fn new(number: u64) -> Rc<Owned> {
        Rc::new(Owned {
            number,
            leaf: Arc::new(Leaf::new()),
            state: Cell::new(State::Loading),
            locks: RefCell::default(),
            changed: RefCell::default(),
            saving: Permits::new(1),
            waiting: RefCell::default(),
        })
    }

    fn turn(&self, state: State) {
        self.state.set(state);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    async fn turned(&self, from: State) {
        poll_fn(|cx| {
            if self.state.get() != from {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Waits for the lock of a slot, of a leaf that was found ready. First come, first served. A
    /// locked leaf is not evicted.
    pub async fn lock(&self, slot: usize) {
        let lock = self.locks.borrow_mut().entry(slot).or_insert_with(|| Rc::new(Permits::new(1))).clone();
        if !mutant::is(Mutant::NoSlotLock) {
            lock.acquire(1).await;
        }
    }

    /// Whether the leaf is in memory and no task has locked a slot.
    pub fn is_unlocked(&self, slot: usize) -> bool {
        let is_locked = self.locks.borrow().contains_key(&slot);
        self.state.get() == State::Ready && (!is_locked || mutant::is(Mutant::LockNotSeen))
    }

    /// Frees the lock of a slot.
    pub fn unlock(&self, slot: usize) {
        let mut locks = self.locks.borrow_mut();
        let Some(lock) = locks.get(&slot) else { return };
        lock.release(1);
        if lock.try_acquire(1) {
            locks.remove(&slot); // no task waited for it
        }
    }

    /// Sets an entry, whose slot the caller has locked.
    pub fn set(&self, slot: usize, entry: u64) {
        self.leaf.set(slot, entry);
        self.note_change(slot..slot + 1);
    }

    /// Sets an entry, whose slot the caller has locked, and the next one.
    pub fn set_pair(&self, slot: usize, first: u64, second: u64) {
        self.leaf.set_pair(slot, first, second);
        self.note_change(slot..slot + 2);
    }

    /// Marks slots as changed.
    pub fn note_change(&self, slots: Range<usize>) {
        let mut changed = self.changed.borrow_mut();
        *changed = Some(match changed.take() {
            Some(before) => before.start.min(slots.start)..before.end.max(slots.end),
            None => slots,
        });
    }

    /// The slots that a save must write, which then count as saved.
    pub fn take_changes(&self) -> Option<Range<usize>> {
        match mutant::is(Mutant::ChangeDuringSave) {
            true => self.changed.borrow().clone(),
            false => self.changed.take(),
        }
    }

    /// After a save: of a broken variant, everything counts as saved.
    pub fn end_save(&self) {
        if mutant::is(Mutant::ChangeDuringSave) {
            self.changed.take();
        }
    }

    /// Whether a flush has to wait for the leaf: it has changed, or is being saved.
    pub fn is_dirty(&self) -> bool {
        self.changed.borrow().is_some() || self.is_being_saved()
    }

    fn is_being_saved(&self) -> bool {
        let is_free = self.saving.try_acquire(1);
        if is_free {
            self.saving.release(1);
        }
        !is_free
    }

    /// Whether it can be evicted now.
    fn is_idle(&self) -> bool {
        let is_locked = !self.locks.borrow().is_empty() && !mutant::is(Mutant::LockedEviction);
        self.state.get() == State::Ready && !is_locked
    }
}

/// The leaves of one owner.
pub(crate) struct Leaves {
    all: RefCell<BTreeMap<u64, Rc<Owned>>>,
    /// The order in which leaves are considered for eviction.
    clock: RefCell<VecDeque<u64>>,
    /// Number of leaves to keep in memory.
    budget: usize,
    pub is_evicting: Cell<bool>,
}

/// The result of [`Leaves::find`].
pub(crate) enum Found {
    Ready(Rc<Owned>),
    /// The caller loads it, and then calls [`Leaves::end_load`].
    ToLoad(Rc<Owned>),
}

impl Leaves {
    pub fn new(budget: usize) -> Leaves {
        Leaves { all: RefCell::default(), clock: RefCell::default(), budget, is_evicting: Cell::new(false) }
    }

    /// The leaf `number`. Of several tasks that need it, the first loads it and the others wait.
    ///
    /// # Errors
    /// The error of the load that it waited for.
    pub async fn find(&self, number: u64) -> Result<Found, IoError> {
        loop {
            let known = self.all.borrow().get(&number).cloned();
            let Some(owned) = known else {
                let owned = Owned::new(number);
                self.all.borrow_mut().insert(number, owned.clone());
                self.clock.borrow_mut().push_back(number);
                return Ok(Found::ToLoad(owned));
            };
            match owned.state.get() {
                State::Ready => return Ok(Found::Ready(owned)),
                state => owned.turned(state).await,
            }
            if let State::Failed(error) = owned.state.get() {
                return Err(error);
            }
        }
    }

    /// The leaf `number`, if it is in memory.
    pub fn get(&self, number: u64) -> Option<Rc<Owned>> {
        self.all.borrow().get(&number).cloned()
    }

    /// Ends the load of a leaf.
    pub fn end_load(&self, owned: &Owned, result: Result<(), IoError>) {
        match result {
            Ok(()) => owned.turn(State::Ready),
            Err(error) => {
                self.all.borrow_mut().remove(&owned.number);
                owned.turn(State::Failed(error));
            }
        }
    }

    /// The leaves that a flush has to wait for.
    pub fn dirty(&self) -> Vec<Rc<Owned>> {
        self.all.borrow().values().filter(|owned| owned.is_dirty()).cloned().collect()
    }

    /// Whether there are more leaves than the budget allows.
    pub fn is_over(&self) -> bool {
        self.all.borrow().len() > self.budget
    }

    /// A leaf to evict: one that no core has read since the last look. `None` if all are in use.
    pub fn victim(&self) -> Option<Rc<Owned>> {
        let mut clock = self.clock.borrow_mut();
        let all = self.all.borrow();
        for _ in 0..2 * clock.len() {
            let number = clock.pop_front()?;
            // A leaf whose load failed is only in the clock.
            let Some(owned) = all.get(&number) else { continue };
            clock.push_back(number);
            if owned.is_idle() && !owned.leaf.take_use() {
                return Some(owned.clone());
            }
        }
        None
    }

    /// Begins to evict a leaf, if it is not in use and is saved. From now on requests for it wait.
    pub fn begin_eviction(&self, owned: &Owned) -> bool {
        let is_saved = !owned.is_dirty() || mutant::is(Mutant::DirtyEviction);
        let may_go = owned.is_idle() && is_saved;
        if may_go {
            owned.turn(State::Evicting);
        }
        may_go
    }

    /// Ends the eviction of a leaf, after every core has forgotten it.
    pub fn end_eviction(&self, owned: &Owned) {
        self.all.borrow_mut().remove(&owned.number);
        self.clock.borrow_mut().retain(|number| *number != owned.number);
        owned.turn(State::Gone);
    }
}
