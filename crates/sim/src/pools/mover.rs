//! Moves of volumes between the pools of a run, with the records of them in a state file: the
//! crates `moves` and `durable`, as the daemon uses them.

use super::world::{Known, World};
use atomic_file::{Meaning, Recovered};
use base::Rng;
use block::{Device, DeviceError, IoError, Request};
use layers::migrate::{Migratable, Migration};
use moves::{Copier, MoveRecord, Owner, Records, Resumed};
use reactor::CoreRef;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use volume::{Info, Pool, PoolError};

const NAMES: [&str; 3] = ["state.json", "state.json.previous", "state.json.damaged"];
const MOST_BYTES: u64 = 1 << 20;
/// Attempts of what is tried again until it works.
const ATTEMPTS: u32 = 20;

/// The content of the state file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Journal {
    generation: u64,
    moves: Records,
}

/// Why a move failed.
#[derive(Debug)]
pub enum Failure {
    /// A pool, or a disk of one.
    Pool(PoolError),
    /// The state file.
    State(io::Error),
    /// Copying.
    Copy(IoError),
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Failure {
        Failure::Pool(error)
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        Failure::Pool(error.into())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Pool(error) => write!(f, "{error}"),
            Failure::State(error) => write!(f, "the state: {error}"),
            Failure::Copy(error) => write!(f, "copying: {error}"),
        }
    }
}

/// The pools that a boot has, by number.
pub type Pools = BTreeMap<usize, Arc<Pool>>;

/// The pools and the records of a boot.
pub struct Mover<'a> {
    world: &'a World,
    pools: &'a Pools,
    core: CoreRef,
    journal: RefCell<Journal>,
    /// Volumes whose moves begin again.
    open: RefCell<Vec<String>>,
    attempts: Cell<u32>,
}

/// The state file becomes damaged while power is off, if there is one before it.
pub fn damage(world: &World, seed: u64) {
    let folder = &world.folder;
    let (Some(mut content), true) = (folder.content(NAMES[0]), folder.content(NAMES[1]).is_some()) else {
        return;
    };
    let mut rng = Rng::new(seed);
    match rng.below(3) {
        0 => content.clear(),
        1 => content.truncate(rng.below(content.len().max(1) as u64) as usize),
        _ => content.fill(0),
    }
    folder.damage(NAMES[0], content);
    world.count(|stats| stats.faults += 1);
}

fn place(pool: usize) -> String {
    format!("disk{pool}")
}

impl<'a> Mover<'a> {
    /// Reads the state file, and finishes moves as far as they were done. `None` when power goes
    /// before, or something is wrong.
    pub fn open(world: &'a World, pools: &'a Pools, core: CoreRef) -> Option<Mover<'a>> {
        let decode = |bytes: &[u8]| match serde_json::from_slice::<Journal>(bytes) {
            Ok(journal) => Meaning::Value(journal),
            Err(error) => Meaning::Damaged(error.to_string()),
        };
        let journal = match atomic_file::recover(&world.folder, NAMES, MOST_BYTES, decode) {
            Ok(Recovered::None) => Journal::default(),
            Ok(Recovered::Current(value) | Recovered::Previous { value, .. }) => value,
            Err(_) if world.machine.is_on() && world.folder.take_failure() => {
                return Mover::open(world, pools, core);
            }
            Err(error) => {
                if world.machine.is_on() {
                    world.fail(format!("the state is not recovered: {error:?}"));
                }
                return None;
            }
        };
        let (journal, open, attempts) = (RefCell::new(journal), RefCell::default(), Cell::new(0));
        let mover = Mover { world, pools, core, journal, open, attempts };
        let records = mover.records();
        let all: Vec<Arc<Pool>> = pools.values().cloned().collect();
        moves::remove_leftovers(&all, |uuid| records.values().any(|record| record.copy == uuid));
        for (uuid, record) in records {
            match moves::resume(&mover, &uuid, &record) {
                Ok(Resumed::Open) => mover.open.borrow_mut().push(uuid),
                Ok(Resumed::Ended) => {}
                Err(_) if !world.machine.is_on() || world.excuses_error() => {}
                Err(error) => {
                    let MoveRecord { from, to, .. } = record;
                    world.fail(format!("a move from {from} to {to} does not end: {error}"));
                }
            }
        }
        world.goes_on().then_some(mover)
    }

    fn records(&self) -> Records {
        self.journal.borrow().moves.clone()
    }

    /// Whether a volume moves, or its move has left something.
    pub fn is_moving(&self, known: &Known) -> bool {
        known.uuid.is_some_and(|uuid| self.journal.borrow().moves.contains_key(&uuid.to_string()))
    }

    /// Whether the place of a volume that counts is not known.
    pub fn is_unknown(&self, known: &Known) -> bool {
        known.uuid.is_some_and(|uuid| moves::is_unknown(&self.journal.borrow().moves, &uuid.to_string()))
    }

    /// Whether a volume of a pool is not shown. Only the copy of an active move is hidden.
    pub fn is_hidden(&self, pool: usize, info: &Info) -> bool {
        let journal = self.journal.borrow();
        let is_hidden = moves::is_hidden(&journal.moves, &place(pool), info);
        let uuid = info.uuid.to_string();
        // A copy is deleted by a later start if this one has failed to.
        let may_be_left = self.world.has_failed(pool);
        let is_known =
            || journal.moves.iter().any(|(volume, record)| [volume, &record.copy].contains(&&uuid));
        if is_hidden && !may_be_left && !is_known() {
            self.world.fail(format!("{} is left in pool {pool}, and no move is on", info.name));
        }
        is_hidden
    }

    /// Moves that an earlier boot has begun: the volume, from where, and to where.
    pub fn open_moves(&self) -> Vec<(String, [usize; 2])> {
        let number = |name: &String| (0..self.world.disks.len()).find(|pool| place(*pool) == *name);
        let (journal, open) = (self.journal.borrow(), self.open.borrow());
        let places = |uuid: &String| {
            let record = journal.moves.get(uuid)?;
            Some((uuid.clone(), [number(&record.from)?, number(&record.to)?]))
        };
        open.iter().filter_map(places).collect()
    }

    /// Begins a move.
    ///
    /// # Errors
    /// When the record cannot be set.
    pub fn begin(&self, known: &Known, to: usize) -> Result<(), Failure> {
        let uuid = known.uuid.expect("it is there");
        self.set(&uuid.to_string(), Some(&MoveRecord::new(place(known.pool), place(to))?))
    }

    /// Carries a move out that has begun. The volume is open as `device`. Says with an error
    /// whether the new place counts.
    ///
    /// # Errors
    /// When it fails: then it is given up, or a later boot ends it.
    pub fn carry_out(&self, known: &Known, device: &Arc<Migratable>) -> Result<(), (bool, Failure)> {
        let uuid = known.uuid.expect("it is there").to_string();
        let record = self.records()[&uuid].clone();
        match self.copy_and_switch(known, &record, device) {
            Ok(()) => moves::free_old_place(self, &uuid, &record).map_err(|error| (true, error)),
            Err(error) => {
                // The first error tells more than what follows from it.
                let _ = moves::give_up(self, &uuid, &self.records()[&uuid]);
                Err((false, error))
            }
        }
    }

    /// Cancels a move that an earlier boot has begun.
    ///
    /// # Errors
    /// When the copy or the record stays.
    pub fn cancel(&self, uuid: &str) -> Result<(), Failure> {
        moves::cancel(self, uuid, &self.records()[uuid])
    }

    fn copy_and_switch(
        &self,
        known: &Known,
        record: &MoveRecord,
        device: &Arc<Migratable>,
    ) -> Result<(), Failure> {
        moves::make_copy(self, record, known.size)?;
        let (from, to) = (self.pool(&record.from)?, self.pool(&record.to)?);
        let info =
            from.volumes().into_iter().find(|info| Some(info.uuid) == known.uuid).expect("it is there");
        let places: [Arc<dyn Device>; 2] =
            [from.open_volume(&info.uuid.to_string())?, to.open_volume(&record.copy)?];
        let migration = device.begin(places[1].clone(), true)?;
        self.copy(&migration, &places, false)?;
        moves::switch(self, &info, record, migration, |migration| self.copy(migration, &places, true))
    }

    /// Copies what is dirty; the last time the copy is flushed.
    fn copy(
        &self,
        migration: &Migration,
        places: &[Arc<dyn Device>; 2],
        is_last: bool,
    ) -> Result<(), Failure> {
        let ([old, new], dirty) = (places.clone(), migration.dirty().clone());
        let copied = self.core.block_on(move |_| async move {
            let copier = Copier::new(&old, &new)?;
            copier.copy(&dirty, is_last, async |_| Ok(()), |_| {}, Failure::Copy).await?;
            if is_last {
                new.open_channel()?.submit(&Request::flush(), 0).await.map_err(Failure::Copy)?;
            }
            Ok(())
        });
        copied.expect("the core runs")
    }

    fn commit(&self, edit: impl FnOnce(&mut Journal)) -> Result<(), Failure> {
        let mut journal = self.journal.borrow().clone();
        edit(&mut journal);
        journal.generation += 1;
        let bytes = serde_json::to_vec(&journal).expect("it has text keys");
        atomic_file::replace(&self.world.folder, NAMES[0], &bytes, Some(NAMES[1])).map_err(Failure::State)?;
        *self.journal.borrow_mut() = journal;
        Ok(())
    }
}

impl Owner for Mover<'_> {
    type Error = Failure;

    fn pool(&self, name: &str) -> Result<Arc<Pool>, Failure> {
        let pool = self.pools.iter().find(|(number, _)| place(**number) == name);
        pool.map(|(_, pool)| pool.clone()).ok_or_else(|| PoolError::NoVolume(name.into()).into())
    }

    fn set(&self, volume: &str, record: Option<&MoveRecord>) -> Result<(), Failure> {
        self.commit(|journal| {
            match record {
                Some(record) => journal.moves.insert(volume.into(), record.clone()),
                None => journal.moves.remove(volume),
            };
        })
    }

    fn delete(&self, pool: &Pool, info: &Info) -> Result<(), Failure> {
        pool.delete_volume(&info.uuid.to_string())?;
        Ok(())
    }

    fn pause(&self) -> bool {
        self.attempts.set(self.attempts.get() + 1);
        self.world.machine.is_on() && self.attempts.get() < ATTEMPTS
    }
}
