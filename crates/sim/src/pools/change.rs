//! The steps of a boot, and what the oracle knows after each.

use super::boot::{Running, join};
use super::mover::Failure;
use super::plan::{Action, Boot};
use super::world::{Known, State};
use block::Device;
use volume::store::RESERVED;
use volume::{Name, PoolError};

/// Names of volumes: few, so that names are used again.
const NAMES: u64 = 10;
/// Most units of a new volume, or of what one grows by.
const MOST_UNITS: u64 = 3;

impl Running<'_> {
    pub(super) fn act(&mut self, action: Action) {
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
                    self.spawn(&known, move |user| user.work(requests, seed));
                }
            }
            Action::Move { volume, to } => self.move_volume(volume, to),
            Action::FailState { number } => self.world.folder.fail_at(number),
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
        let place = (number % self.pools.len() as u64) as usize;
        *self.pools.keys().nth(place).expect("a boot has a pool")
    }

    /// A volume that can be used, and does not move.
    fn pick(&self, number: u64) -> Option<Known> {
        let mut volumes = self.world.state().volumes;
        volumes.retain(|known| self.is_there(known) && !self.mover.is_moving(known));
        let place = number.checked_rem(volumes.len() as u64)?;
        Some(volumes[place as usize].clone())
    }

    /// A size of a few units at most, in whole blocks.
    fn size(&self, number: u64) -> u64 {
        let block = u64::from(self.world.shape.block_size);
        (number % (MOST_UNITS * self.world.shape.unit / block) + 1) * block
    }

    /// A name that no volume has, nor may have at the next start.
    fn free_name(&self, number: u64) -> Option<String> {
        let states = self.world.states.borrow();
        let volumes = states.iter().flat_map(|state| &state.volumes);
        let reserved = self.reserved.as_ref().map(|(_, known)| known.name.clone());
        let names = (0..NAMES).map(|i| format!("v{}", (number.wrapping_add(i)) % NAMES));
        let is_free = |name: &String| {
            reserved.as_ref() != Some(name) && volumes.clone().all(|known| known.name != *name)
        };
        names.into_iter().find(is_free)
    }

    /// Whether the next start may find a change made that ended with this error.
    fn is_unknown(&self, error: &PoolError) -> bool {
        let may_be_unsettled = self.world.is_failing.get();
        !self.world.machine.is_on() || may_be_unsettled && matches!(error, PoolError::Unsettled { .. })
    }

    /// A change has ended: what may be there now.
    fn end<T>(&self, pool: usize, what: &str, after: State, result: Result<T, PoolError>) {
        let is_unknown = |known: &Known| self.mover.is_unknown(known);
        let change = |state: &mut State| state.copy_pools(&[pool], &after, is_unknown);
        match result {
            Ok(_) => self.world.change(change),
            Err(error) if self.is_unknown(&error) => {
                if self.is_tracing {
                    println!("{what} has an unknown outcome: {error}");
                }
                self.world.may_change(change);
            }
            // It has not happened, and that is durable.
            Err(error @ (PoolError::Io(..) | PoolError::Device(_))) if self.world.excuses_error() => {
                if self.is_tracing {
                    println!("{what} failed: {error}");
                }
            }
            Err(PoolError::Full { wants, free }) if wants > free && free == self.pools[&pool].room().1 => {}
            Err(error) => self.world.fail(format!("{what} failed: {error}")),
        }
    }

    fn new_volume(&self, pool: u64, size: u64) -> Option<Known> {
        let (pool, name, size) = (self.pool(pool), self.free_name(size)?, self.size(size));
        Some(Known { id: self.world.new_volume(size), pool, name, size, uuid: None })
    }

    fn create(&mut self, pool: u64, size: u64) {
        let Some(mut known) = self.new_volume(pool, size) else { return };
        let result = self.pools[&known.pool].create_volume(name(&known.name), known.size);
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
        let mut room = match self.pools[&known.pool].reserve_volume(name(&known.name), known.size) {
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
        let result = self.pools[&known.pool].grow_volume(&known.name, size);
        self.world.count(|stats| stats.growths += u64::from(result.is_ok()));
        let mut after = self.world.state();
        after.volumes.iter_mut().filter(|other| other.id == known.id).for_each(|known| known.size = size);
        self.end(known.pool, "grow", after, result);
    }

    fn rename(&mut self, volume: u64, to: u64) {
        let (Some(known), Some(to)) = (self.pick(volume), self.free_name(to)) else { return };
        let result = self.pools[&known.pool].rename_volume(&known.name, name(&to));
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
            let refused = self.pools[&known.pool].delete_volume(&known.name);
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
        let result = self.pools[&known.pool].delete_volume(&known.name);
        let mut after = self.world.state();
        after.volumes.retain(|other| other.id != known.id);
        self.end(known.pool, "delete", after, result);
    }

    fn move_volume(&mut self, volume: u64, to: u64) {
        let (Some(known), to) = (self.pick(volume), self.pool(to)) else { return };
        if to == known.pool || self.pools[&to].room().1 < known.size.next_multiple_of(self.world.shape.unit) {
            return;
        }
        match self.mover.begin(&known, to) {
            Ok(()) => self.carry_out_move(&known, to),
            Err(_) if !self.world.machine.is_on() || self.world.excuses_error() => {}
            Err(error) => self.world.fail(format!("a move is not begun: {error}")),
        }
    }

    fn carry_out_move(&mut self, known: &Known, to: usize) {
        let Some(device) = self.open(known) else { return };
        let result = self.mover.carry_out(known, &device);
        drop(device);
        let mut after = self.world.state();
        after.volumes.iter_mut().filter(|other| other.id == known.id).for_each(|known| known.pool = to);
        if self.is_tracing {
            println!(
                "move of {} to {to}: {:?}",
                known.name,
                result.as_ref().map_err(|(_, error)| error.to_string())
            );
        }
        let is_unknown = |other: &Known| other.id != known.id && self.mover.is_unknown(other);
        // The old place hides it, whatever else its pool has.
        let is_there = |state: &mut State| {
            state.volumes.retain(|other| other.id != known.id || other.pool == to);
            state.copy_pools(&[to], &after, is_unknown);
        };
        match result {
            Ok(()) => self.world.change(|state| state.copy_pools(&[known.pool, to], &after, is_unknown)),
            Err(_) if !self.world.machine.is_on() => self.world.may_change(is_there),
            Err((is_switched, _)) if self.world.excuses_error() => {
                if is_switched {
                    self.world.change(is_there);
                }
            }
            Err((false, Failure::Pool(PoolError::Full { wants, free }))) if wants > free => {}
            Err((_, error)) => self.world.fail(format!("a move failed: {error}")),
        }
    }

    /// Moves that an earlier boot began are carried out or cancelled, or wait for a pool.
    pub(super) fn go_on_with_moves(&mut self, boot: &Boot) {
        for (uuid, [from, to]) in self.mover.open_moves() {
            let is_it = |known: &Known| known.uuid.is_some_and(|own| own.to_string() == uuid);
            let known = self.world.state().volumes.into_iter().find(is_it);
            if !self.world.goes_on() {
                return;
            }
            match known {
                Some(known) if !boot.gives_up => {
                    if [from, to].iter().all(|pool| self.pools.contains_key(pool)) {
                        self.carry_out_move(&known, to);
                    }
                }
                _ => self.cancel_move(&uuid, from),
            }
        }
    }

    fn cancel_move(&mut self, uuid: &str, from: usize) {
        let is_it = |known: &Known| known.uuid.is_some_and(|own| own.to_string() == uuid);
        let stays = |state: &mut State| {
            state.volumes.iter_mut().filter(|known| is_it(known)).for_each(|known| known.pool = from);
        };
        let is_deleted = || !self.world.states.borrow().iter().any(|state| state.volumes.iter().any(is_it));
        match self.mover.cancel(uuid) {
            // Also if the pool of the new place, which is absent, says otherwise.
            Ok(()) => self.world.change(stays),
            Err(_) if !self.world.machine.is_on() => self.world.may_change(stays),
            // The record is of the state before the last change.
            Err(Failure::Pool(PoolError::NoVolume(_))) if is_deleted() => {}
            Err(_) if self.world.excuses_error() => {}
            Err(error) => self.world.fail(format!("a move is not cancelled: {error}")),
        }
    }

    fn extend(&mut self, pool: u64, units: u64) {
        let pool = self.pool(pool);
        self.world.extend(pool, units);
        let mut after = self.world.state();
        // Also what an earlier attempt has not taken.
        after.units[pool] = (self.world.disks[pool].limits().capacity - RESERVED) / self.world.shape.unit;
        match self.pools[&pool].extend() {
            Ok((_, bytes)) if bytes != after.units[pool] * self.world.shape.unit => {
                self.world.fail(format!("extend: {bytes} bytes are not what the disk has"));
            }
            result => self.end(pool, "extend", after, result.map(drop)),
        }
    }
}

fn name(text: &str) -> Name {
    Name::new(text).expect("a name")
}
