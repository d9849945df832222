//! What all disks of a simulated machine share: power, and when it goes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

/// When power fails by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashAt {
    /// When the disks have been given that many writes since power came.
    WriteStarted(u64),
    /// When the disks have ended that many writes; nobody hears of the last one's end.
    WriteEnded(u64),
    /// When the disks have been given that many writes of more than [`LONG_BYTES`] since power came.
    LongWriteStarted(u64),
    /// That many nanoseconds after power came.
    Time(u64),
}

/// Bytes beyond which a write counts as long.
pub const LONG_BYTES: u64 = 8192;

/// A simulated machine. All of it runs in one thread; atomics and locks are here because devices must have them.
#[derive(Debug, Default)]
pub struct Machine {
    /// Grows with every power on: requests of an earlier boot are answered with "gone".
    boot: AtomicU64,
    is_on: AtomicBool,
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

    /// Power comes: a new boot, nothing in flight.
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

    /// Power goes. What is in flight survives as its disk's dice fall, and is answered with "gone".
    pub fn power_off(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        if let Some(waker) = self.crash_waker.lock().unwrap_or_else(PoisonError::into_inner).take() {
            waker.wake();
        }
    }

    /// Whether there is power.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// The number of this boot.
    pub fn boot(&self) -> u64 {
        self.boot.load(Ordering::Relaxed)
    }

    /// Lets power fail at a write. [`CrashAt::Time`] is for whoever has a clock.
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

    /// A crash counted from now on, as one counted from when power came.
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

    /// Wakes `waker` when power goes.
    pub fn wake_at_crash(&self, waker: &Waker) {
        *self.crash_waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
    }

    /// Writes given to disks since power came.
    pub fn writes_started(&self) -> u64 {
        self.writes_started.load(Ordering::Relaxed)
    }

    /// Requests in flight on all disks.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Requests whose future was dropped before they had ended: a bug of the caller.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Prints every request from now on.
    pub fn set_tracing(&self, is_tracing: bool) {
        self.is_tracing.store(is_tracing, Ordering::Relaxed);
    }

    /// Whether requests are printed.
    pub fn is_tracing(&self) -> bool {
        self.is_tracing.load(Ordering::Relaxed)
    }

    /// A request of `len` bytes is given to a disk.
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

    /// A write has reached its disk; power may go before anybody hears of it.
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
