//! Arrays and their members.

use crate::words::words;
use crate::{Drive, Job};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A RAID array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Array {
    /// Name.
    pub name: String,
    /// UUID.
    pub uuid: String,
    /// State.
    pub state: ArrayState,
    /// How many more members may fail, whichever they are, without loss of data; 0 for levels
    /// without redundancy. A member that is rebuilding counts as failed. Null while the array is
    /// offline.
    #[serde(default)]
    pub redundancy_left: Option<usize>,
    /// Whether a process runs the array.
    pub is_running: bool,
    /// Whether the array runs or was stopped cleanly; otherwise the next start recovers it.
    pub is_clean: bool,
    /// Number of changes of the table of members.
    pub generation: u64,
    /// Level, with `groups`, `data` and `parity` as after a running reshape; null while the array
    /// is offline.
    pub level: Option<Level>,
    /// Consistency policy; null while the array is offline.
    pub consistency: Option<Consistency>,
    /// Number of independent groups.
    pub groups: usize,
    /// Data strips per stripe.
    pub data: usize,
    /// Parity strips per stripe; for mirrors, copies beyond the first.
    pub parity: usize,
    /// Strip size in bytes.
    pub strip_bytes: u32,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// Usable capacity in bytes.
    pub capacity_bytes: u64,
    /// Bytes free for new volumes; null without a pool.
    pub free_bytes: Option<u64>,
    /// Estimated seconds until its pool is full, by a linear fit to the used bytes of the last day.
    /// Null with less than six hours of history, when use does not grow, or beyond ten years.
    #[serde(default)]
    pub full_in_s: Option<u64>,
    /// The running reshape.
    pub reshape: Option<Reshape>,
    /// Slots, in order.
    pub members: Vec<Member>,
    /// Spare devices, which replace failed members.
    pub spares: Vec<Spare>,
    /// Running jobs.
    pub jobs: Vec<Job>,
    /// The running scrub, or the last one since the array started.
    pub scrub: Option<Scrub>,
    /// Rows of 4 KiB whose strips contradicted each other, counted since the array started.
    #[serde(default)]
    pub contradictions: u64,
    /// Seconds from the end of one scrub to the start of the next; 0 disables scheduled scrubs.
    pub scrub_period_s: u32,
    /// Daily window for scheduled scrubs; null means at any time.
    pub scrub_window: Option<ScrubWindow>,
    /// Whether a scheduled scrub runs, or waits for its window or for a complete array.
    pub is_scheduled_scrub: bool,
    /// End of the last complete scrub, in nanoseconds since 1970.
    pub last_scrub_ns: Option<u64>,
    /// Start of the next scheduled scrub, in nanoseconds since 1970.
    pub next_scrub_ns: Option<u64>,
    /// Corrected read errors per hour above which a spare replaces a member; 0 means no limit.
    pub read_error_budget: u32,
    /// Names of the volumes in its pool.
    pub volumes: Vec<String>,
    /// Names of the exports that serve the whole device.
    pub exports: Vec<String>,
    /// Reason why the array is offline.
    pub error: Option<String>,
}

words! {
    /// State of an array.
    ArrayState {
        /// Every member is in sync.
        Optimal = "optimal",
        /// Members are missing or rebuilding; all data is available.
        Degraded = "degraded",
        /// More members are missing than the redundancy covers.
        Failed = "failed",
        /// The daemon cannot run the array.
        Offline = "offline",
    }
}

words! {
    /// Level of an array.
    Level {
        /// Stripes without redundancy.
        Raid0 = "0",
        /// Copies on every member.
        Raid1 = "1",
        /// Stripes over mirrors.
        Raid10 = "10",
        /// One parity strip per stripe.
        Raid5 = "5",
        /// Two parity strips per stripe.
        Raid6 = "6",
        /// Three parity strips per stripe.
        Raid7 = "7.3",
        /// Groups of level 5.
        Raid50 = "50",
        /// Groups of level 6.
        Raid60 = "60",
        /// Groups of level 7.3.
        Raid70 = "70",
        /// Any number of data and parity strips per stripe.
        NPlusM = "n+m",
    }
}

words! {
    /// Policy that keeps redundancy consistent after an unclean stop.
    Consistency {
        /// Partial parity log: no data is lost.
        Ppl = "ppl",
        /// Write-intent bitmap: marked regions are resynced.
        Bitmap = "bitmap",
        /// No redundancy to keep consistent, or a full resync.
        None = "none",
    }
}

words! {
    /// State of a slot.
    MemberState {
        /// In sync.
        Live = "live",
        /// Its content is written from the other members.
        Rebuilding = "rebuilding",
        /// Failed, until the other members record the failure.
        Failing = "failing",
        /// Failed, removed or not found.
        Missing = "missing",
    }
}

/// A slot of an array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Slot number.
    pub slot: usize,
    /// UUID of the member; null for an empty slot.
    pub uuid: Option<String>,
    /// Device path or specification on this host; null if the member is missing.
    pub device: Option<String>,
    /// State.
    pub state: MemberState,
    /// Reason for a state other than `live`.
    pub reason: Option<String>,
    /// Corrected read errors since the array started or the member joined.
    pub read_errors: u64,
    /// The drive that the member is on; null until it was read.
    #[serde(default)]
    pub drive: Option<Drive>,
}

/// A spare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Spare {
    /// UUID, if it is known.
    pub uuid: Option<String>,
    /// Device path or specification on this host.
    pub device: Option<String>,
    /// The drive that the spare is on; null until it was read.
    #[serde(default)]
    pub drive: Option<Drive>,
}

impl Array {
    /// Returns the number of members in sync.
    pub fn live_members(&self) -> usize {
        self.members.iter().filter(|member| member.state == MemberState::Live).count()
    }
}

/// A running reshape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reshape {
    /// Level before.
    pub level: Option<Level>,
    /// Data strips per stripe before.
    pub data: usize,
    /// Parity strips per stripe before.
    pub parity: usize,
    /// Bytes of the array that have the new shape.
    pub done_bytes: u64,
    /// Bytes of the array that get the new shape in total.
    pub total_bytes: u64,
}

/// Results of a scrub so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scrub {
    /// Whether the scrub repairs mismatches.
    pub is_repairing: bool,
    /// Whether the scrub is complete.
    pub is_complete: bool,
    /// Stripes compared.
    pub stripes: u64,
    /// Rows (4 KiB of each strip) whose parity did not match the data.
    pub mismatched_rows: u64,
    /// Unreadable strips that the scrub rewrote.
    pub unreadable: u64,
}

/// A daily time window in minutes since midnight UTC. It may span midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubWindow {
    /// First minute.
    #[schema(maximum = 1439)]
    pub start_minute: u16,
    /// Minute after the last. Equal to `start_minute` for the whole day.
    #[schema(maximum = 1439)]
    pub end_minute: u16,
}

/// Request to create an array. The content of the devices is lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewArray {
    /// Name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// Level.
    pub level: Level,
    /// Members in slot order: paths of files or block devices, or device specifications.
    pub members: Vec<String>,
    /// Spare devices, which replace failed members.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spares: Vec<String>,
    /// Strip size in bytes. Default: depends on the number of members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strip_bytes: Option<u32>,
    /// Consistency policy. Default: depends on the level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<Consistency>,
    /// Number of independent groups, for levels 10, 50, 60, 70 and n+m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<usize>,
    /// Parity strips per stripe, for level n+m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parities: Option<usize>,
    /// Number of copies, for level 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<usize>,
    /// Maximum bytes to use of each member. Default: the size of the smallest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_bytes: Option<u64>,
    /// Seconds from the end of one scrub to the start of the next, at least 3600; 0 disables
    /// scheduled scrubs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 315360000)]
    pub scrub_period_s: Option<u32>,
    /// Daily window for scheduled scrubs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_window: Option<ScrubWindow>,
    /// Corrected read errors per hour above which a spare replaces a member; 0 means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_error_budget: Option<u32>,
    /// Overwrite existing content of the members.
    #[serde(default)]
    pub force: bool,
}

/// An action on a running array. Members are named by slot, UUID or device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ArrayAction {
    /// Fail members: the array no longer reads or writes them.
    Fail {
        /// Members by slot, UUID or device.
        members: Vec<String>,
    },
    /// Remove failed members (`failed` stands for all of them) and spares.
    Remove {
        /// Members by slot, UUID or device.
        members: Vec<String>,
    },
    /// Add spares. The array rebuilds empty slots at once, others when a member fails.
    Add {
        /// Device paths or specifications.
        devices: Vec<String>,
        /// Overwrite existing content of the devices.
        #[serde(default)]
        force: bool,
        /// Share the spares between all arrays of the daemon.
        #[serde(default)]
        global: bool,
    },
    /// Re-add former members to their slots and copy the regions that changed since.
    ReAdd {
        /// Device paths or specifications.
        devices: Vec<String>,
    },
    /// Copy a member to another device, which then replaces it.
    Replace {
        /// Member by slot, UUID or device.
        member: String,
        /// Device path or specification.
        device: String,
        /// Overwrite existing content of the device.
        #[serde(default)]
        force: bool,
    },
    /// Use the space by which the members have grown.
    Grow {
        /// Maximum bytes to use of each member. Default: the size of the smallest.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        member_bytes: Option<u64>,
    },
    /// Compare parity and copies with the data.
    Scrub {
        /// Rewrite mismatching and unreadable strips.
        #[serde(default)]
        repair: bool,
    },
    /// Set the scrub schedule and the read-error budget. Omitted fields keep their values.
    Set {
        /// Seconds from the end of one scrub to the start of the next, at least 3600; 0 disables
        /// scheduled scrubs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(maximum = 315360000)]
        scrub_period_s: Option<u32>,
        /// Daily window for scheduled scrubs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scrub_window: Option<ScrubWindow>,
        /// Corrected read errors per hour above which a spare replaces a member; 0 means no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        read_error_budget: Option<u32>,
    },
    /// Pause the jobs of the array.
    Pause,
    /// Resume the jobs of the array.
    Resume,
    /// Cancel the running scrub or replacement.
    Cancel,
}

/// Result of an action.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// Description of the result.
    pub text: String,
    /// The array after the action.
    pub array: Array,
}
