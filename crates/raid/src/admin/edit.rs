//! Changes of membership in the superblocks of an array that nobody uses.

use super::open::Selection;
use crate::Uuid;
use crate::metadata::{
    Found, Label, Maintenance, MaintenanceChange, MemberFailures, MemberState, Reason, Store, Table, Target,
    zero_superblock,
};
use block::{DeviceError, IoError};
use reactor::current;

/// Why membership cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// No member is meant.
    #[error("member {name}: it is not in the array")]
    Unknown {
        /// What was written.
        name: String,
    },
    /// It is out already.
    #[error("slot {slot}: it is out already")]
    Out {
        /// The slot.
        slot: usize,
    },
    /// Too few members would be left.
    #[error("slot {slot}: the array would not survive without it")]
    Needed {
        /// The slot.
        slot: usize,
    },
    /// It is in use: it holds data that the array counts on, or is being filled.
    #[error("slot {slot}: it is {state}: only members that are out can be removed (fail it first)")]
    InUse {
        /// The slot.
        slot: usize,
        /// What it is.
        state: &'static str,
    },
    /// There is nothing in the slot that could be removed.
    #[error("slot {slot}: it is empty already: {why}")]
    Empty {
        /// The slot.
        slot: usize,
        /// Why.
        why: &'static str,
    },
    /// Members that the array counts on are not here.
    #[error("slots {slots:?}: they are missing, and would keep what was set before")]
    Missing {
        /// Their slots.
        slots: Vec<usize>,
    },
    /// A value that cannot be set.
    #[error("{0}")]
    Value(String),
    /// A spare cannot be written.
    #[error("{device}: its superblock cannot be erased: {error}")]
    Spare {
        /// The device.
        device: String,
        /// What it said.
        error: IoError,
    },
    /// The log must be replayed first.
    #[error("it was not stopped in good order: assemble it first")]
    NotClean,
    /// A member cannot be opened on this core.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Members could not be written.
    #[error(transparent)]
    Members(#[from] MemberFailures),
}

/// Takes members out: durably, on all others. On a core. Members are named by slot, UUID or device; returns their
/// slots.
///
/// # Errors
/// When one is not there, or the array would not survive; then nothing has been changed.
pub async fn fail_members(
    selection: &Selection,
    names: &[String],
    wall_ns: u64,
) -> Result<Vec<usize>, EditError> {
    let mut table = selection.assembly.table.clone();
    if !table.is_clean {
        return Err(EditError::NotClean);
    }
    let mut slots = Vec::new();
    for name in names {
        let slot = slot_of(selection, name).ok_or_else(|| EditError::Unknown { name: name.clone() })?;
        if !table.members[slot].is_in() {
            return Err(EditError::Out { slot });
        }
        table.take_out(slot, Reason::Failed);
        slots.push(slot);
        // Members that are not here count as lost: they cannot be told.
        let mut without = table.clone();
        selection.assembly.missing.iter().for_each(|slot| without.take_out(*slot, Reason::Absent));
        if !without.is_alive() {
            return Err(EditError::Needed { slot });
        }
    }
    commit(selection, table, wall_ns, Change::Members).await?;
    Ok(slots)
}

/// What was removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removed {
    /// A slot's former member. It can still be re-added.
    Member(usize),
    /// A spare: the device is nobody's any more.
    Spare(String),
}

/// Lets former members and spares go. On a core. They are named by slot, UUID or device; `failed` means every member
/// that is out. The array remembers who a former member was, so that it can be re-added; a spare's superblock is
/// erased.
///
/// # Errors
/// When one is not there, or is in use; then nothing has been changed.
pub async fn remove_members(
    selection: &Selection,
    names: &[String],
    wall_ns: u64,
) -> Result<Vec<Removed>, EditError> {
    let mut table = selection.assembly.table.clone();
    if !table.is_clean {
        return Err(EditError::NotClean);
    }
    let mut removed = Vec::new();
    for name in names {
        if name == FAILED {
            for slot in failed_slots(&table) {
                remove(&mut table, slot)?;
                removed.push(Removed::Member(slot));
            }
        } else if let Some(slot) = slot_of(selection, name) {
            remove(&mut table, slot)?;
            removed.push(Removed::Member(slot));
        } else if let Some(spare) = spare_of(selection, name) {
            removed.push(Removed::Spare(spare.name.clone()));
        } else {
            return Err(EditError::Unknown { name: name.clone() });
        }
    }
    if removed.iter().any(|removed| matches!(removed, Removed::Member(_))) {
        commit(selection, table, wall_ns, Change::Members).await?;
    }
    for removed in &removed {
        let Removed::Spare(name) = removed else { continue };
        let Some(device) = selection.found.get(name) else { continue };
        let channel = device.open_channel()?;
        let erased = zero_superblock(&*channel, device.limits().capacity).await;
        erased.map_err(|error| EditError::Spare { device: name.clone(), error })?;
    }
    Ok(removed)
}

/// What people write for every member that is out.
pub const FAILED: &str = "failed";

/// Slots of members that are out and have not been removed.
pub fn failed_slots(table: &Table) -> Vec<usize> {
    (0..table.members.len()).filter(|slot| check_removable(table, *slot).is_ok()).collect()
}

/// Lets a slot's former member go in a table.
///
/// # Errors
/// When it is in use, or there is none.
pub fn remove(table: &mut Table, slot: usize) -> Result<(), EditError> {
    check_removable(table, slot)?;
    table.members[slot].reason = Reason::Removed;
    Ok(())
}

fn check_removable(table: &Table, slot: usize) -> Result<(), EditError> {
    let member = &table.members[slot];
    match (member.state, member.reason) {
        (MemberState::Live, _) => Err(EditError::InUse { slot, state: "live" }),
        (MemberState::Rebuilding { .. }, _) => Err(EditError::InUse { slot, state: "being filled" }),
        (MemberState::Missing { .. }, why @ (Reason::None | Reason::Removed)) => {
            Err(EditError::Empty { slot, why: why.text() })
        }
        (MemberState::Missing { .. }, _) => Ok(()),
    }
}

/// The spare that a person means: by its UUID or its device.
fn spare_of<'a>(selection: &'a Selection, name: &str) -> Option<&'a Found> {
    let uuid = Uuid::parse(name);
    let is_it = |found: &&Found| match &found.label {
        Label::Spare(spare) => found.name == name || Some(spare.member) == uuid,
        Label::Member(_) => false,
    };
    selection.assembly.spares.iter().find(is_it)
}

/// Changes what was chosen about scrubs and read errors, durably, on all members. On a core. Returns what holds now.
///
/// # Errors
/// When a value is out of range, or the array was not stopped cleanly or lacks members; then nothing has been changed.
pub async fn set_maintenance(
    selection: &Selection,
    change: &MaintenanceChange,
    wall_ns: u64,
) -> Result<Maintenance, EditError> {
    let mut table = selection.assembly.table.clone();
    table.maintenance = change.apply(table.maintenance, &table.config).map_err(EditError::Value)?;
    let maintenance = table.maintenance;
    if !table.is_clean {
        return Err(EditError::NotClean);
    }
    if !selection.assembly.missing.is_empty() {
        return Err(EditError::Missing { slots: selection.assembly.missing.clone() });
    }
    commit(selection, table, wall_ns, Change::Maintenance).await?;
    Ok(maintenance)
}

/// A change of a table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Other members are live: members that are not here have failed as well.
    Members,
    /// The same members are live, and all of them are here.
    Maintenance,
}

async fn commit(selection: &Selection, table: Table, wall_ns: u64, change: Change) -> Result<(), EditError> {
    let next = selection.assembly.next_table(wall_ns);
    let mut table =
        Table { generation: next.generation, settled: next.settled, updated_ns: wall_ns, ..table };
    if change == Change::Members {
        table.begin_epoch(current().random_u64());
        selection.assembly.missing.iter().for_each(|slot| table.take_out(*slot, Reason::Absent));
    }
    let store = Store::new(table.members.len());
    let mut targets = Vec::new();
    for (slot, found) in selection.assembly.members.iter().enumerate() {
        let (Some(found), Some(device)) = (found, &selection.devices[slot]) else { continue };
        store.note(slot, found);
        if let (true, Some(layout)) = (table.members[slot].is_in(), selection.layout(slot)) {
            targets.push(Target { slot, channel: device.open_channel()?, layout });
        }
    }
    let results = store.commit(&targets, &table).await;
    let failures: Vec<_> =
        results.into_iter().filter_map(|(slot, result)| Some((slot, result.err()?))).collect();
    if failures.is_empty() { Ok(()) } else { Err(MemberFailures(failures).into()) }
}

/// The slot that a person means: by number, the member's UUID, or its device.
pub fn slot_of(selection: &Selection, name: &str) -> Option<usize> {
    let members = &selection.assembly.table.members;
    if let Ok(slot) = name.parse::<usize>() {
        return (slot < members.len()).then_some(slot);
    }
    if let Some(uuid) = Uuid::parse(name).filter(|uuid| *uuid != Uuid::default()) {
        return members.iter().position(|member| member.uuid == uuid);
    }
    let members = &selection.assembly.members;
    let place = members.iter().position(|found| found.as_ref().is_some_and(|found| found.name == name));
    let returning = || selection.assembly.returning.iter().find(|member| member.found.name == name);
    place.or_else(|| Some(returning()?.slot))
}
