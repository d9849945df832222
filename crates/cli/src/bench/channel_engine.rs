//! The engine for any device: a channel on a reactor, one task for each request in flight.
//!
//! While the core polls, the clock is read once for all completions of one turn. A task in every
//! turn, which runs before those that completions have woken, makes the last reading stale.

use super::pattern::{Chooser, Walk};
use super::plan::Plan;
use super::stop::Stop;
use super::tally::{Failure, Tally};
use super::verify::{self, Content, Ledger};
use base::Rng;
use block::{Channel, Device, DeviceError, Flags, IoResult, Op, Request};
use drivers::shared_buffer::SharedBuffer;
use reactor::{Core, Permits, yield_now};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// How often a queue looks whether it should end.
const CHECK_NS: u64 = 10_000_000;
/// Most requests of one task before others get a turn, on devices that complete requests at once;
/// and most bytes, as those requests copy them.
const BURST: u64 = 32;
const BURST_BYTES: u64 = 128 << 10;

/// Runs one queue of the benchmark on the calling core. `buffers`: one for each request in flight.
///
/// # Errors
/// When the channel cannot be opened. A request that fails is counted instead.
pub async fn run_queue(
    core: Core,
    device: Arc<dyn Device>,
    plan: Arc<Plan>,
    queue: u32,
    buffers: Vec<SharedBuffer>,
    stop: Arc<Stop>,
) -> Result<Tally, DeviceError> {
    let channel = device.open_channel()?;
    let job = Rc::new(Job {
        chooser: plan.chooser(),
        tally: RefCell::default(),
        ended: Permits::new(0),
        is_over: Cell::new(false),
        stamp_ns: Cell::new(0),
        turn: Cell::new(0),
        writes: Cell::new(0),
        channel,
        core,
        plan,
        stop,
    });
    if job.plan.latency && !job.plan.event {
        job.core.spawn(Job::keep_time(job.clone()));
    }
    let places = job.plan.places_of(queue);
    let all = Walk::new(places.start, 1, places.end - places.start, job.plan.workload.is_random);
    for (i, buffer) in buffers.into_iter().enumerate() {
        let (i, depth) = (i as u64, u64::from(job.plan.depth));
        let walk = if job.plan.verify {
            // Every place belongs to one task alone, which therefore knows its content.
            let own = (all.count() - i).div_ceil(depth);
            Walk::new(places.start + i, depth, own, job.plan.workload.is_random)
        } else {
            all.clone()
        };
        let rng = Rng::new(job.plan.seed ^ (u64::from(queue) << 32) ^ (i << 16));
        job.core.spawn(Slot { job: job.clone(), walk, rng, buffer: Some(buffer) }.run());
    }
    job.measure().await;
    job.ended.acquire(job.plan.depth as usize).await;
    Ok(job.tally.take())
}

/// One queue while it runs.
struct Job {
    plan: Arc<Plan>,
    chooser: Chooser,
    channel: Rc<dyn Channel>,
    core: Core,
    tally: RefCell<Tally>,
    stop: Arc<Stop>,
    /// A permit for each task that has ended.
    ended: Permits,
    /// Nothing new is started and nothing counted any more.
    is_over: Cell<bool>,
    /// The clock's last reading; 0 when it is stale.
    stamp_ns: Cell<u64>,
    /// Turns of the core so far; constant while no task keeps the time.
    turn: Cell<u64>,
    writes: Cell<u32>,
}

impl Job {
    /// Makes the clock's reading stale in every turn of the core.
    async fn keep_time(job: Rc<Job>) {
        while !job.is_over.get() {
            job.stamp_ns.set(0);
            job.turn.set(job.turn.get() + 1);
            yield_now().await;
        }
    }

    /// Waits for the end of the run.
    async fn measure(&self) {
        let (core, plan) = (&self.core, &self.plan);
        self.wait_until(core.now_ns() + plan.ramp_ns).await;
        self.tally.borrow_mut().restart();
        let start_ns = core.now_ns();
        self.wait_until(start_ns + plan.time_ns).await;
        self.is_over.set(true);
        self.tally.borrow_mut().elapsed_ns = core.now_ns() - start_ns;
    }

    /// Waits for a moment, or for the end of the run.
    async fn wait_until(&self, end_ns: u64) {
        loop {
            let now_ns = self.core.now_ns();
            if now_ns >= end_ns || self.is_over.get() || self.stop.is_raised() {
                return;
            }
            self.core.sleep((end_ns - now_ns).min(CHECK_NS)).await;
        }
    }

    /// The time, read at most once a turn while a task keeps it.
    #[inline]
    fn now_ns(&self) -> u64 {
        if !self.plan.latency {
            return 0;
        }
        match self.stamp_ns.get() {
            0 => self.read_clock(),
            stamp => stamp,
        }
    }

    #[inline]
    fn read_clock(&self) -> u64 {
        let now_ns = self.core.now_ns();
        if !self.plan.event {
            self.stamp_ns.set(now_ns);
        }
        now_ns
    }

    #[inline]
    fn next_op(&self, rng: &mut Rng) -> Op {
        let plan = &self.plan;
        if plan.flush_every > 0 && self.writes.get() >= plan.flush_every {
            self.writes.set(0);
            return Op::Flush;
        }
        let op = self.chooser.next(rng);
        if op == Op::Write {
            self.writes.set(self.writes.get().wrapping_add(1));
        }
        op
    }

    #[inline]
    fn count(&self, op: Op, offset: u64, latency_ns: u64, result: IoResult) {
        let mut tally = self.tally.borrow_mut();
        match result {
            Ok(()) if self.is_over.get() => {}
            Ok(()) => {
                let bytes = if op == Op::Flush { 0 } else { self.plan.request_bytes };
                tally.count(op, bytes, self.plan.latency.then_some(latency_ns));
            }
            Err(error) => {
                tally.fail(Failure { op, offset, error });
                if !self.plan.keep_going {
                    self.stop.fail();
                    self.is_over.set(true);
                }
            }
        }
    }
}

/// One request in flight, again and again.
struct Slot {
    job: Rc<Job>,
    walk: Walk,
    rng: Rng,
    /// `None` while a request has it.
    buffer: Option<SharedBuffer>,
}

impl Slot {
    async fn run(mut self) {
        let mut notes = self.job.plan.verify.then(|| Notes::new(&self.job.plan));
        if notes.is_none() {
            self.fill_with_noise();
        }
        let job = self.job.clone();
        let mut start_ns = job.now_ns();
        let longest =
            if notes.is_some() { 1 } else { (BURST_BYTES / job.plan.request_bytes).clamp(1, BURST) };
        let mut burst = 0;
        while !job.is_over.get() {
            let op = job.next_op(&mut self.rng);
            let index = self.walk.next_index(&mut self.rng);
            let offset = self.walk.block(index) * job.plan.request_bytes;
            if let Some(notes) = &mut notes {
                notes.prepare(op, index, offset, self.buffer.as_mut().expect("idle"));
            }
            let turn = job.turn.get();
            let result = self.submit(op, offset).await;
            // A request that came back in the turn it was submitted in was not found by polling:
            // read on.
            let now_ns = match job.plan.latency && job.turn.get() == turn {
                true => job.read_clock(),
                false => job.now_ns(),
            };
            job.count(op, offset, now_ns - start_ns, result);
            if let Some(notes) = &mut notes {
                let buffer = self.buffer.as_ref().expect("idle");
                notes.settle(op, index, offset, buffer, result, &mut job.tally.borrow_mut());
            }
            start_ns = now_ns;
            if job.plan.think_ns > 0 {
                job.wait_until(job.core.now_ns() + job.plan.think_ns).await;
                start_ns = job.now_ns();
            }
            burst += 1;
            if burst == longest {
                burst = 0;
                yield_now().await;
                start_ns = job.now_ns();
            }
        }
        if let Some(notes) = notes {
            self.read_everything(notes).await;
        }
        job.ended.release(1);
    }

    fn fill_with_noise(&mut self) {
        let mut noise = vec![0; self.job.plan.request_bytes as usize];
        noise
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&self.rng.draw().to_le_bytes()[..word.len()]));
        self.buffer.as_mut().expect("idle").write(&noise);
    }

    async fn submit(&mut self, op: Op, offset: u64) -> IoResult {
        let job = &self.job;
        let flags = if op == Op::Write { job.plan.write_flags } else { Flags::NONE };
        let len = job.plan.request_bytes;
        let request = match op {
            Op::Read | Op::Write => {
                let buffer = self.buffer.take().expect("idle");
                let (buffer, result) = buffer.transfer(&*job.channel, op, flags, offset).await;
                self.buffer = Some(buffer);
                return result;
            }
            Op::WriteZeroes => Request::write_zeroes(len, flags),
            Op::Discard => Request::discard(len),
            Op::Flush => Request::flush(),
        };
        job.channel.submit(&request, if op == Op::Flush { 0 } else { offset }).await
    }

    /// Reads every place whose content is known, and compares.
    async fn read_everything(&mut self, mut notes: Notes) {
        let job = self.job.clone();
        let known: Vec<u64> = notes.ledger.known().collect();
        for index in known {
            if job.stop.is_raised() {
                return;
            }
            let offset = self.walk.block(index) * job.plan.request_bytes;
            notes.prepare(Op::Read, index, offset, self.buffer.as_mut().expect("idle"));
            let result = self.submit(Op::Read, offset).await;
            job.count(Op::Read, offset, 0, result);
            let buffer = self.buffer.as_ref().expect("idle");
            notes.settle(Op::Read, index, offset, buffer, result, &mut job.tally.borrow_mut());
            yield_now().await;
        }
    }
}

/// The content of a task's own places.
struct Notes {
    ledger: Ledger,
    seed: u64,
    /// Content after the write in flight, if it succeeds.
    writing: Content,
    bytes: Vec<u8>,
}

impl Notes {
    fn new(plan: &Plan) -> Notes {
        let bytes = vec![0; plan.request_bytes as usize];
        Notes { ledger: Ledger::default(), seed: plan.seed, writing: Content::Unknown, bytes }
    }

    /// Before a request: puts data into the buffer, or spoils it so that a read that does nothing
    /// shows.
    fn prepare(&mut self, op: Op, index: u64, offset: u64, buffer: &mut SharedBuffer) {
        match op {
            Op::Write => {
                self.writing = self.ledger.next_write();
                verify::fill(&mut self.bytes, self.seed, offset, self.writing);
                buffer.write(&self.bytes);
            }
            Op::Read if self.ledger.content(index) != Content::Unknown => {
                self.bytes.fill(0xa5);
                buffer.write(&self.bytes);
            }
            Op::Read | Op::WriteZeroes | Op::Discard | Op::Flush => {}
        }
    }

    /// After a request: notes what is there now, or compares what was read.
    fn settle(
        &mut self,
        op: Op,
        index: u64,
        offset: u64,
        buffer: &SharedBuffer,
        result: IoResult,
        tally: &mut Tally,
    ) {
        let now = match (op, result) {
            (Op::Flush, _) | (Op::Read, Err(_)) => return,
            (Op::Read, Ok(())) => return self.check(index, offset, buffer, tally),
            (Op::Write, Ok(())) => self.writing,
            (Op::WriteZeroes, Ok(())) => Content::Zeroes,
            (Op::Discard, Ok(())) | (_, Err(_)) => Content::Unknown,
        };
        self.ledger.set(index, now);
    }

    fn check(&mut self, index: u64, offset: u64, buffer: &SharedBuffer, tally: &mut Tally) {
        let content = self.ledger.content(index);
        if content == Content::Unknown {
            return;
        }
        buffer.read(&mut self.bytes);
        tally.verified += 1;
        if let Some(mismatch) = verify::compare(&self.bytes, self.seed, offset, content) {
            tally.mismatch(mismatch);
        }
    }
}
