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

/// Carries a command out.
///
/// # Errors
/// With what could not be done, named by object and value.
pub fn run(args: &ArrayArgs) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    match &args.command {
        ArrayCommand::Create(args) => offline::create::run(args, output),
        ArrayCommand::Examine(args) => offline::examine::run(args, output),
        ArrayCommand::Assemble(args) => offline::assemble::run(args, output),
        ArrayCommand::Check(args) => offline::check::run(args, output),
        ArrayCommand::Show(args) => online::show(args, output),
        ArrayCommand::Stop(args) => online::stop(args, output),
        ArrayCommand::Fail(args) => online::fail(args, output),
        ArrayCommand::Add(args) => online::add(args, output),
        ArrayCommand::ReAdd(args) => online::re_add(args, output),
        ArrayCommand::Replace(args) => online::replace(args, output),
        ArrayCommand::Scrub(args) => {
            online::command(&args.array, Command::Scrub { repair: args.repair }, "scrubbing", output)
        }
        ArrayCommand::Pause(args) => online::command(args, Command::Pause, "paused", output),
        ArrayCommand::Resume(args) => online::command(args, Command::Resume, "resumed", output),
        ArrayCommand::Cancel(args) => online::command(args, Command::Cancel, "cancelled", output),
    }
}
