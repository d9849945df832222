//! The facts that each kind of layer states about itself: [`LayerConfig`].
//!
//! A layer's folder has a file `kind.rs` with its name and keys, the function that reads a
//! specification, and this trait for its options. The table of all kinds is
//! `stack::kinds::layer::TABLE`.

use crate::stats::Stats;
use block::{Device, DeviceError};
use spec::{Key, Spec, SpecError, key};
use std::fmt::Debug;
use std::sync::Arc;

/// The key of the device below a layer.
pub(crate) const DEVICE: Key =
    key("device", "ID", "the device below [every device given before, each by itself]");

/// A layer to be put on a device.
pub trait LayerConfig: Debug + Send + Sync {
    /// Puts the layer on `device`, and the counters that it keeps for the user among `counters`.
    ///
    /// # Errors
    /// Errors of the layer.
    fn wrap(
        &self,
        device: Arc<dyn Device>,
        counters: &mut Vec<Arc<Stats>>,
    ) -> Result<Arc<dyn Device>, DeviceError>;
}

/// A layer that makes one device of several.
pub trait JoinConfig: Debug + Send + Sync {
    /// Makes one device of `devices`.
    ///
    /// # Errors
    /// Errors of the layer.
    fn join(&self, devices: Vec<Arc<dyn Device>>) -> Result<Arc<dyn Device>, DeviceError>;
}

/// A layer and the devices below it.
#[derive(Clone, Debug)]
pub enum LayerSpec {
    /// On the device with this id, or on each one by itself.
    Over(Arc<dyn LayerConfig>, Option<String>),
    /// On several devices, which are one from then on.
    Join(JoinSpec),
}

/// How several devices become one.
#[derive(Clone, Debug)]
pub struct JoinSpec {
    /// The layer that joins them.
    pub config: Arc<dyn JoinConfig>,
    /// The ids of the devices; `None`: all.
    pub devices: Option<Vec<String>>,
    /// The name of the whole.
    pub id: Option<String>,
}

impl LayerSpec {
    /// The layer `config` on the device that the specification names.
    pub(crate) fn over(spec: &Spec, config: impl LayerConfig + 'static) -> Result<LayerSpec, SpecError> {
        Ok(LayerSpec::Over(Arc::new(config), spec.get("device")?))
    }
}
