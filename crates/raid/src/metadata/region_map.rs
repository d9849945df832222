//! The region map: a byte for each region of the array that says what its members hold there.
//!
//! A region is the same part of every member's data. Its bits are durable on every member *before* the write that
//! they are about, so a look at them is enough to know that nothing is to be done: one atomic load. What is not set
//! yet goes out with the next write of its page, together with everything else that waits for that page. Bits are
//! cleared lazily: it is never wrong for one to be still set after a crash.

use super::io::{self, MemberFailures, Target, Targets};
use super::layout::{Layout, MAX_REGIONS, PAGE_BYTES, REGIONS_PER_PAGE};
use super::replicated::{Format, Replicated};
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, Consistency, Uuid};
use block::IoError;
use reactor::sync::{AtomicU8, AtomicU32, AtomicU64, is_broken};
use std::sync::atomic::Ordering;

/// Something was written here; a region without it reads as zeroes on every member.
pub const WRITTEN: u8 = 1;
/// A write may be in flight (consistency `bitmap`): parity may not match after a crash.
pub const DIRTY: u8 = 2;
/// Parity was never made, or is known to be wrong: data is right, redundancy is not.
pub const NEED_SYNC: u8 = 4;
/// Something was written while a member was out: that member lacks it.
pub const STALE: u8 = 8;
/// A crash has left parity open (consistency `bitmap`): what is missing cannot be computed before the next sync.
/// Always with [`NEED_SYNC`].
pub const OPEN: u8 = 16;

const MAGIC: [u8; 8] = *b"FrstRmap";
const HEAD_BYTES: usize = 64;
const PAGE: usize = PAGE_BYTES as usize;
// A model checks one region, and pays for each that there is.
const REGIONS: usize = if cfg!(loom) { 1 } else { REGIONS_PER_PAGE as usize };

/// The region map of a running array, shared by all cores.
pub struct RegionMap {
    array: Uuid,
    initial: u8,
    /// Regions of the array. There is room for more: all that members have pages for.
    regions: AtomicU64,
    /// What holds now: durable, unless it is being cleared.
    now: Box<[AtomicU8]>,
    /// Writes begun in each region, and ended; they wrap. For [`RegionMap::sweep`].
    begun: Box<[AtomicU32]>,
    ended: Box<[AtomicU32]>,
    pages: Box<[Replicated<Vec<u8>>]>,
}

impl RegionMap {
    /// A map in which every region is `initial` and no page was ever written: that of a new array.
    pub fn new(config: &ArrayConfig, initial: u8) -> RegionMap {
        let regions = config.regions() as usize;
        let pages = (0..regions.div_ceil(REGIONS)).map(|_| Replicated::new(vec![initial; REGIONS], 0, 1));
        RegionMap::with(config, initial, pages.collect())
    }

    fn with(config: &ArrayConfig, initial: u8, pages: Box<[Replicated<Vec<u8>>]>) -> RegionMap {
        let regions = pages.len() * REGIONS;
        let mut now = Vec::with_capacity(regions);
        for page in &pages {
            now.extend(page.lock().durable.iter().map(|bits| AtomicU8::new(*bits)));
        }
        RegionMap {
            array: config.uuid,
            initial,
            regions: AtomicU64::new(config.regions()),
            now: now.into(),
            begun: (0..regions).map(|_| AtomicU32::new(0)).collect(),
            ended: (0..regions).map(|_| AtomicU32::new(0)).collect(),
            pages,
        }
    }

    /// Reads the map of an array from its live members: of each page the newest valid copy. Members that hold an older
    /// one are brought up to date before this returns.
    ///
    /// # Errors
    /// Members that could not be read or written: take them out, durably, and call again.
    pub async fn load(
        config: &ArrayConfig,
        initial: u8,
        live: &[Target],
    ) -> Result<RegionMap, MemberFailures> {
        let (map, found) = RegionMap::read(config, initial, live).await?;
        map.repair(&found).await.map(|()| map)
    }

    /// Reads the map as [`RegionMap::load`] does, and writes nothing: members that hold an older copy keep it.
    ///
    /// # Errors
    /// Members that could not be read.
    pub async fn look(
        config: &ArrayConfig,
        initial: u8,
        live: &[Target],
    ) -> Result<RegionMap, MemberFailures> {
        RegionMap::read(config, initial, live).await.map(|(map, _)| map)
    }

    /// The map, and what each member holds of it.
    async fn read<'t>(
        config: &ArrayConfig,
        initial: u8,
        live: &'t [Target],
    ) -> Result<(RegionMap, Vec<(&'t Target, Vec<u8>)>), MemberFailures> {
        let count = (config.regions() as usize).div_ceil(REGIONS);
        let areas = io::all(
            live.iter()
                .map(|target| io::read_long(&*target.channel, target.layout.map_offset, 2 * PAGE * count)),
        );
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for (target, area) in live.iter().zip(areas.await) {
            match area {
                Ok(area) => found.push((target, area)),
                // Some page is unreadable: page by page, so that the others count.
                Err(IoError::Medium | IoError::Corrupt) => {
                    found.push((target, read_pages(target, count).await))
                }
                Err(error) => failures.push((target.slot, error)),
            }
        }
        if !failures.is_empty() || live.is_empty() {
            return Err(MemberFailures(failures));
        }
        let lost =
            initial | WRITTEN | STALE | if config.consistency == Consistency::Bitmap { DIRTY } else { 0 };
        let room = live.iter().map(|target| target.layout.map_pages as usize).min().unwrap_or(0);
        let room = room.min(MAX_REGIONS.div_ceil(REGIONS_PER_PAGE) as usize);
        let used = (0..count).map(|page| newest(config.uuid, page, &found, initial, lost));
        let free = (count..room).map(|_| Replicated::new(vec![initial; REGIONS], 0, 1));
        let pages = used.chain(free).collect();
        Ok((RegionMap::with(config, initial, pages), found))
    }

    /// Writes every page of which a member lacks the newest copy.
    async fn repair(&self, found: &[(&Target, Vec<u8>)]) -> Result<(), MemberFailures> {
        let mut failures: Vec<(usize, IoError)> = Vec::new();
        for (i, page) in self.pages[..self.pages_in_use()].iter().enumerate() {
            let generation = page.lock().generation;
            for (target, area) in found {
                let copies = [0, 1].map(|copy| decode(self.array, i, page_of(area, i, copy)));
                let has_it = copies.into_iter().flatten().any(|(other, _)| other == generation);
                if generation == 0 || has_it || failures.iter().any(|(slot, _)| *slot == target.slot) {
                    continue;
                }
                if let Err(error) = page.write_to(&self.format(i), target).await {
                    failures.push((target.slot, error));
                }
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(MemberFailures(failures)) }
    }

    /// Regions of the array.
    pub fn regions(&self) -> u64 {
        self.regions.load(Ordering::Acquire)
    }

    /// Regions that the array can grow to.
    pub fn room(&self) -> u64 {
        self.now.len() as u64
    }

    /// Makes regions beyond those of the array `bits` on all members, up to `regions`, so that the array can have so
    /// many. They count from [`RegionMap::grow`] on.
    ///
    /// Members may hold pages there from an earlier try, or from another life. So each page is written whatever it
    /// held, with a generation above all that are found.
    ///
    /// # Errors
    /// As [`RegionMap::set`].
    ///
    /// # Panics
    /// When there is no room for so many.
    pub async fn prepare(
        &self,
        regions: u64,
        bits: u8,
        members: &(impl Targets + ?Sized),
    ) -> Result<(), MemberFailures> {
        assert!(regions <= self.room(), "{regions} regions with room for {}", self.room());
        let old = self.regions() as usize;
        let first_free = old.div_ceil(REGIONS);
        for page in old / REGIONS..(regions as usize).div_ceil(REGIONS) {
            let above = if page < first_free { 0 } else { self.newest_on(page, members).await? };
            let from = old.saturating_sub(page * REGIONS).min(REGIONS);
            let mut looks = 0;
            let change = |wanted: &mut Vec<u8>| wanted[from..].fill(bits);
            // The first look is before this write.
            let is_done = |durable: &Vec<u8>| {
                looks += 1;
                looks > 1 && durable[from..].iter().all(|now| *now == bits)
            };
            {
                let mut state = self.pages[page].lock();
                state.generation = state.generation.max(above);
            }
            self.pages[page].change(&self.format(page), members, change, is_done).await?;
        }
        self.now[old..regions as usize].iter().for_each(|now| now.store(bits, Ordering::SeqCst));
        Ok(())
    }

    /// The highest generation of a page that is not in use.
    async fn newest_on(&self, page: usize, members: &(impl Targets + ?Sized)) -> Result<u64, MemberFailures> {
        let (mut newest, mut failures) = (0, Vec::new());
        for target in members.targets() {
            for copy in [0, 1] {
                let place = target.layout.map_page(page as u32, copy);
                match io::read(&*target.channel, place, PAGE).await {
                    Ok(bytes) => {
                        let found = decode(self.array, page, bytes.as_slice());
                        newest = found.map_or(newest, |(generation, _)| newest.max(generation));
                    }
                    // What cannot be read now must not be readable later.
                    Err(IoError::Medium | IoError::Corrupt) => {
                        let zeroed = io::write(&*target.channel, place, &[0; PAGE]).await;
                        failures.extend(zeroed.err().map(|error| (target.slot, error)));
                    }
                    Err(error) => failures.push((target.slot, error)),
                }
            }
        }
        if failures.is_empty() { Ok(newest) } else { Err(MemberFailures(failures)) }
    }

    /// The array has so many regions from now on; they were made ready ([`RegionMap::prepare`]).
    pub fn grow(&self, regions: u64) {
        self.regions.store(regions, Ordering::Release);
    }

    fn pages_in_use(&self) -> usize {
        (self.regions() as usize).div_ceil(REGIONS)
    }

    /// What a region is whose page was never written.
    pub fn initial(&self) -> u8 {
        self.initial
    }

    /// A region's bits.
    #[inline]
    pub fn get(&self, region: u64) -> u8 {
        self.now[region as usize].load(Ordering::SeqCst)
    }

    /// Whether all of `bits` are set in a region, durably. What every write asks; costs a load.
    #[inline]
    pub fn has(&self, region: u64, bits: u8) -> bool {
        self.get(region) & bits == bits
    }

    /// Sets `bits` in a region, and returns when they are durable on all `members`. Costs a load when they are.
    ///
    /// # Errors
    /// Members that could not be written: the caller takes them out, durably, and calls again.
    pub async fn set(
        &self,
        region: u64,
        bits: u8,
        members: &(impl Targets + ?Sized),
    ) -> Result<(), MemberFailures> {
        if self.has(region, bits) {
            return Ok(());
        }
        let (page, i) = (region as usize / REGIONS, region as usize % REGIONS);
        let now = &self.now[region as usize];
        let is_done = |durable: &Vec<u8>| {
            let is_done = durable[i] & bits == bits;
            if is_done {
                now.fetch_or(bits, Ordering::SeqCst);
            }
            is_done
        };
        let format = self.format(page);
        self.pages[page].change(&format, members, |wanted| wanted[i] |= bits, is_done).await
    }

    /// Sets `bits` in every region for which `is_chosen` (number, bits) holds, page by page.
    ///
    /// # Errors
    /// As [`RegionMap::set`].
    pub async fn set_where(
        &self,
        bits: u8,
        members: &(impl Targets + ?Sized),
        is_chosen: impl Fn(u64, u8) -> bool,
    ) -> Result<(), MemberFailures> {
        for page in 0..self.pages_in_use() {
            let first = page * REGIONS;
            let chosen: Vec<usize> = (first..(self.regions() as usize).min(first + REGIONS))
                .filter(|region| is_chosen(*region as u64, self.get(*region as u64)))
                .filter(|region| !self.has(*region as u64, bits))
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let change = |wanted: &mut Vec<u8>| chosen.iter().for_each(|r| wanted[r - first] |= bits);
            let is_done = |durable: &Vec<u8>| {
                let is_done = chosen.iter().all(|r| durable[r - first] & bits == bits);
                chosen.iter().filter(|_| is_done).for_each(|r| {
                    self.now[*r].fetch_or(bits, Ordering::SeqCst);
                });
                is_done
            };
            self.pages[page].change(&self.format(page), members, change, is_done).await?;
        }
        Ok(())
    }

    /// Makes every region of the array what `change` (number, bits) says, durably: all bits of a region, and all regions
    /// of a page, at once. Not while anybody else changes the map.
    ///
    /// # Errors
    /// As [`RegionMap::set`].
    pub async fn change_all(
        &self,
        members: &(impl Targets + ?Sized),
        change: impl Fn(u64, u8) -> u8,
    ) -> Result<(), MemberFailures> {
        for page in 0..self.pages_in_use() {
            let first = page * REGIONS;
            let regions = first..(self.regions() as usize).min(first + REGIONS);
            let goal: Vec<u8> =
                regions.map(|region| change(region as u64, self.get(region as u64))).collect();
            let write = |wanted: &mut Vec<u8>| wanted[..goal.len()].copy_from_slice(&goal);
            let is_done = |durable: &Vec<u8>| durable[..goal.len()] == goal;
            self.pages[page].change(&self.format(page), members, write, is_done).await?;
            for (now, bits) in self.now[first..].iter().zip(&goal) {
                now.store(*bits, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// Clears `bits` in a region, in memory. Members learn of it with the next write of the page; [`RegionMap::settle`]
    /// makes one.
    ///
    /// The caller knows that what they say is over. For [`DIRTY`] there is [`RegionMap::sweep`].
    pub fn clear(&self, region: u64, bits: u8) {
        let mut page = self.pages[region as usize / REGIONS].lock();
        page.wanted[region as usize % REGIONS] &= !bits;
        self.now[region as usize].fetch_and(!bits, Ordering::SeqCst);
    }

    /// Notes that a write into the region begins. Before its bits are looked at.
    #[inline]
    pub fn begin(&self, region: u64) {
        self.begun[region as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a write into the region begins, unless `is_logged` says that it needs no mark; whether it says so. It is
    /// asked after the note: a thread that lets writes be logged and then sees that none is in flight
    /// ([`RegionMap::sweep_idle`]) knows that no later one needs the mark.
    #[inline]
    pub fn begin_unless(&self, region: u64, is_logged: impl FnOnce() -> bool) -> bool {
        if is_broken("a write begins before it asks whether it is logged") {
            let is_logged = is_logged();
            if !is_logged {
                self.begin(region);
            }
            return is_logged;
        }
        self.begin(region);
        let is_logged = is_logged();
        if is_logged {
            self.end(region); // what is logged needs no mark: it is replayed
        }
        is_logged
    }

    /// Notes that a write into the region has ended: it is durable on all members, parity too, or the region is marked
    /// otherwise.
    #[inline]
    pub fn end(&self, region: u64) {
        self.ended[region as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// Clears [`DIRTY`], in memory, in every region that no write has touched since the last sweep, and says in how
    /// many. `memory` is what the last sweep left: empty for the first.
    pub fn sweep(&self, memory: &mut Vec<u32>) -> usize {
        memory.resize(self.regions() as usize, 0);
        let mut cleared = 0;
        for (region, before) in memory.iter_mut().enumerate() {
            // What has ended is counted first: a write in between looks as if it were in flight.
            let ended = self.ended[region].load(Ordering::SeqCst);
            let begun = self.begun[region].load(Ordering::SeqCst);
            let has_ended = begun == ended || mutant::is(Mutant::MarksClearedInFlight);
            let is_idle = std::mem::replace(before, begun) == begun && has_ended;
            if is_idle && self.has(region as u64, DIRTY) {
                cleared += usize::from(self.clear_dirty(region, begun));
            }
        }
        cleared
    }

    /// Clears [`DIRTY`], in memory, in one region, unless writes are in flight there; whether none is.
    pub fn sweep_idle(&self, region: u64) -> bool {
        let region = region as usize;
        let ended = self.ended[region].load(Ordering::SeqCst);
        let begun = self.begun[region].load(Ordering::SeqCst);
        let has_ended = begun == ended || mutant::is(Mutant::MarksClearedInFlight);
        has_ended && (!self.has(region as u64, DIRTY) || self.clear_dirty(region, begun))
    }

    /// Clears [`DIRTY`] in a region unless a write has begun there since `begun` had; whether it did.
    fn clear_dirty(&self, region: usize, begun: u32) -> bool {
        let mut page = self.pages[region / REGIONS].lock();
        if !is_broken("the bit goes before the second look") {
            self.now[region].fetch_and(!DIRTY, Ordering::SeqCst);
        }
        // A write that began meanwhile either sees that the bit is gone, or is seen here: `begin` comes before its
        // look, this look comes after the clearing.
        let is_idle =
            self.begun[region].load(Ordering::SeqCst) == begun || is_broken("a sweep looks again for writes");
        if is_broken("the bit goes before the second look") && is_idle {
            self.now[region].fetch_and(!DIRTY, Ordering::SeqCst);
        }
        if is_idle {
            page.wanted[region % REGIONS] &= !DIRTY;
        } else {
            self.now[region].fetch_or(DIRTY, Ordering::SeqCst);
        }
        is_idle
    }

    /// Writes every page from which bits were cleared.
    ///
    /// # Errors
    /// As [`RegionMap::set`].
    pub async fn settle(&self, members: &(impl Targets + ?Sized)) -> Result<(), MemberFailures> {
        for (i, page) in self.pages[..self.pages_in_use()].iter().enumerate() {
            let is_settled = {
                let page = page.lock();
                page.wanted == page.durable
            };
            if !is_settled {
                // One write is enough: what changes meanwhile is for the next time.
                let mut looks = 0;
                let once = |_: &Vec<u8>| {
                    looks += 1;
                    looks > 1
                };
                page.change(&self.format(i), members, |_| {}, once).await?;
            }
        }
        Ok(())
    }

    /// Writes the whole map to a member that is about to take writes. Not while anybody sets bits; they may be cleared.
    ///
    /// # Errors
    /// When the member cannot be written.
    pub async fn write_to(&self, target: &Target) -> block::IoResult {
        for (i, page) in self.pages[..self.pages_in_use()].iter().enumerate() {
            page.write_to(&self.format(i), target).await?;
        }
        Ok(())
    }

    /// How many regions have all of `bits`.
    pub fn count(&self, bits: u8) -> u64 {
        (0..self.regions()).filter(|region| self.has(*region, bits)).count() as u64
    }

    fn format(&self, page: usize) -> PageFormat {
        PageFormat { array: self.array, page }
    }
}

/// How a page is written.
struct PageFormat {
    array: Uuid,
    page: usize,
}

impl Format<Vec<u8>> for PageFormat {
    fn encode(&self, regions: &Vec<u8>, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[12..16].copy_from_slice(&(self.page as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.array.0);
        bytes[32..40].copy_from_slice(&generation.to_le_bytes());
        bytes[HEAD_BYTES..].copy_from_slice(regions);
        let crc = crc32c::crc32c(&bytes);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn place(&self, layout: &Layout, copy: usize) -> u64 {
        layout.map_page(self.page as u32, copy)
    }
}

/// The generation and the regions of a copy of a page, when it is valid and of this array.
fn decode(array: Uuid, page: usize, bytes: &[u8]) -> Option<(u64, &[u8])> {
    let crc = u32::from_le_bytes(bytes[8..12].try_into().ok()?);
    let computed =
        crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&bytes[..8]), &[0; 4]), &bytes[12..]);
    let is_ours = bytes[..8] == MAGIC
        && crc == computed
        && bytes[12..16] == (page as u32).to_le_bytes()
        && bytes[16..32] == array.0;
    let generation = u64::from_le_bytes(bytes[32..40].try_into().ok()?);
    // A counter that can still be counted on.
    (is_ours && generation >> 63 == 0 && generation > 0).then_some((generation, &bytes[HEAD_BYTES..]))
}

fn page_of(area: &[u8], page: usize, copy: usize) -> &[u8] {
    &area[(2 * page + copy) * PAGE..][..PAGE]
}

/// The newest valid copy of a page over all members. `lost` is what its regions are when every copy is broken.
fn newest(
    array: Uuid,
    page: usize,
    found: &[(&Target, Vec<u8>)],
    initial: u8,
    lost: u8,
) -> Replicated<Vec<u8>> {
    let copies = || found.iter().flat_map(|(_, area)| [0, 1].map(|copy| (copy, page_of(area, page, copy))));
    let valid = copies().filter_map(|(copy, bytes)| Some((copy, decode(array, page, bytes)?)));
    if let Some((copy, (generation, regions))) = valid.max_by_key(|(_, (generation, _))| *generation) {
        return Replicated::new(regions.to_vec(), generation, copy);
    }
    // Otherwise a first write was torn everywhere, or a page rotted everywhere: everything that costs only time.
    // A write that was acknowledged is on every live member: one that has only zeroes proves that there was none.
    let is_untouched =
        |area: &Vec<u8>| [0, 1].iter().all(|copy| page_of(area, page, *copy).iter().all(|byte| *byte == 0));
    if !found.iter().any(|(_, area)| is_untouched(area)) {
        tracing::warn!(page, "no copy of a page of the region map is valid");
        // Of a generation that nobody has, so that it is written to every member before anybody relies on it.
        return Replicated::new(vec![lost; REGIONS], 1, 1);
    }
    Replicated::new(vec![initial; REGIONS], 0, 1)
}

/// Reads a member's pages one by one; one that cannot be read is as good as one that is broken.
async fn read_pages(target: &Target, count: usize) -> Vec<u8> {
    let mut area = Vec::with_capacity(2 * count * PAGE);
    for i in 0..2 * count {
        let place = target.layout.map_offset + (i * PAGE) as u64;
        match io::read(&*target.channel, place, PAGE).await {
            Ok(buffer) => area.extend_from_slice(buffer.as_slice()),
            Err(_) => area.resize(area.len() + PAGE, 0xff),
        }
    }
    area
}

#[cfg(all(test, loom))]
mod models;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::{Disk, config, disks, targets};
    use proptest::prelude::*;
    use reactor::{current, run_simulated};
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    /// An array whose map has several pages.
    fn wide() -> ArrayConfig {
        let mut config = config(2, 1);
        config.region_bytes = 4096;
        config.geometry.group_stripes = 2 * REGIONS_PER_PAGE + 100;
        config
    }

    fn big_disks(count: usize) -> Vec<Disk> {
        let power = crate::metadata::testing::Power::default();
        (0..count).map(|_| Disk::new(40 << 20, &power)).collect()
    }

    #[test]
    fn regions_that_are_added_are_what_was_last_said_whatever_members_hold_there() {
        run_simulated(8, |_| async {
            let (large, disks) = (wide(), big_disks(3));
            let mut small = large.clone();
            small.geometry.group_stripes = 100;
            let targets = targets(&large, &disks);
            let last = large.regions() - 1;
            // A try that ended before the array had grown, and a member with pages from another life.
            let map = RegionMap::load(&small, 0, &targets).await.unwrap();
            map.set(99, WRITTEN, &targets).await.unwrap();
            map.prepare(large.regions(), WRITTEN | NEED_SYNC, &targets).await.unwrap();
            map.prepare(large.regions(), STALE, &targets[..1]).await.unwrap();
            assert_eq!((map.regions(), map.count(NEED_SYNC)), (100, 0));
            let map = RegionMap::load(&small, 0, &targets).await.unwrap();
            assert_eq!((map.get(0), map.get(99), map.regions()), (0, WRITTEN, 100));
            assert!(map.room() > last);
            map.prepare(large.regions(), 0, &targets).await.unwrap();
            map.grow(large.regions());
            map.set(last, WRITTEN, &targets).await.unwrap();
            for map in [map, RegionMap::load(&large, NEED_SYNC, &targets).await.unwrap()] {
                assert_eq!((map.get(99), map.get(100), map.get(REGIONS_PER_PAGE)), (WRITTEN, 0, 0));
                assert_eq!((map.get(last), map.count(WRITTEN)), (WRITTEN, 2));
            }
        });
    }

    #[test]
    fn bits_are_there_again_after_a_restart_and_setting_them_again_writes_nothing() {
        run_simulated(1, |_| async {
            let (config, disks) = (wide(), big_disks(3));
            let targets = targets(&config, &disks);
            let map = RegionMap::new(&config, 0);
            for region in [0, 1, REGIONS_PER_PAGE, 2 * REGIONS_PER_PAGE + 99] {
                map.set(region, WRITTEN | NEED_SYNC, &targets).await.unwrap();
            }
            let writes = disks[0].writes();
            map.set(1, WRITTEN, &targets).await.unwrap();
            assert_eq!(disks[0].writes(), writes);
            map.clear(0, NEED_SYNC);
            assert_eq!(map.get(0), WRITTEN);
            map.set(0, NEED_SYNC, &targets).await.unwrap();
            assert_eq!(disks[0].writes(), writes, "the members have not learned of the clearing");
            map.clear(0, NEED_SYNC);
            map.settle(&targets).await.unwrap();
            assert_eq!(disks[0].writes(), writes + 1);
            let again = RegionMap::load(&config, 0, &targets).await.unwrap();
            assert_eq!((0..map.regions()).find(|r| map.get(*r) != again.get(*r)), None);
            assert_eq!((again.get(0), again.get(1)), (WRITTEN, WRITTEN | NEED_SYNC));
        });
    }

    #[test]
    fn many_writers_of_a_page_share_its_writes() {
        run_simulated(2, |_| async {
            let (config, disks) = (wide(), big_disks(3));
            disks.iter().for_each(|disk| disk.be_slow(1000));
            let targets = Rc::new(targets(&config, &disks));
            let map = Rc::new(RegionMap::new(&config, 0));
            let done = Rc::new(Cell::new(0));
            for region in 0..1000 {
                let (map, targets, done) = (map.clone(), targets.clone(), done.clone());
                current().spawn(async move {
                    map.set(region, WRITTEN, &*targets).await.unwrap();
                    assert!(map.has(region, WRITTEN));
                    done.set(done.get() + 1);
                });
            }
            current().sleep(1_000_000).await;
            assert_eq!((done.get(), disks[0].writes()), (1000, 2));
        });
    }

    #[test]
    fn a_member_that_cannot_be_written_is_named_and_without_it_the_bit_is_set() {
        run_simulated(3, |_| async {
            let (config, disks) = (wide(), big_disks(3));
            let mut targets = targets(&config, &disks);
            let map = RegionMap::new(&config, 0);
            map.set(5, DIRTY, &targets).await.unwrap();
            map.clear(5, DIRTY);
            disks[1].fail(Some(IoError::Medium));
            let failed = map.settle(&targets).await.unwrap_err();
            assert_eq!(failed, MemberFailures(vec![(1, IoError::Medium)]));
            // The others hold a page without the bit by now: it must be written again, though the last page that was
            // durable everywhere has it.
            targets.remove(1);
            map.set(5, DIRTY, &targets).await.unwrap();
            assert!(RegionMap::load(&config, 0, &targets).await.unwrap().has(5, DIRTY));
            assert_eq!(map.set(6, DIRTY, &Vec::new()).await, Err(MemberFailures(vec![])));
        });
    }

    #[test]
    fn a_member_that_lacks_the_newest_page_gets_it_when_the_map_is_loaded() {
        run_simulated(4, |_| async {
            let (config, disks) = (wide(), big_disks(2));
            let targets = targets(&config, &disks);
            let map = RegionMap::new(&config, NEED_SYNC);
            map.set(7, WRITTEN, &targets).await.unwrap();
            map.set(8, WRITTEN, &targets[..1]).await.unwrap();
            let map = RegionMap::load(&config, NEED_SYNC, &targets).await.unwrap();
            assert!(map.has(8, WRITTEN | NEED_SYNC));
            let second = RegionMap::load(&config, NEED_SYNC, &targets[1..]).await.unwrap();
            assert!(second.has(8, WRITTEN));
        });
    }

    #[test]
    fn a_member_that_comes_while_bits_are_being_cleared_does_not_bring_them_back() {
        run_simulated(8, |_| async {
            let (config, disks) = (wide(), big_disks(3));
            let targets = targets(&config, &disks);
            let map = Rc::new(RegionMap::new(&config, 0));
            map.set(7, WRITTEN | DIRTY, &targets[..2]).await.unwrap();
            map.clear(7, DIRTY);
            disks[1].be_slow(1_000_000);
            let is_settled = Rc::new(Cell::new(false));
            let others = super::super::testing::targets(&config, &disks[..2]);
            let (clearing, seen) = (map.clone(), is_settled.clone());
            current().spawn(async move {
                clearing.settle(&others).await.unwrap();
                seen.set(true);
            });
            current().sleep(1).await;
            map.write_to(&targets[2]).await.unwrap();
            assert!(!is_settled.get(), "the member came while the page was being written");
            while !is_settled.get() {
                current().sleep(1_000_000).await;
            }
            // In whatever order they are looked at.
            for order in [[0, 1, 2], [2, 1, 0]] {
                let members: Vec<Target> = order.into_iter().map(|slot| targets[slot].clone()).collect();
                assert_eq!(RegionMap::load(&config, 0, &members).await.unwrap().get(7), WRITTEN);
            }
        });
    }

    #[test]
    fn a_page_that_is_broken_everywhere_makes_work_but_hides_nothing() {
        run_simulated(5, |_| async {
            let (config, disks) = (wide(), big_disks(1));
            let targets = targets(&config, &disks);
            RegionMap::new(&config, 0).set(7, WRITTEN, &targets).await.unwrap();
            let place = targets[0].layout.map_page(0, 0) as usize;
            disks[0].edit(|bytes| bytes[place + 100] ^= 1);
            let map = RegionMap::load(&config, 0, &targets).await.unwrap();
            assert_eq!((map.get(0), map.get(REGIONS_PER_PAGE)), (WRITTEN | STALE, 0));
        });
    }

    #[test]
    fn a_sweep_clears_what_is_idle_and_nothing_else() {
        run_simulated(6, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let targets = targets(&config, &disks);
            let (map, mut memory) = (RegionMap::new(&config, 0), Vec::new());
            for region in 0..2 {
                map.begin(region);
                map.set(region, WRITTEN | DIRTY, &targets).await.unwrap();
            }
            map.end(0);
            assert_eq!(map.sweep(&mut memory), 0, "region 0 was just written");
            assert_eq!(map.sweep(&mut memory), 1);
            assert_eq!((map.get(0), map.get(1)), (WRITTEN, WRITTEN | DIRTY));
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// Writers set and clear bits of one page on slow disks until power goes; what was acknowledged is found.
        #[test]
        fn what_was_durable_is_found_after_power_went(
            seed in 1..u64::MAX, steps in proptest::collection::vec((0..16u64, 0..4u32, any::<bool>()), 1..40), cut in 1..200u64,
        ) {
            run_simulated(seed, |_| async move {
                let (config, (disks, power)) = (config(2, 1), disks(3));
                let targets = Rc::new(targets(&config, &disks));
                let promised = Rc::new(RefCell::new([0u8; 16]));
                for _ in 0..2 {
                    let map = Rc::new(RegionMap::load(&config, 0, &targets).await.unwrap());
                    for region in 0..config.regions() {
                        assert_eq!(promised.borrow()[region as usize] & !map.get(region), 0);
                    }
                    disks.iter().for_each(|disk| disk.be_slow(500));
                    power.fail_after(cut);
                    for (region, bit, clears) in steps.iter().copied() {
                        let (map, targets, promised) = (map.clone(), targets.clone(), promised.clone());
                        let (region, bit) = (region % config.regions(), 1 << bit);
                        let at = current().random_u64() % 3000;
                        current().spawn(async move {
                            current().sleep(at).await;
                            if clears {
                                promised.borrow_mut()[region as usize] &= !bit;
                                map.clear(region, bit);
                                let _ = map.settle(&*targets).await;
                            } else if map.set(region, bit, &*targets).await.is_ok() && map.has(region, bit) {
                                promised.borrow_mut()[region as usize] |= bit;
                            }
                        });
                    }
                    current().sleep(1_000_000).await;
                    power.restore();
                    disks.iter().for_each(|disk| disk.be_slow(0));
                }
            });
        }

        #[test]
        fn any_bytes_are_a_page_or_not(bytes in proptest::collection::vec(any::<u8>(), PAGE)) {
            prop_assert_eq!(decode(Uuid([1; 16]), 0, &bytes), None);
        }
    }
}
