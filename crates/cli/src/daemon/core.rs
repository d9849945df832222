//! `freestone core`: threads that serve.

use super::table::table;
use super::{DaemonArgs, Session};
use crate::error::Error;
use api::{CoreInfo, System};

/// The arguments of `freestone core`.
#[derive(clap::Args, Debug)]
pub struct CoreArgs {
    /// The command
    #[command(subcommand)]
    command: CoreCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum CoreCommand {
    /// List the cores of the daemon and their exports
    List,
}

impl CoreArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let CoreCommand::List = self.command;
        let cores = session.client.get::<System>(&["system"])?.cores;
        session.print(&cores, || list(&cores));
        Ok(())
    }
}

fn list(cores: &[CoreInfo]) -> String {
    let row = |core: &CoreInfo| {
        let cpu = core.cpu.map_or("any".to_owned(), |cpu| cpu.to_string());
        [core.number.to_string(), cpu, core.exports.join(", ")]
    };
    table(["CORE", "PROCESSOR", "EXPORTS"], &cores.iter().map(row).collect::<Vec<_>>())
}
