//! Devices on cores, driven from outside through a bridge.

use block::{
    Channel, Data, Device, DeviceError, Flags, IoError, IoFuture, IoResult, KernelBacking, Limits,
    MemoryRegion, Op, Queue, Request, Segment, SharedLimits, StatusReport,
};
use conformance::Suite;
use drivers::direct::DirectQueue;
use drivers::mem::{MemDevice, Options as MemOptions};
use drivers::null::{NullDevice, Options as NullOptions};
use drivers::shared_memory::SharedMemory;
use reactor::bridge::{BridgeOptions, BridgeQueue};
use reactor::{CoreConfig, Cores, PollWindow, QueueChannel};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MS: Duration = Duration::from_millis(1);
const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// Cores that sleep whenever they can, or that never do in a test's time.
fn cores(count: usize, poll_ns: u64) -> Arc<Cores> {
    let config = CoreConfig { poll: PollWindow::up_to(poll_ns), ..CoreConfig::default() };
    Arc::new(Cores::start(&vec![config; count]).unwrap())
}

fn null(latency: Duration) -> Arc<dyn Device> {
    let latency_ns = latency.as_nanos() as u64;
    Arc::new(NullDevice::new(&NullOptions { latency_ns, ..NullOptions::new(1 << 20) }).unwrap())
}

/// A queue with one request after the other for each slot, all of the same 4 KiB.
struct Client {
    queue: BridgeQueue,
    memory: SharedMemory,
    segment: Box<[Segment; 1]>,
    ended: Vec<(u32, IoResult)>,
}

impl Client {
    fn new(cores: &Arc<Cores>, device: Arc<dyn Device>, options: BridgeOptions) -> Client {
        let queue = BridgeQueue::open(cores, 0, device, &options).unwrap();
        let memory = SharedMemory::new(4096).unwrap();
        let segment = Box::new([memory.segment(0, 4096)]);
        Client { queue, memory, segment, ended: Vec::new() }
    }

    fn push(&mut self, slot: u32, op: Op, offset: u64) -> IoResult {
        // SAFETY: memory and list live as long as the queue, which is dropped before them.
        let data = if op.has_data() { unsafe { Data::new(&*self.segment) } } else { Data::none() };
        let req = Request { op, flags: Flags::NONE, len: if op == Op::Flush { 0 } else { 4096 }, data };
        // SAFETY: as above.
        unsafe { self.queue.push(slot, &req, offset) }
    }

    fn reap(&mut self) -> usize {
        self.queue.reap(&mut |slot, result| self.ended.push((slot, result)))
    }

    /// Reads with so many slots and waits for all.
    fn read(&mut self, count: u32) {
        (0..count).for_each(|slot| self.push(slot, Op::Read, 0).unwrap());
        self.ended.clear();
        let start = Instant::now();
        while self.ended.len() < count as usize {
            assert!(start.elapsed() < Duration::from_secs(60), "{} of {count}", self.ended.len());
            self.queue.wait(count - self.ended.len() as u32, LONG, None).unwrap();
            self.reap();
        }
        self.ended.sort_unstable_by_key(|(slot, _)| *slot);
        assert!(
            self.ended.iter().enumerate().all(|(i, ended)| *ended == (i as u32, Ok(()))),
            "{:?}",
            self.ended
        );
    }
}

/// Waits for the only request in flight, and reaps it. A wake-up that a former wait did not need
/// can end a wait before its request has completed.
fn reap_one(queue: &mut BridgeQueue, slot: u32) {
    let mut ended = None;
    while ended.is_none() {
        queue.wait(1, LONG, None).unwrap();
        queue.reap(&mut |slot, result| assert!(ended.replace((slot, result)).is_none()));
    }
    assert_eq!(ended, Some((slot, Ok(()))));
}

/// A device whose channels are queues over a bridge to other cores.
struct Bridged {
    device: Arc<dyn Device>,
    cores: Arc<Cores>,
    options: BridgeOptions,
}

impl Device for Bridged {
    fn name(&self) -> &str {
        self.device.name()
    }
    fn limits(&self) -> Limits {
        self.device.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let queue = BridgeQueue::open(&self.cores, 0, self.device.clone(), &self.options)?;
        Ok(QueueChannel::open(queue, SharedLimits::new(self.device.limits())))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.device.refresh()
    }
    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.device.map_region(region)
    }
    fn unmap_region(&self, region: &MemoryRegion) {
        self.device.unmap_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

#[test]
fn a_device_behind_a_bridge_conforms() {
    for (depth, poll_ns) in [(1, 0), (4, 50_000), (128, 0)] {
        let device = Arc::new(MemDevice::new(&MemOptions::new(conformance::MIN_CAPACITY)).unwrap());
        let options = BridgeOptions { depth, ..BridgeOptions::default() };
        Suite::new(Arc::new(Bridged { device, cores: cores(1, poll_ns), options })).run();
    }
}

#[test]
fn requests_wake_a_core_that_sleeps_and_completions_a_caller_that_does() {
    for latency in [Duration::ZERO, MS] {
        let spin = PollWindow::up_to(0);
        let mut client =
            Client::new(&cores(1, 0), null(latency), BridgeOptions { spin, ..BridgeOptions::default() });
        for count in [1, 2, 128, 1, 77] {
            client.read(count);
            std::thread::sleep(2 * MS);
        }
    }
}

#[test]
fn no_wake_is_lost_however_often_both_sides_go_to_sleep() {
    let spin = PollWindow::up_to(0);
    let options = BridgeOptions { depth: 4, spin, ..BridgeOptions::default() };
    let mut client = Client::new(&cores(1, 0), null(Duration::ZERO), options);
    for round in 0..5000 {
        client.read(1 + round % 3);
    }
}

#[test]
fn a_queue_that_is_polled_has_no_event() {
    let options = BridgeOptions { is_polled: true, ..BridgeOptions::default() };
    let mut client = Client::new(&cores(1, 0), null(MS / 10), options);
    assert_eq!(client.queue.event_fd(), None);
    client.read(128);
    client.read(1);
}

#[test]
fn the_event_comes_with_the_last_of_those_that_are_waited_for() {
    let mut client = Client::new(&cores(1, 0), null(Duration::ZERO), BridgeOptions::default());
    let fd = client.queue.event_fd().unwrap();
    let is_raised = |timeout| drivers::direct::poll_readable(fd, Some(timeout), None).is_ok();
    assert!(!is_raised(MS));
    client.push(0, Op::Read, 0).unwrap();
    client.push(1, Op::Read, 0).unwrap();
    assert!(client.queue.arm_for(2));
    client.queue.kick();
    assert!(is_raised(LONG.unwrap()));
    assert_eq!((client.reap(), client.queue.in_flight()), (2, 0));
    // The queue was not armed for this request.
    client.push(0, Op::Read, 0).unwrap();
    client.queue.kick();
    assert!(client.queue.look_for(1, LONG.unwrap()));
    assert!(!is_raised(MS));
    // It is there already: nothing would come.
    assert!(!client.queue.arm());
    assert_eq!(client.reap(), 1);
    // Armed before there is anything to wait for.
    assert!(client.queue.arm());
    client.push(0, Op::Read, 0).unwrap();
    client.queue.kick();
    assert!(is_raised(LONG.unwrap()));
}

#[test]
fn waiting_ends_with_the_timeout() {
    for is_polled in [false, true] {
        let options = BridgeOptions { is_polled, ..BridgeOptions::default() };
        let mut client = Client::new(&cores(1, 0), null(100 * MS), options);
        client.push(3, Op::Read, 0).unwrap();
        let start = Instant::now();
        let error = client.queue.wait(1, Some(5 * MS), None).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ETIME));
        assert!(start.elapsed() >= 5 * MS);
        assert_eq!(
            client.queue.wait(1, Some(Duration::ZERO), None).unwrap_err().raw_os_error(),
            Some(libc::ETIME)
        );
        assert_eq!(client.reap(), 0);
        client.queue.wait(1, None, None).unwrap();
        assert!(start.elapsed() >= 100 * MS);
        client.reap();
        assert_eq!(client.ended, [(3, Ok(()))]);
    }
}

#[test]
fn a_signal_that_the_mask_lets_through_ends_the_wait() {
    extern "C" fn ignore(_: libc::c_int) {}
    // SAFETY: the handler does nothing; sets and actions are plain data, valid when zeroed.
    let (mask, blocked) = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
        let (mut mask, mut blocked) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&raw mut mask);
        libc::sigemptyset(&raw mut blocked);
        libc::sigaddset(&raw mut blocked, libc::SIGUSR2);
        (mask, blocked)
    };
    for is_polled in [false, true] {
        let options = BridgeOptions { is_polled, ..BridgeOptions::default() };
        let mut client = Client::new(&cores(1, 0), null(100 * MS), options);
        client.push(0, Op::Read, 0).unwrap();
        // SAFETY: blocks the signal for this thread, then sends it one: it is pending until a wait
        // lets it through.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut());
            libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2);
        }
        let error = client.queue.wait(1, LONG, Some(&mask)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINTR));
        client.queue.wait(1, LONG, Some(&mask)).unwrap();
        assert_eq!(client.reap(), 1);
    }
}

#[test]
fn a_dropped_queue_waits_for_what_is_in_flight() {
    let cores = cores(1, 0);
    let mut client = Client::new(&cores, null(50 * MS), BridgeOptions::default());
    (0..128).for_each(|slot| client.push(slot, Op::Write, 0).unwrap());
    let start = Instant::now();
    drop(client); // not even kicked
    assert!(start.elapsed() >= 50 * MS);
    // The core is free for others.
    Client::new(&cores, null(Duration::ZERO), BridgeOptions::default()).read(3);
}

#[test]
fn a_queue_moves_from_thread_to_thread() {
    let device = Arc::new(MemDevice::new(&MemOptions::new(1 << 20)).unwrap());
    let cores = cores(2, 50_000);
    let mut client = Client::new(&cores, device, BridgeOptions { depth: 3, ..BridgeOptions::default() });
    drop(cores); // the queue keeps them
    for round in 0..50u8 {
        client.memory.write(0, &[round; 4096]);
        client.push(0, Op::Write, 4096).unwrap();
        let mut queue = client.queue;
        queue = std::thread::spawn(move || {
            reap_one(&mut queue, 0);
            queue
        })
        .join()
        .unwrap();
        client.queue = queue;
        client.memory.write(0, &[!round; 4096]);
        client.push(2, Op::Read, 4096).unwrap();
        reap_one(&mut client.queue, 2);
        let mut read = [0; 4096];
        client.memory.read(0, &mut read);
        assert_eq!(read, [round; 4096]);
    }
}

/// A device that breaks its core.
struct Broken(Limits);

struct Panic;

impl Channel for Panic {
    fn submit<'a>(&'a self, _: &'a Request<'a>, _: u64) -> IoFuture<'a> {
        panic!("on purpose")
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}

impl Device for Broken {
    fn name(&self) -> &str {
        "broken"
    }
    fn limits(&self) -> Limits {
        self.0.clone()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(Panic))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.0.clone())
    }
    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }
    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

#[test]
fn a_core_that_ends_takes_no_request_with_it() {
    let cores = cores(1, 0);
    let mut client = Client::new(&cores, Arc::new(Broken(Limits::new(1 << 20))), BridgeOptions::default());
    client.push(5, Op::Read, 0).unwrap();
    client.push(7, Op::Read, 0).unwrap();
    let start = Instant::now();
    while client.ended.len() < 2 && start.elapsed() < LONG.unwrap() {
        client.queue.wait(2, LONG, None).unwrap();
        client.reap();
    }
    assert_eq!(client.ended, [(5, Err(IoError::DeviceGone)), (7, Err(IoError::DeviceGone))]);
    assert_eq!(client.push(5, Op::Read, 0), Err(IoError::DeviceGone));
    let refused = BridgeQueue::open(&cores, 0, null(MS), &BridgeOptions::default()).err().unwrap();
    assert_eq!(refused.to_string(), "null: cannot be served: the core has stopped");
}

#[test]
fn a_depth_that_makes_no_sense_is_refused() {
    let cores = cores(1, 0);
    for depth in [0, BridgeOptions::MAX_DEPTH + 1] {
        let options = BridgeOptions { depth, ..BridgeOptions::default() };
        let refused = BridgeQueue::open(&cores, 0, null(MS), &options).err().unwrap().to_string();
        assert_eq!(refused, format!("null: a queue for {depth} requests: 1 to 65536"));
    }
}
