//! `freestone array grow` of an array that does not run. To grow by size it is started in this
//! process, without clients; new members, and another shape, are written into its superblocks.

use super::assemble::recover;
use super::edit::of_array;
use super::members::{Access, failed, open, select};
use crate::array::args::GrowArgs;
use crate::array::text;
use crate::error::Error;
use crate::output::Output;
use block::Device;
use graph::array::wall_ns;
use raid::admin::group::{add_members, begin_restripe};
use raid::admin::open::{Selection, Wanted};
use raid::array::Growth;
use raid::metadata::{AddOptions, Goal, Identities};
use serde_json::json;
use serving::text::human_bytes;
use std::sync::Arc;

/// Starts an array, has it use what its members have become larger by, and stops it again.
///
/// # Errors
/// When a member is not there (nothing is touched then), or has no room; the message names it.
pub fn run(args: &GrowArgs, output: Output) -> Result<(), Error> {
    let selection = whole(args, output)?;
    let Growth { before, after } = grow(&args.array, selection, args.size.map(|size| size.0))?;
    let human = format!(
        "array {} (not running, its members): {} ({after} bytes), {before} before",
        args.array,
        human_bytes(after)
    );
    let fields = json!({ "array": args.array, "running": false, "capacity": after, "before": before });
    output.event("grown", human, fields);
    Ok(())
}

/// Adds new members to an array, as groups of as many as each of its groups has.
///
/// # Errors
/// When a member is not there, or the new ones do not fit or hold something; nothing is touched
/// then.
pub fn add(args: &GrowArgs, output: Output) -> Result<(), Error> {
    let (selection, devices) = with_new(args, output)?;
    let old = selection.assembly.table.config.geometry;
    let options = options(args);
    let table = reactor::run(async move { add_members(&selection, &devices, &options).await })
        .map_err(|error| Error::Runtime(error.to_string()))?;
    let (before, after) = (old.capacity(), table.config.geometry.capacity());
    let human = format!(
        "array {} (not running, its members): level {}, {} ({after} bytes), {before} before",
        args.array,
        text::shape(&table.config),
        human_bytes(after)
    );
    let slots: Vec<usize> = (old.members()..table.members.len()).collect();
    let fields = json!({
        "array": args.array,
        "running": false,
        "level": table.config.level.name(),
        "groups": table.config.geometry.groups,
        "slots": slots,
        "capacity": after,
        "before": before,
    });
    output.event("grown", human, fields);
    Ok(())
}

/// Begins a reshape, which continues while the array is served.
///
/// # Errors
/// When a member is not there, or the goal cannot be reached with what there is; nothing is touched
/// then.
pub fn restripe(args: &GrowArgs, goal: Goal, output: Output) -> Result<(), Error> {
    let (selection, devices) = with_new(args, output)?;
    let options = options(args);
    let old = selection.assembly.table.config.clone();
    let table = reactor::run(async move { begin_restripe(&selection, &devices, goal, &options).await })
        .map_err(|error| Error::Runtime(error.to_string()))?;
    let geometry = &table.config.geometry;
    let (before, after) = (old.geometry.capacity(), geometry.capacity());
    let human = format!(
        "array {} (not running, its members): reshape from level {} to {}: it runs while the array is served; capacity {} \
         ({after} bytes) afterwards, {before} before",
        args.array,
        text::shape(&old),
        text::shape(&table.config),
        human_bytes(after)
    );
    let slots: Vec<usize> = (old.geometry.members()..table.members.len()).collect();
    let fields = json!({
        "array": args.array,
        "running": false,
        "level": table.config.level.name(),
        "data": geometry.data,
        "parity": geometry.parity,
        "slots": slots,
        "capacity": after,
        "before": before,
    });
    output.event("reshaping", human, fields);
    Ok(())
}

fn options(args: &GrowArgs) -> AddOptions {
    AddOptions { force: args.force, now_ns: wall_ns(), identities: Identities::System }
}

/// The array, recovered if it has to be, and its new members.
fn with_new(args: &GrowArgs, output: Output) -> Result<(Selection, Vec<Arc<dyn Device>>), Error> {
    let mut selection = whole(args, output)?;
    let is_changing = selection.assembly.table.reshape.is_some();
    if !selection.assembly.table.is_clean && !is_changing {
        recover(selection)?;
        selection = whole(args, output)?;
    }
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    for name in &args.add {
        devices.push(match selection.found.get(name) {
            Some(device) => device.clone(), // a spare, or left over from an earlier try
            None => open(std::slice::from_ref(name), Access::Write)?.remove(0).device?,
        });
    }
    Ok((selection, devices))
}

/// The array, if all of its members are here.
fn whole(args: &GrowArgs, output: Output) -> Result<Selection, Error> {
    let wanted = Wanted { array: Some(args.array.clone()), ..Wanted::default() };
    let selection = select(&args.place.members(&args.array), &wanted)?;
    super::say_warnings(&selection.warnings, output);
    let missing: Vec<usize> =
        (0..selection.devices.len()).filter(|slot| selection.devices[*slot].is_none()).collect();
    if !missing.is_empty() {
        let why = format!("slots {missing:?} are not here: it grows only when all members are");
        return Err(of_array(&args.array, &why));
    }
    Ok(selection)
}

fn grow(name: &str, selection: Selection, size: Option<u64>) -> Result<Growth, Error> {
    let array = graph::array::start(selection).map_err(failed)?;
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
    stopped.map_err(|error| of_array(name, &format!("it cannot be stopped: {error}")))?;
    Ok(growth)
}
