//! Changes of membership in the superblocks of an array that nobody uses.

use super::open::Selection;
use crate::Uuid;
use crate::metadata::{MemberFailures, Reason, Store, Table, Target};
use block::DeviceError;
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
    commit(selection, table, wall_ns).await?;
    Ok(slots)
}

async fn commit(selection: &Selection, table: Table, wall_ns: u64) -> Result<(), EditError> {
    let mut table = table.next(wall_ns);
    table.begin_epoch(current().random_u64());
    selection.assembly.missing.iter().for_each(|slot| table.take_out(*slot, Reason::Absent));
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
fn slot_of(selection: &Selection, name: &str) -> Option<usize> {
    let members = &selection.assembly.table.members;
    if let Ok(slot) = name.parse::<usize>() {
        return (slot < members.len()).then_some(slot);
    }
    if let Some(uuid) = Uuid::parse(name) {
        return members.iter().position(|member| member.uuid == uuid);
    }
    selection.assembly.members.iter().position(|found| found.as_ref().is_some_and(|found| found.name == name))
}
