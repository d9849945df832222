//! Checks of the required operations of a virtio-blk device over any transport.
//!
//! ```text
//! driver_check virtio-blk vhost-user|vhost-vdpa|vfio-pci PATH [check|gone]
//!     [queue-size=N] [packed=on] [timeout-ms=N]
//! ```
//!
//! `check` (the default) overwrites the device. `gone` reads until the device is lost, and fails
//! unless every request then ends.

#[path = "../../../drivers_virtio_blk/tests/virtio_blk/buffers.rs"]
mod buffers;

use block::{Data, Flags, IoError, IoResult, Queue, Request, Segment};
use buffers::SharedBuffers;
use conformance::Suite;
use drivers::direct::DirectQueue;
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::{Choice, Options, Session, TransportKind, VirtioBlk, VirtioBlkQueue};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Longer than any emulated machine needs for a request.
const LONG: Duration = Duration::from_secs(60);

pub fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    let [transport, path, arguments @ ..] = words else {
        return Err(
            "usage: driver_check virtio-blk vhost-user|vhost-vdpa|vfio-pci PATH [check|gone] …".into()
        );
    };
    let transport = match *transport {
        "vhost-user" => TransportKind::VhostUser,
        "vhost-vdpa" => TransportKind::VhostVdpa,
        "vfio-pci" => TransportKind::VfioPci,
        other => return Err(format!("no transport {other}: want vhost-user, vhost-vdpa or vfio-pci").into()),
    };
    let mut options = Options::with(transport, path);
    let mut until_gone = false;
    for argument in arguments {
        match argument.split_once('=') {
            Some(("queue-size", value)) => options.queue_size = value.parse()?,
            Some(("timeout-ms", value)) => options.timeout_ms = value.parse()?,
            Some(("packed", "on")) => options.packed = Choice::On,
            None if *argument == "check" => {}
            None if *argument == "gone" => until_gone = true,
            _ => return Err(format!("unknown word {argument}").into()),
        }
    }
    if until_gone { read_until_gone(&options) } else { check(&options) }
}

fn check(options: &Options) -> Result<(), Box<dyn Error>> {
    let session = Session::connect(options)?;
    println!("{}: features {:#x}, {:?}", session.name(), session.features(), session.facts());
    println!("limits: {:?}", session.limits());
    assert!(session.start_queue().is_err(), "a queue before the start");
    session.start(options.queues, options.queue_size)?;
    let memory = SharedMemory::new(2 * MIB)?;
    session.add_region(&memory.region())?;
    for is_polled in [false, true] {
        every_operation(&session, &memory, is_polled);
        println!("ok: every operation, polled: {is_polled}");
    }
    queues_side_by_side(&session, &memory);
    unknown_memory_is_refused(&session, &memory);
    waits_end_in_time(&session);
    queues_come_back(&session, &memory);
    println!("ok: {} queues, unknown memory, waits, queues given back", session.num_queues());
    drop((session, memory));
    let device = VirtioBlk::open(options)?;
    let buffers = SharedBuffers::new(&device)?;
    Suite::new(Arc::new(device)).buffers(Arc::new(buffers)).run();
    println!("ok: conformance");
    Ok(())
}

/// Pushes a request; its memory outlives the queue.
fn push(queue: &mut VirtioBlkQueue, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
    // SAFETY: every check keeps list and memory until its requests have ended.
    unsafe { queue.push(slot, req, offset) }
}

fn data(list: &[Segment]) -> Data<'_> {
    // SAFETY: every check keeps list and memory until its requests have ended.
    unsafe { Data::new(list) }
}

/// Runs one request.
fn complete(queue: &mut VirtioBlkQueue, req: &Request<'_>, offset: u64) -> IoResult {
    push(queue, 0, req, offset)?;
    let mut ended = None;
    while ended.is_none() {
        queue.wait(1, Some(LONG), None).expect("an end in time");
        queue.reap(&mut |slot, result| assert!(slot == 0 && ended.replace(result).is_none()));
    }
    ended.expect("set by the loop")
}

fn every_operation(session: &Arc<Session>, memory: &SharedMemory, is_polled: bool) {
    let start = if is_polled { Session::start_poll_queue } else { Session::start_queue };
    let mut queue = start(session).expect("a queue");
    assert_eq!(queue.event_fd().is_none(), is_polled);
    let list: Vec<Segment> = (0..16).map(|i| memory.segment(i * 8192, 4096)).collect();
    let expected: Vec<u8> = (0..65536usize).map(|i| (i * 7 + i / 256) as u8 | 1).collect();
    data(&list).copy_from(&expected);
    assert_eq!(complete(&mut queue, &Request::write(data(&list), Flags::FUA), MIB as u64), Ok(()));
    assert_eq!(complete(&mut queue, &Request::flush(), 0), Ok(()));
    let limits = session.limits();
    assert!(limits.max_write_zeroes >= 8192 && limits.max_discard >= 4096, "{limits:?}");
    assert_eq!(complete(&mut queue, &Request::write_zeroes(4096, Flags::NO_UNMAP), MIB as u64), Ok(()));
    assert_eq!(complete(&mut queue, &Request::write_zeroes(4096, Flags::FUA), MIB as u64 + 8192), Ok(()));
    assert_eq!(complete(&mut queue, &Request::discard(4096), MIB as u64 + 16384), Ok(()));
    data(&list).fill(0xee);
    assert_eq!(complete(&mut queue, &Request::read(data(&list)), MIB as u64), Ok(()));
    let mut got = vec![0; expected.len()];
    data(&list).copy_to(&mut got);
    for (i, (got, expected)) in got.chunks(4096).zip(expected.chunks(4096)).enumerate() {
        match i {
            0 | 2 => assert!(got.iter().all(|byte| *byte == 0), "block {i} was zeroed"),
            4 => {}
            _ => assert!(got == expected, "block {i}"),
        }
    }
    let beyond = complete(&mut queue, &Request::read(data(&list)), limits.capacity);
    assert_eq!(beyond, Err(IoError::Medium), "a read behind the end");
    println!("serial: {:?}", queue.read_id(LONG));
}

/// Runs all queues concurrently, with full depth.
fn queues_side_by_side(session: &Arc<Session>, memory: &SharedMemory) {
    let mut queues: Vec<VirtioBlkQueue> =
        (0..session.num_queues()).map(|_| session.start_queue().expect("a queue")).collect();
    assert!(session.start_queue().is_err(), "one queue too many");
    let lists: Vec<[Segment; 1]> = (0..64).map(|i| [memory.segment(i * 4096, 4096)]).collect();
    for queue in &mut queues {
        let depth = queue.depth().min(lists.len() as u32);
        for slot in 0..depth {
            let req = Request::read(data(&lists[slot as usize]));
            assert_eq!(push(queue, slot, &req, u64::from(slot) * 4096), Ok(()));
        }
        queue.kick();
    }
    for queue in &mut queues {
        let mut left = queue.depth().min(lists.len() as u32);
        while left > 0 {
            queue.wait(left, Some(LONG), None).expect("an end in time");
            queue.reap(&mut |_, result| {
                assert_eq!(result, Ok(()));
                left -= 1;
            });
        }
    }
}

fn unknown_memory_is_refused(session: &Arc<Session>, memory: &SharedMemory) {
    let mut queue = session.start_queue().expect("a queue");
    let mut private = vec![0u8; 4096];
    let lists = [[Segment { base: private.as_mut_ptr(), len: 4096 }], [memory.segment(0, 4096)]];
    assert_eq!(complete(&mut queue, &Request::read(data(&lists[0])), 0), Err(IoError::Invalid));
    session.remove_region(&memory.region());
    assert_eq!(complete(&mut queue, &Request::read(data(&lists[1])), 0), Err(IoError::Invalid));
    session.add_region(&memory.region()).expect("the region again");
    assert_eq!(complete(&mut queue, &Request::read(data(&lists[1])), 0), Ok(()));
    let facts = session.facts();
    let mut crooked = memory.region();
    crooked.addr += 2 * MIB + 512;
    crooked.len = 512;
    assert!(facts.region_alignment == 1 || session.add_region(&crooked).is_err(), "{facts:?}");
}

fn waits_end_in_time(session: &Arc<Session>) {
    for start in [Session::start_queue, Session::start_poll_queue] {
        let mut queue = start(session).expect("a queue");
        let begin = Instant::now();
        let error = loop {
            // A late event is not an error.
            if let Err(error) = queue.wait(1, Some(Duration::from_millis(50)), None) {
                break error;
            }
            assert!(begin.elapsed() < LONG);
        };
        assert_eq!(error.raw_os_error(), Some(libc::ETIME));
    }
}

/// Returns queues with requests in flight, which must not touch memory afterwards. The queues work
/// when they are started again.
fn queues_come_back(session: &Arc<Session>, memory: &SharedMemory) {
    let lists: Vec<[Segment; 1]> = (0..16).map(|i| [memory.segment(i * 65536, 65536)]).collect();
    for _ in 0..20 {
        let mut queue = session.start_queue().expect("a queue");
        for slot in 0..queue.depth().min(lists.len() as u32) {
            let req = Request::read(data(&lists[slot as usize]));
            assert_eq!(push(&mut queue, slot, &req, 2 * MIB as u64), Ok(()));
        }
        queue.kick();
        drop(queue);
        memory.write(0, &[0x5a; MIB]);
        let mut queue = session.start_queue().expect("a queue");
        let small = [memory.segment(MIB, 512)];
        assert_eq!(complete(&mut queue, &Request::read(data(&small)), 0), Ok(()));
        let mut got = vec![0; MIB];
        memory.read(0, &mut got);
        assert!(got.iter().all(|byte| *byte == 0x5a), "a request came after its queue was given back");
    }
}

fn read_until_gone(options: &Options) -> Result<(), Box<dyn Error>> {
    let session = Session::open(options)?;
    let memory = SharedMemory::new(MIB)?;
    session.add_region(&memory.region())?;
    let mut queue = session.start_queue()?;
    let lists: Vec<[Segment; 1]> = (0..8).map(|i| [memory.segment(i * 4096, 4096)]).collect();
    let mut free: Vec<u32> = (0..8).collect();
    println!("reading");
    let mut results: Vec<IoResult> = Vec::new();
    while results.iter().all(|result| result.is_ok()) {
        results.clear();
        while let Some(slot) = free.pop() {
            if let Err(error) = push(&mut queue, slot, &Request::read(data(&lists[slot as usize])), 0) {
                results.push(Err(error));
                break;
            }
        }
        queue.wait(1, None, None)?;
        queue.reap(&mut |slot, result| {
            free.push(slot);
            results.push(result);
        });
    }
    println!("ended: {results:?}");
    assert!(results.contains(&Err(IoError::DeviceGone)) && session.is_gone());
    assert!(session.start_queue().is_err());
    drop((queue, session));
    println!("gone");
    Ok(())
}
