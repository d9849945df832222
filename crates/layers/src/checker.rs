//! Asserts the contract between two devices of a stack.
//!
//! Stands between layers, not on top: an export's client may send any request, and the topmost
//! device refuses invalid ones. An invalid request of a layer to its child is a bug of the layer:
//! the checker panics and names the request.

use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op,
    Request, StatusReport,
};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A device that checks the requests to its child.
pub struct Checker {
    child: Arc<dyn Device>,
}

impl Checker {
    /// Checks the requests to `child`, and has its name.
    pub fn new(child: Arc<dyn Device>) -> Checker {
        Checker { child }
    }
}

impl Device for Checker {
    fn name(&self) -> &str {
        self.child.name()
    }

    fn limits(&self) -> Limits {
        self.child.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let channel = self.child.open_channel()?;
        let (device, in_flight) = (self.child.clone(), Cell::new(0));
        let takes_registered = device.takes_registered();
        Ok(Rc::new(CheckerChannel { channel, device, takes_registered, in_flight }))
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
        self.child.kernel_backing()
    }
}

struct CheckerChannel {
    channel: Rc<dyn Channel>,
    device: Arc<dyn Device>,
    /// Whether the device took registered buffers when the channel was opened.
    takes_registered: bool,
    in_flight: Cell<usize>,
}

impl CheckerChannel {
    fn check(&self, req: &Request<'_>, offset: u64) {
        let (name, op, len) = (self.device.name(), req.op.name(), req.len);
        if let Err(error) = self.device.limits().check(req, offset) {
            panic!("{name}: {op} of {len} bytes at {offset}: {error}");
        }
        assert!(req.op != Op::Flush || len == 0, "{name}: flush of {len} bytes");
        assert!(req.op.has_data() || req.data.is_empty(), "{name}: {op} at {offset} carries memory");
        if req.data.is_registered() {
            let may_be = self.takes_registered || self.device.takes_registered();
            assert!(may_be, "{name}: {op} at {offset} carries a registered buffer, whose bytes it looks at");
            return;
        }
        let has_null = req.data.iter().any(|segment| segment.base.is_null());
        assert!(!has_null, "{name}: {op} of {len} bytes at {offset}: a segment is a null pointer");
    }
}

impl Channel for CheckerChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.check(req, offset);
        self.in_flight.set(self.in_flight.get() + 1);
        let child = self.channel.submit(req, offset);
        IoFuture::new(Checked { child, channel: self, op: req.op, len: req.len, offset, has_ended: false })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        let name = self.device.name();
        if let Err(error) = self.device.limits().check_range(offset, len) {
            panic!("{name}: status of {len} bytes at {offset}: {error}");
        }
        let (limits, before) = (self.device.limits(), report.covered());
        let child = self.channel.block_status(report, offset, len);
        IoFuture::new(async move {
            let result = child.await;
            let covered = report.covered() - before;
            let is_fit = covered > 0 && covered <= len && limits.check_range(0, covered).is_ok();
            assert!(result.is_err() || is_fit, "{name}: status of {len} bytes covers {covered}");
            result
        })
    }
}

impl Drop for CheckerChannel {
    fn drop(&mut self) {
        let (name, count) = (self.device.name(), self.in_flight.get());
        assert!(
            count == 0 || std::thread::panicking(),
            "{name}: channel closed with {count} requests in flight"
        );
    }
}

/// A request in flight.
struct Checked<'a> {
    child: IoFuture<'a>,
    channel: &'a CheckerChannel,
    op: Op,
    len: u64,
    offset: u64,
    has_ended: bool,
}

impl Checked<'_> {
    fn accuse(&self, what: &str) -> ! {
        let (name, op) = (self.channel.device.name(), self.op.name());
        panic!("{name}: {op} of {} bytes at {} {what}", self.len, self.offset);
    }
}

impl Future for Checked<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult> {
        if self.has_ended {
            self.accuse("was polled again after its end");
        }
        let result = Pin::new(&mut self.child).poll(cx);
        if result.is_ready() {
            self.has_ended = true;
            self.channel.in_flight.set(self.channel.in_flight.get() - 1);
        }
        result
    }
}

impl Drop for Checked<'_> {
    fn drop(&mut self) {
        if !self.has_ended && !std::thread::panicking() {
            self.accuse("was dropped in flight");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Flags;
    use conformance::Suite;
    use drivers::mem::{MemDevice, Options};
    use drivers::null::{self, NullDevice};

    #[test]
    fn it_passes_the_suite_but_for_what_the_caller_must_not_do() {
        let disk = MemDevice::new(&Options::new(64 << 20)).unwrap();
        Suite::new(Arc::new(Checker::new(Arc::new(disk)))).without_refusals().run();
    }

    fn submit(limits: null::Options, op: Op, offset: u64, len: u64) {
        reactor::run(async move {
            let device = Checker::new(Arc::new(NullDevice::new(&limits).unwrap()));
            let channel = device.open_channel().unwrap();
            let req = Request { op, ..Request::write_zeroes(len, Flags::NONE) };
            let _ = channel.submit(&req, offset).await;
        });
    }

    #[test]
    #[should_panic(expected = "null: write_zeroes of 512 bytes at 1048576: beyond the end of the device")]
    fn a_request_beyond_the_end_is_the_callers_fault() {
        submit(null::Options::new(1 << 20), Op::WriteZeroes, 1 << 20, 512);
    }

    #[test]
    #[should_panic(expected = "null: discard of 512 bytes at 100: not aligned")]
    fn a_misaligned_request_is_the_callers_fault() {
        submit(null::Options::new(1 << 20), Op::Discard, 100, 512);
    }

    #[test]
    #[should_panic(expected = "device is read-only")]
    fn a_write_to_a_read_only_device_is_the_callers_fault() {
        submit(null::Options { read_only: true, ..null::Options::new(1 << 20) }, Op::Discard, 0, 512);
    }

    #[test]
    #[should_panic(expected = "null: read of 512 bytes at 0: malformed request")]
    fn a_read_without_memory_is_the_callers_fault() {
        submit(null::Options::new(1 << 20), Op::Read, 0, 512);
    }

    #[test]
    #[should_panic(expected = "null: flush of 512 bytes")]
    fn a_flush_of_a_range_is_the_callers_fault() {
        submit(null::Options::new(1 << 20), Op::Flush, 0, 512);
    }

    #[test]
    #[should_panic(expected = "null: flush of 0 bytes at 0 was dropped in flight")]
    fn a_request_that_is_dropped_in_flight_is_the_callers_fault() {
        reactor::run(async {
            let slow = null::Options { latency_ns: 1_000_000, ..null::Options::new(1 << 20) };
            let device = Checker::new(Arc::new(NullDevice::new(&slow).unwrap()));
            let channel = device.open_channel().unwrap();
            drop(channel.submit(&Request::flush(), 0));
        });
    }

    #[test]
    #[should_panic(expected = "was polled again after its end")]
    fn a_future_that_is_polled_after_its_end_is_the_callers_fault() {
        reactor::run(async {
            let device = Checker::new(Arc::new(NullDevice::new(&null::Options::new(1 << 20)).unwrap()));
            let channel = device.open_channel().unwrap();
            let req = Request::flush();
            let mut future = channel.submit(&req, 0);
            (&mut future).await.unwrap();
            let _ = (&mut future).await;
        });
    }
}
