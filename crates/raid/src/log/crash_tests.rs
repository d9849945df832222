//! The log and recovery under crashes: a minimal write path over members in memory, whose writes
//! tear at sectors.
//!
//! A *world* goes through many crashes. In each round several operations run at once over few
//! stripes and small lanes, so that rows are rewritten and lanes wrap. Then the power fails at a
//! random moment, and members may be lost with it. Recovery runs; it may itself lose power and
//! further members. Then the test compares every stripe with an oracle: a valid code word without
//! holes, blocks without a write unchanged, other blocks old or new.

use super::checksum::Checksum;
use super::entry::Nonce;
use super::*;
use crate::{ArrayConfig, Code};
use block::{Channel, Flags, IoError, IoFuture, IoResult, Op, Request, Segment, StatusReport};
use reactor::current;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

const SECTOR: usize = 512;
const STRIPES: u64 = 10;
const LOG_AT: u64 = 4096;

/// The payload of an entry: partials by parity, and new data.
struct Kept<'a> {
    partials: &'a [Vec<u8>],
    redo: &'a [&'a [u8]],
}

impl Payload for Kept<'_> {
    fn partial(&self, parity: usize) -> &[u8] {
        &self.partials[parity]
    }

    fn redo(&self) -> Redo<'_> {
        self.redo.iter().copied().collect()
    }
}

fn random(below: u64) -> u64 {
    current().random_u64() % below
}

fn chance(percent: u64) -> bool {
    random(100) < percent
}

/// The power of all members.
#[derive(Default)]
struct Power {
    is_off: Cell<bool>,
}

/// A member without a volatile cache; each sector of a write is atomic.
struct Disk {
    power: Rc<Power>,
    is_dead: Cell<bool>,
    content: RefCell<Vec<u8>>,
    /// Longest time of a request.
    most_ns: Cell<u64>,
}

impl Disk {
    fn is_gone(&self) -> bool {
        self.power.is_off.get() || self.is_dead.get()
    }
}

impl Channel for Disk {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(async move {
            if self.is_gone() {
                return Err(IoError::DeviceGone);
            }
            assert!((offset as usize | req.data.len()).is_multiple_of(SECTOR));
            assert!(req.op != Op::Write || req.is_fua(), "a write without FUA");
            current().sleep(1 + random(self.most_ns.get())).await;
            let (at, len) = (offset as usize, req.data.len());
            let mut content = self.content.borrow_mut();
            if !self.is_gone() {
                match req.op {
                    Op::Read => req.data.copy_from(&content[at..at + len]),
                    _ => req.data.copy_to(&mut content[at..at + len]),
                };
                return Ok(());
            }
            if req.op == Op::Write {
                // Torn: nothing, everything, a first part, or any sectors.
                let mode = random(4);
                let first = random(len as u64 / SECTOR as u64 + 1) as usize;
                for sector in 0..len / SECTOR {
                    let lands = match mode {
                        0 => false,
                        1 => sector < first,
                        2 => chance(50),
                        _ => true,
                    };
                    if lands {
                        let from = sector * SECTOR;
                        req.data.part(from, SECTOR).copy_to(&mut content[at + from..at + from + SECTOR]);
                    }
                }
            }
            Err(IoError::DeviceGone)
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}

/// A sector of a data strip: stripe, strip, sector in the strip.
type Sector = (u64, usize, usize);

/// The possible contents of sectors. Each content is named by a tag; 0 is zeroes.
#[derive(Default)]
struct Oracle {
    /// The content that was acknowledged last.
    certain: BTreeMap<Sector, u64>,
    /// The content of a write in flight.
    pending: BTreeMap<Sector, u64>,
    next_tag: u64,
}

fn fill_sector(sector: &mut [u8], tag: u64) {
    let mut state = tag;
    for word in sector.chunks_exact_mut(8) {
        word.copy_from_slice(&state.to_le_bytes());
        state = state.wrapping_mul(0xd129_0d4b_32ab_9185).wrapping_add(tag);
    }
}

struct World {
    config: Arc<ArrayConfig>,
    code: Code,
    power: Rc<Power>,
    disks: Vec<Rc<Disk>>,
    channels: Vec<Rc<dyn Channel>>,
    /// Members that the superblock calls failed.
    out: Cell<u64>,
    /// Members that are not used any more, and that the next commit marks as failed.
    failing: Cell<u64>,
    oracle: RefCell<Oracle>,
    locked: RefCell<Vec<(u64, u32, u32)>>,
    /// Whether a failed member responds again when the power returns.
    comes_back: Cell<bool>,
    running: Cell<usize>,
    tally: RefCell<Tally>,
}

/// Counters over all worlds of a test.
#[derive(Clone, Debug, Default)]
struct Tally {
    crashes: u64,
    writes: u64,
    degraded: u64,
    recoveries_cut: u64,
    replayed: u64,
    stale: u64,
    superseded: u64,
    incomplete: u64,
    bad: u64,
}

fn data_at(config: &ArrayConfig) -> u64 {
    LOG_AT + u64::from(config.lanes) * u64::from(config.lane_bytes)
}

fn segment(bytes: &[u8]) -> Segment {
    Segment { base: bytes.as_ptr().cast_mut(), len: bytes.len() }
}

impl World {
    fn new(config: ArrayConfig) -> Rc<World> {
        let power = Rc::new(Power::default());
        let bytes = data_at(&config) as usize + STRIPES as usize * config.geometry.strip_bytes as usize;
        let disk = |_| {
            let content = RefCell::new(vec![0; bytes]);
            Rc::new(Disk {
                power: power.clone(),
                is_dead: Cell::new(false),
                content,
                most_ns: Cell::new(1000),
            })
        };
        let disks: Vec<Rc<Disk>> = (0..config.geometry.members()).map(disk).collect();
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        Rc::new(World {
            code: config.code(),
            config: Arc::new(config),
            power,
            disks,
            channels,
            out: Cell::new(0),
            failing: Cell::new(0),
            oracle: RefCell::default(),
            locked: RefCell::default(),
            comes_back: Cell::new(false),
            running: Cell::new(0),
            tally: RefCell::default(),
        })
    }

    fn slot(&self, stripe: u64, strip: usize) -> usize {
        self.config.geometry.member(stripe, strip)
    }

    fn is_live(&self, stripe: u64, strip: usize) -> bool {
        (self.out.get() | self.failing.get()) >> self.slot(stripe, strip) & 1 == 0
    }

    fn is_beyond_redundancy(&self) -> bool {
        (self.out.get() | self.failing.get()).count_ones() as usize > self.config.geometry.parity
    }

    fn offset(&self, stripe: u64, offset: u32) -> u64 {
        data_at(&self.config) + self.config.geometry.member_offset(stripe) + u64::from(offset)
    }

    /// Durably marks all members in the mask, and those that are failing, as failed. Returns
    /// `false` if the power fails first.
    async fn put_out(&self, mask: u64) -> bool {
        self.failing.set(self.failing.get() | mask);
        let mask = self.failing.get();
        current().sleep(1 + random(20_000)).await;
        if !self.power.is_off.get() {
            self.out.set(self.out.get() | mask);
        }
        !self.power.is_off.get()
    }

    /// Reads or writes strips `(strip, bytes)` of the same rows in parallel; returns the failed
    /// members as a mask.
    async fn transfer(&self, op: Op, stripe: u64, offset: u32, strips: &[(usize, &[u8])]) -> u64 {
        let segments: Vec<Segment> = strips.iter().map(|(_, bytes)| segment(bytes)).collect();
        let requests: Vec<Request<'_>> = segments
            .iter()
            .map(|segment| {
                // SAFETY: the buffers outlive the requests, which are awaited here.
                let data = unsafe { block::Data::one(segment) };
                Request { op, flags: Flags::FUA, len: segment.len as u64, data }
            })
            .collect();
        let at = self.offset(stripe, offset);
        let results = RefCell::new(vec![Ok(()); strips.len()]);
        let futures = strips.iter().zip(&requests).enumerate().map(|(i, ((strip, _), request))| {
            let channel = &self.channels[self.slot(stripe, *strip)];
            let results = &results;
            IoFuture::new(async move {
                let result: IoResult = channel.submit(request, at).await;
                results.borrow_mut()[i] = result;
                Ok(())
            })
        });
        assert_eq!(block::join_all(futures).await, Ok(()));
        let results = results.into_inner();
        let failed = strips.iter().zip(results).filter(|(_, result)| result.is_err());
        failed.fold(0, |mask, ((strip, _), _)| mask | 1 << self.slot(stripe, *strip))
    }

    /// All data strips of rows, computed for failed members. `Err` contains the mask of members
    /// that failed during the read.
    async fn read_all(&self, stripe: u64, offset: u32, len: u32) -> Result<Vec<Vec<u8>>, u64> {
        let strips = self.config.geometry.group_members();
        let buffers = vec![vec![0u8; len as usize]; strips];
        let live: Vec<(usize, &[u8])> = (0..strips)
            .filter(|strip| self.is_live(stripe, *strip))
            .map(|strip| (strip, &buffers[strip][..]))
            .collect();
        match self.transfer(Op::Read, stripe, offset, &live).await {
            0 => Ok(decode(&self.code, &self.config, buffers, |strip| self.is_live(stripe, strip))),
            failed => Err(failed),
        }
    }

    async fn lock(&self, stripe: u64, offset: u32, len: u32) {
        let overlaps = |(s, o, l): &(u64, u32, u32)| *s == stripe && *o < offset + len && offset < o + l;
        while self.locked.borrow().iter().any(overlaps) {
            current().sleep(500).await;
        }
        self.locked.borrow_mut().push((stripe, offset, len));
    }

    fn unlock(&self, stripe: u64, offset: u32, len: u32) {
        let mut locked = self.locked.borrow_mut();
        let place = locked.iter().position(|lock| *lock == (stripe, offset, len)).unwrap();
        locked.swap_remove(place);
    }

    /// Writes random rectangles until the power fails.
    async fn write_until_crash(self: Rc<Self>, log: Rc<Log>) {
        while !self.power.is_off.get() && !self.is_beyond_redundancy() {
            let data = self.config.geometry.data;
            let strip_blocks = u64::from(self.config.geometry.strip_bytes) / SECTOR as u64;
            let stripe = random(STRIPES);
            let first = random(data as u64) as usize;
            let count = match random(4) {
                0 => data,
                1 => 1 + random((data - first) as u64) as usize,
                _ => 1,
            };
            let first = if count == data { 0 } else { first };
            let blocks = 1 + random(if chance(20) { strip_blocks } else { 3.min(strip_blocks) });
            let most = u64::from(max_len(&self.config, data)) / SECTOR as u64;
            let blocks = blocks.min(most);
            let offset = random(strip_blocks - blocks + 1) as u32 * SECTOR as u32;
            let len = blocks as u32 * SECTOR as u32;
            let modified = ((1u64 << count) - 1) << first;
            self.lock(stripe, offset, len).await;
            let is_done = self.write(&log, stripe, offset, len, modified).await;
            self.unlock(stripe, offset, len);
            if is_done {
                self.tally.borrow_mut().writes += 1;
            }
            if chance(30) {
                current().sleep(random(20_000)).await;
            }
        }
        self.running.set(self.running.get() - 1);
    }

    /// Runs one operation under its lock; returns whether it was acknowledged.
    async fn write(&self, log: &Log, stripe: u64, offset: u32, len: u32, modified: u64) -> bool {
        if self.power.is_off.get() {
            return false; // an interrupted operation may have left the sectors pending
        }
        let data = self.config.geometry.data;
        let strips: Vec<usize> = (0..data).filter(|strip| modified >> strip & 1 == 1).collect();
        let sectors: Vec<Sector> = (offset / 512..(offset + len) / 512)
            .flat_map(|sector| strips.iter().map(move |strip| (stripe, *strip, sector as usize)))
            .collect();
        let mut fresh = vec![vec![0u8; len as usize]; data];
        for key in &sectors {
            let mut oracle = self.oracle.borrow_mut();
            // Some writes are of zeroes, and repeat the old content.
            let tag = if chance(10) { 0 } else { oracle.next_tag + 1 };
            oracle.next_tag += 1;
            oracle.pending.insert(*key, tag);
            let from = key.2 * SECTOR - offset as usize;
            fill_sector(&mut fresh[key.1][from..from + SECTOR], tag);
        }
        loop {
            if self.power.is_off.get() || self.is_beyond_redundancy() {
                return false;
            }
            match self.try_write(log, stripe, offset, len, modified, &fresh).await {
                Ok(()) => break,
                Err(failed) => {
                    if !self.put_out(failed).await {
                        return false;
                    }
                }
            }
        }
        let mut oracle = self.oracle.borrow_mut();
        for key in sectors {
            let tag = oracle.pending.remove(&key).unwrap();
            oracle.certain.insert(key, tag);
        }
        true
    }

    /// `Err` contains the members that failed before anything was written, or all members whose
    /// loss aborts the operation.
    async fn try_write(
        &self,
        log: &Log,
        stripe: u64,
        offset: u32,
        len: u32,
        modified: u64,
        fresh: &[Vec<u8>],
    ) -> Result<(), u64> {
        let (data, parity) = (self.config.geometry.data, self.config.geometry.parity);
        let old = self.read_all(stripe, offset, len).await?;
        let is_modified = |strip: usize| modified >> strip & 1 == 1;
        let is_full = modified.count_ones() as usize == data;
        let is_degraded = self.out.get() | self.failing.get() != 0;
        let kept: Vec<(usize, &[u8])> =
            (0..data).filter(|i| !is_modified(*i)).map(|i| (i, &old[i][..])).collect();
        let new: Vec<(usize, &[u8])> =
            (0..data).filter(|i| is_modified(*i)).map(|i| (i, &fresh[i][..])).collect();
        let mut partials = vec![vec![0u8; if is_full { 0 } else { len as usize }]; parity];
        let mut parities = vec![vec![0u8; len as usize]; parity];
        for j in 0..parity {
            if !is_full {
                self.code.encode_some(&kept, &mut [(j, &mut partials[j])]);
                parities[j].copy_from_slice(&partials[j]);
            }
            self.code.update(&new, &mut [(j, &mut parities[j])]);
        }
        let targets: Vec<Target> = (0..parity)
            .filter(|j| self.is_live(stripe, data + j))
            .map(|j| Target {
                parity: j,
                slot: self.slot(stripe, data + j),
                channel: self.channels[self.slot(stripe, data + j)].clone(),
                log_offset: LOG_AT,
            })
            .collect();
        let redo: Vec<&[u8]> = match new.len() > 1 && !is_full || is_degraded {
            true => new.iter().map(|(_, bytes)| *bytes).collect(),
            false => Vec::new(),
        };
        let key = log.key();
        let checksums: Vec<u32> = match is_full && redo.is_empty() {
            true => new.iter().map(|(_, bytes)| Checksum::of(&key, bytes)).collect(),
            false => Vec::new(),
        };
        let mut ticket = None;
        if targets.is_empty() && self.failing.get() & !self.out.get() != 0 && !self.put_out(0).await {
            return Err(0);
        }
        if !targets.is_empty() {
            let payload = &Kept { partials: &partials, redo: &redo };
            let (checksums, targets) = (&checksums[..], &targets[..]);
            let entry = Entry { stripe, offset, len, modified, checksums, targets, payload };
            match log.append(&entry).await {
                Ok(granted) => ticket = Some(granted),
                Err(AppendError::Members(failed)) => {
                    return Err(failed.iter().fold(0, |mask, (slot, _)| mask | 1 << slot));
                }
                Err(AppendError::Stuck(_)) => {
                    assert!(self.power.is_off.get() || self.is_beyond_redundancy());
                    return Err(0);
                }
                Err(error) => panic!("{error}"),
            }
        }
        let mut writes: Vec<(usize, &[u8])> = new;
        writes.extend((0..parity).map(|j| (data + j, &parities[j][..])));
        writes.retain(|(strip, _)| self.is_live(stripe, *strip));
        let failed = self.transfer(Op::Write, stripe, offset, &writes).await;
        // A skipped member is durably failed before the entry is retired.
        if failed | self.failing.get() & !self.out.get() != 0 && !self.put_out(failed).await {
            return Err(failed); // the ticket is dropped: the power failed
        }
        if self.is_beyond_redundancy() {
            return Err(0);
        }
        if let Some(ticket) = ticket {
            log.retire(ticket);
        }
        Ok(())
    }

    /// Runs recovery until it ends without losing power or a member.
    async fn recover(self: &Rc<Self>, nonce: Nonce) -> Report {
        // Durable: survives the loss of power.
        let mut noted: Vec<BadRange> = Vec::new();
        loop {
            // Lost members are failed before recovery.
            let gone = (0..self.disks.len()).filter(|slot| self.disks[*slot].is_dead.get());
            self.out.set(gone.fold(self.out.get(), |mask, slot| mask | 1 << slot));
            self.failing.set(0);
            if chance(25) {
                self.crash_soon(20_000, 2);
                self.tally.borrow_mut().recoveries_cut += 1;
            }
            let members: Vec<Option<RecoveryMember>> = (0..self.disks.len())
                .map(|slot| {
                    (self.out.get() >> slot & 1 == 0).then(|| RecoveryMember {
                        channel: self.channels[slot].clone(),
                        log_offset: LOG_AT,
                        data_offset: data_at(&self.config),
                    })
                })
                .collect();
            let is_live = |_, slot: usize| self.out.get() >> slot & 1 == 0;
            let context = Recovery {
                config: &self.config,
                nonce,
                members: &members,
                is_live: &is_live,
                first_stripe: 0,
                noted: &noted,
            };
            let result = recover(&context).await;
            if self.power.is_off.get() {
                current().sleep(100_000).await;
                self.power.is_off.set(false);
                continue;
            }
            match result {
                Ok(report) => {
                    // The planned loss of power may still come; then the report does not count.
                    current().sleep(100_000).await;
                    if !self.power.is_off.get() {
                        return Report { bad: noted, ..report };
                    }
                    self.power.is_off.set(false);
                }
                Err(RecoverError::NotNoted { ranges }) => noted.extend(ranges),
                Err(RecoverError::Member { slot, error: IoError::DeviceGone }) => {
                    self.disks[slot].is_dead.set(true);
                    current().sleep(100_000).await;
                    self.power.is_off.set(false);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Lets the power fail within `ns`, and loses members with it at random.
    fn crash_soon(self: &Rc<Self>, ns: u64, most_losses: u64) {
        let world = self.clone();
        let after = random(ns);
        current().spawn(async move {
            current().sleep(after).await;
            world.power.is_off.set(true);
            world.lose(random(most_losses + 1));
        });
    }

    /// Loses up to `count` members, never more than the array has parities.
    fn lose(&self, count: u64) {
        for _ in 0..count {
            let slot = random(self.disks.len() as u64) as usize;
            let gone = (0..self.disks.len())
                .filter(|i| self.disks[*i].is_dead.get() || self.out.get() >> i & 1 == 1)
                .fold(0u64, |mask, i| mask | 1 << i);
            if (gone | 1 << slot).count_ones() as usize <= self.config.geometry.parity {
                self.disks[slot].is_dead.set(true);
            }
        }
    }

    /// Compares every stripe with the oracle and settles the pending sectors.
    fn check(&self, report: &Report) {
        let geometry = &self.config.geometry;
        let mut bad = BTreeSet::new();
        for range in &report.bad {
            for sector in range.offset / 512..(range.offset + range.len) / 512 {
                bad.insert((range.stripe, range.strip, sector as usize));
            }
        }
        let mut oracle = self.oracle.borrow_mut();
        for key in &bad {
            assert!(oracle.pending.contains_key(key), "{key:?} is bad without a write");
        }
        for stripe in 0..STRIPES {
            let strip_bytes = geometry.strip_bytes as usize;
            let at = self.offset(stripe, 0) as usize;
            let strips: Vec<Vec<u8>> = (0..geometry.group_members())
                .map(|strip| {
                    self.disks[self.slot(stripe, strip)].content.borrow()[at..at + strip_bytes].to_vec()
                })
                .collect();
            let is_live = |strip| self.is_live(stripe, strip);
            let decoded = decode(&self.code, &self.config, strips.clone(), is_live);
            for j in (0..geometry.parity).filter(|j| is_live(geometry.data + j)) {
                let data: Vec<(usize, &[u8])> = decoded.iter().map(|strip| &strip[..]).enumerate().collect();
                let mut parity = vec![0; strip_bytes];
                self.code.encode_some(&data, &mut [(j, &mut parity)]);
                let hole = (0..strip_bytes).find(|i| parity[*i] != strips[geometry.data + j][*i]);
                assert_eq!(hole, None, "stripe {stripe}: parity {j} does not fit the data");
            }
            for (strip, bytes) in decoded.iter().enumerate().take(geometry.data) {
                for (sector, bytes) in bytes.chunks_exact(SECTOR).enumerate() {
                    let key = (stripe, strip, sector);
                    let old = oracle.certain.get(&key).copied().unwrap_or(0);
                    let new = oracle.pending.get(&key).copied();
                    let zero = bad.contains(&key).then_some(0);
                    let holds = |tag: u64| {
                        let mut expected = [0; SECTOR];
                        fill_sector(&mut expected, tag);
                        bytes == expected
                    };
                    let found = [Some(old), new, zero].into_iter().flatten().find(|tag| holds(*tag));
                    let found = found.unwrap_or_else(|| {
                        panic!("{key:?} holds {:?}, not {old} or {new:?}", &bytes[..8]);
                    });
                    oracle.certain.insert(key, found);
                }
            }
        }
        oracle.pending.clear();
    }

    /// Replaces lost members by new ones with reconstructed content.
    fn rebuild(&self) {
        let geometry = &self.config.geometry;
        for stripe in 0..STRIPES {
            let at = self.offset(stripe, 0) as usize;
            let end = at + geometry.strip_bytes as usize;
            let strips: Vec<Vec<u8>> = (0..geometry.group_members())
                .map(|strip| self.disks[self.slot(stripe, strip)].content.borrow()[at..end].to_vec())
                .collect();
            let decoded = decode(&self.code, &self.config, strips, |strip| self.is_live(stripe, strip));
            let data: Vec<(usize, &[u8])> = decoded.iter().map(|strip| &strip[..]).enumerate().collect();
            for strip in (0..geometry.group_members()).filter(|strip| !self.is_live(stripe, *strip)) {
                let mut content = self.disks[self.slot(stripe, strip)].content.borrow_mut();
                match strip.checked_sub(geometry.data) {
                    None => content[at..end].copy_from_slice(&decoded[strip]),
                    Some(j) => self.code.encode_some(&data, &mut [(j, &mut content[at..end])]),
                }
            }
        }
        self.disks.iter().for_each(|disk| disk.is_dead.set(false));
        self.out.set(0);
        self.failing.set(0);
    }
}

/// The data strips; those that are not live are computed from the others.
fn decode(
    code: &Code,
    config: &ArrayConfig,
    mut strips: Vec<Vec<u8>>,
    is_live: impl Fn(usize) -> bool,
) -> Vec<Vec<u8>> {
    let geometry = &config.geometry;
    let lost: Vec<usize> = (0..geometry.data).filter(|strip| !is_live(*strip)).collect();
    if !lost.is_empty() {
        let live = (0..geometry.group_members()).filter(|strip| is_live(*strip));
        let decoder = code.decoder(&lost, live.fold(0, |mask, strip| mask | 1 << strip)).unwrap();
        let mut found = vec![vec![0; strips[0].len()]; lost.len()];
        let sources: Vec<&[u8]> = decoder.sources().iter().map(|strip| &strips[*strip][..]).collect();
        decoder.decode(&sources, &mut found.iter_mut().map(|strip| &mut strip[..]).collect::<Vec<_>>());
        lost.iter().zip(found).for_each(|(strip, bytes)| strips[*strip] = bytes);
    }
    strips.truncate(geometry.data);
    strips
}

/// One round: writes, a crash, recovery, the check.
async fn round(world: &Rc<World>, number: u64) {
    let parity = world.config.geometry.parity;
    let mut nonce = [0; 16];
    nonce[..8].copy_from_slice(&current().random_u64().to_le_bytes());
    let nonce = Nonce(nonce);
    let log = Rc::new(Log::new(world.config.clone(), nonce, number));
    for disk in &world.disks {
        disk.most_ns.set(if chance(20) { 30_000 } else { 1000 });
    }
    let writers = 1 + random(8) as usize;
    world.running.set(writers);
    for _ in 0..writers {
        current().spawn(world.clone().write_until_crash(log.clone()));
    }
    // Members also fail while the array runs.
    if chance(30) {
        let world = world.clone();
        current().spawn(async move {
            current().sleep(random(100_000)).await;
            if !world.power.is_off.get() {
                world.lose(1);
                // A member that only hung responds again after the crash, unless it was marked
                // failed.
                world.comes_back.set(chance(50));
            }
        });
    }
    let losses = if chance(50) { 0 } else { parity as u64 };
    let longest = if chance(10) { 1_000_000 } else { 100_000 };
    world.crash_soon(longest, losses);
    while world.running.get() > 0 || !world.power.is_off.get() {
        current().sleep(10_000).await;
    }
    current().sleep(200_000).await;
    world.locked.borrow_mut().clear();
    drop(log);
    if world.comes_back.take() {
        world.disks.iter().for_each(|disk| disk.is_dead.set(false));
    }
    world.power.is_off.set(false);
    {
        let mut tally = world.tally.borrow_mut();
        tally.crashes += 1;
        tally.degraded +=
            u64::from(world.out.get() != 0 || world.disks.iter().any(|disk| disk.is_dead.get()));
    }
    let report = world.recover(nonce).await;
    world.check(&report);
    let mut tally = world.tally.borrow_mut();
    tally.replayed += report.replayed;
    tally.stale += report.stale;
    tally.superseded += report.superseded;
    tally.incomplete += report.incomplete;
    tally.bad += report.bad.len() as u64;
    assert_eq!(report.lost, 0);
    if chance(60) {
        world.rebuild();
    }
}

/// Runs worlds of one geometry, each with its seed, for a number of rounds.
fn run_worlds(
    data: usize,
    parity: usize,
    strip_bytes: u32,
    lanes: u16,
    lane_bytes: u32,
    worlds: u64,
) -> Tally {
    const ROUNDS: u64 = 25;
    #[cfg(feature = "mutants")]
    if let Ok(name) = std::env::var("LOG_MUTANT") {
        use crate::mutant::{Mutant, choose};
        choose(Mutant::ALL.into_iter().find(|mutant| format!("{mutant:?}") == name));
    }
    let mut all = Tally::default();
    let seeds = std::env::var("LOG_SEED").map_or(0..worlds, |seed| {
        let seed: u64 = seed.parse().unwrap();
        seed..seed + 1
    });
    for seed in seeds {
        let config = ArrayConfig { lane_bytes, ..test_array(data, parity, strip_bytes, lanes) };
        let tally = reactor::run_simulated(seed + 1, move |_| async move {
            let world = World::new(config);
            for number in 0..ROUNDS {
                round(&world, number).await;
            }
            world.tally.take()
        });
        all.crashes += tally.crashes;
        all.writes += tally.writes;
        all.degraded += tally.degraded;
        all.recoveries_cut += tally.recoveries_cut;
        all.replayed += tally.replayed;
        all.stale += tally.stale;
        all.superseded += tally.superseded;
        all.incomplete += tally.incomplete;
        all.bad += tally.bad;
    }
    println!("{data}+{parity}: {all:?}");
    all
}

/// Number of worlds that a test runs; `LOG_WORLDS` overrides it.
fn worlds(usual: u64) -> u64 {
    std::env::var("LOG_WORLDS").map_or(usual, |worlds| worlds.parse().unwrap())
}

#[test]
fn raid_5_survives_crashes() {
    let tally = run_worlds(3, 1, 4096, 2, 32 << 10, worlds(8));
    assert!(tally.replayed > 0 && tally.stale > 0 && tally.superseded > 0);
}

#[test]
fn raid_6_survives_crashes() {
    run_worlds(4, 2, 8192, 3, 32 << 10, worlds(8));
}

#[test]
fn three_parities_survive_crashes() {
    run_worlds(6, 3, 4096, 1, 64 << 10, worlds(6));
}

#[test]
fn as_many_parities_as_data_survive_crashes() {
    run_worlds(3, 3, 4096, 2, 24 << 10, worlds(6));
}
