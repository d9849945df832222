//! Limits, in virtual time and in real time.

use super::*;
use block::{Flags, IoError};
use conformance::Suite;
use drivers::mem::{MemDevice, Options};
use drivers::null::{NullDevice, Options as NullOptions};
use reactor::{CoreConfig, Cores};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

const MS: u64 = 1_000_000;

fn qos(limits: Limits) -> (Arc<Throttle>, Qos) {
    let throttle = Arc::new(Throttle::new(limits));
    let null = NullDevice::new(&NullOptions::new(1 << 30)).unwrap();
    (throttle.clone(), Qos::new(Arc::new(null), vec![throttle]))
}

fn iops(per_second: u64) -> Limits {
    Limits { iops: Rate::per_second(per_second), ..Limits::default() }
}

/// Nanoseconds that `requests` requests take if submitted at once.
async fn time_of(channel: &dyn Channel, requests: usize, req: &Request<'_>) -> u64 {
    let begin = reactor::current().now_ns();
    let mut running: Vec<_> = (0..requests).map(|_| channel.submit(req, 0)).collect();
    poll_fn(|cx| {
        running.retain_mut(|request| match Pin::new(request).poll(cx) {
            Poll::Ready(result) => {
                result.unwrap();
                false
            }
            Poll::Pending => true,
        });
        if running.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    reactor::current().now_ns() - begin
}

#[test]
fn it_passes_the_suite_without_limits_and_with_some() {
    let mem = || Arc::new(MemDevice::new(&Options::new(64 << 20)).unwrap());
    Suite::new(Arc::new(Qos::new(mem(), vec![]))).run();
    // A rate that makes requests wait on the slowest machine, until the first of them has waited.
    let throttle = Arc::new(Throttle::new(iops(10)));
    let waits = Arc::new(Waits::default());
    let slow = Qos::new(mem(), vec![throttle.clone()]).with_waits(waits.clone());
    let (raise, slow) = (throttle, Arc::new(slow));
    let ended = Arc::downgrade(&slow);
    let raised = std::thread::spawn(move || {
        while waits.for_device().requests == 0 && ended.strong_count() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        raise.set(Limits { bandwidth: Rate::per_second(1 << 30), ..iops(100_000) });
        waits.for_device().requests > 0
    });
    Suite::new(slow).run();
    assert!(raised.join().unwrap());
}

#[test]
fn requests_begin_at_the_rate_and_after_a_pause_with_a_burst() {
    reactor::run_simulated(1, |_| async {
        let (_, qos) = qos(Limits { iops: Rate { per_second: 1000, burst: 10 }, ..Limits::default() });
        let channel = qos.open_channel().unwrap();
        reactor::current().sleep(1000 * MS).await;
        let zero = Request::write_zeroes(512, Flags::NONE);
        assert_eq!(time_of(&*channel, 31, &zero).await, 20 * MS);
        assert_eq!(time_of(&*channel, 10, &zero).await, 10 * MS, "nothing is left of the burst");
        reactor::current().sleep(5 * MS).await;
        assert_eq!(time_of(&*channel, 11, &zero).await, 6 * MS, "a short pause gives a short burst");
    });
}

#[test]
fn each_limit_holds_for_its_own_kind_and_a_flush_is_never_late() {
    reactor::run_simulated(1, |_| async {
        let limits = Limits {
            write_iops: Rate::per_second(100),
            read_bandwidth: Rate::per_second(1 << 20),
            ..Limits::default()
        };
        let (_, qos) = qos(limits);
        let channel = qos.open_channel().unwrap();
        let (zero, discard) = (Request::write_zeroes(1 << 20, Flags::NONE), Request::discard(4096));
        let core = reactor::current();
        let read = async {
            for _ in 0..5 {
                let buffer = core.buffers().take(1 << 18).await;
                buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await.1.unwrap();
            }
        };
        read.await;
        assert_eq!(
            core.now_ns(),
            1000 * MS,
            "the first begins at once, each other a quarter of a second after it"
        );
        core.sleep(1000 * MS).await;
        assert_eq!(time_of(&*channel, 5, &zero).await, 30 * MS, "one was left over");
        assert_eq!(time_of(&*channel, 3, &discard).await, 30 * MS, "it is a write");
        assert_eq!(time_of(&*channel, 3, &Request::flush()).await, 0);
    });
}

#[test]
fn limits_that_change_hold_at_once_for_those_that_wait() {
    reactor::run_simulated(1, |_| async {
        let (throttle, qos) = qos(iops(1));
        let (channel, core) = (qos.open_channel().unwrap(), reactor::current());
        let raise = throttle.clone();
        core.clone().spawn(async move {
            reactor::current().sleep(500 * MS).await;
            raise.set(iops(1000));
        });
        let zero = Request::write_zeroes(512, Flags::NONE);
        let took = time_of(&*channel, 11, &zero).await;
        assert!((509 * MS..=500 * MS + LOOK_NS + 10 * MS).contains(&took), "{took} ns");
        throttle.set(Limits::default());
        assert_eq!(time_of(&*channel, 1000, &zero).await, 0);
        throttle.set(iops(100));
        assert_eq!(time_of(&*channel, 3, &zero).await, 20 * MS, "what came without limits is not paid for");
    });
}

#[test]
fn devices_of_a_group_share_its_limit_and_keep_their_own() {
    reactor::run_simulated(1, |_| async {
        let group = Arc::new(Throttle::new(iops(1000)));
        let null = Arc::new(NullDevice::new(&NullOptions::new(1 << 30)).unwrap());
        let of = |own: Limits| Qos::new(null.clone(), vec![Arc::new(Throttle::new(own)), group.clone()]);
        let (slow, fast) = (of(iops(100)), of(Limits::default()));
        let (slow, fast) = (slow.open_channel().unwrap(), fast.open_channel().unwrap());
        let core = reactor::current();
        core.spawn(async move {
            assert!(time_of(&*slow, 5, &Request::write_zeroes(512, Flags::NONE)).await >= 40 * MS);
        });
        let zero = Request::write_zeroes(512, Flags::NONE);
        let took = time_of(&*fast, 100, &zero).await;
        // Its own hundred take 99 ms, and the other device's requests come on top.
        assert!((100 * MS..=104 * MS).contains(&took), "{took} ns");
    });
}

/// So many requests that have waited so long in all.
fn waited(requests: u64, ms: u64) -> Waited {
    Waited { requests, ns: ms * MS }
}

#[test]
fn a_wait_counts_from_the_submission_to_the_release_and_not_the_time_of_the_device() {
    reactor::run_simulated(1, |_| async {
        let slow = NullOptions { latency_ns: 7 * MS, ..NullOptions::new(1 << 30) };
        let throttle = Arc::new(Throttle::new(iops(100)));
        let qos = Qos::new(Arc::new(NullDevice::new(&slow).unwrap()), vec![throttle.clone()]);
        let (waits, channel) = (qos.waits.clone(), qos.open_channel().unwrap());
        let zero = Request::write_zeroes(512, Flags::NONE);
        reactor::current().sleep(1000 * MS).await;
        // The first two are a burst. The others wait 10, 20 and 30 ms, two of them in the line.
        assert_eq!(time_of(&*channel, 5, &zero).await, 37 * MS);
        assert_eq!((waits.for_device(), waits.for_group()), (waited(3, 60), Waited::default()));
        // Slower than the limit, refused, a flush: none waits.
        for _ in 0..3 {
            reactor::current().sleep(20 * MS).await;
            channel.submit(&zero, 0).await.unwrap();
        }
        channel.submit(&zero, 1 << 40).await.unwrap_err();
        channel.submit(&Request::flush(), 0).await.unwrap();
        throttle.set(Limits::default());
        time_of(&*channel, 1000, &zero).await;
        assert_eq!(waits.for_device(), waited(3, 60));
    });
}

#[test]
fn a_request_that_limits_release_early_has_waited_until_then() {
    reactor::run_simulated(1, |_| async {
        let (throttle, qos) = qos(iops(1));
        let (waits, channel) = (qos.waits.clone(), qos.open_channel().unwrap());
        let zero = Request::write_zeroes(512, Flags::NONE);
        channel.submit(&zero, 0).await.unwrap();
        reactor::current().spawn(async move {
            reactor::current().sleep(500 * MS).await;
            throttle.set(Limits::default());
        });
        let took = time_of(&*channel, 3, &zero).await;
        assert!((500 * MS..=500 * MS + LOOK_NS).contains(&took), "{took} ns");
        assert_eq!(waits.for_device(), Waited { requests: 3, ns: 3 * took });
    });
}

#[test]
fn a_wait_counts_for_the_limits_whose_turn_comes_last() {
    reactor::run_simulated(1, |_| async {
        let group = Arc::new(Throttle::new(iops(1000)));
        let null = Arc::new(NullDevice::new(&NullOptions::new(1 << 30)).unwrap());
        let of = |own: Limits| Qos::new(null.clone(), vec![Arc::new(Throttle::new(own)), group.clone()]);
        let (own, shared) = (of(iops(100)), of(Limits::default()));
        let zero = Request::write_zeroes(512, Flags::NONE);
        // Beyond the burst of two, the device's own limit is the slower one.
        reactor::current().sleep(1000 * MS).await;
        assert_eq!(time_of(&*own.open_channel().unwrap(), 4, &zero).await, 20 * MS);
        assert_eq!((own.waits.for_device(), own.waits.for_group()), (waited(2, 30), Waited::default()));
        // The group's burst is eleven. A read behind a write that waits is not limited itself.
        group.set(Limits { write_iops: Rate::per_second(1000), ..Limits::default() });
        reactor::current().sleep(1000 * MS).await;
        let (channel, core) = (shared.open_channel().unwrap(), reactor::current());
        let reader = channel.clone();
        core.spawn(async move {
            reactor::current().sleep(MS).await;
            let buffer = reactor::current().buffers().take(4096).await;
            buffer.transfer(&*reader, Op::Read, Flags::NONE, 0).await.1.unwrap();
        });
        assert_eq!(time_of(&*channel, 14, &zero).await, 3 * MS);
        core.sleep(MS).await;
        let (of_group, of_device) = (shared.waits.for_group(), shared.waits.for_device());
        assert_eq!((of_group, of_device), (waited(4, 1 + 2 + 3 + 2), Waited::default()));
        assert_eq!(own.waits.for_group(), Waited::default(), "devices of a group are counted each");
    });
}

#[test]
fn a_guaranteed_minimum_holds_under_load_and_the_group_keeps_its_limit() {
    reactor::run_simulated(1, |_| async {
        let group = Arc::new(Throttle::new(iops(1000)));
        let null = Arc::new(NullDevice::new(&NullOptions::new(1 << 30)).unwrap());
        let of = |floor: Limits| {
            let throttles = vec![Arc::new(Throttle::default()), group.clone()];
            Qos::new(null.clone(), throttles).with_floor(Arc::new(Throttle::new(floor)))
        };
        let (greedy, floored) = (of(Limits::default()), of(iops(300)));
        let (greedy, floored) = (greedy.open_channel().unwrap(), floored.open_channel().unwrap());
        let core = reactor::current();
        let taken = Rc::new(Cell::new(0u64));
        for channel in [&greedy, &floored] {
            channel.submit(&Request::write_zeroes(512, Flags::NONE), 0).await.unwrap();
        }
        // Many channels of the greedy device would starve the other. Here the greedy device has
        // taken units far in advance.
        group.buckets[0].take(Rate::per_second(1000), 5000, core.now_ns());
        let count = taken.clone();
        core.spawn(async move {
            let zero = Request::write_zeroes(512, Flags::NONE);
            loop {
                greedy.submit(&zero, 0).await.unwrap();
                count.set(count.get() + 1);
            }
        });
        let zero = Request::write_zeroes(512, Flags::NONE);
        let took = time_of(&*floored, 304, &zero).await;
        assert!(
            (990 * MS..=1100 * MS).contains(&took),
            "{took} ns for 300 requests beside what a pause has left"
        );
        assert_eq!(
            taken.get(),
            0,
            "the greedy one has to wait for what it took, and for what the floor took"
        );
        reactor::current().sleep(4500 * MS).await;
        let before = taken.get();
        assert!(before > 0);
        reactor::current().sleep(1000 * MS).await;
        assert!((990..=1011).contains(&(taken.get() - before)), "alone it has the group to itself");
    });
}

#[test]
fn cores_share_the_limits() {
    const REQUESTS: usize = 100;
    let (_, qos) = qos(iops(2000));
    let qos = Arc::new(qos);
    let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
    let begin = std::time::Instant::now();
    std::thread::scope(|scope| {
        for core in cores.all() {
            let qos = qos.clone();
            let work = move |_| async move {
                let channel = qos.open_channel().unwrap();
                time_of(&*channel, REQUESTS, &Request::write_zeroes(512, Flags::NONE)).await
            };
            scope.spawn(move || core.block_on(work).unwrap());
        }
    });
    let took = begin.elapsed().as_millis();
    // The bucket admits the first and 20 more at once.
    assert!(took >= (2 * REQUESTS as u128 - 21) / 2, "{took} ms");
}

#[test]
fn errors_of_the_child_pass_and_do_not_hold_the_line_up() {
    reactor::run_simulated(1, |_| async {
        let (_, qos) = qos(iops(1000));
        let channel = qos.open_channel().unwrap();
        let zero = Request::write_zeroes(512, Flags::NONE);
        assert_eq!(channel.submit(&zero, 1 << 40).await, Err(IoError::OutOfRange));
        assert_eq!(channel.submit(&zero, 0).await, Ok(()));
    });
}

/// In real time, in which waiting requests wake up late.
#[test]
fn the_rate_is_the_configured_one() {
    reactor::run(async {
        // The bucket admits 20 at once. A busy machine may be late, not each time.
        let mut best = u64::MAX;
        for _ in 0..20 {
            let (_, qos) = qos(iops(2000));
            let channel = qos.open_channel().unwrap();
            let zero = Request::write_zeroes(512, Flags::NONE);
            let took = time_of(&*channel, 1000, &zero).await;
            assert!(took >= 489 * MS, "{took} ns");
            best = best.min(took);
            if best < 700 * MS {
                return;
            }
        }
        panic!("{best} ns");
    });
}
