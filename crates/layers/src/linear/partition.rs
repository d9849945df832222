//! A part of a device.

use block::{
    Channel, Device, DeviceError, IoError, IoFuture, KernelBacking, KernelExtent, Limits, MemoryRegion, Op,
    Request, SharedLimits, StatusReport,
};
use std::os::fd::BorrowedFd;
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
    /// The part of `child` that starts at byte `start` and is `len` bytes long, or extends to the
    /// child's end.
    ///
    /// # Errors
    /// If start or length is not a multiple of the child's block size, or the part is empty or ends
    /// beyond the child.
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

    fn takes_registered(&self) -> bool {
        self.child.takes_registered()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        let disk = self.child.kernel_backing()?;
        let extent = disk.extent().part(self.start, self.len);
        Ok(Arc::new(PartOfDisk { disk, extent }))
    }
}

/// A part of a block device of this host's kernel.
struct PartOfDisk {
    disk: Arc<dyn KernelBacking>,
    extent: KernelExtent,
}

impl KernelBacking for PartOfDisk {
    fn fd(&self) -> BorrowedFd<'_> {
        self.disk.fd()
    }

    fn extent(&self) -> KernelExtent {
        self.extent
    }

    fn lend(&self) -> Result<(), DeviceError> {
        self.disk.lend()
    }

    fn take_back(&self) -> Result<(), DeviceError> {
        self.disk.take_back()
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
            // The start is on a block border, so the child detects all other errors.
            Some(end) if end <= self.limits.capacity() => self.child.submit(req, self.start + offset),
            _ => IoFuture::ready(Err(IoError::OutOfRange)),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match offset.checked_add(len) {
            Some(end) if end <= self.limits.capacity() => {
                self.child.block_status(report, self.start + offset, len)
            }
            _ => IoFuture::ready(Err(IoError::OutOfRange)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use conformance::Suite;
    use drivers::mem::{MemDevice, Options};
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    const SIZE: u64 = 64 << 20;

    fn disk() -> Arc<MemDevice> {
        Arc::new(MemDevice::new(&Options { max_size: SIZE + (1 << 20), ..Options::new(SIZE) }).unwrap())
    }

    /// Memory that claims to be a disk of the host.
    struct OnDisk {
        memory: Arc<MemDevice>,
        claim: Arc<Claim>,
    }

    #[derive(Default)]
    struct Claim {
        is_lent: AtomicBool,
    }

    impl KernelBacking for Claim {
        fn fd(&self) -> BorrowedFd<'_> {
            unreachable!("no kernel serves it")
        }

        fn extent(&self) -> KernelExtent {
            KernelExtent::WHOLE
        }

        fn lend(&self) -> Result<(), DeviceError> {
            self.is_lent.store(true, Relaxed);
            Ok(())
        }

        fn take_back(&self) -> Result<(), DeviceError> {
            self.is_lent.store(false, Relaxed);
            Ok(())
        }
    }

    impl Device for OnDisk {
        fn name(&self) -> &str {
            "on-disk"
        }

        fn limits(&self) -> Limits {
            self.memory.limits()
        }

        fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
            self.memory.open_channel()
        }

        fn refresh(&self) -> Result<Limits, DeviceError> {
            self.memory.refresh()
        }

        fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
            Ok(())
        }

        fn unmap_region(&self, _: &MemoryRegion) {}

        fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
            Ok(self.claim.clone())
        }
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
    fn the_kernel_serves_the_part_of_a_disk_that_the_layers_leave() {
        let disk = Arc::new(OnDisk { memory: disk(), claim: Arc::default() });
        let outer = Arc::new(Partition::new(disk.clone(), 4096, None).unwrap());
        let inner = Partition::new(outer.clone(), 512, Some(8192)).unwrap();
        let extent = |part: &Partition| part.kernel_backing().unwrap().extent();
        assert_eq!(extent(&outer), KernelExtent { start: 4096, len: None });
        assert_eq!(extent(&inner), KernelExtent { start: 4608, len: Some(8192) });
        let backing = inner.kernel_backing().unwrap();
        backing.lend().unwrap();
        assert!(disk.claim.is_lent.load(Relaxed));
        backing.take_back().unwrap();
        assert!(!disk.claim.is_lent.load(Relaxed));
    }

    #[test]
    fn a_device_that_shrank_below_the_part_is_an_error_of_refresh() {
        let disk = disk();
        let part = Partition::new(disk.clone(), 1 << 20, Some(1 << 20)).unwrap();
        disk.resize(1 << 20).unwrap();
        assert!(part.refresh().unwrap_err().to_string().contains("the device has 1048576 bytes"));
    }
}
