//! Tables of a mapping on simulated cores: a toy format whose entries are numbers of clusters, and
//! users that read, write, discard and move blocks, and make snapshots.
//!
//! ```text
//!   seed ─► World: clusters, the table's disk, what each half of a block may hold
//!             ├─ Toy: the format; loads and saves take time, and saves fail now and then
//!             └─ tasks on two or three cores ─► mapping::View
//! ```
//!
//! A block has two halves in one cluster, so that a change that copies can lose the write of the
//! other half. A cluster that is free holds poison. A reader must find a version of its half that
//! was there at some moment of the read. A snapshot must hold the versions of the moment when
//! changes were held. After a flush the disk must have the entries that were set before.

mod toy;
mod users;
mod world;

pub use mapping::mutant::{Mutant, choose};

use crate::run::{Outcome, caught};
use crate::world::Stats;
use base::{Rng, mix};
use mapping::{Config, Table};
use reactor::{Core, Simulation};
use std::rc::Rc;
use toy::Toy;
use world::World;

/// Simulated time after which a run counts as hung.
const HANGS_NS: u64 = 60_000_000_000;

/// Runs a seed.
pub fn run_seed(seed: u64) -> Outcome {
    let world = World::new();
    let panicked = caught(|| run(&world, seed));
    let stats = Stats { runs: 1, operations: world.operations(), ..Stats::default() };
    Outcome { stats, failure: panicked.or_else(|| world.failure()) }
}

fn run(world: &Rc<World>, seed: u64) {
    let mut rng = Rng::new(mix(seed));
    let count = 2 + rng.below(2) as usize;
    let leaves = 1 + rng.below(6);
    let simulation = Simulation::start(rng.draw(), count);
    let cores: Vec<_> = simulation.cores().iter().map(Core::remote).collect();
    // Not every core owns leaves.
    let owners = &cores[..1 + rng.below(count as u64) as usize];
    let config = Config { entries: world.entries(), cache_bytes: leaves * owners.len() as u64 * 4200 };
    let open = || Rc::new(Table::open(Toy::new(&world.disk), owners, config).expect("a toy opens"));
    let table = open();
    for _ in 0..4 + rng.below(12) {
        let core = &simulation.cores()[rng.below(count as u64) as usize];
        let task = users::work(world.clone(), table.clone(), Rng::new(rng.draw()), 5 + rng.below(40));
        start(world, core, task);
    }
    finish(world, &simulation);
    if world.has_failed() {
        return;
    }
    // The table that is opened again has the entries that were saved.
    start(world, &simulation.cores()[0], users::save(world.clone(), table.clone()));
    finish(world, &simulation);
    drop(table);
    let table = open();
    start(world, &simulation.cores()[count - 1], users::verify(world.clone(), table.clone()));
    finish(world, &simulation);
    drop(table);
}

fn start(world: &Rc<World>, core: &Core, task: impl Future<Output = ()> + 'static) {
    let world = world.clone();
    world.begin();
    core.with_current(|| {
        core.spawn(async move {
            task.await;
            world.end();
        });
    });
}

fn finish(world: &Rc<World>, simulation: &Simulation) {
    let hangs_at = simulation.now_ns() + HANGS_NS;
    simulation.run_until(|| world.running() == 0 || world.has_failed() || simulation.now_ns() > hangs_at);
    if world.running() > 0 && !world.has_failed() {
        world.fail("the tasks do not end".into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_without_a_broken_rule_find_nothing() {
        for seed in 0..200 {
            let outcome = run_seed(seed);
            assert_eq!(outcome.failure, None, "seed {seed}");
            assert!(outcome.stats.operations > 20);
        }
    }
}
