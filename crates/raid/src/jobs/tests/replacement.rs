//! Live members that are copied onto other disks.

use super::*;
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
        // The superblocks name the disk that is being filled, or none is.
        let is_named = member.uuid == uuid && matches!(member.state, MemberState::Rebuilding { .. });
        assert_eq!(is_filled, is_named, "{member:?}, {filled:?}");
        rig.jobs.stop().await;
    });
}
