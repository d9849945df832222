//! Routes requests during a reshape: which geometry has a byte, and which requests wait while bytes
//! are moved.
//!
//! ```text
//!   array   0 ─────────────── moved ─────────────── window's end ─────────────── capacity
//!             the new geometry        being moved               the old geometry
//!                                     requests wait
//! ```
//!
//! Reads go directly to members, so the task that moves a window must know that no request is in
//! flight there. Every core that takes requests has a [`RequestTracker`], which tracks them.

use super::boundary::{Boundary, Shape};
use crate::Geometry;
use crate::metadata::{Reshape, Table};
use reactor::CoreRef;
use std::cell::RefCell;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A reshape in progress, shared by all cores.
pub(crate) struct ReshapeRouter {
    /// The reshape at the start of the array.
    reshape: Reshape,
    new: Geometry,
    /// Capacity of the array in the old geometry, in bytes.
    pub old_bytes: u64,
    /// Capacity of the array in the new geometry, in bytes.
    pub new_bytes: u64,
    boundary: Boundary,
    is_over: AtomicBool,
    /// Cores that take requests.
    trackers: Mutex<Vec<CoreRef>>,
}

/// The stripes of both geometries as one walk: first those of the new geometry with the moved
/// bytes, then those of the old one with the rest. It is constant while no window is moved, and no
/// window is moved while a slot has an incoming device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Stripes of the new geometry.
    new: u64,
    /// The first stripe of the old geometry.
    first_old: u64,
    /// The stripe behind the last one of the old geometry.
    end_old: u64,
}

impl Walk {
    /// The walk of an array with `moved` bytes in the new geometry.
    pub fn of(old: &Geometry, new: &Geometry, moved: u64) -> Walk {
        Walk {
            new: (moved / new.stripe_bytes()).min(new.stripes()),
            first_old: (moved / old.stripe_bytes()).min(old.stripes()),
            end_old: old.stripes(),
        }
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.new + self.end_old - self.first_old
    }

    /// Difference between the number of a stripe of the old geometry and its step.
    pub fn skipped(&self) -> u64 {
        self.first_old.saturating_sub(self.new) // no old stripe follows the last one
    }

    /// The stripe at a step, with its geometry.
    pub fn stripe(&self, step: u64) -> (Shape, u64) {
        if step < self.new { (Shape::New, step) } else { (Shape::Old, step - self.new + self.first_old) }
    }
}

impl ReshapeRouter {
    /// The walk over both geometries.
    pub fn walk(&self) -> Walk {
        Walk::of(&self.reshape.old_geometry, &self.new, self.moved())
    }

    /// Whether a window is being moved.
    pub fn is_moving(&self) -> bool {
        self.boundary.is_moving()
    }

    /// From a checked table.
    pub fn new(table: &Table, reshape: Reshape) -> ReshapeRouter {
        let (old, new) = (&reshape.old_geometry, &table.config.geometry);
        ReshapeRouter {
            reshape,
            new: *new,
            old_bytes: old.capacity(),
            new_bytes: new.capacity(),
            boundary: Boundary::new(reshape.cursor),
            is_over: AtomicBool::new(false),
            trackers: Mutex::default(),
        }
    }

    /// Whether the reshape has not ended.
    #[inline]
    pub fn is_on(&self) -> bool {
        !self.is_over.load(Ordering::Acquire)
    }

    /// Ends the reshape.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Bytes of the array in the new geometry: whole units.
    pub fn moved(&self) -> u64 {
        self.boundary.moved()
    }

    /// The end of the next window of about `bytes`, but at least one unit; `None` if all bytes are
    /// moved. The last unit may end behind the array.
    pub fn next_end(&self, bytes: u64) -> Option<u64> {
        let (moved, unit) = (self.moved(), self.reshape.unit_bytes(&self.new));
        let most = self.reshape.most_units(&self.new, moved / unit).max(1);
        let end = moved + (bytes / unit).clamp(1, most) * unit;
        (moved < self.new_bytes).then(|| end.min(self.reshape.end(&self.new)))
    }

    /// Blocks new requests from the moved bytes to `end`. Then runs `drain`, which waits for those
    /// in flight there.
    pub async fn open_window<F: Future<Output = ()>>(&self, end: u64, drain: impl FnOnce() -> F) {
        self.boundary.open(end, drain).await;
    }

    /// Sets the end of the moved bytes to `end`: the begin or the end of the window. Requests that
    /// wait have to be woken.
    pub fn close_window(&self, end: u64) {
        self.boundary.close(end);
    }

    /// The cores that take requests.
    pub fn trackers(&self) -> Vec<CoreRef> {
        self.trackers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a core that takes requests.
    pub fn add_tracker(&self, core: CoreRef) {
        self.trackers.lock().unwrap_or_else(PoisonError::into_inner).push(core);
    }
}

/// Tracks the requests of one core.
#[derive(Default)]
pub(crate) struct RequestTracker {
    inside: RefCell<Vec<(u64, u64)>>,
    waiting: RefCell<Vec<Waker>>,
}

/// A tracked part of a request; dropping it ends the tracking.
pub(crate) struct Inside<'a> {
    tracker: &'a RequestTracker,
    part: (u64, u64),
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut inside = self.tracker.inside.borrow_mut();
        if let Some(place) = inside.iter().position(|part| *part == self.part) {
            inside.swap_remove(place);
        }
        drop(inside);
        self.tracker.wake();
    }
}

impl RequestTracker {
    /// Waits until the first of some bytes are not being moved, and tracks the part of them in one
    /// geometry. `None` if `must_end` returns true while they are being moved.
    pub async fn enter(
        &self,
        router: &ReshapeRouter,
        (offset, len): (u64, u64),
        must_end: impl Fn() -> bool,
    ) -> Option<(Shape, u64, Inside<'_>)> {
        let found = || match router.boundary.shape_of(offset, len) {
            Some((shape, len)) => Some(Some((shape, len))),
            None if must_end() => Some(None),
            None => None,
        };
        let (shape, len) = self.wait(found).await?;
        let part = (offset, offset + len);
        self.inside.borrow_mut().push(part);
        Some((shape, len, Inside { tracker: self, part }))
    }

    /// Waits until no tracked request has bytes in this range.
    pub async fn drain(&self, from: u64, to: u64) {
        let is_free = || self.inside.borrow().iter().all(|part| part.1 <= from || part.0 >= to);
        self.wait(|| is_free().then_some(())).await;
    }

    async fn wait<R>(&self, mut look: impl FnMut() -> Option<R>) -> R {
        std::future::poll_fn(|cx| match look() {
            Some(result) => Poll::Ready(result),
            None => {
                self.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }

    /// Wakes waiting requests, which check their bytes again.
    pub fn wake(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }
}
