//! `--device` and `--layer`.

use crate::error::Error;
use clap::ArgMatches;
use stack::{DevicePlan, StackPlan};

/// `--device` and `--layer`.
#[derive(clap::Args, Debug)]
pub struct StackArgs {
    /// A device; may be repeated, with id= as name
    #[arg(long = "device", value_name = "KIND:KEY=VALUE,…", required = true)]
    device: Vec<String>,
    /// A layer over the devices given before it, or over the one that device= names
    #[arg(long = "layer", value_name = "KIND:KEY=VALUE,…")]
    layer: Vec<String>,
}

impl StackArgs {
    /// With these specifications of devices and layers.
    pub fn new(device: Vec<String>, layer: Vec<String>) -> StackArgs {
        StackArgs { device, layer }
    }

    /// Parses the arguments; `matches` has their order.
    ///
    /// # Errors
    /// When a specification is invalid, or names a device that does not exist.
    pub fn plan(&self, matches: &ArgMatches) -> Result<StackPlan, Error> {
        let place = |name, i| matches.indices_of(name).and_then(|mut places| places.nth(i)).unwrap_or(i);
        let mut plan = StackPlan::default();
        let mut layers = self.layer.iter().enumerate().map(|(i, text)| (place("layer", i), text)).peekable();
        for (i, text) in self.device.iter().enumerate() {
            while let Some((_, layer)) = layers.next_if(|(at, _)| *at < place("device", i)) {
                plan.add_layer(layer)?;
            }
            plan.add_device(text)?;
        }
        for (_, layer) in layers {
            plan.add_layer(layer)?;
        }
        Ok(plan)
    }
}

/// The plan's only device.
///
/// # Errors
/// When there are several.
pub fn only(plan: &StackPlan) -> Result<&DevicePlan, Error> {
    match plan.devices() {
        [device] => Ok(device),
        devices => Err(Error::Usage(format!("{} devices: this takes one", devices.len()))),
    }
}
