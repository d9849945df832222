//! `freestone image snapshot`.

use super::{FileArgs, failed, open_writable, print_json, readable};
use crate::error::Error;
use qcow2::Snapshot;
use qcow2::offline::snapshots;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The arguments of `freestone image snapshot`.
#[derive(clap::Args, Debug)]
pub(super) struct SnapshotArgs {
    #[command(subcommand)]
    pub(super) command: SnapshotCommand,
}

#[derive(clap::Subcommand, Debug)]
pub(super) enum SnapshotCommand {
    /// List the snapshots of an image
    List(FileArgs),
    /// Make a snapshot of the disk of an image
    Create(NameArgs),
    /// Let the disk have the content and size of a snapshot again; the present content is lost
    Apply(NameArgs),
    /// Delete a snapshot
    Delete(NameArgs),
}

/// An image, and a snapshot of it.
#[derive(clap::Args, Debug)]
pub(super) struct NameArgs {
    /// The image, which nothing else may have open
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Name of the snapshot, or its identifier if it exists
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn list(file: &FileArgs, is_json: bool) -> Result<(), Error> {
    let image = file.open()?;
    match is_json {
        true => print_json(&list_as_json(&image.snapshots)),
        false if image.snapshots.is_empty() => {}
        false => println!("{}", list_as_text(&image.snapshots)),
    }
    Ok(())
}

pub(super) fn create(NameArgs { file, name }: &NameArgs) -> Result<(), Error> {
    let (device, name) = (open_writable(file)?, name.clone());
    // A clock before 1970 has no date in an image.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    reactor::run(async move { snapshots::create(&device, &name, now).await }).map_err(failed).map(drop)
}

pub(super) fn apply(NameArgs { file, name }: &NameArgs) -> Result<(), Error> {
    let (device, name) = (open_writable(file)?, name.clone());
    reactor::run(async move { snapshots::apply(&device, &name).await }).map_err(failed)
}

pub(super) fn delete(NameArgs { file, name }: &NameArgs) -> Result<(), Error> {
    let (device, name) = (open_writable(file)?, name.clone());
    reactor::run(async move { snapshots::delete(&device, &name).await }).map_err(failed)
}

/// The list as `qemu-img info` prints it.
pub(super) fn list_as_text(snapshots: &[Snapshot]) -> String {
    let (id, tag, size) = ("ID", "TAG", "VM SIZE");
    let head = format!("{id:<10}{tag:<16}{size:>9}{:>20}{:>13}{:>11}", "DATE", "VM CLOCK", "ICOUNT");
    let lines = snapshots.iter().map(as_text);
    ["Snapshot list:".to_owned(), head].into_iter().chain(lines).collect::<Vec<_>>().join("\n")
}

pub(super) fn list_as_json(snapshots: &[Snapshot]) -> Value {
    snapshots.iter().map(as_json).collect()
}

/// A line of the list of snapshots. The date is UTC.
fn as_text(snapshot: &Snapshot) -> String {
    let date = UNIX_EPOCH + Duration::from_secs(snapshot.seconds.into());
    let date = humantime::format_rfc3339_seconds(date).to_string().replace('T', " ").replace('Z', "");
    let ms = snapshot.vm_clock_ns / 1_000_000;
    let (seconds, ms) = (ms / 1000, ms % 1000);
    let clock = format!("{:02}:{:02}:{:02}.{ms:03}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let count = snapshot.instructions.map_or(String::new(), |count| count.to_string());
    let (id, name, size) = (&snapshot.id, &snapshot.name, readable(snapshot.vm_state_bytes));
    format!("{id:<10}{name:<16}{size:>9}{date:>20}{clock:>13}{count:>11}")
}

fn as_json(snapshot: &Snapshot) -> Value {
    let mut entry = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_bytes,
        "date-sec": snapshot.seconds,
        "date-nsec": snapshot.nanoseconds,
        "vm-clock-sec": snapshot.vm_clock_ns / 1_000_000_000,
        "vm-clock-nsec": snapshot.vm_clock_ns % 1_000_000_000,
    });
    if let Some(count) = snapshot.instructions {
        entry["icount"] = count.into();
    }
    entry
}
