//! Runs of plans, and what came of them.

use crate::boot::{self, Script};
use crate::plan::{Filter, Plan};
use crate::subject::Subject;
use crate::world::{Stats, World};
use base::mix;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Counts.
    pub stats: Stats,
    /// The first failure, if there is one.
    pub failure: Option<String>,
}

thread_local! {
    /// The last panic of this thread: message and place.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps panics of simulated runs to be reported with their seed. Call once, before runs.
pub fn catch_panics() {
    std::panic::set_hook(Box::new(|info| {
        let text = info.to_string().replace('\n', " ");
        PANIC.with(|panic| panic.borrow_mut().get_or_insert(text).truncate(2000));
    }));
}

/// Runs a plan on a subject.
pub fn run_plan(plan: &Plan, subject: &Rc<dyn Subject>, is_tracing: bool) -> Outcome {
    let world = World::new(plan.seed, &plan.shape, subject.capacity(&plan.shape));
    world.machine.set_tracing(is_tracing);
    world.count(|stats| stats.runs += 1);
    let panicked = caught(|| run_boots(plan, &world, subject, is_tracing));
    let failure = panicked.or_else(|| world.failure());
    Outcome { stats: world.stats.get(), failure }
}

/// Runs `work`. Returns the text of its panic, if it panics.
pub(crate) fn caught(work: impl FnOnce()) -> Option<String> {
    let ran = catch_unwind(AssertUnwindSafe(work));
    let panicked = PANIC.with(RefCell::take);
    ran.err().map(|_| panicked.unwrap_or_else(|| "a panic".into()))
}

fn run_boots(plan: &Plan, world: &Rc<World>, subject: &Rc<dyn Subject>, is_tracing: bool) {
    let seed = |number: u64| mix(plan.seed ^ mix(number));
    let crashes = plan.shape.creation.iter().flat_map(|creation| &creation.crashes);
    for (i, crash) in crashes.map(|crash| Some(*crash)).chain([None]).enumerate() {
        let script = Script::Create { crash, is_first: i == 0 };
        if !boot::run(world, subject, mix(seed(0) ^ i as u64), script, is_tracing) {
            return;
        }
        if world.is_created() {
            break;
        }
    }
    for (i, boot) in plan.boots.iter().enumerate() {
        if !boot::run(world, subject, seed(i as u64 + 1), Script::Boot(boot.clone()), is_tracing) {
            return;
        }
    }
    boot::run(world, subject, seed(u64::MAX), Script::Epilogue, is_tracing);
}

/// A failing run made small.
pub struct Shrunk {
    /// Steps that are left.
    pub keep: BTreeSet<u32>,
    /// Boots that are left.
    pub boots: usize,
    /// The failure that it still shows.
    pub failure: String,
}

/// Most runs that shrinking makes.
const MOST_TRIES: usize = 600;

/// Leaves out steps and boots of a failing plan while it still fails.
pub fn shrink(plan: &Plan, subject: &Rc<dyn Subject>, failure: &str) -> Shrunk {
    let ids = plan.ids().into_iter().collect();
    shrink_with(ids, plan.boots.len(), failure, |keep, boots| {
        let plan = cut(plan, keep, boots);
        let kept = plan.ids().into_iter().collect();
        (run_plan(&plan, subject, false).failure, kept)
    })
}

/// Leaves out steps and boots while a run still fails. `run` says of the steps and boots that it is
/// given how they fail, and which of the steps there are in those boots.
pub(crate) fn shrink_with(
    ids: BTreeSet<u32>,
    boots: usize,
    failure: &str,
    mut run: impl FnMut(&BTreeSet<u32>, usize) -> (Option<String>, BTreeSet<u32>),
) -> Shrunk {
    let mut best = Shrunk { keep: ids, boots, failure: failure.into() };
    let mut tries = 0;
    let mut fails = |keep: &BTreeSet<u32>, boots: usize| {
        tries += 1;
        if tries > MOST_TRIES { None } else { run(keep, boots).0 }
    };
    while best.boots > 0
        && let Some(failure) = fails(&best.keep, best.boots - 1)
    {
        best.boots -= 1;
        best.failure = failure;
    }
    let mut part = best.keep.len();
    while part > 0 {
        let ids: Vec<u32> = best.keep.iter().copied().collect();
        let mut has_shrunk = false;
        for chunk in ids.chunks(part) {
            let keep: BTreeSet<u32> = best.keep.iter().copied().filter(|id| !chunk.contains(id)).collect();
            if let Some(failure) = fails(&keep, best.boots) {
                (best.keep, best.failure, has_shrunk) = (keep, failure, true);
            }
        }
        if !has_shrunk || part > best.keep.len() {
            part /= 2;
        }
    }
    best.keep = run(&best.keep, best.boots).1;
    best
}

/// The plan with those steps in its first `boots` boots.
pub fn cut(plan: &Plan, keep: &BTreeSet<u32>, boots: usize) -> Plan {
    let mut plan = plan.only(keep);
    plan.boots.truncate(boots);
    plan
}

/// Draws the plan of a seed and runs it.
pub fn run_seed(seed: u64, filter: &Filter, subject: &Rc<dyn Subject>) -> Outcome {
    run_plan(&Plan::draw(seed, filter), subject, false)
}
