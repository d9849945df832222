//! How connections end: by the client's leave, by its silence, by ours.

use crate::client::*;
use crate::server::{MIB, Server, wait_until};
use conformance::slow::pattern;
use exports::Export;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

#[test]
fn a_client_that_disconnects_gets_its_pending_replies() {
    let server = Server::start(MIB);
    for form in FORMS {
        let mut client = server.connect(form);
        server.device.hold();
        for cookie in 0..8 {
            client.send(READ, 0, cookie, cookie * 512, 512);
        }
        client.send_write(0, 8, 8192, &[8; 512]);
        client.send(DISC, 0, 9, 0, 0);
        wait_until(|| server.device.in_flight() == 9);
        server.device.release();
        let mut cookies: Vec<u64> = (0..9)
            .map(|_| {
                let reply = client.reply();
                assert_eq!(reply.error, 0);
                reply.cookie
            })
            .collect();
        cookies.sort_unstable();
        assert_eq!(cookies, (0..9).collect::<Vec<_>>());
        assert!(client.is_disconnected());
        server.wait_for_clients(0);
    }
}

#[test]
fn a_client_that_closes_its_sending_side_gets_its_pending_replies() {
    let server = Server::start(MIB);
    let mut client = server.connect(Form::Structured);
    server.device.hold();
    client.send(READ, 0, 1, 512, 512);
    // A write that does not come whole is none.
    let header = client.request(WRITE, 0, 2, 0, 4096);
    std::io::Write::write_all(&mut client.stream, &[&header[..], &[5; 100]].concat()).unwrap();
    client.stream.shutdown(Shutdown::Write).unwrap();
    wait_until(|| server.device.in_flight() == 1);
    server.device.release_soon();
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (1, 0));
    assert!(client.is_disconnected());
    server.wait_for_clients(0);
    assert_eq!(server.device.bytes(0, 512), (0..512).map(pattern).collect::<Vec<_>>());
}

#[test]
fn a_client_that_vanishes_leaves_nothing_behind_and_no_partial_write() {
    let server = Server::start(MIB);
    let mut before = server.device.bytes(0, 32 * 4096);
    for round in 1..=10u8 {
        let mut client = server.connect(Form::Extended);
        server.device.hold();
        for cookie in 0..32 {
            client.send_write(0, cookie, cookie * 4096, &[round; 4096]);
            client.send(READ, 0, 100 + cookie, cookie * 4096, 4096);
        }
        if round % 2 == 0 {
            wait_until(|| server.device.in_flight() > 0);
        }
        drop(client);
        server.device.release_soon();
        server.wait_for_clients(0);
        wait_until(|| server.device.in_flight() == 0);
        server.device.release();
        let mut next = server.connect(Form::Simple);
        let after = next.read(0, 32 * 4096);
        for (old, new) in before.chunks(4096).zip(after.chunks(4096)) {
            assert!(new == old || new == [round; 4096], "round {round}");
        }
        before = after;
        drop(next);
        server.wait_for_clients(0);
    }
}

#[test]
fn an_export_that_stops_answers_what_it_has_and_refuses_the_rest() {
    let mut server = Server::start(MIB);
    let mut client = server.connect(Form::Structured);
    server.device.hold();
    client.send_write(0, 1, 0, &[1; 512]);
    client.send(READ, 0, 2, 4096, 512);
    wait_until(|| server.device.in_flight() == 2);
    let export = server.export.take();
    let stopping = std::thread::spawn(move || drop(export));
    // The listening goes first; then the core hears of it, and refuses also what it does not know.
    wait_until(|| UnixStream::connect(&server.socket).is_err());
    while client.run(99, 0, 0, 0).error != ESHUTDOWN {}
    client.send(READ, 0, 3, 0, 512);
    client.send_write(0, 4, 512, &[4; 512]);
    let mut replies = Vec::new();
    for count in [2, 2] {
        replies.extend((0..count).map(|_| client.reply()).map(|reply| (reply.cookie, reply.error)));
        server.device.release();
    }
    assert_eq!(replies[..2], [(3, ESHUTDOWN), (4, ESHUTDOWN)]);
    replies.sort_unstable();
    assert_eq!(replies, [(1, 0), (2, 0), (3, ESHUTDOWN), (4, ESHUTDOWN)]);
    assert!(client.is_disconnected());
    stopping.join().unwrap();
    assert_eq!(server.device.bytes(0, 512), [1; 512]);
    assert_eq!(server.device.bytes(512, 1)[0], pattern(512));
    assert!(!server.socket.exists());
}

#[test]
fn an_export_stops_at_once_whatever_its_clients_are_at() {
    let mut server = Server::start(MIB);
    let mut idle = server.connect(Form::Simple);
    let mut half = server.connect(Form::Structured);
    let header = half.request(WRITE, 0, 2, 0, 65_536);
    std::io::Write::write_all(&mut half.stream, &[&header[..], &[5; 1000]].concat()).unwrap();
    let mut newcomer = Client::greeted(&server.socket);
    wait_until(|| server.export().stats().clients() == 2);
    let start = Instant::now();
    server.export = None;
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert!(idle.is_disconnected() && half.is_disconnected() && newcomer.is_disconnected());
}

#[test]
fn an_export_stops_though_half_a_write_waits_for_room() {
    let mut server = Server::start(32 * MIB);
    let mut client = server.connect(Form::Structured);
    server.device.hold();
    // All the memory that there is for it.
    client.send(READ, 0, 1, 0, 32 * MIB);
    let header = client.request(WRITE, 0, 2, 0, 65_536);
    std::io::Write::write_all(&mut client.stream, &[&header[..], &[5; 1000]].concat()).unwrap();
    wait_until(|| server.device.in_flight() == 1);
    let export = server.export.take();
    let stopping = std::thread::spawn(move || drop(export));
    server.device.release_soon();
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error, reply.data.len() as u64), (1, 0, 32 * MIB));
    let start = Instant::now();
    assert!(client.is_disconnected());
    stopping.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn an_export_stops_though_a_client_takes_none_of_its_replies() {
    let mut server = Server::start(8 * MIB);
    let mut client = server.connect(Form::Simple);
    for cookie in 0..4 {
        client.send(READ, 0, cookie, 0, 8 * MIB);
    }
    wait_until(|| server.device.executed() == 4);
    let start = Instant::now();
    server.export = None;
    let took = start.elapsed();
    assert!(took > Duration::from_secs(4) && took < Duration::from_secs(60), "{took:?}");
}
