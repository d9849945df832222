//! Corrected read errors of each slot, counted the way md does.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Time in nanoseconds that halves the recent errors of a slot.
pub const WINDOW_NS: u64 = 3_600_000_000_000;

/// Read errors of live members that were corrected from the other members, by slot. Errors are
/// rare, so a lock is cheap enough.
#[derive(Debug, Default)]
pub struct ReadErrors(Mutex<BTreeMap<usize, Count>>);

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    total: u64,
    /// Recent errors; halved for every whole [`WINDOW_NS`] since the last one.
    recent: u32,
    last_ns: u64,
}

impl Count {
    fn recent(&self, now_ns: u64) -> u32 {
        let windows = now_ns.saturating_sub(self.last_ns) / WINDOW_NS;
        self.recent.checked_shr(u32::try_from(windows).unwrap_or(u32::MAX)).unwrap_or(0)
    }
}

impl ReadErrors {
    /// Counts a corrected read error of a slot's member.
    pub(super) fn note(&self, slot: usize, now_ns: u64) {
        let mut counts = self.lock();
        let count = counts.entry(slot).or_default();
        count.recent = count.recent(now_ns).saturating_add(1);
        (count.total, count.last_ns) = (count.total + 1, now_ns);
    }

    /// Corrected read errors of a slot's member since the array started, or since it became a
    /// member.
    pub fn total(&self, slot: usize) -> u64 {
        self.lock().get(&slot).map_or(0, |count| count.total)
    }

    /// Recent corrected read errors of a slot's member, halved for every hour without one.
    pub fn recent(&self, slot: usize, now_ns: u64) -> u32 {
        self.lock().get(&slot).map_or(0, |count| count.recent(now_ns))
    }

    /// Resets the count of a slot: it has another member, or an operator keeps its member.
    pub fn reset(&self, slot: usize) {
        self.lock().remove(&slot);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Count>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_errors_are_halved_for_every_hour_without_one() {
        let errors = ReadErrors::default();
        (0..40).for_each(|_| errors.note(2, 5));
        assert_eq!((errors.recent(2, 5), errors.recent(1, 5)), (40, 0));
        assert_eq!(errors.recent(2, 4 + WINDOW_NS), 40);
        assert_eq!(errors.recent(2, 5 + WINDOW_NS), 20);
        errors.note(2, 5 + 2 * WINDOW_NS);
        assert_eq!((errors.recent(2, 5 + 2 * WINDOW_NS), errors.total(2)), (11, 41));
        assert_eq!(errors.recent(2, u64::MAX), 0);
        errors.reset(2);
        assert_eq!((errors.recent(2, 5), errors.total(2)), (0, 0));
    }
}
