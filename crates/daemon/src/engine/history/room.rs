//! The use of pools over the last day, and when they will be full: a linear fit to their used
//! bytes.

use std::collections::{BTreeMap, VecDeque};

/// Seconds between two points.
const PERIOD_S: u64 = 600;
/// Points of a pool: a day's.
const POINTS: usize = 144;
/// Points that an estimate takes: those of six hours.
const MIN_POINTS: usize = 37;
/// A pool that is full later than this, in seconds, has no estimate: ten years.
const MAX_FULL_IN_S: u64 = 10 * 365 * 86400;

/// The used bytes of pools by their backing, each with its time in seconds.
#[derive(Default)]
pub struct Room {
    pools: BTreeMap<String, VecDeque<(u64, u64)>>,
    last_s: Option<u64>,
}

impl Room {
    /// Whether the next point is due. `now_s` is the time by a clock that is never set.
    pub fn is_due(&self, now_s: u64) -> bool {
        self.last_s.is_none_or(|last_s| now_s >= last_s + PERIOD_S)
    }

    /// Takes the used bytes of all pools, if the next point is due.
    pub fn record(&mut self, now_s: u64, used: &[(String, u64)]) {
        if !self.is_due(now_s) {
            return;
        }
        self.last_s = Some(now_s);
        for (pool, used) in used {
            let points = self.pools.entry(pool.clone()).or_default();
            if points.len() == POINTS {
                points.pop_front();
            }
            points.push_back((now_s, *used));
        }
        // A pool that is gone is forgotten with its last point.
        let is_recent = |at_s: u64| now_s - at_s < PERIOD_S * POINTS as u64;
        self.pools.retain(|_, points| points.back().is_some_and(|(at_s, _)| is_recent(*at_s)));
    }

    /// Seconds until a pool is full that has `free` bytes at present. `None` with less than six
    /// hours of points, when its use does not grow, or when that takes years.
    pub fn full_in_s(&self, pool: &str, free: u64) -> Option<u64> {
        let points = self.pools.get(pool).filter(|points| points.len() >= MIN_POINTS)?;
        let bytes_per_s = slope(points);
        if bytes_per_s <= 0.0 {
            return None;
        }
        let full_in_s = free as f64 / bytes_per_s;
        (full_in_s <= MAX_FULL_IN_S as f64).then_some(full_in_s as u64)
    }
}

/// The slope of the line that fits the points best (least squares).
fn slope(points: &VecDeque<(u64, u64)>) -> f64 {
    // Relative to the first point: the numbers keep their precision.
    let (first_s, first) = points[0];
    let relative =
        || points.iter().map(|(at_s, used)| ((at_s - first_s) as f64, *used as f64 - first as f64));
    let count = points.len() as f64;
    let (sum_x, sum_y) = relative().fold((0.0, 0.0), |(x, y), (at, used)| (x + at, y + used));
    let (mean_x, mean_y) = (sum_x / count, sum_y / count);
    let (products, squares) = relative().fold((0.0, 0.0), |(products, squares), (at, used)| {
        (products + (at - mean_x) * (used - mean_y), squares + (at - mean_x).powi(2))
    });
    if squares > 0.0 { products / squares } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool with this use at each point.
    fn room(points: usize, used: impl Fn(u64) -> u64) -> Room {
        let mut room = Room::default();
        (0..points as u64).for_each(|point| room.record(point * PERIOD_S, &[("data".into(), used(point))]));
        room
    }

    #[test]
    fn a_pool_that_fills_at_a_steady_rate_has_its_time() {
        let rate = 1 << 20; // bytes a second
        let filling = |point| (1 << 40) + point * PERIOD_S * rate;
        assert_eq!(room(MIN_POINTS, filling).full_in_s("data", 3600 * rate), Some(3600));
        assert_eq!(room(MIN_POINTS - 1, filling).full_in_s("data", 3600 * rate), None, "less than six hours");
        assert_eq!(room(MIN_POINTS, filling).full_in_s("other", 1), None);
        assert_eq!(room(MIN_POINTS, filling).full_in_s("data", u64::MAX), None, "not within ten years");
        assert_eq!(room(MIN_POINTS, filling).full_in_s("data", 0), Some(0));
    }

    #[test]
    fn a_pool_whose_use_does_not_grow_has_no_time() {
        for used in [|_| 1 << 40, |point| (1u64 << 40) - (point << 20)] {
            assert_eq!(room(2 * MIN_POINTS, used).full_in_s("data", 1 << 30), None);
        }
    }

    #[test]
    fn a_day_of_points_is_kept_and_points_have_a_distance() {
        // Steps before the last day do not count.
        let late = |point| if point < 200 { point << 30 } else { 200 << 30 };
        assert_eq!(room(200 + POINTS, late).full_in_s("data", 1 << 30), None);
        let mut room = Room::default();
        (0..PERIOD_S).for_each(|at_s| room.record(at_s, &[("data".into(), at_s)]));
        assert_eq!(room.pools["data"].len(), 1);
        let day_s = PERIOD_S * POINTS as u64;
        (1..=POINTS as u64).for_each(|point| room.record(point * PERIOD_S, &[]));
        assert!(room.pools.is_empty(), "forgotten after {day_s} s");
    }
}
