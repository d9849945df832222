//! Runs of tables (`--tables`): replayed, reported, and with broken variants.

use crate::{Args, Search, kill_each};
use sim::{Outcome, tables};

/// Runs after which a mutant counts as one that survives.
const MOST_RUNS: u64 = 20_000;

/// Runs a seed again.
pub fn replay(args: &Args, seed: u64) -> bool {
    let outcome = tables::run_seed(seed);
    println!("{:?}", outcome.stats);
    report(args, seed, &outcome)
}

/// Says what went wrong, and with which command it does so again.
pub fn report(args: &Args, seed: u64, outcome: &Outcome) -> bool {
    let Some(failure) = &outcome.failure else { return true };
    println!("seed {seed} FAILS: {failure}\n  sim --replay {seed}{}", args.filter_text());
    false
}

/// Runs each broken variant until it is caught. Returns whether all are.
pub fn kill_mutants(args: &Args) -> bool {
    let search = || Search::new(0, MOST_RUNS, u64::MAX, None);
    kill_each(args, &tables::Mutant::ALL, tables::choose, search, |_, seed| tables::run_seed(seed))
}
