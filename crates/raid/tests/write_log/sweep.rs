//! Damaged metadata. At many moments of an array's life the power fails, and afterwards one block
//! of 4 KiB is unreadable or has other content. It is a block of a superblock, the write-intent
//! bitmap, the bad blocks or the log, on one member, or the same block on two. The array must
//! start, hold its acknowledged writes, and check clean.
//!
//! The same damage is done to arrays that were stopped cleanly. Unreadable blocks of the log are
//! readable after a start that replays it.
//!
//! Some damage is beyond all redundancy and left out:
//!
//! * The same block on two members of a mirror of two: both copies of it are lost.
//! * The log while a member is missing or being rebuilt, if more members than the remaining parity
//!   cannot read it, or if it is silently wrong. With unreadable blocks the start is refused unless
//!   forced.
//! * Parity after a block of the log was silently wrong. The write then seems not to have begun,
//!   and the next scrub finds the stripe. Its data is correct.

use crate::disk::Disk;
use crate::replay::{Cut, Damage, Moment, Places, Silent, Survival};
use crate::story::{Plan, WALL_NS};
use block::{Device, Flags, Op};
use raid::admin::check::check;
use raid::admin::open::{Candidate, Wanted, select};
use raid::{Consistency, Level};
use std::sync::Arc;

/// Moments of a life with damage of every kind to every block; all others damage one block each.
const WHOLE_SWEEPS: usize = 6;

/// The kinds of damage to one block that an array must survive at a moment.
fn damages<'a>(
    plan: Plan,
    moment: &'a Moment,
    places: &'a Places,
    block: usize,
    number: usize,
) -> impl Iterator<Item = Damage> + 'a {
    let (first, second) = (number % plan.members, (number / plan.members + 1) % plan.members);
    let one = 1 << first;
    let two = (plan.members > 2).then_some(one | 1 << second).filter(|two| *two != one);
    let is_log = places.log.contains(&block);
    let ways = [one].into_iter().chain(two).flat_map(|disks| [(disks, false), (disks, true)]);
    let damage = move |(disks, is_rotten)| Damage { block, disks, is_rotten, is_log };
    ways.map(damage).filter(move |damage: &Damage| {
        !is_log
            || moment.is_whole
            || !damage.is_rotten && { moment.redundancy >= damage.disks.count_ones() as usize }
    })
}

fn sweep(plan: Plan) {
    let (events, bytes, disks) = crate::record(plan);
    let mut moment = Moment::new(disks, bytes);
    let (mut points, mut replays, mut wrong) = (0, 0, Vec::new());
    let mut places = None;
    let all = events.len() / WHOLE_SWEEPS;
    let mut next_whole = all / 2;
    for (i, event) in events.iter().enumerate() {
        if !moment.advance(event) || !moment.is_created {
            continue;
        }
        let places = places.get_or_insert_with(|| moment.places());
        points += 1;
        let is_whole_sweep = i >= next_whole;
        next_whole += if is_whole_sweep { all } else { 0 };
        let blocks = match is_whole_sweep {
            true => places.blocks.clone(),
            false => vec![places.blocks[points * 5 % places.blocks.len()]],
        };
        for (turn, block) in blocks.into_iter().enumerate() {
            for damage in damages(plan, &moment, places, block, points + turn) {
                replays += 1;
                let survival = [Survival::None, Survival::Any, Survival::All][points % 3];
                let cut = Cut { damage: Some(damage), ..Cut::plain(survival, points as u64) };
                if let Err(what) = moment.judge(cut) {
                    wrong.push(format!("{plan:?}, point {points}, {cut:?}: {what}"));
                }
            }
        }
    }
    println!("{plan:?}: {points} points, {replays} replays, {} wrong", wrong.len());
    assert!(points > 100 && replays > 500, "only {points} points and {replays} replays");
    let few = wrong[..wrong.len().min(5)].join("\n");
    assert!(wrong.is_empty(), "{} replays of {replays}, among them\n{few}", wrong.len());
}

/// With a member missing, unreadable blocks of another one's log lose no data while parity remains.
/// The start is refused if blocks may be lost.
fn sweep_with_a_member_missing(plan: Plan) {
    let (events, bytes, disks) = crate::record(plan);
    let mut moment = Moment::new(disks, bytes);
    let (mut points, mut refused, mut wrong) = (0, 0, Vec::new());
    for event in &events {
        if !moment.advance(event) || !moment.is_whole {
            continue;
        }
        points += 1;
        let Places { log, .. } = moment.places();
        let block = log.start + points % log.len();
        let (damaged, missing) = (points % plan.members, Some((points + 1) % plan.members));
        let damage = Some(Damage { block, disks: 1 << damaged, is_rotten: false, is_log: true });
        let cut = Cut { damage, missing, ..Cut::plain(Survival::Any, points as u64) };
        match moment.judge(cut) {
            Err(what) if plan.redundancy == 1 && what.contains("cannot read all of their logs") => {
                refused += 1
            }
            Err(what) => wrong.push(format!("{plan:?}, point {points}, {cut:?}: {what}")),
            Ok(()) => {}
        }
    }
    println!("{plan:?}: {points} points, {refused} refused, {} wrong", wrong.len());
    assert!(points > 100 && (refused > 0) == (plan.redundancy == 1));
    assert!(
        wrong.is_empty(),
        "{} of {points}, among them\n{}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );
}

#[test]
fn an_unreadable_log_block_beside_a_missing_member_costs_nothing_while_parity_is_left() {
    sweep_with_a_member_missing(Plan {
        level: Level::Raid6,
        members: 5,
        redundancy: 2,
        consistency: Consistency::Ppl,
    });
}

#[test]
fn an_unreadable_log_block_beside_a_missing_member_is_refused_where_it_may_cost_blocks() {
    sweep_with_a_member_missing(Plan {
        level: Level::Raid5,
        members: 4,
        redundancy: 1,
        consistency: Consistency::Ppl,
    });
}

/// The disks of a stopped array, with a damaged block of metadata on one of them.
fn stopped(plan: Plan, damaged: impl Fn(&Moment, Damage)) {
    let (events, bytes, disks) = crate::record(plan);
    let mut moment = Moment::new(disks, bytes);
    for event in &events {
        moment.advance(event);
    }
    let places = moment.places();
    for (number, block) in places.blocks.iter().enumerate() {
        let disks = 1 << (number % plan.members);
        for is_rotten in [false, true] {
            let is_log = places.log.contains(block);
            damaged(&moment, Damage { block: *block, disks, is_rotten, is_log });
        }
    }
}

/// Damages every block in every way after a clean stop, on one member and on two, and starts the
/// array for writing.
fn sweep_after_a_stop(level: Level, members: usize, redundancy: usize, consistency: Consistency) {
    let plan = Plan { level, members, redundancy, consistency };
    let (events, bytes, disks) = crate::record(plan);
    let mut moment = Moment::new(disks, bytes);
    for event in &events {
        moment.advance(event);
    }
    let places = moment.places();
    // The last disk replaced disk 1, if the plan replaces one.
    let used: Vec<usize> = (0..disks).filter(|disk| disks == members || *disk != 1).collect();
    let (mut replays, mut wrong) = (0, Vec::new());
    for (turn, block) in places.blocks.iter().copied().enumerate() {
        let is_log = places.log.contains(&block);
        let one = 1 << used[turn % members];
        let two =
            (members > 2).then_some(one | 1 << used[(turn + 1 + turn / members % (members - 1)) % members]);
        for disks in [Some(one), two].into_iter().flatten() {
            for is_rotten in [false, true] {
                replays += 1;
                let damage = Some(Damage { block, disks, is_rotten, is_log });
                let cut = Cut { damage, ..Cut::plain(Survival::All, turn as u64) };
                wrong.extend(moment.judge(cut).err().map(|what| format!("{plan:?}, {cut:?}: {what}")));
            }
        }
    }
    println!("{plan:?}, stopped: {replays} replays, {} wrong", wrong.len());
    assert!(replays > 40, "only {replays} replays");
    assert!(
        wrong.is_empty(),
        "{} of {replays}, among them\n{}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );
}

#[test]
fn an_array_that_was_stopped_bears_damaged_metadata() {
    sweep_after_a_stop(Level::Raid0, 3, 0, Consistency::None);
    sweep_after_a_stop(Level::Raid1, 2, 1, Consistency::Bitmap);
    sweep_after_a_stop(Level::Raid10, 4, 1, Consistency::Bitmap);
    sweep_after_a_stop(Level::Raid5, 4, 1, Consistency::Ppl);
    sweep_after_a_stop(Level::Raid5, 4, 1, Consistency::Bitmap);
    sweep_after_a_stop(Level::Raid6, 5, 2, Consistency::Ppl);
    sweep_after_a_stop(Level::Raid7, 5, 3, Consistency::Ppl);
    sweep_after_a_stop(Level::Raid50, 6, 1, Consistency::Ppl);
    sweep_after_a_stop(Level::Raid60, 8, 2, Consistency::Ppl);
    sweep_after_a_stop(Level::Raid70, 10, 3, Consistency::Ppl);
    sweep_after_a_stop(Level::NPlusM, 6, 4, Consistency::Ppl);
}

#[test]
fn unreadable_blocks_of_the_log_can_be_read_again_after_a_start() {
    let plan = Plan { level: Level::Raid5, members: 4, redundancy: 1, consistency: Consistency::Ppl };
    let (events, bytes, disks) = crate::record(plan);
    let mut moment = Moment::new(disks, bytes);
    let (mut points, mut healed) = (0, 0);
    for event in &events {
        // The array has writes in flight, so a start recovers it.
        if !moment.advance(event) || !moment.is_created || !moment.is_whole || !moment.is_busy() {
            continue;
        }
        let log = moment.places().log;
        let block = log.start + points % log.len();
        points += 1;
        let damage = Some(Damage { block, disks: 1 << 2, is_rotten: false, is_log: true });
        let disks = moment.damaged(Cut { damage, ..Cut::plain(Survival::Any, points as u64) });
        assert!(!disks[2].can_read(block));
        let used: Vec<Arc<dyn Device>> = disks.iter().map(|disk| disk.clone() as Arc<dyn Device>).collect();
        reactor::run_simulated(points as u64, move |_| async move {
            crate::story::start(&used, false).await.expect("an array").stop().await.expect("a stop");
        });
        healed += usize::from(disks[2].can_read(block));
    }
    assert!(points > 100 && healed == points, "{healed} of {points} blocks were rewritten");
}

/// Devices that may belong to an array, as a user names them, or as a directory lists them.
fn candidates(disks: &[Arc<Disk>], is_named: bool) -> Vec<Candidate> {
    let candidate = |disk: &Arc<Disk>| Candidate {
        name: disk.name().to_owned(),
        device: Ok(disk.clone() as Arc<dyn Device>),
        is_named,
    };
    disks.iter().map(candidate).collect()
}

#[test]
fn a_check_and_a_read_only_start_write_nothing_whatever_is_damaged() {
    let plan = Plan { level: Level::Raid5, members: 4, redundancy: 1, consistency: Consistency::Ppl };
    stopped(plan, |moment, damage| {
        let disks = moment.damaged(Cut { damage: Some(damage), ..Cut::plain(Survival::None, 1) });
        let before: Vec<Vec<u8>> = disks.iter().map(|disk| disk.content()).collect();
        let used = disks.clone();
        reactor::run_simulated(1, move |_| async move {
            let wanted = Wanted { read_only: true, run: true, ..Wanted::default() };
            let selection = select(candidates(&used, false), &wanted).await.expect("an array");
            check(&selection, false, &mut Silent).await.expect("a check");
            let array = selection.start_read_only(WALL_NS).await.expect("a start");
            assert!(!array.table().is_degraded(), "{damage:?}");
            let channel = array.open_channel().expect("a channel");
            let buffer = reactor::current().buffers().take(64 << 10).await;
            buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await.1.expect("data");
        });
        for (disk, before) in disks.iter().zip(before) {
            assert!(disk.content() == before, "{damage:?}: {} was written to", disk.name());
        }
    });
}

#[test]
fn a_named_member_whose_superblocks_cannot_be_read_is_missing() {
    let plan = Plan { level: Level::Raid5, members: 4, redundancy: 1, consistency: Consistency::Ppl };
    let (events, bytes, disks) = crate::record(plan);
    let mut moment = Moment::new(disks, bytes);
    for event in &events {
        moment.advance(event);
    }
    let blocks = moment.places().blocks;
    let content: Vec<Arc<Disk>> = moment.damaged(Cut::plain(Survival::None, 1));
    let fill = |(index, disk): (usize, &Arc<Disk>)| {
        let copy = Disk::holding(index, disk.content());
        let bad = blocks.iter().filter(|_| index == 2);
        Arc::new(bad.fold(copy, |copy, block| copy.with_unreadable(*block)))
    };
    // The disk of the replaced member is not part of the array.
    let all: Vec<Arc<Disk>> = content.iter().enumerate().filter(|(i, _)| *i != 1).map(fill).collect();
    reactor::run_simulated(1, move |_| async move {
        let selection = select(candidates(&all, true), &Wanted { run: true, ..Wanted::default() })
            .await
            .expect("an array");
        assert_eq!(selection.assembly.missing, [2], "{:?}", selection.warnings);
        let said = |warning: &String| warning.contains("disk2") && warning.contains("superblock");
        assert!(selection.warnings.iter().any(said), "{:?}", selection.warnings);
        selection.start(WALL_NS).await.expect("a degraded array").stop().await.expect("a stop");
    });
}

fn logged(level: Level, members: usize, redundancy: usize) {
    sweep(Plan { level, members, redundancy, consistency: Consistency::Ppl });
}

fn mirrored(level: Level, members: usize, redundancy: usize) {
    sweep(Plan { level, members, redundancy, consistency: Consistency::Bitmap });
}

#[test]
fn an_array_without_redundancy_bears_damaged_metadata() {
    sweep(Plan { level: Level::Raid0, members: 3, redundancy: 0, consistency: Consistency::None });
}

#[test]
fn mirrors_bear_damaged_metadata() {
    mirrored(Level::Raid1, 2, 1);
    mirrored(Level::Raid1, 3, 2);
    mirrored(Level::Raid10, 4, 1);
}

#[test]
fn arrays_with_one_parity_bear_damaged_metadata() {
    logged(Level::Raid5, 4, 1);
    logged(Level::Raid50, 6, 1);
}

#[test]
fn arrays_with_two_parities_bear_damaged_metadata() {
    logged(Level::Raid6, 5, 2);
    logged(Level::Raid60, 8, 2);
}

#[test]
fn arrays_with_more_parities_bear_damaged_metadata() {
    logged(Level::Raid7, 5, 3);
    logged(Level::Raid70, 10, 3);
    logged(Level::NPlusM, 6, 4);
}
