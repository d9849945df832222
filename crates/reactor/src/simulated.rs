//! Several cores in one thread under virtual time: which core has its turn next is drawn from the seed.

use crate::clock::{Clock, VirtualClock};
use crate::core::Core;
use crate::rng::Rng;
use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

/// Turns without time passing after which the run counts as hung: somebody asks again and again for what only time
/// can bring.
const MOST_TURNS_AT_A_TIME: u64 = 20_000_000;

/// Wakes tasks that have nothing to do, as stale wakers may: once in so many turns, which the seed decides too.
struct StrayWakes {
    rng: Rng,
    one_in: u64,
}

impl StrayWakes {
    fn new(seed: u64) -> StrayWakes {
        // Not the numbers that decide the order of turns.
        let rng = Rng::new(!seed);
        let one_in = [0, 0, 100, 7][(rng.next() % 4) as usize];
        StrayWakes { rng, one_in }
    }

    fn before_turn_of(&self, core: &Core) {
        if self.one_in > 0 && self.rng.next().is_multiple_of(self.one_in) {
            core.wake_any(self.rng.next());
        }
    }
}

/// Runs `count` cores in the calling thread under one virtual clock until the future that `make` returns ends. That
/// future runs on core 0. Cores have their turns in an order that the seed decides; time passes while all of them
/// wait: same seed, same run. With some seeds tasks are woken now and then that have nothing to do.
///
/// What the thread's requests leave behind serves its next run: [`block::release_pool`] gives it back.
///
/// A task of another core is made with [`Core::with_current`] and [`Core::spawn`], or by a message.
///
/// # Panics
/// When the future waits for something that no timer will bring, or the cores never come to wait.
pub fn run_simulated_cores<R: 'static, F: Future<Output = R> + 'static>(
    seed: u64,
    count: usize,
    make: impl FnOnce(VirtualClock, Vec<Core>) -> F,
) -> R {
    assert!(count > 0, "a run needs a core");
    let clock = VirtualClock::default();
    let (order, stray_wakes) = (Rng::new(seed), StrayWakes::new(seed));
    let cores: Vec<Core> = (0..count).map(|i| Core::simulated(i, &clock, order.next())).collect();
    let result = Rc::new(Cell::new(None));
    cores[0].with_current(|| {
        let (future, target) = (make(clock.clone(), cores.clone()), result.clone());
        cores[0].spawn(async move { target.set(Some(future.await)) });
    });
    let mut turns = 0;
    loop {
        let next = if count == 1 { 0 } else { (order.next() % count as u64) as usize };
        stray_wakes.before_turn_of(&cores[next]);
        let is_busy = cores[next].turn();
        turns += 1;
        assert!(turns < MOST_TURNS_AT_A_TIME, "livelock: the cores work on and time does not pass");
        if let Some(result) = result.take() {
            // What a task drops may wake a task of a core before it, whose body must not be another run's by then.
            cores.iter().for_each(Core::drop_tasks);
            cores.into_iter().for_each(Core::end);
            return result;
        }
        if !is_busy && cores.iter().all(Core::is_idle) {
            let next = cores.iter().filter_map(|core| core.timers().next_deadline()).min();
            let next = next.expect("deadlock: no task is ready and no timer runs");
            clock.advance(next.saturating_sub(clock.now_ns()));
            turns = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::current;
    use std::cell::RefCell;

    /// Two cores that send each other messages and sleep; what happened in which order.
    fn trace(seed: u64) -> Vec<(u64, usize, u64)> {
        run_simulated_cores(seed, 2, |_, cores| async move {
            let trace = Rc::new(RefCell::new(Vec::new()));
            let left = Rc::new(Cell::new(2));
            for core in &cores {
                let (trace, left, core) = (trace.clone(), left.clone(), core.clone());
                core.clone().with_current(|| {
                    let task = core.clone();
                    core.spawn(async move {
                        assert_eq!(current().index(), task.index());
                        for round in 0..10 {
                            trace.borrow_mut().push((current().now_ns(), task.index(), round));
                            task.sleep(10 + 5 * task.index() as u64).await;
                        }
                        left.set(left.get() - 1);
                    });
                });
            }
            let (sender, received) = (cores[0].remote(), std::sync::Arc::new(std::sync::Mutex::new(0)));
            let answer = received.clone();
            let there = move |core: &Core| {
                let index = core.index();
                sender.run(move |_| *answer.lock().unwrap() = index).unwrap();
            };
            cores[1].remote().run(there).unwrap();
            while left.get() > 0 {
                current().sleep(1000).await;
            }
            assert_eq!(*received.lock().unwrap(), 1, "the message went there and back");
            trace.take()
        })
    }

    #[test]
    fn two_cores_share_the_clock_and_the_seed_decides_who_is_first() {
        assert_eq!(trace(1), trace(1));
        assert!((2..20).any(|seed| trace(seed) != trace(1)), "some seed turns the cores in another order");
        let times: Vec<u64> = trace(1).iter().map(|(at, _, _)| *at).collect();
        assert!(times.is_sorted() && times.last() == Some(&135));
    }

    /// How often a task that waits for time to pass is polled.
    fn polls(seed: u64) -> u32 {
        run_simulated_cores(seed, 1, |_, cores| async move {
            let polls = Rc::new(Cell::new(0));
            let counted = polls.clone();
            let mut sleep = Box::pin(cores[0].sleep(1_000_000));
            let waiting = std::future::poll_fn(move |cx| {
                counted.set(counted.get() + 1);
                sleep.as_mut().poll(cx)
            });
            cores[0].spawn(waiting);
            // A header that has served and is free may be woken, too.
            cores[0].spawn(async {});
            for _ in 0..1000 {
                cores[0].sleep(1000).await;
            }
            cores[0].sleep(1).await;
            polls.get()
        })
    }

    #[test]
    fn with_some_seeds_tasks_are_woken_that_have_nothing_to_do() {
        let all: Vec<u32> = (0..40).map(polls).collect();
        assert_eq!(all, (0..40).map(polls).collect::<Vec<_>>(), "the seed decides");
        assert!(all.contains(&2), "none: {all:?}");
        assert!(all.iter().any(|polls| (3..100).contains(polls)), "few: {all:?}");
        assert!(all.iter().any(|polls| *polls >= 100), "many: {all:?}");
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn cores_that_wait_for_nothing_are_noticed() {
        run_simulated_cores(1, 2, |_, _| std::future::pending::<()>());
    }
}
