//! The state of one lane: sequences, the tail, and the place of entries on each member. No I/O.
//!
//! ```text
//!   sequences    … retired │ 7 retired 8 active 9 retired 10 active │ next = 11        tail = 8 (the oldest active)
//!
//!   a member     ┌ old laps ──┬ 3 ─ 7 ─ 8 ─ 10 ─┬ free ─┐   an entry lies at a position that only grows;
//!                └────────────┴──────────────────┴───────┘   its place on the member: position mod lane bytes
//! ```
//!
//! Each member has its own circular space for the lane, because a lane's stripes have their parity
//! on different members. Entries follow each other without gaps (one may wrap at the end). The
//! caller writes them in that order, one write at a time.
//!
//! # When space is used again
//!
//! The space of an entry on a member is free as soon as its sequence is below the **durable tail**
//! of that member: the tail inside its newest durable entry. A retired entry alone does not free
//! its space. Recovery must know from this one member that the entry was retired, whatever happens
//! to the others. This holds even if the write that takes its place is torn and destroys the entry
//! and its neighbours in part:
//!
//! - Let `e` be readable on member `x`, and `b` a later entry of the same rows whose data was
//!   written; `b` was durable on `x` then. Recovery must not replay `e`. If `b` is readable, it
//!   supersedes `e`.
//! - If `b` is not readable, a write over it has begun. Before that, `b` was below the durable tail
//!   of `x`, which stood in some entry `n` on `x`.
//! - A write over `b` never overwrites `n`: an entry's tail is at most its own sequence, so `n` is
//!   not below the durable tail. A later write may overwrite `n`. By the same rule `n` is then
//!   below the tail of another durable entry. So some readable entry on `x` has a tail above `b`,
//!   hence above `e`: recovery ignores `e`.
//!
//! From one entry to the next the tails on a member never fall, so only its newest durable entry
//! matters. A gap at the end of a lap would break the order in which entries vanish. So an entry
//! may wrap at the end.
//!
//! # Markers
//!
//! Operations may retire without a later entry on a member that records it. Then the space of the
//! member is not free although no operation needs it. If an appender waits for it, the lane writes
//! a *marker*: a header with a tail and without a payload. One unit of every space is reserved for
//! a marker. Each marker frees at least the oldest entry, so the reserve always exists.
//!
//! Sequences and positions count up from 0 at every assembly. At 10⁹ entries a second, 64 bits last
//! for 500 years.

use crate::log::entry::UNIT;
use crate::mutant::{self, Mutant};
use block::IoError;
use std::collections::VecDeque;

/// One lane.
pub(crate) struct Lane {
    bytes: u64,
    /// The next sequence.
    next: u64,
    /// State of sequences `tail..next`; the first, if any, is not `Retired`.
    states: VecDeque<State>,
    /// By slot; made when a slot is first used.
    spaces: Vec<Option<Space>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Active,
    /// Dropped without retirement: recovery must see it, so it is never retired.
    Abandoned,
    Retired,
}

/// The lane on one member.
#[derive(Default)]
struct Space {
    /// Position of the next entry.
    head: u64,
    /// Entries that take space, oldest first: sequence and position.
    entries: VecDeque<(u64, u64)>,
    /// The tail in the newest entry that was placed.
    placed_tail: u64,
    /// The tail in the newest entry that is durable.
    durable_tail: u64,
    /// The error of a failed write; the content of the space is unknown then.
    failure: Option<IoError>,
}

/// The place of a copy of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub sequence: u64,
    /// In the member's lane, in bytes; an entry wraps to 0 at the end of the lane.
    pub position: u32,
    pub tail: u64,
}

impl Lane {
    /// An empty lane of `bytes` on each member, a multiple of [`UNIT`].
    pub fn new(bytes: u32) -> Lane {
        assert!(bytes.is_multiple_of(UNIT), "a lane of {bytes} bytes");
        Lane { bytes: bytes.into(), next: 0, states: VecDeque::new(), spaces: Vec::new() }
    }

    /// The lowest sequence that is not retired.
    pub fn tail(&self) -> u64 {
        self.next - self.states.len() as u64
    }

    /// Number of entries that can still be retired.
    pub fn outstanding(&self) -> usize {
        self.states.iter().filter(|state| **state == State::Active).count()
    }

    /// Number of entries of abandoned operations.
    pub fn abandoned(&self) -> usize {
        self.states.iter().filter(|state| **state == State::Abandoned).count()
    }

    /// Whether an entry of `bytes` has room on the member now, apart from the unit reserved for a
    /// marker.
    pub fn has_room(&self, slot: usize, bytes: u64) -> bool {
        match self.space(slot) {
            Some(space) => space.used() + bytes + u64::from(UNIT) <= self.bytes,
            None => bytes + u64::from(UNIT) <= self.bytes,
        }
    }

    /// The error of a failed write to the member, after which it must not be written to.
    pub fn failure(&self, slot: usize) -> Option<IoError> {
        self.space(slot).and_then(|space| space.failure)
    }

    /// Whether the oldest entry of the lane belongs to an abandoned operation.
    pub fn is_stuck(&self) -> bool {
        self.states.front() == Some(&State::Abandoned)
    }

    /// Begins the next sequence, which is active. The caller places its copies before it begins
    /// another.
    pub fn begin(&mut self) -> u64 {
        self.states.push_back(State::Active);
        self.next += 1;
        self.next - 1
    }

    /// Takes room on a member for a copy of the newest sequence.
    pub fn place(&mut self, slot: usize, bytes: u64) -> Placement {
        assert!(self.has_room(slot, bytes), "no room for {bytes} bytes on member {slot}");
        self.take(slot, bytes, self.next - 1)
    }

    /// Whether only a marker can free space on the member.
    pub fn needs_marker(&self, slot: usize) -> bool {
        let tail = self.tail();
        self.space(slot).is_some_and(|space| {
            let oldest = space.entries.front().map_or(u64::MAX, |(sequence, _)| *sequence);
            space.failure.is_none() && oldest < tail && space.placed_tail <= oldest
        })
    }

    /// Takes the room reserved for a marker on the member. The sequence of a marker is retired at
    /// once.
    pub fn place_marker(&mut self, slot: usize) -> Placement {
        let sequence = self.begin();
        let used = self.space(slot).map_or(0, Space::used);
        assert!(used + u64::from(UNIT) <= self.bytes, "no room for a marker on member {slot}");
        let placement = self.take(slot, UNIT.into(), sequence);
        self.retire(sequence);
        placement
    }

    /// Records that all entries placed on the member, up to one with this tail, are durable.
    pub fn note_durable(&mut self, slot: usize, tail: u64) {
        let Some(space) = self.spaces.get_mut(slot).and_then(Option::as_mut) else { return };
        debug_assert!(tail >= space.durable_tail, "tails never fall");
        space.durable_tail = space.durable_tail.max(tail);
        space.free_below(space.durable_tail);
    }

    /// Records a failed write to the member and clears its space.
    pub fn fail(&mut self, slot: usize, error: IoError) {
        *self.space_mut(slot) = Space { failure: Some(error), ..Space::default() };
    }

    /// Marks the sequence as retired: recovery need not replay it.
    pub fn retire(&mut self, sequence: u64) {
        self.set(sequence, State::Retired);
        while self.states.front() == Some(&State::Retired) {
            self.states.pop_front();
        }
        if mutant::is(Mutant::SpaceFreedInMemory) {
            let tail = self.tail();
            self.spaces.iter_mut().flatten().for_each(|space| space.free_below(tail));
        }
    }

    /// Keeps the sequence for recovery, without end.
    pub fn abandon(&mut self, sequence: u64) {
        self.set(sequence, State::Abandoned);
    }

    fn set(&mut self, sequence: u64, state: State) {
        let tail = self.tail();
        let place = sequence.checked_sub(tail).and_then(|place| self.states.get_mut(place as usize));
        let place = place.expect("a sequence that was begun and not retired");
        assert!(*place == State::Active, "sequence {sequence} ends once");
        *place = state;
    }

    fn take(&mut self, slot: usize, bytes: u64, sequence: u64) -> Placement {
        let (tail, lane_bytes) = (self.tail(), self.bytes);
        let space = self.space_mut(slot);
        assert!(space.failure.is_none(), "member {slot} has failed");
        let position = space.head;
        space.head += bytes;
        space.entries.push_back((sequence, position));
        space.placed_tail = tail;
        Placement { sequence, position: (position % lane_bytes) as u32, tail }
    }

    fn space(&self, slot: usize) -> Option<&Space> {
        self.spaces.get(slot).and_then(Option::as_ref)
    }

    fn space_mut(&mut self, slot: usize) -> &mut Space {
        if self.spaces.len() <= slot {
            self.spaces.resize_with(slot + 1, || None);
        }
        self.spaces[slot].get_or_insert_default()
    }
}

impl Space {
    fn free_below(&mut self, tail: u64) {
        while self.entries.front().is_some_and(|(sequence, _)| *sequence < tail) {
            self.entries.pop_front();
        }
    }

    fn used(&self) -> u64 {
        self.entries.front().map_or(0, |(_, position)| self.head - position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const U: u64 = UNIT as u64;

    #[test]
    fn the_tail_is_the_oldest_sequence_that_is_not_retired() {
        let mut lane = Lane::new(8 * UNIT);
        let first = lane.begin();
        let second = lane.begin();
        let third = lane.begin();
        lane.retire(second);
        assert_eq!((lane.tail(), lane.outstanding()), (first, 2));
        lane.retire(first);
        assert_eq!(lane.tail(), third);
        lane.retire(third);
        assert_eq!((lane.tail(), lane.outstanding()), (3, 0));
    }

    #[test]
    fn retired_space_is_free_only_when_a_durable_entry_says_so() {
        let mut lane = Lane::new(4 * UNIT);
        for _ in 0..3 {
            let sequence = lane.begin();
            let placement = lane.place(0, U);
            assert_eq!((placement.sequence, placement.tail), (sequence, 0));
            lane.note_durable(0, placement.tail);
        }
        assert!(!lane.has_room(0, U), "one unit is kept");
        assert!(!lane.needs_marker(0), "nothing is retired");
        (0..3).for_each(|sequence| lane.retire(sequence));
        assert!(!lane.has_room(0, U), "no entry on the member says that they are");
        assert!(lane.needs_marker(0));
        let marker = lane.place_marker(0);
        assert_eq!(marker, Placement { sequence: 3, position: 3 * UNIT, tail: 3 });
        assert!(!lane.needs_marker(0), "it is on its way");
        assert!(!lane.has_room(0, U));
        lane.note_durable(0, marker.tail);
        assert!(lane.has_room(0, 2 * U) && !lane.has_room(0, 3 * U), "the marker itself stays");
        lane.begin();
        assert_eq!(lane.place(0, 2 * U).position, 0);
    }

    #[test]
    fn a_member_that_failed_takes_nothing_and_blocks_no_write() {
        let mut lane = Lane::new(4 * UNIT);
        let sequence = lane.begin();
        lane.place(0, U);
        lane.place(1, U);
        lane.fail(1, IoError::DeviceGone);
        assert_eq!((lane.failure(0), lane.failure(1)), (None, Some(IoError::DeviceGone)));
        assert!(lane.has_room(1, 3 * U) && !lane.needs_marker(1));
        lane.retire(sequence);
        assert_eq!(lane.tail(), 1);
    }

    #[test]
    fn an_operation_that_was_given_up_keeps_its_entry() {
        let mut lane = Lane::new(4 * UNIT);
        let (first, second) = (lane.begin(), lane.begin());
        lane.abandon(first);
        lane.retire(second);
        assert!(lane.is_stuck());
        assert_eq!((lane.tail(), lane.outstanding(), lane.abandoned()), (first, 0, 1));
    }

    /// An entry on a member, in the model below.
    #[derive(Clone, Copy, Debug)]
    struct Stored {
        sequence: u64,
        tail: u64,
        /// Entries of the same rows overlap.
        rows: u8,
        start: u64,
        end: u64,
    }

    /// A lane of nine units over two members under any order of events, one write at a time for
    /// each member.
    struct Model {
        lane: Lane,
        stored: [Vec<Stored>; 2],
        in_flight: [VecDeque<Stored>; 2],
        heads: [u64; 2],
        /// Sequence, rows and number of copies that are not durable yet.
        active: Vec<(u64, u8, usize)>,
        /// Sequence and rows of operations whose data may have been written.
        begun: Vec<(u64, u8)>,
    }

    const LANE: u64 = 9 * U;
    const MARKER_ROWS: u8 = 255;

    impl Model {
        fn new() -> Model {
            Model {
                lane: Lane::new(LANE as u32),
                stored: Default::default(),
                in_flight: Default::default(),
                heads: [0; 2],
                active: Vec::new(),
                begun: Vec::new(),
            }
        }

        /// The members that hold parity of these rows.
        fn slots_of(rows: u8) -> impl Iterator<Item = usize> + Clone {
            (0..2).filter(move |slot| (rows % 3 + 1) >> slot & 1 == 1)
        }

        fn note_placed(&mut self, slot: usize, placement: Placement, rows: u8, bytes: u64) {
            let start = self.heads[slot];
            assert_eq!(u64::from(placement.position), start % LANE, "entries lie without gaps");
            self.heads[slot] += bytes;
            let Placement { sequence, tail, .. } = placement;
            self.in_flight[slot].push_back(Stored { sequence, tail, rows, start, end: start + bytes });
        }

        fn append(&mut self, rows: u8, bytes: u64) {
            if self.active.iter().any(|active| active.1 == rows) {
                return;
            }
            for slot in Model::slots_of(rows) {
                if !self.lane.has_room(slot, bytes) && self.lane.needs_marker(slot) {
                    let placement = self.lane.place_marker(slot);
                    self.note_placed(slot, placement, MARKER_ROWS, U);
                }
            }
            if !Model::slots_of(rows).all(|slot| self.lane.has_room(slot, bytes)) {
                return;
            }
            let sequence = self.lane.begin();
            self.active.push((sequence, rows, Model::slots_of(rows).count()));
            for slot in Model::slots_of(rows) {
                let placement = self.lane.place(slot, bytes);
                self.note_placed(slot, placement, rows, bytes);
            }
        }

        fn complete(&mut self, slot: usize) {
            let Some(done) = self.in_flight[slot].pop_front() else { return };
            self.stored[slot].retain(|s| s.start + LANE >= done.end);
            self.stored[slot].push(done);
            self.lane.note_durable(slot, done.tail);
            if let Some(active) = self.active.iter_mut().find(|active| active.0 == done.sequence) {
                active.2 -= 1;
                if active.2 == 0 {
                    self.begun.push((active.0, active.1));
                }
            }
        }

        fn retire(&mut self, nth: usize) {
            if self.active.get(nth).is_some_and(|active| active.2 == 0) {
                self.lane.retire(self.active.remove(nth).0);
            }
        }

        /// Checks every member with all entries that are not durable torn in the worst way: each
        /// destroys the entries under it, or not, and is not readable itself.
        fn check(&self) {
            for slot in 0..2 {
                let survives = |s: &Stored| s.start + LANE >= self.heads[slot];
                for e in &self.stored[slot] {
                    let is_active = self.active.iter().any(|active| active.0 == e.sequence);
                    assert!(!is_active || survives(e), "{e:?} is needed and may be overwritten");
                    let is_stale = self.begun.iter().any(|b| b.1 == e.rows && b.0 > e.sequence);
                    let mut others = self.stored[slot].iter().filter(|s| survives(s));
                    let is_known =
                        others.any(|s| s.tail > e.sequence || (s.rows == e.rows && s.sequence > e.sequence));
                    assert!(!is_stale || is_known, "{e:?} on member {slot} may be replayed");
                }
            }
        }
    }

    proptest! {
        /// Each member alone shows at any moment of every entry on it whether a later one of the
        /// same rows followed.
        #[test]
        fn no_torn_write_brings_a_stale_entry_back(steps in prop::collection::vec((0..8u8, any::<u8>()), 1..400)) {
            let mut model = Model::new();
            for (step, argument) in steps {
                match step {
                    0..3 => model.append(argument % 6, (1 + u64::from(argument) / 6 % 3) * U),
                    3..6 => model.complete(usize::from(argument % 2)),
                    _ => model.retire(usize::from(argument % 8)),
                }
                model.check();
            }
        }
    }

    #[test]
    fn a_lane_in_use_never_blocks_for_ever() {
        let mut model = Model::new();
        for i in 0..10_000u64 {
            let before = model.lane.next;
            for _ in 0..4 {
                model.append((i % 6) as u8, (1 + i % 7) * U);
                (0..16).for_each(|slot| model.complete(slot % 2));
                if model.active.iter().any(|active| active.0 >= before) {
                    break;
                }
            }
            assert_eq!(model.active.len(), 1, "entry {i} found no room");
            model.retire(0);
        }
    }
}
