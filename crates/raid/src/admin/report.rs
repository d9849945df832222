//! Reports on an array and its members: the JSON of `freestone array`, and of the control socket of
//! a running array. Fields are added, never renamed; sizes are bytes.

use crate::Uuid;
use crate::array::Array;
use crate::array::members::SlotState;
use crate::jobs::{Kind, Progress, ScrubReport, Status};
use crate::metadata::{Maintenance, Member, MemberState, Table};
use serde::{Deserialize, Serialize};

/// An array, running or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArrayReport {
    /// The array's name.
    pub name: String,
    /// The array's UUID.
    pub uuid: Uuid,
    /// The usual name of the level.
    pub level: String,
    /// The mechanism of consistency.
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
    /// Capacity in bytes.
    pub capacity: u64,
    /// The reshape in progress. Level, groups, data and parity are those after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reshape: Option<ReshapeReport>,
    /// The state of redundancy.
    pub state: ArrayState,
    /// How many more members may fail, whichever they are, without loss of data.
    #[serde(default)]
    pub redundancy_left: usize,
    /// Whether a process serves the array now.
    pub is_running: bool,
    /// Whether the array is running, or was stopped cleanly; otherwise the next start recovers it.
    pub is_clean: bool,
    /// Generation of the table of members.
    pub generation: u64,
    /// The slots, in their order.
    pub members: Vec<MemberReport>,
    /// Spares of the array.
    pub spares: Vec<SpareReport>,
    /// Running jobs.
    pub jobs: Vec<JobReport>,
    /// The schedule of scrubs, and the limit of read errors of a member.
    #[serde(default)]
    pub maintenance: Maintenance,
    /// End of the last complete scrub, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrubbed_ns: Option<u64>,
    /// Due time of the next scheduled scrub, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_scrub_ns: Option<u64>,
    /// Whether a scheduled scrub is in progress: it runs, or waits until the schedule allows it.
    #[serde(default)]
    pub is_scheduled_scrub: bool,
    /// The running scrub, or the last one since the array was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubReport>,
    /// Rows with strips that contradicted each other in a comparison, since the array started.
    #[serde(default)]
    pub contradictions: u64,
}

impl ArrayReport {
    /// The report of a table, for an array that does not run. The caller adds the devices.
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
            redundancy_left: table.redundancy_left(|_| true),
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
    /// The report of a running array.
    pub fn of_running(array: &Array, jobs: &Status) -> ArrayReport {
        let (table, slots) = (array.table(), array.slots());
        let mut report = ArrayReport { is_running: true, ..ArrayReport::of_table(&table) };
        let is_present = |slot: usize| slots.get(slot).is_some_and(|slot| slot.state == SlotState::Live);
        report.redundancy_left = table.redundancy_left(is_present);
        for (status, member) in slots.into_iter().zip(&mut report.members) {
            member.device = status.device;
            member.read_errors = status.read_errors;
            if status.state != SlotState::Live && member.state == "live" {
                member.state = "failing".into();
            }
        }
        if array.is_frozen() {
            report.state = ArrayState::Failed;
            report.redundancy_left = 0;
        }
        let spare = |name: &String| SpareReport { uuid: None, device: Some(name.clone()) };
        report.spares = jobs.spares.iter().chain(&jobs.global_spares).map(spare).collect();
        report.jobs = jobs.running.iter().map(|progress| JobReport::new(progress, jobs)).collect();
        report.scrub = jobs.scrub.clone();
        report.contradictions = array.counters().contradictions.rows();
        report
    }
}

/// The name of a member's state.
pub const fn state_of(member: &Member) -> &'static str {
    match member.state {
        MemberState::Live => "live",
        MemberState::Rebuilding { .. } => "rebuilding",
        MemberState::Missing { .. } => "missing",
    }
}

/// The state of an array's redundancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrayState {
    /// Every member is in sync.
    Optimal,
    /// Members are missing, but no data is lost.
    Degraded,
    /// Too many members are missing.
    Failed,
}

impl ArrayState {
    /// The name of the state.
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
    /// The slot's number.
    pub slot: usize,
    /// The member's identity, if the slot has one.
    pub uuid: Option<Uuid>,
    /// The device on this host, if present.
    pub device: Option<String>,
    /// `live`, `rebuilding`, `missing`; `failing` until the failure is committed.
    pub state: String,
    /// Why the member is not live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Corrected read errors since the array started, or since it became a member.
    #[serde(default)]
    pub read_errors: u64,
}

/// A spare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpareReport {
    /// The spare's UUID, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// The device on this host, if present.
    pub device: Option<String>,
}

/// A reshape in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReshapeReport {
    /// The level before, by its usual name.
    pub level: String,
    /// Data strips of a stripe before.
    pub data: usize,
    /// Parity strips of a stripe before.
    pub parity: usize,
    /// Bytes of the array in the new geometry.
    pub done: u64,
    /// Bytes to convert in total.
    pub total: u64,
}

/// A job of an array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    /// The kind of the job.
    pub kind: Kind,
    /// The slot of the job, if it concerns only one.
    pub slot: Option<usize>,
    /// Bytes done on each member.
    pub done: u64,
    /// Bytes to process on each member.
    pub total: u64,
    /// Present rate in bytes a second.
    pub rate: u64,
    /// Whether the job is paused.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Reason;
    use crate::metadata::testing::{config, member_uuid, reshaping, table};

    /// The redundancy left of an array of so many groups of so many data and parity strips, after
    /// each of these members has failed in turn.
    fn left_after(groups: usize, (data, parity): (usize, usize), failures: &[usize]) -> Vec<usize> {
        let mut config = config(data, parity);
        config.geometry.groups = groups;
        let mut table = table(&config);
        let fail = |slot: &usize| {
            table.take_out(*slot, Reason::Failed);
            ArrayReport::of_table(&table).redundancy_left
        };
        failures.iter().map(fail).collect()
    }

    #[test]
    fn redundancy_left_is_that_of_the_worst_group() {
        for (level, groups, shape, failures, left) in [
            ("0", 1, (3, 0), &[1][..], &[0][..]),
            ("1", 1, (1, 2), &[0, 2, 1], &[1, 0, 0]),
            ("10", 3, (1, 1), &[0, 3, 5], &[0, 0, 0]),
            ("10 of three copies", 2, (1, 2), &[0, 5, 4], &[1, 1, 0]),
            ("5", 1, (3, 1), &[2, 0], &[0, 0]),
            ("6", 1, (4, 2), &[5, 1, 0], &[1, 0, 0]),
            ("7.3", 1, (3, 3), &[5, 1, 0, 2], &[2, 1, 0, 0]),
            ("n+m", 1, (2, 5), &[0, 1, 2, 3, 4, 5], &[4, 3, 2, 1, 0, 0]),
            ("50", 2, (2, 1), &[0, 3], &[0, 0]),
            ("60", 2, (2, 2), &[0, 4, 5], &[1, 1, 0]),
        ] {
            assert_eq!(left_after(groups, shape, failures), left, "level {level}");
            let mut config = config(shape.0, shape.1);
            config.geometry.groups = groups;
            assert_eq!(ArrayReport::of_table(&table(&config)).redundancy_left, shape.1, "level {level}");
        }
    }

    #[test]
    fn a_member_that_is_rebuilding_is_no_redundancy_yet() {
        let mut table = table(&config(4, 2));
        table.members[1].state = MemberState::Rebuilding { cursor: 15 };
        assert_eq!(ArrayReport::of_table(&table).redundancy_left, 1);
        table.members[1] = Member::live(member_uuid(1));
        assert_eq!(ArrayReport::of_table(&table).redundancy_left, 2);
        assert_eq!(table.redundancy_left(|slot| slot != 3), 1, "slot 3 is failing");
    }

    #[test]
    fn during_a_reshape_the_members_before_and_after_it_count() {
        let (config, reshape) = reshaping(&config(3, 1), (3, 2));
        let table = Table { reshape: Some(reshape), ..table(&config) };
        assert_eq!(ArrayReport::of_table(&table).redundancy_left, 1, "the level before has one parity");
    }
}
