//! Refcounts: entries of a block, and the references that a check counts.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Host cluster management*.

use std::collections::BTreeMap;

/// Clusters in one piece of [`Counts`].
const PIECE: u64 = 1024;

/// Width of the refcounts of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width {
    /// A refcount has `1 << order` bits; at most 6.
    pub(crate) order: u32,
}

impl Width {
    /// Refcounts in a block of `bytes`.
    pub(crate) fn entries(self, bytes: u64) -> u64 {
        (bytes * 8) >> self.order
    }

    /// Largest refcount.
    pub(crate) fn most(self) -> u64 {
        u64::MAX >> (64 - (1 << self.order))
    }

    /// The refcount at `index` of a block. Entries below a byte count from the least significant
    /// bit.
    pub(crate) fn get(self, block: &[u8], index: usize) -> u64 {
        if self.order < 3 {
            let in_byte = 8 >> self.order;
            let shift = (index % in_byte) << self.order;
            return u64::from(block[index / in_byte] >> shift) & self.most();
        }
        let bytes = 1 << (self.order - 3);
        block[index * bytes..][..bytes].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }
}

/// References by cluster. A part of the file without any takes no memory.
#[derive(Default)]
pub(crate) struct Counts(BTreeMap<u64, Box<[u32]>>);

impl Counts {
    /// Adds `more` references to a cluster, up to `most`. Returns whether all were counted.
    pub(crate) fn add(&mut self, cluster: u64, more: u64, most: u64) -> bool {
        let piece = self.0.entry(cluster / PIECE).or_insert_with(|| vec![0; PIECE as usize].into());
        let count = &mut piece[(cluster % PIECE) as usize];
        let sum = u64::from(*count).saturating_add(more);
        let limit = most.min(u64::from(u32::MAX));
        *count = sum.min(limit) as u32;
        sum <= limit
    }

    /// References to a cluster.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        self.0.get(&(cluster / PIECE)).map_or(0, |piece| u64::from(piece[(cluster % PIECE) as usize]))
    }

    /// Clusters in `range` that have references, in their order.
    pub(crate) fn referenced(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let pieces = self.0.range(range.start / PIECE..range.end.div_ceil(PIECE));
        let all = pieces.flat_map(|(number, piece)| {
            piece.iter().enumerate().map(move |(i, count)| (number * PIECE + i as u64, u64::from(*count)))
        });
        all.filter(move |(cluster, count)| *count > 0 && range.contains(cluster))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_below_a_byte_count_from_its_least_significant_bit() {
        let block = [0b1110_0100, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde];
        let first = |order: u32| (0..4).map(|i| Width { order }.get(&block, i)).collect::<Vec<_>>();
        assert_eq!(first(0), [0, 0, 1, 0]);
        assert_eq!(first(1), [0, 1, 2, 3]);
        assert_eq!(first(2), [4, 14, 2, 1]);
        assert_eq!(first(3), [0xe4, 0x12, 0x34, 0x56]);
        assert_eq!(first(4), [0xe412, 0x3456, 0x789a, 0xbcde]);
        assert_eq!(Width { order: 6 }.get(&block, 0), 0xe412_3456_789a_bcde);
        assert_eq!([0, 3, 6].map(|order| Width { order }.most()), [1, 255, u64::MAX]);
        assert_eq!([0, 4, 6].map(|order| Width { order }.entries(512)), [4096, 256, 64]);
    }

    #[test]
    fn references_are_counted_up_to_the_largest_refcount() {
        let mut counts = Counts::default();
        assert!(counts.add(5, 2, 3) && counts.add(5, 1, 3) && !counts.add(5, 1, 3));
        assert!(counts.add(9000, 7, u64::MAX) && !counts.add(9001, u64::MAX, u64::MAX));
        assert_eq!((counts.get(5), counts.get(6), counts.get(9000)), (3, 0, 7));
        assert_eq!(counts.referenced(6..9001).collect::<Vec<_>>(), [(9000, 7)]);
    }
}
