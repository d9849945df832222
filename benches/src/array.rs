//! Arrays under test, created and assembled by the library as `freestone array` does it.

use crate::member::{Drive, Member};
use block::{
    Channel, Device, DeviceError, Flags, IoFuture, KernelBacking, Limits, MemoryRegion, Op, Request,
    StatusReport,
};
use drivers::mem::{self, MemDevice};
use raid::admin::open::{Candidate, Wanted, select};
use raid::array::Array;
use raid::metadata::create::Identities;
use raid::metadata::{CreateOptions, Layout, Shape, create};
use raid::{Consistency, Level, Uuid};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Kind of an array's members.
#[derive(Clone, Copy, Debug)]
pub enum Members {
    /// Memory of this number of bytes, in huge pages.
    Memory(u64),
    /// This number of bytes, of which only metadata is stored, with the drive's limits on data and
    /// log.
    Hollow(u64, Drive),
}

/// An array.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// RAID level.
    pub level: Level,
    /// Number of members.
    pub count: usize,
    /// Kind of members.
    pub members: Members,
    /// `None` for the default.
    pub strip_bytes: Option<u32>,
    /// Consistency mode.
    pub consistency: Consistency,
}

/// A region as large as on members of some terabytes. The default for members as small as these is
/// 64 KiB, and a benchmark would measure the first writes of the write-intent bitmap.
pub const REGION_BYTES: u64 = 64 << 20;

impl Plan {
    fn shape(&self) -> Shape {
        Shape {
            strip_bytes: self.strip_bytes,
            consistency: Some(self.consistency),
            region_bytes: Some(REGION_BYTES),
            ..Shape::new("bench", self.level)
        }
    }

    /// A device that can be a member; `slot` names it.
    pub fn member(&self, slot: usize) -> Arc<dyn Device> {
        let name = format!("member{slot}");
        match self.members {
            Members::Memory(bytes) => {
                let inner = MemDevice::new(&mem::Options { huge_pages: true, ..mem::Options::new(bytes) })
                    .expect("memory");
                Arc::new(Named { name, inner })
            }
            Members::Hollow(bytes, drive) => {
                Arc::new(Member::new(name, bytes, self.hollow(bytes), drive).expect("a member"))
            }
        }
    }

    /// The place of log and data on a member of `bytes` bytes.
    pub fn hollow(&self, bytes: u64) -> Range<u64> {
        let uuid = Uuid::random().expect("randomness");
        let config = self.shape().config(uuid, self.count, bytes, 512).expect("a shape");
        let layout = Layout::new(bytes, &config).expect("it fits");
        layout.log_offset..layout.data_offset + layout.data_bytes
    }

    /// Creates the array and starts it. Must run on a core.
    pub async fn start(&self) -> Arc<Array> {
        self.start_on((0..self.count).map(|slot| self.member(slot)).collect()).await
    }

    /// Creates the array on `devices` and starts it. Must run on a core.
    pub async fn start_on(&self, devices: Vec<Arc<dyn Device>>) -> Arc<Array> {
        let options = CreateOptions {
            shape: self.shape(),
            force: true, // a hollow member returns old memory
            zeroes: true,
            owner: "bench".into(),
            now_ns: 1,
            identities: Identities::System,
        };
        create(&devices, &options).await.expect("it is made");
        let candidate = |device: &Arc<dyn Device>| Candidate {
            name: device.name().to_owned(),
            device: Ok(device.clone()),
            is_named: true,
        };
        let selection = select(devices.iter().map(candidate).collect(), &Wanted::default()).await;
        selection.expect("it assembles").start(2).await.expect("it starts")
    }
}

/// Memory with its own name, because an array refuses a device twice. It keeps its pages when it is
/// zeroed: a drive has no page faults, and a rebuild to fresh memory would measure the kernel.
struct Named {
    name: String,
    inner: MemDevice,
}

impl Device for Named {
    fn name(&self) -> &str {
        &self.name
    }
    fn limits(&self) -> Limits {
        Limits { max_discard: 0, ..self.inner.limits() }
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(NamedChannel(self.inner.open_channel()?)))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }
    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.inner.map_region(region)
    }
    fn unmap_region(&self, region: &MemoryRegion) {
        self.inner.unmap_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

struct NamedChannel(Rc<dyn Channel>);

impl Channel for NamedChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        match req.op {
            Op::WriteZeroes => IoFuture::new(async move {
                let keeping = Request::write_zeroes(req.len, req.flags.with(Flags::NO_UNMAP));
                self.0.submit(&keeping, offset).await
            }),
            _ => self.0.submit(req, offset),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}
