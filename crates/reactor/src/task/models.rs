//! Models of how other threads wake a core and its tasks. After a lost wake or message the core
//! sleeps for ever, and loom reports the deadlock. Counted references are std's, because loom's
//! cannot be dropped after a deadlock.

use super::*;
use crate::core::Core;
use crate::remote::{CoreRef, Inbox, NotSent};
use crate::sync::{model, must_fail};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool as Flag;
use loom::thread;
use std::sync::Arc;

impl Body {
    /// A body that no other execution has used, and its doorbell.
    pub(crate) fn of_model() -> (&'static Body, Doorbell) {
        let (body, doorbell) = (Body::new(), Doorbell::of_model());
        *lock(&body.doorbell) = Some(doorbell.clone());
        (body, doorbell)
    }
}

/// Sleeps as a core does (`Core::sleep_until_event`), unless `has_work`.
fn sleep(body: &'static Body, doorbell: &Doorbell, has_work: impl Fn() -> bool) {
    body.begin_sleep();
    if !has_work() {
        doorbell.wait();
    }
    body.woke_up();
}

/// Two threads each set a flag and wake the same task. The core polls the task when it is woken,
/// until it has seen both flags.
fn two_threads_wake_a_task() {
    let (body, doorbell) = Body::of_model();
    let task = body.new_task();
    let flags = Arc::new([Flag::new(false), Flag::new(false)]);
    let wakers: Vec<_> = [0, 1]
        .map(|i| {
            let (flags, waker) = (flags.clone(), task.waker());
            thread::spawn(move || {
                flags[i].store(true, Ordering::Relaxed);
                waker.wake();
            })
        })
        .into();
    loop {
        let mut is_polled = false;
        if body.has_woken() {
            body.take_woken(|_| is_polled = true);
        }
        if is_polled && flags.iter().all(|flag| flag.load(Ordering::Relaxed)) {
            break;
        }
        if !is_polled {
            sleep(body, &doorbell, || body.has_woken());
        }
    }
    wakers.into_iter().for_each(|waker| waker.join().unwrap());
}

/// A thread writes data and wakes a task, which reads the data.
fn a_woken_task_reads_the_data() {
    let (body, doorbell) = Body::of_model();
    let task = body.new_task();
    let data = Arc::new(UnsafeCell::new(0));
    let waking = {
        let (data, waker) = (data.clone(), task.waker());
        thread::spawn(move || {
            // SAFETY: loom checks that no other access is under way.
            data.with_mut(|data| unsafe { *data = 7 });
            waker.wake();
        })
    };
    let mut is_woken = false;
    while !is_woken {
        if body.has_woken() {
            body.take_woken(|_| is_woken = true);
        } else {
            sleep(body, &doorbell, || body.has_woken());
        }
    }
    // SAFETY: as above.
    assert_eq!(data.with(|data| unsafe { *data }), 7);
    waking.join().unwrap();
}

/// A thread sends two messages to a core that goes to sleep in between.
fn messages_reach_a_core_that_sleeps() {
    let (body, doorbell) = Body::of_model();
    let inbox = Inbox::new(body);
    let sender = CoreRef { inbox: inbox.clone(), index: 0 };
    let sending = thread::spawn(move || {
        for _ in 0..2 {
            assert!(sender.try_run(Box::new(|_: &Core| ())).is_ok());
        }
    });
    let mut count = 0;
    while count < 2 {
        if inbox.is_empty() {
            sleep(body, &doorbell, || !inbox.is_empty());
        } else if inbox.take().is_some() {
            count += 1;
        }
    }
    sending.join().unwrap();
}

/// A core ends while a thread sends it a message. The message is refused or dropped, never kept.
fn a_message_to_a_core_that_ends_is_dropped() {
    let (body, _) = Body::of_model();
    let inbox = Inbox::new(body);
    let kept = Arc::new(());
    let sending = {
        let (sender, kept) = (CoreRef { inbox: inbox.clone(), index: 0 }, kept.clone());
        thread::spawn(move || {
            let sent = sender.try_run(Box::new(move |_: &Core| drop(kept)));
            assert!(!matches!(sent, Err(NotSent::Full(_))));
        })
    };
    inbox.close();
    sending.join().unwrap();
    assert_eq!(Arc::strong_count(&kept), 1);
}

#[test]
fn no_wake_of_a_task_is_lost() {
    model(two_threads_wake_a_task);
    must_fail("the mark is taken away with acquire", two_threads_wake_a_task);
}

#[test]
fn a_woken_task_sees_the_data_of_its_waker() {
    model(a_woken_task_reads_the_data);
    must_fail("a core that goes to sleep puts a fence before its last look", a_woken_task_reads_the_data);
    must_fail("a thread that wakes a core puts a fence before its look", a_woken_task_reads_the_data);
}

#[test]
fn no_message_to_a_core_is_lost() {
    model(messages_reach_a_core_that_sleeps);
    must_fail(
        "a core that goes to sleep puts a fence before its last look",
        messages_reach_a_core_that_sleeps,
    );
    must_fail("a thread that wakes a core puts a fence before its look", messages_reach_a_core_that_sleeps);
}

#[test]
fn no_message_stays_in_an_inbox_that_is_closed() {
    model(a_message_to_a_core_that_ends_is_dropped);
    must_fail("a sender looks again whether the inbox is closed", a_message_to_a_core_that_ends_is_dropped);
}
