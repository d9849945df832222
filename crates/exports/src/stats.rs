//! Counters of an export.

use block::Op;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one queue, or of one core if clients bring any number of queues. The core that
/// serves it writes; any thread may read. Has cache lines of its own.
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
    /// Completed requests of this kind, failed ones included.
    pub fn requests(&self, op: Op) -> u64 {
        self.requests[op as usize].load(Ordering::Relaxed)
    }

    /// Bytes read by clients.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Bytes written by clients.
    pub fn bytes_written(&self) -> u64 {
        self.bytes_written.load(Ordering::Relaxed)
    }

    /// Requests answered with an error.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Interrupts sent to clients, if the protocol has them.
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

/// A single core writes at a time, so a plain load and store do not lose counts.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// Counters of one export.
#[derive(Debug)]
pub struct Stats {
    /// One entry per queue.
    pub queues: Vec<Arc<QueueStats>>,
    clients: AtomicU64,
    connections: AtomicU64,
}

impl Stats {
    pub(crate) fn new(queues: usize) -> Stats {
        let queues = (0..queues).map(|_| Default::default()).collect();
        Stats { queues, clients: AtomicU64::new(0), connections: AtomicU64::new(0) }
    }

    /// The number of connected clients.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::Relaxed)
    }

    /// Whether a client is connected.
    pub fn is_connected(&self) -> bool {
        self.clients() > 0
    }

    /// The number of connections since the start.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a client as connected until the result is dropped.
    pub(crate) fn connect(self: &Arc<Self>) -> Connected {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.clients.fetch_add(1, Ordering::Relaxed);
        Connected(self.clone())
    }
}

/// A connected client.
#[derive(Debug)]
pub(crate) struct Connected(Arc<Stats>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}
