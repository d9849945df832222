//! `freestone array create`.

use super::members::{Access, open};
use crate::array::args::CreateArgs;
use crate::array::text;
use crate::error::Error;
use crate::output::{Output, human_bytes};
use block::Device;
use graph::array::wall_ns;
use raid::Level;
use raid::metadata::{CreateError, CreateOptions, Identities, Shape, Table, create_with_spares};
use serde_json::json;
use std::sync::Arc;

/// Makes an array of the members, after it has seen that nothing is lost, or that it may be.
///
/// # Errors
/// When members do not make such an array, hold something, or fail.
pub fn run(args: &CreateArgs, output: Output) -> Result<(), Error> {
    let shape = shape(args)?;
    let failed = |error: CreateError| match error {
        CreateError::Shape(_) => Error::Usage(format!("array {}: {error}", args.name)),
        _ => Error::Runtime(format!("array {}: {error}", args.name)),
    };
    // What makes no sense is said before any device is opened, and before any is found to be too small.
    shape.config(Identities::System.uuid(), args.members.len(), 1 << 40, 512).map_err(failed)?;
    let mut members: Vec<Arc<dyn Device>> = Vec::new();
    for candidate in open(&args.members, Access::Write)? {
        members.push(candidate.device?);
    }
    let mut spares: Vec<Arc<dyn Device>> = Vec::new();
    for candidate in open(&args.spare, Access::Write)? {
        spares.push(candidate.device?);
    }
    let options = CreateOptions {
        shape,
        force: args.force,
        zeroes: true,
        owner: super::host(),
        now_ns: wall_ns(),
        identities: Identities::System,
    };
    let table =
        reactor::run(async move { create_with_spares(&members, &spares, &options).await }).map_err(failed)?;
    announce(&table, args, output);
    Ok(())
}

fn shape(args: &CreateArgs) -> Result<Shape, Error> {
    let level = args.level;
    let refuse = |what: &str, is_given: bool, levels: &[Level]| match is_given && !levels.contains(&level) {
        true => Err(Error::Usage(format!("array {}: level {} takes no --{what}", args.name, level.name()))),
        false => Ok(()),
    };
    let grouped = [Level::Raid10, Level::Raid50, Level::Raid60, Level::Raid70, Level::NPlusM];
    refuse("groups", args.groups.is_some(), &grouped)?;
    refuse("parities", args.parities.is_some(), &[Level::NPlusM])?;
    refuse("copies", args.copies.is_some(), &[Level::Raid10])?;
    let group = args.members.len() / args.groups.unwrap_or(1).max(1);
    let strip = args.strip.map(|size| u32::try_from(size.0)).transpose();
    Ok(Shape {
        groups: args.groups,
        copies: args.copies,
        data: args.parities.map(|parities| group.saturating_sub(parities)),
        parity: args.parities,
        strip_bytes: strip.map_err(|_| Error::Usage("--strip: at most 1M".into()))?,
        consistency: args.consistency,
        member_bytes: args.size.map(|size| size.0),
        ..Shape::new(&args.name, level)
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
        human_bytes(capacity),
        config.consistency.name()
    );
    let fields = json!({
        "name": config.name,
        "uuid": config.uuid,
        "level": config.level.name(),
        "capacity": capacity,
        "strip_bytes": config.geometry.strip_bytes,
        "consistency": config.consistency.name(),
        "is_synced": is_synced,
        "members": args.members,
        "spares": args.spare,
    });
    output.event("created", human, fields);
}
