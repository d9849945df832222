//! Live members that are copied onto other disks.

use super::*;
use crate::array::Before;
use crate::array::members::Attached;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// A disk as one that may be filled.
fn incoming(rig: &Rig, disk: &Disk) -> Attached {
    let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
    Attached { device: disk.device(), layout }
}

#[test]
fn an_array_without_redundancy_does_not_copy_a_live_member() {
    simulate(|| async {
        let none = ArrayConfig { consistency: Consistency::None, lanes: 0, lane_bytes: 0, ..shape(1, 2, 0) };
        let rig = Rig::new(ArrayConfig { level: Level::Raid0, matrix: Matrix::Copies, ..none }).await;
        rig.write(0, 0x55, 64 << 10).await.unwrap();
        let new = Disk::new();
        let refused = rig.jobs.replace(0, new.device()).await.unwrap_err().to_string();
        assert!(refused.contains("slot 0 is live") && refused.contains("without redundancy"), "{refused}");
        let uuid = rig.array.new_uuid();
        let result = rig.array.start_filling(0, uuid, incoming(&rig, &new)).await;
        assert_eq!(result, Err(IoError::Invalid));
        rig.jobs.idle().await;
        assert_eq!(new.bytes(Op::Write), 0);
        assert!(rig.read_all(64 << 10).await == vec![0x55; 64 << 10]);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_copy_that_another_keeper_ends_has_an_identity_of_its_own() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 1, 1)).await;
        rig.fill(0, 1 << 20, 3).await;
        let (old, new) = (rig.array.table().members[0].uuid, Disk::new());
        rig.jobs.pause();
        // As an earlier keeper has begun it.
        rig.array.start_filling(0, rig.array.new_uuid(), incoming(&rig, &new)).await.unwrap();
        rig.jobs.resume();
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        assert_ne!(rig.array.table().members[0].uuid, old, "two disks would be one member");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_copy_keeps_its_identity_with_another_keeper_and_is_no_spare_meanwhile() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 1, 1)).await;
        let (spare, global) = (Disk::new(), Disk::new());
        for (disk, array) in [(&spare, Some(&rig.config)), (&global, None)] {
            label_spare(&disk.device(), rig.array.new_uuid(), array, 1).await.unwrap();
        }
        let label = found(&spare).await;
        let Label::Spare(known) = &label.label else { panic!("{label:?}") };
        rig.jobs.pause();
        // As an earlier keeper has begun it.
        rig.array.start_filling(0, known.member, incoming(&rig, &spare)).await.unwrap();
        assert_eq!(rig.array.members().incoming_uuid(0), Some(known.member));
        let refused = rig.jobs.add_found_spare(spare.device(), &label).unwrap_err().to_string();
        assert!(refused.ends_with("the array has it already"), "{refused}");
        let other = found(&global).await;
        rig.jobs.add_found_spare(global.device(), &other).unwrap();
        rig.array.stop_filling(0).await.unwrap();
        rig.jobs.add_found_spare(spare.device(), &label).unwrap();
        assert!(rig.jobs.shared.take_spare(&known.member.to_string()).is_some());
        rig.array.start_filling(0, known.member, incoming(&rig, &spare)).await.unwrap();
        assert!(rig.jobs.add_found_spare(global.device(), &other).is_err(), "it would be two spares");
        rig.jobs.resume();
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        assert_eq!(rig.array.table().members[0].uuid, known.member);
        assert!(rig.jobs.add_found_spare(spare.device(), &label).is_err(), "it is a member");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_device_whose_slot_cannot_be_filled_now_waits_for_it() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        rig.jobs.pause();
        rig.array.fail(0).await.unwrap();
        let disks = [Disk::new(), Disk::new(), Disk::new()];
        rig.array.start_filling(0, rig.array.new_uuid(), incoming(&rig, &disks[0])).await.unwrap();
        let mut keeper = keeper::Keeper::new(rig.jobs.shared.clone());
        for disk in &disks[1..] {
            let (attached, uuid) = (incoming(&rig, disk), rig.array.new_uuid());
            keeper.start_filling(0, Incoming { attached, uuid, before: Before::Anything }).await;
        }
        let left = rig.jobs.shared.look(|state| (state.given.len(), state.dedicated.len()));
        assert_eq!(left, (1, 1));
        rig.jobs.stop().await;
    });
}

#[test]
fn a_member_that_fails_while_its_copy_begins_leaves_its_slot_to_the_copy() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 1, 1)).await;
        rig.jobs.pause();
        let (uuid, new) = (rig.array.new_uuid(), Disk::new());
        let mut fill: Pin<Box<_>> = Box::pin(rig.array.start_filling(0, uuid, incoming(&rig, &new)));
        let mut fail: Pin<Box<_>> = Box::pin(rig.array.fail(0));
        let (mut filled, mut failed) = (None, None);
        std::future::poll_fn(|cx| {
            if failed.is_none()
                && let Poll::Ready(result) = fail.as_mut().poll(cx)
            {
                failed = Some(result);
            }
            if filled.is_none()
                && let Poll::Ready(result) = fill.as_mut().poll(cx)
            {
                filled = Some(result);
            }
            if filled.is_some() && failed.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        assert_eq!(failed, Some(Ok(())));
        let member = &rig.array.table().members[0];
        let is_filled = rig.array.slots()[0].filled.is_some();
        // The superblocks name the disk that fills the slot, or no disk fills it.
        let is_named = member.uuid == uuid && matches!(member.state, MemberState::Rebuilding { .. });
        assert_eq!(is_filled, is_named, "{member:?}, {filled:?}");
        rig.jobs.stop().await;
    });
}

/// Waits 5 s at most until the keeper has mended the array. It asks the keeper for nothing.
async fn is_whole_by_itself(rig: &Rig) -> bool {
    for _ in 0..100 {
        if rig.is_whole() {
            return true;
        }
        sleep_ms(50).await;
    }
    false
}

/// Waits until a copy of the member in slot 0 is under way.
async fn copy_begins(rig: &Rig) {
    while !rig.jobs.status().running.iter().any(|job| job.kind == Kind::Replace && job.done_bytes > 0) {
        sleep_ms(5).await;
    }
}

/// An array (3+1) with 3 MiB of data, and the start of a copy of slot 0 onto a slow disk.
async fn slow_copy() -> (Rig, Vec<u8>, Disk) {
    let rig = Rig::new(shape(1, 3, 1)).await;
    let before = rig.fill(0, 3 << 20, 3).await;
    let new = Disk::new();
    // The write-intent bitmap takes its time at the end of the copy, too.
    new.fault.add(Rule::new(Action::Delay(40_000_000)).on(&[Op::Write]));
    rig.jobs.replace(0, new.device()).await.unwrap();
    copy_begins(&rig).await;
    (rig, before, new)
}

/// The superblock of a disk.
async fn found(disk: &Disk) -> Found {
    let channel = disk.device().open_channel().unwrap();
    read_superblock("disk", &*channel, MEMBER_BYTES).await.unwrap()
}

#[test]
fn a_member_that_fails_while_it_is_copied_is_rebuilt_onto_the_disk_of_the_copy() {
    simulate(|| async {
        let (rig, before, _) = slow_copy().await;
        rig.disks[0].die();
        rig.write(0, before[0], 4096).await.unwrap();
        assert!(!rig.is_whole());
        assert!(is_whole_by_itself(&rig).await, "{:#?}", rig.jobs.status());
        assert!(rig.read_all(3 << 20).await == before);
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(1).await.unwrap();
        assert!(rig.read_all(3 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_copy_whose_member_has_failed_is_no_spare_before_its_slot_is_rebuilt() {
    simulate(|| async {
        let (rig, before, copy) = slow_copy().await;
        let label = found(&copy).await;
        assert!(matches!(label.label, Label::Spare(_)), "{label:?}");
        rig.array.fail(0).await.unwrap();
        // The array has detached the copy. The keeper waits for its answers, and then rebuilds the
        // slot onto it.
        assert!(!rig.array.members().is_filling(0) && rig.jobs.shared.look(|state| state.given.is_empty()));
        let refused = rig.jobs.add_found_spare(copy.device(), &label).unwrap_err().to_string();
        assert!(refused.ends_with("the array has it already"), "{refused}");
        assert!(rig.jobs.check_new(&copy.device()).is_err(), "it would fill two slots");
        rig.jobs.idle().await;
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        let [own, _] = rig.array.members().attached(0);
        assert_eq!(own.unwrap().device.name(), copy.device().name());
        assert!(rig.read_all(3 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_device_with_which_the_keeper_begins_is_no_spare() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        rig.array.fail(0).await.unwrap();
        let new = Disk::new();
        rig.jobs.pause();
        rig.jobs.add(new.device()).await.unwrap();
        let label = found(&new).await;
        // The write-intent bitmap of an empty slot's device is written before the array has it.
        new.fault.add(Rule::new(Action::Delay(40_000_000)).on(&[Op::Write]));
        rig.jobs.resume();
        while rig.jobs.shared.look(|state| state.starting.is_none()) {
            sleep_ms(1).await;
        }
        assert!(!rig.array.members().is_filling(0) && rig.jobs.status().spares.is_empty());
        assert!(rig.jobs.add_found_spare(new.device(), &label).is_err(), "it would fill two slots");
        assert!(rig.jobs.check_new(&new.device()).is_err(), "it would fill two slots");
        rig.jobs.idle().await;
        assert!(rig.is_whole() && rig.jobs.status().spares.is_empty());
        rig.jobs.stop().await;
    });
}

#[test]
fn a_slot_whose_copy_cannot_end_gets_a_spare_when_its_member_fails() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        let before = rig.fill(0, 3 << 20, 3).await;
        let (new, spare) = (Disk::new(), Disk::new());
        rig.jobs.add(spare.device()).await.unwrap();
        rig.jobs.replace(0, new.device()).await.unwrap();
        // It takes the data, and then no metadata.
        let data = incoming(&rig, &new).layout.data_offset;
        new.fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]).within(0..data));
        while !rig
            .jobs
            .status()
            .events
            .iter()
            .any(|event| event.text.contains("was filling slot 0 has failed"))
        {
            sleep_ms(50).await;
        }
        rig.array.fail(0).await.unwrap();
        assert!(is_whole_by_itself(&rig).await, "{:#?}", rig.jobs.status());
        let [own, _] = rig.array.members().attached(0);
        assert_eq!(own.unwrap().device.name(), spare.device().name());
        assert!(rig.read_all(3 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_member_that_fails_while_its_copy_takes_its_place_leaves_the_slot_live() {
    simulate(|| async {
        let (rig, before, _) = slow_copy().await;
        while rig.array.members().cursor(0) < rig.config.geometry.stripes() {
            sleep_ms(1).await;
        }
        sleep_ms(10).await;
        assert!(rig.array.members().is_filling(0), "{:#?}", rig.jobs.status());
        rig.array.fail(0).await.unwrap();
        rig.jobs.idle().await;
        let is_live_in_table = rig.array.table().members[0].state == MemberState::Live;
        assert_eq!(rig.array.members().is_live(0), is_live_in_table);
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        assert!(rig.read_all(3 << 20).await == before);
        rig.jobs.stop().await;
    });
}
