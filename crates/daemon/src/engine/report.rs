//! What is open, as the API tells it.

use super::Live;
use crate::state::{ArrayRecord, DeviceRecord};
use api::{Array, ArrayState, Device, Job, Member, Scrub, ScrubWindow, Spare};
use raid::admin::report::{ArrayReport, MemberReport, SpareReport};
use raid::jobs::{Kind, Progress, ScrubReport, Status};
use raid::metadata::Window;

impl Live {
    /// A device.
    pub fn device_report(&self, record: &DeviceRecord) -> Device {
        let DeviceRecord { name, spec } = record;
        let base = self.base(name);
        let limits = base.as_ref().ok().map(|base| base.device.limits());
        let (volumes, free) = self.volumes_on(name);
        Device {
            name: name.clone(),
            spec: spec.clone(),
            capacity: limits.as_ref().map(|limits| limits.capacity),
            block_size: limits.as_ref().map(|limits| limits.block_size),
            read_only: limits.is_some_and(|limits| limits.read_only),
            free,
            volumes,
            exports: self.exports_of_base(name),
            error: base.err().map(|fault| fault.to_string()),
        }
    }

    /// An array, which may not run.
    pub fn array_report(&self, record: &ArrayRecord) -> Array {
        let (volumes, free) = self.volumes_on(&record.name);
        let exports = self.exports_of_base(&record.name);
        let mut array = match self.arrays.get(&record.name) {
            Some(running) => running_array(running.report(), &running.status()),
            None => offline_array(record),
        };
        array.error = self.base(&record.name).err().map(|fault| fault.to_string());
        Array { volumes, free, exports, ..array }
    }
}

fn running_array(report: ArrayReport, status: &Status) -> Array {
    let ArrayReport { name, uuid, level, consistency, groups, data, parity, .. } = report;
    let jobs = status.running.iter().map(|progress| job(&name, progress, status.is_paused)).collect();
    Array {
        uuid: uuid.to_string(),
        state: match report.state {
            raid::admin::report::ArrayState::Optimal => ArrayState::Optimal,
            raid::admin::report::ArrayState::Degraded => ArrayState::Degraded,
            raid::admin::report::ArrayState::Failed => ArrayState::Failed,
        },
        level,
        consistency,
        groups,
        data,
        parity,
        strip_bytes: report.strip_bytes,
        block_size: report.block_size,
        capacity: report.capacity,
        members: report.members.into_iter().map(member).collect(),
        spares: report.spares.into_iter().map(|SpareReport { device, .. }| Spare { device }).collect(),
        jobs,
        scrub: report.scrub.as_ref().map(scrub),
        contradictions: report.contradictions,
        scrub_period_s: report.maintenance.scrub_period_s,
        scrub_window: report
            .maintenance
            .scrub_window
            .map(|Window { start_minute, end_minute }| ScrubWindow { start_minute, end_minute }),
        is_scheduled_scrub: report.is_scheduled_scrub,
        last_scrub_ns: report.scrubbed_ns,
        next_scrub_ns: report.next_scrub_ns,
        read_error_budget: report.maintenance.read_errors,
        name,
        free: None,
        volumes: Vec::new(),
        exports: Vec::new(),
        error: None,
    }
}

fn offline_array(record: &ArrayRecord) -> Array {
    Array {
        name: record.name.clone(),
        uuid: record.uuid.clone(),
        state: ArrayState::Offline,
        level: String::new(),
        consistency: String::new(),
        groups: 0,
        data: 0,
        parity: 0,
        strip_bytes: 0,
        block_size: 0,
        capacity: 0,
        free: None,
        members: Vec::new(),
        spares: Vec::new(),
        jobs: Vec::new(),
        scrub: None,
        contradictions: 0,
        scrub_period_s: 0,
        scrub_window: None,
        is_scheduled_scrub: false,
        last_scrub_ns: None,
        next_scrub_ns: None,
        read_error_budget: 0,
        volumes: Vec::new(),
        exports: Vec::new(),
        error: None,
    }
}

fn member(report: MemberReport) -> Member {
    let MemberReport { slot, uuid, device, state, reason, read_errors } = report;
    Member { slot, uuid: uuid.map(|uuid| uuid.to_string()), device, state, reason, read_errors }
}

fn scrub(report: &ScrubReport) -> Scrub {
    let ScrubReport { is_repairing, is_complete, stripes, mismatched_rows, unreadable, .. } = *report;
    Scrub { is_repairing, is_complete, stripes, mismatched_rows, unreadable }
}

/// A job of an array.
pub fn job(array: &str, progress: &Progress, is_paused: bool) -> Job {
    let kind = kind_name(progress.kind);
    let slot = progress.slot.map(|slot| format!(".{slot}")).unwrap_or_default();
    Job {
        id: format!("{array}.{kind}{slot}"),
        kind: kind.into(),
        array: array.into(),
        volume: None,
        slot: progress.slot,
        done_bytes: progress.done_bytes,
        total_bytes: progress.total_bytes,
        bytes_per_s: progress.bytes_per_s,
        eta_s: progress.eta_s,
        is_paused,
        is_urgent: progress.is_urgent,
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Rebuild => "rebuild",
        Kind::PartialResync => "partial-resync",
        Kind::Replace => "replace",
        Kind::Resync => "resync",
        Kind::Reshape => "reshape",
        Kind::Check => "check",
        Kind::Repair => "repair",
    }
}
