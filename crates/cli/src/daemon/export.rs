//! `freestone export`.

use super::table::{fields, table};
use super::{DaemonArgs, Session, qemu};
use crate::error::Error;
use crate::parse;
use api::{Attach, DataPlane, Export, ExportChange, NewExport};
use base::Size;
use reqwest::Method;
use stack::spec::CpuList;
use std::collections::BTreeMap;

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
    List,
    /// Show an export
    Show {
        /// Its name
        name: String,
        /// Print the command line that attaches it: qemu, libvirt, cloud-hypervisor, nvme,
        /// nbd-client, …
        #[arg(long, value_name = "PROGRAM")]
        attach: Option<String>,
        /// Version of QEMU that the command line is for [default: that of this machine]
        #[arg(long, value_name = "VERSION", requires = "attach", value_parser = parse::parsed::<qemu::Version>)]
        qemu: Option<qemu::Version>,
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
    /// Delete an export and disconnect its clients
    Delete {
        /// Its name
        name: String,
    },
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
}

impl ExportArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let find = |name: &str| session.client.get::<Export>(&["exports", name]);
        match &self.command {
            ExportCommand::List => {
                let exports: Vec<Export> = session.client.get(&["exports"])?;
                session.print(&exports, || list(&exports));
            }
            ExportCommand::Show { name, attach: None, .. } => {
                let export = find(name)?;
                session.print(&export, || show(&export));
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

impl CreateArgs {
    fn new_export(&self) -> Result<NewExport, Error> {
        let option = |text: &String| match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
            _ => Err(Error::Usage(format!("--option {text}: want KEY=VALUE"))),
        };
        Ok(NewExport {
            name: self.name.clone(),
            kind: self.kind.clone(),
            volumes: self.of.clone(),
            options: self.options.iter().map(option).collect::<Result<_, _>>()?,
            read_only: self.read_only,
            cores: self.cores.as_ref().map(|CpuList(cpus)| cpus.clone()).unwrap_or_default(),
            label: self.label.clone(),
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

fn show(export: &Export) -> String {
    let options: Vec<String> = export.options.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let cores: Vec<String> = export.cores.iter().map(usize::to_string).collect();
    let mut rows = vec![
        ("name", export.name.clone()),
        ("kind", export.kind.clone()),
        ("volumes", export.volumes.join(", ")),
        ("options", options.join(" ")),
        ("read-only", if export.read_only { "yes".into() } else { String::new() }),
        ("processors", cores.join(", ")),
        ("label", export.label.clone().unwrap_or_default()),
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
