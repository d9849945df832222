//! The plan of a run: all of it follows from one number, and parts can be left out.

use crate::commands::Command;
use crate::creation::Creation;
use crate::directed::Story;
use crate::faults::Fault;
use crate::machine::CrashAt;
use crate::operations::Operations;
use crate::oracle::SECTOR;
use base::Rng;
use raid::{Consistency, Geometry, Level, Matrix, Zones};
use std::collections::BTreeSet;

/// The array of a run.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Seed of what the subject may draw itself.
    pub seed: u64,
    /// Level.
    pub level: Level,
    /// Shape.
    pub geometry: Geometry,
    /// Matrix of the parity.
    pub matrix: Matrix,
    /// Consistency mode.
    pub consistency: Consistency,
    /// Logical block size of the disks in bytes.
    pub block_size: u32,
    /// Log lanes.
    pub lanes: u16,
    /// Bytes of a lane on a member.
    pub lane_bytes: u32,
    /// Strips of a region.
    pub region_strips: u64,
    /// Whether the disks have volatile caches.
    pub has_volatile_cache: bool,
    /// Typical latency of a disk in nanoseconds.
    pub latency_ns: u64,
    /// Simulated cores.
    pub cores: usize,
    /// Whether the array's own keeper fills, syncs and scrubs.
    pub has_keeper: bool,
    /// Whether more members may be lost than parity covers.
    pub may_lose_too_many: bool,
    /// Bytes of a disk.
    pub disk_bytes: u64,
    /// Stripes of a group once all growth has happened.
    pub most_stripes: u64,
    /// Groups once all growth has happened.
    pub most_groups: usize,
    /// The target of a reshape, if there is one.
    pub next: Option<Next>,
    /// Bytes that the disk of each slot has beyond `disk_bytes`; none when empty.
    pub more_bytes: Vec<u64>,
    /// A slot whose first disk is slow, and how much longer each of its requests takes, in
    /// nanoseconds.
    pub slow: Option<(usize, u64)>,
    /// Members hold garbage when the array is made, and parity was never made.
    pub is_unsynced: bool,
    /// An operator's choices, in runs with operations.
    pub operations: Option<Operations>,
    /// How the array is created, if not by the simulator.
    pub creation: Option<Creation>,
}

/// The target of a reshape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Level.
    pub level: Level,
    /// Data strips of a stripe.
    pub data: usize,
    /// Parity strips of a stripe.
    pub parity: usize,
}

impl Next {
    /// The shape that it comes to, or a little more than that.
    pub fn geometry(&self, shape: &Shape) -> Geometry {
        let Next { data, parity, .. } = *self;
        let group_stripes = shape.geometry.group_stripes + RESERVE_STRIPS;
        Geometry { data, parity, group_stripes, ..shape.geometry }
    }
}

/// Strips that the reserve of a small member has.
pub const RESERVE_STRIPS: u64 = 4;

/// One thing that happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads sectors.
    Read {
        /// First sector.
        lba: u64,
        /// Sectors.
        count: u64,
    },
    /// Writes sectors.
    Write {
        /// First sector.
        lba: u64,
        /// Sectors.
        count: u64,
        /// With FUA.
        is_fua: bool,
        /// The caller changes its memory that many nanoseconds after it submitted; 0 for never.
        change_ns: u64,
    },
    /// Zeroes sectors.
    WriteZeroes {
        /// First sector.
        lba: u64,
        /// Sectors.
        count: u64,
    },
    /// Discards sectors.
    Discard {
        /// First sector.
        lba: u64,
        /// Sectors.
        count: u64,
    },
    /// Writes sectors in sequence, from the front again where there is no room.
    Stream {
        /// First sector.
        lba: u64,
        /// Sectors of a write.
        count: u64,
        /// Writes.
        writes: u64,
        /// Writes in flight.
        depth: u64,
        /// With FUA.
        is_fua: bool,
    },
    /// Flushes.
    Flush,
    /// The disk in a slot dies.
    Kill(usize),
    /// The member in a slot is marked as failed by hand.
    Fail(usize),
    /// A part of a slot's disk (bytes of its data) cannot be read.
    MediumError(usize, u64),
    /// Some blocks of one strip of a slot's disk (at these bytes of its data) cannot be read.
    StripError(usize, u64),
    /// The disk in a slot does not answer for that many nanoseconds.
    Stuck(usize, u64),
    /// The disk in a slot is slow for that many nanoseconds.
    Slow(usize, u64),
    /// One write to a slot's disk fails, the one that comes after so many others; the disk works
    /// on.
    FailWrite(usize, u32),
    /// An empty slot gets the disk that was there back.
    Return(usize),
    /// An empty slot gets a blank disk.
    Replace(usize),
    /// All empty slots of a slot's group get blank disks at the same time.
    ReplaceLost {
        /// A slot of the group.
        slot: usize,
        /// The slot whose disk dies meanwhile.
        killed: usize,
        /// When it dies, in nanoseconds; 0 for never.
        kill_ns: u64,
    },
    /// A block of metadata is damaged.
    Damage(Fault),
    /// Data and parity are compared.
    Scrub,
    /// All disks become larger by so many bytes, and the array with them.
    Grow(u64),
    /// A reshape continues to its end.
    Reshape,
    /// Blocks that could not be read are written again, one after the other.
    RewriteLost,
    /// The live member in a slot is copied onto a blank disk, and detached then.
    ReplaceLive(usize),
    /// The disk that fills a slot dies, as a copy of its member or in its place.
    KillIncoming(usize),
    /// The array gets a spare, of its own or of a pool.
    AddSpare {
        /// Of a pool.
        is_global: bool,
    },
    /// Jobs come to their end; no slot may be empty then while a spare waits.
    AwaitSpares,
    /// The keeper ends, and another one begins on another core.
    MoveKeeper,
    /// A core ends. Its workers continue elsewhere.
    EndCore,
}

impl Action {
    /// The sector behind the last one that it is about.
    pub fn end(&self) -> Option<u64> {
        match *self {
            Action::Read { lba, count }
            | Action::Write { lba, count, .. }
            | Action::Stream { lba, count, .. }
            | Action::WriteZeroes { lba, count }
            | Action::Discard { lba, count } => Some(lba + count),
            _ => None,
        }
    }

    /// The slot that it is about.
    pub fn slot(&self) -> Option<usize> {
        match *self {
            Action::Damage(ref fault) => Some(fault.slot),
            Action::Kill(slot)
            | Action::Fail(slot)
            | Action::MediumError(slot, _)
            | Action::StripError(slot, _)
            | Action::Stuck(slot, _)
            | Action::Slow(slot, _)
            | Action::FailWrite(slot, _)
            | Action::Return(slot)
            | Action::Replace(slot)
            | Action::ReplaceLive(slot)
            | Action::KillIncoming(slot)
            | Action::ReplaceLost { slot, .. } => Some(slot),
            _ => None,
        }
    }
}

/// An action, and who does it when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Names the step in the whole run.
    pub id: u32,
    /// The worker: its steps happen one after the other. Worker `w` runs on core `w % cores`; the
    /// last one is for what is not I/O.
    pub worker: usize,
    /// Nanoseconds that the worker waits before.
    pub delay_ns: u64,
    /// The action.
    pub action: Action,
}

/// New members come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newcomers {
    /// Names it in the whole run.
    pub id: u32,
    /// When power fails, counted from where they begin to come.
    pub crash: Option<CrashAt>,
}

/// From power on to power off.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Boot {
    /// Slots whose disk is not there from this boot on: lost while power was off.
    pub unplugged: Vec<(u32, usize)>,
    /// Slots whose disk is plugged in again, though it is stale.
    pub plugged: Vec<(u32, usize)>,
    /// When power fails.
    pub crash: Option<CrashAt>,
    /// Whether the count to the crash begins before assembly.
    pub is_crash_early: bool,
    /// Whether the array is first started read-only, read, and stopped.
    pub is_looked_at: bool,
    /// Whether the count to the crash begins with the first step, not when power comes.
    pub is_crash_of_work: bool,
    /// The array gets its new groups before anything else happens, if it is whole and lacks them.
    pub newcomers: Option<Newcomers>,
    /// Metadata that is damaged while power is off.
    pub faults: Vec<Fault>,
    /// An operator's commands before the array is started.
    pub commands: Vec<(u32, Command)>,
    /// When power fails during the commands, counted from the first one.
    pub command_crash: Option<CrashAt>,
    /// The steps of all workers.
    pub steps: Vec<Step>,
    /// Whether the array is stopped in the end, if power holds.
    pub is_stopped: bool,
}

/// A whole run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The number that it was made from.
    pub seed: u64,
    /// The array.
    pub shape: Shape,
    /// The array's starts, in their order.
    pub boots: Vec<Boot>,
}

/// Which runs are made.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only these levels; all when empty.
    pub levels: Vec<Level>,
    /// Only this mode.
    pub consistency: Option<Consistency>,
    /// That many simulated cores.
    pub cores: Option<usize>,
    /// Arrays grow.
    pub grow: bool,
    /// Arrays get groups of new members.
    pub groups: bool,
    /// There are streams.
    pub streams: bool,
    /// Arrays change their shape.
    pub shapes: bool,
    /// Metadata is damaged.
    pub faults: bool,
    /// Metadata is damaged while requests run, and log entries that a start needs.
    pub live_faults: bool,
    /// Two members are lost and replaced together.
    pub pairs: bool,
    /// Runs are short sequences of rare events.
    pub directed: bool,
    /// The story of directed runs, where the array allows it; drawn if `None`.
    pub story: Option<Story>,
    /// Members are of different sizes, arrays start unsynced, the write-intent bitmap has several
    /// pages.
    pub wide: bool,
    /// Operators work on arrays, live members are replaced, slots are filled from spares, members
    /// stall.
    pub operations: bool,
    /// With operations: keepers move to other cores, and cores end.
    pub handover: bool,
    /// With operations: commands add disks to arrays that are stopped.
    pub offline: bool,
    /// Arrays are created on disks that hold old data.
    pub create: bool,
}

impl Filter {
    /// Arrays that change their shape are of levels that can, and keep a log. A story has arrays
    /// that allow it.
    fn narrowed(mut self) -> Filter {
        if self.shapes && self.levels.is_empty() {
            self.levels = crate::shapes::LEVELS.to_vec();
        }
        if self.pairs && self.levels.is_empty() {
            self.levels = crate::pairs::LEVELS.to_vec();
        }
        if self.shapes {
            self.consistency = Some(Consistency::Ppl);
        }
        if let Some(story) = self.story {
            story.narrow(&mut self);
        }
        self
    }
}

/// Workers that do I/O, at most.
const MAX_WORKERS: usize = 6;
/// Boots that a run may have after the first few: each costs less than a new run.
const MOST_LATE_BOOTS: u64 = 8;

impl Shape {
    /// Members of the array.
    pub fn members(&self) -> usize {
        self.geometry.members()
    }

    /// The group of a slot.
    pub fn group_of(&self, slot: usize) -> usize {
        if self.next.is_some() { 0 } else { slot / self.geometry.group_members() }
    }

    /// Slots that the array has at most.
    pub fn most_members(&self) -> usize {
        let next = self.next.map_or(0, |next| next.data + next.parity);
        next.max(self.most_groups * self.geometry.group_members())
    }

    /// The array will change to that shape.
    pub fn take(&mut self, next: Next) {
        self.next = Some(next);
        self.lanes = self.lanes.max(2); // each shape has a log
        self.lane_bytes = self.lane_bytes.max(least_lane_bytes(next.data, self.block_size));
        self.disk_bytes = self.least_disk_bytes();
    }

    /// Whether the disk of a slot can zero without a transfer of zeroes.
    pub fn has_zeroes(&self, slot: usize) -> bool {
        self.creation.as_ref().is_none_or(|creation| creation.unzeroed >> slot & 1 == 0)
    }

    /// Bytes that the disk of a slot has beyond `disk_bytes`.
    pub fn more_bytes(&self, slot: usize) -> u64 {
        self.more_bytes.get(slot).copied().unwrap_or(0)
    }

    /// A group has so many stripes of short strips, each a region of its own.
    pub fn have_pages(&mut self, stripes: u64) {
        let data = self.geometry.data.min(2);
        self.geometry = Geometry { data, strip_bytes: 4096, group_stripes: stripes, ..self.geometry };
        (self.region_strips, self.most_stripes) = (1, stripes);
        self.disk_bytes = self.least_disk_bytes();
    }

    /// The log has one lane of so many units of 4 KiB. Blocks have 512 bytes, so that an entry of
    /// one block is a unit.
    pub fn have_hot_lane(&mut self, units: u32) {
        (self.lanes, self.block_size, self.geometry.strip_bytes) = (1, 512, 16384);
        self.lane_bytes = (units * 4096).max(least_lane_bytes(self.geometry.data, 512));
        self.disk_bytes = self.least_disk_bytes();
    }

    fn least_disk_bytes(&self) -> u64 {
        let strip_bytes = u64::from(self.geometry.strip_bytes);
        64 * 1024
            + u64::from(self.lanes) * u64::from(self.lane_bytes)
            + RESERVE_STRIPS * strip_bytes
            + self.geometry.group_stripes * strip_bytes
            + 64 * 1024
    }

    fn draw(seed: u64, rng: &mut Rng, filter: &Filter) -> Shape {
        let levels = if filter.levels.is_empty() { &Level::ALL[..] } else { &filter.levels };
        let level = rng.pick(levels);
        let (groups, data, parity, matrix) = match level {
            Level::Raid0 => (1, rng.range(2, 5), 0, Matrix::Copies),
            Level::Raid1 => (1, 1, rng.range(1, 4), Matrix::Copies),
            Level::Raid10 => (2, 1, rng.range(1, 3), Matrix::Copies),
            Level::Raid5 => (1, rng.range(2, 6), 1, Matrix::Powers),
            Level::Raid6 => (1, rng.range(2, 6), 2, Matrix::Powers),
            Level::Raid7 => (1, rng.range(2, 5), 3, Matrix::Powers),
            Level::Raid50 => (2, rng.range(2, 4), 1, Matrix::Powers),
            Level::Raid60 => (2, rng.range(2, 4), 2, Matrix::Powers),
            Level::Raid70 => (2, 2, 3, Matrix::Powers),
            Level::NPlusM => (1, rng.range(2, 6), rng.range(1, 5), Matrix::Cauchy),
        };
        let modes: &[Consistency] = match level {
            Level::Raid0 => &[Consistency::None],
            Level::Raid1 | Level::Raid10 => &[Consistency::Bitmap],
            _ => &[Consistency::Ppl, Consistency::Ppl, Consistency::Bitmap],
        };
        let mut consistency = rng.pick(modes);
        if let Some(wanted) = filter.consistency
            && modes.contains(&wanted)
        {
            consistency = wanted;
        }
        let strip_bytes = rng.pick(&[4096, 4096, 8192, 16384]);
        let geometry = Geometry {
            groups: groups as usize,
            data: data as usize,
            parity: parity as usize,
            strip_bytes,
            group_stripes: rng.range(2, 7),
            zones: Zones::NONE,
        };
        let lanes = rng.pick(&[1, 2, 3]);
        let block_size = rng.pick(&[512, 512, 4096]);
        let lane_bytes = least_lane_bytes(data as usize, block_size) * rng.pick(&[1, 2, 4]);
        let mut shape = Shape {
            seed: rng.draw(),
            level,
            geometry,
            matrix,
            consistency,
            block_size,
            lanes,
            lane_bytes,
            region_strips: rng.range(1, 4),
            has_volatile_cache: rng.one_in(2),
            latency_ns: rng.pick(&[1000, 20_000, 100_000]),
            cores: rng.pick(&[1, 2, 2]),
            has_keeper: false,
            may_lose_too_many: rng.one_in(12),
            disk_bytes: 0,
            most_stripes: geometry.group_stripes,
            most_groups: geometry.groups,
            next: None,
            more_bytes: Vec::new(),
            slow: None,
            is_unsynced: false,
            operations: None,
            creation: None,
        };
        shape.disk_bytes = shape.least_disk_bytes();
        shape.seeded(seed)
    }

    fn seeded(mut self, seed: u64) -> Shape {
        self.seed ^= seed;
        self
    }
}

/// Little more than two entries of one block of a whole stripe with its redo data: lanes wrap, and
/// long writes are cut.
fn least_lane_bytes(data: usize, block_size: u32) -> u32 {
    let least_entry = (data as u32 + 1) * block_size + 4096;
    (2 * least_entry).next_multiple_of(4096)
}

/// Draws one boot after the other.
struct Drawer<'a> {
    rng: Rng,
    shape: &'a Shape,
    sectors: u64,
    next_id: u32,
    workers: usize,
    /// Where sequential runs continue.
    run_at: u64,
}

impl Plan {
    /// The plan of a seed.
    pub fn draw(seed: u64, filter: &Filter) -> Plan {
        let rng = Rng::new(seed);
        let mut own = rng.fork(1);
        let filter = &filter.clone().narrowed();
        let mut shape = Shape::draw(seed, &mut own, filter);
        shape.cores = filter.cores.unwrap_or(shape.cores);
        shape.has_keeper = rng.fork(6).one_in(3);
        if filter.wide {
            crate::wide::widen(&mut shape, &mut rng.fork(14), filter);
        }
        if filter.create {
            crate::creation::draw(&mut shape, &mut rng.fork(23));
        }
        let sectors = shape.geometry.capacity() / SECTOR as u64;
        let workers = own.range(1, MAX_WORKERS as u64 + 1) as usize;
        let boots = own.range(2, 6);
        let mut drawer = Drawer { rng: rng.fork(2), shape: &shape, sectors, next_id: 1, workers, run_at: 0 };
        let mut boots: Vec<Boot> = (0..boots).map(|i| drawer.boot(i == 0)).collect();
        // The beginning of a run is the same whatever its continuation.
        drawer.rng = rng.fork(4);
        for _ in 0..drawer.rng.below(MOST_LATE_BOOTS) {
            boots.push(drawer.boot(false));
        }
        drawer.rng = rng.fork(5);
        boots.iter_mut().for_each(|boot| drawer.add_fault(boot));
        let mut plan = Plan { seed, shape, boots };
        if filter.directed {
            crate::directed::draw(&mut plan, filter.story);
        }
        if filter.wide {
            crate::wide::draw(&mut plan);
        }
        if filter.grow {
            crate::growth::draw(&mut plan);
        }
        if filter.groups {
            crate::newcomers::draw(&mut plan);
        }
        if filter.streams {
            crate::streams::draw(&mut plan);
        }
        if filter.shapes {
            crate::shapes::draw(&mut plan);
        }
        if filter.faults {
            crate::faults::draw(&mut plan);
        }
        if filter.live_faults {
            crate::faults::draw_live(&mut plan);
        }
        if filter.pairs {
            crate::pairs::draw(&mut plan, workers);
        }
        if filter.operations {
            crate::operations::draw(&mut plan, workers, filter);
        }
        plan
    }

    /// Every step that can be left out.
    pub fn ids(&self) -> Vec<u32> {
        let ids = |boot: &Boot| -> Vec<u32> {
            let plugs = boot.unplugged.iter().chain(&boot.plugged).map(|(id, _)| *id);
            let others = boot.newcomers.iter().map(|newcomers| newcomers.id);
            let faults = boot.faults.iter().map(|fault| fault.id);
            let faults = faults.chain(boot.commands.iter().map(|(id, _)| *id));
            plugs.chain(others).chain(faults).chain(boot.steps.iter().map(|step| step.id)).collect()
        };
        self.boots.iter().flat_map(ids).collect()
    }

    /// The plan with these steps only.
    #[must_use]
    pub fn only(&self, keep: &BTreeSet<u32>) -> Plan {
        let mut plan = self.clone();
        for boot in &mut plan.boots {
            boot.unplugged.retain(|(id, _)| keep.contains(id));
            boot.plugged.retain(|(id, _)| keep.contains(id));
            boot.newcomers = boot.newcomers.take().filter(|newcomers| keep.contains(&newcomers.id));
            boot.faults.retain(|fault| keep.contains(&fault.id));
            boot.commands.retain(|(id, _)| keep.contains(id));
            boot.steps.retain(|step| keep.contains(&step.id));
        }
        plan
    }
}

impl Drawer<'_> {
    fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn boot(&mut self, is_first: bool) -> Boot {
        let mut boot = Boot {
            unplugged: Vec::new(),
            plugged: Vec::new(),
            crash: self.crash(),
            is_crash_early: !is_first && self.rng.one_in(4),
            is_looked_at: false,
            is_crash_of_work: false,
            newcomers: None,
            faults: Vec::new(),
            commands: Vec::new(),
            command_crash: None,
            steps: Vec::new(),
            is_stopped: self.rng.one_in(3),
        };
        if !is_first {
            while self.rng.one_in(4) {
                let slot = self.slot();
                boot.unplugged.push((self.id(), slot));
            }
            if self.rng.one_in(6) {
                let slot = self.slot();
                boot.plugged.push((self.id(), slot));
            }
        }
        let count = 1 + self.rng.log_uniform(40);
        for _ in 0..count {
            let (id, worker) = (self.id(), self.rng.below(self.workers as u64) as usize);
            let delay_ns =
                if self.rng.one_in(2) { 0 } else { self.rng.log_uniform(4 * self.shape.latency_ns) };
            let action = self.io();
            boot.steps.push(Step { id, worker, delay_ns, action });
        }
        let events = if self.rng.one_in(2) { 0 } else { self.rng.range(1, 4) };
        for _ in 0..events {
            let (id, delay_ns) = (self.id(), self.rng.log_uniform(20 * self.shape.latency_ns));
            let action = self.event();
            boot.steps.push(Step { id, worker: self.workers, delay_ns, action });
        }
        boot
    }

    fn crash(&mut self) -> Option<CrashAt> {
        match self.rng.below(16) {
            0 | 1 => None,
            2..6 => Some(CrashAt::Time(self.rng.log_uniform(40 * self.shape.latency_ns))),
            6..11 => Some(CrashAt::WriteStarted(1 + self.rng.log_uniform(255))),
            _ => Some(CrashAt::WriteEnded(1 + self.rng.log_uniform(255))),
        }
    }

    fn slot(&mut self) -> usize {
        self.rng.below(self.shape.members() as u64) as usize
    }

    fn event(&mut self) -> Action {
        let slot = self.slot();
        let time = self.rng.log_uniform(1000) * self.shape.latency_ns;
        match self.rng.below(16) {
            0..3 => Action::Kill(slot),
            3..5 => Action::Fail(slot),
            5..7 => {
                let data = self.shape.geometry.group_stripes * u64::from(self.shape.geometry.strip_bytes);
                Action::MediumError(slot, self.rng.below(data))
            }
            7 => Action::Stuck(slot, time),
            8 => Action::Slow(slot, time),
            9..11 => Action::Return(slot),
            11..14 => Action::Replace(slot),
            _ => Action::Scrub,
        }
    }

    /// Sometimes a write fails.
    fn add_fault(&mut self, boot: &mut Boot) {
        if self.rng.one_in(6) {
            let (id, slot, number) = (self.id(), self.slot(), 1 + self.rng.log_uniform(63) as u32);
            let delay_ns = self.rng.log_uniform(20 * self.shape.latency_ns);
            let action = Action::FailWrite(slot, number);
            boot.steps.push(Step { id, worker: self.workers + 1, delay_ns, action });
        }
    }

    /// A range of whole blocks: within a strip, over strips, a stripe, two stripes, or where the
    /// last one ended.
    fn range(&mut self) -> (u64, u64) {
        let unit = u64::from(self.shape.block_size) / SECTOR as u64;
        let strip = u64::from(self.shape.geometry.strip_bytes) / SECTOR as u64;
        let stripe = strip * self.shape.geometry.data as u64;
        let (lba, count) = match self.rng.below(10) {
            0..4 => (self.rng.below(self.sectors), 1 + self.rng.below(strip.min(8))),
            4 | 5 => (self.rng.below(self.sectors), 1 + self.rng.below(2 * stripe)),
            6 => (self.rng.below(self.sectors / stripe) * stripe, stripe * (1 + self.rng.below(2))),
            7 => (self.rng.below(self.sectors / strip) * strip, strip),
            // A hot spot: many writes on the same rows.
            8 => (self.rng.below(stripe), 1 + self.rng.below(strip)),
            _ => (self.run_at, 1 + self.rng.below(strip)),
        };
        let lba = (lba / unit * unit).min(self.sectors - unit);
        let count = (count.next_multiple_of(unit)).min(self.sectors - lba);
        self.run_at = (lba + count) % self.sectors;
        (lba, count)
    }

    fn io(&mut self) -> Action {
        let (lba, count) = self.range();
        match self.rng.below(32) {
            0..6 => Action::Read { lba, count },
            6..8 => Action::Flush,
            8 | 9 => Action::WriteZeroes { lba, count },
            10 => Action::Discard { lba, count },
            11..14 => {
                let change_ns = 1 + self.rng.log_uniform(3 * self.shape.latency_ns);
                Action::Write { lba, count, is_fua: false, change_ns }
            }
            _ => Action::Write { lba, count, is_fua: self.rng.one_in(4), change_ns: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_one_plan_whose_ranges_lie_in_the_array() {
        for seed in 0..500 {
            let (streams, directed, wide) = (seed % 2 == 1, seed % 3 == 1, seed % 5 == 1);
            let live_faults = seed % 7 == 1;
            let filter = Filter { streams, directed, wide, live_faults, ..Filter::default() };
            let plan = Plan::draw(seed, &filter);
            assert_eq!(plan.boots, Plan::draw(seed, &filter).boots);
            let sectors = plan.shape.geometry.capacity() / SECTOR as u64;
            let unit = u64::from(plan.shape.block_size) / SECTOR as u64;
            for step in plan.boots.iter().flat_map(|boot| &boot.steps) {
                if let Action::Write { lba, count, .. }
                | Action::Stream { lba, count, .. }
                | Action::Read { lba, count } = step.action
                {
                    assert!(count > 0 && lba + count <= sectors && (lba | count) % unit == 0, "{step:?}");
                }
            }
            let ids = plan.ids();
            assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
        }
    }
}
