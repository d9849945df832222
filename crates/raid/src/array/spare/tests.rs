//! Silent rot, and writes and scrubs that meet it.

use super::super::tests::{Faults, config, read, restart, start, write};
use super::super::{Array, SlotState};
use crate::config::Consistency;
use crate::metadata::Layout;
use crate::{ArrayConfig, Level};
use block::{Channel, Device, IoError, Op};
use layers::fault::{Action, Rule};
use std::rc::Rc;
use std::sync::Arc;

const STRIP: u64 = 16 << 10;
const MEMBER_BYTES: u64 = 48 << 20;
/// The row of stripe 0 in which strips rot: the second one.
const ROW: u64 = 4096;

/// An array whose stripe 0 holds another byte in each strip: 1, 2, 3…
struct Rig {
    shape: ArrayConfig,
    array: Arc<Array>,
    faults: Faults,
    channel: Rc<dyn Channel>,
}

impl Rig {
    async fn new(data: usize, parity: usize, consistency: Consistency) -> Rig {
        // A lane takes an entry of a whole stripe.
        let shape =
            ArrayConfig { consistency, lane_bytes: 1 << 20, ..config(Level::NPlusM, 1, data, parity) };
        let (array, faults) = start(&shape, &[]).await;
        let channel = array.open_channel().unwrap();
        for strip in 0..data as u64 {
            write(&*channel, strip * STRIP, strip as u8 + 1, STRIP as usize).await.unwrap();
        }
        // Rot comes later than entries of the log that recovery would replay.
        array.stop().await.unwrap();
        drop((array, channel));
        let array = restart(&shape, &faults, &[], false).await;
        let channel = array.open_channel().unwrap();
        Rig { shape, array, faults, channel }
    }

    fn slot(&self, strip: usize) -> usize {
        self.shape.geometry.member(0, strip)
    }

    /// Where a strip of stripe 0 begins on its member.
    fn place(&self) -> u64 {
        Layout::new(MEMBER_BYTES, &self.shape).unwrap().data_offset
    }

    /// Damages bytes of the row of a strip in silence.
    async fn rot(&self, strip: usize, at: u64, len: usize) {
        let member = self.faults[self.slot(strip)].open_channel().unwrap();
        write(&*member, self.place() + ROW + at, 0xa5, len).await.unwrap();
    }

    async fn lose(&self, strips: &[usize]) {
        for strip in strips {
            self.array.fail(self.slot(*strip)).await.unwrap();
        }
    }

    async fn write_strips(&self, strips: std::ops::Range<u64>, byte: u8) {
        let len = (strips.end - strips.start) * STRIP;
        write(&*self.channel, strips.start * STRIP, byte, len as usize).await.unwrap();
    }

    /// The bytes of the row of a data strip as a client reads them, if all are the same.
    async fn row(&self, strip: u64) -> Result<u8, IoError> {
        let bytes = read(&*self.channel, strip * STRIP + ROW, 4096).await?;
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "strip {strip} is damaged");
        Ok(bytes[0])
    }

    fn contradictions(&self) -> u64 {
        self.array.counters().contradictions.rows()
    }

    async fn rows_that_do_not_fit(&self) -> u32 {
        self.array.scrub_stripe(0, false).await.unwrap().rows
    }

    /// Counts requests of members from now on, by the sum of `hits`.
    fn count(&self, op: Op) {
        self.faults.iter().for_each(|fault| {
            fault.add(Rule::new(Action::Delay(0)).on(&[op]).within(self.place()..MEMBER_BYTES));
        });
    }

    fn hits(&self) -> u64 {
        let hits = self.faults.iter().map(|fault| fault.rules().iter().map(|rule| rule.2).sum::<u64>()).sum();
        self.faults.iter().for_each(|fault| fault.clear());
        hits
    }
}

const MODES: [Consistency; 2] = [Consistency::Ppl, Consistency::Bitmap];

#[test]
fn a_large_write_mends_the_one_wrong_strip_of_a_whole_stripe() {
    for (mode, rotten) in MODES.into_iter().flat_map(|mode| (0..6).map(move |rotten| (mode, rotten))) {
        reactor::run(async move {
            let rig = Rig::new(4, 2, mode).await;
            rig.rot(rotten, 0, 4096).await;
            rig.write_strips(0..3, 9).await;
            assert_eq!(rig.contradictions(), u64::from((0..5).contains(&rotten)), "rot in strip {rotten}");
            assert_eq!(rig.rows_that_do_not_fit().await, 0);
            assert_eq!(rig.row(3).await, Ok(4), "rot in strip {rotten}");
            rig.lose(&[0, 3]).await;
            assert_eq!((rig.row(0).await, rig.row(1).await, rig.row(3).await), (Ok(9), Ok(9), Ok(4)));
        });
    }
}

#[test]
fn a_write_with_one_spare_strip_leaves_a_contradiction_for_a_scrub() {
    for (mode, strips) in MODES.into_iter().flat_map(|mode| [(mode, 0..1), (mode, 0..2)]) {
        reactor::run(async move {
            let rig = Rig::new(3, 1, mode).await;
            rig.rot(2, 0, 4096).await;
            rig.write_strips(strips.clone(), 9).await;
            assert_eq!(rig.rows_that_do_not_fit().await, 1, "{mode:?}, strips {strips:?} were written");
            assert_eq!((rig.row(0).await, rig.row(2).await), (Ok(9), Ok(0xa5)));
        });
    }
}

#[test]
fn a_large_write_keeps_a_contradiction_whose_wrong_strips_are_unknown() {
    for mode in MODES {
        reactor::run(async move {
            let rig = Rig::new(4, 2, mode).await;
            rig.rot(3, 0, 2048).await;
            rig.rot(4, 2048, 2048).await;
            rig.write_strips(0..3, 9).await;
            assert_eq!((rig.contradictions(), rig.rows_that_do_not_fit().await), (1, 1));
            assert_eq!((rig.row(0).await, rig.row(2).await), (Ok(9), Ok(9)));
        });
    }
}

#[test]
fn a_write_to_an_unreadable_parity_keeps_the_contradiction_in_the_other() {
    reactor::run(async {
        let rig = Rig::new(4, 2, Consistency::Ppl).await;
        rig.rot(3, 0, 4096).await;
        let (start, len) = (rig.place() + ROW, 4096);
        let unreadable = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(start..start + len);
        rig.faults[rig.slot(4)].add(unreadable);
        rig.write_strips(0..3, 9).await;
        rig.faults[rig.slot(4)].clear();
        assert_eq!((rig.contradictions(), rig.rows_that_do_not_fit().await), (1, 1));
        assert_eq!(rig.row(0).await, Ok(9));
    });
}

#[test]
fn a_degraded_write_mends_a_wrong_strip_that_two_spare_strips_name() {
    for (mode, rotten) in MODES.into_iter().flat_map(|mode| (1..4).map(move |rotten| (mode, rotten))) {
        reactor::run(async move {
            let rig = Rig::new(4, 3, mode).await;
            rig.rot(rotten, 0, 4096).await;
            rig.lose(&[0]).await;
            rig.write_strips(0..1, 9).await;
            assert_eq!(rig.contradictions(), 1);
            for strip in 1..4 {
                assert_eq!(rig.row(strip).await, Ok(strip as u8 + 1), "rot in strip {rotten}");
            }
            rig.lose(&[2, 3]).await;
            for (strip, byte) in [(0, 9), (1, 2), (2, 3), (3, 4)] {
                assert_eq!(rig.row(strip).await, Ok(byte), "rot in strip {rotten}");
            }
        });
    }
}

#[test]
fn a_degraded_write_of_the_lost_strip_is_readable_and_reports_an_unknown_wrong_strip() {
    for (mode, rotten) in MODES.into_iter().flat_map(|mode| [1, 4, 5].map(|rotten| (mode, rotten))) {
        reactor::run(async move {
            let rig = Rig::new(4, 2, mode).await;
            rig.rot(rotten, 0, 4096).await;
            rig.lose(&[0]).await;
            rig.write_strips(0..1, 9).await;
            assert_eq!((rig.contradictions(), rig.row(0).await), (1, Ok(9)));
        });
    }
}

#[test]
fn a_degraded_write_gives_up_lost_data_that_strips_contradict_and_nothing_else() {
    for (mode, rotten) in MODES.into_iter().flat_map(|mode| [2, 4, 6].map(|rotten| (mode, rotten))) {
        reactor::run(async move {
            let rig = Rig::new(4, 3, mode).await;
            rig.rot(rotten, 0, 4096).await;
            rig.lose(&[0, 1]).await;
            rig.write_strips(0..1, 9).await;
            assert!(rig.contradictions() > 0);
            assert_eq!((rig.row(0).await, rig.row(3).await), (Ok(9), Ok(4)));
            assert_eq!(
                rig.row(1).await,
                Err(IoError::Medium),
                "rot in strip {rotten}: either version could be wrong"
            );
            for at in [0, 2, 3] {
                let bytes = read(&*rig.channel, STRIP + at * 4096, 4096).await.unwrap();
                assert!(bytes.iter().all(|byte| *byte == 2));
            }
            rig.write_strips(1..2, 8).await;
            assert_eq!((rig.row(0).await, rig.row(1).await), (Ok(9), Ok(8)));
        });
    }
}

#[test]
fn writes_without_a_spare_strip_compare_nothing() {
    for (data, parity, lost) in [(3, 1, &[0][..]), (4, 2, &[0, 1])] {
        reactor::run(async move {
            let rig = Rig::new(data, parity, Consistency::Ppl).await;
            rig.rot(2, 0, 4096).await;
            rig.lose(lost).await;
            rig.write_strips(0..1, 9).await;
            assert_eq!((rig.contradictions(), rig.row(0).await), (0, Ok(9)));
        });
    }
}

#[test]
fn small_writes_read_no_more_than_their_strip_and_parity() {
    for (data, parity, strips, reads) in [
        (3, 1, 1, 2),
        (8, 1, 1, 2),
        (8, 1, 7, 8),
        (3, 2, 1, 3),
        (4, 2, 1, 3),
        (8, 2, 3, 5),
        (8, 2, 7, 9),
        (4, 3, 4, 0),
    ] {
        reactor::run(async move {
            let rig = Rig::new(data, parity, Consistency::Ppl).await;
            rig.count(Op::Read);
            rig.write_strips(0..strips, 9).await;
            assert_eq!(rig.hits(), reads, "{strips} strips of {data}+{parity}");
        });
    }
}

#[test]
fn a_scrub_does_not_bring_an_unreadable_strip_back_by_guess() {
    for strip in [1, 4] {
        reactor::run(async move {
            let rig = Rig::new(4, 2, Consistency::Ppl).await;
            rig.rot(2, 0, 4096).await;
            let start = rig.place() + ROW;
            let rule = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(start..start + 4096);
            // Parity follows data, and can be read again.
            rig.faults[rig.slot(strip)].add(if strip == 1 { rule } else { rule.once() });
            let result = rig.array.scrub_stripe(0, true).await;
            rig.faults[rig.slot(strip)].clear();
            assert!(rig.contradictions() > 0);
            match strip {
                // Nothing was written: with all strips readable the wrong one has a name.
                1 => assert_eq!(result, Err(IoError::Medium)),
                // Parity follows data, and no strip is named without evidence.
                _ => assert_eq!(result.unwrap().named, 0),
            }
            assert!(rig.array.slots().iter().all(|slot| slot.state == SlotState::Live));
            if strip == 1 {
                assert_eq!(rig.array.scrub_stripe(0, true).await.unwrap().named, 0b100);
                assert_eq!((rig.row(1).await, rig.row(2).await), (Ok(2), Ok(3)));
            }
        });
    }
}
