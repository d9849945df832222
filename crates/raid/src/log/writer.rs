//! Writers: a task for each lane and member in use, which writes the staged copies as one request.

use crate::ArrayConfig;
use crate::config::MAX_PARITY;
use crate::log::Nonce;
use crate::log::checksum::Key;
use crate::log::entry::{Header, UNIT};
use crate::log::lane::{Lane, Placement};
use block::{Channel, Data, Flags, IoError, IoResult, Request, Segment};
use reactor::{Buffer, BufferPool, MAX_BUFFER, Permits};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Bytes of entries of one core in flight: more than the copies of one entry can need.
const MEMORY: usize = 2 * MAX_PARITY * MAX_BUFFER;
/// Bytes of free buffers that an idle core keeps.
const STOCK: usize = 4 << 20;
/// Largest request to which more entries are added, in bytes: longer requests are no faster and
/// delay the first entry.
const BATCH_BYTES: u64 = 256 << 10;
/// Most entries in one request: segments that any device takes.
const BATCH_ENTRIES: usize = 64;
/// Interval at which [`LaneLog::close`] checks for idle writers.
const CLOSE_POLL_NS: u64 = 20_000;

/// Failed members and their errors.
pub(super) type Failures = Vec<(usize, IoError)>;

/// State shared by all lanes of a core.
pub(super) struct Shared {
    pub config: Arc<ArrayConfig>,
    nonce: Cell<Nonce>,
    /// The key of the nonce.
    key: RefCell<Rc<Key>>,
    pub epoch: Cell<u64>,
    pub buffers: BufferPool,
    memory: Permits,
}

impl Shared {
    pub fn new(config: Arc<ArrayConfig>, nonce: Nonce, epoch: u64) -> Rc<Shared> {
        // Twice the most that appenders take: appenders and markers find a buffer at once.
        let buffers = BufferPool::new(2 * MEMORY);
        reactor::current().trim_when_idle(&buffers, STOCK);
        Rc::new(Shared {
            config,
            nonce: Cell::new(nonce),
            key: RefCell::new(Rc::new(Key::new(&nonce))),
            epoch: Cell::new(epoch),
            buffers,
            memory: Permits::new(MEMORY),
        })
    }

    /// Sets the nonce of later entries.
    pub fn set_nonce(&self, nonce: Nonce) {
        self.nonce.set(nonce);
        *self.key.borrow_mut() = Rc::new(Key::new(&nonce));
    }

    /// The key of checksums.
    pub fn key(&self) -> Rc<Key> {
        self.key.borrow().clone()
    }
}

/// Right to memory of the log's pool, for all copies of an entry at once. So no appender waits for
/// memory while it holds a part.
pub(super) struct Memory {
    shared: Rc<Shared>,
    /// Bytes of one copy.
    each: usize,
    copies: usize,
}

impl Memory {
    pub async fn take(shared: &Rc<Shared>, bytes: usize, copies: usize) -> Memory {
        // The size of a buffer is a power of two.
        let each = bytes.next_power_of_two();
        shared.memory.acquire(each * copies).await;
        Memory { shared: shared.clone(), each, copies }
    }

    /// Splits off the part of one copy.
    pub fn split(&mut self) -> Memory {
        self.copies -= 1;
        Memory { shared: self.shared.clone(), each: self.each, copies: 1 }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shared.memory.release(self.each * self.copies);
    }
}

/// A copy of an entry that waits for its writer.
pub(super) struct Staged {
    /// `None` for a marker, which the writer builds.
    pub buffer: Option<Buffer>,
    pub bytes: u64,
    pub placement: Placement,
    pub flight: Option<usize>,
    pub channel: Rc<dyn Channel>,
    pub log_offset: u64,
    pub _memory: Option<Memory>,
}

/// One lane with its writers.
pub(super) struct LaneLog {
    pub shared: Rc<Shared>,
    pub number: u16,
    pub book: RefCell<Lane>,
    /// One permit: its holder may wait for room and place an entry.
    pub turn: Permits,
    /// Buffers for the copies of one entry, of the holder of the turn.
    pub buffers: RefCell<Vec<Buffer>>,
    /// The appender that waits for room.
    waiting: Cell<Option<Waker>>,
    flights: RefCell<Flights>,
    /// By slot; made when a member is first used.
    queues: RefCell<Vec<Option<Rc<Queue>>>>,
}

/// The queue of one writer.
#[derive(Default)]
struct Queue {
    staged: RefCell<VecDeque<Staged>>,
    is_writing: Cell<bool>,
    is_stopping: Cell<bool>,
    writer: Cell<Option<Waker>>,
}

impl Queue {
    fn is_idle(&self) -> bool {
        !self.is_writing.get() && self.staged.borrow().is_empty()
    }

    fn wake(&self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }
}

impl LaneLog {
    pub fn new(shared: Rc<Shared>, number: u16) -> Rc<LaneLog> {
        let book = RefCell::new(Lane::new(shared.config.lane_bytes));
        Rc::new(LaneLog {
            shared,
            number,
            book,
            turn: Permits::new(1),
            buffers: RefCell::default(),
            waiting: Cell::new(None),
            flights: RefCell::default(),
            queues: RefCell::default(),
        })
    }

    /// Wakes the appender that waits for room.
    pub fn poke(&self) {
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    /// Wakes the holder of the turn at the next change.
    pub fn wait_for_change(&self, waker: &Waker) {
        self.waiting.set(Some(waker.clone()));
    }

    /// The error of the member, which takes no more entries then.
    pub fn failure(&self, slot: usize) -> Option<IoError> {
        self.book.borrow().failure(slot)
    }

    /// Whether no write to the member is queued or in flight.
    pub fn is_idle(&self, slot: usize) -> bool {
        self.queues.borrow().get(slot).and_then(Option::as_ref).is_none_or(|queue| queue.is_idle())
    }

    /// The header of an entry at that placement, without its write.
    pub fn header(&self, slot: usize, placement: Placement) -> Header {
        Header {
            nonce: self.shared.nonce.get(),
            array: self.shared.config.uuid,
            lane: self.number,
            slot: slot as u16,
            position: placement.position,
            sequence: placement.sequence,
            tail: placement.tail,
            epoch: self.shared.epoch.get(),
            write: None,
            payload_checksum: 0,
        }
    }

    /// Passes a copy to the member's writer.
    pub fn stage(self: &Rc<Self>, slot: usize, staged: Staged) {
        let queue = self.queue(slot);
        queue.staged.borrow_mut().push_back(staged);
        queue.wake();
    }

    /// Places a marker on the member and passes it to the writer.
    pub fn stage_marker(self: &Rc<Self>, slot: usize, channel: &Rc<dyn Channel>, log_offset: u64) {
        let placement = self.book.borrow_mut().place_marker(slot);
        let staged = Staged {
            buffer: None,
            bytes: UNIT.into(),
            placement,
            flight: None,
            channel: channel.clone(),
            log_offset,
            _memory: None,
        };
        self.stage(slot, staged);
    }

    /// Ends the writers once their queues are empty.
    pub fn stop(&self) {
        for queue in self.queues.borrow().iter().flatten() {
            queue.is_stopping.set(true);
            queue.wake();
        }
    }

    /// Waits until no write is queued or in flight, then ends the writers.
    pub async fn close(&self) {
        while !self.queues.borrow().iter().flatten().all(|queue| queue.is_idle()) {
            reactor::current().sleep(CLOSE_POLL_NS).await;
        }
        self.stop();
    }

    fn queue(self: &Rc<Self>, slot: usize) -> Rc<Queue> {
        let mut queues = self.queues.borrow_mut();
        if queues.len() <= slot {
            queues.resize_with(slot + 1, || None);
        }
        let queue = queues[slot].get_or_insert_with(|| {
            let queue = Rc::new(Queue::default());
            reactor::current().spawn(write_all(self.clone(), queue.clone(), slot));
            queue
        });
        queue.clone()
    }

    /// Reports the result of a batch to the lane and to the waiting appenders.
    fn finish(&self, slot: usize, batch: &mut Vec<Staged>, queue: &Queue, result: IoResult) {
        match result {
            Ok(()) => {
                let tail = batch.last().map_or(0, |last| last.placement.tail);
                self.book.borrow_mut().note_durable(slot, tail);
            }
            Err(error) => {
                self.book.borrow_mut().fail(slot, error);
                // Copies placed behind the failed write must not be written either: the content
                // before them is unknown.
                batch.extend(queue.staged.borrow_mut().drain(..));
            }
        }
        for flight in batch.drain(..).filter_map(|staged| staged.flight) {
            let orphan = self.flights.borrow_mut().settle(flight, slot, result);
            if let Some(sequence) = orphan {
                self.book.borrow_mut().retire(sequence);
            }
        }
        self.poke();
    }
}

/// The writer of one lane and member.
async fn write_all(lane: Rc<LaneLog>, queue: Rc<Queue>, slot: usize) {
    let mut batch = Vec::with_capacity(BATCH_ENTRIES);
    let mut segments = Vec::with_capacity(BATCH_ENTRIES);
    while wait_for_work(&queue).await {
        queue.is_writing.set(true);
        take_batch(&queue, &mut batch);
        let result = write_batch(&lane, slot, &mut batch, &mut segments).await;
        lane.finish(slot, &mut batch, &queue, result);
        queue.is_writing.set(false);
    }
}

/// Whether there is work; `false` at the end.
async fn wait_for_work(queue: &Queue) -> bool {
    poll_fn(|cx| {
        if !queue.staged.borrow().is_empty() {
            return Poll::Ready(true);
        }
        if queue.is_stopping.get() {
            return Poll::Ready(false);
        }
        queue.writer.set(Some(cx.waker().clone()));
        Poll::Pending
    })
    .await
}

/// Takes the copies of one request: adjacent ones for one channel.
fn take_batch(queue: &Queue, batch: &mut Vec<Staged>) {
    let mut staged = queue.staged.borrow_mut();
    let mut bytes = 0;
    while let Some(next) = staged.front() {
        let joins = batch.first().is_none_or(|first| {
            std::ptr::addr_eq(Rc::as_ptr(&first.channel), Rc::as_ptr(&next.channel))
                && first.log_offset == next.log_offset
                && bytes + next.bytes <= BATCH_BYTES
                && batch.len() < BATCH_ENTRIES
        });
        if !joins {
            break;
        }
        bytes += next.bytes;
        batch.extend(staged.pop_front());
    }
}

async fn write_batch(
    lane: &LaneLog,
    slot: usize,
    batch: &mut [Staged],
    segments: &mut Vec<Segment>,
) -> IoResult {
    segments.clear();
    for staged in batch.iter_mut() {
        if staged.buffer.is_none() {
            let mut buffer = lane.shared.buffers.take(UNIT as usize).await;
            let header = lane.header(slot, staged.placement).encode(lane.shared.config.geometry.data);
            buffer.as_mut_slice().fill(0);
            buffer.as_mut_slice()[..header.len()].copy_from_slice(&header);
            staged.buffer = Some(buffer);
        }
        segments.extend(staged.buffer.as_ref().map(Buffer::segment));
    }
    // SAFETY: the buffers belong to the batch, and batch and segments to the writer, which waits
    // for the request's end before it touches them.
    let data = unsafe { Data::new(segments) };
    let lane_bytes = u64::from(lane.shared.config.lane_bytes);
    let first = &batch[0];
    let lane_at = first.log_offset + u64::from(lane.number) * lane_bytes;
    let position = u64::from(first.placement.position);
    let before_end = (lane_bytes - position).min(data.len() as u64);
    let request = Request::write(data, Flags::FUA);
    if before_end == request.len {
        return first.channel.submit(&request, lane_at + position).await;
    }
    let parts = [request.part(0, before_end), request.part(before_end, request.len - before_end)];
    let ends =
        [first.channel.submit(&parts[0], lane_at + position), first.channel.submit(&parts[1], lane_at)];
    block::join_all(ends.into_iter()).await
}

/// Appends whose copies are not all settled.
#[derive(Default)]
struct Flights {
    list: Vec<Flight>,
    free: Vec<usize>,
}

struct Flight {
    sequence: u64,
    /// Copies that are not settled.
    unsettled: usize,
    failures: Failures,
    waker: Option<Waker>,
    /// The appender was dropped: nothing was written for the entry and nothing will be.
    is_orphan: bool,
}

impl Flights {
    fn start(&mut self, sequence: u64, copies: usize) -> usize {
        let flight =
            Flight { sequence, unsettled: copies, failures: Failures::new(), waker: None, is_orphan: false };
        match self.free.pop() {
            Some(place) => {
                self.list[place] = flight;
                place
            }
            None => {
                self.list.push(flight);
                self.list.len() - 1
            }
        }
    }

    /// Settles one copy, which is durable or has failed. Returns the sequence if it was the last
    /// copy and no appender waits.
    fn settle(&mut self, place: usize, slot: usize, result: IoResult) -> Option<u64> {
        let flight = &mut self.list[place];
        flight.unsettled -= 1;
        if let Err(error) = result {
            flight.failures.push((slot, error));
        }
        if flight.unsettled > 0 {
            return None;
        }
        if flight.is_orphan {
            self.free.push(place);
            return Some(self.list[place].sequence);
        }
        if let Some(waker) = flight.waker.take() {
            waker.wake();
        }
        None
    }
}

/// Waits until every copy of an entry is settled. Returns the sequence, or the failed members; then
/// the entry is retired.
pub(super) struct Pending {
    lane: Rc<LaneLog>,
    /// `None` once it has ended.
    flight: Option<usize>,
}

impl Pending {
    pub fn new(lane: Rc<LaneLog>, sequence: u64, copies: usize) -> Pending {
        let flight = lane.flights.borrow_mut().start(sequence, copies);
        Pending { lane, flight: Some(flight) }
    }

    /// The flight that a copy settles.
    pub fn flight(&self) -> Option<usize> {
        self.flight
    }
}

impl Future for Pending {
    type Output = Result<u64, Failures>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let place = self.flight.expect("not polled after its end");
        let mut flights = self.lane.flights.borrow_mut();
        let flight = &mut flights.list[place];
        if flight.unsettled > 0 {
            flight.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let (sequence, failures) = (flight.sequence, std::mem::take(&mut flight.failures));
        flights.free.push(place);
        drop(flights);
        self.flight = None;
        if failures.is_empty() {
            return Poll::Ready(Ok(sequence));
        }
        self.lane.book.borrow_mut().retire(sequence);
        self.lane.poke();
        Poll::Ready(Err(failures))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Some(place) = self.flight.take() else { return };
        let mut flights = self.lane.flights.borrow_mut();
        if flights.list[place].unsettled > 0 {
            flights.list[place].is_orphan = true;
            return;
        }
        flights.free.push(place);
        self.lane.book.borrow_mut().retire(flights.list[place].sequence);
        self.lane.poke();
    }
}
