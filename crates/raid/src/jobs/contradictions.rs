//! Events about strips that contradict each other: at most one a minute, with the rows since the
//! last.

use super::keeper::Keeper;
use super::status::JOB;

/// Least nanoseconds between two events.
const EVENT_NS: u64 = 60_000_000_000;

/// The last event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reported {
    /// Rows that it and those before it told of.
    rows: u64,
    /// Its time; `None` before the first.
    at_ns: Option<u64>,
}

impl Keeper {
    /// Reports rows that were found since the last event, if that is a minute ago.
    pub(super) fn report_contradictions(&self) {
        let array = self.array();
        let (rows, last) = (array.counters().contradictions.rows(), self.contradictions.get());
        let now_ns = self.core.now_ns();
        let is_due = last.at_ns.is_none_or(|at_ns| now_ns.saturating_sub(at_ns) >= EVENT_NS);
        if rows == last.rows || !is_due {
            return;
        }
        self.contradictions.set(Reported { rows, at_ns: Some(now_ns) });
        let new = rows - last.rows;
        let text = format!("strips of {new} rows contradicted each other: a member returned wrong data");
        tracing::warn!(array = array.config().name, rows = new, "{text}");
        let at_ns = array.wall_ns();
        self.log(|log| log.event(at_ns, JOB, text));
    }
}
