//! Counters for plots.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Counters at one moment. Rates and mean latencies are differences of two samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Samples {
    /// Time in nanoseconds since 1970.
    pub at_ns: u64,
    /// Counters of exported volumes, by name.
    pub volumes: BTreeMap<String, Sample>,
    /// Counters of members, by array and slot (`data/0`).
    /// Errors and requests in flight are estimates from the timed requests.
    #[serde(default)]
    pub members: BTreeMap<String, Sample>,
}

/// Counters since the opening of the volume or member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Completed reads.
    pub reads: u64,
    /// Completed writes, discards and zero writes.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Total latency of the timed reads in nanoseconds.
    pub read_sum_ns: u64,
    /// Number of timed reads.
    pub reads_timed: u64,
    /// Total latency of the timed writes in nanoseconds.
    pub write_sum_ns: u64,
    /// Number of timed writes.
    pub writes_timed: u64,
    /// Requests completed with an error.
    pub errors: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests of a volume that have waited for its limits or those of its group.
    #[serde(default)]
    pub throttled_requests: u64,
    /// Sum of their waits in nanoseconds.
    #[serde(default)]
    pub throttled_ns: u64,
    /// Part of `throttled_ns` that was for the limits of the group.
    #[serde(default)]
    pub group_throttled_ns: u64,
}
