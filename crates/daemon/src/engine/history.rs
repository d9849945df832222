//! The history of the last day: every ten seconds a thread takes the counters of all objects. It
//! is in memory only, so it begins with the daemon.

mod room;
mod series;

use super::Engine;
use super::bases::Base;
use super::samples::sample;
use crate::api_error::ApiError;
use api::{Event, History, HistoryMarker, Sample};
use block::Op;
use layers::stats::Snapshot;
use room::Room;
use series::{Before, Book, Counted, Counters, KEPT_S, PERIOD_S};
use stack::array::wall_ns;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Between two looks at whether the daemon ends.
const LOOK: Duration = Duration::from_millis(250);
/// Beginnings and ends of jobs that are remembered.
const MAX_JOB_MARKERS: usize = 1024;
/// Most points that an answer has unless its caller chooses the resolution.
const USUAL_POINTS: u32 = 360;

/// The history.
#[derive(Default)]
pub(super) struct Kept(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    before: Before,
    book: Book,
    room: Room,
    /// Running jobs by their identifier, with their backing.
    jobs: BTreeMap<String, String>,
    /// Beginnings and ends of jobs, each with the job's backing.
    markers: VecDeque<(String, HistoryMarker)>,
}

impl Inner {
    /// Notes the jobs that have begun or ended since the last look.
    fn note_jobs(&mut self, at_ns: u64, jobs: BTreeMap<String, String>) {
        let mut note = |id: &String, backing: &String, what: &str| {
            if self.markers.len() == MAX_JOB_MARKERS {
                self.markers.pop_front();
            }
            let text = format!("job {id} has {what}");
            let (kind, name, what) = ("job".into(), id.clone(), what.into());
            self.markers.push_back((backing.clone(), HistoryMarker { at_ns, kind, name, what, text }));
        };
        for (id, backing) in self.jobs.iter().filter(|(id, _)| !jobs.contains_key(*id)) {
            note(id, backing, "ended");
        }
        for (id, backing) in jobs.iter().filter(|(id, _)| !self.jobs.contains_key(*id)) {
            note(id, backing, "started");
        }
        self.jobs = jobs;
    }
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The size of the history.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bytes of memory of the points.
    pub bytes: usize,
    /// Objects that have no history, since there are too many.
    pub left_out: usize,
}

/// Starts the thread that takes the counters for as long as the engine lives.
///
/// # Errors
/// When the system refuses a thread.
pub fn start(engine: &Arc<Engine>) -> io::Result<()> {
    let engine = Arc::downgrade(engine);
    reactor::spawn_thread("history", move || keep(&engine))?;
    Ok(())
}

fn keep(engine: &Weak<Engine>) {
    let period = Duration::from_secs(PERIOD_S.into());
    let mut next = Instant::now() + period;
    loop {
        std::thread::sleep(LOOK);
        let Some(engine) = engine.upgrade() else { return };
        if engine.has_ended.load(Ordering::SeqCst) {
            return;
        }
        if Instant::now() >= next {
            engine.record();
            // After a suspension of the machine, times in between have no points.
            next = (next + period).max(Instant::now());
        }
    }
}

impl Engine {
    /// The history of an object in the last seconds, in intervals of `resolution_s`.
    ///
    /// # Errors
    /// When a value is invalid, or there is no such object, nor was there one in the last day.
    pub fn history(
        &self,
        object: &str,
        seconds: Option<u32>,
        resolution_s: Option<u32>,
    ) -> Result<History, ApiError> {
        let seconds = seconds.unwrap_or(3600);
        let usual = seconds.div_ceil(USUAL_POINTS).next_multiple_of(PERIOD_S);
        let resolution_s = resolution_s.unwrap_or(usual);
        for (name, value) in [("seconds", seconds), ("resolution_s", resolution_s)] {
            if !(PERIOD_S..=KEPT_S).contains(&value) || value % PERIOD_S != 0 {
                let detail =
                    format!("{name} {value}: want a multiple of {PERIOD_S} from {PERIOD_S} to {KEPT_S}");
                return Err(ApiError::invalid(detail));
            }
        }
        let related = self.related(object);
        let kept = self.history.lock();
        let points = kept.book.points(object, seconds, resolution_s);
        let since_ns = wall_ns().saturating_sub(u64::from(seconds) * 1_000_000_000);
        let is_of_jobs = |backing: &String| related.iter().any(|(_, name)| name == backing);
        let of_jobs = kept.markers.iter().filter(|(backing, _)| is_of_jobs(backing));
        let mut markers: Vec<HistoryMarker> = of_jobs.map(|(_, marker)| marker.clone()).collect();
        drop(kept);
        let points = match points {
            Some(points) => points,
            // Its first point is due.
            None if self.has_object(object) => Vec::new(),
            None => return Err(ApiError::not_found("history of", object)),
        };
        let is_related =
            |event: &Event| related.iter().any(|(kind, name)| event.kind == *kind && event.name == *name);
        let events = self.events.listen(0).0.into_iter().filter(is_related);
        markers.extend(events.map(|Event { at_ns, kind, name, what, text, .. }| HistoryMarker {
            at_ns,
            kind,
            name,
            what,
            text,
        }));
        markers.retain(|marker| marker.at_ns >= since_ns);
        markers.sort_by_key(|marker| marker.at_ns);
        Ok(History { object: object.to_owned(), resolution_s, points, markers })
    }

    /// The size of the history.
    pub fn history_size(&self) -> Size {
        let kept = self.history.lock();
        Size { bytes: kept.book.bytes(), left_out: kept.book.left_out() }
    }

    /// Whether there is this object now.
    fn has_object(&self, object: &str) -> bool {
        let (kind, name) = object.split_once('/').unwrap_or_default();
        match kind {
            "arrays" => self.array(name).is_ok(),
            "devices" => self.device(name).is_ok(),
            "volumes" => self.volume(name).is_ok_and(|volume| volume.name == name),
            "exports" => self.export(name).is_ok(),
            "members" => {
                let (array, slot) = name.rsplit_once('/').unwrap_or_default();
                let slot = slot.parse::<usize>().ok();
                self.array(array)
                    .is_ok_and(|array| array.members.iter().any(|member| Some(member.slot) == slot))
            }
            _ => false,
        }
    }

    /// Kinds and names of an object, of its exports, and of all that it depends on.
    fn related(&self, object: &str) -> Vec<(&'static str, String)> {
        let (kind, name) = object.split_once('/').unwrap_or_default();
        let on = |backing: String| [("array", backing.clone()), ("device", backing)];
        let of_volume = |name: &str| {
            let volume = self.volume(name).ok();
            let exports = volume.iter().flat_map(|volume| volume.exports.iter().cloned());
            let exports: Vec<_> = exports.map(|export| ("export", export)).collect();
            let backing = volume.into_iter().flat_map(|volume| on(volume.backing));
            exports.into_iter().chain(backing).chain([("volume", name.to_owned())]).collect()
        };
        match kind {
            "arrays" => vec![("array", name.to_owned())],
            "devices" => vec![("device", name.to_owned())],
            "members" => vec![("array", name.rsplit_once('/').unwrap_or_default().0.to_owned())],
            "volumes" => of_volume(name),
            "exports" => {
                let of = self.export(name).map(|export| export.volumes).unwrap_or_default();
                let below = of.into_iter().flat_map(|volume| {
                    let below: Vec<_> = of_volume(&volume);
                    below.into_iter().filter(|(kind, _)| *kind != "export").chain(on(volume))
                });
                below.chain([("export", name.to_owned())]).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Takes the counters of all objects.
    fn record(&self) {
        let counted = self.counted();
        let jobs = self.jobs().into_iter().map(|job| (job.id, job.backing)).collect();
        let now_s = self.started.elapsed().as_secs();
        let is_due = self.history.lock().room.is_due(now_s);
        let used = is_due.then(|| self.used_of_pools());
        let at_ns = wall_ns();
        let mut kept = self.history.lock();
        let loads = kept.before.loads(counted);
        kept.book.record(at_ns, &loads);
        kept.note_jobs(at_ns, jobs);
        if let Some(used) = used {
            kept.room.record(now_s, &used);
        }
    }

    /// Seconds until the pool of an array or device with so many free bytes is full, if the history
    /// tells.
    pub(super) fn full_in_s(&self, backing: &str, free_bytes: Option<u64>) -> Option<u64> {
        self.history.lock().room.full_in_s(backing, free_bytes?)
    }

    /// The used bytes of all pools.
    fn used_of_pools(&self) -> Vec<(String, u64)> {
        let live = self.live();
        let used = |(name, base): (&String, &Result<Base, ApiError>)| {
            let capacity = base.as_ref().ok()?.device.limits().capacity;
            Some((name.clone(), capacity.saturating_sub(live.volumes_on(name).1?)))
        };
        live.bases.iter().filter_map(used).collect()
    }

    /// The counters of all objects, in the order in which they get room: arrays and devices,
    /// volumes, members, exports.
    fn counted(&self) -> Vec<Counted> {
        let mut counted = self.counted_bases_and_volumes();
        counted.extend(self.member_snapshots().into_iter().map(|member| Counted {
            objects: vec![format!("members/{}/{}", member.array, member.slot)],
            device: member.device,
            now: of_snapshot(&member.snapshot, member.every),
        }));
        counted.extend(self.exports().into_iter().filter_map(|export| {
            let traffic = export.traffic?;
            let sample = Sample {
                reads: traffic.reads,
                writes: traffic.writes,
                read_bytes: traffic.read_bytes,
                written_bytes: traffic.written_bytes,
                ..Sample::default()
            };
            let now = Counters { sample, ..Counters::default() };
            let objects = vec![format!("exports/{}", export.name)];
            Some(Counted { objects, device: String::new(), now })
        }));
        counted
    }

    /// The counters of exports that serve all of an array or device, and those of volumes, which
    /// are parts of the same objects.
    fn counted_bases_and_volumes(&self) -> Vec<Counted> {
        let live = self.live();
        let object_of = |base: &str| match live.arrays.contains_key(base) {
            true => format!("arrays/{base}"),
            false => format!("devices/{base}"),
        };
        let open = live.bases.iter().filter_map(|(name, base)| Some((name, base.as_ref().ok()?)));
        let bases = open.map(|(name, base)| Counted {
            objects: vec![object_of(name)],
            device: String::new(),
            now: of_snapshot(&base.served.snapshot(), 1),
        });
        let volumes = live.all_volumes().filter_map(|(backing, info)| {
            let open = live.volumes.get(&info.uuid)?.upgrade()?;
            let objects = vec![format!("volumes/{}", info.name), object_of(backing)];
            let now = of_snapshot(&open.device.snapshot(), 1);
            Some(Counted { objects, device: String::new(), now })
        });
        bases.chain(volumes).collect()
    }
}

fn of_snapshot(snapshot: &Snapshot, every: u32) -> Counters {
    let mut counters = Counters { sample: sample(snapshot, every), ..Counters::default() };
    for op in Op::ALL.into_iter().filter(|op| *op != Op::Flush) {
        counters.latency_ns.merge(&snapshot.of(op).latency_ns);
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_marked_where_they_begin_and_end_and_the_oldest_marks_go_first() {
        let mut kept = Inner::default();
        let jobs = |ids: &[&str]| ids.iter().map(|id| ((*id).into(), "data".into())).collect();
        kept.note_jobs(1, jobs(&["data.check"]));
        kept.note_jobs(2, jobs(&["data.check"]));
        kept.note_jobs(3, jobs(&["data.rebuild.1"]));
        let marks: Vec<_> =
            kept.markers.iter().map(|(_, mark)| (mark.at_ns, &*mark.name, &*mark.what)).collect();
        let expected =
            [(1, "data.check", "started"), (3, "data.check", "ended"), (3, "data.rebuild.1", "started")];
        assert_eq!(marks, expected);
        for at_ns in 4..4 + MAX_JOB_MARKERS as u64 {
            kept.note_jobs(at_ns, jobs(if at_ns % 2 == 0 { &[] } else { &["data.check"] }));
        }
        assert_eq!(kept.markers.len(), MAX_JOB_MARKERS);
        assert_eq!(kept.markers[0].1.at_ns, 4);
    }
}
