//! A device without storage: written data is discarded, and reads return zeroes or leave memory
//! unchanged. It measures the cost of the layers above. With a latency and a ceiling it models a
//! drive.
//!
//! ```text
//!   no latency, no ceiling:  submit ─► done
//!   otherwise:               submit ─► turn in the device's queue (one counter for all cores) ─► timer ─► done
//! ```

pub mod kind;

use block::{
    Channel, Device, DeviceError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op, Request,
    SharedLimits, Status, StatusReport,
};
use reactor::Core;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const NS_PER_SECOND: u64 = 1_000_000_000;

/// The configuration of a null device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Size in bytes; rounded down to whole blocks.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// Whether reads return zeroes; if not, they leave memory unchanged.
    pub zero: bool,
    /// Latency of every request in nanoseconds; 0: requests complete before `submit` returns.
    pub latency_ns: u64,
    /// Maximum requests per second over all cores; 0: no limit.
    pub iops: u64,
    /// Maximum bytes per second over all cores; 0: no limit. The lower of the two limits counts.
    pub bandwidth: u64,
}

impl Options {
    /// A device of `size` bytes that completes every request at once and leaves memory unchanged.
    pub fn new(size: u64) -> Options {
        Options { size, block_size: 512, read_only: false, zero: false, latency_ns: 0, iops: 0, bandwidth: 0 }
    }
}

/// A device without storage.
pub struct NullDevice {
    name: String,
    shared: Arc<Shared>,
}

struct Shared {
    limits: Arc<SharedLimits>,
    zero: bool,
    latency_ns: u64,
    /// Time between two requests at the request limit; 0 without.
    interval_ns: u64,
    /// Nanoseconds for 2^20 bytes at the bandwidth limit; 0 without.
    mebibyte_ns: u64,
    /// Earliest start of the next request, on the cores' clock.
    next_start_ns: AtomicU64,
}

impl NullDevice {
    /// Creates a device.
    ///
    /// # Errors
    /// When the block size is not a power of two from 512 to 65536, or the size is less than a
    /// block.
    pub fn new(options: &Options) -> Result<NullDevice, DeviceError> {
        let limits = crate::plain_limits("null", options.size, options.block_size)?;
        let shared = Shared {
            limits: SharedLimits::new(Limits { read_only: options.read_only, ..limits }),
            zero: options.zero,
            latency_ns: options.latency_ns,
            interval_ns: NS_PER_SECOND.checked_div(options.iops).map_or(0, |ns| ns.max(1)),
            mebibyte_ns: (NS_PER_SECOND << 20).checked_div(options.bandwidth).map_or(0, |ns| ns.max(1)),
            next_start_ns: AtomicU64::new(0),
        };
        Ok(NullDevice { name: "null".into(), shared: Arc::new(shared) })
    }

    /// Changes the size; rounded down to whole blocks.
    pub fn resize(&self, size: u64) {
        self.shared.limits.set_capacity(size);
    }
}

impl Device for NullDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.shared.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(NullChannel { shared: self.shared.clone(), core: reactor::current() }))
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

struct NullChannel {
    shared: Arc<Shared>,
    core: Core,
}

impl NullChannel {
    /// The completion time of a request submitted now, on the cores' clock.
    fn due_ns(&self, now_ns: u64, len: u64) -> u64 {
        let shared = &*self.shared;
        if shared.interval_ns | shared.mebibyte_ns == 0 {
            return now_ns + shared.latency_ns;
        }
        let bytes_ns = ((u128::from(len) * u128::from(shared.mebibyte_ns)) >> 20) as u64;
        let turn = |next: u64| Some(next.max(now_ns) + shared.interval_ns.max(bytes_ns));
        let before = shared
            .next_start_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, turn)
            .expect("the update never gives up");
        before.max(now_ns) + shared.latency_ns
    }

    async fn wait(&self, now_ns: u64, due_ns: u64) -> IoResult {
        if due_ns > now_ns {
            self.core.sleep(due_ns - now_ns).await;
        }
        Ok(())
    }
}

impl Channel for NullChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.shared.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        if self.shared.zero && req.op == Op::Read {
            req.data.fill(0);
        }
        if self.shared.latency_ns | self.shared.interval_ns | self.shared.mebibyte_ns == 0 {
            return IoFuture::ready(Ok(()));
        }
        let now_ns = self.core.now_ns();
        IoFuture::new(self.wait(now_ns, self.due_ns(now_ns, if req.op.has_data() { req.len } else { 0 })))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        let status = if self.shared.zero { Status::ZERO_HOLE } else { Status::DATA };
        let checked = self.shared.limits.check_range(offset, len);
        if checked.is_ok() {
            report.push(len, status);
        }
        IoFuture::ready(checked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Flags, join_all};
    use conformance::Suite;

    #[test]
    fn it_passes_the_suite_as_far_as_a_device_without_memory_can() {
        let device = Arc::new(NullDevice::new(&Options::new(64 << 20)).unwrap());
        let grown = device.clone();
        Suite::new(device).without_data().on_grow(move || grown.resize(65 << 20)).run();
    }

    #[test]
    fn it_passes_the_suite_with_a_latency() {
        let slow = Options { latency_ns: 20_000, block_size: 4096, ..Options::new(64 << 20) };
        Suite::new(Arc::new(NullDevice::new(&slow).unwrap())).without_data().run();
    }

    #[test]
    fn it_passes_the_suite_read_only() {
        let options = Options { read_only: true, zero: true, ..Options::new(1 << 20) };
        Suite::new(Arc::new(NullDevice::new(&options).unwrap())).without_data().run();
    }

    fn run(options: Options, requests: usize) -> u64 {
        reactor::run_simulated(1, |_| async move {
            let device = NullDevice::new(&options).unwrap();
            let channel = device.open_channel().unwrap();
            let start = reactor::current().now_ns();
            let req = Request::write_zeroes(512, Flags::NONE);
            join_all((0..requests).map(|_| channel.submit(&req, 0))).await.unwrap();
            reactor::current().now_ns() - start
        })
    }

    #[test]
    fn a_latency_is_the_same_for_each_of_many_requests_at_once() {
        assert_eq!(run(Options { latency_ns: 80_000, ..Options::new(1 << 20) }, 16), 80_000);
    }

    #[test]
    fn a_ceiling_spaces_the_requests_and_the_latency_comes_on_top() {
        let options = Options { latency_ns: 80_000, iops: 100_000, ..Options::new(1 << 20) };
        assert_eq!(run(options, 16), 15 * 10_000 + 80_000);
    }

    #[test]
    fn a_bandwidth_spaces_requests_by_their_length() {
        let elapsed = reactor::run_simulated(1, |_| async move {
            let device = NullDevice::new(&Options { bandwidth: 1 << 30, ..Options::new(1 << 20) }).unwrap();
            let channel = device.open_channel().unwrap();
            for _ in 0..9 {
                let buffer = reactor::current().buffers().take(1 << 20).await;
                buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await.1.unwrap();
            }
            // The first one starts at once, each later one at its turn.
            reactor::current().now_ns()
        });
        assert_eq!(elapsed, 8 * 976_562);
    }

    #[test]
    fn without_both_a_request_takes_no_time() {
        assert_eq!(run(Options::new(1 << 20), 16), 0);
    }
}
