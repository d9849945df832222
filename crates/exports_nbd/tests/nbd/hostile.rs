//! Hostile and faulty clients: the server disconnects them, and other clients are not affected.

use crate::client::*;
use crate::server::{MIB, Server, wait_until};
use conformance::slow::SlowDevice;
use exports::Export;
use exports_nbd::Config;
use std::io::Write;
use std::time::{Duration, Instant};

/// Checks that a well-behaved client is still served.
fn check_others(server: &Server) {
    let mut client = server.connect(Form::Structured);
    assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
}

#[test]
fn wrong_magics_end_the_connection() {
    let server = Server::start(MIB);
    for form in FORMS {
        let mut client = server.connect(form);
        client.stream.write_all(&[0xab; 64]).unwrap();
        assert!(client.is_disconnected());
        // The header of another form is as wrong.
        let mut client = server.connect(form);
        let own = client.form;
        client.form = if own == Form::Extended { Form::Simple } else { Form::Extended };
        let bytes = [client.request(READ, 0, 1, 0, 512), vec![0; 32]].concat();
        client.stream.write_all(&bytes).unwrap();
        assert!(client.is_disconnected());
    }
    for greeting in [&b"\0\0\0\x04"[..], b"\0\0\0\x03GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff"] {
        let mut client = Client::silent(&server.socket);
        client.stream.write_all(greeting).unwrap();
        assert!(client.is_disconnected());
    }
    check_others(&server);
}

#[test]
fn lengths_that_lie_are_skipped_or_end_the_connection() {
    let server = Server::start(MIB);
    for form in [Form::Simple, Form::Structured] {
        let mut client = server.connect(form);
        client.send(WRITE, 0, 1, 0, 65 * MIB);
        assert!(client.is_disconnected());
    }
    let mut client = server.connect(Form::Extended);
    client.send(READ, PAYLOAD_LEN, 1, 0, u64::MAX);
    assert!(client.is_disconnected());
    let mut client = server.connect(Form::Extended);
    let stray = [client.request(READ, PAYLOAD_LEN, 1, 0, 1000), vec![7; 1000]].concat();
    client.stream.write_all(&stray).unwrap();
    assert_eq!(client.reply().error, EINVAL);
    assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
    let mut client = Client::greeted(&server.socket);
    client.stream.write_all(&[&b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff"[..], &[0; 100_000]].concat()).unwrap();
    drop(client);
    check_others(&server);
}

#[test]
fn a_client_that_only_connects_is_hung_up_on() {
    let server = Server::start(MIB);
    let start = Instant::now();
    let mut silent = Client::silent(&server.socket);
    let mut greeted = Client::greeted(&server.socket);
    check_others(&server);
    assert!(silent.is_disconnected() && greeted.is_disconnected());
    let took = start.elapsed();
    assert!(took > Duration::from_secs(9) && took < Duration::from_secs(60), "{took:?}");
}

#[test]
fn half_open_connections_keep_no_client_out() {
    let server = Server::start(MIB);
    let mut silent: Vec<Client> = (0..200).map(|_| Client::silent(&server.socket)).collect();
    check_others(&server);
    assert!(silent[0].is_disconnected(), "the one that took longest had to go");
    assert_eq!(server.export().stats().connections(), 1);
}

#[test]
fn there_are_as_many_places_as_the_configuration_says() {
    let server = Server::over(SlowDevice::new(MIB), |config| Config { clients: 2, ..config });
    let mut clients = [server.connect(Form::Simple), server.connect(Form::Simple)];
    assert!(Client::silent(&server.socket).is_disconnected());
    clients[0].send(DISC, 0, 0, 0, 0);
    assert!(clients[0].is_disconnected());
    wait_until(|| server.export().stats().clients() == 1);
    check_others(&server);
    assert_eq!(clients[1].run(FLUSH, 0, 0, 0).error, 0);
}

#[test]
fn a_client_that_does_not_read_is_not_read_from_and_holds_its_own_memory_only() {
    let server = Server::start(8 * MIB);
    // Both on the core of the client under test, and on the other.
    let mut others = [server.connect(Form::Structured), server.connect(Form::Structured)];
    let mut greedy = server.connect(Form::Structured);
    let requests: Vec<u8> = (0..4000).flat_map(|cookie| greedy.request(READ, 0, cookie, 0, MIB)).collect();
    let mut stream = greedy.stream.try_clone().unwrap();
    let writer = std::thread::spawn(move || stream.write_all(&requests).unwrap());
    wait_until(|| server.device.executed() >= 32);
    for other in &mut others {
        let start = Instant::now();
        (0..100).for_each(|_| assert_eq!(other.read(0, 4096).len(), 4096));
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    // 32 MiB and what is in the socket.
    let executed = server.device.executed();
    assert!(executed < 240, "{executed} MiB for a client that is gone");
    for _ in 0..4000 {
        assert_eq!(greedy.reply().data.len(), MIB as usize);
    }
    writer.join().unwrap();
}

#[test]
fn many_clients_come_and_go_while_one_works() {
    let server = Server::start(MIB);
    let mut steady = server.connect(Form::Extended);
    for round in 0..200u64 {
        let mut client = Client::greeted(&server.socket);
        match round % 4 {
            0 => drop(client),
            1 => client.send_option(7, &[0; 6]),
            2 => drop(client.option(3, &[])),
            _ => {
                drop(client);
                let mut client = server.connect(Form::Structured);
                client.send(READ, 0, 1, 0, MIB);
            }
        }
        assert_eq!(steady.write(0, 512 * (round % 100), &[round as u8; 512]), 0);
    }
    server.wait_for_clients(1);
    assert_eq!(steady.read(0, 512), [100; 512]);
}
