//! `core-distance A B`: the median round trip of a cache line from core A to core B, in
//! nanoseconds. It bounds the speed of polled paths between two cores, and changes hourly on
//! virtual machines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const ROUNDS: usize = 21;
const TRIPS: u64 = 20_000;

#[repr(align(128))]
struct Line(AtomicU64);

fn bind(cpu: usize) {
    let config = reactor::CoreConfig { cpu: Some(cpu), ..reactor::CoreConfig::default() };
    if let Err(error) = reactor::bind_thread(&config) {
        eprintln!("core-distance: {error}");
        std::process::exit(1);
    }
}

fn main() {
    let cpus: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let [near, far] = cpus[..] else {
        eprintln!("usage: core-distance CPU CPU");
        std::process::exit(2);
    };
    let line = Arc::new(Line(AtomicU64::new(0)));
    let total = 2 * TRIPS * ROUNDS as u64;
    let theirs = line.clone();
    let echo = std::thread::spawn(move || {
        bind(far);
        let mut expected = 1;
        while expected < total {
            while theirs.0.load(Ordering::Acquire) != expected {}
            theirs.0.store(expected + 1, Ordering::Release);
            expected += 2;
        }
    });
    bind(near);
    let mut value = 0;
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..TRIPS {
                line.0.store(value + 1, Ordering::Release);
                value += 2;
                while line.0.load(Ordering::Acquire) != value {}
            }
            start.elapsed().as_nanos() as f64 / TRIPS as f64
        })
        .collect();
    echo.join().expect("the echo does not panic");
    rounds.sort_by(f64::total_cmp);
    println!("{:.0}", rounds[ROUNDS / 2]);
}
