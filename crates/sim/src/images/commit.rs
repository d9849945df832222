//! Commits: the backing file, which is an image too, gets the data of the image while users work.
//! The image keeps its content at each moment. A commit that ends has left it in the backing file.

use super::world::World;
use super::{open_live, power_off};
use crate::user::{Disk, Host, User};
use block::{Channel, Device, Flags, IoError, Op, Request};
use qcow2::{Commit, CommitChannel, LiveImage, Others, Problem};
use reactor::Simulation;
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Most bytes that are copied at a time.
const PART: u64 = 48 << 10;

/// Commits the image to its backing file: first while users work, then without them.
pub fn run(world: &Rc<World>, simulation: &Simulation, image: &Arc<LiveImage>) {
    let commit = match image.begin_commit() {
        Ok(commit) => commit,
        Err(error) => return refused(world, &error.problem),
    };
    let Some(file) = &world.backing else { return };
    let Some(backing) = open_live(world, simulation, file, Others::default(), None, |_| {}) else { return };
    let places = [image, &backing];
    pass(world, simulation, &commit, places);
    simulation.run_until(|| world.users.running() == 0);
    if pass(world, simulation, &commit, places) {
        let disk = Disk { name: "the backing file".into(), ..world.disk.clone() };
        let core = &simulation.cores()[0];
        if let Some(user) = core.with_current(|| User::open(world.clone(), disk, &*backing)) {
            world.users.spawn(core, user.verify());
        }
        simulation.run_until(|| world.users.running() == 0);
    }
    if !world.goes_on() {
        // The backing file is closed when no user has it.
        power_off(world, simulation);
    }
}

/// Copies all parts that the image has. Returns whether the backing file has them, durably.
fn pass(world: &Rc<World>, simulation: &Simulation, commit: &Commit, places: [&Arc<LiveImage>; 2]) -> bool {
    let is_done = Rc::new(Cell::new(false));
    let copy = copy(world.clone(), commit.clone(), places.map(Clone::clone), is_done.clone());
    world.users.spawn(&simulation.cores()[0], Box::pin(copy));
    simulation.run_until(|| is_done.get() || !world.goes_on() || world.users.running() == 0);
    is_done.get() && world.goes_on()
}

async fn copy(world: Rc<World>, commit: Commit, places: [Arc<LiveImage>; 2], is_done: Rc<Cell<bool>>) {
    let [image, backing] = &places;
    let opened = (commit.open_channel(backing.cluster_size()), image.open_channel(), backing.open_channel());
    let (Ok(parts), Ok(image), Ok(backing)) = opened else {
        return if world.machine.is_on() {
            world.fail("a commit does not open".into())
        };
    };
    let mut rest = 0..world.shape.size;
    while world.goes_on() && !rest.is_empty() {
        match copy_next(&parts, &*image, &*backing, rest.clone()).await {
            Ok(end) => rest.start = end,
            Err(error) => return world.job_failed("commit", error),
        }
    }
    match backing.submit(&Request::flush(), 0).await {
        Ok(()) => is_done.set(rest.is_empty()),
        Err(error) => world.job_failed("commit", error),
    }
}

/// Copies the first part of `rest`. Returns its end.
async fn copy_next(
    parts: &CommitChannel,
    image: &dyn Channel,
    backing: &dyn Channel,
    rest: Range<u64>,
) -> Result<u64, IoError> {
    let part = parts.next(rest).await?;
    let len = part.end.min(part.start + PART) - part.start;
    if len == 0 {
        return Ok(part.end);
    }
    let buffer = reactor::current().buffers().take(len as usize).await;
    let (buffer, read) = buffer.transfer(image, Op::Read, Flags::NONE, part.start).await;
    read?;
    if buffer.as_slice().iter().all(|byte| *byte == 0) {
        backing.submit(&Request::write_zeroes(len, Flags::NONE), part.start).await?;
    } else {
        buffer.transfer(backing, Op::Write, Flags::NONE, part.start).await.1?;
    }
    Ok(part.start + len)
}

/// A commit is refused only for a reason.
fn refused(world: &World, problem: &Problem) {
    let has_bitmap = |why: &str| why.contains("dirty bitmaps") && world.bitmap.is_some();
    world.job_refused("commit", problem, has_bitmap);
}
