//! Where time comes from.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Instant;

/// A monotonic clock.
pub trait Clock {
    /// Nanoseconds since an arbitrary fixed moment.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock. All cores of a process agree on its zero, so that a device can
/// space the requests of several.
pub struct MonotonicClock(Instant);

impl Default for MonotonicClock {
    fn default() -> Self {
        static START: OnceLock<Instant> = OnceLock::new();
        MonotonicClock(*START.get_or_init(Instant::now))
    }
}

impl Clock for MonotonicClock {
    #[inline]
    fn now_ns(&self) -> u64 {
        // 584 years fit.
        self.0.elapsed().as_nanos() as u64
    }
}

/// A clock that stands still until somebody moves it: the simulator's.
#[derive(Clone, Default)]
pub struct VirtualClock(Rc<Cell<u64>>);

impl VirtualClock {
    /// Moves time forward.
    pub fn advance(&self, ns: u64) {
        self.0.set(self.0.get() + ns);
    }
}

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        self.0.get()
    }
}
