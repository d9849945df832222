//! The write-intent bitmap: a byte for each region of the array with the state of the members
//! there.
//!
//! A region is the same part of every member's data. Its bits are durable on every member *before*
//! a write that needs them. So one atomic load shows that a write needs no metadata update. A new
//! bit is written with the next write of its page, together with all other changes of the page.
//! Bits are cleared lazily: a bit that is still set after a crash is always correct.

use super::io::{self, MemberFailures, Target, Targets};
use super::layout::{Layout, MAX_REGIONS, PAGE_BYTES, REGIONS_PER_PAGE};
use super::replicated::{Format, Replicated};
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, Consistency, Uuid};
use block::IoError;
use reactor::sync::{AtomicU8, AtomicU32, AtomicU64, is_broken};
use std::sync::atomic::Ordering;

/// The region has been written; a region without this bit reads as zeroes on every member.
pub const WRITTEN: u8 = 1;
/// A write may be in flight (consistency `bitmap`): parity may not match after a crash.
pub const DIRTY: u8 = 2;
/// Parity was never computed, or is known to be wrong: data is correct, redundancy is not.
pub const NEED_SYNC: u8 = 4;
/// The region was written, or synced, while a member was failed: that member lacks it.
pub const STALE: u8 = 8;
/// A crash has left parity inconsistent (consistency `bitmap`): missing strips cannot be
/// reconstructed before the next sync. Always with [`NEED_SYNC`].
pub const OPEN: u8 = 16;

const MAGIC: [u8; 8] = *b"FrstRmap";
const HEAD_BYTES: usize = 64;
const PAGE: usize = PAGE_BYTES as usize;
// A model checks one region; every further region costs it time.
const REGIONS: usize = if cfg!(loom) { 1 } else { REGIONS_PER_PAGE as usize };
/// Sets of counters of writes. A core uses one of them, so that up to this number of cores never
/// write to the same cache line.
const SHARDS: usize = if cfg!(loom) { 2 } else { 8 };

/// The write-intent bitmap of a running array, shared by all cores.
pub struct IntentBitmap {
    array: Uuid,
    initial: u8,
    /// Regions of the array. There is room for all regions that members have pages for.
    regions: AtomicU64,
    /// The present bits: durable, except that a cleared bit may still be set on members.
    now: Box<[AtomicU8]>,
    /// The writes in each region, by shard. For [`IntentBitmap::sweep`].
    writes: [Box<[Writes]>; SHARDS],
    pages: Box<[Replicated<Vec<u8>>]>,
}

/// Writes that have begun in a region, and that have ended, counted by the cores of one shard; they
/// wrap.
struct Writes {
    begun: AtomicU32,
    ended: AtomicU32,
}

impl Writes {
    fn new() -> Writes {
        Writes { begun: AtomicU32::new(0), ended: AtomicU32::new(0) }
    }
}

impl IntentBitmap {
    /// The map of a new array, in which every region is `initial` and no page was ever written.
    pub fn new(config: &ArrayConfig, initial: u8) -> IntentBitmap {
        let regions = config.regions() as usize;
        let pages = (0..regions.div_ceil(REGIONS)).map(|_| Replicated::new(vec![initial; REGIONS], 0, 1));
        IntentBitmap::with(config, initial, pages.collect())
    }

    fn with(config: &ArrayConfig, initial: u8, pages: Box<[Replicated<Vec<u8>>]>) -> IntentBitmap {
        let regions = pages.len() * REGIONS;
        let mut now = Vec::with_capacity(regions);
        for page in &pages {
            now.extend(page.lock().durable.iter().map(|bits| AtomicU8::new(*bits)));
        }
        IntentBitmap {
            array: config.uuid,
            initial,
            regions: AtomicU64::new(config.regions()),
            now: now.into(),
            writes: std::array::from_fn(|_| (0..regions).map(|_| Writes::new()).collect()),
            pages,
        }
    }

    /// Reads the map of an array from its live members: of each page the newest valid copy. Before
    /// it returns, it updates members with an older copy.
    ///
    /// # Errors
    /// Members that could not be read or written: the caller marks them failed, durably, and calls
    /// again.
    pub async fn load(
        config: &ArrayConfig,
        initial: u8,
        live: &[Target],
    ) -> Result<IntentBitmap, MemberFailures> {
        let (map, found) = IntentBitmap::read(config, initial, live).await?;
        map.repair(&found).await.map(|()| map)
    }

    /// Reads the map as [`IntentBitmap::load`] does, but writes nothing: older copies remain.
    ///
    /// # Errors
    /// Members that could not be read.
    pub async fn look(
        config: &ArrayConfig,
        initial: u8,
        live: &[Target],
    ) -> Result<IntentBitmap, MemberFailures> {
        IntentBitmap::read(config, initial, live).await.map(|(map, _)| map)
    }

    /// The map, and the copies of each member.
    async fn read<'t>(
        config: &ArrayConfig,
        initial: u8,
        live: &'t [Target],
    ) -> Result<(IntentBitmap, Vec<(&'t Target, Vec<u8>)>), MemberFailures> {
        let count = (config.regions() as usize).div_ceil(REGIONS);
        let areas = io::all(
            live.iter()
                .map(|target| io::read_long(&*target.channel, target.layout.map_offset, 2 * PAGE * count)),
        );
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for (target, area) in live.iter().zip(areas.await) {
            match area {
                Ok(area) => found.push((target, area)),
                // Some page is unreadable: reads page by page, so that the others count.
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
        Ok((IntentBitmap::with(config, initial, pages), found))
    }

    /// Writes every page to members that lack its newest copy.
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

    /// Sets the regions beyond those of the array, up to `regions`, to `bits` on all members, so
    /// that the array can grow. They count from [`IntentBitmap::grow`] on.
    ///
    /// Members may have pages there from an earlier try, or from another array. So each page is
    /// written whatever its content, with a generation above all others found.
    ///
    /// # Errors
    /// As [`IntentBitmap::set`].
    ///
    /// # Panics
    /// If there is no room for `regions`.
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
            // The first call comes before this write.
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

    /// The highest generation of the copies of an unused page.
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
                    // A copy that is unreadable now must not become readable later.
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

    /// Sets the number of regions, after [`IntentBitmap::prepare`] for them.
    pub fn grow(&self, regions: u64) {
        self.regions.store(regions, Ordering::Release);
    }

    fn pages_in_use(&self) -> usize {
        (self.regions() as usize).div_ceil(REGIONS)
    }

    /// The bits of a region whose page was never written.
    pub fn initial(&self) -> u8 {
        self.initial
    }

    /// A region's bits.
    #[inline]
    pub fn get(&self, region: u64) -> u8 {
        self.now[region as usize].load(Ordering::SeqCst)
    }

    /// Whether all of `bits` are set in a region, durably. Every write asks this; it costs one
    /// load.
    #[inline]
    pub fn has(&self, region: u64, bits: u8) -> bool {
        self.get(region) & bits == bits
    }

    /// Sets `bits` in a region, and returns when they are durable on all `members`. Costs one load
    /// if they already are.
    ///
    /// # Errors
    /// Members that could not be written: the caller marks them failed, durably, and calls again.
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
    /// As [`IntentBitmap::set`].
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

    /// Sets every region of the array to `change` (number, bits), durably: all bits of a region,
    /// and all regions of a page, at once. No other task may change the map meanwhile.
    ///
    /// # Errors
    /// As [`IntentBitmap::set`].
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

    /// Clears `bits` in a region, in memory. Members get this with the next write of the page;
    /// [`IntentBitmap::settle`] forces one.
    ///
    /// The caller knows that the bits are no longer needed. For [`DIRTY`], [`IntentBitmap::sweep`]
    /// decides.
    pub fn clear(&self, region: u64, bits: u8) {
        let mut page = self.pages[region as usize / REGIONS].lock();
        page.wanted[region as usize % REGIONS] &= !bits;
        self.now[region as usize].fetch_and(!bits, Ordering::SeqCst);
    }

    /// Records the begin of a write of a core in the region, before the write reads its bits.
    #[inline]
    pub fn begin(&self, region: u64, core: usize) {
        self.writes[core % SHARDS][region as usize].begun.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the begin of a write of a core in the region, unless `is_logged` returns true: a
    /// logged write needs no mark. Returns the result of `is_logged`, which is called after the
    /// begin is recorded. So a thread that enables logging and then sees no write in flight
    /// ([`IntentBitmap::sweep_idle`]) knows that no later write needs the mark.
    #[inline]
    pub fn begin_unless(&self, region: u64, core: usize, is_logged: impl FnOnce() -> bool) -> bool {
        if is_broken("a write begins before it asks whether it is logged") {
            let is_logged = is_logged();
            if !is_logged {
                self.begin(region, core);
            }
            return is_logged;
        }
        self.begin(region, core);
        let is_logged = is_logged();
        if is_logged {
            self.end(region, core); // a logged write needs no mark: recovery replays it
        }
        is_logged
    }

    /// Records the end of a write of a core in the region: data and parity are durable on all
    /// members, or the region has another mark.
    #[inline]
    pub fn end(&self, region: u64, core: usize) {
        self.writes[core % SHARDS][region as usize].ended.fetch_add(1, Ordering::SeqCst);
    }

    /// Writes that have begun in a region. Shards only grow: two equal results mean that no write
    /// has begun in between.
    fn begun(&self, region: usize) -> u32 {
        let counts = self.writes.iter().map(|shard| shard[region].begun.load(Ordering::SeqCst));
        counts.fold(0, u32::wrapping_add)
    }

    /// Writes that have ended in a region. If as many have begun, counted afterwards, no write was
    /// in flight when this returned: in no shard can fewer have begun than have ended.
    fn ended(&self, region: usize) -> u32 {
        let counts = self.writes.iter().map(|shard| shard[region].ended.load(Ordering::SeqCst));
        counts.fold(0, u32::wrapping_add)
    }

    /// Clears [`DIRTY`], in memory, in every region without a write since the last sweep, and
    /// returns their number. `memory` is the state of the last sweep: empty for the first.
    pub fn sweep(&self, memory: &mut Vec<u32>) -> usize {
        memory.resize(self.regions() as usize, 0);
        let mut cleared = 0;
        for (region, before) in memory.iter_mut().enumerate() {
            // Ended writes are counted first: a write in between counts as in flight.
            let ended = self.ended(region);
            let begun = self.begun(region);
            let has_ended = begun == ended || mutant::is(Mutant::MarksClearedInFlight);
            let is_idle = std::mem::replace(before, begun) == begun && has_ended;
            if is_idle && self.has(region as u64, DIRTY) {
                cleared += usize::from(self.clear_dirty(region, begun));
            }
        }
        cleared
    }

    /// Clears [`DIRTY`], in memory, in one region, unless writes are in flight there; returns
    /// whether none is.
    pub fn sweep_idle(&self, region: u64) -> bool {
        let region = region as usize;
        let ended = self.ended(region);
        let begun = self.begun(region);
        let has_ended = begun == ended || mutant::is(Mutant::MarksClearedInFlight);
        has_ended && (!self.has(region as u64, DIRTY) || self.clear_dirty(region, begun))
    }

    /// Clears [`DIRTY`] in a region unless a write has begun there since `begun` was read; returns
    /// whether it did.
    fn clear_dirty(&self, region: usize, begun: u32) -> bool {
        let mut page = self.pages[region / REGIONS].lock();
        if !is_broken("the bit goes before the second look") {
            self.now[region].fetch_and(!DIRTY, Ordering::SeqCst);
        }
        // A write that begins meanwhile sees that the bit is cleared, or is seen here: `begin`
        // precedes its load of the bit, and this load follows the clearing.
        let is_idle = self.begun(region) == begun || is_broken("a sweep looks again for writes");
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

    /// Writes every page with cleared bits.
    ///
    /// # Errors
    /// As [`IntentBitmap::set`].
    pub async fn settle(&self, members: &(impl Targets + ?Sized)) -> Result<(), MemberFailures> {
        for (i, page) in self.pages[..self.pages_in_use()].iter().enumerate() {
            let is_settled = {
                let page = page.lock();
                page.wanted == page.durable
            };
            if !is_settled {
                // One write is enough: later changes are written the next time.
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

    /// Writes the whole map to a member that is about to take writes. Other tasks may clear bits
    /// meanwhile, but not set them.
    ///
    /// # Errors
    /// When the member cannot be written.
    pub async fn write_to(&self, target: &Target) -> block::IoResult {
        for (i, page) in self.pages[..self.pages_in_use()].iter().enumerate() {
            page.write_to(&self.format(i), target).await?;
        }
        Ok(())
    }

    /// Number of regions with all of `bits`.
    pub fn count(&self, bits: u8) -> u64 {
        (0..self.regions()).filter(|region| self.has(*region, bits)).count() as u64
    }

    fn format(&self, page: usize) -> PageFormat {
        PageFormat { array: self.array, page }
    }
}

/// The on-disk format of a page.
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

/// The generation and the regions of a copy of a page if it is valid and belongs to this array.
fn decode(array: Uuid, page: usize, bytes: &[u8]) -> Option<(u64, &[u8])> {
    let crc = u32::from_le_bytes(bytes[8..12].try_into().ok()?);
    let computed =
        crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&bytes[..8]), &[0; 4]), &bytes[12..]);
    let is_ours = bytes[..8] == MAGIC
        && crc == computed
        && bytes[12..16] == (page as u32).to_le_bytes()
        && bytes[16..32] == array.0;
    let generation = u64::from_le_bytes(bytes[32..40].try_into().ok()?);
    // The counter must have room to grow.
    (is_ours && generation >> 63 == 0 && generation > 0).then_some((generation, &bytes[HEAD_BYTES..]))
}

fn page_of(area: &[u8], page: usize, copy: usize) -> &[u8] {
    &area[(2 * page + copy) * PAGE..][..PAGE]
}

/// The newest valid copy of a page over all members. If every copy is invalid, its regions become
/// `lost`.
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
    // Otherwise a first write was torn on all members, or the page has decayed on all members:
    // `lost` costs only time. An acknowledged write is on every live member, so a member with only
    // zeroes proves that no write was acknowledged.
    let is_untouched =
        |area: &Vec<u8>| [0, 1].iter().all(|copy| page_of(area, page, *copy).iter().all(|byte| *byte == 0));
    if !found.iter().any(|(_, area)| is_untouched(area)) {
        tracing::warn!(page, "write-intent bitmap: no copy of a page is valid");
        // No member has this generation, so the page is written to every member before a request
        // relies on it.
        return Replicated::new(vec![lost; REGIONS], 1, 1);
    }
    Replicated::new(vec![initial; REGIONS], 0, 1)
}

/// Reads a member's pages one by one; an unreadable page counts as an invalid one.
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
    use std::future::Future;
    use std::rc::Rc;
    use std::task::Poll;

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
            // One try ended before the array had grown, and one member has pages from another
            // array.
            let map = IntentBitmap::load(&small, 0, &targets).await.unwrap();
            map.set(99, WRITTEN, &targets).await.unwrap();
            map.prepare(large.regions(), WRITTEN | NEED_SYNC, &targets).await.unwrap();
            map.prepare(large.regions(), STALE, &targets[..1]).await.unwrap();
            assert_eq!((map.regions(), map.count(NEED_SYNC)), (100, 0));
            let map = IntentBitmap::load(&small, 0, &targets).await.unwrap();
            assert_eq!((map.get(0), map.get(99), map.regions()), (0, WRITTEN, 100));
            assert!(map.room() > last);
            map.prepare(large.regions(), 0, &targets).await.unwrap();
            map.grow(large.regions());
            map.set(last, WRITTEN, &targets).await.unwrap();
            for map in [map, IntentBitmap::load(&large, NEED_SYNC, &targets).await.unwrap()] {
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
            let map = IntentBitmap::new(&config, 0);
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
            let again = IntentBitmap::load(&config, 0, &targets).await.unwrap();
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
            let map = Rc::new(IntentBitmap::new(&config, 0));
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
    fn a_write_of_a_core_that_has_ended_holds_up_no_other() {
        reactor::run_simulated_cores(9, 2, |_, cores: Vec<reactor::Core>| async move {
            let (config, disks) = (wide(), big_disks(3));
            disks.iter().for_each(|disk| disk.be_slow(1000));
            let targets = Rc::new(targets(&config, &disks));
            let map = Rc::new(IntentBitmap::new(&config, 0));
            let (others_map, others_targets) = (map.clone(), targets.clone());
            let write = async move { others_map.set(1, WRITTEN, &*others_targets).await.unwrap() };
            cores[1].with_current(|| cores[1].spawn(write));
            let mut set = Box::pin(map.set(2, WRITTEN, &*targets));
            cores[0].sleep(500).await;
            let is_waiting = std::future::poll_fn(|cx| Poll::Ready(set.as_mut().poll(cx).is_pending())).await;
            assert_eq!((is_waiting, disks[0].writes()), (true, 1));
            cores[1].end_simulated();
            set.await.unwrap();
            assert!(IntentBitmap::load(&config, 0, &targets).await.unwrap().has(2, WRITTEN));
        });
    }

    #[test]
    fn a_member_that_cannot_be_written_is_named_and_without_it_the_bit_is_set() {
        run_simulated(3, |_| async {
            let (config, disks) = (wide(), big_disks(3));
            let mut targets = targets(&config, &disks);
            let map = IntentBitmap::new(&config, 0);
            map.set(5, DIRTY, &targets).await.unwrap();
            map.clear(5, DIRTY);
            disks[1].fail(Some(IoError::Medium));
            let failed = map.settle(&targets).await.unwrap_err();
            assert_eq!(failed, MemberFailures(vec![(1, IoError::Medium)]));
            // The other members have a page without the bit now. It must be written again, although
            // the last page that was durable on all has the bit.
            targets.remove(1);
            map.set(5, DIRTY, &targets).await.unwrap();
            assert!(IntentBitmap::load(&config, 0, &targets).await.unwrap().has(5, DIRTY));
            assert_eq!(map.set(6, DIRTY, &Vec::new()).await, Err(MemberFailures(vec![])));
        });
    }

    #[test]
    fn a_member_that_lacks_the_newest_page_gets_it_when_the_map_is_loaded() {
        run_simulated(4, |_| async {
            let (config, disks) = (wide(), big_disks(2));
            let targets = targets(&config, &disks);
            let map = IntentBitmap::new(&config, NEED_SYNC);
            map.set(7, WRITTEN, &targets).await.unwrap();
            map.set(8, WRITTEN, &targets[..1]).await.unwrap();
            let map = IntentBitmap::load(&config, NEED_SYNC, &targets).await.unwrap();
            assert!(map.has(8, WRITTEN | NEED_SYNC));
            let second = IntentBitmap::load(&config, NEED_SYNC, &targets[1..]).await.unwrap();
            assert!(second.has(8, WRITTEN));
        });
    }

    #[test]
    fn a_member_that_comes_while_bits_are_being_cleared_does_not_bring_them_back() {
        run_simulated(8, |_| async {
            let (config, disks) = (wide(), big_disks(3));
            let targets = targets(&config, &disks);
            let map = Rc::new(IntentBitmap::new(&config, 0));
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
            // The result does not depend on the order of members.
            for order in [[0, 1, 2], [2, 1, 0]] {
                let members: Vec<Target> = order.into_iter().map(|slot| targets[slot].clone()).collect();
                assert_eq!(IntentBitmap::load(&config, 0, &members).await.unwrap().get(7), WRITTEN);
            }
        });
    }

    #[test]
    fn a_page_that_is_broken_everywhere_makes_work_but_hides_nothing() {
        run_simulated(5, |_| async {
            let (config, disks) = (wide(), big_disks(1));
            let targets = targets(&config, &disks);
            IntentBitmap::new(&config, 0).set(7, WRITTEN, &targets).await.unwrap();
            let place = targets[0].layout.map_page(0, 0) as usize;
            disks[0].edit(|bytes| bytes[place + 100] ^= 1);
            let map = IntentBitmap::load(&config, 0, &targets).await.unwrap();
            assert_eq!((map.get(0), map.get(REGIONS_PER_PAGE)), (WRITTEN | STALE, 0));
        });
    }

    #[test]
    fn a_sweep_clears_what_is_idle_and_nothing_else() {
        run_simulated(6, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let targets = targets(&config, &disks);
            let (map, mut memory) = (IntentBitmap::new(&config, 0), Vec::new());
            for region in 0..2 {
                map.begin(region, 0);
                map.set(region, WRITTEN | DIRTY, &targets).await.unwrap();
            }
            map.end(0, 0);
            assert_eq!(map.sweep(&mut memory), 0, "region 0 was just written");
            assert_eq!(map.sweep(&mut memory), 1);
            assert_eq!((map.get(0), map.get(1)), (WRITTEN, WRITTEN | DIRTY));
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// Writers set and clear bits of one page on slow disks until the power fails; all
        /// acknowledged bits are found.
        #[test]
        fn durable_bits_are_found_after_a_power_loss(
            seed in 1..u64::MAX, steps in proptest::collection::vec((0..16u64, 0..4u32, any::<bool>()), 1..40), cut in 1..200u64,
        ) {
            run_simulated(seed, |_| async move {
                let (config, (disks, power)) = (config(2, 1), disks(3));
                let targets = Rc::new(targets(&config, &disks));
                let promised = Rc::new(RefCell::new([0u8; 16]));
                for _ in 0..2 {
                    let map = Rc::new(IntentBitmap::load(&config, 0, &targets).await.unwrap());
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
