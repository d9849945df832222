//! Operations on arrays other than failures: live members are replaced, spares come and are taken,
//! members stall beyond the deadlines of reads. The keeper moves, cores end, and an operator's
//! commands work on arrays that are stopped.

use crate::boot::{HANGS_NS, judge};
use crate::commands::Command;
use crate::disk::SimDisk;
use crate::extras;
use crate::gate::{Gate, within};
use crate::machine::CrashAt;
use crate::plan::{Action, Filter, Plan, Step};
use crate::subject::Running;
use crate::world::World;
use base::Rng;
use raid::array::{Deadlines, Soft};
use reactor::Core;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Most cores of a run.
const MOST_CORES: u64 = 3;
/// How often a core that is to end is looked at, in nanoseconds.
const LOOK_NS: u64 = 10_000;
/// An operator's choices.
#[derive(Clone, Copy, Debug)]
pub struct Operations {
    /// How long members are waited for.
    pub deadlines: Deadlines,
}

impl Operations {
    fn draw(rng: &mut Rng, latency_ns: u64) -> Operations {
        let soft = match rng.below(4) {
            0 => Soft::Never,
            1 => Soft::Adaptive,
            _ => Soft::After(latency_ns * (1 + rng.log_uniform(100))),
        };
        let hard_ns = rng.pick(&[300_000_000, 1_000_000_000, Deadlines::HARD_NS]);
        Operations { deadlines: Deadlines { soft, hard_ns } }
    }
}

/// Adds operations to every boot. `worker` does everything that is not I/O.
pub fn draw(plan: &mut Plan, worker: usize, filter: &Filter) {
    let mut rng = Rng::new(plan.seed).fork(17);
    let mut ids = plan.ids().into_iter().max().unwrap_or(0) + 1..;
    let shape = &mut plan.shape;
    (shape.has_keeper, shape.may_lose_too_many) = (true, false);
    shape.cores = rng.range(2, MOST_CORES + 1) as usize;
    shape.operations = Some(Operations::draw(&mut rng, shape.latency_ns));
    let (members, latency_ns, has_parity) =
        (shape.members() as u64, shape.latency_ns, shape.geometry.parity > 0);
    for (i, boot) in plan.boots.iter_mut().enumerate() {
        for _ in 0..rng.range(1, 6) {
            let slot = rng.below(members) as usize;
            for action in actions(&mut rng, slot, has_parity, filter.handover) {
                let (id, delay_ns) = (ids.next().unwrap_or(0), rng.log_uniform(20 * latency_ns));
                boot.steps.push(Step { id, worker, delay_ns, action });
            }
        }
        if i > 0 && rng.one_in(3) {
            for _ in 0..rng.range(1, 4) {
                let id = ids.next().unwrap_or(0);
                boot.commands.push((id, Command::draw(&mut rng, members)));
            }
            let count = 1 + rng.below(40);
            boot.command_crash = match rng.below(3) {
                0 => None,
                1 => Some(CrashAt::WriteStarted(count)),
                _ => Some(CrashAt::WriteEnded(count)),
            };
        }
    }
    if filter.offline {
        draw_additions(plan);
    }
}

/// Adds commands that add disks to a stopped array.
fn draw_additions(plan: &mut Plan) {
    let mut rng = Rng::new(plan.seed).fork(21);
    let mut ids = plan.ids().into_iter().max().unwrap_or(0) + 1..;
    let members = plan.shape.members() as u64;
    for boot in plan.boots.iter_mut().skip(1) {
        if rng.one_in(2) {
            continue;
        }
        for _ in 0..rng.range(1, 3) {
            let id = ids.next().unwrap_or(0);
            boot.commands.push((id, Command::draw_addition(&mut rng, members)));
        }
        let count = 1 + rng.log_uniform(200);
        boot.command_crash = boot.command_crash.or(match rng.below(4) {
            0 | 1 => None,
            2 => Some(CrashAt::WriteStarted(count)),
            _ => Some(CrashAt::WriteEnded(count)),
        });
    }
}

/// One operation, or a few that belong together.
fn actions(rng: &mut Rng, slot: usize, has_parity: bool, hands_over: bool) -> Vec<Action> {
    let lose = |rng: &mut Rng| match rng.below(3) {
        0 => Action::Kill(slot),
        1 => Action::Fail(slot),
        _ => Action::FailWrite(slot, 1 + rng.below(8) as u32),
    };
    let spare = |rng: &mut Rng| Action::AddSpare { is_global: rng.one_in(3) };
    match rng.below(10) {
        0 | 1 => vec![Action::ReplaceLive(slot)],
        2 => vec![Action::ReplaceLive(slot), Action::KillIncoming(slot)],
        3 if has_parity => vec![Action::ReplaceLive(slot), lose(rng), Action::AwaitSpares],
        4 => vec![spare(rng)],
        5 | 6 if has_parity => match rng.one_in(2) {
            true => vec![spare(rng), lose(rng)],
            false => vec![spare(rng), lose(rng), Action::AwaitSpares],
        },
        7 if has_parity => vec![Action::Stuck(slot, rng.range(1, 3000) * 1_000_000)],
        8 if hands_over => vec![Action::MoveKeeper],
        9 if hands_over => vec![Action::EndCore],
        _ => vec![spare(rng), Action::AwaitSpares],
    }
}

/// The workers of a boot, and the cores on which they are.
pub(crate) struct Crew {
    pub cores: Vec<Core>,
    pub gate: Gate,
    /// Workers on each core.
    workers: RefCell<Vec<usize>>,
    /// Workers in a step.
    busy: Cell<usize>,
    /// A core that is about to end: no worker begins a step meanwhile.
    ending: Cell<Option<usize>>,
    ended: RefCell<Vec<usize>>,
}

impl Crew {
    pub fn new(cores: &[Core]) -> Rc<Crew> {
        Rc::new(Crew {
            cores: cores.to_vec(),
            gate: Gate::default(),
            workers: RefCell::new(vec![0; cores.len()]),
            busy: Cell::new(0),
            ending: Cell::new(None),
            ended: RefCell::default(),
        })
    }

    /// A worker comes to a core, or leaves it.
    pub fn note_worker(&self, core: usize, has_come: bool) {
        let count = &mut self.workers.borrow_mut()[core];
        *count = if has_come { *count + 1 } else { *count - 1 };
    }

    /// Begins a step on a core, once no core is about to end. Returns whether it has begun: the
    /// worker must leave a core that is about to end.
    pub async fn begin_step(&self, core: usize) -> bool {
        while let Some(ending) = self.ending.get() {
            if ending == core {
                return false;
            }
            reactor::current().sleep(LOOK_NS).await;
        }
        self.busy.set(self.busy.get() + 1);
        true
    }

    /// Ends a step.
    pub fn end_step(&self) {
        self.busy.set(self.busy.get() - 1);
    }

    /// A core other than the first one and the caller's own.
    fn other_core(&self, number: u64) -> Option<usize> {
        let (own, ended) = (reactor::current().index(), self.ended.borrow());
        let is_free = |core: &usize| *core != own && !ended.contains(core);
        let cores: Vec<usize> = (1..self.cores.len()).filter(is_free).collect();
        number.checked_rem(cores.len() as u64).map(|place| cores[place as usize])
    }

    /// A core that has not ended.
    fn any_core(&self, number: u64) -> Core {
        let ended = self.ended.borrow();
        let cores: Vec<&Core> = self.cores.iter().filter(|core| !ended.contains(&core.index())).collect();
        cores[(number % cores.len() as u64) as usize].clone()
    }
}

/// Does an operation.
pub(crate) async fn run(world: &Rc<World>, running: &Rc<dyn Running>, action: &Action, crew: &Crew) {
    match *action {
        Action::ReplaceLive(slot) if running.live()[slot] && !world.is_lost(slot) => {
            replace_live(world, &**running, slot).await;
        }
        Action::KillIncoming(slot) => kill_incoming(world, &**running, slot),
        Action::AddSpare { is_global } => {
            let disk = world.new_extra();
            let result = running.add_spare(&disk, is_global).await;
            if world.machine.is_on() && result.is_ok() {
                world.extras.note_spare(block::Device::name(&disk));
                extras::look(world, &**running); // it may be taken already
                world.count(|stats| stats.spares += 1);
            }
            judge(world, "a new spare", result);
        }
        Action::AwaitSpares => await_spares(world, &**running).await,
        Action::MoveKeeper => {
            running.stop_keeper().await;
            start_keeper(world, &**running, crew).await;
        }
        Action::EndCore => end_core(world, &**running, crew).await,
        _ => {}
    }
}

/// Copies a live member onto a blank disk. The slot keeps its redundancy whenever power fails.
async fn replace_live(world: &World, running: &dyn Running, slot: usize) {
    if !world.has_parity() {
        let refused = running.replace_live(slot, &world.new_extra()).await;
        if refused.is_ok() && world.machine.is_on() {
            world.fail(format!("slot {slot} is copied without redundancy"));
        }
        return;
    }
    if !world.may_lose(slot) {
        return;
    }
    let result = running.replace_live(slot, &world.new_extra()).await;
    // The slot may be about to be filled with something else, or its member may have been lost
    // meanwhile.
    let is_other = |error: &String| error.contains("a device that fills it") || !running.live()[slot];
    judge(
        world,
        "replacement of a live member",
        result.or_else(|error| if is_other(&error) { Ok(()) } else { Err(error) }),
    );
    world.count(|stats| stats.replacements += 1);
}

/// The disk that fills a slot dies. It may be the member by now.
fn kill_incoming(world: &World, running: &dyn Running, slot: usize) {
    let [_, Some(name)] = running.devices(slot) else { return };
    let disks = world.extras.disks();
    let is_it = |disk: &&SimDisk| block::Device::name(*disk) == name;
    if let Some(disk) = disks.iter().find(is_it)
        && world.may_lose(slot)
    {
        world.note_loss(slot);
        disk.kill();
    }
}

/// Nothing is left to be done after some time. Then no slot is empty while a spare waits.
async fn await_spares(world: &World, running: &dyn Running) {
    for _ in 0..8 {
        if within(HANGS_NS, running.jobs_end()).await.is_none() {
            return world.fail("jobs do not end".into());
        }
        if !world.machine.is_on() {
            return;
        }
        extras::look(world, running);
        world.note_states(&running.live());
        let (spares, live) = (running.spares(), running.live());
        let Some(slot) = live.iter().position(|is_live| !is_live).filter(|_| !spares.is_empty()) else {
            return world.count(|stats| stats.rebuilds += 1);
        };
        if running.is_beyond_help() {
            return;
        }
        // A member may have failed just now.
        reactor::current().sleep(500_000_000).await;
        // A slot that could not be filled is left alone until a request for it.
        running.jobs_end().await;
        if !world.machine.is_on() {
            return;
        }
        if !running.live()[slot] && running.spares() == spares && running.devices(slot)[1].is_none() {
            return world.fail(format!("slot {slot} is empty, and spares wait: {spares:?}"));
        }
    }
}

async fn start_keeper(world: &World, running: &dyn Running, crew: &Crew) {
    let core = crew.any_core(world.draw());
    let disks: Vec<SimDisk> = world.extras.disks().into_iter().filter(|disk| !disk.is_dead()).collect();
    let result = running.start_keeper(&core, &disks).await;
    judge(world, "a new keeper", result);
    world.count(|stats| stats.moves += 1);
}

/// Ends a core: its workers leave it, no worker begins a step, and the keeper ends. The next
/// requests for its stripes meet a core that is gone.
async fn end_core(world: &World, running: &dyn Running, crew: &Crew) {
    let Some(core) = crew.other_core(world.draw()).filter(|_| crew.ending.get().is_none()) else { return };
    crew.ending.set(Some(core));
    let is_on = || world.machine.is_on() && !world.has_failed();
    while is_on() && (crew.workers.borrow()[core] > 0 || crew.busy.get() > 1) {
        reactor::current().sleep(LOOK_NS).await;
    }
    running.stop_keeper().await;
    while is_on() && world.machine.in_flight() > 0 {
        reactor::current().sleep(LOOK_NS).await;
    }
    if is_on() {
        crew.cores[core].end_simulated();
        crew.ended.borrow_mut().push(core);
        world.count(|stats| stats.ended_cores += 1);
        start_keeper(world, running, crew).await;
    }
    crew.ending.set(None);
}
