//! Changes of membership on the members of an array that does not run.

use super::members::{Access, open, select};
use crate::array::args::{AddArgs, MembersArgs, Place, ReAddArgs, RemoveArgs, SetArgs};
use crate::error::Error;
use crate::output::Output;
use block::Device;
use graph::array::wall_ns;
use raid::admin::edit::{Removed, fail_members, remove_members, set_maintenance};
use raid::admin::open::{Selection, Wanted};
use raid::jobs::{fit, label_spare};
use raid::metadata::probe;
use raid::{ArrayConfig, Uuid};
use serde_json::json;
use std::sync::Arc;

/// `freestone array fail` of a stopped array: the superblocks of the others record the failure.
///
/// # Errors
/// When there is no such member, or the array would not survive without it.
pub fn fail(args: &MembersArgs, output: Output) -> Result<(), Error> {
    let selection = selected(&args.array, &args.place, output)?;
    let names = args.members.clone();
    let slots = reactor::run(async move { fail_members(&selection, &names, wall_ns()).await })
        .map_err(|error| of_array(&args.array, &error))?;
    let text: Vec<String> = slots.iter().map(|slot| format!("slot {slot} is out")).collect();
    let human = format!("array {} (not running, its superblocks): {}", args.array, text.join(", "));
    output.event("failed", human, json!({ "array": args.array, "running": false, "slots": slots }));
    Ok(())
}

/// `freestone array remove` of an array that does not run.
///
/// # Errors
/// When there is no such member or spare, or it is in use.
pub fn remove(args: &RemoveArgs, output: Output) -> Result<(), Error> {
    let selection = selected(&args.array, &args.place, output)?;
    let names = args.members.clone();
    let removed = reactor::run(async move { remove_members(&selection, &names, wall_ns()).await })
        .map_err(|error| of_array(&args.array, &error))?;
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
    let text = if text.is_empty() { "no member is out".into() } else { text.join(", ") };
    let human = format!("array {} (not running, its superblocks): {text}", args.array);
    let fields = json!({ "array": args.array, "running": false, "slots": slots, "spares": spares });
    output.event("removed", human, fields);
    Ok(())
}

/// `freestone array set` of an array that does not run: in the superblocks of all members.
///
/// # Errors
/// When a value exceeds its range, or a member is missing.
pub fn set(args: &SetArgs, output: Output) -> Result<(), Error> {
    let selection = selected(&args.array, &args.place, output)?;
    let change = args.maintenance.change();
    let set = reactor::run(async move { set_maintenance(&selection, &change, wall_ns()).await })
        .map_err(|error| of_array(&args.array, &error))?;
    let human = format!("array {} (not running, its superblocks): {set}", args.array);
    output.event("set", human, json!({ "array": args.array, "running": false, "maintenance": set }));
    Ok(())
}

/// `freestone array add` to a stopped array: the devices become its spares, or spares for every
/// array.
///
/// # Errors
/// When a device does not fit, or holds something; then none has been touched.
pub fn add(args: &AddArgs, output: Output) -> Result<(), Error> {
    let ReAddArgs { array, devices, place } = &args.devices;
    let selection = match place.is_given() {
        true => Some(selected(array, place, output)?),
        false => None, // a global spare: no array is needed
    };
    let config = selection.as_ref().map(|selection| selection.assembly.table.config.clone());
    let is_degraded = selection.as_ref().is_some_and(|selection| selection.assembly.table.is_degraded());
    let opened =
        devices.iter().map(|name| to_be_spare(name, selection.as_ref(), args.force, config.as_ref()));
    let opened: Vec<Arc<dyn Device>> = opened.collect::<Result<_, _>>()?;
    let owner = config.filter(|_| !args.global);
    for (name, device) in devices.iter().zip(opened) {
        let owner = owner.clone();
        let made =
            reactor::run(
                async move { label_spare(&device, Uuid::random(), owner.as_ref(), wall_ns()).await },
            );
        made.map_err(|error| Error::Runtime(format!("device {name}: {error}")))?;
    }
    let whose = if args.global { "any array".into() } else { format!("array {array}") };
    let next = if is_degraded { "; the next freestone serve fills the empty slot with it" } else { "" };
    let human = format!("spare of {whose} (not running): {}{next}", devices.join(", "));
    let fields = json!({ "array": array, "running": false, "global": args.global, "devices": devices });
    output.event("added", human, fields);
    Ok(())
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
pub fn selected(array: &str, place: &Place, output: Output) -> Result<Selection, Error> {
    let wanted = Wanted { array: Some(array.to_owned()), run: true, ..Wanted::default() };
    let selection = select(&place.members(array), &wanted)?;
    super::say_warnings(&selection.warnings, output);
    Ok(selection)
}

/// An error of an array.
pub fn of_array(array: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Runtime(format!("array {array}: {error}"))
}
