//! Moving a volume from one pool to another while it is in use: what is durable when, and what a
//! start makes of it.
//!
//! ```text
//!   record set ─► copy made ─► copied, and what is written meanwhile again ─► record: due, twice ─► users wait
//!       ─► rest copied, flushed ─► the copy gets the volume's identity ─► record: done, twice ─► users use the copy
//!       ─► the old place is deleted ─► record removed
//! ```
//!
//! - The old place alone counts until the copy has the volume's identity, and from then on the new
//!   one alone. Both are the same at that moment, because users wait.
//! - Until then the copy has a name and an identity of its own: a start that knows no record of it
//!   deletes it.
//! - The owner of the records also keeps the set before the last change. The record is due in both
//!   before the switch: a start that has to use the older one finishes the move all the same. It is
//!   done in both before users continue: while it is due, both places hold the same.
//! - A start with a due record and without the pool of the new place does not know which place
//!   counts ([`MoveRecord::is_due`]). The volume is not used until the pool is open, or the move is
//!   cancelled.
//!
//! The daemon drives this with its state file and its threads, the simulator (`sim --pools`) with
//! simulated ones.
#![forbid(unsafe_code)]

mod copier;

pub use copier::{Copier, Parts, Whole};

use block::DeviceError;
use layers::migrate::Migration;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use volume::mutant::{self, Mutant};
use volume::{Info, Name, Pool, PoolError, Uuid};

/// A move of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRecord {
    /// The array or device that the volume was on.
    pub from: String,
    /// The one that it moves to.
    pub to: String,
    /// The UUID of its copy there, until that is the volume.
    pub copy: String,
    /// The pool of the new place says which place counts, unless the record says it: it may have
    /// given the copy the volume's identity. Unless the move is running, nothing uses the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_due: bool,
    /// From now on only what is at the new place counts.
    pub is_done: bool,
    /// The move failed, and the volume stays where it is. A volume with its identity at the new
    /// place is left from a failed change of the pool, and is removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stays: bool,
}

impl MoveRecord {
    /// The record of a move that begins, with a new UUID for the copy.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new(from: String, to: String) -> Result<MoveRecord, PoolError> {
        let copy = Uuid::random().map_err(PoolError::Random)?.to_string();
        Ok(MoveRecord { from, to, copy, is_due: false, is_done: false, stays: false })
    }

    /// Whether the move has failed, and all sets of the records say so. Room at the new place may
    /// be left.
    pub fn has_failed(&self) -> bool {
        self.stays && !self.is_due
    }

    /// The record once the move is due.
    fn due(&self) -> MoveRecord {
        MoveRecord { is_due: true, ..self.clone() }
    }
}

/// Moves by the UUID of their volume.
pub type Records = BTreeMap<String, MoveRecord>;

/// The keeper of pools and records. Its methods wait: they are for threads that may.
pub trait Owner {
    /// Why something failed.
    type Error: From<PoolError> + From<DeviceError> + std::fmt::Display;

    /// The pool on an array or device.
    ///
    /// # Errors
    /// When it is not open.
    fn pool(&self, place: &str) -> Result<Arc<Pool>, Self::Error>;

    /// Sets the record of a volume's move, or removes it, durably.
    ///
    /// # Errors
    /// When that fails: then it may be durable or not.
    fn set(&self, volume: &str, record: Option<&MoveRecord>) -> Result<(), Self::Error>;

    /// Deletes a volume that cores may be about to close.
    ///
    /// # Errors
    /// When its pool refuses.
    fn delete(&self, pool: &Pool, info: &Info) -> Result<(), Self::Error>;

    /// Waits before another attempt. Returns whether to make one.
    fn pause(&self) -> bool;
}

/// Action of a start for a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The volume has moved, and its old place is free, or is not there yet. Or it stays, and the
    /// new place is free, or is not there yet.
    Ended,
    /// The move begins again with a new copy when both pools are open, or is given up.
    Open,
}

/// Start of the name of a copy until it is whole; the UUID of the copy follows.
const COPY_PREFIX: &str = "moving-";

/// The name of a copy until it is whole.
fn name_of_copy(copy: Uuid) -> String {
    format!("{COPY_PREFIX}{copy}")
}

/// Makes room of `size` bytes for a copy. A start deletes it unless it knows of it.
///
/// # Errors
/// When the pool has no room, or fails.
pub fn make_room(pool: &Pool, copy: Uuid, size: u64) -> Result<Info, PoolError> {
    let name = Name::new(&name_of_copy(copy)).map_err(|error| PoolError::TooMany(error.to_string()))?;
    pool.create_copy(copy, name, size)
}

/// Whether a volume is a copy that is not whole: it holds what others had in its place, and is
/// never shown.
pub fn is_unfinished_copy(info: &Info) -> bool {
    info.name.as_str().starts_with(COPY_PREFIX) && info.name.as_str() == name_of_copy(info.uuid)
}

/// Whether a volume at a place is a copy that is not whole yet, or what a whole one was copied
/// from.
pub fn is_hidden(records: &Records, place: &str, info: &Info) -> bool {
    let counts_not = |record: &MoveRecord| place == if record.is_done { &record.from } else { &record.to };
    let is_left = || records.get(&info.uuid.to_string()).is_some_and(counts_not);
    is_unfinished_copy(info) || !records.is_empty() && is_left()
}

/// Whether a pool has the volume itself, not a copy of another identity. The pool of the new place
/// says that durably before the record does, and no user writes in between. Both places hold the
/// same then, and later only the new one is current. So records that are older than the switch,
/// restored after damage, delete nothing.
fn has_volume(pool: &Pool, uuid: &str) -> bool {
    Uuid::parse_hyphenated(uuid).is_some_and(|uuid| pool.volume_with(uuid).is_some())
}

/// Whether the place of a volume that counts is not known, unless its move is running. Nothing may
/// use the volume then.
pub fn is_unknown(records: &Records, uuid: &str) -> bool {
    records.get(uuid).is_some_and(|record| record.is_due) && !mutant::is(Mutant::DueIgnored)
}

/// Deletes copies in these pools that nothing will finish: a move failed, and its copy could not be
/// removed. They hold what their room held before. `is_known` says of a copy's UUID whether it
/// stays. Returns whether none is left.
pub fn remove_leftovers(pools: &[Arc<Pool>], is_known: impl Fn(&str) -> bool) -> bool {
    let mut is_none_left = true;
    for pool in pools {
        for info in pool.volumes().iter().filter(|info| is_unfinished_copy(info)) {
            let uuid = info.uuid.to_string();
            if is_known(&uuid) || mutant::is(Mutant::LeftoversStay) {
                continue;
            }
            match pool.delete_volume(&uuid) {
                Ok(_) => tracing::info!(volume = %info.name, "unfinished copy of a volume deleted"),
                Err(error) => {
                    is_none_left = false;
                    tracing::warn!(volume = %info.name, %error, "unfinished copy of a volume not deleted yet");
                }
            }
        }
    }
    is_none_left
}

/// Finishes a move that a start finds, as far as it was done: marks it as done if its pool says so,
/// and frees the old place.
///
/// # Errors
/// When a pool or the records cannot be changed; a later start tries again.
pub fn resume<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) -> Result<Resumed, O::Error> {
    let mut record = record.clone();
    if record.is_due && (record.is_done || record.stays) {
        record.is_due = false;
        record_end(owner, uuid, &record)?;
    }
    if !record.is_done && !record.stays {
        let Ok(to) = owner.pool(&record.to) else { return Ok(Resumed::Open) };
        // The table that says where the volume is may be one that cannot be read now.
        let settled = to.settle();
        if has_volume(&to, uuid) {
            settled?;
            (record.is_due, record.is_done) = (false, true);
            record_end(owner, uuid, &record)?;
            tracing::warn!(
                uuid,
                to = record.to,
                "the volume's pool says that it has moved: the new place counts"
            );
        } else if settled.is_err() {
            keep_place(owner, uuid, &record)?;
            record.stays = true;
        } else if record.is_due {
            record.is_due = false;
            owner.set(uuid, Some(&record))?;
        }
    }
    if record.stays {
        if owner.pool(&record.to).is_ok() {
            remove_all(owner, uuid, &record)?;
            owner.set(uuid, None)?;
        }
        return Ok(Resumed::Ended);
    }
    if !record.is_done {
        return Ok(Resumed::Open);
    }
    if owner.pool(&record.from).is_ok() {
        free_old_place(owner, uuid, &record)?;
    }
    Ok(Resumed::Ended)
}

/// Removes the volume with this UUID from a place. A pool that does not show it may do so at a
/// later start, unless it is settled.
fn remove<O: Owner>(owner: &O, place: &str, uuid: &str) -> Result<(), O::Error> {
    let pool = owner.pool(place)?;
    pool.settle()?;
    let volume = pool.volumes().into_iter().find(|info| info.uuid.to_string() == uuid);
    volume.map_or(Ok(()), |info| owner.delete(&pool, &info))
}

/// Removes the copy, and a volume with the identity of the one that stays.
fn remove_all<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) -> Result<(), O::Error> {
    if !mutant::is(Mutant::IdentityKept) {
        remove(owner, &record.to, uuid)?;
    }
    remove_copy(owner, record)
}

/// Makes the copy of a volume of `size` bytes, after what an earlier attempt has left of one is
/// removed.
///
/// # Errors
/// When the new place is not open, has no room, or fails.
pub fn make_copy<O: Owner>(owner: &O, record: &MoveRecord, size: u64) -> Result<(), O::Error> {
    remove_copy(owner, record)?;
    let copy =
        Uuid::parse_hyphenated(&record.copy).ok_or_else(|| PoolError::NoVolume(record.copy.clone()))?;
    make_room(&*owner.pool(&record.to)?, copy, size)?;
    Ok(())
}

/// Removes what there is of a copy that does not count.
fn remove_copy<O: Owner>(owner: &O, record: &MoveRecord) -> Result<(), O::Error> {
    remove(owner, &record.to, &record.copy)
}

/// The last part, while the volume's users wait. `finish` copies what is left, and flushes the
/// copy.
///
/// # Errors
/// When something fails before the new place counts; the volume stays where it is.
pub fn switch<O: Owner, E: From<O::Error>>(
    owner: &O,
    info: &Info,
    record: &MoveRecord,
    migration: Migration,
    finish: impl FnOnce(&Migration) -> Result<(), E>,
) -> Result<(), E> {
    let uuid = info.uuid.to_string();
    let due = if mutant::is(Mutant::DueNotRecorded) { record.clone() } else { record.due() };
    if !mutant::is(Mutant::DueOnce) {
        owner.set(&uuid, Some(&due))?;
    }
    owner.set(&uuid, Some(&due))?;
    let hold = |migration: &Migration| migration.hold().map_err(|error| E::from(O::Error::from(error)));
    if mutant::is(Mutant::CopyBeforeHold) {
        finish(&migration)?;
        hold(&migration)?;
    } else {
        hold(&migration)?;
        finish(&migration)?;
    }
    let done = MoveRecord { is_done: true, ..record.clone() };
    if mutant::is(Mutant::DoneBeforeSwitch) {
        owner.set(&uuid, Some(&done))?;
    }
    let to = owner.pool(&record.to)?;
    if let Err(error) = to.identify_volume(&record.copy, info.uuid, info.name.clone()) {
        if !to.is_settled() {
            stay(owner, &uuid, record);
        }
        return Err(E::from(error.into()));
    }
    let first = if mutant::is(Mutant::DoneOnce) { done.clone() } else { done.due() };
    while let Err(error) = owner.set(&uuid, Some(&first)) {
        tracing::error!(volume = %info.name, %error, "cannot remember that a volume has moved");
        // Whether it is remembered all the same is not known. No user may write until it is known
        // which place counts.
        if owner.set(&uuid, Some(&due)).is_ok() {
            stay(owner, &uuid, record);
            return Err(error.into());
        }
        if !owner.pause() {
            return Err(error.into());
        }
    }
    while !mutant::is(Mutant::DoneOnce)
        && let Err(error) = owner.set(&uuid, Some(&done))
    {
        tracing::error!(volume = %info.name, %error, "cannot remember twice that a volume has moved");
        if !owner.pause() {
            break;
        }
    }
    migration.complete();
    Ok(())
}

/// The volume stays, and the pool of the new place may say otherwise at a later start. Users wait
/// until the records say that this does not count.
fn stay<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) {
    while let Err(error) = keep_place(owner, uuid, record) {
        tracing::error!(uuid, %error, "cannot remember that a volume stays where it is");
        if !owner.pause() {
            return;
        }
    }
}

/// Records that the volume stays.
fn keep_place<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) -> Result<(), O::Error> {
    if mutant::is(Mutant::StayNotRecorded) {
        return Ok(());
    }
    record_end(owner, uuid, &MoveRecord { stays: true, is_due: false, ..record.clone() })
}

/// Records in both sets how a move has ended. Until it is in both, the record is due.
fn record_end<O: Owner>(owner: &O, uuid: &str, end: &MoveRecord) -> Result<(), O::Error> {
    if !mutant::is(if end.is_done { Mutant::DoneOnce } else { Mutant::StayOnce }) {
        owner.set(uuid, Some(&end.due()))?;
    }
    owner.set(uuid, Some(end))
}

/// The move is done: the place that it has moved from is free again, and the record is removed.
///
/// # Errors
/// When the old place is not open or fails; a later start tries again.
pub fn free_old_place<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) -> Result<(), O::Error> {
    remove(owner, &record.from, uuid)?;
    owner.set(uuid, None)
}

/// The move failed or is cancelled: the volume stays where it is. `record` is the present one. A
/// copy that cannot be removed is hidden. A later [`remove_leftovers`] deletes it, or [`resume`] if
/// it has the identity of the volume; so does the one that finds a new place that is not there now.
///
/// # Errors
/// When the copy or the record stays for now.
pub fn give_up<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) -> Result<(), O::Error> {
    let Ok(to) = owner.pool(&record.to) else {
        // A pool that may say that the volume has moved needs a record.
        return match record.is_due || record.stays {
            true => keep_place(owner, uuid, record),
            false => owner.set(uuid, None),
        };
    };
    let removed = remove_all(owner, uuid, record);
    let ended = match removed {
        Ok(()) => owner.set(uuid, None),
        Err(_) if record.has_failed() => Ok(()),
        Err(_) if !record.stays && to.is_settled() && !has_volume(&to, uuid) => owner.set(uuid, None),
        Err(_) => keep_place(owner, uuid, record),
    };
    ended.and(removed)
}

/// Gives up a move that does not run.
///
/// # Errors
/// As [`give_up`]. When the volume may have moved, and the old place does not have it.
pub fn cancel<O: Owner>(owner: &O, uuid: &str, record: &MoveRecord) -> Result<(), O::Error> {
    let has_moved = owner.pool(&record.to).is_ok_and(|to| has_volume(&to, uuid));
    if (record.is_due || has_moved) && !record.stays {
        let from = owner.pool(&record.from)?;
        from.settle()?;
        if !has_volume(&from, uuid) {
            return Err(PoolError::NoVolume(uuid.to_owned()).into());
        }
    }
    give_up(owner, uuid, record)
}
