//! `freestone export`.

use super::labels::{self, LabelsArgs, RelabelArgs, SelectionArgs};
use super::table::{fields, table};
use super::{DaemonArgs, Session, qemu};
use crate::error::Error;
use crate::output::time;
use crate::parse;
use api::{AnaState, Attach, Client, DataPlane, Export, ExportChange, HostsChange, NewExport, NewHost};
use base::Size;
use client::Method;
use spec::CpuList;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Limit of bytes of a file with one secret.
const MAX_SECRET_BYTES: u64 = 4096;

/// The arguments of `freestone export`.
#[derive(clap::Args, Debug)]
pub struct ExportArgs {
    /// The command
    #[command(subcommand)]
    command: ExportCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum ExportCommand {
    /// List the exports of the daemon
    List {
        #[command(flatten)]
        selection: SelectionArgs,
    },
    /// Show an export
    Show {
        /// Its name
        name: String,
        /// Print the command line that attaches it: qemu, libvirt-disk, cloud-hypervisor, nvme,
        /// nbd-client, …
        #[arg(long, value_name = "PROGRAM")]
        attach: Option<String>,
        /// Version of QEMU that the command line is for [default: that of this machine]
        #[arg(long, value_name = "VERSION", requires = "attach", value_parser = parse::parsed::<qemu::Version>)]
        qemu: Option<qemu::Version>,
    },
    /// List the clients that are connected to an export
    Clients {
        /// Its name
        name: String,
    },
    /// Create an export; the daemon starts it now and at each of its starts
    Create(CreateArgs),
    /// Serve an export from other processors, also while it is in use; NBD and NVMe/TCP connections
    /// move when they reconnect
    Remap {
        /// Its name
        name: String,
        /// Processors, out of those of the daemon [default: all]
        #[arg(long, value_name = "CPUS", value_parser = parse::value::<CpuList>)]
        cores: Option<CpuList>,
    },
    /// Let another server of the rings take over, also while the export is in use; vhost-user-blk
    /// exports only
    DataPlane {
        /// Its name
        name: String,
        /// user: the daemon; kernel: /dev/vhost-blk; auto: the kernel where it can serve the device
        #[arg(value_name = "PLANE", value_parser = parse::data_plane)]
        plane: DataPlane,
    },
    /// Set the ANA state of an NVMe/TCP export over a port, also while it is in use; hosts are
    /// notified
    Ana {
        /// Its name
        name: String,
        /// The port, as configured: ADDR:PORT
        port: String,
        /// optimized, non-optimized, inaccessible, persistent-loss or change
        #[arg(value_name = "STATE", value_parser = parse::ana_state)]
        state: AnaState,
    },
    /// Set and remove labels of an export
    Label(RelabelArgs),
    /// The hosts that may connect to an NVMe/TCP export, also while it is in use
    Host {
        /// The command
        #[command(subcommand)]
        command: HostCommand,
    },
    /// Delete an export and disconnect its clients
    Delete {
        /// Its name
        name: String,
    },
}

/// `freestone export host`.
#[derive(Debug, clap::Subcommand)]
enum HostCommand {
    /// List the hosts that may connect
    List {
        /// The export
        name: String,
    },
    /// Let a host connect, or replace its secrets; the first host of an export that any host may
    /// use ends the access of all others
    Add(HostArgs),
    /// Take the access from a host: when the command has ended, the host has no write in flight and
    /// none follows
    Remove {
        /// The export
        name: String,
        /// The host's NQN
        nqn: String,
    },
}

/// `freestone export host add`.
#[derive(clap::Args, Debug)]
struct HostArgs {
    /// The export
    name: String,
    /// The host's NQN
    nqn: String,
    /// File with the host's secret for authentication (nvme gen-dhchap-key makes one)
    #[arg(long, value_name = "FILE")]
    dhchap_key: Option<PathBuf>,
    /// File with the controller's secret, for hosts that require it to authenticate, too
    #[arg(long, value_name = "FILE", requires = "dhchap_key")]
    dhchap_ctrl_key: Option<PathBuf>,
    /// File with the pre-shared key of TLS (nvme gen-tls-key makes one)
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
}

/// `freestone export create`.
#[derive(clap::Args, Debug)]
struct CreateArgs {
    /// Its name
    name: String,
    /// vhost-user-blk, ublk, vduse, nbd or nvme-tcp
    #[arg(long, value_name = "KIND")]
    kind: String,
    /// The volume, array or device to serve; several become the namespaces of an NVMe subsystem
    #[arg(
        long,
        visible_alias = "volume",
        visible_alias = "array",
        visible_alias = "device",
        value_name = "NAME",
        required = true
    )]
    of: Vec<String>,
    /// An option of the kind, as freestone serve --export takes it: socket=PATH, listen=ADDR:PORT,
    /// queues=N, …
    #[arg(short, long = "option", value_name = "KEY=VALUE")]
    options: Vec<String>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Processors to serve it from, out of those of the daemon
    #[arg(long, value_name = "CPUS", value_parser = parse::value::<CpuList>)]
    cores: Option<CpuList>,
    /// Name of the provisioner token that may delete it
    #[arg(long, value_name = "TOKEN")]
    label: Option<String>,
    #[command(flatten)]
    labels: LabelsArgs,
}

impl ExportArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let find = |name: &str| session.client.get::<Export>(&["exports", name]);
        let clients_of = |name: &str| session.client.get::<Vec<Client>>(&["exports", name, "clients"]);
        match &self.command {
            ExportCommand::List { selection } => {
                let exports: Vec<Export> = session.client.list(&["exports"], &selection.query())?;
                session.print(&exports, || list(&exports));
            }
            ExportCommand::Show { name, attach: None, .. } => {
                let export = find(name)?;
                // An older daemon does not list clients.
                let clients = || client_lines(&clients_of(name).unwrap_or_default());
                session.print(&export, || format!("{}{}", show(&export), clients()));
            }
            ExportCommand::Clients { name } => {
                let clients = clients_of(name)?;
                session.print(&clients, || clients_table(&clients));
            }
            ExportCommand::Show { name, attach: Some(program), qemu } => {
                let attach: Attach = session.client.get(&["exports", name, "attach"])?;
                let known = || attach.lines.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                let key = variant(program, &attach, *qemu);
                let line = attach.lines.get(key).ok_or_else(|| {
                    Error::Usage(format!(
                        "export {name}: nothing is known for {program}, but for {}",
                        known()
                    ))
                })?;
                session.print(&BTreeMap::from([(program, line)]), || line.clone());
            }
            ExportCommand::Create(create) => {
                let new = create.new_export()?;
                let export = session.client.change::<Export>(Method::POST, &["exports"], &new)?;
                session.print_change(export, show);
            }
            ExportCommand::Remap { name, cores } => {
                let cores = cores.as_ref().map(|CpuList(cpus)| cpus.clone()).unwrap_or_default();
                change(&session, name, &ExportChange { cores: Some(cores), ..ExportChange::default() })?;
            }
            ExportCommand::DataPlane { name, plane } => {
                let plane = Some(*plane);
                change(&session, name, &ExportChange { data_plane: plane, ..ExportChange::default() })?;
            }
            ExportCommand::Ana { name, port, state } => {
                let ana = Some(BTreeMap::from([(port.clone(), *state)]));
                change(&session, name, &ExportChange { ana, ..ExportChange::default() })?;
            }
            ExportCommand::Label(args) => {
                let labels = Some(args.change()?);
                change(&session, &args.name, &ExportChange { labels, ..ExportChange::default() })?;
            }
            ExportCommand::Host { command } => command.run(&session)?,
            ExportCommand::Delete { name } => {
                let export = find(name)?;
                if let Some(clients) =
                    export.traffic.map(|traffic| traffic.clients).filter(|clients| *clients > 0)
                {
                    session.confirm(&format!("export {name}: {clients} connected clients lose it"))?;
                }
                session.client.delete(&["exports", name], &[])?;
            }
        }
        Ok(())
    }
}

/// Changes an export, and prints it as it is then.
fn change(session: &Session, name: &str, change: &ExportChange) -> Result<(), Error> {
    let export = session.client.change::<Export>(Method::PATCH, &["exports", name], change)?;
    session.print_change(export, show);
    Ok(())
}

impl HostCommand {
    fn run(&self, session: &Session) -> Result<(), Error> {
        let hosts_of =
            |name: &str| session.client.get::<Export>(&["exports", name]).map(|export| export.hosts);
        let edit = |name: &str, hosts: HostsChange| {
            change(session, name, &ExportChange { hosts: Some(hosts), ..ExportChange::default() })
        };
        match self {
            HostCommand::List { name } => {
                let hosts = hosts_of(name)?;
                session.print(&hosts, || match &hosts {
                    None => "any host may connect".into(),
                    Some(hosts) if hosts.is_empty() => "no host may connect".into(),
                    Some(hosts) => hosts.join("\n"),
                });
                Ok(())
            }
            HostCommand::Add(args) => {
                let HostArgs { name, nqn, .. } = args;
                let host = args.new_host(session.client.is_dry())?;
                if hosts_of(name)?.is_none() {
                    session.confirm(&format!(
                        "export {name}: any host may connect so far, and only {nqn} then"
                    ))?;
                }
                edit(name, HostsChange { add: vec![host], remove: Vec::new() })
            }
            HostCommand::Remove { name, nqn } => {
                edit(name, HostsChange { add: Vec::new(), remove: vec![nqn.clone()] })
            }
        }
    }
}

impl HostArgs {
    /// The host with its secrets, which a dry run does not print.
    fn new_host(&self, is_dry: bool) -> Result<NewHost, Error> {
        let secret = |path: &Option<PathBuf>| -> Result<Option<String>, Error> {
            let Some(path) = path else { return Ok(None) };
            let text = secrets::read_text(path, MAX_SECRET_BYTES);
            let text = text.map_err(|error| Error::Usage(error.to_string()))?;
            Ok(Some(if is_dry { "…".into() } else { text.trim().to_owned() }))
        };
        Ok(NewHost {
            nqn: self.nqn.clone(),
            dhchap: secret(&self.dhchap_key)?,
            dhchap_ctrl: secret(&self.dhchap_ctrl_key)?,
            tls_psk: secret(&self.tls_key)?,
        })
    }
}

impl CreateArgs {
    fn new_export(&self) -> Result<NewExport, Error> {
        Ok(NewExport {
            name: self.name.clone(),
            kind: self.kind.clone(),
            volumes: self.of.clone(),
            options: self.options.iter().map(|text| option(text)).collect::<Result<_, _>>()?,
            read_only: self.read_only,
            cores: self.cores.as_ref().map(|CpuList(cpus)| cpus.clone()).unwrap_or_default(),
            label: self.label.clone(),
            labels: self.labels.labels(),
        })
    }
}

/// The name of the line for a program, where that depends on the program's version.
fn variant<'a>(program: &'a str, attach: &Attach, version: Option<qemu::Version>) -> &'a str {
    if program != "qemu" || !attach.lines.contains_key(Attach::OLD_QEMU) {
        return program;
    }
    match version.or_else(qemu::installed) {
        Some(version) if version < qemu::RECONNECT_MS => Attach::OLD_QEMU,
        Some(_) => program,
        None => {
            eprintln!(
                "freestone: no QEMU is found here: the line is for 9.2 and newer; for an older one give --qemu VERSION"
            );
            program
        }
    }
}

fn list(exports: &[Export]) -> String {
    let row = |export: &Export| {
        let clients = export.traffic.as_ref().map(|traffic| traffic.clients.to_string());
        [
            export.name.clone(),
            export.kind.clone(),
            export.volumes.join(", "),
            export.state.name().to_owned(),
            clients.unwrap_or_default(),
            export.error.clone().or_else(|| export.description.clone()).unwrap_or_default(),
        ]
    };
    table(["NAME", "KIND", "OF", "STATE", "CLIENTS", "WHERE"], &exports.iter().map(row).collect::<Vec<_>>())
}

/// An option of an export or a portal.
pub(super) fn option(text: &str) -> Result<(String, String), Error> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(Error::Usage(format!("--option {text}: want KEY=VALUE"))),
    }
}

fn clients_table(clients: &[Client]) -> String {
    let row = |client: &Client| {
        let size = |bytes: Option<u64>| bytes.map(|bytes| Size(bytes).to_string()).unwrap_or_default();
        [
            client.host.clone().unwrap_or_default(),
            client.address.clone().unwrap_or_default(),
            client.queues.map(|queues| queues.to_string()).unwrap_or_default(),
            security(client).into(),
            size(client.read_bytes),
            size(client.written_bytes),
            time(client.since_ns),
        ]
    };
    let heading = ["HOST", "ADDRESS", "QUEUES", "SECURITY", "READ", "WRITTEN", "SINCE"];
    table(heading, &clients.iter().map(row).collect::<Vec<_>>())
}

const fn security(client: &Client) -> &'static str {
    match (client.is_secured, client.is_authenticated) {
        (true, true) => "tls, authenticated",
        (true, false) => "tls",
        (false, true) => "authenticated",
        (false, false) => "none",
    }
}

/// The clients below the facts of their export; nothing without clients.
fn client_lines(clients: &[Client]) -> String {
    if clients.is_empty() { String::new() } else { format!("\n\n{}", clients_table(clients)) }
}

fn show(export: &Export) -> String {
    let options: Vec<String> = export.options.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let states = export.ana.iter().flatten().map(|(port, state)| format!("{port} {state}"));
    let states: Vec<String> = states.collect();
    let cores: Vec<String> = export.cores.iter().map(usize::to_string).collect();
    let mut rows = vec![
        ("name", export.name.clone()),
        ("kind", export.kind.clone()),
        ("volumes", export.volumes.join(", ")),
        ("options", options.join(" ")),
        ("ANA states", states.join(", ")),
        ("read-only", if export.read_only { "yes".into() } else { String::new() }),
        ("processors", cores.join(", ")),
        ("label", export.label.clone().unwrap_or_default()),
        ("labels", labels::line(&export.labels)),
        ("state", export.state.name().into()),
        ("error", export.error.clone().unwrap_or_default()),
        ("where", export.description.clone().unwrap_or_default()),
    ];
    if let Some(traffic) = &export.traffic {
        rows.push(("clients", traffic.clients.to_string()));
        rows.push(("read", format!("{} in {} requests", Size(traffic.read_bytes), traffic.reads)));
        rows.push(("written", format!("{} in {} requests", Size(traffic.written_bytes), traffic.writes)));
        rows.push(("failed", traffic.errors.to_string()));
    }
    fields(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_have_a_row_each_and_none_have_no_lines() {
        let host = Client {
            address: Some("10.0.0.2:5112".into()),
            host: Some("nqn.a".into()),
            controller: Some(1),
            queues: Some(2),
            since_ns: 1_700_000_000_000_000_000,
            is_secured: true,
            is_authenticated: true,
            read_bytes: Some(4096),
            written_bytes: Some(0),
        };
        let vmm = Client {
            address: None,
            host: None,
            queues: None,
            is_secured: false,
            is_authenticated: false,
            read_bytes: None,
            written_bytes: None,
            ..host.clone()
        };
        let lines = client_lines(&[host, vmm]);
        let rows: Vec<Vec<&str>> =
            lines.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
        let since = "2023-11-14T22:13:20Z";
        let first = ["nqn.a", "10.0.0.2:5112", "2", "tls,", "authenticated", "4", "KiB", "0", "B", since];
        assert_eq!(rows[0], first);
        assert_eq!(rows[1], ["none", since]);
        assert_eq!(client_lines(&[]), "");
    }
}
