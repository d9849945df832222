//! `freestone array assemble`: recovers from a crash and stops the array cleanly.

use super::members::{failed, select};
use crate::array::args::AssembleArgs;
use crate::error::Error;
use crate::output::Output;
use base::Size;
use block::Device;
use raid::admin::open::{Selection, Wanted};
use serde_json::json;
use std::sync::Arc;

/// Assembles an array, so that it is known to be whole and can be served.
///
/// # Errors
/// When it cannot be assembled, with the reason.
pub fn run(args: &AssembleArgs, output: Output) -> Result<(), Error> {
    let wanted =
        Wanted { array: args.members.name.clone(), run: args.run, force: args.force, read_only: false };
    let selection = select(&args.members, &wanted)?;
    super::say_warnings(&selection.warnings, output);
    let config = selection.assembly.table.config.clone();
    let was_clean = selection.assembly.table.is_clean;
    let missing: Vec<usize> =
        (0..selection.devices.len()).filter(|slot| selection.devices[*slot].is_none()).collect();
    recover(selection)?;
    let state = if missing.is_empty() { "all members are present" } else { "degraded" };
    let recovered = if was_clean { "" } else { ", recovered" };
    let capacity = config.geometry.capacity();
    let human = format!(
        "assembled array {} ({}), {}: {state}{recovered}; it can be served",
        config.name,
        config.uuid,
        Size(capacity)
    );
    let fields = json!({
        "name": config.name,
        "uuid": config.uuid,
        "capacity_bytes": capacity,
        "was_clean": was_clean,
        "missing_slots": missing,
    });
    output.event("assembled", human, fields);
    Ok(())
}

/// Starts an array and stops it again.
///
/// # Errors
/// When it cannot be started or stopped.
pub fn recover(selection: Selection) -> Result<(), Error> {
    let name = selection.name().to_owned();
    let array = stack::array::start(selection).map_err(failed)?;
    let stopped = reactor::run(async move {
        // The core that opens the first channel is the one that commits.
        let device: Arc<dyn Device> = array.clone();
        let channel = device.open_channel()?;
        let result = array.stop().await;
        drop(channel);
        Ok::<_, block::DeviceError>(result)
    })?;
    stopped.map_err(|error| Error::Runtime(format!("array {name}: cannot stop: {error}")))
}
