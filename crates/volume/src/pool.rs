//! A pool: a device, and the volumes on it.
//!
//! Everything here waits for the device, which a core is asked to work with: it is for control threads, not for cores. A
//! change is durable when it returns; one that fails has not happened.

use crate::device::{Shared, Volume};
use crate::extents::{Extent, allocate};
use crate::name::{Name, Uuid};
use crate::store::{self, RESERVED, ReadError};
use crate::table::{ALIGNMENT, DecodeError, Record, Table};
use block::{Channel, Device, DeviceError, IoError, Limits, Request};
use reactor::{CoreRef, CoreStopped};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The least that a unit should have: a thousand volumes on a hundred terabytes are a table of a few kilobytes.
const UNIT: u64 = 1 << 20;

/// A device with volumes on it.
pub struct Pool {
    device: Arc<dyn Device>,
    /// Who reads and writes the table. It is there as long as the device: arrays stay with the core that had them first.
    core: CoreRef,
    state: Mutex<State>,
}

struct State {
    table: Table,
    /// Volumes that somebody has open.
    open: HashMap<Uuid, Weak<Shared>>,
}

/// Why something cannot be done with a pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The device refuses something.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// There is no pool on the device, or none that can be read.
    #[error("{0}: {1}")]
    Read(String, ReadError),
    /// There is one already.
    #[error("{0}: the pool {1} is there")]
    Exists(String, Name),
    /// The device is too small for any volume, or for what the pool has on it.
    #[error("{device} has {has} bytes: a pool needs {needs}")]
    TooSmall {
        /// The device.
        device: String,
        /// Bytes it has.
        has: u64,
        /// Bytes that it would need.
        needs: u64,
    },
    /// No volume has this name or UUID.
    #[error("there is no volume {0:?}")]
    NoVolume(String),
    /// A volume has this name.
    #[error("there is a volume {0} already")]
    Taken(Name),
    /// Somebody has the volume open.
    #[error("volume {0} is in use")]
    InUse(Name),
    /// A size that no volume can have.
    #[error("a volume of {0} bytes: {1}")]
    Size(u64, String),
    /// There is not as much room.
    #[error("{wants} bytes: {free} are free")]
    Full {
        /// Bytes that were asked for.
        wants: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The table takes no more, in words.
    #[error("{0}")]
    TooMany(String),
    /// The device failed.
    #[error("{0}: {1}")]
    Io(String, IoError),
    /// The core that works with the device has ended.
    #[error(transparent)]
    Core(#[from] CoreStopped),
    /// The system gave no random bytes.
    #[error("no UUID can be made: {0}")]
    Random(std::io::Error),
}

/// What a pool says about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its identity.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its size in bytes.
    pub size: u64,
    /// In how many pieces it lies.
    pub pieces: usize,
    /// Somebody has it open.
    pub is_open: bool,
}

impl Pool {
    /// Makes a pool without volumes on a device.
    ///
    /// # Errors
    /// When the device has one already, is too small, or fails. What else may be on it is for the caller to find out.
    pub fn create(device: Arc<dyn Device>, name: Name, core: CoreRef) -> Result<Pool, PoolError> {
        let (limits, of) = (device.limits(), device.name().to_owned());
        match read(&device, &core) {
            Ok(table) => return Err(PoolError::Exists(of, table.name)),
            Err(PoolError::Read(_, ReadError::Decode(DecodeError::None | DecodeError::Checksum))) => {}
            Err(error) => return Err(error),
        }
        let unit = unit_of(&limits);
        let data_offset = RESERVED.next_multiple_of(unit);
        let units = limits.capacity.saturating_sub(data_offset) / unit;
        if units == 0 {
            return Err(PoolError::TooSmall { device: of, has: limits.capacity, needs: data_offset + unit });
        }
        let pool = Uuid::random().map_err(PoolError::Random)?;
        // Both copies: neither may be what somebody else has left.
        for sequence in [1, 2] {
            let table =
                Table { pool, name: name.clone(), sequence, unit, data_offset, units, volumes: Vec::new() };
            let bytes = table.encode().map_err(PoolError::TooMany)?;
            on(&device, &core, async move |channel: &dyn Channel| {
                store::write(channel, &bytes, sequence).await
            })?;
        }
        Pool::open(device, core)
    }

    /// Opens the pool on a device.
    ///
    /// # Errors
    /// When there is none, or the device is smaller than the pool.
    pub fn open(device: Arc<dyn Device>, core: CoreRef) -> Result<Pool, PoolError> {
        let table = read(&device, &core)?;
        let (needs, has) = (table.data_offset + table.unit * table.units, device.limits().capacity);
        if has < needs {
            return Err(PoolError::TooSmall { device: device.name().to_owned(), has, needs });
        }
        Ok(Pool { device, core, state: Mutex::new(State { table, open: HashMap::new() }) })
    }

    /// Its name and its identity.
    pub fn identity(&self) -> (Name, Uuid) {
        let state = self.lock();
        (state.table.name.clone(), state.table.pool)
    }

    /// Bytes that volumes can have in all, and that are free.
    pub fn room(&self) -> (u64, u64) {
        let state = self.lock();
        (state.table.units * state.table.unit, free(&state.table))
    }

    /// The volumes, in the order in which they were made.
    pub fn volumes(&self) -> Vec<Info> {
        let state = self.lock();
        state.table.volumes.iter().map(|record| state.info(record)).collect()
    }

    /// Makes a volume that reads as zeroes.
    ///
    /// # Errors
    /// When the name is taken, there is no room, or the device fails.
    pub fn create_volume(&self, name: Name, size: u64) -> Result<Info, PoolError> {
        let mut state = self.lock();
        if state.table.position(name.as_str()).is_some() {
            return Err(PoolError::Taken(name));
        }
        self.check_size(size)?;
        let extents = room_for(&state.table, state.table.units_of(size), None)?;
        let uuid = Uuid::random().map_err(PoolError::Random)?;
        let record = Record { uuid, name, size, extents };
        let mut table = state.table.clone();
        table.volumes.push(record.clone());
        self.commit(&mut state, table, &record.extents)?;
        Ok(state.info(&record))
    }

    /// Makes a volume larger, which may be open; what is new reads as zeroes. Whoever exports it tells its users.
    ///
    /// # Errors
    /// When there is no such volume, it is that large already, there is no room, or the device fails.
    pub fn grow_volume(&self, key: &str, size: u64) -> Result<Info, PoolError> {
        let mut state = self.lock();
        let place = place(&state.table, key)?;
        let old = &state.table.volumes[place];
        if size <= old.size {
            return Err(PoolError::Size(size, format!("{} has {} already", old.name, old.size)));
        }
        self.check_size(size)?;
        let more = state.table.units_of(size) - state.table.units_of(old.size);
        let added = room_for(&state.table, more, old.extents.last().map(Extent::end))?;
        let mut table = state.table.clone();
        let record = &mut table.volumes[place];
        record.size = size;
        let mut new = added.iter();
        // One that begins where the last ends makes that longer.
        if let (Some(last), Some(first)) = (record.extents.last_mut(), added.first())
            && last.end() == first.start
        {
            last.len += first.len;
            new.next();
        }
        record.extents.extend(new);
        let record = record.clone();
        self.commit(&mut state, table, &added)?;
        if let Some(shared) = state.open.get(&record.uuid).and_then(Weak::upgrade) {
            let Table { unit, data_offset, .. } = state.table;
            shared.grow(&record.extents, unit, data_offset, size);
        }
        Ok(state.info(&record))
    }

    /// Gives a volume another name.
    ///
    /// # Errors
    /// When there is no such volume, another has the name, or the device fails.
    pub fn rename_volume(&self, key: &str, name: Name) -> Result<Info, PoolError> {
        let mut state = self.lock();
        let place = place(&state.table, key)?;
        if state.table.volumes.iter().enumerate().any(|(other, volume)| other != place && volume.name == name)
        {
            return Err(PoolError::Taken(name));
        }
        let mut table = state.table.clone();
        table.volumes[place].name = name;
        let record = table.volumes[place].clone();
        self.commit(&mut state, table, &[])?;
        Ok(state.info(&record))
    }

    /// Removes a volume that nobody has open.
    ///
    /// # Errors
    /// When there is no such volume, somebody has it open, or the device fails.
    pub fn delete_volume(&self, key: &str) -> Result<Info, PoolError> {
        let mut state = self.lock();
        let place = place(&state.table, key)?;
        let info = state.info(&state.table.volumes[place]);
        if info.is_open {
            return Err(PoolError::InUse(info.name));
        }
        let mut table = state.table.clone();
        table.volumes.remove(place);
        self.commit(&mut state, table, &[])?;
        state.open.remove(&info.uuid);
        Ok(info)
    }

    /// Opens a volume by its name or UUID. It may be open already: all have the same bytes.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn open_volume(&self, key: &str) -> Result<Arc<Volume>, PoolError> {
        let mut state = self.lock();
        let record = state.table.volumes[place(&state.table, key)?].clone();
        let shared = state.open.get(&record.uuid).and_then(Weak::upgrade).unwrap_or_else(|| {
            let limits = Limits { capacity: record.size, ..self.device.limits() };
            let Table { unit, data_offset, .. } = state.table;
            Arc::new(Shared::new(&record.extents, unit, data_offset, limits))
        });
        state.open.retain(|_, shared| shared.strong_count() > 0);
        state.open.insert(record.uuid, Arc::downgrade(&shared));
        Ok(Arc::new(Volume::new(record.name.as_str(), self.device.clone(), shared)))
    }

    fn check_size(&self, size: u64) -> Result<(), PoolError> {
        let block = u64::from(self.device.limits().block_size);
        match size {
            0 => Err(PoolError::Size(size, "there is nothing in it".into())),
            size if !size.is_multiple_of(block) => {
                Err(PoolError::Size(size, format!("the device has blocks of {block} bytes")))
            }
            _ => Ok(()),
        }
    }

    /// Makes `table` the one that counts; what it has `added` is made to read as zeroes before.
    fn commit(&self, state: &mut State, mut table: Table, added: &[Extent]) -> Result<(), PoolError> {
        table.sequence = state.table.sequence + 1;
        // What it cannot hold is found out before anything is written.
        let bytes = table.encode().map_err(PoolError::TooMany)?;
        let ranges: Vec<(u64, u64)> = added
            .iter()
            .map(|extent| (table.data_offset + extent.start * table.unit, extent.len * table.unit))
            .collect();
        let (limits, sequence) = (self.device.limits(), table.sequence);
        on(&self.device, &self.core, async move |channel: &dyn Channel| {
            for (offset, len) in &ranges {
                store::zero(channel, &limits, *offset, *len).await?;
            }
            if !ranges.is_empty() {
                // Before the table: a volume must never show what was there before.
                channel.submit(&Request::flush(), 0).await?;
            }
            store::write(channel, &bytes, sequence).await
        })?;
        state.table = table;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn info(&self, record: &Record) -> Info {
        let is_open = self.open.get(&record.uuid).is_some_and(|shared| shared.strong_count() > 0);
        let Record { uuid, name, size, extents } = record;
        Info { uuid: *uuid, name: name.clone(), size: *size, pieces: extents.len(), is_open }
    }
}

/// A unit that suits a device: whole stripes of an array.
fn unit_of(limits: &Limits) -> u64 {
    let alignment = ALIGNMENT.max(limits.block_size.into());
    match u64::from(limits.optimal_io_size) {
        stripe if stripe > 0 && stripe.is_multiple_of(alignment) => UNIT.next_multiple_of(stripe),
        _ => UNIT,
    }
}

fn place(table: &Table, key: &str) -> Result<usize, PoolError> {
    table.position(key).ok_or_else(|| PoolError::NoVolume(key.into()))
}

fn free(table: &Table) -> u64 {
    table.holes().iter().map(|hole| hole.len).sum::<u64>() * table.unit
}

fn room_for(table: &Table, units: u64, after: Option<u64>) -> Result<Vec<Extent>, PoolError> {
    let full = || PoolError::Full { wants: units.saturating_mul(table.unit), free: free(table) };
    allocate(&table.holes(), units, after).ok_or_else(full)
}

fn read(device: &Arc<dyn Device>, core: &CoreRef) -> Result<Table, PoolError> {
    let table = on(device, core, async |channel: &dyn Channel| Ok(store::read(channel).await))?;
    table.map_err(|error| PoolError::Read(device.name().to_owned(), error))
}

/// Runs `work` with a channel of the device, on the core.
fn on<R, F>(device: &Arc<dyn Device>, core: &CoreRef, work: F) -> Result<R, PoolError>
where
    R: Send + 'static,
    F: AsyncFnOnce(&dyn Channel) -> Result<R, IoError> + Send + 'static,
{
    let base = device.clone();
    let result = core.block_on(move |_| async move {
        let channel = base.open_channel()?;
        Ok::<_, DeviceError>(work(&*channel).await)
    })??;
    result.map_err(|error| PoolError::Io(device.name().to_owned(), error))
}

#[cfg(test)]
mod tests;
