//! Every write to the members of small arrays is logged, over a life of theirs (made, written to, a member out, another
//! one filled, stopped, started), and the log is replayed up to every point where more became durable: every write with
//! FUA, every flush. At each, writes that were under way survive in several ways, whole or torn, and a member may be
//! missing. What is left must assemble, hold every acknowledged write, and check clean after recovery.
//!
//! The same moments are replayed with damaged metadata (`sweep.rs`): blocks that cannot be read, or hold something else.
//!
//! As with dm-log-writes, but a log says what the array's user knew at each moment, and a run is the same every time.

mod disk;
mod replay;
mod story;
mod sweep;

use disk::{Event, Log};
use raid::{Consistency, Level};
use replay::{Cut, Moment, Survival};
use story::Plan;

/// Points at which disks that lie are looked at: enough to catch them.
const LIARS_LOOK: u64 = 8;

/// Everything that happens in the life of an array; its disks' size and count.
fn record(plan: Plan) -> (Vec<Event>, usize, usize) {
    let log = Log::default();
    let (bytes, disks) = reactor::run_simulated(1, {
        let log = log.clone();
        move |_| story::live(plan, log)
    });
    (log.take(), bytes, disks)
}

/// The ways in which power may go at a moment.
fn cuts(moment: &Moment, plan: Plan, number: u64) -> Vec<Cut> {
    let cut = |survival| Cut::plain(survival, number);
    let mut cuts = vec![cut(Survival::None)];
    if moment.pending() > 0 {
        cuts.extend([Survival::All, Survival::Half, Survival::Any].map(cut));
    }
    // In bitmap mode a parity array may lose idle blocks then, and says so.
    let is_sound = plan.consistency == Consistency::Ppl || plan.level == Level::Raid1;
    if moment.is_created && moment.redundancy > 0 && is_sound {
        let missing = Some(number as usize % plan.members);
        let force = number.is_multiple_of(4); // makes nothing worse
        cuts.push(Cut { missing, force, ..cut(Survival::Any) });
    }
    cuts
}

/// Cuts everywhere. `lie`: every so many-th durable write is lost although it was answered. What is wrong where.
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
