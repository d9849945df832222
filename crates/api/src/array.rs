//! Arrays and their members.

use crate::Job;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A RAID array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Array {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: String,
    /// How it is.
    pub state: ArrayState,
    /// The level by its usual name.
    pub level: String,
    /// How it stays consistent: `ppl`, `bitmap` or `none`.
    pub consistency: String,
    /// Independent groups.
    pub groups: usize,
    /// Data strips of a stripe.
    pub data: usize,
    /// Parity strips of a stripe; further copies of a mirror.
    pub parity: usize,
    /// Bytes of a strip.
    pub strip_bytes: u32,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Bytes that it holds.
    pub capacity: u64,
    /// Bytes that new volumes can have; nothing when it has no volumes.
    pub free: Option<u64>,
    /// Its slots, in their order.
    pub members: Vec<Member>,
    /// Devices that wait for a member to fail.
    pub spares: Vec<Spare>,
    /// What is being done to it.
    pub jobs: Vec<Job>,
    /// The last scrub since it was started, or the one that runs.
    pub scrub: Option<Scrub>,
    /// Rows of 4 KiB whose strips contradicted each other when they were compared, since the array started.
    #[serde(default)]
    pub contradictions: u64,
    /// Seconds from the end of a scrub until the next one is due; 0: none is scheduled.
    pub scrub_period_s: u32,
    /// When scheduled scrubs may run, every day; without it at any time.
    pub scrub_window: Option<ScrubWindow>,
    /// Whether a scheduled scrub is under way: it runs, or waits for its window or for the array to be whole.
    pub is_scheduled_scrub: bool,
    /// The last complete scrub ended.
    pub last_scrub_ns: Option<u64>,
    /// The next scheduled scrub is due.
    pub next_scrub_ns: Option<u64>,
    /// Corrected read errors of an hour beyond which a spare replaces a member; 0: no limit.
    pub read_error_budget: u32,
    /// Names of the volumes on it.
    pub volumes: Vec<String>,
    /// Names of the exports that serve all of it.
    pub exports: Vec<String>,
    /// Why it does not run.
    pub error: Option<String>,
}

/// How an array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ArrayState {
    /// Every member is in sync.
    Optimal,
    /// Members are missing, data is not.
    Degraded,
    /// Too many members are missing.
    Failed,
    /// It does not run.
    Offline,
}

impl ArrayState {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            ArrayState::Optimal => "optimal",
            ArrayState::Degraded => "degraded",
            ArrayState::Failed => "failed",
            ArrayState::Offline => "offline",
        }
    }
}

/// A slot of an array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Its number.
    pub slot: usize,
    /// The member's identity, if the slot has one.
    pub uuid: Option<String>,
    /// What it is on this host, if it is here.
    pub device: Option<String>,
    /// `live`, `rebuilding`, `missing`; `failing` while the others learn of it.
    pub state: String,
    /// Why it is not live.
    pub reason: Option<String>,
    /// Corrected read errors since the array started, or since it became a member.
    pub read_errors: u64,
}

/// A spare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Spare {
    /// What it is on this host.
    pub device: Option<String>,
}

impl Array {
    /// How many members are in sync.
    pub fn live_members(&self) -> usize {
        self.members.iter().filter(|member| member.state == "live").count()
    }
}

/// What a scrub has found so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scrub {
    /// Whether what did not fit was mended.
    pub is_repairing: bool,
    /// Whether it came to the end.
    pub is_complete: bool,
    /// Stripes that were compared.
    pub stripes: u64,
    /// Rows (4 KiB of each strip) that did not fit.
    pub mismatched_rows: u64,
    /// Strips that could not be read and were written again.
    pub unreadable: u64,
}

/// A time of day, the same every day, in minutes since midnight UTC. It may go past midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubWindow {
    /// Its first minute.
    #[schema(maximum = 1439)]
    pub start_minute: u16,
    /// The minute after its last. The same as the first one: the window is the whole day.
    #[schema(maximum = 1439)]
    pub end_minute: u16,
}

/// An array to be made of devices; what they hold is lost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewArray {
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// `0`, `1`, `10`, `5`, `6`, `7.3`, `50`, `60`, `70` or `n+m`.
    pub level: String,
    /// Paths of files or block devices, or device specifications, in the order of their slots.
    pub members: Vec<String>,
    /// Devices that wait for a member to fail.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spares: Vec<String>,
    /// Bytes of a strip; chosen by the number of members without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strip_bytes: Option<u32>,
    /// `ppl`, `bitmap` or `none`; what suits the level without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<String>,
    /// Independent groups, for levels 10, 50, 60, 70 and n+m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<usize>,
    /// Parity strips, for level n+m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parities: Option<usize>,
    /// Copies of everything, for level 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<usize>,
    /// Bytes of each member to use at most; all of the smallest without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_bytes: Option<u64>,
    /// Seconds from the end of a scrub until the next one is due, from 3600; 0: none is scheduled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 315360000)]
    pub scrub_period_s: Option<u32>,
    /// When scheduled scrubs may run, every day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_window: Option<ScrubWindow>,
    /// Corrected read errors of an hour beyond which a spare replaces a member; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_error_budget: Option<u32>,
    /// Whatever lies on the members may be overwritten.
    #[serde(default)]
    pub force: bool,
}

/// Something to be done to an array that runs. Members are named by slot, UUID or device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ArrayAction {
    /// Take members out: nothing is read from them or written to them any more.
    Fail {
        /// The members.
        members: Vec<String>,
    },
    /// Let members go that are out (`failed`: all of them), and spares.
    Remove {
        /// The members.
        members: Vec<String>,
    },
    /// Take devices as spares: empty slots are filled with them at once, others when a member fails.
    Add {
        /// Paths or device specifications.
        devices: Vec<String>,
        /// Whatever lies on them may be overwritten.
        #[serde(default)]
        force: bool,
        /// They are spares for every array of the daemon.
        #[serde(default)]
        global: bool,
    },
    /// Take former members back into their slots: what has changed since is copied.
    ReAdd {
        /// Paths or device specifications.
        devices: Vec<String>,
    },
    /// Copy a member to another device, which takes its place.
    Replace {
        /// The member.
        member: String,
        /// Path or device specification.
        device: String,
        /// Whatever lies on the device may be overwritten.
        #[serde(default)]
        force: bool,
    },
    /// Use what members have become larger by.
    Grow {
        /// Bytes of each member to use at most; all of the smallest without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        member_bytes: Option<u64>,
    },
    /// Compare parity with data.
    Scrub {
        /// Write what is wrong anew.
        #[serde(default)]
        repair: bool,
    },
    /// Choose when it is scrubbed, and how many read errors a member may have. What is left out stays as it is.
    Set {
        /// Seconds from the end of a scrub until the next one is due, from 3600; 0: none is scheduled.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(maximum = 315360000)]
        scrub_period_s: Option<u32>,
        /// When scheduled scrubs may run, every day.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scrub_window: Option<ScrubWindow>,
        /// Corrected read errors of an hour beyond which a spare replaces a member; 0: no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        read_error_budget: Option<u32>,
    },
    /// Let jobs stand still.
    Pause,
    /// Let jobs go on.
    Resume,
    /// End the scrub or replacement that runs.
    Cancel,
}

/// What an action has done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// A sentence for people.
    pub text: String,
    /// The array as it is now.
    pub array: Array,
}
