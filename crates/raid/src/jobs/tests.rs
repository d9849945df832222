//! Arrays on memory that are kept, under virtual time.

mod together;
mod urgency;

use super::*;
use crate::array::{Start, StartMember};
use crate::config::Consistency;
use crate::metadata::intent_bitmap::{NEED_SYNC, STALE};
use crate::metadata::{Label, Store, Table, Target, testing};
use crate::metadata::{Layout, MemberState, read_superblock};
use crate::{ArrayConfig, Geometry, Level, Matrix, Zones};
use block::{Channel, DeviceError, Flags, IoError, IoResult, KernelBacking, Limits, MemoryRegion, Op};
use drivers::mem::{MemDevice, Options as MemOptions};
use layers::fault::{Action, Fault, Rule};
use layers::stats::Stats;
use std::rc::Rc;

mod budget;
mod replacement;
mod schedule;

const MEMBER_BYTES: u64 = 8 << 20;
const STRIP: u64 = 16 << 10;
const DATA_BYTES: u64 = 4 << 20;

/// A member: what breaks it, and what counts its requests.
#[derive(Clone)]
struct Disk {
    fault: Arc<Fault>,
    stats: Arc<Stats>,
}

/// Memory under a name of its own, so that tests can tell members from each other.
struct Named(String, MemDevice);

impl Device for Named {
    fn name(&self) -> &str {
        &self.0
    }
    fn limits(&self) -> Limits {
        self.1.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        self.1.open_channel()
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.1.refresh()
    }
    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.1.map_region(region)
    }
    fn unmap_region(&self, region: &MemoryRegion) {
        self.1.unmap_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

impl Disk {
    fn new() -> Disk {
        let memory = MemDevice::new(&MemOptions::new(MEMBER_BYTES)).unwrap();
        let name = format!("disk-{:016x}", reactor::current().random_u64());
        let fault = Arc::new(Fault::new(Arc::new(Named(name, memory))));
        Disk { stats: Arc::new(Stats::new(fault.clone())), fault }
    }

    fn device(&self) -> Arc<dyn Device> {
        self.stats.clone()
    }

    fn die(&self) {
        self.fault.add(Rule::new(Action::Error(IoError::DeviceGone)));
    }

    fn bytes(&self, op: Op) -> u64 {
        self.stats.snapshot().of(op).bytes
    }
}

fn shape(groups: usize, data: usize, parity: usize) -> ArrayConfig {
    let (matrix, consistency) = match data {
        1 => (Matrix::Copies, Consistency::Bitmap),
        _ => (Matrix::Powers, Consistency::Ppl),
    };
    ArrayConfig {
        level: Level::NPlusM,
        geometry: Geometry {
            groups,
            data,
            parity,
            strip_bytes: STRIP as u32,
            group_stripes: DATA_BYTES / STRIP,
            zones: Zones::NONE,
        },
        matrix,
        consistency,
        region_bytes: 256 << 10,
        lanes: 4,
        lane_bytes: 256 << 10,
        ..testing::config(3, 1)
    }
}

struct Rig {
    config: ArrayConfig,
    disks: Vec<Disk>,
    array: Arc<Array>,
    channel: Rc<dyn Channel>,
    jobs: Jobs,
}

fn options() -> Options {
    Options { checkpoint_ns: 1_000_000, ..Options::default() }
}

impl Rig {
    async fn new(config: ArrayConfig) -> Rig {
        Rig::with_table(config, |_| ()).await
    }

    async fn with_table(config: ArrayConfig, change: impl Fn(&mut Table)) -> Rig {
        let disks: Vec<Disk> = (0..config.geometry.members()).map(|_| Disk::new()).collect();
        let layout = Layout::new(MEMBER_BYTES, &config).unwrap();
        let target = |(slot, disk): (usize, &Disk)| Target {
            slot,
            channel: disk.device().open_channel().unwrap(),
            layout,
        };
        let targets: Vec<Target> = disks.iter().enumerate().map(target).collect();
        let mut table = testing::table(&config);
        change(&mut table);
        let results = Store::new(disks.len()).commit(&targets, &table).await;
        assert!(results.iter().all(|(_, result)| result.is_ok()));
        Rig::start(config, disks, &[], options()).await
    }

    /// Starts from what the disks say, without those in `absent`.
    async fn start(config: ArrayConfig, disks: Vec<Disk>, absent: &[usize], options: Options) -> Rig {
        let wall_ns = 1 + reactor::current().now_ns();
        Rig::start_at(config, disks, absent, options, wall_ns).await
    }

    /// As [`Rig::start`], at another time, in nanoseconds since 1970.
    async fn start_at(
        config: ArrayConfig,
        disks: Vec<Disk>,
        absent: &[usize],
        options: Options,
        wall_ns: u64,
    ) -> Rig {
        let mut members = Vec::new();
        let mut table: Option<Table> = None;
        for (slot, disk) in disks.iter().enumerate() {
            let channel = disk.device().open_channel().unwrap();
            let found = match absent.contains(&slot) {
                false => read_superblock("m", &*channel, MEMBER_BYTES).await.ok(),
                true => None,
            };
            members.push(found.map(|found| {
                let Label::Member(superblock) = &found.label else { panic!("a member") };
                if table.as_ref().is_none_or(|table| table.generation < superblock.table.generation) {
                    table = Some(superblock.table.clone());
                }
                StartMember { device: disk.device(), layout: superblock.layout, found }
            }));
        }
        let table = table.unwrap();
        for (slot, member) in members.iter_mut().enumerate() {
            if matches!(table.members[slot].state, MemberState::Missing { .. }) {
                *member = None;
            }
        }
        let start = Start {
            table,
            members,
            disowned: Vec::new(),
            wall_ns,
            is_simulated: true,
            needs_sync: false,
            trusts_parity: false,
        };
        let array = Array::start(start).await.unwrap();
        let channel = array.open_channel().unwrap();
        let jobs = array.keep(options).unwrap();
        Rig { config, disks, array, channel, jobs }
    }

    async fn write(&self, offset: u64, byte: u8, len: u64) -> IoResult {
        let mut buffer = reactor::current().buffers().take(len as usize).await;
        buffer.as_mut_slice().fill(byte);
        buffer.transfer(&*self.channel, Op::Write, Flags::NONE, offset).await.1
    }

    async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let buffer = reactor::current().buffers().take(len as usize).await;
        let (buffer, result) = buffer.transfer(&*self.channel, Op::Read, Flags::NONE, offset).await;
        result.map(|()| buffer.as_slice().to_vec())
    }

    /// Writes a pattern over a range, 64 KiB at a time; what was written.
    async fn fill(&self, offset: u64, len: u64, seed: u8) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (i, at) in (offset..offset + len).step_by(64 << 10).enumerate() {
            let byte = seed.wrapping_add((i as u8).wrapping_mul(7)).max(1);
            self.write(at, byte, 64 << 10).await.unwrap();
            bytes.resize(bytes.len() + (64 << 10), byte);
        }
        bytes
    }

    async fn read_all(&self, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for at in (0..len).step_by(64 << 10) {
            bytes.extend(self.read(at, 64 << 10).await.unwrap());
        }
        bytes
    }

    async fn mismatches(&self) -> u64 {
        let mut rows = 0;
        for stripe in 0..self.config.geometry.stripes() {
            rows += u64::from(self.array.scrub_stripe(stripe, false).await.unwrap().rows);
        }
        rows
    }

    fn is_whole(&self) -> bool {
        self.array.members().is_healthy()
    }

    /// Gives the array up as a crash does, and starts it from its disks again.
    async fn crash(self, absent: &[usize]) -> Rig {
        let wall_ns = self.array.wall_ns();
        self.crash_until(wall_ns, absent).await
    }

    /// As [`Rig::crash`]; it starts at another time, in nanoseconds since 1970.
    async fn crash_until(self, wall_ns: u64, absent: &[usize]) -> Rig {
        let Rig { config, disks, array, channel, jobs } = self;
        jobs.stop().await;
        drop((jobs, array, channel));
        Rig::start_at(config, disks, absent, options(), wall_ns).await
    }
}

fn simulate<F: Future<Output = ()> + 'static>(make: impl FnOnce() -> F) {
    reactor::run_simulated(7, |_| make());
}

async fn sleep_ms(ms: u64) {
    reactor::current().sleep(ms * 1_000_000).await;
}

#[test]
fn a_spare_takes_the_place_of_a_member_that_fails_while_writes_go_on() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        let mut before = rig.fill(0, 4 << 20, 3).await;
        let spare = Disk::new();
        rig.jobs.add(spare.device()).await.unwrap();
        assert_eq!(rig.jobs.status().spares.len(), 1);
        rig.disks[1].die();
        for i in 0..64u64 {
            let at = i * 37 % 64 * (64 << 10);
            rig.write(at, i as u8 + 1, 4096).await.unwrap();
            before[at as usize..][..4096].fill(i as u8 + 1);
            sleep_ms(3).await;
        }
        rig.jobs.idle().await;
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        assert_eq!(rig.array.count_regions(STALE), 0);
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(0).await.unwrap();
        rig.array.fail(2).await.unwrap();
        assert!(rig.read_all(4 << 20).await == before);
        let totals = rig.jobs.status().totals;
        assert!(totals.filled > 0 && totals.zeroed > 0, "{totals:?}");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_rebuild_goes_on_where_it_was_after_a_crash() {
    simulate(|| async {
        let mut rig = Rig::new(shape(2, 3, 1)).await;
        let before = rig.fill(0, 8 << 20, 3).await;
        rig.array.fail(2).await.unwrap();
        let spare = Disk::new();
        // Slow enough to be caught in the middle.
        spare.fault.add(Rule::new(Action::Delay(40_000_000)).on(&[Op::Write]));
        rig.jobs.add(spare.device()).await.unwrap();
        let progress = loop {
            sleep_ms(5).await;
            if let Some(progress) = rig.jobs.status().running.pop().filter(|running| running.done_bytes > 0) {
                break progress;
            }
        };
        assert_eq!((progress.kind, progress.slot), (Kind::Rebuild, Some(2)));
        rig.disks[2] = spare.clone();
        let mut rig = rig.crash(&[]).await;
        let at = rig.array.members().cursor(2);
        assert!(at > 0 && at < rig.config.geometry.stripes(), "{at}");
        let written = spare.bytes(Op::Write);
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        assert!(spare.bytes(Op::Write) - written < DATA_BYTES, "not all of it again");
        assert!(rig.read_all(8 << 20).await == before);
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(0).await.unwrap();
        assert!(rig.read_all(8 << 20).await == before);
        rig = rig.crash(&[]).await;
        assert!(rig.read_all(8 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_member_that_comes_back_gets_only_what_was_written_meanwhile() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        let mut before = rig.fill(0, 6 << 20, 9).await;
        rig.array.fail(1).await.unwrap();
        rig.write(1 << 20, 0xee, 4096).await.unwrap();
        before[1 << 20..][..4096].fill(0xee);
        assert_eq!(rig.array.count_regions(STALE), 1);
        let written = rig.disks[1].bytes(Op::Write);
        rig.disks[1].fault.clear();
        assert!(rig.jobs.re_add(rig.disks[1].device()).await.unwrap(), "partially");
        rig.jobs.idle().await;
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        assert_eq!(rig.array.count_regions(STALE), 0);
        let moved = rig.disks[1].bytes(Op::Write) - written;
        // That region, and one for each lane of its log: what may have been under way when it went.
        let most = (1 + u64::from(rig.config.lanes)) * rig.config.region_bytes;
        assert!(moved < most + (64 << 10), "{moved} bytes");
        assert!(rig.jobs.status().totals.filled <= most / STRIP);
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(0).await.unwrap();
        assert!(rig.read_all(6 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_member_that_was_away_when_the_log_was_replayed_gets_what_only_its_own_log_tells() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        let mut before = rig.fill(0, 3 << 20, 9).await;
        // Power goes when the new data is written and parity is not.
        let parity = rig.config.geometry.member(10, 3);
        let from = Layout::new(MEMBER_BYTES, &rig.config).unwrap().data_offset;
        let lost = Rule::new(Action::Torn { len: 0, result: Ok(()) }).on(&[Op::Write]).within(from..u64::MAX);
        rig.disks[parity].fault.add(lost);
        let at = 10 * 3 * STRIP;
        rig.write(at, 0xee, 4096).await.unwrap();
        before[at as usize..][..4096].fill(0xee);
        rig.disks[parity].fault.clear();
        let Rig { config, disks, array, channel, jobs } = rig;
        jobs.stop().await;
        drop((array, channel, jobs));
        let rig = Rig::start(config, disks, &[parity], options()).await;
        assert!(rig.jobs.re_add(rig.disks[parity].device()).await.unwrap(), "partially");
        rig.jobs.idle().await;
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail((parity + 1) % 4).await.unwrap();
        assert!(rig.read_all(3 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn regions_that_need_a_sync_are_made_to_fit_and_then_left_alone() {
    simulate(|| async {
        let rig = Rig::with_table(shape(1, 4, 2), |table| table.initial_region = NEED_SYNC).await;
        // Members of any content.
        let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
        rig.jobs.pause();
        for (i, disk) in rig.disks.iter().enumerate() {
            let channel = disk.device().open_channel().unwrap();
            let mut buffer = reactor::current().buffers().take(1 << 20).await;
            buffer.as_mut_slice().fill(i as u8 * 3 + 1);
            let end = buffer.transfer(&*channel, Op::Write, Flags::NONE, layout.data_offset).await;
            end.1.unwrap();
        }
        assert!(rig.mismatches().await > 0);
        assert!(rig.array.count_regions(NEED_SYNC) > 0, "paused");
        rig.jobs.resume();
        rig.jobs.idle().await;
        assert_eq!(rig.array.count_regions(NEED_SYNC), 0);
        assert_eq!(rig.mismatches().await, 0);
        let rig = rig.crash(&[]).await;
        assert_eq!(rig.array.count_regions(NEED_SYNC), 0, "durably");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_request_repeats_a_sync_that_met_unreadable_blocks() {
    simulate(|| async {
        let rig = Rig::with_table(shape(1, 4, 1), |table| table.initial_region = NEED_SYNC).await;
        for disk in &rig.disks[..2] {
            disk.fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]));
        }
        rig.jobs.idle().await;
        assert!(rig.array.count_regions(NEED_SYNC) > 0);
        rig.disks.iter().for_each(|disk| disk.fault.clear());
        rig.jobs.idle().await;
        assert_eq!(rig.array.count_regions(NEED_SYNC), 0);
        assert_eq!(rig.mismatches().await, 0);
    });
}

#[test]
fn a_scrub_names_the_strip_that_is_wrong_and_mends_it() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        let before = rig.fill(0, 4 << 20, 3).await;
        let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
        // Slot 3: data in one stripe, parity in another.
        let (slot, strips) = (3, [5u64, 8]);
        for stripe in strips {
            let channel = rig.disks[slot].device().open_channel().unwrap();
            let mut buffer = reactor::current().buffers().take(4096).await;
            buffer.as_mut_slice().fill(0x5a);
            let at = layout.data_offset + stripe * STRIP + 4096;
            buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await.1.unwrap();
        }
        rig.jobs.scrub(false);
        rig.jobs.idle().await;
        let report = rig.jobs.status().scrub.unwrap();
        assert!(report.is_complete);
        assert_eq!((report.mismatched_rows, report.mismatched_stripes), (2, 2));
        assert_eq!(report.wrong_strips, [(slot, 2)]);
        assert!(report.skipped > 0 && report.stripes > 0);
        rig.jobs.scrub(true);
        rig.jobs.idle().await;
        rig.jobs.scrub(false);
        rig.jobs.idle().await;
        assert_eq!(rig.jobs.status().scrub.unwrap().mismatched_rows, 0);
        assert!(rig.read_all(4 << 20).await == before, "the data was mended, not parity");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_scrub_resumes_as_the_check_or_the_repair_that_it_was() {
    for is_repairing in [false, true] {
        simulate(move || async move {
            let rig = Rig::new(shape(1, 4, 2)).await;
            rig.fill(0, 16 << 20, 3).await;
            // Near the end, which the first run does not reach.
            rot_in(&rig, 250, 2).await;
            rig.disks[0].fault.add(Rule::new(Action::Delay(20_000_000)).on(&[Op::Read]));
            rig.jobs.scrub(is_repairing);
            // While it runs, not only when it is stopped: a crash comes without a warning.
            let is_noted = || rig.array.table().scrub_cursor.is_some_and(|cursor| cursor > 0);
            while !is_noted() {
                assert!(!rig.jobs.status().scrub.is_some_and(|scrub| scrub.is_complete));
                sleep_ms(1).await;
            }
            let rig = rig.crash(&[]).await;
            rig.jobs.idle().await;
            let report = rig.jobs.status().scrub.unwrap();
            assert!(report.is_complete && report.stripes < 256, "{report:?}");
            assert_eq!((report.is_repairing, report.mismatched_rows), (is_repairing, 1));
            assert_eq!(rig.mismatches().await, u64::from(!is_repairing));
            let table = rig.array.table();
            assert_eq!((table.scrub_cursor, table.scrub_repairs), (None, false));
            rig.jobs.stop().await;
        });
    }
}

#[test]
fn a_scrub_that_stands_still_writes_no_superblocks() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        rig.fill(0, 1 << 20, 3).await;
        // The first stripe is compared, the others wait.
        let at = Layout::new(MEMBER_BYTES, &rig.config).unwrap().data_offset
            + rig.config.geometry.member_offset(1);
        let stands = Rule::new(Action::Delay(900_000_000_000)).on(&[Op::Read]).within(at..MEMBER_BYTES);
        rig.disks[0].fault.add(stands);
        // A write of superblocks takes longer than the time between two of them.
        rig.disks[1].fault.add(Rule::new(Action::Delay(10_000_000_000)));
        rig.jobs.scrub(false);
        sleep_ms(100_000).await;
        let generation = rig.array.table().generation;
        sleep_ms(300_000).await;
        assert!(rig.array.table().scrub_cursor.is_some());
        assert_eq!(rig.array.table().generation, generation);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_rebuild_notes_lost_blocks_as_bad_and_continues() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        let before = rig.fill(0, 6 << 20, 9).await;
        rig.array.fail(1).await.unwrap();
        // One row of stripe 0 cannot be read on slot 0: data strip 0 there, data strip 1 is lost
        // with slot 1.
        let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
        let row = layout.data_offset..layout.data_offset + 4096;
        let bad = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(row);
        let id = rig.disks[0].fault.add(bad);
        let spare = Disk::new();
        rig.jobs.add(spare.device()).await.unwrap();
        rig.jobs.idle().await;
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        assert_eq!(rig.jobs.status().totals.bad, 1);
        rig.disks[0].fault.remove(id);
        assert_eq!(rig.read(0, 4096).await, Err(IoError::Medium));
        assert_eq!(rig.read(STRIP, 4096).await, Err(IoError::Medium));
        assert!(rig.read(4096, 4096).await.unwrap() == before[4096..8192]);
        assert!(rig.read(STRIP + 4096, 4096).await.unwrap() == before[STRIP as usize + 4096..][..4096]);
        assert_eq!(rig.mismatches().await, 0);
        // Written again, they are good again.
        rig.write(0, 1, 4096).await.unwrap();
        rig.write(STRIP, 2, 4096).await.unwrap();
        assert!(rig.read(0, 4096).await.unwrap().iter().all(|byte| *byte == 1));
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(2).await.unwrap();
        assert!(rig.read(STRIP, 4096).await.unwrap().iter().all(|byte| *byte == 2));
        rig.jobs.stop().await;
    });
}

#[test]
fn a_degraded_array_takes_writes_to_blocks_that_nothing_can_bring_back() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        let before = rig.fill(0, 6 << 20, 9).await;
        rig.array.fail(1).await.unwrap();
        // Two rows cannot be read on slot 0: data strip 0 there, data strip 1 is lost with slot 1.
        let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
        let rows = layout.data_offset..layout.data_offset + 8192;
        let fault = rig.disks[0].fault.clone();
        for row in [rows.start..rows.start + 4096, rows.start + 4096..rows.end] {
            fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(row.clone()));
            fault.add(Rule::new(Action::Delay(100_000)).on(&[Op::Write, Op::WriteZeroes]).within(row));
        }
        // As with a disk, a row that is written can be read.
        let heal = fault.clone();
        reactor::current().spawn(async move {
            while !heal.rules().is_empty() {
                let rules = heal.rules();
                let is_written = |row: &std::ops::Range<u64>| {
                    let is_write = |rule: &Rule| rule.ops != [Op::Read] && rule.range == *row;
                    rules.iter().any(|(_, rule, hits)| *hits > 0 && is_write(rule))
                };
                for (id, rule, _) in &rules {
                    if is_written(&rule.range) {
                        heal.remove(*id);
                    }
                }
                reactor::current().sleep(1_000).await;
            }
        });
        assert_eq!(rig.read(STRIP, 4096).await, Err(IoError::Medium));
        rig.write(STRIP, 2, 4096).await.unwrap();
        assert!(rig.read(STRIP, 4096).await.unwrap().iter().all(|byte| *byte == 2));
        // The other lost block of the row is an error until it is written, though its disk can read
        // it again.
        assert_eq!(rig.read(0, 4096).await, Err(IoError::Medium));
        rig.write(0, 1, 4096).await.unwrap();
        assert!(rig.read(0, 4096).await.unwrap().iter().all(|byte| *byte == 1));
        assert!(rig.read(STRIP, 4096).await.unwrap().iter().all(|byte| *byte == 2));
        fault.clear();
        // The other row was not written to and loses nothing, now that its disk can read it.
        assert!(rig.read(4096, 4096).await.unwrap() == before[4096..8192]);
        assert!(rig.read(STRIP + 4096, 4096).await.unwrap() == before[STRIP as usize + 4096..][..4096]);
        rig.jobs.add(Disk::new().device()).await.unwrap();
        rig.jobs.idle().await;
        assert!(rig.is_whole() && rig.mismatches().await == 0);
        assert!(rig.read(STRIP, 4096).await.unwrap().iter().all(|byte| *byte == 2));
        rig.jobs.stop().await;
    });
}

#[test]
fn when_a_spare_fails_while_it_is_filled_the_next_one_is_taken() {
    simulate(|| async {
        let pool = SparePool::default();
        let mut rig = Rig::new(shape(1, 4, 2)).await;
        rig.jobs.stop().await;
        rig.jobs = rig.array.keep(Options { spares: pool.clone(), ..options() }).unwrap();
        let before = rig.fill(0, 4 << 20, 3).await;
        let (first, second) = (Disk::new(), Disk::new());
        first.fault.add(Rule { after: 60, ..Rule::new(Action::Error(IoError::DeviceGone)).on(&[Op::Write]) });
        rig.jobs.add_global_spare(second.device()).await.unwrap();
        rig.jobs.add(first.device()).await.unwrap();
        rig.array.fail(4).await.unwrap();
        rig.jobs.idle().await;
        assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
        assert!(pool.names().is_empty() && second.bytes(Op::Write) > 0 && first.bytes(Op::Write) > 0);
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(0).await.unwrap();
        rig.array.fail(1).await.unwrap();
        assert!(rig.read_all(4 << 20).await == before);
        rig.jobs.stop().await;
    });
}

#[test]
fn a_live_member_is_copied_to_its_replacement_and_let_go() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 1, 1)).await;
        let before = rig.fill(0, 2 << 20, 3).await;
        let new = Disk::new();
        rig.jobs.replace(0, new.device()).await.unwrap();
        let read = rig.disks[1].bytes(Op::Read);
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        assert_eq!(rig.disks[1].bytes(Op::Read), read, "copied from the member that goes");
        assert!(matches!(rig.jobs.replace(9, new.device()).await, Err(JobError::NoSuchSlot(9))));
        assert!(rig.jobs.replace(1, new.device()).await.is_err(), "it is a member");
        rig.disks[0].die();
        rig.disks[1].die();
        assert!(rig.read_all(2 << 20).await == before, "the old one is no longer needed");
        rig.jobs.stop().await;
    });
}

#[test]
fn a_pause_holds_jobs_and_resuming_lets_them_go_on() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 3, 1)).await;
        rig.fill(0, 2 << 20, 3).await;
        rig.jobs.pause();
        rig.array.fail(0).await.unwrap();
        rig.jobs.add(Disk::new().device()).await.unwrap();
        sleep_ms(1000).await;
        let status = rig.jobs.status();
        assert!(status.is_paused && status.running.is_empty() && !rig.is_whole());
        rig.jobs.resume();
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        rig.jobs.stop().await;
    });
}

#[test]
fn a_member_that_was_away_for_a_crash_gets_what_was_replayed_without_it() {
    simulate(|| async {
        let mut rig = Rig::new(shape(1, 3, 1)).await;
        let mut before = rig.fill(0, 2 << 20, 3).await;
        // Slot 2 goes away in the middle of writes; the rest crashes and starts without it.
        rig.disks[2].fault.add(Rule::new(Action::Error(IoError::DeviceGone)));
        rig.write(0, 0x77, 8192).await.unwrap();
        before[..8192].fill(0x77);
        rig = rig.crash(&[2]).await;
        rig.write(64 << 10, 0x78, 8192).await.unwrap();
        before[64 << 10..][..8192].fill(0x78);
        rig.disks[2].fault.clear();
        assert!(rig.jobs.re_add(rig.disks[2].device()).await.unwrap());
        rig.jobs.idle().await;
        assert!(rig.is_whole());
        assert_eq!(rig.mismatches().await, 0);
        rig.array.fail(0).await.unwrap();
        assert!(rig.read_all(2 << 20).await == before);
        rig.jobs.stop().await;
    });
}

/// Random writes while members fail, are re-added and replaced, and the array crashes; read back at
/// the end.
#[test]
fn data_outlives_random_failures_returns_and_crashes() {
    for seed in 1..=12 {
        reactor::run_simulated(seed, |_| async move {
            let random = |below: u64| reactor::current().random_u64() % below;
            let config = if seed % 3 == 0 { shape(1, 1, 2) } else { shape(1 + (seed % 2) as usize, 3, 2) };
            let mut rig = Rig::new(config).await;
            let blocks = rig.config.geometry.capacity() / 4096;
            let mut model = std::collections::BTreeMap::new();
            for disk in &rig.disks {
                disk.fault.add(Rule::new(Action::Delay(50_000)));
            }
            for _ in 0..150 {
                let (block, byte) = (random(blocks.min(600)), random(255) as u8 + 1);
                rig.write(block * 4096, byte, 4096).await.unwrap();
                model.insert(block, byte);
                let slots = rig.disks.len() as u64;
                match random(24) {
                    0 => {
                        let slot = random(slots) as usize;
                        let _ = rig.array.fail(slot).await; // refused when it would not survive
                    }
                    1 => {
                        for slot in 0..rig.disks.len() {
                            let _ = rig.jobs.re_add(rig.disks[slot].device()).await; // refused unless it failed
                        }
                    }
                    2 => {
                        let slot = random(slots) as usize;
                        let new = Disk::new();
                        new.fault.add(Rule::new(Action::Delay(50_000)));
                        if rig.jobs.replace(slot, new.device()).await.is_ok() {
                            rig.jobs.idle().await;
                            rig.disks[slot] = new;
                        }
                    }
                    3 => {
                        rig.jobs.idle().await;
                        rig = rig.crash(&[]).await;
                    }
                    4 => rig.jobs.scrub(true),
                    _ => sleep_ms(random(5)).await,
                }
            }
            for slot in 0..rig.disks.len() {
                let _ = rig.jobs.re_add(rig.disks[slot].device()).await;
            }
            rig.jobs.idle().await;
            assert!(rig.is_whole(), "seed {seed}: {:#?}", rig.jobs.status());
            assert_eq!(rig.mismatches().await, 0, "seed {seed}");
            rig.array.fail(0).await.unwrap();
            for (block, byte) in model {
                let found = rig.read(block * 4096, 4096).await.unwrap();
                assert!(found.iter().all(|b| *b == byte), "seed {seed}: block {block}");
            }
            rig.jobs.stop().await;
        });
    }
}

/// Damages a row of a strip in silence: the second one of strip `strip` of stripe 0.
async fn rot(rig: &Rig, strip: usize) {
    rot_in(rig, 0, strip).await;
}

/// Damages the second row of a strip of a stripe in silence.
async fn rot_in(rig: &Rig, stripe: u64, strip: usize) {
    let geometry = &rig.config.geometry;
    let slot = geometry.member(stripe, strip);
    let data = Layout::new(MEMBER_BYTES, &rig.config).unwrap().data_offset;
    let at = data + geometry.member_offset(stripe) + 4096;
    let channel = rig.disks[slot].device().open_channel().unwrap();
    let mut buffer = reactor::current().buffers().take(4096).await;
    buffer.as_mut_slice().fill(0xa5);
    buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await.1.unwrap();
}

fn contradictions(rig: &Rig) -> u64 {
    rig.array.counters().contradictions.rows()
}

#[test]
fn a_row_whose_wrong_strip_is_unknown_is_an_error_and_no_guess() {
    for rotten in [1, 4, 5] {
        simulate(move || async move {
            let rig = Rig::new(shape(1, 4, 2)).await;
            let before = rig.fill(0, 4 << 20, 3).await;
            rot(&rig, rotten).await;
            rig.array.fail(rig.config.geometry.member(0, 0)).await.unwrap();
            assert_eq!(rig.read(4096, 4096).await, Err(IoError::Medium));
            assert!(rig.read(0, 4096).await.unwrap() == before[..4096]);
            assert!(contradictions(&rig) > 0);
            rig.jobs.add(Disk::new().device()).await.unwrap();
            rig.jobs.idle().await;
            assert!(rig.is_whole(), "{:#?}", rig.jobs.status());
            assert_eq!(rig.jobs.status().totals.bad, 1);
            assert_eq!(rig.read(4096, 4096).await, Err(IoError::Medium), "rot in strip {rotten}");
            assert!(rig.read(0, 4096).await.unwrap() == before[..4096]);
            assert!(rig.read(8192, 8192).await.unwrap() == before[8192..16384]);
            assert_eq!(rig.mismatches().await, 0);
            rig.write(4096, 9, 4096).await.unwrap();
            assert!(rig.read(4096, 4096).await.unwrap().iter().all(|byte| *byte == 9));
            assert_eq!(rig.mismatches().await, 0);
            rig.jobs.stop().await;
        });
    }
}

#[test]
fn a_wrong_strip_is_named_and_mended_before_another_is_computed_from_it() {
    for (rotten, reads_first) in [(1, false), (2, true), (3, false), (4, true)] {
        simulate(move || async move {
            let rig = Rig::new(shape(1, 3, 3)).await;
            let before = rig.fill(0, 3 << 20, 3).await;
            rot(&rig, rotten).await;
            rig.array.fail(rig.config.geometry.member(0, 0)).await.unwrap();
            if reads_first {
                assert!(rig.read(4096, 4096).await.unwrap() == before[4096..8192]);
            }
            rig.jobs.add(Disk::new().device()).await.unwrap();
            rig.jobs.idle().await;
            assert!(rig.is_whole() && rig.jobs.status().totals.bad == 0);
            assert!(rig.read_all(3 << 20).await == before, "rot in strip {rotten}");
            // A read compares with one spare strip only: what it did not read is found by the
            // rebuild.
            assert_eq!((contradictions(&rig), rig.mismatches().await), (1, 0));
            rig.jobs.stop().await;
        });
    }
}

#[test]
fn parity_that_is_rebuilt_follows_data_where_the_wrong_strip_is_unknown() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        rig.fill(0, 4 << 20, 3).await;
        rot(&rig, 5).await;
        rig.array.fail(rig.config.geometry.member(0, 4)).await.unwrap();
        rig.jobs.add(Disk::new().device()).await.unwrap();
        rig.jobs.idle().await;
        assert!(rig.is_whole() && rig.jobs.status().totals.bad == 0);
        assert!(contradictions(&rig) > 0, "it is reported");
        assert_eq!(rig.mismatches().await, 1, "the other parity is left to a scrub");
        rig.jobs.stop().await;
    });
}

#[test]
fn contradictions_are_an_event_at_most_once_a_minute_with_the_rows_since() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        rig.fill(0, 4 << 20, 3).await;
        rot(&rig, 1).await;
        rig.array.fail(rig.config.geometry.member(0, 0)).await.unwrap();
        let events = || {
            let events = rig.jobs.status().events.into_iter().map(|event| event.text);
            events.filter(|text| text.contains("contradicted")).collect::<Vec<_>>()
        };
        for _ in 0..3 {
            assert_eq!(rig.read(4096, 4096).await, Err(IoError::Medium));
            sleep_ms(1000).await;
            assert_eq!(events().len(), 1);
        }
        sleep_ms(60_000).await;
        let events = events();
        assert!(events[0].contains(" 1 rows ") && events[1].contains(" 2 rows "), "{events:?}");
        assert_eq!((events.len(), contradictions(&rig)), (2, 3));
        rig.jobs.stop().await;
    });
}

#[test]
fn a_scrub_writes_unreadable_blocks_of_the_log_anew_while_requests_go_on() {
    simulate(|| async {
        let rig = Rig::new(shape(1, 4, 2)).await;
        let layout = Layout::new(MEMBER_BYTES, &rig.config).unwrap();
        let mut bytes = rig.fill(0, 1 << 20, 3).await;
        let nonce = rig.array.table().nonce;
        // The first block of a lane, where entries are written, and the last of the log.
        let blocks = [(2, layout.log_offset), (5, layout.log_offset + layout.log_bytes - 4096)];
        for (slot, at) in blocks {
            let rule = |action, op| Rule::new(action).on(&[op]).within(at..at + 4096);
            rig.disks[slot].fault.add(rule(Action::Error(IoError::Medium), Op::Read));
        }
        let zeroed = |slot: usize, at: u64| {
            let rule = Rule::new(Action::Delay(0)).on(&[Op::Write]).within(at..at + 4096);
            rig.disks[slot].fault.add(rule)
        };
        let counted = zeroed(5, blocks[1].1);
        rig.jobs.scrub(false);
        for i in 0..200 {
            let at = i % 64 * 4096;
            rig.write(at as u64, i as u8, 4096).await.unwrap();
            bytes[at..at + 4096].fill(i as u8);
        }
        rig.jobs.idle().await;
        let events: Vec<String> = rig.jobs.status().events.into_iter().map(|event| event.text).collect();
        for slot in [2, 5] {
            let text = format!("slot {slot}: 1 unreadable blocks of the log were rewritten");
            assert!(events.contains(&text), "{events:?}");
        }
        assert_eq!(rig.disks[5].fault.remove(counted), Some(1), "the block is written once");
        assert_ne!(rig.array.table().nonce, nonce, "older entries are void");
        assert!(rig.is_whole());
        for at in (0..64 * 4096).step_by(4096) {
            rig.write(at as u64, 77, 4096).await.unwrap();
            bytes[at..at + 4096].fill(77);
        }
        rig.disks.iter().for_each(|disk| disk.fault.clear());
        let rig = rig.crash(&[0, 3]).await;
        assert!(rig.read_all(1 << 20).await == bytes);
        rig.jobs.stop().await;
    });
}
