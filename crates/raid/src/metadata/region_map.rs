//! The region map: a byte for each region of the array that says what its members hold there.
//!
//! A region is the same part of every member's data. Its bits are durable on every member *before* the write that
//! they are about, so a look at them is enough to know that nothing is to be done: one atomic load. What is not set
//! yet goes out with the next write of its page, together with everything else that waits for that page. Bits are
//! cleared lazily: it is never wrong for one to be still set after a crash.

use super::io::{self, MemberFailures, Target, Targets};
use super::layout::{Layout, PAGE_BYTES, REGIONS_PER_PAGE};
use super::replicated::{Format, Replicated};
use crate::{ArrayConfig, Consistency, Uuid};
use block::IoError;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Something was written here; a region without it reads as zeroes on every member.
pub const WRITTEN: u8 = 1;
/// A write may be in flight (consistency `bitmap`): parity may not match after a crash.
pub const DIRTY: u8 = 2;
/// Parity was never made, or is known to be wrong: data is right, redundancy is not.
pub const NEED_SYNC: u8 = 4;
/// Something was written while a member was out: that member lacks it.
pub const STALE: u8 = 8;

const MAGIC: [u8; 8] = *b"FrstRmap";
const HEAD_BYTES: usize = 64;
const PAGE: usize = PAGE_BYTES as usize;
const REGIONS: usize = REGIONS_PER_PAGE as usize;

/// The region map of a running array, shared by all cores.
pub struct RegionMap {
    array: Uuid,
    initial: u8,
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
        let regions = config.regions() as usize;
        let bits = |region: usize| pages[region / REGIONS].lock().durable[region % REGIONS];
        RegionMap {
            array: config.uuid,
            initial,
            now: (0..regions).map(|region| AtomicU8::new(bits(region))).collect(),
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
        let pages = (0..count).map(|page| newest(config.uuid, page, &found, initial, lost)).collect();
        let map = RegionMap::with(config, initial, pages);
        map.repair(&found).await.map(|()| map)
    }

    /// Writes every page of which a member lacks the newest copy.
    async fn repair(&self, found: &[(&Target, Vec<u8>)]) -> Result<(), MemberFailures> {
        let mut failures: Vec<(usize, IoError)> = Vec::new();
        for (i, page) in self.pages.iter().enumerate() {
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
        self.now.len() as u64
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
        for page in 0..self.pages.len() {
            let first = page * REGIONS;
            let chosen: Vec<usize> = (first..self.now.len().min(first + REGIONS))
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

    /// Notes that a write into the region has ended: it is durable on all members, parity too, or the region is marked
    /// otherwise.
    #[inline]
    pub fn end(&self, region: u64) {
        self.ended[region as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// Clears [`DIRTY`], in memory, in every region that no write has touched since the last sweep, and says in how
    /// many. `memory` is what the last sweep left: empty for the first.
    pub fn sweep(&self, memory: &mut Vec<u32>) -> usize {
        memory.resize(self.now.len(), 0);
        let mut cleared = 0;
        for (region, before) in memory.iter_mut().enumerate() {
            // What has ended is counted first: a write in between looks as if it were in flight.
            let ended = self.ended[region].load(Ordering::SeqCst);
            let begun = self.begun[region].load(Ordering::SeqCst);
            let is_idle = std::mem::replace(before, begun) == begun && begun == ended;
            if !is_idle || !self.has(region as u64, DIRTY) {
                continue;
            }
            let mut page = self.pages[region / REGIONS].lock();
            self.now[region].fetch_and(!DIRTY, Ordering::SeqCst);
            // A write that began meanwhile either sees that the bit is gone, or is seen here: `begin` comes before its
            // look, this look comes after the clearing.
            if self.begun[region].load(Ordering::SeqCst) == begun {
                page.wanted[region % REGIONS] &= !DIRTY;
                cleared += 1;
            } else {
                self.now[region].fetch_or(DIRTY, Ordering::SeqCst);
            }
        }
        cleared
    }

    /// Writes every page from which bits were cleared.
    ///
    /// # Errors
    /// As [`RegionMap::set`].
    pub async fn settle(&self, members: &(impl Targets + ?Sized)) -> Result<(), MemberFailures> {
        for (i, page) in self.pages.iter().enumerate() {
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

    /// Writes the whole map to a member that is about to take writes. Not while anybody sets bits.
    ///
    /// # Errors
    /// When the member cannot be written.
    pub async fn write_to(&self, target: &Target) -> block::IoResult {
        for (i, page) in self.pages.iter().enumerate() {
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
    // A first write that was torn everywhere, or a page that rotted everywhere: everything that costs only time.
    let was_written = copies().any(|(_, bytes)| bytes[..8] == MAGIC || bytes.iter().any(|byte| *byte != 0));
    if was_written {
        tracing::warn!(page, "no copy of a page of the region map is valid");
    }
    Replicated::new(vec![if was_written { lost } else { initial }; REGIONS], 0, 1)
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
