//! Devices that the daemon has open.

use crate::Drive;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A device that the daemon has open or tries to open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Name, unique among devices, arrays and volumes.
    pub name: String,
    /// Specification, `kind:key=value,…`, in the syntax of `freestone serve --device`.
    pub spec: String,
    /// Capacity in bytes; null while the device is not open.
    pub capacity_bytes: Option<u64>,
    /// Logical block size in bytes.
    pub block_bytes: Option<u32>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Bytes free for new volumes; null without a pool.
    pub free_bytes: Option<u64>,
    /// Estimated seconds until its pool is full, by a linear fit to the used bytes of the last day.
    /// Null with less than six hours of history, when use does not grow, or beyond ten years.
    #[serde(default)]
    pub full_in_s: Option<u64>,
    /// Names of the volumes in its pool.
    pub volumes: Vec<String>,
    /// Names of the exports that serve the whole device.
    pub exports: Vec<String>,
    /// Reason why the device is not open.
    pub error: Option<String>,
    /// The drive that the device is on; null until it was read.
    #[serde(default)]
    pub drive: Option<Drive>,
}

/// Request to open a device now and at each start of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDevice {
    /// Name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// Specification, `kind:key=value,…`, or the path of a file or block device.
    pub spec: String,
    /// Size in bytes of the RBD image that the daemon creates first. Default: the image exists.
    #[serde(default, alias = "size", skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// Request to change a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceChange {
    /// New size in bytes of the RBD image; an image can only grow. Exports announce it to their
    /// clients.
    #[serde(alias = "size")]
    pub size_bytes: u64,
}

/// An internal snapshot of a device that is a qcow2 image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageSnapshot {
    /// Identifier in the image.
    pub id: String,
    /// Name, unique in the image.
    pub name: String,
    /// Time of its creation in nanoseconds since 1970.
    pub created_at_ns: u64,
    /// Size of the disk in bytes; null where the image does not state it.
    pub size_bytes: Option<u64>,
}

/// Request to make an internal snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewImageSnapshot {
    /// Name, of 1 to 255 bytes.
    pub name: String,
}
