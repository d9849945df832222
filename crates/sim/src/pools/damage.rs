//! Damage to the copies of a pool's table while power is off, and what the pool owes then.
//!
//! `docs/on-disk-formats.md` promises that one bad copy in each set costs nothing. Where a set has
//! no whole copy, the pool may refuse to open, names every copy, and never falls back to an older
//! table.

use super::world::World;
use crate::disk::{SimDisk, Unreadable};
use base::Rng;
use block::Device;
use reactor::CoreRef;
use std::sync::Arc;
use volume::PoolError;
use volume::store::{ReadError, SETS};
use volume::table::{ALIGNMENT, Table};

/// Bytes of a table that rot where it is damaged; those behind its end cost nothing.
const ROTTEN: u64 = 600;

/// Damage to the table of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    pool: u64,
    which: Which,
    is_unreadable: bool,
    seed: u64,
}

/// The copies that are damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    One(u64),
    OneOfEachSet(u64),
    /// Both copies of the newest table.
    Newest,
}

impl Damage {
    pub fn draw(rng: &mut Rng) -> Damage {
        let (pool, copy, seed) = (rng.draw(), rng.below(4), rng.draw());
        let which = match rng.below(5) {
            0 | 1 => Which::One(copy),
            2 | 3 => Which::OneOfEachSet(copy),
            _ => Which::Newest,
        };
        Damage { pool, which, is_unreadable: rng.one_in(2), seed }
    }
}

/// A copy as it was before it was damaged.
pub struct Saved {
    /// The pool.
    pub pool: usize,
    offset: u64,
    bytes: Vec<u8>,
}

/// The table in the place of a copy, if it is whole.
fn look(disk: &SimDisk, offset: u64) -> Option<Table> {
    let mut bytes = vec![0; ALIGNMENT as usize];
    disk.peek(offset, &mut bytes);
    let len = Table::length(&bytes).ok()?;
    if disk.has_metadata_error(&(offset..offset + len.max(bytes.len()) as u64)) {
        return None;
    }
    bytes.resize(len, 0);
    disk.peek(offset, &mut bytes);
    Table::decode(&bytes).ok()
}

fn offsets() -> impl Iterator<Item = u64> {
    SETS.into_iter().flatten()
}

/// Copies of a pool's table that are not whole, by their offsets.
pub fn broken(disk: &SimDisk) -> Vec<u64> {
    offsets().filter(|offset| look(disk, *offset).is_none()).collect()
}

/// Damages tables. The world keeps the old bytes until the pool is open.
pub fn apply(world: &World, damages: &[(u32, Damage)]) {
    let mut saved = world.saved.borrow_mut();
    for (_, damage) in damages {
        let pool = (damage.pool % world.disks.len() as u64) as usize;
        if !world.is_made.borrow()[pool] {
            continue;
        }
        let disk = &world.disks[pool];
        let mut rng = Rng::new(damage.seed);
        for offset in damage.which.offsets(disk) {
            let mut bytes = vec![0; ALIGNMENT as usize];
            disk.peek(offset, &mut bytes);
            if !saved.iter().any(|copy| (copy.pool, copy.offset) == (pool, offset)) {
                saved.push(Saved { pool, offset, bytes });
            }
            if damage.is_unreadable {
                let sector = offset + rng.below(ALIGNMENT / 512) * 512;
                disk.add_medium_error(sector..sector + 512, Unreadable::Metadata);
            } else {
                // Not the version: a later format is another promise.
                let at = if rng.one_in(8) { rng.below(8) } else { 12 + rng.below(ROTTEN) };
                let len = if at < 8 { 1 } else { 1 + rng.log_uniform(63) };
                disk.rot(offset + at..offset + at + len);
            }
            world.count(|stats| stats.faults += 1);
        }
    }
}

impl Which {
    fn offsets(self, disk: &SimDisk) -> Vec<u64> {
        match self {
            Which::One(copy) => offsets().skip(copy as usize).take(1).collect(),
            Which::OneOfEachSet(copy) => vec![SETS[0][copy as usize % 2], SETS[1][copy as usize / 2]],
            Which::Newest => {
                let newest = offsets().filter_map(|at| look(disk, at)).max_by_key(|table| table.sequence);
                newest.map_or(Vec::new(), |table| SETS[table.sequence as usize % 2].to_vec())
            }
        }
    }
}

/// Puts the old bytes back. Where requests have failed, an administrator does the rest: the newest
/// table is chosen, and the place of a pool that was not created yet is emptied.
pub fn restore(world: &World, pool: usize, core: &CoreRef) {
    let disk = &world.disks[pool];
    for copy in world.saved.borrow().iter().filter(|copy| copy.pool == pool) {
        disk.mend(&(copy.offset..copy.offset + copy.bytes.len() as u64));
        disk.poke(copy.offset, &copy.bytes);
    }
    if !world.is_torn.borrow()[pool] || has_whole_sets(disk) {
        return;
    }
    let newest = offsets().filter_map(|at| look(disk, at)).max_by_key(|table| table.sequence);
    match newest.filter(|_| world.is_made.borrow()[pool]) {
        Some(table) => {
            let chosen = volume::pool::choose(&(Arc::new(disk.clone()) as Arc<dyn Device>), core, &table);
            if let Err(error) = chosen
                && world.machine.is_on()
            {
                world.fail(format!("the table of pool {pool} cannot be chosen: {error}"));
            }
        }
        None => offsets().for_each(|offset| disk.poke(offset, &[0; ALIGNMENT as usize])),
    }
}

/// Whether each set has a whole copy.
fn has_whole_sets(disk: &SimDisk) -> bool {
    SETS.iter().all(|set| set.iter().any(|offset| look(disk, *offset).is_some()))
}

/// Whether a pool on this disk may refuse to open, as far as the copies decide: a set has no whole
/// copy.
pub fn may_refuse(world: &World, pool: usize) -> bool {
    let disk = &world.disks[pool];
    let is_damaged = world.saved.borrow().iter().any(|copy| copy.pool == pool);
    (is_damaged || world.is_torn.borrow()[pool]) && !has_whole_sets(disk)
}

/// Returns the fault of a refusal, if it has one.
pub fn judge(disk: &SimDisk, error: &PoolError) -> Option<String> {
    if offsets().all(|offset| look(disk, offset).is_none()) {
        return None;
    }
    let text = error.to_string();
    let is_named = |offset: u64| text.contains(&format!("at {offset}:"));
    match error {
        PoolError::Read(_, ReadError::Damaged(_)) if offsets().all(is_named) => None,
        _ => Some(format!("the refusal does not name the copies: {text}")),
    }
}
