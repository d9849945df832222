//! Refcounts: entries of a block, and the references that a check counts.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Host cluster management*.

use std::collections::BTreeMap;

/// Bits 9 to 63 of an entry of the refcount table: the first byte of a block.
pub(crate) const BLOCK_OFFSET: u64 = !0x1ff;
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

    /// Sets the refcount at `index` of a block, to at most [`Width::most`].
    pub(crate) fn set(self, block: &mut [u8], index: usize, count: u64) {
        if self.order < 3 {
            let in_byte = 8 >> self.order;
            let shift = (index % in_byte) << self.order;
            let byte = &mut block[index / in_byte];
            *byte = *byte & !((self.most() as u8) << shift) | (count as u8) << shift;
            return;
        }
        let bytes = 1 << (self.order - 3);
        block[index * bytes..][..bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
    }

    /// The bytes of a block that have the refcount at `index`.
    pub(crate) fn bytes_of(self, index: usize) -> std::ops::Range<usize> {
        let start = (index << self.order) / 8;
        start..start + (1 << self.order.saturating_sub(3))
    }
}

/// A block of `bytes` with these refcounts, the others being 0.
pub(crate) fn block_of(counts: &[u32], width: Width, bytes: usize) -> Vec<u8> {
    let mut block = vec![0; bytes];
    counts.iter().enumerate().for_each(|(index, count)| width.set(&mut block, index, u64::from(*count)));
    block
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
    fn refcounts_that_are_set_are_read_again_and_change_no_other() {
        assert_eq!(block_of(&[1, 0, 1, 1], Width { order: 0 }, 2), [0b1101, 0]);
        assert_eq!(block_of(&[1, 2, 3], Width { order: 1 }, 2), [0b11_10_01, 0]);
        assert_eq!(block_of(&[1, 15, 7], Width { order: 2 }, 2), [0xf1, 7]);
        assert_eq!(block_of(&[1, 258], Width { order: 4 }, 4), [0, 1, 1, 2]);
        assert_eq!(block_of(&[9], Width { order: 6 }, 8), [0, 0, 0, 0, 0, 0, 0, 9]);
        for order in 0..=6 {
            let width = Width { order };
            let mut block = [0xff; 64];
            width.set(&mut block, 5, 0);
            width.set(&mut block, 6, 1);
            let found: Vec<u64> = (4..8).map(|index| width.get(&block, index)).collect();
            assert_eq!(found, [width.most(), 0, 1, width.most()], "order {order}");
            let changed: Vec<usize> = (0..64).filter(|at| block[*at] != 0xff).collect();
            let own = width.bytes_of(5).start..width.bytes_of(6).end;
            assert!(changed.iter().all(|at| own.contains(at)), "order {order}: {changed:?}, not {own:?}");
        }
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
