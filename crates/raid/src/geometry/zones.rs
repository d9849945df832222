//! The numbering of stripes if some groups were added later.
//!
//! ```text
//!   rows     group 0   group 1   group 2     The first two groups had rows 0 to 2 when the third
//!     0         0         1         6        was added; then the array grew by size.
//!     1         2         3         7        zone 0: groups 0 and 1, three rows: stripes 0 to 5
//!     2         4         5         8        zone 1: group 2, three rows: stripes 6 to 8
//!     3         9        10        11        behind the zones: all groups in turn
//! ```
//!
//! A stripe keeps its number and its place, so data never moves when a group is added. An array
//! without added groups has no zones: its stripes go over all groups in turn.

use crate::config::MAX_MEMBERS;

/// Most zones of an array, limited by the room in the superblock.
pub const MAX_ZONES: usize = 5;

/// Consecutive stripes that lie on some groups in turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zone {
    /// The first of its groups.
    pub first_group: u16,
    /// Number of groups.
    pub groups: u16,
    /// Stripes on each of them. They begin at the end of the previous zone on these groups.
    pub rows: u64,
}

/// A zone with its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Part {
    zone: Zone,
    first_stripe: u64,
    first_row: u64,
}

/// The zones of an array, lowest stripes first; none for most arrays.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Zones {
    parts: [Part; MAX_ZONES],
    count: usize,
    /// The part behind all zones.
    end: Part,
}

impl std::fmt::Debug for Zones {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.list()).finish()
    }
}

impl Zones {
    /// No zones: all groups in turn, from the first row on.
    pub const NONE: Zones = {
        let zone = Zone { first_group: 0, groups: 0, rows: 0 };
        let part = Part { zone, first_stripe: 0, first_row: 0 };
        Zones { parts: [part; MAX_ZONES], count: 0, end: part }
    };

    /// These zones. `None` if they are too many, only one (which is redundant), or leave groups of
    /// different length.
    pub fn new(list: &[Zone]) -> Option<Zones> {
        if list.is_empty() {
            return Some(Zones::NONE);
        }
        if !(2..=MAX_ZONES).contains(&list.len()) {
            return None;
        }
        let mut zones = Zones { count: list.len(), ..Zones::NONE };
        let (mut rows, mut known, mut stripes) = ([0u64; MAX_MEMBERS], 0, 0u64);
        for (part, zone) in zones.parts.iter_mut().zip(list) {
            let (first, count) = (usize::from(zone.first_group), usize::from(zone.groups));
            let own = rows.get_mut(first..first + count)?;
            let first_row = *own.first()?;
            let end = first_row.checked_add(zone.rows).filter(|end| *end > first_row)?;
            if first > known || own.iter().any(|row| *row != first_row) {
                return None;
            }
            own.fill(end);
            *part = Part { zone: *zone, first_stripe: stripes, first_row };
            stripes = stripes.checked_add(zone.rows.checked_mul(u64::from(zone.groups))?)?;
            known = known.max(first + count);
        }
        if rows[..known].iter().any(|row| *row != rows[0]) {
            return None;
        }
        let zone = Zone { first_group: 0, groups: known as u16, rows: 0 };
        zones.end = Part { zone, first_stripe: stripes, first_row: rows[0] };
        Some(zones)
    }

    /// Whether there are no zones.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The zones, lowest stripes first.
    pub fn list(&self) -> impl Iterator<Item = Zone> + '_ {
        self.parts[..self.count].iter().map(|part| part.zone)
    }

    /// Number of groups in the zones; 0 without zones.
    pub fn groups(&self) -> usize {
        self.end.zone.groups.into()
    }

    /// Rows of each group in zones.
    pub fn rows(&self) -> u64 {
        self.end.first_row
    }

    /// The group of a stripe, and its row there. The array must have zones.
    #[inline(never)]
    pub(super) fn split(&self, stripe: u64) -> (usize, u64) {
        let parts = &self.parts[..self.count];
        let place = match stripe < self.end.first_stripe {
            true => parts.iter().rfind(|part| part.first_stripe <= stripe).unwrap_or(&self.end),
            false => &self.end,
        };
        let Part { zone, first_stripe, first_row } = place;
        let (local, groups) = (stripe - first_stripe, u64::from(zone.groups));
        (usize::from(zone.first_group) + (local % groups) as usize, first_row + local / groups)
    }

    /// The stripe in a row of a group. The array must have zones.
    #[inline(never)]
    pub(super) fn join(&self, group: usize, row: u64) -> u64 {
        let holds = |part: &&Part| {
            let first = usize::from(part.zone.first_group);
            (first..first + usize::from(part.zone.groups)).contains(&group)
                && (part.first_row..part.first_row + part.zone.rows).contains(&row)
        };
        let Part { zone, first_stripe, first_row } =
            self.parts[..self.count].iter().find(holds).unwrap_or(&self.end);
        first_stripe
            + (row - first_row) * u64::from(zone.groups)
            + (group - usize::from(zone.first_group)) as u64
    }
}
