//! Damage that parity or a second copy stands for: to metadata while power is off, to blocks whose write power cut off, and
//! to strips while the array runs.
//!
//! Each member has one superblock copy that may be damaged, the same in the whole run. Other metadata is damaged on members of a whole array with redundancy. Until the block has been
//! rewritten and parity is right everywhere, each such member counts like a loss in every group. A strip with an unreadable
//! block counts like a loss in its stripe.

use crate::disk::{SimDisk, Unreadable};
use crate::plan::{Action, Plan, Step};
use crate::rng::{Rng, mix};
use crate::subject::Running;
use crate::world::World;
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
    /// A copy of a page of the region map.
    RegionMap,
    /// A copy of the list of bad blocks.
    BadBlocks,
    /// A block of the log.
    Log,
    /// A block of a write that power cut off, wherever it was.
    CutOff,
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

/// Adds damage to a plan. Before every second boot: up to four blocks of metadata, half of them unreadable. Before every
/// second boot, too: one to three blocks of writes that were cut off, which become unreadable. In every second boot: one to
/// four unreadable places in strips, often close together.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(12);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    let mut id = || {
        next_id += 1;
        next_id - 1
    };
    let members = plan.shape.most_members() as u64;
    let data_bytes = plan.shape.most_stripes * u64::from(plan.shape.geometry.strip_bytes);
    for boot in &mut plan.boots {
        for _ in 0..if rng.one_in(2) { 0 } else { rng.range(1, 5) } {
            let place =
                rng.pick(&[Place::Superblock, Place::RegionMap, Place::BadBlocks, Place::Log, Place::Log]);
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
        // A scrub that has mended a strip does not expect it to be unreadable again.
        let mut drawn = BTreeSet::new();
        for _ in 0..if rng.one_in(2) { 0 } else { rng.range(1, 5) } {
            let slot = rng.below(members) as usize;
            let at = if rng.one_in(2) { near } else { rng.below(data_bytes) };
            let delay_ns = rng.log_uniform(8 * plan.shape.latency_ns);
            if drawn.insert((slot, at / u64::from(plan.shape.geometry.strip_bytes))) {
                boot.steps.push(Step { id: id(), worker, delay_ns, action: Action::StripError(slot, at) });
            }
        }
    }
}

/// Damages a block if a copy of what it holds remains, or parity stands for it; whether it did.
pub fn inflict(world: &World, fault: &Fault) -> bool {
    let (slot, disk) = (fault.slot, world.disk(fault.slot));
    if slot >= world.members() || disk.is_dead() || world.is_lost(slot) || world.is_any_beyond() {
        return false;
    }
    let copies = Copies::of(&disk);
    let Some(layout) = copies.newest().map(|superblock| superblock.layout) else { return false };
    let is_damaged = match fault.place {
        Place::Superblock => copies.damage(world, fault, &layout),
        Place::CutOff => cut_off(world, fault, &layout),
        _ => damage_metadata(world, fault, &layout),
    };
    world.count(|stats| match fault.place {
        Place::CutOff => stats.bad_blocks += u64::from(is_damaged),
        _ => stats.faults += u64::from(is_damaged),
    });
    is_damaged
}

fn damage_block(disk: &SimDisk, fault: &Fault, start: u64) {
    if fault.is_unreadable {
        disk.add_medium_error(start..start + PAGE_BYTES, Unreadable::Metadata);
    } else {
        disk.rot(start..start + 1 + fault.number % 64);
    }
}

/// Damages the region map, the bad blocks or the log.
fn damage_metadata(world: &World, fault: &Fault, layout: &Layout) -> bool {
    if !world.is_whole() || !world.covers_damage(fault.slot) {
        return false;
    }
    let start = match fault.place {
        Place::RegionMap if layout.map_pages > 0 => {
            layout.map_page((fault.number >> 1) as u32 % layout.map_pages, (fault.number & 1) as usize)
        }
        Place::BadBlocks => layout.bad_copy((fault.number & 1) as usize),
        // An entry that has rotted looks like one that was cut off: while the log is needed, nothing stands for it.
        Place::Log if layout.log_bytes >= PAGE_BYTES && (fault.is_unreadable || world.was_stopped()) => {
            layout.log_offset + fault.number % (layout.log_bytes / PAGE_BYTES) * PAGE_BYTES
        }
        _ => return false,
    };
    damage_block(&world.disk(fault.slot), fault, start);
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

/// Makes some bytes of a strip unreadable if parity stands for the strip; whether it did. `data`: all strips.
fn spoil(world: &World, slot: usize, data: &Range<u64>, range: Range<u64>) -> bool {
    let number = (range.start - data.start) / u64::from(world.shape.geometry.strip_bytes);
    if world.is_lost(slot) || !world.is_strip_covered(slot, number) {
        return false;
    }
    world.disk(slot).add_medium_error(range, Unreadable::Strip(number));
    world.note_hurt(slot);
    world.note_giving_up(slot);
    // Recovery may write the block anew, so that nothing else tells of it.
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

    /// Damages the copy that may be, if others can be found without it.
    fn damage(&self, world: &World, fault: &Fault, layout: &Layout) -> bool {
        let disk = world.disk(fault.slot);
        let copy = mix(world.shape.seed ^ fault.slot as u64) as usize % COPIES;
        let is_left =
            |others: Range<usize>| others.into_iter().any(|other| other != copy && self.0[other].is_some());
        // Where a disk has grown, and the array not yet, only the copies at its front say where the others are.
        let is_at_end = layout.member_bytes == disk.limits().capacity & !(PAGE_BYTES - 1);
        let may_be_damaged = is_left(if is_at_end { 0..COPIES } else { 0..COPIES / 2 });
        if may_be_damaged {
            damage_block(&disk, fault, layout.superblocks()[copy]);
        }
        may_be_damaged
    }
}
