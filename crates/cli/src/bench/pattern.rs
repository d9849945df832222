//! The next request of a benchmark: its operation and offset.

use base::Rng;
use block::{Limits, Op};
use std::cell::Cell;
use std::rc::Rc;

/// The workload: which operations, in which order of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Places at random instead of one after the other.
    pub is_random: bool,
    /// Which operations.
    pub mix: Mix,
}

/// Which operations a workload is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// One operation.
    Only(Op),
    /// Reads and writes; the percentage of reads is set elsewhere.
    ReadWrite,
    /// Every operation that the device has: to find faults rather than speed.
    All,
}

impl Workload {
    /// Every name with what it stands for.
    pub const NAMES: &[(&str, Workload)] = &[
        ("read", Workload { is_random: false, mix: Mix::Only(Op::Read) }),
        ("write", Workload { is_random: false, mix: Mix::Only(Op::Write) }),
        ("rw", Workload { is_random: false, mix: Mix::ReadWrite }),
        ("trim", Workload { is_random: false, mix: Mix::Only(Op::Discard) }),
        ("zero", Workload { is_random: false, mix: Mix::Only(Op::WriteZeroes) }),
        ("randread", Workload { is_random: true, mix: Mix::Only(Op::Read) }),
        ("randwrite", Workload { is_random: true, mix: Mix::Only(Op::Write) }),
        ("randrw", Workload { is_random: true, mix: Mix::ReadWrite }),
        ("randtrim", Workload { is_random: true, mix: Mix::Only(Op::Discard) }),
        ("randzero", Workload { is_random: true, mix: Mix::Only(Op::WriteZeroes) }),
        ("randall", Workload { is_random: true, mix: Mix::All }),
    ];

    /// The workload's name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, workload)| *workload == self).map_or("?", |(name, _)| name)
    }

    /// Whether it changes what the device holds.
    pub fn is_modifying(self) -> bool {
        match self.mix {
            Mix::Only(op) => op.is_modifying(),
            Mix::ReadWrite | Mix::All => true,
        }
    }
}

impl spec::Value for Workload {
    fn expected() -> String {
        let names: Vec<_> = Self::NAMES.iter().map(|(name, _)| *name).collect();
        names.join(", ")
    }

    fn parse(text: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(name, _)| *name == text).map(|(_, workload)| *workload)
    }
}

/// Chooses operations.
#[derive(Clone, Debug)]
pub struct Chooser {
    /// The operation for each draw of 0 to 99: a table, so that any mixture costs the same.
    table: Rc<[Op]>,
}

impl Chooser {
    /// A chooser for `mix` on a device with these limits.
    pub fn new(mix: Mix, read_percent: u8, limits: &Limits) -> Chooser {
        let shares: Vec<(Op, usize)> = match mix {
            Mix::Only(op) => vec![(op, 100)],
            Mix::ReadWrite => vec![(Op::Read, read_percent.into()), (Op::Write, 100)],
            Mix::All => vec![
                (Op::Flush, 2),
                (Op::Discard, if limits.max_discard > 0 { 8 } else { 0 }),
                (Op::WriteZeroes, if limits.max_write_zeroes > 0 { 10 } else { 0 }),
                (Op::Read, 40),
                (Op::Write, 100),
            ],
        };
        let table = shares.iter().flat_map(|(op, share)| std::iter::repeat_n(*op, *share)).take(100);
        Chooser { table: table.collect() }
    }

    /// The next operation.
    #[inline]
    pub fn next(&self, rng: &mut Rng) -> Op {
        if self.table[0] == self.table[99] { self.table[0] } else { self.table[rng.below(100) as usize] }
    }
}

/// Chooses places: blocks `first`, `first + stride`, … of which there are `count`.
#[derive(Clone, Debug)]
pub struct Walk {
    first: u64,
    stride: u64,
    count: u64,
    is_random: bool,
    /// Shared by those who walk one path together.
    step: Rc<Cell<u64>>,
}

impl Walk {
    /// A walk over `count` (not 0) blocks from `first` on, `stride` apart.
    pub fn new(first: u64, stride: u64, count: u64, is_random: bool) -> Walk {
        assert!(count > 0, "a walk over nothing");
        Walk { first, stride, count, is_random, step: Rc::new(Cell::new(0)) }
    }

    /// The next block: its index in this walk.
    #[inline]
    pub fn next_index(&self, rng: &mut Rng) -> u64 {
        if self.is_random {
            return rng.below(self.count);
        }
        let index = self.step.get();
        self.step.set(if index + 1 == self.count { 0 } else { index + 1 });
        index
    }

    /// The block with this index.
    #[inline]
    pub fn block(&self, index: u64) -> u64 {
        self.first + index * self.stride
    }

    /// How many blocks there are.
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// The blocks of part `part` of `parts` of `blocks` blocks: as equal as they can be.
pub fn share_of(blocks: u64, part: u64, parts: u64) -> std::ops::Range<u64> {
    let border = |part: u64| (u128::from(blocks) * u128::from(part) / u128::from(parts)) as u64;
    border(part)..border(part + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_places_cover_the_walk_and_nothing_else() {
        let walk = Walk::new(3, 4, 10, true);
        let mut rng = Rng::new(1);
        let mut seen = [0u32; 10];
        for _ in 0..10_000 {
            let block = walk.block(walk.next_index(&mut rng));
            assert!((3..3 + 4 * 10).contains(&block) && (block - 3).is_multiple_of(4));
            seen[(block - 3) as usize / 4] += 1;
        }
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
    }

    #[test]
    fn those_who_share_a_walk_take_one_block_each() {
        let first = Walk::new(0, 1, 3, false);
        let second = first.clone();
        let mut rng = Rng::new(1);
        let got = [&first, &second, &first, &second].map(|walk| walk.next_index(&mut rng));
        assert_eq!(got, [0, 1, 2, 0]);
    }

    #[test]
    fn shares_are_disjoint_and_cover_everything() {
        for (blocks, parts) in [(10, 3), (3, 3), (1 << 60, 7)] {
            let shares: Vec<_> = (0..parts).map(|part| share_of(blocks, part, parts)).collect();
            assert_eq!((shares[0].start, shares[parts as usize - 1].end), (0, blocks));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shares.iter().all(|share| share.end - share.start >= blocks / parts));
        }
    }

    #[test]
    fn the_mixture_is_as_asked_for() {
        let limits = Limits { max_discard: 0, ..Limits::new(1 << 20) };
        let mut rng = Rng::new(7);
        let chooser = Chooser::new(Mix::ReadWrite, 70, &limits);
        let reads = (0..100_000).filter(|_| chooser.next(&mut rng) == Op::Read).count();
        assert!((69_000..71_000).contains(&reads), "{reads}");
        let all = Chooser::new(Mix::All, 0, &limits);
        assert!((0..10_000).all(|_| all.next(&mut rng) != Op::Discard), "the device has no discard");
        assert_eq!(Chooser::new(Mix::ReadWrite, 100, &limits).next(&mut rng), Op::Read);
    }
}
