//! `freestone pool`: the table of a pool of volumes, checked and repaired.
//!
//! ```text
//!   freestone pool check NAME             ─► the daemon that has the pool open
//!   freestone pool check --device SPEC    ─► the device, which no daemon has open
//! ```

use crate::daemon::pool as online;
use crate::error::Error;
use crate::output::Output;
use crate::parse::CommonArgs;
use crate::stack_args::{self, StackArgs};
use block::Device;
use clap::ArgMatches;
use reactor::{CoreConfig, CoreRef, Cores};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use volume::pool;
use volume::store::{self, Copy};

/// The arguments of `freestone pool`.
#[derive(clap::Args, Debug)]
pub struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
    /// Socket of freestoned
    #[arg(long, global = true, value_name = "PATH", env = api::SOCKET_VARIABLE, default_value = api::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(clap::Subcommand, Debug)]
enum PoolCommand {
    /// Show every copy of the table; exit with 1 if one is damaged
    Check(CheckArgs),
    /// Rewrite damaged copies of the table
    Repair(RepairArgs),
}

/// The place of the pool.
#[derive(clap::Args, Debug)]
struct Place {
    /// The backing array or device of a pool that freestoned has open
    #[arg(value_name = "NAME", required_unless_present = "device", conflicts_with = "device")]
    name: Option<String>,
    /// The backing device of a pool that no daemon has open; may be repeated for layers
    #[arg(long, value_name = "KIND:KEY=VALUE,…")]
    device: Vec<String>,
    /// A layer over the devices given before it
    #[arg(long, value_name = "KIND:KEY=VALUE,…", requires = "device")]
    layer: Vec<String>,
}

#[derive(clap::Args, Debug)]
struct CheckArgs {
    #[command(flatten)]
    place: Place,
}

#[derive(clap::Args, Debug)]
struct RepairArgs {
    #[command(flatten)]
    place: Place,
    /// Make the table with this sequence number the current one; volumes that only later tables
    /// have are lost
    #[arg(long, requires = "force", conflicts_with = "name")]
    sequence: Option<u64>,
    /// Accept the loss of volumes
    #[arg(long, requires = "sequence")]
    force: bool,
}

/// Checks or repairs a pool.
///
/// # Errors
/// When the device cannot be opened, a copy is damaged, or the repair needs `--sequence`.
pub fn run(args: &PoolArgs, matches: &ArgMatches) -> Result<(), Error> {
    let (_, matches) = matches.subcommand().expect("clap asks for a command");
    let output = Output::new(args.common.json);
    match &args.command {
        PoolCommand::Check(CheckArgs { place }) => match &place.name {
            Some(name) => online::check(&args.socket, name, output),
            None => with_device(place, matches, |device, core| check(device, core, output)),
        },
        PoolCommand::Repair(RepairArgs { place, sequence, .. }) => match &place.name {
            Some(name) => online::repair(&args.socket, name, output),
            None => with_device(place, matches, |device, core| match sequence {
                Some(sequence) => choose(device, core, *sequence, output),
                None => repair(device, core, output),
            }),
        },
    }
}

/// Runs `work` with the device of the command line and a core; arrays are started before and
/// stopped afterwards.
fn with_device(
    place: &Place,
    matches: &ArgMatches,
    work: impl FnOnce(&Arc<dyn Device>, &CoreRef) -> Result<(), Error>,
) -> Result<(), Error> {
    let plan = StackArgs::new(place.device.clone(), place.layer.clone()).plan(matches)?;
    let stacks = [stack_args::only(&plan)?.open()?];
    let cores = Cores::start(&[CoreConfig::default()]).map_err(|error| Error::Runtime(error.to_string()))?;
    let core = cores.get(0);
    let kept = hosting::arrays::keep(&stacks, &core)?;
    let done = work(&stacks[0].device, &core);
    let stopped = hosting::arrays::stop(&kept, &core);
    done?;
    Ok(stopped?)
}

fn inspect(device: &Arc<dyn Device>, core: &CoreRef) -> Result<Vec<Copy>, Error> {
    pool::inspect(device, core).map_err(|error| Error::Runtime(error.to_string()))
}

fn check(device: &Arc<dyn Device>, core: &CoreRef, output: Output) -> Result<(), Error> {
    let copies = inspect(device, core)?;
    for copy in &copies {
        let (sequence, volumes) = copy.table().map(|table| (table.sequence, names(table))).unzip();
        let fields = json!({
            "offset": copy.offset,
            "sequence": sequence,
            "volumes": volumes,
            "is_whole": sequence.is_some(),
            "state": copy.to_string(),
        });
        output.event("copy", format!("{}: copy {copy}", device.name()), fields);
    }
    let found =
        store::choose(copies).map_err(|error| Error::Runtime(format!("{}: {error}", device.name())))?;
    match found.is_whole() {
        true => Ok(()),
        false => {
            let damaged = found.damaged().len();
            let text = format!(
                "{}: {damaged} copies of the table are damaged; no volume is lost (freestone pool repair rewrites them)",
                device.name()
            );
            Err(Error::Runtime(text))
        }
    }
}

fn repair(device: &Arc<dyn Device>, core: &CoreRef, output: Output) -> Result<(), Error> {
    let repaired = pool::repair(device, core).map_err(|error| Error::Runtime(error.to_string()))?;
    let text = format!("{}: {repaired} copies of the table rewritten", device.name());
    output.event("repaired", text, json!({ "device": device.name(), "copies": repaired }));
    Ok(())
}

fn choose(device: &Arc<dyn Device>, core: &CoreRef, sequence: u64, output: Output) -> Result<(), Error> {
    let copies = inspect(device, core)?;
    let tables: Vec<_> = copies.iter().filter_map(Copy::table).collect();
    let Some(chosen) = tables.iter().find(|table| table.sequence == sequence) else {
        let there: Vec<String> = tables.iter().map(|table| table.sequence.to_string()).collect();
        let text = format!("{}: no whole copy has sequence {sequence}: {}", device.name(), there.join(", "));
        return Err(Error::Usage(text));
    };
    let kept = names(chosen);
    let lost: Vec<String> =
        tables.iter().flat_map(|table| names(table)).filter(|name| !kept.contains(name)).collect();
    pool::choose(device, core, chosen).map_err(|error| Error::Runtime(error.to_string()))?;
    let text = format!(
        "{}: the table with sequence {sequence} is current: volumes {kept:?}; no more: {lost:?}",
        device.name()
    );
    output.event("chosen", text, json!({ "sequence": sequence, "volumes": kept, "lost": lost }));
    Ok(())
}

fn names(table: &volume::table::Table) -> Vec<String> {
    table.volumes.iter().map(|volume| volume.name.to_string()).collect()
}
