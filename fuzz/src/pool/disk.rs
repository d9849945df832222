//! A sparse disk in memory with unreadable pages.

use block::{
    Channel, Device, DeviceError, IoError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op,
    Request, StatusReport,
};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Content of a disk. A missing page reads as zeroes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    pages: BTreeMap<u64, Vec<u8>>,
    /// Pages that cannot be read until they are overwritten as a whole.
    unreadable: BTreeSet<u64>,
}

impl Image {
    /// The bytes of a page.
    pub fn page(&self, number: u64) -> Vec<u8> {
        self.pages.get(&number).cloned().unwrap_or_else(|| vec![0; PAGE as usize])
    }

    /// `len` bytes at `at`, both in bytes.
    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let (first, skip) = (at / PAGE, (at % PAGE) as usize);
        let last = (at + len as u64).div_ceil(PAGE);
        let mut bytes: Vec<u8> = (first..last).flat_map(|number| self.page(number)).collect();
        bytes.drain(..skip);
        bytes.truncate(len);
        bytes
    }

    /// Replaces the bytes at `at`, in bytes.
    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            let at = at + i as u64;
            let page = self.pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
            page[(at % PAGE) as usize] = *byte;
        }
    }

    /// Zeroes `len` bytes at `at`.
    fn clear(&mut self, at: u64, len: u64) {
        let mut at = at;
        let end = at + len;
        while at < end {
            let part = (PAGE - at % PAGE).min(end - at);
            if part == PAGE {
                self.pages.remove(&(at / PAGE));
            } else if self.pages.contains_key(&(at / PAGE)) {
                self.put(at, &vec![0; part as usize]);
            }
            at += part;
        }
    }

    /// Makes a page unreadable.
    pub fn damage(&mut self, number: u64) {
        self.unreadable.insert(number);
    }
}

/// The disk.
pub struct Disk {
    capacity: u64,
    image: Arc<Mutex<Image>>,
}

impl Disk {
    /// A disk of `capacity` bytes.
    pub fn holding(image: Image, capacity: u64) -> Disk {
        Disk { capacity, image: Arc::new(Mutex::new(image)) }
    }

    /// The present content.
    pub fn image(&self) -> Image {
        lock(&self.image).clone()
    }
}

fn lock(image: &Mutex<Image>) -> MutexGuard<'_, Image> {
    image.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device for Disk {
    fn name(&self) -> &str {
        "disk"
    }
    fn limits(&self) -> Limits {
        Limits::new(self.capacity)
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(DiskChannel { limits: self.limits(), image: self.image.clone() }))
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
    image: Arc<Mutex<Image>>,
}

impl DiskChannel {
    fn run(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.limits.check(req, offset)?;
        let mut image = lock(&self.image);
        let end = offset + req.len;
        let touched = offset / PAGE..end.div_ceil(PAGE);
        match req.op {
            Op::Read => {
                if image.unreadable.range(touched).next().is_some() {
                    return Err(IoError::Medium);
                }
                req.data.copy_from(&image.bytes(offset, req.len as usize));
            }
            Op::Write => {
                let mut bytes = vec![0; req.len as usize];
                req.data.copy_to(&mut bytes);
                image.put(offset, &bytes);
                image.unreadable.retain(|page| !(offset <= page * PAGE && (page + 1) * PAGE <= end));
            }
            Op::WriteZeroes | Op::Discard => image.clear(offset, req.len),
            Op::Flush => {}
        }
        Ok(())
    }
}

impl Channel for DiskChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let result = self.run(req, offset);
        IoFuture::new(async move { result })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}
