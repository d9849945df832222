//! `freestone ublk`: disks of this machine's kernel, in the habits of the program `ublk`.
//!
//! `list`, `features` and `del` ask the kernel and end. `add` and `recover` are `freestone serve`
//! with one export: they serve until a signal ends them.

use crate::error::Error;
use crate::output::Output;
use crate::parse::CommonArgs;
use crate::serve::{self, ServeArgs, ServeOptions};
use crate::stack_args::StackArgs;
use base::Size;
use clap::ArgMatches;
use exports_ublk::{Control, DeviceInfo};
use serde_json::json;
use std::path::Path;

/// The arguments of `freestone ublk`.
#[derive(clap::Args, Debug)]
pub struct UblkArgs {
    /// The command
    #[command(subcommand)]
    pub command: UblkCommand,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum UblkCommand {
    /// Create a disk and serve it until SIGTERM or SIGINT, which removes it
    Add(AddArgs),
    /// Take over a disk whose server was killed, and serve it until SIGTERM or SIGINT, which
    /// removes it
    Recover(RecoverArgs),
    /// Remove disks of any server after writing back their caches
    Del(DelArgs),
    /// List disks of all servers
    List(ListArgs),
    /// Print the features of the kernel's driver
    Features,
    /// Give a disk's nodes to the user who created it (for udev rules)
    Chown(ChownArgs),
}

/// `freestone ublk add`.
#[derive(clap::Args, Debug)]
pub struct AddArgs {
    #[command(flatten)]
    stack: StackArgs,
    /// The disk's number [default: any that is free]
    #[arg(short = 'n', long = "id", value_name = "N")]
    id: Option<u32>,
    /// Number of queues
    #[arg(short = 'q', long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// Requests in flight in each queue
    #[arg(short = 'd', long = "queue-size", value_name = "N", default_value_t = 128)]
    queue_size: u16,
    /// Further options of --export ublk:…, such as readonly,recovery=plain
    #[arg(short = 'o', long, value_name = "KEY=VALUE,…")]
    options: Option<String>,
    #[command(flatten)]
    serve: ServeOptions,
}

/// `freestone ublk recover`.
#[derive(clap::Args, Debug)]
pub struct RecoverArgs {
    #[command(flatten)]
    stack: StackArgs,
    /// The disk's number
    #[arg(short = 'n', long = "id", value_name = "N")]
    id: u32,
    #[command(flatten)]
    serve: ServeOptions,
}

/// `freestone ublk del`.
#[derive(clap::Args, Debug)]
pub struct DelArgs {
    /// The disk's number; may be repeated
    #[arg(short = 'n', long = "id", value_name = "N", required_unless_present = "all")]
    id: Vec<u32>,
    /// Every disk that Freestone created
    #[arg(short = 'a', long, conflicts_with = "id")]
    all: bool,
}

/// `freestone ublk list`.
#[derive(clap::Args, Debug)]
pub struct ListArgs {
    /// Only the disk with this number
    #[arg(short = 'n', long = "id", value_name = "N")]
    id: Option<u32>,
}

/// `freestone ublk chown`.
#[derive(clap::Args, Debug)]
pub struct ChownArgs {
    /// A node: `ublkc0`, `ublkb0` or a partition `ublkb0p1`, with /dev before it or without
    node: String,
}

impl UblkCommand {
    /// Whether it serves, rather than ask and end.
    pub fn is_serving(&self) -> bool {
        matches!(self, UblkCommand::Add(_) | UblkCommand::Recover(_))
    }
}

/// Runs the command.
///
/// # Errors
/// When the kernel refuses an operation; names object and value.
pub fn run(args: UblkArgs, matches: &ArgMatches) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    let (_, matches) = matches.subcommand().expect("clap asks for a command");
    match args.command {
        UblkCommand::Add(add) => {
            let id = add.id.map_or_else(|| "auto".into(), |id| id.to_string());
            let more = add.options.map(|options| format!(",{options}")).unwrap_or_default();
            let (queues, queue_size) = (add.queues, add.queue_size);
            let export = format!("ublk:id={id},begin=add,queues={queues},queue-size={queue_size}{more}");
            serve::run(&ServeArgs::new(add.stack, export, add.serve, args.common), matches)
        }
        UblkCommand::Recover(recover) => {
            let export = format!("ublk:id={},begin=recover", recover.id);
            serve::run(&ServeArgs::new(recover.stack, export, recover.serve, args.common), matches)
        }
        UblkCommand::Del(args) => delete(&args, output),
        UblkCommand::List(args) => list(&args, output),
        UblkCommand::Features => features(output),
        UblkCommand::Chown(args) => chown(&args.node, output),
    }
}

fn delete(args: &DelArgs, output: Output) -> Result<(), Error> {
    let mut control = open()?;
    let ids = if args.all {
        let devices = control.devices().map_err(failed)?;
        devices.iter().filter(|device| device.is_ours()).map(DeviceInfo::id).collect()
    } else {
        args.id.clone()
    };
    for id in ids {
        control.delete(id).map_err(failed)?;
        output.event("deleted", format!("deleted /dev/ublkb{id}"), json!({ "id": id }));
    }
    Ok(())
}

fn list(args: &ListArgs, output: Output) -> Result<(), Error> {
    let mut control = open()?;
    let devices = match args.id {
        None => control.devices().map_err(failed)?,
        Some(id) => match control.device(id).map_err(failed)? {
            Some(device) => vec![device],
            None => return Err(Error::Runtime(format!("ublk: there is no device {id}"))),
        },
    };
    for device in devices {
        output.event("device", line(&device), fields(&device));
    }
    Ok(())
}

fn line(device: &DeviceInfo) -> String {
    let server = device.pid().map_or_else(String::new, |pid| format!(", process {pid}"));
    let mode = if device.is_read_only() { ", read-only" } else { "" };
    let owner = if device.is_unprivileged() { format!(", user {}", device.owner().0) } else { String::new() };
    let maker = if device.is_ours() { "" } else { ", made by another program" };
    format!(
        "/dev/ublkb{}: {}{server}, {} ({} bytes), {}-byte blocks{mode}, {} × {} requests of up to {}, recovery {}{owner}{maker}",
        device.id(),
        device.state(),
        Size(device.capacity()),
        device.capacity(),
        device.block_size(),
        device.queues(),
        device.queue_size(),
        Size(device.max_io().into()),
        device.recovery(),
    )
}

fn fields(device: &DeviceInfo) -> serde_json::Value {
    json!({
        "id": device.id(),
        "path": format!("/dev/ublkb{}", device.id()),
        "state": device.state(),
        "pid": device.pid(),
        "capacity": device.capacity(),
        "block_size": device.block_size(),
        "read_only": device.is_read_only(),
        "queues": device.queues(),
        "queue_size": device.queue_size(),
        "max_io": device.max_io(),
        "recovery": device.recovery(),
        "flags": device.flags().names(),
        "owner": { "uid": device.owner().0, "gid": device.owner().1 },
        "unprivileged": device.is_unprivileged(),
        "ours": device.is_ours(),
    })
}

/// Nodes of disks that root made stay as they are.
fn chown(node: &str, output: Output) -> Result<(), Error> {
    let name = node.strip_prefix("/dev/").unwrap_or(node);
    let Some(id) = disk_of(name) else {
        return Err(Error::Usage(format!("{node}: want a node of a ublk disk, such as ublkc0 or ublkb0")));
    };
    let path = Path::new("/dev").join(name);
    let Some(device) = open()?.device(id).map_err(failed)? else {
        return Err(Error::Runtime(format!("ublk: there is no device {id}")));
    };
    if !device.is_unprivileged() {
        return Ok(());
    }
    let (uid, gid) = device.owner();
    std::os::unix::fs::lchown(&path, Some(uid), Some(gid)).map_err(|error| {
        Error::Runtime(format!("{} cannot be given to user {uid}: {error}", path.display()))
    })?;
    let human = format!("{} is of user {uid} and group {gid}", path.display());
    output.event("owner", human, json!({ "path": path, "uid": uid, "gid": gid }));
    Ok(())
}

/// The number of the disk that a node's name belongs to.
fn disk_of(name: &str) -> Option<u32> {
    if let Some(number) = name.strip_prefix("ublkc") {
        return number.parse().ok();
    }
    let rest = name.strip_prefix("ublkb")?;
    let (number, partition) = rest.split_once('p').unwrap_or((rest, "1"));
    partition.parse::<u32>().ok()?;
    number.parse().ok()
}

fn features(output: Output) -> Result<(), Error> {
    let features = open()?.features().map_err(failed)?;
    let names = features.names();
    let human = format!("features {:#x}\n  {}", features.bits(), names.join("\n  "));
    output.event("features", human, json!({ "bits": features.bits(), "features": names }));
    Ok(())
}

fn open() -> Result<Control, Error> {
    Control::open().map_err(failed)
}

fn failed(error: exports::Error) -> Error {
    Error::Runtime(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_belongs_to_one_disk_or_to_none() {
        for (name, disk) in [("ublkc7", Some(7)), ("ublkb0", Some(0)), ("ublkb12p3", Some(12))] {
            assert_eq!(disk_of(name), disk, "{name}");
        }
        for name in
            ["", "sda", "ublkb", "ublkc", "ublkb1p", "ublkbp1", "ublk-control", "ublkc1p1", "ublkb1/../sda"]
        {
            assert_eq!(disk_of(name), None, "{name}");
        }
    }
}
