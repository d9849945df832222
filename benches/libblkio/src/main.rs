//! Random reads in blocking mode (or with the completion descriptor) through Freestone's C
//! functions or the crate `blkio`, with one thread and one queue. Prints thousand I/Os per second
//! of one engine as a number.
//!
//! `benches/run` starts it for each engine in turn, and callgrind counts its instructions
//! (`--requests`).

mod ours_engine;
mod peer_engine;

use clap::{Parser, ValueEnum};
use std::time::{Duration, Instant};

/// Largest number of requests in flight.
const MAX_DEPTH: usize = 1024;

#[derive(Clone, Copy, ValueEnum)]
enum Library {
    Ours,
    Peer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Wait in the library.
    Blocking,
    /// Wait for the completion descriptor with poll(2).
    Event,
    /// Poll continuously.
    Polling,
}

/// Command line.
#[derive(Parser)]
struct Args {
    #[arg(long, value_enum)]
    library: Library,
    #[arg(long, default_value = "io_uring")]
    driver: String,
    #[arg(long)]
    path: String,
    #[arg(long)]
    direct: bool,
    #[arg(long, default_value_t = 4096)]
    block_size: usize,
    #[arg(long, default_value_t = 1)]
    depth: usize,
    #[arg(long, value_enum, default_value_t = Mode::Blocking)]
    mode: Mode,
    /// Seconds, after a ramp of a tenth of that time.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Number of requests, instead of a time.
    #[arg(long)]
    requests: Option<u64>,
}

/// Operations of a library under test.
trait Engine {
    /// Bytes of the device.
    fn capacity(&self) -> u64;
    /// Memory for buffers, mapped if necessary.
    fn memory(&self) -> *mut u8;
    /// Enqueues a read.
    fn read(&mut self, offset: u64, buffer: *mut u8, len: usize, token: usize);
    /// Waits for `min` completions and appends their tokens to `done`.
    fn complete(&mut self, min: usize, done: &mut Vec<usize>);
    /// Enables and returns the completion descriptor.
    fn completion_fd(&mut self) -> i32;
}

fn main() {
    let args = Args::parse();
    let bytes = args.depth * args.block_size;
    assert!((1..=MAX_DEPTH).contains(&args.depth), "depth {}: 1 to {MAX_DEPTH}", args.depth);
    let settings = Settings { driver: &args.driver, path: &args.path, direct: args.direct, bytes };
    let iops = match args.library {
        Library::Ours => run(&mut ours_engine::Ours::open(&settings), &args),
        Library::Peer => run(&mut peer_engine::Peer::open(&settings), &args),
    };
    println!("{iops:.0}");
}

/// Device to open, and number of bytes of buffers to map.
struct Settings<'a> {
    driver: &'a str,
    path: &'a str,
    direct: bool,
    bytes: usize,
}

fn run(engine: &mut impl Engine, args: &Args) -> f64 {
    let blocks = engine.capacity() / args.block_size as u64;
    let memory = engine.memory();
    let fd = if args.mode == Mode::Event { engine.completion_fd() } else { -1 };
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut submit = |engine: &mut dyn FnMut(u64, *mut u8, usize), token: usize| {
        // xorshift: the same offsets for every library.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // The buffers are adjacent.
        engine(random % blocks * args.block_size as u64, memory.wrapping_add(token * args.block_size), token);
    };
    let mut done = Vec::with_capacity(MAX_DEPTH);
    for token in 0..args.depth {
        submit(&mut |offset, buffer, token| engine.read(offset, buffer, args.block_size, token), token);
    }
    let (mut count, mut start) = (0u64, Instant::now());
    let mut is_ramp = args.requests.is_none();
    loop {
        done.clear();
        match args.mode {
            Mode::Blocking => engine.complete(1, &mut done),
            Mode::Polling => engine.complete(0, &mut done),
            Mode::Event => {
                engine.complete(0, &mut done);
                if done.is_empty() {
                    wait_readable(fd);
                    engine.complete(0, &mut done);
                }
            }
        }
        count += done.len() as u64;
        for token in &done {
            submit(&mut |offset, buffer, token| engine.read(offset, buffer, args.block_size, token), *token);
        }
        if let Some(requests) = args.requests {
            if count >= requests {
                break;
            }
        } else if count & 63 < done.len() as u64 || args.depth > 32 {
            let elapsed = start.elapsed();
            if is_ramp && elapsed >= Duration::from_secs_f64(args.seconds / 10.0) {
                (is_ramp, count, start) = (false, 0, Instant::now());
            } else if !is_ramp && elapsed >= Duration::from_secs_f64(args.seconds) {
                break;
            }
        }
    }
    let iops = count as f64 / start.elapsed().as_secs_f64();
    let mut left = args.depth;
    while left > 0 {
        done.clear();
        engine.complete(1, &mut done);
        left -= done.len();
    }
    iops
}

fn wait_readable(fd: i32) {
    let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut event = 0u64;
    // SAFETY: structures of our own.
    unsafe {
        libc::poll(&raw mut wanted, 1, -1);
        libc::read(fd, (&raw mut event).cast(), 8);
    }
}
