//! Latencies of foreground requests: a histogram that all cores add to. It has every write and some
//! reads, and is only filled while a background job needs it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Powers of two covered by a histogram, from 2^10 ns on, with four steps each.
const OCTAVES: usize = 24;
const BUCKETS: usize = OCTAVES * 4;

/// A histogram of latencies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts([u32; BUCKETS]);

impl Default for Counts {
    fn default() -> Counts {
        Counts([0; BUCKETS])
    }
}

impl Counts {
    /// Adds a request.
    pub fn note(&mut self, ns: u64) {
        self.note_many(ns, 1);
    }

    /// Adds requests that took the same time.
    pub fn note_many(&mut self, ns: u64, requests: u64) {
        let count = &mut self.0[bucket(ns)];
        *count = count.saturating_add(u32::try_from(requests).unwrap_or(u32::MAX));
    }

    /// Number of requests.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|count| u64::from(*count)).sum()
    }

    /// The latency that 99 of 100 requests did not exceed, at most a quarter too high.
    pub fn p99_ns(&self) -> u64 {
        self.exceeded_by(10)
    }

    /// The latency that half of the requests did not exceed, at most a quarter too high.
    pub fn median_ns(&self) -> u64 {
        self.exceeded_by(500)
    }

    /// The latency that at most `permille` of the requests exceeded.
    fn exceeded_by(&self, permille: u64) -> u64 {
        let above = self.total() * permille / 1000;
        let mut seen = 0;
        for (i, count) in self.0.iter().enumerate().rev() {
            seen += u64::from(*count);
            if seen > above {
                return upper_ns(i);
            }
        }
        0
    }

    /// Adds the requests of another histogram.
    pub fn add(&mut self, other: &Counts) {
        self.0.iter_mut().zip(&other.0).for_each(|(count, other)| *count = count.saturating_add(*other));
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1 << 10);
    let octave = ns.ilog2() as usize;
    let step = (ns >> (octave - 2)) as usize & 3;
    ((octave - 10) * 4 + step).min(BUCKETS - 1)
}

fn upper_ns(bucket: usize) -> u64 {
    let (octave, step) = (bucket / 4 + 10, bucket as u64 % 4);
    (5 + step) << (octave - 2)
}

/// Latencies of foreground requests of all cores, since the last [`Samples::take`].
pub struct Samples {
    is_watched: AtomicBool,
    counts: [AtomicU32; BUCKETS],
}

impl Default for Samples {
    fn default() -> Samples {
        Samples { is_watched: AtomicBool::new(false), counts: [const { AtomicU32::new(0) }; BUCKETS] }
    }
}

impl Samples {
    /// Whether latencies are needed.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Relaxed)
    }

    /// Sets whether latencies are needed.
    pub fn watch(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Relaxed);
    }

    /// Adds a request.
    pub fn note(&self, ns: u64) {
        self.counts[bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }

    /// Takes all latencies and clears the histogram.
    pub fn take(&self) -> Counts {
        Counts(std::array::from_fn(|i| self.counts[i].swap(0, Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_finds_the_slowest_in_a_hundred() {
        let mut counts = Counts::default();
        (0..980).for_each(|_| counts.note(100_000));
        (0..20).for_each(|_| counts.note(9_000_000));
        assert!((9_000_000..11_500_000).contains(&counts.p99_ns()), "{}", counts.p99_ns());
        assert!((100_000..126_000).contains(&counts.median_ns()), "{}", counts.median_ns());
        (0..1100).for_each(|_| counts.note(100_000));
        assert!((100_000..126_000).contains(&counts.p99_ns()));
        let samples = Samples::default();
        [0, 1, u64::MAX].into_iter().for_each(|ns| samples.note(ns));
        assert_eq!((samples.take().total(), samples.take().total()), (3, 0));
    }
}
