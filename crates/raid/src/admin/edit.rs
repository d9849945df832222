//! Changes of membership in the superblocks of an array that is not in use.

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
    /// The name matches no member.
    #[error("member {name}: it is not in the array")]
    Unknown {
        /// The given name.
        name: String,
    },
    /// The member has already failed.
    #[error("slot {slot}: the member has already failed")]
    Out {
        /// The slot.
        slot: usize,
    },
    /// Too few members would remain.
    #[error("slot {slot}: the array would not survive without it")]
    Needed {
        /// The slot.
        slot: usize,
    },
    /// The member is in use: it has data that the array needs, or is being rebuilt.
    #[error("slot {slot}: the member is {state}: only failed members can be removed (fail it first)")]
    InUse {
        /// The slot.
        slot: usize,
        /// Its state.
        state: &'static str,
    },
    /// The slot has no member to remove.
    #[error("slot {slot}: no member to remove: {why}")]
    Empty {
        /// The slot.
        slot: usize,
        /// Why.
        why: &'static str,
    },
    /// Members that the array needs are absent.
    #[error("slots {slots:?}: missing members would keep the old settings")]
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
        /// Its error.
        error: IoError,
    },
    /// The log must be replayed first.
    #[error("array not stopped cleanly: assemble it first")]
    NotClean,
    /// A member cannot be opened on this core.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Members could not be written.
    #[error(transparent)]
    Members(#[from] MemberFailures),
}

/// Marks members as failed, durably on all others. Must run on a core. Members are named by slot,
/// UUID or device; returns their slots.
///
/// # Errors
/// If a member is unknown, or the array would not survive; then nothing has changed.
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
        // Absent members count as lost, because they do not get the new table.
        let mut without = table.clone();
        selection.assembly.missing.iter().for_each(|slot| without.take_out(*slot, Reason::Absent));
        if !without.is_alive() {
            return Err(EditError::Needed { slot });
        }
    }
    commit(selection, table, wall_ns, Change::Members).await?;
    Ok(slots)
}

/// A removed member or spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removed {
    /// A slot's former member, which can still be re-added.
    Member(usize),
    /// A spare; its device has no superblock any more.
    Spare(String),
}

/// Removes former members and spares. Must run on a core. They are named by slot, UUID or device;
/// `failed` means every failed member. The array keeps the UUID of a former member, so that it can
/// be re-added; a spare's superblock is erased.
///
/// # Errors
/// If one is unknown or in use; then nothing has changed.
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

/// The name that stands for every failed member.
pub const FAILED: &str = "failed";

/// Slots of failed members that have not been removed.
pub fn failed_slots(table: &Table) -> Vec<usize> {
    (0..table.members.len()).filter(|slot| check_removable(table, *slot).is_ok()).collect()
}

/// Removes a slot's former member from a table.
///
/// # Errors
/// If the member is in use, or the slot has none.
pub fn remove(table: &mut Table, slot: usize) -> Result<(), EditError> {
    check_removable(table, slot)?;
    table.members[slot].reason = Reason::Removed;
    Ok(())
}

fn check_removable(table: &Table, slot: usize) -> Result<(), EditError> {
    let member = &table.members[slot];
    match (member.state, member.reason) {
        (MemberState::Live, _) => Err(EditError::InUse { slot, state: "live" }),
        (MemberState::Rebuilding { .. }, _) => Err(EditError::InUse { slot, state: "being rebuilt" }),
        (MemberState::Missing { .. }, why @ (Reason::None | Reason::Removed)) => {
            Err(EditError::Empty { slot, why: why.text() })
        }
        (MemberState::Missing { .. }, _) => Ok(()),
    }
}

/// The spare with this UUID or device.
fn spare_of<'a>(selection: &'a Selection, name: &str) -> Option<&'a Found> {
    let uuid = Uuid::parse(name);
    let is_it = |found: &&Found| match &found.label {
        Label::Spare(spare) => found.name == name || Some(spare.member) == uuid,
        Label::Member(_) => false,
    };
    selection.assembly.spares.iter().find(is_it)
}

/// Changes the settings for scrubs and read errors, durably on all members, and returns the new
/// ones. Must run on a core.
///
/// # Errors
/// If a value exceeds its range, or the array was not stopped cleanly or lacks members; then
/// nothing has changed.
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
    /// The set of live members changes: absent members have failed as well.
    Members,
    /// The set of live members stays, and all of them are present.
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

/// The slot with this number, member's UUID, or device.
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
