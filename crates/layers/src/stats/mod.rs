//! Counters and latency of requests.
//!
//! Each channel has its own counters, which only its core writes. Control threads read them at any
//! time and add them up. The data path takes no lock and shares no cache line.

mod histogram;
pub mod kind;

pub use histogram::Histogram;

use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op,
    Request, StatusReport,
};
use histogram::Buckets;
use reactor::Core;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A device whose requests are counted.
pub struct Stats {
    name: String,
    child: Arc<dyn Device>,
    book: Arc<Book>,
    /// One request in this many is timed.
    every: u32,
}

impl Stats {
    /// Counts and times all requests to `child`.
    pub fn new(child: Arc<dyn Device>) -> Stats {
        Stats { name: format!("stats({})", child.name()), child, book: Arc::default(), every: 1 }
    }

    /// As [`Stats::new`], at a cost of a few instructions a request. One request in `every` is
    /// timed, and its error counted; the others count as successful when they are submitted. The
    /// layer has its child's name.
    ///
    /// # Panics
    /// If `every` is 0.
    pub fn sampled(child: Arc<dyn Device>, every: u32) -> Stats {
        assert!(every > 0, "of no requests none can be timed");
        Stats { name: child.name().to_owned(), child, book: Arc::default(), every }
    }

    /// One request in this many is timed.
    pub fn every(&self) -> u32 {
        self.every
    }

    /// The counters of all channels so far, including closed ones.
    pub fn snapshot(&self) -> Snapshot {
        self.book.snapshot()
    }
}

impl Device for Stats {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.child.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let child = self.child.open_channel()?;
        let counters = self.book.open();
        let (every, until_timed) = (self.every, Cell::new(0));
        Ok(Rc::new(StatsChannel {
            child,
            counters,
            book: self.book.clone(),
            core: reactor::current(),
            every,
            until_timed,
        }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
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
        Err(DeviceError::new(&self.name, "requests that the kernel serves would not be counted"))
    }
}

/// The counters of all channels, added up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    ops: [OpSnapshot; Op::ALL.len()],
}

/// The counters of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpSnapshot {
    /// Requests submitted.
    pub submitted: u64,
    /// Requests completed, with or without an error.
    pub completed: u64,
    /// Requests completed with an error.
    pub errors: u64,
    /// Bytes of the requests completed without an error.
    pub bytes: u64,
    /// Nanoseconds from submission to completion.
    pub latency_ns: Histogram,
}

impl Snapshot {
    /// The counters of `op`.
    pub fn of(&self, op: Op) -> &OpSnapshot {
        &self.ops[op as usize]
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u64 {
        // The counters change while they are read: a request's end may be counted before its start.
        self.ops.iter().map(|op| op.submitted.saturating_sub(op.completed)).sum()
    }

    fn add(&mut self, counters: &Counters) {
        for (sum, op) in self.ops.iter_mut().zip(&counters.0) {
            sum.completed += op.completed.get();
            sum.submitted += op.submitted.get();
            sum.errors += op.errors.get();
            sum.bytes += op.bytes.get();
            op.latency.add_to(&mut sum.latency_ns);
        }
    }
}

/// The counters of all channels. Locked by control threads and by channels that open or close.
#[derive(Default)]
pub(crate) struct Book(Mutex<Pages>);

#[derive(Default)]
struct Pages {
    open: Vec<Arc<Counters>>,
    closed: Snapshot,
}

impl Book {
    /// The counters of all channels so far, including closed ones.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.open.iter().fold(book.closed.clone(), |mut sum, counters| {
            sum.add(counters);
            sum
        })
    }

    pub(crate) fn open(&self) -> Arc<Counters> {
        let counters = Arc::new(Counters::default());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).open.push(counters.clone());
        counters
    }

    pub(crate) fn close(&self, counters: &Arc<Counters>) {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pages.open.retain(|c| !Arc::ptr_eq(c, counters));
        pages.closed.add(counters);
    }
}

/// One channel's counters.
#[derive(Default)]
pub(crate) struct Counters([OpCounters; Op::ALL.len()]);

impl Counters {
    /// Counts the start of a request.
    #[inline]
    pub(crate) fn begin(&self, op: Op) {
        self.0[op as usize].submitted.add(1);
    }

    /// Counts the end of a request of `len` bytes.
    #[inline]
    pub(crate) fn end(&self, op: Op, len: u64, latency_ns: u64, result: IoResult) {
        let counters = &self.0[op as usize];
        counters.latency.count(latency_ns);
        match result {
            Ok(()) => counters.bytes.add(len),
            Err(_) => counters.errors.add(1),
        }
        counters.completed.add(1);
    }

    /// Requests in flight. Exact on the channel's core.
    pub(crate) fn in_flight(&self) -> u64 {
        self.0.iter().map(|op| op.submitted.get() - op.completed.get()).sum()
    }
}

/// On cache lines of its own, because another core uses the neighbouring counters.
#[derive(Default)]
#[repr(align(128))]
struct OpCounters {
    submitted: Counter,
    completed: Counter,
    errors: Counter,
    bytes: Counter,
    latency: Buckets,
}

/// A number that one thread writes and others read.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        // Only one thread writes, so this loses nothing and needs no locked instruction.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct StatsChannel {
    child: Rc<dyn Channel>,
    counters: Arc<Counters>,
    book: Arc<Book>,
    core: Core,
    every: u32,
    /// Requests that are not timed before the next one that is.
    until_timed: Cell<u32>,
}

impl Channel for StatsChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let (op, len) = (req.op, req.len);
        self.counters.begin(op);
        if let Some(left) = self.until_timed.get().checked_sub(1) {
            self.until_timed.set(left);
            let counters = &self.counters.0[op as usize];
            counters.completed.add(1);
            counters.bytes.add(len);
            return self.child.submit(req, offset);
        }
        self.until_timed.set(self.every - 1);
        let stopwatch = self.core.stopwatch();
        let child = self.child.submit(req, offset);
        IoFuture::new(async move {
            let result = child.await;
            self.counters.end(op, len, self.core.elapsed_ns(&stopwatch), result);
            result
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.child.block_status(report, offset, len)
    }
}

impl Drop for StatsChannel {
    fn drop(&mut self) {
        self.book.close(&self.counters);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Flags, IoError};
    use conformance::Suite;
    use drivers::mem::{self, MemDevice};
    use drivers::null::{NullDevice, Options};

    #[test]
    fn it_passes_the_suite_and_has_counted_it() {
        let stats = Arc::new(Stats::new(Arc::new(MemDevice::new(&mem::Options::new(64 << 20)).unwrap())));
        Suite::new(stats.clone()).run();
        let snapshot = stats.snapshot();
        assert_eq!(snapshot.in_flight(), 0);
        assert!(snapshot.of(Op::Read).completed > 1000 && snapshot.of(Op::Read).errors > 0);
        assert!(stats.book.0.lock().unwrap().open.is_empty(), "closed channels are added up");
    }

    #[test]
    fn a_sample_counts_all_and_times_some() {
        let child: Arc<dyn Device> = Arc::new(MemDevice::new(&mem::Options::new(64 << 20)).unwrap());
        let stats = Arc::new(Stats::sampled(child.clone(), 7));
        assert_eq!((stats.name(), stats.every()), (child.name(), 7));
        Suite::new(stats).run();
        let snapshot = reactor::run_simulated(1, |_| async {
            let options = Options { latency_ns: 80_000, ..Options::new(1 << 20) };
            let stats = Stats::sampled(Arc::new(NullDevice::new(&options).unwrap()), 10);
            let channel = stats.open_channel().unwrap();
            let req = Request::write_zeroes(4096, Flags::NONE);
            for _ in 0..100 {
                channel.submit(&req, 0).await.unwrap();
            }
            stats.snapshot()
        });
        let zeroes = snapshot.of(Op::WriteZeroes);
        assert_eq!((zeroes.completed, zeroes.bytes, zeroes.latency_ns.count()), (100, 100 * 4096, 10));
        assert!((75_000..=85_000).contains(&zeroes.latency_ns.percentile(50.0)));
    }

    #[test]
    fn each_operation_is_counted_with_its_bytes_errors_and_latency() {
        let snapshot = reactor::run_simulated(1, |_| async {
            let options = Options { latency_ns: 80_000, ..Options::new(1 << 20) };
            let stats = Stats::new(Arc::new(NullDevice::new(&options).unwrap()));
            let channel = stats.open_channel().unwrap();
            let req = Request::write_zeroes(4096, Flags::NONE);
            for _ in 0..3 {
                let future = channel.submit(&req, 0);
                assert_eq!(stats.snapshot().in_flight(), 1);
                future.await.unwrap();
            }
            assert_eq!(channel.submit(&req, 1 << 20).await, Err(IoError::OutOfRange));
            channel.submit(&Request::flush(), 0).await.unwrap();
            stats.snapshot()
        });
        let zeroes = snapshot.of(Op::WriteZeroes);
        assert_eq!((zeroes.submitted, zeroes.completed, zeroes.errors, zeroes.bytes), (4, 4, 1, 3 * 4096));
        assert!((75_000..=85_000).contains(&zeroes.latency_ns.percentile(99.0)));
        assert_eq!(zeroes.latency_ns.percentile(10.0), 0, "the refusal took no time");
        assert_eq!(snapshot.of(Op::Flush).completed, 1);
        assert_eq!(snapshot.of(Op::Read), &OpSnapshot::default());
    }
}
