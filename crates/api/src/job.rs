//! Jobs: work that takes long.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Work that takes long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// What it is called: the array or volume, the kind, and the slot if it is for one.
    pub id: String,
    /// `rebuild`, `partial-resync`, `replace`, `resync`, `reshape`, `check` or `repair` of an array; `move`, `create` or `grow` of
    /// a volume: what is new of it is made to read as zeroes.
    pub kind: String,
    /// The array that it works on, or that a volume is on or moves to: that may be a device.
    pub array: String,
    /// The volume that moves, or is made or grows.
    pub volume: Option<String>,
    /// The slot that it fills.
    pub slot: Option<usize>,
    /// Bytes of a member, or of the volume, that are done.
    pub done_bytes: u64,
    /// Bytes of a member, or of the volume.
    pub total_bytes: u64,
    /// Bytes of those in a second, of late.
    pub bytes_per_s: u64,
    /// Seconds until it ends, at this rate.
    pub eta_s: Option<u64>,
    /// Whether it stands still.
    pub is_paused: bool,
    /// Whether it runs at full rate: a rebuild of a group that has no redundancy left, without a rate that was set.
    #[serde(default)]
    pub is_urgent: bool,
}

/// What is to be different about a job. It holds for all jobs of its array.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobChange {
    /// Stand still, or go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_paused: Option<bool>,
    /// Bytes in a second at most, of each member or of the volume; 0 for as many as leave users their latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes_per_s: Option<u64>,
    /// Bytes in a second at least, of each member or of the volume, whatever users want.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bytes_per_s: Option<u64>,
}
