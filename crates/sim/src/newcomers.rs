//! New members: blank disks that a stopped array is given as groups more.
//!
//! Power goes while they come, at any write, or not; afterwards the array has its old shape or its
//! new one, and the new one if it was acknowledged. As long as it has the old one it is tried
//! again, with the same disks.

use crate::disk::SimDisk;
use crate::growth::{around_the_end, place};
use crate::machine::CrashAt;
use crate::plan::{Action, Newcomers, Plan, Shape, Step};
use crate::world::World;
use base::Rng;
use block::Device;
use raid::Geometry;

/// Adds new groups to a plan from some boot on, requests to what is added, and events for the new
/// members.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(10);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    let groups = if rng.one_in(4) { 2 } else { 1 };
    let old = plan.shape.members();
    plan.shape.most_groups = plan.shape.geometry.groups + groups;
    let new = groups * plan.shape.geometry.group_members();
    let writes = (12 * new + 2 * old) as u64;
    let first = rng.below(plan.boots.len() as u64) as usize;
    let shape = plan.shape.clone();
    for boot in &mut plan.boots[first..] {
        let crash = match rng.below(4) {
            0 => None,
            1 => Some(CrashAt::WriteEnded(1 + rng.below(writes))),
            // The last ones are the superblocks.
            2 => Some(CrashAt::WriteStarted(1 + writes - rng.below(6 * (old + new) as u64).min(writes - 1))),
            _ => Some(CrashAt::WriteStarted(1 + rng.below(writes))),
        };
        boot.newcomers = Some(Newcomers { id: next_id, crash });
        next_id += 1;
        let workers = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(1);
        for _ in 0..rng.below(8) {
            let worker = rng.below(workers as u64) as usize;
            boot.steps.push(Step { id: next_id, worker, delay_ns: 0, action: request(&mut rng, &shape) });
            next_id += 1;
        }
        if rng.one_in(3) {
            let delay_ns = rng.log_uniform(20 * shape.latency_ns);
            let slot = old + rng.below(new as u64) as usize;
            let action = event(&mut rng, slot);
            boot.steps.push(Step { id: next_id, worker: workers, delay_ns, action });
            next_id += 1;
        }
    }
}

/// Draws an event of a new member.
pub fn event(rng: &mut Rng, slot: usize) -> Action {
    match rng.below(4) {
        0 => Action::Kill(slot),
        1 => Action::Fail(slot),
        2 => Action::Return(slot),
        _ => Action::Replace(slot),
    }
}

/// A request to what is added, or to both sides of where it begins.
fn request(rng: &mut Rng, shape: &Shape) -> Action {
    let after = Geometry { groups: shape.most_groups, ..shape.geometry };
    let (lba, count) = place(rng, shape, &around_the_end(shape, &after));
    match rng.below(6) {
        0 => Action::Read { lba, count },
        1 => Action::WriteZeroes { lba, count },
        _ => Action::Write { lba, count, is_fua: rng.one_in(4), change_ns: 0 },
    }
}

/// Disks hold bytes that mean nothing.
pub fn fill_with_garbage(world: &World, disks: &[SimDisk]) {
    for disk in disks {
        let word = world.draw().to_le_bytes();
        disk.poke(0, &word.repeat(disk.limits().capacity as usize / word.len()));
    }
}

/// Something is on the disks before they come.
pub fn soil(world: &World, disks: &[SimDisk]) {
    for disk in disks {
        let garbage = vec![world.draw() as u8 | 1; disk.limits().capacity as usize];
        // The first pages stay: superblocks of an earlier try, which must do no harm.
        let (from, to) = (SOILED_FROM as usize, garbage.len() - SOILED_FROM as usize);
        disk.poke(SOILED_FROM, &garbage[from..to]);
    }
}

/// Room for superblocks at both ends of a disk.
const SOILED_FROM: u64 = 32 << 10;
