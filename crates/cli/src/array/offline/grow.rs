//! `freestone array grow` of an array that does not run. To grow by size it is started in this
//! process, without clients; new members, and another shape, are written into its superblocks.

use super::Members;
use super::assemble::recover;
use super::edit::of_array;
use super::members::{Access, failed, open, select};
use crate::array::args::GrowArgs;
use crate::array::host::Outcome;
use crate::array::text;
use crate::error::Error;
use base::Size;
use block::Device;
use raid::admin::group::{add_members, begin_restripe};
use raid::admin::open::{Selection, Wanted};
use raid::array::Growth;
use raid::metadata::{AddOptions, Goal, Identities};
use serde_json::json;
use stack::array::wall_ns;
use std::sync::Arc;

/// Starts an array, has it use what its members have become larger by, and stops it again.
///
/// # Errors
/// When a member is not there (nothing is touched then), or has no room; the message names it.
pub fn run(array: &Members<'_>, member_bytes: Option<u64>) -> Result<Outcome, Error> {
    let selection = whole(array)?;
    let Growth { before, after } = grow(array.array, selection, member_bytes)?;
    let text = format!(
        "array {} (not running, its members): {} ({after} bytes), {before} before",
        array.array,
        Size(after)
    );
    let fields =
        json!({ "array": array.array, "running": false, "capacity_bytes": after, "before_bytes": before });
    Ok(Outcome { event: "grown", text, fields })
}

/// Adds new members to an array, as groups of as many as each of its groups has.
///
/// # Errors
/// When a member is not there, or the new ones do not fit or hold something; nothing is touched
/// then.
pub fn add(array: &Members<'_>, args: &GrowArgs) -> Result<Outcome, Error> {
    let (selection, devices) = with_new(array, &args.add)?;
    let old = selection.assembly.table.config.geometry;
    let options = options(args);
    let table = reactor::run(async move { add_members(&selection, &devices, &options).await })
        .map_err(|error| Error::Runtime(error.to_string()))?;
    let (before, after) = (old.capacity(), table.config.geometry.capacity());
    let text = format!(
        "array {} (not running, its members): level {}, {} ({after} bytes), {before} before",
        array.array,
        text::shape(&table.config),
        Size(after)
    );
    let slots: Vec<usize> = (old.members()..table.members.len()).collect();
    let fields = json!({
        "array": array.array,
        "running": false,
        "level": table.config.level.name(),
        "groups": table.config.geometry.groups,
        "slots": slots,
        "capacity_bytes": after,
        "before_bytes": before,
    });
    Ok(Outcome { event: "grown", text, fields })
}

/// Begins a reshape, which continues while the array is served.
///
/// # Errors
/// When a member is not there, or the goal cannot be reached with what there is; nothing is touched
/// then.
pub fn restripe(array: &Members<'_>, args: &GrowArgs, goal: Goal) -> Result<Outcome, Error> {
    let (selection, devices) = with_new(array, &args.add)?;
    let options = options(args);
    let old = selection.assembly.table.config.clone();
    let table = reactor::run(async move { begin_restripe(&selection, &devices, goal, &options).await })
        .map_err(|error| Error::Runtime(error.to_string()))?;
    let geometry = &table.config.geometry;
    let (before, after) = (old.geometry.capacity(), geometry.capacity());
    let text = format!(
        "array {} (not running, its members): reshape from level {} to {}: it runs while the array is served; capacity {} \
         ({after} bytes) afterwards, {before} before",
        array.array,
        text::shape(&old),
        text::shape(&table.config),
        Size(after)
    );
    let slots: Vec<usize> = (old.geometry.members()..table.members.len()).collect();
    let fields = json!({
        "array": array.array,
        "running": false,
        "level": table.config.level.name(),
        "data": geometry.data,
        "parity": geometry.parity,
        "slots": slots,
        "capacity_bytes": after,
        "before_bytes": before,
    });
    Ok(Outcome { event: "reshaping", text, fields })
}

fn options(args: &GrowArgs) -> AddOptions {
    AddOptions { force: args.force, now_ns: wall_ns(), identities: Identities::System }
}

/// The array, recovered if it has to be, and its new members.
fn with_new(array: &Members<'_>, names: &[String]) -> Result<(Selection, Vec<Arc<dyn Device>>), Error> {
    let mut selection = whole(array)?;
    let is_changing = selection.assembly.table.reshape.is_some();
    if !selection.assembly.table.is_clean && !is_changing {
        recover(selection)?;
        selection = whole(array)?;
    }
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    for name in names {
        devices.push(match selection.found.get(name) {
            Some(device) => device.clone(), // a spare, or left over from an earlier try
            None => open(std::slice::from_ref(name), Access::Write)?.remove(0).device?,
        });
    }
    Ok((selection, devices))
}

/// The array, if all of its members are here.
fn whole(array: &Members<'_>) -> Result<Selection, Error> {
    let wanted = Wanted { array: Some(array.array.to_owned()), ..Wanted::default() };
    let selection = select(&array.place.members(array.array), &wanted)?;
    super::say_warnings(&selection.warnings, array.output);
    let missing: Vec<usize> =
        (0..selection.devices.len()).filter(|slot| selection.devices[*slot].is_none()).collect();
    if !missing.is_empty() {
        let why = format!("slots {missing:?} are not here: it grows only when all members are");
        return Err(of_array(array.array, &why));
    }
    Ok(selection)
}

fn grow(name: &str, selection: Selection, size: Option<u64>) -> Result<Growth, Error> {
    let array = stack::array::start(selection).map_err(failed)?;
    let (grown, stopped) = reactor::run(async move {
        // The core that opens the first channel is the one that commits.
        let device: Arc<dyn Device> = array.clone();
        let channel = device.open_channel()?;
        let grown = array.grow(size).await;
        let stopped = array.stop().await;
        drop(channel);
        Ok::<_, block::DeviceError>((grown, stopped))
    })?;
    let growth = grown.map_err(|error| Error::Runtime(error.to_string()))?;
    stopped.map_err(|error| of_array(name, &format!("cannot stop: {error}")))?;
    Ok(growth)
}
