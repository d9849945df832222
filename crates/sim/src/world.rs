//! State that outlives a boot: disks and their content, the oracle's knowledge, and lost members.

use crate::commands::Budget;
use crate::disk::{DiskConfig, SimDisk};
use crate::extras::Extras;
use crate::machine::Machine;
use crate::oracle::{ANYTHING, Oracle, SECTOR};
use crate::plan::Shape;
use base::Rng;
use raid::Geometry;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Runs.
    pub runs: u64,
    /// Times that power went.
    pub crashes: u64,
    /// … before the array was up.
    pub early_crashes: u64,
    /// Requests that the workload made.
    pub operations: u64,
    /// Members that were lost.
    pub losses: u64,
    /// Rebuilds that ended.
    pub rebuilds: u64,
    /// … of two members and more at the same time.
    pub pairs: u64,
    /// Scrubs that ended.
    pub scrubs: u64,
    /// Writes that a disk failed.
    pub failed_writes: u64,
    /// Strips that were damaged in silence, and found.
    pub damages: u64,
    /// Damages to metadata.
    pub faults: u64,
    /// Blocks that became unreadable, of strips or where power cut off a write.
    pub bad_blocks: u64,
    /// Writes that were lost or misdirected, and found.
    pub strays: u64,
    /// Blocks that could not be read and need not be.
    pub unreadable: u64,
    /// Read-only starts that were not refused.
    pub looks: u64,
    /// Arrays that grew.
    pub growths: u64,
    /// Live members that were to be replaced.
    pub replacements: u64,
    /// Spares that came.
    pub spares: u64,
    /// Keepers that were started while an array ran.
    pub moves: u64,
    /// Cores that ended.
    pub ended_cores: u64,
    /// Commands of operators that were carried out.
    pub commands: u64,
    /// Runs that ended because more members were lost than parity covers.
    pub frozen: u64,
}

impl Stats {
    /// Adds another run's.
    pub fn add(&mut self, other: &Stats) {
        self.runs += other.runs;
        self.crashes += other.crashes;
        self.early_crashes += other.early_crashes;
        self.operations += other.operations;
        self.losses += other.losses;
        self.rebuilds += other.rebuilds;
        self.pairs += other.pairs;
        self.scrubs += other.scrubs;
        self.failed_writes += other.failed_writes;
        self.damages += other.damages;
        self.faults += other.faults;
        self.bad_blocks += other.bad_blocks;
        self.strays += other.strays;
        self.unreadable += other.unreadable;
        self.looks += other.looks;
        self.growths += other.growths;
        self.replacements += other.replacements;
        self.spares += other.spares;
        self.moves += other.moves;
        self.ended_cores += other.ended_cores;
        self.commands += other.commands;
        self.frozen += other.frozen;
    }
}

/// A slot as the world knows it.
#[derive(Clone, Copy, Debug, Default)]
struct SlotFate {
    /// Its member does not hold all data: dead, failed, stale or rebuilding.
    is_lost: bool,
    /// It was killed or detached by hand, or a write to it has failed: reasons for the array to
    /// detach it.
    has_reason: bool,
}

/// A write in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    lba: u64,
    count: u64,
    is_unlogged: bool,
}

/// All that a run is about.
pub struct World {
    /// The array.
    pub shape: Shape,
    /// Power.
    pub machine: Arc<Machine>,
    /// The data that reads may return.
    pub oracle: RefCell<Oracle>,
    /// Counts.
    pub stats: Cell<Stats>,
    /// Disks of no slot.
    pub extras: Extras,
    /// The budget of read errors that was set.
    pub budget: Cell<Budget>,
    disks: RefCell<Vec<SimDisk>>,
    slots: RefCell<Vec<SlotFate>>,
    /// Groups that have lost more than parity covers.
    is_beyond: RefCell<Vec<bool>>,
    /// Groups in which a read has failed while a member could not be read.
    was_impaired: RefCell<Vec<bool>>,
    /// Stripes that were being written when power went, and not logged, until a resync.
    torn: RefCell<BTreeSet<u64>>,
    /// Whether writes that begin now need not be logged: mode `bitmap` with every member live.
    is_unlogged: Cell<bool>,
    /// Regions that may be marked as dirty: unlogged writes went there.
    marked: RefCell<BTreeSet<u64>>,
    /// Regions whose parity may be open since a crash.
    fragile: RefCell<BTreeSet<u64>>,
    /// Groups that have lost something while there were fragile regions.
    was_hurt: RefCell<Vec<bool>>,
    /// Groups in which the array may have noted blocks as bad in this boot: it has filled
    /// something, or met blocks that a member cannot read.
    gives_up: RefCell<Vec<bool>>,
    /// Slots whose disks may hold a commit that power has cut off elsewhere, and that no assembly
    /// has seen since.
    may_be_ahead: RefCell<BTreeSet<usize>>,
    /// Damage to logs and maps, by slot, until it is rewritten and parity is right everywhere.
    tainted: RefCell<Vec<(usize, Range<u64>)>>,
    /// The array has been created.
    is_created: Cell<bool>,
    /// Whether the array was stopped cleanly when power went last.
    was_stopped: Cell<bool>,
    /// The sectors that writes work on.
    writes: RefCell<Vec<InFlight>>,
    /// Disks that came in the place of others.
    replacements: Cell<u64>,
    /// Bytes of a disk now.
    disk_bytes: Cell<u64>,
    /// The shape that the array had last, or changes to.
    geometry: Cell<Geometry>,
    /// The array may change its shape: both must be readable.
    is_crossing: Cell<bool>,
    /// Sectors that the array has at least.
    sectors: Cell<u64>,
    failure: RefCell<Option<String>>,
    rng: RefCell<Rng>,
}

impl World {
    /// Blank disks.
    pub fn new(seed: u64, shape: &Shape, capacity: u64) -> Rc<World> {
        let machine = Machine::new();
        let mut rng = Rng::new(seed).fork(3);
        let count = shape.most_members();
        let disks: Vec<SimDisk> = (0..count)
            .map(|slot| {
                let capacity = shape.disk_bytes + shape.more_bytes(slot);
                let config = DiskConfig {
                    has_zeroes: shape.has_zeroes(slot),
                    ..disk_config(shape, rng.draw(), capacity)
                };
                SimDisk::new(format!("disk{slot}"), &machine, &config)
            })
            .collect();
        if let Some((slot, extra_ns)) = shape.slow {
            disks[slot].set_extra_latency(extra_ns);
        }
        let mut oracle = Oracle::new(seed, capacity);
        if shape.is_unsynced {
            let garbage = oracle.begin_write(0, oracle.sectors(), ANYTHING);
            oracle.end_write(0, oracle.sectors(), garbage, true, true);
        }
        Rc::new(World {
            machine,
            oracle: RefCell::new(oracle),
            stats: Cell::default(),
            extras: Extras::default(),
            budget: Cell::default(),
            slots: RefCell::new(vec![SlotFate::default(); disks.len()]),
            disks: RefCell::new(disks),
            is_beyond: RefCell::new(vec![false; shape.most_groups]),
            was_impaired: RefCell::new(vec![false; shape.most_groups]),
            torn: RefCell::default(),
            is_unlogged: Cell::new(false),
            marked: RefCell::default(),
            fragile: RefCell::default(),
            was_hurt: RefCell::new(vec![false; shape.most_groups]),
            gives_up: RefCell::new(vec![false; shape.most_groups]),
            may_be_ahead: RefCell::default(),
            tainted: RefCell::default(),
            is_created: Cell::new(false),
            was_stopped: Cell::new(false),
            writes: RefCell::default(),
            replacements: Cell::default(),
            disk_bytes: Cell::new(shape.disk_bytes),
            geometry: Cell::new(shape.geometry),
            is_crossing: Cell::new(false),
            sectors: Cell::new(shape.geometry.capacity() / SECTOR as u64),
            failure: RefCell::default(),
            rng: RefCell::new(rng),
            shape: shape.clone(),
        })
    }

    /// Changes the counts.
    pub fn count(&self, change: impl FnOnce(&mut Stats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }

    /// Something is wrong. The first word is kept.
    pub fn fail(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
    }

    /// Returns the first failure.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Whether something is wrong.
    pub fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// The array has been created.
    pub fn note_created(&self) {
        self.is_created.set(true);
    }

    /// Whether the array has been created.
    pub fn is_created(&self) -> bool {
        self.is_created.get()
    }

    /// The disk of a slot.
    pub fn disk(&self, slot: usize) -> SimDisk {
        self.disks.borrow()[slot].clone()
    }

    /// All disks, by slot.
    pub fn disks(&self) -> Vec<SimDisk> {
        self.disks.borrow().clone()
    }

    /// Disks of slots and others.
    pub fn all_disks(&self) -> Vec<SimDisk> {
        self.disks().into_iter().chain(self.extras.disks()).collect()
    }

    /// Those of them that are not dead.
    pub fn plugged_disks(&self) -> Vec<SimDisk> {
        self.all_disks().into_iter().filter(|disk| !disk.is_dead()).collect()
    }

    /// Changes what is known of the budget of read errors.
    pub fn change_budget(&self, change: impl FnOnce(&mut Budget)) {
        let mut budget = self.budget.get();
        change(&mut budget);
        self.budget.set(budget);
    }

    /// Another disk is the slot's member now.
    pub fn set_disk(&self, slot: usize, disk: SimDisk) {
        self.disks.borrow_mut()[slot] = disk;
    }

    /// Whether the slot has the disk of that name.
    pub fn has_disk(&self, slot: usize, name: &str) -> bool {
        block::Device::name(&self.disks.borrow()[slot]) == name
    }

    /// Two slots exchange their disks.
    pub fn swap_disks(&self, one: usize, other: usize) {
        self.disks.borrow_mut().swap(one, other);
        let swapped = |slot: &usize| match *slot {
            slot if slot == one => other,
            slot if slot == other => one,
            slot => slot,
        };
        let ahead: BTreeSet<usize> = self.may_be_ahead.borrow().iter().map(swapped).collect();
        self.may_be_ahead.replace(ahead);
    }

    /// A blank disk of no slot.
    pub fn new_extra(&self) -> SimDisk {
        let name = format!("extra{}", self.replacements.replace(self.replacements.get() + 1));
        let config = disk_config(&self.shape, self.draw(), self.disk_bytes.get());
        let disk = SimDisk::new(name, &self.machine, &config);
        self.extras.add(&disk);
        disk
    }

    /// A number from the run's own randomness.
    pub fn draw(&self) -> u64 {
        self.rng.borrow_mut().draw()
    }

    /// The slot gets a blank disk.
    pub fn replace(&self, slot: usize) -> SimDisk {
        let name = format!("disk{slot}.{}", self.replacements.replace(self.replacements.get() + 1));
        let capacity = self.disk_bytes.get() + self.shape.more_bytes(slot);
        let disk = SimDisk::new(name, &self.machine, &disk_config(&self.shape, self.draw(), capacity));
        self.disks.borrow()[slot].kill();
        self.disks.borrow_mut()[slot] = disk.clone();
        self.may_be_ahead.borrow_mut().remove(&slot);
        disk
    }

    /// Every disk becomes larger.
    pub fn grow_disks(&self, bytes: u64) {
        self.disks.borrow().iter().for_each(|disk| disk.grow(bytes));
        self.disk_bytes.set(self.disk_bytes.get() + bytes);
    }

    /// Notes the shape and size that the array reports. Old data stays in its place.
    pub fn note_geometry(&self, geometry: Option<Geometry>, bytes: u64) {
        let geometry = geometry.unwrap_or(self.geometry.get());
        if geometry.groups < self.geometry.get().groups {
            self.fail(format!("the array has {} groups, and had more", geometry.groups));
        }
        let old = self.geometry.replace(geometry);
        if self.is_next(&old) && !self.is_next(&geometry) {
            self.fail(format!("the array has {geometry:?}, and had its next shape"));
        }
        self.note_capacity(bytes);
    }

    fn is_next(&self, geometry: &Geometry) -> bool {
        self.shape.next.is_some_and(|next| (next.data, next.parity) == (geometry.data, geometry.parity))
    }

    /// Whether the array can get groups or another shape that it has not.
    pub fn lacks_something(&self) -> bool {
        let geometry = self.geometry.get();
        match self.shape.next {
            Some(_) => !self.is_next(&geometry),
            None => geometry.groups < self.shape.most_groups,
        }
    }

    /// The array may have two shapes from now on, or has one.
    pub fn note_crossing(&self, is_crossing: bool) {
        self.is_crossing.set(is_crossing);
    }

    /// Whether the array has redundancy.
    pub fn has_parity(&self) -> bool {
        self.geometry.get().parity > 0
    }

    /// The shape that the array had last.
    pub fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    /// Members of the array, without disks that are to become some.
    pub fn members(&self) -> usize {
        self.geometry.get().members()
    }

    /// The array says how large it is. It may not have become smaller since it was asked last.
    fn note_capacity(&self, bytes: u64) {
        let (sectors, most) = (bytes / SECTOR as u64, self.oracle.borrow().sectors());
        if sectors < self.sectors.get() || sectors > most {
            self.fail(format!(
                "the array has {sectors} sectors, it had {} and can have {most}",
                self.sectors.get()
            ));
        }
        self.sectors.set(sectors.min(most));
    }

    /// Sectors of the array.
    pub fn sectors(&self) -> u64 {
        self.sectors.get()
    }

    /// Whether there was a reason for the array to detach some member, or not to change: blocks
    /// that cannot be read, damaged metadata.
    pub fn has_reason(&self) -> bool {
        let is_unsound = |disk: &SimDisk| disk.is_failing() || disk.has_medium_errors();
        self.slots.borrow().iter().any(|slot| slot.has_reason)
            || self.disks.borrow().iter().any(is_unsound)
            || self.was_impaired.borrow().contains(&true)
            || self.was_hurt.borrow().contains(&true)
            || self.is_damaged()
    }

    /// Whether the slot's member is lost, or may be, as a write to it has failed.
    pub fn is_lost(&self, slot: usize) -> bool {
        self.slots.borrow()[slot].is_lost || self.disk(slot).has_failed_write()
    }

    /// Whether some block of a member of the group cannot be read from it, or could not when a read
    /// failed before. A block that was lost then stays bad until it is written.
    pub fn is_impaired(&self, group: usize) -> bool {
        let is_bad = |slot: usize| self.is_lost(slot) || self.disks.borrow()[slot].has_medium_errors();
        let mut was_impaired = self.was_impaired.borrow_mut();
        was_impaired[group] |= self.slots_of(group).any(is_bad);
        was_impaired[group]
    }

    /// Whether no member is lost.
    pub fn is_whole(&self) -> bool {
        (0..self.members()).all(|slot| !self.is_lost(slot))
    }

    /// Whether a group has lost more than parity covers.
    pub fn is_beyond(&self, group: usize) -> bool {
        self.is_beyond.borrow()[group]
    }

    /// Whether any has.
    pub fn is_any_beyond(&self) -> bool {
        self.is_beyond.borrow().contains(&true)
    }

    pub fn slots_of(&self, group: usize) -> std::ops::Range<usize> {
        if self.shape.next.is_some() {
            return 0..self.shape.most_members();
        }
        let members = self.shape.geometry.group_members();
        group * members..(group + 1) * members
    }

    /// Whether the run may lose the slot's member now. When it may lose too many and does, the
    /// group is beyond help from here on. This loss and each later one then kill the disks that
    /// were lost before: the array could not tell that they are stale.
    pub fn may_lose(&self, slot: usize) -> bool {
        let group = self.shape.group_of(slot);
        if !self.is_beyond(group) {
            if self.is_covered(slot) {
                return true;
            }
            if !self.shape.may_lose_too_many {
                return false;
            }
            self.is_beyond.borrow_mut()[group] = true;
        }
        let is_lost_soon = |other: &usize| self.is_lost(*other) || self.disk(*other).is_failing();
        for other in self.slots_of(group).filter(is_lost_soon) {
            self.disk(other).kill();
            self.slots.borrow_mut()[other].has_reason = true;
        }
        true
    }

    /// Whether a member counts as lost as a whole: it is, or a write to it may fail, or too much of
    /// it cannot be read.
    fn is_used_up(&self, slot: usize) -> bool {
        let disk = self.disk(slot);
        // During a reshape, a block's number says nothing about its row.
        let is_unreadable =
            if self.shape.next.is_some() { disk.has_medium_errors() } else { disk.is_unreadable() };
        self.is_lost(slot) || disk.is_failing() || is_unreadable
    }

    /// Counts losses of a row among some members, and damage to metadata. Members count that are
    /// lost, and those that cannot read their block. The row is the one with the most unreadable
    /// blocks, of those with numbers in `only`, or else of all.
    fn losses(&self, slots: impl Iterator<Item = usize>, only: Option<&Range<u64>>) -> usize {
        let (used_up, others): (Vec<usize>, Vec<usize>) = slots.partition(|slot| self.is_used_up(*slot));
        let mut unreadable: BTreeMap<u64, usize> = BTreeMap::new();
        let blocks = others.iter().flat_map(|slot| self.disk(*slot).unreadable_blocks());
        for number in blocks.filter(|number| only.is_none_or(|only| only.contains(number))) {
            *unreadable.entry(number).or_default() += 1;
        }
        // The log of an array with one parity opens it everywhere, and it stays open until the
        // array has its next shape.
        let weight = if self.shape.next.is_some() { raid::config::MAX_PARITY } else { 1 };
        used_up.len() + unreadable.values().max().unwrap_or(&0) + self.damaged().len() * weight
    }

    /// Whether parity covers one loss more of a slot, besides what is lost already: of its member,
    /// or of some of its blocks.
    fn is_covered_at(&self, slot: usize, only: Option<&Range<u64>>) -> bool {
        let group = self.shape.group_of(slot);
        let is_left = |(slots, parity): (Range<usize>, usize)| {
            let others = slots.clone().filter(|other| *other != slot);
            !slots.contains(&slot) || self.losses(others, only) < parity
        };
        !self.is_beyond(group) && self.sets_of(group).into_iter().all(is_left)
    }

    /// Whether parity covers the loss of the slot's member, besides what is lost already.
    pub fn is_covered(&self, slot: usize) -> bool {
        self.is_covered_at(slot, None)
    }

    /// Whether parity covers the loss of blocks of the slot's member, counted from its first strip,
    /// besides what is lost.
    pub fn are_blocks_covered(&self, slot: usize, blocks: &Range<u64>) -> bool {
        match self.shape.next {
            Some(_) => self.is_covered(slot),
            None => self.is_covered_at(slot, Some(blocks)),
        }
    }

    /// Whether parity of every group covers damage to a slot's metadata, besides all that is lost
    /// already and may fail soon, the member itself included.
    pub fn covers_damage(&self, slot: usize) -> bool {
        let more = usize::from(!self.damaged().contains(&slot));
        let groups = 0..self.is_beyond.borrow().len();
        let mut sets = groups.flat_map(|group| self.sets_of(group));
        !self.is_any_beyond() && sets.all(|(slots, parity)| self.losses(slots, None) + more <= parity)
    }

    /// Slots of a group, and how many of them parity covers: of both shapes when the array may have
    /// two.
    fn sets_of(&self, group: usize) -> Vec<(Range<usize>, usize)> {
        let set = |geometry: Geometry| (0..geometry.members(), geometry.parity);
        match self.shape.next {
            Some(next) if self.is_crossing.get() => {
                vec![set(self.shape.geometry), set(next.geometry(&self.shape))]
            }
            Some(_) => vec![set(self.geometry.get())],
            None => vec![(self.slots_of(group), self.shape.geometry.parity)],
        }
    }

    /// Slots whose metadata is damaged in a way that counts like a loss in every group: parity may
    /// be open in all of them, as they share the regions.
    fn damaged(&self) -> BTreeSet<usize> {
        self.tainted.borrow().iter().map(|(slot, _)| *slot).collect()
    }

    /// Whether metadata is damaged in a way that counts like a loss in every group.
    pub fn is_damaged(&self) -> bool {
        !self.tainted.borrow().is_empty()
    }

    /// Whether the array was stopped before power went last, or has just been made: nothing needs
    /// its log.
    pub fn was_stopped(&self) -> bool {
        self.was_stopped.get()
    }

    /// A part of the slot's log or maps is damaged: until it is rewritten and parity is right
    /// everywhere, that counts like a loss.
    pub fn note_damaged(&self, slot: usize, range: Range<u64>) {
        self.tainted.borrow_mut().push((slot, range));
    }

    /// The slot's member is lost: there is a reason for the array to detach it.
    pub fn note_loss(&self, slot: usize) {
        let mut slots = self.slots.borrow_mut();
        slots[slot].has_reason = true;
        self.was_hurt.borrow_mut()[self.shape.group_of(slot)] = true;
        if self.shape.operations.is_some() {
            self.note_giving_up(slot); // a spare may come by itself
        }
        if !slots[slot].is_lost {
            slots[slot].is_lost = true;
            self.count(|stats| stats.losses += 1);
        }
    }

    /// The slot's member does not answer in time: the array may detach it.
    pub fn note_late(&self, slot: usize) {
        let has_deadline = self.shape.operations.is_some();
        self.note_hurt(slot);
        if has_deadline {
            self.slots.borrow_mut()[slot].has_reason = true;
            self.note_giving_up(slot);
            self.disk(slot).suspect();
        }
    }

    /// Something is the matter with the slot's member, and that is no reason for the array to
    /// detach it.
    pub fn note_hurt(&self, slot: usize) {
        self.was_hurt.borrow_mut()[self.shape.group_of(slot)] = true;
    }

    /// The slot's member holds all data.
    pub fn note_live(&self, slot: usize) {
        self.excuse_fragile(|group| group == self.shape.group_of(slot));
        self.slots.borrow_mut()[slot] = SlotFate::default();
        self.disk(slot).forgive();
    }

    /// Whether a read-only start must succeed: the array was stopped cleanly and lacks nothing.
    /// Copies of a mirror may differ where they were never synced.
    pub fn must_be_readable(&self) -> bool {
        let is_mirror = self.shape.geometry.data == 1;
        let is_sound = self.is_whole() && !self.is_any_beyond() && !self.is_damaged();
        self.was_stopped.get() && is_sound && !is_mirror && !self.is_crossing.get()
    }

    /// The array says which members are live.
    pub fn note_states(&self, live: &[bool]) {
        for (slot, is_live) in live.iter().enumerate() {
            let fate = self.slots.borrow()[slot];
            if !is_live && !fate.has_reason && !self.disk(slot).has_failed_write() {
                self.fail(format!("the array took out the member in slot {slot} for no reason"));
            }
            if !is_live && !fate.is_lost {
                self.note_loss(slot);
            }
            if *is_live && !self.disk(slot).is_dead() {
                if fate.is_lost {
                    self.excuse_fragile(|group| group == self.shape.group_of(slot));
                    // The superblocks that say so may not be durable yet.
                    self.disk(slot).suspect();
                }
                self.slots.borrow_mut()[slot].is_lost = false;
            }
        }
    }

    /// Notes the live members of an array that was assembled. The result of writes that failed is
    /// known now: the member failed, the array could do without the write, or power went before it
    /// was acknowledged. While the array runs this is unknown: it fails the member when the other
    /// writes of the stripe have ended, or later.
    pub fn note_assembled(&self, live: &[bool]) {
        self.note_states(live);
        // A failed member keeps its superblock, and may later be assembled without the members that
        // superseded it.
        let is_in = |slot: &usize| !self.disk(*slot).is_dead() && live.get(*slot) == Some(&true);
        self.may_be_ahead.borrow_mut().retain(|slot| !is_in(slot));
        for (slot, disk) in self.disks.borrow().iter().enumerate() {
            self.count(|stats| stats.failed_writes += u64::from(disk.has_failed_write()));
            disk.forgive();
            // A keeper continues to fill slots.
            let is_filled = self.shape.has_keeper && live.get(slot) == Some(&false);
            if disk.has_medium_errors() || is_filled {
                self.note_giving_up(slot);
            }
        }
    }

    /// A disk fills a slot, or the slot's disk cannot read some block. Blocks of its group that
    /// open parity cannot reconstruct are noted as bad from now on, and stay so, however the array
    /// is started.
    pub fn note_giving_up(&self, slot: usize) {
        self.gives_up.borrow_mut()[self.shape.group_of(slot)] = true;
    }

    /// A write works on sectors.
    pub fn note_write(&self, lba: u64, count: u64) {
        let write = InFlight { lba, count, is_unlogged: self.is_unlogged.get() };
        self.mark(&write);
        self.writes.borrow_mut().push(write);
    }

    fn mark(&self, write: &InFlight) {
        if write.is_unlogged {
            let stripes = self.stripes_of(write);
            self.marked.borrow_mut().extend(stripes.map(|stripe| self.region_of_stripe(stripe)));
        }
    }

    fn stripes_of(&self, write: &InFlight) -> std::ops::RangeInclusive<u64> {
        self.stripe_of(write.lba)..=self.stripe_of(write.lba + write.count - 1)
    }

    fn region_of_stripe(&self, stripe: u64) -> u64 {
        let geometry = self.geometry.get();
        geometry.member_offset(stripe) / u64::from(geometry.strip_bytes) / self.shape.region_strips
    }

    /// From now on writes may be unlogged, those in flight too, or none is that begins now.
    pub fn note_logging(&self, is_every_member_live: bool) {
        // A spare may have made it whole at any moment.
        let is_unlogged = (is_every_member_live || self.shape.operations.is_some())
            && self.shape.consistency == raid::Consistency::Bitmap
            && self.shape.geometry.data > 1;
        self.is_unlogged.set(is_unlogged);
        if is_unlogged {
            self.writes.borrow_mut().iter_mut().for_each(|write| write.is_unlogged = true);
            self.writes.borrow().iter().for_each(|write| self.mark(write));
        }
    }

    /// As [`World::note_logging`], with the live members that the array reports. If all disks are
    /// alive, a keeper fills empty slots on its own, and the simulator gets no notice of the end.
    pub fn note_logging_with(&self, live: &[bool]) {
        let is_filled_soon = self.shape.has_keeper && self.disks.borrow().iter().all(|disk| !disk.is_dead());
        self.note_logging(!live.contains(&false) || is_filled_soon);
    }

    /// No write has been under way for some time: nothing is marked any more.
    pub fn note_idle(&self) {
        self.marked.borrow_mut().clear();
    }

    /// It does not any more.
    pub fn note_written(&self, lba: u64, count: u64) {
        let mut writes = self.writes.borrow_mut();
        if let Some(place) = writes.iter().position(|write| (write.lba, write.count) == (lba, count)) {
            writes.swap_remove(place);
        }
    }

    /// The stripe of a sector.
    pub fn stripe_of(&self, lba: u64) -> u64 {
        self.geometry.get().locate(lba * SECTOR as u64).stripe
    }

    /// The group of a sector.
    pub fn group_of(&self, lba: u64) -> usize {
        self.geometry.get().group(self.stripe_of(lba))
    }

    /// Power went, and everything has ended.
    pub fn note_crash(&self, was_stopped: bool) {
        self.was_stopped.set(was_stopped);
        let (writes, mut marked) = (self.writes.take(), self.marked.take());
        if !was_stopped {
            self.tear_given_up();
        }
        self.excuse_fragile(|group| self.gives_up.borrow()[group]);
        self.gives_up.borrow_mut().fill(false);
        if !was_stopped {
            if self.fragile.borrow().is_empty() {
                self.was_hurt.borrow_mut().fill(false);
            }
            self.fragile.borrow_mut().append(&mut marked);
            for write in writes.iter().filter(|write| write.is_unlogged) {
                self.torn.borrow_mut().extend(self.stripes_of(write));
            }
            // Recovery rewrites a block that it cannot read: a block that it could not reconstruct
            // is noted as bad then.
            let groups = self.was_impaired.borrow().len();
            (0..groups).for_each(|group| {
                self.is_impaired(group);
            });
            let is_bad = |slot: usize| self.is_lost(slot) || self.disk(slot).has_medium_errors();
            for (group, was_hurt) in self.was_hurt.borrow_mut().iter_mut().enumerate() {
                *was_hurt |= self.slots_of(group).any(is_bad);
            }
        }
        let is_commit_torn = self.all_disks().iter().fold(false, |torn, disk| torn | disk.take_torn_commit());
        if is_commit_torn {
            let slots = (0..self.members()).filter(|slot| !self.disk(*slot).is_dead());
            self.may_be_ahead.borrow_mut().extend(slots);
        }
        self.oracle.borrow_mut().crash();
    }

    /// The array gives up blocks that cannot be reconstructed by writes of its own, which power may
    /// cut off like any other.
    fn tear_given_up(&self) {
        let gives_up = self.gives_up.borrow();
        let may_be_torn = |stripe: &u64| {
            gives_up[self.geometry.get().group(*stripe)]
                && self.fragile.borrow().contains(&self.region_of_stripe(*stripe))
        };
        let stripes: Vec<u64> = self.stripes().filter(may_be_torn).collect();
        self.torn.borrow_mut().extend(stripes);
    }

    /// Two lines of the array look as if they had continued without each other. That may be so when
    /// power cut off a commit that failed members. The disks that had got it were away when the
    /// array was assembled next, and now they are back. Nothing on the disks tells that from an
    /// array whose halves were both used. Takes the disks away again; whether there are any.
    pub fn take_split_away(&self) -> bool {
        let is_back = |slot: &usize| !self.disk(*slot).is_dead() && self.is_lost(*slot);
        let back: Vec<usize> = self.may_be_ahead.borrow().iter().copied().filter(is_back).collect();
        back.iter().for_each(|slot| self.disk(*slot).kill());
        !back.is_empty()
    }

    /// Whether a sector has no redundancy: power went while its region was marked, and no resync
    /// has made its parity right. A member's data there is lost with the member.
    fn is_fragile(&self, lba: u64) -> bool {
        self.fragile.borrow().contains(&self.region_of_stripe(self.stripe_of(lba)))
    }

    /// Whether a sector may have been lost because it has no redundancy: something of its group is
    /// lost, or was since power went.
    pub fn may_be_lost(&self, lba: u64) -> bool {
        let group = self.group_of(lba);
        self.is_fragile(lba) && (self.is_impaired(group) || self.was_hurt.borrow()[group])
    }

    /// Whether a write of some sectors may be refused: blocks that only open parity could hold are.
    pub fn may_refuse(&self, lba: u64, count: u64) -> bool {
        (lba..lba + count).any(|lba| self.may_be_lost(lba))
    }

    /// Every stripe's parity is right. Blocks that were lost before stay so until they are written.
    ///
    /// The array has given up blocks that could not be reconstructed by a write of its own, which
    /// leaves its region marked like any other.
    pub fn note_synced(&self) {
        if self.is_unlogged.get() {
            let gives_up = self.gives_up.borrow();
            let given_up = self.stripes().filter(|stripe| gives_up[self.geometry.get().group(*stripe)]);
            let regions: BTreeSet<u64> = given_up.map(|stripe| self.region_of_stripe(stripe)).collect();
            self.marked.borrow_mut().extend(regions.intersection(&self.fragile.borrow()));
        }
        let was_hurt = self.was_hurt.borrow().clone();
        self.excuse_fragile(|group| was_hurt[group] || self.is_impaired(group));
        self.fragile.borrow_mut().clear();
        self.torn.borrow_mut().clear();
        self.tainted.borrow_mut().retain(|(slot, range)| self.disk(*slot).has_metadata_error(range));
        self.was_hurt.borrow_mut().fill(false);
    }

    /// Blocks that could not be reconstructed in fragile regions of some groups stay unreadable
    /// until they are written.
    fn excuse_fragile(&self, is_chosen: impl Fn(usize) -> bool) {
        let is_lost = |stripe: &u64| {
            let is_fragile = self.fragile.borrow().contains(&self.region_of_stripe(*stripe));
            is_fragile && is_chosen(self.geometry.get().group(*stripe))
        };
        for stripe in self.stripes().filter(is_lost) {
            let sectors = self.sectors_of(stripe);
            self.oracle.borrow_mut().excuse(sectors);
        }
    }

    /// All stripes; the array may have grown.
    fn stripes(&self) -> std::ops::Range<u64> {
        0..self.sectors() * SECTOR as u64 / self.shape.geometry.stripe_bytes()
    }

    fn sectors_of(&self, stripe: u64) -> std::ops::Range<u64> {
        let sectors = self.shape.geometry.stripe_bytes() / SECTOR as u64;
        stripe * sectors..(stripe + 1) * sectors
    }

    /// A boot tries to start the array by force: in stripes that were being written, blocks of lost
    /// members may be wrong, even if power goes before it is up. All others are right.
    pub fn give_up_dirty(&self) {
        for stripe in self.torn.take() {
            let sectors = self.sectors_of(stripe);
            self.oracle.borrow_mut().give_up(sectors.start, sectors.end - sectors.start);
        }
    }

    /// The array has been started by force: parity is trusted, and all can be read. Until then, if
    /// power goes, the next start finds what it left open.
    pub fn note_forced(&self) {
        self.fragile.borrow_mut().clear();
    }
}

fn disk_config(shape: &Shape, seed: u64, capacity: u64) -> DiskConfig {
    DiskConfig {
        capacity,
        block_size: shape.block_size,
        has_volatile_cache: shape.has_volatile_cache,
        has_zeroes: true,
        latency_ns: shape.latency_ns,
        seed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Unreadable;
    use crate::plan::{Filter, Plan};
    use block::{Device, Flags, Op};

    #[test]
    fn a_member_of_which_a_write_has_failed_counts_as_lost_until_the_array_has_been_assembled_again() {
        let filter = Filter { levels: vec![raid::Level::Raid5], ..Filter::default() };
        let shape = Plan::draw(1, &filter).shape;
        reactor::run_simulated(1, move |_| async move {
            let world = World::new(1, &shape, shape.geometry.capacity());
            world.machine.power_on();
            world.disk(1).fail_write(1);
            let channel = world.disk(1).open_channel().unwrap();
            let buffer = reactor::current().buffers().take(4096).await;
            let (_, result) = buffer.transfer(&*channel, Op::Write, Flags::FUA, 0).await;
            assert_eq!(result, Err(block::IoError::Medium));
            let live = vec![true; shape.members()];
            world.note_states(&live);
            assert!(world.is_lost(1) && !world.is_covered(0), "the array may be about to take it out");
            world.note_assembled(&live);
            assert!(!world.is_lost(1) && world.is_covered(0));
        });
    }

    #[test]
    fn unreadable_blocks_count_per_row_and_members_in_every_row() {
        let filter = Filter { levels: vec![raid::Level::Raid6], ..Filter::default() };
        let shape = Plan::draw(1, &filter).shape;
        let world = World::new(1, &shape, shape.geometry.capacity());
        let block = u64::from(shape.block_size);
        world.note_loss(0);
        let spoil = |slot: usize, number: u64| {
            assert!(world.are_blocks_covered(slot, &(number..number + 1)));
            let range = number * block..(number + 1) * block;
            world.disk(slot).add_medium_error(range, Unreadable::Blocks(0));
        };
        spoil(1, 0);
        assert!(!world.are_blocks_covered(2, &(0..2)));
        assert!(!world.is_covered(2) && !world.covers_damage(2));
        spoil(2, 1);
        assert!(world.is_covered(0), "it is lost already");
        assert!(!world.is_covered(1) && !world.is_covered(3), "one row would lose three blocks");
    }

    /// A world in which a crash has left parity open in the first stripe.
    fn with_open_parity() -> Rc<World> {
        let levels = vec![raid::Level::Raid6];
        let consistency = Some(raid::Consistency::Bitmap);
        let shape = Plan::draw(1, &Filter { levels, consistency, ..Filter::default() }).shape;
        let world = World::new(1, &shape, shape.geometry.capacity());
        world.note_logging(true);
        world.note_write(0, 1);
        world.note_written(0, 1);
        world.note_crash(false);
        world
    }

    #[test]
    fn a_resync_that_gives_blocks_up_leaves_their_region_marked() {
        for gives_up in [false, true] {
            let world = with_open_parity();
            if gives_up {
                world.note_giving_up(0);
            }
            world.note_synced();
            world.note_crash(false);
            world.note_loss(0);
            assert_eq!(world.may_be_lost(0), gives_up);
        }
    }

    /// Whether a block may be unreadable after a start by force, where a crash had left parity
    /// open.
    fn may_be_unreadable_by_force(was_filling: bool, is_up: bool) -> bool {
        let world = with_open_parity();
        world.note_loss(0);
        if was_filling {
            world.note_giving_up(0);
        }
        world.note_crash(false);
        world.give_up_dirty();
        if is_up {
            world.note_forced();
        }
        let mut oracle = world.oracle.borrow_mut();
        let ticket = oracle.begin_read();
        let is_excused = |lba: u64, _| world.may_be_lost(lba);
        oracle.end_failed_read(0, 1, ticket, block::IoError::Medium, true, is_excused).is_ok()
    }

    #[test]
    fn after_a_start_by_force_only_what_a_fill_had_given_up_may_be_unreadable() {
        assert!(may_be_unreadable_by_force(true, true));
        assert!(!may_be_unreadable_by_force(false, true));
    }

    #[test]
    fn a_start_by_force_in_which_power_goes_leaves_open_what_was_open() {
        assert!(may_be_unreadable_by_force(false, false));
    }
}
