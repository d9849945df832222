//! What an export counts.

use block::Op;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one queue, or of one core where clients bring any number of queues. Written by the core that serves
/// it, read by anyone; cache lines of its own.
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

    /// Bytes that clients have read.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Bytes that clients have written.
    pub fn bytes_written(&self) -> u64 {
        self.bytes_written.load(Ordering::Relaxed)
    }

    /// Requests that were answered with an error.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Times that a client was interrupted, where the protocol has that.
    pub fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn count_request(&self, op: Op, bytes: u64) {
        add(&self.requests[op as usize], 1);
        match op {
            Op::Read => add(&self.bytes_read, bytes),
            Op::Write => add(&self.bytes_written, bytes),
            Op::WriteZeroes | Op::Discard | Op::Flush => {}
        }
    }

    pub(crate) fn count_failure(&self) {
        add(&self.failed, 1);
    }

    pub(crate) fn count_interrupt(&self) {
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
    pub queues: Vec<Arc<QueueStats>>,
    clients: AtomicU64,
    connections: AtomicU64,
}

impl Stats {
    pub(crate) fn new(queues: usize) -> Stats {
        let queues = (0..queues).map(|_| Default::default()).collect();
        Stats { queues, clients: AtomicU64::new(0), connections: AtomicU64::new(0) }
    }

    /// How many clients are connected.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::Relaxed)
    }

    /// Whether a client is connected.
    pub fn is_connected(&self) -> bool {
        self.clients() > 0
    }

    /// How many clients have connected since the start.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// A client has connected; it counts as connected until what is returned is dropped.
    pub(crate) fn connect(self: &Arc<Self>) -> Connected {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.clients.fetch_add(1, Ordering::Relaxed);
        Connected(self.clone())
    }
}

/// A client that is connected.
#[derive(Debug)]
pub(crate) struct Connected(Arc<Stats>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}
