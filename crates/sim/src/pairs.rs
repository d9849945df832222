//! Two members of one group that fail together and are replaced by blank disks together: the array
//! rebuilds both in one pass.

use crate::boot::judge;
use crate::disk::SimDisk;
use crate::plan::{Action, Plan, Step};
use crate::subject::Running;
use crate::world::World;
use base::Rng;
use raid::Level;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;

/// Levels with arrays that can lose two members of a group.
pub const LEVELS: [Level; 6] =
    [Level::Raid1, Level::Raid6, Level::Raid7, Level::Raid10, Level::Raid60, Level::NPlusM];

/// Adds failures of two members, and their replacement, to three of four boots. `worker` runs all
/// steps that are not I/O.
pub fn draw(plan: &mut Plan, worker: usize) {
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
        let first = rng.below(geometry.groups as u64) as usize * size;
        let one = rng.below(size as u64) as usize;
        let other = (one + 1 + rng.below(size as u64 - 1) as usize) % size;
        let lose = |rng: &mut Rng, slot: usize| match rng.one_in(2) {
            true => Action::Kill(first + slot),
            false => Action::Fail(first + slot),
        };
        let mut actions = vec![lose(&mut rng, one), lose(&mut rng, other)];
        // During the rebuild, sometimes one of them fails again, or another member.
        if rng.one_in(3) {
            let kill_ns = 1 + rng.log_uniform(40 * latency_ns);
            let killed = first + rng.below(size as u64) as usize;
            actions.push(Action::ReplaceLost { slot: first + one, killed, kill_ns });
        }
        actions.push(Action::ReplaceLost { slot: first + one, killed: 0, kill_ns: 0 });
        for action in actions {
            let id = ids.next().expect("numbers do not end");
            let delay_ns = rng.log_uniform(20 * latency_ns);
            boot.steps.push(Step { id, worker, delay_ns, action });
        }
    }
}

/// Replaces the failed disks of a slot's group with blank ones, all at once. The disk of slot
/// `killed` dies after `kill_ns` nanoseconds; 0 for never.
pub(crate) async fn replace_lost(
    world: &Rc<World>,
    running: &Rc<dyn Running>,
    slot: usize,
    (killed, kill_ns): (usize, u64),
) {
    let group = world.shape.group_of(slot);
    if world.is_beyond(group) {
        return;
    }
    let live = running.live();
    let is_lost = |slot: &usize| world.is_lost(*slot) && !live[*slot];
    let slots: Vec<usize> = world.slots_of(group).filter(is_lost).collect();
    let mut disks: Vec<(usize, SimDisk)> = Vec::new();
    for slot in slots {
        world.note_loss(slot); // a failed write counts for a disk that fails now
        disks.push((slot, world.replace(slot)));
        world.note_giving_up(slot);
    }
    if disks.is_empty() {
        return;
    }
    world.note_logging(true); // from some time on, if these were the last missing members
    let mut timer = (kill_ns > 0).then(|| reactor::current().sleep(kill_ns));
    let mut added = running.add_all(&disks);
    let result = poll_fn(|cx| {
        if timer.as_mut().is_some_and(|timer| Pin::new(timer).poll(cx).is_ready()) {
            timer = None;
            if !world.disk(killed).is_dead() && world.may_lose(killed) {
                world.disk(killed).kill();
                world.note_loss(killed);
            }
        }
        added.as_mut().poll(cx)
    });
    let result = result.await;
    if world.machine.is_on() {
        world.note_logging_with(&running.live());
    }
    if disks.iter().any(|(_, disk)| disk.is_dead()) {
        if world.machine.is_on() {
            world.note_states(&running.live());
        }
        return; // failed again during the rebuild
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
