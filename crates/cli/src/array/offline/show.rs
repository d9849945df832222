//! `freestone array show` of an array that does not run: what its members' superblocks say.

use super::examine::look;
use super::members::{Access, failed, open};
use crate::array::args::ShowArgs;
use crate::array::text;
use crate::error::Error;
use crate::output::Output;
use raid::Uuid;
use raid::admin::report::{ArrayReport, SpareReport};
use raid::metadata::Label;
use serde_json::Value;

/// Prints every array that has a member among those that were named or found.
///
/// # Errors
/// When a named device is no member, or the array that was asked for is not among those found.
pub fn run(args: &ShowArgs, output: Output) -> Result<(), Error> {
    let mut arrays: Vec<ArrayReport> = Vec::new();
    let mut spares = Vec::new();
    let named = args.place.member.len();
    let mut names = args.place.member.clone();
    for directory in &args.place.scan {
        let found = graph::array::disks_in(directory).map_err(failed)?;
        names.extend(found.into_iter().map(|path| path.display().to_string()));
    }
    for (i, candidate) in open(&names, Access::Read)?.into_iter().enumerate() {
        match look(&candidate) {
            Ok(found) => take(&mut arrays, &mut spares, found.label, candidate.name),
            Err(error) if i < named => return Err(error),
            Err(_) => {} // a directory holds other files too
        }
    }
    for (array, spare) in spares {
        for report in arrays.iter_mut().filter(|report| array.is_none_or(|array| array == report.uuid)) {
            report.spares.push(SpareReport { uuid: spare.uuid, device: spare.device.clone() });
        }
    }
    let wanted = |report: &&ArrayReport| match &args.array {
        Some(name) => report.name == *name || Uuid::parse(name) == Some(report.uuid),
        None => true,
    };
    let mut is_found = false;
    for report in arrays.iter().filter(wanted) {
        is_found = true;
        output.event("array", text::array(report), serde_json::to_value(report).unwrap_or(Value::Null));
    }
    match &args.array {
        Some(name) if !is_found => {
            Err(Error::Runtime(format!("array {name}: it does not run, and no member of it was found")))
        }
        _ => Ok(()),
    }
}

/// Adds what a device says to what is known of its array. The newest table counts.
fn take(
    arrays: &mut Vec<ArrayReport>,
    spares: &mut Vec<(Option<Uuid>, SpareReport)>,
    label: Label,
    name: String,
) {
    let superblock = match label {
        Label::Member(superblock) => superblock,
        Label::Spare(spare) => {
            return spares.push((spare.array, SpareReport { uuid: Some(spare.member), device: Some(name) }));
        }
    };
    let fresh = ArrayReport::of_table(&superblock.table);
    let at = arrays.iter().position(|report| report.uuid == fresh.uuid).unwrap_or_else(|| {
        arrays.push(fresh.clone());
        arrays.len() - 1
    });
    if fresh.generation > arrays[at].generation {
        let old = std::mem::replace(&mut arrays[at], fresh);
        for before in old.members.into_iter().filter(|member| member.device.is_some()) {
            let same = arrays[at].members.iter_mut().find(|now| now.uuid == before.uuid);
            same.into_iter().for_each(|now| now.device = before.device.clone());
        }
    }
    let mine = arrays[at].members.iter_mut().find(|member| member.uuid == Some(superblock.member));
    mine.into_iter().for_each(|member| member.device = Some(name.clone()));
}
