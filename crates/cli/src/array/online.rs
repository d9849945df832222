//! Commands for a running array. Commands that also work on a stopped one continue in
//! [`super::offline`].

use super::args::{
    AddArgs, GrowArgs, MembersArgs, Place, ReAddArgs, RemoveArgs, ReplaceArgs, RunningArgs, SetArgs, ShowArgs,
};
use super::{offline, text};
use crate::daemon::running::{self, RunningArray};
use crate::error::Error;
use crate::output::Output;
use api::Array;
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
    /// The socket of the daemon that alone is asked, if one was named.
    pub daemon: Option<&'a Path>,
    /// Where results go.
    pub output: Output,
}

/// An array that runs, and the way to it.
enum Running {
    /// Its control socket.
    Control(Client),
    /// The API of its daemon.
    Daemon(Box<RunningArray>),
}

impl Running {
    fn ask(&mut self, array: &str, command: Command) -> Result<Done, Error> {
        match self {
            Running::Control(client) => client.ask(command).map_err(|error| failed(array, error)),
            Running::Daemon(running) => running.ask(command),
        }
    }
}

impl Online<'_> {
    /// `freestone array show`.
    pub fn show(&self, args: &ShowArgs) -> Result<(), Error> {
        let output = self.output;
        if let Some(socket) = self.daemon {
            return self.show_of(socket, args);
        }
        match (&args.array, self.control) {
            (Some(array), _) => match self.reach(array)? {
                Some((_, report)) => print(&report, output),
                None if args.place.is_given() => offline::show::run(args, output)?,
                None => return Err(self.not_running(array)),
            },
            (None, _) if args.place.is_given() => offline::show::run(args, output)?,
            (None, Some(path)) => {
                client::all_at(path).map_err(Error::Runtime)?.iter().for_each(|report| print(report, output));
            }
            (None, None) => client::running().iter().for_each(|(_, report)| print(report, output)),
        }
        Ok(())
    }

    /// `freestone array show`, of the daemon at `socket`.
    fn show_of(&self, socket: &Path, args: &ShowArgs) -> Result<(), Error> {
        let Some(name) = &args.array else {
            if args.place.is_given() {
                return offline::show::run(args, self.output);
            }
            RunningArray::all(socket)?.iter().for_each(|array| print_of_daemon(array, self.output));
            return Ok(());
        };
        match RunningArray::find(socket, name)? {
            Some(running) => print_of_daemon(running.array(), self.output),
            None if args.place.is_given() => offline::show::run(args, self.output)?,
            None => return Err(self.not_running(name)),
        }
        Ok(())
    }

    /// `freestone array stop`.
    pub fn stop(&self, args: &RunningArgs) -> Result<(), Error> {
        let mut running = self.connect(&args.array)?;
        let done = running.ask(&args.array, Command::Stop)?;
        // Stopped is when its sockets are gone: members are free again.
        if let Running::Control(client) = &mut running {
            client.wait_for_end();
        }
        self.say("stopped", &args.array, &done);
        Ok(())
    }

    /// `freestone array fail`.
    pub fn fail(&self, args: &MembersArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(running) => {
                self.ask(running, &args.array, Command::Fail { members: args.members.clone() }, "failed")
            }
            None => offline::edit::fail(args, self.output),
        }
    }

    /// `freestone array remove`.
    pub fn remove(&self, args: &RemoveArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(running) => {
                self.ask(running, &args.array, Command::Remove { members: args.members.clone() }, "removed")
            }
            None => offline::edit::remove(args, self.output),
        }
    }

    /// `freestone array add`.
    pub fn add(&self, args: &AddArgs) -> Result<(), Error> {
        let ReAddArgs { array, devices, place } = &args.devices;
        let running = match args.global {
            // Nothing of the array is needed to make a spare for any.
            true => self.find(array)?,
            false => self.find_or_place(array, place)?,
        };
        match running {
            Some(running) => {
                let (force, global) = (args.force, args.global);
                let command = Command::Add { devices: absolute(devices), force, global };
                self.ask(running, array, command, "added")
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
            Some(running) => {
                let command = Command::Grow { size: args.size.map(|size| size.0) };
                self.ask(running, &args.array, command, "grown")
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
            Some(running) => {
                let command = Command::ReAdd { devices: absolute(&args.devices) };
                self.ask(running, &args.array, command, "re-added")
            }
            None => offline::fill::re_add(args, self.output),
        }
    }

    /// `freestone array replace`.
    pub fn replace(&self, args: &ReplaceArgs) -> Result<(), Error> {
        match self.find_or_place(&args.array, &args.place)? {
            Some(running) => {
                let device = absolute(std::slice::from_ref(&args.with)).remove(0);
                let command = Command::Replace { member: args.member.clone(), device, force: args.force };
                self.ask(running, &args.array, command, "replacing")
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
            Some(running) => self.ask(running, &args.array, Command::Set(change), "set"),
            None => offline::edit::set(args, self.output),
        }
    }

    /// A command that takes nothing but the array.
    pub fn command(&self, args: &RunningArgs, command: Command, event: &str) -> Result<(), Error> {
        let running = self.connect(&args.array)?;
        self.ask(running, &args.array, command, event)
    }

    fn ask(&self, mut running: Running, array: &str, command: Command, event: &str) -> Result<(), Error> {
        let done = running.ask(array, command)?;
        self.say(event, array, &done);
        Ok(())
    }

    /// The array, if it runs. A server whose control socket was named must have it.
    fn find(&self, array: &str) -> Result<Option<Running>, Error> {
        match self.daemon {
            Some(socket) => {
                Ok(RunningArray::find(socket, array)?.map(|found| Running::Daemon(Box::new(found))))
            }
            None => Ok(self.reach(array)?.map(|(client, _)| Running::Control(client))),
        }
    }

    /// The array over its control socket, if it runs.
    fn reach(&self, array: &str) -> Result<Option<(Client, ArrayReport)>, Error> {
        let found = match self.control {
            Some(path) => client::at(path, array).map(Some),
            None => client::find(array),
        };
        found.map_err(|error| failed(array, error))
    }

    /// The array, if it runs; `None` when it does not, and members were given to work on.
    fn find_or_place(&self, array: &str, place: &Place) -> Result<Option<Running>, Error> {
        match self.find(array)? {
            Some(running) => Ok(Some(running)),
            None if place.is_given() => Ok(None),
            None if self.daemon.is_some() => Err(self.not_running(array)),
            None => Err(Error::Runtime(format!(
                "array {array}: it does not run: its members are needed (--member or --scan)"
            ))),
        }
    }

    fn connect(&self, array: &str) -> Result<Running, Error> {
        self.find(array)?.ok_or_else(|| self.not_running(array))
    }

    fn not_running(&self, array: &str) -> Error {
        match self.daemon {
            Some(socket) => Error::Runtime(format!(
                "array {array}: the daemon at {} has no such array (without --socket and {}, every running array is \
                 searched)",
                socket.display(),
                api::SOCKET_VARIABLE
            )),
            None => not_running(array),
        }
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

/// Prints an array of a daemon; as JSON with the fields of the API.
fn print_of_daemon(array: &Array, output: Output) {
    let human = match running::report(array) {
        Some(report) => text::array(&report),
        None => {
            let why = array.error.as_deref().unwrap_or("it is not open");
            format!("array {} ({}): offline: {why}", array.name, array.uuid)
        }
    };
    output.event("array", human, serde_json::to_value(array).unwrap_or(Value::Null));
}

fn print(report: &ArrayReport, output: Output) {
    output.event("array", text::array(report), serde_json::to_value(report).unwrap_or(Value::Null));
}
