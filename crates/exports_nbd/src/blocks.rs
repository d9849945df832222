//! Writes that are not aligned to blocks: the export reads the block, modifies it and writes it
//! back.
//!
//! Between reading and writing no other write may reach the block, from any connection or core. So
//! an unaligned write holds its blocks exclusively, and all other writes of the export share theirs
//! ([`RangeLock`]).
//!
//! ```text
//!   before the first unaligned write:  a write passes its core's gate, and nothing else
//!   the first:   is_tracked = true ─► each core notices ─► earlier writes have ended ─► is_ready = true
//!   from then on:   every write takes its range in the lock
//! ```
//!
//! A core that received the message sees `is_tracked`, since the message follows the store. Its
//! gate waits for the writes that it let pass before ([`reactor::fence`]). A range waits for
//! earlier ranges only and each request holds one, so no request waits in a circle.

use exports::stream::Link;
use reactor::CoreRef;
use reactor::fence::{self, Gate, Running};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The ranges that writes of one export hold or wait for.
pub(crate) struct RangeLock {
    /// The number of the export's gates.
    number: u64,
    cores: Vec<CoreRef>,
    export: Arc<str>,
    /// Whether every new write takes a range.
    is_tracked: AtomicBool,
    /// Whether every write without a range has ended.
    is_ready: AtomicBool,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next_id: u64,
    /// In order of arrival.
    entries: Vec<Entry>,
}

struct Entry {
    id: u64,
    start: u64,
    end: u64,
    is_alone: bool,
    is_granted: bool,
    waker: Option<Waker>,
}

/// The writes of one core to an export.
pub(crate) struct Writes {
    lock: Arc<RangeLock>,
    gate: Rc<Gate>,
}

/// A block-aligned write in flight.
pub(crate) enum Turn<'a> {
    Untracked { _running: Running },
    Tracked { _range: Held<'a> },
}

impl RangeLock {
    /// Creates the lock of an export that `cores` serve.
    pub(crate) fn new(cores: &[CoreRef], export: Arc<str>) -> Arc<RangeLock> {
        Arc::new(RangeLock {
            number: fence::new_number(),
            cores: cores.to_vec(),
            export,
            is_tracked: AtomicBool::new(false),
            is_ready: AtomicBool::new(false),
            table: Mutex::default(),
        })
    }

    /// Waits for a range of bytes. `is_alone`: exclusive, else shared with other shared ranges.
    fn acquire(&self, start: u64, len: u64, is_alone: bool) -> Acquire<'_> {
        Acquire { lock: self, start, end: start + len, is_alone, id: None }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases a range or withdraws its request, and wakes those that waited for it.
    fn leave(&self, id: u64) {
        let wakers: Vec<Waker> = {
            let mut table = self.table();
            table.entries.retain(|entry| entry.id != id);
            let free = (0..table.entries.len()).filter(|place| table.is_free(*place));
            let free: Vec<usize> = free.collect();
            free.into_iter().filter_map(|place| table.grant(place)).collect()
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Table {
    /// Whether an entry conflicts with no earlier one.
    fn is_free(&self, place: usize) -> bool {
        let entry = &self.entries[place];
        let overlaps = |other: &Entry| other.start < entry.end && entry.start < other.end;
        !self.entries[..place].iter().any(|other| overlaps(other) && (other.is_alone || entry.is_alone))
    }

    /// Grants an entry its range. Returns the task to wake.
    fn grant(&mut self, place: usize) -> Option<Waker> {
        self.entries[place].is_granted = true;
        self.entries[place].waker.take()
    }
}

impl Writes {
    /// The write counter of the calling core.
    pub(crate) fn of(lock: &Arc<RangeLock>) -> Writes {
        Writes { gate: Gate::of(lock.number), lock: lock.clone() }
    }

    /// Starts a block-aligned write, which ends when the result is dropped.
    #[inline]
    pub(crate) async fn enter(&self, start: u64, len: u64) -> Turn<'_> {
        let running = self.gate.pass();
        // In this order: a write that does not see the flag has passed the gate before the core
        // receives the message.
        if !self.lock.is_tracked.load(Ordering::Relaxed) {
            return Turn::Untracked { _running: running };
        }
        drop(running);
        Turn::Tracked { _range: self.lock.acquire(start, len, false).await }
    }

    /// Waits until no other write uses these blocks. None starts before the result is dropped.
    pub(crate) async fn enter_alone(&self, start: u64, len: u64, link: &Link) -> Held<'_> {
        let lock = &*self.lock;
        if !lock.is_ready.load(Ordering::Acquire) {
            if !lock.is_tracked.swap(true, Ordering::SeqCst) {
                let (export, peer) = (&*lock.export, link.names().1);
                tracing::info!(
                    export,
                    peer,
                    "first unaligned write of a client: overlapping writes of this export are serialised"
                );
            }
            // Later callers wait for the same writes, and for some newer ones that have a range.
            fence::wait(lock.number, &lock.cores).await;
            lock.is_ready.store(true, Ordering::Release);
        }
        lock.acquire(start, len, true).await
    }
}

/// A pending request for a range.
struct Acquire<'a> {
    lock: &'a RangeLock,
    start: u64,
    end: u64,
    is_alone: bool,
    /// The entry's identifier, while it waits.
    id: Option<u64>,
}

impl<'a> Future for Acquire<'a> {
    type Output = Held<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Held<'a>> {
        let lock = self.lock;
        let mut table = lock.table();
        let place = match self.id {
            Some(id) => table.entries.iter().position(|entry| entry.id == id).expect("it waits"),
            None => {
                let id = table.next_id;
                table.next_id += 1;
                let Acquire { start, end, is_alone, .. } = *self;
                table.entries.push(Entry { id, start, end, is_alone, is_granted: false, waker: None });
                self.id = Some(id);
                let place = table.entries.len() - 1;
                if table.is_free(place) {
                    table.grant(place);
                }
                place
            }
        };
        let entry = &mut table.entries[place];
        if entry.is_granted {
            self.id = None;
            return Poll::Ready(Held { lock, id: entry.id });
        }
        entry.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        self.id.into_iter().for_each(|id| self.lock.leave(id));
    }
}

/// A granted range; released when dropped.
pub(crate) struct Held<'a> {
    lock: &'a RangeLock,
    id: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.lock.leave(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    fn poll<'a>(acquire: Pin<&mut Acquire<'a>>) -> Option<Held<'a>> {
        match acquire.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(held) => Some(held),
            Poll::Pending => None,
        }
    }

    #[test]
    fn ranges_wait_for_earlier_ones_that_overlap_unless_both_are_shared() {
        let lock = RangeLock::new(&[], "export".into());
        let one = poll(pin!(lock.acquire(0, 1024, false))).expect("free");
        let two = poll(pin!(lock.acquire(512, 1024, false))).expect("shared");
        let (mut alone, mut late) = (pin!(lock.acquire(1024, 512, true)), pin!(lock.acquire(1024, 1, false)));
        assert!(poll(alone.as_mut()).is_none());
        assert!(poll(late.as_mut()).is_none(), "it came after the one that waits");
        let beside = poll(pin!(lock.acquire(1536, 512, true))).expect("no overlap with any of them");
        drop(one);
        assert!(poll(alone.as_mut()).is_none());
        drop(two);
        let alone = poll(alone).expect("it is its turn");
        assert!(poll(late.as_mut()).is_none());
        drop(alone);
        assert!(poll(late).is_some());
        drop(beside);
        assert!(lock.table().entries.is_empty());
    }

    #[test]
    fn one_that_gives_up_waiting_keeps_no_other_one_waiting() {
        let lock = RangeLock::new(&[], "export".into());
        let held = poll(pin!(lock.acquire(0, 512, false))).expect("free");
        let mut late = pin!(lock.acquire(0, 512, false));
        {
            let mut alone = pin!(lock.acquire(0, 512, true));
            assert!(poll(alone.as_mut()).is_none() && poll(late.as_mut()).is_none());
        }
        assert!(poll(late).is_some());
        drop(held);
    }
}
