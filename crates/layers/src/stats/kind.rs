//! The kind `stats` of layers.

use super::Stats;
use crate::kind::{DEVICE, LayerConfig, LayerSpec};
use block::{Device, DeviceError};
use spec::{Kind, Spec, SpecError};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind =
    Kind { name: "stats", about: "counts and times requests; SIGUSR1 prints the counters", keys: &[DEVICE] };

/// Counters.
#[derive(Debug)]
struct Counters;

/// The layer of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse(spec: &Spec) -> Result<LayerSpec, SpecError> {
    LayerSpec::over(spec, Counters)
}

impl LayerConfig for Counters {
    fn wrap(
        &self,
        device: Arc<dyn Device>,
        counters: &mut Vec<Arc<Stats>>,
    ) -> Result<Arc<dyn Device>, DeviceError> {
        let stats = Arc::new(Stats::new(device));
        counters.push(stats.clone());
        Ok(stats)
    }
}
