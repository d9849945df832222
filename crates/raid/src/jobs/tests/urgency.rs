//! Rates of rebuilds while requests run, under virtual time.

use super::*;
use std::cell::Cell;

/// The minimum rate in these tests, in bytes per second.
const FLOOR: u64 = 256 << 10;

/// Work runs at its minimum rate while there are requests: none of them meets its target.
fn at_floor() -> Pace {
    let latency_target_ns = Some(1);
    Pace { least_bytes_per_s: FLOOR, least_percent: 0, latency_target_ns, ..Pace::default() }
}

/// An array under load from the start, with a spare that takes 100 ms for a write.
struct Busy {
    rig: Rig,
    has_ended: Rc<Cell<bool>>,
}

impl Busy {
    async fn new(config: ArrayConfig) -> Busy {
        let mut rig = Rig::new(config).await;
        rig.jobs.stop().await;
        rig.jobs = rig.array.keep(Options { pace: at_floor(), ..options() }).unwrap();
        rig.fill(0, rig.config.geometry.capacity(), 3).await;
        for disk in &rig.disks {
            disk.fault.add(Rule::new(Action::Delay(200_000)));
        }
        let has_ended = Rc::new(Cell::new(false));
        let (channel, is_over) = (rig.array.open_channel().unwrap(), has_ended.clone());
        reactor::current().spawn(async move {
            while !is_over.get() {
                let buffer = reactor::current().buffers().take(4096).await;
                buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await.1.unwrap();
                sleep_ms(1).await;
            }
        });
        Busy { rig, has_ended }
    }

    /// Loses a member, and returns when its rebuild runs.
    async fn lose(&self, slot: usize) {
        self.rig.array.fail(slot).await.unwrap();
        let spare = Disk::new();
        spare.fault.add(Rule::new(Action::Delay(100_000_000)).on(&[Op::Write]));
        self.rig.jobs.add(spare.device()).await.unwrap();
        while self.running().is_none() {
            sleep_ms(1).await;
        }
    }

    fn running(&self) -> Option<Progress> {
        self.rig.jobs.status().running.pop()
    }

    async fn end(self) {
        self.has_ended.set(true);
        self.rig.jobs.stop().await;
        sleep_ms(10).await;
    }
}

#[test]
fn the_floor_of_a_rebuild_counts_the_bytes_of_one_member() {
    for data in [2, 8] {
        simulate(move || async move {
            let busy = Busy::new(shape(1, data, 2)).await;
            busy.lose(1).await;
            sleep_ms(1000).await;
            let before = busy.running().unwrap().done_bytes;
            sleep_ms(4000).await;
            let done = busy.running().unwrap().done_bytes - before;
            assert!(
                (4 * FLOOR * 9 / 10..=4 * FLOOR * 11 / 10).contains(&done),
                "{data}+2: {done} bytes in 4 s"
            );
            busy.end().await;
        });
    }
}

#[test]
fn a_rebuild_without_redundancy_left_runs_at_full_rate() {
    simulate(|| async {
        let busy = Busy::new(shape(1, 3, 1)).await;
        busy.lose(1).await;
        assert!(busy.running().unwrap().is_urgent);
        sleep_ms(2500).await;
        assert!(busy.rig.is_whole(), "{:#?}", busy.rig.jobs.status());
        busy.end().await;
    });
}

#[test]
fn a_rebuild_becomes_urgent_when_the_last_redundancy_goes() {
    simulate(|| async {
        let busy = Busy::new(shape(1, 3, 2)).await;
        busy.lose(1).await;
        sleep_ms(3000).await;
        assert!(busy.running().is_some_and(|job| job.slot == Some(1) && !job.is_urgent));
        busy.rig.array.fail(2).await.unwrap();
        sleep_ms(200).await;
        assert!(busy.running().unwrap().is_urgent);
        sleep_ms(2500).await;
        assert!(busy.rig.array.members().is_live(1), "{:#?}", busy.rig.jobs.status());
        busy.end().await;
    });
}

#[test]
fn a_pace_that_is_set_shows_at_once() {
    simulate(|| async {
        let busy = Busy::new(shape(1, 3, 1)).await;
        busy.lose(1).await;
        assert!(busy.running().unwrap().is_urgent);
        busy.rig.jobs.set_pace(at_floor());
        assert!(!busy.running().unwrap().is_urgent);
        busy.end().await;
    });
}

#[test]
fn the_pace_that_an_operator_sets_holds_without_redundancy() {
    simulate(|| async {
        let busy = Busy::new(shape(1, 3, 1)).await;
        busy.rig.jobs.set_pace(at_floor());
        busy.lose(1).await;
        sleep_ms(3000).await;
        let running = busy.running().unwrap();
        assert!(!running.is_urgent && running.done_bytes < DATA_BYTES / 2, "{running:?}");
        busy.end().await;
    });
}
