//! Devices with layers on them: planned, then opened.

use crate::kinds::device::DeviceConfig;
use crate::kinds::layer::LayerConfig;
use crate::spec::{Role, SpecError};
use block::{Device, DeviceError};
use layers::stats::Stats;
use std::sync::Arc;

/// What is to be opened: everything that can be checked without opening has been.
#[derive(Debug, Default)]
pub struct StackPlan {
    /// In the order in which they were added.
    pub devices: Vec<DevicePlan>,
}

/// One device with its layers, the lowest first.
#[derive(Debug)]
pub struct DevicePlan {
    /// Its name among the devices of the plan.
    pub id: String,
    /// What it stands on.
    pub config: DeviceConfig,
    /// What stands on it.
    pub layers: Vec<LayerConfig>,
}

/// A device with its layers, open.
pub struct Stack {
    /// Its name among the devices of the plan.
    pub id: String,
    /// The topmost device.
    pub device: Arc<dyn Device>,
    /// The stats layers on the way down.
    pub stats: Vec<Arc<Stats>>,
}

impl StackPlan {
    /// Adds the device that `text` describes. Without `id=` it is called after its place: `device0`.
    ///
    /// # Errors
    /// When the text makes no sense or the id is taken.
    pub fn add_device(&mut self, text: &str) -> Result<(), SpecError> {
        let (config, id) = DeviceConfig::parse(text)?;
        let id = id.unwrap_or_else(|| format!("device{}", self.devices.len()));
        if self.devices.iter().any(|device| device.id == id) {
            let message = format!("there is a device {id:?} already");
            return Err(SpecError::refused(Role::Device, text, message));
        }
        self.devices.push(DevicePlan { id, config, layers: Vec::new() });
        Ok(())
    }

    /// Puts the layer that `text` describes on every device added so far, or on the one that `device=` names.
    ///
    /// # Errors
    /// When the text makes no sense or there is no such device.
    pub fn add_layer(&mut self, text: &str) -> Result<(), SpecError> {
        let (config, target) = LayerConfig::parse(text)?;
        let refused = |message| SpecError::refused(Role::Layer, text, message);
        if self.devices.is_empty() {
            return Err(refused("no device is given before it".into()));
        }
        match target {
            Some(id) => {
                let at = self.position(&id).map_err(refused)?;
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
}

impl DevicePlan {
    /// Opens the device and puts its layers on it.
    ///
    /// # Errors
    /// What driver or layer say.
    pub fn open(&self) -> Result<Stack, DeviceError> {
        let mut stack = Stack { id: self.id.clone(), device: self.config.open()?, stats: Vec::new() };
        for layer in &self.layers {
            stack.device = layer.wrap(stack.device, &mut stack.stats)?;
        }
        Ok(stack)
    }
}
