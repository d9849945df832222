//! Quality of service: limits of requests and bytes a second, for a device or a group of devices.
//!
//! ```text
//!   submit ─► nothing is limited: the child's own future
//!             else ─► the channel's line: the first takes a turn of every bucket ─► child
//! ```
//!
//! Requests of a channel begin in the order of their submission. Only the first in the line has
//! taken its turn. So a change of the limits, which a control thread may make at any time, applies
//! at once to all waiting requests. All cores share the buckets, and all devices of a group share
//! the group's. As in QEMU's throttling, discards and write-zeroes count as writes of their length.
//! A flush counts nothing: it makes data durable and is no load of its own.
//!
//! A device of a group may have a *guaranteed minimum*: a share of the group's limits that it can
//! always use. Its requests within that share do not wait for the group's turn. They still take the
//! turn, so the other devices wait longer, and the group's limits hold.

mod bucket;
pub mod kind;
mod waits;

pub use bucket::Rate;
pub use waits::{Waited, Waits};

use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoFuture, IoResult, KernelBacking, Limits as DeviceLimits,
    MemoryRegion, Op, Request, StatusReport,
};
use bucket::Bucket;
use reactor::{Core, Permits};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use waits::LimitOf;

/// Longest sleep of a waiting request before it checks whether the limits have changed.
const LOOK_NS: u64 = 20_000_000;

/// The limits of a device or a group. All of them apply at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// All requests except flushes.
    pub iops: Rate,
    /// Reads.
    pub read_iops: Rate,
    /// Writes, discards and write-zeroes.
    pub write_iops: Rate,
    /// Bytes of all requests.
    pub bandwidth: Rate,
    /// Bytes that are read.
    pub read_bandwidth: Rate,
    /// Bytes that are written, discarded or zeroed.
    pub write_bandwidth: Rate,
}

/// Number of limits.
const LIMITS: usize = 6;

impl Limits {
    /// Whether nothing is limited.
    pub fn is_unlimited(&self) -> bool {
        self.list().iter().all(|rate| rate.is_unlimited())
    }

    fn list(&self) -> [Rate; LIMITS] {
        let Limits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth } = *self;
        [iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth]
    }
}

/// The cost of a request for each of [`Limits::list`].
fn costs(req: &Request<'_>) -> [u64; LIMITS] {
    match req.op {
        Op::Read => [1, 1, 0, req.len, req.len, 0],
        _ => [1, 0, 1, req.len, 0, req.len],
    }
}

/// Limits and their use. Shared by the cores of a device, and by the devices of a group.
#[derive(Debug, Default)]
pub struct Throttle {
    /// Grows with every change of the limits.
    generation: AtomicU64,
    /// The last change for which the buckets forgot units taken in advance.
    forgiven: AtomicU64,
    limits: Mutex<Limits>,
    buckets: [Bucket; LIMITS],
}

impl Throttle {
    /// A throttle with these limits.
    pub fn new(limits: Limits) -> Throttle {
        Throttle { limits: Mutex::new(limits), generation: AtomicU64::new(1), ..Throttle::default() }
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the limits, also for waiting requests.
    pub fn set(&self, limits: Limits) {
        let mut own = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        *own = limits;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Forgets, once for each change, units taken in advance at the old rates.
    fn forgive(&self, generation: u64, now_ns: u64) {
        if self.forgiven.fetch_max(generation, Ordering::Relaxed) < generation {
            self.buckets.iter().for_each(|bucket| bucket.forgive(now_ns));
        }
    }
}

/// A device with limits.
pub struct Qos {
    name: String,
    child: Arc<dyn Device>,
    throttles: Vec<Arc<Throttle>>,
    floor: Option<Arc<Throttle>>,
    waits: Arc<Waits>,
}

impl Qos {
    /// Limits `child` by all of `throttles`: its own first, then that of its group, …
    pub fn new(child: Arc<dyn Device>, throttles: Vec<Arc<Throttle>>) -> Qos {
        Qos { name: format!("qos({})", child.name()), child, throttles, floor: None, waits: Arc::default() }
    }

    /// The same with a guaranteed minimum of all throttles except the first. A minimum without
    /// limits has no effect.
    pub fn with_floor(self, floor: Arc<Throttle>) -> Qos {
        Qos { floor: Some(floor), ..self }
    }

    /// The same, but it counts waits in `waits`, which several devices may share.
    pub fn with_waits(self, waits: Arc<Waits>) -> Qos {
        Qos { waits, ..self }
    }
}

impl Device for Qos {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> DeviceLimits {
        self.child.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let throttles = self.throttles.iter();
        Ok(Rc::new(QosChannel {
            child: self.child.open_channel()?,
            device: self.child.clone(),
            throttles: throttles.map(|throttle| View::new(throttle.clone())).collect(),
            floor: self.floor.clone().map(View::new),
            line: Permits::new(1),
            held_by: Cell::default(),
            waits: self.waits.clone(),
            core: reactor::current(),
        }))
    }

    fn refresh(&self) -> Result<DeviceLimits, DeviceError> {
        self.child.refresh()
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.child.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.child.unmap_region(region);
    }

    fn takes_registered(&self) -> bool {
        self.child.takes_registered()
    }

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        self.child.bitmaps()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::new(&self.name, "requests that the kernel serves would not be limited"))
    }
}

/// A throttle, and a channel's copy of its limits.
struct View {
    throttle: Arc<Throttle>,
    generation: Cell<u64>,
    rates: Cell<[Rate; LIMITS]>,
    is_unlimited: Cell<bool>,
}

impl View {
    fn new(throttle: Arc<Throttle>) -> View {
        let nothing = Limits::default().list();
        View { throttle, generation: Cell::new(0), rates: Cell::new(nothing), is_unlimited: Cell::new(true) }
    }

    /// Updates the copy; returns whether the limits have changed since the last call.
    #[inline]
    fn update(&self, now_ns: impl FnOnce() -> u64) -> bool {
        let generation = self.throttle.generation.load(Ordering::Acquire);
        if generation == self.generation.get() {
            return false;
        }
        self.generation.set(generation);
        let limits = self.throttle.limits();
        self.is_unlimited.set(limits.is_unlimited());
        self.rates.set(limits.list());
        self.throttle.forgive(generation, now_ns());
        true
    }

    /// Takes a turn of every limit; returns the time of the last one.
    fn take(&self, costs: [u64; LIMITS], now_ns: u64) -> u64 {
        self.limits(costs).map(|(bucket, rate, units)| bucket.take(rate, units, now_ns)).max().unwrap_or(0)
    }

    /// The time of the last turn if they were taken now; `None` without a limit.
    fn next(&self, costs: [u64; LIMITS], now_ns: u64) -> Option<u64> {
        self.limits(costs).map(|(bucket, rate, _)| bucket.next(rate, now_ns)).max()
    }

    /// The limits that apply to a request with these costs, each with its cost.
    #[inline]
    fn limits(&self, costs: [u64; LIMITS]) -> impl Iterator<Item = (&Bucket, Rate, u64)> {
        let limits = self.throttle.buckets.iter().zip(self.rates.get()).zip(costs);
        let limits = limits.map(|((bucket, rate), units)| (bucket, rate, units));
        limits.filter(|(_, rate, units)| !rate.is_unlimited() && *units > 0)
    }
}

struct QosChannel {
    child: Rc<dyn Channel>,
    device: Arc<dyn Device>,
    throttles: Vec<View>,
    floor: Option<View>,
    /// The first request in the line holds the only permit.
    line: Permits,
    /// The limits for which the last request waited that was first in the line.
    held_by: Cell<LimitOf>,
    waits: Arc<Waits>,
    core: Core,
}

impl QosChannel {
    /// Whether the limits of any throttle have changed.
    #[inline]
    fn update(&self) -> bool {
        // Every view must update its copy.
        let views = self.throttles.iter().chain(&self.floor);
        views.fold(false, |changed, view| view.update(|| self.core.now_ns()) | changed)
    }

    #[inline]
    fn is_unlimited(&self) -> bool {
        self.throttles.iter().all(|view| view.is_unlimited.get())
    }

    async fn carry_out(&self, req: &Request<'_>, offset: u64) -> IoResult {
        // A request that the device refuses costs nothing: its length may be any number.
        self.device.limits().check(req, offset)?;
        let submitted_ns = self.core.now_ns();
        let mut now_ns = submitted_ns;
        if !self.line.try_acquire(1) {
            self.line.acquire(1).await;
            now_ns = self.core.now_ns();
        }
        let released_ns = self.wait(costs(req), now_ns).await;
        if released_ns > submitted_ns {
            self.waits.add(self.held_by.get(), released_ns - submitted_ns);
        }
        self.line.release(1);
        self.child.submit(req, offset).await
    }

    /// Waits for the turn of the first request in the line; returns the time of its release.
    async fn wait(&self, costs: [u64; LIMITS], mut now_ns: u64) -> u64 {
        let mut turn_ns = self.take(costs, now_ns);
        while now_ns < turn_ns {
            self.core.sleep((turn_ns - now_ns).min(LOOK_NS)).await;
            now_ns = self.core.now_ns();
            if self.update() {
                turn_ns = self.take(costs, now_ns);
            }
        }
        if let Some(floor) = &self.floor
            && floor.next(costs, now_ns).is_some_and(|turn_ns| turn_ns <= now_ns)
        {
            floor.take(costs, now_ns);
        }
        now_ns
    }

    /// Takes a turn of every limit; returns the time of the last one.
    fn take(&self, costs: [u64; LIMITS], now_ns: u64) -> u64 {
        let (own, shared) = self.throttles.split_at(self.throttles.len().min(1));
        let turn = |views: &[View]| views.iter().map(|view| view.take(costs, now_ns)).max().unwrap_or(0);
        let (own, shared) = (turn(own), turn(shared));
        let floor = self.floor.as_ref().and_then(|floor| floor.next(costs, now_ns));
        let shared = floor.map_or(shared, |floor| shared.min(floor));
        let turn_ns = own.max(shared);
        if turn_ns > now_ns {
            self.held_by.set(if own >= shared { LimitOf::Device } else { LimitOf::Group });
        }
        turn_ns
    }
}

impl Channel for QosChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.update();
        let is_line_empty = self.line.waiting() == 0;
        if req.op == Op::Flush || (self.is_unlimited() && is_line_empty) {
            return self.child.submit(req, offset);
        }
        IoFuture::new(self.carry_out(req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.child.block_status(report, offset, len)
    }
}

#[cfg(test)]
mod tests;
