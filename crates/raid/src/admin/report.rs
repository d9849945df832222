//! An array and its members as people and programs read them: the JSON of `freestone array`, and of the control
//! socket of a running array. Fields are added, never renamed; sizes are bytes.

use crate::Uuid;
use crate::array::Array;
use crate::array::members::SlotState;
use crate::jobs::{Kind, Progress, ScrubReport, Status};
use crate::metadata::{Maintenance, Member, MemberState, Table};
use serde::{Deserialize, Serialize};

/// An array, running or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArrayReport {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: Uuid,
    /// The level by its usual name.
    pub level: String,
    /// How it stays consistent.
    pub consistency: String,
    /// Independent groups.
    pub groups: usize,
    /// Data strips of a stripe.
    pub data: usize,
    /// Parity strips of a stripe; further copies of a mirror.
    pub parity: usize,
    /// Bytes of a strip.
    pub strip_bytes: u32,
    /// Logical block size.
    pub block_size: u32,
    /// Bytes that the array holds.
    pub capacity: u64,
    /// The change of shape that is under way: level, groups, data and parity are those it will have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reshape: Option<ReshapeReport>,
    /// How it is.
    pub state: ArrayState,
    /// Whether a process serves it now.
    pub is_running: bool,
    /// Whether it was stopped in good order, or is running; otherwise assembly recovers it.
    pub is_clean: bool,
    /// Changes of the table of members so far.
    pub generation: u64,
    /// The slots, in their order.
    pub members: Vec<MemberReport>,
    /// Members that wait for another to fail.
    pub spares: Vec<SpareReport>,
    /// What is being done to it.
    pub jobs: Vec<JobReport>,
    /// When it is scrubbed, and how many read errors a member may have.
    #[serde(default)]
    pub maintenance: Maintenance,
    /// The last complete scrub ended, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrubbed_ns: Option<u64>,
    /// The next scheduled scrub is due, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_scrub_ns: Option<u64>,
    /// Whether a scheduled scrub is under way: it runs, or waits until the schedule allows that.
    #[serde(default)]
    pub is_scheduled_scrub: bool,
    /// The last scrub since it was started, or the one that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubReport>,
    /// Rows whose strips contradicted each other when they were compared, since the array started.
    #[serde(default)]
    pub contradictions: u64,
}

impl ArrayReport {
    /// What a table says about an array that does not run. Devices are for the caller to fill in.
    pub fn of_table(table: &Table) -> ArrayReport {
        let config = &table.config;
        let geometry = &config.geometry;
        let member = |(slot, member): (usize, &Member)| MemberReport {
            slot,
            uuid: (member.uuid != Uuid::default()).then_some(member.uuid),
            device: None,
            state: state_of(member).into(),
            reason: (!member.is_live()).then(|| member.reason.text().into()),
            read_errors: 0,
        };
        ArrayReport {
            name: config.name.clone(),
            uuid: config.uuid,
            level: config.level.name().into(),
            consistency: config.consistency.name().into(),
            groups: geometry.groups,
            data: geometry.data,
            parity: geometry.parity,
            strip_bytes: geometry.strip_bytes,
            block_size: config.block_size,
            capacity: table.capacity(),
            reshape: table.reshape.map(|reshape| ReshapeReport {
                level: reshape.old_level.name().into(),
                data: reshape.old_geometry.data,
                parity: reshape.old_geometry.parity,
                done: reshape.cursor,
                total: reshape.end(geometry),
            }),
            state: match (table.is_alive(), table.is_degraded()) {
                (false, _) => ArrayState::Failed,
                (true, true) => ArrayState::Degraded,
                (true, false) => ArrayState::Optimal,
            },
            is_running: false,
            is_clean: table.is_clean,
            generation: table.generation,
            members: table.members.iter().enumerate().map(member).collect(),
            spares: Vec::new(),
            jobs: Vec::new(),
            maintenance: table.maintenance,
            scrubbed_ns: Some(table.scrubbed_ns).filter(|at_ns| *at_ns != 0),
            next_scrub_ns: table.next_scrub_ns(table.updated_ns),
            is_scheduled_scrub: table.scrub_is_scheduled,
            scrub: None,
            contradictions: 0,
        }
    }
}

impl ArrayReport {
    /// What a running array is now.
    pub fn of_running(array: &Array, jobs: &Status) -> ArrayReport {
        let mut report = ArrayReport { is_running: true, ..ArrayReport::of_table(&array.table()) };
        for (status, member) in array.slots().into_iter().zip(&mut report.members) {
            member.device = status.device;
            member.read_errors = status.read_errors;
            if status.state != SlotState::Live && member.state == "live" {
                member.state = "failing".into();
            }
        }
        if array.is_frozen() {
            report.state = ArrayState::Failed;
        }
        let spare = |name: &String| SpareReport { uuid: None, device: Some(name.clone()) };
        report.spares = jobs.spares.iter().chain(&jobs.global_spares).map(spare).collect();
        report.jobs = jobs.running.iter().map(|progress| JobReport::new(progress, jobs)).collect();
        report.scrub = jobs.scrub.clone();
        report.contradictions = array.counters().contradictions.rows();
        report
    }
}

/// The word for a member's state.
pub const fn state_of(member: &Member) -> &'static str {
    match member.state {
        MemberState::Live => "live",
        MemberState::Rebuilding { .. } => "rebuilding",
        MemberState::Missing { .. } => "missing",
    }
}

/// How an array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrayState {
    /// Every member is in sync.
    Optimal,
    /// Members are missing, data is not.
    Degraded,
    /// Too many members are missing.
    Failed,
}

impl ArrayState {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            ArrayState::Optimal => "optimal",
            ArrayState::Degraded => "degraded",
            ArrayState::Failed => "failed",
        }
    }
}

/// One slot of an array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberReport {
    /// Its number.
    pub slot: usize,
    /// The member's identity, if the slot has one.
    pub uuid: Option<Uuid>,
    /// What it is on this host, if it is here.
    pub device: Option<String>,
    /// `live`, `rebuilding`, `missing`; `failing` while the others learn of it.
    pub state: String,
    /// Why it is not live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Corrected read errors since the array started, or since it became a member.
    #[serde(default)]
    pub read_errors: u64,
}

/// A spare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpareReport {
    /// Its identity, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// What it is on this host, if it is here.
    pub device: Option<String>,
}

/// A change of shape that is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReshapeReport {
    /// The level before, by its usual name.
    pub level: String,
    /// Data strips of a stripe before.
    pub data: usize,
    /// Parity strips of a stripe before.
    pub parity: usize,
    /// Bytes of the array that have the new shape.
    pub done: u64,
    /// Bytes that will have it at the end.
    pub total: u64,
}

/// Work on an array that takes long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    /// What it is.
    pub kind: Kind,
    /// The slot that it is for, if it is for one.
    pub slot: Option<usize>,
    /// Bytes done on each member.
    pub done: u64,
    /// Bytes to be done on each member.
    pub total: u64,
    /// Bytes a second at the moment.
    pub rate: u64,
    /// Whether it waits to be resumed.
    pub is_paused: bool,
    /// Whether it runs at full rate, because its group has no redundancy left.
    #[serde(default)]
    pub is_urgent: bool,
}

impl JobReport {
    fn new(progress: &Progress, jobs: &Status) -> JobReport {
        JobReport {
            kind: progress.kind,
            slot: progress.slot,
            done: progress.done_bytes,
            total: progress.total_bytes,
            rate: progress.bytes_per_s,
            is_paused: jobs.is_paused,
            is_urgent: progress.is_urgent,
        }
    }
}
