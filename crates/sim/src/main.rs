//! The simulator of the RAID engine: runs seeds, replays one, makes failing ones small, kills
//! mutants.
#![forbid(unsafe_code)]

mod pool_runs;
mod seed_runs;

use clap::Parser;
use sim::{Filter, Outcome, Plan, Stats, Subject};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A run allocates as much as it computes: a quarter of its time went into the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Simulates RAID arrays that crash, lose members and re-add them, and checks that nothing is lost.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Seeds to run, as FIRST..END
    #[arg(long, value_parser = parse_range)]
    seeds: Option<(u64, u64)>,
    /// Run for that many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Run until power has failed that many times
    #[arg(long)]
    crashes: Option<u64>,
    /// First seed; without it the time of day decides
    #[arg(long)]
    from: Option<u64>,
    /// Threads, each with runs of its own
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Only this level; may be given several times
    #[arg(long, value_parser = parse_level)]
    level: Vec<raid::Level>,
    /// Only this consistency mode, where the level has it
    #[arg(long, value_parser = parse_consistency)]
    consistency: Option<raid::Consistency>,
    /// That many simulated cores, whatever the seed says
    #[arg(long)]
    cores: Option<usize>,
    /// Arrays get groups of new members
    #[arg(long)]
    groups: bool,
    /// Arrays grow
    #[arg(long)]
    grow: bool,
    /// Writes come in streams, too
    #[arg(long)]
    streams: bool,
    /// Arrays change their shape
    #[arg(long, conflicts_with_all = ["grow", "groups"])]
    shapes: bool,
    /// Metadata becomes unreadable or rots while power is off, strips become unreadable, and writes
    /// stray
    #[arg(long)]
    faults: bool,
    /// Metadata becomes unreadable or rots while requests run, and log entries that a start needs
    /// become unreadable
    #[arg(long)]
    live_faults: bool,
    /// Two members of a group are lost and replaced together, under the keeper
    #[arg(long, conflicts_with_all = ["grow", "groups", "shapes"])]
    pairs: bool,
    /// Pools of volumes instead of arrays; with --faults, requests to their disks fail often
    #[arg(long, conflicts_with_all = ["grow", "groups", "streams", "shapes", "live_faults", "pairs", "level", "consistency", "cores"])]
    pools: bool,
    /// With --pools: volumes move often
    #[arg(long, requires = "pools")]
    moves: bool,
    /// Tables of a mapping instead of arrays: no power loss, but evictions, moves and snapshots
    #[arg(long, conflicts_with_all = ["grow", "groups", "streams", "shapes", "faults", "live_faults", "pairs", "pools", "directed", "wide", "operations", "create", "level", "consistency", "cores"])]
    tables: bool,
    /// Images in QEMU's format qcow2 instead of arrays; with --faults, requests to their files fail
    /// often
    #[arg(long, conflicts_with_all = ["grow", "groups", "streams", "shapes", "live_faults", "pairs", "pools", "tables", "directed", "wide", "operations", "create", "level", "consistency", "cores"])]
    images: bool,
    /// Runs are short sequences of rare events
    #[arg(long, conflicts_with_all = ["grow", "groups", "shapes", "pairs", "pools"])]
    directed: bool,
    /// With --directed: only this sequence, where the array allows it
    #[arg(long, requires = "directed")]
    story: Option<sim::Story>,
    /// Members are of different sizes and arrays start unsynced; without growth and reshapes,
    /// write-intent bitmaps have several pages
    #[arg(long)]
    wide: bool,
    /// Operators work on arrays, live members are replaced, slots are filled from spares, members
    /// stall
    #[arg(long, conflicts_with_all = ["grow", "groups", "shapes", "pairs", "pools", "directed"])]
    operations: bool,
    /// With --operations: keepers move to other cores, and cores end
    #[arg(long, requires = "operations")]
    handover: bool,
    /// With --operations: commands add spares and former members to arrays that are stopped
    #[arg(long, requires = "operations")]
    offline: bool,
    /// Arrays are created on disks that hold old data, and power fails meanwhile
    #[arg(long, conflicts_with_all = ["grow", "groups", "shapes", "pairs", "pools", "directed"])]
    create: bool,
    /// Run one seed again
    #[arg(long)]
    replay: Option<u64>,
    /// With --replay: only these steps, e.g. 1,4-7
    #[arg(long, value_parser = parse_set)]
    keep: Option<BTreeSet<u32>>,
    /// With --replay: only that many boots
    #[arg(long)]
    boots: Option<usize>,
    /// With --replay: print what happens
    #[arg(long)]
    trace: bool,
    /// Do not make a failing run small
    #[arg(long)]
    no_shrink: bool,
    /// Continue after a failing run
    #[arg(long)]
    keep_going: bool,
    /// Run each broken variant of the engine until it is caught; fail if one is not within
    /// --crashes (100000)
    #[arg(long)]
    mutants: bool,
    /// Only this broken variant
    #[arg(long)]
    mutant: Option<String>,
    /// Replay the runs of this file, before all others: a line is SEED and OPTIONS of --replay, #
    /// and what it found
    #[arg(long)]
    regressions: Option<std::path::PathBuf>,
}

type SubjectMaker = fn() -> Rc<dyn Subject>;
/// Runs a seed.
type Runner<'a> = dyn Fn(u64) -> Outcome + Sync + 'a;

fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let parse = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
    let (first, end) = text.split_once("..").ok_or("FIRST..END is needed")?;
    Ok((parse(first)?, parse(end)?))
}

fn parse_level(text: &str) -> Result<raid::Level, String> {
    raid::Level::from_name(text).ok_or_else(|| format!("{text}: no level"))
}

fn parse_consistency(text: &str) -> Result<raid::Consistency, String> {
    use raid::Consistency::{Bitmap, None, Ppl};
    [None, Bitmap, Ppl].into_iter().find(|mode| mode.name() == text).ok_or_else(|| format!("{text}: no mode"))
}

fn parse_set(text: &str) -> Result<BTreeSet<u32>, String> {
    let mut set = BTreeSet::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let parse = |text: &str| text.parse::<u32>().map_err(|error| format!("{text}: {error}"));
        set.extend(parse(first)?..=parse(last)?);
    }
    Ok(set)
}

/// The steps as [`parse_set`] reads them.
fn set_text(set: &BTreeSet<u32>) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for id in set {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *id => *last = *id,
            _ => parts.push((*id, *id)),
        }
    }
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

impl Args {
    /// Whether a broken variant is to be caught.
    fn is_chosen(&self, mutant: &impl Debug) -> bool {
        self.mutant.as_ref().is_none_or(|name| *name == format!("{mutant:?}"))
    }

    fn filter(&self) -> Filter {
        let Args { consistency, cores, grow, groups, streams, shapes, .. } = *self;
        let Args { faults, live_faults, pairs, directed, story, wide, operations, handover, offline, .. } =
            *self;
        let create = self.create;
        let levels = self.level.clone();
        Filter {
            levels,
            consistency,
            cores,
            grow,
            groups,
            streams,
            shapes,
            faults,
            live_faults,
            pairs,
            directed,
            story,
            wide,
            operations,
            handover,
            offline,
            create,
        }
    }

    fn kind_of_pools(&self) -> sim::pools::Kind {
        sim::pools::Kind { faults: self.faults, moves: self.moves }
    }

    /// The options that a replay needs, too.
    fn filter_text(&self) -> String {
        let levels = self.level.iter().map(|level| format!(" --level {}", level.name()));
        let mode = self.consistency.iter().map(|mode| format!(" --consistency {}", mode.name()));
        let mutant = self.mutant.iter().map(|name| format!(" --mutant {name}"));
        let cores = self.cores.iter().map(|cores| format!(" --cores {cores}"));
        let options = [
            (self.grow, " --grow"),
            (self.groups, " --groups"),
            (self.streams, " --streams"),
            (self.shapes, " --shapes"),
            (self.faults, " --faults"),
            (self.live_faults, " --live-faults"),
            (self.pairs, " --pairs"),
            (self.pools, " --pools"),
            (self.moves, " --moves"),
            (self.tables, " --tables"),
            (self.images, " --images"),
            (self.directed, " --directed"),
            (self.wide, " --wide"),
            (self.operations, " --operations"),
            (self.handover, " --handover"),
            (self.offline, " --offline"),
            (self.create, " --create"),
        ];
        let options = options.into_iter().filter(|(is_set, _)| *is_set).map(|(_, option)| option.to_owned());
        let story = self.story.iter().filter_map(clap::ValueEnum::to_possible_value);
        let story = story.map(|story| format!(" --story {}", story.get_name()));
        levels.chain(mode).chain(cores).chain(options).chain(story).chain(mutant).collect()
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let maker: SubjectMaker = || Rc::new(sim::ArraySubject);
    sim::catch_panics();
    if let Err(error) = choose(args.mutant.as_deref()) {
        eprintln!("sim: {error}");
        return ExitCode::from(2);
    }
    let is_good = match args.replay {
        Some(seed) => replay(&args, seed, maker),
        None if args.mutants && args.pools => pool_runs::kill_mutants(&args),
        None if args.mutants && args.tables => seed_runs::kill_mutants_of_tables(&args),
        None if args.mutants && args.images => seed_runs::kill_mutants_of_images(&args),
        None if args.mutants => {
            kill_mutants(&args, maker)
                & pool_runs::kill_mutants(&args)
                & seed_runs::kill_mutants_of_tables(&args)
                & seed_runs::kill_mutants_of_images(&args)
        }
        None => regressions(&args, maker) && search(&args, maker),
    };
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn choose(name: Option<&str>) -> Result<(), String> {
    let Some(name) = name else { return Ok(()) };
    let mutant = raid::mutant::Mutant::ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
    let of_pools = sim::pools::Mutant::ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
    let of_tables = sim::tables::Mutant::ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
    let of_images = sim::images::Mutant::ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
    if mutant.is_none() && of_pools.is_none() && of_tables.is_none() && of_images.is_none() {
        return Err(format!("{name}: no such mutant"));
    }
    raid::mutant::choose(mutant);
    sim::pools::choose(of_pools);
    sim::tables::choose(of_tables);
    sim::images::choose(of_images);
    Ok(())
}

fn replay(args: &Args, seed: u64, maker: SubjectMaker) -> bool {
    if args.pools {
        return pool_runs::replay(args, seed);
    }
    if args.tables || args.images {
        return seed_runs::replay(args, seed);
    }
    let mut plan = Plan::draw(seed, &args.filter());
    let boots = args.boots.unwrap_or(plan.boots.len());
    let keep = args.keep.clone().unwrap_or_else(|| plan.ids().into_iter().collect());
    plan = sim::cut(&plan, &keep, boots);
    if args.trace {
        println!("{:#?}", plan.shape);
    }
    let outcome = sim::run_plan(&plan, &maker(), args.trace);
    println!("{:?}", outcome.stats);
    report(args, seed, &outcome, maker)
}

/// Says what went wrong, and with which command it does so again.
fn report(args: &Args, seed: u64, outcome: &Outcome, maker: SubjectMaker) -> bool {
    let Some(failure) = &outcome.failure else { return true };
    let filter = args.filter_text();
    println!("seed {seed} FAILS: {failure}");
    let plan = Plan::draw(seed, &args.filter());
    let shape = &plan.shape;
    println!(
        "  level {} {:?} {} blocks of {} cores {}",
        shape.level.name(),
        shape.geometry,
        shape.consistency.name(),
        shape.block_size,
        shape.cores
    );
    println!("  sim --replay {seed}{filter}");
    if !args.no_shrink && args.keep.is_none() {
        let small = sim::shrink(&plan, &maker(), failure);
        println!("  made small: {}", small.failure);
        let (boots, keep) = (small.boots, set_text(&small.keep));
        println!("  sim --replay {seed}{filter} --boots {boots} --keep '{keep}' --trace");
    }
    false
}

fn regressions(args: &Args, maker: SubjectMaker) -> bool {
    let Some(path) = &args.regressions else { return true };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("sim: {}: {error}", path.display());
            return false;
        }
    };
    let mut is_good = true;
    for line in text.lines().filter(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty()) {
        // A line is what follows `sim --replay`, then what it found.
        let options = line.split('#').next().unwrap_or_default().split_whitespace();
        let run = match Args::try_parse_from(["sim", "--replay"].into_iter().chain(options)) {
            Ok(run) => run,
            Err(error) => {
                eprintln!("sim: {}: {line}: {error}", path.display());
                return false;
            }
        };
        is_good &= replay(&run, run.replay.unwrap_or_default(), maker);
    }
    is_good
}

/// Counts of all threads.
struct Search {
    next: AtomicU64,
    end: u64,
    crashes: u64,
    deadline: Option<Instant>,
    is_over: AtomicBool,
    stats: Mutex<Stats>,
    failures: Mutex<Vec<(u64, Outcome)>>,
}

impl Search {
    fn new(first: u64, end: u64, crashes: u64, seconds: Option<u64>) -> Search {
        Search {
            next: AtomicU64::new(first),
            end,
            crashes,
            deadline: seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds)),
            is_over: AtomicBool::new(false),
            stats: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    /// Runs seeds until the search is over.
    fn work(&self, run: &Runner<'_>, keeps_going: bool) {
        while !self.is_over.load(Ordering::Relaxed) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end || self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
                break;
            }
            let outcome = run(seed);
            let mut stats = self.stats.lock().expect("no panic under this lock");
            stats.add(&outcome.stats);
            if stats.crashes >= self.crashes {
                self.is_over.store(true, Ordering::Relaxed);
            }
            drop(stats);
            if outcome.failure.is_some() {
                self.failures.lock().expect("no panic under this lock").push((seed, outcome));
                self.is_over.fetch_or(!keeps_going, Ordering::Relaxed);
            }
        }
        block::release_pool();
    }

    fn run(&self, jobs: usize, run: &Runner<'_>, keeps_going: bool) {
        std::thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| self.work(run, keeps_going));
            }
        });
    }
}

fn search(args: &Args, maker: SubjectMaker) -> bool {
    let started = Instant::now();
    let of_day = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |now| now.as_nanos() as u64) >> 8 << 8
    };
    let first = args.from.unwrap_or_else(|| if args.seconds.is_some() { of_day() } else { 0 });
    let (first, end) = args.seeds.unwrap_or((first, u64::MAX));
    let crashes = args.crashes.unwrap_or(u64::MAX);
    if args.seeds.is_none() && args.seconds.is_none() && args.crashes.is_none() {
        return args.regressions.is_some();
    }
    let search = Search::new(first, end, crashes, args.seconds);
    let filter = args.filter();
    let run = |seed| match (args.pools, args.tables || args.images) {
        (true, _) => sim::pools::run_seed(seed, args.kind_of_pools()),
        (_, true) => seed_runs::run_seed(args, seed, false),
        _ => sim::run_seed(seed, &filter, &maker()),
    };
    search.run(args.jobs, &run, args.keep_going);
    let stats = search.stats.into_inner().expect("no panic under this lock");
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "seeds from {first}: {stats:?}; {seconds:.1} s, {:.0} crashes/s",
        stats.crashes as f64 / seconds
    );
    let failures = search.failures.into_inner().expect("no panic under this lock");
    for (seed, outcome) in &failures {
        match (args.pools, args.tables || args.images) {
            (true, _) => pool_runs::report(args, *seed, outcome),
            (_, true) => seed_runs::report(args, *seed, outcome),
            _ => report(args, *seed, outcome, maker),
        };
    }
    failures.is_empty()
}

/// Crashes after which a mutant counts as one that survives.
const MOST_CRASHES: u64 = 100_000;

/// A search for a broken variant of the engine.
fn search_of_mutant(args: &Args) -> Search {
    Search::new(0, u64::MAX, args.crashes.unwrap_or(MOST_CRASHES), None)
}

fn kill_mutants(args: &Args, maker: SubjectMaker) -> bool {
    let run = |mutant: raid::mutant::Mutant, seed| {
        let grow = args.grow || mutant.is_about_growth();
        let groups = args.groups || mutant.is_about_groups();
        let streams = args.streams || mutant.is_about_streams();
        let shapes = args.shapes || mutant.is_about_shapes();
        let wide = args.wide || mutant.is_about_looks();
        let faults = args.faults || mutant.is_about_looks();
        let operations = args.operations || mutant.is_about_operations();
        let create = args.create || mutant.is_about_creation();
        let story = args.story.or(sim::Story::of(mutant));
        let directed = args.directed || story.is_some();
        let filter = Filter { grow, groups, streams, shapes, directed, story, ..args.filter() };
        let filter = Filter { wide, faults, operations, create, ..filter };
        sim::run_seed(seed, &filter, &maker())
    };
    kill_each(args, &raid::mutant::Mutant::ALL, raid::mutant::choose, || search_of_mutant(args), run)
}

/// Runs each broken variant that is chosen, until `run` catches it or `search` is over. Returns
/// whether all are caught.
fn kill_each<M: Copy + Debug + Sync>(
    args: &Args,
    all: &[M],
    choose: fn(Option<M>),
    search: impl Fn() -> Search,
    run: impl Fn(M, u64) -> Outcome + Sync,
) -> bool {
    let mut are_killed = true;
    for mutant in all.iter().copied().filter(|mutant| args.is_chosen(mutant)) {
        choose(Some(mutant));
        let search = search();
        search.run(args.jobs, &|seed| run(mutant, seed), false);
        let Stats { runs, crashes, .. } = search.stats.into_inner().expect("no panic under this lock");
        match search.failures.into_inner().expect("no panic under this lock").first() {
            Some((seed, Outcome { failure, .. })) => {
                let failure: String = failure.as_deref().unwrap_or_default().chars().take(300).collect();
                println!("{mutant:?}: killed after {runs} runs, {crashes} crashes, seed {seed}: {failure}");
            }
            None => {
                println!("{mutant:?}: SURVIVES {runs} runs, {crashes} crashes");
                are_killed = false;
            }
        }
    }
    choose(None);
    are_killed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_mutant_chooses_it_alone() {
        let name = format!("{:?}", raid::mutant::Mutant::ALL[0]);
        let args = Args::parse_from(["sim", "--mutants", "--mutant", &name]);
        assert!(args.is_chosen(&raid::mutant::Mutant::ALL[0]));
        assert!(!args.is_chosen(&raid::mutant::Mutant::ALL[1]));
        assert!(!sim::pools::Mutant::ALL.iter().any(|mutant| args.is_chosen(mutant)));
    }
}
