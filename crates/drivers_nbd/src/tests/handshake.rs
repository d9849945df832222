//! Servers that cannot be used, and the reported reasons.

use super::*;
use server::SIZE;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;

fn refusal(options: &Options) -> OpenError {
    Session::open(options, &Cancel::never()).expect_err("an error")
}

/// The error of opening when the server sends this when it is asked for the export.
fn when_asked(answer: impl FnOnce(&mut Client) + Send + 'static) -> OpenError {
    let mut server = Server::raw(|mut client| {
        client.greet(3);
        assert_eq!(client.option().0, 7);
        answer(&mut client);
        client.linger();
    });
    (server.options.export, server.options.replies) = ("disk".into(), Replies::Simple);
    refusal(&server.options)
}

#[test]
fn a_refusal_has_the_error_number_of_its_reason() {
    for (kind, data, errno, text) in [
        (1 << 31 | 5, &b"use TLS"[..], libc::EPROTONOSUPPORT, "(use TLS)"),
        (1 << 31 | 6, b"", libc::ENOENT, "no export \"disk\""),
        (1 << 31 | 2, b"not you", libc::EACCES, "(not you)"),
        (2, b"", libc::EPROTO, "answers NBD_OPT_GO with 0x2"),
    ] {
        let error = when_asked(move |client| client.answer(7, kind, data));
        assert!(matches!(error, OpenError::Handshake(_)), "{error}");
        assert!(error.errno() == errno && error.to_string().contains(text), "{error}: {}", error.errno());
    }
}

#[test]
fn an_export_without_a_whole_block_cannot_be_used() {
    let error = when_asked(|client| {
        client.about_export(300, 1);
        client.answer(7, 1, &[]);
    });
    assert!(matches!(&error, OpenError::Export(why) if why.contains("300 bytes")), "{error}");
    let error = when_asked(|client| {
        client.about_export(SIZE, 1);
        client.about_blocks([1, 256, 256]);
        client.answer(7, 1, &[]);
    });
    assert_eq!(error.errno(), libc::ENOTSUP, "{error}");
}

/// The error of opening with TLS when the server answers STARTTLS like this.
fn when_tls_is_asked_for(answer: impl FnOnce(&mut Client) + Send + 'static) -> OpenError {
    let files = tempfile::tempdir().unwrap();
    tls::authority::write_all(files.path());
    let mut server = Server::raw(|mut client| {
        client.greet(3);
        assert_eq!(client.option(), (5, Vec::new()));
        answer(&mut client);
        client.linger();
    });
    server.options.tls = Some(Tls::new(Some(files.path()), None, None, None).unwrap());
    refusal(&server.options)
}

#[test]
fn a_client_that_requires_tls_does_not_continue_without_it() {
    let error = when_tls_is_asked_for(|client| client.answer(5, 1 << 31 | 1, b"what?"));
    assert_eq!(error.to_string(), "the server does not support TLS, which is required (what?)");
    assert_eq!(error.errno(), libc::EPROTONOSUPPORT);
    // An attacker in the middle acknowledges and continues in the clear.
    let error = when_tls_is_asked_for(|client| {
        client.answer(5, 1, &[]);
        client.answer(7, 1, &[]);
    });
    assert!(matches!(&error, OpenError::Stream(StreamError::Tls(_))), "{error}");
    assert_eq!(error.errno(), libc::EKEYREJECTED);
}

#[test]
fn a_server_that_hangs_up_is_an_error() {
    for bytes in [0, 5, 16, 18] {
        let server = Server::raw(move |mut client| client.send(&b"NBDMAGICIHAVEOPT\0\x03"[..bytes]));
        let error = refusal(&server.options);
        assert!(matches!(error, OpenError::Stream(StreamError::Io(_))), "{error}");
    }
}

#[test]
fn an_old_server_is_asked_by_name() {
    let mut server = Server::raw(|mut client| {
        assert_eq!(client.greet(0), 0);
        assert_eq!(client.option(), (1, b"old".to_vec()));
        client.send(&[&SIZE.to_be_bytes()[..], &ALL_FLAGS.to_be_bytes(), &[0; 124]].concat());
        serve(&mut client, 1);
    });
    server.options.export = "old".into();
    let session = Session::open(&server.options, &Cancel::never()).unwrap();
    assert_eq!((session.facts().replies, session.facts().size), (Replies::Simple, SIZE));
    let mut queue = session.start_queue(&Cancel::never()).unwrap();
    let mut memory = vec![0; 512];
    let list = segment(&mut memory);
    assert_eq!(push(&mut queue, 0, &Request::read(data(&list)), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    assert!(memory.iter().all(|byte| *byte == 7));
    let server = Server::raw(|mut client| {
        client.greet(0);
        client.option();
    });
    let error = refusal(&server.options);
    assert!(matches!(error, OpenError::Handshake(HandshakeError::NoExport { .. })), "{error}");
}

#[test]
fn a_silent_server_costs_no_more_than_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut options = Options::new(Address::Unix(path));
    options.timeout_ms = 100;
    let start = Instant::now();
    let error = refusal(&options);
    assert!(matches!(error, OpenError::Stream(StreamError::TimedOut(100))), "{error}");
    assert_eq!(error.errno(), libc::ETIMEDOUT);
    assert!(start.elapsed() >= Duration::from_millis(100) && start.elapsed() < Duration::from_secs(60));
}

#[test]
fn another_thread_ends_an_attempt_in_every_phase() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    // Silent servers. The backlog of the last one fills up, so that connecting blocks, too.
    let mut crowd = Vec::new();
    for is_crowded in [false, true] {
        for address in [Address::Unix(path.clone()), Address::Tcp { host: "127.0.0.1".into(), port }] {
            let options = Options { timeout_ms: 60_000, ..Options::new(address) };
            let cancel = Cancel::new().unwrap();
            let other = cancel.clone();
            let start = Instant::now();
            let attempt = std::thread::spawn(move || Session::open(&options, &other).err().unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!attempt.is_finished(), "crowded: {is_crowded}");
            cancel.cancel();
            let error = attempt.join().unwrap();
            assert!(matches!(error, OpenError::Stream(StreamError::Cancelled)), "{error}");
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        fill(&path, &mut crowd);
    }
    drop(listener);
    // A start that was cancelled before does nothing.
    let cancel = Cancel::new().unwrap();
    cancel.cancel();
    let server =
        Server::raw(|mut client| drop(client.stream.set_nonblocking(true).map(|()| client.greet(3))));
    let options = server.options.clone();
    std::mem::forget(server);
    assert!(matches!(Session::open(&options, &cancel), Err(OpenError::Stream(StreamError::Cancelled))));
}

/// Connects until the backlog is full.
fn fill(path: &std::path::Path, crowd: &mut Vec<socket2::Socket>) {
    loop {
        let kind = socket2::Type::STREAM.nonblocking();
        let socket = socket2::Socket::new(socket2::Domain::UNIX, kind, None).unwrap();
        if socket.connect(&socket2::SockAddr::unix(path).unwrap()).is_err() {
            return;
        }
        crowd.push(socket);
    }
}

#[test]
fn an_address_without_a_server_is_an_error_that_names_it() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let cases = [
        (Address::Unix("/nonexistent/socket".into()), "/nonexistent/socket: No such file", libc::ENOENT),
        (Address::Unix("/x".repeat(100).into()), "path", 0),
        (Address::Tcp { host: "127.0.0.1".into(), port }, "127.0.0.1:", libc::ECONNREFUSED),
        (Address::Tcp { host: "no.such.host.invalid".into(), port: 1 }, "no.such.host.invalid:1", 0),
    ];
    for (address, why, errno) in cases {
        let error = refusal(&Options::new(address));
        assert!(
            matches!(
                error,
                OpenError::Stream(StreamError::Connect { .. }) | OpenError::Stream(StreamError::TimedOut(_))
            ),
            "{error}"
        );
        assert!(error.to_string().contains(why), "{error}");
        assert!(errno == 0 || error.errno() == errno, "{error}: {}", error.errno());
    }
}

#[test]
fn reported_block_sizes_become_limits() {
    let export =
        Export { size: SIZE + 5000, blocks: Some([4096, 65536, 100_000]), ..Export::good(Replies::Simple) };
    let (_server, session, _queue) = Server::start(export, Client::linger);
    let limits = session.limits();
    assert_eq!((limits.block_size, limits.physical_block_size, limits.optimal_io_size), (4096, 4096, 65536));
    assert_eq!((limits.capacity, session.facts().max_payload), (SIZE + 4096, 98304));
}
