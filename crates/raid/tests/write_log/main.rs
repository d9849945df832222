//! The tests log every write to the members of small arrays over their life: created, written to, a
//! member failed and replaced, a live one replaced, stopped, started. Then they replay the log up
//! to every point where more became durable: every write with FUA, every flush. At each point,
//! writes in flight survive in several ways, whole or torn, and a member may be missing. The
//! resulting disks must assemble with every member, hold every acknowledged write, and check clean
//! after recovery.
//!
//! The same moments are replayed with damaged metadata (`sweep.rs`): blocks that are unreadable, or
//! have other content.
//!
//! The method is that of dm-log-writes, but the log also has the knowledge of the array's user at
//! each moment, and a run is deterministic.

mod disk;
mod replay;
mod story;
mod sweep;

use disk::{Event, Log};
use raid::{Consistency, Level};
use replay::{Cut, Moment, Survival};
use story::Plan;

/// With lying disks one point in this many is checked: enough to detect them.
const LIARS_LOOK: u64 = 8;

/// Records the life of an array; returns its events, and the size and number of its disks.
fn record(plan: Plan) -> (Vec<Event>, usize, usize) {
    let log = Log::default();
    let (bytes, disks) = reactor::run_simulated(1, {
        let log = log.clone();
        move |_| story::live(plan, log)
    });
    (log.take(), bytes, disks)
}

/// The kinds of power loss at a moment.
fn cuts(moment: &Moment, plan: Plan, number: u64) -> Vec<Cut> {
    let cut = |survival| Cut::plain(survival, number);
    let mut cuts = vec![cut(Survival::None)];
    if moment.pending() > 0 {
        cuts.extend([Survival::All, Survival::Half, Survival::Any].map(cut));
    }
    // In bitmap mode a parity array may lose idle blocks then, and reports that.
    let is_sound = plan.consistency == Consistency::Ppl || plan.level == Level::Raid1;
    if moment.is_created && moment.redundancy > 0 && is_sound {
        let missing = Some(number as usize % plan.members);
        let force = number.is_multiple_of(4); // has no bad effect
        cuts.push(Cut { missing, force, ..cut(Survival::Any) });
    }
    cuts
}

/// Cuts the power at all points. With `lie`, every so many-th durable write is lost although it was
/// completed. Returns all errors found.
fn replay(plan: Plan, lie: Option<usize>) -> Vec<String> {
    let (events, bytes, disks) = record(plan);
    let mut moment = Moment::new(disks, bytes);
    let (mut points, mut replays, mut durable, mut wrong) = (0, 0, 0, Vec::new());
    for event in &events {
        if let (Some(every), Some(write), true) = (lie, moment.fua_of(event), moment.is_created) {
            durable += 1;
            if durable % every == 0 {
                moment.forget(write);
            }
        }
        if !moment.advance(event) {
            continue;
        }
        points += 1;
        if lie.is_some() && points % LIARS_LOOK != 0 {
            continue;
        }
        for cut in cuts(&moment, plan, points) {
            replays += 1;
            if let Err(what) = moment.judge(cut) {
                wrong.push(format!("{plan:?}, point {points}, {cut:?}: {what}"));
            }
        }
    }
    println!("{plan:?}: {points} points, {replays} replays, {} wrong", wrong.len());
    assert!(points > 200, "only {points} points where more became durable");
    wrong
}

fn is_sound(level: Level, members: usize, redundancy: usize, consistency: Consistency) {
    let wrong = replay(Plan { level, members, redundancy, consistency }, None);
    assert!(
        wrong.is_empty(),
        "{} replays, among them\n{}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );
}

#[test]
fn raid_5_holds_what_it_acknowledged_at_every_point_of_its_log() {
    is_sound(Level::Raid5, 4, 1, Consistency::Ppl);
}

#[test]
fn raid_6_holds_what_it_acknowledged_at_every_point_of_its_log() {
    is_sound(Level::Raid6, 5, 2, Consistency::Ppl);
}

#[test]
fn raid_5_in_bitmap_mode_holds_what_it_acknowledged_at_every_point_of_its_log() {
    is_sound(Level::Raid5, 4, 1, Consistency::Bitmap);
}

#[test]
fn a_mirror_holds_what_it_acknowledged_at_every_point_of_its_log() {
    is_sound(Level::Raid1, 2, 1, Consistency::Bitmap);
}

#[test]
fn disks_that_forget_durable_writes_are_noticed() {
    let plan = Plan { level: Level::Raid5, members: 4, redundancy: 1, consistency: Consistency::Ppl };
    let wrong = replay(plan, Some(29));
    assert!(wrong.len() > 20, "{wrong:?}");
}
