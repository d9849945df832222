//! Memory for the data of requests, between socket and device.
//!
//! Requests do not use the core's own pool. Drivers and layers need that pool to complete a
//! request, so waiting requests must not hold it. A store has no limit of its own: each allocation
//! is charged to its connection's account ([`super::budget`]). So a client that reads slowly uses
//! up its own memory and no other client's.

use super::budget::Charge;
use crate::DataMemory;
use block::{Data, Segment};
use reactor::{Buffer, BufferPool, Core, MAX_BUFFER};
use std::cell::RefCell;
use std::rc::Rc;

/// Free bytes that a store keeps on an idle core.
const STOCK: usize = 2 * MAX_BUFFER;
/// Empty lists kept for later requests.
const SPARE: usize = 256;
/// The shortest buffer of a pool.
const MIN_BUFFER: usize = 4096;

/// The memory allocator of one export on one core.
#[derive(Clone)]
pub struct Store(Rc<Shared>);

struct Shared {
    pool: BufferPool,
    spare: RefCell<Vec<Lists>>,
}

/// A request's memory, as owned buffers and as lent segments.
#[derive(Default)]
struct Lists {
    buffers: Vec<Buffer>,
    segments: Vec<Segment>,
}

/// Memory of one request. Returns to its store when dropped.
pub struct Memory {
    lists: Lists,
    len: usize,
    store: Store,
    /// The charge to the connection's account, if it counts.
    charge: Option<Charge>,
}

impl Store {
    /// Creates an empty store, whose free memory goes back to the system while `core` sleeps.
    pub fn new(core: &Core) -> Store {
        // The budgets of its users bound the pool.
        let pool = BufferPool::new(usize::MAX >> 1);
        core.trim_when_idle(&pool, STOCK);
        Store(Rc::new(Shared { pool, spare: RefCell::default() }))
    }

    /// Bytes that memory for `len` bytes costs of a budget.
    #[inline]
    pub fn cost(len: usize) -> usize {
        let rest = len % MAX_BUFFER;
        let rest = if rest == 0 { 0 } else { rest.max(MIN_BUFFER).next_power_of_two() };
        len - len % MAX_BUFFER + rest
    }

    /// Memory for `len` bytes, whose content is undefined.
    #[inline]
    pub fn take(&self, len: usize) -> Memory {
        let mut lists = self.0.spare.borrow_mut().pop().unwrap_or_default();
        let mut left = len;
        while left > 0 {
            let buffer = self.0.pool.try_take(left.min(MAX_BUFFER)).expect("a store has no limit of its own");
            left -= buffer.segment().len;
            lists.segments.push(buffer.segment());
            lists.buffers.push(buffer);
        }
        Memory { lists, len, store: self.clone(), charge: None }
    }

    /// As [`Store::take`], charged to a connection.
    #[inline]
    pub fn take_charged(&self, len: usize, charge: Charge) -> Memory {
        let mut memory = self.take(len);
        memory.charge = Some(charge);
        memory
    }
}

impl Memory {
    /// The memory as segments.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        &self.lists.segments
    }

    /// Keeps `len` bytes from `start` on, moves them to the front, and releases the rest.
    pub fn cut(&mut self, start: usize, len: usize) {
        assert!(start + len <= self.len, "{len} bytes at {start} of {}", self.len);
        // SAFETY: no request has this memory now: it is borrowed exclusively.
        let data = unsafe { self.data() };
        if start > 0 {
            copy(data, start, data, 0, len);
        }
        let mut left = len;
        for segment in &mut self.lists.segments {
            segment.len = segment.len.min(left);
            left -= segment.len;
        }
        self.lists.segments.retain(|segment| segment.len > 0);
        self.len = len;
    }
}

// SAFETY: the segments are those of the buffers that we own.
unsafe impl DataMemory for Memory {
    #[inline]
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    unsafe fn data(&self) -> Data<'_> {
        // SAFETY: by contract; the segments are those of the buffers that we own, and no client
        // reaches them.
        unsafe { Data::new(&self.lists.segments).stable() }
    }
}

/// Copies `len` bytes between two buffers, front to back. They may overlap if `to` is before
/// `from`.
pub fn copy(from: Data<'_>, from_at: usize, to: Data<'_>, to_at: usize, len: usize) {
    let mut bytes = [0; 4096];
    for at in (0..len).step_by(bytes.len()) {
        let piece = &mut bytes[..(len - at).min(4096)];
        from.part(from_at + at, piece.len()).copy_to(piece);
        to.part(to_at + at, piece.len()).copy_from(piece);
    }
}

impl Drop for Memory {
    #[inline]
    fn drop(&mut self) {
        self.lists.buffers.clear();
        self.lists.segments.clear();
        let mut spare = self.store.0.spare.borrow_mut();
        if spare.len() < SPARE {
            spare.push(std::mem::take(&mut self.lists));
        }
        if self.charge.as_ref().is_some_and(Charge::is_tight) {
            self.store.0.pool.shrink(STOCK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_any_length_is_split_into_segments_and_its_lists_serve_again() {
        reactor::run(async {
            let store = Store::new(&reactor::current());
            for (len, segments, cost) in [
                (0, 0, 0),
                (1, 1, 4096),
                (5000, 1, 8192),
                (MAX_BUFFER, 1, MAX_BUFFER),
                (2 * MAX_BUFFER + 1, 3, 2 * MAX_BUFFER + 4096),
                (32 * MAX_BUFFER, 32, 32 * MAX_BUFFER),
            ] {
                let mut memory = store.take(len);
                assert_eq!((memory.len(), memory.segments().len(), Store::cost(len)), (len, segments, cost));
                let bytes: Vec<u8> = (0..len).map(|i| (i / 5) as u8).collect();
                let half = len / 2;
                assert_eq!(memory.fill(0, &bytes[..half]), half);
                assert_eq!(memory.fill(half, &bytes[half..]), len - half);
                assert_eq!(memory.fill(len, b"more"), 0);
                let mut got = vec![0; len];
                // SAFETY: the memory has no other user.
                assert_eq!(unsafe { memory.data() }.copy_to(&mut got), len);
                assert!(got == bytes);
                memory.cut(len / 3, half);
                // SAFETY: as before.
                assert_eq!(unsafe { memory.data() }.copy_to(&mut got), half);
                assert!(got[..half] == bytes[len / 3..][..half] && memory.len() == half);
                drop(memory);
                assert_eq!(store.0.spare.borrow().len(), 1);
            }
        });
    }
}
