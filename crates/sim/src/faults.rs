//! Damage to metadata while power is off: a block of a superblock, the region map, the list of bad blocks or the log cannot
//! be read any more, or holds something else.
//!
//! Each member has one superblock copy that may be damaged, the same in the whole run, so its twin always remains. The other
//! structures are damaged on one member of a whole array with redundancy, until the block has been rewritten and parity is right
//! everywhere. That counts like a loss in every group.

use crate::array::config;
use crate::plan::Plan;
use crate::rng::{Rng, mix};
use crate::world::World;
use block::Device;
use raid::Uuid;
use raid::metadata::Layout;
use raid::metadata::layout::{COPIES, PAGE_BYTES};

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
}

/// One block of metadata that is damaged.
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

/// Adds damage before every second boot: up to four blocks, half of them unreadable, of the log only unreadable ones.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(12);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    let members = plan.shape.members() as u64;
    for boot in &mut plan.boots {
        let count = if rng.one_in(2) { 0 } else { rng.range(1, 5) };
        for _ in 0..count {
            let place =
                rng.pick(&[Place::Superblock, Place::RegionMap, Place::BadBlocks, Place::Log, Place::Log]);
            let is_unreadable = rng.one_in(2) || place == Place::Log;
            let (slot, number) = (rng.below(members) as usize, rng.draw());
            boot.faults.push(Fault { id: next_id, slot, place, number, is_unreadable });
            next_id += 1;
        }
    }
}

/// Damages a block if a copy of what it holds remains; whether it did.
pub fn inflict(world: &World, fault: &Fault) -> bool {
    let (slot, disk) = (fault.slot, world.disk(fault.slot));
    if disk.is_dead() || world.is_lost(slot) || world.is_any_beyond() {
        return false;
    }
    let Ok(layout) = Layout::new(disk.limits().capacity, &config(&world.shape, Uuid::default())) else {
        return false;
    };
    let start = match fault.place {
        Place::Superblock => {
            let copy = mix(world.shape.seed ^ slot as u64) as usize % COPIES;
            layout.superblocks()[copy]
        }
        _ if !world.is_whole() || !world.covers_damage() => return false,
        Place::RegionMap if layout.map_pages > 0 => {
            layout.map_page((fault.number >> 1) as u32 % layout.map_pages, (fault.number & 1) as usize)
        }
        Place::BadBlocks => layout.bad_copy((fault.number & 1) as usize),
        Place::Log if layout.log_bytes >= PAGE_BYTES => {
            layout.log_offset + fault.number % (layout.log_bytes / PAGE_BYTES) * PAGE_BYTES
        }
        _ => return false,
    };
    if fault.is_unreadable {
        disk.add_metadata_error(start..start + PAGE_BYTES);
    } else {
        disk.rot(start..start + 1 + fault.number % 64);
    }
    if fault.place != Place::Superblock {
        world.note_damaged(slot, start..start + PAGE_BYTES);
    }
    world.count(|stats| stats.faults += 1);
    true
}
