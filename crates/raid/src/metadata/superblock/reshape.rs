//! The state of a reshape in progress: the old geometry, and the position.
//!
//! ```text
//!   member, before          │ reserve      │ 0    │ 1    │ 2    │ … old rows │
//!   during reshape        │      │ 0  │ 1  │ 2 … new rows    │ … old rows │
//!                                  ◄ shift ►       ◄ cursor
//! ```
//!
//! Strips are moved in units: the least data that fills whole rows of both geometries. A unit has
//! never more new rows than old ones. The new rows begin lower by at least the new rows of one
//! unit. So a unit is never written over old rows that are still to be moved.

use crate::{ArrayConfig, ConfigError, Geometry, Level, Matrix};

/// A reshape in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reshape {
    /// The level before.
    pub old_level: Level,
    /// The matrix before.
    pub old_matrix: Matrix,
    /// The geometry before; the configuration has the new one.
    pub old_geometry: Geometry,
    /// Bytes of the array that have the new geometry: whole units.
    pub cursor: u64,
    /// Bytes by which every member's data begins lower than in the old geometry.
    pub shift: u64,
}

impl Reshape {
    /// The configuration before the reshape, with the present number of lanes.
    pub fn old_config(&self, config: &ArrayConfig) -> ArrayConfig {
        ArrayConfig {
            level: self.old_level,
            matrix: self.old_matrix,
            geometry: self.old_geometry,
            ..config.clone()
        }
    }

    /// Rows by which the new geometry begins lower.
    pub const fn shift_rows(&self) -> u64 {
        self.shift / self.old_geometry.strip_bytes as u64
    }

    /// Bytes of the array that are moved at a time: the least that fills whole rows of both
    /// geometries.
    pub const fn unit_bytes(&self, new: &Geometry) -> u64 {
        Reshape::unit_strips(self.old_geometry.data, new.data) * new.strip_bytes as u64
    }

    /// Data strips of a unit ([`Reshape::unit_bytes`]), for stripes with `old` and `new` data
    /// strips: the least common multiple.
    pub const fn unit_strips(old: usize, new: usize) -> u64 {
        let (mut divisor, mut rest) = (old as u64, new as u64);
        while rest != 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        old as u64 / divisor * new as u64
    }

    /// The cursor of a complete reshape: the new capacity, rounded up to whole units.
    pub const fn end(&self, new: &Geometry) -> u64 {
        new.capacity().next_multiple_of(self.unit_bytes(new))
    }

    /// Most units that may be moved next after `moved` units, whose move is durable. New rows of
    /// `w` more units end at row `(moved + w) · n` of the new geometry, which is `shift` rows lower
    /// in the old one. Old rows are needed from `moved · o` on.
    pub const fn most_units(&self, new: &Geometry, moved: u64) -> u64 {
        let unit = Reshape::unit_strips(self.old_geometry.data, new.data);
        let (old_rows, new_rows) = (unit / self.old_geometry.data as u64, unit / new.data as u64);
        (self.shift_rows() + (old_rows - new_rows) * moved) / new_rows
    }

    /// Checks the values that other arithmetic relies on, against the array's checked
    /// configuration.
    ///
    /// # Errors
    /// Names the invalid value.
    pub fn check(&self, config: &ArrayConfig) -> Result<(), ConfigError> {
        let (old, new) = (&self.old_geometry, &config.geometry);
        let fail = |text: String| Err(ConfigError(text));
        self.old_config(config).check()?;
        if old.groups != 1 || new.groups != 1 || !new.zones.is_empty() {
            return fail(format!(
                "{} groups before, {} now: only an array of one group can be reshaped",
                old.groups, new.groups
            ));
        }
        let is_mirror = old.data < 2 || old.parity == 0 || new.parity == 0;
        let is_smaller = new.data < old.data || new.members() < old.members();
        let is_same = (new.data, new.parity) == (old.data, old.parity);
        if is_mirror || is_smaller || is_same {
            let shape = |of: &Geometry| format!("{}+{}", of.data, of.parity);
            return fail(format!("reshape from {} to {} members", shape(old), shape(new)));
        }
        if old.strip_bytes != new.strip_bytes {
            return fail(format!("strips of {} bytes before, {} now", old.strip_bytes, new.strip_bytes));
        }
        let strip = u64::from(new.strip_bytes);
        let least = Reshape::unit_strips(old.data, new.data) / new.data as u64 * strip;
        if !self.shift.is_multiple_of(strip) || self.shift < least {
            return fail(format!("{} bytes lower: a multiple of {strip}, at least {least}", self.shift));
        }
        if old.group_stripes.checked_add(self.shift / strip) != Some(new.group_stripes) {
            let (before, now) = (old.group_stripes, new.group_stripes);
            return fail(format!("{before} stripes before, {now} now, {} bytes lower", self.shift));
        }
        let unit = self.unit_bytes(new);
        let end = new.capacity().checked_next_multiple_of(unit);
        if !self.cursor.is_multiple_of(unit) || end.is_none_or(|end| self.cursor > end) {
            let capacity = new.capacity();
            return fail(format!("{} of {capacity} bytes moved, {unit} at a time", self.cursor));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::{config, reshaping};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn units_that_may_be_moved_cover_no_row_that_is_needed(
            old in 2usize..40, more in 1usize..20, extra in 0u64..100, steps in 1usize..200,
        ) {
            let (config, mut reshape) = reshaping(&config(old, 1), (old + more, 1));
            let unit = Reshape::unit_strips(old, old + more);
            let (old_rows, new_rows) = (unit / old as u64, unit / (old + more) as u64);
            reshape.shift = (new_rows + extra) * u64::from(config.geometry.strip_bytes);
            let mut moved = 0;
            for _ in 0..steps {
                let units = reshape.most_units(&config.geometry, moved);
                prop_assert!(units > 0, "the reshape always continues");
                let behind = |units: u64| (moved + units) * new_rows;
                prop_assert!(behind(units) <= reshape.shift_rows() + moved * old_rows);
                prop_assert!(behind(units + 1) > reshape.shift_rows() + moved * old_rows, "a further unit would cover needed rows");
                moved += units.min(1000);
            }
        }
    }

    #[test]
    fn a_unit_fills_whole_rows_of_both_shapes() {
        for (old, new, strips) in [(2, 3, 6), (4, 6, 12), (4, 4, 4), (3, 9, 9), (62, 63, 3906)] {
            assert_eq!(Reshape::unit_strips(old, new), strips);
        }
        let (config, reshape) = reshaping(&config(2, 1), (3, 1));
        assert_eq!(reshape.unit_bytes(&config.geometry), 6 * 4096);
        // 18 rows of 3 strips.
        assert_eq!((reshape.shift_rows(), reshape.end(&config.geometry)), (2, 54 * 4096));
    }

    #[test]
    fn a_change_that_arithmetic_could_not_cope_with_is_refused_with_its_values() {
        type Edit = fn(&mut ArrayConfig, &mut Reshape);
        let edits: [(Edit, &str); 15] = [
            (|_, reshape| reshape.old_geometry.groups = 2, "2 groups before, 1 now"),
            (|config, _| config.geometry.groups = 2, "1 groups before, 2 now"),
            (|_, reshape| reshape.old_geometry.strip_bytes = 8192, "strips of 8192 bytes before, 4096 now"),
            (|_, reshape| reshape.old_geometry.data = 4, "from 4+1 to 3+1 members"),
            (|_, reshape| reshape.old_geometry.parity = 3, "from 2+3 to 3+1 members"),
            (|_, reshape| reshape.old_geometry.data = 3, "from 3+1 to 3+1 members"),
            (|_, reshape| reshape.old_geometry.data = 0, "0+1 members"),
            (|_, reshape| reshape.old_geometry.parity = 0, "0 parities"),
            (
                |_, reshape| reshape.old_geometry.group_stripes -= 1,
                "15 stripes before, 18 now, 8192 bytes lower",
            ),
            (|_, reshape| reshape.shift -= 4096, "4096 bytes lower: a multiple of 4096, at least 8192"),
            (|_, reshape| reshape.shift += 512, "8704 bytes lower"),
            (|_, reshape| reshape.shift = 0, "0 bytes lower"),
            (|_, reshape| reshape.cursor = 4096, "4096 of 221184 bytes moved, 24576 at a time"),
            (|_, reshape| reshape.cursor = u64::MAX / 24576 * 24576, "bytes moved"),
            (|_, reshape| reshape.cursor += 10 * 24576, "245760 of 221184 bytes moved"),
        ];
        for (edit, part) in edits {
            let (mut config, mut reshape) = reshaping(&config(2, 1), (3, 1));
            reshape.check(&config).unwrap();
            edit(&mut config, &mut reshape);
            let error = reshape.check(&config).unwrap_err().to_string();
            assert!(error.contains(part), "{error} lacks {part}");
        }
        for (old, new) in [((2, 1), (2, 2)), ((3, 3), (5, 1)), ((4, 2), (6, 3))] {
            let (config, mut reshape) = reshaping(&config(old.0, old.1), new);
            reshape.cursor = reshape.end(&config.geometry);
            assert_eq!(reshape.check(&config), Ok(()), "{old:?} {new:?}");
        }
    }
}
