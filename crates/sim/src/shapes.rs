//! Reshapes: a stopped array begins to change its level or number of members, with data on its
//! disks, and continues while it serves.
//!
//! Power fails at any write of the beginning, or not, and later as at any other time. As long as
//! the array has its old shape, the reshape is tried again with the same disks. Once it has begun
//! it cannot be undone, and every byte must be unchanged.

use crate::growth::request;
use crate::machine::CrashAt;
use crate::newcomers::event;
use crate::oracle::SECTOR;
use crate::plan::{Action, Newcomers, Next, Plan, RESERVE_STRIPS, Shape, Step};
use base::Rng;
use raid::Level;
use raid::metadata::Reshape;

/// Levels whose arrays are reshaped.
pub const LEVELS: [Level; 4] = [Level::Raid5, Level::Raid6, Level::Raid7, Level::NPlusM];

/// Adds a reshape to a plan from some boot on, requests to the whole array, and events for new
/// members.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(11);
    let Some(next) = choose(&mut rng, &plan.shape) else { return };
    plan.shape.take(next);
    let shape = plan.shape.clone();
    let old = shape.members();
    let everywhere = 0..next.geometry(&shape).capacity() / SECTOR as u64;
    let members = next.data + next.parity;
    let mut ids = plan.ids().into_iter().max().unwrap_or(0) + 1..;
    let mut id = || ids.next().expect("numbers do not end");
    let writes = (12 * (members - old) + 8 * members) as u64;
    let first = rng.below(plan.boots.len() as u64) as usize;
    for boot in &mut plan.boots[first..] {
        let mut step =
            |worker: usize, delay_ns: u64, action: Action| Step { id: id(), worker, delay_ns, action };
        let workers = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(1);
        if !rng.one_in(4) {
            let delay_ns = rng.log_uniform(20 * shape.latency_ns);
            boot.steps.push(step(workers, delay_ns, Action::Reshape));
        }
        for _ in 0..rng.below(16) {
            let worker = rng.below(workers as u64) as usize;
            let delay_ns = if rng.one_in(2) { 0 } else { rng.log_uniform(20 * shape.latency_ns) };
            boot.steps.push(step(worker, delay_ns, request(&mut rng, &shape, &everywhere)));
        }
        if members > old && rng.one_in(3) {
            let delay_ns = rng.log_uniform(20 * shape.latency_ns);
            let slot = old + rng.below((members - old) as u64) as usize;
            boot.steps.push(step(workers + 1, delay_ns, event(&mut rng, slot)));
        }
        let crash = match rng.below(4) {
            0 | 1 => None,
            2 => Some(CrashAt::WriteEnded(1 + rng.below(writes))),
            _ => Some(CrashAt::WriteStarted(1 + rng.below(writes))),
        };
        boot.newcomers = Some(Newcomers { id: id(), crash });
    }
}

/// The next shape of an array; `None` when it keeps its shape.
fn choose(rng: &mut Rng, shape: &Shape) -> Option<Next> {
    let (data, parity) = (shape.geometry.data, shape.geometry.parity);
    let more = data + 1 + rng.below(2) as usize;
    let ways: &[(Level, usize, usize)] = match shape.level {
        Level::Raid5 => &[(Level::Raid5, more, 1), (Level::Raid6, data, 2), (Level::Raid6, more, 2)],
        Level::Raid6 => &[
            (Level::Raid6, more, 2),
            (Level::Raid7, data, 3),
            (Level::Raid7, data + 1, 3),
            (Level::Raid5, data + 1, 1),
        ],
        Level::Raid7 => &[(Level::Raid7, more, 3)],
        Level::NPlusM => &[(Level::NPlusM, more, parity)],
        _ => return None,
    };
    let (level, data, parity) = rng.pick(ways);
    let next = Next { level, data, parity };
    let new_rows = Reshape::unit_strips(shape.geometry.data, data) / data as u64;
    (new_rows <= RESERVE_STRIPS).then_some(next)
}
