//! Tracks the received bytes of a read. Parts of a reply may arrive in any order, but each byte
//! exactly once.

use nbd::reply::Violation;

/// Maximum gaps of a read: a server sends the parts of one read roughly in order.
const MAX_RANGES: usize = 256;

/// Disjoint ranges, sorted, neighbours joined. A single range, reused for each read, unless parts
/// arrive out of order.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    ranges: Vec<(u64, u64)>,
}

impl Coverage {
    /// Forgets all received bytes.
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds `start..end`, which is not empty.
    ///
    /// # Errors
    /// When part of it was received before, or there are too many gaps.
    pub(super) fn add(&mut self, start: u64, end: u64) -> Result<(), Violation> {
        // From here on every range ends at or after the new one's start.
        let at = self.ranges.partition_point(|range| range.1 < start);
        let joins_left = self.ranges.get(at).is_some_and(|range| range.1 == start);
        let next = at + usize::from(joins_left);
        let joins_right = match self.ranges.get(next) {
            Some(range) if range.0 < end => {
                return Err(Violation::Overlap { offset: start, len: end - start });
            }
            range => range.is_some_and(|range| range.0 == end),
        };
        match (joins_left, joins_right) {
            (true, true) => self.ranges[at].1 = self.ranges.remove(next).1,
            (true, false) => self.ranges[at].1 = end,
            (false, true) => self.ranges[at].0 = start,
            (false, false) if self.ranges.len() == MAX_RANGES => return Err(Violation::Scattered),
            (false, false) => self.ranges.insert(at, (start, end)),
        }
        Ok(())
    }

    /// Whether `0..len` has been received.
    pub(super) fn is_whole(&self, len: u64) -> bool {
        *self.ranges == [(0, len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_agrees_with_a_list_of_bytes() {
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        let (mut overlaps, mut whole) = (0, 0);
        for _ in 0..2000 {
            let (mut coverage, mut bytes) = (Coverage::default(), [false; 16]);
            for _ in 0..40 {
                let start = random(16);
                let end = start + 1 + random(4.min(16 - start));
                let range = &mut bytes[start as usize..end as usize];
                let is_there = range.iter().any(|byte| *byte);
                let added = coverage.add(start, end);
                if is_there {
                    assert_eq!(added, Err(Violation::Overlap { offset: start, len: end - start }));
                    overlaps += 1;
                } else {
                    assert_eq!(added, Ok(()));
                    range.fill(true);
                }
                assert_eq!(coverage.is_whole(16), bytes.iter().all(|byte| *byte));
                assert!(coverage.ranges.windows(2).all(|pair| pair[0].1 < pair[1].0), "{coverage:?}");
            }
            whole += u32::from(coverage.is_whole(16));
        }
        assert!(overlaps > 100 && whole > 10, "{overlaps} overlaps, {whole} whole");
    }

    #[test]
    fn pieces_without_end_are_refused() {
        let mut coverage = Coverage::default();
        let refused = (0..).map(|i| coverage.add(2 * i, 2 * i + 1)).position(|added| added.is_err());
        assert_eq!(refused, Some(MAX_RANGES));
        coverage.clear();
        assert_eq!(coverage.add(0, 4), Ok(()));
        assert!(coverage.is_whole(4) && !coverage.is_whole(5));
    }
}
