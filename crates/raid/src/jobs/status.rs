//! The keeper's report: the running job, its progress, and events.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Events that are remembered.
const EVENTS: usize = 64;

/// The word for events of jobs.
pub(super) const JOB: &str = "job";
/// The word for the start of a scheduled scrub.
pub(super) const SCRUB_STARTED: &str = "scrub started by schedule";
/// The word for the end of a scheduled scrub.
pub(super) const SCRUB_FINISHED: &str = "scrub finished by schedule";

/// A kind of job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A device gets the content of an empty slot.
    Rebuild,
    /// A former member gets what it lacks.
    PartialResync,
    /// A live member is copied to another device.
    Replace,
    /// Parity is made to fit where a crash or creation left it open.
    Resync,
    /// The array gets another shape.
    Reshape,
    /// Parity is compared with data.
    Check,
    /// Parity is compared with data, and what does not fit is mended.
    Repair,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The kind of job.
    pub kind: Kind,
    /// The slot that the job fills.
    pub slot: Option<usize>,
    /// Bytes of a member that are done.
    pub done_bytes: u64,
    /// Bytes of a member.
    pub total_bytes: u64,
    /// Bytes of a member in a second, of late.
    pub bytes_per_s: u64,
    /// Seconds until it ends, at this rate.
    pub eta_s: Option<u64>,
    /// Whether it runs at full rate, because its group has no redundancy left.
    pub is_urgent: bool,
}

/// The findings of a scrub so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Whether what did not fit was mended.
    pub is_repairing: bool,
    /// Stripes that were compared.
    pub stripes: u64,
    /// Stripes of regions that were never written, or could not be compared.
    pub skipped: u64,
    /// Rows (4 KiB of each strip) that did not fit.
    pub mismatched_rows: u64,
    /// Stripes that have such rows.
    pub mismatched_stripes: u64,
    /// Strips that could not be read and were written again.
    pub unreadable: u64,
    /// Stripes that could not be read at all.
    pub failed: u64,
    /// Wrong strips that parity told, by slot.
    pub wrong_strips: Vec<(usize, u64)>,
    /// Whether it came to the end.
    pub is_complete: bool,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// When, in nanoseconds since 1970.
    pub at_ns: u64,
    /// A word for it: `job`, or that a scheduled scrub has started or finished.
    pub what: &'static str,
    /// A sentence that describes it.
    pub text: String,
}

/// The state of an array's jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The job that runs, or ran when jobs were held: for each slot, where one pass fills several.
    pub running: Vec<Progress>,
    /// Whether jobs are held.
    pub is_paused: bool,
    /// Spares of the array, by name.
    pub spares: Vec<String>,
    /// Spares of all arrays, by name.
    pub global_spares: Vec<String>,
    /// The last scrub, or the one that runs.
    pub scrub: Option<ScrubReport>,
    /// The last events, the newest at the end.
    pub events: Vec<Event>,
    /// Work of jobs so far.
    pub totals: Totals,
}

/// Work of jobs since the array was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Strips that were computed or copied.
    pub filled: u64,
    /// Strips that got zeroes, as they were never written.
    pub zeroed: u64,
    /// Strips that needed nothing.
    pub skipped: u64,
    /// Strips of which rows could not be brought back.
    pub bad: u64,
    /// Stripes whose parity was made to fit.
    pub synced: u64,
    /// Jobs that came to their end.
    pub jobs: u64,
}

/// The keeper's record of all this.
#[derive(Default)]
pub(super) struct Log {
    pub running: Vec<Progress>,
    pub scrub: Option<ScrubReport>,
    pub totals: Totals,
    events: VecDeque<Event>,
    /// The keeper has looked, and found nothing to do.
    pub is_at_rest: bool,
    /// Something has changed since it looked.
    pub is_stale: bool,
}

impl Log {
    pub fn status(&self) -> Status {
        Status {
            running: self.running.clone(),
            scrub: self.scrub.clone(),
            events: self.events.iter().cloned().collect(),
            totals: self.totals,
            ..Status::default()
        }
    }

    pub fn event(&mut self, at_ns: u64, what: &'static str, text: String) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(Event { at_ns, what, text });
    }

    pub fn is_idle(&self) -> bool {
        self.is_at_rest && !self.is_stale
    }
}

/// How fast a job is, over the last seconds.
pub(super) struct Meter {
    since_ns: u64,
    since_bytes: u64,
    bytes_per_s: f64,
}

/// Nanoseconds that one look of a meter covers.
const LOOK_NS: u64 = 1_000_000_000;

impl Meter {
    pub fn new(now_ns: u64, done_bytes: u64) -> Meter {
        Meter { since_ns: now_ns, since_bytes: done_bytes, bytes_per_s: 0.0 }
    }

    /// The rate, now that so many bytes are done.
    pub fn rate(&mut self, now_ns: u64, done_bytes: u64) -> u64 {
        let passed = now_ns.saturating_sub(self.since_ns);
        if passed >= LOOK_NS {
            let rate = done_bytes.saturating_sub(self.since_bytes) as f64 * 1e9 / passed as f64;
            self.bytes_per_s =
                if self.bytes_per_s == 0.0 { rate } else { 0.7 * self.bytes_per_s + 0.3 * rate };
            (self.since_ns, self.since_bytes) = (now_ns, done_bytes);
        }
        self.bytes_per_s as u64
    }
}
