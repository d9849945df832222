//! Two members of one group that are lost together, and get blank disks together: the keeper fills both in one pass.

use crate::boot::judge;
use crate::disk::SimDisk;
use crate::plan::{Action, Plan, Step};
use crate::rng::Rng;
use crate::subject::Running;
use crate::world::World;
use raid::Level;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;

/// Levels of which arrays can lose two members of a group.
pub const LEVELS: [Level; 6] =
    [Level::Raid1, Level::Raid6, Level::Raid7, Level::Raid10, Level::Raid60, Level::NPlusM];

/// Adds losses of two members, and their replacement, to three of four boots. `worker` does everything that is not I/O.
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
        // While they are filled, sometimes one of them is lost again, or another member.
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

/// Replaces the lost disks of a slot's group with blank ones, all at once. The disk of slot `killed` dies meanwhile, after
/// `kill_ns` nanoseconds; 0 for never.
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
        world.note_loss(slot); // a write that failed says so of a disk that goes now
        disks.push((slot, world.replace(slot)));
        world.note_giving_up(slot);
    }
    if disks.is_empty() {
        return;
    }
    world.note_logging(true); // from some moment on, if these were the last that were missing
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
