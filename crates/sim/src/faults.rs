//! Damage that parity or a second copy stands for: to metadata while power is off, to blocks whose
//! write power cut off, and to strips while the array runs.
//!
//! Each member has one superblock copy that may be damaged, the same in the whole run. Other
//! metadata is damaged on members of a whole array with redundancy. Until the block has been
//! rewritten and parity is right everywhere, each such member counts like a loss in every group. A
//! block of a strip that cannot be read counts like a loss in its row.

use crate::disk::{SimDisk, Unreadable};
use crate::plan::{Action, Plan, Step};
use crate::subject::Running;
use crate::world::World;
use base::{Rng, mix};
use block::Device;
use raid::metadata::layout::{COPIES, COPY_BYTES, PAGE_BYTES};
use raid::metadata::{Label, Layout, Superblock};
use std::collections::BTreeSet;
use std::ops::Range;

/// Structures that can be damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The first block of one superblock copy.
    Superblock,
    /// A copy of a page of the write-intent bitmap.
    IntentBitmap,
    /// A copy of the list of bad blocks.
    BadBlocks,
    /// A block of the log.
    Log,
    /// A block of a write that power cut off, wherever it was.
    CutOff,
    /// A block of one of the last entries that the log got before power went.
    Entry,
}

/// One block that is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Names it in the whole run.
    pub id: u32,
    /// The member.
    pub slot: usize,
    /// The structure.
    pub place: Place,
    /// Selects the block in the structure.
    pub number: u64,
    /// The block cannot be read. Otherwise some of its bytes have changed.
    pub is_unreadable: bool,
}

/// Adds damage to a plan. Before every second boot: up to four blocks of metadata, half of them
/// unreadable. Before every second boot, too: one to three blocks of writes that were cut off,
/// which become unreadable. In every second boot: one to four unreadable places in strips, often
/// close together. In every second boot: blocks of most strips of one stripe.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(12);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    let mut id = || {
        next_id += 1;
        next_id - 1
    };
    let members = plan.shape.most_members() as u64;
    let strip_bytes = u64::from(plan.shape.geometry.strip_bytes);
    let data_bytes = plan.shape.most_stripes * strip_bytes;
    let mut rows = Rng::new(plan.seed).fork(22);
    for boot in &mut plan.boots {
        for _ in 0..if rng.one_in(2) { 0 } else { rng.range(1, 5) } {
            let place =
                rng.pick(&[Place::Superblock, Place::IntentBitmap, Place::BadBlocks, Place::Log, Place::Log]);
            let is_unreadable = rng.one_in(2);
            let (slot, number) = (rng.below(members) as usize, rng.draw());
            boot.faults.push(Fault { id: id(), slot, place, number, is_unreadable });
        }
        for _ in 0..if rng.one_in(2) { 0 } else { rng.range(1, 4) } {
            let (slot, number) = (rng.below(members) as usize, rng.draw());
            let place = Place::CutOff;
            boot.faults.push(Fault { id: id(), slot, place, number, is_unreadable: true });
        }
        let worker = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(0);
        let near = rng.below(data_bytes);
        // Rarely more than one error in a strip: places fold where the array has fewer stripes.
        let mut drawn = BTreeSet::new();
        for _ in 0..if rng.one_in(2) { 0 } else { rng.range(1, 5) } {
            let slot = rng.below(members) as usize;
            let at = if rng.one_in(2) { near } else { rng.below(data_bytes) };
            let delay_ns = rng.log_uniform(8 * plan.shape.latency_ns);
            if drawn.insert((slot, at / strip_bytes)) {
                boot.steps.push(Step { id: id(), worker, delay_ns, action: Action::StripError(slot, at) });
            }
        }
        // At about the same time blocks of one stripe become unreadable, each in any row.
        let strip = rows.below(data_bytes) / strip_bytes;
        let mut delay_ns = rows.log_uniform(8 * plan.shape.latency_ns);
        for slot in 0..if rows.one_in(2) { 0 } else { members as usize } {
            let at = strip * strip_bytes + rows.below(strip_bytes);
            if !rows.one_in(3) && drawn.insert((slot, strip)) {
                let action = Action::StripError(slot, at);
                boot.steps.push(Step { id: id(), worker: worker + 1, delay_ns, action });
                delay_ns = 0;
            }
        }
    }
}

/// Adds damage under load to a plan. In two of three boots: one to four blocks of superblocks,
/// write-intent bitmap, bad-block list and log, between requests; half of them rot, except the log.
/// Before every second boot: one to three blocks of the last log entries become unreadable.
pub fn draw_live(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(20);
    let mut ids = plan.ids().into_iter().max().unwrap_or(0) + 1..;
    let mut id = || ids.next().expect("numbers do not end");
    let members = plan.shape.most_members() as u64;
    for boot in &mut plan.boots {
        for _ in 0..if rng.one_in(2) { 0 } else { rng.range(1, 4) } {
            let (slot, number, place) = (rng.below(members) as usize, rng.draw(), Place::Entry);
            boot.faults.push(Fault { id: id(), slot, place, number, is_unreadable: true });
        }
        let worker = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(0);
        for _ in 0..if rng.one_in(3) { 0 } else { rng.range(1, 5) } {
            let place = rng.pick(&[
                Place::Superblock,
                Place::IntentBitmap,
                Place::IntentBitmap,
                Place::BadBlocks,
                Place::Log,
            ]);
            let is_unreadable = rng.one_in(2) || place == Place::Log;
            let (id, slot, number) = (id(), rng.below(members) as usize, rng.draw());
            let delay_ns = rng.log_uniform(16 * plan.shape.latency_ns);
            let action = Action::Damage(Fault { id, slot, place, number, is_unreadable });
            boot.steps.push(Step { id, worker, delay_ns, action });
        }
    }
}

/// Damages a block if a copy of what it holds remains, or parity stands for it; whether it did.
/// `is_live`: requests run.
pub fn inflict(world: &World, fault: &Fault, is_live: bool) -> bool {
    let (slot, disk) = (fault.slot, world.disk(fault.slot));
    if slot >= world.members() || disk.is_dead() || world.is_lost(slot) || world.is_any_beyond() {
        return false;
    }
    let copies = Copies::of(&disk);
    let Some(layout) = copies.newest().map(|superblock| superblock.layout) else { return false };
    let is_damaged = match fault.place {
        Place::Superblock => copies.damage(world, fault, &layout, is_live),
        Place::CutOff => cut_off(world, fault, &layout),
        Place::Entry => spoil_entry(world, fault, &layout),
        _ => damage_metadata(world, fault, &layout, is_live),
    };
    world.count(|stats| match fault.place {
        Place::CutOff => stats.bad_blocks += u64::from(is_damaged),
        _ => stats.faults += u64::from(is_damaged),
    });
    is_damaged
}

fn damage_block(disk: &SimDisk, fault: &Fault, start: u64, is_live: bool) {
    if fault.is_unreadable {
        disk.add_medium_error(start..start + PAGE_BYTES, Unreadable::Metadata);
    } else {
        let range = start..start + 1 + fault.number % 64;
        if is_live {
            disk.rot_metadata(range);
        } else {
            disk.rot(range);
        }
    }
}

/// Damages the write-intent bitmap, the bad blocks or the log.
fn damage_metadata(world: &World, fault: &Fault, layout: &Layout, is_live: bool) -> bool {
    if !world.is_whole() || !world.covers_damage(fault.slot) {
        return false;
    }
    let start = match fault.place {
        Place::IntentBitmap if layout.map_pages > 0 => {
            layout.map_page((fault.number >> 1) as u32 % layout.map_pages, (fault.number & 1) as usize)
        }
        Place::BadBlocks => layout.bad_copy((fault.number & 1) as usize),
        // An entry that has rotted looks like one that was cut off: while the log is needed,
        // nothing stands for it.
        Place::Log if layout.log_bytes >= PAGE_BYTES && (fault.is_unreadable || world.was_stopped()) => {
            layout.log_offset + fault.number % (layout.log_bytes / PAGE_BYTES) * PAGE_BYTES
        }
        _ => return false,
    };
    damage_block(&world.disk(fault.slot), fault, start, is_live);
    world.note_damaged(fault.slot, start..start + PAGE_BYTES);
    true
}

/// Makes a block unreadable that was being written when power went.
fn cut_off(world: &World, fault: &Fault, layout: &Layout) -> bool {
    let (slot, disk) = (fault.slot, world.disk(fault.slot));
    let Some(block) = disk.cut_off_block(fault.number) else { return false };
    let data = layout.data_offset..layout.data_offset + layout.data_bytes;
    if data.contains(&block.start) {
        return spoil(world, slot, &data, block);
    }
    // Superblocks have their own rule.
    let is_other = (layout.map_offset..layout.log_offset + layout.log_bytes).contains(&block.start);
    if !is_other || !world.is_whole() || !world.covers_damage(slot) {
        return false;
    }
    disk.add_medium_error(block.clone(), Unreadable::Metadata);
    world.note_damaged(slot, block);
    true
}

/// Makes a block of one of the last log entries unreadable.
fn spoil_entry(world: &World, fault: &Fault, layout: &Layout) -> bool {
    let (slot, disk) = (fault.slot, world.disk(fault.slot));
    if !world.is_whole() || !world.covers_damage(slot) {
        return false;
    }
    let log = layout.log_offset..layout.log_offset + layout.log_bytes;
    let Some(block) = disk.ended_block(&log, fault.number) else { return false };
    disk.add_medium_error(block.clone(), Unreadable::Metadata);
    world.note_damaged(slot, block);
    true
}

/// Makes some bytes of a strip unreadable if parity stands for its blocks; whether it did. `data`:
/// all strips.
fn spoil(world: &World, slot: usize, data: &Range<u64>, range: Range<u64>) -> bool {
    let block = u64::from(world.shape.block_size);
    let blocks = (range.start - data.start) / block..(range.end - data.start).div_ceil(block);
    if world.is_lost(slot) || !world.are_blocks_covered(slot, &blocks) {
        return false;
    }
    world.disk(slot).add_medium_error(range, Unreadable::Blocks(data.start));
    world.note_hurt(slot);
    world.note_giving_up(slot);
    // Recovery may rewrite the block, so that nothing else tells of it.
    world.is_impaired(world.shape.group_of(slot));
    true
}

/// A place in a running array's strips becomes unreadable: one block, or 4 KiB of the strip.
pub fn spoil_strip(world: &World, running: &dyn Running, slot: usize, at: u64) {
    let Some(data) = running.strips_at(slot) else { return };
    let block = u64::from(world.shape.block_size);
    let start = data.start + at % (data.end - data.start) / block * block;
    let len = if world.draw().is_multiple_of(2) { block } else { PAGE_BYTES - start % PAGE_BYTES };
    if spoil(world, slot, &data, start..start + len) {
        world.count(|stats| stats.bad_blocks += 1);
    }
}

/// Whether a disk has a superblock of a member.
pub fn is_member(disk: &SimDisk) -> bool {
    Copies::of(disk).newest().is_some()
}

/// The superblock copies of a disk that is off.
struct Copies([Option<Box<Superblock>>; COPIES]);

impl Copies {
    fn of(disk: &SimDisk) -> Copies {
        let read = |place: u64| {
            let mut bytes = vec![0; COPY_BYTES as usize];
            disk.peek(place, &mut bytes);
            match Label::decode(&bytes) {
                Ok(Label::Member(superblock)) => Some(superblock),
                _ => None,
            }
        };
        let places = Layout::superblocks_at(disk.limits().capacity);
        let mut copies = Copies(places.map_or([const { None }; COPIES], |places| places.map(read)));
        // The disk may have grown, and the array not yet.
        if let Some(layout) = copies.newest().map(|superblock| superblock.layout) {
            copies.0 = layout.superblocks().map(read);
        }
        copies
    }

    fn newest(&self) -> Option<&Superblock> {
        self.0.iter().flatten().max_by_key(|copy| copy.table.generation).map(|copy| &**copy)
    }

    /// Damages the copy that may be, if another copy of what was committed can be read without it.
    fn damage(&self, world: &World, fault: &Fault, layout: &Layout, is_live: bool) -> bool {
        let disk = world.disk(fault.slot);
        let copy = mix(world.shape.seed ^ fault.slot as u64) as usize % COPIES;
        let places = layout.superblocks();
        let generations = self.0.each_ref().map(|copy| copy.as_ref().map(|copy| copy.table.generation));
        let is_left = |others: Range<usize>, least: Option<u64>| {
            let can_be_read = |other: usize| disk.is_readable(&(places[other]..places[other] + COPY_BYTES));
            others.into_iter().any(|other| other != copy && generations[other] >= least && can_be_read(other))
        };
        // Where a disk has grown, and the array not yet, only the copies at its front say where the
        // others are. Of these, a running array writes one after the other, and power may tear it.
        let is_at_end = layout.member_bytes == disk.limits().capacity & !(PAGE_BYTES - 1);
        let front = 0..COPIES / 2;
        let may_lack_end = is_left(front.clone(), Some(0)) && !(is_live && front.contains(&copy));
        let may_be_damaged = (is_at_end || may_lack_end) && is_left(0..COPIES, committed(generations));
        if may_be_damaged {
            damage_block(&disk, fault, places[copy], is_live);
        }
        may_be_damaged
    }
}

/// The generation that a member must not lack: the second highest of its copies. Power may have cut
/// off the commit of the highest, which then stands in one copy.
fn committed(mut generations: [Option<u64>; COPIES]) -> Option<u64> {
    generations.sort_unstable_by(|a, b| b.cmp(a));
    generations[1].or(generations[0])
}
