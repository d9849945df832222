//! Measures the cost of one request in the executor, the layers, a driver's slots, and a RAID 5:
//! nanoseconds and allocations, at queue depth 32. With `--check` it fails when a request
//! allocates, which none may once the pools are warm.
//!
//! The RAID 5 has two cores, each on a thread. Core 0 submits requests to stripes of one core, and
//! both threads count allocations.
//!
//! A request that reads an entry of a table (`mapping`) is measured on one core.
//!
//! Then 1 to 16 cores of one RAID 5 take their turns on one thread, and each writes to all stripes.
//! However many there are, a write needs at most one message and one wake between cores with a log
//! (`ppl`), and almost none without (`bitmap`).
//!
//! `--trace MODE CORES` only writes from that many cores, for `benches/shared_lines.py`: it reads
//! the trace of valgrind and counts cache lines that move between cores.

use benches::array::{Members, Plan};
use benches::member::Member;
use block::{
    Channel, Data, Device, DeviceError, Flags, IoResult, KernelBacking, Limits, MemoryRegion, Op, Queue,
    Request, Segment, SharedLimits,
};
use layers::linear::Partition;
use layers::stats::Stats;
use raid::array::Array;
use raid::{Consistency, Level};
use reactor::{Core, CoreConfig, QueueChannel};
use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

const DEPTH: u32 = 32;
const WARM_UP: u64 = 100_000;
const MEASURED: u64 = 2_000_000;
const CAPACITY: u64 = 1 << 30;
/// Requests to an array that are measured: each is several requests to members.
const MEASURED_OF_ARRAY: u64 = 100_000;
/// Requests in a round of several cores.
const ROUND: u64 = 40_000;
/// Most rounds until the pools of all cores hold what a load needs at a time.
const MOST_ROUNDS: u64 = 20;
/// Bytes of the array, and requests, of a traced load: each lock word is taken several times.
const TRACED_BYTES: u64 = 128 << 20;
const TRACED: u64 = 1_000;
/// Most cores of a trace. The marks behind theirs begin and end what is counted, and end a turn.
const MOST_TRACED: usize = 64;
const BEGIN: usize = MOST_TRACED;
const END: usize = MOST_TRACED + 1;
const BETWEEN_TURNS: usize = MOST_TRACED + 2;
/// Requests that a member has in flight; more wait in line.
const MEMBER_DEPTH: u32 = 128;
/// The array: 4+1 members without stored data, whose requests take a turn of their core.
const ARRAY: Plan = Plan {
    level: Level::Raid5,
    count: 5,
    members: Members::Memory(CAPACITY),
    strip_bytes: Some(64 << 10),
    consistency: Consistency::Ppl,
};

/// The same array without a log.
const UNLOGGED: Plan = Plan { consistency: Consistency::Bitmap, ..ARRAY };

thread_local! {
    /// Requests that this thread has pushed into loopbacks.
    static PUSHED: Cell<u64> = const { Cell::new(0) };
}

/// A queue that completes every request at the next reap.
struct Loopback {
    pushed: VecDeque<u32>,
    depth: u32,
}

impl Queue for Loopback {
    fn depth(&self) -> u32 {
        self.depth
    }
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        std::hint::black_box((req.len, offset));
        PUSHED.set(PUSHED.get() + 1);
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

struct LoopbackDevice {
    limits: Arc<SharedLimits>,
    depth: u32,
}

impl LoopbackDevice {
    fn new(depth: u32) -> LoopbackDevice {
        LoopbackDevice { limits: SharedLimits::new(Limits::new(CAPACITY)), depth }
    }
}

impl Device for LoopbackDevice {
    fn name(&self) -> &str {
        "loopback"
    }
    fn limits(&self) -> Limits {
        self.limits.get()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let queue = Loopback { pushed: VecDeque::with_capacity(self.depth as usize), depth: self.depth };
        Ok(QueueChannel::open(queue, self.limits.clone()))
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

/// Requests of a load.
struct Load {
    channel: Rc<dyn Channel>,
    request: Request<'static>,
    /// Offsets of the requests, one after the other and again.
    offsets: Vec<u64>,
}

impl Load {
    /// Write zeroes has no data, so no copy is measured.
    fn of_zeroes(channel: Rc<dyn Channel>, offsets: Vec<u64>) -> Load {
        Load { channel, request: Request::write_zeroes(4096, Flags::NONE), offsets }
    }
}

/// One task for each queue slot, each with one request in flight, until `target` requests are done.
fn spawn_load(core: &Core, load: &Rc<Load>, started: &Rc<Cell<u64>>, target: u64) {
    for _ in 0..DEPTH {
        let (load, started) = (load.clone(), started.clone());
        core.spawn(async move {
            while started.get() < target {
                let offset = load.offsets[started.get() as usize % load.offsets.len()];
                started.set(started.get() + 1);
                load.channel.submit(&load.request, offset).await.expect("a loopback does not fail");
            }
        });
    }
}

fn run_until(core: &Core, load: &Rc<Load>, count: u64) -> f64 {
    let started = Rc::new(Cell::new(0));
    spawn_load(core, load, &started, count);
    let start = Instant::now();
    while Rc::strong_count(&started) > 1 {
        core.turn();
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// Measures one stack. Returns the allocations of the measured part.
fn measure(name: &str, core: &Core, device: &dyn Device) -> u64 {
    let channel = core.with_current(|| device.open_channel()).expect("a channel");
    let offsets = (0..1 << 16).map(|number| number * 7 * 4096 % (CAPACITY / 2)).collect();
    let load = Rc::new(Load::of_zeroes(channel, offsets));
    measure_load(name, core, &load, MEASURED / 5, || 0)
}

/// Measures a load in rounds of `count` requests. `elsewhere` returns the allocations of other
/// threads since its last call.
fn measure_load(
    name: &str,
    core: &Core,
    load: &Rc<Load>,
    count: u64,
    mut elsewhere: impl FnMut() -> u64,
) -> u64 {
    run_until(core, load, WARM_UP);
    let mut rounds: Vec<f64> = (0..5).map(|_| run_until(core, load, count)).collect();
    rounds.sort_by(f64::total_cmp);
    // The tasks themselves are boxed once each, whatever the number of requests.
    let mut allocations_of = |count| {
        elsewhere();
        let counted = allocation_counter::measure(|| {
            run_until(core, load, count);
        });
        counted.count_total + elsewhere()
    };
    let allocations = last_round(|| allocations_of(count).saturating_sub(allocations_of(u64::from(DEPTH))));
    println!(
        "{name:34} {:6.1} ns/request (median of 5, {:.1}..{:.1}), {allocations} allocations in {count} requests",
        rounds[2], rounds[0], rounds[4],
    );
    allocations
}

/// Allocations in the first round without any, or the last one: in earlier rounds the pools of some
/// core may still grow to what the load needs at a time.
fn last_round(mut allocations_of_round: impl FnMut() -> u64) -> u64 {
    let mut allocations = u64::MAX;
    for _ in 0..MOST_ROUNDS {
        allocations = allocations_of_round();
        if allocations == 0 {
            break;
        }
    }
    allocations
}

/// Core 1 of the array, on a thread of its own that counts its allocations.
struct OtherCore {
    shared: Arc<OtherShared>,
    thread: Option<JoinHandle<()>>,
}

struct OtherShared {
    /// Moves when the thread is to report, and to `u64::MAX` when it is to end.
    report: AtomicU64,
    /// Allocations before the last report.
    allocations: AtomicU64,
    reported: Barrier,
}

impl OtherCore {
    fn start(device: Arc<Array>) -> OtherCore {
        let (report, allocations) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared = Arc::new(OtherShared { report, allocations, reported: Barrier::new(2) });
        let theirs = shared.clone();
        let thread = std::thread::spawn(move || theirs.run(&device));
        OtherCore { shared, thread: Some(thread) }
    }

    /// Allocations since the last call.
    fn allocations(&self) -> u64 {
        self.shared.report.fetch_add(1, Ordering::SeqCst);
        self.shared.reported.wait();
        self.shared.allocations.load(Ordering::SeqCst)
    }
}

impl OtherShared {
    fn run(&self, device: &Array) {
        let core = Core::start(1, &CoreConfig::default()).expect("an io_uring");
        let _channel = core.with_current(|| device.open_channel()).expect("a channel");
        let mut seen = 0;
        while seen != u64::MAX {
            let counted = allocation_counter::measure(|| {
                while self.report.load(Ordering::Relaxed) == seen {
                    core.turn();
                }
            });
            seen = self.report.load(Ordering::SeqCst);
            if seen != u64::MAX {
                self.allocations.store(counted.count_total, Ordering::SeqCst);
                self.reported.wait();
            }
        }
    }
}

impl Drop for OtherCore {
    fn drop(&mut self) {
        self.shared.report.store(u64::MAX, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("core 1 does not panic");
        }
    }
}

/// Runs a future on a core that takes its turns here.
fn block_on<R: 'static>(core: &Core, future: impl Future<Output = R> + 'static) -> R {
    let result = Rc::new(Cell::new(None));
    let target = result.clone();
    core.with_current(|| core.spawn(async move { target.set(Some(future.await)) }));
    loop {
        core.turn();
        if let Some(result) = result.take() {
            return result;
        }
    }
}

/// Offsets of 4 KiB blocks of an array, in stripes that core `owner` of two owns, and in strips of
/// the member in `slot` if there is one.
fn offsets(array: &Array, owner: u16, slot: Option<usize>) -> Vec<u64> {
    let config = array.config();
    let is_chosen = |offset: &u64| {
        let located = config.geometry.locate(*offset);
        let is_in_slot =
            slot.is_none_or(|slot| config.geometry.member(located.stripe, located.strip) == slot);
        config.lane_of(located.stripe) % 2 == owner && is_in_slot
    };
    // A prime number of blocks apart, so that no requests are a stream.
    let blocks = CAPACITY / 4096;
    (0..blocks).map(|number| number * 7919 % blocks * 4096).filter(is_chosen).collect()
}

/// Creates and starts the array on members of `bytes` without stored data.
fn start_array(core: &Core, plan: &'static Plan, bytes: u64) -> Arc<Array> {
    let member = |slot: usize| -> Arc<dyn Device> {
        let data = Arc::new(LoopbackDevice::new(MEMBER_DEPTH));
        let member = Member::over(data, format!("member{slot}"), bytes, plan.hollow(bytes));
        Arc::new(member.expect("a member"))
    };
    let devices = (0..plan.count).map(member).collect();
    block_on(core, async move { plan.start_on(devices).await })
}

/// A request for 4 KiB of leaked memory.
fn request(op: Op) -> Request<'static> {
    let bytes: &'static mut [u64] = vec![0; 512].leak();
    let segment = Segment { base: bytes.as_mut_ptr().cast(), len: 4096 };
    // SAFETY: memory and segment are leaked.
    let data = unsafe { Data::one(Box::leak(Box::new(segment))) };
    Request { op, flags: Flags::NONE, len: 4096, data }
}

/// Measures requests of one core to stripes of its own and to those that it forwards.
fn measure_array(core: &Core) -> u64 {
    let array = start_array(core, &ARRAY, CAPACITY);
    let channel = core.with_current(|| array.open_channel()).expect("a channel");
    let other = OtherCore::start(array.clone());
    let generation = array.table().generation;
    while array.table().generation == generation {
        core.turn(); // core 1 becomes an owner of stripes
    }
    let of = |op, owner, slot| {
        let offsets = offsets(&array, owner, slot);
        Rc::new(Load { channel: channel.clone(), request: request(op), offsets })
    };
    let zeroes = Rc::new(Load::of_zeroes(channel.clone(), offsets(&array, 1, None)));
    let count = MEASURED_OF_ARRAY / 5;
    let mut total = 0;
    let mut measure = |name, load: Rc<Load>, is_forwarded: bool| {
        let before = PUSHED.get();
        total += measure_load(name, core, &load, count, || other.allocations());
        assert_eq!(PUSHED.get() == before, is_forwarded, "{name}: another core than expected did the work");
    };
    measure("RAID 5, own write", of(Op::Write, 0, None), false);
    measure("RAID 5, forwarded write", of(Op::Write, 1, None), true);
    measure("RAID 5, forwarded zeroes", zeroes, true);
    let failing = array.clone();
    block_on(core, async move { failing.fail(0).await }).expect("the array survives it");
    measure("RAID 5, forwarded degraded read", of(Op::Read, 1, Some(0)), true);
    total
}

/// Writes of core `number` of `count` to all stripes in the first `bytes` of an array.
fn write_load(core: &Core, array: &Arc<Array>, number: usize, count: usize, bytes: u64) -> Rc<Load> {
    let channel = core.with_current(|| array.open_channel()).expect("a channel");
    let blocks = bytes / 4096;
    // Each core begins elsewhere, and no requests are a stream.
    let start = number as u64 * blocks / count as u64;
    let offsets = (0..blocks).map(|block| (start + block * 7919) % blocks * 4096).collect();
    Rc::new(Load { channel, request: request(Op::Write), offsets })
}

/// Shared by the threads of a trace. Accesses to it are not counted.
#[repr(C)]
struct Trace {
    /// A store to one says that the core of its number takes a turn, or what its name says.
    marks: [Mark; BETWEEN_TURNS + 1],
    /// The core that may run.
    turn: Mutex<usize>,
    turned: Condvar,
    array: OnceLock<Arc<Array>>,
    /// Loads that are done, of all cores.
    done: AtomicUsize,
}

/// Alone in its cache line.
#[repr(align(64))]
struct Mark(AtomicU64);

static TRACE: Trace = Trace {
    marks: [const { Mark(AtomicU64::new(0)) }; BETWEEN_TURNS + 1],
    turn: Mutex::new(0),
    turned: Condvar::new(),
    array: OnceLock::new(),
    done: AtomicUsize::new(0),
};

impl Trace {
    fn mark(&self, number: usize) {
        self.marks[number].0.store(1, Ordering::Release);
    }

    /// Runs `work` when it is the turn of core `number` of `count`.
    fn in_turn<R>(&self, number: usize, count: usize, work: impl FnOnce() -> R) -> R {
        let turn = self.turn.lock().expect("no thread panics");
        let mut turn = self.turned.wait_while(turn, |turn| *turn != number).expect("no thread panics");
        self.mark(number);
        let result = work();
        self.mark(BETWEEN_TURNS);
        *turn = (number + 1) % count;
        self.turned.notify_all();
        result
    }

    /// A core that writes on this thread: its share of twice [`TRACED`] requests that are not
    /// counted, and of [`TRACED`] that are.
    fn run(&self, plan: &'static Plan, number: usize, count: usize) {
        let (core, load) = self.in_turn(number, count, || {
            let core = Core::start(number, &CoreConfig::default()).expect("an io_uring");
            let array = self.array.get_or_init(|| start_array(&core, plan, TRACED_BYTES));
            let load = write_load(&core, array, number, count, TRACED_BYTES);
            (core, load)
        });
        let share = TRACED / count as u64;
        for (phase, requests) in [2 * share, share].into_iter().enumerate() {
            let started = Rc::new(Cell::new(0));
            self.in_turn(number, count, || {
                if phase == 1 && number == 0 {
                    self.mark(BEGIN);
                }
                spawn_load(&core, &load, &started, requests);
            });
            let mut is_running = true;
            while self.in_turn(number, count, || {
                core.turn();
                if is_running && Rc::strong_count(&started) == 1 {
                    is_running = false;
                    self.done.fetch_add(1, Ordering::SeqCst);
                }
                self.done.load(Ordering::SeqCst) < (phase + 1) * count
            }) {}
        }
        self.in_turn(number, count, || {
            if number == 0 {
                self.mark(END);
            }
        });
    }
}

/// Writes from cores, each on a thread of its own that runs in its turn, for a trace. Prints the
/// address of what they share, its bytes, those of a mark, and the number of requests.
fn trace(mode: &str, count: &str) {
    let plan = if mode == "ppl" { &ARRAY } else { &UNLOGGED };
    let count = count.parse().ok().filter(|count| (1..=MOST_TRACED).contains(count)).expect("1 to 64 cores");
    let requests = TRACED / count as u64 * count as u64;
    println!("{} {} {} {requests}", &raw const TRACE as usize, size_of::<Trace>(), size_of::<Mark>());
    std::thread::scope(|scope| {
        for number in 0..count {
            scope.spawn(move || TRACE.run(plan, number, count));
        }
    });
}

/// Counts what writes of `count` cores to stripes of all of them take, with all cores on this
/// thread. Returns the allocations.
fn count_of_cores(plan: &'static Plan, count: usize) -> u64 {
    let start = |index| Core::start(index, &CoreConfig::default()).expect("an io_uring");
    let cores: Vec<Core> = (0..count).map(start).collect();
    let array = start_array(&cores[0], plan, CAPACITY);
    let load = |(number, core)| write_load(core, &array, number, count, CAPACITY);
    let loads: Vec<Rc<Load>> = cores.iter().enumerate().map(load).collect();
    let run = |requests: u64| {
        let started = Rc::new(Cell::new(0));
        let spawn = |(core, load)| spawn_load(core, load, &started, requests);
        cores.iter().zip(&loads).for_each(spawn);
        while Rc::strong_count(&started) > 1 {
            for core in &cores {
                core.turn();
            }
        }
    };
    let allocations_of = |requests| allocation_counter::measure(|| run(requests)).count_total;
    let sum = |of: fn(&Core) -> u64| cores.iter().map(of).sum::<u64>();
    run(ROUND); // every core becomes an owner of stripes
    let before = (sum(Core::messages), sum(Core::foreign_wakes));
    let mut requests = 0;
    let allocations = last_round(|| {
        let of_tasks = allocations_of(u64::from(DEPTH) * count as u64);
        requests += ROUND + u64::from(DEPTH) * count as u64;
        allocations_of(ROUND).saturating_sub(of_tasks)
    });
    let per_request = |now: u64, before: u64| (now - before) as f64 / requests as f64;
    let messages = per_request(sum(Core::messages), before.0);
    let wakes = per_request(sum(Core::foreign_wakes), before.1);
    let (mode, most) = match plan.consistency {
        Consistency::Ppl => ("ppl", 1.01),
        _ => ("bitmap", 0.05),
    };
    println!(
        "RAID 5, {mode}, writes of {count:2} cores: {messages:.2} messages and {wakes:.2} wakes a request, \
         {allocations} allocations in {ROUND} requests"
    );
    assert!(messages <= most && wakes <= most, "{mode}, {count} cores: want at most {most} of each");
    allocations
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [option, mode, count] = &arguments[..]
        && option == "--trace"
    {
        return trace(mode, count);
    }
    let core = Core::start(0, &CoreConfig::default()).expect("an io_uring");
    let leaf: Arc<dyn Device> = Arc::new(LoopbackDevice::new(DEPTH));
    let linear = |child: &Arc<dyn Device>| -> Arc<dyn Device> {
        Arc::new(Partition::new(child.clone(), 4096, None).expect("a partition that lies inside"))
    };
    let stats = |child: &Arc<dyn Device>| -> Arc<dyn Device> { Arc::new(Stats::new(child.clone())) };
    let two = stats(&linear(&leaf));
    let mut allocations = measure("leaf alone", &core, &*leaf);
    allocations += measure("linear, stats over leaf", &core, &*two);
    allocations += measure("linear, stats, linear, stats", &core, &*stats(&linear(&two)));
    allocations += measure_array(&core);
    let (entry_ns, of_entries) = benches::table::measure_entries();
    println!("entry of a table, 8 MiB of leaves  {entry_ns:6.1} ns, {of_entries} allocations");
    allocations += of_entries;
    for plan in [&ARRAY, &UNLOGGED] {
        allocations += [1, 2, 4, 8, 16].map(|count| count_of_cores(plan, count)).iter().sum::<u64>();
    }
    if arguments.iter().any(|argument| argument == "--check") && allocations > 0 {
        eprintln!("hot-path: {allocations} allocations in the hot path: want 0");
        std::process::exit(1);
    }
}
