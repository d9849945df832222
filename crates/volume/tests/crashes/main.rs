//! Pools on a simulated disk that repeatedly loses power at any write.
//!
//! The oracle knows the acknowledged changes. After every loss of power:
//!
//! * the volumes are those before the interrupted change or after it, with their names, identities
//!   and sizes;
//! * a volume reads the flushed data or later writes, else zeroes: never bytes of another volume or
//!   of a former owner of the disk;
//! * the free room is the room that no volume has.

mod disk;

use base::Rng;
use block::{Channel, Device, Flags, Op, Request};
use disk::{CELL, Disk};
use reactor::{BufferPool, CoreConfig, CoreRef, Cores};
use std::collections::BTreeMap;
use std::sync::Arc;
use volume::{Name, Pool, PoolError, Uuid};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 10 * MIB;

/// The oracle's state of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    size: u64,
    /// `None` until the pool has reported it.
    uuid: Option<Uuid>,
    /// For each cell the allowed values, the newest first.
    cells: Vec<Vec<u8>>,
}

type Volumes = BTreeMap<String, Known>;

/// Next step of a run.
enum Change {
    Create { name: String, size: u64 },
    Grow { name: String, size: u64 },
    Rename { name: String, to: String },
    Delete { name: String },
    Write { name: String, cell: usize, value: u8 },
    Flush { name: String },
}

struct Run {
    core: CoreRef,
    disk: Disk,
    rng: Rng,
    volumes: Volumes,
}

impl Run {
    fn new(seed: u64, core: CoreRef) -> Run {
        let disk = Disk::new(CAPACITY);
        drop(Pool::create(Arc::new(disk.clone()), name("data"), core.clone()).unwrap());
        Run { core, disk, rng: Rng::new(seed), volumes: Volumes::new() }
    }

    fn open(&self) -> Result<Pool, PoolError> {
        Pool::open(Arc::new(self.disk.clone()), self.core.clone())
    }

    /// Applies changes until the power fails, and checks the state afterwards.
    fn crash(&mut self) {
        let pool = self.open().unwrap();
        self.disk.fail_after(self.rng.below(120));
        let mut states = vec![self.volumes.clone()];
        for _ in 0..8 {
            let change = self.choose();
            let before = self.volumes.clone();
            // A failed write may still have arrived.
            let after = expected(before.clone(), &change);
            match self.apply(&pool, &change) {
                Ok(()) => {
                    self.volumes = acknowledged(after, &change);
                    states = vec![self.volumes.clone()];
                }
                Err(PoolError::Full { .. }) => {}
                Err(error) => {
                    assert!(self.disk.is_off(), "{error}");
                    states = vec![after, before];
                    break;
                }
            }
        }
        drop(pool);
        self.disk.restart(&mut self.rng);
        self.judge(&states);
    }

    fn choose(&mut self) -> Change {
        let names: Vec<String> = self.volumes.keys().cloned().collect();
        let fresh =
            (0..).map(|i| format!("v{i}")).find(|name| !self.volumes.contains_key(name)).expect("free");
        let size = (self.rng.below(2) * 16 + 1 + self.rng.below(16)) * CELL;
        if names.is_empty() {
            return Change::Create { name: fresh, size };
        }
        let name = names[self.rng.below(names.len() as u64) as usize].clone();
        let old = self.volumes[&name].size;
        match self.rng.below(12) {
            0 | 1 => Change::Create { name: fresh, size },
            2 => Change::Grow { name, size: old + size },
            3 => Change::Rename { name, to: fresh },
            4 => Change::Delete { name },
            5 | 6 => Change::Flush { name },
            _ => {
                let (cell, value) = (self.rng.below(old / CELL) as usize, 1 + self.rng.below(200) as u8);
                Change::Write { name, cell, value }
            }
        }
    }

    fn apply(&self, pool: &Pool, change: &Change) -> Result<(), PoolError> {
        match change {
            Change::Create { name: new, size } => pool.create_volume(name(new), *size).map(drop),
            Change::Grow { name, size } => pool.grow_volume(name, *size).map(drop),
            Change::Rename { name: old, to } => pool.rename_volume(old, name(to)).map(drop),
            Change::Delete { name } => pool.delete_volume(name).map(drop),
            Change::Write { name, cell, value } => {
                let (at, value) = (*cell as u64 * CELL, *value);
                self.on(pool, name, async move |channel: &dyn Channel| {
                    let mut buffer = BufferPool::new(reactor::MAX_BUFFER).take(CELL as usize).await;
                    buffer.as_mut_slice().fill(value);
                    buffer.transfer(channel, Op::Write, Flags::NONE, at).await.1
                })
            }
            Change::Flush { name } => {
                self.on(pool, name, async |channel: &dyn Channel| channel.submit(&Request::flush(), 0).await)
            }
        }
    }

    /// Runs `work` on a volume.
    fn on<R, F>(&self, pool: &Pool, name: &str, work: F) -> Result<R, PoolError>
    where
        R: Send + 'static,
        F: AsyncFnOnce(&dyn Channel) -> Result<R, block::IoError> + Send + 'static,
    {
        let volume = pool.open_volume(name)?;
        let work = move |_| async move { work(&*volume.open_channel().unwrap()).await };
        self.core.block_on(work)?.map_err(|error| PoolError::Io(name.into(), error))
    }

    /// Compares the pool with the allowed states and adopts the one that it has.
    fn judge(&mut self, states: &[Volumes]) {
        let pool = self.open().expect("a loss of power leaves a table");
        let found: Vec<(String, u64, Uuid)> =
            pool.volumes().into_iter().map(|info| (info.name.to_string(), info.size, info.uuid)).collect();
        let is_it = |state: &&Volumes| {
            let is_known = |(name, size, uuid): &(String, u64, Uuid)| {
                state
                    .get(name)
                    .is_some_and(|known| known.size == *size && known.uuid.is_none_or(|own| own == *uuid))
            };
            state.len() == found.len() && found.iter().all(is_known)
        };
        let state = states.iter().find(is_it).unwrap_or_else(|| panic!("{found:?}, none of {states:?}"));
        let mut volumes = state.clone();
        for (name, size, uuid) in &found {
            let size = *size;
            let values = self.on(&pool, name, async move |channel: &dyn Channel| {
                let mut values = Vec::new();
                let pool = BufferPool::new(reactor::MAX_BUFFER);
                for at in (0..size).step_by(CELL as usize) {
                    let buffer = pool.take(CELL as usize).await;
                    let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, at).await;
                    result?;
                    values.push(buffer.as_slice()[0]);
                }
                Ok(values)
            });
            let known = volumes.get_mut(name).expect("found");
            known.uuid = Some(*uuid);
            for (cell, (value, allowed)) in values.unwrap().into_iter().zip(&mut known.cells).enumerate() {
                assert!(allowed.contains(&value), "{name}, cell {cell}: {value}, not one of {allowed:?}");
                *allowed = vec![value];
            }
        }
        let used: u64 = found.iter().map(|(_, size, _)| size.next_multiple_of(MIB)).sum();
        assert_eq!(pool.room(), (CAPACITY - 4 * MIB, CAPACITY - 4 * MIB - used));
        self.volumes = volumes;
    }
}

/// The volumes after a change that is not acknowledged.
fn expected(mut volumes: Volumes, change: &Change) -> Volumes {
    match change {
        Change::Create { name, size } => {
            let cells = vec![vec![0]; (size / CELL) as usize];
            volumes.insert(name.clone(), Known { size: *size, uuid: None, cells });
        }
        Change::Grow { name, size } => {
            let known = volumes.get_mut(name).expect("chosen");
            known.size = *size;
            known.cells.resize((size / CELL) as usize, vec![0]);
        }
        Change::Rename { name, to } => {
            let known = volumes.remove(name).expect("chosen");
            volumes.insert(to.clone(), known);
        }
        Change::Delete { name } => drop(volumes.remove(name)),
        Change::Write { name, cell, value } => {
            volumes.get_mut(name).expect("chosen").cells[*cell].insert(0, *value);
        }
        Change::Flush { .. } => {}
    }
    volumes
}

/// The volumes after an acknowledged change. The disk has one cache, so every change of the table
/// flushes it too, but the pool promises that only for a volume's flush.
fn acknowledged(mut volumes: Volumes, change: &Change) -> Volumes {
    if let Change::Flush { name } = change {
        volumes.get_mut(name).expect("chosen").cells.iter_mut().for_each(|cell| cell.truncate(1));
    }
    volumes
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

#[test]
fn a_pool_survives_losses_of_power_at_any_write() {
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    for seed in 0..6 {
        let mut run = Run::new(seed, cores.get(0));
        for crash in 0..10 {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.crash()));
            assert!(result.is_ok(), "seed {seed}, crash {crash}");
        }
    }
}
