//! Members with blocks that cannot be read until they are written.

use super::{Faults, MEMBER_BYTES};
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, KernelBacking, MemoryRegion, Op, Request, StatusReport,
};
use drivers::mem::{MemDevice, Options};
use layers::fault::Fault;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

pub const BLOCK: u64 = 512;

/// First bytes of blocks that cannot be read until they are written.
pub type Bad = Arc<Mutex<BTreeSet<u64>>>;

/// Memory with bad blocks.
pub struct Scarred(MemDevice, Bad);

impl Scarred {
    /// Members, and the bad blocks of each.
    pub fn disks(count: usize) -> (Faults, Vec<Bad>) {
        let bad: Vec<Bad> = (0..count).map(|_| Bad::default()).collect();
        let disk = |bad: &Bad| {
            let memory = MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap();
            Arc::new(Fault::new(Arc::new(Scarred(memory, bad.clone()))))
        };
        (bad.iter().map(disk).collect(), bad)
    }
}

impl Device for Scarred {
    fn name(&self) -> &str {
        "scarred"
    }
    fn limits(&self) -> block::Limits {
        self.0.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(ScarredChannel(self.0.open_channel()?, self.1.clone())))
    }
    fn refresh(&self) -> Result<block::Limits, DeviceError> {
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

struct ScarredChannel(Rc<dyn Channel>, Bad);

impl Channel for ScarredChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let mut bad = self.1.lock().unwrap();
        let is_in = |at: &u64| at + BLOCK > offset && *at < offset + req.len;
        match req.op {
            Op::Read if bad.iter().any(is_in) => IoFuture::new(async { Err(IoError::Medium) }),
            Op::Write => {
                bad.retain(|at| !is_in(at));
                self.0.submit(req, offset)
            }
            _ => self.0.submit(req, offset),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}
