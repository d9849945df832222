//! Where the bytes of an array lie.
//!
//! ```text
//!   array     stripe 0        stripe 1        stripe 2        stripe 3 …      stripe s = group s % g, its stripe s / g
//!             ├ group 0 ┤     ├ group 1 ┤     ├ group 0 ┤     ├ group 1 ┤
//!   group     D0 D1 D2 P0     left-symmetric: parity moves one member down with each stripe of the group, data
//!             D1 D2 P0 D0     follows behind it, so a sequential read uses all members
//!             D2 P0 D0 D1
//! ```
//!
//! The layout of RAID 5 and 6 is md's left-symmetric. Strips of a stripe are numbered: data `0..k`, parity `k..k+m`.

/// The shape of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Groups.
    pub groups: usize,
    /// Data strips in a stripe (k).
    pub data: usize,
    /// Parity strips in a stripe (m); copies beside the first for a mirror.
    pub parity: usize,
    /// Bytes of a strip.
    pub strip_bytes: u32,
    /// Stripes of a group.
    pub group_stripes: u64,
}

/// Where a byte of the array lies.
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

    /// Where a byte of the array lies.
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
        // Both are less than `members`; another division would cost more than all the rest.
        let position = first_parity + turn;
        group * members + if position < members { position } else { position - members }
    }

    /// The strip of a stripe that a member holds; `None` when the member is of another group.
    #[inline]
    pub fn strip_on(&self, stripe: u64, member: usize) -> Option<usize> {
        let members = self.group_members();
        let (group, group_stripe) = self.split(stripe);
        let position = member.checked_sub(group * members).filter(|position| *position < members)?;
        let first_parity = members - 1 - (group_stripe % members as u64) as usize;
        let turn = (position + members - first_parity) % members;
        Some(if turn < self.parity { self.data + turn } else { turn - self.parity })
    }

    /// Where a stripe begins on its members, in bytes of their data.
    #[inline]
    pub fn member_offset(&self, stripe: u64) -> u64 {
        self.split(stripe).1 * u64::from(self.strip_bytes)
    }

    /// The group of a stripe.
    #[inline]
    pub fn group(&self, stripe: u64) -> usize {
        self.split(stripe).0
    }

    #[inline]
    fn split(&self, stripe: u64) -> (usize, u64) {
        match self.groups {
            1 => (0, stripe),
            groups => ((stripe % groups as u64) as usize, stripe / groups as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAID5: Geometry = Geometry { groups: 1, data: 3, parity: 1, strip_bytes: 4096, group_stripes: 8 };

    #[test]
    fn raid_5_is_laid_out_as_md_does() {
        // md(4), left-symmetric: P on the last member first, data behind it.
        let table: Vec<Vec<usize>> =
            (0..4).map(|stripe| (0..4).map(|strip| RAID5.member(stripe, strip)).collect()).collect();
        assert_eq!(table, [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]);
    }

    #[test]
    fn every_strip_has_a_member_of_its_own_and_can_be_found_from_it() {
        for (groups, data, parity) in
            [(1, 1, 1), (3, 1, 2), (1, 4, 0), (2, 5, 1), (2, 6, 2), (1, 21, 3), (1, 4, 4)]
        {
            let geometry = Geometry { groups, data, parity, strip_bytes: 16384, group_stripes: 100 };
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
}
