//! Requests on an array from tasks of one or several cores: rate and latency.

use base::Rng;
use benches::array::Plan;
use benches::memory::cpu_seconds;
use block::{Channel, Data, Device, Flags, Op, Request, Segment};
use reactor::{Core, CoreConfig, Cores};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Load on an array.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Read or write.
    pub op: Op,
    /// Bytes of a request, at most 1 MiB.
    pub len: u64,
    /// Whether each request follows the previous one; otherwise its position is random.
    pub is_sequential: bool,
    /// Whether the array may use the memory of writes in place ([`Data::stable`]).
    pub is_stable: bool,
    /// Requests in flight on each core.
    pub depth: usize,
    /// Number of cores.
    pub cores: usize,
}

/// Members without latency never wait, so a task yields after this number of requests.
const TURN: u64 = 64;

/// Runs a load on a simulated core, whose time advances only while all tasks wait. Returns requests
/// per second of that time.
pub fn run_in_virtual_time(plan: Plan, load: Load, seconds: f64) -> f64 {
    reactor::run_simulated(1, move |_| async move {
        let array: Arc<dyn Device> = plan.start().await;
        on_core(reactor::current(), array, load, 0, (seconds, false)).await
    })
}

/// Runs a load for `seconds` after a warm-up. Returns requests per second, or per second of the
/// cores' own time.
pub fn run(device: &Arc<dyn Device>, load: Load, seconds: f64, is_cpu_time: bool) -> f64 {
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
                core.block_on(move |core| on_core(core, device, load, i as u64, (seconds, is_cpu_time)))
                    .expect("the core runs")
            })
        })
        .collect();
    results.into_iter().map(|thread| thread.join().expect("no load panics")).sum()
}

async fn on_core(
    core: Core,
    device: Arc<dyn Device>,
    load: Load,
    index: u64,
    (seconds, is_cpu_time): (f64, bool),
) -> f64 {
    let running = Running::start(&core, &device, load, index);
    let warm = Duration::from_secs_f64(seconds / 4.0);
    core.sleep(warm.as_nanos() as u64).await;
    let (before, start_ns, cpu_start) = (running.done(), core.now_ns(), cpu_seconds());
    core.sleep((seconds * 1e9) as u64).await;
    let taken = match is_cpu_time {
        true => cpu_seconds() - cpu_start,
        false => (core.now_ns() - start_ns) as f64 / 1e9,
    };
    let rate = (running.done() - before) as f64 / taken;
    running.stop().await;
    rate
}

/// A load that runs on the calling core until it is stopped.
pub struct Running {
    core: Core,
    shared: Rc<Shared>,
}

struct Shared {
    load: Load,
    channel: Rc<dyn Channel>,
    /// Number of requests that fit on the device.
    places: u64,
    next: Cell<u64>,
    done: Cell<u64>,
    tasks: Cell<usize>,
    is_over: Cell<bool>,
    /// Latencies of requests in nanoseconds, while they are recorded.
    times: RefCell<Option<Vec<u32>>>,
}

impl Running {
    /// Starts a load. `index` distinguishes cores.
    pub fn start(core: &Core, device: &Arc<dyn Device>, load: Load, index: u64) -> Running {
        let shared = Rc::new(Shared {
            load,
            channel: device.open_channel().expect("a channel"),
            places: device.limits().capacity / load.len,
            next: Cell::new(0),
            done: Cell::new(0),
            tasks: Cell::new(load.depth),
            is_over: Cell::new(false),
            times: RefCell::default(),
        });
        for slot in 0..load.depth {
            let rng = Rng::new(index << 32 | slot as u64);
            core.spawn(request_after_request(core.clone(), shared.clone(), rng));
        }
        Running { core: core.clone(), shared }
    }

    /// Number of completed requests.
    pub fn done(&self) -> u64 {
        self.shared.done.get()
    }

    /// 99th percentile of the latency of requests in the next `seconds`, in nanoseconds.
    pub async fn p99_ns(&self, seconds: f64) -> f64 {
        self.shared.times.replace(Some(Vec::with_capacity(1 << 22)));
        self.core.sleep((seconds * 1e9) as u64).await;
        let mut times = self.shared.times.take().expect("it was set above");
        assert!(times.len() >= 1000, "{} requests are too few for a p99", times.len());
        let at = times.len() * 99 / 100;
        f64::from(*times.select_nth_unstable(at).1)
    }

    /// Stops the load; returns when the last request has ended.
    pub async fn stop(self) {
        self.shared.is_over.set(true);
        while self.shared.tasks.get() > 0 {
            self.core.sleep(100_000).await;
        }
    }
}

async fn request_after_request(core: Core, shared: Rc<Shared>, mut rng: Rng) {
    let load = shared.load;
    let buffer = core.buffers().take(load.len as usize).await;
    let segment = Segment { len: load.len as usize, ..buffer.segment() };
    // SAFETY: the buffer lives as long as this task, its only user, which does not write to it.
    let data = unsafe {
        let data = Data::one(&segment);
        if load.is_stable { data.stable() } else { data }
    };
    let req = Request { op: load.op, flags: Flags::NONE, len: load.len, data };
    while !shared.is_over.get() {
        let place = match load.is_sequential {
            true => shared.next.replace(shared.next.get() + 1),
            false => rng.below(shared.places),
        };
        let begin = shared.times.borrow().is_some().then(Instant::now);
        shared.channel.submit(&req, place % shared.places * load.len).await.expect("no request fails");
        if let (Some(begin), Some(times)) = (begin, &mut *shared.times.borrow_mut()) {
            times.push(u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX));
        }
        shared.done.set(shared.done.get() + 1);
        if shared.done.get().is_multiple_of(TURN) {
            reactor::yield_now().await;
        }
    }
    shared.tasks.set(shared.tasks.get() - 1);
}
