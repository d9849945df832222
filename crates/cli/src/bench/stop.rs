//! Ends a run early.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Looked at by every queue now and then.
#[derive(Default)]
pub struct Stop {
    is_interrupted: Arc<AtomicBool>,
    has_failed: AtomicBool,
}

impl Stop {
    /// The flag that a signal handler raises to end the run.
    pub fn interrupt_flag(&self) -> Arc<AtomicBool> {
        self.is_interrupted.clone()
    }

    /// A queue has failed: the others stop.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Whether the user wants no more.
    pub fn is_interrupted(&self) -> bool {
        self.is_interrupted.load(Ordering::Relaxed)
    }

    /// Whether to end now.
    pub fn is_raised(&self) -> bool {
        self.is_interrupted() || self.has_failed.load(Ordering::Relaxed)
    }
}
