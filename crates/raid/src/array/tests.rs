//! Arrays on memory devices: the conformance suite, complete and degraded, and failures of members.

use super::*;
use crate::config::Consistency;
use crate::metadata::intent_bitmap::{DIRTY, NEED_SYNC, OPEN};
use crate::metadata::testing;
use crate::metadata::{Layout, Store, Target, read_superblock};
use crate::{Geometry, Level, Matrix, Zones};
use block::{Flags, Op, Request};
use conformance::Suite;
use drivers::mem::{MemDevice, Options};
use layers::fault::{Action, Fault, Rule};

mod forwarded;
mod in_place;
mod rows;
mod scarred;
mod unsynced;

const MEMBER_BYTES: u64 = 48 << 20;

pub(super) fn config(level: Level, groups: usize, data: usize, parity: usize) -> ArrayConfig {
    let matrix = match (data, parity) {
        (1, _) | (_, 0) => Matrix::Copies,
        (_, 1..=3) => Matrix::Powers,
        _ => Matrix::Cauchy,
    };
    let consistency = match (data, parity) {
        (_, 0) => Consistency::None,
        (1, _) => Consistency::Bitmap,
        _ => Consistency::Ppl,
    };
    let strip_bytes = 16 << 10;
    // Small enough that the suite's requests meet in stripes, with a full last stripe.
    let group_stripes = (40 << 20) / u64::from(strip_bytes) / groups as u64 / data as u64 + 3;
    ArrayConfig {
        level,
        geometry: Geometry { groups, data, parity, strip_bytes, group_stripes, zones: Zones::NONE },
        matrix,
        consistency,
        region_bytes: 1 << 20,
        lanes: 4,
        lane_bytes: 256 << 10,
        ..testing::config(3, 1)
    }
}

pub(super) type Faults = Vec<Arc<Fault>>;

/// An array of new members, without those in `absent`.
pub(super) async fn start(config: &ArrayConfig, absent: &[usize]) -> (Arc<Array>, Faults) {
    let count = config.geometry.members();
    let disk = || Arc::new(MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap());
    let faults: Faults = (0..count).map(|_| Arc::new(Fault::new(disk()))).collect();
    (restart(config, &faults, absent, true).await, faults)
}

pub(super) async fn restart(
    config: &ArrayConfig,
    faults: &Faults,
    absent: &[usize],
    is_new: bool,
) -> Arc<Array> {
    if is_new {
        write_superblocks(faults, &testing::table(config)).await;
    }
    start_again(config, faults, absent, false).await
}

async fn write_superblocks(faults: &Faults, table: &crate::metadata::Table) {
    let layout = Layout::new(MEMBER_BYTES, &table.config).unwrap();
    let target = |(slot, fault): (usize, &Arc<Fault>)| {
        let channel = fault.open_channel().unwrap();
        Target { slot, channel, layout }
    };
    let targets: Vec<Target> = faults.iter().enumerate().map(target).collect();
    let results = Store::new(faults.len()).commit(&targets, table).await;
    assert!(results.iter().all(|(_, result)| result.is_ok()));
}

async fn start_again(
    config: &ArrayConfig,
    faults: &Faults,
    absent: &[usize],
    trusts_parity: bool,
) -> Arc<Array> {
    let layout = Layout::new(MEMBER_BYTES, config).unwrap();
    let mut members = Vec::new();
    let mut table: Option<crate::metadata::Table> = None;
    for (slot, fault) in faults.iter().enumerate() {
        if absent.contains(&slot) {
            members.push(None);
            continue;
        }
        let found = read_superblock("m", &*fault.open_channel().unwrap(), MEMBER_BYTES).await.unwrap();
        let crate::metadata::Label::Member(superblock) = &found.label else { panic!("a member") };
        if table.as_ref().is_none_or(|table| table.generation < superblock.table.generation) {
            table = Some(superblock.table.clone());
        }
        members.push(Some(StartMember { device: fault.clone(), layout, found }));
    }
    let table = table.unwrap().retry(1);
    let start = Start {
        table,
        members,
        disowned: Vec::new(),
        wall_ns: 1,
        is_simulated: true,
        needs_sync: false,
        trusts_parity,
    };
    Array::start(start).await.unwrap()
}

fn suite(config: ArrayConfig, absent: &'static [usize]) {
    let (array, _) = reactor::run(async move { start(&config, absent).await });
    Suite::new(array).run();
}

#[test]
fn arrays_without_parity_pass_the_suite() {
    suite(config(Level::Raid0, 1, 4, 0), &[]);
    suite(config(Level::Raid1, 1, 1, 1), &[]);
    suite(config(Level::Raid10, 2, 1, 2), &[]);
}

#[test]
fn raid_5_passes_the_suite() {
    suite(config(Level::Raid5, 1, 3, 1), &[]);
}

#[test]
fn raid_6_and_50_pass_the_suite() {
    suite(config(Level::Raid6, 1, 4, 2), &[]);
    suite(config(Level::Raid50, 2, 3, 1), &[]);
}

#[test]
fn wide_arrays_pass_the_suite() {
    suite(config(Level::Raid7, 1, 6, 3), &[]);
    suite(config(Level::NPlusM, 1, 4, 4), &[]);
}

#[test]
fn arrays_that_lack_members_pass_the_suite() {
    suite(config(Level::Raid1, 1, 1, 2), &[0, 2]);
    suite(config(Level::Raid5, 1, 3, 1), &[1]);
    suite(config(Level::Raid6, 1, 4, 2), &[0, 3]);
    suite(config(Level::NPlusM, 1, 3, 4), &[0, 2, 4, 6]);
}

pub(super) async fn write(channel: &dyn Channel, offset: u64, byte: u8, len: usize) -> IoResult {
    let mut buffer = reactor::current().buffers().take(len).await;
    buffer.as_mut_slice().fill(byte);
    buffer.transfer(channel, Op::Write, Flags::NONE, offset).await.1
}

pub(super) async fn read(channel: &dyn Channel, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
    let buffer = reactor::current().buffers().take(len).await;
    let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, offset).await;
    result.map(|()| buffer.as_slice().to_vec())
}

/// Fills the first bytes of an array with a pattern, by writes of many sizes.
pub(super) async fn fill(channel: &dyn Channel, bytes: u64) {
    let mut at = 0;
    for (i, len) in [4096, 512, 65536, 3584, 131072, 20480].into_iter().cycle().enumerate() {
        if at + len > bytes {
            break;
        }
        write(channel, at, i as u8 + 1, len as usize).await.unwrap();
        at += len;
    }
}

async fn scrub(array: &Array) -> u64 {
    let mut mismatches = 0;
    for stripe in 0..64 {
        mismatches += u64::from(array.scrub_stripe(stripe, false).await.unwrap().mismatches.count_ones());
    }
    mismatches
}

#[test]
fn written_data_survives_the_loss_of_as_many_members_as_there_are_parities() {
    reactor::run(async {
        for (data, parity, lost) in [(3, 1, &[2][..]), (4, 2, &[0, 5]), (5, 3, &[1, 2, 6])] {
            let (array, faults) = start(&config(Level::NPlusM, 1, data, parity), &[]).await;
            let channel = array.open_channel().unwrap();
            fill(&*channel, 2 << 20).await;
            assert_eq!(scrub(&array).await, 0);
            let before = read(&*channel, 0, 1 << 20).await.unwrap();
            for slot in lost {
                faults[*slot].add(Rule::new(Action::Error(IoError::DeviceGone)));
            }
            assert!(read(&*channel, 0, 1 << 20).await.unwrap() == before);
            write(&*channel, 8192, 0xaa, 100 << 10).await.unwrap();
            let after = read(&*channel, 0, 1 << 20).await.unwrap();
            assert!(after[8192..][..100 << 10].iter().all(|b| *b == 0xaa));
            assert!(after[..8192] == before[..8192] && after[108 << 10..] == before[108 << 10..]);
            let out = array.slots().iter().filter(|slot| slot.state == SlotState::Out).count();
            assert_eq!(out, lost.len());
            assert_eq!(array.table().members.iter().filter(|m| !m.is_live()).count(), lost.len());
        }
    });
}

/// A write whose region is being marked when the array loses too many members changes no stripe:
/// the member that failed last would be taken for one that has it.
#[test]
fn a_write_that_is_overtaken_by_the_loss_of_its_group_changes_nothing() {
    reactor::run_simulated(5, |_| async {
        let config = ArrayConfig { consistency: Consistency::Bitmap, ..config(Level::Raid5, 1, 3, 1) };
        let (array, faults) = start(&config, &[]).await;
        let channel = array.open_channel().unwrap();
        for fault in &faults {
            let late = Rule::new(Action::Delay(1_000_000)).on(&[Op::Write]);
            fault.add(Rule { count: Some(1), ..late });
        }
        let result = Rc::new(std::cell::Cell::new(None));
        let answer = result.clone();
        reactor::current().spawn(async move {
            answer.set(Some(write(&*channel, 0, 7, 48 << 10).await));
        });
        reactor::current().sleep(100_000).await;
        faults[0].add(Rule::new(Action::Error(IoError::DeviceGone)));
        let _ = array.fail(1).await;
        while result.get().is_none() {
            reactor::current().sleep(100_000).await;
        }
        assert!(array.is_frozen());
        assert_eq!(result.get(), Some(Err(IoError::Medium)));
        let layout = Layout::new(MEMBER_BYTES, &config).unwrap();
        for fault in &faults[1..] {
            let strip = read(&*fault.open_channel().unwrap(), layout.data_offset, 16 << 10).await.unwrap();
            assert!(strip.iter().all(|byte| *byte == 0), "a strip was written");
        }
    });
}

/// Without a log, a write waits for the record of a failure before it skips the member. A further
/// failure could freeze the array, and the member would count as live with its old strip.
#[test]
fn a_write_without_a_log_skips_a_member_only_after_its_failure_is_durable() {
    reactor::run_simulated(6, |_| async {
        let config = ArrayConfig { consistency: Consistency::Bitmap, ..config(Level::Raid5, 1, 3, 1) };
        let (array, faults) = start(&config, &[]).await;
        let channel = array.open_channel().unwrap();
        let layout = Layout::new(MEMBER_BYTES, &config).unwrap();
        let slow = |range, ns| Rule { range, ..Rule::new(Action::Delay(ns)).on(&[Op::Write]) };
        for fault in &faults {
            fault.add(slow(layout.map_offset..layout.bad_offset, 2_000_000));
            fault.add(slow(0..layout.map_offset, 50_000_000));
        }
        let result = Rc::new(std::cell::Cell::new(None));
        let answer = result.clone();
        reactor::current().spawn(async move {
            answer.set(Some(write(&*channel, 0, 7, 48 << 10).await));
        });
        reactor::current().sleep(100_000).await;
        let failing = array.clone();
        reactor::current().spawn(async move { failing.fail(1).await.unwrap() });
        reactor::current().sleep(20_000_000).await;
        assert_eq!(result.get(), None);
        for fault in [&faults[0], &faults[2], &faults[3]] {
            let strip = read(&*fault.open_channel().unwrap(), layout.data_offset, 16 << 10).await.unwrap();
            assert!(strip.iter().all(|byte| *byte == 0), "a strip was written");
        }
        while result.get().is_none() {
            reactor::current().sleep(1_000_000).await;
        }
        assert_eq!(result.get(), Some(Ok(())));
    });
}

#[test]
fn an_array_that_has_lost_too_many_members_answers_with_errors_only() {
    reactor::run(async {
        let (array, faults) = start(&config(Level::Raid5, 1, 3, 1), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        for slot in [0, 1] {
            faults[slot].add(Rule::new(Action::Error(IoError::DeviceGone)));
        }
        assert_eq!(write(&*channel, 0, 1, 64 << 10).await, Err(IoError::Medium));
        assert_eq!(read(&*channel, 0, 4096).await, Err(IoError::Medium));
        assert!(array.is_frozen());
    });
}

#[test]
fn a_bad_block_is_computed_from_the_others_and_written_again() {
    reactor::run(async {
        let (array, faults) = start(&config(Level::Raid5, 1, 3, 1), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        let before = read(&*channel, 0, 256 << 10).await.unwrap();
        let reads = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]);
        faults[1].add(Rule { count: Some(3), ..reads });
        assert!(read(&*channel, 0, 256 << 10).await.unwrap() == before);
        assert!(array.counters().repairs.load(std::sync::atomic::Ordering::Relaxed) > 0);
        assert!(array.slots().iter().all(|slot| slot.state == SlotState::Live));
    });
}

#[test]
fn an_unreadable_log_block_of_a_member_that_is_rebuilt_costs_the_progress_and_no_start() {
    reactor::run(async {
        let shape = config(Level::Raid5, 1, 3, 1);
        let (faults, bad) = scarred::Scarred::disks(4);
        let array = restart(&shape, &faults, &[], true).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        array.fail(2).await.unwrap();
        let layout = Layout::new(MEMBER_BYTES, &shape).unwrap();
        let newcomer = Attached { device: faults[2].clone(), layout };
        array.start_filling(2, Uuid::random().unwrap(), newcomer).await.unwrap();
        array.fill_stripe(2, 0).await.unwrap();
        array.advance(2, 1);
        array.checkpoint(2).await.unwrap();
        write(&*channel, 0, 7, 4096).await.unwrap();
        let before = read(&*channel, 0, 1 << 20).await.unwrap();
        drop((channel, array));
        bad[2].lock().unwrap().insert(layout.log_offset + u64::from(shape.lane_bytes) - scarred::BLOCK);
        let array = restart(&shape, &faults, &[], false).await;
        assert_eq!(array.slots()[2].filled, Some(0));
        assert_eq!(array.count_regions(NEED_SYNC), 0);
        assert!(bad[2].lock().unwrap().is_empty(), "the block was written again");
        assert!(read(&*array.open_channel().unwrap(), 0, 1 << 20).await.unwrap() == before);
    });
}

#[test]
fn a_new_member_is_filled_while_writes_go_on() {
    reactor::run(async {
        let shape = config(Level::Raid6, 1, 4, 2);
        let (array, faults) = start(&shape, &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 2 << 20).await;
        faults[2].add(Rule::new(Action::Error(IoError::DeviceGone)));
        write(&*channel, 0, 7, 128 << 10).await.unwrap();
        let device = Arc::new(MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap());
        let layout = Layout::new(MEMBER_BYTES, &shape).unwrap();
        let uuid = Uuid::random().unwrap();
        array.start_filling(2, uuid, Attached { device, layout }).await.unwrap();
        for stripe in 0..shape.geometry.stripes() {
            array.fill_stripe(2, stripe).await.unwrap();
            if stripe % 64 == 63 {
                array.advance(2, stripe + 1);
                array.checkpoint(2).await.unwrap();
                write(&*channel, stripe * 4096, stripe as u8, 64 << 10).await.unwrap();
            }
        }
        array.finish_filling(2, uuid).await.unwrap();
        assert!(array.slots().iter().all(|slot| slot.state == SlotState::Live));
        let before = read(&*channel, 0, 1 << 20).await.unwrap();
        assert_eq!(scrub(&array).await, 0);
        array.fail(0).await.unwrap();
        array.fail(1).await.unwrap();
        assert_eq!(array.fail(3).await, Err(IoError::Invalid), "the array would not survive");
        assert!(read(&*channel, 0, 1 << 20).await.unwrap() == before);
    });
}

#[test]
fn an_epoch_begins_when_other_members_are_live_and_not_when_a_core_joins() {
    reactor::run_simulated_cores(1, 2, |_, cores: Vec<reactor::Core>| async move {
        let (array, _) = start(&config(Level::Raid6, 1, 4, 2), &[]).await;
        let _channel = array.open_channel().unwrap();
        let before = array.table();
        let _other = cores[1].with_current(|| array.open_channel()).unwrap();
        cores[0].sleep(1_000_000_000).await;
        let joined = array.table();
        // An interrupted commit is on some members only. These have not continued without the
        // others.
        assert!(joined.nonce != before.nonce && joined.generation > before.generation);
        assert_eq!(joined.history, before.history);
        array.fail(3).await.unwrap();
        assert_eq!(array.table().epoch, before.epoch + 1);
    });
}

/// An array of three cores; core 1 commits, and core 0 has the channel and owns the last lanes.
async fn start_on_three(cores: &[reactor::Core]) -> (Arc<Array>, Faults, Rc<dyn Channel>) {
    let (array, faults) = start(&config(Level::Raid6, 1, 4, 2), &[]).await;
    for core in [&cores[1], &cores[2]] {
        core.with_current(|| array.open_channel()).unwrap();
        cores[0].sleep(1_000_000_000).await;
    }
    let channel = array.open_channel().unwrap();
    cores[0].sleep(1_000_000_000).await;
    assert_eq!(array.shared.common.owner_cores().len(), 3);
    (array, faults, channel)
}

/// Writes to some stripes at the same time: to those that this core owns, or to the others.
async fn write_at_once(array: &Array, channel: &dyn Channel, are_own: bool) {
    let owner = registry::find(array.shared.id).unwrap();
    let is_chosen = |offset: &u64| owner.owns(array.config().geometry.locate(*offset).stripe) == are_own;
    let offsets = (0..1 << 20).step_by(64 << 10).filter(is_chosen);
    let writes: Vec<_> = offsets.map(|offset| write(channel, offset, 7, 4096)).collect();
    assert!(writes.len() > 1);
    assert!(crate::metadata::all(writes).await.iter().all(Result::is_ok));
}

#[test]
fn a_gate_that_the_committing_core_left_closed_is_opened_once_after_its_end() {
    reactor::run_simulated_cores(1, 3, |_, cores: Vec<reactor::Core>| async move {
        let (array, faults, channel) = start_on_three(&cores).await;
        delay_superblocks(&faults, &[0]);
        let closing = array.clone();
        cores[0].spawn(async move {
            assert_eq!(closing.rewrite_log(Vec::new()).await, Err(IoError::DeviceGone));
        });
        cores[0].sleep(5_000_000).await;
        assert!(registry::find(array.shared.id).unwrap().gate.try_enter().is_none());
        let before = array.table();
        cores[1].end_simulated();
        write_at_once(&array, &*channel, true).await;
        let after = array.table();
        assert_eq!(array.shared.common.owner_cores().len(), 2);
        // Members may have a table of the next generation.
        assert!(after.generation == before.generation + 2 && after.nonce != before.nonce);
    });
}

#[test]
fn many_requests_for_stripes_of_a_core_that_has_ended_share_a_commit() {
    reactor::run_simulated_cores(1, 3, |_, cores: Vec<reactor::Core>| async move {
        let (array, faults, channel) = start_on_three(&cores).await;
        delay_superblocks(&faults, &[0]);
        let before = array.table();
        cores[1].end_simulated();
        write_at_once(&array, &*channel, false).await;
        assert_eq!(array.shared.common.owner_cores().len(), 2);
        assert_eq!(array.table().generation, before.generation + 1);
    });
}

#[test]
fn a_scrub_finds_parity_that_does_not_fit_and_mends_it() {
    reactor::run(async {
        let shape = config(Level::Raid5, 1, 3, 1);
        let (array, faults) = start(&shape, &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        let layout = Layout::new(MEMBER_BYTES, &shape).unwrap();
        // The parity of stripe 0 is on the last member.
        let member = faults[3].open_channel().unwrap();
        write(&*member, layout.data_offset + 4096, 0x55, 4096).await.unwrap();
        assert_eq!(array.scrub_stripe(0, false).await.unwrap().mismatches, 0b1000);
        assert_eq!(array.scrub_stripe(0, true).await.unwrap().mismatches, 0b1000);
        assert_eq!(array.scrub_stripe(0, true).await.unwrap().mismatches, 0);
        assert_eq!(scrub(&array).await, 0);
    });
}

#[test]
fn an_array_starts_again_with_what_it_had() {
    reactor::run(async {
        let shape = config(Level::Raid5, 1, 3, 1);
        let (array, faults) = start(&shape, &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        let before = read(&*channel, 0, 1 << 20).await.unwrap();
        array.stop().await.unwrap();
        drop((array, channel));
        for absent in [&[][..], &[3], &[3]] {
            let array = restart(&shape, &faults, absent, false).await;
            let channel = array.open_channel().unwrap();
            assert!(read(&*channel, 0, 1 << 20).await.unwrap() == before);
        }
    });
}

#[test]
fn zeroes_and_discards_leave_parity_right() {
    reactor::run(async {
        let (array, _) = start(&config(Level::Raid6, 1, 4, 2), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 2 << 20).await;
        let zeroes = Request::write_zeroes(300 << 10, Flags::NONE);
        channel.submit(&zeroes, 5 << 10).await.unwrap();
        channel.submit(&Request::discard(512 << 10), 1 << 20).await.unwrap();
        let bytes = read(&*channel, 0, 512 << 10).await.unwrap();
        assert!(bytes[5 << 10..305 << 10].iter().all(|b| *b == 0) && bytes[305 << 10] != 0);
        assert_eq!(scrub(&array).await, 0);
    });
}

#[test]
fn a_full_stripe_from_scattered_memory_has_the_parity_of_what_was_written() {
    reactor::run(async {
        let bitmap = |config| ArrayConfig { consistency: Consistency::Bitmap, ..config };
        let raid6 = config(Level::NPlusM, 1, 5, 2);
        for config in [config(Level::NPlusM, 1, 3, 1), raid6.clone(), bitmap(raid6)] {
            let (array, faults) = start(&config, &[]).await;
            let channel = array.open_channel().unwrap();
            let len = config.geometry.stripe_bytes() as usize;
            // Borders of segments inside blocks, between blocks, and in the middle of a line.
            for lens in [&[len][..], &[512, 4096, len - 4608], &[1000, 3096, 24, 30000, len - 34120]] {
                let mut buffer = reactor::current().buffers().take(len + 8).await;
                let noise =
                    |i: usize| ((i as u64 ^ len as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8;
                buffer.as_mut_slice().iter_mut().enumerate().for_each(|(i, byte)| *byte = noise(i));
                let expected = buffer.as_slice()[8..].to_vec();
                let (_, result) =
                    buffer.transfer_in_segments(&*channel, Op::Write, Flags::NONE, len as u64, 8, lens).await;
                result.unwrap();
                assert_eq!(scrub(&array).await, 0, "segments of {lens:?}");
                assert!(read(&*channel, len as u64, len).await.unwrap() == expected, "{lens:?}");
            }
            let before = read(&*channel, len as u64, len).await.unwrap();
            faults[1].add(Rule::new(Action::Error(IoError::DeviceGone)));
            assert!(read(&*channel, len as u64, len).await.unwrap() == before);
        }
    });
}

fn bitmap() -> ArrayConfig {
    ArrayConfig { consistency: Consistency::Bitmap, ..config(Level::Raid5, 1, 3, 1) }
}

#[test]
fn once_a_member_has_gone_nothing_is_dirty_and_a_crash_leaves_nothing_unreadable() {
    reactor::run(async {
        let (array, faults) = start(&bitmap(), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        let before = read(&*channel, 0, 1 << 20).await.unwrap();
        assert!(array.count_regions(DIRTY) > 0 && !array.table().is_logging);
        array.fail(1).await.unwrap();
        assert!(array.table().is_logging);
        reactor::current().sleep(50_000_000).await;
        assert_eq!(array.count_regions(DIRTY), 0);
        drop((channel, array));
        let array = restart(&bitmap(), &faults, &[1], false).await;
        assert_eq!(array.count_regions(NEED_SYNC), 0);
        assert!(read(&*array.open_channel().unwrap(), 0, 1 << 20).await.unwrap() == before);
    });
}

#[test]
fn marks_of_an_idle_array_go_although_the_committing_core_has_ended() {
    for is_degraded in [false, true] {
        reactor::run_simulated_cores(1, 2, move |_, cores: Vec<reactor::Core>| async move {
            let (array, faults) = start(&bitmap(), &[]).await;
            let _other = cores[1].with_current(|| array.open_channel()).unwrap();
            let channel = array.open_channel().unwrap();
            cores[0].sleep(100_000_000).await;
            fill(&*channel, 1 << 20).await;
            let before = read(&*channel, 0, 1 << 20).await.unwrap();
            if is_degraded {
                array.fail(2).await.unwrap(); // it leaves marks, and a task that takes them away
            }
            assert!(array.count_regions(DIRTY) > 0);
            cores[1].end_simulated();
            // With a member missing, before the next sweep of core 0.
            cores[0].sleep(if is_degraded { 20_000_000 } else { 3_000_000_000 }).await;
            assert_eq!(array.count_regions(DIRTY), 0);
            drop((channel, array));
            let absent = if is_degraded { &[2][..] } else { &[] };
            let array = restart(&bitmap(), &faults, absent, false).await;
            assert_eq!(array.count_regions(NEED_SYNC), 0);
            assert!(read(&*array.open_channel().unwrap(), 0, 1 << 20).await.unwrap() == before);
        });
    }
}

#[test]
fn a_new_core_that_succeeds_the_committing_one_takes_marks_of_a_failure_away() {
    reactor::run_simulated_cores(1, 3, |_, cores: Vec<reactor::Core>| async move {
        let (array, _) = start(&bitmap(), &[]).await;
        let writing = array.clone();
        cores[1].spawn(async move { fill(&*writing.open_channel().unwrap(), 1 << 20).await });
        cores[0].sleep(100_000_000).await;
        array.fail(2).await.unwrap();
        assert!(array.count_regions(DIRTY) > 0);
        cores[1].end_simulated();
        let _channel = cores[2].with_current(|| array.open_channel()).unwrap();
        // Less than until the next sweep of core 0.
        cores[0].sleep(100_000_000).await;
        assert_eq!(array.count_regions(DIRTY), 0);
    });
}

#[test]
fn a_write_that_starts_over_leaves_no_mark_when_it_has_ended() {
    reactor::run(async {
        let (array, faults) = start(&bitmap(), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        faults[1].add(Rule { count: Some(2), ..Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]) });
        for stripe in 0..4 {
            write(&*channel, stripe * (48 << 10), 7, 4096).await.unwrap();
        }
        assert!(array.counters().read_errors.load(std::sync::atomic::Ordering::Relaxed) > 0);
        let regions = &array.shared.common.regions;
        assert!((0..regions.regions()).all(|region| regions.sweep_idle(region)));
        assert_eq!(array.count_regions(DIRTY), 0);
    });
}

#[test]
fn a_member_lost_after_a_crash_leaves_dirty_regions_without_it_until_a_start_is_forced() {
    reactor::run(async {
        let (array, faults) = start(&bitmap(), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, 1 << 20).await;
        let before = read(&*channel, 0, 1 << 20).await.unwrap();
        drop((channel, array));
        let array = restart(&bitmap(), &faults, &[], false).await;
        let channel = array.open_channel().unwrap();
        assert!(array.count_regions(NEED_SYNC | OPEN) > 0 && array.count_regions(DIRTY) == 0);
        assert!(read(&*channel, 0, 1 << 20).await.unwrap() == before);
        array.fail(1).await.unwrap();
        let blocks = (0..1 << 20).step_by(16 << 10);
        let mut lost = Vec::new();
        for offset in blocks {
            match read(&*channel, offset, 4096).await {
                Ok(bytes) => assert!(bytes == before[offset as usize..][..4096]),
                Err(error) => lost.push((offset, error)),
            }
        }
        assert!(lost.len() > 10 && lost.iter().all(|(_, error)| *error == IoError::Medium));
        assert_eq!(
            write(&*channel, lost[0].0, 1, 4096).await,
            Err(IoError::Medium),
            "no member could read it"
        );
        drop((channel, array));
        let array = start_again(&bitmap(), &faults, &[1], true).await;
        assert!(read(&*array.open_channel().unwrap(), 0, 1 << 20).await.unwrap() == before);
    });
}

/// A mirror of three in which slot 1 has an incoming device, with its first 64 stripes done; also
/// returns the device that fills it.
async fn start_filled_in_part() -> (Arc<Array>, Faults, Arc<Fault>) {
    let shape = config(Level::Raid1, 1, 1, 2);
    let (array, faults) = start(&shape, &[1]).await;
    let device = Arc::new(Fault::new(Arc::new(MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap())));
    let layout = Layout::new(MEMBER_BYTES, &shape).unwrap();
    let incoming = Attached { device: device.clone(), layout };
    array.start_filling(1, Uuid::random().unwrap(), incoming).await.unwrap();
    for stripe in 0..64 {
        array.fill_stripe(1, stripe).await.unwrap();
    }
    array.advance(1, 64);
    array.checkpoint(1).await.unwrap();
    (array, faults, device)
}

/// Whether the member's superblock says that slot 1 is used.
async fn says_that_slot_1_is_in(member: &Fault) -> bool {
    let found = read_superblock("m", &*member.open_channel().unwrap(), MEMBER_BYTES).await.unwrap();
    let crate::metadata::Label::Member(superblock) = &found.label else { panic!("a member") };
    superblock.table.members[1].is_in()
}

#[test]
fn a_device_that_is_being_filled_and_misses_a_superblock_is_out_for_all_others() {
    reactor::run(async {
        let (array, faults, device) = start_filled_in_part().await;
        assert!(says_that_slot_1_is_in(&faults[0]).await);
        // Both copies, once: afterwards the device looks like a good one.
        device.add(Rule { count: Some(2), ..Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]) });
        array.checkpoint(1).await.unwrap();
        assert_eq!(array.slots()[1].filled, None);
        assert!(!array.table().members[1].is_in() && !says_that_slot_1_is_in(&faults[0]).await);
    });
}

/// Delays superblock writes on some members.
fn delay_superblocks(faults: &Faults, members: &[usize]) {
    for member in members {
        for superblocks in [4096..32768, MEMBER_BYTES - 32768..MEMBER_BYTES] {
            let late = Rule::new(Action::Delay(50_000_000)).on(&[Op::Write]);
            faults[*member].add(late.within(superblocks));
        }
    }
}

#[test]
fn a_write_that_skips_a_device_that_was_being_filled_waits_for_the_commit_on_the_others() {
    reactor::run_simulated(1, |_| async {
        let (array, faults, _device) = start_filled_in_part().await;
        let channel = array.open_channel().unwrap();
        delay_superblocks(&faults, &[0, 2]);
        let stopping = array.clone();
        reactor::current().spawn(async move { stopping.stop_filling(1).await.unwrap() });
        reactor::current().sleep(5_000_000).await;
        assert!(array.slots()[1].filled.is_none() && says_that_slot_1_is_in(&faults[0]).await);
        write(&*channel, 0, 7, 4096).await.unwrap();
        assert!(!says_that_slot_1_is_in(&faults[0]).await && !says_that_slot_1_is_in(&faults[2]).await);
    });
}

#[test]
fn a_read_of_copies_that_may_differ_waits_until_the_failure_of_a_member_is_committed() {
    reactor::run_simulated(1, |_| async {
        let shape = config(Level::Raid1, 1, 1, 2);
        let (array, faults) = start(&shape, &[]).await;
        write(&*array.open_channel().unwrap(), 0, 7, 4096).await.unwrap();
        drop(array);
        let array = restart(&shape, &faults, &[], false).await;
        let channel = array.open_channel().unwrap();
        assert!(array.region_bits(0) & NEED_SYNC != 0);
        delay_superblocks(&faults, &[0, 2]);
        let failing = array.clone();
        reactor::current().spawn(async move { failing.fail(1).await.unwrap() });
        reactor::current().sleep(5_000_000).await;
        assert_eq!(array.slots()[1].state, SlotState::Failing);
        assert!(says_that_slot_1_is_in(&faults[0]).await);
        read(&*channel, 0, 4096).await.unwrap();
        assert!(!says_that_slot_1_is_in(&faults[0]).await && !says_that_slot_1_is_in(&faults[2]).await);
    });
}

#[test]
fn a_replacement_gets_no_superblock_of_the_member_that_failed_beside_it() {
    reactor::run(async {
        let shape = config(Level::Raid1, 1, 1, 2);
        let (array, faults) = start(&shape, &[]).await;
        let device = Arc::new(MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap());
        let layout = Layout::new(MEMBER_BYTES, &shape).unwrap();
        let incoming = Attached { device: device.clone(), layout };
        array.start_filling(1, Uuid::random().unwrap(), incoming).await.unwrap();
        faults[1].add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]));
        array.checkpoint(1).await.unwrap();
        assert!(!array.table().members[1].is_in() && array.slots()[1].filled.is_none());
        let channel = device.open_channel().unwrap();
        assert!(read_superblock("m", &*channel, MEMBER_BYTES).await.is_err());
    });
}
