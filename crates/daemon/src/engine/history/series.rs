//! The points of all objects: a ring each, over one axis of samples.
//!
//! ```text
//!   sample      0  1  2  3  4  5  6      every 10 s; its time stands once, in `times`
//!   volumes/a   p  p  p  p  p  p  p
//!   volumes/b         p  p  -  -  p      `first` is 2; GAP while it was not there
//! ```

use api::{HistoryPoint, Sample};
use layers::stats::Histogram;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Seconds between two samples.
pub const PERIOD_S: u32 = 10;
/// Seconds of the history.
pub const KEPT_S: u32 = 24 * 60 * 60;
/// Samples of the history.
const SAMPLES: usize = (KEPT_S / PERIOD_S) as usize;
/// Most objects with a history. Each has up to 8640 points of 24 bytes, so all have 53 MB at most.
const MAX_OBJECTS: usize = 256;
/// Points by which a ring grows: one hour's.
const GROWTH: usize = 360;

/// Counters of requests: since an object was opened, or of the time between two samples.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Requests and bytes.
    pub sample: Sample,
    /// Latency of reads and writes in nanoseconds.
    pub latency_ns: Histogram,
}

impl Counters {
    /// The difference to `before`. Counters that are smaller than before began again.
    fn since(&self, before: &Counters) -> Counters {
        let (now, old) = (&self.sample, &before.sample);
        if now.reads < old.reads || now.writes < old.writes {
            return self.clone();
        }
        let sample = Sample {
            reads: now.reads - old.reads,
            writes: now.writes - old.writes,
            read_bytes: now.read_bytes.saturating_sub(old.read_bytes),
            written_bytes: now.written_bytes.saturating_sub(old.written_bytes),
            ..Sample::default()
        };
        Counters { sample, latency_ns: self.latency_ns.since(&before.latency_ns) }
    }

    fn add(&mut self, other: &Counters) {
        self.sample.reads += other.sample.reads;
        self.sample.writes += other.sample.writes;
        self.sample.read_bytes += other.sample.read_bytes;
        self.sample.written_bytes += other.sample.written_bytes;
        self.latency_ns.merge(&other.latency_ns);
    }
}

/// Counters that began with 0 when something was opened.
pub struct Counted {
    /// The object that they are of, and those of which it is a part.
    pub objects: Vec<String>,
    /// The device of a member, which may be replaced by another one with counters of its own;
    /// empty for other objects.
    pub device: String,
    /// Their values.
    pub now: Counters,
}

/// The counters of the last sample. An object that is not there has none, so its counters begin
/// with 0 when it is there again. A member that was replaced has no load until the next sample.
#[derive(Default)]
pub struct Before(HashMap<String, (String, Counters)>);

impl Before {
    /// The load of each object since the last sample, in the order of `counted`. It is a sum of
    /// differences: a difference of sums would jump when a part comes or goes.
    pub fn loads(&mut self, counted: Vec<Counted>) -> Vec<(String, Counters)> {
        let (mut loads, mut places) = (Vec::<(String, Counters)>::new(), HashMap::new());
        let mut after = HashMap::new();
        for Counted { objects, device, now } in counted {
            let load = match self.0.get(&objects[0]) {
                None => now.clone(),
                Some((former, before)) if *former == device => now.since(before),
                Some(_) => Counters::default(),
            };
            for object in &objects {
                let place = *places.entry(object.clone()).or_insert(loads.len());
                if place == loads.len() {
                    loads.push((object.clone(), Counters::default()));
                }
                loads[place].1.add(&load);
            }
            after.extend(objects.into_iter().next().map(|object| (object, (device, now))));
        }
        self.0 = after;
        loads
    }
}

/// The load of an object between two samples. Small, because there are two million of them at most.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    reads: u32,
    writes: u32,
    read_bytes: f32,
    written_bytes: f32,
    /// NaN without timed requests.
    p50_ns: f32,
    p99_ns: f32,
}

/// A time at which the object was not there.
const GAP: Point = Point {
    reads: u32::MAX,
    writes: 0,
    read_bytes: 0.0,
    written_bytes: 0.0,
    p50_ns: f32::NAN,
    p99_ns: f32::NAN,
};

impl Point {
    fn is_gap(&self) -> bool {
        self.reads == GAP.reads
    }

    fn of(load: &Counters) -> Point {
        let count = |count: u64| u32::try_from(count).unwrap_or(u32::MAX).min(u32::MAX - 1);
        let percentile = |percent| match load.latency_ns.count() {
            0 => f32::NAN,
            _ => load.latency_ns.percentile(percent) as f32,
        };
        Point {
            reads: count(load.sample.reads),
            writes: count(load.sample.writes),
            read_bytes: load.sample.read_bytes as f32,
            written_bytes: load.sample.written_bytes as f32,
            p50_ns: percentile(50.0),
            p99_ns: percentile(99.0),
        }
    }
}

/// The points of an object.
#[derive(Default)]
struct Series {
    /// The sample of the first point.
    first: u64,
    points: VecDeque<Point>,
}

impl Series {
    /// The sample after the last point.
    fn end(&self) -> u64 {
        self.first + self.points.len() as u64
    }

    /// Appends the point of a sample, after gaps for samples that lacked the object.
    fn push(&mut self, sample: u64, point: Point) {
        let oldest = (sample + 1).saturating_sub(SAMPLES as u64);
        while self.first < oldest && self.points.pop_front().is_some() {
            self.first += 1;
        }
        if self.points.is_empty() {
            self.first = sample;
        }
        while self.end() < sample {
            self.append(GAP);
        }
        self.append(point);
    }

    fn append(&mut self, point: Point) {
        if self.points.len() == self.points.capacity() {
            self.points.reserve_exact(GROWTH.min(SAMPLES - self.points.len()));
        }
        self.points.push_back(point);
    }

    fn at(&self, sample: u64) -> Option<&Point> {
        let place = sample.checked_sub(self.first)?;
        self.points.get(place as usize).filter(|point| !point.is_gap())
    }
}

/// The points of all objects.
#[derive(Default)]
pub struct Book {
    /// The next sample.
    next: u64,
    /// When the last samples were taken, in nanoseconds since 1970.
    times: VecDeque<u64>,
    objects: BTreeMap<String, Series>,
    left_out: usize,
}

impl Book {
    /// Takes the loads of all objects since the last sample.
    pub fn record(&mut self, at_ns: u64, loads: &[(String, Counters)]) {
        let sample = self.next;
        self.next += 1;
        if self.times.len() == SAMPLES {
            self.times.pop_front();
        }
        self.times.push_back(at_ns);
        let mut new = Vec::new();
        for (object, load) in loads {
            match self.objects.get_mut(object) {
                Some(series) => series.push(sample, Point::of(load)),
                None => new.push((object, load)),
            }
        }
        self.objects.retain(|_, series| series.end() + SAMPLES as u64 > self.next);
        self.left_out = 0;
        for (object, load) in new {
            if !self.make_room(sample) {
                self.left_out += 1;
                continue;
            }
            let mut series = Series::default();
            series.push(sample, Point::of(load));
            self.objects.insert(object.clone(), series);
        }
    }

    /// Whether another object has room, if need be in place of the one that is gone for longest.
    fn make_room(&mut self, sample: u64) -> bool {
        if self.objects.len() < MAX_OBJECTS {
            return true;
        }
        let gone = self.objects.iter().filter(|(_, series)| series.end() <= sample);
        let longest = gone.min_by_key(|(_, series)| series.end()).map(|(object, _)| object.clone());
        longest.is_some_and(|longest| self.objects.remove(&longest).is_some())
    }

    /// The points of an object in the last seconds, each of so many seconds. The intervals have
    /// fixed limits, so that a later answer repeats them; only complete ones count. `None` if the
    /// object has no history.
    pub fn points(&self, object: &str, seconds: u32, resolution_s: u32) -> Option<Vec<HistoryPoint>> {
        let series = self.objects.get(object)?;
        let parts = u64::from(resolution_s / PERIOD_S);
        let oldest = self.next - self.times.len() as u64;
        let from = self.next.saturating_sub(u64::from(seconds / PERIOD_S)).max(oldest);
        let intervals = from.div_ceil(parts)..self.next / parts;
        let points = intervals.filter_map(|interval| {
            let samples = interval * parts..(interval + 1) * parts;
            let at_ns = self.times[(samples.end - 1 - oldest) as usize];
            merged(at_ns, samples.filter_map(|sample| series.at(sample)))
        });
        Some(points.collect())
    }

    /// Objects that exist and have no history, since there are too many.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Bytes of memory of the points.
    pub fn bytes(&self) -> usize {
        let each = |(object, series): (&String, &Series)| {
            object.capacity() + size_of::<Series>() + series.points.capacity() * size_of::<Point>()
        };
        self.objects.iter().map(each).sum::<usize>() + self.times.capacity() * size_of::<u64>()
    }
}

/// Several points as one; `None` without any.
fn merged<'a>(at_ns: u64, points: impl Iterator<Item = &'a Point>) -> Option<HistoryPoint> {
    let mut sum = HistoryPoint { at_ns, ..HistoryPoint::default() };
    let (mut weighted_ns, mut weight, mut is_any) = (0.0, 0.0, false);
    for point in points {
        is_any = true;
        sum.reads += u64::from(point.reads);
        sum.writes += u64::from(point.writes);
        sum.read_bytes += point.read_bytes as u64;
        sum.written_bytes += point.written_bytes as u64;
        if !point.p50_ns.is_nan() {
            // A request may be timed after it was counted, so there may be none.
            let requests = (f64::from(point.reads) + f64::from(point.writes)).max(1.0);
            weighted_ns += f64::from(point.p50_ns) * requests;
            weight += requests;
            sum.p99_ns = sum.p99_ns.max(Some(point.p99_ns as u64));
        }
    }
    sum.p50_ns = (weight > 0.0).then(|| (weighted_ns / weight) as u64);
    is_any.then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counters after so many reads of 4 KiB, each of which took so long.
    fn counters(reads: u64, latency_ns: u64) -> Counters {
        let mut latency = Histogram::default();
        latency.record_many(latency_ns, reads);
        let sample = Sample { reads, read_bytes: reads * 4096, ..Sample::default() };
        Counters { sample, latency_ns: latency }
    }

    fn volume(now: Counters) -> Counted {
        Counted { objects: vec!["volumes/a".into(), "arrays/data".into()], device: String::new(), now }
    }

    fn book(samples: &[Option<Counters>]) -> Book {
        let (mut book, mut before) = (Book::default(), Before::default());
        for (number, now) in samples.iter().enumerate() {
            book.record(1000 + number as u64, &before.loads(now.iter().cloned().map(volume).collect()));
        }
        book
    }

    fn reads(book: &Book, seconds: u32, resolution_s: u32) -> Vec<(u64, u64)> {
        let points = book.points("volumes/a", seconds, resolution_s).unwrap();
        points.iter().map(|point| (point.at_ns, point.reads)).collect()
    }

    #[test]
    fn points_are_differences_and_a_restart_of_counters_is_none() {
        let book = book(&[3, 10, 10, 4].map(|count| Some(counters(count, 1000))));
        assert_eq!(reads(&book, KEPT_S, 10), [(1000, 3), (1001, 7), (1002, 0), (1003, 4)]);
        let points = book.points("volumes/a", 30, 10).unwrap();
        assert_eq!((points[0].read_bytes, points[0].written_bytes), (7 * 4096, 0));
        assert!(points[0].p50_ns.unwrap().abs_diff(1000) < 70 && points[0].p99_ns == points[0].p50_ns);
        assert_eq!((points[1].p50_ns, points[1].p99_ns), (None, None));
        assert!(book.points("volumes/b", 30, 10).is_none());
    }

    #[test]
    fn longer_intervals_are_sums_with_fixed_limits_and_the_last_one_is_complete() {
        let at = |number: u64| Some(counters(number * number, 1000));
        let book = book(&(0..8).map(at).collect::<Vec<_>>());
        assert_eq!(reads(&book, KEPT_S, 30), [(1002, 4), (1005, 21)]);
        assert_eq!(reads(&book, 60, 30), [(1005, 21)], "an interval that began before is incomplete");
        assert_eq!(reads(&book, 10, 10), [(1007, 13)]);
    }

    #[test]
    fn a_time_without_the_object_has_no_points() {
        let now = |count| Some(counters(count, 1000));
        let book = book(&[None, now(1), None, None, now(2), now(5)]);
        assert_eq!(reads(&book, KEPT_S, 10), [(1001, 1), (1004, 2), (1005, 3)]);
        assert_eq!(reads(&book, KEPT_S, 20), [(1001, 1), (1005, 5)]);
    }

    #[test]
    fn percentiles_of_intervals_favour_the_slowest_part() {
        let mut later = counters(90, 1000);
        later.latency_ns.record_many(1_000_000, 10);
        later.sample.reads += 10;
        let book = book(&[Some(counters(90, 1000)), Some(later)]);
        let point = book.points("volumes/a", 20, 20).unwrap()[0];
        assert!(point.p99_ns.unwrap() > 900_000, "{point:?}");
        assert!((90_000..120_000).contains(&point.p50_ns.unwrap()), "{point:?}");
    }

    #[test]
    fn a_sum_does_not_jump_when_a_part_comes_or_goes() {
        let (mut book, mut before) = (Book::default(), Before::default());
        let part = |name: &str, count| Counted {
            objects: vec![format!("volumes/{name}"), "arrays/data".into()],
            device: String::new(),
            now: counters(count, 1000),
        };
        let served = |count| Counted {
            objects: vec!["arrays/data".into()],
            device: String::new(),
            now: counters(count, 1000),
        };
        for (at_ns, parts) in [
            vec![served(5), part("a", 100), part("b", 1000)],
            vec![served(6), part("a", 101), part("b", 1003)],
            vec![served(6), part("a", 102)],
            vec![served(6), part("a", 102), part("b", 4)],
        ]
        .into_iter()
        .enumerate()
        {
            book.record(at_ns as u64, &before.loads(parts));
        }
        let points = book.points("arrays/data", KEPT_S, 10).unwrap();
        assert_eq!(points.iter().map(|point| point.reads).collect::<Vec<_>>(), [1105, 5, 1, 4]);
    }

    #[test]
    fn the_counters_of_a_replaced_member_are_not_those_of_its_successor() {
        let mut before = Before::default();
        let mut load = |device: &str, count| {
            let (objects, device) = (vec!["members/data/0".into()], device.into());
            let counted = Counted { objects, device, now: counters(count, 1000) };
            before.loads(vec![counted])[0].1.sample.reads
        };
        assert_eq!([load("old", 5), load("old", 7), load("new", 900), load("new", 901)], [5, 2, 0, 1]);
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_points_go_first() {
        let mut book = Book::default();
        let load = [("volumes/a".into(), counters(1, 1000))];
        (0..SAMPLES as u64 + 50).for_each(|number| book.record(number, &load));
        let points = reads(&book, KEPT_S, 10);
        assert_eq!((points.len(), points[0]), (SAMPLES, (50, 1)));
        assert_eq!(reads(&book, KEPT_S, KEPT_S), [], "no day is complete");
        let of_object = book.bytes() - book.times.capacity() * size_of::<u64>();
        assert!((207_360..208_000).contains(&of_object), "{of_object}");
    }

    #[test]
    fn objects_beyond_the_limit_wait_for_one_that_is_gone() {
        let mut book = Book::default();
        let loads = |first: usize| -> Vec<(String, Counters)> {
            (first..MAX_OBJECTS + 2).map(|object| (format!("volumes/{object}"), counters(7, 1000))).collect()
        };
        for first in [0, 1, 2] {
            book.record(first as u64, &loads(first));
            assert_eq!((book.objects.len(), book.left_out()), (MAX_OBJECTS, 2 - first));
        }
        let last = format!("volumes/{}", MAX_OBJECTS + 1);
        assert_eq!(book.points(&last, KEPT_S, 10).unwrap().len(), 1);
    }

    #[test]
    fn an_object_is_forgotten_a_day_after_its_end() {
        let mut book = book(&[Some(counters(1, 1000))]);
        (1..SAMPLES).for_each(|number| book.record(number as u64, &[]));
        assert!(book.points("volumes/a", KEPT_S, 10).is_some());
        book.record(SAMPLES as u64, &[]);
        assert!(book.points("volumes/a", KEPT_S, 10).is_none());
    }
}
