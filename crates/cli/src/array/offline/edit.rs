//! Changes of membership on the members of an array that does not run.

use super::members::select;
use crate::array::args::{Members, MembersArgs};
use crate::error::Error;
use crate::output::Output;
use raid::admin::edit::fail_members;
use raid::admin::open::Wanted;
use serde_json::json;

/// `freestone array fail` of an array that does not run: the others' superblocks say that it is out.
///
/// # Errors
/// When there is no such member, or the array would not survive without it.
pub fn fail(args: &MembersArgs, output: Output) -> Result<(), Error> {
    if args.place.member.is_empty() && args.place.scan.is_empty() {
        return Err(Error::Runtime(format!(
            "array {}: it does not run: its members are needed (--member or --scan)",
            args.array
        )));
    }
    let members = Members {
        members: args.place.member.clone(),
        name: Some(args.array.clone()),
        scan: args.place.scan.clone(),
    };
    let wanted = Wanted { array: Some(args.array.clone()), run: true, force: false };
    let selection = select(&members, &wanted)?;
    super::say_warnings(&selection.warnings, output);
    let names = args.members.clone();
    let now = graph::array::wall_ns();
    let slots = reactor::run(async move { fail_members(&selection, &names, now).await })
        .map_err(|error| Error::Runtime(format!("array {}: {error}", args.array)))?;
    let text: Vec<String> = slots.iter().map(|slot| format!("slot {slot} is out")).collect();
    let human = format!("array {} (not running, its superblocks): {}", args.array, text.join(", "));
    output.event("failed", human, json!({ "array": args.array, "running": false, "slots": slots }));
    Ok(())
}
