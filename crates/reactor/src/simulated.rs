//! Several cores in one thread under virtual time. The seed decides the order of their turns.

use crate::clock::{Clock, VirtualClock};
use crate::core::Core;
use base::Rng;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::mpsc;

/// Turns without progress of time after which the run counts as hung: a task polls for something
/// that only time can bring.
const MOST_TURNS_AT_A_TIME: u64 = 20_000_000;

/// Wakes tasks without work, as stale wakers may. The seed decides how many turns lie between two
/// such wakes.
struct StrayWakes {
    rng: RefCell<Rng>,
    one_in: u64,
}

impl StrayWakes {
    fn new(seed: u64) -> StrayWakes {
        // Independent of the numbers that decide the order of turns.
        let mut rng = Rng::new(!seed);
        let one_in = [0, 0, 100, 7][(rng.draw() % 4) as usize];
        StrayWakes { rng: rng.into(), one_in }
    }

    fn before_turn_of(&self, core: &Core) {
        let mut rng = self.rng.borrow_mut();
        if self.one_in > 0 && rng.draw().is_multiple_of(self.one_in) {
            core.wake_any(rng.draw());
        }
    }
}

/// Simulated cores that take turns while the thread that owns them waits for one of them.
///
/// Code outside the cores that calls [`CoreRef::call`](crate::CoreRef::call) or
/// [`CoreRef::block_on`](crate::CoreRef::block_on) runs unchanged on that thread. Until it has its
/// answer, all cores take turns and virtual time passes. A thread has one simulation at a time.
pub struct Simulation(Rc<Turns>);

thread_local! {
    /// The simulation that this thread owns.
    static OWNED: RefCell<Option<Rc<Turns>>> = const { RefCell::new(None) };
}

/// The cores, and the order of their turns.
struct Turns {
    clock: VirtualClock,
    order: RefCell<Rng>,
    stray_wakes: StrayWakes,
    cores: Vec<Core>,
    is_running: Cell<bool>,
}

impl Turns {
    fn new(seed: u64, count: usize) -> Turns {
        assert!(count > 0, "a run needs a core");
        let clock = VirtualClock::default();
        let (mut order, stray_wakes) = (Rng::new(seed), StrayWakes::new(seed));
        let cores = (0..count).map(|i| Core::simulated(i, &clock, order.draw())).collect();
        Turns { clock, order: order.into(), stray_wakes, cores, is_running: Cell::new(false) }
    }

    fn run_until<R>(&self, mut result: impl FnMut() -> Option<R>) -> R {
        let cores = &self.cores;
        assert!(!self.is_running.replace(true), "a task of a simulated core waits for a core");
        let mut turns = 0;
        loop {
            let draw = || self.order.borrow_mut().draw();
            let next = if cores.len() == 1 { 0 } else { (draw() % cores.len() as u64) as usize };
            self.stray_wakes.before_turn_of(&cores[next]);
            let is_busy = cores[next].turn();
            turns += 1;
            assert!(turns < MOST_TURNS_AT_A_TIME, "livelock: the cores work on and time does not pass");
            if let Some(result) = result() {
                self.is_running.set(false);
                return result;
            }
            if !is_busy && cores.iter().all(Core::is_idle) {
                let next = cores.iter().filter_map(|core| core.timers().next_deadline()).min();
                let next = next.expect("deadlock: no task is ready and no timer runs");
                self.clock.advance(next.saturating_sub(self.clock.now_ns()));
                turns = 0;
            }
        }
    }

    fn end(&self) {
        // A dropped task may wake a task of an earlier core. So no body is given to another run
        // before all tasks are dropped.
        self.cores.iter().for_each(Core::drop_tasks);
        self.cores.iter().for_each(|core| core.clone().end());
    }
}

impl Simulation {
    /// `count` cores under one virtual clock; the seed decides the order of their turns.
    ///
    /// # Panics
    /// If the thread already has a simulation, or `count` is 0.
    pub fn start(seed: u64, count: usize) -> Simulation {
        let turns = Rc::new(Turns::new(seed, count));
        let before = OWNED.replace(Some(turns.clone()));
        assert!(before.is_none(), "this thread has a simulation already");
        Simulation(turns)
    }

    /// The cores. [`Core::with_current`] and [`Core::spawn`] add a task to one.
    pub fn cores(&self) -> &[Core] {
        &self.0.cores
    }

    /// Nanoseconds since the start.
    pub fn now_ns(&self) -> u64 {
        self.0.clock.now_ns()
    }

    /// Runs turns of the cores until `is_over` returns true.
    ///
    /// # Panics
    /// On a deadlock (no task is ready and no timer runs), or if the cores never wait.
    pub fn run_until(&self, mut is_over: impl FnMut() -> bool) {
        if !is_over() {
            self.0.run_until(|| is_over().then_some(()));
        }
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        OWNED.take();
        // After a panic requests may still be in flight, whose tasks must not be dropped.
        if !std::thread::panicking() {
            self.0.end();
        }
    }
}

/// Receives the answer of a core. On a thread that owns a [`Simulation`], runs the cores until
/// then.
pub(crate) fn receive<R>(receiver: &mpsc::Receiver<R>) -> Result<R, mpsc::RecvError> {
    match OWNED.with_borrow(Option::clone) {
        None => receiver.recv(),
        Some(turns) => turns.run_until(|| match receiver.try_recv() {
            Ok(answer) => Some(Ok(answer)),
            Err(mpsc::TryRecvError::Disconnected) => Some(Err(mpsc::RecvError)),
            Err(mpsc::TryRecvError::Empty) => None,
        }),
    }
}

/// Runs `count` cores in the calling thread under one virtual clock until the future that `make`
/// returns ends. That future runs on core 0.
///
/// The seed decides the order of turns, and time passes while all cores wait: the same seed gives
/// the same run. With some seeds tasks without work are woken now and then.
///
/// The thread keeps the memory of its requests for its next run; [`block::release_pool`] frees it.
///
/// [`Core::with_current`] and [`Core::spawn`], or a message, add a task to another core.
///
/// # Panics
/// On a deadlock (no task is ready and no timer runs), or if the cores never wait.
pub fn run_simulated_cores<R: 'static, F: Future<Output = R> + 'static>(
    seed: u64,
    count: usize,
    make: impl FnOnce(VirtualClock, Vec<Core>) -> F,
) -> R {
    let turns = Turns::new(seed, count);
    let result = Rc::new(Cell::new(None));
    turns.cores[0].with_current(|| {
        let (future, target) = (make(turns.clock.clone(), turns.cores.clone()), result.clone());
        turns.cores[0].spawn(async move { target.set(Some(future.await)) });
    });
    let result = turns.run_until(|| result.take());
    turns.end();
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::current;

    /// Two cores that send each other messages and sleep; returns their steps in order.
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
    fn two_cores_share_the_clock_and_the_seed_decides_their_order() {
        assert_eq!(trace(1), trace(1));
        assert!((2..20).any(|seed| trace(seed) != trace(1)), "some seed turns the cores in another order");
        let times: Vec<u64> = trace(1).iter().map(|(at, _, _)| *at).collect();
        assert!(times.is_sorted() && times.last() == Some(&135));
    }

    /// Number of polls of a task that waits for a timer.
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
            // A free header may be woken, too.
            cores[0].spawn(async {});
            for _ in 0..1000 {
                cores[0].sleep(1000).await;
            }
            cores[0].sleep(1).await;
            polls.get()
        })
    }

    #[test]
    fn with_some_seeds_tasks_without_work_are_woken() {
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

    /// Waits for both cores from outside, while a task works on; returns the times and the rounds.
    fn wait_outside(seed: u64) -> (u64, u64, u32) {
        let simulation = Simulation::start(seed, 2);
        let [first, second] = simulation.cores() else { unreachable!("there are two cores") };
        let rounds = Rc::new(Cell::new(0));
        let (counted, core) = (rounds.clone(), first.clone());
        first.with_current(|| {
            first.spawn(async move {
                for _ in 0..10 {
                    core.sleep(100).await;
                    counted.set(counted.get() + 1);
                }
            });
        });
        let slept = second.remote().block_on(|core| async move {
            core.sleep(250).await;
            core.now_ns()
        });
        let (slept, seen) = (slept.unwrap(), rounds.get());
        assert_eq!(first.remote().call(|core| core.index()), Ok(0));
        simulation.run_until(|| rounds.get() == 10);
        (slept, simulation.now_ns(), seen)
    }

    #[test]
    fn a_thread_that_waits_for_its_simulated_cores_lets_them_work() {
        for seed in 0..4 {
            assert_eq!(wait_outside(seed), (250, 1000, 2));
        }
        let stopped = {
            let simulation = Simulation::start(1, 1);
            simulation.cores()[0].remote()
        };
        assert_eq!(stopped.call(|_| ()), Err(crate::CoreStopped));
    }

    #[test]
    #[should_panic(expected = "a task of a simulated core waits")]
    fn a_task_cannot_wait_for_its_own_simulation() {
        let simulation = Simulation::start(1, 1);
        let own = simulation.cores()[0].remote();
        let _ = simulation.cores()[0].remote().call(move |_| own.call(|_| ()));
    }
}
