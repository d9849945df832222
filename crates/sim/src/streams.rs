//! Streams: concurrent sequential writes that are not aligned to stripes. The array joins writes to
//! the same stripe.
//!
//! A stream wraps around the array, so that it lasts longer than a few stripes. Its caller takes
//! the next place when it submits, as the kernel does in writeback.

use crate::client::Client;
use crate::oracle::SECTOR;
use crate::plan::{Action, Plan, Shape, Step};
use base::Rng;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// Adds one or two streams to every other boot of a plan, in addition to its other steps.
pub fn draw(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(10);
    let mut next_id = plan.ids().into_iter().max().unwrap_or(0) + 1;
    for boot in &mut plan.boots {
        let streams = if rng.one_in(2) { 0 } else { rng.range(1, 3) };
        for _ in 0..streams {
            let worker = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(0);
            let delay_ns = if rng.one_in(2) { 0 } else { rng.log_uniform(20 * plan.shape.latency_ns) };
            let action = stream(&mut rng, &plan.shape);
            boot.steps.push(Step { id: next_id, worker, delay_ns, action });
            next_id += 1;
        }
    }
}

fn stream(rng: &mut Rng, shape: &Shape) -> Action {
    let unit = u64::from(shape.block_size) / SECTOR as u64;
    let stripe = shape.geometry.stripe_bytes() / SECTOR as u64;
    let sectors = shape.geometry.capacity() / SECTOR as u64;
    let count = (1 + rng.log_uniform(2 * stripe)).next_multiple_of(unit).min(sectors);
    // A window of several stripes as often as one that is smaller than a stripe.
    let depth = (1 + rng.log_uniform(4 * stripe) / count).clamp(2, 32);
    let lba = rng.below(sectors - count + 1) / unit * unit;
    let writes = (depth + rng.below(8 * stripe) / count).min(128);
    Action::Stream { lba, count, writes, depth, is_fua: rng.one_in(4) }
}

/// Start positions of a stream's writes: adjacent, wrapping to the front at the end.
struct Places {
    next: Cell<u64>,
    left: Cell<u64>,
    count: u64,
    sectors: u64,
}

impl Places {
    fn take(&self) -> Option<u64> {
        let left = self.left.get().checked_sub(1)?;
        self.left.set(left);
        let lba = if self.next.get() + self.count > self.sectors { 0 } else { self.next.get() };
        self.next.set(lba + self.count);
        Some(lba)
    }
}

/// Writes a stream; returns when its last write has ended.
pub async fn run(client: &Client, (lba, count): (u64, u64), (writes, depth): (u64, u64), is_fua: bool) {
    let places = Places { next: Cell::new(lba), left: Cell::new(writes), count, sectors: client.sectors() };
    let one_after_the_other = || async {
        while client.is_on()
            && let Some(lba) = places.take()
        {
            client.write(lba, count, is_fua, 0).await;
        }
    };
    let mut running: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
    running.extend((0..depth).map(|_| Box::pin(one_after_the_other()) as _));
    std::future::poll_fn(|cx| {
        running.retain_mut(|task| task.as_mut().poll(cx).is_pending());
        if running.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}
