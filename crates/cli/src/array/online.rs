//! Commands for an array that runs. Those that work without one go on in [`super::offline`].

use super::args::{
    AddArgs, GrowArgs, MembersArgs, Place, ReAddArgs, RemoveArgs, ReplaceArgs, RunningArgs, SetArgs, ShowArgs,
};
use super::{offline, text};
use crate::error::Error;
use crate::output::Output;
use graph::kinds::raid::is_spec;
use raid::admin::report::ArrayReport;
use serde_json::{Value, json};
use serving::control::client::{self, Client};
use serving::control::protocol::{Command, Done};
use std::path::Path;

/// Whom to ask, and where to say what came of it.
#[derive(Clone, Copy)]
pub struct Online<'a> {
    /// The control socket; otherwise arrays are looked for where control sockets usually are.
    pub control: Option<&'a Path>,
    /// Where results go.
    pub output: Output,
}

impl Online<'_> {
    /// `freestone array show`.
    pub fn show(&self, args: &ShowArgs) -> Result<(), Error> {
        let output = self.output;
        match (&args.array, self.control) {
            (Some(array), _) => match self.find(array)? {
                Some((_, report)) => print(&report, output),
                None if args.place.is_given() => offline::show::run(args, output)?,
                None => return Err(not_running(array)),
            },
            (None, _) if args.place.is_given() => offline::show::run(args, output)?,
            (None, Some(path)) => {
                client::all_at(path).map_err(Error::Runtime)?.iter().for_each(|report| print(report, output));
            }
            (None, None) => client::running().iter().for_each(|(_, report)| print(report, output)),
        }
        Ok(())
    }

    /// `freestone array stop`.
    pub fn stop(&self, args: &RunningArgs) -> Result<(), Error> {
        let mut client = self.connect(&args.array)?;
        let done = client.ask(Command::Stop).map_err(|error| failed(&args.array, error))?;
        // Stopped is when its sockets are gone: members are free again.
        client.wait_for_end();
        self.say("stopped", &args.array, &done);
        Ok(())
    }

    /// `freestone array fail`.
    pub fn fail(&self, args: &MembersArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(client) => {
                self.ask(client, &args.array, Command::Fail { members: args.members.clone() }, "failed")
            }
            None => offline::edit::fail(args, self.output),
        }
    }

    /// `freestone array remove`.
    pub fn remove(&self, args: &RemoveArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(client) => {
                self.ask(client, &args.array, Command::Remove { members: args.members.clone() }, "removed")
            }
            None => offline::edit::remove(args, self.output),
        }
    }

    /// `freestone array add`.
    pub fn add(&self, args: &AddArgs) -> Result<(), Error> {
        let ReAddArgs { array, devices, place } = &args.devices;
        let running = match args.global {
            // Nothing of the array is needed to make a spare for any.
            true => self.find(array)?.map(|(client, _)| client),
            false => self.find_or_place(array, place)?,
        };
        match running {
            Some(client) => {
                let (force, global) = (args.force, args.global);
                let command = Command::Add { devices: absolute(devices), force, global };
                self.ask(client, array, command, "added")
            }
            None => offline::edit::add(args, self.output),
        }
    }

    /// `freestone array grow`.
    pub fn grow(&self, args: &GrowArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(_) if args.goal().is_some() => Err(Error::Runtime(format!(
                "array {}: it runs: a change of its shape can begin only while it does not (stop it, then grow it with \
                 --level or --members and --scan or --member)",
                args.array
            ))),
            Some(_) if !args.add.is_empty() => Err(Error::Runtime(format!(
                "array {}: it runs: it can be given new members only while it does not (stop it, then grow it with \
                 --add and --scan or --member)",
                args.array
            ))),
            Some(client) => {
                let command = Command::Grow { size: args.size.map(|size| size.0) };
                self.ask(client, &args.array, command, "grown")
            }
            None => match args.goal() {
                Some(goal) => offline::grow::restripe(args, goal, self.output),
                None if !args.add.is_empty() => offline::grow::add(args, self.output),
                None => offline::grow::run(args, self.output),
            },
        }
    }

    /// `freestone array re-add`.
    pub fn re_add(&self, args: &ReAddArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(client) => {
                let command = Command::ReAdd { devices: absolute(&args.devices) };
                self.ask(client, &args.array, command, "re-added")
            }
            None => offline::fill::re_add(args, self.output),
        }
    }

    /// `freestone array replace`.
    pub fn replace(&self, args: &ReplaceArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(client) => {
                let device = absolute(std::slice::from_ref(&args.with)).remove(0);
                let command = Command::Replace { member: args.member.clone(), device, force: args.force };
                self.ask(client, &args.array, command, "replacing")
            }
            None => offline::fill::replace(args, self.output),
        }
    }

    /// `freestone array set`.
    pub fn set(&self, args: &SetArgs) -> Result<(), Error> {
        let change = args.maintenance.change();
        if change.is_empty() {
            return Err(Error::Usage(
                "nothing to set: give --scrub-every, --scrub-window or --read-errors".into(),
            ));
        }
        match self.find_or_place(&args.array, &args.place)? {
            Some(client) => self.ask(client, &args.array, Command::Set(change), "set"),
            None => offline::edit::set(args, self.output),
        }
    }

    /// A command that takes nothing but the array.
    pub fn command(&self, args: &RunningArgs, command: Command, event: &str) -> Result<(), Error> {
        let client = self.connect(&args.array)?;
        self.ask(client, &args.array, command, event)
    }

    fn ask(&self, mut client: Client, array: &str, command: Command, event: &str) -> Result<(), Error> {
        let done = client.ask(command).map_err(|error| failed(array, error))?;
        self.say(event, array, &done);
        Ok(())
    }

    /// The array, if it runs. A server that was named must have it.
    fn find(&self, array: &str) -> Result<Option<(Client, ArrayReport)>, Error> {
        match self.control {
            Some(path) => client::at(path, array).map(Some).map_err(|error| failed(array, error)),
            None => Ok(client::find(array)),
        }
    }

    /// The array, if it runs; `None` when it does not, and members were given to work on.
    fn find_or_place(&self, array: &str, place: &Place) -> Result<Option<Client>, Error> {
        match self.find(array)? {
            Some((client, _)) => Ok(Some(client)),
            None if place.is_given() => Ok(None),
            None => Err(Error::Runtime(format!(
                "array {array}: it does not run: its members are needed (--member or --scan)"
            ))),
        }
    }

    fn connect(&self, array: &str) -> Result<Client, Error> {
        self.find(array)?.map(|(client, _)| client).ok_or_else(|| not_running(array))
    }

    fn say(&self, event: &str, array: &str, done: &Done) {
        let human = format!("array {array} (running, process {}): {}", done.pid, done.text);
        let fields = json!({ "array": array, "running": true, "pid": done.pid, "text": done.text });
        self.output.event(event, human, fields);
    }
}

/// Paths as the server finds them, whose directory is another.
fn absolute(devices: &[String]) -> Vec<String> {
    let absolute = |device: &String| match is_spec(device) {
        true => device.clone(),
        false => std::path::absolute(device).map_or(device.clone(), |path| path.display().to_string()),
    };
    devices.iter().map(absolute).collect()
}

fn not_running(array: &str) -> Error {
    let directory = serving::control::directory();
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
