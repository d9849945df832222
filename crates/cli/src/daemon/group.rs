//! `freestone group`: volumes that share limits.

use super::table::table;
use super::{DaemonArgs, QosArgs, Session, limits};
use crate::error::Error;
use api::Group;
use client::Method;

/// The arguments of `freestone group`.
#[derive(clap::Args, Debug)]
pub struct GroupArgs {
    /// The command
    #[command(subcommand)]
    command: GroupCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum GroupCommand {
    /// List the groups of the daemon
    List,
    /// Set the common limits of the volumes of a group; creates the group if it does not exist
    Set {
        /// Its name
        name: String,
        #[command(flatten)]
        qos: QosArgs,
    },
    /// Delete a group without volumes
    Delete {
        /// Its name
        name: String,
    },
}

impl GroupArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        match &self.command {
            GroupCommand::List => {
                let groups: Vec<Group> = session.client.get(&["groups"])?;
                session.print(&groups, || list(&groups));
            }
            GroupCommand::Set { name, qos } => {
                let group = session.client.change::<Group>(Method::PUT, &["groups", name], &qos.qos())?;
                session.print_change(group, |group| list(std::slice::from_ref(group)));
            }
            GroupCommand::Delete { name } => session.client.delete(&["groups", name], &[])?,
        }
        Ok(())
    }
}

fn list(groups: &[Group]) -> String {
    let row = |group: &Group| [group.name.clone(), limits(&group.qos), group.volumes.join(", ")];
    table(["NAME", "LIMITS", "VOLUMES"], &groups.iter().map(row).collect::<Vec<_>>())
}
