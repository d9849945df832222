//! Several lost members of one group that are filled in one pass.

use super::*;

/// Loses two members and gives the array two spares, while jobs are held.
async fn lose_two(rig: &Rig, slots: [usize; 2]) -> [Disk; 2] {
    let spares = [Disk::new(), Disk::new()];
    rig.jobs.pause();
    for (slot, spare) in slots.into_iter().zip(&spares) {
        rig.array.fail(slot).await.unwrap();
        rig.jobs.add(spare.device()).await.unwrap();
    }
    spares
}

/// Bytes that the members read, without those that are lost.
fn read(rig: &Rig, lost: &[usize]) -> u64 {
    let is_left = |(slot, _): &(usize, &Disk)| !lost.contains(slot);
    rig.disks.iter().enumerate().filter(is_left).map(|(_, disk)| disk.bytes(Op::Read)).sum()
}

/// Puts the spares among the disks, in the slots that the keeper has chosen.
fn adopt(rig: &mut Rig, spares: &[Disk]) {
    for slot in 0..rig.disks.len() {
        let devices = rig.array.members().attached(slot).into_iter().flatten();
        for attached in devices {
            let is_it = |spare: &&Disk| Arc::ptr_eq(&spare.device(), &attached.device);
            if let Some(spare) = spares.iter().find(is_it) {
                rig.disks[slot] = spare.clone();
            }
        }
    }
}

/// Waits until jobs have filled so many bytes of a slot.
async fn wait_for(rig: &Rig, slot: usize, bytes: u64) {
    let is_there = |job: &Progress| job.slot == Some(slot) && job.done_bytes >= bytes;
    while !rig.jobs.status().running.iter().any(is_there) {
        assert!(!rig.is_whole(), "slot {slot} is full already: {:#?}", rig.jobs.status());
        sleep_ms(1).await;
    }
}

fn slow(disk: &Disk) {
    disk.fault.add(Rule::new(Action::Delay(20_000_000)).on(&[Op::Write]));
}

async fn check_content(rig: &Rig, before: &[u8], lose: &[usize]) {
    assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
    assert_eq!(rig.mismatches().await, 0);
    assert!(rig.read_all(before.len() as u64).await == before);
    for slot in lose {
        rig.array.fail(*slot).await.unwrap();
    }
    assert!(rig.read_all(before.len() as u64).await == before, "without slots {lose:?}");
}

#[test]
fn two_lost_members_are_filled_with_one_read_of_the_others() {
    // Data, parity, strips that are read for a stripe: with 7.3 one parity is compared. Members
    // that are lost at the end.
    let cases: [(usize, usize, u64, &[usize]); 3] =
        [(4, 2, 4, &[2, 3]), (3, 3, 4, &[2, 3, 4]), (1, 2, 1, &[2, 1])];
    for (data, parity, strips, lose) in cases {
        simulate(move || async move {
            let rig = Rig::new(shape(1, data, parity)).await;
            let before = rig.fill(0, rig.config.geometry.capacity(), 3).await;
            lose_two(&rig, [0, 1]).await;
            let reads = read(&rig, &[0, 1]);
            rig.jobs.resume();
            rig.jobs.idle().await;
            let reads = read(&rig, &[0, 1]) - reads;
            let pass = strips * DATA_BYTES;
            assert!(
                (pass..pass + (64 << 10)).contains(&reads),
                "{data}+{parity}: {reads} bytes, {pass} in a pass"
            );
            assert_eq!(rig.jobs.status().totals.jobs, 2);
            check_content(&rig, &before, lose).await;
            rig.jobs.stop().await;
        });
    }
}

#[test]
fn when_one_newcomer_fails_the_other_is_filled_to_the_end() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        let before = rig.fill(0, rig.config.geometry.capacity(), 3).await;
        let spares = lose_two(&rig, [1, 3]).await;
        spares.iter().for_each(slow);
        rig.jobs.resume();
        wait_for(&rig, 3, DATA_BYTES / 4).await;
        spares[0].die();
        while rig.array.members().is_filling(1) {
            sleep_ms(1).await;
        }
        assert!(rig.array.members().cursor(3) > 0 && rig.array.members().is_filling(3));
        rig.jobs.idle().await;
        assert!(rig.array.members().is_live(3) && !rig.array.members().is_live(1));
        let written = spares[1].bytes(Op::Write);
        assert!(written < DATA_BYTES * 5 / 4, "{written} bytes: no strip is filled twice");
        rig.jobs.add(Disk::new().device()).await.unwrap();
        rig.jobs.idle().await;
        check_content(&rig, &before, &[0, 2]).await;
        rig.jobs.stop().await;
    });
}

#[test]
fn a_pass_over_two_newcomers_goes_on_after_a_crash() {
    simulate(|| async {
        let mut rig = Rig::new(shape(1, 4, 2)).await;
        let before = rig.fill(0, rig.config.geometry.capacity(), 3).await;
        let spares = lose_two(&rig, [1, 3]).await;
        spares.iter().for_each(slow);
        rig.jobs.resume();
        wait_for(&rig, 1, DATA_BYTES / 2).await;
        adopt(&mut rig, &spares);
        let rig = rig.crash(&[]).await;
        for slot in [1, 3] {
            let at = rig.array.members().cursor(slot) * STRIP;
            assert!((DATA_BYTES / 4..DATA_BYTES).contains(&at), "slot {slot} begins at {at}");
        }
        let (reads, pass) = (read(&rig, &[1, 3]), 4 * DATA_BYTES);
        rig.jobs.idle().await;
        let reads = read(&rig, &[1, 3]) - reads;
        assert!(reads < pass * 3 / 4 + (1 << 20), "{reads} bytes: one pass over the rest");
        check_content(&rig, &before, &[0, 2]).await;
        rig.jobs.stop().await;
    });
}

#[test]
fn a_second_spare_joins_a_pass_that_has_just_begun_and_waits_for_one_that_has_come_far() {
    for (begun, is_joint) in [(0, true), (DATA_BYTES * 2 / 5, false)] {
        simulate(move || async move {
            let mut rig = Rig::new(shape(1, 4, 2)).await;
            rig.jobs.stop().await;
            let window_bytes = 4 * 6 * STRIP as usize;
            rig.jobs = rig.array.keep(Options { window_bytes, ..options() }).unwrap();
            let before = rig.fill(0, rig.config.geometry.capacity(), 3).await;
            rig.array.fail(1).await.unwrap();
            rig.array.fail(3).await.unwrap();
            let [first, second] = [Disk::new(), Disk::new()];
            slow(&first);
            rig.jobs.add(first.device()).await.unwrap();
            wait_for(&rig, 1, begun).await;
            rig.jobs.add(second.device()).await.unwrap();
            while !rig.array.members().is_filling(3) {
                sleep_ms(1).await;
            }
            assert_eq!(!rig.array.members().is_live(1), is_joint, "at {begun}");
            rig.jobs.idle().await;
            check_content(&rig, &before, &[0, 2]).await;
            rig.jobs.stop().await;
        });
    }
}
