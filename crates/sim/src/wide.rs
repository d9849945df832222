//! Wide runs: arrays that are not alike in every respect, as those of other runs are.
//!
//! - Members are not of one size.
//! - Members cannot be zeroed cheaply: they hold garbage, and parity was never made. So a sector
//!   that was never written may hold anything. A sector that was written follows the same rules as
//!   everywhere, whichever members are lost before the initial sync has ended.
//! - The write-intent bitmap has two pages.
//! - Before some boots the array is started read-only and read. That must not write to any disk.

use crate::growth;
use crate::oracle::SECTOR;
use crate::plan::{Filter, Plan, Shape, Step};
use base::Rng;
use raid::metadata::layout::REGIONS_PER_PAGE;

/// Most units of 4 KiB by which a disk is larger than the smallest.
const MORE_UNITS: u64 = 64;
/// Stripes of an array with two pages that have their regions in the second one, at most.
const SECOND_PAGE: u64 = 100;

/// Draws what is unlike about the array of a run. Before its boots are drawn.
pub fn widen(shape: &mut Shape, rng: &mut Rng, filter: &Filter) {
    shape.is_unsynced = rng.one_in(2) && shape.geometry.parity > 0;
    if rng.one_in(2) {
        shape.more_bytes = (0..shape.most_members()).map(|_| rng.below(MORE_UNITS) * 4096).collect();
    }
    let is_changed = filter.grow || filter.groups || filter.shapes;
    // An array grows as far as its smallest member.
    if let (true, Some(least)) = (is_changed, shape.more_bytes.iter().min().copied()) {
        shape.more_bytes.iter_mut().for_each(|bytes| *bytes -= least);
    }
    // They take long: a directed run writes every stripe, and a reshape moves them all.
    let has_pages = rng.one_in(32) && !filter.directed && !is_changed;
    if has_pages {
        shape.have_pages(REGIONS_PER_PAGE + 1 + rng.below(SECOND_PAGE));
    }
}

/// Adds read-only starts, and requests to the regions of the second page.
pub fn draw(plan: &mut Plan) {
    let shape = plan.shape.clone();
    let mut looks = Rng::new(plan.seed).fork(16);
    plan.boots.iter_mut().for_each(|boot| boot.is_looked_at = looks.one_in(3));
    if shape.geometry.group_stripes <= REGIONS_PER_PAGE {
        return;
    }
    let mut rng = Rng::new(plan.seed).fork(15);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    let sectors = shape.geometry.capacity() / SECTOR as u64;
    let last = SECOND_PAGE * shape.geometry.stripe_bytes() / SECTOR as u64;
    for boot in &mut plan.boots {
        let workers = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(1);
        for _ in 0..rng.below(12) {
            let worker = rng.below(workers as u64) as usize;
            let action = growth::request(&mut rng, &shape, &(sectors - last..sectors));
            boot.steps.push(Step { id: next_id, worker, delay_ns: 0, action });
            next_id += 1;
        }
    }
}
