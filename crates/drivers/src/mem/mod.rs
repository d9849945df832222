//! A RAM disk: sparse memory of this process that all cores copy from and to.
//!
//! The disk is one anonymous mapping. A page is allocated when it is written, and released when it
//! is discarded or zeroed. Requests are plain copies inside `submit`. Cores that access the same
//! bytes concurrently get any mix of them, as with a drive.

pub mod kind;

use block::{
    Channel, Device, DeviceError, Flags, IoFuture, KernelBacking, Limits, MemoryRegion, Op, Request,
    SharedLimits, StatusReport,
};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// Granularity at which memory is released.
const PAGE: u64 = 4096;

/// The configuration of a RAM disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Size in bytes; rounded down to whole blocks.
    pub size: u64,
    /// Maximum size for [`MemDevice::resize`] in bytes, for which address space is reserved. A
    /// smaller value than `size` counts as `size`.
    pub max_size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// Allocate 2 MiB at a time where the kernel can (transparent huge pages): large requests are
    /// faster. Any byte that is written then takes 2 MiB of memory.
    pub huge_pages: bool,
}

impl Options {
    /// A disk of `size` bytes with 512-byte blocks that cannot grow, of small pages.
    pub fn new(size: u64) -> Options {
        Options { size, max_size: size, block_size: 512, read_only: false, huge_pages: false }
    }
}

/// A RAM disk.
pub struct MemDevice {
    name: String,
    shared: Arc<Shared>,
}

struct Shared {
    limits: Arc<SharedLimits>,
    mapping: Mapping,
}

impl MemDevice {
    /// Creates a disk full of zeroes.
    ///
    /// # Errors
    /// When the block size is not a power of two from 512 to 65536, the size is less than a block,
    /// or address space is lacking. When huge pages are wanted and the kernel was built without.
    pub fn new(options: &Options) -> Result<MemDevice, DeviceError> {
        let limits = crate::plain_limits("mem", options.size, options.block_size)?;
        let len = options.max_size.max(options.size);
        let mapping = Mapping::new(len)
            .map_err(|e| DeviceError::new("mem", format!("cannot reserve {len} bytes")).because(e))?;
        if options.huge_pages {
            mapping
                .prefer_huge_pages()
                .map_err(|e| DeviceError::new("mem", "the kernel offers no huge pages").because(e))?;
        }
        let limits = Limits { read_only: options.read_only, ..limits };
        let shared = Shared { limits: SharedLimits::new(limits), mapping };
        Ok(MemDevice { name: "mem".into(), shared: Arc::new(shared) })
    }

    /// Grows or shrinks the disk. Data beyond the new end is lost.
    ///
    /// # Errors
    /// When `size` exceeds [`Options::max_size`] or is less than a block.
    pub fn resize(&self, size: u64) -> Result<(), DeviceError> {
        let limits = &self.shared.limits;
        let (least, most) = (u64::from(limits.fixed().block_size), self.shared.mapping.len);
        if !(least..=most).contains(&size) {
            return Err(DeviceError::new(&self.name, format!("size {size}: want {least} to {most} bytes")));
        }
        let before = limits.capacity();
        limits.set_capacity(size);
        if size < before {
            self.shared.mapping.zero(size, before - size, false);
        }
        Ok(())
    }
}

impl Device for MemDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.shared.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(MemChannel(self.shared.clone())))
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

struct MemChannel(Arc<Shared>);

impl Channel for MemChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let shared = &*self.0;
        if let Err(error) = shared.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        match req.op {
            Op::Read | Op::Write => shared.mapping.copy(req, offset),
            Op::WriteZeroes => shared.mapping.zero(offset, req.len, req.flags.contains(Flags::NO_UNMAP)),
            Op::Discard => shared.mapping.release_pages(offset, req.len),
            Op::Flush => {}
        }
        IoFuture::ready(Ok(()))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.limits.answer_data(report, offset, len)
    }
}

/// Private anonymous memory that is allocated only where it was written.
struct Mapping {
    base: NonNull<u8>,
    /// Usable length; the mapping ends at the next page boundary.
    len: u64,
}

// SAFETY: the memory belongs to the mapping and is only accessed through raw copies, never a
// reference. Cores that race for the same bytes get any mix of them, as the device model allows.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: u64) -> std::io::Result<Mapping> {
        let bytes = len.checked_next_multiple_of(PAGE).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| std::io::Error::from_raw_os_error(libc::ENOMEM))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| std::io::Error::other("address 0 is unusable"))?;
        Ok(Mapping { base, len })
    }

    /// Pages that are written from now on are huge ones, where a whole one lies in the mapping.
    fn prefer_huge_pages(&self) -> std::io::Result<()> {
        let bytes = self.len.next_multiple_of(PAGE) as usize;
        // SAFETY: our own mapping, whose content the advice does not change.
        match unsafe { libc::madvise(self.base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// The address of byte `offset` of the disk, after a check that `len` bytes follow.
    #[inline]
    fn at(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset}+{len} of {}", self.len);
        // SAFETY: inside the mapping, as just asserted.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    #[inline]
    fn copy(&self, req: &Request<'_>, offset: u64) {
        let mut disk = self.at(offset, req.len);
        for segment in req.data.iter() {
            // SAFETY: the segments hold `req.len` bytes in all, which lie inside the mapping; the
            // caller's memory is valid by the contract of `Data::new` and is not ours.
            unsafe {
                if req.op == Op::Read {
                    disk.copy_to_nonoverlapping(segment.base, segment.len);
                } else {
                    disk.copy_from_nonoverlapping(segment.base, segment.len);
                }
                disk = disk.add(segment.len);
            }
        }
    }

    /// Makes a range read as zeroes; releases the pages that lie completely inside unless
    /// `keeps_pages`.
    fn zero(&self, offset: u64, len: u64, keeps_pages: bool) {
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(PAGE), end & !(PAGE - 1));
        if keeps_pages || first >= last {
            return self.fill_zeroes(offset, len);
        }
        self.fill_zeroes(offset, first - offset);
        self.release_pages(first, last - first);
        self.fill_zeroes(last, end - last);
    }

    fn fill_zeroes(&self, offset: u64, len: u64) {
        // SAFETY: `at` checked the range.
        unsafe { self.at(offset, len).write_bytes(0, len as usize) };
    }

    /// Releases the pages that lie completely inside a range; they then read as zeroes.
    fn release_pages(&self, offset: u64, len: u64) {
        let (first, last) = (offset.next_multiple_of(PAGE), (offset + len) & !(PAGE - 1));
        if first < last {
            let start = self.at(first, last - first);
            // SAFETY: whole pages of our own mapping, to which no reference exists.
            let result = unsafe { libc::madvise(start.cast(), (last - first) as usize, libc::MADV_DONTNEED) };
            assert_eq!(result, 0, "madvise on our own pages: {}", std::io::Error::last_os_error());
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the device and its channels are gone.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len.next_multiple_of(PAGE) as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use conformance::Suite;

    fn suite(options: Options) {
        let device = Arc::new(MemDevice::new(&options).unwrap());
        let grown = device.clone();
        Suite::new(device).on_grow(move || grown.resize(65 << 20).unwrap()).run();
    }

    #[test]
    fn a_disk_that_no_address_space_holds_is_refused_by_its_size() {
        for size in [u64::MAX, 1 << 62] {
            let refused = MemDevice::new(&Options::new(size)).err().unwrap().to_string();
            assert!(
                refused.starts_with(&format!("mem: cannot reserve {size} bytes: Cannot allocate")),
                "{refused}"
            );
        }
    }

    #[test]
    fn it_passes_the_suite() {
        suite(Options { max_size: 65 << 20, ..Options::new(64 << 20) });
    }

    #[test]
    fn it_passes_the_suite_with_large_blocks() {
        suite(Options { max_size: 65 << 20, block_size: 4096, ..Options::new(64 << 20) });
    }

    #[test]
    fn it_passes_the_suite_with_huge_pages() {
        suite(Options { max_size: 65 << 20, huge_pages: true, ..Options::new(64 << 20) });
    }

    /// Whether the kernel would use huge pages for this address, by `/proc/self/smaps`.
    fn wants_huge_pages(address: u64) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|word| word.split_once('-'));
            if let Some((first, end)) = range {
                let at = |text: &str| u64::from_str_radix(text, 16).unwrap();
                is_inside = (at(first)..at(end)).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_inside) {
                return flags.split(' ').any(|flag| flag == "hg");
            }
        }
        panic!("{address:#x} is not mapped");
    }

    #[test]
    fn huge_pages_are_used_when_they_are_wanted() {
        for huge_pages in [false, true] {
            let disk = MemDevice::new(&Options { huge_pages, ..Options::new(8 << 20) }).unwrap();
            let address = disk.shared.mapping.base.as_ptr() as u64;
            assert_eq!(wants_huge_pages(address), huge_pages);
        }
    }

    #[test]
    fn it_passes_the_suite_read_only() {
        let options = Options { read_only: true, ..Options::new(1 << 20) };
        Suite::new(Arc::new(MemDevice::new(&options).unwrap())).run();
    }

    #[test]
    fn a_disk_larger_than_the_host_takes_only_what_was_written() {
        let disk = MemDevice::new(&Options::new(1 << 40)).unwrap();
        let resident = |mapping: &Mapping| {
            let mut pages = vec![0u8; 16];
            // SAFETY: the vector has a byte for each page asked about.
            unsafe { libc::mincore(mapping.base.as_ptr().cast(), 16 * 4096, pages.as_mut_ptr()) };
            pages.iter().filter(|p| **p & 1 == 1).count()
        };
        let mapping = &disk.shared.mapping;
        // SAFETY: plain call on our own mapping. Huge pages, which the host may use otherwise, are
        // not part of this test.
        unsafe { libc::madvise(mapping.base.as_ptr().cast(), 16 * 4096, libc::MADV_NOHUGEPAGE) };
        mapping.zero(0, 8 * 4096, true);
        assert_eq!(resident(mapping), 8);
        mapping.zero(100, 3 * 4096, false);
        assert_eq!(resident(mapping), 6, "two whole pages lie inside");
        mapping.release_pages(0, 8 * 4096 - 1);
        assert_eq!(resident(mapping), 1);
    }

    #[test]
    fn a_disk_that_shrank_and_grew_again_has_forgotten_what_was_cut_off() {
        let disk = MemDevice::new(&Options::new(1 << 20)).unwrap();
        // SAFETY: inside the mapping.
        unsafe { disk.shared.mapping.at(1 << 19, 1).write(7) };
        disk.resize(1 << 19).unwrap();
        disk.resize(1 << 20).unwrap();
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { disk.shared.mapping.at(1 << 19, 1).read() }, 0);
        let error = disk.resize(2 << 20).unwrap_err().to_string();
        assert!(error.contains("size 2097152"), "{error}");
    }
}
