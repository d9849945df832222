//! Measures the requests a second of one queue of the NBD client whose thread sleeps in between, as
//! in a program of the C API. `nbd_iops URI [read|write] [BYTES] [DEPTH] [SECONDS]`; the
//! export is overwritten by `write`.

use block::{Data, Flags, Queue, Request, Segment};
use drivers::direct::DirectQueue;
use drivers_nbd::{Cancel, Options, Session};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u64| arguments.get(i).map_or(Ok(default), |text| text.parse::<u64>());
    let uri = arguments.first().ok_or("nbd_iops URI [read|write] [BYTES] [DEPTH] [SECONDS]")?;
    let is_write = arguments.get(1).is_some_and(|word| word == "write");
    let (len, depth, seconds) = (number(2, 4096)?, number(3, 1)?, number(4, 3)?);
    let options = Options { queue_depth: u32::try_from(depth)?, ..Options::from_uri(uri)? };
    let session = Session::open(&options, &Cancel::never())?;
    let mut queue = session.start_queue(&Cancel::never())?;
    let blocks = session.limits().capacity / len;
    let mut buffer = vec![0u8; usize::try_from(len * depth)?];
    let segments: Vec<Segment> = buffer
        .chunks_mut(len as usize)
        .map(|part| Segment { base: part.as_mut_ptr(), len: part.len() })
        .collect();

    let mut random = 1u64;
    let mut free: Vec<u32> = (0..depth as u32).collect();
    let mut latencies = Vec::with_capacity(1 << 20);
    let mut started = vec![Instant::now(); depth as usize];
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds) || free.len() < depth as usize {
        while start.elapsed() < Duration::from_secs(seconds)
            && let Some(slot) = free.pop()
        {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // SAFETY: list and memory live until the program ends.
            let data = unsafe { Data::new(&segments[slot as usize..=slot as usize]) };
            let req = if is_write { Request::write(data, Flags::NONE) } else { Request::read(data) };
            started[slot as usize] = Instant::now();
            // SAFETY: as above.
            unsafe { queue.push(slot, &req, (random >> 20) % blocks * len)? };
        }
        queue.wait(1, Some(Duration::from_secs(10)), None)?;
        let mut failure = None;
        queue.reap(&mut |slot, result| {
            failure = failure.or(result.err());
            latencies.push(started[slot as usize].elapsed());
            free.push(slot);
        });
        if let Some(error) = failure {
            return Err(error.into());
        }
    }
    let iops = latencies.len() as f64 / start.elapsed().as_secs_f64();
    latencies.sort_unstable();
    let at = |part: f64| latencies[(latencies.len() as f64 * part) as usize].as_secs_f64() * 1e6;
    println!("{iops:.0} IOPS, µs: p50 {:.1} p90 {:.1} p99 {:.1}", at(0.5), at(0.9), at(0.99));
    Ok(())
}
