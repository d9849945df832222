//! A part of a device.

use block::{
    Channel, Device, DeviceError, IoError, IoFuture, Limits, MemoryRegion, Op, Request, SharedLimits,
};
use std::rc::Rc;
use std::sync::Arc;

/// A part of a device as a device of its own.
pub struct Partition {
    name: String,
    child: Arc<dyn Device>,
    start: u64,
    /// `None`: to the end of the child, and growing with it.
    len: Option<u64>,
    limits: Arc<SharedLimits>,
}

impl Partition {
    /// The part of `child` that starts at byte `start` and is `len` bytes long, or goes to the child's end.
    ///
    /// # Errors
    /// When start or length are no multiple of the child's block size, or the part is empty or ends beyond
    /// the child.
    pub fn new(child: Arc<dyn Device>, start: u64, len: Option<u64>) -> Result<Partition, DeviceError> {
        let name = format!("linear({})", child.name());
        let mut limits = child.limits();
        let block_size = u64::from(limits.block_size);
        if !start.is_multiple_of(block_size) || !len.unwrap_or(0).is_multiple_of(block_size) {
            let len = len.map_or("to the end".into(), |len| len.to_string());
            let message = format!("offset={start}, len={len}: not multiples of the block size {block_size}");
            return Err(DeviceError::new(name, message));
        }
        limits.capacity = capacity(&name, start, len, limits.capacity)?;
        Ok(Partition { name, child, start, len, limits: SharedLimits::new(limits) })
    }
}

fn capacity(name: &str, start: u64, len: Option<u64>, whole: u64) -> Result<u64, DeviceError> {
    let most = whole.saturating_sub(start);
    match len.unwrap_or(most) {
        len if len > 0 && len <= most => Ok(len),
        len => {
            Err(DeviceError::new(name, format!("offset={start}, len={len}: the device has {whole} bytes")))
        }
    }
}

impl Device for Partition {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let (child, limits) = (self.child.open_channel()?, self.limits.clone());
        Ok(Rc::new(PartitionChannel { child, start: self.start, limits }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        let whole = self.child.refresh()?.capacity;
        self.limits.set_capacity(capacity(&self.name, self.start, self.len, whole)?);
        Ok(self.limits.get())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.child.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.child.unmap_region(region);
    }
}

struct PartitionChannel {
    child: Rc<dyn Channel>,
    start: u64,
    limits: Arc<SharedLimits>,
}

impl Channel for PartitionChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if req.op == Op::Flush {
            return self.child.submit(req, 0);
        }
        match offset.checked_add(req.len) {
            // The start is on a block border, so the child sees every other mistake as it was made.
            Some(end) if end <= self.limits.capacity() => self.child.submit(req, self.start + offset),
            _ => IoFuture::ready(Err(IoError::OutOfRange)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use conformance::Suite;
    use drivers::mem::{MemDevice, Options};

    const SIZE: u64 = 64 << 20;

    fn disk() -> Arc<MemDevice> {
        Arc::new(MemDevice::new(&Options { max_size: SIZE + (1 << 20), ..Options::new(SIZE) }).unwrap())
    }

    #[test]
    fn it_passes_the_suite_and_grows_with_its_device() {
        let disk = disk();
        let open_ended = Partition::new(disk.clone(), 1 << 20, None).unwrap();
        Suite::new(Arc::new(open_ended)).on_grow(move || disk.resize(SIZE + (1 << 20)).unwrap()).run();
    }

    #[test]
    fn a_partition_of_a_partition_passes_the_suite() {
        let outer = Arc::new(Partition::new(disk(), 512, Some(SIZE - 1024)).unwrap());
        let inner = Partition::new(outer, 512, Some(32 << 20)).unwrap();
        Suite::new(Arc::new(inner)).run();
    }

    #[test]
    fn a_part_that_is_not_inside_the_device_is_refused() {
        let refusal =
            |start, len| Partition::new(disk(), start, len).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(refusal(0, Some(SIZE + 512)).contains("the device has 67108864 bytes"));
        assert!(refusal(SIZE, None).contains("len=0"));
        assert!(refusal(!511, Some(512)).contains("the device has"));
        assert!(refusal(100, None).contains("block size 512"));
        assert!(refusal(0, Some(100)).contains("block size 512"));
    }

    #[test]
    fn a_device_that_shrank_below_the_part_is_an_error_of_refresh() {
        let disk = disk();
        let part = Partition::new(disk.clone(), 1 << 20, Some(1 << 20)).unwrap();
        disk.resize(1 << 20).unwrap();
        assert!(part.refresh().unwrap_err().to_string().contains("the device has 1048576 bytes"));
    }
}
