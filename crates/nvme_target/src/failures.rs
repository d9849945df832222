//! Failed authentications, by address: an address has a limited number within a time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Failures of one address before it is refused for a while.
const MAX_FAILURES: u32 = 16;
/// Time until an address with too many failures is accepted again.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);
/// Maximum number of addresses whose failures are counted.
const MAX_ADDRESSES: usize = 1024;

/// Recent authentication failures by address: their number, and the time of the first.
#[derive(Default)]
pub(crate) struct Failures(Mutex<HashMap<Box<str>, (u32, Instant)>>);

impl Failures {
    /// Counts a failure.
    pub(crate) fn note(&self, peer: &str) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|_, (_, since)| since.elapsed() < FAILURE_PAUSE);
        // With this many addresses attacking, counting more of them does not help.
        if failures.len() < MAX_ADDRESSES || failures.contains_key(address(peer)) {
            failures.entry(address(peer).into()).or_insert((0, Instant::now())).0 += 1;
        }
    }

    /// Whether a peer's address has failed too often recently.
    pub(crate) fn are_too_many(&self, peer: &str) -> bool {
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = failures.get(address(peer)).filter(|(_, since)| since.elapsed() < FAILURE_PAUSE);
        of.is_some_and(|(count, _)| *count >= MAX_FAILURES)
    }
}

/// The peer's address without its port.
fn address(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(address, _)| address)
}
