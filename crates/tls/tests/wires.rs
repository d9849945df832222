//! Wires over sockets that are at times full, empty or closed.

use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use tempfile::TempDir;
use tls::authority::write_all;
use tls::{Came, Client, RECORD, Server, Wire};

fn pair() -> [(Wire, UnixStream); 2] {
    let files = TempDir::new().unwrap();
    write_all(files.path());
    let mut client = Client::with_certificates(files.path()).unwrap().session("localhost").unwrap();
    let server = Server::with_certificates(files.path(), false).unwrap();
    let mut server = server.session().unwrap();
    while !(client.handshake().unwrap() & server.handshake().unwrap()) || !client.unsent().is_empty() {
        server.feed(client.unsent());
        client.sent(client.unsent().len());
        server.handshake().unwrap();
        client.feed(server.unsent());
        server.sent(server.unsent().len());
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    [(Wire::new(client), ours), (Wire::new(server), theirs)]
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7 + at / 1000) as u8).collect()
}

fn say(wire: &mut Wire, bytes: &[u8]) {
    for part in bytes.chunks(RECORD) {
        wire.say(part.len(), |to| to.copy_from_slice(part)).unwrap();
    }
    wire.seal().unwrap();
}

#[test]
fn everything_arrives_in_order_however_little_room_there_is() {
    let [(mut ours, out), (mut theirs, back)] = pair();
    let expected = bytes(3_000_000);
    say(&mut ours, &expected);
    let (mut got, mut rooms, mut full) = (Vec::new(), [1, 100, 5000, 70_000, 300_000].iter().cycle(), 0);
    while got.len() < expected.len() {
        ours.send(&out).unwrap();
        full += u32::from(ours.unsent() > 0);
        let room = *rooms.next().unwrap();
        if let Came::Bytes { len, .. } =
            theirs.receive(&back, room, |bytes| got.extend_from_slice(bytes)).unwrap()
        {
            assert!(len <= room);
        }
    }
    assert!(full > 1 && got == expected);
    assert_eq!(theirs.receive(&back, 10, |_| panic!("nothing")).unwrap(), Came::Nothing);
}

#[test]
fn decrypted_bytes_that_wait_are_not_taken_for_nothing() {
    let [(mut ours, out), (mut theirs, back)] = pair();
    say(&mut ours, &bytes(1000));
    ours.send(&out).unwrap();
    let mut receive = |room| theirs.receive(&back, room, |_| {}).unwrap();
    assert_eq!(receive(999), Came::Bytes { len: 999, is_drained: false });
    assert_eq!(receive(999), Came::Bytes { len: 1, is_drained: true });
    assert_eq!(receive(999), Came::Nothing);
    assert!(!theirs.has_more());
    say(&mut ours, &bytes(1000));
    ours.send(&out).unwrap();
    theirs.receive(&back, 10, |_| {}).unwrap();
    assert!(theirs.has_more());
}

#[test]
fn bytes_before_the_end_are_handed_over_first() {
    for says_goodbye in [true, false] {
        let [(mut ours, out), (mut theirs, back)] = pair();
        say(&mut ours, b"last words");
        ours.send(&out).unwrap();
        if says_goodbye {
            ours.close(&out);
        }
        drop(out);
        let mut got = Vec::new();
        let came = theirs.receive(&back, 100, |bytes| got.extend_from_slice(bytes)).unwrap();
        assert!(matches!(came, Came::Bytes { len: 10, .. }) && got == b"last words", "{came:?} {got:?}");
        let end = theirs.receive(&back, 100, |_| {});
        match says_goodbye {
            true => assert_eq!(end.unwrap(), Came::End),
            false => assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionAborted),
        }
    }
}

#[test]
fn bytes_that_are_no_tls_end_it() {
    let [(_, mut out), (mut theirs, back)] = pair();
    out.write_all(b"something in the clear").unwrap();
    let error = theirs.receive(&back, 100, |_| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
}
