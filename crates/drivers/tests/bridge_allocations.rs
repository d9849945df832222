//! A warm bridge allocates nothing for a request, on either side.

use block::{Data, Queue, Request};
use drivers::direct::DirectQueue;
use drivers::null::{NullDevice, Options};
use drivers::shared_memory::SharedMemory;
use reactor::bridge::{BridgeOptions, BridgeQueue};
use reactor::{CoreConfig, Cores};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts what this process allocates while the test looks.
struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_COUNTING.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn run(queue: &mut BridgeQueue, memory: &SharedMemory, rounds: usize) {
    let segments = [memory.segment(0, 4096)];
    for _ in 0..rounds {
        for slot in 0..queue.depth() {
            // SAFETY: the memory outlives the requests, which end below.
            let request = Request::read(unsafe { Data::new(&segments) });
            // SAFETY: as above.
            unsafe { queue.push(slot, &request, 0) }.unwrap();
        }
        while queue.in_flight() > 0 {
            queue.wait(queue.in_flight(), None, None).unwrap();
            queue.reap(&mut |_, result| result.unwrap());
        }
    }
}

#[test]
fn a_warm_queue_allocates_nothing() {
    let cores = Arc::new(Cores::start(&[CoreConfig::default()]).unwrap());
    let memory = SharedMemory::new(4096).unwrap();
    for latency_ns in [0, 50_000] {
        let device = NullDevice::new(&Options { latency_ns, ..Options::new(1 << 20) }).unwrap();
        let options = BridgeOptions { depth: 32, ..BridgeOptions::default() };
        let mut queue = BridgeQueue::open(&cores, 0, Arc::new(device), &options).unwrap();
        run(&mut queue, &memory, 100);
        ALLOCATIONS.store(0, Ordering::Relaxed);
        IS_COUNTING.store(true, Ordering::Relaxed);
        run(&mut queue, &memory, 500);
        IS_COUNTING.store(false, Ordering::Relaxed);
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0, "in 16000 requests of {latency_ns} ns");
    }
}
