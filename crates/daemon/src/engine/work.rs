//! Long work of the daemon itself: how it is doing, and what is wanted of it.

use crate::api_error::ApiError;
use api::{Job, JobChange, JobKind};
use block::Op;
use layers::migrate::Migratable;
use layers::stats::Histogram;
use raid::array::Counts;
use raid::jobs::{Pace, Throttle};
use reactor::Core;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks of paused work.
pub const LOOK: Duration = Duration::from_millis(50);
/// Over how long a rate is measured.
const RATE_TIME: Duration = Duration::from_secs(1);

/// How work is doing, and what is wanted of it.
#[derive(Default)]
pub struct Control {
    total: u64,
    left: AtomicU64,
    bytes_per_s: AtomicU64,
    pace: Mutex<Pace>,
    is_paused: AtomicBool,
    is_cancelled: AtomicBool,
    has_ended: AtomicBool,
}

/// Why work ends early.
pub enum Stop {
    /// A step failed.
    Error(ApiError),
    /// A client cancelled the job.
    Cancelled,
    /// The daemon ends.
    Later,
}

impl<F: Into<ApiError>> From<F> for Stop {
    fn from(error: F) -> Stop {
        Stop::Error(error.into())
    }
}

impl Control {
    /// For work on `total` bytes.
    pub fn new(total: u64) -> Control {
        Control { total, left: total.into(), ..Control::default() }
    }

    /// Notes how much is left.
    pub fn set_left(&self, bytes: u64) {
        self.left.store(bytes, Ordering::Relaxed);
    }

    /// Gives the work up.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::SeqCst);
    }

    /// Ends the work because the daemon ends.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }

    /// Whether the work continues; waits while the job is paused.
    ///
    /// # Errors
    /// When it is to end.
    pub fn check(&self) -> Result<(), Stop> {
        if self.is_cancelled.load(Ordering::SeqCst) {
            Err(Stop::Cancelled)
        } else if self.has_ended.load(Ordering::SeqCst) {
            Err(Stop::Later)
        } else {
            Ok(())
        }
    }

    /// Pauses or resumes it, or changes its pace.
    pub fn change(&self, change: &JobChange) {
        if let Some(is_paused) = change.is_paused {
            self.is_paused.store(is_paused, Ordering::Relaxed);
        }
        if change.max_bytes_per_s.is_some() || change.min_bytes_per_s.is_some() {
            *self.pace.lock().unwrap_or_else(PoisonError::into_inner) = pace(change);
        }
    }

    fn pace(&self) -> Pace {
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job that this is: what `kind` of work on which `volume`, on which array or device.
    pub fn job(&self, kind: JobKind, volume: &str, on: &str) -> Job {
        Job { backing: on.into(), volume: Some(volume.into()), ..self.job_of_device(kind, volume) }
    }

    /// As [`Control::job`], for work on all of a device.
    pub fn job_of_device(&self, kind: JobKind, device: &str) -> Job {
        let (left, rate) = (self.left.load(Ordering::Relaxed), self.bytes_per_s.load(Ordering::Relaxed));
        let is_paused = self.is_paused.load(Ordering::Relaxed);
        Job {
            id: format!("{device}.{kind}"),
            kind,
            backing: device.into(),
            volume: None,
            slot: None,
            done_bytes: self.total.saturating_sub(left),
            total_bytes: self.total,
            bytes_per_s: rate,
            eta_s: (rate > 0 && !is_paused).then(|| left.div_ceil(rate)),
            is_paused,
            is_urgent: false,
            waits_for: None,
        }
    }
}

/// A recorded job that does not run: `missing` is the array or device that it needs and that is not
/// open. Without one the daemon is about to continue it.
pub fn waiting(job: Job, missing: Option<ApiError>) -> Job {
    let soon = || "the daemon continues it within seconds".to_owned();
    Job { waits_for: Some(missing.map_or_else(soon, |missing| missing.detail)), ..job }
}

/// Work on a thread of its own.
pub struct Task {
    thread: Mutex<Option<JoinHandle<()>>>,
    /// How it is doing.
    pub control: Arc<Control>,
}

impl Task {
    /// Begins `work` on `total` bytes on a thread with this name.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn start(
        name: &str,
        total: u64,
        work: impl FnOnce(&Arc<Control>) + Send + 'static,
    ) -> io::Result<Task> {
        let control = Arc::new(Control::new(total));
        let own = control.clone();
        let thread = reactor::spawn_thread(name, move || work(&own))?;
        Ok(Task { thread: Mutex::new(Some(thread)), control })
    }

    /// Ends it for now.
    pub fn stop(&self) {
        self.control.end();
        if self.take_thread().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a job has ended with a defect of the daemon; its log says more");
        }
    }

    /// Gives it up. The caller joins the thread, unless another does.
    pub fn cancel(&self) -> Option<JoinHandle<()>> {
        self.control.cancel();
        self.take_thread()
    }

    fn take_thread(&self) -> Option<JoinHandle<()>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Waits for the thread of a job that was given up: nothing is left of the job afterwards.
pub fn join(thread: Option<JoinHandle<()>>) -> Result<(), ApiError> {
    match thread.is_some_and(|thread| thread.join().is_err()) {
        true => Err(ApiError::failed("a defect of the daemon; its log says more")),
        false => Ok(()),
    }
}

/// The pace of work while volumes are used: as fast as their users keep their latency, within the
/// given bounds.
pub struct Pacer {
    began: Instant,
    throttle: Throttle,
    users: Users,
    /// Since when bytes have been counted that were begun.
    since: Instant,
    bytes: u64,
}

impl Pacer {
    /// For work that is about to begin.
    pub fn new(control: &Control, users: Users) -> Pacer {
        let now = Instant::now();
        Pacer { began: now, throttle: Throttle::new(control.pace(), 0), users, since: now, bytes: 0 }
    }

    /// Waits on a core until work on so many bytes may begin.
    ///
    /// # Errors
    /// When the work is to end.
    pub async fn wait(&mut self, core: &Core, control: &Control, bytes: u64) -> Result<(), Stop> {
        while let Some(wait) = self.begin(control, bytes)? {
            core.sleep(wait.as_nanos() as u64).await;
        }
        Ok(())
    }

    /// Begins work on so many bytes, if it may: otherwise how long to wait and ask again.
    ///
    /// # Errors
    /// When the work is to end.
    pub fn begin(&mut self, control: &Control, bytes: u64) -> Result<Option<Duration>, Stop> {
        control.check()?;
        if control.is_paused.load(Ordering::Relaxed) {
            self.report(control, 0);
            return Ok(Some(LOOK));
        }
        let now_ns = self.began.elapsed().as_nanos() as u64;
        self.throttle.set_pace(control.pace());
        if self.throttle.is_due(now_ns) {
            self.throttle.look(now_ns, &self.users.take());
        }
        let took = self.since.elapsed();
        if took >= RATE_TIME {
            let rate = u128::from(self.bytes) * 1_000_000_000 / took.as_nanos();
            self.report(control, rate as u64);
        }
        Ok(match self.throttle.begin(now_ns, bytes) {
            Ok(()) => {
                self.bytes += bytes;
                None
            }
            // The job may be changed meanwhile.
            Err(at_ns) => Some(Duration::from_nanos(at_ns.saturating_sub(now_ns)).min(LOOK)),
        })
    }

    /// Bytes that should be begun at once at most: what may be done in a tenth of a second.
    pub fn most_at_once(&self) -> u64 {
        self.throttle.allowed().map_or(u64::MAX, |bytes_per_s| (bytes_per_s / 10.0) as u64)
    }

    fn report(&mut self, control: &Control, bytes_per_s: u64) {
        control.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
        (self.since, self.bytes) = (Instant::now(), 0);
    }
}

/// The latency that users of some volumes see.
#[derive(Default)]
pub struct Users(Vec<(Weak<Migratable>, [Histogram; 2])>);

impl Users {
    /// Of these volumes, from now on, as long as they are open.
    pub fn of(volumes: impl Iterator<Item = Arc<Migratable>>) -> Users {
        Users(volumes.map(|volume| (Arc::downgrade(&volume), latencies(&volume))).collect())
    }

    /// The latencies of their requests since the last call.
    fn take(&mut self) -> Counts {
        let mut counts = Counts::default();
        for (volume, before) in &mut self.0 {
            let Some(volume) = volume.upgrade() else { continue };
            let now = latencies(&volume);
            for (now, before) in now.iter().zip(before.iter()) {
                now.since(before).iter().for_each(|(ns, requests)| counts.note_many(ns, requests));
            }
            *before = now;
        }
        counts
    }
}

fn latencies(volume: &Migratable) -> [Histogram; 2] {
    let snapshot = volume.snapshot();
    [Op::Read, Op::Write].map(|op| snapshot.of(op).latency_ns.clone())
}

/// The pace that a change asks for.
pub fn pace(change: &JobChange) -> Pace {
    let usual = Pace::default();
    Pace {
        most_bytes_per_s: change.max_bytes_per_s.filter(|most| *most > 0),
        least_bytes_per_s: change.min_bytes_per_s.unwrap_or(usual.least_bytes_per_s),
        ..usual
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Device, Flags, Request};
    use reactor::{CoreConfig, Cores};
    use stack::kinds::member::member;

    const MIB: u64 = 1 << 20;

    fn change(least: u64, most: u64) -> JobChange {
        JobChange { is_paused: None, max_bytes_per_s: Some(most), min_bytes_per_s: Some(least) }
    }

    #[test]
    fn work_is_as_fast_as_it_may_be_and_says_so() {
        let control = Control::new(10 * MIB);
        let mut pacer = Pacer::new(&control, Users::default());
        let mut begin = |bytes| pacer.begin(&control, bytes).ok().unwrap();
        assert_eq!((begin(1 << 30), begin(1 << 30)), (None, None), "there is no limit, and no other job");
        assert_eq!(Pacer::new(&control, Users::default()).most_at_once(), u64::MAX);
        control.change(&change(1, MIB));
        assert_eq!((begin(1 << 30), begin(1)), (None, Some(LOOK)), "a gigabyte takes a thousand seconds");
        assert_eq!(Pacer::new(&control, Users::default()).most_at_once(), MIB / 10);
        control.change(&change(1, 0));
        assert_eq!(begin(1), None, "another pace is wanted");
        control.change(&JobChange { is_paused: Some(true), ..JobChange::default() });
        assert_eq!(begin(1), Some(LOOK));
        pacer.since -= Duration::from_secs(4);
        pacer.bytes = 4 * MIB;
        control.change(&JobChange { is_paused: Some(false), ..JobChange::default() });
        assert_eq!(pacer.begin(&control, 1).ok().unwrap(), None);
        let job = control.job(JobKind::Move, "v1", "fast");
        assert!((MIB / 2..=MIB).contains(&job.bytes_per_s), "{job:?}");
        assert_eq!((&*job.id, job.done_bytes, job.is_paused), ("v1.move", 0, false));
        control.set_left(2 * MIB);
        assert_eq!(control.job(JobKind::Move, "v1", "fast").done_bytes, 8 * MIB);
        control.cancel();
        assert!(matches!(pacer.begin(&control, 1), Err(Stop::Cancelled)));
    }

    #[test]
    fn the_latency_of_users_is_counted_while_they_exist() {
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let device = member("null:size=1M", false, false).unwrap().open().unwrap();
        let volume = Arc::new(Migratable::new(device));
        let mut users = Users::of([volume.clone()].into_iter());
        let work = |device: Arc<Migratable>| {
            let work = move |core: reactor::Core| async move {
                let channel = device.open_channel().unwrap();
                for op in [Op::Read, Op::Write, Op::Read] {
                    let buffer = core.buffers().take(512).await;
                    buffer.transfer(&*channel, op, Flags::NONE, 0).await.1.unwrap();
                }
                channel.submit(&Request::flush(), 0).await.unwrap();
            };
            cores.get(0).block_on(work).unwrap();
        };
        work(volume.clone());
        assert_eq!((users.take().total(), users.take().total()), (3, 0));
        work(volume.clone());
        drop(volume);
        assert_eq!(users.take().total(), 0, "an unused volume is closed");
    }
}
