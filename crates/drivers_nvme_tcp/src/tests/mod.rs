//! The host against a handwritten target.

mod authentication;
mod discovery;
mod hostile;
mod reconnect;
mod target;

use super::*;
use block::{Flags, IoError, IoResult, Queue, Request};
use drivers::test_queue::{data, ends, push, segment};
use nvme::command::opcode;
use nvme::identify::controller_data::oncs;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use target::{NQN, SIZE, Target, Traits};

const LONG: Duration = Duration::from_secs(60);

fn options(target: &Target) -> Options {
    let nqn = Nqn::new(NQN).unwrap();
    let options = Options::new(parse_address(&target.address).unwrap(), nqn);
    Options { host_id: Some([3; 16]), timeout_ms: 10_000, ..options }
}

fn open(options: &Options) -> (Arc<Session>, NvmeTcpQueue) {
    let session = Session::open(options, &Cancel::never()).unwrap();
    let queue = session.start_queue(&Cancel::never()).unwrap();
    (session, queue)
}

/// Runs one request to its completion.
fn run(queue: &mut NvmeTcpQueue, req: &Request<'_>, offset: u64) -> IoResult {
    push(queue, 0, req, offset)?;
    ends(queue, 1)[0].1
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 5 + i) as u8).collect()
}

fn every_kind() -> Vec<(&'static str, Traits, bool, bool)> {
    let good = Traits::default;
    vec![
        ("plain", good(), false, false),
        ("header digests", good(), true, false),
        ("data digests", good(), false, true),
        (
            "both, aligned, with responses",
            Traits { align_bytes: 64, uses_success: false, ..good() },
            true,
            true,
        ),
        ("no data in capsules", Traits { capsule_units: 4, ..good() }, false, true),
        ("small data PDUs", Traits { max_h2c_data: 4096, capsule_units: 4, ..good() }, true, false),
        ("large blocks", Traits { block_shift: 12, max_transfer_exponent: 1, ..good() }, false, false),
        ("no optional commands", Traits { commands: 0, has_cache: false, ..good() }, false, false),
    ]
}

#[test]
fn every_kind_of_target_keeps_what_it_is_given() {
    for (name, traits, header_digest, data_digest) in every_kind() {
        let (target, block) = (Target::start(traits.clone()), 1usize << traits.block_shift);
        let (_session, mut queue) = open(&Options { header_digest, data_digest, ..options(&target) });
        for len in [block, 8 * block, 200 << 10, 1 << 20] {
            let offset = (3 * block) as u64;
            let (mut source, mut copy) = (bytes(len), vec![0; len]);
            // Memory segments with other boundaries than the blocks.
            let (front, back) = source.split_at_mut(len / 3);
            let list = [segment(front)[0], segment(back)[0]];
            let (front, back) = copy.split_at_mut(len / 2 + 1);
            let other = [segment(front)[0], segment(back)[0]];
            assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::FUA), offset), Ok(()), "{name}");
            assert_eq!(run(&mut queue, &Request::read(data(&other)), offset), Ok(()), "{name}");
            assert!(source == copy, "{name}: {len} bytes came back wrong");
        }
        let whole = 1 << 20;
        let zeroes = Request::write_zeroes(whole, Flags::NONE);
        assert_eq!(run(&mut queue, &zeroes, (3 * block) as u64), Ok(()), "{name}");
        assert!(target.state.disk.lock().unwrap().iter().all(|byte| *byte == 0), "{name}");
        assert_eq!(run(&mut queue, &Request::flush(), 0), Ok(()), "{name}");
        let has_discard = traits.commands != 0;
        let discarded = if has_discard { Ok(()) } else { Err(IoError::Unsupported) };
        assert_eq!(run(&mut queue, &Request::discard(whole), 0), discarded, "{name}");
        let fast = Request::write_zeroes(whole, Flags::NO_FALLBACK);
        assert_eq!(run(&mut queue, &fast, 0), discarded, "{name}");
    }
}

#[test]
fn commands_say_what_requests_ask_for() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    let mut memory = vec![1; 4096];
    let list = segment(&mut memory);
    let requests = [
        Request::read(data(&list)),
        Request::write(data(&list), Flags::NONE),
        Request::write(data(&list), Flags::FUA),
        Request::flush(),
        Request::discard(8192),
        Request::write_zeroes(8192, Flags::NONE),
        Request::write_zeroes(8192, Flags::FUA.with(Flags::NO_UNMAP)),
    ];
    for req in &requests {
        assert_eq!(run(&mut queue, req, 4096), Ok(()), "{req:?}");
    }
    let seen = target.state.seen.lock().unwrap().clone();
    let asked: Vec<_> = seen.iter().map(|e| (e.opcode, e.nsid, e.cdw[0], e.cdw[2])).collect();
    let (fua, deallocate) = (1 << 30, 1 << 25);
    assert_eq!(
        asked,
        [
            (opcode::READ, 1, 8, 7),
            (opcode::WRITE, 1, 8, 7),
            (opcode::WRITE, 1, 8, 7 | fua),
            (opcode::FLUSH, 1, 0, 0),
            (opcode::DATASET_MANAGEMENT, 1, 0, 0),
            (opcode::WRITE_ZEROES, 1, 8, 15 | deallocate),
            (opcode::WRITE_ZEROES, 1, 8, 15 | fua),
        ]
    );
}

#[test]
fn many_requests_in_flight_end_each_once() {
    let target = Target::start(Traits { capsule_units: 4 + 64, ..Traits::default() });
    let (session, mut queue) = open(&Options { queue_depth: 200, ..options(&target) });
    assert_eq!(queue.depth(), 64, "what the controller takes");
    assert_eq!(session.max_queues(), 4);
    let mut memory = bytes(64 * 8192);
    let lists: Vec<_> = memory.chunks_mut(8192).map(segment).collect();
    for round in 0..6 {
        for slot in 0..64 {
            let window = data(&lists[slot as usize]);
            let req =
                if round % 2 == 0 { Request::write(window, Flags::NONE) } else { Request::read(window) };
            assert_eq!(push(&mut queue, slot, &req, u64::from(slot) * 8192), Ok(()));
        }
        let ended = ends(&mut queue, 64);
        assert!(ended.iter().enumerate().all(|(i, end)| *end == (i as u32, Ok(()))), "{ended:?}");
    }
    assert!(memory == bytes(64 * 8192));
}

#[test]
fn a_device_passes_the_suite() {
    for (_, traits, header_digest, data_digest) in every_kind() {
        let target = Target::start(traits);
        let device =
            NvmeTcpDevice::open(&Options { header_digest, data_digest, ..options(&target) }).unwrap();
        let blocks = target.state.clone();
        let grow = move || {
            blocks.blocks.fetch_add(8, Ordering::SeqCst);
        };
        conformance::Suite::new(Arc::new(device)).on_grow(grow).run();
    }
}

#[test]
fn limits_are_those_of_the_namespace() {
    let traits =
        Traits { commands: oncs::WRITE_ZEROES, has_cache: false, block_shift: 12, ..Traits::default() };
    let target = Target::start(traits);
    let session = Session::open(&options(&target), &Cancel::never()).unwrap();
    let limits = session.limits();
    assert_eq!((limits.capacity, limits.block_size, limits.max_discard), (SIZE as u64, 4096, 0));
    assert!(!limits.volatile_cache && limits.native_fua && !limits.read_only);
    assert_eq!((session.facts().max_transfer, session.facts().in_capsule), (128 << 10, 8192));
    assert!(session.name().ends_with("nqn.2014-08.org.example:disk/1"), "{}", session.name());
    let read_only = Options { read_only: true, ..options(&target) };
    assert!(Session::open(&read_only, &Cancel::never()).unwrap().limits().read_only);
}

#[test]
fn a_namespace_that_grows_is_noticed() {
    let target = Target::start(Traits::default());
    let (session, mut queue) = open(&options(&target));
    let start = Instant::now();
    target.resize(SIZE * 2);
    while session.limits().capacity == SIZE as u64 {
        assert!(start.elapsed() < LONG, "the session did not notice");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(session.limits().capacity, 2 * SIZE as u64);
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), SIZE as u64), Ok(()));
    target.state.blocks.store((SIZE >> 9) as u64, Ordering::SeqCst);
    let device = NvmeTcpDevice::over(session);
    assert_eq!(device.refresh().unwrap().capacity, SIZE as u64);
    assert_eq!(run(&mut queue, &Request::read(data(&list)), SIZE as u64), Err(IoError::OutOfRange));
}

#[test]
fn an_error_of_opening_has_a_clear_text() {
    let target = Target::start(Traits::default());
    let good = options(&target);
    let refused = |options: &Options| match Session::open(options, &Cancel::never()) {
        Err(error) => (error.errno(), error.to_string()),
        Ok(_) => panic!("opened"),
    };
    let other = Options { nqn: Nqn::new("nqn.other").unwrap(), ..good.clone() };
    let (errno, text) = refused(&other);
    assert!(errno == libc::ENOENT && text.contains("the subsystem's name"), "{text}");
    let (errno, text) = refused(&Options { nsid: Some(7), ..good.clone() });
    assert!(errno == libc::ENOENT && text.contains("no namespace 7"), "{text}");
    target.state.traits.lock().unwrap().refuses_digests = true;
    let (_, text) = refused(&Options { data_digest: true, ..good.clone() });
    assert!(text.contains("does not grant data digests"), "{text}");
    target.state.is_silent.store(true, Ordering::SeqCst);
    let (errno, text) = refused(&Options { timeout_ms: 100, ..good.clone() });
    assert!(errno == libc::ETIMEDOUT && text.contains("100 ms"), "{text}");
    target.close();
    let (errno, text) = refused(&good);
    assert!(errno == libc::ECONNREFUSED && text.contains(&target.address), "{text}");
}

#[test]
fn queues_come_and_go_and_there_are_no_more_than_the_controller_grants() {
    let target = Target::start(Traits::default());
    let session = Session::open(&options(&target), &Cancel::never()).unwrap();
    let start = || session.start_queue(&Cancel::never());
    for _ in 0..3 {
        let mut queues: Vec<_> = (0..4).map(|_| start().unwrap()).collect();
        assert!(matches!(start(), Err(OpenError::AllInUse(4))));
        let mut memory = bytes(4096);
        let list = segment(&mut memory);
        for queue in &mut queues {
            assert_eq!(run(queue, &Request::read(data(&list)), 0), Ok(()));
        }
    }
    assert_eq!(target.opcodes().len(), 12);
}
