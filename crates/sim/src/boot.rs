//! One boot: power on, assembly, check of the surviving data, workload and events, power off.
//!
//! ```text
//!   power on ─► assemble ─► verify ─► workers … ─┬─► stop or idle ─► power off
//!                                                └─► power goes ──► every request must end ─► power off
//! ```

use crate::client::Client;
use crate::damage;
use crate::disk::{STUCK_LOOK_NS, SimDisk, Unreadable};
use crate::extras;
use crate::faults;
use crate::gate::within;
use crate::growth;
use crate::machine::CrashAt;
use crate::newcomers;
use crate::operate;
use crate::operations::{self, Crew};
use crate::oracle::SECTOR;
use crate::pairs;
use crate::plan::{Action, Boot, Newcomers, Step};
use crate::streams;
use crate::subject::{Refusal, Running, Scrubbed, Subject};
use crate::world::World;
use raid::Consistency;
use reactor::{Core, VirtualClock};
use std::cell::Cell;
use std::rc::Rc;
use std::task::Poll;

/// Virtual time in nanoseconds after which an operation counts as hanging. Rebuilds of these small
/// arrays take seconds.
pub(crate) const HANGS_NS: u64 = 600_000_000_000;

/// Time until no region is marked dirty, without a member and without writes: generous for the
/// slowest disks.
const IDLE_NS: u64 = 20_000_000;
/// The same while every member is live: two sweeps of a second, and the writes of the write-intent
/// bitmap.
const LONG_IDLE_NS: u64 = 3_000_000_000;

/// State of a boot's task.
struct Session {
    world: Rc<World>,
    subject: Rc<dyn Subject>,
    cores: Vec<Core>,
    is_tracing: bool,
    /// The array was stopped or is being created: a power failure has no effect.
    is_stopped: Cell<bool>,
}

/// Start and course of a boot.
#[derive(Clone)]
pub enum Script {
    /// A boot of the plan.
    Boot(Boot),
    /// A try to create the array.
    Create {
        /// When power fails.
        crash: Option<CrashAt>,
        /// The disks still hold what they held before.
        is_first: bool,
    },
    /// The end of a run: a check of all data including parity, then with as many members missing
    /// as parity covers.
    Epilogue,
}

/// Runs a boot. Returns whether another one is useful.
pub fn run(
    world: &Rc<World>,
    subject: &Rc<dyn Subject>,
    seed: u64,
    script: Script,
    is_tracing: bool,
) -> bool {
    let (world, subject) = (world.clone(), subject.clone());
    let cores = if matches!(script, Script::Create { .. }) { 1 } else { world.shape.cores };
    reactor::run_simulated_cores(seed, cores, move |_: VirtualClock, cores| async move {
        let is_stopped = Cell::new(matches!(script, Script::Create { .. }));
        let session = Session { world, subject, cores, is_tracing, is_stopped };
        session.world.machine.power_on();
        let goes_on = session.run(script).await;
        session.end().await;
        goes_on && !session.world.has_failed()
    })
}

impl Session {
    fn is_on(&self) -> bool {
        self.world.machine.is_on()
    }

    fn note(&self, what: &str) {
        if self.is_tracing {
            println!("{:>12} ---- {what}", self.cores[0].now_ns());
        }
    }

    async fn run(&self, script: Script) -> bool {
        match script {
            Script::Create { crash, is_first } => {
                self.create(crash, is_first).await;
                true
            }
            Script::Boot(boot) => self.boot(&boot).await,
            Script::Epilogue => self.epilogue().await,
        }
    }

    /// Creates the array, unless an earlier try has.
    async fn create(&self, crash: Option<CrashAt>, is_first: bool) {
        let (world, disks) = (&self.world, self.world.disks());
        let disks = &disks[..world.members()];
        if is_first && world.shape.creation.is_some() {
            newcomers::fill_with_garbage(world, disks);
            if let Err(error) = self.subject.soil(&world.shape, disks).await {
                world.fail(format!("a former array: {error}"));
            }
        }
        self.arm(crash.map(|crash| world.machine.from_now(crash)));
        match within(HANGS_NS, self.subject.create(&world.shape, disks)).await {
            None => world.fail("create hangs".into()),
            Some(_) if !self.is_on() => world.count(|stats| stats.crashes += 1),
            Some(Err(error)) => world.fail(format!("create: {error}")),
            Some(Ok(())) => world.note_created(),
        }
    }

    /// Turns power off, if it is on; every running task must end.
    async fn end(&self) {
        self.world.machine.power_off();
        let machine = &self.world.machine;
        let drained = within(HANGS_NS, async {
            while machine.in_flight() > 0 {
                reactor::current().sleep(1_000_000).await;
            }
        });
        if drained.await.is_none() {
            self.world.fail("requests to disks never end".into());
        }
        if machine.dropped() > 0 {
            self.world
                .fail(format!("{} requests to disks were dropped before they ended", machine.dropped()));
        }
        self.world.all_disks().iter().for_each(SimDisk::lose_cache);
        self.world.note_crash(self.is_stopped.get());
        self.world.count(|stats| stats.crashes += u64::from(!self.is_stopped.get()));
        self.note("power is off");
    }

    fn arm(&self, crash: Option<CrashAt>) {
        self.world.machine.crash_at(crash);
        if let Some(CrashAt::Time(ns)) = crash {
            let machine = self.world.machine.clone();
            let core = self.cores[0].clone();
            let alarm = core.sleep(ns);
            core.spawn(async move {
                alarm.await;
                machine.power_off();
            });
        }
    }

    fn change_disks(&self, boot: &Boot) {
        for (_, slot) in &boot.unplugged {
            let disk = self.world.disk(*slot);
            if !disk.is_dead() && self.world.may_lose(*slot) {
                self.note(&format!("slot {slot} is unplugged"));
                disk.kill();
                self.world.note_loss(*slot);
            }
        }
        for (_, slot) in &boot.plugged {
            if self.world.is_lost(*slot) && !self.world.is_beyond(self.world.shape.group_of(*slot)) {
                self.note(&format!("slot {slot} is plugged in again"));
                self.world.disk(*slot).revive();
            }
        }
    }

    /// Damages metadata with a copy elsewhere.
    fn damage_metadata(&self, boot: &Boot) {
        for fault in &boot.faults {
            if faults::inflict(&self.world, fault, false) {
                self.note(&format!("{fault:?}"));
            }
        }
        self.world.all_disks().iter().for_each(SimDisk::forget_cut_off);
    }

    async fn boot(&self, boot: &Boot) -> bool {
        self.change_disks(boot);
        self.damage_metadata(boot);
        if !boot.commands.is_empty() && !self.operate(boot).await {
            return !self.world.has_failed();
        }
        if boot.is_looked_at {
            self.look().await;
        }
        if boot.is_crash_early {
            self.arm(boot.crash);
        }
        let Some(running) = self.assemble().await else {
            self.world.count(|stats| stats.early_crashes += u64::from(!self.is_on()));
            return !self.is_on();
        };
        let Some(client) = self.client(&*running) else { return false };
        self.verify(&client).await;
        let (running, client) = match &boot.newcomers {
            Some(newcomers) if self.can_extend(&*running) && self.can_reshape(&*running).await => {
                drop(client);
                match self.extend(running, newcomers).await {
                    Some(both) => both,
                    None => return !self.world.has_failed(),
                }
            }
            _ => (running, client),
        };
        if !boot.is_crash_early {
            let crash = boot.crash.filter(|_| boot.is_crash_of_work);
            self.arm(crash.map(|crash| self.world.machine.from_now(crash)).or(boot.crash));
        }
        if self.world.draw().is_multiple_of(2) {
            resync(&self.world, &*running).await;
        }
        self.work(boot, &running).await;
        if !boot.faults.is_empty() && self.world.draw().is_multiple_of(2) {
            self.let_write_stray(&*running, &client).await;
        }
        if self.world.draw().is_multiple_of(4) {
            self.idle(&*running).await;
        }
        if self.is_on() && !self.world.has_failed() {
            extras::look(&self.world, &*running);
            self.world.note_states(&running.live());
            self.verify(&client).await;
        }
        drop(client);
        if self.is_on() && boot.is_stopped && !self.world.has_failed() {
            self.stop(&*running).await;
        }
        !self.world.has_failed()
    }

    /// Runs the operator's commands before the array is started. Returns whether power is on and no
    /// check has failed.
    async fn operate(&self, boot: &Boot) -> bool {
        let world = &self.world;
        self.arm(boot.command_crash);
        for (_, command) in &boot.commands {
            self.note(&format!("{command:?}"));
            operate::run(world, &self.subject, *command).await;
            if !self.is_on() || world.has_failed() {
                return false;
            }
        }
        self.arm(None);
        true
    }

    /// Checks that the assembled array knows its spares and settings.
    fn note_operations(&self, running: &dyn Running) {
        let world = &self.world;
        if world.shape.operations.is_none() {
            return;
        }
        extras::look(world, running);
        world.extras.settle(|| world.draw().is_multiple_of(2));
        extras::check_spares(world, running);
        if let Some(value) = running.read_error_budget() {
            let mut budget = world.budget.get();
            if !budget.note(value) {
                world.fail(format!("the array allows {value} read errors: {:?}", world.budget.get()));
            }
            world.budget.set(budget);
        }
    }

    /// Starts the array read-only, reads all of it and stops it. No disk may be written.
    async fn look(&self) {
        let world = &self.world;
        self.note("read-only start");
        let disks = world.plugged_disks();
        match within(HANGS_NS, self.subject.look(&disks)).await {
            None => world.fail("a read-only start hangs".into()),
            Some(Ok(Some(running))) => {
                if let Some(client) = self.client(&*running) {
                    self.verify(&client).await;
                }
                if within(HANGS_NS, running.stop()).await != Some(Ok(())) {
                    world.fail("a read-only array does not stop".into());
                }
                world.count(|stats| stats.looks += 1);
            }
            Some(Ok(None)) if world.must_be_readable() => {
                world.fail("a read-only start is refused after a clean stop".into());
            }
            // Another start is judged below.
            Some(Ok(None) | Err(_)) => {}
        }
        if world.machine.writes_started() > 0 {
            world.fail(format!("a read-only start wrote {} times", world.machine.writes_started()));
        }
    }

    /// Whether new members can be added.
    fn can_extend(&self, running: &dyn Running) -> bool {
        let world = &self.world;
        world.lacks_something()
            && self.is_on()
            && world.is_whole()
            && !world.is_any_beyond()
            && !running.live().contains(&false)
    }

    /// Whether the array may begin its reshape, if it has one: that needs parity that was computed.
    async fn can_reshape(&self, running: &dyn Running) -> bool {
        let world = &self.world;
        world.shape.next.is_none() || !world.shape.is_unsynced || resync(world, running).await
    }

    /// Stops the array, adds its new members and starts it again; `None` when power fails or a
    /// check fails.
    async fn extend(
        &self,
        running: Rc<dyn Running>,
        newcomers: &Newcomers,
    ) -> Option<(Rc<dyn Running>, Client)> {
        self.stop(&*running).await;
        drop(running);
        if !self.is_on() || self.world.has_failed() {
            return None;
        }
        self.note("members are added");
        self.world.note_crossing(self.world.shape.next.is_some());
        self.arm(newcomers.crash);
        let disks = self.world.disks();
        let (own, new) = disks.split_at(self.world.members());
        newcomers::soil(&self.world, new);
        match within(HANGS_NS, self.subject.extend(&self.world.shape, own, new)).await {
            None => self.world.fail("the addition of members never ends".into()),
            Some(Ok(geometry)) => {
                // The capacity never shrinks again, even if power fails now. A reshape increases it
                // at its end.
                let bytes = match self.world.shape.next {
                    Some(_) => self.world.sectors() * SECTOR as u64,
                    None => geometry.capacity(),
                };
                self.world.note_geometry(Some(geometry), bytes);
                self.world.count(|stats| stats.growths += 1);
            }
            Some(Err(_)) if !self.is_on() || self.world.has_reason() => {}
            // Blocks are lost, recorded by their places in the present shape.
            Some(Err(_)) if self.world.shape.next.is_some() && self.world.is_impaired(0) => {}
            Some(Err(error)) => self.world.fail(format!("new members: {error}")),
        }
        if !self.is_on() || self.world.has_failed() {
            return None;
        }
        self.arm(None);
        let running = self.assemble().await?;
        self.is_stopped.set(false);
        let client = self.client(&*running)?;
        self.verify(&client).await;
        Some((running, client))
    }

    /// Lets a write be lost or misdirected while the array is quiet and all parity is right.
    async fn let_write_stray(&self, running: &dyn Running, client: &Client) {
        let world = &self.world;
        if self.is_on() && !world.has_failed() && world.has_parity() && world.is_whole() {
            extras::look(world, running);
            world.note_states(&running.live());
            if world.is_whole() && !world.is_damaged() && resync(world, running).await {
                extras::look(world, running);
                self.note("a write strays");
                damage::stray(world, running, client).await;
            }
        }
    }

    /// Waits until the array has cleared every mark: sooner when it logs without a member.
    async fn idle(&self, running: &dyn Running) {
        let is_degraded = running.live().contains(&false);
        self.note("idle");
        if self.world.machine.in_flight() > 0 {
            // A request of a disk that was stuck ends with the disk's next look, and the array may
            // be writing with it.
            reactor::current().sleep(STUCK_LOOK_NS).await;
        }
        reactor::current().sleep(if is_degraded { IDLE_NS } else { LONG_IDLE_NS }).await;
        if self.is_on() && is_degraded == running.live().contains(&false) {
            self.world.note_idle();
            self.world.note_logging_with(&running.live());
        }
    }

    async fn stop(&self, running: &dyn Running) {
        self.note("stop");
        match within(HANGS_NS, running.stop()).await {
            None => self.world.fail("stop hangs".into()),
            Some(Err(error)) if self.is_on() && !self.world.is_any_beyond() => {
                self.world.fail(format!("stop: {error}"));
            }
            Some(_) => self.is_stopped.set(self.is_on()),
        }
    }

    /// Assembles and starts the array. `None` when power failed, the array may refuse, or a check
    /// failed.
    async fn assemble(&self) -> Option<Rc<dyn Running>> {
        let world = &self.world;
        let mut force = false;
        loop {
            let disks = world.plugged_disks();
            self.note(if force { "assemble by force" } else { "assemble" });
            let assembly = self.subject.assemble(&world.shape, &disks, &self.cores, force);
            let Some(result) = within(HANGS_NS, assembly).await else {
                world.fail("assembly hangs".into());
                return None;
            };
            if !self.is_on() {
                return None;
            }
            let may_be_dirty =
                world.shape.consistency == Consistency::Bitmap && world.shape.geometry.data > 1;
            match result {
                Ok(running) => {
                    if force {
                        world.note_forced();
                    }
                    self.note_operations(&*running);
                    world.note_assembled(&running.live());
                    world.note_logging_with(&running.live());
                    note_shape(world, &*running);
                    return Some(running);
                }
                Err(Refusal::DirtyDegraded) if !force && may_be_dirty => {
                    world.give_up_dirty();
                    force = true;
                }
                Err(Refusal::SplitBrain(_)) if world.take_split_away() => {}
                Err(_) if world.is_any_beyond() => {
                    world.count(|stats| stats.frozen += 1);
                    return None;
                }
                Err(refusal) => {
                    world.fail(format!("assembly is refused: {refusal:?}"));
                    return None;
                }
            }
        }
    }

    fn client(&self, running: &dyn Running) -> Option<Client> {
        let device = running.device();
        match device.open_channel() {
            Ok(channel) => Some(Client::new(&self.world, channel, device.limits().volatile_cache)),
            Err(error) => {
                if self.is_on() {
                    self.world.fail(format!("no channel: {error}"));
                }
                None
            }
        }
    }

    async fn verify(&self, client: &Client) {
        self.note("verify");
        let most =
            [1, 8, 64, 200][(self.world.draw() % 4) as usize] * u64::from(self.world.shape.block_size) / 512;
        let most = if self.world.draw().is_multiple_of(8) { most } else { 256 };
        if within(HANGS_NS, client.verify(most)).await.is_none() {
            self.world.fail("a read hangs".into());
        }
    }

    /// Starts the workers and waits for their end or a power failure; then waits until all have
    /// ended.
    async fn work(&self, boot: &Boot, running: &Rc<dyn Running>) {
        let crew = Crew::new(&self.cores);
        let gate = crew.gate.clone();
        let workers = boot.steps.iter().map(|step| step.worker + 1).max().unwrap_or(0);
        for worker in 0..workers {
            let steps: Vec<Step> = boot.steps.iter().filter(|s| s.worker == worker).cloned().collect();
            let shared = Rc::new((self.world.clone(), running.clone(), crew.clone()));
            spawn_worker(&shared, worker % self.cores.len(), steps, self.is_tracing);
        }
        let machine = self.world.machine.clone();
        let done = within(HANGS_NS, async {
            std::future::poll_fn(|cx| {
                machine.wake_at_crash(cx.waker());
                if machine.is_on() { gate.poll_empty(cx) } else { Poll::Ready(()) }
            })
            .await;
        });
        if done.await.is_none() {
            return self.world.fail(format!("{} workers hang", gate.running()));
        }
        if !self.is_on() {
            self.note("power goes");
        }
        let ended = within(HANGS_NS, std::future::poll_fn(|cx| gate.poll_empty(cx)));
        if ended.await.is_none() {
            self.world.fail(format!("{} workers hang after power loss", gate.running()));
        }
    }

    async fn epilogue(&self) -> bool {
        let world = &self.world;
        let Some(running) = self.assemble().await else { return false };
        let Some(client) = self.client(&*running) else { return false };
        self.verify(&client).await;
        if world.has_failed() || world.is_any_beyond() {
            return false;
        }
        if running.is_reshaping() {
            run_event(world, &running, &Action::Reshape).await;
            self.verify(&client).await;
        }
        let is_in_sync = resync(world, &*running).await;
        if is_in_sync && world.is_whole() && world.has_parity() {
            scrub(world, &*running).await;
            damage::inflict(world, &*running).await;
        }
        let members = world.members();
        let first = world.draw() as usize % members;
        for slot in (first..first + members).map(|slot| slot % members) {
            let disk = world.disk(slot);
            if world.has_parity() && !disk.is_dead() && !world.is_lost(slot) && self.can_lose(slot) {
                self.note(&format!("slot {slot} dies"));
                disk.kill();
                world.note_loss(slot);
            }
        }
        self.verify(&client).await;
        drop(client);
        self.stop(&*running).await;
        true
    }

    /// Whether parity also covers the loss of this slot.
    fn can_lose(&self, slot: usize) -> bool {
        let group = self.world.shape.group_of(slot);
        !self.world.shape.may_lose_too_many && self.world.may_lose(slot) && !self.world.is_beyond(group)
    }
}

/// State shared by all workers of a boot.
type Work = Rc<(Rc<World>, Rc<dyn Running>, Rc<Crew>)>;

/// Runs the steps of a worker on a core. When the core ends, the worker continues on the first one.
fn spawn_worker(work: &Work, core: usize, steps: Vec<Step>, is_tracing: bool) {
    let crew = &work.2;
    crew.note_worker(core, true);
    let shared = work.clone();
    let task = async move {
        let rest = run_worker(&shared, steps, is_tracing).await;
        shared.2.note_worker(core, false);
        if !rest.is_empty() {
            spawn_worker(&shared, 0, rest, is_tracing);
        }
    };
    crew.gate.spawn(&crew.cores[core], task);
}

/// Runs steps. Returns the remaining ones if the core ends.
async fn run_worker(work: &Work, steps: Vec<Step>, is_tracing: bool) -> Vec<Step> {
    let (world, running, crew) = &**work;
    let core = reactor::current();
    let device = running.device();
    let Ok(channel) = device.open_channel() else {
        if world.machine.is_on() {
            world.fail("no channel for a worker".into());
        }
        return Vec::new();
    };
    let client = Client::new(world, channel, device.limits().volatile_cache);
    for (i, step) in steps.iter().enumerate() {
        core.sleep(step.delay_ns).await;
        if !world.machine.is_on() || world.has_failed() {
            return Vec::new();
        }
        if !crew.begin_step(core.index()).await {
            return steps[i..].to_vec();
        }
        let trace = |what: &str| {
            if is_tracing {
                println!(
                    "{:>12} step {} on core {}: {:?} {what}",
                    core.now_ns(),
                    step.id,
                    core.index(),
                    step.action
                );
            }
        };
        if step.action.end().is_some_and(|end| end > world.sectors()) {
            crew.end_step();
            continue; // the array has not grown to it yet
        }
        trace("begins");
        match step.action {
            Action::Read { lba, count } => client.read(lba, count).await,
            Action::Write { lba, count, is_fua, change_ns } => {
                client.write(lba, count, is_fua, change_ns).await;
            }
            Action::Stream { lba, count, writes, depth, is_fua } => {
                streams::run(&client, (lba, count), (writes, depth), is_fua).await;
            }
            Action::WriteZeroes { lba, count } => client.clear(lba, count, false).await,
            Action::Discard { lba, count } => client.clear(lba, count, true).await,
            Action::Flush => client.flush().await,
            Action::RewriteLost => client.rewrite_lost().await,
            _ => {
                if world.shape.operations.is_some() {
                    extras::look(world, &**running);
                    operations::run(world, running, &step.action, crew).await;
                }
                run_event(world, running, &step.action).await;
            }
        }
        trace("ends");
        crew.end_step();
    }
    Vec::new()
}

async fn run_event(world: &Rc<World>, running: &Rc<dyn Running>, action: &Action) {
    if action.slot().is_some_and(|slot| slot >= world.members()) {
        return; // the array has no such slot yet
    }
    world.note_crossing(running.is_reshaping());
    match *action {
        Action::Kill(slot) if !world.disk(slot).is_dead() && world.may_lose(slot) => {
            world.disk(slot).kill();
            world.note_loss(slot);
        }
        Action::Fail(slot) if !world.is_lost(slot) && running.live()[slot] && world.may_lose(slot) => {
            world.note_loss(slot);
            let result = running.fail(slot).await;
            if result.is_ok() {
                world.note_logging(false);
            }
            judge(world, "fail", result);
        }
        Action::MediumError(slot, at) if !world.is_lost(slot) && world.may_lose(slot) => {
            let disk = world.disk(slot);
            let end = block::Device::limits(&disk).capacity - world.shape.more_bytes(slot);
            let data = world.shape.geometry.group_stripes * u64::from(world.shape.geometry.strip_bytes);
            // Strips lie in the upper part of a member: the range is usually there, sometimes in
            // metadata.
            let at = match running.strips_at(slot).filter(|_| world.shape.creation.is_some()) {
                Some(strips) => strips.start + at,
                None => (end - data + at).saturating_sub(64 << 10),
            };
            disk.add_medium_error(at..at + 4096, Unreadable::Disk);
            world.note_hurt(slot);
            world.note_giving_up(slot);
        }
        Action::StripError(slot, at) => faults::spoil_strip(world, &**running, slot, at),
        Action::Damage(ref fault) => {
            faults::inflict(world, fault, true);
        }
        Action::FailWrite(slot, number) if !world.is_lost(slot) && world.is_covered(slot) => {
            world.note_hurt(slot);
            world.disk(slot).fail_write(number);
        }
        Action::Stuck(slot, ns) | Action::Slow(slot, ns) if !world.is_lost(slot) && world.may_lose(slot) => {
            world.note_late(slot);
            let disk = world.disk(slot);
            let is_stuck = matches!(action, Action::Stuck(..));
            if is_stuck {
                disk.set_stuck(true)
            } else {
                disk.set_extra_latency(ns)
            }
            reactor::current().sleep(ns).await;
            if is_stuck {
                disk.set_stuck(false)
            } else {
                disk.set_extra_latency(0)
            }
            if world.machine.is_on() {
                world.note_states(&running.live());
            }
        }
        Action::Return(slot) | Action::Replace(slot) if world.is_lost(slot) => {
            if world.is_beyond(world.shape.group_of(slot)) || running.live()[slot] {
                return;
            }
            world.note_loss(slot); // a failed write counts for a disk that fails now
            let disk = match action {
                Action::Return(_) => {
                    world.disk(slot).revive();
                    world.disk(slot)
                }
                _ => world.replace(slot),
            };
            world.note_logging(true); // from some time on, if this was the last missing member
            world.note_giving_up(slot);
            let result = running.add(slot, &disk).await;
            if world.machine.is_on() {
                world.note_logging_with(&running.live());
            }
            let result = match world.shape.operations.is_some() {
                true => judged_add(world, running, slot, &disk, result),
                false => result,
            };
            if world.machine.is_on() && result.is_ok() && running.live()[slot] {
                world.note_live(slot);
                world.count(|stats| stats.rebuilds += 1);
            }
            judge(world, "add", result);
        }
        Action::ReplaceLost { slot, killed, kill_ns } => {
            pairs::replace_lost(world, running, slot, (killed, kill_ns)).await;
        }
        Action::Grow(bytes) => growth::run(world, running, bytes).await,
        Action::Reshape => {
            let result = running.reshape().await;
            if world.machine.is_on() {
                note_shape(world, &**running);
            }
            judge(world, "reshape", result);
        }
        Action::Scrub if world.has_parity() && world.is_whole() => {
            let is_in_sync = resync(world, &**running).await;
            if is_in_sync {
                scrub(world, &**running).await;
            }
        }
        _ => {}
    }
}

/// Result of adding a disk to a slot, which a spare may have filled meanwhile, or another disk
/// after that.
fn judged_add(
    world: &World,
    running: &Rc<dyn Running>,
    slot: usize,
    disk: &SimDisk,
    result: Result<(), String>,
) -> Result<(), String> {
    extras::look(world, &**running);
    let name = Some(block::Device::name(disk).to_owned());
    let is_other = !world.has_disk(slot, block::Device::name(disk));
    let is_elsewhere =
        (0..world.members()).any(|other| other != slot && running.devices(other).contains(&name));
    if running.live()[slot] || is_other || is_elsewhere || disk.is_dead() { Ok(()) } else { result }
}

/// Records the array's present shape.
fn note_shape(world: &World, running: &dyn Running) {
    world.note_crossing(running.is_reshaping());
    world.note_geometry(running.geometry(), running.device().limits().capacity);
}

pub(crate) fn judge(world: &World, what: &str, result: Result<(), String>) {
    if let Err(error) = result
        && world.machine.is_on()
        && !world.is_any_beyond()
    {
        world.fail(format!("{what}: {error}"));
    }
}

/// Resyncs parity after a crash. Returns whether all of it is right.
async fn resync(world: &World, running: &dyn Running) -> bool {
    if running.is_reshaping() {
        return false; // parity has two shapes
    }
    let was_whole = world.is_whole();
    let result = running.resync().await;
    // With a failed member, which the array may notice before the simulator, the comparison is
    // skipped or incomplete.
    let has_all = !running.live().contains(&false);
    match result {
        Ok(()) if world.machine.is_on() && was_whole && has_all => {
            world.note_synced();
            true
        }
        Ok(()) => false,
        Err(error) => {
            if world.machine.is_on() && world.is_whole() && has_all && !world.is_any_beyond() {
                world.fail(format!("resync: {error}"));
            }
            false
        }
    }
}

async fn scrub(world: &World, running: &dyn Running) {
    if running.is_reshaping() {
        return;
    }
    let result = running.scrub(false).await;
    if !world.machine.is_on() || world.is_any_beyond() {
        return;
    }
    match result {
        Ok(found) if found == Scrubbed::default() => {
            world.count(|stats| stats.scrubs += 1);
        }
        Ok(found) => world.fail(format!("a scrub found {found:?}, and nothing is wrong")),
        Err(_) if !world.is_whole() => {}
        Err(error) => world.fail(format!("scrub: {error}")),
    }
}
