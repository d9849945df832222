//! Lost connections of a queue with a reconnect delay.

use super::server::{SIZE, Serve};
use super::*;
use drivers::direct::DirectQueue;
use std::os::unix::net::UnixListener;

/// Longer than any test.
const LONG: u32 = 600;
const ESHUTDOWN: u32 = 108;

fn turn(export: Export, serve: impl FnOnce(&mut Client) + Send + 'static) -> (Export, Serve) {
    (export, Box::new(serve))
}

#[test]
fn unanswered_requests_are_sent_again_on_the_next_connection() {
    for replies in every_form() {
        let export = Export::good(replies);
        let turns = vec![
            turn(export, move |client| {
                // A write arrives in part, and the data of a read in part.
                let read = client.request();
                let mut bytes = vec![3; 2048];
                if replies != Replies::Simple {
                    bytes = client.part(&read, 0, 1, &[&read.offset.to_be_bytes()[..], &bytes].concat());
                }
                let head =
                    if replies == Replies::Simple { server::simple(read.cookie, 0, &[]) } else { vec![] };
                client.send(&[head, bytes].concat());
                client.request();
                client.bytes::<1000>();
            }),
            turn(export, |client| {
                let seen = serve(client, 3);
                assert_eq!(seen.iter().map(|asked| asked.command).collect::<Vec<_>>(), [0, 1, 4]);
                assert_eq!(seen.iter().map(|asked| asked.offset).collect::<Vec<_>>(), [4096, 1 << 20, 512]);
                assert!(seen.iter().all(|asked| asked.len >= 4096), "{seen:?}");
                serve(client, 1);
                assert_eq!(client.request().command, 2, "an orderly disconnect");
            }),
        ];
        let (_server, _session, mut queue) = Server::in_turn(LONG, turns);
        let (mut input, mut output) = (vec![9; 4096], vec![5; 1 << 20]);
        let (a, b) = (segment(&mut input), segment(&mut output));
        assert_eq!(push(&mut queue, 0, &Request::read(data(&a)), 4096), Ok(()));
        assert_eq!(push(&mut queue, 1, &Request::write(data(&b), Flags::FUA), 1 << 20), Ok(()));
        assert_eq!(push(&mut queue, 2, &Request::discard(8192), 512), Ok(()));
        assert_eq!(ends(&mut queue, 3), [(0, Ok(())), (1, Ok(())), (2, Ok(()))]);
        assert!(input == [7; 4096] && queue.is_connected() && queue.lost().is_none());
        assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    }
}

#[test]
fn a_write_is_sent_again_if_the_flush_after_it_was_not_answered() {
    let export = Export { flags: ALL_FLAGS & !(1 << 3), ..Export::good(Replies::Structured) };
    let commands = |seen: Vec<Asked>| seen.iter().map(|asked| asked.command).collect::<Vec<_>>();
    let turns = vec![
        turn(export, move |client| {
            assert_eq!(commands(serve(client, 1)), [1]);
            assert_eq!(client.request().command, 3);
        }),
        turn(export, move |client| assert_eq!(commands(serve(client, 2)), [1, 3])),
    ];
    let (_server, _session, mut queue) = Server::in_turn(LONG, turns);
    let mut buffer = vec![1; 512];
    let list = segment(&mut buffer);
    assert_eq!(push(&mut queue, 0, &Request::write(data(&list), Flags::FUA), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
}

#[test]
fn requests_that_a_server_refuses_because_it_ends_wait_for_the_next_one() {
    let export = Export::good(Replies::Structured);
    let turns = vec![
        turn(export, |client| {
            serve(client, 1);
            let asked = client.request();
            client.done(&asked, ESHUTDOWN);
            client.linger();
        }),
        turn(export, |client| drop(serve(client, 1))),
    ];
    let (_server, _session, mut queue) = Server::in_turn(LONG, turns);
    for _ in 0..2 {
        assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    }
}

#[test]
fn requests_fail_after_the_delay_even_if_the_server_accepts_connections() {
    let export = Export::good(Replies::Simple);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        // A client may give up during its handshake.
        let refuse = |mut client: Client| {
            client.agree(&export);
            let asked = client.request();
            client.done(&asked, ESHUTDOWN);
            client.linger();
            asked.command == 2
        };
        loop {
            let client = Client::accept(&listener);
            let served = std::thread::scope(|scope| scope.spawn(|| refuse(client)).join());
            if served.is_ok_and(|is_end| is_end) {
                return;
            }
        }
    });
    let options = Options { queue_depth: 16, reconnect_delay_s: 1, ..Options::new(Address::Unix(path)) };
    let session = Session::open(&options, &Cancel::never()).unwrap();
    let mut queue = session.start_queue(&Cancel::never()).unwrap();
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
    wait_for_connection(&mut queue);
    drop(queue);
    server.join().unwrap();
}

fn wait_for_connection(queue: &mut NbdQueue) {
    while !queue.is_connected() {
        queue.wait(1, Some(Duration::from_secs(60)), None).expect("an event");
        queue.reap(&mut |_, _| panic!("nothing is in flight"));
    }
}

#[test]
fn requests_fail_while_there_is_no_server_and_later_ones_reach_the_next() {
    let export = Export::good(Replies::Extended);
    let (server, _session, mut queue) = Server::in_turn(
        1,
        vec![turn(export, |client| {
            serve(client, 1);
        })],
    );
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Err(IoError::DeviceGone));
    assert!(!queue.is_connected() && queue.lost().is_none());
    let Address::Unix(path) = &server.options.address else { unreachable!() };
    std::fs::remove_file(path).unwrap();
    let listener = UnixListener::bind(path).unwrap();
    let next = std::thread::spawn(move || {
        let mut client = Client::accept(&listener);
        client.agree(&export);
        serve(&mut client, 1);
    });
    wait_for_connection(&mut queue);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    next.join().unwrap();
}

/// A queue with a request that its first server does not answer, and then another server.
fn lost_then(export: Export, next: (Export, Serve)) -> (Server, Arc<Session>, NbdQueue) {
    let turns = vec![turn(export, |client| assert_eq!(client.request().command, 3)), next];
    let (server, session, mut queue) = Server::in_turn(LONG, turns);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    (server, session, queue)
}

#[test]
fn an_export_that_has_grown_is_taken_over_with_its_size() {
    let export = Export::good(Replies::Extended);
    let grown = turn(Export { size: SIZE * 2 + 100, ..export }, |client| drop(serve(client, 1)));
    let (_server, session, mut queue) = lost_then(export, grown);
    let device = NbdDevice::over(session.clone());
    assert_eq!(device.limits().capacity, SIZE);
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    assert_eq!(device.limits().capacity, SIZE * 2, "whole blocks");
}

#[test]
fn an_export_that_has_shrunk_is_refused_with_both_sizes() {
    let export = Export { blocks: None, ..Export::good(Replies::Extended) };
    let shrunk = turn(Export { size: SIZE / 2, ..export }, |client| client.linger());
    let (_server, session, mut queue) = lost_then(export, shrunk);
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
    let why = queue.lost().unwrap();
    assert!(why.contains(&format!("size {SIZE} to {} bytes", SIZE / 2)), "{why}");
    assert_eq!(session.limits().capacity, SIZE);
}

#[test]
fn a_refresh_asks_the_server_over_a_further_connection() {
    let export = Export::good(Replies::Structured);
    let grown = Export { size: SIZE * 2, ..export };
    let turns = vec![
        // The connection stays open while the next one is served.
        turn(export, |client| std::mem::forget(client.stream.try_clone().unwrap())),
        turn(grown, |client| assert_eq!(client.request().command, 2, "an orderly disconnect")),
        turn(export, |client| client.linger()),
    ];
    let (_server, session, queue) = Server::in_turn(0, turns);
    let device = NbdDevice::over(session);
    assert_eq!(device.refresh().unwrap().capacity, SIZE * 2);
    let error = device.refresh().unwrap_err().to_string();
    assert!(error.contains(&format!("size {} to {SIZE} bytes", SIZE * 2)), "{error}");
    assert_eq!(device.limits().capacity, SIZE * 2);
    drop(queue);
}

#[test]
fn another_export_and_a_violation_end_the_queue() {
    let export = Export::good(Replies::Structured);
    let other = Export { flags: ALL_FLAGS & !(1 << 5), ..export };
    let turns = vec![
        turn(export, |client| assert_eq!(client.request().command, 3)),
        turn(other, |client| client.linger()),
    ];
    let (_server, _session, mut queue) = Server::in_turn(LONG, turns);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
    let why = queue.lost().unwrap();
    assert!(why.contains("the export changed from"), "{why}");
    let lie = |client: &mut Client| {
        client.request();
        client.send(&[1; 64]);
        client.linger();
    };
    let (_server, _session, mut queue) = Server::in_turn(LONG, vec![turn(export, lie)]);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
    assert!(queue.lost().is_some());
}
