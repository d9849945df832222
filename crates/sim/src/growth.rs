//! Growth: disks become larger between or under requests, and the array with them.
//!
//! The added space is written and read like everything else. Power goes during growth as at any
//! other time: afterwards the array has its old size or its new one, and the new one if growth was
//! acknowledged.

use crate::array::config;
use crate::oracle::SECTOR;
use crate::plan::{Action, Plan, Shape, Step};
use crate::subject::Running;
use crate::world::World;
use base::Rng;
use raid::Geometry;
use raid::metadata::Layout;
use std::ops::Range;
use std::rc::Rc;

/// The least by which a disk grows: less is not worth moving superblocks for.
const LEAST_BYTES: u64 = 24 << 10;

/// The shape that an array has once its disks have grown by `bytes`.
fn grown(shape: &Shape, bytes: u64) -> Geometry {
    let strip = u64::from(shape.geometry.strip_bytes);
    let layout = Layout::new(shape.disk_bytes, &config(shape, raid::Uuid::default()));
    let data_bytes = layout.map(|layout| layout.grown(shape.disk_bytes + bytes).data_bytes);
    let group_stripes = data_bytes.map_or(shape.geometry.group_stripes, |bytes| bytes / strip);
    Geometry { group_stripes, ..shape.geometry }
}

/// Adds growth to a plan: once or twice, with requests to what is added.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(9);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    let mut bytes = 0;
    let mut first_boot = 0;
    // One after the other, as an administrator does it.
    let mut last: Option<(usize, usize)> = None;
    for _ in 0..rng.range(1, 3) {
        let by = LEAST_BYTES + 4096 * rng.below(16);
        let boot = rng.range(first_boot, plan.boots.len() as u64) as usize;
        bytes += by;
        let after = grown(&plan.shape, bytes);
        let free = plan.boots[boot].steps.iter().map(|step| step.worker + 1).max().unwrap_or(0);
        let worker = last.filter(|(other, _)| *other == boot).map_or(free, |(_, worker)| worker);
        last = Some((boot, worker));
        let mut step = |worker: usize, delay_ns: u64, action: Action| {
            next_id += 1;
            Step { id: next_id - 1, worker, delay_ns, action }
        };
        let delay_ns = rng.log_uniform(20 * plan.shape.latency_ns);
        plan.boots[boot].steps.push(step(worker, delay_ns, Action::Grow(by)));
        for later in boot..plan.boots.len() {
            for _ in 0..rng.below(6) {
                let worker = if later == boot { worker } else { rng.below(worker as u64 + 1) as usize };
                let action = request(&mut rng, &plan.shape, &around_the_end(&plan.shape, &after));
                plan.boots[later].steps.push(step(worker, 0, action));
            }
        }
        first_boot = boot as u64;
        plan.shape.most_stripes = after.group_stripes;
    }
}

/// The last stripe of the old shape and everything behind it, in sectors.
pub fn around_the_end(shape: &Shape, after: &Geometry) -> Range<u64> {
    let stripe = shape.geometry.stripe_bytes() / SECTOR as u64;
    let (old, new) = (shape.geometry.capacity() / SECTOR as u64, after.capacity() / SECTOR as u64);
    old - stripe.min(old)..new
}

/// Up to two stripes or so that begin among some sectors and end there: first sector, sectors.
pub fn place(rng: &mut Rng, shape: &Shape, among: &Range<u64>) -> (u64, u64) {
    let unit = u64::from(shape.block_size) / SECTOR as u64;
    let stripe = shape.geometry.stripe_bytes() / SECTOR as u64;
    let lba = (among.start + rng.below(among.end - among.start)) / unit * unit;
    let count = (1 + rng.log_uniform(2 * stripe)).next_multiple_of(unit).min(among.end - lba);
    (lba, count)
}

/// A request among some sectors.
pub fn request(rng: &mut Rng, shape: &Shape, among: &Range<u64>) -> Action {
    let (lba, count) = place(rng, shape, among);
    match rng.below(8) {
        0 | 1 => Action::Read { lba, count },
        2 => Action::WriteZeroes { lba, count },
        3 => Action::Discard { lba, count },
        _ => Action::Write { lba, count, is_fua: rng.one_in(4), change_ns: 0 },
    }
}

/// All disks become larger, absent ones too, and a command lets the array use the space.
pub async fn run(world: &Rc<World>, running: &Rc<dyn Running>, bytes: u64) {
    world.grow_disks(bytes);
    let was_whole = world.is_whole() && !running.live().contains(&false);
    let result = running.grow().await;
    if !world.machine.is_on() {
        return;
    }
    let has_reason = !was_whole || !world.is_whole() || world.has_reason() || world.is_any_beyond();
    match result {
        Ok(()) => {
            world.note_geometry(running.geometry(), running.device().limits().capacity);
            world.count(|stats| stats.growths += 1);
        }
        // A member may be missing, or fail meanwhile.
        Err(_) if has_reason || running.live().contains(&false) => {}
        Err(error) => world.fail(format!("growth: {error}")),
    }
}
