//! Tests compare codes with sums computed byte by byte, for every loss of strips that parity
//! covers.

use super::gf::multiply;
use super::*;
use proptest::prelude::*;

/// Pseudorandom bytes, different for each strip.
pub(super) fn noise(strip: usize, len: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(strip as u64 + 1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// A stripe of noise with its parity, computed byte by byte.
pub(super) fn stripe(code: &Code, len: usize) -> Vec<Vec<u8>> {
    let mut strips: Vec<Vec<u8>> = (0..code.data).map(|i| noise(i, len)).collect();
    for j in 0..code.parity {
        let byte =
            |at| (0..code.data).fold(0, |sum, i| sum ^ multiply(code.coefficient(j, i), strips[i][at]));
        strips.push((0..len).map(byte).collect());
    }
    strips
}

/// Every code of which the tests lose all sets of strips.
fn codes() -> Vec<Code> {
    let raid5 = (1..=61).map(|k| (Matrix::Powers, k, 1));
    let raid6 = (1..=24).map(|k| (Matrix::Powers, k, 2));
    let raid7 = (1..=21).map(|k| (Matrix::Powers, k, 3));
    let mirrors = (0..=4).map(|copies| (Matrix::Copies, 1, copies));
    let plain = [1, 2, 24, 64].map(|k| (Matrix::Copies, k, 0));
    let cauchy = [(1, 1), (3, 2), (1, 4), (2, 4), (4, 4), (10, 4), (16, 4), (5, 5), (6, 6), (4, 8), (3, 12)];
    let cauchy = cauchy.map(|(k, m)| (Matrix::Cauchy, k, m));
    let all = raid5.chain(raid6).chain(raid7).chain(mirrors).chain(plain).chain(cauchy);
    all.map(|(matrix, k, m)| Code::new(matrix, k, m).unwrap()).collect()
}

/// Every set of at most `most` of `strips`, as a mask.
fn losses(strips: usize, most: usize) -> Vec<u64> {
    let mut sets = vec![0u64];
    for _ in 0..most {
        let grown = sets
            .iter()
            .flat_map(|set| (64 - set.leading_zeros() as usize..strips).map(move |strip| set | 1 << strip));
        sets.extend(grown.collect::<Vec<_>>());
        sets.sort_unstable();
        sets.dedup();
    }
    sets
}

fn everything(code: &Code) -> u64 {
    u64::MAX >> (64 - code.data - code.parity)
}

fn check_loss(code: &Code, strips: &[Vec<u8>], lost: &[usize], available: u64) {
    let decoder = code.decoder(lost, available).unwrap();
    assert!(decoder.sources().is_sorted() && decoder.sources().len() <= code.data);
    assert!(decoder.sources().iter().all(|s| available >> s & 1 != 0 && !lost.contains(s)));
    let sources: Vec<&[u8]> = decoder.sources().iter().map(|s| &strips[*s][..]).collect();
    let mut found: Vec<Vec<u8>> = lost.iter().map(|_| vec![0xA5; strips[0].len()]).collect();
    decoder.decode(&sources, &mut found.iter_mut().map(|f| &mut f[..]).collect::<Vec<_>>());
    for (strip, bytes) in lost.iter().zip(&found) {
        assert!(*bytes == strips[*strip], "strip {strip} of {lost:?} by {:?}", decoder.sources());
    }
}

#[test]
fn every_loss_that_parity_covers_is_brought_back_in_every_geometry() {
    for code in codes() {
        let strips = stripe(&code, 3);
        for set in losses(code.data + code.parity, code.parity) {
            let lost: Vec<usize> = (0..64).filter(|s| set >> s & 1 != 0).collect();
            check_loss(&code, &strips, &lost, everything(&code) & !set);
        }
    }
}

#[test]
fn one_strip_more_than_parity_is_refused() {
    for code in codes().iter().filter(|code| code.data + code.parity <= 11) {
        for set in losses(code.data + code.parity, code.parity + 1) {
            let lost: Vec<usize> = (0..64).filter(|s| set >> s & 1 != 0).collect();
            let is_refused = code.decoder(&lost, everything(code)).is_err();
            assert_eq!(is_refused, lost.len() > code.parity, "{lost:?}");
        }
    }
}

#[test]
fn one_of_several_missing_strips_can_be_asked_for_in_any_order() {
    let code = Code::new(Matrix::Powers, 8, 3).unwrap();
    let strips = stripe(&code, 5);
    for set in losses(11, 3) {
        let mut missing: Vec<usize> = (0..11).filter(|s| set >> s & 1 != 0).collect();
        missing.reverse();
        for count in 0..=missing.len() {
            check_loss(&code, &strips, &missing[..count], everything(&code) & !set);
        }
    }
}

#[test]
fn data_serves_before_parity_and_a_mirror_needs_one_copy() {
    let raid6 = Code::new(Matrix::Powers, 4, 2).unwrap();
    assert_eq!(raid6.decoder(&[1], 0b11_1101).unwrap().sources(), [0, 2, 3, 4]);
    assert_eq!(raid6.decoder(&[1], 0b10_1101).unwrap().sources(), [0, 2, 3, 5]);
    assert_eq!(raid6.decoder(&[5], 0b01_1111).unwrap().sources(), [0, 1, 2, 3]);
    assert_eq!(raid6.decoder(&[], 0b11_1111).unwrap().sources(), [0usize; 0]);
    let mirror = Code::new(Matrix::Copies, 1, 2).unwrap();
    assert_eq!(mirror.decoder(&[0], 0b110).unwrap().sources(), [1]);
    assert_eq!(mirror.decoder(&[0, 1], 0b100).unwrap().sources(), [2]);
    assert_eq!(mirror.decoder(&[2], 0b011).unwrap().sources(), [0]);
}

#[test]
fn a_stripe_wider_than_a_mask_is_refused() {
    for matrix in [Matrix::Copies, Matrix::Powers, Matrix::Cauchy] {
        assert!(Code::new(matrix, 63, 2).is_err());
        assert!(Code::new(matrix, 0, 1).is_err());
        assert!(Code::new(matrix, usize::MAX, 1).is_err());
    }
    assert!(Code::new(Matrix::Powers, 4, 4).is_err());
    assert!(Code::new(Matrix::Copies, 2, 1).is_err());
    assert!(Code::new(Matrix::Cauchy, 48, 16).is_ok());
}

pub(super) fn code_and_length() -> impl Strategy<Value = (Code, usize)> {
    let shape = prop_oneof![
        (1..=61usize, 1..=3usize).prop_map(|(k, m)| (Matrix::Powers, k, m)),
        (1..=48usize, 1..=16usize).prop_map(|(k, m)| (Matrix::Cauchy, k, m)),
        (0..=8usize).prop_map(|m| (Matrix::Copies, 1, m)),
    ];
    (shape.prop_map(|(matrix, k, m)| Code::new(matrix, k, m).unwrap()), 0..300usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_loss_of_a_wide_stripe_is_brought_back(
        (code, len) in code_and_length(), seed in proptest::collection::vec(any::<prop::sample::Index>(), 0..16)
    ) {
        let strips = stripe(&code, len);
        let mut lost: Vec<usize> = seed.iter().map(|i| i.index(code.data + code.parity)).collect();
        lost.truncate(code.parity);
        lost.sort_unstable();
        lost.dedup();
        check_loss(&code, &strips, &lost, everything(&code));
    }

    #[test]
    fn parity_is_the_sum_of_its_parts((code, len) in code_and_length(), mask in any::<u64>()) {
        let strips = stripe(&code, len);
        let data: Vec<(usize, &[u8])> = (0..code.data).map(|i| (i, &strips[i][..])).collect();
        let mut whole = vec![vec![0x5A; len]; code.parity];
        code.encode(
            &data.iter().map(|(_, d)| *d).collect::<Vec<_>>(),
            &mut whole.iter_mut().map(|p| &mut p[..]).collect::<Vec<_>>(),
        );
        prop_assert!(whole == strips[code.data..]);

        let (some, rest): (Vec<_>, Vec<_>) = data.into_iter().partition(|(i, _)| mask >> i & 1 != 0);
        let mut parts = vec![vec![0x3C; len]; code.parity];
        let mut targets: Vec<(usize, &mut [u8])> =
            parts.iter_mut().enumerate().map(|(j, p)| (j, &mut p[..])).rev().collect();
        code.encode_some(&some, &mut targets);
        code.update(&rest, &mut targets);
        prop_assert!(parts == strips[code.data..]);
    }
}
