//! The cost of one request through a virtqueue: the export over a null device on one processor, a
//! polling initiator on another.
//!
//! With `alone` both take turns on one thread. This measures the cost of the code without the
//! transfer between processors, in CPU time of that thread, so it works on a busy machine.
//!
//! `cargo run --release -p freestone-exports --example ring_speed -- [seconds] [packed] [alone]
//! [qd=1,32]`

use block::{Data, Queue, Request};
use drivers::null::{NullDevice, Options as NullOptions};
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::{Choice, Options, Session};
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{Core, CoreConfig, Cores, PollWindow};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SERVER_CPU: usize = 0;
const INITIATOR_CPU: usize = 1;
const BLOCK: usize = 4096;
const DEVICE_BYTES: u64 = 1 << 30;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds = arguments.first().and_then(|text| text.parse().ok()).unwrap_or(1);
    let packed = if arguments.iter().any(|text| text == "packed") { Choice::On } else { Choice::Off };
    let depths: Vec<u32> = match arguments.iter().find(|text| text.contains("qd=")) {
        Some(list) => list[3..].split(',').map(|depth| depth.parse().expect("a depth")).collect(),
        None => vec![1, 4, 32, 128],
    };
    let is_alone = arguments.iter().any(|text| text == "alone");
    if is_alone {
        return alone(packed, &depths);
    }
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("blk.sock");
    let server = CoreConfig { cpu: Some(SERVER_CPU), poll: PollWindow::up_to(1_000_000), seed: 1 };
    let cores = Cores::start(&[server]).expect("a core");
    let device = Arc::new(NullDevice::new(&NullOptions::new(DEVICE_BYTES)).expect("a device"));
    let export = VhostUserBlk::start(device, cores.all(), Config::new(&socket)).expect("an export");
    pin(INITIATOR_CPU);
    let session =
        Session::open(&Options { packed, queue_size: 256, ..Options::new(&socket) }).expect("a session");
    let memory = SharedMemory::new(BLOCK * 256).expect("memory");
    session.add_region(&memory.region()).expect("shared memory");
    let mut queue = session.start_queue().expect("a virtqueue");
    println!("{:>6} {:>10} {:>8}", "depth", "k IOPS", "ns each");
    for depth in depths {
        let (requests, time) = run(&mut queue, &memory, depth, Duration::from_secs(seconds));
        let ns = time.as_nanos() as f64 / requests as f64;
        println!("{depth:>6} {:>10.0} {ns:>8.0}", 1e6 / ns);
    }
    drop(queue);
    drop(session);
    drop(export);
}

/// Server and initiator on this thread.
fn alone(packed: Choice, depths: &[u32]) {
    const REQUESTS: u64 = 1_000_000;
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("blk.sock");
    let server = CoreConfig { poll: PollWindow::up_to(u64::MAX), ..CoreConfig::default() };
    let core = Core::start(0, &server).expect("a core");
    let device = Arc::new(NullDevice::new(&NullOptions::new(DEVICE_BYTES)).expect("a device"));
    let _export = VhostUserBlk::start(device, &[core.remote()], Config::new(&socket)).expect("an export");
    let options = Options { packed, queue_size: 256, ..Options::new(&socket) };
    let client = std::thread::spawn(move || {
        let session = Session::open(&options).expect("a session");
        let memory = SharedMemory::new(BLOCK * 256).expect("memory");
        session.add_region(&memory.region()).expect("shared memory");
        let queue = session.start_queue().expect("a virtqueue");
        Moved((memory, queue))
    });
    while !client.is_finished() {
        core.turn();
    }
    let Moved((memory, mut queue)) = client.join().expect("a client");
    println!("{:>6} {:>8}", "depth", "ns each");
    for &depth in depths {
        let segments: Vec<_> =
            (0..depth as usize).map(|slot| [memory.segment(slot * BLOCK, BLOCK)]).collect();
        let start = thread_time();
        for _ in 0..REQUESTS / u64::from(depth) {
            for slot in 0..depth {
                // SAFETY: the memory lives until every request has ended, below.
                let request = Request::read(unsafe { Data::new(&segments[slot as usize]) });
                // SAFETY: as above.
                unsafe { queue.push(slot, &request, u64::from(slot) * BLOCK as u64) }.expect("a free slot");
            }
            queue.kick();
            let mut ended = 0;
            while ended < depth {
                core.turn();
                queue.reap(&mut |_, result| {
                    result.expect("a null device does not fail");
                    ended += 1;
                });
            }
        }
        let ns = (thread_time() - start).as_nanos() as f64 / REQUESTS as f64;
        println!("{depth:>6} {ns:>8.0}");
    }
    std::process::exit(0); // the core does not run any more, so the export cannot be stopped cleanly
}

/// Goes from one thread to another.
struct Moved<T>(T);

// SAFETY: a queue without requests points to nothing that belongs to a thread.
unsafe impl<T> Send for Moved<T> {}

fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a live variable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Keeps `depth` random reads in flight for a while; how many ended.
fn run(queue: &mut impl Queue, memory: &SharedMemory, depth: u32, time: Duration) -> (u64, Duration) {
    let segments: Vec<_> = (0..depth as usize).map(|slot| [memory.segment(slot * BLOCK, BLOCK)]).collect();
    let mut seed = 1u64;
    let mut push = |queue: &mut dyn Queue, slot: u32| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = (seed >> 33) % (DEVICE_BYTES / BLOCK as u64) * BLOCK as u64;
        // SAFETY: the memory lives until every request has ended.
        let request = Request::read(unsafe { Data::new(&segments[slot as usize]) });
        // SAFETY: as above.
        unsafe { queue.push(slot, &request, offset) }.expect("a free slot");
    };
    (0..depth).for_each(|slot| push(queue, slot));
    queue.kick();
    let start = Instant::now();
    let (mut requests, mut ended) = (0, Vec::with_capacity(depth as usize));
    let mut in_flight = depth;
    let mut is_over = false;
    while in_flight > 0 {
        queue.reap(&mut |slot, result| {
            result.expect("a null device does not fail");
            ended.push(slot);
        });
        requests += ended.len() as u64;
        in_flight -= ended.len() as u32;
        if !is_over {
            in_flight += ended.len() as u32;
            ended.iter().for_each(|&slot| push(queue, slot));
            is_over = start.elapsed() > time;
        }
        if !ended.is_empty() {
            queue.kick();
            ended.clear();
        }
    }
    (requests, start.elapsed())
}

fn pin(cpu: usize) {
    // SAFETY: the set is a plain bit array, valid when zeroed.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}
