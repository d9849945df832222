//! Long-running jobs.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A long-running job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Identifier: the array, device or volume, the kind, and the slot if the job has one.
    pub id: String,
    /// Kind.
    pub kind: JobKind,
    /// The array or device of the job; for a volume, the array or device that backs it or to which
    /// it moves.
    pub backing: String,
    /// The volume that moves, is created, copied or grows.
    pub volume: Option<String>,
    /// The slot that the job rebuilds.
    pub slot: Option<usize>,
    /// Completed bytes of each member or of the volume.
    pub done_bytes: u64,
    /// Total bytes of each member or of the volume.
    pub total_bytes: u64,
    /// Recent rate in bytes per second.
    pub bytes_per_s: u64,
    /// Estimated seconds to completion at the recent rate.
    pub eta_s: Option<u64>,
    /// Whether the job is paused.
    pub is_paused: bool,
    /// Whether the job runs at full rate: a rebuild of a group without redundancy, unless a rate is
    /// set.
    #[serde(default)]
    pub is_urgent: bool,
    /// Present if the job does not run: the missing array or device and the reason, until that is
    /// open, or that the daemon is about to continue the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

words! {
    /// Kind of a job.
    JobKind {
        /// Write a member from the others.
        Rebuild = "rebuild",
        /// Copy the regions that changed while a member was missing.
        PartialResync = "partial-resync",
        /// Copy a member to its replacement.
        Replace = "replace",
        /// Make redundancy match the data.
        Resync = "resync",
        /// Change the level, the number of members or the strip size.
        Reshape = "reshape",
        /// Compare redundancy with the data.
        Check = "check",
        /// Compare redundancy with the data and rewrite mismatches.
        Repair = "repair",
        /// Move a volume.
        Move = "move",
        /// Zero a new volume.
        Create = "create",
        /// Zero the new part of a volume.
        Grow = "grow",
        /// Copy another object to a new volume.
        Copy = "copy",
        /// Copy the data of the backing file into the image of a device.
        Stream = "stream",
        /// Copy the data of the image of a device to its backing file, which then is the device.
        Commit = "commit",
    }
}

/// Request to change a job. The change applies to all jobs of its array.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobChange {
    /// Pause or resume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_paused: Option<bool>,
    /// Maximum bytes per second of each member or of the volume; 0 lets the latency of users set
    /// the rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes_per_s: Option<u64>,
    /// Minimum bytes per second of each member or of the volume, at the expense of users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bytes_per_s: Option<u64>,
}
