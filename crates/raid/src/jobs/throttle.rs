//! How fast background work may go: a pure controller, fed with what foreground requests took.
//!
//! ```text
//!   no foreground request for a while       as fast as it goes
//!   requests, p99 up to the target          faster, by a tenth a look
//!   requests, p99 above the target          slower, by a third a look, never below the minimum
//! ```
//!
//! The target is the operator's, or a multiple of the requests' latency while background work ran
//! at its minimum rate. Latencies come from [`crate::array::Samples`].

use crate::array::Counts;

/// Nanoseconds between two looks of the controller.
pub const LOOK_NS: u64 = 100_000_000;
/// Looks without a request after which the array counts as idle.
const IDLE_LOOKS: u32 = 5;
/// Fewest requests that a p99 is taken of; a look with fewer is added to the next.
const FEWEST: u64 = 20;
/// Looks whose requests are judged even when they are fewer.
const MOST_LOOKS: u32 = 10;

/// How background work and foreground requests share an array. The jobs of an array count the bytes
/// of one member: a rate means the same for an array of four members and one of twenty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Bytes in a second that background work always gets.
    pub least_bytes_per_s: u64,
    /// The share of the fastest rate seen that background work always gets, in percent.
    pub least_percent: u32,
    /// Bytes in a second that background work gets at most.
    pub most_bytes_per_s: Option<u64>,
    /// Nanoseconds that 99 of 100 foreground requests are to be done in. Without it the throttle
    /// measures what they take while background work is slow, and allows half as much again.
    pub latency_target_ns: Option<u64>,
    /// Background work takes what it can.
    pub is_urgent: bool,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            least_bytes_per_s: 8 << 20,
            least_percent: 5,
            most_bytes_per_s: None,
            latency_target_ns: None,
            is_urgent: false,
        }
    }
}

/// The controller.
#[derive(Clone, Debug)]
pub struct Throttle {
    pace: Pace,
    /// Bytes in a second; `None` for no limit.
    rate: Option<f64>,
    /// The fastest rate that was reached.
    fastest: f64,
    /// The 99th percentile of latencies while work ran at its minimum rate.
    baseline_ns: Option<f64>,
    /// When the next stripe may begin.
    next_ns: u64,
    look_ns: u64,
    looks: u32,
    /// Requests of the looks since the last judgement.
    gathered: Counts,
    idle_looks: u32,
    /// Bytes that were begun since the last look.
    bytes: u64,
}

/// The target is the baseline times this, when none is given.
const HEADROOM: f64 = 1.5;
/// How far below a target the controller stays.
const MARGIN: f64 = 0.9;

impl Throttle {
    /// A throttle that has seen nothing yet.
    pub fn new(pace: Pace, now_ns: u64) -> Throttle {
        Throttle {
            pace,
            rate: None,
            fastest: 0.0,
            baseline_ns: None,
            next_ns: now_ns,
            look_ns: now_ns,
            looks: 0,
            gathered: Counts::default(),
            idle_looks: IDLE_LOOKS,
            bytes: 0,
        }
    }

    /// Sets the pace from now on: work that was begun at the old one delays no later work.
    pub fn set_pace(&mut self, pace: Pace) {
        if pace != self.pace {
            (self.pace, self.next_ns) = (pace, 0);
        }
    }

    /// Begins work on so many bytes if it may.
    ///
    /// # Errors
    /// When it may not yet: the moment to ask again.
    pub fn begin(&mut self, now_ns: u64, bytes: u64) -> Result<(), u64> {
        if now_ns < self.next_ns {
            return Err(self.next_ns);
        }
        self.bytes += bytes;
        if let Some(rate) = self.allowed() {
            // Unused allowance is kept for a tenth of a look.
            let from = self.next_ns.max(now_ns.saturating_sub(LOOK_NS / 10));
            self.next_ns = from + (bytes as f64 * 1e9 / rate) as u64;
        }
        Ok(())
    }

    /// Bytes in a second that may be done now; `None` for no limit.
    pub fn allowed(&self) -> Option<f64> {
        let most = self.pace.most_bytes_per_s.map(|most| most.max(1) as f64);
        let rate = if self.pace.is_urgent { None } else { self.rate.map(|rate| rate.max(self.floor())) };
        match (rate, most) {
            (Some(rate), Some(most)) => Some(rate.min(most)),
            (rate, most) => rate.or(most),
        }
    }

    /// Whether it is time for [`Throttle::look`].
    pub fn is_due(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.look_ns) >= LOOK_NS
    }

    /// Judges what foreground requests took since the last look.
    pub fn look(&mut self, now_ns: u64, counts: &Counts) {
        let passed = now_ns.saturating_sub(self.look_ns).max(1);
        let done = self.bytes as f64 * 1e9 / passed as f64;
        (self.look_ns, self.bytes) = (now_ns, 0);
        self.fastest = self.fastest.max(done);
        if self.pace.is_urgent {
            // The latencies of this time say nothing about work at its minimum rate.
            (self.rate, self.looks, self.gathered, self.idle_looks) = (None, 0, Counts::default(), 0);
            return;
        }
        if counts.total() == 0 {
            self.idle_looks += 1;
            if self.idle_looks >= IDLE_LOOKS {
                (self.rate, self.looks, self.gathered) = (None, 0, Counts::default());
                self.next_ns = self.next_ns.min(now_ns);
            }
            return;
        }
        self.idle_looks = 0;
        self.gathered.add(counts);
        self.looks += 1;
        if self.rate.is_none() {
            // Requests run again. Work is slow at first, so that their undisturbed latency is
            // known.
            self.rate = Some(self.floor());
            (self.looks, self.gathered) = (0, Counts::default());
            return;
        }
        if self.gathered.total() < FEWEST && self.looks < MOST_LOOKS {
            return;
        }
        let p99_ns = self.gathered.p99_ns() as f64;
        (self.looks, self.gathered) = (0, Counts::default());
        self.judge(p99_ns, done);
    }

    fn judge(&mut self, p99_ns: f64, done: f64) {
        let floor = self.floor();
        let rate = self.rate.unwrap_or(floor).max(floor);
        if rate <= 1.05 * floor {
            self.baseline_ns = Some(self.baseline_ns.map_or(p99_ns, |old| 0.8 * old + 0.2 * p99_ns));
        }
        let measured = self.baseline_ns.map(|baseline| baseline * HEADROOM);
        let target = self.pace.latency_target_ns.map(|ns| ns as f64).or(measured).unwrap_or(p99_ns);
        self.rate = Some(match p99_ns > MARGIN * target {
            // From what was reached: a limit far above it pace nothing.
            true => (rate.min(done.max(floor)) * 0.67).max(floor),
            false => (rate + (rate * 0.1).max(floor / 4.0)).min(2.0 * done.max(self.fastest).max(floor)),
        });
    }

    fn floor(&self) -> f64 {
        let share = self.fastest * f64::from(self.pace.least_percent) / 100.0;
        share.max(self.pace.least_bytes_per_s as f64).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks for some seconds, with requests that take `latency_ns` of the rate that work has.
    fn run(
        throttle: &mut Throttle,
        now_ns: &mut u64,
        looks: u32,
        most: f64,
        latency_ns: impl Fn(f64) -> u64,
    ) {
        for _ in 0..looks {
            let rate = throttle.allowed().unwrap_or(most).min(most);
            let bytes = (rate * LOOK_NS as f64 / 1e9) as u64;
            throttle.bytes += bytes;
            *now_ns += LOOK_NS;
            let mut counts = Counts::default();
            let latency = latency_ns(rate);
            (0..if latency == 0 { 0 } else { 100 }).for_each(|_| counts.note(latency));
            assert!(throttle.is_due(*now_ns));
            throttle.look(*now_ns, &counts);
        }
    }

    const MOST: f64 = 2e9;

    /// A device on which requests wait for background work: twice as long at full speed.
    fn latency(rate: f64) -> u64 {
        100_000 + (1_000_000.0 * rate / MOST) as u64
    }

    #[test]
    fn work_is_not_held_up_without_requests() {
        let (mut throttle, mut now_ns) = (Throttle::new(Pace::default(), 0), 0);
        run(&mut throttle, &mut now_ns, 20, MOST, |_| 0);
        assert_eq!(throttle.allowed(), None);
        assert_eq!(throttle.begin(now_ns, 1 << 30), Ok(()));
        assert_eq!(throttle.begin(now_ns, 1 << 30), Ok(()));
    }

    #[test]
    fn work_settles_where_requests_meet_their_target() {
        for pace in [Pace::default(), Pace { latency_target_ns: Some(300_000), ..Pace::default() }] {
            let (mut throttle, mut now_ns) = (Throttle::new(pace, 0), 0);
            run(&mut throttle, &mut now_ns, 10, MOST, |_| 0);
            run(&mut throttle, &mut now_ns, 400, MOST, latency);
            // Measured: at the minimum rate (5 %) requests take 150 µs; half as much again is 225.
            let target = pace.latency_target_ns.unwrap_or(250_000);
            let mut worst = 0;
            let mut total = 0.0;
            for _ in 0..100 {
                run(&mut throttle, &mut now_ns, 1, MOST, latency);
                let rate = throttle.allowed().unwrap();
                worst = worst.max(latency(rate));
                total += rate / 100.0;
            }
            assert!(worst <= target * 5 / 4, "{worst} ns, target {target}");
            assert!(total > 0.05 * MOST, "{total}");
            run(&mut throttle, &mut now_ns, 10, MOST, |_| 0);
            assert_eq!(throttle.allowed(), None, "idle again");
        }
    }

    #[test]
    fn the_floor_holds_however_slow_requests_are() {
        let pace = Pace { least_bytes_per_s: 10 << 20, latency_target_ns: Some(1), ..Pace::default() };
        let (mut throttle, mut now_ns) = (Throttle::new(pace, 0), 0);
        run(&mut throttle, &mut now_ns, 200, 1e8, |_| 5_000_000);
        assert_eq!(throttle.allowed(), Some(f64::from(10 << 20)));
        let mut begun = 0u64;
        let end = now_ns + 1_000_000_000;
        while now_ns < end {
            match throttle.begin(now_ns, 1 << 16) {
                Ok(()) => begun += 1 << 16,
                Err(at) => now_ns = at,
            }
        }
        assert!((9 << 20..12 << 20).contains(&begun), "{begun} bytes in a second");
    }

    #[test]
    fn another_pace_holds_at_once() {
        let slow = Pace { most_bytes_per_s: Some(1), ..Pace::default() };
        let mut throttle = Throttle::new(slow, 0);
        assert_eq!(
            (throttle.begin(0, 1 << 20), throttle.begin(1, 1)),
            (Ok(()), Err((1 << 20) * 1_000_000_000))
        );
        throttle.set_pace(slow);
        assert!(throttle.begin(1, 1).is_err());
        throttle.set_pace(Pace::default());
        assert_eq!(throttle.begin(1, 1), Ok(()));
    }

    #[test]
    fn a_ceiling_holds_without_requests_and_urgent_work_is_not_slowed() {
        let pace = Pace { most_bytes_per_s: Some(1 << 20), ..Pace::default() };
        assert_eq!(Throttle::new(pace, 0).allowed(), Some(f64::from(1 << 20)));
        let urgent = Pace { is_urgent: true, latency_target_ns: Some(1), ..Pace::default() };
        let (mut throttle, mut now_ns) = (Throttle::new(urgent, 0), 0);
        run(&mut throttle, &mut now_ns, 50, MOST, latency);
        assert_eq!(throttle.allowed(), None);
    }

    #[test]
    fn latencies_beside_urgent_work_are_no_baseline_for_later_work() {
        let urgent = Pace { is_urgent: true, ..Pace::default() };
        let (mut throttle, mut now_ns) = (Throttle::new(urgent, 0), 0);
        run(&mut throttle, &mut now_ns, 50, MOST, latency);
        throttle.set_pace(Pace::default());
        run(&mut throttle, &mut now_ns, 400, MOST, latency);
        let rate = throttle.allowed().unwrap();
        // At the minimum rate (5 %) requests take 150 µs. Work may make them half as slow again,
        // as without the urgent time.
        assert!(latency(rate) <= 280_000, "{rate} bytes in a second");
    }
}
