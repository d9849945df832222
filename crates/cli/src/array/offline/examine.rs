//! `freestone array examine`: the superblocks of members.

use super::members::{Access, open};
use crate::array::args::ExamineArgs;
use crate::array::text;
use crate::error::Error;
use crate::output::Output;
use base::Size;
use hosting::vocabulary;
use raid::admin::open::Candidate;
use raid::admin::report::ArrayReport;
use raid::jobs::Status;
use raid::metadata::store::Copy;
use raid::metadata::{Found, Label, Layout, Spare, Superblock, read_superblock};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// Prints what stands on each member.
///
/// # Errors
/// When one cannot be opened, or is no member: after all have been printed.
pub fn run(args: &ExamineArgs, output: Output) -> Result<(), Error> {
    let mut first_error = None;
    for candidate in open(&args.members, Access::Read)? {
        match look(&candidate) {
            Ok(found) => {
                let mut fields = label_json(&found.label);
                fields["device"] = candidate.name.as_str().into();
                fields["copies"] = copies(&found).map(|(offset, copy)| copy_json(offset, copy)).collect();
                let human =
                    format!("{}: {}{}", candidate.name, label_text(&found.label), copies_text(&found));
                output.event("member", human, fields);
            }
            Err(error) => {
                if args.members.len() > 1 {
                    let fields = json!({ "device": candidate.name, "error": error.to_string() });
                    output.event("no_member", &error, fields);
                }
                first_error.get_or_insert(error);
            }
        }
    }
    first_error.map_or(Ok(()), Err)
}

/// Reads the superblocks of a candidate.
///
/// # Errors
/// When it cannot be opened, or is no member.
pub fn look(candidate: &Candidate) -> Result<Found, Error> {
    let device = match &candidate.device {
        Ok(device) => Arc::clone(device),
        Err(error) => return Err(Error::Runtime(format!("device {error}"))),
    };
    let name = candidate.name.clone();
    reactor::run(async move {
        let channel = device.open_channel()?;
        let found = read_superblock(&name, &*channel, device.limits().capacity).await;
        found.map_err(|error| Error::Runtime(error.to_string()))
    })
}

/// Every copy and where it lies.
fn copies(found: &Found) -> impl Iterator<Item = (u64, &Copy)> {
    let end = match &found.label {
        Label::Member(superblock) => superblock.layout.member_bytes,
        Label::Spare(spare) => spare.member_bytes,
    };
    Layout::superblocks_at(end).into_iter().flatten().zip(&found.copies)
}

fn label_text(label: &Label) -> String {
    match label {
        Label::Member(superblock) => member_text(superblock),
        Label::Spare(spare) => spare_text(spare),
    }
}

fn member_text(superblock: &Superblock) -> String {
    let Superblock { member, slot, layout, table, .. } = superblock;
    let config = &table.config;
    let geometry = &config.geometry;
    let mut text = format!("slot {slot} of array {} ({})", config.name, config.uuid);
    let strip = Size(geometry.strip_bytes.into());
    let stopped = match (table.is_creating, table.is_clean) {
        (true, _) => "being created",
        (false, true) => "clean",
        (false, false) => "running, or not stopped cleanly",
    };
    let rows = [
        ("member", member.to_string()),
        (
            "level",
            format!("{} ({} x {}+{})", config.level.name(), geometry.groups, geometry.data, geometry.parity),
        ),
        ("capacity", format!("{} ({} bytes)", Size(table.capacity()), table.capacity())),
        ("strip", strip.to_string()),
        ("consistency", config.consistency.name().into()),
        ("state", stopped.into()),
        ("generation", format!("{}, epoch {}", table.generation, table.epoch)),
        ("served by", table.owner.clone()),
        ("data", format!("{} bytes at {}", layout.data_bytes, layout.data_offset)),
        ("log", format!("{} lanes of {}", config.lanes, Size(config.lane_bytes.into()))),
    ];
    let changing = ArrayReport::of_table(table)
        .reshape
        .map(|reshape| ("changing", text::reshape(&vocabulary::reshape(&reshape))));
    for (name, value) in rows.into_iter().chain(changing) {
        let _ = write!(text, "\n  {name:<14}{value}");
    }
    for (slot, member) in table.members.iter().enumerate() {
        let state = raid::admin::report::state_of(member);
        let why = if member.is_live() { String::new() } else { format!(" ({})", member.reason.text()) };
        let _ = write!(text, "\n  slot {slot:<9}{state:<12}{}{why}", member.uuid);
    }
    text
}

fn spare_text(spare: &Spare) -> String {
    match spare.array {
        Some(array) => format!("spare of array {} ({array})", spare.array_name),
        None => "spare of any array".into(),
    }
}

fn copies_text(found: &Found) -> String {
    let mut text = String::new();
    for (offset, copy) in copies(found) {
        let state = match copy {
            Copy::Valid(generation) => format!("generation {generation}"),
            Copy::Bad(error) => error.to_string(),
            Copy::Unreadable(error) => format!("cannot be read: {error}"),
        };
        let _ = write!(text, "\n  copy at {offset:<12}{state}");
    }
    text
}

fn label_json(label: &Label) -> Value {
    match label {
        Label::Member(superblock) => {
            let Superblock { member, slot, layout, table, .. } = &**superblock;
            json!({
                "role": "member",
                "member": member,
                "slot": slot,
                "layout": layout,
                "array": vocabulary::array(ArrayReport::of_table(table), &Status::default()),
                "epoch": table.epoch,
                "history": table.history,
                "members": table.members,
                "served_by": table.owner,
                "created_ns": table.created_ns,
                "updated_ns": table.updated_ns,
                "region_bytes": table.config.region_bytes,
                "lanes": table.config.lanes,
                "lane_bytes": table.config.lane_bytes,
            })
        }
        Label::Spare(spare) => json!({
            "role": "spare",
            "member": spare.member,
            "array_uuid": spare.array,
            "array_name": spare.array_name,
            "member_bytes": spare.member_bytes,
            "created_ns": spare.created_ns,
        }),
    }
}

fn copy_json(offset: u64, copy: &Copy) -> Value {
    match copy {
        Copy::Valid(generation) => json!({ "offset": offset, "generation": generation }),
        Copy::Bad(error) => json!({ "offset": offset, "error": error.to_string() }),
        Copy::Unreadable(error) => json!({ "offset": offset, "error": error.to_string() }),
    }
}
