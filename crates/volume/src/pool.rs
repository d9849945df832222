//! A pool: a device, and the volumes on it.
//!
//! All functions of this module wait for the device, and a core does the I/O. They are for control
//! threads, not for cores. A change is durable when it returns; a failed change leaves the pool as
//! it was.

mod check;

use crate::device::{Shared, Volume};
use crate::extents::{Extent, allocate};
use crate::mutant::{self, Mutant};
use crate::name::Name;
use crate::store::{self, Former, Found, ReadError};
use crate::table::{ALIGNMENT, COPIES, DecodeError, RESERVED, Record, Table};
use base::Uuid;
use block::{Channel, Device, DeviceError, IoError, Limits, Request};
use reactor::{CoreRef, CoreStopped};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Smallest unit. A thousand volumes on a hundred terabytes make a table of a few kilobytes.
const UNIT: u64 = 1 << 20;

/// A device with volumes on it.
pub struct Pool {
    device: Arc<dyn Device>,
    /// The core that reads and writes the table for the lifetime of the device: arrays stay with
    /// the first core that used them.
    core: CoreRef,
    /// Held for the duration of a change.
    changing: Mutex<()>,
    /// Held only briefly: queries do not wait for a change.
    state: Mutex<State>,
    /// Offsets in bytes of damaged copies of the table that the opening rewrote.
    rewritten_at_opening: Vec<u64>,
    /// Number of copies rewritten since the opening, including those.
    rewritten: AtomicU64,
}

struct State {
    table: Table,
    /// Open volumes.
    open: HashMap<Uuid, Weak<Shared>>,
    /// Extents reserved for new or growing volumes. The table does not contain them.
    reserved: Vec<Record>,
    /// Copies that the opening could neither read nor rewrite. Each may hold the table of a failed
    /// change, newer than `table`.
    unmended: Option<Found>,
    /// A table whose commit failed may stand on the device, newer than `table`.
    is_unsettled: bool,
    /// Highest sequence number that a table on the device may have.
    highest: u64,
}

/// Room reserved for a new volume or for the growth of one. Nothing is durable before
/// [`Reservation::commit`]; dropping the reservation frees the room.
pub struct Reservation<'a> {
    pool: &'a Pool,
    /// The new volume with its extents, or the growing volume with the added extents.
    record: Record,
    /// Size in bytes before growth; `None` for a new volume.
    grows_from: Option<u64>,
    /// Ranges of the device in bytes that must still be zeroed.
    unclean: Vec<Range<u64>>,
    is_committed: bool,
}

/// Why an operation on a pool failed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The device refuses an operation.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device has no readable pool.
    #[error("{0}: {1}")]
    Read(String, ReadError),
    /// The device already contains a pool.
    #[error("{0} already contains pool {1}")]
    Exists(String, Name),
    /// The device is too small for a volume, or for the extent of its pool.
    #[error("{device} has {has} bytes: a pool needs {needs}")]
    TooSmall {
        /// The device.
        device: String,
        /// Bytes that the device has.
        has: u64,
        /// Bytes that the pool needs.
        needs: u64,
    },
    /// No volume has this name or UUID.
    #[error("volume {0:?} does not exist")]
    NoVolume(String),
    /// Another volume has this name or UUID.
    #[error("volume {0} already exists")]
    Taken(Name),
    /// The volume is open or growing.
    #[error("volume {0} is in use")]
    InUse(Name),
    /// The size is invalid, with the reason.
    #[error("a volume of {0} bytes: {1}")]
    Size(u64, String),
    /// The pool has too little free room.
    #[error("{wants} bytes: {free} are free")]
    Full {
        /// Bytes requested.
        wants: u64,
        /// Free bytes.
        free: u64,
    },
    /// The table has no room for another entry, with the reason.
    #[error("{0}")]
    TooMany(String),
    /// The device failed.
    #[error("{0}: {1}")]
    Io(String, IoError),
    /// A change failed, and the device accepted neither all of the new table nor the previous one
    /// again.
    #[error("{device}: {error}; the previous table is not restored: the next start may find the change made")]
    Unsettled {
        /// The device.
        device: String,
        /// Why the change failed.
        error: String,
    },
    /// The core that does the I/O has stopped.
    #[error(transparent)]
    Core(#[from] CoreStopped),
    /// The system returned no random bytes.
    #[error("no UUID can be made: {0}")]
    Random(std::io::Error),
}

/// State of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// UUID.
    pub uuid: Uuid,
    /// Name.
    pub name: Name,
    /// Bytes.
    pub size: u64,
    /// Number of extents.
    pub pieces: usize,
    /// Whether a user has the volume open.
    pub is_open: bool,
}

impl Pool {
    /// Makes a pool without volumes on a device.
    ///
    /// # Errors
    /// When the device already contains a pool, is too small, or fails. The caller checks for other
    /// content of the device.
    pub fn create(device: Arc<dyn Device>, name: Name, core: CoreRef) -> Result<Pool, PoolError> {
        Pool::create_over(device, name, core).map(|(pool, _)| pool)
    }

    /// Like [`Pool::create`]; also returns the former content at the places of the tables, for
    /// [`Pool::undo_create`].
    ///
    /// # Errors
    /// As [`Pool::create`]. The former content is then written back as far as the device accepts
    /// it.
    pub fn create_over(
        device: Arc<dyn Device>,
        name: Name,
        core: CoreRef,
    ) -> Result<(Pool, Former), PoolError> {
        let (limits, of) = (device.limits(), device.name().to_owned());
        match read(&device, &core) {
            Ok(found) => return Err(PoolError::Exists(of, found.table.name)),
            Err(PoolError::Read(_, ReadError::Decode(DecodeError::None | DecodeError::Checksum))) => {}
            Err(error) => return Err(error),
        }
        let (unit, data_offset, units) = plan(&of, &limits)?;
        let pool = Uuid::random().map_err(PoolError::Random)?;
        // Write both sets, so that no copy of a former pool remains.
        let table = |sequence| Table {
            pool,
            name: name.clone(),
            sequence,
            copies: COPIES,
            unit,
            data_offset,
            units,
            volumes: Vec::new(),
        };
        let tables = [1, 2].map(|sequence| (table(sequence).encode(), sequence));
        let len = tables.iter().filter_map(|(bytes, _)| Some(bytes.as_ref().ok()?.len())).max();
        let len = len.unwrap_or_default();
        let former = on(&device, &core, async move |channel: &dyn Channel| Former::read(channel, len).await)?;
        let written = tables.into_iter().try_for_each(|(bytes, sequence)| {
            let bytes = bytes.map_err(PoolError::TooMany)?;
            on(&device, &core, async move |channel: &dyn Channel| {
                store::write(channel, &bytes, sequence).await
            })
        });
        match written.and_then(|()| Pool::open(device.clone(), core.clone())) {
            Ok(pool) => Ok((pool, former)),
            Err(error) => {
                if let Err(error) = restore(&device, &core, former) {
                    tracing::error!(device = of, %error, "the content before the pool was created is not restored");
                }
                Err(error)
            }
        }
    }

    /// Restores the content of the device before [`Pool::create_over`], unless the pool has volumes
    /// by now. Returns whether it did; the pool must not be used afterwards.
    ///
    /// # Errors
    /// When the device fails.
    pub fn undo_create(&self, former: Former) -> Result<bool, PoolError> {
        let (_alone, _) = self.change();
        if !self.lock().occupied().volumes.is_empty() {
            return Ok(false);
        }
        restore(&self.device, &self.core, former).map(|()| true)
    }

    /// Checks whether a volume of `size` bytes fits on a device that has no pool yet, without I/O.
    ///
    /// # Errors
    /// As [`Pool::create`] and [`Pool::reserve_volume`] for invalid sizes.
    pub fn check_fits(device: &dyn Device, size: u64) -> Result<(), PoolError> {
        let limits = device.limits();
        check_size(&limits, size)?;
        let (unit, _, units) = plan(device.name(), &limits)?;
        match size.div_ceil(unit) <= units {
            true => Ok(()),
            false => {
                let wants = size.div_ceil(unit).saturating_mul(unit);
                Err(PoolError::Full { wants, free: unit * units })
            }
        }
    }

    /// Opens the pool on a device.
    ///
    /// # Errors
    /// When the device has no pool, or is smaller than the pool.
    pub fn open(device: Arc<dyn Device>, core: CoreRef) -> Result<Pool, PoolError> {
        let found = read(&device, &core)?;
        let table = &found.table;
        let (needs, has) = (table.data_offset + table.unit * table.units, device.limits().capacity);
        // Check before any write: a refused device stays unchanged.
        if has < needs {
            return Err(PoolError::TooSmall { device: device.name().to_owned(), has, needs });
        }
        let (rewritten_at_opening, unmended) = mend(&device, &core, &found);
        let (table, highest) = (found.table.clone(), found.table.sequence);
        let (open, reserved, is_unsettled) = (HashMap::new(), Vec::new(), false);
        let state = Mutex::new(State { table, open, reserved, unmended, is_unsettled, highest });
        let rewritten = AtomicU64::new(rewritten_at_opening.len() as u64);
        Ok(Pool { device, core, changing: Mutex::default(), state, rewritten_at_opening, rewritten })
    }

    /// Name and identity of the pool.
    pub fn identity(&self) -> (Name, Uuid) {
        let state = self.lock();
        (state.table.name.clone(), state.table.pool)
    }

    /// Takes back what a change that failed may have left, so that a later start finds the present
    /// table. Does no I/O if nothing is left. Every change begins with it.
    ///
    /// # Errors
    /// When the device fails.
    pub fn settle(&self) -> Result<(), PoolError> {
        let (_alone, _) = self.change();
        self.take_back()
    }

    /// Whether no change that failed can be found by a later start.
    pub fn is_settled(&self) -> bool {
        let state = self.lock();
        !state.is_unsettled && state.unmended.is_none()
    }

    /// Total and free bytes for volumes.
    pub fn room(&self) -> (u64, u64) {
        let state = self.lock();
        (state.table.units * state.table.unit, free(&state.occupied()))
    }

    /// Extends the pool to the present capacity of its device. Returns the bytes for volumes before
    /// and after.
    ///
    /// # Errors
    /// When the device fails.
    pub fn extend(&self) -> Result<(u64, u64), PoolError> {
        let (_alone, mut table) = self.change();
        let before = table.units;
        table.units =
            before.max(self.device.limits().capacity.saturating_sub(table.data_offset) / table.unit);
        let (unit, after) = (table.unit, table.units);
        if after > before {
            drop(self.commit(table)?);
        }
        Ok((before * unit, after * unit))
    }

    /// The volumes in the order of their creation.
    pub fn volumes(&self) -> Vec<Info> {
        let state = self.lock();
        state.table.volumes.iter().map(|record| state.info(record)).collect()
    }

    /// The volume with this UUID.
    pub fn volume_with(&self, uuid: Uuid) -> Option<Info> {
        let state = self.lock();
        state.table.volumes.iter().find(|record| record.uuid == uuid).map(|record| state.info(record))
    }

    /// Creates a volume that reads as zeroes: [`Pool::reserve_volume`], zeroing and commit.
    ///
    /// # Errors
    /// When the name is taken, the pool has too little room, or the device fails.
    pub fn create_volume(&self, name: Name, size: u64) -> Result<Info, PoolError> {
        let mut new = self.reserve_volume(name, size)?;
        new.zero(async |left| left)?;
        new.commit()
    }

    /// Creates a volume with this identity for a copy: the caller writes every byte before it reads
    /// any.
    ///
    /// # Errors
    /// When the identity or the name is taken, the pool has too little room, or the device fails.
    pub fn create_copy(&self, uuid: Uuid, name: Name, size: u64) -> Result<Info, PoolError> {
        let mut new = self.reserve(uuid, name, size)?;
        // The copy does not write the rest of its last unit, which a later growth exposes.
        let unit = self.lock().table.unit;
        new.unclean = new.unclean.pop().map(|range| range.end - unit..range.end).into_iter().collect();
        if mutant::is(Mutant::CopyEndNotZeroed) {
            new.unclean.clear();
        }
        new.zero(async |left| left)?;
        new.commit()
    }

    /// Reserves room for a new volume. Other changes of the pool may run meanwhile.
    ///
    /// # Errors
    /// When the name is taken, or the pool has too little room.
    pub fn reserve_volume(&self, name: Name, size: u64) -> Result<Reservation<'_>, PoolError> {
        self.reserve(Uuid::random().map_err(PoolError::Random)?, name, size)
    }

    fn reserve(&self, uuid: Uuid, name: Name, size: u64) -> Result<Reservation<'_>, PoolError> {
        self.check_size(size)?;
        let mut state = self.lock();
        let all = state.occupied();
        if all.volumes.iter().any(|volume| volume.uuid == uuid || volume.name == name) {
            return Err(PoolError::Taken(name));
        }
        let extents = room_for(&all, all.units_of(size), None)?;
        state.reserve(self, Record { uuid, name, size, extents }, None)
    }

    /// Grows a volume, which may be open: [`Pool::reserve_growth`], zeroing and commit.
    ///
    /// # Errors
    /// When no such volume exists, it has this size or more, the pool has too little room, or the
    /// device fails.
    pub fn grow_volume(&self, key: &str, size: u64) -> Result<Info, PoolError> {
        let mut more = self.reserve_growth(key, size)?;
        more.zero(async |left| left)?;
        more.commit()
    }

    /// Reserves room for the growth of a volume, which may be open. After the growth its exports
    /// report the new size to their clients.
    ///
    /// # Errors
    /// When no such volume exists, it has this size or more, it is growing already, or the pool has
    /// too little room.
    pub fn reserve_growth(&self, key: &str, size: u64) -> Result<Reservation<'_>, PoolError> {
        self.check_size(size)?;
        let mut state = self.lock();
        let old = state.table.volumes[place(&state.table, key)?].clone();
        if size <= old.size {
            return Err(PoolError::Size(size, format!("{} already has {}", old.name, old.size)));
        }
        state.check_not_growing(&old)?;
        let all = state.occupied();
        let more = all.units_of(size) - all.units_of(old.size);
        let extents = room_for(&all, more, old.extents.last().map(Extent::end))?;
        state.reserve(self, Record { size, extents, ..old.clone() }, Some(old.size))
    }

    /// Renames a volume.
    ///
    /// # Errors
    /// When no such volume exists, another has the name, or the device fails.
    pub fn rename_volume(&self, key: &str, name: Name) -> Result<Info, PoolError> {
        self.identify(key, None, name)
    }

    /// Gives a volume, which may be open, this identity and name: a copy replaces its original.
    ///
    /// # Errors
    /// When no such volume exists, another has the identity or the name, or the device fails.
    pub fn identify_volume(&self, key: &str, uuid: Uuid, name: Name) -> Result<Info, PoolError> {
        self.identify(key, Some(uuid), name)
    }

    fn identify(&self, key: &str, uuid: Option<Uuid>, name: Name) -> Result<Info, PoolError> {
        let (_alone, mut table) = self.change();
        let place = place(&table, key)?;
        let before = table.volumes[place].uuid;
        let uuid = uuid.unwrap_or(before);
        let all = self.lock().occupied();
        let mut others = all.volumes.iter().filter(|volume| volume.uuid != before);
        if others.any(|volume| volume.name == name || volume.uuid == uuid) {
            return Err(PoolError::Taken(name));
        }
        let record = Record { uuid, name, ..table.volumes[place].clone() };
        table.volumes[place] = record.clone();
        let mut state = self.commit(table)?;
        if let Some(shared) = state.open.remove(&before) {
            state.open.insert(uuid, shared);
        }
        Ok(state.info(&record))
    }

    /// Deletes a volume that is not open.
    ///
    /// # Errors
    /// When no such volume exists, it is open or growing, or the device fails.
    pub fn delete_volume(&self, key: &str) -> Result<Info, PoolError> {
        let (_alone, mut table) = self.change();
        let place = place(&table, key)?;
        let state = self.lock();
        let info = state.info(&table.volumes[place]);
        if info.is_open && !mutant::is(Mutant::DeleteInUse) {
            return Err(PoolError::InUse(info.name));
        }
        state.check_not_growing(&table.volumes[place])?;
        drop(state);
        table.volumes.remove(place);
        self.commit(table)?.open.remove(&info.uuid);
        Ok(info)
    }

    /// Opens a volume by name or UUID. All users of a volume share its bytes.
    ///
    /// # Errors
    /// When no such volume exists.
    pub fn open_volume(&self, key: &str) -> Result<Arc<Volume>, PoolError> {
        // Waits for changes: a deleted volume is not opened, and a growing one is opened with its
        // new size.
        let (_alone, table) = self.change();
        let record = table.volumes[place(&table, key)?].clone();
        let mut state = self.lock();
        let shared = state.open.get(&record.uuid).and_then(Weak::upgrade).unwrap_or_else(|| {
            let limits = Limits { capacity: record.size, ..self.device.limits() };
            let Table { unit, data_offset, .. } = table;
            Arc::new(Shared::new(&record.extents, unit, data_offset, limits))
        });
        state.open.retain(|_, shared| shared.strong_count() > 0);
        state.open.insert(record.uuid, Arc::downgrade(&shared));
        Ok(Arc::new(Volume::new(record.uuid, self.device.clone(), shared)))
    }

    fn check_size(&self, size: u64) -> Result<(), PoolError> {
        check_size(&self.device.limits(), size)
    }

    /// Makes `table` the current one. If that fails, the copies already written are overwritten
    /// with the previous table, so that no start finds a failed change.
    fn commit(&self, mut table: Table) -> Result<MutexGuard<'_, State>, PoolError> {
        self.take_back()?;
        table.sequence = self.lock().next_sequence(1);
        table.copies = COPIES;
        let (bytes, sequence) = (table.encode().map_err(PoolError::TooMany)?, table.sequence);
        self.lock().highest = sequence;
        let written = on(&self.device, &self.core, async move |channel: &dyn Channel| {
            store::write(channel, &bytes, sequence).await
        });
        if let Err(error) = written {
            self.lock().is_unsettled = true;
            return Err(match self.take_back() {
                Ok(()) => error,
                Err(_) => {
                    PoolError::Unsettled { device: self.device.name().to_owned(), error: error.to_string() }
                }
            });
        }
        let mut state = self.lock();
        state.table = table;
        Ok(state)
    }

    /// Overwrites what a failed commit may have left. That place must hold an older table, such as
    /// the current one with the preceding sequence number. If that place cannot be written, the
    /// current table gets the highest number.
    fn take_back(&self) -> Result<(), PoolError> {
        let unmended = self.lock().unmended.clone();
        if let Some(found) = unmended {
            let damaged = found.damaged().len() as u64;
            on(&self.device, &self.core, async move |channel: &dyn Channel| found.mend(channel).await)?;
            self.rewritten.fetch_add(damaged, Ordering::Relaxed);
            self.lock().unmended = None;
        }
        let (current, newer) = {
            let state = self.lock();
            if !state.is_unsettled || mutant::is(Mutant::NoTakeBack) {
                return Ok(());
            }
            (state.table.clone(), Table { sequence: state.next_sequence(0), ..state.table.clone() })
        };
        let older = Table { sequence: current.sequence.saturating_sub(1), ..current };
        let bytes = older.encode().map_err(PoolError::TooMany)?;
        let taken_back = on(&self.device, &self.core, async move |channel: &dyn Channel| {
            store::take_back(channel, &bytes, older.sequence, older.sequence + 1).await
        });
        if let Err(error) = taken_back {
            // The former format has no copies to spare, and a lone table with the number 1 counts
            // whatever number another place had.
            if newer.copies < COPIES || older.sequence < 2 {
                return Err(error);
            }
            self.outrank(newer)?;
        }
        self.lock().is_unsettled = false;
        Ok(())
    }

    /// Writes the current table with a higher number over its own copies, one after the other.
    fn outrank(&self, newer: Table) -> Result<(), PoolError> {
        let (bytes, sequence) = (newer.encode().map_err(PoolError::TooMany)?, newer.sequence);
        self.lock().highest = sequence;
        on(&self.device, &self.core, async move |channel: &dyn Channel| {
            store::write(channel, &bytes, sequence).await
        })?;
        self.lock().table = newer;
        Ok(())
    }

    /// Begins a change and excludes other changes. Returns the lock and the current table.
    fn change(&self) -> (MutexGuard<'_, ()>, Table) {
        let alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let table = self.lock().table.clone();
        (alone, table)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation<'_> {
    /// The volume as it will be after the commit.
    pub fn info(&self) -> Info {
        self.pool.lock().info(&self.record)
    }

    /// Bytes that are not zeroed yet.
    pub fn left(&self) -> u64 {
        bytes(&self.unclean)
    }

    /// Zeroes the room on the pool's core. Before each step `next` receives the bytes left and
    /// returns how many to zero, in whole MiB and at least one; 0 stops. `next` may wait before it
    /// answers. Returns the bytes left.
    ///
    /// # Errors
    /// When the device fails.
    pub fn zero(&mut self, mut next: impl AsyncFnMut(u64) -> u64 + Send + 'static) -> Result<u64, PoolError> {
        // A table that a later start finds may have allocated the room.
        self.pool.settle()?;
        let (mut unclean, limits) = (self.unclean.clone(), self.pool.device.limits());
        let (unclean, zeroed) =
            on(&self.pool.device, &self.pool.core, async move |channel: &dyn Channel| {
                let mut zeroed = Ok(());
                while let Some(range) = unclean.first_mut()
                    && zeroed.is_ok()
                {
                    let len = range.end - range.start;
                    let part = match next(bytes(&unclean)).await {
                        0 => break,
                        most => len.min(most.max(UNIT) / UNIT * UNIT),
                    };
                    let range = &mut unclean[0];
                    if !mutant::is(Mutant::NoZeroing) {
                        zeroed = store::zero(channel, &limits, range.start, part).await;
                    }
                    range.start += part;
                    unclean.retain(|range| !range.is_empty());
                }
                Ok((unclean, zeroed))
            })?;
        zeroed.map_err(|error| PoolError::Io(self.pool.device.name().to_owned(), error))?;
        self.unclean = unclean;
        Ok(self.left())
    }

    /// Makes the volume or its growth durable. Users of an open volume see the new size.
    ///
    /// # Panics
    /// When bytes are not zeroed yet.
    ///
    /// # Errors
    /// When the table has no room for the entry, or the device fails.
    pub fn commit(mut self) -> Result<Info, PoolError> {
        assert!(self.unclean.is_empty(), "volume {} would expose former content", self.record.name);
        let (_alone, mut table) = self.pool.change();
        let record = add(&mut table, &self.record, self.grows_from)?;
        // Flush the zeroes before the table: a volume must never expose former content.
        on(&self.pool.device, &self.pool.core, async |channel: &dyn Channel| {
            if mutant::is(Mutant::ZeroesNotFlushed) {
                return Ok(());
            }
            channel.submit(&Request::flush(), 0).await
        })?;
        let mut state = self.pool.commit(table)?;
        state.release(&self.record);
        self.is_committed = true;
        if let Some(shared) = state.open.get(&record.uuid).and_then(Weak::upgrade) {
            let Table { unit, data_offset, .. } = state.table;
            shared.grow(&record.extents, unit, data_offset, record.size);
        }
        Ok(state.info(&record))
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.is_committed {
            self.pool.lock().release(&self.record);
        }
    }
}

impl State {
    /// The next number of a table: higher than any on the device, for the set of the current table
    /// (`other` 0) or the other one (1).
    fn next_sequence(&self, other: u64) -> u64 {
        let next = if mutant::is(Mutant::NumberUsedAgain) { self.table.sequence } else { self.highest } + 1;
        next + (next + self.table.sequence + other) % 2
    }

    /// The table including all reservations.
    fn occupied(&self) -> Table {
        let mut table = self.table.clone();
        if !mutant::is(Mutant::ReservedIsFree) {
            table.volumes.extend(self.reserved.iter().cloned());
        }
        table
    }

    fn reserve<'a>(
        &mut self,
        pool: &'a Pool,
        record: Record,
        grows_from: Option<u64>,
    ) -> Result<Reservation<'a>, PoolError> {
        // Check that the table can hold the record before anything is written.
        let mut table = self.table.clone();
        add(&mut table, &record, grows_from)?;
        table.encode().map_err(PoolError::TooMany)?;
        let Table { unit, data_offset, .. } = self.table;
        let range = |extent: &Extent| data_offset + extent.start * unit..data_offset + extent.end() * unit;
        let unclean = record.extents.iter().map(range).collect();
        self.reserved.push(record.clone());
        Ok(Reservation { pool, record, grows_from, unclean, is_committed: false })
    }

    fn release(&mut self, record: &Record) {
        self.reserved.retain(|other| other.uuid != record.uuid);
    }

    fn check_not_growing(&self, record: &Record) -> Result<(), PoolError> {
        match self.reserved.iter().any(|other| other.uuid == record.uuid) {
            true => Err(PoolError::InUse(record.name.clone())),
            false => Ok(()),
        }
    }

    fn info(&self, record: &Record) -> Info {
        let is_open = self.open.get(&record.uuid).is_some_and(|shared| shared.strong_count() > 0);
        let Record { uuid, name, size, extents } = record;
        Info { uuid: *uuid, name: name.clone(), size: *size, pieces: extents.len(), is_open }
    }
}

/// Returns the unit, the data offset and the number of units of a new pool.
fn plan(device: &str, limits: &Limits) -> Result<(u64, u64, u64), PoolError> {
    let unit = unit_of(limits);
    let data_offset = RESERVED.next_multiple_of(unit);
    let units = limits.capacity.saturating_sub(data_offset) / unit;
    match units {
        0 => {
            let (device, has, needs) = (device.to_owned(), limits.capacity, data_offset + unit);
            Err(PoolError::TooSmall { device, has, needs })
        }
        units => Ok((unit, data_offset, units)),
    }
}

fn check_size(limits: &Limits, size: u64) -> Result<(), PoolError> {
    let block = u64::from(limits.block_size);
    match size {
        0 => Err(PoolError::Size(size, "a volume must not be empty".into())),
        size if !size.is_multiple_of(block) => {
            Err(PoolError::Size(size, format!("the device has blocks of {block} bytes")))
        }
        _ => Ok(()),
    }
}

/// A unit that suits the device: whole stripes of an array.
fn unit_of(limits: &Limits) -> u64 {
    let alignment = ALIGNMENT.max(limits.block_size.into());
    match u64::from(limits.optimal_io_size) {
        stripe if stripe > 0 && stripe.is_multiple_of(alignment) => UNIT.next_multiple_of(stripe),
        _ => UNIT,
    }
}

fn bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Adds a volume, or the growth of one, to a table. Returns the volume as it is afterwards.
fn add(table: &mut Table, record: &Record, grows_from: Option<u64>) -> Result<Record, PoolError> {
    let Some(size) = grows_from else {
        // Another change may have taken the name since the reservation.
        if table.volumes.iter().any(|volume| volume.uuid == record.uuid || volume.name == record.name) {
            return Err(PoolError::Taken(record.name.clone()));
        }
        table.volumes.push(record.clone());
        return Ok(record.clone());
    };
    let is_it = |volume: &&mut Record| volume.uuid == record.uuid && volume.size == size;
    let grown = table.volumes.iter_mut().find(is_it);
    let grown = grown.ok_or_else(|| PoolError::NoVolume(record.uuid.to_string()))?;
    grown.size = record.size;
    let mut new = record.extents.iter();
    // An extent that begins at the end of the last one extends it.
    if let (Some(last), Some(first)) = (grown.extents.last_mut(), record.extents.first())
        && last.end() == first.start
    {
        last.len += first.len;
        new.next();
    }
    grown.extents.extend(new);
    Ok(grown.clone())
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

/// Reads every copy of the table on a device whose pool is not open.
///
/// # Errors
/// When the device cannot be read.
pub fn inspect(device: &Arc<dyn Device>, core: &CoreRef) -> Result<Vec<store::Copy>, PoolError> {
    on(device, core, async |channel: &dyn Channel| store::inspect(channel).await)
}

/// Rewrites damaged copies of the table on a device whose pool is not open. Returns their number.
///
/// # Errors
/// When the device has no pool, the newest table may be lost, or the device fails.
pub fn repair(device: &Arc<dyn Device>, core: &CoreRef) -> Result<usize, PoolError> {
    let found = read(device, core)?;
    let damaged = found.damaged().len();
    on(device, core, async move |channel: &dyn Channel| found.mend(channel).await)?;
    Ok(damaged)
}

/// Makes a table that was found the current one and overwrites every copy. The pool must not be
/// open.
///
/// # Errors
/// When the device fails.
pub fn choose(device: &Arc<dyn Device>, core: &CoreRef, table: &Table) -> Result<(), PoolError> {
    let copies = inspect(device, core)?;
    let sequences = copies.iter().filter_map(|copy| Some(copy.table()?.sequence));
    let newest = sequences.max().unwrap_or(table.sequence);
    // An unreadable copy may hold a later table, so all four are written.
    for sequence in [newest + 1, newest + 2] {
        let table = Table { sequence, copies: COPIES, ..table.clone() };
        let bytes = table.encode().map_err(PoolError::TooMany)?;
        on(device, core, async move |channel: &dyn Channel| store::write(channel, &bytes, sequence).await)?;
    }
    Ok(())
}

fn read(device: &Arc<dyn Device>, core: &CoreRef) -> Result<Found, PoolError> {
    let found = on(device, core, async |channel: &dyn Channel| Ok(store::read(channel).await))?;
    found.map_err(|error| PoolError::Read(device.name().to_owned(), error))
}

fn restore(device: &Arc<dyn Device>, core: &CoreRef, former: Former) -> Result<(), PoolError> {
    on(device, core, async move |channel: &dyn Channel| former.restore(channel).await)
}

/// Rewrites damaged copies of the table and returns their offsets. If that fails, the pool uses the
/// intact copies, and the rest is to be rewritten before the next change.
fn mend(device: &Arc<dyn Device>, core: &CoreRef, found: &Found) -> (Vec<u64>, Option<Found>) {
    if found.is_whole() || mutant::is(Mutant::NoMend) {
        return (Vec::new(), None);
    }
    for copy in &found.copies {
        tracing::warn!(device = device.name(), "pool {}: copy of the table {copy}", found.table.name);
    }
    let copies = found.clone();
    match on(device, core, async move |channel: &dyn Channel| copies.mend(channel).await) {
        Ok(()) => {
            tracing::info!(device = device.name(), "pool {}: damaged copies rewritten", found.table.name);
            (found.damaged(), None)
        }
        Err(error) => {
            tracing::error!(device = device.name(), %error, "pool {}: damaged copies not rewritten", found.table.name);
            (Vec::new(), Some(found.clone()).filter(|_| !mutant::is(Mutant::UnmendedForgotten)))
        }
    }
}

/// Runs `work` with a channel of the device on the core.
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
