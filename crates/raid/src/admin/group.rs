//! Groups of new members for an array that nobody uses.

use super::open::Selection;
use crate::metadata::{AddError, AddOptions, CreateError, Table, Target, add_groups};
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
    let mut own = Vec::new();
    for (slot, device) in selection.devices.iter().enumerate() {
        let (Some(device), Some(layout)) = (device, selection.layout(slot)) else { continue };
        if let Some(same) = devices.iter().find(|other| Arc::ptr_eq(device, other)) {
            let why = format!("it is slot {slot} already");
            return Err(CreateError::Unfit { device: same.name().to_owned(), why }.into());
        }
        own.push(Target { slot, channel: device.open_channel().map_err(CreateError::Open)?, layout });
    }
    add_groups(&selection.assembly, &own, devices, options).await
}
