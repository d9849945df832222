//! The clocks of a core.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Instant;

/// A monotonic clock.
pub trait Clock {
    /// Nanoseconds since an arbitrary fixed moment.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock. Its zero is the same for all cores of a process, so that a device
/// can space the requests of several cores.
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

/// The simulator's clock. It stands still until [`VirtualClock::advance`].
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
