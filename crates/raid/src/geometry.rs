//! The geometry of an array: maps bytes of the array to members.
//!
//! ```text
//!   array     stripe 0        stripe 1        stripe 2        stripe 3 …
//!             ├ group 0 ┤     ├ group 1 ┤     ├ group 0 ┤     ├ group 1 ┤
//!             stripe s is stripe s / g of group s % g
//!   group     D0 D1 D2 P0     left-symmetric: parity moves one member down with each stripe
//!             D1 D2 P0 D0     of the group, and data follows it, so a sequential read uses
//!             D2 P0 D0 D1     all members
//! ```
//!
//! Groups that are added later have their own stripes behind the others ([`Zones`]). Only
//! [`Geometry`] knows that.
//!
//! The layout of RAID 5 and 6 is md's left-symmetric. The strips of a stripe are numbered: data
//! `0..k`, parity `k..k+m`.

mod zones;

pub use zones::{MAX_ZONES, Zone, Zones};

/// The geometry of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Groups.
    pub groups: usize,
    /// Data strips in a stripe (k).
    pub data: usize,
    /// Parity strips in a stripe (m); further copies in a mirror.
    pub parity: usize,
    /// Bytes of a strip.
    pub strip_bytes: u32,
    /// Stripes of a group.
    pub group_stripes: u64,
    /// The numbering of stripes if groups were added later; [`Zones::NONE`] otherwise.
    pub zones: Zones,
}

/// The place of a byte of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The stripe.
    pub stripe: u64,
    /// The data strip in the stripe.
    pub strip: usize,
    /// Bytes into the strip.
    pub offset: u32,
}

impl Geometry {
    /// Members of a group.
    #[inline]
    pub const fn group_members(&self) -> usize {
        self.data + self.parity
    }

    /// Members of the array, without spares.
    #[inline]
    pub const fn members(&self) -> usize {
        self.groups * self.group_members()
    }

    /// Stripes of the array.
    #[inline]
    pub const fn stripes(&self) -> u64 {
        self.groups as u64 * self.group_stripes
    }

    /// Bytes of data in a stripe.
    #[inline]
    pub const fn stripe_bytes(&self) -> u64 {
        self.data as u64 * self.strip_bytes as u64
    }

    /// Bytes of data in the array.
    #[inline]
    pub const fn capacity(&self) -> u64 {
        self.stripes() * self.stripe_bytes()
    }

    /// The place of a byte of the array.
    #[inline]
    pub fn locate(&self, offset: u64) -> Place {
        let strip_number = offset >> self.strip_bytes.trailing_zeros();
        Place {
            stripe: strip_number / self.data as u64,
            strip: (strip_number % self.data as u64) as usize,
            offset: (offset & (u64::from(self.strip_bytes) - 1)) as u32,
        }
    }

    /// The member that holds a strip (data or parity) of a stripe.
    #[inline]
    pub fn member(&self, stripe: u64, strip: usize) -> usize {
        debug_assert!(strip < self.group_members());
        let members = self.group_members();
        let (group, group_stripe) = self.split(stripe);
        let first_parity = members - 1 - (group_stripe % members as u64) as usize;
        let turn = if strip < self.data { self.parity + strip } else { strip - self.data };
        // Both are less than `members`; another division would cost more than the rest of the
        // function.
        let position = first_parity + turn;
        group * members + if position < members { position } else { position - members }
    }

    /// The strip of a stripe on a member; `None` if the member belongs to another group.
    #[inline]
    pub fn strip_on(&self, stripe: u64, member: usize) -> Option<usize> {
        let members = self.group_members();
        let (group, group_stripe) = self.split(stripe);
        let position = member.checked_sub(group * members).filter(|position| *position < members)?;
        let first_parity = members - 1 - (group_stripe % members as u64) as usize;
        let turn = (position + members - first_parity) % members;
        Some(if turn < self.parity { self.data + turn } else { turn - self.parity })
    }

    /// Offset of a stripe in its members' data, in bytes.
    #[inline]
    pub fn member_offset(&self, stripe: u64) -> u64 {
        self.split(stripe).1 * u64::from(self.strip_bytes)
    }

    /// The group of a stripe.
    #[inline]
    pub fn group(&self, stripe: u64) -> usize {
        self.split(stripe).0
    }

    /// The stripe in a row of a group: the inverse of [`Geometry::group`] and
    /// [`Geometry::member_offset`].
    #[inline]
    pub fn stripe(&self, group: usize, row: u64) -> u64 {
        match self.zones.is_empty() {
            true => row * self.groups as u64 + group as u64,
            false => self.zones.join(group, row),
        }
    }

    /// The stripe after `step` others on a walk over all stripes. The walk goes row by row, each
    /// row over all groups. Rebuilds and scrubs use this order, so that the completed part is the
    /// first part of every member.
    #[inline]
    pub fn stripe_at_step(&self, step: u64) -> u64 {
        match self.zones.is_empty() {
            true => step,
            false => self.zones.join((step % self.groups as u64) as usize, step / self.groups as u64),
        }
    }

    /// Number of stripes before one on the walk; see [`Geometry::stripe_at_step`].
    #[inline]
    pub fn step_of(&self, stripe: u64) -> u64 {
        if self.zones.is_empty() {
            return stripe;
        }
        let (group, row) = self.zones.split(stripe);
        row * self.groups as u64 + group as u64
    }

    /// Bytes of every member's data before a step of the walk.
    #[inline]
    pub fn step_offset(&self, step: u64) -> u64 {
        step / self.groups as u64 * u64::from(self.strip_bytes)
    }

    /// The geometry with `added` more groups, whose stripes follow all existing ones. `None` if
    /// there would be too many zones.
    pub fn with_groups_added(&self, added: usize) -> Option<Geometry> {
        let (old, new) = (u16::try_from(self.groups).ok()?, u16::try_from(added).ok()?);
        let mut list: Vec<Zone> = self.zones.list().collect();
        let rows = self.group_stripes.checked_sub(self.zones.rows())?;
        if rows > 0 {
            list.push(Zone { first_group: 0, groups: old, rows });
        }
        list.push(Zone { first_group: old, groups: new, rows: self.group_stripes });
        Some(Geometry { groups: self.groups + added, zones: Zones::new(&list)?, ..*self })
    }

    /// The group of a stripe, and its row there.
    #[inline]
    fn split(&self, stripe: u64) -> (usize, u64) {
        if !self.zones.is_empty() {
            return self.zones.split(stripe);
        }
        match self.groups {
            1 => (0, stripe),
            groups => ((stripe % groups as u64) as usize, stripe / groups as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RAID5: Geometry =
        Geometry { groups: 1, data: 3, parity: 1, strip_bytes: 4096, group_stripes: 8, zones: Zones::NONE };

    #[test]
    fn raid_5_is_laid_out_as_md_does() {
        // md(4), left-symmetric: P begins on the last member, data follows it.
        let table: Vec<Vec<usize>> =
            (0..4).map(|stripe| (0..4).map(|strip| RAID5.member(stripe, strip)).collect()).collect();
        assert_eq!(table, [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]);
    }

    #[test]
    fn every_strip_has_a_member_of_its_own_and_can_be_found_from_it() {
        for (groups, data, parity) in
            [(1, 1, 1), (3, 1, 2), (1, 4, 0), (2, 5, 1), (2, 6, 2), (1, 21, 3), (1, 4, 4)]
        {
            let geometry =
                Geometry { groups, data, parity, strip_bytes: 16384, group_stripes: 100, zones: Zones::NONE };
            for stripe in 0..geometry.stripes() {
                let members: Vec<usize> = (0..data + parity).map(|s| geometry.member(stripe, s)).collect();
                for (strip, member) in members.iter().enumerate() {
                    assert_eq!(geometry.strip_on(stripe, *member), Some(strip));
                    assert_eq!(member / (data + parity), geometry.group(stripe));
                    assert_eq!(members.iter().filter(|m| *m == member).count(), 1);
                }
                let other = (geometry.group(stripe) + 1) % groups * (data + parity);
                assert_eq!(geometry.strip_on(stripe, other).is_none(), groups > 1);
            }
        }
    }

    #[test]
    fn bytes_follow_each_other_strip_by_strip() {
        let place = |offset| RAID5.locate(offset);
        assert_eq!(place(0), Place { stripe: 0, strip: 0, offset: 0 });
        assert_eq!(place(4097), Place { stripe: 0, strip: 1, offset: 1 });
        assert_eq!(place(3 * 4096 - 1), Place { stripe: 0, strip: 2, offset: 4095 });
        assert_eq!(place(3 * 4096), Place { stripe: 1, strip: 0, offset: 0 });
        assert_eq!(RAID5.capacity(), 8 * 3 * 4096);
    }

    #[test]
    fn a_group_that_is_added_comes_behind_the_others_and_then_takes_its_turn() {
        let old = Geometry { groups: 2, group_stripes: 3, ..RAID5 };
        let added = old.with_groups_added(1).unwrap();
        let grown = Geometry { group_stripes: 5, ..added };
        let groups = |geometry: &Geometry| -> Vec<usize> {
            (0..geometry.stripes()).map(|stripe| geometry.group(stripe)).collect()
        };
        assert_eq!(groups(&added), [0, 1, 0, 1, 0, 1, 2, 2, 2]);
        assert_eq!(groups(&grown), [0, 1, 0, 1, 0, 1, 2, 2, 2, 0, 1, 2, 0, 1, 2]);
        let rows: Vec<u64> = (0..15).map(|stripe| grown.member_offset(stripe) / 4096).collect();
        assert_eq!(rows, [0, 0, 1, 1, 2, 2, 0, 1, 2, 3, 3, 3, 4, 4, 4]);
        // The place of a stripe that was added by size does not depend on the number of stripes at
        // the time.
        assert!((0..15).all(|stripe| added.member(stripe, 2) == grown.member(stripe, 2)));
        let walk: Vec<u64> = (0..9).map(|step| added.stripe_at_step(step)).collect();
        assert_eq!(walk, [0, 1, 6, 2, 3, 7, 4, 5, 8]);
        assert_eq!(added.capacity(), old.capacity() / 2 * 3);
    }

    #[test]
    fn zones_that_make_no_sense_are_refused() {
        let zone = |first_group, groups, rows| Zone { first_group, groups, rows };
        let good = [zone(0, 2, 3), zone(2, 1, 3)];
        assert_eq!(Zones::new(&good).map(|zones| (zones.groups(), zones.rows())), Some((3, 3)));
        for bad in [
            &[zone(0, 2, 3)][..],
            &[zone(0, 2, 3), zone(2, 1, 2)],
            &[zone(0, 2, 3), zone(3, 1, 3)],
            &[zone(0, 2, 3), zone(1, 1, 3)],
            &[zone(0, 2, 3), zone(1, 2, 3)],
            &[zone(0, 2, 0), zone(2, 1, 0)],
            &[zone(0, 0, 3), zone(0, 1, 3)],
            &[zone(0, 2, u64::MAX), zone(2, 1, u64::MAX)],
            &[zone(0, 2, 3), zone(2, u16::MAX, 3)],
            &[zone(0, 1, 1); 6],
        ] {
            assert_eq!(Zones::new(bad), None, "{bad:?}");
        }
    }

    /// One growth of an array: added groups, or rows.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Groups(usize),
        Rows(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![(1usize..4).prop_map(Step::Groups), (1u64..9).prop_map(Step::Rows)];
        proptest::collection::vec(step, 0..8)
    }

    proptest! {
        #[test]
        fn a_stripe_keeps_its_place_however_an_array_grows(groups in 1usize..4, rows in 1u64..9, steps in steps()) {
            let mut geometry = Geometry { groups, group_stripes: rows, ..RAID5 };
            for step in steps {
                let old = geometry;
                geometry = match step {
                    Step::Rows(rows) => Geometry { group_stripes: old.group_stripes + rows, ..old },
                    Step::Groups(added) => match old.with_groups_added(added) {
                        Some(grown) => grown,
                        None => {
                            prop_assert!(old.zones.list().count() + 2 > MAX_ZONES);
                            old
                        }
                    },
                };
                for stripe in 0..old.stripes() {
                    let place = |geometry: &Geometry| (geometry.group(stripe), geometry.member_offset(stripe));
                    prop_assert_eq!(place(&old), place(&geometry));
                }
                let list: Vec<Zone> = geometry.zones.list().collect();
                prop_assert_eq!(Zones::new(&list), Some(geometry.zones));
            }
            let mut seen = std::collections::BTreeSet::new();
            for stripe in 0..geometry.stripes() {
                let (group, row) = geometry.split(stripe);
                prop_assert!(group < geometry.groups && row < geometry.group_stripes);
                prop_assert!(seen.insert((group, row)));
                prop_assert_eq!(geometry.stripe(group, row), stripe);
                prop_assert_eq!(geometry.stripe_at_step(geometry.step_of(stripe)), stripe);
                prop_assert_eq!(geometry.step_offset(geometry.step_of(stripe)), geometry.member_offset(stripe));
                for strip in 0..geometry.group_members() {
                    prop_assert_eq!(geometry.strip_on(stripe, geometry.member(stripe, strip)), Some(strip));
                }
            }
            let walk: Vec<u64> = (0..geometry.stripes()).map(|step| geometry.stripe_at_step(step)).collect();
            prop_assert!(walk.windows(2).all(|pair| geometry.member_offset(pair[0]) <= geometry.member_offset(pair[1])));
        }
    }
}
