//! A file as a device whose requests take as long as a test wants, or until it lets them go. The
//! file survives its server.

use block::{
    Channel, Device, DeviceError, IoError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op,
    Request, Status, StatusReport,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Held requests end after this time, so that a test that fails while it holds them ends.
const LONGEST_HOLD: Duration = Duration::from_secs(90);

/// How often a held request looks whether it may go.
const LOOK_NS: u64 = 200_000;

/// The byte that a fresh device has at `offset`.
pub fn pattern(offset: u64) -> u8 {
    (offset / 512).wrapping_mul(7).wrapping_add(offset % 251) as u8
}

/// See the module.
pub struct SlowDevice {
    shared: Arc<Shared>,
}

struct Shared {
    file: File,
    limits: Mutex<Limits>,
    delay_ns: AtomicU64,
    /// The number of holds, and of those that are over. Requests are held that come during one.
    holds: AtomicUsize,
    over: AtomicUsize,
    is_holding: AtomicBool,
    flushes: AtomicUsize,
    fua_writes: AtomicUsize,
    /// Writes of memory that is not stable, and of memory that is.
    writes: [AtomicUsize; 2],
    executed: AtomicUsize,
    in_flight: AtomicUsize,
    regions: Mutex<Vec<MemoryRegion>>,
    /// A byte offset whose requests fail, and how.
    fault: Mutex<Option<(u64, IoError)>>,
    /// The end and the status of each extent, in order.
    extents: Mutex<Vec<(u64, Status)>>,
}

impl SlowDevice {
    /// A device of `len` bytes with a volatile cache, which has [`pattern`] everywhere.
    pub fn new(len: u64) -> SlowDevice {
        SlowDevice::with_limits(Limits { volatile_cache: true, ..Limits::new(len) })
    }

    /// As [`SlowDevice::new`], with these limits.
    pub fn with_limits(limits: Limits) -> SlowDevice {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..limits.capacity).map(pattern).collect();
        file.write_all_at(&bytes, 0).unwrap();
        SlowDevice::over(file, limits)
    }

    /// The device that an earlier one has left behind.
    pub fn reopen(path: &Path) -> SlowDevice {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let capacity = file.metadata().unwrap().len();
        SlowDevice::over(file, Limits { volatile_cache: true, ..Limits::new(capacity) })
    }

    fn over(file: File, limits: Limits) -> SlowDevice {
        let shared = Shared {
            file,
            limits: Mutex::new(limits),
            delay_ns: AtomicU64::new(0),
            holds: AtomicUsize::new(0),
            over: AtomicUsize::new(0),
            is_holding: AtomicBool::new(false),
            flushes: AtomicUsize::new(0),
            fua_writes: AtomicUsize::new(0),
            writes: Default::default(),
            executed: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            regions: Mutex::default(),
            fault: Mutex::default(),
            extents: Mutex::default(),
        };
        SlowDevice { shared: Arc::new(shared) }
    }

    /// Every request waits that long first; 0 completes at once.
    pub fn slow(self, delay_ns: u64) -> SlowDevice {
        self.set_delay(delay_ns);
        self
    }

    /// Requests are held from the start, see [`SlowDevice::hold`].
    pub fn held(self) -> SlowDevice {
        self.hold();
        self
    }

    /// Sets the time that every request waits first; 0 completes at once.
    pub fn set_delay(&self, delay_ns: u64) {
        self.shared.delay_ns.store(delay_ns, Ordering::Relaxed);
    }

    /// Requests that come from now on stay in flight until [`SlowDevice::release`].
    pub fn hold(&self) {
        self.shared.holds.fetch_add(1, Ordering::Relaxed);
        self.shared.is_holding.store(true, Ordering::Relaxed);
    }

    /// Requests that come from now on are not held; those that are held stay so.
    pub fn let_pass(&self) {
        self.shared.is_holding.store(false, Ordering::Relaxed);
    }

    /// Carries out the requests that are held, and holds no more.
    pub fn release(&self) {
        self.shared.release();
    }

    /// Releases soon, so that a call that waits for held requests can begin before that.
    pub fn release_soon(&self) {
        let shared = self.shared.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            shared.release();
        });
    }

    /// Changes the capacity.
    pub fn grow(&self, capacity: u64) {
        self.shared.file.set_len(capacity).unwrap();
        self.shared.limits.lock().unwrap().capacity = capacity;
    }

    /// Fails requests that contain the byte at `offset` with this error.
    pub fn fail_at(&self, offset: u64, error: IoError) {
        *self.shared.fault.lock().unwrap() = Some((offset, error));
    }

    /// Reports these extents, each with its end and its status, one in an answer; data behind them.
    pub fn report(&self, extents: &[(u64, Status)]) {
        *self.shared.extents.lock().unwrap() = extents.to_vec();
    }

    /// The stored bytes.
    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.shared.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// Flushes that have been carried out.
    pub fn flushes(&self) -> usize {
        self.shared.flushes.load(Ordering::Relaxed)
    }

    /// Requests with FUA that have been carried out.
    pub fn fua_writes(&self) -> usize {
        self.shared.fua_writes.load(Ordering::Relaxed)
    }

    /// Writes of stable memory, and of memory that a client may change.
    pub fn stable_and_other_writes(&self) -> (usize, usize) {
        let [other, stable] = &self.shared.writes;
        (stable.load(Ordering::Relaxed), other.load(Ordering::Relaxed))
    }

    /// Requests that have been carried out.
    pub fn executed(&self) -> usize {
        self.shared.executed.load(Ordering::Relaxed)
    }

    /// Requests that wait for their delay or for a release.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Relaxed)
    }

    /// The regions of memory that are mapped at present.
    pub fn regions(&self) -> Vec<MemoryRegion> {
        self.shared.regions.lock().unwrap().clone()
    }
}

impl Device for SlowDevice {
    fn name(&self) -> &str {
        "slow"
    }

    fn limits(&self) -> Limits {
        self.shared.limits.lock().unwrap().clone()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(SlowChannel { shared: self.shared.clone() }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.shared.regions.lock().unwrap().push(*region);
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        let mut regions = self.shared.regions.lock().unwrap();
        let place = regions.iter().position(|r| r == region).expect("a region is unmapped once");
        regions.remove(place);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

struct SlowChannel {
    shared: Arc<Shared>,
}

impl Channel for SlowChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let delay_ns = self.shared.delay_ns.load(Ordering::Relaxed);
        let hold = self.shared.hold();
        if delay_ns == 0 && hold.is_none() {
            return IoFuture::ready(self.shared.execute(req, offset));
        }
        IoFuture::new(async move {
            self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
            if delay_ns > 0 {
                reactor::current().sleep(delay_ns).await;
            }
            if let Some(hold) = hold {
                self.shared.wait_for_the_end_of(hold).await;
            }
            let result = self.shared.execute(req, offset);
            self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
            result
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        if let Some((at, error)) = *self.shared.fault.lock().unwrap()
            && (offset..offset + len).contains(&at)
        {
            return IoFuture::ready(Err(error));
        }
        let extents = self.shared.extents.lock().unwrap();
        match extents.iter().find(|(end, _)| *end > offset) {
            Some((end, status)) => {
                report.push(len.min(end - offset), *status);
                IoFuture::ready(Ok(()))
            }
            None => report.answer_data(len),
        }
    }
}

impl Shared {
    /// The hold that is on.
    fn hold(&self) -> Option<usize> {
        self.is_holding.load(Ordering::Relaxed).then(|| self.holds.load(Ordering::Relaxed))
    }

    async fn wait_for_the_end_of(&self, hold: usize) {
        let begin = Instant::now();
        while self.over.load(Ordering::Relaxed) < hold && begin.elapsed() < LONGEST_HOLD {
            reactor::current().sleep(LOOK_NS).await;
        }
    }

    fn release(&self) {
        self.is_holding.store(false, Ordering::Relaxed);
        self.over.store(self.holds.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn execute(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.executed.fetch_add(1, Ordering::Relaxed);
        self.limits.lock().unwrap().check(req, offset)?;
        if let Some((at, error)) = *self.fault.lock().unwrap()
            && req.op != Op::Flush
            && (offset..offset + req.len).contains(&at)
        {
            return Err(error);
        }
        if req.is_fua() && req.op.is_modifying() {
            self.fua_writes.fetch_add(1, Ordering::Relaxed);
        }
        if req.op == Op::Write {
            self.writes[usize::from(req.data.is_stable())].fetch_add(1, Ordering::Relaxed);
        }
        let mut bytes = vec![0; req.len as usize];
        match req.op {
            Op::Read => {
                self.file.read_exact_at(&mut bytes, offset).unwrap();
                req.data.copy_from(&bytes);
                return Ok(());
            }
            Op::Write => drop(req.data.copy_to(&mut bytes)),
            Op::WriteZeroes => {}
            Op::Discard => bytes.fill(0xdd),
            Op::Flush => drop(self.flushes.fetch_add(1, Ordering::Relaxed)),
        }
        self.file.write_all_at(&bytes, offset).unwrap();
        Ok(())
    }
}
