//! The waits of requests for limits.
//!
//! A request's wait is the time from its submission to its release by the limits, in the line of
//! its channel too. It is counted at the release. Requests that are released at once do not count.

use std::sync::atomic::{AtomicU64, Ordering};

/// Waits of the requests to a device, on all cores.
#[derive(Debug, Default)]
pub struct Waits {
    device: Counter,
    group: Counter,
}

/// The owner of limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LimitOf {
    /// The device itself.
    #[default]
    Device,
    /// The device's group.
    Group,
}

/// Waits so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// Requests that have waited.
    pub requests: u64,
    /// Sum of their waits in nanoseconds.
    pub ns: u64,
}

impl Waits {
    /// Waits for the device's own limits.
    ///
    /// A request that must wait for its turn counts for the limits whose turn comes last. One that
    /// waits in the line only counts for the limits that held the request before it.
    pub fn for_device(&self) -> Waited {
        self.device.so_far()
    }

    /// Waits for the limits of the device's group, counted in the same way.
    pub fn for_group(&self) -> Waited {
        self.group.so_far()
    }

    pub(super) fn add(&self, limit: LimitOf, ns: u64) {
        match limit {
            LimitOf::Device => self.device.add(ns),
            LimitOf::Group => self.group.add(ns),
        }
    }
}

#[derive(Debug, Default)]
struct Counter {
    requests: AtomicU64,
    ns: AtomicU64,
}

impl Counter {
    fn add(&self, ns: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn so_far(&self) -> Waited {
        Waited { requests: self.requests.load(Ordering::Relaxed), ns: self.ns.load(Ordering::Relaxed) }
    }
}
