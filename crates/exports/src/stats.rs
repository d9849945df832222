//! Counters of an export.

use crate::clients::{Bytes, Clients, Connection, Moved, Peer};
use block::Op;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

    /// Counts a request of `bytes` bytes that has completed.
    #[inline]
    pub fn count_request(&self, op: Op, bytes: u64) {
        add(&self.requests[op as usize], 1);
        match op {
            Op::Read => add(&self.bytes_read, bytes),
            Op::Write => add(&self.bytes_written, bytes),
            Op::WriteZeroes | Op::Discard | Op::Flush => {}
        }
    }

    /// Adds requests that the kernel has completed.
    pub fn add_requests(&self, op: Op, requests: u64) {
        add(&self.requests[op as usize], requests);
    }

    /// Adds bytes of requests that the kernel has completed.
    pub fn add_bytes(&self, read: u64, written: u64) {
        add(&self.bytes_read, read);
        add(&self.bytes_written, written);
    }

    /// Adds failures of requests that the kernel has completed.
    pub fn add_failures(&self, failures: u64) {
        add(&self.failed, failures);
    }

    /// Counts a request that is answered with an error.
    pub fn count_failure(&self) {
        add(&self.failed, 1);
    }

    /// Counts an interrupt of a client.
    pub fn count_interrupt(&self) {
        add(&self.interrupts, 1);
    }
}

/// A single core writes at a time, so a plain load and store do not lose counts.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// Counters of an export, as sums over all queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Requests that have completed, by [`Op`].
    pub requests: [u64; Op::ALL.len()],
    /// Bytes that clients have read.
    pub bytes_read: u64,
    /// Bytes that clients have written.
    pub bytes_written: u64,
    /// Requests that were answered with an error.
    pub failed: u64,
    /// Times that a client was interrupted.
    pub interrupts: u64,
    /// Clients that are connected.
    pub clients: u64,
    /// Clients that have connected since the start.
    pub connections: u64,
}

impl Totals {
    /// The counters of an export whose earlier processes have counted `self`, and whose present one
    /// counts `now`.
    /// Clients are those of the present one.
    #[must_use]
    pub fn followed_by(&self, now: &Totals) -> Totals {
        let add = u64::saturating_add; // the other process may be hostile
        Totals {
            requests: std::array::from_fn(|op| add(self.requests[op], now.requests[op])),
            bytes_read: add(self.bytes_read, now.bytes_read),
            bytes_written: add(self.bytes_written, now.bytes_written),
            failed: add(self.failed, now.failed),
            interrupts: add(self.interrupts, now.interrupts),
            clients: now.clients,
            connections: add(self.connections, now.connections),
        }
    }
}

/// Counters of one export.
#[derive(Debug)]
pub struct Stats {
    /// One entry per queue.
    pub queues: Vec<Arc<QueueStats>>,
    clients: AtomicU64,
    connections: AtomicU64,
    listed: Mutex<Clients>,
    /// The clients of an export in another process.
    reported: Mutex<Option<ClientsReport>>,
}

/// The clients of an export, for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientsReport {
    /// The connections, the oldest first.
    pub connections: Vec<Connection>,
    /// The bytes of each NVMe host since the start.
    pub hosts: BTreeMap<String, Moved>,
}

impl Stats {
    /// Counters of an export with so many queues, all 0.
    pub fn new(queues: usize) -> Stats {
        let queues = (0..queues).map(|_| Default::default()).collect();
        Stats {
            queues,
            clients: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            listed: Mutex::default(),
            reported: Mutex::default(),
        }
    }

    /// Counters of an export in another process, which [`Stats::set_totals`] copies here.
    pub fn of_totals() -> Stats {
        Stats::new(1)
    }

    /// The sums over all queues.
    pub fn totals(&self) -> Totals {
        let sum = |of: &dyn Fn(&QueueStats) -> u64| self.queues.iter().map(|queue| of(queue)).sum();
        Totals {
            requests: Op::ALL.map(|op| sum(&|queue| queue.requests(op))),
            bytes_read: sum(&QueueStats::bytes_read),
            bytes_written: sum(&QueueStats::bytes_written),
            failed: sum(&QueueStats::failed),
            interrupts: sum(&QueueStats::interrupts),
            clients: self.clients(),
            connections: self.connections(),
        }
    }

    /// Replaces the counters of the first queue, and of clients, by sums of another process.
    pub fn set_totals(&self, totals: &Totals) {
        let queue = &self.queues[0];
        for (counter, requests) in queue.requests.iter().zip(totals.requests) {
            counter.store(requests, Ordering::Relaxed);
        }
        for (counter, total) in [
            (&queue.bytes_read, totals.bytes_read),
            (&queue.bytes_written, totals.bytes_written),
            (&queue.failed, totals.failed),
            (&queue.interrupts, totals.interrupts),
            (&self.clients, totals.clients),
            (&self.connections, totals.connections),
        ] {
            counter.store(total, Ordering::Relaxed);
        }
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

    /// The clients that are connected, the oldest first. Takes locks that requests do not.
    pub fn client_connections(&self) -> Vec<Connection> {
        match &*lock(&self.reported) {
            Some(reported) => reported.connections.clone(),
            None => lock(&self.listed).connections(),
        }
    }

    /// The bytes of each NVMe host since the start, by its NQN. Takes locks that requests do not.
    pub fn client_hosts(&self) -> BTreeMap<String, Moved> {
        match &*lock(&self.reported) {
            Some(reported) => reported.hosts.clone(),
            None => lock(&self.listed).hosts(),
        }
    }

    /// [`Stats::client_connections`] and [`Stats::client_hosts`].
    pub fn client_list(&self) -> ClientsReport {
        ClientsReport { connections: self.client_connections(), hosts: self.client_hosts() }
    }

    /// Replaces the clients by those of another process.
    pub fn set_client_list(&self, report: ClientsReport) {
        *lock(&self.reported) = Some(report);
    }

    /// Counts a client of a protocol without addresses as connected until the result is dropped.
    pub fn connect(self: &Arc<Self>) -> Connected {
        self.connect_as(Peer::default(), None)
    }

    /// The same for a connection with counters of its own.
    pub fn connect_peer(self: &Arc<Self>, peer: Peer) -> Connected {
        self.connect_as(peer, Some(Arc::default()))
    }

    fn connect_as(self: &Arc<Self>, peer: Peer, bytes: Option<Arc<Bytes>>) -> Connected {
        let number = lock(&self.listed).connect(peer, bytes.clone());
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.clients.fetch_add(1, Ordering::Relaxed);
        Connected { stats: self.clone(), number, bytes }
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connected client.
#[derive(Debug)]
pub struct Connected {
    stats: Arc<Stats>,
    number: u64,
    bytes: Option<Arc<Bytes>>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        lock(&self.stats.listed).disconnect(self.number);
        self.stats.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counters of a connection: those of its core, and its own.
#[derive(Debug)]
pub struct ConnectionStats {
    of_core: Arc<QueueStats>,
    connected: Connected,
}

impl ConnectionStats {
    /// Counters of a connection that the core with `of_core` serves.
    pub fn new(of_core: Arc<QueueStats>, connected: Connected) -> ConnectionStats {
        ConnectionStats { of_core, connected }
    }

    /// As [`QueueStats::count_request`].
    #[inline]
    pub fn count_request(&self, op: Op, bytes: u64) {
        self.of_core.count_request(op, bytes);
        if let Some(own) = &self.connected.bytes {
            own.count(op, bytes);
        }
    }

    /// As [`QueueStats::count_failure`].
    pub fn count_failure(&self) {
        self.of_core.count_failure();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_another_process_continue_those_of_its_predecessors() {
        let served = Arc::new(Stats::new(2));
        let _client = served.connect();
        served.queues[0].count_request(Op::Read, 512);
        served.queues[1].count_request(Op::Read, 1024);
        served.queues[1].count_request(Op::Write, 4096);
        served.queues[1].count_failure();
        let totals = served.totals();
        assert_eq!((totals.requests[Op::Read as usize], totals.bytes_read), (2, 1536));
        let shown = Stats::of_totals();
        shown.set_totals(&totals.followed_by(&totals));
        assert_eq!((shown.clients(), shown.connections()), (1, 2));
        assert_eq!((shown.queues[0].requests(Op::Write), shown.queues[0].bytes_written()), (2, 8192));
        let end = totals.followed_by(&Totals { clients: 0, ..Totals::default() });
        assert_eq!(end, Totals { clients: 0, ..totals });
    }
}
