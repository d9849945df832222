//! Why an array cannot be created.

use block::{DeviceError, IoError};
use signatures::Findings;

/// Why an array cannot be created. Messages name the devices.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The requested parameters contradict each other.
    #[error("{0}")]
    Shape(String),
    /// Devices have content.
    #[error("{}; --force overwrites them", in_words(.0))]
    InUse(Vec<(String, Findings)>),
    /// A device cannot be a member.
    #[error("{device}: {why}")]
    Unfit {
        /// The device.
        device: String,
        /// Why.
        why: String,
    },
    /// A device cannot be opened.
    #[error(transparent)]
    Open(#[from] DeviceError),
    /// A device failed during the creation. No array exists; the devices' former content may be
    /// lost.
    #[error("{device}: {doing}: {error}")]
    Io {
        /// The device.
        device: String,
        /// The failed operation.
        doing: &'static str,
        /// Its error.
        error: IoError,
    },
}

fn in_words(found: &[(String, Findings)]) -> String {
    let device = |(name, findings): &(String, Findings)| format!("{name} holds {findings}");
    found.iter().map(device).collect::<Vec<_>>().join("; ")
}
