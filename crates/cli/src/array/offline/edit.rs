//! Changes of membership on the members of an array that does not run.

use super::Members;
use super::members::{Access, open, select};
use crate::array::host::Outcome;
use crate::error::Error;
use block::Device;
use raid::ArrayConfig;
use raid::admin::edit::{Removed, fail_members, remove_members, set_maintenance};
use raid::admin::open::{Selection, Wanted};
use raid::jobs::{fit, label_spare};
use raid::metadata::{Identities, MaintenanceChange, probe};
use serde_json::json;
use stack::array::wall_ns;
use std::sync::Arc;

/// Fails members: the superblocks of the others record the failure.
///
/// # Errors
/// When there is no such member, or the array would not survive without it.
pub fn fail(array: &Members<'_>, members: Vec<String>) -> Result<Outcome, Error> {
    let selection = selected(array)?;
    let slots = reactor::run(async move { fail_members(&selection, &members, wall_ns()).await })
        .map_err(|error| of_array(array.array, &error))?;
    let text: Vec<String> = slots.iter().map(|slot| format!("slot {slot} failed")).collect();
    Ok(Outcome {
        event: "failed",
        text: format!("array {} (not running, its superblocks): {}", array.array, text.join(", ")),
        fields: json!({ "array": array.array, "running": false, "slots": slots }),
    })
}

/// Removes failed members and spares.
///
/// # Errors
/// When there is no such member or spare, or it is in use.
pub fn remove(array: &Members<'_>, members: Vec<String>) -> Result<Outcome, Error> {
    let selection = selected(array)?;
    let removed = reactor::run(async move { remove_members(&selection, &members, wall_ns()).await })
        .map_err(|error| of_array(array.array, &error))?;
    let (mut slots, mut spares, mut text) = (Vec::new(), Vec::new(), Vec::new());
    for removed in removed {
        match removed {
            Removed::Member(slot) => {
                text.push(format!("slot {slot} is removed"));
                slots.push(slot);
            }
            Removed::Spare(name) => {
                text.push(format!("{name} is no spare any more"));
                spares.push(name);
            }
        }
    }
    let text = if text.is_empty() { "no member has failed".into() } else { text.join(", ") };
    Ok(Outcome {
        event: "removed",
        text: format!("array {} (not running, its superblocks): {text}", array.array),
        fields: json!({ "array": array.array, "running": false, "slots": slots, "spares": spares }),
    })
}

/// Sets the scrub schedule and the read-error budget in the superblocks of all members.
///
/// # Errors
/// When a value exceeds its range, or a member is missing.
pub fn set(array: &Members<'_>, change: &MaintenanceChange) -> Result<Outcome, Error> {
    let (selection, change) = (selected(array)?, *change);
    let set = reactor::run(async move { set_maintenance(&selection, &change, wall_ns()).await })
        .map_err(|error| of_array(array.array, &error))?;
    Ok(Outcome {
        event: "set",
        text: format!("array {} (not running, its superblocks): {set}", array.array),
        fields: json!({ "array": array.array, "running": false, "maintenance": set }),
    })
}

/// Makes devices spares of the array, or of every array.
///
/// # Errors
/// When a device does not fit, or holds something; then none has been touched.
pub fn add(array: &Members<'_>, devices: &[String], force: bool, is_global: bool) -> Result<Outcome, Error> {
    let selection = match array.place.is_given() {
        true => Some(selected(array)?),
        false => None, // a global spare: no array is needed
    };
    let config = selection.as_ref().map(|selection| selection.assembly.table.config.clone());
    let is_degraded = selection.as_ref().is_some_and(|selection| selection.assembly.table.is_degraded());
    let opened = devices.iter().map(|name| to_be_spare(name, selection.as_ref(), force, config.as_ref()));
    let opened: Vec<Arc<dyn Device>> = opened.collect::<Result<_, _>>()?;
    let owner = config.filter(|_| !is_global);
    for (name, device) in devices.iter().zip(opened) {
        let owner = owner.clone();
        let uuid = Identities::System.uuid();
        let made = reactor::run(async move { label_spare(&device, uuid, owner.as_ref(), wall_ns()).await });
        made.map_err(|error| Error::Runtime(format!("device {name}: {error}")))?;
    }
    let whose = if is_global { "any array".into() } else { format!("array {}", array.array) };
    let next = if is_degraded { "; the next freestone serve fills the empty slot with it" } else { "" };
    Ok(Outcome {
        event: "added",
        text: format!("spare of {whose} (not running): {}{next}", devices.join(", ")),
        fields: json!({ "array": array.array, "running": false, "global": is_global, "devices": devices }),
    })
}

/// Opens a device that is to be a spare, and sees that it fits and that nothing on it would be
/// missed.
fn to_be_spare(
    name: &str,
    selection: Option<&Selection>,
    force: bool,
    config: Option<&ArrayConfig>,
) -> Result<Arc<dyn Device>, Error> {
    if let Some(selection) = selection
        && selection.found.contains_key(name)
    {
        return Err(Error::Runtime(format!("device {name}: it is the array's already, or a spare")));
    }
    let device = open_unused(name, force)?;
    if let Some(config) = config {
        fit(&device, config).map_err(|error| Error::Runtime(format!("device {error}")))?;
    }
    Ok(device)
}

/// Opens a device that is to be overwritten, and sees that nothing on it would be missed.
///
/// # Errors
/// When it cannot be opened, or holds something and `force` is not given.
pub fn open_unused(name: &str, force: bool) -> Result<Arc<dyn Device>, Error> {
    let device = open(&[name.to_owned()], Access::Write)?.remove(0).device?;
    if force {
        return Ok(device);
    }
    let subject = device.clone();
    let found = reactor::run(async move {
        let channel = subject.open_channel()?;
        Ok::<_, block::DeviceError>(probe(&*channel, &subject.limits()).await)
    })?
    .map_err(|error| Error::Runtime(format!("device {name}: it cannot be read: {error}")))?;
    if found.is_empty() {
        return Ok(device);
    }
    Err(Error::Runtime(format!("device {name} holds {found} (--force overwrites it)")))
}

/// The array's members, claimed.
///
/// # Errors
/// When they do not make an array that can be used.
pub fn selected(array: &Members<'_>) -> Result<Selection, Error> {
    let wanted = Wanted { array: Some(array.array.to_owned()), run: true, ..Wanted::default() };
    let selection = select(&array.place.members(array.array), &wanted)?;
    super::say_warnings(&selection.warnings, array.output);
    Ok(selection)
}

/// An error of an array.
pub fn of_array(array: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Runtime(format!("array {array}: {error}"))
}
