//! Speed of a rebuild, compared with parity of cold data on the same core, and latency of
//! foreground requests during a rebuild with a latency target.

use super::load::{Load, Running};
use benches::array::{Members, Plan, REGION_BYTES};
use benches::member::Drive;
use benches::memory::Memory;
use block::{Device, Flags, Op, Request};
use raid::array::Array;
use raid::jobs::{Jobs, Kind, Options, Pace};
use raid::{Code, Consistency, Level, Matrix};
use reactor::{Core, CoreConfig, Cores};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a member in memory: five of them exceed any cache.
const MEMORY_BYTES: u64 = 384 << 20;
/// This exceeds any cache, too.
const POOL_BYTES: usize = 512 << 20;
const XOR_SECONDS: f64 = 0.3;
const DATA: usize = 4;
const MEBIBYTE: usize = 1 << 20;
/// An NVMe drive: a strip of 128 KiB delays a small request by at most that request's own latency.
const NVME: Drive = Drive { iops: 200_000, bandwidth: 3 << 30, latency_ns: 80_000 };
const NVME_BYTES: u64 = 16 << 30;
/// Allowed latency of requests during a rebuild, as a multiple of that without one.
const ALLOWED: f64 = 1.5;
/// The throttle adjusts ten times per second and starts at its minimum.
const SETTLES_S: f64 = 2.0;
const CORE: usize = 1;

const PLAN: Plan = Plan {
    level: Level::Raid5,
    count: DATA + 1,
    members: Members::Memory(MEMORY_BYTES),
    strip_bytes: None,
    consistency: Consistency::Ppl,
};

/// Runs on its own core.
fn on_core<F: Future<Output = Value> + 'static>(work: impl FnOnce(Core) -> F + Send + 'static) -> Value {
    let cores =
        Cores::start(&[CoreConfig { cpu: Some(CORE), ..CoreConfig::default() }]).expect("a core starts");
    cores.get(0).block_on(work).expect("the core runs")
}

/// Gigabytes a second of surviving strips that a rebuild reads, and that XOR alone reads of cold
/// memory.
pub fn speed() -> Value {
    on_core(|_| async {
        let xor = cold_xor();
        let array = PLAN.start().await;
        fill(&array).await;
        array.fail(0).await.expect("parity stands for it");
        let jobs = array.keep(Options::default()).expect("a keeper");
        let spare = PLAN.member(DATA + 1);
        touch_pages(&spare).await;
        jobs.add(spare).await.expect("it fits");
        let start = Instant::now();
        jobs.idle().await;
        let seconds = start.elapsed().as_secs_f64();
        assert!(!array.table().is_degraded(), "{:?}", jobs.status());
        jobs.stop().await;
        let geometry = &array.config().geometry;
        let read = geometry.group_stripes * u64::from(geometry.strip_bytes) * DATA as u64;
        json!({ "rebuild": read as f64 / seconds / 1e9, "xor": xor })
    })
}

/// Writes all data once, so that reads of members in memory have a cost and a rebuild has data.
pub async fn fill(array: &Arc<Array>) {
    let channel = array.open_channel().expect("a channel");
    let mut buffer = reactor::current().buffers().take(MEBIBYTE).await;
    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + i / 255) as u8);
    let end = array.limits().capacity;
    for at in (0..end - end % MEBIBYTE as u64).step_by(MEBIBYTE) {
        let (same, result) = buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await;
        result.expect("no request fails");
        buffer = same;
    }
}

/// Allocates every page of a RAM disk.
async fn touch_pages(device: &Arc<dyn Device>) {
    let channel = device.open_channel().expect("a channel");
    let zeroes = Request::write_zeroes(device.limits().capacity, Flags::NONE);
    channel.submit(&zeroes, 0).await.expect("no request fails");
}

/// Gigabytes of data per second: parity of 4+1, 1 MiB a strip, from memory.
fn cold_xor() -> f64 {
    let (pool, code) = (Memory::new(POOL_BYTES), Code::new(Matrix::Powers, DATA, 1).expect("a code"));
    let (start, mut at, mut bytes) = (Instant::now(), 0, 0);
    while start.elapsed().as_secs_f64() < XOR_SECONDS {
        let strips = pool.strips(at, DATA + 1, MEBIBYTE);
        // SAFETY: strips of the pool, which do not overlap and have no other user.
        let (sources, target) = unsafe {
            let source = |strip: &*mut u8| std::slice::from_raw_parts(strip.cast_const(), MEBIBYTE);
            let sources: Vec<&[u8]> = strips[..DATA].iter().map(source).collect();
            (sources, std::slice::from_raw_parts_mut(strips[DATA], MEBIBYTE))
        };
        code.encode(&sources, &mut [target]);
        bytes += DATA * MEBIBYTE;
        at = (at + (DATA + 1) * MEBIBYTE) % (POOL_BYTES - (DATA + 1) * MEBIBYTE);
    }
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Measures the p99 latency of requests of 4 KiB on an array that lacks a member, in nanoseconds,
/// before the rebuild and during it. The rebuild is limited to [`ALLOWED`] times the former; its
/// rate in bytes per second is also returned.
pub fn foreground(op: Op, seconds: f64) -> Value {
    on_core(move |core| async move {
        // A group without redundancy left would be rebuilt at full rate, whatever the latency.
        let members = Members::Hollow(NVME_BYTES, NVME);
        let plan = Plan { level: Level::Raid6, count: DATA + 2, members, ..PLAN };
        let array = plan.start().await;
        touch(&array).await;
        array.fail(0).await.expect("parity stands for it");
        let device: Arc<dyn Device> = array.clone();
        let load = Load { op, len: 4096, is_sequential: false, is_stable: false, depth: 8, cores: 1 };
        let running = Running::start(&core, &device, load, 0);
        running.p99_ns(seconds / 4.0).await;
        let without = running.p99_ns(seconds).await;
        let pace = Pace { latency_target_ns: Some((without * ALLOWED) as u64), ..Pace::default() };
        let jobs = array.keep(Options { pace, ..Options::default() }).expect("a keeper");
        jobs.add(plan.member(plan.count)).await.expect("it fits");
        core.sleep((SETTLES_S * 1e9) as u64).await;
        let before = rebuilt(&jobs);
        let during = running.p99_ns(seconds).await;
        let bytes = rebuilt(&jobs) - before;
        jobs.stop().await;
        running.stop().await;
        json!({ "without": without, "during": during, "rebuild": bytes as f64 / seconds })
    })
}

/// Writes one block in each region, so that all of it is rebuilt.
async fn touch(array: &Arc<Array>) {
    let channel = array.open_channel().expect("a channel");
    let mut buffer = reactor::current().buffers().take(4096).await;
    let step = REGION_BYTES * DATA as u64;
    for at in (0..array.limits().capacity).step_by(step as usize) {
        let (same, result) = buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await;
        result.expect("no request fails");
        buffer = same;
    }
}

/// Bytes of a member that the running rebuild has completed.
fn rebuilt(jobs: &Jobs) -> u64 {
    let status = jobs.status();
    let rebuild = status.running.into_iter().find(|job| job.kind == Kind::Rebuild);
    rebuild.expect("a rebuild that lasts longer than it is measured").done_bytes
}
