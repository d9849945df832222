//! Models of the marks that writes leave in the region map, and of those who take them away.

use super::*;
use crate::metadata::testing::config;
use loom::cell::UnsafeCell;
use loom::thread;
use reactor::sync::{AtomicBool, model, must_fail};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A map of one region, which is marked durably.
fn map() -> Arc<RegionMap> {
    let mut config = config(2, 1);
    config.region_bytes = config.geometry.group_stripes * u64::from(config.geometry.strip_bytes);
    assert_eq!(config.regions(), 1);
    Arc::new(RegionMap::new(&config, WRITTEN | DIRTY))
}

/// Sets the mark. It is durable on all members already, so nothing is written and nothing is waited for.
fn mark(map: &RegionMap) {
    let members: Vec<Target> = Vec::new();
    let set = std::pin::pin!(map.set(0, DIRTY, &members));
    assert_eq!(set.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(())));
}

/// A write is in flight while marks of idle regions are cleared. From its look at the mark to its end, whatever page is
/// written has the mark.
fn a_sweep_beside_a_write() {
    let map = map();
    let writing = {
        let map = map.clone();
        thread::spawn(move || {
            map.begin(0);
            mark(&map);
            assert_eq!(map.pages[0].lock().wanted[0] & DIRTY, DIRTY, "a write in flight has no mark");
            map.end(0);
        })
    };
    map.sweep(&mut vec![0]);
    map.sweep_idle(0);
    writing.join().unwrap();
    // Nothing is in flight: the next write that finds the mark finds it in what is wanted, too.
    let is_marked = map.has(0, DIRTY);
    assert_eq!(map.pages[0].lock().wanted[0] & DIRTY == DIRTY, is_marked);
}

/// From some moment on writes are logged. Once no write is in flight, none that needs the mark comes any more.
fn writes_that_begin_to_be_logged() {
    let (map, is_logging) = (map(), Arc::new(AtomicBool::new(false)));
    let unlogged = Arc::new(UnsafeCell::new(()));
    let writing = {
        let (map, is_logging, unlogged) = (map.clone(), is_logging.clone(), unlogged.clone());
        thread::spawn(move || {
            if !map.begin_unless(0, || is_logging.load(Ordering::SeqCst)) {
                unlogged.with(|_| ());
                map.end(0);
            }
        })
    };
    is_logging.store(true, Ordering::SeqCst);
    if map.sweep_idle(0) {
        unlogged.with_mut(|_| ()); // loom fails when a write without a log is under way
    }
    writing.join().unwrap();
}

#[test]
fn a_write_in_flight_keeps_its_mark() {
    model(a_sweep_beside_a_write);
    must_fail("a sweep looks again for writes", a_sweep_beside_a_write);
    must_fail("the bit goes before the second look", a_sweep_beside_a_write);
}

#[test]
fn no_unlogged_write_comes_after_the_last_was_seen_to_end() {
    model(writes_that_begin_to_be_logged);
    must_fail("a write begins before it asks whether it is logged", writes_that_begin_to_be_logged);
}
