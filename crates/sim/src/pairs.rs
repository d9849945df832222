//! Two members of one group that are lost together, and get blank disks together: the keeper fills both in one pass.

use crate::boot::judge;
use crate::disk::SimDisk;
use crate::plan::{Action, Plan, Step};
use crate::rng::Rng;
use crate::subject::Running;
use crate::world::World;
use raid::Level;
use std::rc::Rc;

/// Levels of which arrays can lose two members of a group.
pub const LEVELS: [Level; 6] =
    [Level::Raid1, Level::Raid6, Level::Raid7, Level::Raid10, Level::Raid60, Level::NPlusM];

/// Adds losses of two members, and their replacement, to three of four boots.
pub fn draw(plan: &mut Plan) {
    let geometry = plan.shape.geometry;
    if geometry.parity < 2 {
        return;
    }
    let mut rng = Rng::new(plan.seed).fork(13);
    let mut ids = plan.ids().into_iter().max().unwrap_or(0) + 1..;
    plan.shape.has_keeper = true;
    let (size, latency_ns) = (geometry.group_members(), plan.shape.latency_ns);
    for boot in &mut plan.boots {
        if rng.one_in(4) {
            continue;
        }
        let worker = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(1);
        let first = rng.below(geometry.groups as u64) as usize * size;
        let one = rng.below(size as u64) as usize;
        let other = (one + 1 + rng.below(size as u64 - 1) as usize) % size;
        let lose = |rng: &mut Rng, slot: usize| match rng.one_in(2) {
            true => Action::Kill(first + slot),
            false => Action::Fail(first + slot),
        };
        let mut actions = vec![lose(&mut rng, one), lose(&mut rng, other), Action::ReplaceLost(first + one)];
        // While they are filled, sometimes one of them is lost again, or another member.
        let mut beside = Vec::new();
        if rng.one_in(3) {
            beside.push(Action::Kill(first + rng.below(size as u64) as usize));
            actions.push(Action::ReplaceLost(first + one));
        }
        for (worker, actions) in [(worker, actions), (worker + 1, beside)] {
            for action in actions {
                let id = ids.next().expect("numbers do not end");
                let delay_ns = rng.log_uniform(20 * latency_ns);
                boot.steps.push(Step { id, worker, delay_ns, action });
            }
        }
    }
}

/// Replaces the lost disks of a slot's group with blank ones, all at once.
pub(crate) async fn replace_lost(world: &Rc<World>, running: &Rc<dyn Running>, slot: usize) {
    let group = world.shape.group_of(slot);
    if world.is_beyond(group) {
        return;
    }
    let live = running.live();
    let is_lost = |slot: &usize| world.is_lost(*slot) && !live[*slot];
    let slots: Vec<usize> = world.slots_of(group).filter(is_lost).collect();
    let mut disks: Vec<(usize, SimDisk)> = Vec::new();
    for slot in slots {
        world.note_loss(slot, true); // a write that failed says so of a disk that goes now
        disks.push((slot, world.replace(slot)));
        world.note_giving_up(slot);
    }
    if disks.is_empty() {
        return;
    }
    world.note_logging(true); // from some moment on, if these were the last that were missing
    let result = running.add_all(&disks).await;
    if world.machine.is_on() {
        world.note_logging_with(&running.live());
    }
    if disks.iter().any(|(_, disk)| disk.is_dead()) {
        if world.machine.is_on() {
            world.note_states(&running.live());
        }
        return; // lost again while they were filled
    }
    if world.machine.is_on() && result.is_ok() {
        disks.iter().for_each(|(slot, _)| world.note_live(*slot));
        world.count(|stats| {
            stats.rebuilds += disks.len() as u64;
            stats.pairs += u64::from(disks.len() > 1);
        });
    }
    judge(world, "replacement", result);
}
