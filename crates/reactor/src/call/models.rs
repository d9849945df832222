//! Models of a call and its answer. After a lost wake the caller sleeps for ever, and loom reports
//! the deadlock. Counted references are std's, because loom's cannot be dropped after a deadlock.

use super::*;
use crate::doorbell::Doorbell;
use crate::sync::{model, must_fail};
use crate::task::{Body, Task};
use loom::thread;

/// A request that a model answers itself.
struct Number(u64);

impl CallRequest for Number {
    type Answer = u64;
    const IS_ORDERED: bool = false;

    fn start(self, _: &Core, reply: Reply<Number>) {
        reply.send(self.0);
    }
}

/// A core with one task, which waits for answers.
struct Caller {
    body: &'static Body,
    doorbell: Doorbell,
    task: &'static Task,
}

impl Caller {
    fn new() -> Caller {
        let (body, doorbell) = Body::of_model();
        Caller { body, doorbell, task: body.new_task() }
    }

    /// Polls the task when it is woken, as a core does, until the call has ended.
    fn wait(&self, call: &Call<Number>) -> Result<u64, CoreStopped> {
        let waker = self.task.waker();
        let mut is_woken = true;
        loop {
            if is_woken && let Poll::Ready(answer) = call.poll_answer(&mut Context::from_waker(&waker)) {
                return answer;
            }
            is_woken = false;
            while !is_woken {
                if self.body.has_woken() {
                    self.body.take_woken(|_| is_woken = true);
                } else {
                    self.body.begin_sleep();
                    if !self.body.has_woken() {
                        self.doorbell.wait();
                    }
                    self.body.woke_up();
                }
            }
        }
    }
}

/// Makes the called core's hand of a call of this number.
fn send(call: &mut Call<Number>, number: u64) -> Arc<Slot<Number>> {
    call.fill(Number(number));
    call.hand_over()
}

/// A thread answers a call with the number after its own. The queue between the cores has a model
/// of its own; the start of a thread orders memory as it does.
fn answer(called: Arc<Slot<Number>>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let (Number(number), reply) = called.accept();
        reply.send(number + 1);
    })
}

fn a_call_has_its_answer() {
    let (caller, mut call) = (Caller::new(), Call::default());
    let called = answer(send(&mut call, 7));
    assert_eq!(caller.wait(&call), Ok(8));
    called.join().unwrap();
}

fn two_calls_have_their_answers() {
    let (caller, mut call) = (Caller::new(), Call::default());
    let first = answer(send(&mut call, 7));
    assert_eq!(caller.wait(&call), Ok(8));
    // The first thread may still be about to wake the task.
    let second = answer(send(&mut call, 8));
    assert_eq!(caller.wait(&call), Ok(9));
    first.join().unwrap();
    second.join().unwrap();
}

fn a_lost_call_ends() {
    let (caller, mut call) = (Caller::new(), Call::default());
    let called = send(&mut call, 7);
    let losing = thread::spawn(move || called.lose());
    assert_eq!(caller.wait(&call), Err(CoreStopped));
    losing.join().unwrap();
}

#[test]
fn each_call_has_its_answer() {
    model(a_call_has_its_answer);
    must_fail("a caller looks again after it has left its task", a_call_has_its_answer);
    must_fail("an answer is released with its flag", a_call_has_its_answer);
}

#[test]
fn memory_of_a_call_serves_the_next_one() {
    model(two_calls_have_their_answers);
    must_fail("a caller looks again after it has left its task", two_calls_have_their_answers);
}

#[test]
fn a_call_that_its_core_loses_ends_without_an_answer() {
    model(a_lost_call_ends);
    must_fail("a caller looks again after it has left its task", a_lost_call_ends);
}
