//! Scheduled scrubs, over hours of virtual time.

use super::*;
use crate::metadata::{Maintenance, Window};

const SECOND_NS: u64 = 1_000_000_000;
const HOUR_NS: u64 = 3600 * SECOND_NS;

/// A whole array that is scrubbed every hour, with some data.
async fn hourly(window: Option<Window>) -> Rig {
    let rig = Rig::with_table(shape(1, 4, 2), move |table| {
        table.maintenance =
            Maintenance { scrub_period_s: 3600, scrub_window: window, ..Maintenance::default() };
    })
    .await;
    rig.fill(0, 16 << 20, 3).await;
    rig
}

/// Makes a scrub take more than a minute.
fn slow_down(rig: &Rig) {
    rig.disks[0].fault.add(Rule::new(Action::Delay(10 * SECOND_NS)).on(&[Op::Read]));
}

fn due_ns(rig: &Rig) -> u64 {
    rig.array.table().next_scrub_ns(rig.array.wall_ns()).unwrap()
}

async fn sleep_until(rig: &Rig, at_ns: u64) {
    reactor::current().sleep(at_ns.saturating_sub(rig.array.wall_ns())).await;
}

/// How many scheduled scrubs have started and finished, by their events.
fn turns(rig: &Rig) -> (usize, usize) {
    let events = rig.jobs.status().events;
    let count = |what: &str| events.iter().filter(|event| event.what == what).count();
    (count("scrub started by schedule"), count("scrub finished by schedule"))
}

fn is_checking(rig: &Rig) -> bool {
    rig.jobs.status().running.iter().any(|job| job.kind == Kind::Check)
}

#[test]
fn a_scheduled_scrub_checks_the_array_once_in_each_period() {
    simulate(|| async {
        let rig = hourly(None).await;
        rot_in(&rig, 7, 2).await;
        let first_ns = due_ns(&rig);
        assert!(first_ns > HOUR_NS / 10 * 9 && first_ns <= HOUR_NS + 1);
        sleep_until(&rig, first_ns - SECOND_NS).await;
        assert_eq!((turns(&rig), rig.array.table().scrubbed_ns), ((0, 0), 0));
        sleep_until(&rig, first_ns + 10 * SECOND_NS).await;
        rig.jobs.idle().await;
        assert_eq!(turns(&rig), (1, 1));
        let report = rig.jobs.status().scrub.unwrap();
        assert!(report.is_complete && !report.is_repairing && report.mismatched_rows == 1);
        let table = rig.array.table();
        assert!(table.scrubbed_ns >= first_ns && table.scrubbed_ns < first_ns + 10 * SECOND_NS);
        assert_eq!((table.scrub_cursor, table.scrub_is_scheduled), (None, false));
        // A scrub that was asked for counts as well.
        sleep_until(&rig, first_ns + HOUR_NS / 2).await;
        rig.jobs.scrub(true);
        rig.jobs.idle().await;
        assert_eq!(rig.mismatches().await, 0);
        let second_ns = due_ns(&rig);
        assert!(second_ns > first_ns + HOUR_NS / 10 * 14);
        sleep_until(&rig, second_ns - SECOND_NS).await;
        assert_eq!(turns(&rig), (1, 1));
        sleep_until(&rig, second_ns + 10 * SECOND_NS).await;
        assert_eq!(turns(&rig), (2, 2));
        rig.jobs.stop().await;
    });
}

#[test]
fn a_scheduled_scrub_stops_with_its_window_and_resumes_in_the_next() {
    simulate(|| async {
        let window = Window { start_minute: 61, end_minute: 62 };
        let rig = hourly(Some(window)).await;
        slow_down(&rig);
        let minute_ns = 60 * SECOND_NS;
        assert_eq!(due_ns(&rig), 61 * minute_ns);
        sleep_until(&rig, 61 * minute_ns - SECOND_NS).await;
        assert_eq!(turns(&rig), (0, 0));
        sleep_until(&rig, 61 * minute_ns + 30 * SECOND_NS).await;
        assert!(turns(&rig) == (1, 0) && is_checking(&rig));
        // Stripes that are under way when the window closes are compared.
        sleep_until(&rig, 62 * minute_ns + 30 * SECOND_NS).await;
        assert!(turns(&rig) == (1, 0) && !is_checking(&rig));
        let table = rig.array.table();
        let cursor = table.scrub_cursor.unwrap();
        assert!(cursor > 0 && table.scrub_is_scheduled);
        let compared = rig.jobs.status().scrub.unwrap().stripes;
        sleep_until(&rig, 70 * minute_ns).await;
        assert_eq!(rig.array.table().scrub_cursor, Some(cursor));
        // The rest of the day passes without power. A start that reads slowly would take a minute.
        rig.disks[0].fault.clear();
        let rig = rig.crash_until(24 * HOUR_NS + 61 * minute_ns - 5 * SECOND_NS, &[]).await;
        slow_down(&rig);
        sleep_ms(4000).await;
        assert!(!is_checking(&rig), "the window is closed");
        sleep_ms(3000).await;
        assert!(is_checking(&rig));
        rig.disks[0].fault.clear();
        sleep_ms(30_000).await;
        assert_eq!(turns(&rig), (0, 1), "it is the same scrub");
        let report = rig.jobs.status().scrub.unwrap();
        assert!(report.is_complete && report.stripes <= 256 - compared, "{report:?} after {compared}");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_cancelled_scheduled_scrub_does_not_start_again_before_its_next_turn() {
    for replaces_it in [false, true] {
        simulate(move || async move {
            let rig = hourly(None).await;
            slow_down(&rig);
            let first_ns = due_ns(&rig);
            sleep_until(&rig, first_ns + 15 * SECOND_NS).await;
            assert!(is_checking(&rig) && turns(&rig) == (1, 0));
            if replaces_it {
                rig.jobs.scrub(true); // takes the place of the scheduled one
                sleep_ms(30_000).await;
            }
            rig.jobs.cancel();
            sleep_ms(60_000).await;
            rig.jobs.idle().await;
            let table = rig.array.table();
            assert!(table.scrub_cursor.is_none() && table.scrubbed_ns == 0 && table.scrub_cancelled_s > 0);
            let rig = rig.crash(&[]).await;
            rig.disks[0].fault.clear();
            let second_ns = due_ns(&rig);
            assert!(second_ns > first_ns + HOUR_NS / 10 * 9);
            sleep_until(&rig, second_ns - SECOND_NS).await;
            assert_eq!(turns(&rig), (0, 0));
            sleep_until(&rig, second_ns + 10 * SECOND_NS).await;
            assert_eq!(turns(&rig), (1, 1));
            rig.jobs.stop().await;
        });
    }
}

#[test]
fn a_degraded_array_postpones_its_scheduled_scrub() {
    simulate(|| async {
        let rig = hourly(None).await;
        slow_down(&rig);
        let first_ns = due_ns(&rig);
        sleep_until(&rig, first_ns + 15 * SECOND_NS).await;
        assert!(is_checking(&rig));
        // One that runs stops when a member fails, and one that was asked for runs all the same.
        rig.array.fail(1).await.unwrap();
        sleep_ms(30_000).await;
        assert!(!is_checking(&rig) && rig.array.table().scrub_is_scheduled);
        rig.disks[0].fault.clear();
        let cursor = rig.array.table().scrub_cursor;
        sleep_ms(600_000).await;
        assert_eq!((turns(&rig), rig.array.table().scrub_cursor), ((1, 0), cursor));
        rig.jobs.add(Disk::new().device()).await.unwrap();
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        sleep_ms(10_000).await;
        assert_eq!(turns(&rig), (1, 1), "it resumes");
        // Without a schedule none is due, and one that waits is forgotten.
        rig.array.fail(2).await.unwrap();
        let off = Maintenance { scrub_period_s: 0, ..rig.array.maintenance() };
        sleep_until(&rig, due_ns(&rig) + 10 * SECOND_NS).await;
        assert_eq!(turns(&rig), (1, 1));
        rig.array.set_maintenance(off).await.unwrap();
        rig.jobs.add(Disk::new().device()).await.unwrap();
        rig.jobs.idle().await;
        sleep_ms(10_000).await;
        assert_eq!(turns(&rig), (1, 1));
        assert!(rig.is_whole() && !rig.array.table().scrub_is_scheduled);
        rig.jobs.stop().await;
    });
}
