//! Allocation of units in a pool.

/// A contiguous range of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First unit.
    pub start: u64,
    /// Number of units; never 0.
    pub len: u64,
}

impl Extent {
    /// The unit after the last.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Returns the free extents among `units` in order, given the `used` ones.
pub fn holes(units: u64, used: impl IntoIterator<Item = Extent>) -> Vec<Extent> {
    let mut used: Vec<Extent> = used.into_iter().collect();
    used.sort_unstable_by_key(|extent| extent.start);
    let mut holes = Vec::new();
    let mut at = 0;
    for extent in used.into_iter().chain([Extent { start: units, len: 1 }]) {
        if extent.start > at {
            holes.push(Extent { start: at, len: extent.start - at });
        }
        at = at.max(extent.end());
    }
    holes
}

/// Takes `len` units from `holes` in as few extents as possible. Units directly after `after` are
/// preferred, then the smallest hole that fits the rest, then the largest holes. Returns `None` if
/// too few units are free.
pub fn allocate(holes: &[Extent], len: u64, after: Option<u64>) -> Option<Vec<Extent>> {
    let mut free = holes.to_vec();
    let mut found = Vec::new();
    let mut left = len;
    let mut take = |free: &mut Vec<Extent>, place: usize, left: &mut u64| {
        let hole = &mut free[place];
        let len = hole.len.min(*left);
        found.push(Extent { start: hole.start, len });
        (hole.start, hole.len) = (hole.start + len, hole.len - len);
        *left -= len;
    };
    if let Some(place) = free.iter().position(|hole| Some(hole.start) == after)
        && left > 0
    {
        take(&mut free, place, &mut left);
    }
    while left > 0 {
        free.retain(|hole| hole.len > 0);
        let fitting =
            (0..free.len()).filter(|place| free[*place].len >= left).min_by_key(|place| free[*place].len);
        let place = fitting.or_else(|| (0..free.len()).max_by_key(|place| free[*place].len))?;
        take(&mut free, place, &mut left);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(start: u64, len: u64) -> Extent {
        Extent { start, len }
    }

    #[test]
    fn room_is_one_hole_if_one_is_large_enough_and_the_smallest_of_those() {
        let free = holes(100, [extent(10, 10), extent(30, 5), extent(60, 40)]);
        assert_eq!(free, [extent(0, 10), extent(20, 10), extent(35, 25)]);
        assert_eq!(allocate(&free, 10, None), Some(vec![extent(0, 10)]));
        assert_eq!(allocate(&free, 12, None), Some(vec![extent(35, 12)]));
        assert_eq!(allocate(&free, 30, None), Some(vec![extent(35, 25), extent(0, 5)]));
        assert_eq!(allocate(&free, 45, None).unwrap().len(), 3);
        assert_eq!(allocate(&free, 46, None), None);
        assert_eq!(allocate(&free, 0, None), Some(vec![]));
        assert_eq!(allocate(&free, 12, Some(20)), Some(vec![extent(20, 10), extent(0, 2)]));
        assert_eq!(allocate(&free, 3, Some(20)), Some(vec![extent(20, 3)]));
        assert_eq!(allocate(&free, 3, Some(30)), Some(vec![extent(0, 3)]));
    }

    proptest! {
        #[test]
        fn an_allocation_was_free_and_has_the_requested_length(
            lens in prop::collection::vec((0..20u64, 1..20u64), 0..12), wanted in 1..200u64, after in any::<Option<u8>>(),
        ) {
            let mut used = Vec::new();
            let mut at = 0;
            for (gap, len) in lens {
                used.push(extent(at + gap, len));
                at += gap + len;
            }
            let free = holes(at + 10, used.iter().copied());
            let total: u64 = free.iter().map(|hole| hole.len).sum();
            prop_assert_eq!(total + used.iter().map(|extent| extent.len).sum::<u64>(), at + 10);
            match allocate(&free, wanted, after.map(u64::from)) {
                None => prop_assert!(total < wanted),
                Some(found) => {
                    prop_assert_eq!(found.iter().map(|extent| extent.len).sum::<u64>(), wanted);
                    let left = holes(at + 10, used.iter().chain(&found).copied());
                    prop_assert_eq!(left.iter().map(|hole| hole.len).sum::<u64>(), total - wanted, "it was not all free");
                }
            }
        }
    }
}
