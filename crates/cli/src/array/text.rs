//! Arrays for people.

use crate::daemon::device::full_in;
use crate::daemon::drive;
use crate::output::time;
use api::{Array, ArrayState, Job, JobKind, Level, Member, Reshape};
use base::Size;
use hosting::vocabulary::raid_window;
use raid::ArrayConfig;
use raid::metadata::Maintenance;
use std::fmt::Write;

/// A level with its groups: `6 (4+2)`, `60 (2 groups of 4+2)`.
pub fn shape(config: &ArrayConfig) -> String {
    let geometry = &config.geometry;
    level(config.level.name(), geometry.groups, geometry.data, geometry.parity)
}

fn level(name: &str, groups: usize, data: usize, parity: usize) -> String {
    let groups = if groups == 1 { String::new() } else { format!("{groups} groups of ") };
    format!("{name} ({groups}{data}+{parity})")
}

/// An array, its members and its jobs.
pub fn array(array: &Array) -> String {
    if array.state == ArrayState::Offline {
        let why = array.error.as_deref().unwrap_or("it is not open");
        return format!("array {} ({}): offline: {why}", array.name, array.uuid);
    }
    let running = match (array.is_running, array.is_clean) {
        (true, _) => "running",
        (false, true) => "stopped",
        (false, false) => "not stopped cleanly",
    };
    let mut text = format!("array {} ({}): {}, {running}", array.name, array.uuid, array.state);
    let rows = [
        ("level", level(level_name(array.level), array.groups, array.data, array.parity)),
        ("capacity", format!("{} ({} bytes)", Size(array.capacity_bytes), array.capacity_bytes)),
        ("full in", full_in(array.full_in_s)),
        ("strip", Size(array.strip_bytes.into()).to_string()),
        ("block size", Size(array.block_bytes.into()).to_string()),
        ("redundancy", redundancy(array)),
        ("consistency", array.consistency.map_or_else(String::new, |policy| policy.to_string())),
        ("generation", if array.generation > 0 { array.generation.to_string() } else { String::new() }),
        ("scrubs", scrubs(array)),
        ("read errors", read_errors(array.read_error_budget)),
    ];
    let changing = array.reshape.as_ref().map(|reshape| ("changing", self::reshape(reshape)));
    for (name, value) in rows.into_iter().chain(changing).filter(|(_, value)| !value.is_empty()) {
        let _ = write!(text, "\n  {name:<14}{value}");
    }
    for member in &array.members {
        let _ = write!(text, "\n  slot {:<9}{}", member.slot, self::member(member));
    }
    for spare in &array.spares {
        let _ = write!(text, "\n  spare         {}", device(spare.device.as_deref()));
    }
    if array.contradictions > 0 {
        let _ = write!(text, "\n  contradictions {} rows since the start", array.contradictions);
    }
    for job in &array.jobs {
        let _ = write!(text, "\n  {}", self::job(job));
    }
    if let Some(found) = &array.scrub {
        let state = if found.is_complete { "last scrub" } else { "scrub so far" };
        let done = if found.is_repairing { ", repaired" } else { "" };
        let _ = write!(
            text,
            "\n  {state}: {} stripes, {} rows different, {} strips unreadable{done}",
            found.stripes, found.mismatched_rows, found.unreadable
        );
    }
    text
}

/// How many more members may fail: `2 more members may fail`. Empty for a failed array.
fn redundancy(array: &Array) -> String {
    match array.redundancy_left.filter(|_| array.state != ArrayState::Failed) {
        None => String::new(),
        Some(0) => "none left: data is lost if a member fails".into(),
        Some(1) => "1 more member may fail".into(),
        Some(left) => format!("{left} more members may fail"),
    }
}

/// The schedule of scrubs, and when the last one ended:
/// `scrub every 30d, next 2026-12-01T22:00:00Z, last never`.
fn scrubs(array: &Array) -> String {
    let next = match (array.is_scheduled_scrub, array.next_scrub_ns) {
        (true, _) => ", under way".into(),
        (false, Some(at_ns)) => format!(", next {}", time(at_ns)),
        (false, None) => String::new(),
    };
    let last = array.last_scrub_ns.map_or("never".into(), time);
    let maintenance = Maintenance {
        scrub_period_s: array.scrub_period_s,
        scrub_window: array.scrub_window.map(raid_window),
        read_errors: array.read_error_budget,
    };
    format!("{}{next}, last {last}", maintenance.schedule_text())
}

fn read_errors(most: u32) -> String {
    match most {
        0 => "not limited".into(),
        most => format!("at most {most} of a member in an hour"),
    }
}

/// Progress of a reshape: `from 5 (2+1): 12.5 % of 3 GiB moved`.
pub fn reshape(reshape: &Reshape) -> String {
    let percent = percent(reshape.done_bytes, reshape.total_bytes);
    let before = level(level_name(reshape.level), 1, reshape.data, reshape.parity);
    format!("from {before}: {percent:.1} % of {} moved", Size(reshape.total_bytes))
}

fn percent(done: u64, total: u64) -> f64 {
    if total == 0 { 100.0 } else { 100.0 * done as f64 / total as f64 }
}

fn member(member: &Member) -> String {
    let errors = match member.read_errors {
        0 => String::new(),
        errors => format!(", {errors} corrected read errors"),
    };
    let drive = member.drive.as_ref().map(drive::name).filter(|name| !name.is_empty());
    let drive = drive.map(|name| format!(" ({name})")).unwrap_or_default();
    format!("{:<12}{}{drive}{errors}", member.state, device(member.device.as_deref()))
}

fn device(name: Option<&str>) -> &str {
    name.unwrap_or("-")
}

fn level_name(level: Option<Level>) -> &'static str {
    level.map_or("unknown", Level::name)
}

const fn job_name(kind: JobKind) -> &'static str {
    match kind {
        JobKind::Rebuild => "rebuild",
        JobKind::PartialResync => "partial resync",
        JobKind::Replace => "replacement",
        JobKind::Resync => "resync",
        JobKind::Reshape => "restripe",
        JobKind::Check => "scrub",
        JobKind::Repair => "scrub with repair",
        JobKind::Move => "move",
        JobKind::Create => "creation",
        JobKind::Grow => "growth",
        JobKind::Copy => "copy",
        JobKind::Stream => "stream",
        JobKind::Commit => "commit",
    }
}

/// How far a job is.
pub fn job(job: &Job) -> String {
    let percent = percent(job.done_bytes, job.total_bytes);
    let mut text = job_name(job.kind).to_owned();
    if let Some(slot) = job.slot {
        let _ = write!(text, " of slot {slot}");
    }
    let _ = write!(text, ": {percent:.1} % of {}", Size(job.total_bytes));
    if job.is_urgent {
        text.push_str(", urgent (unprotected)");
    }
    if job.is_paused {
        text.push_str(", paused");
    } else if let Some(seconds) = job.total_bytes.saturating_sub(job.done_bytes).checked_div(job.bytes_per_s)
    {
        let _ = write!(text, ", {}/s, {seconds} s left", Size(job.bytes_per_s));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_says_how_far_it_is_and_whether_it_is_urgent() {
        let rebuild = Job {
            id: "data.rebuild.1".into(),
            kind: JobKind::Rebuild,
            backing: "data".into(),
            volume: None,
            slot: Some(1),
            done_bytes: 1 << 20,
            total_bytes: 4 << 20,
            bytes_per_s: 1 << 20,
            eta_s: Some(3),
            is_paused: false,
            is_urgent: false,
            waits_for: None,
        };
        assert_eq!(job(&rebuild), "rebuild of slot 1: 25.0 % of 4 MiB, 1 MiB/s, 3 s left");
        let urgent = Job { is_urgent: true, ..rebuild };
        assert_eq!(
            job(&urgent),
            "rebuild of slot 1: 25.0 % of 4 MiB, urgent (unprotected), 1 MiB/s, 3 s left"
        );
    }
}
