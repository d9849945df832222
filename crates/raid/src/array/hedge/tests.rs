//! Members that answer late, in virtual time.

use super::super::deadlines::READS;
use super::super::members::SlotState;
use super::super::tests::{Faults, config, fill, read, start};
use super::*;
use crate::Level;
use crate::array::members::Attached;
use crate::array::{Array, Before, Deadlines, Soft, Wanted};
use crate::metadata::Reason;
use block::{Channel, Device, Flags};
use drivers::mem::{MemDevice, Options};
use layers::fault::{Action, Rule};
use reactor::{current, run_simulated};
use std::cell::Cell;
use std::sync::Arc;

const BYTES: u64 = 2 << 20;
const MS: u64 = 1_000_000;
const SOFT_MS: u64 = 2;
const HARD_MS: u64 = 1000;

/// An array with data, and its first strip's member.
struct Subject {
    array: Arc<Array>,
    faults: Faults,
    channel: Rc<dyn Channel>,
    expected: Vec<u8>,
}

impl Subject {
    async fn new(level: Level, data: usize, parity: usize) -> Subject {
        let (array, faults) = start(&config(level, 1, data, parity), &[]).await;
        let channel = array.open_channel().unwrap();
        fill(&*channel, BYTES).await;
        let expected = read(&*channel, 0, 64 << 10).await.unwrap();
        array.set_deadlines(Deadlines { soft: Soft::After(SOFT_MS * MS), hard_ns: HARD_MS * MS });
        Subject { array, faults, channel, expected }
    }

    /// Has a slot answer reads late from now on.
    fn delay(&self, slot: usize, ms: u64) {
        let delay = Action::Delay(ms * MS);
        self.faults[slot].add(Rule::new(delay).on(&[Op::Read]));
    }

    /// Reads the first block, checks it, and says how many milliseconds that took.
    async fn first_block(&self) -> u64 {
        let started_ns = current().now_ns();
        assert_eq!(read(&*self.channel, 0, 4096).await.unwrap(), self.expected[..4096]);
        (current().now_ns() - started_ns) / MS
    }

    fn state(&self, slot: usize) -> SlotState {
        self.array.slots()[slot].state
    }

    fn late_and_raced(&self) -> (u64, u64) {
        let counters = self.array.counters();
        (counters.late_reads.load(Ordering::Relaxed), counters.raced_reads.load(Ordering::Relaxed))
    }

    /// The slot of the first block.
    fn slot(&self) -> usize {
        self.array.config().geometry.member(0, 0)
    }
}

#[test]
fn a_late_read_is_answered_by_the_other_members_and_the_late_answer_touches_no_buffer() {
    for (level, data, parity) in [(Level::Raid5, 3, 1), (Level::Raid6, 4, 2), (Level::Raid1, 1, 2)] {
        run_simulated(1, move |_| async move {
            let subject = Subject::new(level, data, parity).await;
            assert_eq!(subject.first_block().await, 0);
            subject.delay(subject.slot(), 500);
            let mut buffer = current().buffers().take(4096).await;
            buffer.as_mut_slice().fill(0);
            let started_ns = current().now_ns();
            let (mut buffer, result) = buffer.transfer(&*subject.channel, Op::Read, Flags::NONE, 0).await;
            assert_eq!((result, buffer.as_slice()), (Ok(()), &subject.expected[..4096]));
            let took = (current().now_ns() - started_ns) / MS;
            assert!((SOFT_MS..SOFT_MS + 2).contains(&took), "{level:?}: {took} ms");
            assert_eq!(subject.late_and_raced(), (1, 1));
            buffer.as_mut_slice().fill(0xee);
            // While it owes an answer it is not asked again.
            assert_eq!(subject.first_block().await, 0);
            current().sleep(600 * MS).await;
            assert!(buffer.as_slice().iter().all(|byte| *byte == 0xee), "the late answer was written");
            assert_eq!(subject.state(subject.slot()), SlotState::Live);
            subject.faults[subject.slot()].clear();
            assert_eq!(subject.first_block().await, 0);
            assert_eq!(subject.late_and_raced(), (1, 1));
        });
    }
}

#[test]
fn a_member_that_does_not_answer_by_the_hard_deadline_is_out() {
    run_simulated(2, |_| async {
        let subject = Subject::new(Level::Raid5, 3, 1).await;
        let slot = subject.slot();
        subject.delay(slot, 100 * HARD_MS);
        assert_eq!(subject.first_block().await, SOFT_MS);
        current().sleep((HARD_MS - SOFT_MS - 1) * MS).await;
        assert_eq!(subject.state(slot), SlotState::Live);
        current().sleep(5 * MS).await;
        assert_eq!(subject.state(slot), SlotState::Out);
        assert_eq!(subject.array.table().members[slot].reason, Reason::TimedOut);
        assert_eq!(subject.first_block().await, 0);
        // At the end no request waits for it for longer than the hard deadline.
        let started_ns = current().now_ns();
        subject.array.stop().await.unwrap();
        assert!((current().now_ns() - started_ns) / MS <= HARD_MS + 20);
        current().sleep(100 * HARD_MS * MS).await;
    });
}

#[test]
fn a_member_that_has_replaced_a_late_one_stays() {
    run_simulated(6, |_| async {
        let subject = Subject::new(Level::Raid5, 3, 1).await;
        let slot = subject.slot();
        subject.delay(slot, 2 * HARD_MS);
        assert_eq!(subject.first_block().await, SOFT_MS);
        let [own, _] = subject.array.members().attached(slot);
        let layout = own.unwrap().layout;
        let device = Arc::new(MemDevice::new(&Options::new(subject.faults[slot].limits().capacity)).unwrap());
        subject.array.fail(slot).await.unwrap();
        let uuid = crate::Uuid::random().unwrap();
        subject.array.start_filling(slot, uuid, Attached { device, layout }).await.unwrap();
        for step in 0..subject.array.fill_steps() {
            let wanted = vec![Wanted { slot, before: Before::Anything }];
            let filled = subject.array.fill_step(step, wanted).await.unwrap();
            assert!(filled.iter().all(|(_, filled)| filled.is_ok()));
            subject.array.advance(slot, step + 1);
        }
        subject.array.finish_filling(slot, uuid).await.unwrap();
        current().sleep(3 * HARD_MS * MS).await;
        assert_eq!(subject.state(slot), SlotState::Live);
        assert_eq!(subject.first_block().await, 0);
        subject.array.stop().await.unwrap();
    });
}

#[test]
fn a_member_that_the_array_needs_is_waited_for() {
    run_simulated(3, |_| async {
        let subject = Subject::new(Level::Raid5, 3, 1).await;
        let slot = subject.slot();
        subject.array.fail((slot + 1) % 4).await.unwrap();
        subject.delay(slot, 3 * HARD_MS);
        assert_eq!(subject.first_block().await, 3 * HARD_MS);
        assert_eq!(subject.state(slot), SlotState::Live);
        assert!(!subject.array.is_frozen());
    });
}

#[test]
fn of_two_members_that_do_not_answer_one_is_taken_out_and_the_array_lives() {
    run_simulated(4, |_| async {
        let subject = Subject::new(Level::Raid5, 3, 1).await;
        let geometry = subject.array.config().geometry;
        let slots = [geometry.member(0, 0), geometry.member(0, 1)];
        slots.iter().for_each(|slot| subject.delay(*slot, 5 * HARD_MS));
        let strip = geometry.strip_bytes as usize;
        let reads = [0, strip].map(|at| {
            let (channel, expected) = (subject.channel.clone(), subject.expected[at..at + 4096].to_vec());
            async move { assert_eq!(read(&*channel, at as u64, 4096).await.unwrap(), expected) }
        });
        let done: Vec<Rc<Cell<bool>>> = reads
            .into_iter()
            .map(|read| {
                let done = Rc::new(Cell::new(false));
                let flag = done.clone();
                current().spawn(async move {
                    read.await;
                    flag.set(true);
                });
                done
            })
            .collect();
        current().sleep(20 * HARD_MS * MS).await;
        assert!(done.iter().all(|done| done.get()));
        let live = slots.iter().filter(|slot| subject.state(**slot) == SlotState::Live).count();
        assert_eq!((live, subject.array.is_frozen()), (1, false));
    });
}

#[test]
fn the_adaptive_deadline_follows_what_reads_usually_take() {
    run_simulated(5, |_| async {
        let subject = Subject::new(Level::Raid5, 3, 1).await;
        subject.array.set_deadlines(Deadlines { soft: Soft::Adaptive, hard_ns: HARD_MS * MS });
        let slot = subject.slot();
        // Half a millisecond: sixteen times that is what a read may take.
        let usual = Rule::new(Action::Delay(MS / 2)).on(&[Op::Read]);
        subject.faults[slot].add(usual.clone());
        for _ in 0..READS {
            subject.first_block().await;
        }
        assert_eq!(subject.late_and_raced(), (0, 0));
        subject.faults[slot].clear();
        subject.delay(slot, 5);
        assert_eq!((subject.first_block().await, subject.late_and_raced()), (5, (0, 0)));
        subject.faults[slot].clear();
        subject.delay(slot, 400);
        let took = subject.first_block().await;
        assert!((8..11).contains(&took), "{took} ms");
        assert_eq!(subject.late_and_raced(), (1, 1));
        current().sleep(500 * MS).await;
    });
}

#[test]
fn without_a_deadline_a_read_waits_for_its_member() {
    run_simulated(6, |_| async {
        let subject = Subject::new(Level::Raid5, 3, 1).await;
        subject.array.set_deadlines(Deadlines::default());
        subject.delay(subject.slot(), 3 * HARD_MS);
        assert_eq!(subject.first_block().await, 3 * HARD_MS);
        assert_eq!((subject.state(subject.slot()), subject.late_and_raced()), (SlotState::Live, (0, 0)));
    });
}
