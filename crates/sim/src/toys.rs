//! Toy arrays, a correct one and broken ones, that test the simulator itself.

use crate::SimDisk;
use crate::plan::{Filter, Plan, Shape};
use crate::run::{run_plan, shrink};
use crate::subject::{Local, Refusal, Running, Scrubbed, Subject};
use block::{
    Channel, Device, DeviceError, Flags, IoError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion,
    Op, Request, StatusReport,
};
use raid::Level;
use reactor::{Core, Permits};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Defect of a toy mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// Acknowledges a write when the first leg has the data.
    AckEarly,
    /// Passes the caller's memory to both legs.
    NoSnapshot,
    /// Writes without FUA to disks with caches and reports no cache itself.
    NoFua,
    /// Reads from any leg without a resync after a crash.
    NoResync,
    /// Runs overlapping writes concurrently.
    NoLock,
    /// Re-adds a failed leg as it is.
    StaleLeg,
    /// Corrupts a byte sometimes.
    Damages,
    /// Detaches a leg for one read error.
    DetachesOnReadError,
}

thread_local! {
    /// Writes take turns, whatever their channel.
    static LINE: Rc<Permits> = Rc::new(Permits::new(1));
}

struct ToySubject {
    bug: Bug,
    /// Legs with complete data, which real metadata would record.
    live: Arc<AtomicU64>,
}

/// A mirror. All work runs on the core of the channel; writes take turns per device.
struct ToyMirror {
    bug: Bug,
    legs: Vec<SimDisk>,
    live: Arc<AtomicU64>,
    limits: Limits,
}

impl Subject for ToySubject {
    fn capacity(&self, shape: &Shape) -> u64 {
        shape.geometry.capacity()
    }

    fn create<'a>(&'a self, shape: &'a Shape, _: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        self.live.store((1 << shape.members()) - 1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }

    fn extend<'a>(
        &'a self,
        _: &'a Shape,
        _: &'a [SimDisk],
        _: &'a [SimDisk],
    ) -> Local<'a, Result<raid::Geometry, String>> {
        Box::pin(async { Err("a toy has one group".into()) })
    }

    fn assemble<'a>(
        &'a self,
        shape: &'a Shape,
        disks: &'a [SimDisk],
        _: &'a [Core],
        _: bool,
    ) -> Local<'a, Result<Rc<dyn Running>, Refusal>> {
        Box::pin(async move {
            let mut live = 0;
            for disk in disks {
                live |= self.live.load(Ordering::Relaxed) & 1 << slot_of(disk);
            }
            if self.bug == Bug::StaleLeg {
                live = disks.iter().map(|disk| 1 << slot_of(disk)).sum();
            }
            let sources: Vec<&SimDisk> = disks.iter().filter(|disk| live & 1 << slot_of(disk) != 0).collect();
            if sources.is_empty() {
                return Err(Refusal::TooFew);
            }
            if self.bug != Bug::NoResync {
                for target in &sources {
                    match copy(&sources, target, shape).await {
                        Ok(()) => {}
                        Err(IoError::Medium) => live &= !(1 << slot_of(target)),
                        Err(error) => return Err(Refusal::Other(error.to_string())),
                    }
                }
            }
            self.live.store(live, Ordering::Relaxed);
            let legs = disks.to_vec();
            let limits = Limits { max_discard: 0, ..Limits::new(shape.geometry.capacity()) };
            let limits = Limits { block_size: shape.block_size, ..limits };
            let mirror = Arc::new(ToyMirror { bug: self.bug, legs, live: self.live.clone(), limits });
            Ok(Rc::new(ToyRunning { mirror, members: shape.members() }) as Rc<dyn Running>)
        })
    }
}

/// Offset of a leg's data: that of an array member's data, so that unreadable ranges hit it.
fn data_offset(disk: &SimDisk, bytes: u64) -> u64 {
    disk.limits().capacity - bytes - (64 << 10)
}

fn slot_of(disk: &SimDisk) -> usize {
    disk.name()[4..].split('.').next().unwrap().parse().unwrap()
}

/// Copies the first readable leg to `target`.
async fn copy(sources: &[&SimDisk], target: &SimDisk, shape: &Shape) -> IoResult {
    let gone = |_| IoError::DeviceGone;
    let to = target.open_channel().map_err(gone)?;
    let (bytes, len) = (shape.geometry.capacity(), shape.geometry.strip_bytes as usize);
    let start = data_offset(target, bytes);
    for offset in (start..start + bytes).step_by(len) {
        let mut buffer = reactor::current().buffers().take(len).await;
        let mut result = Err(IoError::DeviceGone);
        for source in sources {
            let from = source.open_channel().map_err(gone)?;
            (buffer, result) = buffer.transfer(&*from, Op::Read, Flags::NONE, offset).await;
            if result.is_ok() {
                break;
            }
        }
        result.map_err(|_| IoError::DeviceGone)?;
        buffer.transfer(&*to, Op::Write, Flags::FUA, offset).await.1?;
    }
    Ok(())
}

struct ToyRunning {
    mirror: Arc<ToyMirror>,
    members: usize,
}

impl Running for ToyRunning {
    fn device(&self) -> Arc<dyn Device> {
        self.mirror.clone()
    }

    fn geometry(&self) -> Option<raid::Geometry> {
        None
    }

    fn live(&self) -> Vec<bool> {
        let live = self.mirror.live.load(Ordering::Relaxed);
        (0..self.members).map(|slot| live & 1 << slot != 0).collect()
    }

    fn fail(&self, slot: usize) -> Local<'_, Result<(), String>> {
        self.mirror.drop_leg(slot);
        Box::pin(async { Ok(()) })
    }

    fn add<'a>(&'a self, _: usize, _: &'a SimDisk) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn scrub(&self, _: bool) -> Local<'_, Result<Scrubbed, String>> {
        Box::pin(async { Ok(Scrubbed::default()) })
    }

    fn strips_at(&self, _: usize) -> Option<std::ops::Range<u64>> {
        None // it finds nothing
    }

    fn resync(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn grow(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn stop(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}

impl ToyMirror {
    fn drop_leg(&self, slot: usize) {
        self.live.fetch_and(!(1 << slot), Ordering::Relaxed);
    }
}

impl Device for ToyMirror {
    fn name(&self) -> &str {
        "toy"
    }

    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let legs: Result<Vec<_>, _> = self
            .legs
            .iter()
            .filter(|leg| !leg.is_dead())
            .map(|leg| Ok((slot_of(leg), leg.open_channel()?)))
            .collect();
        Ok(Rc::new(ToyChannel {
            bug: self.bug,
            legs: legs?,
            disks: self.legs.clone(),
            live: self.live.clone(),
            line: LINE.with(Rc::clone),
            turn: Cell::new(0),
            limits: self.limits.clone(),
        }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

struct ToyChannel {
    bug: Bug,
    legs: Vec<(usize, Rc<dyn Channel>)>,
    disks: Vec<SimDisk>,
    live: Arc<AtomicU64>,
    line: Rc<Permits>,
    turn: Cell<usize>,
    limits: Limits,
}

impl ToyChannel {
    fn live(&self) -> Vec<&(usize, Rc<dyn Channel>)> {
        let live = self.live.load(Ordering::Relaxed);
        self.legs.iter().filter(|(slot, _)| live & 1 << slot != 0).collect()
    }

    /// Marks a leg as failed because it does not answer, unless power is off.
    fn drop_leg(&self, slot: usize) {
        if self.disks.iter().any(|disk| disk.is_dead() && slot_of(disk) == slot) {
            self.live.fetch_and(!(1 << slot), Ordering::Relaxed);
        }
    }

    async fn read(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let first = if self.bug == Bug::NoResync { self.turn.replace(self.turn.get() + 1) } else { 0 };
        let mut result = Err(IoError::Medium);
        let legs = self.live();
        for i in 0..legs.len() {
            let (slot, leg) = legs[(first + i) % legs.len()];
            result = leg.submit(req, offset).await;
            match result {
                Ok(()) => break,
                Err(IoError::DeviceGone) => self.drop_leg(*slot),
                Err(_) if self.bug == Bug::DetachesOnReadError => {
                    self.live.fetch_and(!(1 << slot), Ordering::Relaxed);
                }
                Err(_) => {}
            }
        }
        result
    }

    async fn write(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let flags = if self.bug == Bug::NoFua { req.flags } else { req.flags.with(Flags::FUA) };
        if self.bug != Bug::NoLock {
            self.line.acquire(1).await;
        }
        let mut own = reactor::current().buffers().take(req.len as usize).await;
        if req.op == Op::Write {
            req.data.copy_to(own.as_mut_slice());
        } else {
            own.as_mut_slice().fill(0);
        }
        if self.bug == Bug::Damages && reactor::current().random_u64().is_multiple_of(64) {
            own.as_mut_slice()[100] ^= 1;
        }
        let legs = self.live();
        let direct = req.with_flags(flags);
        let mut held = Vec::new();
        for _ in &legs {
            let mut copy = reactor::current().buffers().take(req.len as usize).await;
            copy.as_mut_slice().copy_from_slice(own.as_slice());
            held.push(copy);
        }
        let writes = legs.iter().zip(held).map(|((slot, leg), copy)| {
            let is_direct = self.bug == Bug::NoSnapshot && req.op == Op::Write;
            let direct = &direct;
            async move {
                let result = match is_direct {
                    true => leg.submit(direct, offset).await,
                    false => copy.transfer(&**leg, Op::Write, flags, offset).await.1,
                };
                match result {
                    Ok(()) => {}
                    Err(IoError::DeviceGone) => self.drop_leg(*slot),
                    Err(_) => drop(self.live.fetch_and(!(1 << slot), Ordering::Relaxed)),
                }
            }
        });
        let mut writes: Vec<_> = writes.map(Box::pin).collect();
        if self.bug == Bug::AckEarly {
            // One leg after the other, and the last one after the acknowledgement: it is written
            // with the next write, or never.
            writes.truncate(1);
        }
        all(writes).await;
        if self.bug != Bug::NoLock {
            self.line.release(1);
        }
        if self.live().is_empty() { Err(IoError::Medium) } else { Ok(()) }
    }
}

async fn all<F: Future<Output = ()>>(mut futures: Vec<std::pin::Pin<Box<F>>>) {
    std::future::poll_fn(|cx| {
        futures.retain_mut(|future| future.as_mut().poll(cx).is_pending());
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

impl Channel for ToyChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        let offset = offset + data_offset(&self.disks[0], self.limits.capacity);
        match req.op {
            Op::Read => IoFuture::new(self.read(req, offset)),
            Op::Write | Op::WriteZeroes => IoFuture::new(self.write(req, offset)),
            Op::Discard => IoFuture::ready(Err(IoError::Unsupported)),
            Op::Flush => IoFuture::ready(Ok(())),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match self.limits.check_range(offset, len) {
            Ok(()) => report.answer_data(len),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}

fn filter() -> Filter {
    Filter { levels: vec![Level::Raid1], ..Filter::default() }
}

fn subject(bug: Bug) -> Rc<dyn Subject> {
    Rc::new(ToySubject { bug, live: Arc::default() })
}

/// Writes of a toy take turns only on one core, and a toy has no rebuild.
fn plan(seed: u64) -> Plan {
    let mut plan = Plan::draw(seed, &filter());
    plan.shape.cores = 1;
    plan.shape.may_lose_too_many = false;
    for boot in &mut plan.boots {
        boot.plugged.clear();
        boot.steps
            .retain(|step| !matches!(step.action, crate::Action::Return(_) | crate::Action::Replace(_)));
    }
    plan
}

#[test]
fn a_right_mirror_passes() {
    for seed in 0..400 {
        let outcome = run_plan(&plan(seed), &subject(Bug::None), false);
        assert_eq!(outcome.failure, None, "seed {seed}");
    }
}

fn find(bug: Bug, most: u64) -> Option<(u64, String)> {
    (0..most).find_map(|seed| Some((seed, run_plan(&plan(seed), &subject(bug), false).failure?)))
}

#[test]
fn every_bug_of_a_mirror_is_found() {
    let bugs = [
        Bug::AckEarly,
        Bug::NoSnapshot,
        Bug::NoFua,
        Bug::NoResync,
        Bug::NoLock,
        Bug::StaleLeg,
        Bug::Damages,
        Bug::DetachesOnReadError,
    ];
    for bug in bugs {
        let found = find(bug, 2000);
        println!("{bug:?}: {found:?}");
        assert!(found.is_some(), "{bug:?} is not found");
    }
}

#[test]
fn a_failing_run_is_made_small_and_still_fails() {
    let (seed, failure) = find(Bug::Damages, 100).unwrap();
    let small = shrink(&plan(seed), &subject(Bug::Damages), &failure);
    assert!(small.keep.len() <= 2, "{:?} of {}", small.keep, plan(seed).ids().len());
    let again = run_plan(&crate::cut(&plan(seed), &small.keep, small.boots), &subject(Bug::Damages), false);
    assert_eq!(again.failure, Some(small.failure));
}
