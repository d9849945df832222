//! New members for an array that nobody uses: groups of them, or for another shape.

use super::open::Selection;
use crate::metadata::{
    self, AddError, AddOptions, CreateError, Goal, RestripeError, Table, Target, add_groups,
};
use block::Device;
use std::sync::Arc;

/// Adds devices to an array as new groups, in their order: see [`crate::metadata::group`]. Returns its new table. On a
/// core.
///
/// # Errors
/// See [`AddError`].
pub async fn add_members(
    selection: &Selection,
    devices: &[Arc<dyn Device>],
    options: &AddOptions,
) -> Result<Table, AddError> {
    let own = own(selection, devices)?;
    add_groups(&selection.assembly, &own, devices, options).await
}

/// Begins to change an array's shape, with devices as new members, in their order: see [`crate::metadata::restripe`].
/// Returns its new table. On a core.
///
/// # Errors
/// See [`RestripeError`].
pub async fn begin_restripe(
    selection: &Selection,
    devices: &[Arc<dyn Device>],
    goal: Goal,
    options: &AddOptions,
) -> Result<Table, RestripeError> {
    let own = own(selection, devices)?;
    metadata::begin_restripe(&selection.assembly, &own, devices, goal, options).await
}

/// The members that the array has, none of which is to become another.
fn own(selection: &Selection, devices: &[Arc<dyn Device>]) -> Result<Vec<Target>, CreateError> {
    let mut own = Vec::new();
    for (slot, device) in selection.devices.iter().enumerate() {
        let (Some(device), Some(layout)) = (device, selection.layout(slot)) else { continue };
        if let Some(same) = devices.iter().find(|other| Arc::ptr_eq(device, other)) {
            let why = format!("it is slot {slot} already");
            return Err(CreateError::Unfit { device: same.name().to_owned(), why });
        }
        own.push(Target { slot, channel: device.open_channel()?, layout });
    }
    Ok(own)
}
