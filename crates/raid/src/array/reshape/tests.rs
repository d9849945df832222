//! Reshapes of arrays on memory devices. The simulator tests power loss meanwhile (`sim --shapes`).

use super::*;
use crate::array::members::Attached;
use crate::array::{Array, Before, Start, Wanted};
use crate::config::Consistency;
use crate::jobs::{self, Jobs};
use crate::metadata::intent_bitmap::WRITTEN;
use crate::metadata::{
    AssembleOptions, Found, Label, Layout, Member, Reshape, Store, Target, assemble, read_superblock, testing,
};
use crate::{ArrayConfig, Geometry, Level, Matrix, Zones};
use block::{Channel, Device, Op};
use conformance::Suite;
use drivers::mem::{MemDevice, Options};
use layers::fault::{Action, Fault, Rule};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

const STRIP: u64 = 16 << 10;
const BLOCK: u64 = 4096;

struct Bench {
    faults: Vec<Arc<Fault>>,
    old: ArrayConfig,
    new: ArrayConfig,
    shift: u64,
    member_bytes: u64,
}

impl Bench {
    /// Geometries as (data, parity).
    fn new(old: (usize, usize), new: (usize, usize), consistency: Consistency) -> Bench {
        Bench::of_members(4 << 20, old, new, consistency)
    }

    fn of_members(
        member_bytes: u64,
        old: (usize, usize),
        new: (usize, usize),
        consistency: Consistency,
    ) -> Bench {
        let config = |(data, parity): (usize, usize)| ArrayConfig {
            level: Level::NPlusM,
            geometry: Geometry {
                groups: 1,
                data,
                parity,
                strip_bytes: STRIP as u32,
                group_stripes: 1,
                zones: Zones::NONE,
            },
            matrix: Matrix::Powers,
            consistency,
            region_bytes: 64 << 10,
            lanes: 4,
            lane_bytes: 256 << 10,
            ..testing::config(2, 1)
        };
        let (mut old, mut new) = (config(old), config(new));
        let shift = 4 * STRIP;
        old.geometry.group_stripes = Layout::most_group_stripes(member_bytes, &old) / 2;
        new.geometry.group_stripes = old.geometry.group_stripes + shift / STRIP;
        new.lanes = 2;
        let disk = |_| {
            let disk = MemDevice::new(&Options::new(member_bytes)).unwrap();
            Arc::new(Fault::new(Arc::new(disk)))
        };
        Bench { faults: (0..new.geometry.members()).map(disk).collect(), old, new, shift, member_bytes }
    }

    fn targets(&self, shift: u64, count: usize) -> Vec<Target> {
        let layout = Layout::new(self.member_bytes, &self.old).unwrap();
        let layout = Layout {
            data_offset: layout.data_offset - shift,
            data_bytes: layout.data_bytes + shift,
            reserve_bytes: layout.reserve_bytes - shift,
            ..layout
        };
        let target =
            |slot: usize| Target { slot, channel: self.faults[slot].open_channel().unwrap(), layout };
        (0..count).map(target).collect()
    }

    async fn create(&self) -> Arc<Array> {
        let targets = self.targets(0, self.old.geometry.members());
        // Every region is marked as written when a reshape begins.
        let table = Table { initial_region: WRITTEN, ..testing::table(&self.old) };
        let results = Store::new(targets.len()).commit(&targets, &table).await;
        assert!(results.iter().all(|(_, result)| result.is_ok()));
        self.start(&[]).await
    }

    async fn find(&self, absent: &[usize]) -> Vec<Found> {
        let mut found = Vec::new();
        for (slot, fault) in self.faults.iter().enumerate().filter(|(slot, _)| !absent.contains(slot)) {
            found.extend(
                read_superblock(&format!("m{slot}"), &*fault.open_channel().unwrap(), self.member_bytes)
                    .await,
            );
        }
        found
    }

    async fn start(&self, absent: &[usize]) -> Arc<Array> {
        let assembly = assemble(self.find(absent).await, &AssembleOptions::default()).unwrap();
        let device = |found: &Found| {
            let slot: usize = found.name[1..].parse().unwrap();
            Some(self.faults[slot].clone() as Arc<dyn Device>)
        };
        Array::start(Start::new(assembly, 1, true, device)).await.unwrap()
    }

    /// Begins the reshape of a stopped array.
    async fn begin(&self) {
        let found = self.find(&[]).await;
        let Label::Member(superblock) = &found[0].label else { panic!("a member") };
        let mut table = superblock.table.next(1);
        table.config = self.new.clone();
        let missing = table.members.len()..self.new.geometry.members();
        table.members.extend(missing.map(|slot| Member::live(testing::member_uuid(slot))));
        table.reshape = Some(Reshape {
            old_level: self.old.level,
            old_matrix: self.old.matrix,
            old_geometry: self.old.geometry,
            cursor: 0,
            shift: self.shift,
        });
        let targets = self.targets(self.shift, self.new.geometry.members());
        let store = Store::new(targets.len());
        found.iter().enumerate().for_each(|(slot, found)| store.note(slot, found));
        let results = store.commit(&targets, &table).await;
        assert!(results.iter().all(|(_, result)| result.is_ok()), "{results:?}");
    }

    /// An array with a pattern and a reshape in progress.
    async fn begun(&self) -> (Arc<Array>, Vec<u8>) {
        let array = self.create().await;
        let channel = array.open_channel().unwrap();
        let blocks = array.limits().capacity / BLOCK;
        let pattern: Vec<u8> = (0..blocks).map(|block| (block % 251) as u8 + 1).collect();
        for (block, byte) in pattern.iter().enumerate() {
            write(&*channel, block as u64, *byte).await;
        }
        drop(channel);
        array.stop().await.unwrap();
        drop(array);
        self.begin().await;
        (self.start(&[]).await, pattern)
    }
}

async fn write(channel: &dyn Channel, block: u64, byte: u8) {
    let mut buffer = reactor::current().buffers().take(BLOCK as usize).await;
    buffer.as_mut_slice().fill(byte);
    buffer.transfer(channel, Op::Write, Flags::NONE, block * BLOCK).await.1.unwrap();
}

async fn read(channel: &dyn Channel, block: u64) -> Result<u8, IoError> {
    let buffer = reactor::current().buffers().take(BLOCK as usize).await;
    let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, block * BLOCK).await;
    let bytes = buffer.as_slice();
    result.map(|()| {
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} has the content of one write");
        bytes[0]
    })
}

async fn check(array: &Array, pattern: &[u8]) {
    let channel = array.open_channel().unwrap();
    for (block, byte) in pattern.iter().enumerate() {
        assert_eq!(read(&*channel, block as u64).await, Ok(*byte), "block {block}");
    }
    for block in pattern.len() as u64..array.limits().capacity / BLOCK {
        assert_eq!(read(&*channel, block).await, Ok(0), "block {block}, which was added");
    }
}

async fn mismatches(array: &Array) -> u64 {
    let mut found = 0;
    for stripe in 0..array.config().geometry.stripes() {
        found += u64::from(array.scrub_stripe(stripe, false).await.unwrap().mismatches != 0);
    }
    found
}

const CASES: [((usize, usize), (usize, usize)); 6] = [
    ((2, 1), (3, 1)),
    ((3, 1), (3, 2)),
    ((3, 1), (4, 2)),
    ((3, 2), (4, 1)),
    ((4, 1), (6, 1)),
    ((2, 2), (4, 2)),
];

#[test]
fn an_array_has_its_bytes_at_every_moment_of_a_change_and_more_room_after_it() {
    for (old, new) in CASES {
        for consistency in [Consistency::Ppl, Consistency::Bitmap] {
            reactor::run(async move {
                let bench = Bench::new(old, new, consistency);
                let (array, mut pattern) = bench.begun().await;
                let channel = array.open_channel().unwrap();
                let before = array.limits().capacity;
                check(&array, &pattern).await;
                let mut windows = 0;
                while array.move_window(8 * STRIP).await.unwrap() {
                    windows += 1;
                    assert_eq!(array.table().reshape.unwrap().check(array.config()), Ok(()));
                    for block in [windows * 7, windows * 31].map(|block| block % pattern.len() as u64) {
                        pattern[block as usize] = 252 + (windows % 4) as u8;
                        write(&*channel, block, pattern[block as usize]).await;
                    }
                    if windows % 5 == 0 {
                        check(&array, &pattern).await;
                    }
                }
                assert_eq!(array.limits().capacity, before, "until its end");
                array.end_reshape().await.unwrap();
                assert!(windows > 5 && !array.is_reshaping() && array.moved().is_none());
                assert_eq!(array.limits().capacity, bench.new.geometry.capacity());
                check(&array, &pattern).await;
                assert_eq!(mismatches(&array).await, 0, "{old:?} to {new:?}");
                let last = array.limits().capacity / BLOCK - 1;
                write(&*channel, last, 9).await;
                assert_eq!(read(&*channel, last).await, Ok(9));
                write(&*channel, last, 0).await;
                drop(channel);
                array.stop().await.unwrap();
                drop(array);
                let array = bench.start(&[0]).await;
                assert_eq!(
                    (array.config().lanes, array.table().reshape),
                    (4, None),
                    "the array has all lanes again"
                );
                check(&array, &pattern).await;
            });
        }
    }
}

#[test]
fn a_change_goes_on_after_a_stop_a_crash_and_the_loss_of_a_member() {
    for (old, new) in CASES {
        reactor::run(async move {
            let bench = Bench::new(old, new, Consistency::Ppl);
            let (mut array, mut pattern) = bench.begun().await;
            for round in 0..6u64 {
                for _ in 0..2 {
                    array.move_window(3 * STRIP).await.unwrap();
                }
                let channel = array.open_channel().unwrap();
                for block in (round..pattern.len() as u64).step_by(97) {
                    pattern[block as usize] = 200 + round as u8;
                    write(&*channel, block, pattern[block as usize]).await;
                }
                drop(channel);
                if round % 2 == 0 {
                    array.stop().await.unwrap();
                }
                drop(array);
                array = bench.start(if round < 3 { &[] } else { &[1] }).await;
                check(&array, &pattern).await;
            }
            while array.move_window(1 << 20).await.unwrap() {}
            array.end_reshape().await.unwrap();
            check(&array, &pattern).await;
            let table = array.table();
            assert!(
                matches!(table.members[1].state, MemberState::Missing { since: 0 }),
                "a complete rebuild is needed"
            );
        });
    }
}

#[test]
fn only_blocks_that_cannot_be_read_are_bad_in_the_new_geometry() {
    reactor::run(async {
        let bench = Bench::new((2, 1), (3, 1), Consistency::Ppl);
        let (array, pattern) = bench.begun().await;
        let channel = array.open_channel().unwrap();
        // Without slot 1 the second block of the array cannot be reconstructed.
        array.fail(1).await.unwrap();
        let slot = bench.old.geometry.member(0, 0);
        let at = bench.targets(0, 1)[0].layout.data_offset + BLOCK;
        bench.faults[slot]
            .add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(at..at + BLOCK));
        let mut expected = Vec::new();
        for block in 0..pattern.len() as u64 {
            expected.push(read(&*channel, block).await);
        }
        assert_eq!(expected[1], Err(IoError::Medium));
        let lost = expected.iter().filter(|result| result.is_err()).count();
        assert!(lost <= 2, "the block, and the strip of the failed member in its row");
        while array.move_window(1 << 20).await.unwrap() {}
        array.end_reshape().await.unwrap();
        bench.faults[slot].clear();
        for (block, expected) in expected.into_iter().enumerate() {
            assert_eq!(read(&*channel, block as u64).await, expected, "block {block}");
        }
        write(&*channel, 1, 77).await;
        assert_eq!(read(&*channel, 1).await, Ok(77), "the block is good once it is written");
    });
}

#[test]
fn requests_wait_for_a_window_and_no_others_do() {
    reactor::run(async {
        let bench = Bench::new((3, 1), (4, 1), Consistency::Ppl);
        let (array, pattern) = bench.begun().await;
        let done = Rc::new(Cell::new(0));
        let (mover, windows) = (array.clone(), done.clone());
        reactor::current().spawn(async move {
            while mover.move_window(6 * STRIP).await.unwrap() {
                windows.set(windows.get() + 1);
            }
        });
        let channel = array.open_channel().unwrap();
        let mut round = 0;
        while array.moved().unwrap().done < array.moved().unwrap().total {
            round += 1;
            let block = (round * 37) % pattern.len() as u64;
            assert_eq!(read(&*channel, block).await, Ok(pattern[block as usize]), "block {block}");
            write(&*channel, block, pattern[block as usize]).await;
        }
        while array.end_reshape().await.is_err() {
            reactor::yield_now().await;
        }
        assert!(done.get() > 3);
        check(&array, &pattern).await;
        assert_eq!(mismatches(&array).await, 0);
    });
}

#[test]
fn an_array_half_way_through_a_change_passes_the_suite() {
    let array = reactor::run(async {
        let bench = Bench::of_members(32 << 20, (3, 1), (4, 2), Consistency::Ppl);
        let (array, _) = bench.begun().await;
        for _ in 0..40 {
            array.move_window(8 * STRIP).await.unwrap();
        }
        array
    });
    Suite::new(array).run();
}

#[test]
fn two_lost_members_freeze_an_array_that_gets_its_second_parity() {
    reactor::run(async {
        let bench = Bench::new((3, 1), (3, 2), Consistency::Ppl);
        let (array, _) = bench.begun().await;
        array.fail(0).await.unwrap();
        assert_eq!(array.fail(1).await, Err(IoError::Invalid), "the old geometry needs it");
        array.fail(4).await.unwrap();
        while array.move_window(1 << 20).await.unwrap() {}
        array.end_reshape().await.unwrap();
        assert_eq!(array.fail(1).await, Err(IoError::Invalid), "two members have already failed");
    });
}

impl Bench {
    /// A blank disk replaces the one in a slot; returns it as a new device for the array.
    fn renew(&mut self, array: &Array, slot: usize) -> Attached {
        let disk = MemDevice::new(&Options::new(self.member_bytes)).unwrap();
        self.faults[slot] = Arc::new(Fault::new(Arc::new(disk)));
        let config = ArrayConfig { lanes: array.log_lanes(), ..ArrayConfig::clone(array.config()) };
        let layout = Layout::new(self.member_bytes, &config).unwrap();
        Attached { device: self.faults[slot].clone(), layout }
    }
}

async fn move_to_the_end(array: &Array) {
    while array.move_window(1 << 20).await.unwrap() {}
    array.end_reshape().await.unwrap();
}

#[test]
fn a_slot_is_filled_in_both_shapes_while_a_change_stands_still() {
    for (old, new) in CASES {
        for (windows, slot) in [(0, 1), (4, 1), (4, new.0 + new.1 - 1)] {
            reactor::run(async move {
                let mut bench = Bench::new(old, new, Consistency::Ppl);
                let (mut array, mut pattern) = bench.begun().await;
                for _ in 0..windows {
                    array.move_window(3 * STRIP).await.unwrap();
                }
                array.fail(slot).await.unwrap();
                let (newcomer, uuid) = (bench.renew(&array, slot), testing::member_uuid(40));
                array.start_filling(slot, uuid, newcomer).await.unwrap();
                assert_eq!(array.move_window(STRIP).await, Err(IoError::Invalid));
                let steps = array.fill_steps();
                let mut step = 0;
                while step < steps {
                    let wanted = vec![Wanted { slot, before: Before::Anything }];
                    let filled = array.fill_step(step, wanted).await.unwrap();
                    assert!(filled.iter().all(|(_, result)| result.is_ok()), "{filled:?}");
                    step += 1;
                    array.advance(slot, step);
                    let channel = array.open_channel().unwrap();
                    for block in [step * 53, step * 11 + 5].map(|block| block % pattern.len() as u64) {
                        pattern[block as usize] = (step % 250) as u8 + 1;
                        write(&*channel, block, pattern[block as usize]).await;
                    }
                    drop(channel);
                    if step == steps / 2 {
                        array.checkpoint(slot).await.unwrap();
                        drop(array); // as in a crash
                        array = bench.start(&[]).await;
                        assert_eq!((array.members().cursor(slot), array.fill_steps()), (step, steps));
                        check(&array, &pattern).await;
                    }
                }
                array.finish_filling(slot, uuid).await.unwrap();
                for other in (0..new.0 + new.1).filter(|other| *other != slot).take(old.1.min(new.1)) {
                    array.fail(other).await.unwrap();
                }
                check(&array, &pattern).await;
                move_to_the_end(&array).await;
                check(&array, &pattern).await;
            });
        }
    }
}

fn says(jobs: &Jobs, text: &str) -> Option<usize> {
    jobs.status().events.iter().position(|event| event.text.contains(text))
}

#[test]
fn a_spare_is_filled_while_a_change_cannot_go_on() {
    reactor::run_simulated(7, |_| async {
        let bench = Bench::new((3, 2), (4, 2), Consistency::Ppl);
        let (array, pattern) = bench.begun().await;
        for _ in 0..2 {
            array.move_window(3 * STRIP).await.unwrap();
        }
        let owner = array.owner();
        let range = |i: u64| BadRange { stripe: (1 << 40) + 2 * i, strips: 1, offset: 0, len: BLOCK as u32 };
        let mut ranges = 0;
        while array.shared.common.bad.add(range(ranges), &*owner).await.is_ok() {
            ranges += 1;
        }
        drop(owner);
        // The next row cannot be moved: it is lost, and the bad-block list has no room.
        let stripe = array.moved().unwrap().done / bench.old.geometry.stripe_bytes();
        let at = bench.targets(0, 1)[0].layout.data_offset + bench.old.geometry.member_offset(stripe);
        for slot in [0, 2, 4] {
            let lost = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(at..at + BLOCK);
            bench.faults[slot].add(lost);
        }
        let jobs = array.keep(jobs::Options::default()).unwrap();
        jobs.add(Arc::new(MemDevice::new(&Options::new(bench.member_bytes)).unwrap())).await.unwrap();
        while says(&jobs, "the reshape stops").is_none() {
            reactor::current().sleep(1_000_000).await;
        }
        bench.faults.iter().for_each(|fault| fault.clear());
        bench.faults[3].add(Rule::new(Action::Error(IoError::DeviceGone)));
        let channel = array.open_channel().unwrap();
        for (block, byte) in pattern.iter().enumerate() {
            write(&*channel, block as u64, *byte).await;
        }
        reactor::current().sleep(60_000_000_000).await;
        assert!(array.members().is_healthy(), "{:#?}", jobs.status());
        assert!(!array.is_reshaping(), "the second try succeeded: {:#?}", jobs.status());
        check(&array, &pattern).await;
        jobs.stop().await;
    });
}

#[test]
fn without_redundancy_a_spare_is_filled_before_a_change_goes_on() {
    reactor::run_simulated(7, |_| async {
        let bench = Bench::new((3, 1), (4, 1), Consistency::Ppl);
        let (array, pattern) = bench.begun().await;
        let jobs = array.keep(jobs::Options::default()).unwrap();
        jobs.pause();
        array.fail(1).await.unwrap();
        jobs.add(Arc::new(MemDevice::new(&Options::new(bench.member_bytes)).unwrap())).await.unwrap();
        jobs.resume();
        jobs.idle().await;
        let (full, changed) = (says(&jobs, "slot 1 is full"), says(&jobs, "its new shape"));
        assert!(full.is_some() && full < changed, "{:#?}", jobs.status());
        array.fail(0).await.unwrap();
        check(&array, &pattern).await;
        jobs.stop().await;
    });
}
