//! A member that keeps its metadata and has nothing behind its data and its log: what the engine costs by itself, or,
//! with ceilings, how much of its members' speed an array gets out of them.

use block::{Channel, Device, DeviceError, IoFuture, Limits, MemoryRegion, Op, Request};
use drivers::mem::{self, MemDevice};
use drivers::null::{self, NullDevice};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// See the module.
pub struct Member {
    metadata: MemDevice,
    data: NullDevice,
    /// What is not kept.
    hollow: Range<u64>,
}

/// What a member can do at most; 0 for no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ceiling {
    /// Requests a second.
    pub iops: u64,
    /// Bytes a second.
    pub bandwidth: u64,
}

impl Member {
    /// A member of `bytes` bytes that forgets what is written to `hollow`.
    pub fn new(bytes: u64, hollow: Range<u64>, ceiling: Ceiling) -> Result<Arc<Member>, DeviceError> {
        let Ceiling { iops, bandwidth } = ceiling;
        let latency_ns = if iops | bandwidth == 0 { 0 } else { 50_000 };
        let data = null::Options { iops, bandwidth, latency_ns, ..null::Options::new(bytes) };
        let metadata = MemDevice::new(&mem::Options::new(bytes))?;
        Ok(Arc::new(Member { metadata, data: NullDevice::new(&data)?, hollow }))
    }
}

impl Device for Member {
    fn name(&self) -> &str {
        "member"
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
}
