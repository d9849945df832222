//! Cost of the RAID engine on members without cost, its use of modelled drives, and its rebuild; or
//! its speed under the loads that SPDK's arrays are measured with.
//!
//! Each round measures every case once, so that a drift of the machine affects all equally. Prints
//! a line of JSON for each case with its description, the result of every round, and the
//! theoretical limit.

mod cases;
mod load;
mod rebuild;

use benches::array::Members;
use block::{Device, Op};
use cases::Case;
use clap::Parser;
use serde_json::{Value, json};
use std::sync::Arc;

/// Command line.
#[derive(Parser)]
struct Args {
    /// Seconds for each case and round.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Number of rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only cases whose names contain this text.
    #[arg(long, default_value = "")]
    only: String,
    /// Measure rates in seconds of the cores' own time, which excludes other programs on the
    /// machine. Not for modelled drives, which wait.
    #[arg(long)]
    cpu_time: bool,
    /// Only modelled drives, in virtual time: the array's share of their speed, however busy the
    /// machine is.
    #[arg(long, conflicts_with = "cpu_time")]
    virtual_time: bool,
    /// Only the arrays and loads that SPDK has, too.
    #[arg(long, conflicts_with = "virtual_time")]
    peer: bool,
}

/// Cases that are not a load on a clean array.
const REBUILD: &str = "rebuild: speed";
const FOREGROUND: [(&str, Op); 2] =
    [("rebuild: foreground read 4K", Op::Read), ("rebuild: foreground write 4K", Op::Write)];

fn main() {
    let args = Args::parse();
    let is_wanted =
        |name: &str| name.contains(&args.only) && (!args.virtual_time || name.starts_with("drives"));
    let cases: Vec<Case> = match args.peer {
        true => cases::peer(),
        false => cases::engine().into_iter().chain(cases::drives()).collect(),
    };
    let cases: Vec<Case> = cases.into_iter().filter(|case| is_wanted(&case.name())).collect();
    let mut rates = vec![Vec::new(); cases.len()];
    let mut rebuilds: Vec<(&str, Vec<Value>)> = Vec::new();
    for round in 0..args.rounds {
        for (case, rates) in cases.iter().zip(&mut rates) {
            rates.push(measure(case, &args));
        }
        let mut keep = |name, measure: &dyn Fn() -> Value| {
            if args.peer || !is_wanted(name) {
                return;
            }
            if round == 0 {
                rebuilds.push((name, Vec::new()));
            }
            let of_name = rebuilds.iter_mut().find(|(other, _)| *other == name);
            of_name.expect("added in the first round").1.push(measure());
        };
        keep(REBUILD, &rebuild::speed);
        for (name, op) in FOREGROUND {
            keep(name, &|| rebuild::foreground(op, args.seconds));
        }
        eprintln!("  round {} of {} done", round + 1, args.rounds);
    }
    for (case, rates) in cases.iter().zip(rates) {
        println!("{}", line(case, &rates));
    }
    for (name, rounds) in rebuilds {
        println!("{}", json!({ "table": "rebuild", "name": name, "rounds": rounds }));
    }
}

fn measure(case: &Case, args: &Args) -> f64 {
    let plan = case.plan;
    if args.virtual_time {
        return load::run_in_virtual_time(plan, case.load, args.seconds);
    }
    let array: Arc<dyn Device> = reactor::run(async move {
        let array = plan.start().await;
        if matches!(plan.members, Members::Memory(_)) {
            rebuild::fill(&array).await;
        }
        array
    });
    load::run(&array, case.load, args.seconds, args.cpu_time)
}

fn line(case: &Case, rates: &[f64]) -> Value {
    json!({
        "table": case.table,
        "name": case.name(),
        "array": case.array,
        "mode": case.plan.consistency.name(),
        "load": case.load_name,
        "cores": case.load.cores,
        "op": if case.load.op == Op::Read { "read" } else { "write" },
        "len": case.load.len,
        "depth": case.load.depth,
        "rounds": rates,
        "theory": case.theory,
    })
}
