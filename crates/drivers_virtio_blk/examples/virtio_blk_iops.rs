//! Measures the requests a second of one thread over a vhost-user-blk socket, polling, without
//! futures.
//!
//! ```text
//! cargo run --release -p freestone-drivers-virtio-blk --example virtio_blk_iops -- \
//!     SOCKET [key=value …]
//!     qd=1,32,128  bs=4096  op=read|write  seconds=2  cpu=1
//!     packed=auto|on|off  event_idx=…  indirect=…
//! ```
//!
//! It also prints the cost of a request for this thread: the time from finding completions to
//! having pushed as many new requests. Polls without a completion do not count.

use block::{Data, Flags, Queue, Request, Segment};
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::{Choice, Options, Session, VirtioBlkQueue};
use std::error::Error;
use std::time::{Duration, Instant};

struct Settings {
    options: Options,
    depths: Vec<usize>,
    block_len: usize,
    is_write: bool,
    time: Duration,
    cpu: Option<usize>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let settings = settings()?;
    if let Some(cpu) = settings.cpu {
        pin(cpu);
    }
    let deepest = settings.depths.iter().copied().max().unwrap_or(1);
    let session = Session::open(&settings.options)?;
    let memory = SharedMemory::new(deepest * settings.block_len)?;
    memory.write(0, &vec![1; memory.len()]);
    session.add_region(&memory.region())?;
    println!("{}: features {:#x}, {:?}", session.name(), session.features(), session.facts());
    for &depth in &settings.depths {
        let mut queue = session.start_queue()?;
        let result = measure(&mut queue, &memory, &settings, depth);
        println!(
            "qd {depth:4}: {:8.1} kIOPS, {:8.0} ns a request, {:4.0} ns of this thread, {:5.1} requests a batch",
            result.count as f64 / result.elapsed.as_secs_f64() / 1e3,
            result.elapsed.as_nanos() as f64 * depth as f64 / result.count as f64,
            result.busy_ns / result.count as f64,
            result.count as f64 / result.batches as f64,
        );
    }
    Ok(())
}

struct Measured {
    count: u64,
    batches: u64,
    elapsed: Duration,
    busy_ns: f64,
}

fn measure(queue: &mut VirtioBlkQueue, memory: &SharedMemory, settings: &Settings, depth: usize) -> Measured {
    let depth = depth.min(queue.depth() as usize);
    let len = settings.block_len;
    let segments: Vec<Segment> = (0..depth).map(|i| memory.segment(i * len, len)).collect();
    let blocks = queue.session().limits().capacity / len as u64;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut push = |queue: &mut VirtioBlkQueue, slot: u32| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let offset = ((u128::from(random) * u128::from(blocks)) >> 64) as u64 * len as u64;
        // SAFETY: the memory and the list outlive the queue, and the bytes are never read.
        let data = unsafe { Data::new(std::slice::from_ref(&segments[slot as usize])) };
        let req = if settings.is_write { Request::write(data, Flags::NONE) } else { Request::read(data) };
        // SAFETY: as above.
        unsafe { queue.push(slot, &req, offset) }.expect("a request that is in order");
    };
    for slot in 0..depth as u32 {
        push(queue, slot);
    }
    queue.kick();
    let mut done = Vec::with_capacity(depth);
    let (mut count, mut batches, mut busy) = (0u64, 0u64, 0u64);
    let (start, start_ticks) = (Instant::now(), ticks());
    let elapsed = loop {
        let before = ticks();
        queue.reap(&mut |slot, result| {
            result.expect("the server failed a request");
            done.push(slot);
        });
        if done.is_empty() {
            std::hint::spin_loop();
            continue;
        }
        count += done.len() as u64;
        batches += 1;
        for slot in done.drain(..) {
            push(queue, slot);
        }
        queue.kick();
        busy += ticks() - before;
        if batches & 255 == 0 && start.elapsed() > settings.time {
            break start.elapsed();
        }
    };
    let ns_per_tick = elapsed.as_nanos() as f64 / (ticks() - start_ticks) as f64;
    let mut left = depth;
    while left > 0 {
        left -= queue.reap(&mut |_, _| ());
    }
    Measured { count, batches, elapsed, busy_ns: busy as f64 * ns_per_tick }
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 has a time-stamp counter.
    #[cfg(target_arch = "x86_64")]
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

fn pin(cpu: usize) {
    // SAFETY: all-zero is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours; the macro checks the number.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set outlives the call.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    assert_eq!(result, 0, "cpu {cpu}: {}", std::io::Error::last_os_error());
}

fn settings() -> Result<Settings, Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: virtio_blk_iops SOCKET [key=value …]")?;
    let mut settings = Settings {
        options: Options::new(path),
        depths: vec![1, 32, 128],
        block_len: 4096,
        is_write: false,
        time: Duration::from_secs(2),
        cpu: None,
    };
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("{arg}: not key=value"))?;
        match key {
            "qd" => settings.depths = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "bs" => settings.block_len = value.parse()?,
            "op" => settings.is_write = value == "write",
            "seconds" => settings.time = Duration::from_secs_f64(value.parse()?),
            "cpu" => settings.cpu = Some(value.parse()?),
            "size" => settings.options.queue_size = value.parse()?,
            "packed" => settings.options.packed = choice(value)?,
            "event_idx" => settings.options.event_idx = choice(value)?,
            "indirect" => settings.options.indirect = choice(value)?,
            "inflight" => settings.options.inflight = choice(value)?,
            _ => return Err(format!("{key}: unknown").into()),
        }
    }
    Ok(settings)
}

fn choice(value: &str) -> Result<Choice, String> {
    match value {
        "auto" => Ok(Choice::Auto),
        "on" => Ok(Choice::On),
        "off" => Ok(Choice::Off),
        _ => Err(format!("{value}: not auto, on or off")),
    }
}
