//! One boot: the pools are opened and judged, everything is read, steps are carried out, power goes.

use super::damage;
use super::plan::{Action, Boot};
use super::user::User;
use super::world::{Known, State, World};
use crate::disk::SimDisk;
use crate::gate::Gate;
use crate::machine::CrashAt;
use block::{Device, Request};
use reactor::{Core, Simulation};
use std::rc::Rc;
use std::sync::Arc;
use volume::store::{RESERVED, ReadError};
use volume::table::DecodeError;
use volume::{Info, Name, Pool, PoolError, Reservation};

/// Names of volumes: few, so that names are used again.
const NAMES: u64 = 10;
/// Most units of a new volume, or of what one grows by.
const MOST_UNITS: u64 = 3;

/// A boot that is on.
struct Running<'a> {
    world: &'a Rc<World>,
    simulation: &'a Simulation,
    pools: &'a [Pool],
    reserved: Option<(Reservation<'a>, Known)>,
    is_tracing: bool,
}

/// Runs a boot to its end; what may be there afterwards is in the world.
pub fn run(world: &Rc<World>, seed: u64, boot: &Boot, is_tracing: bool) {
    damage::apply(world, &boot.damages);
    world.machine.power_on();
    let simulation = Simulation::start(seed, world.shape.cores);
    world.machine.crash_at(boot.crash);
    if let Some(CrashAt::Time(ns)) = boot.crash {
        let (core, machine) = (simulation.cores()[0].clone(), world.machine.clone());
        core.clone().with_current(|| {
            core.clone().spawn(async move {
                core.sleep(ns).await;
                machine.power_off();
            });
        });
    }
    let pools = open_all(world, &simulation.cores()[0]);
    if let Some(pools) = &pools {
        let mut running = Running { world, simulation: &simulation, pools, reserved: None, is_tracing };
        running.judge();
        if world.goes_on() {
            running.verify();
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

fn join(world: &World, simulation: &Simulation) {
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

/// The pools; `None` when power goes before, or something is wrong.
fn open_all(world: &World, core: &Core) -> Option<Vec<Pool>> {
    let open = |(number, disk): (usize, &SimDisk)| {
        let pool = open(world, core, number, disk)?;
        world.goes_on().then_some(pool)
    };
    world.disks.iter().enumerate().map(open).collect()
}

fn open(world: &World, core: &Core, number: usize, disk: &SimDisk) -> Option<Pool> {
    let device: Arc<dyn Device> = Arc::new(disk.clone());
    let is_made = world.is_made.borrow()[number];
    let may_refuse = damage::may_refuse(world, number);
    let mut opened = Pool::open(device.clone(), core.remote());
    match &opened {
        Err(PoolError::Read(_, ReadError::Decode(DecodeError::None | DecodeError::Checksum))) if !is_made => {
            let name = Name::new("pool").expect("a name");
            opened = Pool::create(device, name, core.remote());
        }
        Err(error) if may_refuse && world.machine.is_on() => {
            if let Some(wrong) = damage::judge(disk, error) {
                world.fail(wrong);
            }
            damage::restore(world, number);
            opened = Pool::open(device, core.remote());
        }
        _ => {}
    }
    if !world.machine.is_on() {
        return None;
    }
    match opened {
        Ok(pool) => {
            world.is_made.borrow_mut()[number] = true;
            world.saved.borrow_mut().retain(|copy| copy.pool != number);
            let broken = damage::broken(disk);
            if !broken.is_empty() {
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
        let found: Vec<(usize, Info)> = (self.pools.iter().enumerate())
            .flat_map(|(number, pool)| pool.volumes().into_iter().map(move |info| (number, info)))
            .collect();
        let unit = self.world.shape.unit;
        let rooms: Vec<(u64, u64)> = self.pools.iter().map(Pool::room).collect();
        let states = self.world.states.borrow().clone();
        let is_it = |state: &&State| {
            let has =
                |(pool, info): &(usize, Info)| state.volumes.iter().any(|known| is_same(known, *pool, info));
            let used = |pool: usize| {
                let volumes = state.volumes.iter().filter(|known| known.pool == pool);
                volumes.map(|known| known.size.next_multiple_of(unit)).sum::<u64>()
            };
            let room = |pool: usize| {
                (state.units[pool] * unit, (state.units[pool] * unit).saturating_sub(used(pool)))
            };
            state.volumes.len() == found.len()
                && found.iter().all(has)
                && (0..rooms.len()).all(|pool| rooms[pool] == room(pool))
        };
        let Some(mut state) = states.iter().find(is_it).cloned() else {
            return self
                .world
                .fail(format!("the pools have {found:?} and room {rooms:?}; none of {states:?}"));
        };
        for known in &mut state.volumes {
            let own = found.iter().find(|(pool, info)| is_same(known, *pool, info));
            known.uuid = own.map(|(_, info)| info.uuid);
        }
        self.world.decide(state);
    }

    /// Runs `work` of a user on a volume, on a core that `number` chooses.
    fn spawn<F, W>(&self, known: &Known, number: u64, work: W)
    where
        F: Future<Output = ()> + 'static,
        W: FnOnce(User) -> F + 'static,
    {
        let device: Arc<dyn Device> = match self.pools[known.pool].open_volume(&known.name) {
            Ok(volume) => volume,
            Err(error) => return self.world.fail(format!("volume {}: {error}", known.name)),
        };
        let cores = self.simulation.cores();
        let core = &cores[(number % cores.len() as u64) as usize];
        let (world, id) = (self.world.clone(), known.id);
        let users: Gate = world.content(id).users;
        users.spawn(core, async move {
            if let Some(user) = User::open(&world, id, &device) {
                drop(device);
                work(user).await;
            }
        });
    }

    /// Reads all volumes.
    fn verify(&self) {
        for known in &self.world.state().volumes {
            self.spawn(known, known.id.into(), User::verify);
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

    fn act(&mut self, action: Action) {
        match action {
            Action::Create { pool, size } => self.create(pool, size),
            Action::Reserve { pool, size } => self.reserve(pool, size),
            Action::EndReserved { commits } => self.end_reserved(commits),
            Action::Grow { volume, by } => self.grow(volume, by),
            Action::Rename { volume, to } => self.rename(volume, to),
            Action::Delete { volume } => self.delete(volume),
            Action::Extend { pool, units } => self.extend(pool, units),
            Action::Work { volume, requests, seed } => {
                if let Some(known) = self.pick(volume) {
                    self.spawn(&known, seed, move |user| user.work(requests, seed));
                }
            }
            Action::Join => join(self.world, self.simulation),
            Action::FailWrite { pool, number } => {
                let disk = &self.world.disks[self.pool(pool)];
                if !disk.is_failing() {
                    disk.fail_write(number);
                }
            }
        }
    }

    fn pool(&self, number: u64) -> usize {
        (number % self.pools.len() as u64) as usize
    }

    fn pick(&self, number: u64) -> Option<Known> {
        let volumes = self.world.state().volumes;
        let place = number.checked_rem(volumes.len() as u64)?;
        Some(volumes[place as usize].clone())
    }

    /// A size of a few units at most, in whole blocks.
    fn size(&self, number: u64) -> u64 {
        let block = u64::from(self.world.shape.block_size);
        (number % (MOST_UNITS * self.world.shape.unit / block) + 1) * block
    }

    /// A name that no volume has.
    fn free_name(&self, number: u64) -> Option<String> {
        let volumes = self.world.state().volumes;
        let reserved = self.reserved.as_ref().map(|(_, known)| known.name.clone());
        let names = (0..NAMES).map(|i| format!("v{}", (number.wrapping_add(i)) % NAMES));
        let is_free = |name: &String| {
            reserved.as_ref() != Some(name) && volumes.iter().all(|known| known.name != *name)
        };
        names.into_iter().find(is_free)
    }

    /// A change has ended: what may be there now.
    fn end(&self, pool: usize, what: &str, after: State, result: Result<Info, PoolError>) {
        let before = self.world.state();
        match result {
            Ok(_) => self.world.decide(after),
            Err(error) if !self.world.machine.is_on() => {
                if self.is_tracing {
                    println!("{what} cut off: {error}");
                }
                *self.world.states.borrow_mut() = vec![before, after];
            }
            // It has not happened, and that is durable.
            Err(error @ (PoolError::Io(..) | PoolError::Device(_))) if self.world.excuses_error() => {
                if self.is_tracing {
                    println!("{what} failed: {error}");
                }
            }
            Err(PoolError::Full { wants, free }) if wants > free && free == self.pools[pool].room().1 => {}
            Err(error) => self.world.fail(format!("{what} failed: {error}")),
        }
    }

    fn new_volume(&self, pool: u64, size: u64) -> Option<Known> {
        let (pool, name, size) = (self.pool(pool), self.free_name(size)?, self.size(size));
        Some(Known { id: self.world.new_volume(size), pool, name, size, uuid: None })
    }

    fn create(&mut self, pool: u64, size: u64) {
        let Some(mut known) = self.new_volume(pool, size) else { return };
        let result = self.pools[known.pool].create_volume(name(&known.name), known.size);
        known.uuid = result.as_ref().ok().map(|info| info.uuid);
        let mut after = self.world.state();
        after.volumes.push(known.clone());
        self.end(known.pool, "create", after, result);
    }

    fn reserve(&mut self, pool: u64, size: u64) {
        if self.reserved.is_some() {
            return self.end_reserved(true);
        }
        let Some(known) = self.new_volume(pool, size) else { return };
        let mut room = match self.pools[known.pool].reserve_volume(name(&known.name), known.size) {
            Ok(room) => room,
            Err(PoolError::Full { wants, free }) if wants > free => return,
            Err(error) => return self.world.fail(format!("reserve failed: {error}")),
        };
        let mut parts = size % 2;
        let zeroed = room.zero(async move |left| {
            parts = parts.saturating_sub(1);
            if parts > 0 { left } else { 0 }
        });
        match zeroed {
            Ok(_) => self.reserved = Some((room, known)),
            Err(_) if !self.world.machine.is_on() || self.world.excuses_error() => {}
            Err(error) => self.world.fail(format!("zeroing failed: {error}")),
        }
    }

    fn end_reserved(&mut self, commits: bool) {
        let Some((mut room, mut known)) = self.reserved.take() else { return };
        if !commits {
            return;
        }
        let result = room.zero(async |left| left).and_then(|_| room.commit());
        known.uuid = result.as_ref().ok().map(|info| info.uuid);
        let mut after = self.world.state();
        after.volumes.push(known.clone());
        self.end(known.pool, "commit", after, result);
    }

    fn grow(&mut self, volume: u64, by: u64) {
        let Some(known) = self.pick(volume) else { return };
        let size = known.size + self.size(by);
        let result = self.pools[known.pool].grow_volume(&known.name, size);
        self.world.count(|stats| stats.growths += u64::from(result.is_ok()));
        let mut after = self.world.state();
        after.volumes.iter_mut().filter(|other| other.id == known.id).for_each(|known| known.size = size);
        self.end(known.pool, "grow", after, result);
    }

    fn rename(&mut self, volume: u64, to: u64) {
        let (Some(known), Some(to)) = (self.pick(volume), self.free_name(to)) else { return };
        let result = self.pools[known.pool].rename_volume(&known.name, name(&to));
        let mut after = self.world.state();
        after
            .volumes
            .iter_mut()
            .filter(|other| other.id == known.id)
            .for_each(|known| known.name = to.clone());
        self.end(known.pool, "rename", after, result);
    }

    fn delete(&mut self, volume: u64) {
        let Some(known) = self.pick(volume) else { return };
        let users = self.world.content(known.id).users;
        if users.running() > 0 {
            // A user that has not opened its channel yet has the device open, too.
            let refused = self.pools[known.pool].delete_volume(&known.name);
            if !matches!(refused, Err(PoolError::InUse(_))) {
                return self
                    .world
                    .fail(format!("volume {} is in use, and was deleted: {refused:?}", known.name));
            }
            self.simulation.run_until(|| users.running() == 0);
            if !self.world.goes_on() {
                return;
            }
        }
        let result = self.pools[known.pool].delete_volume(&known.name);
        let mut after = self.world.state();
        after.volumes.retain(|other| other.id != known.id);
        self.end(known.pool, "delete", after, result);
    }

    fn extend(&mut self, pool: u64, units: u64) {
        let pool = self.pool(pool);
        self.world.extend(pool, units);
        let mut after = self.world.state();
        // Also what an earlier attempt has not taken.
        after.units[pool] = (self.world.disks[pool].limits().capacity - RESERVED) / self.world.shape.unit;
        match self.pools[pool].extend() {
            Ok((_, bytes)) if bytes == after.units[pool] * self.world.shape.unit => self.world.decide(after),
            Ok(room) => self.world.fail(format!("extend: {room:?} is not what the disk has")),
            Err(_) if !self.world.machine.is_on() => self.world.states.borrow_mut().push(after),
            Err(_) if self.world.excuses_error() => {}
            Err(error) => self.world.fail(format!("extend failed: {error}")),
        }
    }
}

fn is_same(known: &Known, pool: usize, info: &Info) -> bool {
    (known.pool, &*known.name, known.size) == (pool, info.name.as_str(), info.size)
        && known.uuid.is_none_or(|uuid| uuid == info.uuid)
}

fn name(text: &str) -> Name {
    Name::new(text).expect("a name")
}
