//! A member that stores its metadata and discards its data and its log. It measures the cost of the
//! engine alone or, with limits, the share of its members' speed that an array uses.

use block::{
    Channel, Device, DeviceError, IoFuture, KernelBacking, Limits, MemoryRegion, Op, Request, StatusReport,
};
use drivers::mem::{self, MemDevice};
use drivers::null::{self, NullDevice};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The member of the module.
pub struct Member {
    name: String,
    metadata: MemDevice,
    data: Arc<dyn Device>,
    /// Bytes that are not stored.
    hollow: Range<u64>,
}

/// Limits of a member; 0 for no limit. A request also waits for all earlier ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drive {
    /// Requests per second.
    pub iops: u64,
    /// Bytes per second.
    pub bandwidth: u64,
    /// Latency of a request on an idle drive, in nanoseconds.
    pub latency_ns: u64,
}

impl Member {
    /// A member of `bytes` bytes that discards writes to `hollow`.
    ///
    /// # Errors
    /// When address space is lacking.
    pub fn new(name: String, bytes: u64, hollow: Range<u64>, drive: Drive) -> Result<Member, DeviceError> {
        let Drive { iops, bandwidth, latency_ns } = drive;
        let data = null::Options { iops, bandwidth, latency_ns, ..null::Options::new(bytes) };
        Member::over(Arc::new(NullDevice::new(&data)?), name, bytes, hollow)
    }

    /// A member that passes requests to `hollow` to the device `data`.
    ///
    /// # Errors
    /// When address space is lacking.
    pub fn over(
        data: Arc<dyn Device>,
        name: String,
        bytes: u64,
        hollow: Range<u64>,
    ) -> Result<Member, DeviceError> {
        Ok(Member { name, metadata: MemDevice::new(&mem::Options::new(bytes))?, data, hollow })
    }
}

impl Device for Member {
    fn name(&self) -> &str {
        &self.name
    }
    fn limits(&self) -> Limits {
        self.metadata.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let (metadata, data) = (self.metadata.open_channel()?, self.data.open_channel()?);
        Ok(Rc::new(MemberChannel { metadata, data, hollow: self.hollow.clone() }))
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

struct MemberChannel {
    metadata: Rc<dyn Channel>,
    data: Rc<dyn Channel>,
    hollow: Range<u64>,
}

impl Channel for MemberChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let is_hollow = req.op != Op::Flush && self.hollow.contains(&offset);
        if is_hollow { self.data.submit(req, offset) } else { self.metadata.submit(req, offset) }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}
