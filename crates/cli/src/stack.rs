//! From `--device` and `--layer` to open devices.

use crate::error::Error;
use crate::kinds::device::DeviceConfig;
use crate::kinds::layer::{LayerConfig, StatsOf};
use block::Device;
use clap::ArgMatches;
use std::sync::Arc;

/// `--device` and `--layer`.
#[derive(clap::Args, Debug)]
pub struct StackArgs {
    /// A device; several are told apart by id=
    #[arg(long = "device", value_name = "KIND:KEY=VALUE,…", required = true)]
    device: Vec<String>,
    /// A layer over the devices given before it, or over the one that device= names
    #[arg(long = "layer", value_name = "KIND:KEY=VALUE,…")]
    layer: Vec<String>,
}

/// What is to be opened: everything that can be checked without opening has been.
#[derive(Debug)]
pub struct StackPlan {
    /// In the order of the command line; not empty.
    pub devices: Vec<DevicePlan>,
}

/// One device with its layers, the lowest first.
#[derive(Debug)]
pub struct DevicePlan {
    /// Its name on the command line.
    pub id: String,
    /// What it stands on.
    pub config: DeviceConfig,
    /// What stands on it.
    pub layers: Vec<LayerConfig>,
}

/// A device with its layers, open.
pub struct Stack {
    /// Its name on the command line.
    pub id: String,
    /// The topmost device.
    pub device: Arc<dyn Device>,
    /// The stats layers on the way down.
    pub stats: Vec<StatsOf>,
}

impl StackPlan {
    /// The plan of these arguments; `matches` tells in which order they came.
    ///
    /// # Errors
    /// When a specification makes no sense, or names a device that is not there.
    pub fn parse(args: &StackArgs, matches: &ArgMatches) -> Result<StackPlan, Error> {
        let place = |name, i| matches.indices_of(name).and_then(|mut places| places.nth(i)).unwrap_or(i);
        let mut plan = StackPlan { devices: Vec::new() };
        let mut layers = args.layer.iter().enumerate().map(|(i, text)| (place("layer", i), text)).peekable();
        for (i, text) in args.device.iter().enumerate() {
            while let Some((_, layer)) = layers.next_if(|(at, _)| *at < place("device", i)) {
                plan.add_layer(layer)?;
            }
            plan.add_device(text)?;
        }
        layers.try_for_each(|(_, layer)| plan.add_layer(layer))?;
        Ok(plan)
    }

    fn add_device(&mut self, text: &str) -> Result<(), Error> {
        let (config, id) = DeviceConfig::parse(text)?;
        let id = id.unwrap_or_else(|| format!("device{}", self.devices.len()));
        if self.devices.iter().any(|device| device.id == id) {
            return Err(Error::Usage(format!("--device {text}: there is a device {id:?} already")));
        }
        self.devices.push(DevicePlan { id, config, layers: Vec::new() });
        Ok(())
    }

    fn add_layer(&mut self, text: &str) -> Result<(), Error> {
        let (config, target) = LayerConfig::parse(text)?;
        let option = format!("--layer {text}");
        if self.devices.is_empty() {
            return Err(Error::Usage(format!("{option}: no device is given before it")));
        }
        match target {
            Some(id) => {
                let at = self.position(&id).map_err(|fault| Error::Usage(format!("{option}: {fault}")))?;
                self.devices[at].layers.push(config);
            }
            None => self.devices.iter_mut().for_each(|device| device.layers.push(config.clone())),
        }
        Ok(())
    }

    /// The place of the device with this id; an error lists those that there are.
    ///
    /// # Errors
    /// When there is none.
    pub fn position(&self, id: &str) -> Result<usize, String> {
        let known = || self.devices.iter().map(|device| device.id.as_str()).collect::<Vec<_>>().join(", ");
        self.devices
            .iter()
            .position(|device| device.id == id)
            .ok_or_else(|| format!("no device {id:?}; there are {}", known()))
    }

    /// The plan's only device.
    ///
    /// # Errors
    /// When there are several.
    pub fn only(&self) -> Result<&DevicePlan, Error> {
        match &*self.devices {
            [device] => Ok(device),
            devices => Err(Error::Usage(format!("{} devices: this takes one", devices.len()))),
        }
    }
}

impl DevicePlan {
    /// Opens the device and puts its layers on it.
    ///
    /// # Errors
    /// What driver or layer say.
    pub fn open(&self) -> Result<Stack, Error> {
        let mut stack = Stack { id: self.id.clone(), device: self.config.open()?, stats: Vec::new() };
        for layer in &self.layers {
            let (device, stats) = layer.wrap(stack.device)?;
            stack.device = device;
            stack.stats.extend(stats);
        }
        Ok(stack)
    }
}
