//! Requests on an array from tasks of one or several cores, and how many of them ended in a second.

use block::{Data, Device, Flags, Op, Request, Segment};
use reactor::{CoreConfig, Cores};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is done.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Read or write.
    pub op: Op,
    /// Bytes of a request.
    pub len: u64,
    /// Whether each request follows the one before; otherwise its place is random.
    pub is_sequential: bool,
    /// Requests in flight on each core.
    pub depth: usize,
    /// Cores.
    pub cores: usize,
}

/// Runs a load for `seconds` after a warm-up; requests a second.
pub fn run(device: &Arc<dyn Device>, load: Load, seconds: f64) -> f64 {
    let configs: Vec<CoreConfig> =
        (0..load.cores).map(|cpu| CoreConfig { cpu: Some(cpu), ..CoreConfig::default() }).collect();
    let cores = Cores::start(&configs).expect("cores start");
    let results: Vec<_> = cores
        .all()
        .iter()
        .enumerate()
        .map(|(i, core)| {
            let (device, core) = (device.clone(), core.clone());
            std::thread::spawn(move || {
                core.block_on(move |_| on_core(device, load, i as u64, seconds)).expect("the core runs")
            })
        })
        .collect();
    results.into_iter().map(|thread| thread.join().expect("no load panics")).sum()
}

async fn on_core(device: Arc<dyn Device>, load: Load, index: u64, seconds: f64) -> f64 {
    let channel = device.open_channel().expect("a channel");
    let capacity = device.limits().capacity / load.len * load.len;
    let next = Rc::new(Cell::new(0u64));
    let done = Rc::new(Cell::new(0u64));
    let running = Rc::new(Cell::new(load.depth));
    let is_over = Rc::new(Cell::new(false));
    let core = reactor::current();
    for slot in 0..load.depth {
        let (channel, core_) = (channel.clone(), core.clone());
        let (next, done, running, is_over) = (next.clone(), done.clone(), running.clone(), is_over.clone());
        core.spawn(async move {
            let buffer = core_.buffers().take(load.len.min(1 << 20) as usize).await;
            let segment = Segment { len: load.len as usize, ..buffer.segment() };
            // SAFETY: the buffer lives as long as this task and nobody else uses it.
            let data = unsafe { Data::one(&segment) };
            let req = Request { op: load.op, flags: Flags::NONE, len: load.len, data };
            let mut random = (index << 32 | slot as u64 | 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            while !is_over.get() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let block = match load.is_sequential {
                    true => next.replace(next.get() + 1),
                    false => random >> 8,
                };
                let offset = block % (capacity / load.len) * load.len;
                channel.submit(&req, offset).await.expect("no request fails");
                done.set(done.get() + 1);
                if done.get().is_multiple_of(64) {
                    reactor::yield_now().await; // members without latency never wait
                }
            }
            running.set(running.get() - 1);
        });
    }
    let warm = Duration::from_secs_f64(seconds / 4.0);
    core.sleep(warm.as_nanos() as u64).await;
    let (before, start) = (done.get(), Instant::now());
    core.sleep((seconds * 1e9) as u64).await;
    let rate = (done.get() - before) as f64 / start.elapsed().as_secs_f64();
    is_over.set(true);
    while running.get() > 0 {
        core.sleep(100_000).await;
    }
    drop(channel);
    rate
}
