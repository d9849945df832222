//! What an export counts.

use block::Op;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters of one queue. Written by the core that serves it, read by anyone; a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    requests: [AtomicU64; Op::ALL.len()],
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    failed: AtomicU64,
    interrupts: AtomicU64,
}

impl QueueStats {
    /// Requests of this kind that have completed, well or not.
    pub fn requests(&self, op: Op) -> u64 {
        self.requests[op as usize].load(Ordering::Relaxed)
    }

    /// Bytes that the guest has read.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Bytes that the guest has written.
    pub fn bytes_written(&self) -> u64 {
        self.bytes_written.load(Ordering::Relaxed)
    }

    /// Requests that were answered with an error.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Times that the guest was interrupted.
    pub fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn count_request(&self, op: Op, bytes: u64) {
        add(&self.requests[op as usize], 1);
        match op {
            Op::Read => add(&self.bytes_read, bytes),
            Op::Write => add(&self.bytes_written, bytes),
            Op::WriteZeroes | Op::Discard | Op::Flush => {}
        }
    }

    pub(super) fn count_failure(&self) {
        add(&self.failed, 1);
    }

    pub(super) fn count_interrupt(&self) {
        add(&self.interrupts, 1);
    }
}

/// One core writes at a time, so a plain load and store count right.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// Counters of one export.
#[derive(Debug)]
pub struct Stats {
    /// One entry a queue.
    pub queues: Vec<std::sync::Arc<QueueStats>>,
    pub(super) is_connected: AtomicBool,
    pub(super) connections: AtomicU64,
}

impl Stats {
    pub(super) fn new(queues: u16) -> Stats {
        let queues = (0..queues).map(|_| Default::default()).collect();
        Stats { queues, is_connected: AtomicBool::new(false), connections: AtomicU64::new(0) }
    }

    /// Whether a client is connected.
    pub fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }

    /// How many clients have connected since the start.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }
}
