//! Members of arrays after a crash and after a stop.

use super::disk::Disk;
use super::{BUFFER, WALL_NS};
use block::{Channel, Device, Flags, Op};
use raid::admin::open::{Candidate, Wanted, select};
use raid::array::Array;
use raid::jobs::Options;
use raid::metadata::create::Identities;
use raid::metadata::{CreateOptions, Shape, create};
use raid::{Consistency, Level};
use std::sync::Arc;

const DISK_BYTES: usize = 288 << 10;
const LATENCY_NS: u64 = 50_000;
/// Time from the last writes to the crash, by which some of the writes have ended.
const CRASH_NS: u64 = 60_000;

/// An array, and whether a member fails and is replaced.
struct Plan {
    level: Level,
    groups: Option<usize>,
    members: usize,
    consistency: Consistency,
    loses_one: bool,
}

/// The members of all arrays: each after a crash, and after a stop.
pub fn all() -> Vec<Vec<Vec<u8>>> {
    let plan = |level, groups, members, consistency, loses_one| Plan {
        level,
        groups,
        members,
        consistency,
        loses_one,
    };
    let plans = [
        plan(Level::Raid5, None, 3, Consistency::Ppl, false),
        plan(Level::Raid6, None, 4, Consistency::Ppl, true),
        plan(Level::Raid5, None, 3, Consistency::Bitmap, false),
        plan(Level::Raid1, None, 2, Consistency::Bitmap, true),
        plan(Level::Raid10, Some(2), 4, Consistency::Bitmap, false),
        plan(Level::Raid0, None, 2, Consistency::None, false),
    ];
    plans.into_iter().flat_map(|plan| reactor::run_simulated(3, move |_| live(plan))).collect()
}

async fn live(plan: Plan) -> [Vec<Vec<u8>>; 2] {
    let new_disk = |i| Arc::new(Disk::holding(i, vec![0; DISK_BYTES], LATENCY_NS));
    let mut disks: Vec<Arc<Disk>> = (0..plan.members).map(new_disk).collect();
    let has_log =
        plan.consistency != Consistency::None && !matches!(plan.level, Level::Raid1 | Level::Raid10);
    let shape = Shape {
        strip_bytes: Some(4096),
        groups: plan.groups,
        lanes: has_log.then_some((2, 32 << 10)),
        region_bytes: Some(16 << 10),
        consistency: Some(plan.consistency),
        ..Shape::new("story", plan.level)
    };
    let options = CreateOptions {
        shape,
        force: true,
        zeroes: true,
        owner: "host".to_owned(),
        now_ns: WALL_NS,
        identities: Identities::Core,
    };
    create(&devices(&disks), &options).await.expect("it is made");
    let array = start(&devices(&disks)).await;
    work(&array, 4).await;
    if plan.loses_one {
        array.fail(1).await.expect("another one stands for it");
        work(&array, 2).await;
        disks.push(new_disk(plan.members));
        let jobs = array.keep(Options::default()).expect("a keeper");
        jobs.add(disks[plan.members].clone()).await.expect("it fits");
        jobs.idle().await;
        jobs.stop().await;
        array.fail(0).await.expect("another one stands for it");
    }
    let busy = array.clone();
    reactor::current().spawn(async move { work(&busy, 3).await });
    reactor::current().sleep(CRASH_NS).await;
    let crashed = disks.iter().map(|disk| disk.image()).collect();
    reactor::current().sleep(100 * LATENCY_NS).await;
    array.stop().await.expect("it stops");
    [crashed, disks.iter().map(|disk| disk.image()).collect()]
}

fn devices(disks: &[Arc<Disk>]) -> Vec<Arc<dyn Device>> {
    disks.iter().map(|disk| disk.clone() as Arc<dyn Device>).collect()
}

async fn start(disks: &[Arc<dyn Device>]) -> Arc<Array> {
    let candidate = |disk: &Arc<dyn Device>| Candidate {
        name: disk.name().to_owned(),
        device: Ok(disk.clone()),
        is_named: false,
    };
    let selection = select(disks.iter().map(candidate).collect(), &Wanted::default()).await;
    selection.expect("all members are there").start(WALL_NS).await.expect("they are new")
}

/// Writes at several offsets concurrently.
async fn work(array: &Arc<Array>, writes: u64) {
    let channel = array.open_channel().expect("members are open");
    let places = (0..writes).map(|i| i * 3 * BUFFER as u64 / 2 / 512 * 512);
    let all = places.map(|at| block::IoFuture::new(write(&*channel, at)));
    block::join_all(all).await.expect("no request fails");
}

async fn write(channel: &dyn Channel, at: u64) -> block::IoResult {
    let mut buffer = reactor::current().buffers().take(BUFFER).await;
    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(i, byte)| *byte = (i as u64 * 31 + at) as u8);
    buffer.transfer(channel, Op::Write, Flags::NONE, at).await.1
}
