//! `freestone array create`.

use crate::array::args::CreateArgs;
use crate::array::text;
use crate::error::Error;
use crate::output::Output;
use api::NewArray;
use base::Size;
use hosting::create::{Creation, CreationError};
use hosting::vocabulary::scrub_window;
use raid::metadata::{MaintenanceChange, Table};
use serde_json::json;

/// Makes an array of the members, after it has seen that nothing is lost, or that it may be.
///
/// # Errors
/// When members do not make such an array, hold something, or fail.
pub fn run(args: &CreateArgs, output: Output) -> Result<(), Error> {
    let table = Creation::from(&request(args)?).carry_out().map_err(|error| match error {
        CreationError::Nonsense(..) => Error::Usage(error.to_string()),
        _ => Error::Runtime(error.to_string()),
    })?;
    announce(&table, args, output);
    Ok(())
}

/// The array that the arguments request.
///
/// # Errors
/// When they are invalid.
pub fn request(args: &CreateArgs) -> Result<NewArray, Error> {
    let MaintenanceChange { scrub_period_s, scrub_window: window, read_errors } = args.maintenance.change();
    let strip_bytes = args.strip.map(|size| u32::try_from(size.0)).transpose();
    Ok(NewArray {
        name: args.name.clone(),
        level: args.level,
        members: args.members.clone(),
        spares: args.spare.clone(),
        strip_bytes: strip_bytes.map_err(|_| Error::Usage("--strip: at most 1M".into()))?,
        consistency: args.consistency,
        groups: args.groups,
        parities: args.parities,
        copies: args.copies,
        member_bytes: args.size.map(|size| size.0),
        scrub_period_s,
        scrub_window: window.map(scrub_window),
        read_error_budget: read_errors,
        force: args.force,
    })
}

fn announce(table: &Table, args: &CreateArgs, output: Output) {
    let config = &table.config;
    let shape = text::shape(config);
    let capacity = config.geometry.capacity();
    let is_synced = table.initial_region == 0 || config.geometry.parity == 0;
    let synced = if is_synced { "" } else { "; parity is made as regions are written" };
    let spares = match args.spare.len() {
        0 => String::new(),
        1 => ", 1 spare".into(),
        count => format!(", {count} spares"),
    };
    let human = format!(
        "created array {} ({}): level {shape}, {} ({capacity} bytes), consistency {}{spares}{synced}",
        config.name,
        config.uuid,
        Size(capacity),
        config.consistency.name()
    );
    let fields = json!({
        "name": config.name,
        "uuid": config.uuid,
        "level": config.level.name(),
        "capacity_bytes": capacity,
        "strip_bytes": config.geometry.strip_bytes,
        "consistency": config.consistency.name(),
        "is_synced": is_synced,
        "members": args.members,
        "spares": args.spare,
    });
    output.event("created", human, fields);
}
