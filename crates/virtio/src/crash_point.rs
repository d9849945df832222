//! Marks the points where killing a process has consequences: before each store that another
//! process will see.

/// Marks such a point. Tests end the simulated process here; otherwise it does nothing.
#[inline(always)]
pub(crate) fn crash_point() {
    #[cfg(test)]
    fuse::burn();
}

/// Lets tests choose the point.
#[cfg(test)]
pub(crate) mod fuse {
    use std::cell::Cell;

    thread_local!(static LEFT: Cell<u64> = const { Cell::new(u64::MAX) });

    /// The panic payload of a "killed" process.
    pub(crate) struct Killed;

    /// Runs `process` and kills it before its store number `stores`; `None` when it was killed.
    pub(crate) fn run_killed_after<R>(stores: u64, process: impl FnOnce() -> R) -> Option<R> {
        LEFT.set(stores);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(process));
        LEFT.set(u64::MAX);
        match result {
            Ok(value) => Some(value),
            Err(payload) if payload.is::<Killed>() => None,
            Err(payload) => std::panic::resume_unwind(payload),
        }
    }

    pub(super) fn burn() {
        match LEFT.get() {
            u64::MAX => {}
            0 => std::panic::resume_unwind(Box::new(Killed)), // no message: this is no failure
            left => LEFT.set(left - 1),
        }
    }
}
