//! The hosts of an array: a daemon, the process that serves it, or its members alone.
//!
//! ```text
//!   `freestone array X` ─► find ─► dyn Host ─┬─ Control       control socket of freestone serve
//!                                            ├─ RunningArray  API of freestoned
//!                                            └─ Members       devices, opened and locked here
//! ```
//!
//! All speak the vocabulary of [`api`]; an outcome names the host that it comes from.

use super::args::GrowArgs;
use crate::error::Error;
use crate::output::Output;
use api::{Array, ArrayAction};
use serde_json::{Value, json};
use stack::kinds::member::is_spec;

/// A host of one array.
pub trait Host {
    /// Reports the array. Members of several arrays of one name are several reports.
    ///
    /// # Errors
    /// When the host does not answer, or has no such array.
    fn show(&mut self) -> Result<Vec<Array>, Error>;

    /// Carries an action out.
    ///
    /// # Errors
    /// With the reason of the host, which changed nothing unless a device failed.
    fn act(&mut self, action: ArrayAction) -> Result<Outcome, Error>;

    /// Adds groups of members, or begins a reshape.
    ///
    /// # Errors
    /// When the array runs, or the new members or the goal do not fit.
    fn extend(&mut self, args: &GrowArgs) -> Result<Outcome, Error>;

    /// Stops the array.
    ///
    /// # Errors
    /// When the array does not run, or its process serves more than the array.
    fn stop(&mut self) -> Result<Outcome, Error>;
}

/// The result of a command, for people and for programs.
pub struct Outcome {
    /// The event in JSON.
    pub event: &'static str,
    /// The line for people.
    pub text: String,
    /// The fields in JSON.
    pub fields: Value,
}

impl Outcome {
    /// An outcome of a running array.
    pub fn running(event: &'static str, array: &str, pid: u32, text: &str) -> Outcome {
        Outcome {
            event,
            text: format!("array {array} (running, process {pid}): {text}"),
            fields: json!({ "array": array, "running": true, "pid": pid, "text": text }),
        }
    }

    /// Prints it.
    pub fn print(self, output: Output) {
        output.event(self.event, self.text, self.fields);
    }
}

/// The event of an action on a running array.
pub const fn event(action: &ArrayAction) -> &'static str {
    match action {
        ArrayAction::Fail { .. } => "failed",
        ArrayAction::Remove { .. } => "removed",
        ArrayAction::Add { .. } => "added",
        ArrayAction::ReAdd { .. } => "re-added",
        ArrayAction::Replace { .. } => "replacing",
        ArrayAction::Grow { .. } => "grown",
        ArrayAction::Scrub { .. } => "scrubbing",
        ArrayAction::Set { .. } => "set",
        ArrayAction::Pause => "paused",
        ArrayAction::Resume => "resumed",
        ArrayAction::Cancel => "cancelled",
    }
}

/// The action with paths as the server finds them, whose working directory is another.
pub fn absolute(action: ArrayAction) -> ArrayAction {
    let path = |device: String| match is_spec(&device) {
        true => device,
        false => std::path::absolute(&device).map_or(device, |path| path.display().to_string()),
    };
    let all = |devices: Vec<String>| devices.into_iter().map(path).collect();
    match action {
        ArrayAction::Add { devices, force, global } => {
            ArrayAction::Add { devices: all(devices), force, global }
        }
        ArrayAction::ReAdd { devices } => ArrayAction::ReAdd { devices: all(devices) },
        ArrayAction::Replace { member, device, force } => {
            ArrayAction::Replace { member, device: path(device), force }
        }
        action => action,
    }
}

/// The refusal of [`Host::extend`] by a host that runs the array.
pub fn cannot_extend(args: &GrowArgs) -> Error {
    let (what, options) = match args.goal() {
        Some(_) => ("a reshape begins only while it is stopped", "--level or --members"),
        None => ("new members join only while it is stopped", "--add"),
    };
    Error::Runtime(format!(
        "array {}: it runs: {what} (stop it, then grow it with {options} and --scan or --member)",
        args.array
    ))
}
