//! Commands for an array that runs. Those that work without one go on in [`super::offline`].

use super::args::{MembersArgs, RunningArgs, ShowArgs};
use super::control::client::{self, Client};
use super::control::protocol::{Command, Done};
use super::{offline, text};
use crate::error::Error;
use crate::output::Output;
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
