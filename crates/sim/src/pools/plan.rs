//! The plan of a run: a few pools, and for each boot its steps and the end of power. All of it is
//! drawn from one number.

use super::damage::Damage;
use crate::machine::CrashAt;
use base::Rng;
use std::collections::BTreeSet;

/// The disks of a run, and how their pools begin.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Units of each pool at first.
    pub units: Vec<u64>,
    /// Bytes of a unit: 1 MiB where the pool's own code makes the pool, else less, so that a boot
    /// reads less.
    pub unit: u64,
    /// Volumes of one unit that the first pool has at first: its table is long, and torn more
    /// often.
    pub crowd: u64,
    /// Whether [`volume::Pool::create`] makes the pools, with power loss at any of its writes.
    pub is_created: bool,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Whether disks have a volatile cache.
    pub has_volatile_cache: bool,
    /// Typical latency of a disk in nanoseconds.
    pub latency_ns: u64,
    /// Simulated cores.
    pub cores: usize,
    /// Whether requests to the disks fail often in some boots.
    pub has_faults: bool,
    /// Whether some boots do not have all pools.
    pub has_absent: bool,
}

/// The next action of a boot. Numbers are drawn at large and reduced to the objects that exist when
/// the step is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Makes a volume.
    Create { pool: u64, size: u64 },
    /// Reserves room for a new volume, and zeroes a part of it. At most one reservation exists.
    Reserve { pool: u64, size: u64 },
    /// Zeroes the rest of the reserved room and commits it, or drops the reservation.
    EndReserved { commits: bool },
    /// Makes a volume larger.
    Grow { volume: u64, by: u64 },
    /// Gives a volume another name.
    Rename { volume: u64, to: u64 },
    /// Removes a volume, after its users have closed it.
    Delete { volume: u64 },
    /// A disk becomes larger, and its pool with it.
    Extend { pool: u64, units: u64 },
    /// A user of a volume makes requests, while the next steps are carried out.
    Work { volume: u64, requests: u64, seed: u64 },
    /// Waits until no user makes requests any more.
    Join,
    /// Moves a volume to another pool, while its users continue.
    Move { volume: u64, to: u64 },
    /// A system call for the state file fails: the `number`th from now on.
    FailState { number: u64 },
    /// A write to a disk fails: the `number`th from now on.
    FailWrite { pool: u64, number: u32 },
}

/// An action, with a number by which a failing run can keep it.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub id: u32,
    pub action: Action,
}

/// From power on to power off.
#[derive(Clone, Debug, Default)]
pub struct Boot {
    /// Damage to the tables before power comes.
    pub damages: Vec<(u32, Damage)>,
    /// The state file is damaged, with this seed.
    pub state_damage: Option<(u32, u64)>,
    /// One request to a disk in so many fails; 0: none.
    pub failing: u64,
    /// Whether requests fail from the start of the boot, not only after everything was read.
    pub fails_at_start: bool,
    /// A system call for the state file fails after the start: the number; 0: none.
    pub state_failure: u64,
    /// The pool that this boot does not have, drawn at large; 0: it has all.
    pub absent: u64,
    /// Whether moves that an earlier boot began are cancelled.
    pub gives_up: bool,
    /// The steps, in their order.
    pub steps: Vec<Step>,
    /// When power goes before the steps have ended.
    pub crash: Option<CrashAt>,
    /// Power goes at this system call for the state file; 0: at none.
    pub state_crash: u64,
    /// Whether users have ended and caches are flushed when power goes after the last step.
    pub is_quiet: bool,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) seed: u64,
    pub(super) shape: Shape,
    pub(super) boots: Vec<Boot>,
}

/// A kind of runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// Requests to the disks fail often.
    pub faults: bool,
    /// Volumes move often.
    pub moves: bool,
}

impl Plan {
    /// The plan of a seed.
    pub fn draw(seed: u64, kind: Kind) -> Plan {
        let root = Rng::new(seed);
        let mut shape = Shape::draw(&mut root.fork(1));
        let mut rng = root.fork(2);
        let mut next_id = 0;
        let mut boots: Vec<Boot> =
            (0..rng.range(2, 8)).map(|number| Boot::draw(&mut rng, number > 0, &mut next_id)).collect();
        // With this number the seeds in regressions.txt draw none, and keep their runs.
        let mut rng = root.fork(31);
        shape.has_absent = rng.one_in(4) || kind.moves;
        if shape.has_absent {
            boots.iter_mut().for_each(|boot| boot.absent = if rng.one_in(2) { rng.draw() } else { 0 });
        }
        if kind.moves {
            let mut rng = root.fork(6);
            boots.iter_mut().for_each(|boot| boot.draw_moves(&mut rng));
        }
        if kind.faults {
            shape.has_faults = true;
            let mut rng = root.fork(4);
            boots.iter_mut().for_each(|boot| boot.draw_faults(&mut rng));
        }
        Plan { seed, shape, boots }
    }

    /// How often power comes.
    pub fn boots(&self) -> usize {
        self.boots.len()
    }

    /// The numbers of all steps and damages.
    pub fn ids(&self) -> BTreeSet<u32> {
        let of_boot = |boot: &Boot| {
            let damages = boot.damages.iter().map(|(id, _)| *id);
            let damages = damages.chain(boot.state_damage.iter().map(|(id, _)| *id));
            damages.chain(boot.steps.iter().map(|step| step.id)).collect::<Vec<_>>()
        };
        self.boots.iter().flat_map(of_boot).collect()
    }

    /// The plan with those steps and damages in its first `boots` boots.
    pub fn cut(&self, keep: &BTreeSet<u32>, boots: usize) -> Plan {
        let mut plan = self.clone();
        plan.boots.truncate(boots);
        for boot in &mut plan.boots {
            boot.damages.retain(|(id, _)| keep.contains(id));
            boot.state_damage = boot.state_damage.filter(|(id, _)| keep.contains(id));
            boot.steps.retain(|step| keep.contains(&step.id));
        }
        plan
    }
}

impl Shape {
    fn draw(rng: &mut Rng) -> Shape {
        let is_created = rng.one_in(8);
        let crowd = if !is_created && rng.one_in(4) { rng.range(20, 80) } else { 0 };
        let unit = match (is_created, crowd) {
            (true, _) => 1 << 20,
            (_, 0) => rng.pick(&[16, 32, 64]) << 10,
            _ => 4 << 10,
        };
        let most = if is_created { 4 } else { 12 };
        let mut units: Vec<u64> = (0..rng.range(2, 5)).map(|_| rng.range(2, most)).collect();
        units[0] += crowd;
        Shape {
            units,
            unit,
            crowd,
            is_created,
            block_size: rng.pick(&[512, 512, 4096]),
            has_volatile_cache: !rng.one_in(3),
            latency_ns: rng.pick(&[10_000, 100_000]),
            cores: if rng.one_in(3) { 2 } else { 1 },
            has_faults: false,
            has_absent: false,
        }
    }
}

impl Boot {
    fn draw(rng: &mut Rng, may_damage: bool, next_id: &mut u32) -> Boot {
        let mut id = || {
            *next_id += 1;
            *next_id
        };
        let damages = match may_damage && rng.one_in(2) {
            true => (0..rng.range(1, 3)).map(|_| (id(), Damage::draw(rng))).collect(),
            false => Vec::new(),
        };
        let state_damage = (may_damage && rng.one_in(3)).then(|| (id(), rng.draw()));
        let steps = (0..rng.range(3, 16)).map(|_| Step { id: id(), action: Action::draw(rng) }).collect();
        let state_crash = if rng.one_in(4) { 1 + rng.log_uniform(60) } else { 0 };
        let crash = match rng.below(8) {
            _ if state_crash > 0 => None,
            0..3 => Some(CrashAt::WriteStarted(1 + rng.log_uniform(400))),
            3..5 => Some(CrashAt::WriteEnded(1 + rng.log_uniform(400))),
            5 => Some(CrashAt::Time(rng.log_uniform(100_000_000))),
            _ => None,
        };
        let (gives_up, is_quiet) = (rng.one_in(3), rng.one_in(3));
        Boot { damages, state_damage, gives_up, steps, crash, state_crash, is_quiet, ..Boot::default() }
    }

    /// The pool that this boot does not have, of so many.
    pub fn absent(&self, pools: usize) -> Option<usize> {
        (self.absent > 0).then(|| (self.absent % pools as u64) as usize)
    }

    /// Lets volumes move often, with power loss in their changes of the state file.
    fn draw_moves(&mut self, rng: &mut Rng) {
        self.steps.iter_mut().for_each(|step| step.action = Action::draw_move(rng));
        if rng.one_in(2) {
            (self.crash, self.state_crash) = (None, 1 + rng.log_uniform(60));
        }
    }

    /// Lets requests fail often.
    fn draw_faults(&mut self, rng: &mut Rng) {
        self.failing = if rng.one_in(4) { 0 } else { 2 + rng.log_uniform(200) };
        self.fails_at_start = rng.one_in(2);
        self.state_failure = if rng.one_in(4) { 1 + rng.log_uniform(10) } else { 0 };
    }
}

impl Action {
    fn draw_move(rng: &mut Rng) -> Action {
        let (first, second) = (rng.draw(), rng.draw());
        match rng.below(8) {
            0..2 => Action::Create { pool: first, size: second },
            2 => Action::Work { volume: first, requests: 1 + rng.log_uniform(30), seed: second },
            3 => match rng.one_in(2) {
                true => Action::FailWrite { pool: first, number: 1 + rng.log_uniform(30) as u32 },
                false => Action::FailState { number: 1 + rng.log_uniform(30) },
            },
            _ => Action::Move { volume: first, to: second },
        }
    }

    fn draw(rng: &mut Rng) -> Action {
        let mut any = || rng.draw();
        let (first, second) = (any(), any());
        match rng.below(30) {
            0..5 => Action::Create { pool: first, size: second },
            5 => Action::Reserve { pool: first, size: second },
            6 => Action::EndReserved { commits: !rng.one_in(3) },
            7..9 => Action::Grow { volume: first, by: second },
            9 => Action::Rename { volume: first, to: second },
            10..13 => Action::Delete { volume: first },
            13 if rng.one_in(2) => Action::Extend { pool: first, units: 1 + second % 3 },
            13 => Action::Join,
            14 => Action::FailWrite { pool: first, number: 1 + rng.log_uniform(30) as u32 },
            15..19 => Action::Move { volume: first, to: second },
            19 if rng.one_in(2) => Action::FailState { number: 1 + rng.log_uniform(30) },
            _ => Action::Work { volume: first, requests: 1 + rng.log_uniform(30), seed: second },
        }
    }
}
