//! Tests compare every set of loops that this processor has with sums computed byte by byte.

use super::super::gf::{NIBBLES, power};
use super::super::tests::noise;
use super::*;
use proptest::prelude::*;

/// A job and the geometry of its strips.
#[derive(Debug)]
struct Case {
    coefficients: Vec<u8>,
    is_powers: bool,
    is_added: bool,
    sources: usize,
    targets: usize,
    len: usize,
    /// Distance of strip `n` from a page boundary, in bytes: `n` times this.
    skew: usize,
}

impl Case {
    fn powers(sources: usize, targets: usize, len: usize) -> Case {
        let cell = |n: usize| power(2, (n / sources * (n % sources)) as u32);
        Case {
            coefficients: (0..sources * targets).map(cell).collect(),
            is_powers: true,
            is_added: false,
            sources,
            targets,
            len,
            skew: 0,
        }
    }

    /// Runs the job and compares the results; bytes around the targets must not change.
    fn check(&self, kernels: &Kernels) {
        let at = |n: usize| 64 + n * self.skew;
        let mut room: Vec<Vec<u8>> =
            (0..self.sources + self.targets).map(|n| noise(n, at(n) + self.len + 200)).collect();
        let before = room.clone();
        let (sources, targets) = room.split_at_mut(self.sources);
        let offset = |n: usize, room: &[u8]| room.as_ptr().align_offset(64) + n * self.skew;
        kernels.run(
            &Job { coefficients: &self.coefficients, is_powers: self.is_powers, is_added: self.is_added },
            sources.iter().enumerate().map(|(n, room)| &room[offset(n, room)..][..self.len]),
            targets.iter_mut().enumerate().map(|(n, room)| {
                let from = offset(n + self.sources, room);
                &mut room[from..][..self.len]
            }),
        );
        for t in 0..self.targets {
            let target = self.sources + t;
            let from = offset(target, &room[target]);
            let mut expected = before[target].clone();
            if !self.is_added {
                expected[from..][..self.len].fill(0);
            }
            for s in 0..self.sources {
                let coefficient = self.coefficients[t * self.sources + s];
                let source = &room[s][offset(s, &room[s])..][..self.len];
                let table = &NIBBLES.0[coefficient as usize];
                let product = |b: u8| table[b as usize & 15] ^ table[16 + (b as usize >> 4)];
                expected[from..].iter_mut().zip(source).for_each(|(e, b)| *e ^= product(*b));
            }
            assert!(room[target] == expected, "{}: target {t} of {self:?}", kernels.name);
        }
        assert!(room[..self.sources] == before[..self.sources]);
    }
}

#[test]
fn every_length_around_a_step_and_a_block_is_right() {
    let lengths = (0..=300).chain(BLOCK_BYTES - 2..=BLOCK_BYTES + 2).chain([4096, 4608]);
    for len in lengths {
        for kernels in Kernels::available() {
            for targets in 1..=3 {
                Case::powers(3, targets, len).check(kernels);
                Case { is_powers: false, is_added: true, ..Case::powers(9, targets, len) }.check(kernels);
            }
        }
    }
}

#[test]
fn every_number_of_sources_is_right() {
    for sources in 0..=64 {
        for kernels in Kernels::available() {
            for targets in 1..=3 {
                for (is_powers, is_added) in [(true, false), (true, true), (false, false), (false, true)] {
                    Case { is_powers, is_added, skew: 1, ..Case::powers(sources, targets, 133) }
                        .check(kernels);
                }
            }
        }
    }
}

#[test]
fn every_coefficient_is_right() {
    for coefficient in 0..=255 {
        for kernels in Kernels::available() {
            let coefficients = vec![coefficient, 1];
            let all_bytes = Case { coefficients, is_powers: false, ..Case::powers(2, 1, 2048) };
            all_bytes.check(kernels);
        }
    }
}

#[test]
fn old_and_new_bytes_of_a_strip_are_taken_together() {
    for kernels in Kernels::available() {
        for (targets, coefficients) in [(1, vec![7, 7]), (2, vec![1, 1, 9, 9]), (3, vec![1, 1, 9, 9, 4, 5])] {
            let case =
                Case { coefficients, is_powers: false, is_added: true, ..Case::powers(2, targets, 700) };
            case.check(kernels);
        }
    }
}

#[test]
fn large_targets_are_written_past_the_caches_and_are_the_same() {
    for kernels in Kernels::available() {
        for (sources, targets) in [(4, 1), (23, 1), (8, 2), (10, 4)] {
            let len = STREAM_BYTES / (sources + targets) + 64;
            Case { is_powers: targets <= 3, ..Case::powers(sources, targets, len) }.check(kernels);
        }
    }
}

#[test]
fn rows_of_ones_are_plain_sums_and_the_first_is_made_with_its_products() {
    let groups = |rows: &[u8], targets| {
        let job = Job { coefficients: rows, is_powers: false, is_added: false };
        let next = |group: &Group| next_group(&job, 2, targets, group.end());
        let all = std::iter::successors(next_group(&job, 2, targets, 0), next);
        all.map(|group| (group.kind, group.count)).collect::<Vec<_>>()
    };
    assert_eq!(groups(&[1, 1, 1, 1], 2), [(Kind::Sum, 1), (Kind::Sum, 1)]);
    assert_eq!(groups(&[1, 1, 1, 2], 2), [(Kind::SumAndProducts, 2)]);
    assert_eq!(groups(&[1, 2, 1, 1], 2), [(Kind::Products, 1), (Kind::Sum, 1)]);
    assert_eq!(
        groups(&[1, 1, 1, 2, 1, 3, 1, 4, 1, 5, 1, 1], 6),
        [(Kind::SumAndProducts, 4), (Kind::Products, 1), (Kind::Sum, 1)]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_sums_are_right(
        sources in 0..30usize, targets in 0..10usize, len in 0..5000usize, skew in 0..64usize,
        is_added: bool, seed in 0..1000usize, ones in any::<u16>(),
    ) {
        let mut coefficients = noise(seed, sources * targets);
        for t in (0..targets).filter(|t| ones >> t & 1 != 0) {
            coefficients[t * sources..][..sources].fill(1);
        }
        let case = Case { coefficients, is_powers: false, is_added, sources, targets, len, skew };
        for kernels in Kernels::available() {
            case.check(kernels);
        }
    }
}
