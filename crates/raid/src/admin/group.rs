//! New members for an array that is not in use: complete groups, or for a reshape.

use super::open::Selection;
use crate::metadata::{
    self, AddError, AddOptions, CreateError, Goal, RestripeError, Table, Target, add_groups,
};
use block::Device;
use std::sync::Arc;

/// Adds devices to an array as new groups, in their order: see [`crate::metadata::group`]. Returns
/// the new table. Must run on a core.
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

/// Begins a reshape of an array, with devices as new members, in their order: see
/// [`crate::metadata::restripe`]. Returns the new table. Must run on a core.
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

/// The members of the array. Refuses new devices that already are members.
fn own(selection: &Selection, devices: &[Arc<dyn Device>]) -> Result<Vec<Target>, CreateError> {
    let mut own = Vec::new();
    for (slot, device) in selection.devices.iter().enumerate() {
        let (Some(device), Some(layout)) = (device, selection.layout(slot)) else { continue };
        if let Some(same) = devices.iter().find(|other| Arc::ptr_eq(device, other)) {
            let why = format!("device is already slot {slot}");
            return Err(CreateError::Unfit { device: same.name().to_owned(), why });
        }
        own.push(Target { slot, channel: device.open_channel()?, layout });
    }
    Ok(own)
}
