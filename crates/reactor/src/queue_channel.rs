//! A leaf's rings as a [`Channel`]: op slots, wakers, the line of waiting requests, bounce buffers.
//!
//! ```text
//!   submit ─► checks ─► slot (or wait for one) ─► Queue::push      … flush ─► Queue::kick
//!   IoFuture ◄─ slot ◄─ Queue::reap ◄─ poll
//! ```

use crate::buffer::MAX_BUFFER;
use crate::core::{Core, current};
use crate::slots::Slots;
use crate::source::{Source, SourceHandle};
use block::{Channel, IoFuture, IoResult, Op, Queue, Request, SharedLimits, StatusReport, StatusStart};
use std::cell::{OnceCell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

/// The channel over one leaf queue.
pub struct QueueChannel<Q> {
    queue: RefCell<Q>,
    slots: Box<Slots<IoResult>>,
    limits: Arc<SharedLimits>,
    core: Core,
    handle: OnceCell<SourceHandle>,
}

impl<Q: Queue + 'static> QueueChannel<Q> {
    /// Serves `queue` on the calling core.
    pub fn open(queue: Q, limits: Arc<SharedLimits>) -> Rc<Self> {
        let core = current();
        let slots = Slots::new(queue.depth());
        let channel = Rc::new(QueueChannel {
            queue: RefCell::new(queue),
            slots,
            limits,
            core,
            handle: OnceCell::new(),
        });
        let source: Rc<dyn Source> = channel.clone();
        let _ = channel.handle.set(channel.core.register(&source));
        channel
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// The queue itself, for a driver's own calls.
    pub fn queue(&self) -> &RefCell<Q> {
        &self.queue
    }

    /// Pushes a request with a slot that the caller has taken.
    #[inline]
    fn push<'a>(&'a self, slot: u32, req: &Request<'a>, offset: u64) -> IoFuture<'a> {
        // SAFETY: by the contract of `Data::new` the data stays valid until the request has
        // completed, and a request completes only after its slot was reaped.
        let pushed = unsafe { self.queue.borrow_mut().push(slot, req, offset) };
        if let Err(error) = pushed {
            self.slots.give_back(slot);
            return IoFuture::ready(Err(error));
        }
        if let Some(handle) = self.handle.get() {
            handle.activate();
        }
        self.slots.future(slot)
    }

    /// Pushes a query of block status with a slot that the caller has taken.
    fn push_status<'a>(&'a self, slot: u32, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        // SAFETY: the future borrows the report, and completes only after its slot was reaped.
        let started = unsafe { self.queue.borrow_mut().push_status(slot, report, offset, len) };
        match started {
            StatusStart::InRing => {
                if let Some(handle) = self.handle.get() {
                    handle.activate();
                }
                self.slots.future(slot)
            }
            StatusStart::Apart(answer) => {
                self.slots.give_back(slot);
                answer
            }
        }
    }

    async fn push_when_free<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoResult {
        self.slots.permits.acquire(1).await;
        let slot = self.slots.take_permitted();
        self.push(slot, req, offset).await
    }

    #[inline]
    fn submit_as_it_is<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if self.slots.permits.try_acquire(1) {
            let slot = self.slots.take_permitted();
            return self.push(slot, req, offset);
        }
        IoFuture::new(self.push_when_free(req, offset))
    }

    #[inline]
    fn must_bounce(&self, req: &Request<'_>) -> bool {
        let limits = self.limits.fixed();
        req.op.has_data()
            && ((limits.memory_alignment > 1 && !req.data.is_aligned(limits.memory_alignment as usize))
                || req.data.segment_count() > usize::from(limits.max_segments)
                || !self.queue.borrow_mut().reaches(&req.data))
    }

    /// Copies through buffers of the core, for memory that the device cannot use.
    async fn submit_bounced(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let mut done = 0;
        while done < req.len {
            let len = (req.len - done).min(MAX_BUFFER as u64);
            let part = req.part(done, len);
            let mut buffer = self.core.buffers().take(len as usize).await;
            if req.op == Op::Write {
                part.data.copy_to(buffer.as_mut_slice());
            }
            let leaf = AsItIs(self);
            let (buffer, result) = buffer.transfer(&leaf, req.op, req.flags, offset + done).await;
            result?;
            if req.op == Op::Read {
                part.data.copy_from(buffer.as_slice());
            }
            done += len;
        }
        Ok(())
    }
}

/// The channel without the check of the memory.
struct AsItIs<'c, Q>(&'c QueueChannel<Q>);

impl<Q: Queue + 'static> Channel for AsItIs<'_, Q> {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.0.submit_as_it_is(req, offset)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

impl<Q: Queue + 'static> Channel for QueueChannel<Q> {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        if req.len == 0 && req.op != Op::Flush {
            return IoFuture::ready(Ok(()));
        }
        if self.must_bounce(req) {
            return IoFuture::new(self.submit_bounced(req, offset));
        }
        self.submit_as_it_is(req, offset)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        if let Err(error) = self.limits.check_range(offset, len) {
            return IoFuture::ready(Err(error));
        }
        if len == 0 {
            return IoFuture::ready(Ok(()));
        }
        if self.slots.permits.try_acquire(1) {
            return self.push_status(self.slots.take_permitted(), report, offset, len);
        }
        IoFuture::new(async move {
            self.slots.permits.acquire(1).await;
            self.push_status(self.slots.take_permitted(), report, offset, len).await
        })
    }
}

impl<Q: Queue + 'static> Source for QueueChannel<Q> {
    fn flush(&self) {
        self.queue.borrow_mut().kick();
    }

    fn poll(&self) -> usize {
        if self.slots.in_flight() == 0 {
            return 0;
        }
        self.queue.borrow_mut().reap(&mut |slot, result| self.slots.complete(slot, result))
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.queue.borrow().event_fd()
    }

    fn arm(&self) -> bool {
        if self.slots.in_flight() == 0 {
            return true;
        }
        let mut queue = self.queue.borrow_mut();
        queue.event_fd().is_some() && queue.arm()
    }

    fn disarm(&self) {
        self.queue.borrow_mut().disarm();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Data, Flags, IoError, Limits, Segment};
    use std::cell::Cell;
    use std::collections::VecDeque;

    /// Completes one request a reap, in the order of pushing, and records the requests.
    struct OneByOne {
        depth: u32,
        /// The device reaches memory below this address.
        end: usize,
        pushed: VecDeque<(u32, IoResult)>,
        most: usize,
        seen: Vec<(u64, usize)>,
    }

    impl Queue for OneByOne {
        fn depth(&self) -> u32 {
            self.depth
        }
        unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
            if offset == 8192 {
                return Err(IoError::NoMemory);
            }
            if req.op == Op::Read {
                req.data.fill(7);
            }
            self.seen.push((offset, req.data.segment_count()));
            self.pushed.push_back((slot, Ok(())));
            self.most = self.most.max(self.pushed.len());
            Ok(())
        }
        fn reaches(&mut self, data: &Data<'_>) -> bool {
            data.iter().all(|segment| segment.base.addr() < self.end)
        }
        fn kick(&mut self) {}
        fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
            let Some((slot, result)) = self.pushed.pop_front() else { return 0 };
            done(slot, result);
            1
        }
        fn event_fd(&self) -> Option<RawFd> {
            None
        }
        fn arm(&mut self) -> bool {
            false
        }
        fn disarm(&mut self) {}
    }

    fn open(depth: u32, limits: Limits) -> Rc<QueueChannel<OneByOne>> {
        let queue = OneByOne { depth, end: usize::MAX, pushed: VecDeque::new(), most: 0, seen: Vec::new() };
        QueueChannel::open(queue, SharedLimits::new(limits))
    }

    #[test]
    fn more_requests_than_slots_wait_and_are_all_served_in_order() {
        crate::run(async {
            let channel = open(4, Limits::new(1 << 20));
            let left = Rc::new(Cell::new(100));
            for i in 0..100u64 {
                let (channel, left) = (channel.clone(), left.clone());
                current().spawn(async move {
                    let req = Request::write_zeroes(512, Flags::NONE);
                    assert_eq!(channel.submit(&req, 16384 + i * 512).await, Ok(()));
                    left.set(left.get() - 1);
                });
            }
            while left.get() > 0 {
                crate::yield_now().await;
            }
            let queue = channel.queue().borrow();
            assert_eq!(queue.most, 4);
            assert!(queue.seen.is_sorted() && queue.seen.len() == 100);
            assert_eq!(channel.in_flight(), 0);
        });
    }

    #[test]
    fn a_refused_push_is_the_requests_error_and_frees_its_slot() {
        crate::run(async {
            let channel = open(1, Limits::new(1 << 20));
            for _ in 0..3 {
                let req = Request::write_zeroes(512, Flags::NONE);
                assert_eq!(channel.submit(&req, 8192).await, Err(IoError::NoMemory));
                assert_eq!(channel.submit(&req, 4096).await, Ok(()));
                assert_eq!(channel.submit(&req, 1 << 20).await, Err(IoError::OutOfRange));
            }
        });
    }

    #[test]
    fn memory_out_of_reach_goes_through_a_bounce_buffer() {
        crate::run(async {
            let channel = open(4, Limits::new(1 << 24));
            let mut memory = vec![0u8; MAX_BUFFER + 512];
            let segments = [Segment { base: memory.as_mut_ptr(), len: memory.len() }];
            // SAFETY: the memory lives to the end of the test.
            let data = unsafe { Data::new(&segments) };
            assert_eq!(channel.submit(&Request::read(data), 4096).await, Ok(()));
            channel.queue().borrow_mut().end = 0;
            assert_eq!(channel.submit(&Request::read(data), 4096).await, Ok(()));
            assert_eq!(channel.queue().borrow().seen, [(4096, 1), (4096, 1), (4096 + MAX_BUFFER as u64, 1)]);
            assert!(memory.iter().all(|byte| *byte == 7));
        });
    }

    #[test]
    fn misaligned_or_scattered_memory_goes_through_a_bounce_buffer() {
        crate::run(async {
            let limits = Limits { memory_alignment: 512, max_segments: 2, ..Limits::new(1 << 24) };
            let channel = open(4, limits);
            let mut memory = vec![0u8; (2 << 20) + 1024 + 1];
            let (base, len) = (memory.as_mut_ptr().wrapping_add(1), (2 << 20) + 1024);
            let odd = base.wrapping_add(usize::from(base.addr() % 2 == 0));
            let segments = [Segment { base: odd, len: len - 1024 }];
            // SAFETY: the memory lives to the end of the test.
            let data = unsafe { Data::new(&segments) };
            assert_eq!(channel.submit(&Request::read(data), 4096).await, Ok(()));
            assert_eq!(channel.queue().borrow().seen, [(4096, 1), (4096 + MAX_BUFFER as u64, 1)]);
            assert!(memory.iter().filter(|b| **b == 7).count() == 2 << 20);
        });
    }
}
