//! A device queue without a reactor, for programs without `unsafe`: every slot has its own buffer.

use crate::shared_buffer::SharedBuffer;
use block::{Data, Flags, IoResult, Limits, Op, Queue, Request, Segment};

/// A queue polled by its owner. Dropping it waits for everything in flight.
///
/// ```text
///   loop { reap: slots that have ended ─► submit: their next requests ─► kick }
/// ```
pub struct BareQueue<Q: Queue> {
    queue: Q,
    limits: Limits,
    /// The memory of each slot; points into `buffers`.
    segments: Box<[Segment]>,
    is_busy: Box<[bool]>,
    in_flight: usize,
    /// Keeps the memory alive as long as the queue.
    _buffers: Vec<SharedBuffer>,
}

impl<Q: Queue> BareQueue<Q> {
    /// Uses `queue` with one slot per buffer. All buffers have the same length, and their memory is
    /// registered with the device.
    ///
    /// # Panics
    /// With more buffers than the depth of the queue.
    pub fn new(queue: Q, limits: Limits, buffers: Vec<SharedBuffer>) -> BareQueue<Q> {
        assert!(
            buffers.len() <= queue.depth() as usize,
            "{} buffers, depth {}",
            buffers.len(),
            queue.depth()
        );
        BareQueue {
            segments: buffers.iter().map(SharedBuffer::segment).collect(),
            is_busy: vec![false; buffers.len()].into(),
            in_flight: 0,
            queue,
            limits,
            _buffers: buffers,
        }
    }

    /// The number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Submits a request of the buffers' length in an idle slot, with the slot's buffer if the
    /// operation has data.
    ///
    /// # Errors
    /// When the request fails at once; the slot stays idle.
    ///
    /// # Panics
    /// When the slot does not exist or is busy.
    #[inline]
    pub fn submit(&mut self, slot: u32, op: Op, flags: Flags, offset: u64) -> IoResult {
        let place = slot as usize;
        assert!(!self.is_busy[place], "slot {slot} is busy");
        let list = std::slice::from_ref(&self.segments[place]);
        // SAFETY: list and memory live as long as the queue, whose drop waits for requests in
        // flight; nothing else uses the buffer.
        let data = if op.has_data() { unsafe { Data::new(list) } } else { Data::none() };
        let len = if op == Op::Flush { 0 } else { list[0].len as u64 };
        let req = Request { op, flags, len, data };
        self.limits.check(&req, offset)?;
        // SAFETY: as above.
        unsafe { self.queue.push(slot, &req, offset)? };
        self.is_busy[place] = true;
        self.in_flight += 1;
        Ok(())
    }

    /// Rings the doorbell for everything submitted since the last call.
    #[inline]
    pub fn kick(&mut self) {
        self.queue.kick();
    }

    /// Appends completed requests to `done`. Returns their number.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<(u32, IoResult)>) -> usize {
        let is_busy = &mut self.is_busy;
        let before = done.len();
        self.queue.reap(&mut |slot, result| {
            let was_busy = is_busy.get_mut(slot as usize).is_some_and(|busy| std::mem::replace(busy, false));
            assert!(was_busy, "slot {slot} completed twice");
            done.push((slot, result));
        });
        let count = done.len() - before;
        self.in_flight -= count;
        count
    }
}

impl<Q: Queue> Drop for BareQueue<Q> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            self.kick();
            if self.reap(&mut done) == 0 {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::RawFd;

    /// Completes requests in the second poll after their submission.
    struct Slow {
        pushed: Vec<u32>,
        looks: u32,
    }

    impl Queue for Slow {
        fn depth(&self) -> u32 {
            4
        }
        unsafe fn push(&mut self, slot: u32, _: &Request<'_>, _: u64) -> IoResult {
            self.pushed.push(slot);
            Ok(())
        }
        fn kick(&mut self) {}
        fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
            self.looks += 1;
            let ended =
                if self.looks.is_multiple_of(2) { std::mem::take(&mut self.pushed) } else { Vec::new() };
            ended.iter().for_each(|slot| done(*slot, Ok(())));
            ended.len()
        }
        fn event_fd(&self) -> Option<RawFd> {
            None
        }
        fn arm(&mut self) -> bool {
            false
        }
        fn disarm(&mut self) {}
    }

    fn queue() -> BareQueue<Slow> {
        let (_, buffers) = SharedBuffer::allocate(2, 4096).unwrap();
        BareQueue::new(Slow { pushed: Vec::new(), looks: 0 }, Limits::new(1 << 20), buffers)
    }

    #[test]
    fn a_slot_is_free_again_when_its_request_has_ended() {
        let mut queue = queue();
        queue.submit(0, Op::Read, Flags::NONE, 0).unwrap();
        queue.submit(1, Op::Flush, Flags::NONE, 0).unwrap();
        let mut done = Vec::new();
        assert_eq!((queue.reap(&mut done), queue.reap(&mut done)), (0, 2));
        assert_eq!(done, [(0, Ok(())), (1, Ok(()))]);
        queue.submit(0, Op::Write, Flags::FUA, 4096).unwrap();
        assert_eq!(queue.in_flight(), 1);
    }

    #[test]
    fn a_request_beyond_the_end_does_not_reach_the_queue() {
        let mut queue = queue();
        assert_eq!(queue.submit(0, Op::Read, Flags::NONE, 1 << 20), Err(block::IoError::OutOfRange));
        assert_eq!(queue.in_flight(), 0);
    }

    #[test]
    #[should_panic(expected = "slot 0 is busy")]
    fn a_busy_slot_takes_no_second_request() {
        let mut queue = queue();
        queue.submit(0, Op::Read, Flags::NONE, 0).unwrap();
        let _ = queue.submit(0, Op::Read, Flags::NONE, 0);
    }
}
