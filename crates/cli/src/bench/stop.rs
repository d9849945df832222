//! What ends a run before its time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Looked at by every queue now and then.
#[derive(Default)]
pub struct Stop {
    is_interrupted: Arc<AtomicBool>,
    has_failed: AtomicBool,
}

impl Stop {
    /// What a signal handler raises when the user wants no more.
    pub fn interrupt_flag(&self) -> Arc<AtomicBool> {
        self.is_interrupted.clone()
    }

    /// A queue has failed: the others need not go on.
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
