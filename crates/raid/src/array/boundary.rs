//! The boundary between the geometries of a reshape, shared by all cores: the number of moved
//! bytes, and the end of the window that is being moved.
//!
//! Claim, with a model (`cfg(loom)`, at the end of the file): a request may use the geometry of its
//! bytes until its core next answers messages. It never meets the move of these bytes, and finds
//! the moved content.

use crate::mutant::{self, Mutant};
use reactor::sync::{AtomicU64, is_broken};
use std::future::Future;
use std::sync::atomic::Ordering;

/// The geometry of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Old,
    New,
}

pub(super) struct Boundary {
    moved: AtomicU64,
    window_end: AtomicU64,
}

impl Boundary {
    /// A boundary with `moved` moved bytes and no open window.
    pub fn new(moved: u64) -> Boundary {
        Boundary { moved: AtomicU64::new(moved), window_end: AtomicU64::new(moved) }
    }

    /// Number of moved bytes.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::SeqCst)
    }

    /// Whether a window is open.
    pub fn is_moving(&self) -> bool {
        self.window_end.load(Ordering::SeqCst) != self.moved()
    }

    /// Opens a window from the moved bytes to `end`, whose geometry is then undefined. Then runs
    /// `drain`, which waits for requests that were routed before.
    pub async fn open<F: Future<Output = ()>>(&self, end: u64, drain: impl FnOnce() -> F) {
        let is_late = is_broken("the window opens before requests are drained");
        if !is_late {
            self.window_end.store(end, Ordering::SeqCst);
        }
        drain().await;
        if is_late {
            self.window_end.store(end, Ordering::SeqCst);
        }
    }

    /// Closes the window and sets the moved bytes to `end`: the begin or the end of the window.
    pub fn close(&self, end: u64) {
        let order = match is_broken("the end of a move is stored with release") {
            false => Ordering::SeqCst,
            true => Ordering::Relaxed,
        };
        self.moved.store(end, order);
        self.window_end.store(end, order);
    }

    /// The geometry of the first of some bytes, and the number of bytes that have it; `None` while
    /// they are being moved.
    pub fn shape_of(&self, offset: u64, len: u64) -> Option<(Shape, u64)> {
        // In this order: a window that closes and another that opens in between look like one
        // longer window.
        let moved = self.moved.load(Ordering::SeqCst);
        let window_end = self.window_end.load(Ordering::SeqCst);
        if offset < moved {
            Some((Shape::New, len.min(moved - offset)))
        } else if offset >= window_end || mutant::is(Mutant::CrossFreely) {
            Some((Shape::Old, len))
        } else {
            None
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::mpsc;
    use loom::thread;
    use reactor::sync::{model, must_fail};
    use std::sync::Arc;

    /// A byte in each geometry.
    #[derive(Default)]
    struct Byte {
        old: UnsafeCell<u8>,
        new: UnsafeCell<u8>,
    }

    /// A request that writes the byte at 0 unless it is being moved; loom fails if it meets the
    /// move.
    fn write(boundary: &Boundary, byte: &Byte, value: u8) -> bool {
        let Some((shape, _)) = boundary.shape_of(0, 1) else { return false };
        let place = if shape == Shape::Old { &byte.old } else { &byte.new };
        // SAFETY: loom checks that no other access runs at the same time.
        place.with_mut(|place| unsafe { *place = value });
        true
    }

    /// One core takes requests, before and after it answers that it has none in flight, while
    /// another core moves the byte.
    fn requests_during_a_move() {
        let (boundary, byte) = (Arc::new(Boundary::new(0)), Arc::new(Byte::default()));
        let ((ask, asked), (answer, answered)) = (mpsc::channel(), mpsc::channel());
        let core = {
            let (boundary, byte) = (boundary.clone(), byte.clone());
            thread::spawn(move || {
                assert!(write(&boundary, &byte, 1) || boundary.window_end.load(Ordering::SeqCst) == 1);
                asked.recv().unwrap();
                answer.send(()).unwrap();
                write(&boundary, &byte, 2)
            })
        };
        loom::future::block_on(boundary.open(1, || async {
            ask.send(()).unwrap();
            answered.recv().unwrap();
        }));
        // SAFETY: as above.
        let value = byte.old.with(|old| unsafe { *old });
        // SAFETY: as above.
        byte.new.with_mut(|new| unsafe { *new = value });
        boundary.close(1);
        let has_written = core.join().unwrap();
        // SAFETY: as above.
        let found = byte.new.with(|new| unsafe { *new });
        assert!(if has_written { found == 2 } else { found <= 1 }, "{found}");
        assert_eq!(boundary.shape_of(0, 1), Some((Shape::New, 1)));
    }

    #[test]
    fn no_request_meets_the_move_of_its_bytes() {
        model(requests_during_a_move);
        must_fail("the window opens before requests are drained", requests_during_a_move);
        must_fail("the end of a move is stored with release", requests_during_a_move);
    }
}
