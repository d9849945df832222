//! `freestone array grow` of an array that does not run: it is started in this process, without clients.

use super::edit::of_array;
use super::members::{failed, select};
use crate::array::args::GrowArgs;
use crate::error::Error;
use crate::output::{Output, human_bytes};
use block::Device;
use raid::admin::open::{Selection, Wanted};
use raid::array::Growth;
use serde_json::json;
use std::sync::Arc;

/// Starts an array, has it use what its members have become larger by, and stops it again.
///
/// # Errors
/// When a member is not there (nothing is touched then), or has no room; the message names it.
pub fn run(args: &GrowArgs, output: Output) -> Result<(), Error> {
    let wanted = Wanted { array: Some(args.array.clone()), ..Wanted::default() };
    let selection = select(&args.place.members(&args.array), &wanted)?;
    super::say_warnings(&selection.warnings, output);
    let missing: Vec<usize> =
        (0..selection.devices.len()).filter(|slot| selection.devices[*slot].is_none()).collect();
    if !missing.is_empty() {
        let why = format!("slots {missing:?} are not here: it grows only when all members are");
        return Err(of_array(&args.array, &why));
    }
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
