//! The counters of a benchmark: per queue while it runs, added up at the end.

use super::latencies::Latencies;
use block::{IoError, Op};

/// The counts of one operation.
#[derive(Clone, Default)]
pub struct OpTally {
    /// Requests that ended well.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How long they took; empty where that was not measured.
    pub latency: Latencies,
}

/// A request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its operation.
    pub op: Op,
    /// Its offset in bytes.
    pub offset: u64,
    /// The reason.
    pub error: IoError,
}

/// Data that was read and is not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Offset of the first wrong 8 bytes.
    pub offset: u64,
    /// The written data.
    pub expected: u64,
    /// The data that was read.
    pub found: u64,
}

/// Everything that was counted.
#[derive(Clone, Default)]
pub struct Tally {
    /// By [`Op`], in the order of [`Op::ALL`].
    pub ops: [OpTally; Op::ALL.len()],
    /// Requests that failed.
    pub failures: u64,
    /// The first of them.
    pub first_failure: Option<Failure>,
    /// Blocks that were read and compared.
    pub verified: u64,
    /// Blocks that were not what they should be.
    pub mismatches: u64,
    /// The first of them.
    pub first_mismatch: Option<Mismatch>,
    /// How long was measured.
    pub elapsed_ns: u64,
}

impl Tally {
    /// Counts a request that ended well; `latency_ns` where it was measured.
    #[inline]
    pub fn count(&mut self, op: Op, bytes: u64, latency_ns: Option<u64>) {
        let tally = &mut self.ops[op as usize];
        tally.count += 1;
        tally.bytes += bytes;
        if let Some(ns) = latency_ns {
            tally.latency.record(ns);
        }
    }

    /// Counts a request that failed.
    pub fn fail(&mut self, failure: Failure) {
        self.failures += 1;
        self.first_failure.get_or_insert(failure);
    }

    /// Counts a block that is not what it should be.
    pub fn mismatch(&mut self, mismatch: Mismatch) {
        self.mismatches += 1;
        self.first_mismatch.get_or_insert(mismatch);
    }

    /// Forgets what was counted for speed (the ramp), not what went wrong.
    pub fn restart(&mut self) {
        self.ops = Default::default();
        self.elapsed_ns = 0;
    }

    /// Adds what another queue counted at the same time.
    pub fn merge(&mut self, other: &Tally) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.count += theirs.count;
            mine.bytes += theirs.bytes;
            mine.latency.merge(&theirs.latency);
        }
        self.failures += other.failures;
        self.first_failure = self.first_failure.or(other.first_failure);
        self.verified += other.verified;
        self.mismatches += other.mismatches;
        self.first_mismatch = self.first_mismatch.or(other.first_mismatch);
        self.elapsed_ns = self.elapsed_ns.max(other.elapsed_ns);
    }

    /// Requests of all operations.
    pub fn requests(&self) -> u64 {
        self.ops.iter().map(|op| op.count).sum()
    }

    /// Bytes of all operations.
    pub fn bytes(&self) -> u64 {
        self.ops.iter().map(|op| op.bytes).sum()
    }

    /// `count` a second.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.elapsed_ns == 0 { 0.0 } else { count as f64 * 1e9 / self.elapsed_ns as f64 }
    }

    /// Whether everything that was asked for was done, and rightly.
    pub fn is_clean(&self) -> bool {
        self.failures == 0 && self.mismatches == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_add_up_and_the_longest_time_counts() {
        let mut first = Tally { elapsed_ns: 1_000_000_000, ..Tally::default() };
        let mut second = Tally { elapsed_ns: 2_000_000_000, ..Tally::default() };
        first.count(Op::Read, 4096, Some(10));
        second.count(Op::Read, 4096, Some(30));
        second.count(Op::Flush, 0, None);
        let failure = Failure { op: Op::Write, offset: 0, error: IoError::Medium };
        second.fail(failure);
        first.merge(&second);
        assert_eq!((first.requests(), first.bytes()), (3, 8192));
        assert_eq!(first.ops[Op::Read as usize].latency.max(), 30);
        assert_eq!(first.ops[Op::Flush as usize].latency.count(), 0);
        assert_eq!(first.per_second(first.requests()), 1.5);
        assert_eq!(first.first_failure, Some(failure));
        assert!(!first.is_clean());
        first.restart();
        assert_eq!((first.requests(), first.failures), (0, 1));
    }
}
