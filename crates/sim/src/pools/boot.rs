//! One boot: the pools are opened and judged, everything is read, steps are carried out, power
//! goes.

use super::damage;
use super::mover::{self, Mover, Pools};
use super::plan::Boot;
use super::world::{Known, State, World};
use crate::disk::SimDisk;
use crate::gate::Gate;
use crate::machine::CrashAt;
use crate::user::User;
use base::mix;
use block::{Device, Request};
use layers::migrate::Migratable;
use reactor::{Core, Simulation};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use volume::store::ReadError;
use volume::table::DecodeError;
use volume::{Info, Name, Pool, PoolError, Reservation};

/// A boot that is on.
pub(super) struct Running<'a> {
    pub(super) world: &'a Rc<World>,
    pub(super) simulation: &'a Simulation,
    pub(super) pools: &'a Pools,
    pub(super) mover: Mover<'a>,
    /// Volumes that users have open.
    open: RefCell<BTreeMap<u32, Weak<Migratable>>>,
    pub(super) reserved: Option<(Reservation<'a>, Known)>,
    pub(super) is_tracing: bool,
}

/// Runs a boot to its end; what may be there afterwards is in the world.
pub fn run(world: &Rc<World>, seed: u64, boot: &Boot, is_tracing: bool) {
    damage::apply(world, &boot.damages);
    if let Some((_, seed)) = boot.state_damage {
        mover::damage(world, seed);
    }
    world.machine.power_on();
    let simulation = Simulation::start(seed, world.shape.cores);
    world.machine.crash_at(boot.crash);
    world.folder.crash_at(boot.state_crash);
    world.is_failing.set(boot.failing > 0);
    if boot.fails_at_start {
        fail_often(world, boot, seed);
    }
    if let Some(CrashAt::Time(ns)) = boot.crash {
        let (core, machine) = (simulation.cores()[0].clone(), world.machine.clone());
        core.clone().with_current(|| {
            core.clone().spawn(async move {
                core.sleep(ns).await;
                machine.power_off();
            });
        });
    }
    let pools = open_all(world, &simulation.cores()[0], boot.absent(world.disks.len()));
    let core = simulation.cores()[0].remote();
    let opened = pools.as_ref().and_then(|pools| Some((pools, Mover::open(world, pools, core)?)));
    if let Some((pools, mover)) = opened {
        let (simulation, open) = (&simulation, RefCell::default());
        let mut running = Running { world, simulation, pools, mover, open, reserved: None, is_tracing };
        running.judge();
        if world.goes_on() {
            running.verify();
            fail_often(world, boot, mix(seed));
            running.go_on_with_moves(boot);
            running.carry_out(boot);
        }
    } else {
        world.count(|stats| stats.early_crashes += 1);
    }
    if boot.is_quiet && world.goes_on() {
        join(world, &simulation);
        flush(world, &simulation);
    }
    world.machine.power_off();
    join(world, &simulation);
    drop(pools);
    world.count(|stats| stats.crashes += 1);
    if world.machine.in_flight() > 0 || world.machine.dropped() > 0 {
        world.fail("a request was dropped or never ended".into());
    }
    drop(simulation);
    world.lose_power();
}

/// Lets requests to the disks fail.
fn fail_often(world: &World, boot: &Boot, seed: u64) {
    world.folder.fail_at(boot.state_failure);
    for (number, disk) in world.disks.iter().enumerate().filter(|_| boot.failing > 0) {
        disk.fail_often(boot.failing, mix(seed ^ number as u64));
    }
}

pub(super) fn join(world: &World, simulation: &Simulation) {
    simulation.run_until(|| world.running() == 0);
}

/// Flushes every disk.
fn flush(world: &World, simulation: &Simulation) {
    let core = simulation.cores()[0].remote();
    for disk in &world.disks {
        let disk = disk.clone();
        let flushed = core.block_on(move |_| async move {
            let Ok(channel) = disk.open_channel() else { return };
            let _ = channel.submit(&Request::flush(), 0).await;
        });
        flushed.expect("the core runs");
    }
}

/// The pools but the absent one; `None` when power goes before, or something is wrong.
fn open_all(world: &World, core: &Core, absent: Option<usize>) -> Option<Pools> {
    let open = |(number, disk): (usize, &SimDisk)| {
        let pool = open(world, core, number, disk)?;
        world.goes_on().then(|| (number, Arc::new(pool)))
    };
    world.disks.iter().enumerate().filter(|(number, _)| Some(*number) != absent).map(open).collect()
}

fn open(world: &World, core: &Core, number: usize, disk: &SimDisk) -> Option<Pool> {
    let device: Arc<dyn Device> = Arc::new(disk.clone());
    let open_or_make = || match Pool::open(device.clone(), core.remote()) {
        Err(PoolError::Read(_, ReadError::Decode(DecodeError::None | DecodeError::Checksum)))
            if !world.is_made.borrow()[number] =>
        {
            Pool::create(device.clone(), Name::new("pool").expect("a name"), core.remote())
        }
        opened => opened,
    };
    let mut opened = open_or_make();
    if opened.is_err() && world.machine.is_on() && world.has_failed(number) {
        world.is_torn.borrow_mut()[number] = true;
        disk.revive();
        opened = open_or_make();
    }
    if let Err(error) = &opened
        && damage::may_refuse(world, number)
        && world.machine.is_on()
    {
        if let Some(wrong) = damage::judge(disk, error) {
            world.fail(wrong);
        }
        disk.revive();
        damage::restore(world, number, &core.remote());
        opened = open_or_make();
    }
    if !world.machine.is_on() {
        return None;
    }
    match opened {
        Ok(pool) => {
            world.is_made.borrow_mut()[number] = true;
            world.saved.borrow_mut().retain(|copy| copy.pool != number);
            let broken = damage::broken(disk);
            if broken.is_empty() {
                world.is_torn.borrow_mut()[number] = false;
            } else if world.has_failed(number) {
                world.is_torn.borrow_mut()[number] = true;
            } else {
                world.fail(format!("pool {number} is open, and its copies at {broken:?} are not whole"));
            }
            Some(pool)
        }
        Err(error) => {
            world.fail(format!("pool {number} does not open: {error}"));
            None
        }
    }
}

impl<'a> Running<'a> {
    /// Compares the tables with the states that may be, and takes over the one that is.
    fn judge(&self) {
        let mut found: Vec<(usize, Info)> = (self.pools.iter())
            .flat_map(|(number, pool)| pool.volumes().into_iter().map(move |info| (*number, info)))
            .collect();
        let unit = self.world.shape.unit;
        let rooms: BTreeMap<usize, (u64, u64)> =
            self.pools.iter().map(|(number, pool)| (*number, pool.room())).collect();
        let used = |pool: usize| -> u64 {
            let volumes = found.iter().filter(|(of, _)| *of == pool);
            volumes.map(|(_, info)| info.size.next_multiple_of(unit)).sum()
        };
        let used: BTreeMap<usize, u64> = self.pools.keys().map(|pool| (*pool, used(*pool))).collect();
        let states = self.world.states.borrow().clone();
        let is_unknown = |info: &Info| {
            let mut known = states.iter().flat_map(|state| &state.volumes);
            known.any(|known| known.uuid == Some(info.uuid) && self.mover.is_unknown(known))
        };
        found.retain(|(pool, info)| !self.mover.is_hidden(*pool, info) && !is_unknown(info));
        let is_it = |state: &&State| {
            let has =
                |(pool, info): &(usize, Info)| state.volumes.iter().any(|known| is_same(known, *pool, info));
            let is_room = |(pool, room): (&usize, &(u64, u64))| {
                let all = state.units[*pool] * unit;
                *room == (all, all.saturating_sub(used[pool]))
            };
            state.volumes.iter().filter(|known| self.is_there(known)).count() == found.len()
                && found.iter().all(has)
                && rooms.iter().all(is_room)
        };
        // The pools that are absent may have any of their tables.
        let mut left: Vec<State> = states.iter().filter(is_it).cloned().collect();
        if left.is_empty() {
            return self
                .world
                .fail(format!("the pools have {found:?} and room {rooms:?}; none of {states:?}"));
        }
        for known in left.iter_mut().flat_map(|state| &mut state.volumes) {
            let own = found.iter().find(|(pool, info)| is_same(known, *pool, info));
            known.uuid = own.map(|(_, info)| info.uuid).or(known.uuid);
        }
        // The table of a change that failed may be one that cannot be read now.
        for (pool, _) in self.pools.iter().filter(|(_, pool)| !pool.is_settled()) {
            let pool = *pool;
            if !self.world.is_failing.get() {
                self.world.fail(format!("pool {pool} is not settled"));
            }
            let with = |other: &State, state: &State| {
                let mut state = state.clone();
                state.copy_pools(&[pool], other, |known| self.mover.is_unknown(known));
                state
            };
            let more: Vec<State> =
                left.iter().flat_map(|state| states.iter().map(|other| with(other, state))).collect();
            left.extend(more);
        }
        self.world.set_states(left);
    }

    /// Whether a volume can be used in this boot.
    pub(super) fn is_there(&self, known: &Known) -> bool {
        self.pools.contains_key(&known.pool) && !self.mover.is_unknown(known)
    }

    /// The device by which users have a volume open.
    pub(super) fn open(&self, known: &Known) -> Option<Arc<Migratable>> {
        if let Some(device) = self.open.borrow().get(&known.id).and_then(Weak::upgrade) {
            return Some(device);
        }
        match self.pools[&known.pool].open_volume(&known.name) {
            Ok(volume) => {
                let device = Arc::new(Migratable::new(volume));
                self.open.borrow_mut().insert(known.id, Arc::downgrade(&device));
                Some(device)
            }
            Err(error) => {
                self.world.fail(format!("volume {}: {error}", known.name));
                None
            }
        }
    }

    /// Runs `work` of a user on a volume.
    pub(super) fn spawn<F, W>(&self, known: &Known, work: W)
    where
        F: Future<Output = ()> + 'static,
        W: FnOnce(User) -> F + 'static,
    {
        let Some(device) = self.open(known) else { return };
        // All users of a volume are on one core: in one thread the channels of all cores are on one
        // list of its layer.
        let cores = self.simulation.cores();
        let core = &cores[known.id as usize % cores.len()];
        let (world, id) = (self.world.clone(), known.id);
        let users: Gate = world.content(id).users;
        users.spawn(core, async move {
            if let Some(user) = User::open(world.clone(), world.disk(id), &*device) {
                work(user).await;
                drop(device); // as an export has it open, as long as its clients use it
            }
        });
    }

    /// Reads all volumes.
    fn verify(&self) {
        for known in self.world.state().volumes.iter().filter(|known| self.is_there(known)) {
            self.spawn(known, User::verify);
        }
        join(self.world, self.simulation);
    }

    fn carry_out(&mut self, boot: &Boot) {
        for step in &boot.steps {
            if !self.world.goes_on() {
                return;
            }
            if self.is_tracing {
                println!("step {} {:?}; {:?}", step.id, step.action, self.world.state());
            }
            self.act(step.action);
        }
        if self.world.goes_on()
            && let Some((room, _)) = self.reserved.take()
        {
            drop(room);
        }
    }
}

fn is_same(known: &Known, pool: usize, info: &Info) -> bool {
    (known.pool, &*known.name, known.size) == (pool, info.name.as_str(), info.size)
        && known.uuid.is_none_or(|uuid| uuid == info.uuid)
}
