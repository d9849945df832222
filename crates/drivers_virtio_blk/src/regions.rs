//! The memory that the server knows, and its guest addresses.

use block::{Data, MemoryRegion};
use drivers::shared_memory::HUGE_PAGE;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Alignment of regions in guest addresses, for servers that use huge pages.
const GUEST_ALIGNMENT: u64 = HUGE_PAGE as u64;

/// A region and its guest physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The memory in this process.
    pub memory: MemoryRegion,
    /// Guest address of the first byte.
    pub guest_addr: u64,
}

impl Region {
    /// Guest address after the last byte.
    fn guest_end(&self) -> u64 {
        self.guest_addr + self.memory.len as u64
    }
}

/// All regions of a session. Changes are rare and made one at a time; queues keep a copy
/// ([`RegionCache`]). The lock of the list is never held while the device is asked for something,
/// because queues take it.
#[derive(Debug, Default)]
pub struct Regions {
    generation: AtomicU32,
    list: Mutex<Vec<Region>>,
    change: Mutex<()>,
    /// Whether they include the buffers of the cores, through which data of other memory is copied.
    have_buffers: AtomicBool,
}

impl Regions {
    /// Begins a change, which ends with the returned value. Waits for the end of another change.
    pub(super) fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the regions.
    pub fn lock(&self) -> MutexGuard<'_, Vec<Region>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a region, and notifies the queues.
    pub(super) fn add(&self, region: Region) {
        self.lock().push(region);
        if reactor::has_buffers(&region.memory) {
            self.have_buffers.store(true, Ordering::Release);
        }
        self.publish();
    }

    /// Notifies the queues that the list has changed.
    pub fn publish(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// The lowest free guest address in the ranges `usable` for `len` bytes, apart from the regions in
/// `list`. Low addresses keep a dirty log short. A gap separates regions, so that buffers with
/// consecutive guest addresses lie in one region.
pub fn free_guest_addr(list: &[Region], len: usize, usable: &[RangeInclusive<u64>]) -> Option<u64> {
    let fits = |start: u64| {
        let end = start.checked_add(len as u64)?;
        let is_usable = usable.iter().any(|range| range.contains(&start) && range.contains(&(end - 1)));
        let is_free = list.iter().all(|r| end < r.guest_addr || r.guest_end() < start);
        (is_usable && is_free).then_some(start)
    };
    let aligned = |addr: u64| addr.checked_next_multiple_of(GUEST_ALIGNMENT);
    let after = |r: &Region| aligned(r.guest_end() + 1);
    // Some devices treat address 0 as none, so no region starts there.
    let first = |range: &RangeInclusive<u64>| aligned((*range.start()).max(1));
    let mut starts: Vec<u64> = list.iter().filter_map(after).chain(usable.iter().filter_map(first)).collect();
    starts.sort_unstable();
    starts.into_iter().find_map(fits)
}

/// One queue's copy of the regions, and the last one used.
#[derive(Debug)]
pub struct RegionCache {
    generation: u32,
    last: Region,
    list: Vec<Region>,
}

impl RegionCache {
    /// An empty copy.
    pub fn new() -> RegionCache {
        let nothing = MemoryRegion { addr: 0, len: 0, fd: None, fd_offset: 0 };
        RegionCache { generation: 0, last: Region { memory: nothing, guest_addr: 0 }, list: Vec::new() }
    }

    /// The guest address of the `len` bytes at `base`; `None` unless they lie in one region.
    #[inline]
    pub fn guest_addr(&mut self, regions: &Regions, base: *const u8, len: usize) -> Option<u64> {
        if regions.generation.load(Ordering::Acquire) == self.generation
            && let Some(addr) = addr_in(&self.last, base, len)
        {
            return Some(addr);
        }
        self.search(regions, base, len)
    }

    /// Whether all of the data lies in regions, or none of them has the buffers of the cores.
    #[inline]
    pub fn reaches(&mut self, regions: &Regions, data: &Data<'_>) -> bool {
        !regions.have_buffers.load(Ordering::Acquire)
            || data.iter().all(|segment| self.guest_addr(regions, segment.base, segment.len).is_some())
    }

    #[cold]
    fn search(&mut self, regions: &Regions, base: *const u8, len: usize) -> Option<u64> {
        let generation = regions.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.list.clear();
            self.list.extend_from_slice(&regions.lock());
            self.list.sort_unstable_by_key(|r| r.memory.addr);
            self.generation = generation;
        }
        let after = self.list.partition_point(|r| r.memory.addr <= base.addr());
        let region = *self.list.get(after.checked_sub(1)?)?;
        let addr = addr_in(&region, base, len)?;
        self.last = region;
        Some(addr)
    }
}

#[inline]
fn addr_in(region: &Region, base: *const u8, len: usize) -> Option<u64> {
    let offset = base.addr().wrapping_sub(region.memory.addr);
    (offset < region.memory.len && len <= region.memory.len - offset)
        .then(|| region.guest_addr + offset as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(addr: usize, len: usize, guest_addr: u64) -> Region {
        Region { memory: MemoryRegion { addr, len, fd: None, fd_offset: 0 }, guest_addr }
    }

    fn find(cache: &mut RegionCache, regions: &Regions, addr: usize, len: usize) -> Option<u64> {
        cache.guest_addr(regions, std::ptr::without_provenance(addr), len)
    }

    #[test]
    fn memory_is_found_only_where_it_lies_in_one_region() {
        let regions = Regions::default();
        regions.lock().extend([region(0x5000, 0x1000, 0x40_0000), region(0x4000, 0x1000, 0x20_0000)]);
        regions.publish();
        let mut cache = RegionCache::new();
        for _ in 0..2 {
            assert_eq!(find(&mut cache, &regions, 0x4010, 0x10), Some(0x20_0010));
            assert_eq!(find(&mut cache, &regions, 0x5ff0, 0x10), Some(0x40_0ff0));
            assert_eq!(find(&mut cache, &regions, 0x5ff0, 0x11), None);
            assert_eq!(find(&mut cache, &regions, 0x4ff0, 0x20), None, "across two regions");
            assert_eq!(find(&mut cache, &regions, 0x3fff, 1), None);
            assert_eq!(find(&mut cache, &regions, 0x6000, 0), None);
            assert_eq!(find(&mut cache, &regions, 0x4010, usize::MAX), None);
        }
    }

    #[test]
    fn data_is_out_of_reach_only_if_buffers_are_within() {
        let regions = Regions::default();
        regions.add(region(0x4000, 0x1000, 0x20_0000));
        let at = |addr| block::Segment { base: std::ptr::without_provenance_mut(addr), len: 0x10 };
        let (inside, outside) = ([at(0x4000), at(0x4ff0)], [at(0x4000), at(0x5000)]);
        let mut cache = RegionCache::new();
        // SAFETY: nothing accesses the memory.
        let mut reaches = |list: &[block::Segment]| cache.reaches(&regions, &unsafe { Data::new(list) });
        assert!(reaches(&inside) && reaches(&outside));
        regions.have_buffers.store(true, Ordering::Release);
        assert!(reaches(&inside) && !reaches(&outside));
    }

    #[test]
    fn a_region_that_comes_back_elsewhere_is_not_mistaken_for_the_old_one() {
        let regions = Regions::default();
        regions.lock().push(region(0x4000, 0x1000, 0x20_0000));
        regions.publish();
        let mut cache = RegionCache::new();
        assert_eq!(find(&mut cache, &regions, 0x4000, 1), Some(0x20_0000));
        regions.lock()[0] = region(0x4000, 0x1000, 0x60_0000);
        regions.publish();
        assert_eq!(find(&mut cache, &regions, 0x4000, 1), Some(0x60_0000));
        regions.lock().clear();
        regions.publish();
        assert_eq!(find(&mut cache, &regions, 0x4000, 1), None);
    }

    #[test]
    fn guest_addresses_fill_gaps_and_never_overlap() {
        let mut list = Vec::new();
        let all = [0..=u64::MAX];
        for len in [0x1000, 3 << 20, 2 << 20, 0x2000] {
            let at = free_guest_addr(&list, len, &all).unwrap();
            list.push(region(0, len, at));
        }
        assert_eq!(list.iter().map(|r| r.guest_addr >> 20).collect::<Vec<_>>(), [2, 4, 8, 12]);
        list.remove(1);
        assert_eq!(free_guest_addr(&list, 3 << 20, &all), Some(4 << 20));
        assert_eq!(free_guest_addr(&list, 4 << 20, &all), Some(14 << 20), "there would be no gap");
        assert_eq!(free_guest_addr(&list, usize::MAX, &all), None);
    }

    #[test]
    fn addresses_that_a_device_cannot_reach_are_not_given_out() {
        // The address space of a PC's IOMMU: a hole for interrupts, and an end.
        let usable = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1];
        let find = |list: &[Region], len| free_guest_addr(list, len, &usable);
        assert_eq!(find(&[], 0x1000), Some(2 << 20));
        let mut list = vec![region(0, 0xfe00_0000, 2 << 20)];
        assert_eq!(find(&list, 0x10_0000), Some(0xfe40_0000));
        assert_eq!(find(&list, 0x100_0000), Some(0xff00_0000), "it would reach into the hole");
        list.push(region(0, 0x1000, 0xff00_0000));
        assert_eq!(find(&list, 1 << 38), Some(0xff20_0000));
        assert_eq!(find(&list, 1 << 39), None);
        assert_eq!(free_guest_addr(&[], 1, &[]), None);
        assert_eq!(free_guest_addr(&[], 0x1000, &[u64::MAX - 0xfff..=u64::MAX]), None);
        assert_eq!(free_guest_addr(&[], 0x1000, &[0x1000..=0x2fff]), None, "no aligned start in it");
    }
}
