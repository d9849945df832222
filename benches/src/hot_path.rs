//! Measures the cost of one request in the executor, the layers and a driver's slots: nanoseconds
//! and allocations, at queue depth 32. With `--check` it fails when a request allocates, which none
//! may once the pools are warm.

use block::{
    Channel, Data, Device, DeviceError, Flags, IoResult, KernelBacking, Limits, MemoryRegion, Op, Queue,
    Request, SharedLimits,
};
use layers::linear::Partition;
use layers::stats::Stats;
use reactor::{Core, CoreConfig, QueueChannel};
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

const DEPTH: u32 = 32;
const WARM_UP: u64 = 100_000;
const MEASURED: u64 = 2_000_000;
const CAPACITY: u64 = 1 << 30;

/// A queue that completes every request at the next reap.
struct Loopback {
    pushed: VecDeque<u32>,
}

impl Queue for Loopback {
    fn depth(&self) -> u32 {
        DEPTH
    }
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        std::hint::black_box((req.len, offset));
        self.pushed.push_back(slot);
        Ok(())
    }
    fn kick(&mut self) {}
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let count = self.pushed.len();
        for slot in self.pushed.drain(..) {
            done(slot, Ok(()));
        }
        count
    }
    fn event_fd(&self) -> Option<std::os::fd::RawFd> {
        None
    }
    fn arm(&mut self) -> bool {
        self.pushed.is_empty()
    }
    fn disarm(&mut self) {}
}

struct LoopbackDevice(Arc<SharedLimits>);

impl Device for LoopbackDevice {
    fn name(&self) -> &str {
        "loopback"
    }
    fn limits(&self) -> Limits {
        self.0.get()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let queue = Loopback { pushed: VecDeque::with_capacity(DEPTH as usize) };
        Ok(QueueChannel::open(queue, self.0.clone()))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }
    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }
    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

/// One task for each queue slot, each with one request in flight, until `target` requests are done.
fn spawn_load(core: &Core, channel: &Rc<dyn Channel>, started: &Rc<Cell<u64>>, target: u64) {
    for slot in 0..u64::from(DEPTH) {
        let (channel, started) = (channel.clone(), started.clone());
        core.spawn(async move {
            // Write zeroes has no data, so no copy is measured.
            let req = Request { op: Op::WriteZeroes, flags: Flags::NONE, len: 4096, data: Data::none() };
            while started.get() < target {
                started.set(started.get() + 1);
                let offset = (started.get() * 7 + slot) * 4096 % (CAPACITY / 2);
                channel.submit(&req, offset).await.expect("a loopback does not fail");
            }
        });
    }
}

fn run_until(core: &Core, channel: &Rc<dyn Channel>, count: u64) -> f64 {
    let started = Rc::new(Cell::new(0));
    spawn_load(core, channel, &started, count);
    let start = Instant::now();
    while Rc::strong_count(&started) > 1 {
        core.turn();
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// Measures one stack. Returns the allocations of the measured part.
fn measure(name: &str, core: &Core, device: &dyn Device) -> u64 {
    let channel = core.with_current(|| device.open_channel()).expect("a channel");
    run_until(core, &channel, WARM_UP);
    let mut rounds: Vec<f64> = (0..5).map(|_| run_until(core, &channel, MEASURED / 5)).collect();
    rounds.sort_by(f64::total_cmp);
    // The tasks themselves are boxed once each, whatever the number of requests.
    let allocations_of = |count| {
        let counted = allocation_counter::measure(|| {
            run_until(core, &channel, count);
        });
        counted.count_total
    };
    let allocations = allocations_of(MEASURED / 5).saturating_sub(allocations_of(u64::from(DEPTH)));
    println!(
        "{name:34} {:6.1} ns/request (median of 5, {:.1}..{:.1}), {allocations} allocations in {} requests",
        rounds[2],
        rounds[0],
        rounds[4],
        MEASURED / 5
    );
    allocations
}

fn main() {
    let core = Core::start(0, &CoreConfig::default()).expect("an io_uring");
    let leaf: Arc<dyn Device> = Arc::new(LoopbackDevice(SharedLimits::new(Limits::new(CAPACITY))));
    let linear = |child: &Arc<dyn Device>| -> Arc<dyn Device> {
        Arc::new(Partition::new(child.clone(), 4096, None).expect("a partition that lies inside"))
    };
    let stats = |child: &Arc<dyn Device>| -> Arc<dyn Device> { Arc::new(Stats::new(child.clone())) };
    let two = stats(&linear(&leaf));
    let mut allocations = measure("leaf alone", &core, &*leaf);
    allocations += measure("linear, stats over leaf", &core, &*two);
    allocations += measure("linear, stats, linear, stats", &core, &*stats(&linear(&two)));
    if std::env::args().any(|arg| arg == "--check") && allocations > 0 {
        eprintln!("hot-path: {allocations} allocations in the hot path: want 0");
        std::process::exit(1);
    }
}
