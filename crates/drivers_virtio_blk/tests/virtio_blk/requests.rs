//! Requests one by one, and what a server can do wrong.

use crate::server::{MIB, Server};
use block::{Data, Flags, IoError, IoResult, Queue, Request, Segment};
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::{Choice, Options, Session, VirtioBlkQueue};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn open(server: &Server, change: impl FnOnce(&mut Options)) -> (Arc<Session>, SharedMemory) {
    let mut options = Options::new(server.socket());
    change(&mut options);
    let session = Session::open(&options).unwrap();
    let memory = SharedMemory::new(2 * MIB).unwrap();
    session.add_region(&memory.region()).unwrap();
    (session, memory)
}

/// Does requests one after the other; each ends within ten seconds.
fn run<'s>(
    queue: &mut VirtioBlkQueue,
    segments: &'s [Segment],
    make: impl FnOnce(Data<'s>) -> Request<'s>,
    offset: u64,
) -> IoResult {
    // SAFETY: the memory outlives the request, which has ended when this returns.
    let data = unsafe { Data::new(segments) };
    // SAFETY: as above.
    unsafe { queue.push(0, &make(data), offset)? };
    queue.kick();
    let start = Instant::now();
    let mut result = None;
    while result.is_none() {
        queue.reap(&mut |slot, r| {
            assert_eq!(slot, 0);
            assert!(result.replace(r).is_none());
        });
        assert!(start.elapsed() < Duration::from_secs(60), "no completion");
    }
    result.unwrap()
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

fn write_and_read_back(server: &Server, change: impl FnOnce(&mut Options)) {
    let (session, memory) = open(server, change);
    let mut queue = session.start_queue().unwrap();
    // One segment, many, and borders that no sector knows.
    for (seed, lens) in
        [(1, vec![4096]), (2, vec![4096; 20]), (3, vec![512, 1024, 65536, 512]), (4, vec![MIB])]
    {
        let len: usize = lens.iter().sum();
        let expected = pattern(seed, len);
        memory.write(0, &expected);
        let mut at = 0;
        let segments: Vec<Segment> = lens
            .iter()
            .map(|len| {
                at += len;
                memory.segment(at - len, *len)
            })
            .collect();
        let offset = u64::from(seed) * 2 * MIB as u64;
        assert_eq!(run(&mut queue, &segments, |data| Request::write(data, Flags::FUA), offset), Ok(()));
        let mut got = vec![0; len];
        server.disk().read_exact_at(&mut got, offset).unwrap();
        assert_eq!(got, expected);
        memory.write(0, &vec![0; len]);
        assert_eq!(run(&mut queue, &segments, Request::read, offset), Ok(()));
        memory.read(0, &mut got);
        assert_eq!(got, expected);
    }
}

#[test]
fn written_data_is_read_back_with_indirect_descriptors() {
    if let Some(server) = Server::start() {
        write_and_read_back(&server, |options| options.indirect = Choice::On);
    }
}

#[test]
fn written_data_is_read_back_with_plain_chains() {
    if let Some(server) = Server::start() {
        write_and_read_back(&server, |options| options.indirect = Choice::Off);
        write_and_read_back(&server, |options| {
            options.indirect = Choice::Off;
            options.event_idx = Choice::Off;
            options.queue_size = 32;
        });
    }
}

#[test]
fn every_operation_is_served() {
    let Some(server) = Server::start() else { return };
    let (session, memory) = open(&server, |_| ());
    let limits = session.limits();
    assert_eq!((limits.capacity, limits.block_size, limits.read_only), (16 * MIB as u64, 512, false));
    assert!(limits.volatile_cache && limits.max_discard > 0 && limits.max_write_zeroes > 0, "{limits:?}");
    let mut queue = session.start_queue().unwrap();
    memory.write(0, &vec![0xaa; 65536]);
    let segments = [memory.segment(0, 65536)];
    assert_eq!(run(&mut queue, &segments, |data| Request::write(data, Flags::NONE), 0), Ok(()));
    assert_eq!(run(&mut queue, &[], |_| Request::flush(), 0), Ok(()));
    assert_eq!(run(&mut queue, &[], |_| Request::write_zeroes(4096, Flags::NO_UNMAP), 0), Ok(()));
    assert_eq!(run(&mut queue, &[], |_| Request::write_zeroes(4096, Flags::FUA), 8192), Ok(()));
    assert_eq!(run(&mut queue, &[], |_| Request::discard(4096), 16384), Ok(()));
    let mut got = vec![1; 65536];
    assert_eq!(run(&mut queue, &segments, Request::read, 0), Ok(()));
    memory.read(0, &mut got);
    for (i, page) in got.chunks(4096).enumerate() {
        let expected = if [0, 2, 4].contains(&i) { 0 } else { 0xaa };
        assert!(page.iter().all(|byte| *byte == expected), "page {i}");
    }
    assert_eq!(
        run(&mut queue, &segments, Request::read, 16 * MIB as u64),
        Err(IoError::Medium),
        "beyond the end"
    );
    assert!(queue.read_id(Duration::from_secs(5)).is_ok());
}

#[test]
fn a_deep_queue_completes_every_slot_once_and_by_events() {
    let Some(server) = Server::start() else { return };
    for (event_idx, indirect) in [(Choice::On, Choice::On), (Choice::Off, Choice::Off)] {
        let (session, memory) = open(&server, |options| {
            options.event_idx = event_idx;
            options.indirect = indirect;
            options.queue_size = 64;
        });
        let mut queue = session.start_queue().unwrap();
        let depth = queue.depth() as usize;
        let segments: Vec<Segment> = (0..depth).map(|i| memory.segment(i * 4096, 4096)).collect();
        let (mut started, mut ended) = (0, 0);
        let mut free: Vec<u32> = (0..depth as u32).collect();
        while ended < 2000 {
            while let Some(slot) = free.pop().filter(|_| started < 2000) {
                // SAFETY: the memory outlives the queue.
                let data = unsafe { Data::new(std::slice::from_ref(&segments[slot as usize])) };
                // SAFETY: as above.
                unsafe { queue.push(slot, &Request::read(data), started % 64 * 4096).unwrap() };
                started += 1;
            }
            queue.kick();
            while queue.arm() {
                wait(queue.event_fd().unwrap());
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

/// Waits for the event and takes it, as long as the server may need.
fn wait(fd: i32) {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the entry outlives the call.
    assert_eq!(unsafe { libc::poll(&mut entry, 1, 10_000) }, 1, "no event");
    let mut count = 0u64;
    // SAFETY: eight bytes, as an eventfd wants.
    assert_eq!(unsafe { libc::read(fd, (&raw mut count).cast(), 8) }, 8);
}

#[test]
fn memory_that_the_server_does_not_have_is_refused_here() {
    let Some(server) = Server::start() else { return };
    let (session, memory) = open(&server, |_| ());
    let mut queue = session.start_queue().unwrap();
    let mut private = vec![0u8; 4096];
    let segments = [memory.segment(0, 512), Segment { base: private.as_mut_ptr(), len: 512 }];
    assert_eq!(run(&mut queue, &segments, Request::read, 0), Err(IoError::Invalid));
    assert_eq!(run(&mut queue, &segments[1..], Request::read, 0), Err(IoError::Invalid));
    assert_eq!(run(&mut queue, &segments[..1], Request::read, 0), Ok(()));
    session.remove_region(&memory.region());
    assert_eq!(run(&mut queue, &segments[..1], Request::read, 0), Err(IoError::Invalid));
    session.add_region(&memory.region()).unwrap();
    assert_eq!(run(&mut queue, &segments[..1], Request::read, 0), Ok(()));
}

#[test]
fn virtqueues_are_handed_out_once_and_come_back() {
    let Some(server) = Server::start() else { return };
    let (session, memory) = open(&server, |_| ());
    let first = session.start_queue().unwrap();
    let mut second = session.start_queue().unwrap();
    assert!(session.start_queue().is_err());
    assert_eq!(run(&mut second, &[memory.segment(0, 4096)], Request::read, 0), Ok(()));
    drop(first);
    let mut again = session.start_queue().unwrap();
    assert_eq!(again.index(), 0);
    assert_eq!(run(&mut again, &[memory.segment(0, 4096)], Request::read, 0), Ok(()));
}

#[test]
fn requests_in_flight_end_when_the_server_is_killed() {
    let Some(mut server) = Server::start() else { return };
    let (session, memory) = open(&server, |_| ());
    let mut queue = session.start_queue().unwrap();
    let segments = [memory.segment(0, 4096)];
    server.child.kill().unwrap();
    // SAFETY: the memory outlives the queue.
    let data = unsafe { Data::new(&segments) };
    // SAFETY: as above.
    let pushed = unsafe { queue.push(0, &Request::read(data), 0) };
    queue.kick();
    if pushed.is_ok() {
        if queue.arm() {
            wait(queue.event_fd().unwrap());
        }
        let (start, mut result) = (Instant::now(), None);
        while result.is_none() {
            queue.reap(&mut |_, r| result = Some(r));
            assert!(start.elapsed() < Duration::from_secs(60), "no end");
        }
        assert_eq!(result, Some(Err(IoError::DeviceGone)));
    }
    // SAFETY: as above.
    assert_eq!(unsafe { queue.push(0, &Request::read(data), 0) }, Err(IoError::DeviceGone));
    assert!(session.start_queue().is_err());
}
