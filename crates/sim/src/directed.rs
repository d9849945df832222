//! Directed runs: short runs, each with a rare sequence of events that plans seldom draw.
//!
//! A run has one [`Story`]. Boots, steps and the time of the power failure are random as in other
//! plans; the sequence of events is fixed.

use crate::machine::CrashAt;
use crate::oracle::SECTOR;
use crate::plan::{Action, Boot, Filter, Plan, Shape, Step};
use base::Rng;
use raid::mutant::Mutant;
use raid::{Consistency, Level};

/// Levels with a log.
const PARITY_LEVELS: [Level; 7] =
    [Level::Raid5, Level::Raid6, Level::Raid7, Level::Raid50, Level::Raid60, Level::Raid70, Level::NPlusM];
/// Largest number of blocks of a strip that are written repeatedly.
const HOT_BLOCKS: u64 = 8;
/// Number of blocks after them: with the parity and the new data they make an entry of four units.
const LONG_ENTRY_BLOCKS: u64 = 12;

/// Sequence of events of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Story {
    /// Power fails during writes. A member is missing at the next start and is then re-added, with
    /// few or no writes in between.
    AwayAtReplay,
    /// A member misses only writes of zeroes.
    AwayForZeroes,
    /// Two members fail at about the same time.
    TwoFail,
    /// Blocks are lost with a full stripe that was being written. They are rewritten, and power
    /// fails meanwhile.
    LostBlocks,
    /// A degraded array writes the same few rows repeatedly, in a lane with few entries.
    HotLane,
    /// A member fails while another one is slow to write data that is not logged.
    SlowMark,
}

impl Story {
    /// Restricts the choice of arrays to those that allow the story, within the filter.
    pub fn narrow(self, filter: &mut Filter) {
        let (levels, mode): (&[Level], _) = match self {
            Story::AwayForZeroes => (&[], None),
            Story::TwoFail => (&[Level::Raid6, Level::Raid7, Level::Raid60, Level::NPlusM], None),
            Story::AwayAtReplay | Story::LostBlocks => (&PARITY_LEVELS, Some(Consistency::Ppl)),
            Story::HotLane => (&[Level::Raid5], Some(Consistency::Ppl)),
            Story::SlowMark => (&PARITY_LEVELS, Some(Consistency::Bitmap)),
        };
        if filter.levels.is_empty() {
            filter.levels = levels.to_vec();
        }
        filter.consistency = filter.consistency.or(mode);
    }

    /// The story that shows a mutant which other runs detect too rarely.
    pub fn of(mutant: Mutant) -> Option<Story> {
        match mutant {
            Mutant::ReplayedNotStale => Some(Story::AwayAtReplay),
            Mutant::SpaceFreedInMemory => Some(Story::HotLane),
            Mutant::MarksClearedInFlight => Some(Story::SlowMark),
            Mutant::BadClearedEarly => Some(Story::LostBlocks),
            Mutant::ZeroesNotStale => Some(Story::AwayForZeroes),
            Mutant::CommitIgnoresOthers => Some(Story::TwoFail),
            _ => None,
        }
    }
}

/// Replaces the boots of a plan by a story that its array allows: `wanted`, or any. If none is
/// possible, the plan stays as it is.
pub fn draw(plan: &mut Plan, wanted: Option<Story>) {
    let mut rng = Rng::new(plan.seed).fork(13);
    let mut stories = possible(&plan.shape);
    stories.retain(|story| wanted.is_none_or(|wanted| wanted == *story));
    if stories.is_empty() {
        return;
    }
    let story = rng.pick(&stories);
    plan.shape.may_lose_too_many = false;
    match story {
        Story::AwayAtReplay | Story::AwayForZeroes => plan.shape.has_keeper = true, // it adds former members
        Story::HotLane => plan.shape.have_hot_lane(8 + rng.below(3) as u32),
        _ => {}
    }
    let mut teller = Teller { rng, shape: &plan.shape, next_id: 1, slow: None };
    plan.boots = teller.tell(story);
    plan.shape.slow = teller.slow;
}

/// The stories that an array allows.
fn possible(shape: &Shape) -> Vec<Story> {
    let (geometry, is_ppl) = (&shape.geometry, shape.consistency == Consistency::Ppl);
    let is_mirror = geometry.data == 1;
    let stories = [
        (Story::AwayAtReplay, is_ppl),
        (Story::AwayForZeroes, true),
        (Story::TwoFail, geometry.parity > 1 || geometry.groups > 1),
        (Story::LostBlocks, is_ppl),
        (Story::HotLane, is_ppl && geometry.parity == 1 && geometry.data > 2),
        (Story::SlowMark, !is_ppl && !is_mirror),
    ];
    let allowed = stories.into_iter().filter(|(_, is_allowed)| *is_allowed && geometry.parity > 0);
    allowed.map(|(story, _)| story).collect()
}

struct Teller<'a> {
    rng: Rng,
    shape: &'a Shape,
    next_id: u32,
    /// A slot with a slow disk, and the additional latency of its requests in nanoseconds.
    slow: Option<(usize, u64)>,
}

impl Teller<'_> {
    fn tell(&mut self, story: Story) -> Vec<Boot> {
        match story {
            Story::AwayAtReplay => self.away_at_replay(),
            Story::AwayForZeroes => self.away_for_zeroes(),
            Story::TwoFail => self.two_fail(),
            Story::LostBlocks => self.lost_blocks(),
            Story::HotLane => self.hot_lane(),
            Story::SlowMark => self.slow_mark(),
        }
    }

    fn away_at_replay(&mut self) -> Vec<Boot> {
        let slot = self.slot();
        let (mut written, mut away) = (self.empty(), self.empty());
        for worker in 0..self.rng.range(1, 5) as usize {
            for _ in 0..self.rng.range(1, 4) {
                let write = self.small_write();
                self.add(&mut written, worker, 0, write);
            }
        }
        written.crash = Some(self.crash(30));
        let id = self.id();
        away.unplugged.push((id, slot));
        if self.rng.one_in(4) {
            let write = self.small_write();
            self.add(&mut away, 0, 0, write);
        }
        self.add(&mut away, 0, 0, Action::Return(slot));
        vec![self.filled(), written, away.stopped()]
    }

    fn away_for_zeroes(&mut self) -> Vec<Boot> {
        let slot = self.slot();
        let mut boot = self.empty();
        self.add(&mut boot, 0, 0, Action::Fail(slot));
        for _ in 0..self.rng.range(1, 4) {
            let Action::Write { lba, count, .. } = self.small_write() else { continue };
            self.add(&mut boot, 0, 0, Action::WriteZeroes { lba, count });
        }
        if self.rng.one_in(4) {
            boot.crash = Some(self.crash(60));
        }
        self.add(&mut boot, 0, 0, Action::Return(slot));
        self.add(&mut boot, 0, 0, Action::Scrub);
        vec![self.filled(), boot.stopped()]
    }

    fn two_fail(&mut self) -> Vec<Boot> {
        let (first, mut second) = (self.slot(), self.slot());
        if first == second {
            second = (first + 1) % self.shape.members();
        }
        let mut boot = self.empty();
        let workers = self.rng.range(2, 6) as usize;
        for worker in 0..workers {
            for _ in 0..self.rng.range(1, 6) {
                let write = if self.rng.one_in(2) { self.full_stripe() } else { self.small_write() };
                self.add(&mut boot, worker, 0, write);
            }
        }
        let (is_dying, delay_ns) = (self.rng.one_in(2), self.rng.log_uniform(8 * self.shape.latency_ns));
        for (i, slot) in [first, second].into_iter().enumerate() {
            let event = match is_dying {
                true => Action::Kill(slot),
                false => Action::FailWrite(slot, 1 + self.rng.below(4) as u32),
            };
            self.add(&mut boot, workers + i, delay_ns, event);
        }
        boot.crash = if self.rng.one_in(4) { None } else { Some(self.crash(127)) };
        let mut after = self.empty();
        if is_dying {
            after.plugged = [first, second].map(|slot| (self.id(), slot)).to_vec();
        }
        vec![self.filled(), boot.stopped(), after.stopped()]
    }

    fn lost_blocks(&mut self) -> Vec<Boot> {
        let (mut written, mut away) = (self.empty(), self.empty());
        let workers = self.rng.range(1, 4);
        for worker in 0..workers as usize {
            for _ in 0..2 {
                let write = self.full_stripe();
                self.add(&mut written, worker, 0, write);
            }
        }
        // Entries of the log come first, then all strips.
        let geometry = &self.shape.geometry;
        let writes = workers * (geometry.group_members() + geometry.parity) as u64;
        written.crash = Some(self.crash(writes));
        let most = if self.shape.geometry.parity > 1 { 3 } else { 2 };
        let is_left_out = self.rng.one_in(4);
        for _ in 0..self.rng.range(1, most) {
            away.unplugged.push((self.id(), self.slot()));
        }
        let slots: Vec<usize> = away.unplugged.iter().map(|(_, slot)| *slot).collect();
        let mut boots = vec![self.filled(), written, away.stopped()];
        for i in 0..4 {
            let mut again = self.empty();
            // A rebuilt device holds zeroes for lost blocks.
            for slot in slots.iter().filter(|_| i == 0 && !is_left_out) {
                self.add(&mut again, 0, 0, Action::Replace(*slot));
            }
            if again.steps.is_empty() {
                self.add(&mut again, 0, 0, Action::RewriteLost);
            }
            again.crash = match i == 0 && !is_left_out {
                true => None,
                false => Some(self.crash(12 + 6 * self.shape.members() as u64)),
            };
            boots.push(again);
        }
        boots
    }

    /// Small writes to few blocks of one strip, and some after them with entries of the maximum
    /// length. Power fails when such an entry is written. The slow member holds none of these
    /// blocks: writes elsewhere keep the lane's tail back.
    fn hot_lane(&mut self) -> Vec<Boot> {
        let mut boots = vec![self.filled()];
        let geometry = self.shape.geometry;
        let stripe = geometry.stripe_bytes() / SECTOR as u64;
        let first = self.rng.below(self.sectors() / stripe) * stripe;
        let number = geometry.locate(first * SECTOR as u64).stripe;
        self.slow = Some((geometry.member(number, 2), 30 * self.shape.latency_ns));
        let hot = self.rng.range(3, HOT_BLOCKS + 1);
        for i in 0..self.rng.range(6, 16) {
            let mut boot = self.empty();
            let workers = self.rng.range(4, 7) as usize;
            if i == 0 {
                self.add(&mut boot, workers, 0, Action::Fail(geometry.member(number, 1)));
            }
            for worker in 0..workers {
                for _ in 0..self.rng.range(6, 16) {
                    let (lba, count) = match self.rng.below(12) {
                        0 | 1 => (first + HOT_BLOCKS, LONG_ENTRY_BLOCKS),
                        2 => (self.rng.below(self.sectors()), 1),
                        _ => (first + self.rng.below(hot), 1),
                    };
                    self.add(&mut boot, worker, 0, Action::Write { lba, count, is_fua: true, change_ns: 0 });
                }
            }
            boot.crash = Some(CrashAt::LongWriteStarted(1 + self.rng.below(6)));
            boots.push(boot);
        }
        boots
    }

    fn slow_mark(&mut self) -> Vec<Boot> {
        let (slot, mut slow) = (self.slot(), self.slot());
        if slot == slow {
            slow = (slot + 1) % self.shape.members();
        }
        let mut boot = self.empty();
        let workers = self.rng.range(1, 5) as usize;
        let slow_ns = 100 * self.shape.latency_ns + 2_000_000;
        self.add(&mut boot, workers, 0, Action::Slow(slow, slow_ns));
        for worker in 0..workers {
            let delay_ns = self.rng.log_uniform(4 * self.shape.latency_ns);
            for _ in 0..self.rng.range(1, 3) {
                let write = self.small_write();
                self.add(&mut boot, worker, delay_ns, write);
            }
        }
        let delay_ns = self.rng.log_uniform(20 * self.shape.latency_ns);
        self.add(&mut boot, workers + 1, delay_ns, Action::Fail(slot));
        boot.crash = Some(CrashAt::Time(delay_ns + self.rng.below(2 * slow_ns)));
        vec![self.filled(), boot, self.empty().stopped()]
    }

    /// Writes everything once and stops the array.
    fn filled(&mut self) -> Boot {
        let mut boot = self.empty();
        let stripe = self.shape.geometry.stripe_bytes() / SECTOR as u64;
        for (i, lba) in (0..self.sectors()).step_by(stripe as usize).enumerate() {
            let count = stripe.min(self.sectors() - lba);
            self.add(&mut boot, i % 3, 0, Action::Write { lba, count, is_fua: false, change_ns: 0 });
        }
        boot.stopped()
    }

    fn empty(&self) -> Boot {
        Boot { is_crash_of_work: true, ..Boot::default() }
    }

    fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn add(&mut self, boot: &mut Boot, worker: usize, delay_ns: u64, action: Action) {
        let id = self.id();
        boot.steps.push(Step { id, worker, delay_ns, action });
    }

    fn slot(&mut self) -> usize {
        self.rng.below(self.shape.members() as u64) as usize
    }

    fn sectors(&self) -> u64 {
        self.shape.geometry.capacity() / SECTOR as u64
    }

    /// Sectors of a block.
    fn unit(&self) -> u64 {
        u64::from(self.shape.block_size) / SECTOR as u64
    }

    fn crash(&mut self, most: u64) -> CrashAt {
        let count = 1 + self.rng.below(most);
        if self.rng.one_in(2) { CrashAt::WriteStarted(count) } else { CrashAt::WriteEnded(count) }
    }

    /// A write of some blocks, within a strip or into the next one.
    fn small_write(&mut self) -> Action {
        let unit = self.unit();
        let lba = self.rng.below(self.sectors()) / unit * unit;
        let count = (1 + self.rng.below(8)).next_multiple_of(unit).min(self.sectors() - lba);
        Action::Write { lba, count, is_fua: self.rng.one_in(2), change_ns: 0 }
    }

    fn full_stripe(&mut self) -> Action {
        let count = self.shape.geometry.stripe_bytes() / SECTOR as u64;
        let lba = self.rng.below(self.sectors() / count) * count;
        Action::Write { lba, count, is_fua: self.rng.one_in(2), change_ns: 0 }
    }
}

impl Boot {
    fn stopped(self) -> Boot {
        Boot { is_stopped: true, ..self }
    }
}
