//! Contradictions between strips: counts each, and logs at most one line a second about them.

use crate::ArrayConfig;
use crate::stripe::plan::ones;
use std::sync::atomic::{AtomicU64, Ordering};

/// Least nanoseconds between two log lines.
const LOG_NS: u64 = 1_000_000_000;

/// Rows whose strips contradicted each other, with the limit of log lines about them.
#[derive(Debug, Default)]
pub struct Contradictions {
    rows: AtomicU64,
    /// Time of the last log line; 0 before the first.
    logged_ns: AtomicU64,
    logged_rows: AtomicU64,
}

impl Contradictions {
    /// Rows found since the array started.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Counts contradictions and logs them, at most one line a second.
    pub(super) fn report(&self, found: &Found, config: &ArrayConfig) {
        let now_ns = reactor::current().now_ns();
        let Some(rows) = self.note(found.rows, now_ns) else { return };
        let Found { stripe, offset, mended, unknown, .. } = *found;
        let geometry = &config.geometry;
        let slots: Vec<usize> = ones(mended).map(|strip| geometry.member(stripe, strip)).collect();
        tracing::error!(
            array = config.name,
            stripe,
            offset,
            rows,
            unknown,
            ?slots,
            "strips contradict each other: {}",
            match unknown {
                0 => "the wrong ones are computed from the others",
                _ => "the wrong one is unknown",
            }
        );
    }

    /// Counts rows. If a log line is due, returns the rows since the last one, including these.
    fn note(&self, rows: u64, now_ns: u64) -> Option<u64> {
        let all = self.rows.fetch_add(rows, Ordering::Relaxed) + rows;
        let logged_ns = self.logged_ns.load(Ordering::Relaxed);
        if logged_ns != 0 && now_ns.saturating_sub(logged_ns) < LOG_NS {
            return None;
        }
        let exchange =
            self.logged_ns.compare_exchange(logged_ns, now_ns.max(1), Ordering::Relaxed, Ordering::Relaxed);
        // Another core that logs at the same time covers both.
        exchange.ok().map(|_| all.saturating_sub(self.logged_rows.swap(all, Ordering::Relaxed)))
    }
}

/// Contradicting rows of a part of a stripe.
pub(super) struct Found {
    pub stripe: u64,
    /// First byte of the first such row in each strip.
    pub offset: u32,
    /// Number of rows.
    pub rows: u64,
    /// Wrong strips that were identified and computed from the others, as a mask.
    pub mended: u64,
    /// Rows whose wrong strip is unknown.
    pub unknown: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_counted_and_a_line_a_second_tells_of_all_since_the_last() {
        let contradictions = Contradictions::default();
        assert_eq!(contradictions.note(2, 5), Some(2));
        assert_eq!(contradictions.note(3, 6), None);
        assert_eq!(contradictions.note(1, LOG_NS + 4), None);
        assert_eq!(contradictions.note(4, LOG_NS + 5), Some(8));
        assert_eq!(contradictions.note(1, LOG_NS + 6), None);
        assert_eq!(contradictions.rows(), 11);
    }
}
