//! Servers that violate the protocol.

use super::*;
use std::sync::mpsc;

/// The server's reply to two reads of 1024 bytes: one at 4096 and one at 8192.
type Lie = fn(&mut Client, Asked, Asked) -> Vec<u8>;

const DATA: u16 = 1;

fn at(offset: u64, tail: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes(), tail].concat()
}

/// Violations of structured replies.
const STRUCTURED: [(&str, Lie); 16] = [
    ("closed the connection", |_, _, _| Vec::new()),
    ("starts with 0x67446699", |_, _, _| vec![0x67, 0x44, 0x66, 0x99]),
    ("reply without a request", |c, a, _| c.part(&Asked { cookie: a.cookie ^ 1 << 32, ..a }, 1, 0, &[])),
    ("reply without a request", |c, a, _| c.part(&Asked { cookie: a.cookie | 0xff, ..a }, 1, 0, &[])),
    ("reply without a request", |c, a, _| c.part(&Asked { cookie: a.cookie + 2, ..a }, 1, 0, &[])),
    ("does not fit", |_, a, _| server::simple(a.cookie, 0, &[0; 1024])),
    ("outside", |c, a, _| c.part(&a, 1, DATA, &at(4095, &[1; 16]))),
    ("outside", |c, a, _| c.part(&a, 1, DATA, &at(4096, &[1; 1025]))),
    ("outside", |c, a, _| c.part(&a, 1, DATA, &at(5120, &[1; 1]))),
    ("outside", |c, a, _| c.part(&a, 1, DATA, &at(u64::MAX, &[1; 1024]))),
    ("outside", |c, a, _| c.part(&a, 1, 2, &at(4608, &[0xff; 4]))),
    ("repeats", |c, a, _| {
        [c.part(&a, 0, DATA, &at(4096, &[1; 600])), c.part(&a, 0, DATA, &at(4600, &[1; 520]))].concat()
    }),
    ("before all", |c, a, _| c.part(&a, 1, DATA, &at(4096, &[1; 1023]))),
    ("before all", |c, a, _| c.part(&a, 1, 0, &[])),
    ("is 1048576 bytes", |c, a, _| {
        let mut bytes = c.part(&a, 1, 0x8001, &[0, 0, 0, 5, 0, 0]);
        bytes[16..20].copy_from_slice(&(1u32 << 20).to_be_bytes());
        bytes
    }),
    ("closed the connection", |c, a, _| c.part(&a, 1, DATA, &at(4096, &[1; 1024]))[..600].to_vec()),
];

#[test]
fn every_lie_ends_all_requests_and_touches_nothing_else() {
    for (what, lie) in STRUCTURED {
        for replies in [Replies::Structured, Replies::Extended] {
            let is_compact =
                ["starts with", "does not fit", "1048576"].iter().any(|word| what.contains(word));
            if is_compact && replies == Replies::Extended {
                continue;
            }
            let (_server, session, mut queue) = Server::start(Export::good(replies), move |client| {
                let (first, second) = (client.request(), client.request());
                let bytes = lie(client, first, second);
                client.send(&bytes);
                if !what.contains("closed") {
                    // The client disconnects, not the server.
                    client.linger();
                }
            });
            // Memory around the requests must not change.
            let mut memory = vec![0x55; 4096];
            let list = [Segment { base: memory[512..].as_mut_ptr(), len: 1024 }];
            let other = [Segment { base: memory[2048..].as_mut_ptr(), len: 1024 }];
            assert_eq!(push(&mut queue, 0, &Request::read(data(&list)), 4096), Ok(()));
            assert_eq!(push(&mut queue, 1, &Request::read(data(&other)), 8192), Ok(()));
            let gone = Err(IoError::DeviceGone);
            assert_eq!(ends(&mut queue, 2), [(0, gone), (1, gone)], "{what}");
            assert_eq!(queue.reap(&mut |_, _| panic!("{what}: ended twice")), 0);
            let why = queue.lost().expect("it is lost");
            assert!(why.contains(what), "{what}: {why}");
            assert_eq!(push(&mut queue, 0, &Request::flush(), 0), gone);
            drop((queue, session));
            for range in [0..512, 1536..2048, 2048..3072, 3072..4096] {
                assert!(memory[range.clone()].iter().all(|byte| *byte == 0x55), "{what}: {range:?}");
            }
        }
    }
}

#[test]
fn an_extended_reply_that_names_another_offset_is_a_lie() {
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Extended), |client| {
        let asked = client.request();
        let bytes = part(Replies::Extended, &Asked { offset: 0, ..asked }, 1, 0, &[]);
        client.send(&bytes);
    });
    assert_eq!(push(&mut queue, 0, &Request::discard(512), 512), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
}

#[test]
fn a_request_is_answered_once() {
    for replies in every_form() {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), |client| {
            let asked = client.request();
            client.done(&asked, 0);
            client.done(&asked, 0);
        });
        assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
        let start = Instant::now();
        while queue.lost().is_none() {
            queue.reap(&mut |_, _| panic!("ended twice"));
            assert!(start.elapsed() < Duration::from_secs(60), "the connection is still open");
        }
    }
}

#[test]
fn data_for_a_request_without_is_a_lie() {
    for replies in [Replies::Structured, Replies::Extended] {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), |client| {
            let asked = client.request();
            client.payload(&asked);
            let bytes = client.part(&asked, 1, DATA, &at(asked.offset, &[1; 512]));
            client.send(&bytes);
        });
        let mut memory = vec![0x55; 512];
        let list = segment(&mut memory);
        assert_eq!(push(&mut queue, 0, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
        assert!(memory.iter().all(|byte| *byte == 0x55));
    }
}

#[test]
fn a_server_that_never_stops_talking_keeps_no_thread_from_leaving() {
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Structured), |client| {
        use std::io::Write;
        let asked = client.request();
        let bytes = client.part(&asked, 0, 0x8001, &[&[0, 0, 0, 5, 0x0f, 0xff][..], &[b'x'; 0xfff]].concat());
        let bytes = bytes.repeat(64);
        while client.stream.write_all(&bytes).is_ok() {}
    });
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    queue.kick();
    for _ in 0..100 {
        let start = Instant::now();
        assert_eq!(queue.reap(&mut |_, _| panic!("it never ends")), 0);
        assert!(start.elapsed() < Duration::from_secs(60), "one look took {:?}", start.elapsed());
    }
}

#[test]
fn a_write_that_is_answered_early_ends_when_its_memory_is_free() {
    let (go_on, wait) = mpsc::channel();
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Structured), move |client| {
        let asked = client.request();
        client.done(&asked, 28);
        wait.recv().unwrap();
        client.payload(&asked);
        serve(client, 1);
    });
    let mut memory = vec![1; 1 << 20];
    let list = segment(&mut memory);
    assert_eq!(push(&mut queue, 0, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
    queue.kick();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        assert_eq!(queue.reap(&mut |_, _| panic!("its memory is still being sent")), 0);
    }
    go_on.send(()).unwrap();
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::NoSpace))]);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
}

#[test]
fn requests_answered_before_the_server_vanished_have_completed() {
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Structured), |client| {
        let (first, _second) = (client.request(), client.request());
        client.data(&first, &[3; 1024]);
    });
    let (mut first, mut second) = (vec![0x55; 1024], vec![0x55; 1024]);
    let (a, b) = (segment(&mut first), segment(&mut second));
    assert_eq!(push(&mut queue, 0, &Request::read(data(&a)), 4096), Ok(()));
    assert_eq!(push(&mut queue, 1, &Request::read(data(&b)), 4096), Ok(()));
    assert_eq!(ends(&mut queue, 2), [(0, Ok(())), (1, Err(IoError::DeviceGone))]);
    assert!(first == [3; 1024]);
}

#[test]
fn an_idle_queue_wakes_up_when_the_server_goes() {
    let (go_on, wait) = mpsc::channel::<()>();
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Structured), move |_| {
        let _ = wait.recv();
    });
    assert!(queue.arm());
    go_on.send(()).unwrap();
    let event = queue.event_fd().unwrap();
    drivers::direct::poll_readable(event, Some(Duration::from_secs(10)), None).expect("an event");
    assert_eq!(queue.reap(&mut |_, _| panic!("nothing was in flight")), 0);
    assert!(queue.lost().is_some() && queue.arm(), "nothing more will come");
}
