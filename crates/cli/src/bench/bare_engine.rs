//! The engine for leaf queues: a loop that polls them and pushes the next request for each that has
//! ended. No futures, no tasks; the clock is read once for all completions that are found together.

use super::pattern::{Chooser, Walk};
use super::plan::Plan;
use super::stop::Stop;
use super::tally::{Failure, Tally};
use base::Rng;
use block::{DeviceError, Flags, Op, Queue};
use drivers::bare_queue::BareQueue;
use drivers::shared_buffer::SharedBuffer;
use reactor::Core;

/// Turns of the loop between two looks at the clock and at whether to end.
const TURNS_PER_CHECK: u32 = 256;

/// Runs queues of the benchmark on the calling thread. Each comes with its number and its buffers.
///
/// # Errors
/// When a queue cannot be opened or is not deep enough. A request that fails is counted instead.
pub fn run_queues<Q: Queue>(
    core: &Core,
    open: impl Fn() -> Result<Q, DeviceError>,
    name: &str,
    plan: &Plan,
    queues: Vec<(u32, Vec<SharedBuffer>)>,
    stop: &Stop,
) -> Result<Tally, DeviceError> {
    let mut lanes = Vec::new();
    for (number, buffers) in queues {
        let queue = open()?;
        if queue.depth() < plan.depth {
            let message = format!("--qd {}: its queues hold {} requests", plan.depth, queue.depth());
            return Err(DeviceError::new(name, message));
        }
        lanes.push(Lane::new(plan, number, BareQueue::new(queue, plan.limits.clone(), buffers)));
    }
    let mut run = Run { core, plan, stop, tally: Tally::default(), is_over: false };
    run.go(&mut lanes);
    Ok(run.tally)
}

/// The run of one thread.
struct Run<'a> {
    core: &'a Core,
    plan: &'a Plan,
    stop: &'a Stop,
    tally: Tally,
    is_over: bool,
}

impl Run<'_> {
    fn go<Q: Queue>(&mut self, lanes: &mut [Lane<Q>]) {
        self.poll_until(self.core.now_ns() + self.plan.ramp_ns, lanes);
        self.tally.restart();
        let start_ns = self.core.now_ns();
        self.poll_until(start_ns + self.plan.time_ns, lanes);
        self.tally.elapsed_ns = self.core.now_ns() - start_ns;
    }

    /// Continues until a moment, or until the run is stopped.
    fn poll_until<Q: Queue>(&mut self, end_ns: u64, lanes: &mut [Lane<Q>]) {
        let mut turns = 0u32;
        while !self.is_over {
            if turns.is_multiple_of(TURNS_PER_CHECK)
                && (self.core.now_ns() >= end_ns || self.stop.is_raised())
            {
                return;
            }
            turns = turns.wrapping_add(1);
            let found: usize = lanes.iter_mut().map(|lane| lane.turn(self)).sum();
            if found == 0 {
                std::hint::spin_loop();
            }
        }
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        if self.plan.latency { self.core.now_ns() } else { 0 }
    }

    #[cold]
    fn fail(&mut self, failure: Failure) {
        self.tally.fail(failure);
        if !self.plan.keep_going {
            self.stop.fail();
            self.is_over = true;
        }
    }
}

/// The request in flight in a slot.
#[derive(Clone, Copy)]
struct InFlight {
    op: Op,
    offset: u64,
    start_ns: u64,
}

/// One queue.
struct Lane<Q: Queue> {
    queue: BareQueue<Q>,
    chooser: Chooser,
    walk: Walk,
    rng: Rng,
    slots: Box<[InFlight]>,
    idle: Vec<u32>,
    done: Vec<(u32, block::IoResult)>,
    writes: u32,
}

impl<Q: Queue> Lane<Q> {
    fn new(plan: &Plan, number: u32, queue: BareQueue<Q>) -> Lane<Q> {
        let places = plan.places_of(number);
        let depth = plan.depth as usize;
        Lane {
            queue,
            chooser: plan.chooser(),
            walk: Walk::new(places.start, 1, places.end - places.start, plan.workload.is_random),
            rng: Rng::new(plan.seed ^ (u64::from(number) << 32)),
            slots: vec![InFlight { op: Op::Flush, offset: 0, start_ns: 0 }; depth].into(),
            idle: (0..plan.depth).rev().collect(),
            done: Vec::with_capacity(depth),
            writes: 0,
        }
    }

    /// Counts the completed requests, starts as many new ones, and returns their number.
    #[inline]
    fn turn(&mut self, run: &mut Run<'_>) -> usize {
        let found = self.queue.reap(&mut self.done);
        if found > 0 || !self.idle.is_empty() {
            let now_ns = run.now_ns();
            self.count(run, now_ns);
            self.start(run, now_ns);
        }
        self.queue.kick();
        found
    }

    #[inline]
    fn count(&mut self, run: &mut Run<'_>, now_ns: u64) {
        for (slot, result) in self.done.drain(..) {
            let InFlight { op, offset, start_ns } = self.slots[slot as usize];
            self.idle.push(slot);
            match result {
                Ok(()) => {
                    let bytes = if op == Op::Flush { 0 } else { run.plan.request_bytes };
                    run.tally.count(op, bytes, run.plan.latency.then_some(now_ns - start_ns));
                }
                Err(error) => run.fail(Failure { op, offset, error }),
            }
        }
    }

    #[inline]
    fn start(&mut self, run: &mut Run<'_>, now_ns: u64) {
        for place in (0..self.idle.len()).rev() {
            let slot = self.idle[place];
            let op = self.next_op(run.plan);
            let index = self.walk.next_index(&mut self.rng);
            let offset = if op == Op::Flush { 0 } else { self.walk.block(index) * run.plan.request_bytes };
            let flags = if op == Op::Write { run.plan.write_flags } else { Flags::NONE };
            self.slots[slot as usize] = InFlight { op, offset, start_ns: now_ns };
            match self.queue.submit(slot, op, flags, offset) {
                Ok(()) => drop(self.idle.swap_remove(place)),
                Err(error) => run.fail(Failure { op, offset, error }), // idle until the next turn
            }
        }
    }

    #[inline]
    fn next_op(&mut self, plan: &Plan) -> Op {
        if plan.flush_every > 0 && self.writes >= plan.flush_every {
            self.writes = 0;
            return Op::Flush;
        }
        let op = self.chooser.next(&mut self.rng);
        if op == Op::Write {
            self.writes = self.writes.wrapping_add(1);
        }
        op
    }
}
