//! A disk in memory.

use block::{
    Channel, Device, DeviceError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op, Request,
    StatusReport,
};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A disk that answers after a random time, at most `latency_ns`; immediately if that is 0.
pub struct Disk {
    name: String,
    bytes: Arc<Mutex<Vec<u8>>>,
    latency_ns: u64,
}

impl Disk {
    /// A disk that holds `bytes`.
    pub fn holding(index: usize, bytes: Vec<u8>, latency_ns: u64) -> Disk {
        Disk { name: format!("disk{index}"), bytes: Arc::new(Mutex::new(bytes)), latency_ns }
    }

    /// The present content.
    pub fn image(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }
}

fn lock(bytes: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device for Disk {
    fn name(&self) -> &str {
        &self.name
    }
    fn limits(&self) -> Limits {
        Limits::new(lock(&self.bytes).len() as u64)
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let (limits, bytes) = (self.limits(), self.bytes.clone());
        Ok(Rc::new(DiskChannel { limits, bytes, latency_ns: self.latency_ns }))
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

struct DiskChannel {
    limits: Limits,
    bytes: Arc<Mutex<Vec<u8>>>,
    latency_ns: u64,
}

impl DiskChannel {
    async fn run(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.limits.check(req, offset)?;
        if self.latency_ns > 0 {
            let core = reactor::current();
            core.sleep(core.random_u64() % self.latency_ns).await;
        }
        let mut bytes = lock(&self.bytes);
        let range = offset as usize..(offset + req.len) as usize;
        match req.op {
            Op::Read => {
                req.data.copy_from(&bytes[range]);
            }
            Op::Write => {
                req.data.copy_to(&mut bytes[range]);
            }
            Op::WriteZeroes | Op::Discard => bytes[range].fill(0),
            Op::Flush => {}
        }
        Ok(())
    }
}

impl Channel for DiskChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(self.run(req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}
