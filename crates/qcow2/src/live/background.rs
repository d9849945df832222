//! Work of the home that no request waits for. The close of the image does.

use reactor::Permits;
use std::cell::Cell;
use std::future::{Future, ready};

/// More than there is at a time.
const MOST: usize = usize::MAX >> 1;

/// See the module.
pub(super) struct Background {
    running: Permits,
    is_closed: Cell<bool>,
}

impl Background {
    pub(super) fn new() -> Background {
        Background { running: Permits::new(MOST), is_closed: Cell::new(false) }
    }

    /// Does `work`, unless the image is closed. Work that waits for other cores delays the close.
    pub(super) async fn run(&self, work: impl Future<Output = ()>) {
        if !self.is_closed.get() {
            self.running.during(1, work).await;
        }
    }

    /// Waits for all work that has begun.
    pub(super) async fn ended(&self) {
        self.running.during(MOST, ready(())).await;
    }

    /// From now on no work begins.
    pub(super) fn close(&self) {
        self.is_closed.set(true);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.get()
    }
}
