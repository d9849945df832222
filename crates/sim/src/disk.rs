//! A simulated disk: contents in memory, latency, a volatile cache, faults and power loss, all
//! derived from its seed.
//!
//! ```text
//!   submit ──► latency (virtual) ──► end: read contents, or write to medium / volatile cache
//!                  │ power goes
//!                  └──► the write survives as a whole, not at all or torn between blocks; the answer is "gone"
//! ```
//!
//! A request takes effect when it ends, so latency alone reorders writes. Memory of the caller is
//! read at that moment: a caller that changes it in flight has the change written.

use crate::machine::Machine;
use crate::medium::Medium;
use base::Rng;
use block::{
    Channel, Device, DeviceError, Flags, IoError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion,
    Op, Request, SharedLimits, Status, StatusReport,
};
use raid::metadata::superblock::MAGIC;
use reactor::Core;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Properties of a disk.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Bytes.
    pub capacity: u64,
    /// Logical block size in bytes, the unit of torn writes: 512 to 4096.
    pub block_size: u32,
    /// Whether writes without FUA stay in a cache until a flush.
    pub has_volatile_cache: bool,
    /// Whether the disk can write zeroes without a transfer of them.
    pub has_zeroes: bool,
    /// Typical latency in nanoseconds. Some requests take a few times as long, a few much longer.
    pub latency_ns: u64,
    /// Seed of every decision of the disk.
    pub seed: u64,
}

/// Interval in nanoseconds of virtual time at which a stuck request checks whether it still is.
pub(crate) const STUCK_LOOK_NS: u64 = 100_000_000;

/// Number of completed writes that a disk remembers.
const MOST_ENDED: usize = 64;

/// Weight of an unreadable range for redundancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Like the loss of the whole disk.
    Disk,
    /// Like the loss of its blocks in their rows. The strips of the disk begin at this offset.
    Blocks(u64),
    /// No loss: it is metadata, of which a copy exists elsewhere.
    Metadata,
}

/// An acknowledged write that did not happen, or happened elsewhere. Later writes are included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strayed {
    /// Intended offset in bytes.
    pub offset: u64,
    /// Expected data at that offset.
    pub bytes: Vec<u8>,
    /// Actual offset of a misdirected write, and the expected data there.
    pub overwritten: Option<(u64, Vec<u8>)>,
}

/// Makes the next write to a range of bytes stray.
#[derive(Clone, Debug)]
struct Stray {
    within: Range<u64>,
    is_misdirected: bool,
}

/// A disk of a [`Machine`].
#[derive(Clone)]
pub struct SimDisk(Arc<Shared>);

struct Shared {
    name: String,
    machine: Arc<Machine>,
    limits: Arc<SharedLimits>,
    /// Whether it is a file, which may be resized.
    is_file: AtomicBool,
    /// Whether block status tells zeroes from data.
    tells_zeroes: AtomicBool,
    state: Mutex<State>,
}

struct State {
    medium: Medium,
    cache: Vec<Cached>,
    /// Unreadable until rewritten.
    bad: Vec<(Range<u64>, Unreadable)>,
    /// Rotten metadata until it is rewritten.
    rotten: Vec<(Range<u64>, Unreadable)>,
    /// The last completed writes, until [`SimDisk::forget_cut_off`].
    ended: VecDeque<Range<u64>>,
    /// Writes in flight when power failed, until [`SimDisk::forget_cut_off`].
    cut_off: Vec<Range<u64>>,
    rng: Rng,
    latency_ns: u64,
    extra_latency_ns: u64,
    is_dead: bool,
    is_stuck: bool,
    stray: Option<Stray>,
    strayed: Option<Strayed>,
    /// Writes until one fails; 0 for none.
    writes_to_failure: u32,
    has_failed_write: bool,
    failing: Option<Failing>,
    has_torn_commit: bool,
}

/// See [`SimDisk::fail_often`].
struct Failing {
    one_in: u64,
    rng: Rng,
}

/// An acknowledged write that is not durable.
struct Cached {
    offset: u64,
    bytes: Vec<u8>,
}

impl SimDisk {
    /// A disk full of zeroes.
    pub fn new(name: impl Into<String>, machine: &Arc<Machine>, config: &DiskConfig) -> SimDisk {
        let limits = Limits {
            block_size: config.block_size,
            volatile_cache: config.has_volatile_cache,
            max_transfer: 1 << 20,
            max_write_zeroes: if config.has_zeroes { u64::MAX } else { 0 },
            ..Limits::new(config.capacity)
        };
        let state = State {
            medium: Medium::new(config.capacity),
            cache: Vec::new(),
            bad: Vec::new(),
            rotten: Vec::new(),
            ended: VecDeque::new(),
            cut_off: Vec::new(),
            rng: Rng::new(config.seed),
            latency_ns: config.latency_ns,
            extra_latency_ns: 0,
            is_dead: false,
            is_stuck: false,
            stray: None,
            strayed: None,
            writes_to_failure: 0,
            has_torn_commit: false,
            has_failed_write: false,
            failing: None,
        };
        let (name, machine, limits) = (name.into(), machine.clone(), SharedLimits::new(limits));
        let (is_file, tells_zeroes) = (AtomicBool::new(false), AtomicBool::new(false));
        SimDisk(Arc::new(Shared { name, machine, limits, is_file, tells_zeroes, state: Mutex::new(state) }))
    }

    /// Extends the disk by `bytes`, which read as zeroes.
    pub fn grow(&self, bytes: u64) {
        let capacity = self.0.limits.capacity() + bytes;
        self.lock().medium.resize(capacity);
        self.0.limits.set_capacity(capacity);
    }

    /// Allows the disk to be resized, as a file can be. The new length is durable at once.
    pub fn let_resize(&self) {
        self.0.is_file.store(true, Ordering::Relaxed);
    }

    /// Lets block status tell blocks of zeroes from data.
    pub fn tell_zeroes(&self) {
        self.0.tells_zeroes.store(true, Ordering::Relaxed);
    }

    /// Kills the disk: every request fails with "gone" until [`SimDisk::revive`].
    pub fn kill(&self) {
        self.lock().is_dead = true;
    }

    /// Revives the disk with its former content, which may be stale.
    pub fn revive(&self) {
        let mut state = self.lock();
        state.is_dead = false;
        state.is_stuck = false;
        state.writes_to_failure = 0;
        state.failing = None;
    }

    /// Whether the disk is dead.
    pub fn is_dead(&self) -> bool {
        self.lock().is_dead
    }

    /// Stops or resumes the completion of requests.
    pub fn set_stuck(&self, is_stuck: bool) {
        let mut state = self.lock();
        state.is_stuck = is_stuck;
    }

    /// Delays every request by this number of nanoseconds.
    pub fn set_extra_latency(&self, ns: u64) {
        self.lock().extra_latency_ns = ns;
    }

    /// Makes these bytes unreadable until they are rewritten. Rounded to whole blocks.
    pub fn add_medium_error(&self, range: Range<u64>, counts_as: Unreadable) {
        let block = u64::from(self.0.limits.fixed().block_size);
        let end = range.end.next_multiple_of(block).min(self.0.limits.capacity());
        let range = range.start & !(block - 1)..end;
        self.lock().bad.push((range, counts_as));
    }

    /// Makes these bytes readable again.
    pub fn mend(&self, range: &Range<u64>) {
        rewrite(&mut self.lock().bad, range);
    }

    /// Whether all bytes of `range` can be read.
    pub fn is_readable(&self, range: &Range<u64>) -> bool {
        !self.lock().bad.iter().any(|(bad, _)| overlaps(bad, range))
    }

    /// Whether metadata in `range` is unreadable, or rotten by [`SimDisk::rot_metadata`].
    pub fn has_metadata_error(&self, range: &Range<u64>) -> bool {
        let is_there = |(bad, kind): &(_, _)| *kind == Unreadable::Metadata && overlaps(bad, range);
        let state = self.lock();
        state.bad.iter().chain(&state.rotten).any(is_there)
    }

    /// Whether anything but metadata is unreadable.
    pub fn has_medium_errors(&self) -> bool {
        self.lock().bad.iter().any(|(_, kind)| *kind != Unreadable::Metadata)
    }

    /// Whether an unreadable range counts like the loss of the whole disk.
    pub fn is_unreadable(&self) -> bool {
        self.lock().bad.iter().any(|(_, kind)| *kind == Unreadable::Disk)
    }

    /// The unreadable blocks of strips, counted from the first strip.
    pub fn unreadable_blocks(&self) -> BTreeSet<u64> {
        let block = u64::from(self.0.limits.fixed().block_size);
        let blocks = |(bad, kind): &(Range<u64>, Unreadable)| match kind {
            Unreadable::Blocks(start) => (bad.start - start) / block..(bad.end - start).div_ceil(block),
            _ => 0..0,
        };
        self.lock().bad.iter().flat_map(blocks).collect()
    }

    /// A block of a write that was in flight at the last power failure; `number` selects it.
    pub fn cut_off_block(&self, number: u64) -> Option<Range<u64>> {
        let block = u64::from(self.0.limits.fixed().block_size);
        let state = self.lock();
        let blocks: u64 = state.cut_off.iter().map(|range| (range.end - range.start) / block).sum();
        let mut left = number.checked_rem(blocks)?;
        for range in &state.cut_off {
            let count = (range.end - range.start) / block;
            if left < count {
                let start = range.start + left * block;
                return Some(start..start + block);
            }
            left -= count;
        }
        None
    }

    /// A block of one of the last completed writes inside `within`; `number` selects it.
    pub fn ended_block(&self, within: &Range<u64>, number: u64) -> Option<Range<u64>> {
        let block = u64::from(self.0.limits.fixed().block_size);
        let state = self.lock();
        let is_within = |range: &&Range<u64>| within.start <= range.start && range.end <= within.end;
        let ended: Vec<&Range<u64>> = state.ended.iter().filter(is_within).collect();
        let range = ended[(number >> 32).checked_rem(ended.len() as u64)? as usize];
        let start = range.start + number % ((range.end - range.start) / block) * block;
        Some(start..start + block)
    }

    /// Forgets the writes that were in flight at the last power failure, and the completed ones.
    pub fn forget_cut_off(&self) {
        let mut state = self.lock();
        state.cut_off.clear();
        state.ended.clear();
    }

    /// Silently changes bits of the stored data.
    pub fn rot(&self, range: Range<u64>) {
        let mut state = self.lock();
        let state = &mut *state;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        state.medium.read(range.start, &mut bytes);
        for byte in &mut bytes {
            *byte ^= (state.rng.draw() as u8).max(1);
        }
        state.medium.write(range.start, &bytes);
    }

    /// Rots metadata, which counts as damaged until its block is rewritten.
    pub fn rot_metadata(&self, range: Range<u64>) {
        let block = u64::from(self.0.limits.fixed().block_size);
        let blocks = range.start / block * block..range.end.next_multiple_of(block);
        self.rot(range);
        self.lock().rotten.push((blocks, Unreadable::Metadata));
    }

    /// Makes the next write to bytes `within` stray: it is acknowledged and does not happen, or
    /// happens elsewhere within them.
    pub fn let_write_stray(&self, within: Range<u64>, is_misdirected: bool) {
        self.lock().stray = Some(Stray { within, is_misdirected });
    }

    /// Returns the write that strayed, if any. No other one will.
    pub fn take_strayed(&self) -> Option<Strayed> {
        let mut state = self.lock();
        state.stray = None;
        state.strayed.take()
    }

    /// Makes the `number`th write from now on fail after a torn write; all others succeed.
    pub fn fail_write(&self, number: u32) {
        self.lock().writes_to_failure = number;
    }

    /// Lets requests of every kind fail, one in `one_in` on average, until [`SimDisk::revive`].
    /// Changes that fail are torn, and a flush that fails makes a part of the cache durable. Each
    /// counts as a failed write.
    pub fn fail_often(&self, one_in: u64, seed: u64) {
        self.lock().failing = Some(Failing { one_in, rng: Rng::new(seed) });
    }

    /// Whether a write will fail, or one has failed since [`SimDisk::forgive`].
    pub fn is_failing(&self) -> bool {
        let state = self.lock();
        state.writes_to_failure > 0 || state.has_failed_write
    }

    /// Whether a write has failed since [`SimDisk::forgive`].
    pub fn has_failed_write(&self) -> bool {
        self.lock().has_failed_write
    }

    /// Allows the array to detach the disk's member: it counts as one with a failed write until
    /// [`SimDisk::forgive`].
    pub fn suspect(&self) {
        self.lock().has_failed_write = true;
    }

    /// Clears the failed write once its effects are repaired.
    pub fn forgive(&self) {
        self.lock().has_failed_write = false;
    }

    /// Whether power failed during a write of a superblock since the last call.
    pub fn take_torn_commit(&self) -> bool {
        std::mem::take(&mut self.lock().has_torn_commit)
    }

    /// Drops the cache after a power failure, once every request has ended. Must be called for
    /// every disk before power returns, unless only the processes were killed.
    pub fn lose_cache(&self) {
        self.lock().lose_power(self.0.limits.fixed().block_size);
    }

    /// Makes the whole cache durable.
    pub fn write_cache(&self) {
        let mut state = self.lock();
        let count = state.cache.len();
        state.destage(count);
    }

    /// Reads the stored data, for tests and tools that inspect a disk without power.
    pub fn peek(&self, offset: u64, bytes: &mut [u8]) {
        self.lock().read(offset, bytes);
    }

    /// Silently replaces stored data.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        self.write_cache();
        self.lock().medium.write(offset, bytes);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_here(&self, state: &State, boot: u64) -> bool {
        self.machine.is_on() && self.machine.boot() == boot && !state.is_dead
    }

    /// Accepts a request and returns its latency.
    fn begin(&self, req: &Request<'_>, offset: u64, boot: u64) -> Result<u64, IoError> {
        self.limits.check(req, offset)?;
        let mut state = self.lock();
        if !self.is_here(&state, boot) {
            return Err(IoError::DeviceGone);
        }
        let latency_ns = state.draw_latency();
        drop(state);
        self.machine.note_start(req.op.is_modifying(), req.len);
        Ok(latency_ns)
    }

    fn is_stuck(&self, boot: u64) -> bool {
        let state = self.lock();
        state.is_stuck && self.is_here(&state, boot)
    }

    /// Applies the effect of the request.
    fn finish(&self, req: &Request<'_>, offset: u64, boot: u64) -> IoResult {
        let mut state = self.lock();
        if !self.is_here(&state, boot) {
            match self.machine.is_kill() {
                true => state.destage_below(&(offset..offset + req.len)),
                false => state.lose_power(self.limits.fixed().block_size),
            }
            if req.op == Op::Write {
                state.cut_off.push(offset..offset + req.len);
            }
            state.tear(req, offset, self.limits.fixed().block_size);
            return Err(IoError::DeviceGone);
        }
        match req.op {
            Op::Read | Op::Flush if state.fails_now() => {
                if req.op == Op::Flush {
                    let count = state.cache.len() / 2;
                    state.destage(count);
                }
                return Err(IoError::Medium);
            }
            Op::Read => state.finish_read(req, offset)?,
            Op::Flush => {
                let count = state.cache.len();
                state.destage(count);
            }
            Op::Write | Op::WriteZeroes | Op::Discard if state.is_to_fail() => {
                state.tear(req, offset, self.limits.fixed().block_size);
                drop(state);
                self.machine.note_write();
                return Err(if self.machine.is_on() { IoError::Medium } else { IoError::DeviceGone });
            }
            Op::Write | Op::WriteZeroes | Op::Discard => {
                state.finish_write(req, offset, &self.limits.get());
                drop(state);
                self.machine.note_write();
                if !self.machine.is_on() {
                    return Err(IoError::DeviceGone);
                }
            }
        }
        Ok(())
    }

    fn trace(&self, core: &Core, what: &str, req: &Request<'_>, offset: u64) {
        let (now, name, op, flags) = (core.now_ns(), &self.name, req.op.name(), req.flags);
        println!("{now:>12} {name:<8} {op} {offset}+{} {flags:?} {what}", req.len);
    }
}

impl State {
    fn draw_latency(&mut self) -> u64 {
        let base = self.latency_ns;
        let outlier = if self.rng.one_in(32) { self.rng.below(20 * base) } else { 0 };
        base / 2 + self.rng.below(base.max(1)) + outlier + self.extra_latency_ns
    }

    /// Whether the write that ends now fails.
    fn is_to_fail(&mut self) -> bool {
        let is_last = self.writes_to_failure == 1;
        self.writes_to_failure = self.writes_to_failure.saturating_sub(1);
        self.has_failed_write |= is_last;
        is_last || self.fails_now()
    }

    /// Whether the request that ends now is one of those that fail often.
    fn fails_now(&mut self) -> bool {
        let fails = self.failing.as_mut().is_some_and(|failing| failing.rng.one_in(failing.one_in));
        self.has_failed_write |= fails;
        fails
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.medium.read(offset, bytes);
        for cached in &self.cache {
            cached.overlay(offset, bytes);
        }
    }

    fn finish_read(&mut self, req: &Request<'_>, offset: u64) -> IoResult {
        let range = offset..offset + req.len;
        if self.bad.iter().any(|(bad, _)| overlaps(bad, &range)) {
            return Err(IoError::Medium);
        }
        if self.cache.is_empty() {
            self.medium.read_into(offset, &req.data);
        } else {
            let mut bytes = vec![0; req.len as usize];
            self.read(offset, &mut bytes);
            req.data.copy_from(&bytes);
        }
        Ok(())
    }

    fn finish_write(&mut self, req: &Request<'_>, mut offset: u64, limits: &Limits) {
        if let Some(strayed) = &mut self.strayed {
            strayed.note_write(req, offset);
        }
        if let Some(stray) = self.stray.take_if(|stray| stray.holds(req, offset)) {
            match self.stray(&stray, req, offset, limits.block_size) {
                Some(place) => offset = place,
                None => return,
            }
        }
        let range = offset..offset + req.len;
        rewrite(&mut self.bad, &range);
        rewrite(&mut self.rotten, &range);
        if self.ended.len() == MOST_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back(range.clone());
        if req.op == Op::Discard {
            self.destage_below(&range);
            return self.discard(offset, req.len);
        }
        if limits.volatile_cache && !req.flags.contains(Flags::FUA) {
            let mut bytes = vec![0; req.len as usize];
            req.data.copy_to(&mut bytes);
            self.cache.push(Cached { offset, bytes });
            return;
        }
        self.destage_below(&range);
        match req.op {
            Op::Write => self.medium.write_from(offset, &req.data),
            _ => self.medium.zero(offset, req.len),
        }
    }

    /// Lets the write stray. Returns its actual offset, if it happens.
    fn stray(&mut self, stray: &Stray, req: &Request<'_>, offset: u64, block_size: u32) -> Option<u64> {
        let mut bytes = vec![0; req.len as usize];
        if req.op == Op::Write {
            req.data.copy_to(&mut bytes);
        }
        let place = stray.is_misdirected.then(|| {
            let places = (stray.within.end - stray.within.start - req.len) / u64::from(block_size) + 1;
            stray.within.start + self.rng.below(places) * u64::from(block_size)
        });
        let overwritten = place.map(|place| {
            let mut before = vec![0; req.len as usize];
            self.read(place, &mut before);
            (place, before)
        });
        self.strayed = Some(Strayed { offset, bytes, overwritten });
        place
    }

    /// Discarded blocks read as before or as zeroes. The NVMe and ATA command sets promise at least
    /// that no other block's data appears.
    fn discard(&mut self, offset: u64, len: u64) {
        let mut at = offset;
        while at < offset + len {
            let part = (4096 - at % 4096).min(offset + len - at);
            match self.rng.below(4) {
                0 => {}
                // Draw as many numbers as otherwise: a seed keeps its meaning.
                1 => (0..part).for_each(|_| {
                    self.rng.draw();
                }),
                _ => self.medium.zero(at, part),
            }
            at += part;
        }
    }

    /// Makes the oldest `count` cached writes durable.
    fn destage(&mut self, count: usize) {
        for cached in self.cache.drain(..count) {
            self.medium.write(cached.offset, &cached.bytes);
        }
    }

    /// Makes cached writes durable up to the last one that touches `range`, so that no older one
    /// overwrites it later.
    fn destage_below(&mut self, range: &Range<u64>) {
        let last = self.cache.iter().rposition(|cached| overlaps(&cached.range(), range));
        self.destage(last.map_or(0, |last| last + 1));
    }

    /// Keeps a random part of the cache.
    fn lose_power(&mut self, block_size: u32) {
        for cached in std::mem::take(&mut self.cache) {
            for part in survivors(&mut self.rng, cached.bytes.len() as u64, block_size) {
                let bytes = &cached.bytes[part.start as usize..part.end as usize];
                self.medium.write(cached.offset + part.start, bytes);
            }
        }
    }

    /// Tears a request that was in flight when power failed.
    fn tear(&mut self, req: &Request<'_>, offset: u64, block_size: u32) {
        if !req.op.is_modifying() {
            return;
        }
        self.has_torn_commit |= is_superblock(req);
        for part in survivors(&mut self.rng, req.len, block_size) {
            let (at, len) = (offset + part.start, part.end - part.start);
            rewrite(&mut self.bad, &(at..at + len));
            rewrite(&mut self.rotten, &(at..at + len));
            match req.op {
                Op::Write => self.medium.write_from(at, &req.data.part(part.start as usize, len as usize)),
                Op::WriteZeroes => self.medium.zero(at, len),
                _ => self.discard(at, len),
            }
        }
    }
}

impl Strayed {
    /// Updates the strayed write: a later write to the same bytes defines their expected data.
    fn note_write(&mut self, req: &Request<'_>, offset: u64) {
        let mut bytes = vec![0; req.len as usize];
        if req.op == Op::Write {
            req.data.copy_to(&mut bytes);
        }
        let own = (self.offset, &mut self.bytes);
        let other = self.overwritten.as_mut().map(|(offset, bytes)| (*offset, bytes));
        for (start, belongs) in [Some(own), other].into_iter().flatten() {
            let (from, to) = (start.max(offset), (start + belongs.len() as u64).min(offset + req.len));
            if from < to {
                let source = &bytes[(from - offset) as usize..(to - offset) as usize];
                belongs[(from - start) as usize..(to - start) as usize].copy_from_slice(source);
            }
        }
    }
}

impl Stray {
    fn holds(&self, req: &Request<'_>, offset: u64) -> bool {
        let is_within = self.within.start <= offset && offset + req.len <= self.within.end;
        is_within && matches!(req.op, Op::Write | Op::WriteZeroes)
    }
}

impl Cached {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes.len() as u64
    }

    /// Copies the cached data over `bytes`, which were read at `offset`.
    fn overlay(&self, offset: u64, bytes: &mut [u8]) {
        let range = self.range();
        let (from, to) = (range.start.max(offset), range.end.min(offset + bytes.len() as u64));
        if from < to {
            let source = &self.bytes[(from - self.offset) as usize..(to - self.offset) as usize];
            bytes[(from - offset) as usize..(to - offset) as usize].copy_from_slice(source);
        }
    }
}

fn is_superblock(req: &Request<'_>) -> bool {
    let mut start = [0; MAGIC.len()];
    if req.op != Op::Write || req.len < start.len() as u64 {
        return false;
    }
    req.data.part(0, start.len()).copy_to(&mut start);
    start == MAGIC
}

/// The parts of a write of `len` bytes that survive: none, all, one end, or any blocks.
fn survivors(rng: &mut Rng, len: u64, block_size: u32) -> Vec<Range<u64>> {
    let block = u64::from(block_size);
    let blocks = len / block;
    match rng.below(8) {
        0..3 => vec![],
        3..6 => std::iter::once(0..len).collect(),
        6 => {
            let cut = rng.below(blocks + 1) * block;
            std::iter::once(if rng.one_in(2) { 0..cut } else { cut..len }).collect()
        }
        _ => {
            let mut survives = || rng.one_in(2);
            (0..blocks).filter(|_| survives()).map(|i| i * block..(i + 1) * block).collect()
        }
    }
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Removes `range` from the unreadable ranges.
fn rewrite(bad: &mut Vec<(Range<u64>, Unreadable)>, range: &Range<u64>) {
    if !bad.iter().any(|(b, _)| overlaps(b, range)) {
        return;
    }
    for (b, kind) in std::mem::take(bad) {
        let before = b.start..b.end.min(range.start);
        let behind = b.start.max(range.end)..b.end;
        bad.extend(
            [before, behind].into_iter().filter(|part| part.start < part.end).map(|part| (part, kind)),
        );
    }
}

impl Device for SimDisk {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn limits(&self) -> Limits {
        self.0.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let boot = self.0.machine.boot();
        if !self.0.is_here(&self.lock(), boot) {
            return Err(DeviceError::new(&self.0.name, "disk not found"));
        }
        Ok(Rc::new(SimChannel { disk: self.0.clone(), core: reactor::current(), boot }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn resize(&self, bytes: u64) -> Result<Limits, DeviceError> {
        let mut state = self.lock();
        if !self.0.is_file.load(Ordering::Relaxed) || !self.0.is_here(&state, self.0.machine.boot()) {
            return Err(DeviceError::new(&self.0.name, "the size is fixed"));
        }
        if bytes < self.0.limits.capacity() {
            let all = state.cache.len();
            state.destage(all);
        }
        state.medium.resize(bytes);
        self.0.limits.set_capacity(bytes);
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

struct SimChannel {
    disk: Arc<Shared>,
    core: Core,
    boot: u64,
}

/// Counts a request as in flight until it ends, or is dropped.
struct InFlight {
    machine: Arc<Machine>,
    has_ended: bool,
}

impl InFlight {
    fn end(&mut self) {
        self.has_ended = true;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.machine.note_end(!self.has_ended);
    }
}

impl Channel for SimChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let latency_ns = match self.disk.begin(req, offset, self.boot) {
            Ok(latency_ns) => latency_ns,
            Err(error) => return IoFuture::ready(Err(error)),
        };
        if self.disk.machine.is_tracing() {
            self.disk.trace(&self.core, "starts", req, offset);
        }
        let sleep = self.core.sleep(latency_ns);
        let mut in_flight = InFlight { machine: self.disk.machine.clone(), has_ended: false };
        IoFuture::new(async move {
            sleep.await;
            while self.disk.is_stuck(self.boot) {
                self.core.sleep(STUCK_LOOK_NS).await;
            }
            in_flight.end();
            let result = self.disk.finish(req, offset, self.boot);
            if self.disk.machine.is_tracing() {
                self.disk.trace(&self.core, if result.is_ok() { "ok" } else { "failed" }, req, offset);
            }
            result
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        if !self.disk.tells_zeroes.load(Ordering::Relaxed) {
            return self.disk.limits.answer_data(report, offset, len);
        }
        let limits = self.disk.limits.get();
        if let Err(error) = limits.check_range(offset, len) {
            return IoFuture::ready(Err(error));
        }
        let mut bytes = vec![0; len as usize];
        self.disk.lock().read(offset, &mut bytes);
        for block in bytes.chunks(limits.block_size as usize) {
            let is_zero = block.iter().all(|byte| *byte == 0);
            let status = if is_zero { Status::ZERO_HOLE } else { Status::DATA };
            if !report.push(block.len() as u64, status) {
                break;
            }
        }
        IoFuture::ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use conformance::Suite;

    fn config() -> DiskConfig {
        DiskConfig {
            capacity: 16 << 20,
            block_size: 512,
            has_volatile_cache: false,
            has_zeroes: true,
            latency_ns: 10_000,
            seed: 1,
        }
    }

    #[test]
    fn it_passes_the_suite_with_and_without_a_cache() {
        for (block_size, has_volatile_cache) in [(512, false), (4096, true)] {
            let machine = Machine::new();
            machine.power_on();
            let config = DiskConfig { block_size, has_volatile_cache, latency_ns: 100, ..config() };
            Suite::new(Arc::new(SimDisk::new("sim", &machine, &config))).run();
        }
    }

    async fn write(channel: &dyn Channel, offset: u64, byte: u8, flags: Flags) -> IoResult {
        let mut buffer = reactor::current().buffers().take(4096).await;
        buffer.as_mut_slice().fill(byte);
        buffer.transfer(channel, Op::Write, flags, offset).await.1
    }

    async fn read(channel: &dyn Channel, offset: u64) -> Result<Vec<u8>, IoError> {
        let buffer = reactor::current().buffers().take(4096).await;
        let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, offset).await;
        result.map(|()| buffer.as_slice().to_vec())
    }

    /// Crashes a disk with a volatile cache: writes without flush, with FUA, with a flush, and one
    /// in flight at the power failure.
    fn crash(seed: u64) -> Vec<(u8, usize)> {
        reactor::run_simulated(seed, move |_| async move {
            let machine = Machine::new();
            machine.power_on();
            let disk =
                SimDisk::new("d", &machine, &DiskConfig { has_volatile_cache: true, seed, ..config() });
            let channel = disk.open_channel().unwrap();
            for (offset, flags) in [(0, Flags::NONE), (4096, Flags::FUA), (8192, Flags::NONE)] {
                assert_eq!(write(&*channel, offset, 7, flags).await, Ok(()));
                if offset == 8192 {
                    assert_eq!(channel.submit(&Request::flush(), 0).await, Ok(()));
                }
            }
            assert_eq!(write(&*channel, 0, 8, Flags::NONE).await, Ok(()));
            let late = channel.clone();
            reactor::current().spawn(async move {
                assert_eq!(write(&*late, 12288, 9, Flags::FUA).await, Err(IoError::DeviceGone));
            });
            reactor::current().sleep(1).await;
            machine.power_off();
            while machine.in_flight() > 0 {
                reactor::current().sleep(1000).await;
            }
            assert_eq!(read(&*channel, 0).await, Err(IoError::DeviceGone), "a channel of the last boot");
            disk.lose_cache();
            machine.power_on();
            assert_eq!(read(&*channel, 0).await, Err(IoError::DeviceGone), "a channel of the last boot");
            let channel = disk.open_channel().unwrap();
            let mut seen = Vec::new();
            for offset in [0, 4096, 8192, 12288] {
                let bytes = read(&*channel, offset).await.unwrap();
                assert!(
                    bytes.chunks(512).all(|block| block.iter().all(|b| *b == block[0])),
                    "torn in a block"
                );
                seen.push((bytes[0], bytes.chunks(512).filter(|block| block[0] == bytes[0]).count()));
            }
            assert_eq!(machine.dropped(), 0);
            seen
        })
    }

    #[test]
    fn power_loss_keeps_what_is_durable_and_tears_the_rest() {
        let seen: Vec<_> = (0..200).map(crash).collect();
        assert!(seen.iter().all(|blocks| blocks[1] == (7, 8) && blocks[2] == (7, 8)));
        for (place, values) in [(0, [7, 8]), (3, [0, 9])] {
            for value in values {
                assert!(seen.iter().any(|blocks| blocks[place] == (value, 8)), "{value} survives at {place}");
            }
            assert!(seen.iter().any(|blocks| blocks[place].1 < 8), "torn at {place}");
        }
        assert_eq!(crash(5), crash(5));
    }

    #[test]
    fn faults_do_what_they_are_called() {
        reactor::run_simulated(1, |_| async {
            let machine = Machine::new();
            machine.power_on();
            let disk = SimDisk::new("d", &machine, &config());
            let channel = disk.open_channel().unwrap();
            disk.add_medium_error(4096..4097, Unreadable::Blocks(4096 - 3 * 512));
            assert!(disk.has_medium_errors() && !disk.is_unreadable());
            assert_eq!(disk.unreadable_blocks(), BTreeSet::from([3]));
            assert_eq!(read(&*channel, 4096).await, Err(IoError::Medium));
            assert_eq!(write(&*channel, 4096, 1, Flags::NONE).await, Ok(()));
            assert_eq!(read(&*channel, 4096).await, Ok(vec![1; 4096]), "rewritten");
            disk.fail_write(2);
            assert_eq!(write(&*channel, 8192, 1, Flags::NONE).await, Ok(()));
            assert!(disk.is_failing() && !disk.has_failed_write());
            assert_eq!(write(&*channel, 8192, 1, Flags::NONE).await, Err(IoError::Medium));
            assert_eq!(write(&*channel, 8192, 1, Flags::NONE).await, Ok(()));
            assert!(disk.is_failing() && disk.has_failed_write());
            disk.forgive();
            assert!(!disk.is_failing());
            disk.let_write_stray(4096..8192, false);
            assert_eq!(write(&*channel, 8192, 2, Flags::NONE).await, Ok(()), "another place");
            assert_eq!(write(&*channel, 4096, 2, Flags::NONE).await, Ok(()));
            assert_eq!(read(&*channel, 4096).await, Ok(vec![1; 4096]), "lost");
            let lost = Strayed { offset: 4096, bytes: vec![2; 4096], overwritten: None };
            assert_eq!(disk.take_strayed(), Some(lost));
            disk.let_write_stray(4096..12288, true);
            assert_eq!(write(&*channel, 4096, 3, Flags::NONE).await, Ok(()));
            let strayed = disk.take_strayed().expect("a misdirected write");
            let (place, before) = strayed.overwritten.expect("a place");
            assert_eq!(read(&*channel, place).await, Ok(vec![3; 4096]));
            assert_eq!((strayed.offset, strayed.bytes), (4096, vec![3; 4096]));
            disk.poke(place, &before);
            assert_eq!(read(&*channel, 4096).await, Ok(vec![1; 4096]), "as before");
            assert_eq!(disk.take_strayed(), None);
            disk.rot(4096..4097);
            assert_ne!(read(&*channel, 4096).await.unwrap()[0], 1);
            disk.kill();
            assert_eq!(read(&*channel, 0).await, Err(IoError::DeviceGone));
            disk.revive();
            disk.set_stuck(true);
            let core = reactor::current();
            let free = disk.clone();
            core.spawn(async move {
                reactor::current().sleep(5_000_000_000).await;
                free.set_stuck(false);
            });
            let before = core.now_ns();
            assert!(read(&*channel, 0).await.is_ok());
            assert!(core.now_ns() - before >= 5_000_000_000);
        });
    }
}
