//! `freestone array`: makes arrays, looks after them, looks into them.
//!
//! ```text
//!   array runs (its control socket answers)  ─► control ─► the freestone serve that runs it
//!   array does not run                       ─► offline ─► members, opened and locked here
//! ```
//!
//! A command says which of the two it did. Nothing here touches a member that a running array has open: opening one
//! for writing claims it.

mod args;
pub mod control;
mod offline;
mod online;
mod text;

pub use args::ArrayArgs;

use crate::error::Error;
use crate::output::Output;
use args::ArrayCommand;
use control::protocol::Command;
use online::Online;

/// Carries a command out.
///
/// # Errors
/// With what could not be done, named by object and value.
pub fn run(args: &ArrayArgs) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    let online = Online { control: args.control.as_deref(), output };
    match &args.command {
        ArrayCommand::Create(args) => offline::create::run(args, output),
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
        ArrayCommand::Pause(args) => online.command(args, Command::Pause, "paused"),
        ArrayCommand::Resume(args) => online.command(args, Command::Resume, "resumed"),
        ArrayCommand::Cancel(args) => online.command(args, Command::Cancel, "cancelled"),
    }
}
