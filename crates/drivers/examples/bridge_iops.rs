//! Measures the requests a second of one thread through a bridge to a null device on one core.
//!
//! ```text
//! cargo run --release -p freestone-drivers --example bridge_iops -- [seconds for each depth]
//! ```
//!
//! `freestone bench --device null` measures the same device on the core itself: the difference is
//! the cost of the bridge.

use block::Device;
use block::{Flags, Op};
use drivers::bare_queue::BareQueue;
use drivers::null::{NullDevice, Options};
use drivers::shared_buffer::SharedBuffer;
use reactor::bridge::{BridgeOptions, BridgeQueue};
use reactor::{CoreConfig, Cores, bind_thread};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).map_or(Ok(1.0), |text| text.parse())?;
    let on = |cpu| CoreConfig { cpu: Some(cpu), ..CoreConfig::default() };
    let cores = Arc::new(Cores::start(&[on(0)])?);
    bind_thread(&on(1))?;
    let device: Arc<dyn Device> = Arc::new(NullDevice::new(&Options::new(1 << 30))?);
    for depth in [1, 32, 128] {
        let options = BridgeOptions { depth, ..BridgeOptions::default() };
        let queue = BridgeQueue::open(&cores, 0, device.clone(), &options)?;
        let (_, buffers) = SharedBuffer::allocate(depth as usize, 4096)?;
        let mut queue = BareQueue::new(queue, device.limits(), buffers);
        let (count, elapsed) = run(&mut queue, depth, Duration::from_secs_f64(seconds));
        let ns = elapsed.as_nanos() as f64;
        let kiops = count as f64 / ns * 1e6;
        println!(
            "qd {depth:4}: {kiops:8.0} kIOPS, {:6.0} ns a request",
            ns * f64::from(depth) / count as f64
        );
    }
    Ok(())
}

fn run(queue: &mut BareQueue<BridgeQueue>, depth: u32, time: Duration) -> (u64, Duration) {
    let mut done: Vec<_> = (0..depth).map(|slot| (slot, Ok(()))).collect();
    let (mut count, mut turns) = (0, 0u32);
    let start = Instant::now();
    while !turns.is_multiple_of(1024) || start.elapsed() < time {
        turns = turns.wrapping_add(1);
        for (slot, result) in done.drain(..) {
            result.expect("a null device does not fail");
            queue.submit(slot, Op::Read, Flags::NONE, 0).expect("a request that is in order");
        }
        queue.kick();
        count += queue.reap(&mut done) as u64;
    }
    (count, start.elapsed())
}
