//! How long requests took.

use base::Histogram;

/// A distribution of nanoseconds, exact below 64 and within 1.6 % above; minimum, maximum and mean
/// are exact.
#[derive(Clone)]
pub struct Latencies {
    histogram: Histogram<6, 64>,
    sum: u64,
    min: u64,
    max: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { histogram: Histogram::default(), sum: 0, min: u64::MAX, max: 0 }
    }
}

impl Latencies {
    /// Adds one value.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.histogram.record(ns);
        // Half a millennium of latency before it wraps.
        self.sum = self.sum.wrapping_add(ns);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
    }

    /// Adds everything that `other` holds.
    pub fn merge(&mut self, other: &Latencies) {
        self.histogram.merge(&other.histogram);
        self.sum = self.sum.wrapping_add(other.sum);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// The number of values.
    pub fn count(&self) -> u64 {
        self.histogram.count()
    }

    /// The smallest value; 0 without values.
    pub fn min(&self) -> u64 {
        self.min.min(self.max)
    }

    /// The largest value; 0 without values.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The mean value; 0 without values.
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.count().max(1) as f64
    }

    /// The value that `percent` of all values do not exceed; 0 without values.
    pub fn percentile(&self, percent: f64) -> u64 {
        self.histogram.percentile(percent).clamp(self.min(), self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_values() {
        let mut latencies = Latencies::default();
        let mut other = Latencies::default();
        (1..=1000u64).for_each(|ns| if ns % 2 == 0 { latencies.record(ns) } else { other.record(ns) });
        latencies.merge(&other);
        assert_eq!((latencies.count(), latencies.min(), latencies.max()), (1000, 1, 1000));
        assert!((latencies.mean() - 500.5).abs() < 1e-9);
        for (percent, exact) in [(50.0, 500.0), (90.0, 900.0), (99.0, 990.0), (99.9, 999.0), (100.0, 1000.0)]
        {
            let got = latencies.percentile(percent) as f64;
            assert!((got - exact).abs() <= exact * 0.016, "p{percent}: {got}");
        }
    }

    #[test]
    fn no_percentile_lies_outside_the_recorded_values() {
        let mut latencies = Latencies::default();
        latencies.record(1_000_001);
        assert_eq!([1.0, 50.0, 100.0].map(|percent| latencies.percentile(percent)), [1_000_001; 3]);
    }

    #[test]
    fn latencies_without_values_are_all_zeroes() {
        let none = Latencies::default();
        assert_eq!((none.min(), none.max(), none.percentile(50.0), none.mean()), (0, 0, 0, 0.0));
    }
}
