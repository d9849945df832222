//! Arrays for people.

use raid::ArrayConfig;
use raid::admin::report::{ArrayReport, JobReport, MemberReport, ReshapeReport};
use raid::jobs::Kind;
use serving::text::human_bytes;
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

/// An array, its members and what is being done to it.
pub fn array(report: &ArrayReport) -> String {
    let running = match (report.is_running, report.is_clean) {
        (true, _) => "running",
        (false, true) => "stopped",
        (false, false) => "not stopped in good order",
    };
    let mut text = format!("array {} ({}): {}, {running}", report.name, report.uuid, report.state.name());
    let rows = [
        ("level", level(&report.level, report.groups, report.data, report.parity)),
        ("capacity", format!("{} ({} bytes)", human_bytes(report.capacity), report.capacity)),
        ("strip", human_bytes(report.strip_bytes.into())),
        ("block size", human_bytes(report.block_size.into())),
        ("consistency", report.consistency.clone()),
        ("generation", if report.generation > 0 { report.generation.to_string() } else { String::new() }),
        ("scrubs", scrubs(report)),
        ("read errors", read_errors(report.maintenance.read_errors)),
    ];
    let changing = report.reshape.as_ref().map(|reshape| ("changing", self::reshape(reshape)));
    for (name, value) in rows.into_iter().chain(changing).filter(|(_, value)| !value.is_empty()) {
        let _ = write!(text, "\n  {name:<14}{value}");
    }
    for member in &report.members {
        let _ = write!(text, "\n  slot {:<9}{}", member.slot, self::member(member));
    }
    for spare in &report.spares {
        let _ = write!(text, "\n  spare         {}", device(spare.device.as_deref()));
    }
    if report.contradictions > 0 {
        let _ = write!(text, "\n  contradictions {} rows since the start", report.contradictions);
    }
    for job in &report.jobs {
        let _ = write!(text, "\n  {}", self::job(job));
    }
    if let Some(found) = &report.scrub {
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

/// The schedule of scrubs, and when the last one ended:
/// `scrub every 30d, next 2026-12-01T22:00:00Z, last never`.
fn scrubs(report: &ArrayReport) -> String {
    let next = match (report.is_scheduled_scrub, report.next_scrub_ns) {
        (true, _) => ", under way".into(),
        (false, Some(at_ns)) => format!(", next {}", time(at_ns)),
        (false, None) => String::new(),
    };
    let last = report.scrubbed_ns.map_or("never".into(), time);
    format!("{}{next}, last {last}", report.maintenance.schedule_text())
}

fn read_errors(most: u32) -> String {
    match most {
        0 => "not limited".into(),
        most => format!("at most {most} of a member in an hour"),
    }
}

/// A time in nanoseconds since 1970, in UTC.
fn time(at_ns: u64) -> String {
    let since = std::time::Duration::from_secs(at_ns / 1_000_000_000);
    humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + since).to_string()
}

/// Progress of a reshape: `from 5 (2+1): 12.5 % of 3 GiB moved`.
pub fn reshape(reshape: &ReshapeReport) -> String {
    let percent = percent(reshape.done, reshape.total);
    let before = level(&reshape.level, 1, reshape.data, reshape.parity);
    format!("from {before}: {percent:.1} % of {} moved", human_bytes(reshape.total))
}

fn percent(done: u64, total: u64) -> f64 {
    if total == 0 { 100.0 } else { 100.0 * done as f64 / total as f64 }
}

fn member(member: &MemberReport) -> String {
    let errors = match member.read_errors {
        0 => String::new(),
        errors => format!(", {errors} corrected read errors"),
    };
    format!("{:<12}{}{errors}", member.state, device(member.device.as_deref()))
}

fn device(name: Option<&str>) -> &str {
    name.unwrap_or("-")
}

const fn job_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Rebuild => "rebuild",
        Kind::PartialResync => "partial resync",
        Kind::Replace => "replacement",
        Kind::Resync => "resync",
        Kind::Reshape => "restripe",
        Kind::Check => "scrub",
        Kind::Repair => "scrub with repair",
    }
}

/// How far a job is.
pub fn job(job: &JobReport) -> String {
    let percent = percent(job.done, job.total);
    let mut text = job_name(job.kind).to_owned();
    if let Some(slot) = job.slot {
        let _ = write!(text, " of slot {slot}");
    }
    let _ = write!(text, ": {percent:.1} % of {}", human_bytes(job.total));
    if job.is_urgent {
        text.push_str(", urgent (unprotected)");
    }
    if job.is_paused {
        text.push_str(", paused");
    } else if let Some(seconds) = job.total.saturating_sub(job.done).checked_div(job.rate) {
        let _ = write!(text, ", {}/s, {seconds} s left", human_bytes(job.rate));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_says_how_far_it_is_and_whether_it_is_urgent() {
        let rebuild = JobReport {
            kind: Kind::Rebuild,
            slot: Some(1),
            done: 1 << 20,
            total: 4 << 20,
            rate: 1 << 20,
            is_paused: false,
            is_urgent: false,
        };
        assert_eq!(job(&rebuild), "rebuild of slot 1: 25.0 % of 4 MiB, 1 MiB/s, 3 s left");
        let urgent = JobReport { is_urgent: true, ..rebuild };
        assert_eq!(
            job(&urgent),
            "rebuild of slot 1: 25.0 % of 4 MiB, urgent (unprotected), 1 MiB/s, 3 s left"
        );
    }
}
