//! State common to all disks of a simulated machine: power, and when it fails.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

/// Time of a power failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashAt {
    /// When the disks have received this number of writes since power on.
    WriteStarted(u64),
    /// When the disks have ended this number of writes; the last one is not acknowledged.
    WriteEnded(u64),
    /// When the disks have received this number of writes of more than [`LONG_BYTES`] since power
    /// on.
    LongWriteStarted(u64),
    /// This number of nanoseconds after power on.
    Time(u64),
}

/// Length beyond which a write counts as long.
pub const LONG_BYTES: u64 = 8192;

/// A simulated machine. All of it runs in one thread; devices require the atomics and locks.
#[derive(Debug, Default)]
pub struct Machine {
    /// Grows with every power on: requests of an earlier boot fail with "gone".
    boot: AtomicU64,
    is_on: AtomicBool,
    is_kill: AtomicBool,
    writes_started: AtomicU64,
    writes_ended: AtomicU64,
    long_started: AtomicU64,
    crash_started: AtomicU64,
    crash_long: AtomicU64,
    crash_ended: AtomicU64,
    in_flight: AtomicU64,
    dropped: AtomicU64,
    is_tracing: AtomicBool,
    crash_waker: Mutex<Option<Waker>>,
}

impl Machine {
    /// A machine without power.
    pub fn new() -> Arc<Machine> {
        Arc::default()
    }

    /// Turns power on: a new boot without requests in flight.
    ///
    /// # Panics
    /// When requests of the last boot have not ended.
    pub fn power_on(&self) {
        assert_eq!(self.in_flight(), 0, "requests of the last boot are still in flight");
        self.boot.fetch_add(1, Ordering::Relaxed);
        for counter in [&self.writes_started, &self.writes_ended, &self.long_started] {
            counter.store(0, Ordering::Relaxed);
        }
        self.crash_at(None);
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Turns power off. A random part of the writes in flight survives; they fail with "gone".
    pub fn power_off(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        if let Some(waker) = self.crash_waker.lock().unwrap_or_else(PoisonError::into_inner).take() {
            waker.wake();
        }
    }

    /// Sets whether only the processes end at the next power off: disks keep their caches.
    pub fn set_kill(&self, is_kill: bool) {
        self.is_kill.store(is_kill, Ordering::Relaxed);
    }

    /// Whether only the processes end at the next power off.
    pub fn is_kill(&self) -> bool {
        self.is_kill.load(Ordering::Relaxed)
    }

    /// Whether power is on.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// The number of this boot.
    pub fn boot(&self) -> u64 {
        self.boot.load(Ordering::Relaxed)
    }

    /// Makes power fail at a write. [`CrashAt::Time`] is left to callers with a clock.
    pub fn crash_at(&self, at: Option<CrashAt>) {
        let (mut started, mut ended, mut long) = (u64::MAX, u64::MAX, u64::MAX);
        match at {
            Some(CrashAt::WriteStarted(n)) => started = n,
            Some(CrashAt::WriteEnded(n)) => ended = n,
            Some(CrashAt::LongWriteStarted(n)) => long = n,
            Some(CrashAt::Time(_)) | None => {}
        }
        self.crash_long.store(long, Ordering::Relaxed);
        self.crash_started.store(started, Ordering::Relaxed);
        self.crash_ended.store(ended, Ordering::Relaxed);
    }

    /// Converts a crash counted from now into one counted from power on.
    pub fn from_now(&self, crash: CrashAt) -> CrashAt {
        match crash {
            CrashAt::WriteStarted(count) => CrashAt::WriteStarted(self.writes_started() + count),
            CrashAt::WriteEnded(count) => {
                CrashAt::WriteEnded(self.writes_ended.load(Ordering::Relaxed) + count)
            }
            CrashAt::LongWriteStarted(count) => {
                CrashAt::LongWriteStarted(self.long_started.load(Ordering::Relaxed) + count)
            }
            CrashAt::Time(ns) => CrashAt::Time(ns),
        }
    }

    /// Wakes `waker` when power fails.
    pub fn wake_at_crash(&self, waker: &Waker) {
        *self.crash_waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
    }

    /// Number of writes that disks received since power on.
    pub fn writes_started(&self) -> u64 {
        self.writes_started.load(Ordering::Relaxed)
    }

    /// Number of requests in flight on all disks.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Number of requests with a future that was dropped before their end: a bug of the caller.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Sets whether every request is printed.
    pub fn set_tracing(&self, is_tracing: bool) {
        self.is_tracing.store(is_tracing, Ordering::Relaxed);
    }

    /// Whether requests are printed.
    pub fn is_tracing(&self) -> bool {
        self.is_tracing.load(Ordering::Relaxed)
    }

    /// Records that a disk received a request of `len` bytes.
    pub(crate) fn note_start(&self, is_write: bool, len: u64) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        if is_write {
            let is_long = len > LONG_BYTES;
            let long = self.long_started.fetch_add(is_long.into(), Ordering::Relaxed) + 1;
            if is_long && long == self.crash_long.load(Ordering::Relaxed) {
                self.power_off();
            }
            let count = self.writes_started.fetch_add(1, Ordering::Relaxed) + 1;
            if count == self.crash_started.load(Ordering::Relaxed) {
                self.power_off();
            }
        }
    }

    /// Records that a write has reached its disk; power may fail before its acknowledgement.
    pub(crate) fn note_write(&self) {
        let count = self.writes_ended.fetch_add(1, Ordering::Relaxed) + 1;
        if count == self.crash_ended.load(Ordering::Relaxed) {
            self.power_off();
        }
    }

    pub(crate) fn note_end(&self, was_dropped: bool) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.dropped.fetch_add(was_dropped.into(), Ordering::Relaxed);
    }
}
