//! Images in QEMU's format qcow2 that are written on several simulated cores, with power loss,
//! kills of the process and failing writes.
//!
//! ```text
//!   seed ─► Plan ─► boots: check the image ─► open ─► read the whole disk ─► users write ─► close, or power goes
//! ```
//!
//! After each power loss [`qcow2::check`](mod@qcow2::check) must find a valid image, in which
//! clusters may leak. After a clean end no further ones do. The disk reads as the oracle says:
//! after a kill with a restart log it has all writes that were acknowledged.

mod bitmap;
mod commit;
mod file;
mod plan;
mod snapshots;
mod stream;
mod world;

pub use plan::Plan;

use crate::disk::SimDisk;
use crate::run::{Outcome, caught};
use crate::user::{Host, User};
use base::mix;
use block::Device;
use plan::{Boot, Command};
use qcow2::{Header, Image, LiveImage, Others, Qcow2, Report, RestartLog};
use reactor::Simulation;
use std::rc::Rc;
use std::sync::Arc;
use world::World;

/// A broken variant: of images, or of the tables below them.
pub use qcow2::mutant::{Mutant, choose};

/// Reads on each core during a change of snapshots.
const READS: u64 = 40;

/// Draws the plan of a seed and runs it. `has_faults`: requests to the files fail often.
pub fn run_seed(seed: u64, has_faults: bool) -> Outcome {
    run_plan(&Plan::draw(seed, has_faults), false)
}

/// Runs a plan.
pub fn run_plan(plan: &Plan, is_tracing: bool) -> Outcome {
    let world = World::new(plan);
    world.machine.set_tracing(is_tracing);
    world.count(|stats| stats.runs += 1);
    let panicked = caught(|| run_boots(plan, &world, is_tracing));
    let failure = panicked.or_else(|| world.failure());
    Outcome { stats: world.stats.get(), failure }
}

fn run_boots(plan: &Plan, world: &Rc<World>, is_tracing: bool) {
    // The last boot only looks, and closes the image.
    let last = Boot { has_log: true, ..Boot::default() };
    let mut boots = (1..).zip(plan.boots.iter().chain([&last])).peekable();
    while let Some((number, boot)) = boots.next() {
        if is_tracing {
            println!("boot {number}: {boot:?}");
        }
        let is_logged = boot.has_log && boots.peek().is_some_and(|(_, next)| next.has_log);
        run(world, mix(plan.seed ^ mix(number)), boot, is_logged);
        if world.failure().is_some() {
            return;
        }
    }
}

/// Runs a boot to its end. `is_logged`: it and the next boot have the restart log.
fn run(world: &Rc<World>, seed: u64, boot: &Boot, is_logged: bool) {
    world.begin_boot(boot.is_kill);
    let simulation = Simulation::start(seed, world.shape.cores + 1);
    world.machine.crash_at(boot.crash);
    world.open_backing(&simulation);
    check_backing(world, &simulation);
    let leaks = check(world, &simulation, world.leaks.take());
    stream::look(world, &simulation, true);
    snapshots::check(world, &simulation);
    check_bitmap(world, &simulation, false);
    match world.goes_on().then(|| open(world, &simulation, boot)).flatten() {
        Some(image) => {
            use_image(world, &simulation, boot, &image);
            if world.goes_on() && boot.crash.is_none() {
                let crash = boot.crash_at_end.map(|crash| world.machine.from_now(crash));
                world.machine.crash_at(crash);
                drop(image);
                if world.machine.in_flight() > 0 && world.machine.is_on() {
                    world.fail("the image was closed while requests of it were in flight".into());
                }
                world.machine.crash_at(None);
                stream::look(world, &simulation, true);
                // A write that failed may leave a table and a block that nothing refers to.
                // A search for leaks passes over clusters whose use changes.
                world.are_leaks_freed.set(world.had_session.get() && boot.users.is_empty());
                let more = if boot.failing_write > 0 { 2 } else { 0 };
                let most = leaks.filter(|_| boot.failing == 0).map(|leaks| leaks + more);
                world.leaks.set(check(world, &simulation, most));
                world.are_leaks_freed.set(false);
                check_closed(world, &simulation, boot);
                check_bitmap(world, &simulation, world.shape.fixed.is_none());
            } else {
                power_off(world, &simulation);
                drop(image);
            }
        }
        None => world.count(|stats| stats.early_crashes += 1),
    }
    power_off(world, &simulation);
    world.count(|stats| stats.crashes += 1);
    if world.machine.in_flight() > 0 || world.machine.dropped() > 0 {
        world.fail("a request was dropped or never ended".into());
    }
    drop(simulation);
    world.end_boot(is_logged);
}

/// Turns power off, and waits until every request has ended.
fn power_off(world: &World, simulation: &Simulation) {
    world.machine.power_off();
    simulation.run_until(|| world.users.running() == 0 && world.machine.in_flight() == 0);
}

/// Checks the metadata of the image, in which at most `most` clusters leak if that is known.
/// Returns how many do, unless power goes before. A dirty image may have more, and wrong COPIED
/// bits: the next open repairs it.
fn check(world: &World, simulation: &Simulation, most: Option<u64>) -> Option<u64> {
    let (report, is_dirty, errors) = report(world, simulation, &world.file)?;
    let most = most.filter(|_| !is_dirty);
    if world.are_leaks_freed.get() && (report.leaks > 0 || is_dirty) {
        let leaks = &report.messages;
        world.fail(format!("the image was open since a crash: dirty: {is_dirty}, leaks: {leaks:?}"));
    }
    if errors > 0 || most.is_some_and(|most| report.leaks > most) {
        world.fail(format!("{errors} errors, {} leaks, not {most:?}: {:?}", report.leaks, report.messages));
    }
    Some(report.leaks)
}

/// Checks the metadata of the backing file, if it is an image. Clusters may leak in it.
fn check_backing(world: &World, simulation: &Simulation) {
    let Some(file) = world.backing_image() else { return };
    if let Some((report, _, errors @ 1..)) = report(world, simulation, file) {
        world.fail(format!("{errors} errors of the backing file: {:?}", report.messages));
    }
}

/// Checks the image in `file`, unless power goes before. Returns what was found, whether the image
/// is dirty, and its errors, which COPIED bits of a dirty image are not.
fn report(world: &World, simulation: &Simulation, file: &SimDisk) -> Option<(Report, bool, u64)> {
    let device = file.clone();
    let checked = simulation.cores()[0].remote().block_on(move |_| async move {
        let is_dirty = Image::open_header(&device).await?.is_dirty();
        Ok::<_, qcow2::Error>((qcow2::check(&device).await?, is_dirty))
    });
    if !world.machine.is_on() {
        return None;
    }
    match checked.expect("the core runs") {
        Ok((report, is_dirty)) => {
            let excused = if is_dirty { report.wrong_copied } else { 0 };
            let errors = report.corruptions + report.check_errors - excused;
            Some((report, is_dirty, errors))
        }
        Err(error) => {
            world.fail(format!("{} cannot be checked: {error}", file.name()));
            None
        }
    }
}

/// Checks that the image is not dirty after its end, unless a change of snapshots or a search for
/// leaks has failed.
fn check_closed(world: &World, simulation: &Simulation, boot: &Boot) {
    let file = world.file.clone();
    let header =
        simulation.cores()[0].remote().block_on(move |_| async move { Image::open_header(&file).await });
    let is_dirty = header.expect("the core runs").is_ok_and(|header| header.is_dirty());
    let may_be_dirty = world.is_unsettled.get() || boot.has_failures();
    if world.machine.is_on() && is_dirty && !may_be_dirty {
        world.fail("the image was closed, and is dirty".into());
    }
}

/// Compares the bitmap with the granules that were written, unless it is in use. `was_saved`: it
/// must not be in use.
fn check_bitmap(world: &World, simulation: &Simulation, was_saved: bool) {
    let Some(bitmap) = &world.bitmap else { return };
    let device: Arc<dyn Device> = Arc::new(world.file.clone());
    let others = world.others();
    let read = simulation.cores()[0].remote().block_on(move |_| async move {
        let mut image = Image::open(device).await?;
        image.load_bitmaps().await?;
        Ok::<_, qcow2::Error>((image.bitmaps().await?.len(), Qcow2::new(image, others, 64 << 10)?))
    });
    if !world.machine.is_on() {
        return;
    }
    let (count, disk) = match read.expect("the core runs") {
        Ok(found) => found,
        Err(error) => return world.fail(format!("the bitmap cannot be read: {error}")),
    };
    let loaded = disk.bitmaps().pop();
    if count != 1 || was_saved && bitmap.is_saved.get() && loaded.is_none() {
        world.fail(format!("{count} bitmaps, of which one is in use: {}", loaded.is_none()));
    }
    bitmap.is_saved.set(loaded.is_some());
    let wrong = loaded.and_then(|loaded| {
        let oracle = world.disk.oracle.borrow();
        bitmap.wrong(&oracle, |offset, len| loaded.run(offset, len))
    });
    if let Some(offset) = wrong {
        world.fail(format!("the bitmap has a wrong bit for byte {offset}"));
    }
}

/// Opens the image; `None` when power goes before, or something is wrong.
fn open(world: &World, simulation: &Simulation, boot: &Boot) -> Option<Arc<LiveImage>> {
    let log = boot.has_log.then(|| world.restart_log(boot.seed as u32));
    open_live(world, simulation, &world.file, world.others(), log, |header| {
        world.had_session.set(header.is_some_and(|header| header.session() > 0));
        // An image with writes to restore is not repaired.
        world.is_unsettled.set(header.is_some_and(Header::is_dirty));
    })
}

/// As [`open`], for the image in `file`, whose recovered header `note` gets.
fn open_live(
    world: &World,
    simulation: &Simulation,
    file: &SimDisk,
    others: Others,
    log: Option<RestartLog>,
    note: impl FnOnce(Option<&Header>),
) -> Option<Arc<LiveImage>> {
    let device: Arc<dyn Device> = Arc::new(file.clone());
    let cores = simulation.cores();
    let image = cores[0].remote().block_on(move |_| async move {
        qcow2::recover(&device, log.as_ref()).await?;
        Ok((Image::open(device).await?, log))
    });
    let opened = image.expect("the core runs");
    note(opened.as_ref().ok().map(|(image, _)| &image.header));
    let (home, cache_bytes) = (cores[world.shape.cores].remote(), world.shape.cache_bytes);
    let opened = opened.and_then(|(image, log)| LiveImage::open_on(home, image, others, cache_bytes, log));
    match opened {
        Ok(image) => Some(Arc::new(image)),
        Err(error) => {
            if world.machine.is_on() {
                world.fail(format!("{} does not open: {error}", file.name()));
            }
            None
        }
    }
}

/// Reads everything, then lets users work.
fn use_image(world: &Rc<World>, simulation: &Simulation, boot: &Boot, image: &Arc<LiveImage>) {
    let spawn =
        |core: usize, work: fn(User, u64, u64) -> crate::Local<'static, ()>, requests: u64, seed: u64| {
            let core = &simulation.cores()[core];
            let user = core.with_current(|| User::open(world.clone(), world.disk.clone(), &**image));
            if let Some(user) = user {
                world.users.spawn(core, work(user, requests, seed));
            }
        };
    spawn(0, |user, _, _| Box::pin(user.verify()), 0, 0);
    simulation.run_until(|| world.users.running() == 0);
    if boot.failing_write > 0 {
        world.file.fail_write(boot.failing_write);
    }
    if boot.failing > 0 {
        world.file.fail_often(boot.failing, boot.seed);
        // The other end of a commit is opened, and closed, without errors.
        if let Some(backing) = world.backing.as_ref().filter(|_| !boot.has_commit()) {
            backing.fail_often(boot.failing, mix(boot.seed));
        }
    }
    for (number, requests) in boot.users.iter().enumerate() {
        let seed = mix(boot.seed ^ number as u64);
        spawn(number % world.shape.cores, |user, n, seed| Box::pin(user.work(n, seed)), *requests, seed);
    }
    for step in &boot.steps {
        let goal = world.stats.get().operations + step.after;
        simulation.run_until(|| world.users.running() == 0 || world.stats.get().operations >= goal);
        if world.goes_on() {
            // Reads do not wait, so they load entries meanwhile.
            for core in 0..world.shape.cores {
                let seed = mix(boot.seed ^ goal ^ core as u64);
                spawn(core, |user, n, seed| Box::pin(user.look(n, seed)), READS, seed);
            }
            match step.command {
                Command::Create => snapshots::create(world, simulation, image),
                Command::Delete => snapshots::delete(world, simulation, image),
                Command::Stream => stream::run(world, simulation, image),
                Command::Commit => commit::run(world, simulation, image),
            }
        }
    }
    simulation.run_until(|| world.users.running() == 0);
    // No later write fails: the image must close without an error.
    world.count(|stats| stats.failed_writes += u64::from(world.file.has_failed_write()));
    world.mend();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_write_of_a_short_life_may_fail() {
        for seed in 0..80 {
            let mut plan = Plan::draw(seed, false);
            // The tables of a bitmap are added with refcounts of 16 bits.
            plan.shape.refcount_order = if plan.shape.bitmap.is_some() { 4 } else { 6 };
            plan.shape.has_snapshot = false;
            for failing_write in 1..12 {
                let users = vec![1];
                plan.boots = vec![Boot { seed, users, failing_write, has_log: true, ..Boot::default() }];
                let outcome = run_plan(&plan, false);
                assert_eq!(outcome.failure, None, "seed {seed}, write {failing_write}");
            }
        }
    }

    #[test]
    fn each_write_of_a_change_of_snapshots_may_fail() {
        let nexts = [Command::Create, Command::Stream, Command::Commit];
        for (seed, next) in (0..8).flat_map(|seed| nexts.map(|next| (seed, next))) {
            let mut plan = Plan::draw(seed, false);
            let has_backing = !matches!(next, Command::Create);
            let backing = has_backing.then_some((plan.shape.size / 2) & !4095);
            (plan.shape.bitmap, plan.shape.backing, plan.shape.refcount_order) = (None, backing, 4);
            plan.shape.backing_bits = matches!(next, Command::Commit).then_some(12 + seed as u32 % 4);
            plan.shape.has_snapshot &= !has_backing;
            for failing_write in 1..24 {
                let first = if matches!(next, Command::Commit) { next } else { Command::Create };
                let steps = [first, next].map(|command| plan::Step { after: 0, command });
                let (users, steps) = (vec![1], steps.to_vec());
                let crash_at_end = Some(crate::machine::CrashAt::WriteStarted(1));
                plan.boots =
                    vec![Boot { seed, users, steps, failing_write, crash_at_end, ..Boot::default() }];
                let outcome = run_plan(&plan, false);
                assert_eq!(outcome.failure, None, "seed {seed}, write {failing_write}, {next:?}");
            }
        }
    }

    #[test]
    fn images_stay_valid_and_keep_what_was_acknowledged_and_a_seed_means_one_run() {
        for (seed, has_faults) in (0..60).flat_map(|seed| [(seed, false), (seed, true)]) {
            let outcome = run_seed(seed, has_faults);
            assert_eq!(outcome.failure, None, "seed {seed}, faults: {has_faults}");
            assert_eq!(outcome.stats, run_seed(seed, has_faults).stats, "seed {seed}");
        }
    }
}
