//! Random reads of 4 KiB, polled: `bench io_uring:path=disk.img 32 10` keeps 32 in flight for 10
//! seconds.

mod common;

use blkio::{Request, Result};
use std::time::{Duration, Instant};

const LEN: usize = 4096;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers = |depth: &str, seconds: &str| Some((depth.parse().ok()?, seconds.parse().ok()?));
    match &arguments[..] {
        [spec, depth, seconds] if numbers(depth, seconds).is_some() => {
            let (depth, seconds) = numbers(depth, seconds).expect("looked at before");
            common::report(bench(spec, depth, Duration::from_secs(seconds)));
        }
        _ => {
            eprintln!("usage: bench DRIVER:PROPERTY=VALUE,… DEPTH SECONDS");
            std::process::exit(2);
        }
    }
}

fn bench(spec: &str, depth: usize, duration: Duration) -> Result<()> {
    let device = common::device(spec)?.start()?;
    let mut queue = device.queue(0)?;
    let blocks = device.capacity()? / LEN as u64;
    if blocks == 0 {
        return Err(blkio::Error::new(22, format!("{spec} is shorter than {LEN} bytes")));
    }
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut offset = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % blocks * LEN as u64
    };
    for _ in 0..depth {
        queue.submit(Request::read(offset(), device.buffer(LEN)?));
    }
    let start = Instant::now();
    let mut count = 0u64;
    let mut buffers = Vec::with_capacity(depth);
    while start.elapsed() < duration {
        for completion in queue.wait(1)? {
            let blkio::Completion { result, memory, .. } = completion;
            result?;
            if let blkio::Memory::One(buffer) = memory {
                buffers.push(buffer);
            }
        }
        count += buffers.len() as u64;
        for buffer in buffers.drain(..) {
            queue.submit(Request::read(offset(), buffer));
        }
    }
    println!("{:.0} reads/s", count as f64 / start.elapsed().as_secs_f64());
    Ok(())
}
