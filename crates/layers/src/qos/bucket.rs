//! A token bucket that all cores share, as one number: *full*, the time up to which tokens are
//! spent.
//!
//! ```text
//!   ──────────┬──────────────────┬────────────► time
//!           full                now
//!             └──── tokens ──────┘            never more than the burst
//! ```
//!
//! A request begins at *full* or now, whichever is later, and moves *full* later by its cost. The
//! lag of *full* behind now is at most the burst: an idle bucket admits a burst, then requests at
//! the rate. A request may cost more than the bucket holds; the requests after it wait longer. This
//! is the ATM Forum's GCRA ("virtual scheduling").

use std::sync::atomic::{AtomicU64, Ordering};

const NS_PER_SECOND: u128 = 1_000_000_000;
/// Smallest burst, in nanoseconds at the rate. A waiting request wakes up to some milliseconds
/// late; without a burst it would never catch up.
pub(super) const LEAST_NS: u64 = 10_000_000;

/// A rate, and a burst after a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Requests or bytes a second; 0: unlimited.
    pub per_second: u64,
    /// Limit of units, unused during a pause, that may follow at once after it. At least 10 ms'
    /// worth.
    pub burst: u64,
}

impl Rate {
    /// A rate without bursts.
    pub fn per_second(per_second: u64) -> Rate {
        Rate { per_second, burst: 0 }
    }

    pub(super) fn is_unlimited(self) -> bool {
        self.per_second == 0
    }

    /// Nanoseconds that `units` take at this rate, rounded up so that the rate is never exceeded.
    fn ns(self, units: u64) -> u64 {
        let ns = (u128::from(units) * NS_PER_SECOND).div_ceil(u128::from(self.per_second));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}

/// The use of a rate.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    full_ns: AtomicU64,
}

impl Bucket {
    /// Takes `units` at `now_ns`; returns the time from which they may be used.
    pub(super) fn take(&self, rate: Rate, units: u64, now_ns: u64) -> u64 {
        let (cost, burst) = (rate.ns(units), rate.ns(rate.burst).max(LEAST_NS));
        let begin = |full: u64| full.max(now_ns.saturating_sub(burst));
        let push = |full: u64| Some(begin(full).saturating_add(cost));
        let before = self
            .full_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, push)
            .expect("there is always a next turn");
        begin(before)
    }

    /// The time from which units taken now could be used.
    pub(super) fn next(&self, rate: Rate, now_ns: u64) -> u64 {
        let burst = rate.ns(rate.burst).max(LEAST_NS);
        self.full_ns.load(Ordering::Relaxed).max(now_ns.saturating_sub(burst))
    }

    /// Forgets units taken in advance, after a change of the rate.
    pub(super) fn forgive(&self, now_ns: u64) {
        self.full_ns.fetch_min(now_ns, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn after_a_pause_a_burst_comes_at_once_and_the_rest_at_the_rate() {
        let (bucket, rate) = (Bucket::default(), Rate { per_second: 100, burst: 3 });
        let now = 50_000_000;
        let begins: Vec<u64> = (0..6).map(|_| bucket.take(rate, 1, now).max(now) - now).collect();
        assert_eq!(begins, [0, 0, 0, 0, 10_000_000, 20_000_000]);
        // Without a burst, a request that wakes up late catches up.
        let (bucket, rate) = (Bucket::default(), Rate::per_second(1000));
        bucket.take(rate, 1, now);
        let turns: Vec<u64> = (0..3).map(|_| bucket.take(rate, 1, now + 7_000_000)).collect();
        assert!(turns.iter().all(|turn| *turn < now + 7_000_000), "{turns:?}");
    }

    #[test]
    fn a_request_that_costs_more_than_the_bucket_holds_delays_those_behind_it() {
        let (bucket, rate) = (Bucket::default(), Rate { per_second: 1 << 20, burst: 4096 });
        let now = 1_000_000_000;
        assert!(bucket.take(rate, 1 << 20, now) <= now);
        assert!(bucket.take(rate, 1, now) > now + 980_000_000);
        bucket.forgive(now);
        assert!(bucket.take(rate, 1, now) <= now);
    }

    #[test]
    fn nothing_overflows() {
        let bucket = Bucket::default();
        let slow = Rate { per_second: 1, burst: u64::MAX };
        for units in [u64::MAX, u64::MAX, 0, 1] {
            bucket.take(slow, units, u64::MAX);
            bucket.take(Rate { burst: 0, ..slow }, units, 0);
        }
    }

    proptest! {
        /// In no window do more units begin than the rate, the burst and one request allow.
        #[test]
        fn a_rate_is_never_exceeded(
            per_second in 1u64..1_000_000, burst in 0u64..1000,
            requests in prop::collection::vec((0u64..5_000_000, 1u64..50), 1..60),
        ) {
            let (bucket, rate) = (Bucket::default(), Rate { per_second, burst });
            let held = (u128::from(burst) * NS_PER_SECOND).max(u128::from(LEAST_NS) * u128::from(per_second));
            let (mut now, mut begun) = (1_000_000_000_000u64, Vec::new());
            for (pause, units) in requests {
                now += pause;
                // The request waits for its turn.
                now = now.max(bucket.take(rate, units, now));
                begun.push((now, units));
            }
            for from in 0..begun.len() {
                let mut sum = 0u128;
                for to in from..begun.len() {
                    // The cost of the last request has no limit: later ones wait for it.
                    let window = u128::from(begun[to].0 - begun[from].0);
                    let allowed = held + window * u128::from(per_second);
                    prop_assert!(sum * NS_PER_SECOND <= allowed + NS_PER_SECOND, "{sum} units from {from} to {to}");
                    sum += u128::from(begun[to].1);
                }
            }
        }
    }
}
