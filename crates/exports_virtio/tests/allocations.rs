//! Memory costs of an export: nothing per request once it is warm, and little while it is idle.

mod common;

use block::{Data, Queue, Request};
use common::{Guest, GuestConfig};
use drivers::null::{NullDevice, Options as NullOptions};
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::{Choice, Options, Session, VirtioBlkQueue};
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Counts what this process allocates while a test looks.
struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// The tests of this file look at the whole process: one after the other.
static ALONE: Mutex<()> = Mutex::new(());

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

const DEPTH: u32 = 32;

fn run(queue: &mut VirtioBlkQueue, memory: &SharedMemory, rounds: usize) {
    let segments: [_; DEPTH as usize] = std::array::from_fn(|slot| [memory.segment(slot * 4096, 4096)]);
    for _ in 0..rounds {
        for slot in 0..DEPTH {
            // SAFETY: the memory outlives the requests, which end below.
            let request = Request::read(unsafe { Data::new(&segments[slot as usize]) });
            // SAFETY: as above.
            unsafe { queue.push(slot, &request, 0) }.unwrap();
        }
        queue.kick();
        let (start, mut ended) = (Instant::now(), 0);
        while ended < DEPTH {
            queue.reap(&mut |_, result| {
                result.unwrap();
                ended += 1;
            });
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_warm_queue_allocates_nothing() {
    let _alone = ALONE.lock();
    for (packed, latency_ns) in
        [(Choice::Off, 0), (Choice::On, 0), (Choice::Off, 50_000), (Choice::On, 50_000)]
    {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("blk.sock");
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let device = NullDevice::new(&NullOptions { latency_ns, ..NullOptions::new(1 << 20) }).unwrap();
        let export = VhostUserBlk::start(Arc::new(device), cores.all(), Config::new(&socket)).unwrap();
        let session = Session::open(&Options { packed, ..Options::new(&socket) }).unwrap();
        let memory = SharedMemory::new(DEPTH as usize * 4096).unwrap();
        session.add_region(&memory.region()).unwrap();
        let mut queue = session.start_queue().unwrap();
        run(&mut queue, &memory, 200);
        ALLOCATIONS.store(0, Ordering::Relaxed);
        IS_COUNTING.store(true, Ordering::Relaxed);
        run(&mut queue, &memory, 500);
        IS_COUNTING.store(false, Ordering::Relaxed);
        let count = ALLOCATIONS.load(Ordering::Relaxed);
        assert_eq!(count, 0, "allocations in 16000 requests, packed {packed:?}, latency {latency_ns}");
        drop(queue);
        drop(session);
        drop(export);
    }
}

/// Memory of this process that is neither file nor shared, in KiB.
fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn an_idle_export_with_a_client_is_small() {
    const EXPORTS: u64 = 16;
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
    let before = anonymous_kib();
    let all: Vec<_> = (0..EXPORTS)
        .map(|i| {
            let socket = dir.path().join(i.to_string());
            let device = NullDevice::new(&NullOptions::new(1 << 20)).unwrap();
            let config = Config { num_queues: 4, queue_size: 1024, ..Config::new(&socket) };
            let export = VhostUserBlk::start(Arc::new(device), cores.all(), config).unwrap();
            let guest = Guest::boot(&socket, GuestConfig { queues: 4, size: 1024, ..GuestConfig::default() });
            (guest, export)
        })
        .collect();
    let each = (anonymous_kib() - before) / EXPORTS;
    assert!(each < 512, "{each} KiB for each idle export");
    drop(all);
}
