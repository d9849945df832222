//! How long requests took: counts in buckets that are never more than 1.6 % wide.

/// Buckets of each power of two, as a power of two.
const SUB_BITS: u32 = 6;
const SUBS: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUBS;

/// A distribution of nanoseconds, exact below 64 and within 1.6 % above; minimum, maximum and mean are exact.
#[derive(Clone)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
    sum: u64,
    min: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: vec![0; BUCKETS].into(), count: 0, sum: 0, min: u64::MAX, max: 0 }
    }
}

impl Histogram {
    /// Adds one value.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.record_many(ns, 1);
    }

    /// Adds `times` equal values.
    #[inline]
    pub fn record_many(&mut self, ns: u64, times: u64) {
        self.counts[bucket_of(ns)] += times;
        self.count += times;
        // Half a millennium of latency before it wraps.
        self.sum = self.sum.wrapping_add(ns.wrapping_mul(times));
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
    }

    /// Adds everything that `other` holds.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
        self.count += other.count;
        self.sum = self.sum.wrapping_add(other.sum);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// How many values there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The smallest value; 0 when there is none.
    pub fn min(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// The largest value; 0 when there is none.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The mean value; 0 when there is none.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The value that `percent` of all values do not exceed; 0 when there is none.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = ((percent / 100.0 * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle_of(bucket).clamp(self.min(), self.max);
            }
        }
        0
    }
}

#[inline]
fn bucket_of(ns: u64) -> usize {
    if ns < SUBS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - SUB_BITS;
    (shift as usize + 1) * SUBS + ((ns >> shift) as usize - SUBS)
}

fn middle_of(bucket: usize) -> u64 {
    if bucket < SUBS {
        return bucket as u64;
    }
    let shift = bucket / SUBS - 1;
    let first = ((SUBS + bucket % SUBS) as u64) << shift;
    first + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_falls_into_a_bucket_that_is_narrow_enough() {
        let mut last = 0;
        for ns in
            (0..64).chain((6..64).flat_map(|bits| [1u64 << bits, (1 << bits) + 1, u64::MAX >> (63 - bits)]))
        {
            let bucket = bucket_of(ns);
            assert!(bucket < BUCKETS && bucket >= last, "{ns}");
            last = bucket;
            let error = middle_of(bucket).abs_diff(ns);
            assert!(error as f64 <= ns as f64 * 0.016, "{ns}: {error}");
        }
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_values() {
        let mut histogram = Histogram::default();
        let mut other = Histogram::default();
        (1..=1000u64).for_each(|ns| if ns % 2 == 0 { histogram.record(ns) } else { other.record(ns) });
        histogram.merge(&other);
        assert_eq!((histogram.count(), histogram.min(), histogram.max()), (1000, 1, 1000));
        assert!((histogram.mean() - 500.5).abs() < 1e-9);
        for (percent, exact) in [(50.0, 500.0), (90.0, 900.0), (99.0, 990.0), (99.9, 999.0), (100.0, 1000.0)]
        {
            let got = histogram.percentile(percent) as f64;
            assert!((got - exact).abs() <= exact * 0.016, "p{percent}: {got}");
        }
    }

    #[test]
    fn an_empty_histogram_is_all_zeroes() {
        let empty = Histogram::default();
        assert_eq!((empty.min(), empty.max(), empty.percentile(50.0), empty.mean()), (0, 0, 0, 0.0));
    }
}
