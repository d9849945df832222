//! Routes between running cores.

use crate::{Call, CallRequest, Core, CoreConfig, CoreStopped, Cores, Reply, current, run_simulated_cores};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

/// A request that records its number.
struct Record(u64, Arc<Mutex<Vec<u64>>>);

impl CallRequest for Record {
    type Answer = ();

    const IS_ORDERED: bool = false;

    fn start(self, _: &Core, reply: Reply<Record>) {
        self.1.lock().unwrap().push(self.0);
        reply.send(());
    }
}

#[test]
fn more_calls_than_a_route_holds_arrive_in_order_and_are_answered() {
    let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (to, numbers) = (cores.get(1), seen.clone());
    let answered = cores.get(0).block_on(move |core| async move {
        let answered = Rc::new(Cell::new(0));
        for number in 0..2000 {
            let (to, numbers, answered) = (to.clone(), numbers.clone(), answered.clone());
            core.spawn(async move {
                Call::default().run(&to, Record(number, numbers)).await.unwrap();
                answered.set(answered.get() + 1);
            });
        }
        while answered.get() < 2000 {
            core.sleep(1000).await;
        }
        (answered.get(), core.foreign_wakes())
    });
    let (answered, wakes) = answered.unwrap();
    assert!(answered == 2000 && wakes > 0, "{wakes} wakes");
    let seen = seen.lock().unwrap();
    let mut sorted = seen.clone();
    sorted.sort_unstable();
    assert!(sorted.iter().copied().eq(0..2000), "each arrives once");
    // A task that found the route full sends its request later.
    assert!(seen[..256].is_sorted(), "{seen:?}");
}

#[test]
fn a_core_wakes_the_tasks_of_another_without_a_lost_wake() {
    const ROUNDS: u64 = 20_000;
    let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
    let round = Arc::new(AtomicU64::new(0));
    let wakers: Arc<[Mutex<Option<Waker>>; 2]> = Arc::default();
    let play = |own: usize| {
        let (round, wakers, core) = (round.clone(), wakers.clone(), cores.get(own));
        std::thread::spawn(move || {
            core.block_on(move |core| async move {
                loop {
                    let now = poll_fn(|cx| {
                        *wakers[own].lock().unwrap() = Some(cx.waker().clone());
                        let now = round.load(Ordering::SeqCst);
                        if now % 2 == own as u64 || now >= ROUNDS { Poll::Ready(now) } else { Poll::Pending }
                    });
                    let now = now.await;
                    round.store(now + 1, Ordering::SeqCst);
                    if let Some(other) = wakers[1 - own].lock().unwrap().take() {
                        other.wake();
                    }
                    if now >= ROUNDS {
                        return core.foreign_wakes();
                    }
                }
            })
        })
    };
    let players = [play(0), play(1)];
    let wakes = players.map(|player| player.join().unwrap().unwrap());
    assert!(wakes.iter().all(|wakes| *wakes > ROUNDS / 4), "{wakes:?}: they wake each other");
}

#[test]
fn a_call_on_its_way_to_a_core_that_ends_has_no_answer() {
    run_simulated_cores(3, 2, |_, cores| async move {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let to = cores[1].remote();
        let mut call = Call::default();
        let mut answer = Box::pin(call.run(&to, Record(1, seen.clone())));
        // It is on its way, as no other core has taken a turn.
        assert!(poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_pending())).await);
        cores[1].end_simulated();
        assert_eq!(answer.await, Err(CoreStopped));
        assert!(seen.lock().unwrap().is_empty() && Arc::strong_count(&seen) == 1);
    });
}

#[test]
fn a_core_wakes_a_task_of_a_core_that_has_sent_it_nothing() {
    let wakes = (0..20).map(|seed| {
        run_simulated_cores(seed, 2, |_, cores| async move {
            let (waiting, woken) = (Rc::new(RefCell::new(None)), Rc::new(Cell::new(0)));
            let (keep, count) = (waiting.clone(), woken.clone());
            let wait = async move {
                poll_fn(move |cx| {
                    *keep.borrow_mut() = Some(cx.waker().clone());
                    count.set(count.get() + 1);
                    if count.get() > 1 { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
            };
            cores[1].with_current(|| cores[1].spawn(wait));
            while woken.get() == 0 {
                current().sleep(10).await;
            }
            let waker: Waker = waiting.take().unwrap();
            waker.wake();
            while woken.get() < 2 {
                current().sleep(10).await;
            }
            cores[1].foreign_wakes()
        })
    });
    // A stray wake may come first.
    assert!(wakes.filter(|wakes| *wakes == 1).count() >= 10);
}
