//! Detects *streams* of sequential writes, and decides whether to wait for the next write of one.
//!
//! A stream is identified by the offset of its next write. Two properties of a stream decide:
//!
//! * its *window*, the bytes that its caller keeps in flight. Callers submit when a request
//!   completes, so only bytes that do not wait themselves can bring the next write. A caller of one
//!   write at a time never causes a wait.
//! * whether it is *steady*. A caller that submits a batch and waits for all of it also fills its
//!   window, but no further write follows. So only bytes count that replaced completed ones. A
//!   futile wait resets this count and doubles the bytes that the next wait requires, until a wait
//!   succeeds.
//!
//! This module has no I/O and no clock: callers pass the time.

use std::cell::{Cell, RefCell};

/// Most known streams.
const STREAMS: usize = 8;
/// Ends of recent writes that may become streams.
const ENDS: usize = 16;
/// Longest wait for the next write if no write of the stream is in flight: callers submit when a
/// request has completed, a guest some ten microseconds later.
pub const IDLE_NS: u64 = 100_000;
/// Longest wait.
pub const HOLD_NS: u64 = 10_000_000;
/// A wait requires this many times its held and missing bytes as steady bytes before it.
const STEADY_TIMES: u64 = 2;
/// Most futile waits that count: each doubles the steady bytes required.
const MOST_FAILURES: u32 = 6;
/// A write that arrives within this time would have come anyway.
const PAYS_NS: u64 = 20_000;

/// Identifies a stream while a write of it is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(usize);

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Bytes of writes in flight.
    in_flight: u64,
    /// Their recent maximum.
    window: u64,
    /// Bytes of the window that have completed without a replacement.
    room: u64,
    /// Bytes that have replaced completed ones.
    steady: u64,
    /// Futile waits since the last success.
    failures: u32,
    /// Smoothed latency of writes.
    latency_ns: u64,
    /// Time of the last begin or end of a write.
    last_ns: u64,
}

/// The streams of one core.
pub struct Streams {
    /// Offset of the next write of each stream. Separate, because every write is compared with
    /// them.
    next: RefCell<[u64; STREAMS]>,
    streams: RefCell<[Stream; STREAMS]>,
    ends: RefCell<[u64; ENDS]>,
    oldest_end: Cell<usize>,
}

/// A partial stripe that waits for its stream's next write.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The stream.
    pub stream: StreamId,
    /// Bytes of whole requests that cannot complete before it is written.
    pub held: u64,
    /// Bytes missing up to the stripe's end.
    pub missing: u64,
    /// Begin of the wait.
    pub since_ns: u64,
}

impl Default for Streams {
    fn default() -> Streams {
        Streams {
            next: RefCell::new([u64::MAX; STREAMS]),
            streams: RefCell::default(),
            ends: RefCell::new([u64::MAX; ENDS]),
            oldest_end: Cell::new(0),
        }
    }
}

impl Streams {
    /// Records the begin of a write. Returns its stream if it continues where another write ended;
    /// then the caller must call [`Streams::end`].
    #[inline]
    pub fn begin(&self, offset: u64, len: u64, now_ns: impl FnOnce() -> u64) -> Option<StreamId> {
        let known = self.next.borrow().iter().position(|next| *next == offset);
        let index = match known {
            Some(index) => index,
            None => self.found(offset, len)?,
        };
        let now_ns = now_ns();
        self.next.borrow_mut()[index] = offset + len;
        let stream = &mut self.streams.borrow_mut()[index];
        if known.is_none() || (stream.in_flight == 0 && now_ns.saturating_sub(stream.last_ns) > IDLE_NS) {
            *stream = Stream::default();
        }
        let replaced = stream.room.min(len);
        stream.room -= replaced;
        stream.steady += replaced;
        stream.in_flight += len;
        stream.window = stream.window.max(stream.in_flight);
        stream.last_ns = now_ns;
        Some(StreamId(index))
    }

    /// The place of a new stream that begins with this write, if the write follows another one.
    #[inline]
    fn found(&self, offset: u64, len: u64) -> Option<usize> {
        let ends = &mut *self.ends.borrow_mut();
        let Some(end) = ends.iter().position(|end| *end == offset) else {
            let oldest = self.oldest_end.get();
            ends[oldest] = offset + len;
            self.oldest_end.set((oldest + 1) % ENDS);
            return None;
        };
        ends[end] = offset + len;
        let streams = self.streams.borrow();
        let idle = (0..STREAMS).filter(|index| streams[*index].in_flight == 0);
        let index = idle.min_by_key(|index| streams[*index].last_ns)?;
        ends[end] = u64::MAX;
        Some(index)
    }

    /// Records the end of a stream's write.
    pub fn end(&self, id: StreamId, len: u64, taken_ns: u64, now_ns: u64) {
        let stream = &mut self.streams.borrow_mut()[id.0];
        stream.in_flight -= len;
        stream.room = (stream.room + len).min(stream.window);
        stream.last_ns = now_ns;
        stream.latency_ns = match stream.latency_ns {
            0 => taken_ns,
            before => before - before / 8 + taken_ns / 8,
        };
    }

    /// Records that the missing bytes have arrived.
    pub fn came(&self, waiting: &Waiting, now_ns: u64) {
        if now_ns.saturating_sub(waiting.since_ns) > PAYS_NS {
            self.streams.borrow_mut()[waiting.stream.0].failures = 0;
        }
    }

    /// Whether all writes of a stream in flight wait themselves.
    pub fn is_quiet(&self, waiting: &Waiting) -> bool {
        self.streams.borrow()[waiting.stream.0].in_flight <= waiting.held
    }

    /// Time until which to wait for a stream's next write; `None` if there is no wait, or it is
    /// over. The wait takes at most as long as a write of the stream.
    pub fn deadline_ns(&self, waiting: &Waiting, now_ns: u64) -> Option<u64> {
        let Waiting { stream, held, missing, since_ns } = *waiting;
        let wanted = held + missing;
        let stream = &mut self.streams.borrow_mut()[stream.0];
        let needed = (STEADY_TIMES * wanted) << stream.failures;
        if stream.steady < needed || stream.window < wanted {
            return None;
        }
        let mut deadline = since_ns + stream.latency_ns.clamp(IDLE_NS, HOLD_NS);
        if stream.in_flight <= held {
            deadline = deadline.min(stream.last_ns.max(since_ns) + IDLE_NS);
        }
        if now_ns < deadline {
            return Some(deadline);
        }
        (stream.steady, stream.window) = (0, stream.in_flight);
        stream.failures = (stream.failures + 1).min(MOST_FAILURES);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRIPE: u64 = 1000;

    /// A caller with writes of one length, some in flight; each takes 50 µs.
    struct Caller {
        streams: Streams,
        len: u64,
        now_ns: u64,
        next: u64,
    }

    impl Caller {
        fn new(len: u64) -> Caller {
            Caller { streams: Streams::default(), len, now_ns: 0, next: 0 }
        }

        fn begin(&mut self) -> Option<StreamId> {
            let offset = self.next;
            self.next += self.len;
            self.streams.begin(offset, self.len, || self.now_ns)
        }

        fn end(&mut self, stream: Option<StreamId>) {
            if let Some(stream) = stream {
                self.streams.end(stream, self.len, 50_000, self.now_ns);
            }
        }

        /// Keeps `depth` writes in flight for `writes` writes.
        fn flow(&mut self, depth: usize, writes: usize) -> std::collections::VecDeque<Option<StreamId>> {
            let mut running = std::collections::VecDeque::new();
            for _ in 0..writes {
                if running.len() == depth {
                    self.now_ns += 50_000;
                    let first = running.pop_front().unwrap();
                    self.end(first);
                }
                let stream = self.begin();
                running.push_back(stream);
            }
            running
        }

        /// Time until which the latest write would wait, as the only write of its stripe.
        fn wait(&self, stream: Option<StreamId>) -> Option<u64> {
            let (held, missing) = (self.len, STRIPE - self.len % STRIPE);
            let waiting = Waiting { stream: stream?, held, missing, since_ns: self.now_ns };
            self.streams.deadline_ns(&waiting, self.now_ns)
        }
    }

    #[test]
    fn a_steady_stream_that_can_fill_a_stripe_is_waited_for_as_long_as_a_write_takes_at_most() {
        let mut caller = Caller::new(300);
        let mut running = caller.flow(4, 30);
        let last = *running.back().unwrap();
        assert_eq!(caller.wait(last), Some(caller.now_ns + IDLE_NS));
        // When no other write is in flight, the wait ends. After a futile wait it does not wait
        // again.
        let waiting = Waiting { stream: last.unwrap(), held: 300, missing: 700, since_ns: caller.now_ns };
        assert!(!caller.streams.is_quiet(&waiting));
        while running.len() > 1 {
            let first = running.pop_front().unwrap();
            caller.end(first);
        }
        assert!(caller.streams.is_quiet(&waiting));
        assert!(caller.wait(last).is_some());
        let late_ns = caller.now_ns + HOLD_NS;
        assert_eq!(caller.streams.deadline_ns(&waiting, late_ns), None);
        assert_eq!(caller.wait(last), None);
        // It needs twice the steady bytes, until a wait has succeeded.
        let last = *caller.flow(4, 10).back().unwrap();
        assert_eq!(caller.wait(last), None);
        caller.streams.came(&waiting, caller.now_ns);
        assert!(caller.wait(last).is_some());
    }

    #[test]
    fn one_write_at_a_time_a_thin_stream_and_a_batch_are_not_waited_for() {
        for (len, depth) in [(300, 1), (2000, 1), (100, 9), (10, 32)] {
            let mut caller = Caller::new(len);
            let last = *caller.flow(depth, 500).back().unwrap();
            assert!(last.is_some());
            assert_eq!(caller.wait(last), None, "{depth} of {len}");
        }
        let mut caller = Caller::new(100);
        for _ in 0..10 {
            for stream in caller.flow(50, 50) {
                caller.end(stream);
            }
            caller.now_ns += 2 * IDLE_NS;
        }
        let last = *caller.flow(50, 50).back().unwrap();
        assert_eq!(caller.wait(last), None, "nothing came after the batches before");
    }

    #[test]
    fn streams_are_known_among_other_writes_and_each_by_itself() {
        let streams = Streams::default();
        let mut ids = Vec::new();
        for round in 0..4u64 {
            for stream in 0..4u64 {
                let id = streams.begin((stream << 40) + round * 10, 10, || 0);
                assert_eq!(id.is_some(), round > 0);
                ids.extend(id);
                assert_eq!(streams.begin(1 << 60 | (round * 4 + stream) << 20, 10, || 0), None);
            }
        }
        assert!(ids[..4].iter().all(|id| ids.iter().filter(|other| *other == id).count() == 3));
        for stream in 0..2 * STREAMS as u64 {
            streams.begin(1 << 50 | stream << 20, 10, || 0);
            streams.begin((1 << 50 | stream << 20) + 10, 10, || 0);
        }
        assert!(ids.iter().all(|id| *id != StreamId(7)));
        for id in ids {
            streams.end(id, 10, 1, 1);
        }
    }
}
