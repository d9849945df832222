//! Guest memory mapped into this process.
//!
//! ```text
//!   guest address ──►┐
//!   user address  ──►├─ region {guest_addr, user_addr, len, fd} ──► address in this process
//!   host address  ◄──┘   (user addresses are those of the front-end: vhost-user names rings by them)
//! ```
//!
//! A [`GuestMemory`] never changes. A front-end that adds or removes a region gets a new one that
//! shares the other mappings; a mapping is removed with the last snapshot that has it.
//!
//! **Checks and their limits.** Regions are non-empty, do not overflow and do not overlap, and
//! their files are long enough when they are mapped. A front-end that truncates such a file later
//! makes the next access raise SIGBUS, in this process or (as `EFAULT`) in a system call. Only the
//! owner of the file can prevent that, with a memfd sealed against shrinking. A program that must
//! survive it calls [`crate::contain_truncation`]. Every region is watched for truncation, so their
//! number is limited: for each guest ([`MAX_REGIONS`]) and for the process.

use crate::mapping::Mapping;
use crate::truncation;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// Largest number of regions of one guest: the 509 memory slots of QEMU, rounded up.
pub const MAX_REGIONS: usize = 512;
/// Number of regions that any guest may have, however many others have. VMMs use fewer without
/// hot-plugged memory.
const FEW_REGIONS: usize = 16;

/// Description of a region by a front-end.
#[derive(Debug)]
pub struct RegionSpec {
    /// First guest address.
    pub guest_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// First address in the front-end's process. VDUSE has none and repeats the guest address.
    pub user_addr: u64,
    /// The file with the bytes.
    pub fd: OwnedFd,
    /// Offset of the region in the file, in bytes.
    pub fd_offset: u64,
}

/// Why a memory table was refused.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The region is empty or its addresses wrap around.
    #[error(
        "guest memory region at {guest_addr:#x} of {len} bytes (user address {user_addr:#x}) is empty or wraps around"
    )]
    BadRange {
        /// First guest address.
        guest_addr: u64,
        /// First user address.
        user_addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Two regions share guest or user addresses.
    #[error("guest memory regions at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// First guest address of one.
        first: u64,
        /// First guest address of the other.
        second: u64,
    },
    /// The guest has more than [`MAX_REGIONS`].
    #[error("{0} guest memory regions: the limit is {MAX_REGIONS}")]
    TooMany(usize),
    /// Other guests have so many regions that the rest is reserved for guests with few.
    #[error("{0} guest memory regions: this process has room for guests with at most {FEW_REGIONS} now")]
    NoRoom(usize),
    /// The region to remove does not exist.
    #[error("no guest memory region at {guest_addr:#x} of {len} bytes")]
    NoSuchRegion {
        /// First guest address.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The file could not be mapped.
    #[error("guest memory region at {guest_addr:#x} of {len} bytes cannot be mapped")]
    Map {
        /// First guest address.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
        /// The system's error.
        source: io::Error,
    },
}

/// One mapped region.
#[derive(Debug)]
pub struct Region {
    guest_addr: u64,
    user_addr: u64,
    fd: OwnedFd,
    fd_offset: u64,
    mapping: Mapping,
}

impl Region {
    fn map(spec: RegionSpec) -> Result<Region, MemoryError> {
        let RegionSpec { guest_addr, len, user_addr, fd, fd_offset } = spec;
        let is_sound = |addr: u64| len > 0 && addr.checked_add(len).is_some();
        if !is_sound(guest_addr) || !is_sound(user_addr) {
            return Err(MemoryError::BadRange { guest_addr, user_addr, len });
        }
        match Mapping::new(fd.as_fd(), fd_offset, len) {
            Ok(mapping) => Ok(Region { guest_addr, user_addr, fd, fd_offset, mapping }),
            Err(source) => Err(MemoryError::Map { guest_addr, len, source }),
        }
    }

    /// First guest address.
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// First address in the front-end's process.
    pub fn user_addr(&self) -> u64 {
        self.user_addr
    }

    /// First byte in this process.
    pub fn host_addr(&self) -> *mut u8 {
        self.mapping.addr()
    }

    /// Length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// The region as devices register it.
    pub fn as_block_region(&self) -> block::MemoryRegion {
        block::MemoryRegion {
            addr: self.host_addr().addr(),
            len: self.mapping.len(),
            fd: Some(self.fd.as_raw_fd()),
            fd_offset: self.fd_offset,
        }
    }

    fn part(&self, offset: u64, len: u64) -> Option<*mut u8> {
        (offset < self.len() && len <= self.len() - offset)
            .then(|| self.host_addr().wrapping_add(offset as usize))
    }
}

/// All memory of a guest at one moment.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// Ordered by guest address, without overlaps.
    regions: Vec<Arc<Region>>,
}

impl GuestMemory {
    /// Maps every region.
    ///
    /// # Errors
    /// When a region is malformed, overlaps another or cannot be mapped, or when the guest or all
    /// guests together have too many.
    pub fn map(specs: Vec<RegionSpec>) -> Result<GuestMemory, MemoryError> {
        if specs.len() > MAX_REGIONS {
            return Err(MemoryError::TooMany(specs.len()));
        }
        check_room(specs.len(), specs.len())?;
        let regions = specs.into_iter().map(|spec| Region::map(spec).map(Arc::new));
        GuestMemory::of(regions.collect::<Result<_, _>>()?)
    }

    /// Returns this memory with one more region.
    ///
    /// # Errors
    /// As [`GuestMemory::map`].
    pub fn with_added(&self, spec: RegionSpec) -> Result<GuestMemory, MemoryError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(MemoryError::TooMany(self.regions.len() + 1));
        }
        check_room(self.regions.len() + 1, 1)?;
        let mut regions = self.regions.clone();
        regions.push(Arc::new(Region::map(spec)?));
        GuestMemory::of(regions)
    }

    /// Returns this memory without the region that has exactly these addresses.
    ///
    /// # Errors
    /// When no such region exists.
    pub fn without(&self, guest_addr: u64, user_addr: u64, len: u64) -> Result<GuestMemory, MemoryError> {
        let is_it =
            |r: &Arc<Region>| r.guest_addr == guest_addr && r.user_addr == user_addr && r.len() == len;
        let position =
            self.regions.iter().position(is_it).ok_or(MemoryError::NoSuchRegion { guest_addr, len })?;
        let mut regions = self.regions.clone();
        regions.remove(position);
        Ok(GuestMemory { regions })
    }

    fn of(mut regions: Vec<Arc<Region>>) -> Result<GuestMemory, MemoryError> {
        check_overlap(&mut regions, |r| r.user_addr)?;
        check_overlap(&mut regions, |r| r.guest_addr)?;
        Ok(GuestMemory { regions })
    }

    /// The regions in ascending order of guest address.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Arc<Region>> {
        self.regions.iter()
    }

    /// The region that holds `guest_addr`.
    pub fn region_at(&self, guest_addr: u64) -> Option<&Region> {
        let after = self.regions.partition_point(|r| r.guest_addr <= guest_addr);
        let region = &self.regions[after.checked_sub(1)?];
        (guest_addr - region.guest_addr < region.len()).then_some(region)
    }

    /// Whether the file of a region was truncated since it was mapped
    /// ([`crate::contain_truncation`]).
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    /// Address of `len` bytes at a guest address in this process. Returns `None` if the range does
    /// not lie in one region.
    pub fn translate(&self, guest_addr: u64, len: u64) -> Option<*mut u8> {
        let region = self.region_at(guest_addr)?;
        region.part(guest_addr - region.guest_addr, len)
    }

    /// As [`GuestMemory::translate`], for an address of the front-end's process.
    pub fn translate_user(&self, user_addr: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|r| r.part(user_addr.checked_sub(r.user_addr)?, len))
    }

    /// The guest address of a byte of this process that lies in guest memory.
    pub fn guest_addr_of(&self, host: *const u8) -> Option<u64> {
        self.regions.iter().find_map(|r| {
            let offset = host.addr().checked_sub(r.host_addr().addr())? as u64;
            (offset < r.len()).then(|| r.guest_addr + offset)
        })
    }
}

/// Reserves part of the process's limit for guests with few regions. `new` regions bring the guest
/// to `total`.
fn check_room(total: usize, new: usize) -> Result<(), MemoryError> {
    let is_free = total <= FEW_REGIONS || truncation::room() >= truncation::RESERVED + new;
    if is_free { Ok(()) } else { Err(MemoryError::NoRoom(total)) }
}

/// Checks for overlaps and leaves the regions ordered by `start`.
fn check_overlap(regions: &mut [Arc<Region>], start: impl Fn(&Region) -> u64) -> Result<(), MemoryError> {
    regions.sort_by_key(|r| start(r));
    match regions.windows(2).find(|pair| start(&pair[1]) - start(&pair[0]) < pair[0].len()) {
        Some(pair) => Err(MemoryError::Overlap { first: pair[0].guest_addr, second: pair[1].guest_addr }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::sealed_file;

    fn spec(guest_addr: u64, user_addr: u64, len: u64, fd_offset: u64) -> RegionSpec {
        let fd = sealed_file(c"test", fd_offset + len).unwrap();
        RegionSpec { guest_addr, len, user_addr, fd, fd_offset }
    }

    #[test]
    fn an_address_translates_only_inside_one_region() {
        let memory =
            GuestMemory::map(vec![spec(0x10_0000, 0x7000_0000, 0x3000, 0x1000), spec(0, 0x1000, 0x2000, 0)])
                .unwrap();
        let starts: Vec<u64> = memory.regions().map(|r| r.guest_addr()).collect();
        assert_eq!(starts, [0, 0x10_0000]);
        let high = memory.regions().nth(1).unwrap().host_addr();
        assert_eq!(memory.translate(0x10_0000, 0x3000), Some(high));
        assert_eq!(memory.translate(0x10_2fff, 1), Some(high.wrapping_add(0x2fff)));
        assert_eq!(memory.translate_user(0x7000_0010, 16), Some(high.wrapping_add(16)));
        for (addr, len) in [
            (0x10_2fff, 2),
            (0x10_3000, 0),
            (0x2000, 1),
            (0x1fff, 2),
            (0xf_ffff, 1),
            (u64::MAX, 1),
            (0, u64::MAX),
            (0x10, u64::MAX - 0xf),
        ] {
            assert_eq!(memory.translate(addr, len), None, "{addr:#x} {len:#x}");
        }
        assert_eq!(memory.translate_user(0x10_0000, 1), None);
        assert_eq!(memory.guest_addr_of(high.wrapping_add(5)), Some(0x10_0005));
        let alone = memory.without(0, 0x1000, 0x2000).unwrap();
        assert_eq!(alone.guest_addr_of(high.wrapping_add(0x2fff)), Some(0x10_2fff));
        assert_eq!(alone.guest_addr_of(high.wrapping_add(0x3000)), None);
        assert_eq!(alone.guest_addr_of(high.wrapping_sub(1)), None);
        assert_eq!(GuestMemory::default().translate(0, 0), None);
    }

    #[test]
    fn a_region_offset_in_its_file_shows_the_bytes_at_that_offset() {
        let spec = spec(0, 0, 0x2000, 0x1800);
        let file = std::fs::File::from(spec.fd.try_clone().unwrap());
        std::os::unix::fs::FileExt::write_at(&file, b"hello", 0x1810).unwrap();
        let memory = GuestMemory::map(vec![spec]).unwrap();
        let at = memory.translate(0x10, 5).unwrap();
        // SAFETY: five mapped bytes that only this test touches.
        assert_eq!(unsafe { std::slice::from_raw_parts(at, 5) }, b"hello");
    }

    #[test]
    fn a_snapshot_keeps_what_a_later_one_has_lost() {
        let first = GuestMemory::map(vec![spec(0, 0, 0x1000, 0)]).unwrap();
        let second = first.with_added(spec(0x1000, 0x1000, 0x1000, 0)).unwrap();
        let third = second.without(0, 0, 0x1000).unwrap();
        assert_eq!(first.translate(0, 1), second.translate(0, 1));
        assert_eq!(third.translate(0, 1), None);
        assert!(third.translate(0x1000, 0x1000).is_some());
        assert!(matches!(third.without(0x1000, 0, 0x1000), Err(MemoryError::NoSuchRegion { .. })));
        let region = Arc::downgrade(&first.regions[0]);
        drop(second);
        assert!(region.upgrade().is_some());
        drop(first);
        assert!(region.upgrade().is_none());
    }

    #[test]
    fn malformed_tables_are_refused() {
        let overlapping = vec![spec(0, 0, 0x2000, 0), spec(0x1000, 0x10_0000, 0x1000, 0)];
        assert!(matches!(GuestMemory::map(overlapping), Err(MemoryError::Overlap { .. })));
        let same_user = vec![spec(0, 0x5000, 0x2000, 0), spec(0x10_0000, 0x5000, 0x1000, 0)];
        assert!(matches!(GuestMemory::map(same_user), Err(MemoryError::Overlap { .. })));
        let wraps = RegionSpec { guest_addr: u64::MAX - 10, ..spec(0, 0, 0x1000, 0) };
        assert!(matches!(GuestMemory::map(vec![wraps]), Err(MemoryError::BadRange { .. })));
        let empty = RegionSpec { len: 0, ..spec(0, 0, 0x1000, 0) };
        assert!(matches!(GuestMemory::map(vec![empty]), Err(MemoryError::BadRange { .. })));
        let short = RegionSpec { len: 0x1001, ..spec(0, 0, 0x1000, 0) };
        assert!(matches!(GuestMemory::map(vec![short]), Err(MemoryError::Map { .. })));
        let beyond = RegionSpec { fd_offset: u64::MAX - 5, ..spec(0, 0, 0x1000, 0) };
        assert!(matches!(GuestMemory::map(vec![beyond]), Err(MemoryError::Map { .. })));
        let many = (0..=MAX_REGIONS as u64).map(|i| spec(i << 12, i << 12, 4096, 0)).collect();
        assert!(matches!(GuestMemory::map(many), Err(MemoryError::TooMany(513))));
    }
}
