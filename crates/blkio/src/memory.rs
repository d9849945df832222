//! Memory regions: what a program told the device about, and what the library allocated for it.

use crate::{Error, Region, Result};
use drivers::shared_memory::SharedMemory;
use std::os::fd::AsRawFd;

/// The device's requirements of regions.
#[derive(Clone, Copy)]
pub(crate) struct RegionRules {
    pub alignment: u64,
    pub needs_fd: bool,
    pub max_regions: u64,
}

/// The regions of an instance.
#[derive(Default)]
pub(crate) struct Regions {
    mapped: Vec<Region>,
    allocated: Vec<(Region, SharedMemory)>,
}

impl Regions {
    /// Whether `region` may be mapped now.
    ///
    /// # Errors
    /// `EINVAL` for a malformed region and one that is mapped already, `ENOSPC` when there are too
    /// many.
    pub fn check(&self, region: &Region, rules: RegionRules) -> Result<()> {
        let refuse = |message: String| Err(Error::new(libc::EINVAL, format!("memory region: {message}")));
        let alignment = rules.alignment;
        let Region { addr, len, .. } = *region;
        if !(addr as u64).is_multiple_of(alignment) || !(len as u64).is_multiple_of(alignment) {
            return refuse(format!(
                "addr {addr:#x} and len {len:#x} must be multiples of mem-region-alignment ({alignment})"
            ));
        }
        if addr == 0 || len == 0 || addr.checked_add(len).is_none() {
            return refuse(format!("addr {addr:#x} with len {len:#x} is no memory"));
        }
        if region.iova != 0 || region.flags != 0 {
            return refuse(format!(
                "iova {:#x} and flags {:#x} are reserved and must be 0",
                region.iova, region.flags
            ));
        }
        if rules.needs_fd && region.fd < 0 {
            return refuse(format!("fd {} is invalid: this driver needs a file descriptor", region.fd));
        }
        if region.fd >= 0 && region.fd_offset < 0 {
            return refuse(format!("fd_offset {} is negative", region.fd_offset));
        }
        if self.mapped.contains(region) {
            return refuse(format!("addr {addr:#x} is already mapped"));
        }
        if let Some(other) = self.mapped.iter().find(|other| other.overlaps(region)) {
            return refuse(format!(
                "addr {addr:#x} with len {len:#x} overlaps the region at {:#x} with len {:#x}",
                other.addr, other.len
            ));
        }
        if self.mapped.len() as u64 >= rules.max_regions {
            let message = format!("more than max-mem-regions ({}) memory regions", rules.max_regions);
            return Err(Error::new(libc::ENOSPC, message));
        }
        Ok(())
    }

    pub fn add_mapped(&mut self, region: &Region) {
        self.mapped.push(*region);
    }

    /// Forgets a mapped region; `false` when there is no such one.
    pub fn remove_mapped(&mut self, region: &Region) -> bool {
        let at = self.mapped.iter().position(|r| r == region);
        at.map(|at| self.mapped.swap_remove(at)).is_some()
    }

    /// Allocates `len` bytes of memory that can be shared with another process, at a multiple of
    /// `own_alignment`. The memory behind it has a multiple of that, too ([`Regions::whole`]).
    ///
    /// # Errors
    /// `EINVAL` for a length that is no multiple of `alignment`, and what the operating system
    /// says.
    pub fn allocate(&mut self, len: usize, alignment: u64, own_alignment: usize) -> Result<Region> {
        if len == 0 || !(len as u64).is_multiple_of(alignment) || i64::try_from(len).is_err() {
            let message = format!(
                "memory region: len {len} must be a positive multiple of mem-region-alignment ({alignment})"
            );
            return Err(Error::new(libc::EINVAL, message));
        }
        let memory = SharedMemory::aligned(len, own_alignment)
            .map_err(|error| Error::os(&format!("memory region of {len} bytes"), &error))?;
        let addr = memory.base().addr();
        if !(addr as u64).is_multiple_of(alignment) {
            let message = format!("memory region: no memory with an alignment of {alignment} bytes");
            return Err(Error::new(libc::EOVERFLOW, message));
        }
        let region = Region { addr, len, iova: 0, fd_offset: 0, fd: memory.as_raw_fd(), flags: 0 };
        self.allocated.push((region, memory));
        Ok(region)
    }

    /// The region with all of the memory behind it, if [`Regions::allocate`] made it.
    pub fn whole(&self, region: &Region) -> Region {
        let allocated = self.allocated.iter().find(|(known, _)| known == region);
        Region { len: allocated.map_or(region.len, |(_, memory)| memory.len()), ..*region }
    }

    /// Gives memory of [`Regions::allocate`] back.
    ///
    /// # Errors
    /// `EINVAL` when it is none or still mapped; it then stays until the end of the instance.
    pub fn free(&mut self, region: &Region) -> Result<()> {
        let addr = region.addr;
        let refuse = |message: String| Err(Error::new(libc::EINVAL, format!("memory region: {message}")));
        let Some(at) = self.allocated.iter().position(|(known, _)| known == region) else {
            return refuse(format!("addr {addr:#x} does not come from blkio_alloc_mem_region()"));
        };
        if self.mapped.contains(region) {
            return refuse(format!("addr {addr:#x} is still mapped"));
        }
        self.allocated.swap_remove(at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: RegionRules = RegionRules { alignment: 4096, needs_fd: true, max_regions: 2 };

    fn region(addr: usize, len: usize) -> Region {
        Region { addr, len, iova: 0, fd_offset: 0, fd: 3, flags: 0 }
    }

    #[test]
    fn a_malformed_region_is_refused_with_its_values() {
        let regions = Regions::default();
        let good = region(0x10000, 0x2000);
        assert_eq!(regions.check(&good, RULES), Ok(()));
        for bad in [
            Region { addr: 0x10001, ..good },
            Region { len: 0x2001, ..good },
            Region { len: 0, ..good },
            Region { addr: 0, ..good },
            Region { addr: usize::MAX - 0xfff, ..good },
            Region { iova: 1, ..good },
            Region { flags: 1, ..good },
            Region { fd: -1, ..good },
            Region { fd_offset: -1, ..good },
        ] {
            assert_eq!(regions.check(&bad, RULES).map_err(|e| e.errno()), Err(libc::EINVAL), "{bad:?}");
        }
    }

    #[test]
    fn regions_neither_overlap_nor_exceed_their_number() {
        let mut regions = Regions::default();
        regions.add_mapped(&region(0x10000, 0x2000));
        assert!(regions.check(&region(0x10000, 0x2000), RULES).is_err());
        assert!(regions.check(&region(0x11000, 0x2000), RULES).is_err());
        assert!(regions.check(&region(0xf000, 0x4000), RULES).is_err());
        assert_eq!(regions.check(&region(0x12000, 0x1000), RULES), Ok(()));
        regions.add_mapped(&region(0x12000, 0x1000));
        let full = regions.check(&region(0x20000, 0x1000), RULES).unwrap_err();
        assert_eq!(full.errno(), libc::ENOSPC);
        assert!(regions.remove_mapped(&region(0x12000, 0x1000)));
        assert!(!regions.remove_mapped(&region(0x12000, 0x1000)));
    }

    #[test]
    fn allocated_memory_is_given_back_once_and_only_when_unmapped() {
        let mut regions = Regions::default();
        assert_eq!(regions.allocate(100, 512, 1).unwrap_err().errno(), libc::EINVAL);
        let region = regions.allocate(8192, 4096, 1).unwrap();
        // SAFETY: fresh memory of our own.
        unsafe { (region.addr as *mut u8).write(1) };
        regions.add_mapped(&region);
        assert!(regions.free(&region).is_err());
        regions.remove_mapped(&region);
        assert_eq!(regions.free(&region), Ok(()));
        assert!(regions.free(&region).is_err());
    }
    #[test]
    fn a_device_gets_all_of_the_memory_behind_an_allocated_region() {
        const ALIGNMENT: usize = 2 << 20;
        let mut regions = Regions::default();
        let allocated = regions.allocate(12288, 4096, ALIGNMENT).unwrap();
        assert_eq!((allocated.len, allocated.addr % ALIGNMENT, allocated.fd_offset), (12288, 0, 0));
        assert_eq!(regions.whole(&allocated), Region { len: ALIGNMENT, ..allocated });
        let own = region(0x10000, 0x2000);
        assert_eq!(regions.whole(&own), own, "the program's own memory stays as it is");
        let part = Region { len: 4096, ..allocated };
        assert_eq!(regions.whole(&part), part);
    }
}
