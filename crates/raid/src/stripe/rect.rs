//! Cuts a contiguous range of the array into rectangles: the same bytes of neighbouring strips of
//! one stripe.
//!
//! ```text
//!              strip 0   1   2   3
//!   row 0..a             ▒   ▒   ▒      band 1: strips 1..4
//!   row a..b         ▒   ▒   ▒   ▒      band 2: strips 0..4
//!   row b..s         ▒   ▒   ▒          band 3: strips 0..3
//! ```
//!
//! A range inside a stripe has at most three bands. All strips of a rectangle are modified in the
//! same rows, so each is one update of parity and one entry of the log.

use crate::Geometry;
use arrayvec::ArrayVec;

/// The same bytes of neighbouring data strips of one stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rect {
    /// The stripe.
    pub stripe: u64,
    /// The first data strip.
    pub first: usize,
    /// Number of data strips.
    pub count: usize,
    /// First byte in each strip.
    pub offset: u32,
    /// Bytes in each strip.
    pub len: u32,
    /// Offset of the first strip's bytes in the request; the next strip's bytes follow one strip
    /// later.
    pub at: u64,
}

impl Rect {
    /// The data strips as a mask.
    pub fn mask(&self) -> u64 {
        (u64::MAX >> (64 - self.count)) << self.first
    }

    /// Offset of a data strip's bytes in the request.
    pub fn at_strip(&self, geometry: &Geometry, strip: usize) -> u64 {
        self.at + (strip - self.first) as u64 * u64::from(geometry.strip_bytes)
    }
}

/// The rectangles of one stripe.
pub type Rects = ArrayVec<Rect, 3>;

/// A part of a request inside one stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The stripe.
    pub stripe: u64,
    /// First byte in the stripe's data.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Offset of these bytes in the request.
    pub at: u64,
}

/// The parts of a range, stripe by stripe.
pub fn runs(geometry: &Geometry, offset: u64, len: u64) -> impl Iterator<Item = Run> + use<> {
    let stripe_bytes = geometry.stripe_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == len {
            return None;
        }
        let position = offset + at;
        let within = position % stripe_bytes;
        let run = Run {
            stripe: position / stripe_bytes,
            offset: within,
            len: (stripe_bytes - within).min(len - at),
            at,
        };
        at += run.len;
        Some(run)
    })
}

impl Run {
    /// The rectangles of the part.
    pub fn rects(&self, geometry: &Geometry) -> Rects {
        let strip_bytes = u64::from(geometry.strip_bytes);
        let last = self.offset + self.len - 1;
        let (first_strip, last_strip) = ((self.offset / strip_bytes) as usize, (last / strip_bytes) as usize);
        let (head, tail) = ((self.offset % strip_bytes) as u32, (last % strip_bytes) as u32 + 1);
        let mut rects = Rects::new();
        let mut add = |from: u32, to: u32, first: usize, end: usize| {
            if from < to && first < end {
                let into_stripe = first as u64 * strip_bytes + u64::from(from);
                // The first strip of a band begins before the range only if the band does not reach
                // that strip.
                let at = self.at + (into_stripe - self.offset);
                rects.push(Rect {
                    stripe: self.stripe,
                    first,
                    count: end - first,
                    offset: from,
                    len: to - from,
                    at,
                });
            }
        };
        if first_strip == last_strip {
            add(head, tail, first_strip, last_strip + 1);
            return rects;
        }
        let (low, high) = (head.min(tail), head.max(tail));
        add(0, low, first_strip + 1, last_strip + 1);
        if head <= tail {
            add(low, high, first_strip, last_strip + 1);
        } else {
            add(low, high, first_strip + 1, last_strip);
        }
        add(high, geometry.strip_bytes, first_strip, last_strip);
        rects
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Zones;
    use proptest::prelude::*;

    const GEOMETRY: Geometry =
        Geometry { groups: 2, data: 4, parity: 1, strip_bytes: 8192, group_stripes: 8, zones: Zones::NONE };

    proptest! {
        #[test]
        fn every_byte_of_a_range_lies_in_one_rectangle(start in 0u64..40, blocks in 1u64..60) {
            let (offset, len) = (start * 512 * 5, blocks * 2560);
            let mut seen = vec![0u8; len as usize];
            for run in runs(&GEOMETRY, offset, len) {
                for rect in run.rects(&GEOMETRY) {
                    prop_assert!(rect.len > 0 && rect.offset + rect.len <= GEOMETRY.strip_bytes);
                    for strip in rect.first..rect.first + rect.count {
                        let at = rect.at_strip(&GEOMETRY, strip);
                        let place = GEOMETRY.locate(offset + at);
                        prop_assert_eq!((place.stripe, place.strip, place.offset), (rect.stripe, strip, rect.offset));
                        seen[at as usize..][..rect.len as usize].iter_mut().for_each(|n| *n += 1);
                    }
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }
    }

    #[test]
    fn a_full_stripe_is_one_rectangle() {
        let [run] = runs(&GEOMETRY, 32768, 32768).collect::<Vec<_>>()[..] else { panic!("one stripe") };
        assert_eq!(
            run.rects(&GEOMETRY)[..],
            [Rect { stripe: 1, first: 0, count: 4, offset: 0, len: 8192, at: 0 }]
        );
        assert_eq!(run.rects(&GEOMETRY)[0].mask(), 0b1111);
    }
}
