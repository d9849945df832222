//! Pools and their volumes on simulated disks: made, grown, renamed and deleted while users write,
//! with power loss and damaged tables.
//!
//! ```text
//!   seed ─► Plan ─► boots: open and judge the pools ─► read all volumes ─► steps, users beside them ─► power goes
//! ```
//!
//! The pool's code is for threads that wait. It runs here on the thread that owns the simulated
//! cores ([`reactor::Simulation`]): while it waits for a core, all cores work, those of users
//! included.
//!
//! After each start the tables must be those before the change that was cut off, or after it. A
//! volume reads as its own oracle says: it never shows bytes of another volume or of a former owner
//! of its disk.

mod boot;
mod change;
mod damage;
mod folder;
mod mover;
mod plan;
mod world;

pub use plan::{Kind, Plan};
pub use volume::mutant::{Mutant, choose};

use crate::run::{Outcome, Shrunk, caught, shrink_with};
use base::mix;
use std::collections::BTreeSet;
use std::rc::Rc;
use volume::extents::Extent;
use volume::store;
use volume::table::{COPIES, Record, Table};
use volume::{Name, Uuid};
use world::World;

/// Runs a plan.
pub fn run_plan(plan: &Plan, is_tracing: bool) -> Outcome {
    let world = World::new(plan.seed, &plan.shape);
    world.machine.set_tracing(is_tracing);
    world.count(|stats| stats.runs += 1);
    let panicked = caught(|| run_boots(plan, &world, is_tracing));
    let failure = panicked.or_else(|| world.failure());
    Outcome { stats: world.stats.get(), failure }
}

/// Draws the plan of a seed and runs it.
pub fn run_seed(seed: u64, kind: Kind) -> Outcome {
    run_plan(&Plan::draw(seed, kind), false)
}

/// Leaves out steps and boots of a failing plan while it still fails.
pub fn shrink(plan: &Plan, failure: &str) -> Shrunk {
    shrink_with(plan.ids(), plan.boots.len(), failure, |keep, boots| {
        let plan = plan.cut(keep, boots);
        let kept: BTreeSet<u32> = plan.ids();
        (run_plan(&plan, false).failure, kept)
    })
}

fn run_boots(plan: &Plan, world: &Rc<World>, is_tracing: bool) {
    let seed = |number: u64| mix(plan.seed ^ mix(number));
    if !plan.shape.is_created {
        format(world, seed(0));
    }
    // The last boot only looks.
    let last = plan::Boot::default();
    for (number, boot) in plan.boots.iter().chain([&last]).enumerate() {
        if is_tracing {
            println!("boot {number}: {boot:?}");
        }
        boot::run(world, seed(number as u64 + 1), boot, is_tracing);
        if world.failure().is_some() {
            return;
        }
    }
}

/// Writes what [`volume::Pool::create`] writes, but for the size of a unit and a crowd of volumes.
fn format(world: &World, seed: u64) {
    world.machine.power_on();
    let simulation = reactor::Simulation::start(seed, 1);
    let record = |(unit, known): (usize, &world::Known)| Record {
        uuid: known.uuid.expect("it was given one"),
        name: Name::new(&known.name).expect("a name"),
        size: known.size,
        extents: vec![Extent { start: unit as u64, len: 1 }],
    };
    let crowd: Vec<Record> = world.state().volumes.iter().enumerate().map(record).collect();
    for (number, disk) in world.disks.iter().enumerate() {
        for sequence in [1, 2] {
            let table = Table {
                pool: Uuid([number as u8 + 1; 16]),
                name: Name::new("pool").expect("a name"),
                sequence,
                copies: COPIES,
                unit: world.shape.unit,
                data_offset: store::RESERVED,
                units: world.shape.units[number],
                volumes: if number == 0 { crowd.clone() } else { Vec::new() },
            };
            let (disk, bytes) = (disk.clone(), table.encode().expect("a table that is not full"));
            let written = simulation.cores()[0].remote().block_on(move |_| async move {
                let channel = block::Device::open_channel(&disk).expect("a disk with power");
                store::write(&*channel, &bytes, sequence).await
            });
            written.expect("the core runs").expect("a disk with power takes writes");
        }
    }
    world.machine.power_off();
    drop(simulation);
    world.lose_power();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_keep_what_they_have_acknowledged_and_a_seed_means_one_run() {
        for number in 0..40 {
            let (seed, kind) = (number / 2, Kind { faults: number % 2 > 0, moves: number % 4 > 1 });
            let outcome = run_seed(seed, kind);
            assert_eq!(outcome.failure, None, "seed {seed}, {kind:?}");
            assert_eq!(outcome.stats, run_seed(seed, kind).stats, "seed {seed}");
        }
    }

    #[test]
    fn a_failing_run_is_made_small() {
        let plan = Plan::draw(0, Kind::default());
        let failing = plan.ids().into_iter().nth(2).expect("a plan has steps");
        let small = shrink_with(plan.ids(), plan.boots(), "it fails", |keep, boots| {
            let kept = plan.cut(keep, boots).ids();
            (kept.contains(&failing).then(|| "it fails".into()), kept)
        });
        assert_eq!(small.keep, [failing].into());
    }
}
