//! The history of an object: its load over the last day, as the daemon keeps it in memory.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The load of an object in equal intervals, and what happened meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// The object: `arrays/NAME`, `devices/NAME`, `volumes/NAME`, `exports/NAME` or
    /// `members/ARRAY/SLOT`.
    pub object: String,
    /// Seconds of an interval.
    pub resolution_s: u32,
    /// The complete intervals, oldest first. Times without the object have none.
    pub points: Vec<HistoryPoint>,
    /// Events of the object and of those that it depends on, and its jobs, oldest first.
    pub markers: Vec<HistoryMarker>,
}

/// The load of an object in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistoryPoint {
    /// End of the interval in nanoseconds since 1970.
    pub at_ns: u64,
    /// Completed reads.
    pub reads: u64,
    /// Completed writes, discards and zero writes.
    pub writes: u64,
    /// Bytes read, to within one in 16 million.
    pub read_bytes: u64,
    /// Bytes written, to within one in 16 million.
    pub written_bytes: u64,
    /// Median latency in nanoseconds; of an interval over 10 s, the mean of the medians of its
    /// parts, weighted by their requests. Null without timed requests.
    pub p50_ns: Option<u64>,
    /// 99th percentile of latency in nanoseconds; of an interval over 10 s, the largest of its
    /// parts. Null without timed requests.
    pub p99_ns: Option<u64>,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HistoryMarker {
    /// Time in nanoseconds since 1970.
    pub at_ns: u64,
    /// Kind of the object, as that of an event.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// Event type; `started` and `ended` for jobs.
    pub what: String,
    /// Description.
    pub text: String,
}
