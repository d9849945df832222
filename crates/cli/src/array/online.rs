//! Commands for an array that runs. Those that work without one go on in [`super::offline`].

use super::args::{AddArgs, MembersArgs, ReAddArgs, ReplaceArgs, RunningArgs, ShowArgs};
use super::control::client::{self, Client};
use super::control::protocol::{Command, Done};
use super::{offline, text};
use crate::error::Error;
use crate::output::Output;
use graph::kinds::raid::is_spec;
use raid::admin::report::ArrayReport;
use serde_json::{Value, json};

/// `freestone array show`.
pub fn show(args: &ShowArgs, output: Output) -> Result<(), Error> {
    let is_offline = !(args.place.member.is_empty() && args.place.scan.is_empty());
    match &args.array {
        Some(array) => match client::find(array) {
            Some((_, report)) => print(&report, output),
            None if is_offline => offline::show::run(args, output)?,
            None => return Err(not_running(array)),
        },
        None if is_offline => offline::show::run(args, output)?,
        None => client::running().iter().for_each(|(_, report)| print(report, output)),
    }
    Ok(())
}

/// `freestone array stop`.
pub fn stop(args: &RunningArgs, output: Output) -> Result<(), Error> {
    let (mut client, _) = connect(&args.array)?;
    let done = client.ask(Command::Stop).map_err(|error| failed(&args.array, error))?;
    // Stopped is when its sockets are gone: members are free again.
    client.wait_for_end();
    say("stopped", &args.array, &done, output);
    Ok(())
}

/// `freestone array fail`.
pub fn fail(args: &MembersArgs, output: Output) -> Result<(), Error> {
    match client::find(&args.array) {
        Some((client, _)) => {
            ask(client, &args.array, Command::Fail { members: args.members.clone() }, "failed", output)
        }
        None => offline::edit::fail(args, output),
    }
}

/// `freestone array add`.
pub fn add(args: &AddArgs, output: Output) -> Result<(), Error> {
    let array = &args.devices.array;
    let (client, _) = connect(array)?;
    let command = Command::Add { devices: absolute(&args.devices.devices), force: args.force };
    ask(client, array, command, "added", output)
}

/// `freestone array re-add`.
pub fn re_add(args: &ReAddArgs, output: Output) -> Result<(), Error> {
    let (client, _) = connect(&args.array)?;
    ask(client, &args.array, Command::ReAdd { devices: absolute(&args.devices) }, "re-added", output)
}

/// `freestone array replace`.
pub fn replace(args: &ReplaceArgs, output: Output) -> Result<(), Error> {
    let (client, _) = connect(&args.array)?;
    let device = absolute(std::slice::from_ref(&args.with)).remove(0);
    let command = Command::Replace { member: args.member.clone(), device, force: args.force };
    ask(client, &args.array, command, "replacing", output)
}

/// A command that takes nothing but the array.
pub fn command(args: &RunningArgs, command: Command, event: &str, output: Output) -> Result<(), Error> {
    let (client, _) = connect(&args.array)?;
    ask(client, &args.array, command, event, output)
}

/// Paths as the server finds them, whose directory is another.
fn absolute(devices: &[String]) -> Vec<String> {
    let absolute = |device: &String| match is_spec(device) {
        true => device.clone(),
        false => std::path::absolute(device).map_or(device.clone(), |path| path.display().to_string()),
    };
    devices.iter().map(absolute).collect()
}

fn ask(mut client: Client, array: &str, command: Command, event: &str, output: Output) -> Result<(), Error> {
    let done = client.ask(command).map_err(|error| failed(array, error))?;
    say(event, array, &done, output);
    Ok(())
}

fn connect(array: &str) -> Result<(Client, ArrayReport), Error> {
    client::find(array).ok_or_else(|| not_running(array))
}

fn not_running(array: &str) -> Error {
    let directory = super::control::directory();
    Error::Runtime(format!(
        "array {array}: it does not run (no freestone serve answers for it in {})",
        directory.display()
    ))
}

fn failed(array: &str, error: String) -> Error {
    Error::Runtime(format!("array {array}: {error}"))
}

fn print(report: &ArrayReport, output: Output) {
    output.event("array", text::array(report), serde_json::to_value(report).unwrap_or(Value::Null));
}

fn say(event: &str, array: &str, done: &Done, output: Output) {
    let human = format!("array {array} (running, process {}): {}", done.pid, done.text);
    output.event(
        event,
        human,
        json!({ "array": array, "running": true, "pid": done.pid, "text": done.text }),
    );
}
