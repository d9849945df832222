//! Arrays to be measured, made and assembled by the library as `freestone array` does it.

use super::member::{Drive, Member};
use block::{Channel, Device, DeviceError, Flags, IoFuture, Limits, MemoryRegion, Op, Request};
use drivers::mem::{self, MemDevice};
use raid::admin::open::{Candidate, Wanted, select};
use raid::array::Array;
use raid::metadata::create::Identities;
use raid::metadata::{CreateOptions, Layout, Shape, create};
use raid::{Consistency, Level, Uuid};
use std::rc::Rc;
use std::sync::Arc;

/// What the members of an array are.
#[derive(Clone, Copy, Debug)]
pub enum Members {
    /// So many bytes of memory.
    Memory(u64),
    /// So many bytes of which only metadata is kept, with the drive's ceilings on data and log.
    Hollow(u64, Drive),
}

/// An array.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Its level.
    pub level: Level,
    /// How many members it has.
    pub count: usize,
    /// What they are.
    pub members: Members,
    /// `None` for the default.
    pub strip_bytes: Option<u32>,
    /// How it stays consistent.
    pub consistency: Consistency,
}

/// A region as large as on members of some terabytes; on members as small as these the default is 64 KiB, and a benchmark
/// would measure how the region map is written for the first time.
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

    /// A device that can be a member; `slot` is for its name.
    pub fn member(&self, slot: usize) -> Arc<dyn Device> {
        let name = format!("member{slot}");
        match self.members {
            Members::Memory(bytes) => {
                let inner = MemDevice::new(&mem::Options::new(bytes)).expect("memory");
                Arc::new(Named { name, inner })
            }
            Members::Hollow(bytes, drive) => {
                let config = self.shape().config(Uuid::random(), self.count, bytes, 512).expect("a shape");
                let layout = Layout::new(bytes, &config).expect("it fits");
                let hollow = layout.log_offset..layout.data_offset + layout.data_bytes;
                Arc::new(Member::new(name, bytes, hollow, drive).expect("a member"))
            }
        }
    }

    /// Makes the array and starts it. On a core.
    pub async fn start(&self) -> Arc<Array> {
        let devices: Vec<Arc<dyn Device>> = (0..self.count).map(|slot| self.member(slot)).collect();
        let options = CreateOptions {
            shape: self.shape(),
            force: true, // a read of a hollow member finds whatever was in memory
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

/// Memory under a name of its own, for an array refuses the same device twice. It keeps its pages when it is zeroed: a drive
/// takes no page faults, and a rebuild onto fresh memory would measure the kernel.
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
}
