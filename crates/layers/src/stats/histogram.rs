//! Latencies that one thread counts while others read them.

use super::Counter;

/// Nanoseconds to within 6 %. Values from 18 minutes on count as 18 minutes.
pub type Histogram = base::Histogram<3, 40>;

/// A [`Histogram`] that one thread writes while others read it.
pub(super) struct Buckets(Box<[Counter]>);

impl Default for Buckets {
    fn default() -> Self {
        Buckets((0..Histogram::BUCKETS).map(|_| Counter::default()).collect())
    }
}

impl Buckets {
    #[inline]
    pub fn count(&self, value: u64) {
        self.0[Histogram::bucket_of(value)].add(1);
    }

    pub fn add_to(&self, histogram: &mut Histogram) {
        histogram.add(self.0.iter().map(Counter::get));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_become_a_histogram() {
        let buckets = Buckets::default();
        [7, 7, 1000, u64::MAX].into_iter().for_each(|ns| buckets.count(ns));
        let mut histogram = Histogram::default();
        histogram.record(7);
        buckets.add_to(&mut histogram);
        let counts: Vec<u64> = histogram.iter().map(|(_, count)| count).collect();
        assert_eq!((counts, histogram.percentile(50.0)), (vec![3, 1, 1], 7));
    }
}
