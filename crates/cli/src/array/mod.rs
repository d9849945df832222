//! `freestone array`: creates, changes and shows arrays.
//!
//! ```text
//!   a daemon is named (--socket)             ─► daemon  ─► that freestoned, and no other process
//!   array runs (its control socket answers)  ─► control ─► the process that runs it
//!   array is to be made, with a daemon       ─► daemon  ─► freestoned, which runs it
//!   array does not run                       ─► stopped ─► members, opened and locked here
//! ```
//!
//! Commands on an array are dispatched once, over [`Host`]; each outcome names its host. Nothing
//! here touches a member that a running array has open: opening one for writing claims it.

pub(crate) mod args;
mod control;
pub(crate) mod host;
mod offline;
mod stopped;
mod text;

pub use args::ArrayArgs;

use crate::daemon;
use crate::daemon::running::RunningArray;
use crate::error::Error;
use crate::output::Output;
use api::{Array, ArrayAction};
use args::{ArrayCommand, Place, ReAddArgs, ShowArgs};
use control::Control;
use host::Host;
use hosting::vocabulary;
use offline::Members;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Carries a command out.
///
/// # Errors
/// With what could not be done, named by object and value.
pub fn run(args: &ArrayArgs) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    let control = args.control.as_deref();
    // A given control socket overrides the daemon that the environment names.
    let daemon = args.socket.as_deref().filter(|_| control.is_none());
    let hosts = Hosts { control, daemon, output };
    match &args.command {
        ArrayCommand::Create(create) => match daemon::array::socket(args.socket.as_deref()) {
            Some(socket) => {
                daemon::array::create(&socket, &offline::create::request(create)?, args.common.json)
            }
            None => offline::create::run(create, output),
        },
        ArrayCommand::List => daemon::array::list(&socket(args), args.common.json),
        ArrayCommand::Delete(delete) => {
            daemon::array::delete(&socket(args), &delete.array, delete.keep, delete.yes)
        }
        ArrayCommand::Examine(args) => offline::examine::run(args, output),
        ArrayCommand::Assemble(args) => offline::assemble::run(args, output),
        ArrayCommand::Check(args) => offline::check::run(args, output),
        ArrayCommand::Show(args) => {
            hosts.show(args)?.iter().for_each(|array| print(array, output));
            Ok(())
        }
        ArrayCommand::Stop(args) => {
            hosts.find(&args.array, None, false)?.stop()?.print(output);
            Ok(())
        }
        ArrayCommand::Grow(args) if args.goal().is_some() || !args.add.is_empty() => {
            hosts.find(&args.array, Some(&args.place), false)?.extend(args)?.print(output);
            Ok(())
        }
        ArrayCommand::Fail(args) => {
            hosts.act(&args.array, Some(&args.place), ArrayAction::Fail { members: args.members.clone() })
        }
        ArrayCommand::Remove(args) => {
            hosts.act(&args.array, Some(&args.place), ArrayAction::Remove { members: args.members.clone() })
        }
        ArrayCommand::Add(args) => {
            let ReAddArgs { array, devices, place } = &args.devices;
            let (force, global) = (args.force, args.global);
            hosts.act(array, Some(place), ArrayAction::Add { devices: devices.clone(), force, global })
        }
        ArrayCommand::ReAdd(args) => {
            hosts.act(&args.array, Some(&args.place), ArrayAction::ReAdd { devices: args.devices.clone() })
        }
        ArrayCommand::Replace(args) => {
            let (member, device, force) = (args.member.clone(), args.with.clone(), args.force);
            hosts.act(&args.array, Some(&args.place), ArrayAction::Replace { member, device, force })
        }
        ArrayCommand::Grow(args) => {
            let member_bytes = args.size.map(|size| size.0);
            hosts.act(&args.array, Some(&args.place), ArrayAction::Grow { member_bytes })
        }
        ArrayCommand::Scrub(args) => {
            hosts.act(&args.array.array, None, ArrayAction::Scrub { repair: args.repair })
        }
        ArrayCommand::Set(args) => {
            let change = args.maintenance.change();
            if change.is_empty() {
                return Err(Error::Usage(
                    "nothing to set: give --scrub-every, --scrub-window or --read-errors".into(),
                ));
            }
            hosts.act(&args.array, Some(&args.place), vocabulary::set(change))
        }
        ArrayCommand::Pause(args) => hosts.act(&args.array, None, ArrayAction::Pause),
        ArrayCommand::Resume(args) => hosts.act(&args.array, None, ArrayAction::Resume),
        ArrayCommand::Cancel(args) => hosts.act(&args.array, None, ArrayAction::Cancel),
    }
}

/// The hosts that a command may use.
struct Hosts<'a> {
    /// The control socket; otherwise arrays are searched where control sockets usually are.
    control: Option<&'a Path>,
    /// The socket of the daemon that alone is used, if one was named.
    daemon: Option<&'a Path>,
    /// Receiver of warnings.
    output: Output,
}

impl Hosts<'_> {
    /// Has the array's host act, and prints the outcome. A command that also works on a stopped
    /// array has the `place` of its members.
    fn act(&self, array: &str, place: Option<&Place>, action: ArrayAction) -> Result<(), Error> {
        // Nothing of an array is needed to make a spare for any.
        let is_for_any = matches!(action, ArrayAction::Add { global: true, .. });
        self.find(array, place, is_for_any)?.act(action)?.print(self.output);
        Ok(())
    }

    /// The host that runs the array.
    fn running(&self, array: &str) -> Result<Option<Box<dyn Host>>, Error> {
        Ok(match self.daemon {
            Some(socket) => RunningArray::find(socket, array)?.map(|found| Box::new(found) as Box<dyn Host>),
            None => Control::find(self.control, array)?.map(|found| Box::new(found) as Box<dyn Host>),
        })
    }

    /// The host of the array: the one that runs it, or its members at `place`. A command that
    /// `is_for_any` array needs no members.
    fn find<'a>(
        &self,
        array: &'a str,
        place: Option<&'a Place>,
        is_for_any: bool,
    ) -> Result<Box<dyn Host + 'a>, Error> {
        if let Some(host) = self.running(array)? {
            return Ok(host);
        }
        match place {
            Some(place) if place.is_given() || is_for_any => {
                Ok(Box::new(Members { array, place, output: self.output }))
            }
            Some(_) if self.daemon.is_none() => Err(Error::Runtime(format!(
                "array {array}: it does not run: its members are needed (--member or --scan)"
            ))),
            _ => Err(self.not_running(array)),
        }
    }

    /// The array of this name, or all.
    fn show(&self, args: &ShowArgs) -> Result<Vec<Array>, Error> {
        match (&args.array, self.daemon) {
            (Some(array), _) => match self.running(array)? {
                Some(mut host) => host.show(),
                None if args.place.is_given() => {
                    Members { array, place: &args.place, output: self.output }.show()
                }
                None => Err(self.not_running(array)),
            },
            (None, _) if args.place.is_given() => offline::show::arrays(None, &args.place),
            (None, Some(socket)) => RunningArray::all(socket),
            (None, None) => Control::all(self.control),
        }
    }

    fn not_running(&self, array: &str) -> Error {
        Error::Runtime(match self.daemon {
            Some(socket) => format!(
                "array {array}: the daemon at {} has no such array (without --socket and {}, every running array is \
                 searched)",
                socket.display(),
                api::SOCKET_VARIABLE
            ),
            None => format!(
                "array {array}: it does not run (no freestone serve answers for it in {})",
                hosting::control::directory().display()
            ),
        })
    }
}

fn print(array: &Array, output: Output) {
    output.event("array", text::array(array), serde_json::to_value(array).unwrap_or(Value::Null));
}

/// Where the daemon is that lists and deletes arrays.
fn socket(args: &ArrayArgs) -> PathBuf {
    args.socket.clone().unwrap_or_else(|| api::DEFAULT_SOCKET.into())
}
