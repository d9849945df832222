//! Tests of the driver against a test server that each test configures.

mod direct;
mod reconnect;
mod server;

use super::*;
use block::{Data, Flags, IoError, IoResult, Queue, Request, Segment};
use drivers::shared_memory::SharedMemory;
use server::{Character, DISK, Seen, Server};
use std::time::{Duration, Instant};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use virtio::blk::*;
use virtio::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};

/// Pushes a request; its memory outlives the test's queue.
fn push(
    queue: &mut VirtioBlkQueue,
    slot: u32,
    segments: &[Segment],
    flags: Option<Flags>,
    offset: u64,
) -> IoResult {
    // SAFETY: every test keeps list and memory until its requests have ended.
    let data = unsafe { Data::new(segments) };
    let req = flags.map_or_else(|| Request::read(data), |flags| Request::write(data, flags));
    // SAFETY: as above.
    unsafe { queue.push(slot, &req, offset) }
}

/// Polls and returns the first result.
fn end(queue: &mut VirtioBlkQueue) -> (u32, IoResult) {
    queue.kick();
    let (start, mut ended) = (Instant::now(), None);
    while ended.is_none() {
        queue.reap(&mut |slot, result| assert!(ended.replace((slot, result)).is_none(), "one at a time"));
        assert!(start.elapsed() < Duration::from_secs(60), "no completion");
        std::thread::yield_now();
    }
    ended.unwrap()
}

fn every_ring() -> impl Iterator<Item = Options> {
    (0..8).map(|bits| {
        let choice = |bit| if bits & bit != 0 { Choice::On } else { Choice::Off };
        let options = Options { queue_size: 16, timeout_ms: 5000, ..Options::new("/") };
        Options { packed: choice(1), event_idx: choice(2), indirect: choice(4), ..options }
    })
}

fn options() -> Options {
    Options { queue_size: 16, timeout_ms: 5000, ..Options::new("/") }
}

#[test]
fn data_goes_through_every_kind_of_ring_and_memory_message() {
    let bare = Protocol::CONFIG | Protocol::MQ;
    for (protocol, options) in
        [Character::good().protocol, bare].into_iter().flat_map(|p| every_ring().map(move |o| (p, o)))
    {
        let (server, session, memory) = Server::good(Character { protocol, ..Character::good() }, &options);
        let mut queue = session.start_queue().unwrap();
        // Two segments apart in memory, twenty-one adjacent ones, and ten apart that exceed the
        // limit of one request.
        let lists: [Vec<Segment>; 3] = [
            vec![memory.segment(8192, 1024), memory.segment(0, 512)],
            (0..21).map(|i| memory.segment(i * 512, 512)).collect(),
            (0..10).map(|i| memory.segment(i * 4096, if i < 9 { 700 } else { 356 })).collect(),
        ];
        for (i, list) in lists.iter().enumerate() {
            memory.write(0, &vec![0; 64 << 10]);
            let bytes: Vec<u8> =
                (0..list.iter().map(|s| s.len).sum()).map(|b: usize| (b / 7 + i) as u8).collect();
            // SAFETY: the memory lives as long as the test.
            let data = unsafe { Data::new(list) };
            data.copy_from(&bytes);
            assert_eq!(push(&mut queue, 1, list, Some(Flags::NONE), 4096), Ok(()));
            assert_eq!(end(&mut queue), (1, Ok(())));
            data.fill(0);
            assert_eq!(push(&mut queue, 1, list, None, 4096), Ok(()));
            assert_eq!(end(&mut queue), (1, Ok(())));
            let mut got = vec![0; bytes.len()];
            data.copy_to(&mut got);
            assert!(got == bytes, "list {i} with {options:?}");
        }
        let seen = server.take_seen();
        assert_eq!(seen[2], Seen::Transfer(VIRTIO_BLK_T_OUT, 8, vec![21 * 512]), "neighbours are joined");
        let [first, second] = [&seen[4], &seen[5]];
        assert_eq!(first, &Seen::Transfer(VIRTIO_BLK_T_OUT, 8, vec![700, 700, 700, 700, 700, 700, 700, 220]));
        assert_eq!(second, &Seen::Transfer(VIRTIO_BLK_T_OUT, 18, vec![480, 700, 356]));
        assert_eq!(queue.read_id(Duration::from_secs(5)).as_deref(), Ok("by hand"));
    }
}

#[test]
fn a_write_with_fua_is_followed_by_a_flush_where_there_is_a_cache() {
    let cases = [
        (VIRTIO_BLK_F_FLUSH, 0, true),
        (VIRTIO_BLK_F_FLUSH | VIRTIO_BLK_F_CONFIG_WCE, 0, false),
        (0, 0, false),
    ];
    for (feature, writeback, is_flushed) in cases {
        let good = Character::good();
        let features = good.features & !VIRTIO_BLK_F_FLUSH | feature;
        let config = ConfigSpace { writeback, ..good.config };
        let wce = if feature & VIRTIO_BLK_F_CONFIG_WCE != 0 { Choice::On } else { Choice::Auto };
        let options = Options { config_wce: wce, ..options() };
        let (server, session, memory) = Server::good(Character { features, config, ..good }, &options);
        let mut queue = session.start_queue().unwrap();
        let list = [memory.segment(0, 512)];
        assert_eq!(session.limits().volatile_cache, is_flushed);
        assert_eq!(push(&mut queue, 0, &list, Some(Flags::FUA), 0), Ok(()));
        assert_eq!(end(&mut queue), (0, Ok(())));
        let write = Seen::Transfer(VIRTIO_BLK_T_OUT, 0, vec![512]);
        let expected = if is_flushed { vec![write, Seen::Flush] } else { vec![write] };
        assert_eq!(server.take_seen(), expected);
        // A failed write makes nothing durable.
        assert_eq!(push(&mut queue, 0, &list, Some(Flags::FUA), 2 * DISK as u64), Ok(()));
        assert_eq!(end(&mut queue), (0, Err(IoError::Medium)));
        // SAFETY: no memory.
        assert_eq!(unsafe { queue.push(0, &Request::flush(), 0) }, Ok(()));
        assert!(queue.arm() || feature == 0, "a flush that needs no server is ready at once");
        assert_eq!(end(&mut queue), (0, Ok(())));
        assert_eq!(server.take_seen(), if feature == 0 { vec![] } else { vec![Seen::Flush] });
    }
}

#[test]
fn ranges_carry_the_wish_to_unmap_only_where_it_is_allowed() {
    let (server, session, _memory) = Server::good(Character::good(), &options());
    let mut queue = session.start_queue().unwrap();
    let requests = [
        Request::write_zeroes(4096, Flags::NONE),
        Request::write_zeroes(4096, Flags::NO_UNMAP),
        Request::discard(4096),
    ];
    for req in requests {
        // SAFETY: no memory.
        assert_eq!(unsafe { queue.push(3, &req, 512) }, Ok(()));
        assert_eq!(end(&mut queue), (3, Ok(())));
    }
    let range = |flags| Seen::Range(Range { sector: 1, num_sectors: 8, flags });
    assert_eq!(server.take_seen(), [range(RANGE_F_UNMAP), range(0), range(0)]);
}

#[test]
fn segments_longer_than_the_server_takes_are_cut() {
    let good = Character::good();
    let config = ConfigSpace { size_max: 1000, ..good.config };
    let (server, session, memory) = Server::good(
        Character { features: good.features | VIRTIO_BLK_F_SIZE_MAX, config, ..good },
        &options(),
    );
    let mut queue = session.start_queue().unwrap();
    let list = [memory.segment(0, 16384)];
    assert_eq!(push(&mut queue, 0, &list, Some(Flags::FUA), 0), Ok(()));
    assert_eq!(end(&mut queue), (0, Ok(())));
    let seen = server.take_seen();
    assert_eq!(seen.last(), Some(&Seen::Flush));
    let mut next = 0;
    for part in &seen[..seen.len() - 1] {
        let Seen::Transfer(VIRTIO_BLK_T_OUT, sector, lens) = part else { panic!("{part:?}") };
        assert_eq!(*sector, next);
        assert!(lens.len() <= 8 && lens.iter().all(|len| *len <= 1000), "{lens:?}");
        next += lens.iter().sum::<usize>() as u64 / 512;
    }
    assert_eq!(next, 32);
}

#[test]
fn a_new_capacity_reaches_the_device_by_itself() {
    let (server, session, _memory) = Server::good(Character::good(), &options());
    let device = VirtioBlk::over(session);
    assert_eq!(device.limits().capacity, DISK as u64);
    *server.resize.lock().unwrap() = Some(1 << 20);
    let start = Instant::now();
    while device.limits().capacity != 512 << 20 {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", device.limits());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(device.refresh().unwrap().capacity, 512 << 20);
}

#[test]
fn everything_in_flight_ends_when_the_server_vanishes() {
    for options in every_ring() {
        let (mut server, session, memory) =
            Server::good(Character { serves: false, ..Character::good() }, &options);
        let mut queue = session.start_queue().unwrap();
        let list = [memory.segment(0, 512)];
        for slot in 0..queue.depth() {
            assert_eq!(push(&mut queue, slot, &list, None, 0), Ok(()));
        }
        queue.kick();
        assert!(queue.arm());
        server.end();
        let mut entry = libc::pollfd { fd: queue.event_fd().unwrap(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the entry outlives the call.
        assert_eq!(unsafe { libc::poll(&mut entry, 1, 10_000) }, 1, "no event");
        let mut ended = Vec::new();
        assert_eq!(queue.reap(&mut |slot, result| ended.push((slot, result))), queue.depth() as usize);
        ended.sort_by_key(|(slot, _)| *slot);
        let expected: Vec<_> = (0..queue.depth()).map(|slot| (slot, Err(IoError::DeviceGone))).collect();
        assert_eq!(ended, expected);
        assert_eq!(queue.reap(&mut |_, _| panic!("ended twice")), 0);
        assert_eq!(push(&mut queue, 0, &list, None, 0), Err(IoError::DeviceGone));
    }
}

#[test]
fn a_server_that_breaks_a_ring_loses_its_device() {
    let (_server, session, memory) = Server::good(Character { lies: true, ..Character::good() }, &options());
    let mut queue = session.start_queue().unwrap();
    let list = [memory.segment(0, 512)];
    assert_eq!(push(&mut queue, 5, &list, None, 0), Ok(()));
    assert_eq!(end(&mut queue), (5, Err(IoError::DeviceGone)));
    assert_eq!(push(&mut queue, 5, &list, None, 0), Err(IoError::DeviceGone));
    assert!(session.start_queue().is_err(), "the connection is shut down");
}

#[test]
fn a_server_that_cannot_be_used_is_an_error_that_says_why() {
    let good = Character::good();
    let open =
        |character, options: &Options| Server::start(character, options).1.err().map(|e| e.to_string());
    let cases = [
        (Character { features: good.features & !VIRTIO_F_VERSION_1, ..good }, "virtio 1.0"),
        (Character { protocol: Protocol::MQ, ..good }, "no configuration space"),
        (Character { features: good.features & !VIRTIO_F_RING_PACKED, ..good }, "no packed rings"),
    ];
    for (character, why) in cases {
        let error = open(character, &Options { packed: Choice::On, ..options() }).unwrap();
        assert!(error.contains(why), "{error}");
    }
    let error = open(good, &Options { queues: 3, ..options() }).unwrap();
    assert!(error.contains("3 queues: the device has 2"), "{error}");
    let error = open(good, &Options { inflight: Choice::On, ..options() }).unwrap();
    assert!(error.contains("no in-flight memory"), "{error}");
}

#[test]
fn memory_regions_are_told_once_and_never_overlap() {
    let (_server, session, memory) = Server::good(Character::good(), &options());
    let region = memory.region();
    session.add_region(&region).unwrap();
    assert_eq!(session.regions().lock().len(), 2);
    let half = MemoryRegion { len: region.len / 2, ..region };
    assert!(session.add_region(&half).unwrap_err().to_string().contains("overlaps"));
    let private = MemoryRegion { addr: 4096, len: 4096, fd: None, fd_offset: 0 };
    assert!(session.add_region(&private).unwrap_err().to_string().contains("no file"));
    let more: Vec<SharedMemory> = (0..3).map(|_| SharedMemory::new(4096).unwrap()).collect();
    session.add_region(&more[0].region()).unwrap();
    session.add_region(&more[1].region()).unwrap();
    assert!(session.add_region(&more[2].region()).unwrap_err().to_string().contains("allows 4 regions"));
    session.remove_region(&region);
    session.add_region(&more[2].region()).unwrap();
}

#[test]
fn a_channel_serves_requests_and_the_last_virtqueue_cannot_be_had_twice() {
    let (_server, session, memory) = Server::good(Character::good(), &options());
    let device = VirtioBlk::over(session);
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let other = device.open_channel().unwrap();
        assert!(device.open_channel().is_err_and(|e| e.to_string().contains("all 2 virtqueues are in use")));
        memory.write(0, &[7; 4096]);
        let list = [memory.segment(0, 4096)];
        // SAFETY: list and memory outlive the requests, which are awaited.
        let data = unsafe { Data::new(&list) };
        assert_eq!(channel.submit(&Request::write(data, Flags::FUA), 8192).await, Ok(()));
        data.fill(0);
        assert_eq!(other.submit(&Request::read(data), 8192).await, Ok(()));
        let mut got = [0; 4096];
        memory.read(0, &mut got);
        assert_eq!(got, [7; 4096]);
    });
}
