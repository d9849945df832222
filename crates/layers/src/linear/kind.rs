//! The kinds `linear` and `concat` of layers.

use super::{Concat, Partition};
use crate::kind::{DEVICE, JoinConfig, JoinSpec, LayerConfig, LayerSpec};
use crate::stats::Stats;
use base::Size;
use block::{Device, DeviceError};
use spec::{Kind, Spec, SpecError, Value, key};
use std::sync::Arc;

/// The kind `linear`.
pub static LINEAR: Kind = Kind {
    name: "linear",
    about: "a range of the device",
    keys: &[
        key("offset", "SIZE", "start of the range [0]"),
        key("len", "SIZE", "length of the range [to the end, growing with the device]"),
        DEVICE,
    ],
};

/// The kind `concat`.
pub static CONCAT: Kind = Kind {
    name: "concat",
    about: "several devices, one after the other, as one",
    keys: &[
        key("devices", "LIST", "the devices in their order, joined by + [all devices given before]"),
        key(
            "id",
            "NAME",
            "the name by which layers and exports refer to it [those of its devices, joined by +]",
        ),
    ],
};

/// A range of a device.
#[derive(Debug)]
struct Range {
    /// Its first byte.
    offset: u64,
    /// Its length in bytes; `None`: to the end.
    len: Option<u64>,
}

/// The layer `linear` of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse_linear(spec: &Spec) -> Result<LayerSpec, SpecError> {
    let Size(offset) = spec.get_or("offset", Size(0))?;
    let len = spec.get("len")?.map(|Size(len)| len);
    LayerSpec::over(spec, Range { offset, len })
}

impl LayerConfig for Range {
    fn wrap(
        &self,
        device: Arc<dyn Device>,
        _counters: &mut Vec<Arc<Stats>>,
    ) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(Partition::new(device, self.offset, self.len)?))
    }
}

/// Devices one after the other.
#[derive(Debug)]
struct InOrder;

/// The layer `concat` of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse_concat(spec: &Spec) -> Result<LayerSpec, SpecError> {
    let devices = spec.get("devices")?.map(|Names(names)| names);
    Ok(LayerSpec::Join(JoinSpec { config: Arc::new(InOrder), devices, id: spec.get("id")? }))
}

impl JoinConfig for InOrder {
    fn join(&self, devices: Vec<Arc<dyn Device>>) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(Concat::new(devices)?))
    }
}

/// Ids joined by `+`.
struct Names(Vec<String>);

impl Value for Names {
    fn expected() -> String {
        "ids joined by +, each once".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let names: Vec<String> = text.split('+').map(str::to_owned).collect();
        let is_new = |(i, name): (usize, &String)| !name.is_empty() && !names[..i].contains(name);
        names.iter().enumerate().all(is_new).then_some(Names(names))
    }
}
