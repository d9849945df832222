//! How often values of each size occur, in logarithmic buckets.

use std::fmt;

/// Counts of values in buckets: `2^STEP_BITS` to each doubling, so a bucket's middle is within
/// `1 / 2^(STEP_BITS + 1)` of each of its values. Values below `2^STEP_BITS` have one bucket each.
/// Values of more than `MAX_BITS` bits count as the largest of these.
///
/// ```
/// type Latencies = base::Histogram<3, 40>; // nanoseconds to within 6 %, up to 18 minutes
///
/// let mut latencies = Latencies::default();
/// (1..=1000).for_each(|us| latencies.record(us * 1000));
/// assert_eq!(latencies.count(), 1000);
/// assert!(latencies.percentile(99.0).abs_diff(990_000) * 16 <= 990_000);
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram<const STEP_BITS: u32, const MAX_BITS: u32> {
    counts: Box<[u64]>,
}

impl<const STEP_BITS: u32, const MAX_BITS: u32> Default for Histogram<STEP_BITS, MAX_BITS> {
    fn default() -> Self {
        Histogram { counts: vec![0; Self::BUCKETS].into() }
    }
}

impl<const STEP_BITS: u32, const MAX_BITS: u32> Histogram<STEP_BITS, MAX_BITS> {
    const STEPS: u64 = 1 << STEP_BITS;
    const MAX: u64 = u64::MAX >> (64 - MAX_BITS);

    /// Number of buckets.
    pub const BUCKETS: usize = Self::bucket_of(Self::MAX) + 1;

    /// The bucket that holds `value`: 0 for the smallest values, [`Self::BUCKETS`] - 1 for the
    /// largest.
    #[inline]
    pub const fn bucket_of(value: u64) -> usize {
        let value = if value < Self::MAX { value } else { Self::MAX };
        if value < Self::STEPS {
            return value as usize;
        }
        let shift = value.ilog2() - STEP_BITS;
        ((shift as u64 + 1) * Self::STEPS + (value >> shift) - Self::STEPS) as usize
    }

    /// The middle of a bucket.
    pub const fn middle_of(bucket: usize) -> u64 {
        let (doubling, step) = (bucket as u64 / Self::STEPS, bucket as u64 % Self::STEPS);
        if doubling == 0 {
            return step;
        }
        let shift = doubling - 1;
        ((Self::STEPS + step) << shift) + ((1 << shift) >> 1)
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_many(value, 1);
    }

    /// Counts `times` equal values.
    #[inline]
    pub fn record_many(&mut self, value: u64, times: u64) {
        self.counts[Self::bucket_of(value)] += times;
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.add(other.counts.iter().copied());
    }

    /// Adds the count of each bucket, from the first bucket on.
    pub fn add(&mut self, counts: impl IntoIterator<Item = u64>) {
        self.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }

    /// The values recorded since `before`, an earlier copy of this histogram.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let counts = self.counts.iter().zip(&before.counts);
        Histogram { counts: counts.map(|(now, before)| now.saturating_sub(*before)).collect() }
    }

    /// The value that `percent` of all values do not exceed, to within a bucket; 0 without values.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = (self.count() as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map_or(0, Self::middle_of)
    }

    /// The mean, to within a bucket; 0 without values.
    pub fn mean(&self) -> u64 {
        let sum: u128 = self.iter().map(|(middle, count)| u128::from(middle) * u128::from(count)).sum();
        (sum / u128::from(self.count().max(1))) as u64
    }

    /// The buckets with values: the middle of each, and its number of values.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let counts = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        counts.map(|(bucket, count)| (Self::middle_of(bucket), *count))
    }
}

impl<const STEP_BITS: u32, const MAX_BITS: u32> fmt::Debug for Histogram<STEP_BITS, MAX_BITS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Coarse = Histogram<3, 40>;
    type Fine = Histogram<6, 64>;

    fn values() -> impl Iterator<Item = u64> {
        let around =
            |bits: u32| [1u64 << bits, (1u64 << bits) + (1u64 << bits >> 1) - 1, u64::MAX >> (63 - bits)];
        (0..1 << 12).chain((12..64).flat_map(around))
    }

    fn every_bucket_is_narrow<const S: u32, const M: u32>() {
        let mut before = 0;
        for value in values().filter(|value| value.checked_shr(M).unwrap_or(0) == 0) {
            let bucket = Histogram::<S, M>::bucket_of(value);
            assert!(bucket >= before && bucket < Histogram::<S, M>::BUCKETS, "{value}: bucket {bucket}");
            before = bucket;
            let middle = Histogram::<S, M>::middle_of(bucket);
            assert!(middle.abs_diff(value) <= value >> (S + 1), "{value} counts as {middle}");
            assert_eq!(Histogram::<S, M>::bucket_of(middle), bucket);
        }
        assert_eq!(before + 1, Histogram::<S, M>::BUCKETS);
    }

    #[test]
    fn every_value_falls_into_a_bucket_whose_middle_is_near() {
        every_bucket_is_narrow::<3, 40>();
        every_bucket_is_narrow::<6, 64>();
    }

    /// Metrics and reports print the middles: they stay the same.
    #[test]
    fn the_buckets_never_change() {
        let middles = [0, 7, 8, 9, 15, 16, 17, 1000, 1 << 20, 999_999_999].map(|value| {
            [Coarse::middle_of(Coarse::bucket_of(value)), Fine::middle_of(Fine::bucket_of(value))]
        });
        let coarse = [0, 7, 8, 9, 15, 17, 17, 992, 1_114_112, 973_078_528];
        let fine = [0, 7, 8, 9, 15, 16, 17, 1004, 1_056_768, 1_002_438_656];
        assert_eq!((middles.map(|[middle, _]| middle), middles.map(|[_, middle]| middle)), (coarse, fine));
        assert_eq!((Coarse::BUCKETS, Fine::BUCKETS), (304, 3776));
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut histogram = Coarse::default();
        (1..=1000).for_each(|value| histogram.record(value * 1000));
        for (percent, expected) in [(0.0, 1000), (50.0, 500_000), (99.0, 990_000), (100.0, 1_000_000)] {
            let got = histogram.percentile(percent);
            assert!(got.abs_diff(expected) * 16 <= expected, "{percent}: {got}");
        }
        assert!(histogram.mean().abs_diff(500_500) < 10_000);
    }

    #[test]
    fn histograms_are_added_and_subtracted() {
        let mut sum = Coarse::default();
        sum.record_many(5, 3);
        let before = sum.clone();
        let mut other = Coarse::default();
        other.record(9);
        sum.merge(&other);
        assert_eq!((sum.count(), sum.iter().collect::<Vec<_>>()), (4, vec![(5, 3), (9, 1)]));
        assert_eq!((sum.since(&before), before.since(&sum).count()), (other, 0));
        assert_eq!(format!("{sum:?}"), "{5: 3, 9: 1}");
    }

    #[test]
    fn an_empty_histogram_is_all_zeroes_and_a_value_beyond_the_range_counts_as_the_largest() {
        let mut histogram = Coarse::default();
        assert_eq!((histogram.count(), histogram.percentile(50.0), histogram.mean()), (0, 0, 0));
        histogram.record(u64::MAX);
        assert!(histogram.percentile(50.0) > 1 << 39);
    }
}
