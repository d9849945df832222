//! Requests on a bare queue, for the tests of drivers.

use crate::direct::DirectQueue;
use block::{Data, IoResult, Request, Segment};
use std::time::{Duration, Instant};

/// Longest time until requests end, on a busy machine as well.
const LONG: Duration = Duration::from_secs(60);

/// Pushes a request; its memory outlives the test's queue.
pub fn push<Q: DirectQueue>(queue: &mut Q, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
    // SAFETY: every test keeps list and memory until its requests have ended.
    unsafe { queue.push(slot, req, offset) }
}

/// The memory of a request.
pub fn data(segments: &[Segment]) -> Data<'_> {
    // SAFETY: every test keeps list and memory until its requests have ended.
    unsafe { Data::new(segments) }
}

/// The only segment of a request.
pub fn segment(bytes: &mut [u8]) -> [Segment; 1] {
    [Segment { base: bytes.as_mut_ptr(), len: bytes.len() }]
}

/// Waits until `count` requests have ended; returns their slots and results, by slot.
pub fn ends<Q: DirectQueue>(queue: &mut Q, count: usize) -> Vec<(u32, IoResult)> {
    let (start, mut ended) = (Instant::now(), Vec::new());
    while ended.len() < count {
        queue.wait(1, Some(LONG), None).expect("a completion");
        queue.reap(&mut |slot, result| ended.push((slot, result)));
        assert!(start.elapsed() < LONG, "only {ended:?}");
    }
    ended.sort_by_key(|(slot, _)| *slot);
    ended
}
