//! Models of the marks of writes in the write-intent bitmap, and of the sweeps that clear them.

use super::*;
use crate::metadata::testing::config;
use loom::cell::UnsafeCell;
use loom::thread;
use reactor::sync::{AtomicBool, model, must_fail};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A map of one region, which is marked durably.
fn map() -> Arc<IntentBitmap> {
    let mut config = config(2, 1);
    config.region_bytes = config.geometry.group_stripes * u64::from(config.geometry.strip_bytes);
    assert_eq!(config.regions(), 1);
    Arc::new(IntentBitmap::new(&config, WRITTEN | DIRTY))
}

/// Sets the mark. It is already durable on all members, so this writes nothing and waits for
/// nothing.
fn mark(map: &IntentBitmap) {
    let members: Vec<Target> = Vec::new();
    let set = std::pin::pin!(map.set(0, DIRTY, &members));
    assert_eq!(set.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(())));
}

/// A write is in flight while a sweep clears marks of idle regions. From the write's load of the
/// mark to its end, every page that is written has the mark.
fn a_sweep_during_a_write() {
    let map = map();
    let writing = {
        let map = map.clone();
        thread::spawn(move || {
            map.begin(0, 1);
            mark(&map);
            assert_eq!(map.pages[0].lock().wanted[0] & DIRTY, DIRTY, "a write in flight has no mark");
            map.end(0, 1);
        })
    };
    map.sweep(&mut vec![0]);
    map.sweep_idle(0);
    writing.join().unwrap();
    // No write is in flight: a mark that the next write finds is also in `wanted`.
    let is_marked = map.has(0, DIRTY);
    assert_eq!(map.pages[0].lock().wanted[0] & DIRTY == DIRTY, is_marked);
}

/// At some moment the logging of writes begins. Once no write is in flight, no later write needs
/// the mark.
fn writes_that_begin_to_be_logged() {
    let (map, is_logging) = (map(), Arc::new(AtomicBool::new(false)));
    let unlogged = Arc::new(UnsafeCell::new(()));
    let writing = {
        let (map, is_logging, unlogged) = (map.clone(), is_logging.clone(), unlogged.clone());
        thread::spawn(move || {
            if !map.begin_unless(0, 1, || is_logging.load(Ordering::SeqCst)) {
                unlogged.with(|_| ());
                map.end(0, 1);
            }
        })
    };
    is_logging.store(true, Ordering::SeqCst);
    if map.sweep_idle(0) {
        unlogged.with_mut(|_| ()); // loom fails while an unlogged write is in flight
    }
    writing.join().unwrap();
}

#[test]
fn a_write_in_flight_keeps_its_mark() {
    model(a_sweep_during_a_write);
    must_fail("a sweep looks again for writes", a_sweep_during_a_write);
    must_fail("the bit goes before the second look", a_sweep_during_a_write);
}

#[test]
fn no_unlogged_write_comes_after_the_last_was_seen_to_end() {
    model(writes_that_begin_to_be_logged);
    must_fail("a write begins before it asks whether it is logged", writes_that_begin_to_be_logged);
}
