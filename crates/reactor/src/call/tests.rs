//! Calls between simulated cores, between threads, and to cores that end.

use super::*;
use crate::{CoreConfig, Cores, current, run_simulated_cores, yield_now};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// How the called core treats a request.
enum Ask {
    /// It answers with the number at once.
    Echo(u64),
    /// A task answers with the number after so many nanoseconds.
    Later(u64, u64),
}

impl CallRequest for Ask {
    type Answer = u64;
    const IS_ORDERED: bool = false;

    fn start(self, core: &Core, reply: Reply<Ask>) {
        match self {
            Ask::Echo(number) => reply.send(number),
            Ask::Later(number, ns) => {
                let sleep = core.sleep(ns);
                core.spawn(async move {
                    sleep.await;
                    reply.send(number);
                });
            }
        }
    }
}

#[test]
fn more_calls_than_an_inbox_holds_have_their_answers() {
    const CALLS: u64 = 3000;
    run_simulated_cores(1, 2, |_, cores: Vec<Core>| async move {
        let (sum, left) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(CALLS)));
        for number in 0..CALLS {
            let (sum, left, called) = (sum.clone(), left.clone(), cores[1].remote());
            cores[0].spawn(async move {
                let mut call = Call::default();
                for round in 0..2 {
                    let ask = if round == 0 { Ask::Echo(number) } else { Ask::Later(number, 1000 + number) };
                    let answer = call.run(&called, ask).await.unwrap();
                    sum.set(sum.get() + answer);
                    assert!(!call.is_under_way());
                }
                left.set(left.get() - 1);
            });
        }
        cores[0].sleep(1_000_000).await;
        assert_eq!(left.get(), 0, "calls without an answer");
        assert_eq!(sum.get(), CALLS * (CALLS - 1));
    });
}

#[test]
fn calls_in_the_inbox_and_in_tasks_of_a_core_that_ends_end_without_an_answer() {
    for seed in 0..20 {
        run_simulated_cores(seed, 2, |_, cores: Vec<Core>| async move {
            let ends = Rc::new(RefCell::new(Vec::new()));
            let spawn = |ask: Ask| {
                let (ends, called) = (ends.clone(), cores[1].remote());
                cores[0].spawn(async move {
                    let mut call = Call::default();
                    let end = call.run(&called, ask).await;
                    assert_eq!(call.run(&called, Ask::Echo(1)).await, Err(CoreStopped));
                    ends.borrow_mut().push(end);
                });
            };
            (0..100).for_each(|number| spawn(Ask::Later(number, u64::MAX)));
            cores[0].sleep(1000).await;
            (0..100).for_each(|number| spawn(Ask::Echo(number)));
            yield_now().await;
            yield_now().await;
            cores[1].end_simulated();
            cores[0].sleep(1000).await;
            assert_eq!(ends.borrow().len(), 200);
            let lost = ends.borrow().iter().filter(|end| **end == Err(CoreStopped)).count();
            assert!(lost >= 100, "{lost} calls were lost");
        });
    }
}

#[test]
fn two_threads_call_each_other_and_sleep_in_between() {
    let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
    let calls = [0, 1].map(|index| {
        let (core, called) = (cores.get(index), cores.get(1 - index));
        std::thread::spawn(move || {
            core.block_on(move |core| async move {
                let mut call = Call::default();
                for number in 0..2000 {
                    let ask = if number % 100 == 0 { Ask::Later(number, 100_000) } else { Ask::Echo(number) };
                    assert_eq!(call.run(&called, ask).await, Ok(number));
                }
                core.sleeps()
            })
        })
    });
    for thread in calls {
        assert!(thread.join().unwrap().unwrap() >= 10);
    }
}

#[test]
fn a_task_of_pooled_memory_runs_as_others_do() {
    crate::run(async {
        let done = Rc::new(Cell::new(0));
        for _ in 0..10 {
            let done = done.clone();
            current().start_request(block::IoFuture::new(async move {
                yield_now().await;
                done.set(done.get() + 1);
                Ok(())
            }));
        }
        while done.get() < 10 {
            yield_now().await;
        }
    });
}
