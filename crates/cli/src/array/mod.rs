//! `freestone array`: makes arrays, looks after them, looks into them.
//!
//! ```text
//!   a daemon is named (--socket)             ─► daemon  ─► that freestoned, and no other process
//!   array runs (its control socket answers)  ─► control ─► the process that runs it
//!   array is to be made, with a daemon       ─► daemon  ─► freestoned, which runs it
//!   array does not run                       ─► offline ─► members, opened and locked here
//! ```
//!
//! A command says which of the two it did. Nothing here touches a member that a running array has
//! open: opening one for writing claims it.

mod args;
mod offline;
mod online;
mod text;

pub use args::ArrayArgs;

use crate::daemon;
use crate::error::Error;
use crate::output::Output;
use args::ArrayCommand;
use online::Online;
use serving::control::protocol::Command;
use std::path::PathBuf;

/// Carries a command out.
///
/// # Errors
/// With what could not be done, named by object and value.
pub fn run(args: &ArrayArgs) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    let control = args.control.as_deref();
    // A given control socket overrides the daemon that the environment names.
    let daemon = args.socket.as_deref().filter(|_| control.is_none());
    let online = Online { control, daemon, output };
    match &args.command {
        ArrayCommand::Create(create) => match daemon::array::socket(args.socket.as_deref()) {
            Some(socket) => {
                daemon::array::create(&socket, &offline::create::creation(create)?, args.common.json)
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
        ArrayCommand::Show(args) => online.show(args),
        ArrayCommand::Stop(args) => online.stop(args),
        ArrayCommand::Fail(args) => online.fail(args),
        ArrayCommand::Remove(args) => online.remove(args),
        ArrayCommand::Add(args) => online.add(args),
        ArrayCommand::ReAdd(args) => online.re_add(args),
        ArrayCommand::Replace(args) => online.replace(args),
        ArrayCommand::Grow(args) => online.grow(args),
        ArrayCommand::Scrub(args) => {
            online.command(&args.array, Command::Scrub { repair: args.repair }, "scrubbing")
        }
        ArrayCommand::Set(args) => online.set(args),
        ArrayCommand::Pause(args) => online.command(args, Command::Pause, "paused"),
        ArrayCommand::Resume(args) => online.command(args, Command::Resume, "resumed"),
        ArrayCommand::Cancel(args) => online.command(args, Command::Cancel, "cancelled"),
    }
}

/// Where the daemon is that lists and deletes arrays.
fn socket(args: &ArrayArgs) -> PathBuf {
    args.socket.clone().unwrap_or_else(|| api::DEFAULT_SOCKET.into())
}
