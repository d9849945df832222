//! Checks of queues and memory as the C API uses them.

use super::driver::{Disk, Driver, Memory, pattern};
use block::{Data, Flags, IoError, Op, Queue, Request, Segment};
use drivers::direct::{DirectQueue, ZoneAction, ZoneRequest};
use std::time::Duration;

const MIB: u64 = 1 << 20;

pub fn run(disk: &impl Disk, is_polled: bool) {
    let mut driver = Driver::new(disk, is_polled);
    long_and_odd_memory(&mut driver, disk);
    tiny_pieces(&mut driver, disk);
    every_operation(&mut driver);
    refused_requests(&mut driver, disk);
    if !disk.shape().has_zones {
        // SAFETY: no memory.
        let refused = unsafe { driver.queue.push_zone(0, ZoneRequest::ManageAll(ZoneAction::Reset)) };
        assert_eq!(refused, Err(IoError::Unsupported), "zones without zones");
    }
    timeouts(&mut driver);
    if !is_polled {
        events(&mut driver);
    }
    more_than_the_device_holds(disk, is_polled);
    other_threads(driver);
    dropped_in_flight(disk, is_polled);
}

/// Requests longer than one command, with unaligned memory.
fn long_and_odd_memory<D: Disk>(driver: &mut Driver<D::Queue>, disk: &D) {
    let len = 3 * disk.shape().max_transfer.clamp(512 << 10, 4 << 20);
    let mut memory = Memory::new(len + 4096);
    let bytes = pattern(0, len, 1);
    for at in [0, 4, 1, 512, 3072, 4095] {
        if at % disk.shape().memory_alignment > 0 {
            continue;
        }
        memory[at..at + len].copy_from_slice(&bytes);
        let list = [Segment { base: memory[at..].as_mut_ptr(), len }];
        // SAFETY: the memory outlives the requests, which are waited for.
        let data = unsafe { Data::new(&list) };
        assert_eq!(driver.run(&Request::write(data, Flags::NONE), MIB), Ok(()), "skip {at}");
        memory.fill(0);
        assert_eq!(driver.run(&Request::read(data), MIB), Ok(()), "skip {at}");
        assert!(memory[at..at + len] == bytes, "skip {at}");
        assert!(memory[..at].iter().chain(&memory[at + len..]).all(|b| *b == 0), "around skip {at}");
    }
}

/// A few blocks in segments of one dword, of odd lengths, and with one in each page.
fn tiny_pieces<D: Disk>(driver: &mut Driver<D::Queue>, disk: &D) {
    let block = disk.shape().block_size;
    let len = 4 * block.max(4096);
    let bytes = pattern(5, len, 2);
    assert_eq!(driver.write(0, &bytes, Flags::NONE), Ok(()));
    for (piece, apart) in
        [(4, 4), (4, 12), (1000, 4096), (4096, 4096), (512, 4608), (block, 2 * block), (2048, 3000)]
    {
        if block / piece.max(1) > 1000 {
            continue; // more segments than the kernel accepts for one block
        }
        if (piece | apart) % disk.shape().memory_alignment > 0 {
            continue;
        }
        let mut memory = Memory::new(len.div_ceil(piece) * apart);
        let base = memory.as_mut_ptr();
        let list: Vec<Segment> = (0..len.div_ceil(piece))
            .map(|i| Segment { base: base.wrapping_add(i * apart), len: piece.min(len - i * piece) })
            .collect();
        // SAFETY: the memory outlives the request, which is waited for.
        let data = unsafe { Data::new(&list) };
        assert_eq!(driver.run(&Request::read(data), 0), Ok(()), "pieces of {piece}");
        let mut got = vec![0; len];
        data.copy_to(&mut got);
        assert!(got == bytes, "pieces of {piece}, {apart} apart");
        assert_eq!(driver.run(&Request::write(data, Flags::FUA), 2 * MIB), Ok(()));
        assert!(*driver.read(2 * MIB, len).expect("read") == *bytes, "written in pieces of {piece}");
    }
}

fn every_operation(driver: &mut Driver<impl DirectQueue>) {
    let bytes = pattern(9, MIB as usize, 3);
    assert_eq!(driver.write(4 * MIB, &bytes, Flags::FUA), Ok(()));
    assert_eq!(driver.run(&Request::flush(), 0), Ok(()));
    for (flags, at) in [(Flags::NONE, 0), (Flags::NO_UNMAP, 1), (Flags::FUA.with(Flags::NO_FALLBACK), 2)] {
        let offset = 4 * MIB + at * 64 * 1024;
        assert_eq!(driver.run(&Request::write_zeroes(64 << 10, flags), offset), Ok(()), "{flags:?}");
    }
    let got = driver.read(4 * MIB, MIB as usize).expect("read");
    assert!(got[..192 << 10].iter().all(|b| *b == 0), "zeroes");
    assert!(got[192 << 10..] == bytes[192 << 10..], "behind the zeroes");
    assert_eq!(driver.run(&Request::discard(MIB), 4 * MIB), Ok(()));
    assert_eq!(driver.run(&Request::write_zeroes(7 * MIB, Flags::NONE), 4 * MIB), Ok(()));
    assert!(driver.read(10 * MIB, MIB as usize).expect("read").iter().all(|b| *b == 0), "long zeroes");
}

fn refused_requests<D: Disk>(driver: &mut Driver<D::Queue>, disk: &D) {
    let (end, block) = (disk.shape().capacity, disk.shape().block_size);
    assert_eq!(driver.read(end, block).err(), Some(IoError::OutOfRange), "read beyond the end");
    let beyond = Request::write_zeroes(2 * block as u64, Flags::NONE);
    assert_eq!(driver.run(&beyond, end - block as u64), Err(IoError::OutOfRange));
    assert_eq!(driver.read(1, block).err(), Some(IoError::Misaligned));
    let list = [Segment { base: std::ptr::without_provenance_mut(4096), len: block }];
    // SAFETY: the memory is not mapped, which the kernel detects.
    let nowhere = unsafe { Data::new(&list) };
    for op in [Op::Read, Op::Write] {
        let req = Request { op, ..Request::read(nowhere) };
        assert!(driver.run(&req, 0).is_err(), "{op:?} with memory that is not there");
    }
    assert!(driver.read(0, block).is_ok(), "after errors");
}

fn timeouts(driver: &mut Driver<impl DirectQueue>) {
    let nothing = driver.queue.wait(1, Some(Duration::ZERO), None);
    assert!(nothing.is_ok(), "there is nothing to wait for");
    let mut late = 0;
    for _ in 0..50 {
        // SAFETY: a flush has no memory.
        unsafe { driver.queue.push(0, &Request::flush(), 0) }.expect("push");
        match driver.queue.wait(1, Some(Duration::ZERO), None) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => late += 1,
            Err(error) => panic!("{error}"),
        }
        assert_eq!(driver.finish(), Ok(()));
    }
    println!("{late} of 50 flushes took more than no time");
}

/// An armed queue raises its event, which is an eventfd that does not block.
fn events(driver: &mut Driver<impl DirectQueue>) {
    let fd = driver.queue.event_fd().expect("an event");
    for round in 0..20u8 {
        // SAFETY: a flush has no memory.
        unsafe { driver.queue.push(3, &Request::flush(), 0) }.expect("push");
        driver.queue.kick();
        let mut ended = Vec::new();
        while ended.is_empty() {
            if driver.queue.arm() {
                let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one entry of our own.
                let count = unsafe { libc::poll(&raw mut wanted, 1, 10_000) };
                assert_eq!(count, 1, "no event in round {round}");
            }
            driver.queue.disarm();
            driver.queue.reap(&mut |slot, result| ended.push((slot, result)));
        }
        assert_eq!(ended, [(3, Ok(()))]);
        let mut counter = [0u8; 8];
        // SAFETY: eight bytes of our own; twice, as the first may find nothing and neither may
        // block.
        let read = || unsafe { libc::read(fd, counter.as_mut_ptr().cast(), 8) };
        let last = [read].map(|mut read| (read(), read()))[0].1;
        assert_eq!(last, -1, "an eventfd is empty once read");
    }
}

/// The kernel has a limited number of entries in each of the device's queues; further requests
/// wait.
fn more_than_the_device_holds(disk: &impl Disk, is_polled: bool) {
    const DEPTH: u32 = 3000;
    let block = disk.shape().block_size;
    let bytes = pattern(0, DEPTH as usize * block, 4);
    let mut driver =
        Driver { queue: disk.open_queue(DEPTH, is_polled).expect("a queue"), results: Vec::new() };
    assert_eq!(driver.write(0, &bytes, Flags::NONE), Ok(()));
    let mut memory = Memory::new(bytes.len());
    let lists: Vec<Segment> =
        memory.chunks_mut(block).map(|c| Segment { base: c.as_mut_ptr(), len: block }).collect();
    for round in 0..10 {
        for (slot, segment) in lists.iter().enumerate() {
            // SAFETY: memory and lists outlive the requests, which are waited for.
            let req = Request::read(unsafe { Data::new(std::slice::from_ref(segment)) });
            // SAFETY: likewise.
            unsafe { driver.queue.push(slot as u32, &req, (slot * block) as u64) }.expect("push");
        }
        driver.wait(DEPTH as usize);
        let failed: Vec<_> = driver.results.drain(..).filter(|(_, result)| result.is_err()).collect();
        assert!(failed.is_empty(), "round {round}: {} failed: {:?} …", failed.len(), failed[0]);
    }
    assert!(*memory == *bytes);
}

/// One thread submits, others reap.
fn other_threads(mut driver: Driver<impl DirectQueue + 'static>) {
    const LEN: usize = 16 << 10;
    let memory: &'static mut Memory = Box::leak(Box::new(Memory::of(&[7; 32 * LEN])));
    let lists: &'static [Segment] =
        Box::leak(memory.chunks_mut(LEN).map(|c| Segment { base: c.as_mut_ptr(), len: LEN }).collect());
    for (slot, segment) in lists.iter().enumerate() {
        // SAFETY: memory and list live forever.
        let data = unsafe { Data::new(std::slice::from_ref(segment)) };
        let req = Request::write(data, Flags::NONE);
        // SAFETY: likewise.
        unsafe { driver.queue.push(slot as u32, &req, 8 * MIB + (slot * LEN) as u64) }.expect("push");
    }
    driver.queue.kick();
    let reaped = std::thread::spawn(move || {
        driver.wait(32);
        let mut slots: Vec<u32> = driver
            .results
            .drain(..)
            .map(|(slot, result)| {
                assert_eq!(result, Ok(()));
                slot
            })
            .collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..32).collect::<Vec<_>>());
        driver
    });
    let mut driver = reaped.join().expect("the other thread");
    assert!(driver.read(8 * MIB, 32 * LEN).expect("read").iter().all(|b| *b == 7));
    // The submitter ends before its requests have been reaped.
    let submitter = std::thread::spawn(move || {
        // SAFETY: a flush has no memory.
        unsafe { driver.queue.push(5, &Request::flush(), 0) }.expect("push");
        driver.queue.kick();
        driver
    });
    let mut driver = submitter.join().expect("the submitter");
    driver.wait(1);
    assert_eq!(driver.results.pop(), Some((5, Ok(()))));
}

/// A queue that is dropped waits for requests in flight.
fn dropped_in_flight(disk: &impl Disk, is_polled: bool) {
    let mut bytes = Memory::of(&pattern(1, MIB as usize, 9));
    let list = [bytes.segment()];
    let mut driver = Driver::new(disk, is_polled);
    // SAFETY: the memory outlives the queue.
    unsafe { driver.queue.push(0, &Request::write(Data::new(&list), Flags::NONE), 12 * MIB) }.expect("push");
    driver.queue.kick();
    drop(driver);
    let mut driver = Driver::new(disk, is_polled);
    assert!(*driver.read(12 * MIB, bytes.len()).expect("read") == *bytes);
}
