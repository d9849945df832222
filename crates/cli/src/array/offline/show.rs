//! `freestone array show` of an array that does not run: what its members' superblocks say.

use super::examine::look;
use super::members::{Access, failed, open};
use crate::array::args::Place;
use crate::error::Error;
use api::Array;
use hosting::vocabulary;
use raid::Uuid;
use raid::admin::report::{ArrayReport, SpareReport};
use raid::jobs::Status;
use raid::metadata::Label;

/// Reports every array, or the one of this name or UUID, that has a member among those that were
/// named or found.
///
/// # Errors
/// When a named device is no member, or the wanted array is not among those found.
pub fn arrays(wanted: Option<&str>, place: &Place) -> Result<Vec<Array>, Error> {
    let mut arrays: Vec<ArrayReport> = Vec::new();
    let mut spares = Vec::new();
    let named = place.member.len();
    let mut names = place.member.clone();
    for directory in &place.scan {
        let found = stack::array::disks_in(directory).map_err(failed)?;
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
    arrays.retain(|report| {
        wanted.is_none_or(|name| report.name == name || Uuid::parse(name) == Some(report.uuid))
    });
    match wanted {
        Some(name) if arrays.is_empty() => {
            Err(Error::Runtime(format!("array {name}: it does not run, and no member of it was found")))
        }
        _ => {
            let array = |report| vocabulary::array(report, &Status::default());
            Ok(arrays.into_iter().map(array).collect())
        }
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
