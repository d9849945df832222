//! `freestone history`: the load of an object over the last day.

use super::{DaemonArgs, Session, event};
use crate::error::Error;
use crate::output::time;
use api::{History, HistoryMarker, HistoryPoint};
use base::Size;
use hosting::text::grouped;

/// The daemon keeps points of this length, in seconds.
const PERIOD_S: u32 = 10;
/// The daemon keeps them so long, in seconds.
const KEPT_S: u32 = 24 * 3600;
/// Most lines without `--every`.
const LINES: u32 = 60;
/// Lengths of an interval that are easy to read, in seconds.
const EASY_S: [u32; 9] = [10, 30, 60, 120, 300, 600, 900, 1800, 3600];

/// The arguments of `freestone history`.
#[derive(clap::Args, Debug)]
pub struct HistoryArgs {
    /// arrays/NAME, devices/NAME, volumes/NAME, exports/NAME or members/ARRAY/SLOT
    object: String,
    /// Time until now: a multiple of 10s, at most 24h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = tens)]
    last: u32,
    /// Length of an interval, a multiple of 10s [default: 60 lines or fewer]
    #[arg(long, value_name = "TIME", value_parser = tens)]
    every: Option<u32>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Seconds of a time such as `90s`, `10min` or `24h`.
fn tens(text: &str) -> Result<u32, String> {
    let limits = || format!("want a multiple of 10s from {PERIOD_S}s to {}h", KEPT_S / 3600);
    let time = humantime::parse_duration(text).map_err(|error| format!("{error}; {}", limits()))?;
    let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let is_whole = time.subsec_nanos() == 0 && seconds.is_multiple_of(PERIOD_S);
    if is_whole && (PERIOD_S..=KEPT_S).contains(&seconds) { Ok(seconds) } else { Err(limits()) }
}

impl HistoryArgs {
    /// Prints the history.
    ///
    /// # Errors
    /// When the daemon does not answer, or does not know the object.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let every = self.every.unwrap_or_else(|| easy(self.last));
        let query = [
            ("object", self.object.clone()),
            ("seconds", self.last.to_string()),
            ("resolution_s", every.to_string()),
        ];
        let history: History = session.client.get_with(&["history"], &query)?;
        session.print(&history, || text(&history));
        Ok(())
    }
}

/// The shortest easy interval with which `seconds` have at most [`LINES`] lines.
fn easy(seconds: u32) -> u32 {
    let least = seconds.div_ceil(LINES);
    EASY_S.into_iter().find(|every| *every >= least).unwrap_or(KEPT_S)
}

const HEADING: [&str; 7] = ["UNTIL", "READS/S", "WRITES/S", "READ", "WRITTEN", "P50 µs", "P99 µs"];

/// A table of the intervals, and the events below it.
fn text(history: &History) -> String {
    let rows: Vec<_> = history.points.iter().map(|point| cells(point, history.resolution_s)).collect();
    let points = match rows.is_empty() {
        true => format!("{}: no interval of {} s is complete", history.object, history.resolution_s),
        false => super::table::table(HEADING, &rows),
    };
    let lines = history
        .markers
        .iter()
        .map(|HistoryMarker { at_ns, kind, name, what, text }| event::line(*at_ns, kind, name, what, text));
    std::iter::once(points).chain(lines).collect::<Vec<_>>().join("\n")
}

fn cells(point: &HistoryPoint, seconds: u32) -> [String; 7] {
    let seconds = f64::from(seconds.max(1));
    let count = |count: u64| grouped((count as f64 / seconds).round() as u64);
    let rate = |bytes: u64| format!("{}/s", Size((bytes as f64 / seconds).round() as u64));
    let us = |ns: Option<u64>| ns.map(|ns| grouped((ns + 500) / 1000)).unwrap_or_default();
    [
        time(point.at_ns),
        count(point.reads),
        count(point.writes),
        rate(point.read_bytes),
        rate(point.written_bytes),
        us(point.p50_ns),
        us(point.p99_ns),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_multiple_of_ten_seconds_within_a_day() {
        assert_eq!(["10s", "90s", "10min", "24h", "1day"].map(tens), [10, 90, 600, 86400, 86400].map(Ok));
        for wrong in ["0s", "5s", "15s", "1500ms", "25h", "hour", "", "99999999999s"] {
            let error = tens(wrong).unwrap_err();
            assert!(error.ends_with("want a multiple of 10s from 10s to 24h"), "{wrong}: {error}");
        }
    }

    #[test]
    fn intervals_are_easy_to_read_and_fill_a_page_at_most() {
        assert_eq!([10, 600, 610, 3600, 86400].map(easy), [10, 10, 30, 60, 1800]);
        for seconds in (PERIOD_S..=KEPT_S).step_by(PERIOD_S as usize) {
            assert!(seconds.div_ceil(easy(seconds)) <= LINES && easy(seconds).is_multiple_of(PERIOD_S));
        }
    }

    #[test]
    fn rates_are_of_a_second_and_events_follow() {
        let point = HistoryPoint {
            at_ns: 1_800_000_060_000_000_000,
            reads: 90_000,
            writes: 60,
            read_bytes: 60 << 20,
            written_bytes: 0,
            p50_ns: Some(80_499),
            p99_ns: None,
        };
        let marker = HistoryMarker {
            at_ns: 1_800_000_001_000_000_000,
            kind: "array".into(),
            name: "data".into(),
            what: "failed".into(),
            text: "member 1".into(),
        };
        let object = String::from("volumes/v1");
        let history = History { object, resolution_s: 60, points: vec![point], markers: vec![marker] };
        let expected = "               UNTIL  READS/S  WRITES/S     READ  WRITTEN  P50 µs  P99 µs\n\
                        2027-01-15T08:01:00Z    1,500         1  1 MiB/s    0 B/s      80\n\
                        2027-01-15T08:00:01Z  array data  failed: member 1";
        assert_eq!(text(&history), expected);
        let empty = History { points: Vec::new(), markers: Vec::new(), ..history };
        assert_eq!(text(&empty), "volumes/v1: no interval of 60 s is complete");
    }
}
