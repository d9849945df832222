//! Members with corrected read errors: which are counted, and what becomes of a member with too
//! many.

use super::*;
use crate::array::WINDOW_NS;
use crate::metadata::MaintenanceChange;

/// Makes data blocks of a slot's member unreadable, each in another stripe; where they are in the
/// array.
fn break_blocks(rig: &Rig, slot: usize, count: usize) -> Vec<u64> {
    let geometry = &rig.config.geometry;
    let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
    let data = |stripe: &u64| geometry.strip_on(*stripe, slot).is_some_and(|strip| strip < geometry.data);
    let places = (0..geometry.group_stripes).filter(data).take(count).map(|stripe| {
        let at = layout.data_offset + geometry.member_offset(stripe);
        let bad = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(at..at + 4096);
        rig.disks[slot].fault.add(bad);
        stripe * geometry.stripe_bytes() + geometry.strip_on(stripe, slot).unwrap() as u64 * STRIP
    });
    places.collect()
}

#[test]
fn a_member_over_its_read_error_budget_is_replaced_while_it_is_read_from() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        let before = rig.fill(0, 4 << 20, 3).await;
        let spare = Disk::new();
        // Slow enough that reads are served meanwhile.
        spare.fault.add(Rule::new(Action::Delay(20_000_000)).on(&[Op::Write]));
        let places = break_blocks(&rig, 0, 21);
        rig.jobs.add(spare.device()).await.unwrap();
        let check =
            async |at: u64| assert!(rig.read(at, 4096).await.unwrap() == before[at as usize..][..4096]);
        for at in &places[..20] {
            check(*at).await;
        }
        sleep_ms(1000).await;
        rig.jobs.idle().await;
        assert_eq!(rig.array.read_errors().total(0), 20);
        assert_eq!(rig.jobs.status().spares.len(), 1, "20 errors are within the budget");
        check(places[20]).await;
        let (mut served, mut reads) = (0, 0);
        for _ in 0..200 {
            sleep_ms(5).await;
            if rig.jobs.status().spares.is_empty() {
                break;
            }
        }
        assert!(rig.jobs.status().spares.is_empty(), "21 errors exceed the budget");
        while rig.jobs.status().totals.jobs == 0 {
            assert!(reads < 100_000, "{:#?}", rig.jobs.status());
            assert!((0..6).all(|slot| rig.array.members().is_live(slot)), "redundancy is never reduced");
            let is_copying = rig.jobs.status().running.iter().any(|job| job.kind == Kind::Replace);
            check(reads * (64 << 10) % (4 << 20)).await;
            (served, reads) = (served + u64::from(is_copying), reads + 1);
            sleep_ms(1).await;
        }
        rig.jobs.idle().await;
        assert!(served > 0, "{:#?}", rig.jobs.status());
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        let device = rig.array.slots()[0].device.clone();
        assert_eq!(device.as_deref(), Some(spare.device().name()));
        assert_ne!(device.as_deref(), Some(rig.disks[0].device().name()));
        assert!(spare.bytes(Op::Write) >= DATA_BYTES / 4 && rig.array.read_errors().total(0) == 0);
        assert_eq!(rig.mismatches().await, 0);
        assert!(rig.read_all(4 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_member_over_its_read_error_budget_stays_without_a_spare_and_one_event_says_so() {
    for (budget, events) in [(20, 1), (5, 1), (22, 0), (0, 0)] {
        simulate(move || async move {
            let mut rig = Rig::new(shape(1, 4, 2)).await;
            let change = MaintenanceChange { read_errors: Some(budget), ..Default::default() };
            let maintenance = change.apply(rig.array.maintenance(), &rig.config).unwrap();
            rig.array.set_maintenance(maintenance).await.unwrap();
            rig = rig.crash(&[]).await;
            let before = rig.fill(0, 4 << 20, 3).await;
            for at in break_blocks(&rig, 0, 22) {
                assert!(rig.read(at, 4096).await.unwrap() == before[at as usize..][..4096]);
                sleep_ms(200).await;
            }
            rig.jobs.idle().await;
            let texts: Vec<String> = rig.jobs.status().events.into_iter().map(|event| event.text).collect();
            assert_eq!(texts.len(), events, "{texts:?}");
            assert!(texts.iter().all(|text| text.starts_with("slot 0: ") && text.contains("no spare")));
            assert!(rig.is_whole() && rig.array.slots()[0].read_errors == 22);
            rig.jobs.stop().await;
        });
    }
}

#[test]
fn a_scrub_that_finds_too_many_unreadable_strips_has_the_member_replaced() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        rig.fill(0, 4 << 20, 3).await;
        let spare = Disk::new();
        rig.jobs.add(spare.device()).await.unwrap();
        break_blocks(&rig, 2, 1);
        for _ in 0..21 {
            // The fault stays when the block is written again, so that every scrub of the stripe
            // fails after it.
            let stripe = (0..6).find(|stripe| rig.config.geometry.strip_on(*stripe, 2).unwrap() < 4).unwrap();
            let _ = rig.array.scrub_stripe(stripe, false).await;
        }
        sleep_ms(1000).await;
        rig.jobs.idle().await;
        let device = rig.array.slots()[2].device.clone();
        assert_eq!(device.as_deref(), Some(spare.device().name()));
        assert_ne!(device.as_deref(), Some(rig.disks[2].device().name()));
        assert!(rig.is_whole() && rig.mismatches().await == 0);
        rig.jobs.stop().await;
    });
}

/// Reads places in the array, whose blocks cannot be read on their member.
async fn read_blocks(rig: &Rig, places: &[u64]) {
    for at in places {
        rig.read(*at, 4096).await.unwrap();
    }
}

fn warnings(rig: &Rig) -> usize {
    let events = rig.jobs.status().events;
    events.iter().filter(|event| event.text.contains("no spare can replace it")).count()
}

#[test]
fn the_warning_about_a_member_over_its_budget_is_repeated_after_an_hour() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        rig.fill(0, 4 << 20, 3).await;
        let places = break_blocks(&rig, 0, 22);
        read_blocks(&rig, &places[..21]).await;
        sleep_ms(1000).await;
        assert_eq!(warnings(&rig), 1);
        // The member stays above the budget: errors of the last hour count in full.
        let minute_ms = WINDOW_NS / 1_000_000 / 60;
        sleep_ms(30 * minute_ms).await;
        read_blocks(&rig, &places[21..]).await;
        sleep_ms(29 * minute_ms).await;
        assert_eq!(warnings(&rig), 1, "within an hour");
        sleep_ms(2 * minute_ms).await;
        assert_eq!(warnings(&rig), 2, "after an hour");
        // Halved twice, the count is within the budget.
        sleep_ms(150 * minute_ms).await;
        assert_eq!(warnings(&rig), 2);
        assert!(rig.is_whole());
        rig.jobs.stop().await;
    });
}

#[test]
fn a_cancelled_replacement_of_a_member_over_its_budget_resets_its_count() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        rig.fill(0, 4 << 20, 3).await;
        let (first, second) = (Disk::new(), Disk::new());
        first.fault.add(Rule::new(Action::Delay(20_000_000)).on(&[Op::Write]));
        let places = break_blocks(&rig, 0, 21);
        rig.jobs.add(first.device()).await.unwrap();
        read_blocks(&rig, &places).await;
        while rig.jobs.status().running.iter().all(|job| job.kind != Kind::Replace) {
            assert_eq!(rig.jobs.status().totals.jobs, 0);
            sleep_ms(1).await;
        }
        rig.jobs.add(second.device()).await.unwrap();
        assert!(rig.array.read_errors().recent(0, rig.array.wall_ns()) > 20);
        rig.jobs.cancel();
        sleep_ms(10_000).await;
        rig.jobs.idle().await;
        assert_eq!(rig.array.read_errors().total(0), 0);
        assert_eq!(rig.array.slots()[0].device.as_deref(), Some(rig.disks[0].device().name()));
        assert_eq!(rig.jobs.status().spares, [second.device().name()], "the next spare is not taken");
        assert!(rig.is_whole() && rig.jobs.status().totals.jobs == 0);
        rig.jobs.stop().await;
    });
}

#[test]
fn read_errors_that_writes_and_rebuilds_get_past_are_counted() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 6, 2)).await;
        rig.fill(0, 6 << 20, 3).await;
        // Modifying parity reads fewer strips than computing it from all data: the old block is
        // read.
        let places = break_blocks(&rig, 0, 3);
        rig.write(places[0], 9, 4096).await.unwrap();
        assert_eq!(rig.array.read_errors().total(0), 1);
        rig.array.fail(1).await.unwrap();
        assert_eq!(rig.array.read_errors().total(0), 1);
        rig.jobs.add(Disk::new().device()).await.unwrap();
        rig.jobs.idle().await;
        assert!(rig.is_whole() && rig.jobs.status().totals.bad == 0);
        assert_eq!(rig.array.read_errors().total(0), 4, "one for each stripe that was filled");
        assert!((1..8).all(|slot| rig.array.read_errors().total(slot) == 0));
        rig.jobs.stop().await;
    });
}
