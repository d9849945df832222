//! Devices: leaves that the daemon has open.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A device that the daemon has open, or tries to open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Its name. No other device, array or volume has it.
    pub name: String,
    /// How it is opened: `kind:key=value,…`, as `freestone serve --device` takes it.
    pub spec: String,
    /// Bytes; nothing while it cannot be opened.
    pub capacity: Option<u64>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Bytes that new volumes can have; nothing when it has no volumes.
    pub free: Option<u64>,
    /// Names of the volumes on it.
    pub volumes: Vec<String>,
    /// Names of the exports that serve all of it.
    pub exports: Vec<String>,
    /// Why it is not open.
    pub error: Option<String>,
}

/// A device to be opened, now and at every start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDevice {
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// `kind:key=value,…`, or the path of a file or block device.
    pub spec: String,
}
