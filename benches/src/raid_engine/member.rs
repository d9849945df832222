//! A member that keeps its metadata and has nothing behind its data and its log: what the engine costs by itself, or,
//! with ceilings, how much of its members' speed an array gets out of them.

use block::{Channel, Device, DeviceError, IoFuture, Limits, MemoryRegion, Op, Request};
use drivers::mem::{self, MemDevice};
use drivers::null::{self, NullDevice};
use std::ops::Range;
use std::rc::Rc;

/// See the module.
pub struct Member {
    name: String,
    metadata: MemDevice,
    data: NullDevice,
    /// What is not kept.
    hollow: Range<u64>,
}

/// What a member can do at most; 0 for no limit. A request also waits for those before it, whatever they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drive {
    /// Requests a second.
    pub iops: u64,
    /// Bytes a second.
    pub bandwidth: u64,
    /// How long a request takes when the drive is idle, in nanoseconds.
    pub latency_ns: u64,
}

impl Member {
    /// A member of `bytes` bytes that forgets what is written to `hollow`.
    ///
    /// # Errors
    /// When there is not enough address space.
    pub fn new(name: String, bytes: u64, hollow: Range<u64>, drive: Drive) -> Result<Member, DeviceError> {
        let Drive { iops, bandwidth, latency_ns } = drive;
        let data = null::Options { iops, bandwidth, latency_ns, ..null::Options::new(bytes) };
        let metadata = MemDevice::new(&mem::Options::new(bytes))?;
        Ok(Member { name, metadata, data: NullDevice::new(&data)?, hollow })
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
