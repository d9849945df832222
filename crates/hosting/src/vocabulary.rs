//! Maps between the engine's types and [`api`], the vocabulary of management. REST, control sockets
//! and command line all use these functions, and no other mapping.

use api::{ArrayAction, Job, JobKind, Member, MemberState, Reshape, Scrub, ScrubWindow, Spare};
use raid::admin::report::{self, ArrayReport, MemberReport, ReshapeReport, SpareReport};
use raid::jobs::{Kind, Progress, ScrubReport, Status};
use raid::metadata::{MaintenanceChange, Window};

/// An array and its jobs.
pub fn array(report: ArrayReport, status: &Status) -> api::Array {
    let jobs = status.running.iter().map(|progress| job(&report.name, progress, status.is_paused)).collect();
    let ArrayReport { name, uuid, groups, data, parity, .. } = report;
    api::Array {
        name,
        uuid: uuid.to_string(),
        state: match report.state {
            report::ArrayState::Optimal => api::ArrayState::Optimal,
            report::ArrayState::Degraded => api::ArrayState::Degraded,
            report::ArrayState::Failed => api::ArrayState::Failed,
        },
        redundancy_left: Some(report.redundancy_left),
        is_running: report.is_running,
        is_clean: report.is_clean || report.is_running,
        generation: report.generation,
        level: api::Level::from_name(&report.level),
        consistency: api::Consistency::from_name(&report.consistency),
        groups,
        data,
        parity,
        strip_bytes: report.strip_bytes,
        block_bytes: report.block_size,
        capacity_bytes: report.capacity,
        free_bytes: None,
        full_in_s: None,
        reshape: report.reshape.as_ref().map(reshape),
        members: report.members.into_iter().map(member).collect(),
        spares: report.spares.into_iter().map(spare).collect(),
        jobs,
        scrub: report.scrub.as_ref().map(scrub),
        contradictions: report.contradictions,
        scrub_period_s: report.maintenance.scrub_period_s,
        scrub_window: report.maintenance.scrub_window.map(scrub_window),
        is_scheduled_scrub: report.is_scheduled_scrub,
        last_scrub_ns: report.scrubbed_ns,
        next_scrub_ns: report.next_scrub_ns,
        read_error_budget: report.maintenance.read_errors,
        volumes: Vec::new(),
        exports: Vec::new(),
        error: None,
    }
}

fn member(report: MemberReport) -> Member {
    let MemberReport { slot, uuid, device, state, reason, read_errors } = report;
    let state = MemberState::from_name(&state).unwrap_or(MemberState::Missing);
    let uuid = uuid.map(|uuid| uuid.to_string());
    Member { slot, uuid, device, state, reason, read_errors, drive: None }
}

fn spare(SpareReport { uuid, device }: SpareReport) -> Spare {
    Spare { uuid: uuid.map(|uuid| uuid.to_string()), device, drive: None }
}

/// A running reshape.
pub fn reshape(report: &ReshapeReport) -> Reshape {
    Reshape {
        level: api::Level::from_name(&report.level),
        data: report.data,
        parity: report.parity,
        done_bytes: report.done,
        total_bytes: report.total,
    }
}

fn scrub(report: &ScrubReport) -> Scrub {
    let ScrubReport { is_repairing, is_complete, stripes, mismatched_rows, unreadable, .. } = *report;
    Scrub { is_repairing, is_complete, stripes, mismatched_rows, unreadable }
}

/// A job of an array.
pub fn job(array: &str, progress: &Progress, is_paused: bool) -> Job {
    let kind = job_kind(progress.kind);
    let slot = progress.slot.map(|slot| format!(".{slot}")).unwrap_or_default();
    Job {
        id: format!("{array}.{kind}{slot}"),
        kind,
        backing: array.into(),
        volume: None,
        slot: progress.slot,
        done_bytes: progress.done_bytes,
        total_bytes: progress.total_bytes,
        bytes_per_s: progress.bytes_per_s,
        eta_s: progress.eta_s,
        is_paused,
        is_urgent: progress.is_urgent,
        waits_for: None,
    }
}

fn job_kind(kind: Kind) -> JobKind {
    match kind {
        Kind::Rebuild => JobKind::Rebuild,
        Kind::PartialResync => JobKind::PartialResync,
        Kind::Replace => JobKind::Replace,
        Kind::Resync => JobKind::Resync,
        Kind::Reshape => JobKind::Reshape,
        Kind::Check => JobKind::Check,
        Kind::Repair => JobKind::Repair,
    }
}

/// The level of a requested array.
pub fn raid_level(level: api::Level) -> raid::Level {
    match level {
        api::Level::Raid0 => raid::Level::Raid0,
        api::Level::Raid1 => raid::Level::Raid1,
        api::Level::Raid10 => raid::Level::Raid10,
        api::Level::Raid5 => raid::Level::Raid5,
        api::Level::Raid6 => raid::Level::Raid6,
        api::Level::Raid7 => raid::Level::Raid7,
        api::Level::Raid50 => raid::Level::Raid50,
        api::Level::Raid60 => raid::Level::Raid60,
        api::Level::Raid70 => raid::Level::Raid70,
        api::Level::NPlusM => raid::Level::NPlusM,
    }
}

/// The consistency policy of a requested array.
pub fn raid_consistency(policy: api::Consistency) -> raid::Consistency {
    match policy {
        api::Consistency::Ppl => raid::Consistency::Ppl,
        api::Consistency::Bitmap => raid::Consistency::Bitmap,
        api::Consistency::None => raid::Consistency::None,
    }
}

/// A window of scheduled scrubs.
pub fn scrub_window(Window { start_minute, end_minute }: Window) -> ScrubWindow {
    ScrubWindow { start_minute, end_minute }
}

/// A window of scheduled scrubs, for the engine.
pub fn raid_window(ScrubWindow { start_minute, end_minute }: ScrubWindow) -> Window {
    Window { start_minute, end_minute }
}

/// A requested scrub schedule and read-error budget.
pub fn maintenance(
    scrub_period_s: Option<u32>,
    window: Option<ScrubWindow>,
    read_error_budget: Option<u32>,
) -> MaintenanceChange {
    MaintenanceChange {
        scrub_period_s,
        scrub_window: window.map(raid_window),
        read_errors: read_error_budget,
    }
}

/// The action that makes a change of the scrub schedule and the read-error budget.
pub fn set(change: MaintenanceChange) -> ArrayAction {
    let MaintenanceChange { scrub_period_s, scrub_window: window, read_errors } = change;
    ArrayAction::Set {
        scrub_period_s,
        scrub_window: window.map(scrub_window),
        read_error_budget: read_errors,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_and_policy_has_one_name_in_the_engine_and_in_the_api() {
        assert_eq!(
            api::Level::ALL.iter().map(|level| raid_level(*level)).collect::<Vec<_>>(),
            raid::Level::ALL
        );
        for level in api::Level::ALL {
            assert_eq!(raid_level(*level).name(), level.name());
        }
        for policy in api::Consistency::ALL {
            assert_eq!(raid_consistency(*policy).name(), policy.name());
        }
    }
}
