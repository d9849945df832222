//! The time of an array's next scheduled scrub.
//!
//! The period counts from the end of the last complete scrub, scheduled or not. It is shortened by
//! up to a tenth, depending on the array's UUID. So arrays of one age do not all begin at once.

use super::Table;
use crate::Uuid;
use crate::metadata::maintenance::{DAY_NS, Maintenance, SECOND_NS};

impl Table {
    /// Time of the next scheduled scrub, in nanoseconds since 1970: the first moment of the window
    /// from the due time on. `None` if none is scheduled. A last scrub more than a day after
    /// `now_ns` does not count: the clock was wrong.
    pub fn next_scrub_ns(&self, now_ns: u64) -> Option<u64> {
        let Maintenance { scrub_period_s, scrub_window, .. } = self.maintenance;
        if scrub_period_s == 0 {
            return None;
        }
        let cancelled_ns = u64::from(self.scrub_cancelled_s) * SECOND_NS;
        let known = [self.created_ns, self.scrubbed_ns, cancelled_ns];
        let latest_ns = now_ns.saturating_add(DAY_NS);
        let last_ns = known.into_iter().filter(|at_ns| *at_ns <= latest_ns).max().unwrap_or(0);
        let due_ns = last_ns.saturating_add(interval_ns(self.config.uuid, scrub_period_s));
        Some(scrub_window.map_or(due_ns, |window| window.next_ns(due_ns)))
    }

    /// Whether a scheduled scrub may run at `now_ns`: one is scheduled, its window is open, and
    /// every member is live.
    pub fn allows_scheduled_scrub(&self, now_ns: u64) -> bool {
        let Maintenance { scrub_period_s, scrub_window, .. } = self.maintenance;
        let is_open = scrub_window.is_none_or(|window| window.contains(now_ns));
        scrub_period_s > 0 && is_open && !self.is_degraded() && self.reshape.is_none()
    }
}

/// Nanoseconds from the end of a scrub until the next one is due: nine tenths of the period to the
/// whole period.
fn interval_ns(array: Uuid, period_s: u32) -> u64 {
    let period_ns = u64::from(period_s) * SECOND_NS;
    let (first, _) = array.0.split_at(8);
    let random = u64::from_le_bytes(first.try_into().expect("8 bytes"));
    period_ns - random % (period_ns / 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::maintenance::Window;
    use crate::metadata::testing::{config, table};

    const HOUR_NS: u64 = 3600 * SECOND_NS;

    fn window(text: &str) -> Window {
        text.parse().unwrap()
    }

    #[test]
    fn the_next_scrub_counts_from_the_last_one_and_arrays_differ() {
        let mut table = table(&config(3, 1));
        let now_ns = 20_000 * DAY_NS;
        assert_eq!(table.next_scrub_ns(now_ns), None);
        table.maintenance.scrub_period_s = 10 * 86400;
        (table.created_ns, table.scrubbed_ns) = (now_ns, 0);
        let due = |table: &Table| table.next_scrub_ns(now_ns).unwrap();
        let first = due(&table);
        assert!(first > now_ns + 9 * DAY_NS && first <= now_ns + 10 * DAY_NS);
        table.scrubbed_ns = now_ns + HOUR_NS;
        assert_eq!(due(&table), first + HOUR_NS);
        table.scrub_cancelled_s = ((now_ns + 2 * HOUR_NS) / SECOND_NS) as u32;
        assert_eq!(due(&table), first + 2 * HOUR_NS);
        // The clock was wrong.
        table.scrubbed_ns = now_ns + 40_000 * DAY_NS;
        assert_eq!(due(&table), first + 2 * HOUR_NS);
        table.maintenance.scrub_window = Some(window("22:00-06:00"));
        assert!(due(&table) >= first + 2 * HOUR_NS && due(&table) < first + 26 * HOUR_NS);
        assert!(window("22:00-06:00").contains(due(&table)));
        let intervals: Vec<u64> =
            (0..=255).map(|byte| interval_ns(Uuid::from_random([byte; 16]), 864_000)).collect();
        assert!(intervals.iter().all(|ns| (9 * DAY_NS..=10 * DAY_NS).contains(ns)));
        let distinct: std::collections::BTreeSet<u64> = intervals.iter().map(|ns| ns / HOUR_NS).collect();
        assert!(distinct.len() > 15, "{distinct:?}");
    }
}
