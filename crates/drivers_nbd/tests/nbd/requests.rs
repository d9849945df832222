//! Requests one by one, and what a real server can do wrong.

use crate::server::{MIB, Over, SIZE, Server};
use block::{Data, Flags, IoError, IoResult, Queue, Request, Segment};
use drivers::direct::DirectQueue;
use drivers_nbd::{Cancel, HandshakeError, NbdQueue, OpenError, Options, Replies, Session};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn open(server: &Server, change: impl FnOnce(&mut Options)) -> (Arc<Session>, NbdQueue) {
    let mut options = server.options.clone();
    change(&mut options);
    let session = Session::open(&options, &Cancel::never()).unwrap();
    let queue = session.start_queue(&Cancel::never()).unwrap();
    (session, queue)
}

/// Does a request; it ends within ten seconds.
fn run(queue: &mut NbdQueue, req: &Request<'_>, offset: u64) -> IoResult {
    // SAFETY: the memory outlives the request, which has ended when this returns.
    unsafe { queue.push(0, req, offset)? };
    let (start, mut result) = (Instant::now(), None);
    while result.is_none() {
        let waited = queue.wait(1, Some(Duration::from_secs(60)), None);
        waited.unwrap_or_else(|error| panic!("{req:?}: {error}"));
        queue.reap(&mut |slot, ended| assert!(slot == 0 && result.replace(ended).is_none()));
        assert!(start.elapsed() < Duration::from_secs(60), "{req:?} does not end");
    }
    result.unwrap()
}

fn segments(buffer: &mut [u8], lens: &[usize]) -> Vec<Segment> {
    let mut rest = buffer;
    lens.iter()
        .map(|len| {
            let (first, tail) = std::mem::take(&mut rest).split_at_mut(*len);
            rest = tail;
            Segment { base: first.as_mut_ptr(), len: *len }
        })
        .collect()
}

fn data(segments: &[Segment]) -> Data<'_> {
    // SAFETY: every test keeps list and memory until its requests have ended.
    unsafe { Data::new(segments) }
}

#[test]
fn written_data_is_read_back_in_every_form_of_replies() {
    let Some(server) = Server::storage_daemon(Over::Unix) else { return };
    let mut seen = Vec::new();
    for replies in [Replies::Simple, Replies::Structured, Replies::Extended] {
        let (session, mut queue) = open(&server, |options| options.replies = replies);
        seen.push(session.facts().replies);
        for (seed, lens) in
            [(1, vec![4096]), (2, vec![512; 200]), (3, vec![512, 1024, 65536, 100, 412]), (4, vec![3 << 20])]
        {
            let len: usize = lens.iter().sum();
            let mut buffer: Vec<u8> = (0..len).map(|i| (i / 3 + seed) as u8).collect();
            let expected = buffer.clone();
            let list = segments(&mut buffer, &lens);
            let offset = seed as u64 * 4 * MIB + 512;
            assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::FUA), offset), Ok(()));
            data(&list).fill(0);
            assert_eq!(run(&mut queue, &Request::read(data(&list)), offset), Ok(()));
            assert!(buffer == expected, "{replies:?} {lens:?}");
        }
        assert_eq!(run(&mut queue, &Request::flush(), 0), Ok(()));
        // A hole and data in one read.
        let mut buffer = vec![7; MIB as usize];
        let list = segments(&mut buffer, &[MIB as usize]);
        assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
        assert_eq!(run(&mut queue, &Request::discard(256 << 10), 512 << 10), Ok(()));
        let zeroes = Request::write_zeroes(256 << 10, Flags::NONE);
        assert_eq!(run(&mut queue, &zeroes, 256 << 10), Ok(()));
        data(&list).fill(9);
        assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Ok(()));
        assert!(buffer[..256 << 10].iter().all(|byte| *byte == 7));
        assert!(buffer[256 << 10..512 << 10].iter().all(|byte| *byte == 0));
        assert!(buffer[768 << 10..].iter().all(|byte| *byte == 7));
    }
    assert_eq!(seen[..2], [Replies::Simple, Replies::Structured]);
}

#[test]
fn the_servers_properties_become_limits() {
    if let Some(server) = Server::nbdkit(Over::Tcp, &["memory", "32M"]) {
        let (session, queue) = open(&server, |options| options.queue_depth = 7);
        let (limits, facts) = (session.limits(), session.facts());
        assert_eq!((limits.capacity, limits.block_size, limits.read_only), (SIZE, 512, false));
        assert!(
            facts.has_flush() && facts.has_fua() && facts.has_trim() && facts.can_multi_conn(),
            "{facts:?}"
        );
        assert!(limits.volatile_cache && limits.native_fua && limits.max_discard > SIZE, "{limits:?}");
        assert_eq!((queue.depth(), session.max_queues() > 1), (7, true));
    }
    if let Some(server) = Server::nbdkit(Over::Unix, &["--readonly", "memory", "32M"]) {
        assert!(open(&server, |_| ()).0.limits().read_only);
    }
    if let Some(server) = Server::qemu_nbd(Over::Unix, 1) {
        let (session, first) = open(&server, |_| ());
        assert_eq!(session.max_queues(), 1);
        let refused = session.start_queue(&Cancel::never()).err().unwrap();
        assert!(matches!(refused, OpenError::AllInUse(1)), "{refused}");
        drop(first);
        let mut again = session.start_queue(&Cancel::never()).unwrap();
        assert_eq!(run(&mut again, &Request::flush(), 0), Ok(()));
    }
}

#[test]
fn an_export_that_is_not_there_is_an_error_that_names_it() {
    let Some(server) = Server::storage_daemon(Over::Unix) else { return };
    let mut options = server.options.clone();
    options.export = "nothing here".into();
    let error = Session::open(&options, &Cancel::never()).err().unwrap();
    assert!(
        matches!(&error, OpenError::Handshake(HandshakeError::NoExport { export, .. }) if export == "nothing here"),
        "{error}"
    );
    options.connections = 65;
    let error = Session::open(&options, &Cancel::never()).err().unwrap();
    assert!(error.to_string().contains("65 connections"), "{error}");
}

#[test]
fn more_connections_than_are_safe_are_refused() {
    let Some(server) = Server::qemu_nbd(Over::Unix, 1) else { return };
    let mut options = server.options.clone();
    options.connections = 2;
    let error = Session::open(&options, &Cancel::never()).err().unwrap();
    assert!(error.to_string().contains("CAN_MULTI_CONN"), "{error}");
}

#[test]
fn errors_of_the_server_are_the_requests_own() {
    let failing = ["--filter=error", "memory", "32M", "error-pread=EIO", "error-pwrite=ENOSPC"];
    let rates = ["error-pread-rate=100%", "error-pwrite-rate=100%"];
    let Some(server) = Server::nbdkit(Over::Unix, &[&failing[..], &rates].concat()) else { return };
    for replies in [Replies::Simple, Replies::Structured] {
        let (_session, mut queue) = open(&server, |options| options.replies = replies);
        let mut buffer = vec![0; 4096];
        let list = segments(&mut buffer, &[4096]);
        for _ in 0..3 {
            assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Err(IoError::Medium));
            let write = Request::write(data(&list), Flags::NONE);
            assert_eq!(run(&mut queue, &write, 0), Err(IoError::NoSpace));
            assert_eq!(run(&mut queue, &Request::flush(), 0), Ok(()));
        }
        assert!(queue.lost().is_none());
    }
}

#[test]
fn zeroes_without_a_fallback_are_only_written_where_that_is_fast() {
    let zeroes = Request::write_zeroes(MIB, Flags::NO_FALLBACK);
    if let Some(server) = Server::nbdkit(Over::Unix, &["memory", "32M"]) {
        let (session, mut queue) = open(&server, |_| ());
        let expected = if session.facts().has_fast_zero() { Ok(()) } else { Err(IoError::Unsupported) };
        assert_eq!(run(&mut queue, &zeroes, 0), expected);
    }
    let poor = ["--filter=nozero", "memory", "32M", "zeromode=none"];
    if let Some(server) = Server::nbdkit(Over::Unix, &poor) {
        let (_session, mut queue) = open(&server, |_| ());
        assert_eq!(run(&mut queue, &zeroes, 0), Err(IoError::Unsupported));
        assert_eq!(run(&mut queue, &zeroes.with_flags(Flags::NONE), 0), Ok(()));
    }
}

/// Waits for the queue's event, and takes it.
fn sleep(queue: &NbdQueue) {
    let event = queue.event_fd().unwrap();
    drivers::direct::poll_readable(event, Some(Duration::from_secs(20)), None).expect("an event");
}

#[test]
fn a_deep_queue_completes_every_slot_once_and_by_events() {
    for over in [Over::Unix, Over::Tcp] {
        let Some(server) = Server::nbdkit(over, &["memory", "32M"]) else { return };
        let (_session, mut queue) = open(&server, |options| options.queue_depth = 64);
        let mut buffer = vec![0; 64 * 4096];
        let list = segments(&mut buffer, &[4096; 64]);
        let (mut started, mut ended) = (0, 0);
        let mut free: Vec<u32> = (0..64).collect();
        while ended < 3000 {
            while started < 3000
                && let Some(slot) = free.pop()
            {
                let data = data(std::slice::from_ref(&list[slot as usize]));
                // SAFETY: the memory outlives the queue.
                unsafe { queue.push(slot, &Request::read(data), started % 64 * 4096).unwrap() };
                started += 1;
            }
            queue.kick();
            while queue.arm() {
                sleep(&queue);
            }
            queue.disarm();
            queue.reap(&mut |slot, result| {
                assert_eq!(result, Ok(()));
                assert!(!free.contains(&slot));
                free.push(slot);
                ended += 1;
            });
        }
    }
}

#[test]
fn requests_in_flight_end_when_the_server_is_killed() {
    for over in [Over::Unix, Over::Tcp] {
        let slow = ["--filter=delay", "memory", "32M", "rdelay=60", "wdelay=60"];
        let Some(mut server) = Server::nbdkit(over, &slow) else { return };
        let (session, mut queue) = open(&server, |_| ());
        let mut buffer = vec![0x55; 128 * 4096];
        let list = segments(&mut buffer, &[4096; 128]);
        for slot in 0..128 {
            let data = data(std::slice::from_ref(&list[slot as usize]));
            let req = if slot % 2 == 0 { Request::read(data) } else { Request::write(data, Flags::NONE) };
            // SAFETY: the memory outlives the queue.
            unsafe { queue.push(slot, &req, u64::from(slot) * 4096).unwrap() };
        }
        queue.kick();
        let is_quiet = queue.arm();
        server.child.kill().unwrap();
        if is_quiet {
            sleep(&queue);
        }
        let (start, mut ended) = (Instant::now(), vec![0; 128]);
        while ended.contains(&0) {
            queue.reap(&mut |slot, result| {
                assert_eq!(result, Err(IoError::DeviceGone));
                ended[slot as usize] += 1;
            });
            assert!(start.elapsed() < Duration::from_secs(60), "{ended:?}");
        }
        assert!(ended.iter().all(|count| *count == 1) && queue.lost().is_some());
        let again = Request::read(data(&list[..1]));
        // SAFETY: the memory outlives the queue.
        assert_eq!(unsafe { queue.push(0, &again, 0) }, Err(IoError::DeviceGone));
        drop(queue);
        assert!(session.start_queue(&Cancel::never()).is_err());
    }
}

#[test]
fn memory_may_go_when_the_queue_is_dropped_with_requests_in_flight() {
    let slow = ["--filter=delay", "memory", "32M", "rdelay=1"];
    let Some(server) = Server::nbdkit(Over::Unix, &slow) else { return };
    let (_session, mut queue) = open(&server, |_| ());
    let mut buffer = vec![0x55; 64 << 10];
    let list = segments(&mut buffer, &[64 << 10]);
    // SAFETY: the memory outlives the queue.
    unsafe { queue.push(0, &Request::read(data(&list)), 0).unwrap() };
    queue.kick();
    drop(queue);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(buffer.iter().all(|byte| *byte == 0x55), "the buffer was written after the drop");
}

#[test]
fn the_queue_may_move_between_threads() {
    let Some(server) = Server::nbdkit(Over::Unix, &["--filter=delay", "memory", "32M", "rdelay=20ms"]) else {
        return;
    };
    let (_session, mut queue) = open(&server, |_| ());
    for round in 0..8u64 {
        let mut buffer = vec![1; 4096];
        // Pushed and armed on a thread that is gone when the reply comes.
        queue = std::thread::spawn(move || {
            let list = segments(&mut buffer, &[4096]);
            // SAFETY: list and buffer are leaked below.
            unsafe { queue.push(0, &Request::read(data(&list)), round * 4096).unwrap() };
            queue.kick();
            queue.arm();
            std::mem::forget(buffer);
            std::mem::forget(list);
            queue
        })
        .join()
        .unwrap();
        let (start, mut count) = (Instant::now(), 0);
        while count == 0 {
            sleep(&queue);
            count = queue.reap(&mut |_, result| assert_eq!(result, Ok(())));
            while count == 0 && !queue.arm() {
                count = queue.reap(&mut |_, result| assert_eq!(result, Ok(())));
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no completion");
        }
        queue.disarm();
    }
}

#[test]
fn a_warm_queue_allocates_nothing() {
    const DEPTH: usize = 32;
    let Some(server) = Server::nbdkit(Over::Unix, &["memory", "32M"]) else { return };
    for replies in [Replies::Simple, Replies::Structured] {
        let (_session, mut queue) = open(&server, |options| options.replies = replies);
        let mut buffer = vec![0; DEPTH * 8192];
        let list = segments(&mut buffer, &[8192; DEPTH]);
        let work = |queue: &mut NbdQueue| {
            for slot in 0..DEPTH {
                let data = data(&list[slot..=slot]);
                let req = if slot % 2 == 0 { Request::read(data) } else { Request::write(data, Flags::FUA) };
                // SAFETY: the memory outlives the queue.
                unsafe { queue.push(slot as u32, &req, slot as u64 * 8192).unwrap() };
            }
            let mut ended = 0;
            while ended < DEPTH {
                queue.wait(1, Some(Duration::from_secs(60)), None).expect("a completion");
                queue.reap(&mut |_, result| ended += usize::from(result.is_ok()));
            }
        };
        (0..20).for_each(|_| work(&mut queue));
        let allocated = allocation_counter::measure(|| (0..200).for_each(|_| work(&mut queue)));
        assert_eq!(allocated.count_total, 0, "{replies:?}");
    }
}
