//! Runs of pools (`--pools`): replayed, reported, and with broken variants.

use crate::{Args, kill_each, search_of_mutant, set_text};
use sim::{Outcome, pools};

/// Runs a seed again.
pub fn replay(args: &Args, seed: u64) -> bool {
    let plan = pools::Plan::draw(seed, args.kind_of_pools());
    let keep = args.keep.clone().unwrap_or_else(|| plan.ids());
    let plan = plan.cut(&keep, args.boots.unwrap_or(plan.boots()));
    let outcome = pools::run_plan(&plan, args.trace);
    println!("{:?}", outcome.stats);
    report(args, seed, &outcome)
}

/// Says what went wrong, and with which command it does so again.
pub fn report(args: &Args, seed: u64, outcome: &Outcome) -> bool {
    let Some(failure) = &outcome.failure else { return true };
    let command = format!("sim --replay {seed}{}", args.filter_text());
    println!("seed {seed} FAILS: {failure}\n  {command}");
    if !args.no_shrink && args.keep.is_none() {
        let small = pools::shrink(&pools::Plan::draw(seed, args.kind_of_pools()), failure);
        println!("  made small: {}", small.failure);
        println!("  {command} --boots {} --keep '{}' --trace", small.boots, set_text(&small.keep));
    }
    false
}

/// Runs each broken variant until it is caught. Returns whether all are.
pub fn kill_mutants(args: &Args) -> bool {
    let run = |mutant: pools::Mutant, seed| {
        let pools::Kind { faults, moves } = args.kind_of_pools();
        let (faults, moves) = (faults || mutant.needs_faults(), moves || mutant.needs_moves());
        pools::run_seed(seed, pools::Kind { faults, moves })
    };
    kill_each(args, &pools::Mutant::ALL, pools::choose, || search_of_mutant(args), run)
}
