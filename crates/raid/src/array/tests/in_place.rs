//! Memory that members get: the caller's own where that is stable, else a copy. Members that reads
//! of a mirror go to.

use super::*;
use block::{IoFuture, KernelBacking, MemoryRegion, StatusReport};
use reactor::Buffer;
use std::cell::{Cell, RefCell};
use std::sync::Mutex;

const STRIP: usize = 16 << 10;

/// A request of a member.
struct Visit {
    op: Op,
    slot: usize,
    /// First byte of its memory.
    base: usize,
}

type Seen = Arc<Mutex<Vec<Visit>>>;

/// Memory of a slot that notes its requests.
struct Watched(MemDevice, usize, Seen);

impl Device for Watched {
    fn name(&self) -> &str {
        "watched"
    }
    fn limits(&self) -> Limits {
        self.0.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(WatchedChannel(self.0.open_channel()?, self.1, self.2.clone())))
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

struct WatchedChannel(Rc<dyn Channel>, usize, Seen);

impl Channel for WatchedChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let visit = |segment: block::Segment| Visit { op: req.op, slot: self.1, base: segment.base.addr() };
        self.2.lock().unwrap().extend(req.data.iter().map(visit));
        self.0.submit(req, offset)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

struct Rig {
    array: Arc<Array>,
    faults: Faults,
    channel: Rc<dyn Channel>,
    seen: Seen,
}

impl Rig {
    async fn new(level: Level, groups: usize, data: usize, parity: usize) -> Rig {
        let (shape, seen) = (config(level, groups, data, parity), Seen::default());
        let disk = |slot| {
            let memory = MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap();
            Arc::new(Fault::new(Arc::new(Watched(memory, slot, seen.clone()))))
        };
        let faults: Faults = (0..shape.geometry.members()).map(disk).collect();
        let array = restart(&shape, &faults, &[], true).await;
        let channel = array.open_channel().unwrap();
        Rig { array, faults, channel, seen }
    }

    /// The number of writes of members whose data lies in the memory of `write`.
    async fn count_in_place(&self, write: impl AsyncFnOnce(Buffer, &dyn Channel) -> Buffer) -> usize {
        let mut buffer = reactor::current().buffers().take(8 * STRIP).await;
        for (i, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
            *byte = (i / 512 % 251) as u8 + 1;
        }
        let memory = buffer.segment().base.addr()..buffer.segment().base.addr() + buffer.segment().len;
        self.seen.lock().unwrap().clear();
        drop(write(buffer, &*self.channel).await);
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|visit| visit.op == Op::Write && memory.contains(&visit.base)).count()
    }

    /// Reads `count` blocks all over the array, 16 at a time. Returns the reads of each slot that
    /// went into the caller's memory.
    async fn read_blocks(&self, count: usize) -> Vec<usize> {
        self.seen.lock().unwrap().clear();
        let (next, callers) = (Rc::new(Cell::new(0)), Rc::new(RefCell::new(Vec::new())));
        let running = Rc::new(Cell::new(0));
        let core = reactor::current();
        for _ in 0..16 {
            running.set(running.get() + 1);
            let (next, callers, running) = (next.clone(), callers.clone(), running.clone());
            let (channel, core) = (self.channel.clone(), core.clone());
            reactor::current().spawn(async move {
                while next.get() < count {
                    let block = next.replace(next.get() + 1) as u64;
                    let buffer = core.buffers().take(4096).await;
                    callers.borrow_mut().push(buffer.segment().base.addr());
                    let place = block * 37 % 2048 * 4096;
                    let (_, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, place).await;
                    assert_eq!(result, Ok(()));
                }
                running.set(running.get() - 1);
            });
        }
        while running.get() > 0 {
            core.sleep(100_000).await;
        }
        let mut reads = vec![0; self.faults.len()];
        let callers = callers.borrow();
        for visit in self.seen.lock().unwrap().iter().filter(|visit| callers.contains(&visit.base)) {
            reads[visit.slot] += usize::from(visit.op == Op::Read);
        }
        reads
    }

    /// Writes a whole buffer that the caller might change. Returns the number of writes of members
    /// in place.
    async fn write_changing(&self) -> usize {
        self.count_in_place(async |buffer, channel| {
            let (buffer, result) =
                buffer.transfer_changing(channel, Op::Write, Flags::NONE, 0, |_, _| {}).await;
            assert_eq!(result, Ok(()));
            buffer
        })
        .await
    }

    /// Writes segments of these lengths that begin `skip` bytes into a buffer, and reads them back.
    /// Returns the number of writes of members in place.
    async fn write_segments(&self, skip: usize, lens: &[usize]) -> usize {
        let count = self
            .count_in_place(async |buffer, channel| {
                let (buffer, result) =
                    buffer.transfer_in_segments(channel, Op::Write, Flags::NONE, 0, skip, lens).await;
                assert_eq!(result, Ok(()));
                let len = lens.iter().sum();
                assert!(read(channel, 0, len).await.unwrap() == buffer.as_slice()[skip..][..len]);
                buffer
            })
            .await;
        assert_eq!(scrub(&self.array).await, 0);
        count
    }
}

#[test]
fn stable_memory_goes_to_members_without_a_copy() {
    reactor::run(async {
        // Each copy of a mirror is written from the one memory.
        let mirror = Rig::new(Level::Raid1, 1, 1, 2).await;
        assert_eq!(mirror.write_segments(0, &[4096]).await, 3);
        let striped = Rig::new(Level::Raid10, 2, 1, 1).await;
        assert_eq!(striped.write_segments(512, &[2 * STRIP]).await, 4);
        for (level, data, parity) in [(Level::Raid5, 3, 1), (Level::Raid6, 4, 2), (Level::NPlusM, 3, 4)] {
            let rig = Rig::new(level, 1, data, parity).await;
            assert_eq!(rig.write_segments(0, &[data * STRIP]).await, data, "a full stripe of {level:?}");
            assert_eq!(rig.write_segments(1024, &[4096]).await, 1, "a part of {level:?}");
            assert_eq!(
                rig.write_segments(0, &vec![STRIP; data]).await,
                data,
                "scattered strips of {level:?}"
            );
        }
    });
}

#[test]
fn memory_that_a_member_may_be_unable_to_use_is_copied() {
    reactor::run(async {
        let mirror = Rig::new(Level::Raid1, 1, 1, 1).await;
        assert_eq!(mirror.write_segments(1, &[4096]).await, 0, "misaligned");
        assert_eq!(mirror.write_segments(0, &[512, 3584]).await, 0, "a strip in two segments");
        let raid = Rig::new(Level::Raid5, 1, 3, 1).await;
        assert_eq!(raid.write_segments(4, &[3 * STRIP]).await, 0, "misaligned");
        assert_eq!(
            raid.write_segments(0, &[STRIP / 2, STRIP / 2, 2 * STRIP]).await,
            2,
            "a strip in two segments is copied, the others are not"
        );
    });
}

#[test]
fn memory_that_the_caller_may_change_is_copied() {
    reactor::run(async {
        for (level, data, parity) in [(Level::Raid1, 1, 1), (Level::Raid5, 3, 1), (Level::Raid6, 4, 2)] {
            let rig = Rig::new(level, 1, data, parity).await;
            assert_eq!(rig.write_changing().await, 0, "{level:?}");
        }
    });
}

#[test]
fn a_mirror_without_snapshots_copies_nothing_and_an_array_with_parity_always_does() {
    reactor::run(async {
        for (level, groups, data, parity, in_place) in [
            (Level::Raid1, 1, 1, 2, 24),
            (Level::Raid10, 2, 1, 1, 16),
            (Level::Raid5, 1, 3, 1, 0),
            (Level::Raid6, 1, 4, 2, 0),
        ] {
            let rig = Rig::new(level, groups, data, parity).await;
            rig.array.set_snapshot(false);
            assert_eq!(rig.write_changing().await, in_place, "{level:?}");
            assert_eq!(scrub(&rig.array).await, 0, "{level:?}");
            rig.array.set_snapshot(true);
            assert_eq!(rig.write_changing().await, 0, "{level:?}");
        }
    });
}

#[test]
fn copies_share_reads_and_a_slow_one_gets_few() {
    reactor::run_simulated(1, |_| async move {
        let mirror = Rig::new(Level::Raid1, 1, 1, 1).await;
        let slow = |ns| Rule::new(Action::Delay(ns)).on(&[Op::Read]);
        mirror.faults[0].add(slow(1_000_000));
        let second = mirror.faults[1].add(slow(1_000_000));
        let even = mirror.read_blocks(1000).await;
        assert!(even[0] > 400 && even[1] > 400 && even[0] + even[1] == 1000, "{even:?}");
        mirror.faults[1].remove(second);
        mirror.faults[1].add(slow(10_000_000));
        let uneven = mirror.read_blocks(1000).await;
        assert!(uneven[0] > 800 && uneven[0] + uneven[1] == 1000, "{uneven:?}");
    });
}

#[test]
fn reads_of_a_mirror_that_lacks_members_need_no_copy() {
    reactor::run(async {
        for (level, groups, parity, failed) in [(Level::Raid1, 1, 2, 0), (Level::Raid10, 2, 1, 3)] {
            let mirror = Rig::new(level, groups, 1, parity).await;
            mirror.array.fail(failed).await.unwrap();
            let reads = mirror.read_blocks(500).await;
            assert_eq!((reads.iter().sum::<usize>(), reads[failed]), (500, 0), "{level:?}: {reads:?}");
        }
    });
}
