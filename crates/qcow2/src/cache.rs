//! A cache of one core: tables or clusters, by number. The clock algorithm evicts.

use reactor::Permits;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Loads that run at once; a key belongs to one of them.
const LANES: u64 = 16;
/// Entries that a core keeps even if other cores use up the budget.
const LEAST_ENTRIES: usize = 4;

/// Bytes that the caches of all cores may hold together.
#[derive(Clone)]
pub(crate) struct Budget(Arc<AtomicI64>);

impl Budget {
    pub(crate) fn new(bytes: u64) -> Budget {
        Budget(Arc::new(AtomicI64::new(i64::try_from(bytes).unwrap_or(i64::MAX))))
    }

    fn take(&self, bytes: usize) {
        self.0.fetch_sub(bytes as i64, Ordering::Relaxed);
    }

    fn give(&self, bytes: usize) {
        self.0.fetch_add(bytes as i64, Ordering::Relaxed);
    }

    fn is_exceeded(&self) -> bool {
        self.0.load(Ordering::Relaxed) < 0
    }
}

struct Slot {
    bytes: Rc<[u8]>,
    is_used: Cell<bool>,
}

/// Bytes by key. Tasks that need the same key wait for one load.
pub(crate) struct Cache {
    budget: Budget,
    most_entries: usize,
    slots: RefCell<HashMap<u64, Slot>>,
    clock: RefCell<VecDeque<u64>>,
    lanes: [Permits; LANES as usize],
}

impl Cache {
    /// A cache of at most `most_entries`, within `budget`.
    pub(crate) fn new(budget: Budget, most_entries: usize) -> Cache {
        Cache {
            budget,
            most_entries: most_entries.max(1),
            slots: RefCell::default(),
            clock: RefCell::default(),
            lanes: std::array::from_fn(|_| Permits::new(1)),
        }
    }

    /// The bytes of `key`, if they are here.
    pub(crate) fn get(&self, key: u64) -> Option<Rc<[u8]>> {
        let slots = self.slots.borrow();
        let slot = slots.get(&key)?;
        slot.is_used.set(true);
        Some(slot.bytes.clone())
    }

    /// The bytes of `key`, from `load` if they are not here.
    ///
    /// # Errors
    /// The error of `load`; the next call tries again.
    pub(crate) async fn get_or_load<E>(
        &self,
        key: u64,
        load: impl Future<Output = Result<Rc<[u8]>, E>>,
    ) -> Result<Rc<[u8]>, E> {
        let find_or_load = async {
            match self.get(key) {
                Some(bytes) => Ok(bytes),
                None => load.await.inspect(|bytes| self.insert(key, bytes.clone())),
            }
        };
        self.lanes[(key % LANES) as usize].during(1, find_or_load).await
    }

    fn insert(&self, key: u64, bytes: Rc<[u8]>) {
        let (mut slots, mut clock) = (self.slots.borrow_mut(), self.clock.borrow_mut());
        self.budget.take(bytes.len());
        slots.insert(key, Slot { bytes, is_used: Cell::new(false) });
        clock.push_back(key);
        while slots.len() > self.most_entries || self.budget.is_exceeded() && slots.len() > LEAST_ENTRIES {
            let Some(oldest) = clock.pop_front() else { break };
            if slots.get(&oldest).is_some_and(|slot| slot.is_used.replace(false)) {
                clock.push_back(oldest);
            } else if let Some(slot) = slots.remove(&oldest) {
                self.budget.give(slot.bytes.len());
            }
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.slots.get_mut().values().for_each(|slot| self.budget.give(slot.bytes.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn load(cache: &Cache, key: u64, loads: &Cell<u32>) -> Rc<[u8]> {
        let loaded = cache.get_or_load(key, async {
            loads.set(loads.get() + 1);
            reactor::yield_now().await;
            Ok::<_, ()>(Rc::from(vec![key as u8; 100]))
        });
        loaded.await.unwrap()
    }

    #[test]
    fn the_budget_bounds_all_caches_and_used_entries_stay() {
        reactor::run(async {
            let budget = Budget::new(1000);
            let (first, second) = (Cache::new(budget.clone(), 100), Cache::new(budget.clone(), 100));
            let loads = Cell::new(0);
            for key in 0..20 {
                load(&first, key, &loads).await;
                assert_eq!(load(&first, 0, &loads).await[..], [0; 100]);
            }
            assert_eq!((loads.get(), first.slots.borrow().len()), (20, 10));
            for key in 0..20 {
                load(&second, key, &loads).await;
            }
            assert_eq!(second.slots.borrow().len(), LEAST_ENTRIES);
            drop((first, second));
            assert_eq!(budget.0.load(Ordering::Relaxed), 1000);
        });
    }

    #[test]
    fn tasks_that_need_one_key_wait_for_one_load() {
        reactor::run(async {
            let shared = Rc::new((Cache::new(Budget::new(1000), 100), Cell::new(0)));
            let core = reactor::current();
            let done = Rc::new(Cell::new(0));
            for _ in 0..8 {
                let (shared, done) = (shared.clone(), done.clone());
                core.spawn(async move {
                    load(&shared.0, 7, &shared.1).await;
                    done.set(done.get() + 1);
                });
            }
            while done.get() < 8 {
                reactor::yield_now().await;
            }
            assert_eq!(shared.1.get(), 1);
        });
    }
}
