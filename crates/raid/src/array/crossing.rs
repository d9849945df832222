//! An array that changes its shape: which shape holds a byte, and who waits while bytes change over.
//!
//! ```text
//!   array   0 ─────────────── moved ─────────────── window's end ─────────────── capacity
//!             the new shape           being moved               the old shape
//!                                     requests wait
//! ```
//!
//! Reads go straight to members, so whoever moves a window must know that no request is under way there: every core
//! that takes requests has a [`Front`], where they sign in.

use super::boundary::{Boundary, Shape};
use super::owner::Owner;
use super::registry;
use super::remote::{self, LocalFuture};
use crate::Geometry;
use crate::metadata::{Reshape, Table};
use reactor::CoreRef;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A change of shape as all cores see it.
pub(crate) struct Crossing {
    /// As it was when the array was started.
    reshape: Reshape,
    new: Geometry,
    /// Bytes of the array in the old shape.
    pub old_bytes: u64,
    /// Bytes of the array in the new shape.
    pub new_bytes: u64,
    boundary: Boundary,
    is_over: AtomicBool,
    /// Cores that take requests.
    fronts: Mutex<Vec<CoreRef>>,
}

/// The stripes of both shapes as one walk: those of the new shape that hold what is moved, then those of the old one
/// that hold the rest. It stays as it is while no window is moved, and none is while a slot is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Stripes of the new shape.
    new: u64,
    /// The first stripe of the old shape.
    first_old: u64,
    /// The stripe behind the last one of the old shape.
    end_old: u64,
}

impl Walk {
    /// The walk of an array of which `moved` bytes have the new shape.
    pub fn of(old: &Geometry, new: &Geometry, moved: u64) -> Walk {
        Walk {
            new: (moved / new.stripe_bytes()).min(new.stripes()),
            first_old: (moved / old.stripe_bytes()).min(old.stripes()),
            end_old: old.stripes(),
        }
    }

    /// How many steps it has.
    pub fn steps(&self) -> u64 {
        self.new + self.end_old - self.first_old
    }

    /// By how much the number of a stripe of the old shape exceeds its step.
    pub fn skipped(&self) -> u64 {
        self.first_old.saturating_sub(self.new) // behind the last old stripe there is nothing to be numbered
    }

    /// The stripe at a step, and its shape.
    pub fn stripe(&self, step: u64) -> (Shape, u64) {
        if step < self.new { (Shape::New, step) } else { (Shape::Old, step - self.new + self.first_old) }
    }
}

impl Crossing {
    /// The walk over both shapes.
    pub fn walk(&self) -> Walk {
        Walk::of(&self.reshape.old_geometry, &self.new, self.moved())
    }

    /// Whether a window is being moved.
    pub fn is_moving(&self) -> bool {
        self.boundary.is_moving()
    }

    /// What a table says, which has been checked.
    pub fn new(table: &Table, reshape: Reshape) -> Crossing {
        let (old, new) = (&reshape.old_geometry, &table.config.geometry);
        Crossing {
            reshape,
            new: *new,
            old_bytes: old.capacity(),
            new_bytes: new.capacity(),
            boundary: Boundary::new(reshape.cursor),
            is_over: AtomicBool::new(false),
            fronts: Mutex::default(),
        }
    }

    /// Whether there are still two shapes.
    #[inline]
    pub fn is_on(&self) -> bool {
        !self.is_over.load(Ordering::Acquire)
    }

    /// From now on there is one shape.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Bytes of the array that have the new shape: whole units.
    pub fn moved(&self) -> u64 {
        self.boundary.moved()
    }

    /// Where the next window may end when it is to have `bytes` or, if a unit is more than that, one unit; `None` when
    /// all is moved. The last unit may end behind the array.
    pub fn next_end(&self, bytes: u64) -> Option<u64> {
        let (moved, unit) = (self.moved(), self.reshape.unit_bytes(&self.new));
        let most = self.reshape.most_units(&self.new, moved / unit).max(1);
        let end = moved + (bytes / unit).clamp(1, most) * unit;
        (moved < self.new_bytes).then(|| end.min(self.reshape.end(&self.new)))
    }

    /// Lets no request in from what is moved to `end`, and waits for those under way there.
    pub async fn open_window(&self, lead: u64, end: u64) {
        let moved = self.moved();
        let drain = move |owner: Rc<Owner>| -> LocalFuture<()> {
            Box::pin(async move { owner.front.drain(moved, end).await })
        };
        self.boundary.open(end, || self.at_fronts(lead, drain)).await;
    }

    /// What is moved ends at `end` from now on: where the window began or where it ended. Requests go on.
    pub async fn close_window(&self, lead: u64, end: u64) {
        self.boundary.close(end);
        self.wake(lead).await;
    }

    /// Requests that wait look again.
    pub async fn wake(&self, lead: u64) {
        self.at_fronts(lead, |owner| Box::pin(async move { owner.front.wake() })).await;
    }

    /// A core takes requests from now on.
    pub fn add_front(&self, core: CoreRef) {
        self.fronts.lock().unwrap_or_else(PoisonError::into_inner).push(core);
    }

    async fn at_fronts<W>(&self, lead: u64, work: W)
    where
        W: FnOnce(Rc<Owner>) -> LocalFuture<()> + Clone + Send + 'static,
    {
        let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for core in fronts {
            let work = work.clone();
            let done = remote::call(&core, move || match registry::find(lead) {
                Some(owner) => work(owner),
                None => Box::pin(std::future::ready(())),
            });
            let _ = done.await; // a core that has ended runs nothing
        }
    }
}

/// Where a core's requests sign in.
#[derive(Default)]
pub(crate) struct Front {
    inside: RefCell<Vec<(u64, u64)>>,
    waiting: RefCell<Vec<Waker>>,
}

/// A part of a request that has signed in; it signs out when this is dropped.
pub(crate) struct Inside<'a> {
    front: &'a Front,
    part: (u64, u64),
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut inside = self.front.inside.borrow_mut();
        if let Some(place) = inside.iter().position(|part| *part == self.part) {
            inside.swap_remove(place);
        }
        drop(inside);
        self.front.wake();
    }
}

impl Front {
    /// Signs the first part of some bytes in that is all of one shape, once it is not being moved. `None` when
    /// `must_end` says that it will not be any more.
    pub async fn enter(
        &self,
        crossing: &Crossing,
        (offset, len): (u64, u64),
        must_end: impl Fn() -> bool,
    ) -> Option<(Shape, u64, Inside<'_>)> {
        let found = || match crossing.boundary.shape_of(offset, len) {
            Some((shape, len)) => Some(Some((shape, len))),
            None if must_end() => Some(None),
            None => None,
        };
        let (shape, len) = self.wait(found).await?;
        let part = (offset, offset + len);
        self.inside.borrow_mut().push(part);
        Some((shape, len, Inside { front: self, part }))
    }

    /// Waits until no request is signed in that has bytes of this range.
    async fn drain(&self, from: u64, to: u64) {
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

    fn wake(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }
}
