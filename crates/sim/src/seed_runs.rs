//! Runs of tables (`--tables`) and images (`--images`), which a seed alone describes: replayed,
//! reported, and with broken variants.

use crate::{Args, Search, kill_each};
use sim::{Outcome, images, tables};

/// Runs after which a mutant counts as one that survives.
const MOST_RUNS: u64 = 20_000;

/// Runs a seed of the kind that `args` choose.
pub fn run_seed(args: &Args, seed: u64, is_tracing: bool) -> Outcome {
    match args.images {
        true => images::run_plan(&images::Plan::draw(seed, args.faults), is_tracing),
        false => tables::run_seed(seed),
    }
}

/// Runs a seed again.
pub fn replay(args: &Args, seed: u64) -> bool {
    let outcome = run_seed(args, seed, args.trace);
    println!("{:?}", outcome.stats);
    report(args, seed, &outcome)
}

/// Says what went wrong, and with which command it does so again.
pub fn report(args: &Args, seed: u64, outcome: &Outcome) -> bool {
    let Some(failure) = &outcome.failure else { return true };
    println!("seed {seed} FAILS: {failure}\n  sim --replay {seed}{}", args.filter_text());
    false
}

/// Runs each broken variant of tables until it is caught. Returns whether all are.
pub fn kill_mutants_of_tables(args: &Args) -> bool {
    kill_each(args, &tables::Mutant::ALL, tables::choose, search, |_, seed| tables::run_seed(seed))
}

/// Runs each broken variant of images until it is caught. Returns whether all are.
pub fn kill_mutants_of_images(args: &Args) -> bool {
    kill_each(args, &images::Mutant::ALL, images::choose, search, |_, seed| {
        images::run_seed(seed, args.faults)
    })
}

/// A search for a broken variant.
fn search() -> Search {
    Search::new(0, MOST_RUNS, u64::MAX, None)
}
