//! Time for a chain to pass through a queue, with everything in the cache of one core, and with a
//! driver on another core that has just written the memory.

use super::*;
use crate::ring::{PackedRing, SplitDescriptor, SplitRing};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const BATCH: u64 = 16;
const ROUNDS: usize = 20_000;

fn run(name: &str, is_packed: bool, is_indirect: bool, has_inflight: bool) {
    let guest = Guest::new();
    let region = crate::inflight::InflightRegion::create(1, 128, is_packed).unwrap();
    let inflight = has_inflight.then(|| region.queue(0).unwrap());
    let mut queue =
        VirtQueue::new(QueueConfig { inflight, event_idx: true, ..guest.config(128, is_packed) }).unwrap();
    let mut driver = Driver::new(&guest, 128, is_packed, true);
    let mut chains: Vec<Chain> = (0..BATCH).map(|_| Chain::new()).collect();
    let buffers = [(0x100, 16, false), (0x1000, 4096, true), (0x180, 1, true)]
        .map(|(at, len, is_writable)| Buffer { addr: HEAP + 0x1_0000 + at, len, is_writable });
    let mut spent = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        (0..BATCH).for_each(|i| assert!(driver.add(&buffers, is_indirect, i)));
        let start = Instant::now();
        for chain in &mut chains {
            assert_eq!(queue.pop(chain), Ok(true));
            let request = crate::blk::parse(chain).unwrap();
            std::hint::black_box(&request);
            request.status.set(0);
        }
        chains.iter_mut().for_each(|chain| queue.push_used(chain, 4097));
        std::hint::black_box(queue.publish());
        spent.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        while driver.poll().is_some() {}
    }
    spent.sort_by(f64::total_cmp);
    println!("{name:32} fastest {:5.1} ns, median {:5.1} ns", spent[0], spent[ROUNDS / 2]);
}

#[test]
#[ignore = "prints nanoseconds; for release builds"]
fn speed() {
    for has_inflight in [false, true] {
        let inflight = if has_inflight { ", in-flight" } else { "" };
        for (layout, is_packed) in [("split", false), ("packed", true)] {
            run(&format!("{layout}, indirect{inflight}"), is_packed, true, has_inflight);
            run(&format!("{layout}, 3 descriptors{inflight}"), is_packed, false, has_inflight);
        }
    }
}

const SLOTS: u16 = 32;
const WINDOW: u32 = 256;
const WINDOWS: usize = 20_000;

/// A driver that keeps [`SLOTS`] requests in flight and touches the memory that a real one touches:
/// three descriptors in the ring or in a table, the header, the status.
fn drive(guest: &Guest, is_packed: bool, is_indirect: bool, stop: &AtomicBool) {
    let host = |addr| guest.host(addr, 1);
    let slot_at = |slot: u16| HEAP + 0x1_0000 + 0x400 * u64::from(slot);
    let put = |table: u64, i: u16, addr: u64, len: u32, flags: u16, next: u16| {
        let words = match is_packed {
            false => SplitDescriptor { addr, len, flags, next }.to_words(),
            true => crate::ring::PackedDescriptor { addr, len, id: next, flags }.to_words(),
        };
        // SAFETY: inside guest memory.
        unsafe { host(table + 16 * u64::from(i)).cast::<[u64; 2]>().write_volatile(words) };
    };
    let fill = |table: u64, first: u16, slot: u16| {
        let base = slot_at(slot);
        let more = if is_packed { 0 } else { NEXT };
        put(table, first, base, 16, more, first + 1);
        put(table, first + 1, base + 0x8000, 4096, more | WRITE, first + 2);
        put(table, first + 2, base + 16, 1, WRITE, 0);
        guest.write(base, &[0; 16]);
    };
    // SAFETY: the areas of `Guest::config`.
    let split = unsafe { SplitRing::new(128, host(DESC), host(DRIVER), host(DEVICE)) };
    // SAFETY: as above.
    let packed = unsafe { PackedRing::new(128, host(DESC), host(DRIVER), host(DEVICE)) };
    let mut avail = crate::ring::PackedPosition::START;
    let mut used = crate::ring::PackedPosition::START;
    let mut split_idx = (0u16, 0u16);
    let mut add = |slot: u16, avail: &mut crate::ring::PackedPosition| {
        let table = slot_at(slot) + 0x100;
        if is_indirect {
            fill(table, 0, slot);
        }
        match is_packed {
            false => {
                match is_indirect {
                    true => put(DESC, 4 * slot, table, 48, INDIRECT, 0),
                    false => fill(DESC, 4 * slot, slot),
                }
                split.avail_entry(split_idx.0).store(4 * slot, Ordering::Relaxed);
                split_idx.0 = split_idx.0.wrapping_add(1);
                split.avail_idx().store(split_idx.0, Ordering::Release);
            }
            true => {
                packed.set_desc(avail.slot, table, 48, slot);
                packed.flags(avail.slot).store(INDIRECT | avail.avail_flags(), Ordering::Release);
                *avail = avail.advanced(1, 128);
            }
        }
    };
    (0..SLOTS).for_each(|slot| add(slot, &mut avail));
    while !stop.load(Ordering::Relaxed) {
        let slot = match is_packed {
            false if split.used_idx().load(Ordering::Acquire) == split_idx.1 => continue,
            false => {
                let id = split.used_entry(split_idx.1).0.load(Ordering::Relaxed);
                split_idx.1 = split_idx.1.wrapping_add(1);
                id as u16 / 4
            }
            true => {
                let flags = packed.flags(used.slot).load(Ordering::Acquire);
                if flags & 0x8080 != used.used_flags() {
                    continue;
                }
                let id = packed.desc(used.slot).id;
                used = used.advanced(1, 128);
                id
            }
        };
        assert_eq!(guest.read::<1>(slot_at(slot) + 16), [0]);
        add(slot, &mut avail);
    }
}

fn pin(core: usize) {
    // SAFETY: all-zero is an empty set; the call reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

fn run_between_cores(name: &str, is_packed: bool, is_indirect: bool) {
    let guest = Guest::new();
    let mut queue = guest.queue(128, is_packed);
    queue.disable_notifications();
    Driver::new(&guest, 128, is_packed, false).want_interrupts(false);
    let stop = AtomicBool::new(false);
    let mut windows = Vec::with_capacity(WINDOWS);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            drive(&guest, is_packed, is_indirect, &stop);
        });
        pin(0);
        let mut chains: Vec<Chain> = (0..SLOTS).map(|_| Chain::new()).collect();
        let (mut start, mut done) = (Instant::now(), 0);
        while windows.len() < WINDOWS {
            let mut popped = 0;
            while popped < chains.len() && queue.pop(&mut chains[popped]).unwrap() {
                let request = crate::blk::parse(&chains[popped]).unwrap();
                std::hint::black_box(&request.command);
                request.status.set(0);
                popped += 1;
            }
            chains[..popped].iter_mut().for_each(|chain| queue.push_used(chain, 4097));
            queue.publish();
            done += popped as u32;
            if done >= WINDOW {
                windows.push(start.elapsed().as_nanos() as f64 / f64::from(done));
                (start, done) = (Instant::now(), 0);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    windows.sort_by(f64::total_cmp);
    let at = |percent| windows[WINDOWS * percent / 100];
    println!("{name:32} p1 {:6.1} ns, p10 {:6.1} ns, median {:6.1} ns", at(1), at(10), at(50));
}

#[test]
#[ignore = "prints nanoseconds; for release builds, needs two idle cores"]
fn speed_between_cores() {
    run_between_cores("split, indirect", false, true);
    run_between_cores("split, 3 descriptors", false, false);
    run_between_cores("packed, indirect", true, true);
}
