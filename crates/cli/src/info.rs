//! `freestone info`: what a device is and can do.

use crate::error::Error;
use crate::output::Output;
use crate::parse::CommonArgs;
use crate::stack_args::StackArgs;
use base::Size;
use block::Limits;
use clap::ArgMatches;
use serde_json::{Value, json};
use stack::Stack;

/// The arguments of `freestone info`.
#[derive(clap::Args, Debug)]
pub struct InfoArgs {
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Opens the devices and prints their limits.
///
/// # Errors
/// When a device cannot be opened.
pub fn run(args: &InfoArgs, matches: &ArgMatches) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    for plan in args.stack.plan(matches)?.into_devices() {
        let stack = plan.open()?;
        let limits = stack.device.limits();
        output.event("device", human(&stack, &limits), json_of(&stack, &limits));
    }
    Ok(())
}

/// A device's limits as JSON.
pub fn json_of(stack: &Stack, limits: &Limits) -> Value {
    json!({
        "id": stack.id,
        "device": stack.device.name(),
        "capacity": limits.capacity,
        "block_size": limits.block_size,
        "physical_block_size": limits.physical_block_size,
        "optimal_io_size": limits.optimal_io_size,
        "memory_alignment": limits.memory_alignment,
        "max_transfer": limits.max_transfer,
        "max_segments": limits.max_segments,
        "max_discard": limits.max_discard,
        "discard_alignment": limits.discard_alignment,
        "max_write_zeroes": limits.max_write_zeroes,
        "read_only": limits.read_only,
        "volatile_cache": limits.volatile_cache,
        "native_fua": limits.native_fua,
        "rotational": limits.rotational,
    })
}

fn human(stack: &Stack, limits: &Limits) -> String {
    let size = |bytes: u64| if bytes == 0 { "none".into() } else { Size(bytes).to_string() };
    let yes = |fact: bool| if fact { "yes" } else { "no" };
    let rows = [
        ("capacity", format!("{} ({} bytes)", Size(limits.capacity), limits.capacity)),
        ("block size", Size(limits.block_size.into()).to_string()),
        ("physical block size", Size(limits.physical_block_size.into()).to_string()),
        ("optimal I/O size", size(limits.optimal_io_size.into())),
        ("memory alignment", Size(limits.memory_alignment.into()).to_string()),
        ("longest transfer", Size(limits.max_transfer.into()).to_string()),
        ("most segments", limits.max_segments.to_string()),
        ("longest discard", size(limits.max_discard)),
        ("discard alignment", Size(limits.discard_alignment.into()).to_string()),
        ("longest write zeroes", size(limits.max_write_zeroes)),
        ("read-only", yes(limits.read_only).into()),
        ("volatile cache", yes(limits.volatile_cache).into()),
        ("native FUA", yes(limits.native_fua).into()),
        ("rotational", yes(limits.rotational).into()),
    ];
    let mut text = format!("{}: {}", stack.id, stack.device.name());
    for (name, value) in rows {
        text.push_str(&format!("\n  {name:<22}{value}"));
    }
    text
}
