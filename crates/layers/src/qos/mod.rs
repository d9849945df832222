//! Quality of service: how many requests and bytes a second a device takes, or a group of devices together.
//!
//! ```text
//!   submit ─► nothing is limited: the child's own future
//!             else ─► the channel's line: one at a time asks every bucket for its turn ─► child
//! ```
//!
//! Requests of a channel begin in the order in which they came. Only the first of the line has taken its turn, so limits
//! that change (from a control thread, at any time) hold at once for all that wait. Buckets are shared by all cores,
//! and those of a group by all its devices. As in QEMU's throttling discards and written zeroes count as writes of
//! their length, and a flush counts nothing: it is how a client makes sure, not how it makes load.
//!
//! A device of a group may have a *floor*: what it gets of the group's limits, whatever the others take. Its requests within
//! the floor do not wait for the group's turn; they take it all the same, so the others pay, and the group's limits hold.

mod bucket;

pub use bucket::Rate;

use block::{
    Channel, Device, DeviceError, IoFuture, IoResult, Limits as DeviceLimits, MemoryRegion, Op, Request,
};
use bucket::Bucket;
use reactor::{Core, Permits};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest sleep until somebody who waits looks whether the limits have changed.
const LOOK_NS: u64 = 20_000_000;

/// What a device, or a group, may take. All of them hold at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests of every kind but flushes.
    pub iops: Rate,
    /// Reads.
    pub read_iops: Rate,
    /// Writes, discards and written zeroes.
    pub write_iops: Rate,
    /// Bytes of all of them.
    pub bandwidth: Rate,
    /// Bytes that are read.
    pub read_bandwidth: Rate,
    /// Bytes that are written, discarded or zeroed.
    pub write_bandwidth: Rate,
}

/// How many limits there are.
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

/// What a request costs of each of [`Limits::list`].
fn costs(req: &Request<'_>) -> [u64; LIMITS] {
    match req.op {
        Op::Read => [1, 1, 0, req.len, req.len, 0],
        _ => [1, 0, 1, req.len, 0, req.len],
    }
}

/// Limits, and what has been taken of them. Shared by the cores of a device, and by the devices of a group.
#[derive(Debug, Default)]
pub struct Throttle {
    /// Grows with every change of the limits.
    generation: AtomicU64,
    /// The last change for which the buckets were emptied of what was taken in advance.
    forgiven: AtomicU64,
    limits: Mutex<Limits>,
    buckets: [Bucket; LIMITS],
    waited: AtomicU64,
    waited_ns: AtomicU64,
}

impl Throttle {
    /// With these limits, from now on.
    pub fn new(limits: Limits) -> Throttle {
        Throttle { limits: Mutex::new(limits), generation: AtomicU64::new(1), ..Throttle::default() }
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the limits, for all that wait too.
    pub fn set(&self, limits: Limits) {
        let mut own = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        *own = limits;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// How many requests have waited, and for how long together, in nanoseconds.
    pub fn waited(&self) -> (u64, u64) {
        (self.waited.load(Ordering::Relaxed), self.waited_ns.load(Ordering::Relaxed))
    }

    /// What was taken at the old rates is not paid for at the new ones.
    fn forgive(&self, generation: u64, now_ns: u64) {
        if self.forgiven.fetch_max(generation, Ordering::Relaxed) < generation {
            self.buckets.iter().for_each(|bucket| bucket.forgive(now_ns));
        }
    }

    fn note(&self, ns: u64) {
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.waited_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

/// A device that takes no more than it may.
pub struct Qos {
    name: String,
    child: Arc<dyn Device>,
    throttles: Vec<Arc<Throttle>>,
    floor: Option<Arc<Throttle>>,
}

impl Qos {
    /// `child`, which takes what every one of `throttles` allows: its own, that of its group, …
    pub fn new(child: Arc<dyn Device>, throttles: Vec<Arc<Throttle>>) -> Qos {
        Qos { name: format!("qos({})", child.name()), child, throttles, floor: None }
    }

    /// The same, with what it gets of all throttles but the first whatever others take of them. A floor without limits is
    /// none.
    pub fn with_floor(self, floor: Arc<Throttle>) -> Qos {
        Qos { floor: Some(floor), ..self }
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
}

/// A throttle, and what a channel knows of its limits.
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

    /// Whether the limits have changed since this was asked last.
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

    /// Takes a turn of every limit; when the last of them comes.
    fn take(&self, costs: [u64; LIMITS], now_ns: u64) -> u64 {
        self.limits(costs).map(|(bucket, rate, units)| bucket.take(rate, units, now_ns)).max().unwrap_or(0)
    }

    /// When turns that were taken now would come, of the limits that there are.
    fn next(&self, costs: [u64; LIMITS], now_ns: u64) -> Option<u64> {
        self.limits(costs).map(|(bucket, rate, _)| bucket.next(rate, now_ns)).max()
    }

    /// The limits that there are for what costs something, and how much that is.
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
    /// Who is first has this.
    line: Permits,
    core: Core,
}

impl QosChannel {
    /// Whether the limits of any throttle have changed.
    #[inline]
    fn update(&self) -> bool {
        // Every one of them has to look.
        let views = self.throttles.iter().chain(&self.floor);
        views.fold(false, |changed, view| view.update(|| self.core.now_ns()) | changed)
    }

    #[inline]
    fn is_unlimited(&self) -> bool {
        self.throttles.iter().all(|view| view.is_unlimited.get())
    }

    async fn carry_out(&self, req: &Request<'_>, offset: u64) -> IoResult {
        // One that the device refuses costs nothing: it may ask for more bytes than there are.
        self.device.limits().check(req, offset)?;
        self.line.acquire(1).await;
        self.wait(costs(req)).await;
        self.line.release(1);
        self.child.submit(req, offset).await
    }

    /// Waits for the turn of the first in the line.
    async fn wait(&self, costs: [u64; LIMITS]) {
        let begin_ns = self.core.now_ns();
        let mut now_ns = begin_ns;
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
        if now_ns > begin_ns {
            self.throttles.iter().for_each(|view| view.throttle.note(now_ns - begin_ns));
        }
    }

    fn take(&self, costs: [u64; LIMITS], now_ns: u64) -> u64 {
        let (own, shared) = self.throttles.split_at(self.throttles.len().min(1));
        let turn = |views: &[View]| views.iter().map(|view| view.take(costs, now_ns)).max().unwrap_or(0);
        let (own, shared) = (turn(own), turn(shared));
        let floor = self.floor.as_ref().and_then(|floor| floor.next(costs, now_ns));
        own.max(floor.map_or(shared, |floor| shared.min(floor)))
    }
}

impl Channel for QosChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.update();
        let nobody_waits = self.line.waiting() == 0;
        if req.op == Op::Flush || (self.is_unlimited() && nobody_waits) {
            return self.child.submit(req, offset);
        }
        IoFuture::new(self.carry_out(req, offset))
    }
}

#[cfg(test)]
mod tests;
