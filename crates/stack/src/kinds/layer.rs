//! The table of all kinds of layers: devices over other devices.

use block::Device;
use layers::checker::Checker;
pub use layers::kind::{JoinConfig, JoinSpec, LayerConfig, LayerSpec};
use layers::{fault, linear, qos, stats};
use spec::{Entry, Kind, Role, SpecError};
use std::sync::Arc;

/// Every kind of layer. Its folder in the crate `layers` has the rest.
const TABLE: &[Entry<LayerSpec>; 5] = &[
    Entry { kind: &linear::kind::LINEAR, parse: linear::kind::parse_linear },
    Entry { kind: &linear::kind::CONCAT, parse: linear::kind::parse_concat },
    Entry { kind: &stats::kind::KIND, parse: stats::kind::parse },
    Entry { kind: &qos::kind::KIND, parse: qos::kind::parse },
    Entry { kind: &fault::kind::KIND, parse: fault::kind::parse },
];

/// The names and keys of the kinds.
pub const KINDS: &[&Kind] = &spec::kinds(TABLE);

/// The layer that `text` describes.
///
/// # Errors
/// When the text is invalid.
pub fn parse(text: &str) -> Result<LayerSpec, SpecError> {
    Ok(spec::parse(Role::Layer, TABLE, text)?.1)
}

/// `device`, watched in debug builds: a layer above that breaks the rules ends the program.
pub(crate) fn checked(device: Arc<dyn Device>) -> Arc<dyn Device> {
    if cfg!(debug_assertions) { Arc::new(Checker::new(device)) } else { device }
}
