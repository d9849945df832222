//! `freestone portal`: listeners that exports share.

use super::export::option;
use super::table::{fields, table};
use super::{DaemonArgs, Session};
use crate::error::Error;
use api::{DEFAULT_PORTAL_KIND, NewPortal, Portal};
use client::Method;

/// The arguments of `freestone portal`.
#[derive(clap::Args, Debug)]
pub struct PortalArgs {
    /// The command
    #[command(subcommand)]
    command: PortalCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum PortalCommand {
    /// List the portals of the daemon
    List,
    /// Show a portal
    Show {
        /// Its name
        name: String,
    },
    /// Open a portal; exports use it with --option portal=NAME
    Create {
        /// Its name
        name: String,
        /// Kind of its exports: nvme-tcp or nbd
        #[arg(long, default_value = DEFAULT_PORTAL_KIND)]
        kind: String,
        /// A port to listen at; may be repeated. STATE is the ANA state of NVMe/TCP exports there
        #[arg(long, value_name = "ADDR:PORT[@STATE]", required = true)]
        listen: Vec<String>,
        /// Most connections of each port, one queue each; discovery does not count [default: 4096]
        #[arg(long, value_name = "N")]
        clients: Option<u32>,
        /// An option of its kind; may be repeated. For nbd: default-export, tls, tls-certificates,
        /// tls-psk, tls-verify-peer, address-clients
        #[arg(short, long = "option", value_name = "KEY=VALUE")]
        options: Vec<String>,
    },
    /// Delete a portal that no export uses
    Delete {
        /// Its name
        name: String,
    },
}

impl PortalArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        match &self.command {
            PortalCommand::List => {
                let portals: Vec<Portal> = session.client.get(&["portals"])?;
                session.print(&portals, || list(&portals));
            }
            PortalCommand::Show { name } => {
                let portal: Portal = session.client.get(&["portals", name])?;
                session.print(&portal, || show(&portal));
            }
            PortalCommand::Create { name, kind, listen, clients, options } => {
                let new = NewPortal {
                    name: name.clone(),
                    kind: Some(kind.clone()),
                    listen: listen.clone(),
                    clients: *clients,
                    options: options.iter().map(|text| option(text)).collect::<Result<_, _>>()?,
                };
                let portal = session.client.change::<Portal>(Method::POST, &["portals"], &new)?;
                session.print_change(portal, show);
            }
            PortalCommand::Delete { name } => session.client.delete(&["portals", name], &[])?,
        }
        Ok(())
    }
}

fn list(portals: &[Portal]) -> String {
    let row = |portal: &Portal| {
        let listens = portal.error.clone().unwrap_or_else(|| portal.addresses.join(", "));
        [portal.name.clone(), portal.kind.clone(), portal.exports.len().to_string(), listens]
    };
    table(["NAME", "KIND", "EXPORTS", "WHERE"], &portals.iter().map(row).collect::<Vec<_>>())
}

fn show(portal: &Portal) -> String {
    let connections: Vec<String> = portal.connections.iter().map(u32::to_string).collect();
    let options: Vec<String> = portal.options.iter().map(|(key, value)| format!("{key}={value}")).collect();
    fields(&[
        ("name", portal.name.clone()),
        ("kind", portal.kind.clone()),
        ("listen", portal.listen.join(", ")),
        ("addresses", portal.addresses.join(", ")),
        ("error", portal.error.clone().unwrap_or_default()),
        ("connections", connections.join(", ")),
        ("most clients", portal.clients.to_string()),
        ("options", options.join(" ")),
        ("exports", portal.exports.join(", ")),
        ("in discovery", portal.discovery_clients.to_string()),
    ])
}
