//! An operator's settings for the upkeep of an array.

use crate::ArrayConfig;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Default limit of corrected read errors of a member in an hour, the same as with md.
pub const READ_ERRORS: u32 = 20;
/// The shortest period of scheduled scrubs, in seconds: one hour.
pub const LEAST_PERIOD_S: u32 = 3600;
/// The longest period of scheduled scrubs, in seconds: 3650 days.
pub const MOST_PERIOD_S: u32 = 3650 * 86400;

const DAY_MINUTES: u16 = 1440;
const MINUTE_NS: u64 = 60_000_000_000;
pub(super) const DAY_NS: u64 = DAY_MINUTES as u64 * MINUTE_NS;
pub(super) const SECOND_NS: u64 = 1_000_000_000;

/// An operator's settings for the upkeep of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maintenance {
    /// Seconds from the end of a scrub until the next one is due; 0: none is scheduled.
    pub scrub_period_s: u32,
    /// When scheduled scrubs may run; `None`: at any time.
    pub scrub_window: Option<Window>,
    /// Most corrected read errors of a member in an hour; 0: no limit.
    pub read_errors: u32,
}

impl Default for Maintenance {
    fn default() -> Maintenance {
        Maintenance { scrub_period_s: 0, scrub_window: None, read_errors: READ_ERRORS }
    }
}

impl fmt::Display for Maintenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.schedule_text())?;
        match self.read_errors {
            0 => f.write_str(", read errors of a member not limited"),
            most => write!(f, ", at most {most} read errors of a member in an hour"),
        }
    }
}

impl Maintenance {
    /// The schedule in words: `scrub every 30d in 22:00-06:00 UTC`.
    pub fn schedule_text(&self) -> String {
        match (self.scrub_period_s, self.scrub_window) {
            (0, _) => "no scrub scheduled".into(),
            (period_s, None) => format!("scrub every {}", period_text(period_s)),
            (period_s, Some(window)) => format!("scrub every {} in {window} UTC", period_text(period_s)),
        }
    }
}

/// A daily period, in minutes since midnight UTC. It may cross midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Its first minute.
    pub start_minute: u16,
    /// The minute after its last one. If it equals `start_minute`, the window is the whole day.
    pub end_minute: u16,
}

/// A change of [`Maintenance`]. A field that is `None` does not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaintenanceChange {
    /// Seconds from the end of a scrub until the next one is due; 0: none is scheduled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_period_s: Option<u32>,
    /// When scheduled scrubs may run. Equal start and end: at any time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_window: Option<Window>,
    /// Most corrected read errors of a member in an hour; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_errors: Option<u32>,
}

impl MaintenanceChange {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == MaintenanceChange::default()
    }

    /// `before` with this change.
    ///
    /// # Errors
    /// If a value exceeds its range, or the array has no redundancy to scrub. The text names the
    /// value.
    /// value.
    pub fn apply(&self, before: Maintenance, config: &ArrayConfig) -> Result<Maintenance, String> {
        if let Some(period) = self.scrub_period_s.filter(|period| *period != 0) {
            if !(LEAST_PERIOD_S..=MOST_PERIOD_S).contains(&period) {
                return Err(format!(
                    "scrub period of {period} s: expected {LEAST_PERIOD_S} to {MOST_PERIOD_S} s, or 0 for none"
                ));
            }
            if config.geometry.parity == 0 {
                return Err(format!(
                    "scrub period of {period} s: level {} has no redundancy to scrub",
                    config.level.name()
                ));
            }
        }
        if let Some(window) = self.scrub_window.filter(|window| !window.is_valid()) {
            let Window { start_minute, end_minute } = window;
            return Err(format!(
                "scrub window from minute {start_minute} to {end_minute}: a day has minutes 0 to 1439"
            ));
        }
        Ok(Maintenance {
            scrub_period_s: self.scrub_period_s.unwrap_or(before.scrub_period_s),
            scrub_window: match self.scrub_window {
                Some(window) => window.or_none(),
                None => before.scrub_window,
            },
            read_errors: self.read_errors.unwrap_or(before.read_errors),
        })
    }
}

impl Window {
    /// Whether both minutes lie within a day.
    pub fn is_valid(&self) -> bool {
        self.start_minute < DAY_MINUTES && self.end_minute < DAY_MINUTES
    }

    /// The window; `None` if it is the whole day.
    pub fn or_none(self) -> Option<Window> {
        (self.start_minute != self.end_minute).then_some(self)
    }

    /// Whether the window contains a time, in nanoseconds since 1970.
    pub fn contains(&self, at_ns: u64) -> bool {
        let minute = (at_ns % DAY_NS / MINUTE_NS) as u16;
        match self.start_minute < self.end_minute {
            true => (self.start_minute..self.end_minute).contains(&minute),
            false => minute >= self.start_minute || minute < self.end_minute,
        }
    }

    /// The first time at or after `at_ns` in the window, in nanoseconds since 1970.
    pub fn next_ns(&self, at_ns: u64) -> u64 {
        if self.contains(at_ns) {
            return at_ns;
        }
        let start_ns = (at_ns - at_ns % DAY_NS).saturating_add(u64::from(self.start_minute) * MINUTE_NS);
        if start_ns >= at_ns { start_ns } else { start_ns.saturating_add(DAY_NS) }
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |minute: u16| format!("{:02}:{:02}", minute / 60, minute % 60);
        write!(f, "{}-{}", time(self.start_minute), time(self.end_minute))
    }
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Window, String> {
        if text == "off" {
            return Ok(Window { start_minute: 0, end_minute: 0 });
        }
        let minute = |text: &str| {
            let (hour, minute) = text.split_once(':').filter(|(hour, minute)| {
                let is_number = |text: &str| text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
                is_number(hour) && is_number(minute)
            })?;
            let (hour, minute): (u16, u16) = (hour.parse().ok()?, minute.parse().ok()?);
            (hour < 24 && minute < 60).then_some(hour * 60 + minute)
        };
        let window = text
            .split_once('-')
            .and_then(|(start, end)| Some(Window { start_minute: minute(start)?, end_minute: minute(end)? }));
        window.ok_or_else(|| format!("{text:?}: expected HH:MM-HH:MM in UTC, or off"))
    }
}

/// Parses a period in seconds: `30d`, `12h`, `2w`; 0 for `off`.
///
/// # Errors
/// If the text is no period, or out of range.
pub fn parse_period(text: &str) -> Result<u32, String> {
    if text == "off" {
        return Ok(0);
    }
    let wrong = || format!("{text:?}: expected hours, days or weeks such as 12h, 30d or 4w, or off");
    let unit_s = match text.chars().last() {
        Some('h') => 3600,
        Some('d') => 86400,
        Some('w') => 7 * 86400,
        _ => return Err(wrong()),
    };
    let digits = &text[..text.len() - 1];
    let count: u64 = match digits.bytes().all(|b| b.is_ascii_digit()) {
        true => digits.parse().map_err(|_| wrong())?,
        false => return Err(wrong()),
    };
    let period_s = u32::try_from(count.saturating_mul(unit_s)).unwrap_or(u32::MAX);
    match (LEAST_PERIOD_S..=MOST_PERIOD_S).contains(&period_s) {
        true => Ok(period_s),
        false => Err(format!("{text:?}: expected 1h to 3650d, or off")),
    }
}

/// Formats a period for [`parse_period`], in its largest unit without a remainder of hours.
pub fn period_text(period_s: u32) -> String {
    match period_s {
        0 => "off".into(),
        _ if period_s.is_multiple_of(86400) => format!("{}d", period_s / 86400),
        _ if period_s.is_multiple_of(3600) => format!("{}h", period_s / 3600),
        _ => format!("{period_s} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::config;

    const HOUR_NS: u64 = 60 * MINUTE_NS;

    fn window(text: &str) -> Window {
        text.parse().unwrap()
    }

    #[test]
    fn a_window_contains_its_first_minute_and_may_pass_midnight() {
        let (day, night) = (window("09:30-17:00"), window("22:00-06:00"));
        let at = |hours: u64, minutes: u64| 20_000 * DAY_NS + hours * HOUR_NS + minutes * MINUTE_NS;
        assert!(!day.contains(at(9, 30) - 1) && day.contains(at(9, 30)) && !day.contains(at(17, 0)));
        assert!(night.contains(at(23, 59)) && night.contains(at(0, 0)) && night.contains(at(5, 59)));
        assert!(!night.contains(at(6, 0)) && !night.contains(at(21, 59)));
        assert_eq!(day.next_ns(at(12, 0)), at(12, 0));
        assert_eq!(day.next_ns(at(17, 0)), at(33, 30));
        assert_eq!(night.next_ns(at(6, 0)), at(22, 0));
        assert_eq!(night.next_ns(at(2, 0)), at(2, 0));
        assert_eq!((window("off").or_none(), night.or_none()), (None, Some(night)));
        assert_eq!(window("07:05-00:00").to_string(), "07:05-00:00");
        for text in ["", "22-06", "24:00-06:00", "22:60-06:00", "2:00-6:00", "22:00-06:00-", "+2:00-06:00"] {
            assert!(text.parse::<Window>().unwrap_err().contains("expected HH:MM-HH:MM"), "{text}");
        }
    }

    #[test]
    fn periods_are_hours_days_and_weeks_in_range() {
        let all = [("off", 0, "off"), ("1h", 3600, "1h"), ("36h", 129_600, "36h"), ("4w", 2_419_200, "28d")];
        for (text, seconds, again) in all {
            assert_eq!(parse_period(text), Ok(seconds));
            assert_eq!(period_text(seconds), again);
        }
        assert_eq!(parse_period("3650d"), Ok(MOST_PERIOD_S));
        for text in
            ["", "d", "30", "-1d", "+1d", "1.5d", "30 d", "1m", "0h", "3651d", "99999999999999999d", "1é"]
        {
            assert!(parse_period(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_change_out_of_range_is_refused_with_its_value() {
        let apply =
            |change: MaintenanceChange, config: &ArrayConfig| change.apply(Maintenance::default(), config);
        let period = |period_s| MaintenanceChange { scrub_period_s: Some(period_s), ..Default::default() };
        let all = MaintenanceChange {
            scrub_window: Some(window("22:00-06:00")),
            read_errors: Some(0),
            ..period(86400)
        };
        let made = apply(all, &config(3, 1)).unwrap();
        assert_eq!((made.scrub_period_s, made.read_errors), (86400, 0));
        let off = MaintenanceChange { scrub_window: Some(window("off")), ..period(0) };
        let after = off.apply(made, &config(3, 1)).unwrap();
        assert_eq!(after, Maintenance { scrub_period_s: 0, scrub_window: None, read_errors: 0 });
        assert_eq!(MaintenanceChange::default().apply(made, &config(3, 1)), Ok(made));
        assert!(apply(period(3599), &config(3, 1)).unwrap_err().starts_with("scrub period of 3599 s"));
        assert!(apply(period(86400), &config(3, 0)).unwrap_err().contains("no redundancy"));
        let beyond = Window { start_minute: 1440, end_minute: 0 };
        let change = MaintenanceChange { scrub_window: Some(beyond), ..Default::default() };
        assert!(apply(change, &config(3, 1)).unwrap_err().contains("minute 1440"));
    }
}
