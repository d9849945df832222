//! The arithmetic of a change of shape: how much may be moved at a time when the new shape grows over the old one.
//!
//! Rows of the new shape begin `shift` rows lower on every member than those of the old one. A *unit* is the least part
//! of the array that is whole rows in both shapes: `old_rows` of the old, `new_rows` of the new, which are no more.
//!
//! ```text
//!   member    ├ shift ┤ old rows of unit 0 ┤ of unit 1 ┤ …
//!             ├ new rows of unit 0 ┤ of unit 1 ┤ …
//! ```
//!
//! Units 0 to c are moved, and this is durable: old rows below `c · old_rows` are of no use any more. New rows of `w`
//! more units end at `(c + w) · new_rows`, which is row `(c + w) · new_rows − shift` of the old shape. While that is no
//! more than `c · old_rows`, they lie where nobody looks, so power may go at any time.

use super::Geometry;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restripe {
    /// Bytes of the array in a unit.
    pub unit_bytes: u64,
    /// Rows of a unit in the old shape.
    pub old_rows: u64,
    /// Rows of a unit in the new shape: the least shift.
    pub new_rows: u64,
}

impl Restripe {
    /// From one shape to another, of one group each and with strips of the same length. `None` when the new one has fewer
    /// data strips in a stripe.
    pub fn new(old: &Geometry, new: &Geometry) -> Option<Restripe> {
        let is_sound = (old.groups, new.groups) == (1, 1) && old.strip_bytes == new.strip_bytes;
        if !is_sound || old.data == 0 || new.data < old.data {
            return None;
        }
        let (old_data, new_data) = (old.data as u64, new.data as u64);
        let unit = old_data / gcd(old_data, new_data) * new_data;
        Some(Restripe {
            unit_bytes: unit * u64::from(new.strip_bytes),
            old_rows: unit / old_data,
            new_rows: unit / new_data,
        })
    }

    /// Units that may be moved next when so many are moved, with a shift of so many rows.
    pub fn most_units(&self, moved: u64, shift_rows: u64) -> u64 {
        (shift_rows + (self.old_rows - self.new_rows) * moved) / self.new_rows
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Zones;
    use proptest::prelude::*;

    fn shape(data: usize) -> Geometry {
        Geometry { groups: 1, data, parity: 1, strip_bytes: 4096, group_stripes: 100, zones: Zones::NONE }
    }

    #[test]
    fn a_unit_is_whole_rows_in_both_shapes() {
        let restripe = Restripe::new(&shape(4), &shape(6)).unwrap();
        assert_eq!(restripe, Restripe { unit_bytes: 12 * 4096, old_rows: 3, new_rows: 2 });
        assert_eq!(Restripe::new(&shape(4), &shape(3)), None);
        assert_eq!(Restripe::new(&shape(4), &Geometry { groups: 2, ..shape(4) }), None);
    }

    proptest! {
        #[test]
        fn what_may_be_written_covers_no_row_that_is_needed(
            old in 1usize..40, more in 0usize..20, extra in 0u64..100, steps in 1usize..200,
        ) {
            let restripe = Restripe::new(&shape(old), &shape(old + more)).unwrap();
            let Restripe { old_rows, new_rows, .. } = restripe;
            let (shift, mut moved) = (new_rows + extra, 0);
            for _ in 0..steps {
                let units = restripe.most_units(moved, shift);
                prop_assert!(units > 0, "it always goes on");
                prop_assert!((moved + units) * new_rows <= shift + moved * old_rows);
                prop_assert!((moved + units + 1) * new_rows > shift + moved * old_rows, "as much as may be");
                moved += units.min(1000);
            }
        }
    }
}
