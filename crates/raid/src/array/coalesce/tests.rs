//! Sequential writes on members that take time and count what they do, in virtual time.

use super::super::tests::{Faults, config, fill, read, restart, write};
use super::*;
use crate::array::Array;
use crate::{ArrayConfig, Consistency, Level};
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, KernelBacking, Limits, MemoryRegion, Op, StatusReport,
};
use drivers::mem::{self, MemDevice};
use drivers::null::{self, NullDevice};
use layers::fault::{Action, Fault, Rule};
use reactor::{current, run_simulated};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const MEMBER_BYTES: u64 = 48 << 20;
/// A member's performance.
const IOPS: u64 = 10_000;
const BANDWIDTH: u64 = 200 << 20;

/// Requests that members have carried out.
#[derive(Default)]
struct Done {
    reads: AtomicU64,
    writes: AtomicU64,
}

/// Memory that takes as long as a drive.
struct Drive {
    memory: MemDevice,
    time: NullDevice,
    done: Arc<Done>,
}

impl Drive {
    fn new(done: &Arc<Done>) -> Drive {
        let time = null::Options {
            iops: IOPS,
            bandwidth: BANDWIDTH,
            latency_ns: 50_000,
            ..null::Options::new(MEMBER_BYTES)
        };
        let memory = MemDevice::new(&mem::Options::new(MEMBER_BYTES)).unwrap();
        Drive { memory, time: NullDevice::new(&time).unwrap(), done: done.clone() }
    }
}

impl Device for Drive {
    fn name(&self) -> &str {
        "drive"
    }
    fn limits(&self) -> Limits {
        self.memory.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let (memory, time) = (self.memory.open_channel()?, self.time.open_channel()?);
        Ok(Rc::new(DriveChannel { memory, time, done: self.done.clone() }))
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

struct DriveChannel {
    memory: Rc<dyn Channel>,
    time: Rc<dyn Channel>,
    done: Arc<Done>,
}

impl Channel for DriveChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        match req.op {
            Op::Read => self.done.reads.fetch_add(1, Ordering::Relaxed),
            _ => self.done.writes.fetch_add(1, Ordering::Relaxed),
        };
        IoFuture::new(async move {
            self.time.submit(req, offset).await?;
            self.memory.submit(req, offset).await
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.memory.block_status(report, offset, len)
    }
}

/// An array on drives.
struct Subject {
    array: Arc<Array>,
    faults: Faults,
    done: Arc<Done>,
    /// The content that the array should have.
    expected: Rc<RefCell<Vec<u8>>>,
}

/// Requests one after the other, some in flight.
#[derive(Clone, Copy)]
struct Load {
    from: u64,
    len: u64,
    count: u64,
    depth: u64,
    /// From the last to the first: no stream.
    is_backwards: bool,
}

impl Load {
    fn offset(&self, number: u64) -> u64 {
        let number = if self.is_backwards { self.count - 1 - number } else { number };
        self.from + number * self.len
    }
}

impl Subject {
    async fn new(config: &ArrayConfig) -> Subject {
        let done = Arc::new(Done::default());
        let fault = || Arc::new(Fault::new(Arc::new(Drive::new(&done))));
        let faults: Faults = (0..config.geometry.members()).map(|_| fault()).collect();
        let array = restart(config, &faults, &[], true).await;
        let expected = Rc::new(RefCell::new(vec![0; array.limits().capacity as usize]));
        let subject = Subject { array, faults, done, expected };
        subject.count();
        subject
    }

    fn stripe_bytes(&self) -> u64 {
        self.array.config().geometry.stripe_bytes()
    }

    /// Reads and writes of members since the last call.
    fn count(&self) -> (u64, u64) {
        (self.done.reads.swap(0, Ordering::Relaxed), self.done.writes.swap(0, Ordering::Relaxed))
    }

    fn joined(&self) -> u64 {
        self.array.counters().joined_writes.load(Ordering::Relaxed)
    }

    /// Runs a load; how its requests ended, and how long it took.
    async fn run(&self, load: Load) -> (Vec<IoResult>, u64) {
        let started_ns = current().now_ns();
        let next = Rc::new(Cell::new(0));
        let results = Rc::new(RefCell::new(vec![None; load.count as usize]));
        for _ in 0..load.depth {
            let channel = self.array.open_channel().unwrap();
            let (next, results, expected) = (next.clone(), results.clone(), self.expected.clone());
            current().spawn(async move {
                while next.get() < load.count {
                    let number = next.replace(next.get() + 1);
                    let offset = load.offset(number);
                    let mut buffer = current().buffers().take(load.len as usize).await;
                    let noise = |i: usize| (i as u64 ^ offset ^ offset >> 9).wrapping_mul(0x9E37_79B9) >> 8;
                    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(i, b)| *b = noise(i) as u8);
                    expected.borrow_mut()[offset as usize..][..load.len as usize]
                        .copy_from_slice(buffer.as_slice());
                    let result = buffer.transfer(&*channel, Op::Write, Flags::NONE, offset).await.1;
                    results.borrow_mut()[number as usize] = Some(result);
                }
            });
        }
        while results.borrow().iter().any(Option::is_none) {
            current().sleep(10_000).await;
        }
        let results = results.borrow().iter().map(|result| result.unwrap()).collect();
        (results, current().now_ns() - started_ns)
    }

    /// Bytes a second that a load gets.
    async fn speed(&self, load: Load) -> f64 {
        let (results, ns) = self.run(load).await;
        assert!(results.iter().all(Result::is_ok));
        (load.len * load.count) as f64 / ns as f64 * 1e9
    }

    /// Reads everything, and scrubs what was written to.
    async fn check(&self) {
        self.check_contents().await;
        for stripe in 0..self.array.config().geometry.stripes().min(640) {
            assert_eq!(self.array.scrub_stripe(stripe, false).await.unwrap().mismatches, 0);
        }
    }

    async fn check_contents(&self) {
        let expected = self.expected.borrow().clone();
        let channel = self.array.open_channel().unwrap();
        for (i, bytes) in expected.chunks(1 << 20).enumerate() {
            assert!(read(&*channel, (i as u64) << 20, bytes.len()).await.unwrap() == bytes, "MiB {i}");
        }
    }
}

fn raid5(consistency: Consistency) -> ArrayConfig {
    ArrayConfig { consistency, ..config(Level::Raid5, 1, 5, 1) }
}

/// Two streams' worth of stripes in flight, in requests that do not fit them.
const STREAM: Load = Load { from: 0, len: 128 << 10, count: 320, depth: 16, is_backwards: false };

#[test]
fn a_stream_that_does_not_fit_stripes_is_written_in_whole_stripes_at_the_speed_of_its_drives() {
    for (consistency, writes_of_stripe, least) in
        [(Consistency::Bitmap, 6, 0.94), (Consistency::Ppl, 7, 0.93)]
    {
        run_simulated(1, move |_| async move {
            let subject = Subject::new(&raid5(consistency)).await;
            // A strip takes as long as a request does at least, and so does the header in the log.
            let theory = (5 * 16384 * IOPS) as f64 * 6.0 / writes_of_stripe as f64;
            let speed = subject.speed(STREAM).await / theory;
            let (reads, writes) = subject.count();
            assert!(speed > least, "{consistency:?}: {speed}");
            let stripes = STREAM.len * STREAM.count / subject.stripe_bytes();
            assert!(reads < 120, "{consistency:?}: {reads} reads");
            assert!(writes < stripes * writes_of_stripe * 21 / 20, "{consistency:?}: {writes} writes");
            subject.check().await;
        });
    }
}

#[test]
fn requests_much_smaller_than_a_stripe_are_joined_when_enough_of_them_are_in_flight() {
    run_simulated(1, |_| async {
        let subject = Subject::new(&raid5(Consistency::Ppl)).await;
        let load = Load { len: 4096, count: 4000, depth: 64, ..STREAM };
        let speed = subject.speed(load).await;
        let alone = Subject::new(&raid5(Consistency::Ppl)).await;
        let backwards = alone.speed(Load { is_backwards: true, ..load }).await;
        assert!(speed > 5.0 * backwards, "{speed:.0} and {backwards:.0} bytes/s");
        assert!(subject.joined() > 3000 && alone.joined() == 0);
        subject.check().await;
    });
}

#[test]
fn writes_that_wait_for_the_same_rows_are_written_together() {
    run_simulated(1, |_| async {
        let subject = Subject::new(&raid5(Consistency::Bitmap)).await;
        // The first opens no stream, the second is the first of one; it has the rows when the
        // others come.
        let load = Load { len: 16 << 10, count: 5, depth: 5, ..STREAM };
        subject.speed(load).await;
        assert_eq!(subject.joined(), 3);
        subject.check().await;
    });
}

#[test]
fn single_writes_and_streams_too_thin_for_a_stripe_never_wait() {
    run_simulated(1, |_| async {
        let loads = [(4096, 1), (16 << 10, 1), (120 << 10, 1), (4096, 3), (4096, 8)];
        for (len, depth) in loads {
            let load = Load { len, depth, count: 64, ..STREAM };
            let forwards = Subject::new(&raid5(Consistency::Ppl)).await.run(load).await.1;
            let load = Load { is_backwards: true, ..load };
            let backwards = Subject::new(&raid5(Consistency::Ppl)).await.run(load).await.1;
            assert!(forwards <= backwards * 21 / 20, "{len}, {depth}: {forwards} and {backwards} ns");
        }
    });
}

#[test]
fn a_member_that_fails_in_a_stream_fails_no_write_and_one_too_many_fails_all() {
    for consistency in [Consistency::Ppl, Consistency::Bitmap] {
        run_simulated(1, move |_| async move {
            let subject = Subject::new(&raid5(consistency)).await;
            let gone = Rule::new(Action::Error(IoError::DeviceGone));
            subject.faults[2].add(Rule { after: 200, ..gone.clone() });
            assert!(subject.run(STREAM).await.0.iter().all(Result::is_ok));
            assert_eq!(subject.array.table().members.iter().filter(|member| !member.is_live()).count(), 1);
            subject.check_contents().await;
            subject.faults[3].add(Rule { after: 200, ..gone });
            let results = subject.run(STREAM).await.0;
            let failed = results.iter().position(Result::is_err).unwrap();
            assert!(failed > 0 && results[failed + 64..].iter().all(|end| *end == Err(IoError::Medium)));
        });
    }
}

#[test]
fn requests_of_a_failed_joint_write_end_as_they_would_alone() {
    run_simulated(1, |_| async {
        let config = raid5(Consistency::Bitmap);
        let mut ends = Vec::new();
        for depth in [1, 64] {
            // A crash, and a member lost before the resync: what it held cannot be written.
            let subject = Subject::new(&config).await;
            fill(&*subject.array.open_channel().unwrap(), 2 << 20).await;
            drop(subject.array);
            let array = restart(&config, &subject.faults, &[], false).await;
            array.fail(1).await.unwrap();
            let subject = Subject { array, ..subject };
            let load = Load { len: 4096, count: 400, depth, ..STREAM };
            ends.push((subject.run(load).await.0, subject.joined()));
        }
        let failed = ends[0].0.iter().filter(|end| **end == Err(IoError::Medium)).count();
        assert!((40..200).contains(&failed), "{failed}");
        assert!(ends[0].0 == ends[1].0);
        assert!(ends[0].1 == 0 && ends[1].1 > 40, "{} joined", ends[1].1);
    });
}

#[test]
fn a_stream_over_places_that_others_write_to_leaves_whole_blocks_and_right_parity() {
    run_simulated(3, |_| async {
        let subject = Subject::new(&raid5(Consistency::Ppl)).await;
        let is_over = Rc::new(Cell::new(false));
        let (other, seen) = (subject.array.open_channel().unwrap(), is_over.clone());
        current().spawn(async move {
            while !seen.get() {
                let block = current().random_u64() % (STREAM.count * STREAM.len / 4096);
                write(&*other, block * 4096, 0xee, 4096).await.unwrap();
            }
            seen.set(false);
        });
        assert!(subject.run(STREAM).await.0.iter().all(Result::is_ok));
        is_over.set(true);
        while is_over.get() {
            current().sleep(10_000).await;
        }
        let channel = subject.array.open_channel().unwrap();
        let mut others = 0;
        for at in (0..(STREAM.count * STREAM.len) as usize).step_by(4096) {
            let bytes = read(&*channel, at as u64, 4096).await.unwrap();
            if bytes.iter().all(|byte| *byte == 0xee) {
                subject.expected.borrow_mut()[at..at + 4096].fill(0xee);
                others += 1;
            }
        }
        assert!(others > 0);
        subject.check().await;
    });
}
