//! A histogram with logarithmic buckets: eight to each doubling, so a value is known to within 6 %.

use super::Counter;

/// Buckets to each doubling.
const STEPS: u64 = 8;
/// Values from here on (18 minutes in nanoseconds) count as this.
const MAX: u64 = (1 << 40) - 1;
const BUCKETS: usize = bucket_of(MAX) + 1;

/// The bucket that holds `value`. Values below [`STEPS`] have one each.
const fn bucket_of(value: u64) -> usize {
    if value < STEPS {
        return value as usize;
    }
    let shift = value.ilog2() - STEPS.ilog2();
    ((shift as u64 + 1) * STEPS + (value >> shift) - STEPS) as usize
}

/// The middle of a bucket.
fn middle_of(bucket: usize) -> u64 {
    let (doubling, step) = (bucket as u64 / STEPS, bucket as u64 % STEPS);
    if doubling == 0 {
        return step;
    }
    let shift = doubling - 1;
    ((STEPS + step) << shift) + ((1 << shift) >> 1)
}

/// How often values of each size occurred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    buckets: Vec<u64>,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: vec![0; BUCKETS] }
    }
}

impl Histogram {
    /// How many values there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Counts one value.
    pub fn record(&mut self, value: u64) {
        self.buckets[bucket_of(value.min(MAX))] += 1;
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(a, b)| *a += b);
    }

    /// The values that were recorded since this was as `before`.
    #[must_use]
    pub fn since(&self, before: &Histogram) -> Histogram {
        let buckets = self.buckets.iter().zip(&before.buckets);
        Histogram { buckets: buckets.map(|(now, before)| now.saturating_sub(*before)).collect() }
    }

    /// The value below which `percent` of all lie, to within 6 %; 0 without values.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = (self.count() as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle_of(bucket);
            }
        }
        0
    }

    /// The mean, to within 6 %; 0 without values.
    pub fn mean(&self) -> u64 {
        let sum: u128 =
            self.buckets.iter().enumerate().map(|(b, n)| u128::from(middle_of(b)) * u128::from(*n)).sum();
        (sum / u128::from(self.count().max(1))) as u64
    }

    /// Every bucket that holds values: a value in its middle, and how many.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.buckets.iter().enumerate().filter(|(_, n)| **n > 0).map(|(b, n)| (middle_of(b), *n))
    }
}

/// A histogram that one thread writes while others read it.
pub(super) struct Buckets(Box<[Counter]>);

impl Default for Buckets {
    fn default() -> Self {
        Buckets((0..BUCKETS).map(|_| Counter::default()).collect())
    }
}

impl Buckets {
    #[inline]
    pub fn count(&self, value: u64) {
        self.0[bucket_of(value.min(MAX))].add(1);
    }

    pub fn add_to(&self, histogram: &mut Histogram) {
        histogram.buckets.iter_mut().zip(&self.0).for_each(|(sum, n)| *sum += n.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lands_in_a_bucket_whose_middle_is_near() {
        let mut before = 0;
        for value in (0..1 << 14).chain((14..40).map(|e| (1 << e) + 12345)) {
            let bucket = bucket_of(value);
            assert!(bucket >= before && bucket < BUCKETS);
            before = bucket;
            let error = middle_of(bucket).abs_diff(value);
            assert!(error * 16 <= value, "{value} counts as {}", middle_of(bucket));
        }
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile(50.0), 0);
        (1..=1000).for_each(|v| histogram.record(v * 1000));
        for (percent, expected) in [(0.0, 1000), (50.0, 500_000), (99.0, 990_000), (100.0, 1_000_000)] {
            let got = histogram.percentile(percent);
            assert!(got.abs_diff(expected) * 16 <= expected, "{percent}: {got}");
        }
        assert!(histogram.mean().abs_diff(500_500) < 10_000);
        let mut twice = histogram.clone();
        twice.merge(&histogram);
        assert_eq!(twice.count(), 2000);
        assert_eq!(twice.percentile(50.0), histogram.percentile(50.0));
    }

    #[test]
    fn a_value_beyond_all_limits_counts_as_the_largest() {
        let mut histogram = Histogram::default();
        histogram.record(u64::MAX);
        assert!(histogram.percentile(50.0) > 1 << 39);
    }
}
