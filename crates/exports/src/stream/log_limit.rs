//! Rate limit for log lines that peers can trigger.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two lines; events in between are counted.
const INTERVAL: Duration = Duration::from_secs(10);

/// A rate-limited log line.
#[derive(Default)]
pub struct LogLimit(Mutex<State>);

#[derive(Default)]
struct State {
    logged: Option<Instant>,
    /// Events since the last line.
    count: u64,
}

impl LogLimit {
    /// Counts an event. Returns the number of events since the last line, this one included, when a
    /// line is due.
    pub fn due(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count += 1;
        if state.logged.is_some_and(|logged| logged.elapsed() < INTERVAL) {
            return None;
        }
        state.logged = Some(Instant::now());
        Some(std::mem::take(&mut state.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_event_is_logged_and_those_after_it_are_counted() {
        let limit = LogLimit::default();
        assert_eq!((limit.due(), limit.due(), limit.due()), (Some(1), None, None));
        limit.0.lock().unwrap().logged = None;
        assert_eq!(limit.due(), Some(3));
    }
}
