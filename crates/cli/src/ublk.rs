//! `freestone ublk`: disks of this machine's kernel, in the habits of the program `ublk`.
//!
//! `list`, `features` and `del` ask the kernel and end. `add` and `recover` are `freestone serve` with one export: they
//! serve until a signal ends them.

use crate::args::CommonArgs;
use crate::error::Error;
use crate::output::{Output, human_bytes};
use crate::serve::{self, ServeArgs, ServeOptions};
use crate::stack::StackArgs;
use clap::ArgMatches;
use exports::ublk::{Control, DeviceInfo};
use serde_json::json;

/// The arguments of `freestone ublk`.
#[derive(clap::Args, Debug)]
pub struct UblkArgs {
    /// What to do
    #[command(subcommand)]
    pub command: UblkCommand,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum UblkCommand {
    /// Make a disk and serve it until SIGTERM or SIGINT, which removes it
    Add(AddArgs),
    /// Take a disk over whose server was killed, and serve it until SIGTERM or SIGINT, which removes it
    Recover(RecoverArgs),
    /// Remove disks, whoever serves them; what is cached of them is written first
    Del(DelArgs),
    /// List disks, whoever serves them
    List(ListArgs),
    /// Say what the kernel's driver can do
    Features,
}

/// `freestone ublk add`.
#[derive(clap::Args, Debug)]
pub struct AddArgs {
    #[command(flatten)]
    stack: StackArgs,
    /// The disk's number [default: any that is free]
    #[arg(short = 'n', long = "id", value_name = "N")]
    id: Option<u32>,
    /// Queues
    #[arg(short = 'q', long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// Requests in flight in each queue
    #[arg(short = 'd', long = "queue-size", value_name = "N", default_value_t = 128)]
    queue_size: u16,
    /// More of --export ublk:…, such as readonly,recovery=plain
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
    /// The disk's number; several may be given
    #[arg(short = 'n', long = "id", value_name = "N", required_unless_present = "all")]
    id: Vec<u32>,
    /// Every disk that Freestone made
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

impl UblkCommand {
    /// Whether it serves, rather than ask and end.
    pub fn is_serving(&self) -> bool {
        matches!(self, UblkCommand::Add(_) | UblkCommand::Recover(_))
    }
}

/// Carries a command out.
///
/// # Errors
/// With what could not be done, named by object and value.
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
    let maker = if device.is_ours() { "" } else { ", made by another program" };
    format!(
        "/dev/ublkb{}: {}{server}, {} ({} bytes), {}-byte blocks{mode}, {} × {} requests of up to {}, recovery {}{maker}",
        device.id(),
        device.state(),
        human_bytes(device.capacity()),
        device.capacity(),
        device.block_size(),
        device.queues(),
        device.queue_size(),
        human_bytes(device.max_io().into()),
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
        "ours": device.is_ours(),
    })
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
