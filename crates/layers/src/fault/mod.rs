//! Errors, delays and torn writes by rule, for tests of the layers above.
//!
//! A control thread may change the rules while requests run. Each channel has its own copy of the
//! list, and updates it when the list's generation has changed. Without rules it returns its
//! child's future.

pub mod kind;

use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoError, IoFuture, IoResult, KernelBacking, Limits,
    MemoryRegion, Op, Request, StatusReport,
};
use reactor::Core;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The effect of a rule on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The request fails and does not reach the child.
    Error(IoError),
    /// The request starts that many nanoseconds late. Other rules still apply.
    Delay(u64),
    /// Only the first `len` bytes of a write or write-zeroes, rounded down to whole blocks, reach
    /// the child; then the request ends with `result`. With a length of 0 and `Ok` the write is
    /// lost silently.
    Torn {
        /// Bytes that reach the child.
        len: u64,
        /// Result for the caller.
        result: IoResult,
    },
}

/// A set of requests, and an action on them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The action.
    pub action: Action,
    /// Operations that the rule matches.
    pub ops: Vec<Op>,
    /// The rule matches requests that touch these bytes; a flush touches all.
    pub range: Range<u64>,
    /// Probability that the rule hits a matching request, from 0 to 1.
    pub probability: f64,
    /// Number of matching requests that the rule skips first.
    pub after: u64,
    /// Largest number of requests that the rule hits; `None`: unlimited.
    pub count: Option<u64>,
}

impl Rule {
    /// A rule that hits every request.
    pub fn new(action: Action) -> Rule {
        let ops = Op::ALL.to_vec();
        Rule { action, ops, range: 0..u64::MAX, probability: 1.0, after: 0, count: None }
    }

    /// The same rule for `ops` only.
    #[must_use]
    pub fn on(self, ops: &[Op]) -> Rule {
        Rule { ops: ops.to_vec(), ..self }
    }

    /// The same rule for requests that touch `range` (bytes) only.
    #[must_use]
    pub fn within(self, range: Range<u64>) -> Rule {
        Rule { range, ..self }
    }

    /// The same rule, hitting one request only.
    #[must_use]
    pub fn once(self) -> Rule {
        Rule { count: Some(1), ..self }
    }

    fn concerns(&self, req: &Request<'_>, offset: u64) -> bool {
        let can_tear = matches!(req.op, Op::Write | Op::WriteZeroes);
        let is_possible = can_tear || !matches!(self.action, Action::Torn { .. });
        let touches = req.op == Op::Flush
            || (offset < self.range.end && self.range.start < offset.saturating_add(req.len));
        is_possible && touches && self.ops.contains(&req.op)
    }
}

/// Names a rule of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(u64);

/// A device that breaks requests by rule.
pub struct Fault {
    name: String,
    child: Arc<dyn Device>,
    rules: Arc<Rules>,
}

impl Fault {
    /// `child` without rules.
    pub fn new(child: Arc<dyn Device>) -> Fault {
        Fault { name: format!("fault({})", child.name()), child, rules: Arc::default() }
    }

    /// Appends a rule. It applies to requests submitted from now on.
    pub fn add(&self, rule: Rule) -> RuleId {
        let mut id = RuleId(0);
        self.rules.change(|list, generation| {
            id = RuleId(generation);
            list.push(Arc::new(Active { id, rule, seen: AtomicU64::new(0), hits: AtomicU64::new(0) }));
        });
        id
    }

    /// Removes a rule. Returns the number of requests that it has hit, or `None` for an unknown
    /// rule.
    pub fn remove(&self, id: RuleId) -> Option<u64> {
        let mut hits = None;
        self.rules.change(|list, _| {
            let place = list.iter().position(|active| active.id == id);
            hits = place.map(|place| list.remove(place).hits.load(Ordering::Relaxed));
        });
        hits
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.rules.change(|list, _| list.clear());
    }

    /// The rules, each with the number of requests that it has hit.
    pub fn rules(&self) -> Vec<(RuleId, Rule, u64)> {
        let entry = |a: &Arc<Active>| (a.id, a.rule.clone(), a.hits.load(Ordering::Relaxed));
        self.rules.lock().iter().map(entry).collect()
    }
}

/// A rule in force, shared by all cores.
struct Active {
    id: RuleId,
    rule: Rule,
    /// Requests that the rule matched.
    seen: AtomicU64,
    hits: AtomicU64,
}

impl Active {
    /// Returns whether the rule hits this request, and counts it.
    fn hits(&self, req: &Request<'_>, offset: u64, core: &Core) -> bool {
        let rule = &self.rule;
        if !rule.concerns(req, offset) || self.seen.fetch_add(1, Ordering::Relaxed) < rule.after {
            return false;
        }
        // A double holds 53 bits.
        let chance = (core.random_u64() >> 11) as f64 / (1u64 << 53) as f64;
        if chance >= rule.probability {
            return false;
        }
        let next = |hits: u64| (hits < rule.count.unwrap_or(u64::MAX)).then_some(hits + 1);
        self.hits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

#[derive(Default)]
struct Rules {
    /// Grows with every change.
    generation: AtomicU64,
    list: Mutex<Vec<Arc<Active>>>,
}

impl Rules {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Active>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Active>>, u64)) {
        let mut list = self.lock();
        let generation = self.generation.load(Ordering::Relaxed) + 1;
        change(&mut list, generation);
        self.generation.store(generation, Ordering::Release);
    }
}

impl Device for Fault {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.child.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(FaultChannel {
            child: self.child.open_channel()?,
            device: self.child.clone(),
            rules: self.rules.clone(),
            generation: Cell::new(0),
            list: RefCell::default(),
            core: reactor::current(),
        }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.child.refresh()
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.child.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.child.unmap_region(region);
    }

    fn takes_registered(&self) -> bool {
        self.child.takes_registered()
    }

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        self.child.bitmaps()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::new(&self.name, "requests that the kernel serves would not be disturbed"))
    }
}

struct FaultChannel {
    child: Rc<dyn Channel>,
    device: Arc<dyn Device>,
    rules: Arc<Rules>,
    generation: Cell<u64>,
    list: RefCell<Vec<Arc<Active>>>,
    core: Core,
}

/// The combined effect of the rules on one request.
#[derive(Default)]
struct Plan {
    delay_ns: u64,
    end: Option<End>,
}

enum End {
    Error(IoError),
    Torn { len: u64, result: IoResult },
}

impl FaultChannel {
    #[inline]
    fn update(&self) {
        let generation = self.rules.generation.load(Ordering::Acquire);
        if generation != self.generation.get() {
            self.generation.set(generation);
            self.list.borrow_mut().clone_from(&self.rules.lock());
        }
    }

    /// Adds up delays until the first error or torn write, which decides the result.
    fn plan(&self, req: &Request<'_>, offset: u64) -> Plan {
        let mut plan = Plan::default();
        for active in self.list.borrow().iter() {
            if plan.end.is_some() {
                break;
            }
            if !active.hits(req, offset, &self.core) {
                continue;
            }
            match active.rule.action {
                Action::Delay(ns) => plan.delay_ns = plan.delay_ns.saturating_add(ns),
                Action::Error(error) => plan.end = Some(End::Error(error)),
                Action::Torn { len, result } => plan.end = Some(End::Torn { len, result }),
            }
        }
        plan
    }

    async fn carry_out(&self, plan: Plan, req: &Request<'_>, offset: u64) -> IoResult {
        if plan.delay_ns > 0 {
            self.core.sleep(plan.delay_ns).await;
        }
        match plan.end {
            None => self.child.submit(req, offset).await,
            Some(End::Error(error)) => Err(error),
            Some(End::Torn { len, result }) => self.tear(len, req, offset).await.and(result),
        }
    }

    async fn tear(&self, len: u64, req: &Request<'_>, offset: u64) -> IoResult {
        let limits = self.device.limits();
        limits.check(req, offset)?;
        let len = len.min(req.len) & !(u64::from(limits.block_size) - 1);
        if len == 0 {
            return Ok(());
        }
        self.child.submit(&req.part(0, len), offset).await
    }
}

impl Channel for FaultChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.update();
        if self.list.borrow().is_empty() {
            return self.child.submit(req, offset);
        }
        let plan = self.plan(req, offset);
        if plan.delay_ns == 0 && plan.end.is_none() {
            return self.child.submit(req, offset);
        }
        IoFuture::new(self.carry_out(plan, req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.child.block_status(report, offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Flags;
    use conformance::Suite;
    use drivers::mem::{MemDevice, Options};

    fn fault() -> Arc<Fault> {
        Arc::new(Fault::new(Arc::new(MemDevice::new(&Options::new(64 << 20)).unwrap())))
    }

    #[test]
    fn it_passes_the_suite_without_rules_and_with_delays() {
        Suite::new(fault()).run();
        let late = fault();
        late.add(Rule { probability: 0.1, ..Rule::new(Action::Delay(100_000)) });
        Suite::new(late.clone()).run();
        assert!(late.rules()[0].2 > 100);
    }

    /// Runs the suite, which must detect the effect of this rule.
    fn broken(rule: Rule) {
        let fault = fault();
        fault.add(rule);
        Suite::new(fault).run();
    }

    #[test]
    #[should_panic(expected = "fault(mem): more writes at once than any queue holds: byte ")]
    fn the_suite_notices_one_write_that_was_lost_among_thousands() {
        let lost = Rule::new(Action::Torn { len: 0, result: Ok(()) }).on(&[Op::Write]).once();
        broken(Rule { after: 2000, ..lost });
    }

    #[test]
    #[should_panic(expected = "after write zeroes []")]
    fn the_suite_notices_zeroes_that_were_not_written_to_the_end() {
        let torn = Action::Torn { len: 4096, result: Ok(()) };
        broken(Rule::new(torn).on(&[Op::WriteZeroes]));
    }

    #[test]
    #[should_panic(expected = "flush")]
    fn the_suite_notices_a_flush_that_fails() {
        broken(Rule { after: 9, ..Rule::new(Action::Error(IoError::Medium)).on(&[Op::Flush]).once() });
    }

    async fn zero(channel: &dyn Channel, offset: u64, len: u64) -> IoResult {
        channel.submit(&Request::write_zeroes(len, Flags::NONE), offset).await
    }

    #[test]
    fn a_rule_hits_what_it_names_after_so_many_and_so_often() {
        reactor::run(async {
            let fault = fault();
            let channel = fault.open_channel().unwrap();
            let rule = Rule::new(Action::Error(IoError::Medium)).on(&[Op::WriteZeroes]).within(4096..8192);
            let id = fault.add(Rule { after: 1, count: Some(2), ..rule });
            assert_eq!(zero(&*channel, 0, 4096).await, Ok(()), "before the range");
            assert_eq!(zero(&*channel, 8192, 512).await, Ok(()), "behind the range");
            assert_eq!(channel.submit(&Request::discard(512), 4096).await, Ok(()), "another operation");
            let mut results = Vec::new();
            for _ in 0..4 {
                results.push(zero(&*channel, 7680, 1024).await);
            }
            assert_eq!(results, [Ok(()), Err(IoError::Medium), Err(IoError::Medium), Ok(())]);
            assert_eq!(fault.remove(id), Some(2));
            assert_eq!(fault.remove(id), None);
        });
    }

    #[test]
    fn a_rule_with_a_probability_hits_about_that_many() {
        reactor::run(async {
            let fault = fault();
            let channel = fault.open_channel().unwrap();
            let id = fault.add(Rule { probability: 0.25, ..Rule::new(Action::Error(IoError::TimedOut)) });
            for _ in 0..4000 {
                let _ = zero(&*channel, 0, 512).await;
            }
            let hits = fault.remove(id).unwrap();
            assert!((800..1200).contains(&hits), "{hits} of 4000");
        });
    }

    #[test]
    fn a_torn_write_reaches_the_child_in_whole_blocks_only() {
        reactor::run(async {
            let fault = fault();
            let channel = fault.open_channel().unwrap();
            let core = reactor::current();
            let mut buffer = core.buffers().take(2048).await;
            buffer.as_mut_slice().fill(7);
            fault.add(Rule::new(Action::Torn { len: 1100, result: Err(IoError::DeviceGone) }).once());
            let (buffer, result) = buffer.transfer(&*channel, Op::Write, Flags::NONE, 0).await;
            assert_eq!(result, Err(IoError::DeviceGone));
            let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await;
            assert_eq!(result, Ok(()));
            assert!(buffer.as_slice()[..1024].iter().all(|b| *b == 7));
            assert!(buffer.as_slice()[1024..].iter().all(|b| *b == 0));
            fault.add(Rule::new(Action::Torn { len: 0, result: Ok(()) }).on(&[Op::Write]).once());
            let mut buffer = buffer;
            buffer.as_mut_slice().fill(9);
            let (buffer, result) = buffer.transfer(&*channel, Op::Write, Flags::NONE, 0).await;
            assert_eq!(result, Ok(()), "lost without a word");
            let (buffer, _) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await;
            assert_eq!(buffer.as_slice()[0], 7);
            assert_eq!(zero(&*channel, !511, 512).await, Err(IoError::OutOfRange));
        });
    }

    #[test]
    fn delays_add_up_and_an_error_comes_late() {
        let elapsed = reactor::run_simulated(1, |_| async {
            let fault = fault();
            let channel = fault.open_channel().unwrap();
            fault.add(Rule::new(Action::Delay(1000)));
            fault.add(Rule::new(Action::Delay(500)));
            fault.add(Rule::new(Action::Error(IoError::NoSpace)).on(&[Op::Flush]));
            assert_eq!(channel.submit(&Request::flush(), 0).await, Err(IoError::NoSpace));
            fault.clear();
            assert_eq!(channel.submit(&Request::flush(), 0).await, Ok(()));
            reactor::current().now_ns()
        });
        assert_eq!(elapsed, 1500);
    }
}
