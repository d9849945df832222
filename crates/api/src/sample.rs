//! What was counted, for plots.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// What was counted up to a moment. Rates and mean latencies are differences of two samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Samples {
    /// When, in nanoseconds since 1970.
    pub at_ns: u64,
    /// By name of the volume; those that an export serves.
    pub volumes: BTreeMap<String, Sample>,
    /// By array and slot: `data/0`. A few of the requests are timed; errors and requests in flight are estimated from them.
    #[serde(default)]
    pub members: BTreeMap<String, Sample>,
}

/// Counters since the volume was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Reads that have ended.
    pub reads: u64,
    /// Writes, discards and written zeroes that have ended.
    pub writes: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Bytes that were written.
    pub bytes_written: u64,
    /// What the reads that were timed took together, in nanoseconds.
    pub read_ns_sum: u64,
    /// How many those are.
    pub reads_timed: u64,
    /// What the writes that were timed took together, in nanoseconds.
    pub write_ns_sum: u64,
    /// How many those are.
    pub writes_timed: u64,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Requests that are on their way.
    pub in_flight: u64,
}
