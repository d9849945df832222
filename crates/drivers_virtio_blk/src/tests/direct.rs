//! Queues for a program without a reactor: sleeping and polling in them, and manual setup of a
//! session.

use super::server::{Character, Server};
use super::*;
use drivers::direct::{DirectQueue, ZoneAction, ZoneRequest};

const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(60);

fn both_kinds(session: &Arc<Session>) -> [VirtioBlkQueue; 2] {
    [session.start_queue().unwrap(), session.start_poll_queue().unwrap()]
}

/// Waits and reaps until a request ends.
fn wait_for_one(queue: &mut VirtioBlkQueue) -> (u32, IoResult) {
    let mut ended = None;
    while ended.is_none() {
        queue.wait(1, Some(LONG), None).unwrap();
        queue.reap(&mut |slot, result| assert!(ended.replace((slot, result)).is_none(), "one at a time"));
    }
    ended.unwrap()
}

#[test]
fn a_wait_ends_with_a_completion_whatever_the_kind_of_queue_and_thread() {
    let (_server, session, memory) = Server::good(Character::good(), &options());
    let list = [memory.segment(0, 4096)];
    for mut queue in both_kinds(&session) {
        for round in 0..50 {
            let flags = (round % 2 == 0).then_some(Flags::FUA);
            assert_eq!(push(&mut queue, 3, &list, flags, 8192), Ok(()));
            queue = std::thread::spawn(move || {
                assert_eq!(wait_for_one(&mut queue), (3, Ok(())));
                queue
            })
            .join()
            .unwrap();
        }
    }
}

#[test]
fn a_server_that_fills_every_event_blocks_neither_requests_nor_the_end_of_the_session() {
    let character = Character { serves: false, fills_events: true, ..Character::good() };
    let (mut server, session, memory) = Server::good(character, &options());
    let (step, steps) = std::sync::mpsc::channel();
    // A thread of its own: a write that blocks fails the test instead of hanging it.
    let user = std::thread::spawn(move || {
        let mut queue = session.start_queue().unwrap();
        let list = [memory.segment(0, 512)];
        assert_eq!(push(&mut queue, 0, &list, None, 0), Ok(()));
        queue.kick();
        step.send("kicked").unwrap();
        assert_eq!(wait_for_one(&mut queue), (0, Err(IoError::DeviceGone)));
        step.send("woken").unwrap();
        drop((queue, session));
        step.send("ended").unwrap();
    });
    assert_eq!(steps.recv_timeout(LONG), Ok("kicked"));
    server.end();
    assert_eq!(steps.recv_timeout(LONG), Ok("woken"));
    assert_eq!(steps.recv_timeout(LONG), Ok("ended"));
    user.join().unwrap();
}

#[test]
fn only_an_event_queue_has_an_event_and_it_does_not_block() {
    let (_server, session, _memory) = Server::good(Character::good(), &options());
    let [event, polled] = both_kinds(&session);
    assert_eq!(polled.event_fd(), None);
    // SAFETY: no pointers are passed.
    let flags = unsafe { libc::fcntl(event.event_fd().unwrap(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0);
}

#[test]
fn a_wait_that_nothing_ends_takes_as_long_as_it_may() {
    let (_server, session, memory) =
        Server::good(Character { serves: false, ..Character::good() }, &options());
    let list = [memory.segment(0, 512)];
    for mut queue in both_kinds(&session) {
        assert_eq!(push(&mut queue, 0, &list, None, 0), Ok(()));
        let start = Instant::now();
        let error = queue.wait(1, Some(SHORT), None).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ETIME));
        assert!(start.elapsed() >= SHORT, "{:?}", start.elapsed());
        let error = queue.wait(1, Some(Duration::ZERO), None).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ETIME));
    }
}

#[test]
fn a_wait_without_end_ends_when_the_server_vanishes() {
    for is_polled in [false, true] {
        let character = Character { serves: false, ..Character::good() };
        let (mut server, session, memory) = Server::good(character, &options());
        let [event, polled] = both_kinds(&session);
        let mut queue = if is_polled { polled } else { event };
        let list = [memory.segment(0, 512)];
        assert_eq!(push(&mut queue, 0, &list, None, 0), Ok(()));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut ended = Vec::new();
                while ended.is_empty() {
                    queue.wait(1, None, None).unwrap();
                    queue.reap(&mut |slot, result| ended.push((slot, result)));
                }
                assert_eq!(ended, [(0, Err(IoError::DeviceGone))]);
            });
            std::thread::sleep(SHORT);
            assert!(!waiter.is_finished());
            server.end();
        });
    }
}

#[test]
fn a_device_without_zones_says_so() {
    let (_server, session, _memory) = Server::good(Character::good(), &options());
    let mut queue = session.start_queue().unwrap();
    // SAFETY: no pointers are passed.
    let result = unsafe { queue.push_zone(0, ZoneRequest::ManageAll(ZoneAction::Reset)) };
    assert_eq!(result, Err(IoError::Unsupported));
}

#[test]
fn the_size_of_the_virtqueues_bounds_what_is_in_flight() {
    for (size, indirect, depth) in [
        (1, Choice::On, 1),
        (2, Choice::On, 2),
        (256, Choice::On, 256),
        (32768, Choice::On, 32768),
        (1, Choice::Off, 1),
        (256, Choice::Off, 85),
    ] {
        let options = Options { queue_size: size, indirect, queues: 1, ..options() };
        let (_server, session, memory) = Server::good(Character::good(), &options);
        let mut queue = session.start_queue().unwrap();
        assert_eq!(queue.depth(), depth, "{size} {indirect:?}");
        let list = [memory.segment(0, 4096)];
        for slot in [0, depth - 1] {
            assert_eq!(push(&mut queue, slot, &list, Some(Flags::NONE), 0), Ok(()));
            assert_eq!(wait_for_one(&mut queue), (slot, Ok(())));
        }
    }
}

#[test]
fn a_session_starts_once_with_what_the_server_has() {
    for (options, why) in [
        (Options { queue_size: 0, ..options() }, "queue size 0"),
        (Options { queue_size: 100, ..options() }, "queue size 100"),
        (Options { queue_size: 32769, ..options() }, "queue size 32769"),
        (Options { queues: 3, ..options() }, "3 queues: the device has 2"),
    ] {
        let error = Server::start(Character::good(), &options).1.err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
    let (_server, session, _memory) = Server::good(Character::good(), &options());
    assert!(session.start(1, 16).unwrap_err().to_string().contains("already been started"));
    let facts = session.facts();
    assert_eq!((facts.max_queues, facts.max_segments, facts.max_regions), (2, 8, 3));
    assert_eq!((session.num_queues(), facts.max_queue_size), (2, 32768));
}
