//! The locator finds the wrong strip of a stripe. It compares more strips than decoding needs.
//!
//! Any `k` of the `p` present strips compute the others. One spare strip shows that a strip is
//! wrong. Two spare strips identify it: the strip without which all others agree. The code is MDS,
//! so a single wrong strip is never mistaken for another. With three or more spare strips, two
//! wrong strips are never mistaken for one. With two spare strips that may happen by chance, where
//! their errors are in the same bytes.

use super::{Code, Decoder, Slices, SlicesMut};

/// Memory on the stack for strips that are computed for comparison, in bytes.
const PIECE_BYTES: usize = 16 << 10;

/// The strips of a stripe by number, data first; `None` for a strip that is not present. All have
/// one length.
pub type Present<'a> = [Option<&'a [u8]>];

/// The locator's judgement of a stripe, or of some bytes of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Located {
    /// All present strips agree, or there is no spare strip.
    Agreed,
    /// Exactly this strip is wrong: without it all others agree.
    Wrong(usize),
    /// Strips contradict each other, and the wrong ones are unknown.
    Ambiguous,
}

impl Code {
    /// Finds the wrong strip among those present. The error may differ from byte to byte, but must
    /// be in one strip: callers pass ranges as small as a single fault damages.
    ///
    /// # Panics
    /// If fewer than `k` strips are present.
    pub fn locate(&self, strips: &Present<'_>) -> Located {
        if self.agree(strips) {
            return Located::Agreed;
        }
        let present = strips.iter().flatten().count();
        if present < self.data + 2 {
            return Located::Ambiguous;
        }
        let mut rest = strips.to_vec();
        let mut is_suspect = |suspect: &usize| {
            let strip = rest[*suspect].take();
            let is_wrong = strip.is_some() && self.agree(&rest);
            rest[*suspect] = strip;
            is_wrong
        };
        let mut suspects = (0..strips.len()).filter(|suspect| is_suspect(suspect));
        match (suspects.next(), suspects.next()) {
            (Some(wrong), None) => Located::Wrong(wrong),
            _ => Located::Ambiguous,
        }
    }

    /// Whether the present strips agree: the first `k` of them compute all others.
    ///
    /// # Panics
    /// If fewer than `k` strips are present.
    pub fn agree(&self, strips: &Present<'_>) -> bool {
        let mut present = (0..strips.len()).filter(|strip| strips[*strip].is_some());
        let base = present.by_ref().take(self.data).fold(0u64, |mask, strip| mask | 1 << strip);
        let spare: Vec<usize> = present.collect();
        let decoder = self.decoder(&spare, base).expect("k strips are present");
        decoder.agrees(&spare, strips)
    }
}

impl Decoder {
    /// Whether the lost strips, in the order passed to [`Code::decoder`], equal the results of the
    /// sources. Allocates nothing.
    ///
    /// # Panics
    /// If a source or a lost strip is not present.
    pub fn agrees(&self, lost: &[usize], strips: &Present<'_>) -> bool {
        let strip = |number: &usize| strips[*number].expect("sources and lost strips are present");
        let Some(len) = lost.first().map(|first| strip(first).len()) else { return true };
        let mut memory = [0; PIECE_BYTES];
        let piece = PIECE_BYTES / lost.len().next_power_of_two();
        for start in (0..len).step_by(piece) {
            let range = start..len.min(start + piece);
            let sources: Slices<'_> =
                self.sources().iter().map(|source| &strip(source)[range.clone()]).collect();
            let mut computed: SlicesMut<'_> =
                memory.chunks_mut(piece).take(lost.len()).map(|bytes| &mut bytes[..range.len()]).collect();
            self.decode(&sources, &mut computed);
            if lost.iter().zip(&computed).any(|(lost, bytes)| strip(lost)[range.clone()] != **bytes) {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{code_and_length, stripe};
    use super::*;
    use crate::parity::Matrix;
    use proptest::prelude::*;

    fn present(strips: &[Vec<u8>], missing: u64) -> Vec<Option<&[u8]>> {
        let is_there = |strip: usize| missing >> strip & 1 == 0;
        strips.iter().enumerate().map(|(strip, bytes)| is_there(strip).then_some(&bytes[..])).collect()
    }

    /// Adds a nonzero error to some bytes of a strip.
    fn damage(strip: &mut [u8], at: usize, error: &[u8]) {
        for (byte, error) in strip[at..].iter_mut().zip(error) {
            *byte ^= (*error).max(1);
        }
    }

    /// At most `most` missing strips, chosen by `picks`.
    fn missing(strips: usize, most: usize, picks: &[prop::sample::Index]) -> u64 {
        picks.iter().take(most).fold(0, |mask, pick| mask | 1 << pick.index(strips))
    }

    fn nth(strips: usize, missing: u64, pick: prop::sample::Index) -> usize {
        let there: Vec<usize> = (0..strips).filter(|strip| missing >> strip & 1 == 0).collect();
        there[pick.index(there.len())]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn one_wrong_strip_is_named_with_two_spare_strips_and_noticed_with_one(
            (code, len) in code_and_length(),
            losses in proptest::collection::vec(any::<prop::sample::Index>(), 0..16),
            (pick, at) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            error in proptest::collection::vec(any::<u8>(), 1..300),
        ) {
            let (count, mut strips) = (code.data + code.parity, stripe(&code, len + 1));
            let missing = missing(count, code.parity, &losses);
            let spare = code.parity - missing.count_ones() as usize;
            prop_assert_eq!(code.locate(&present(&strips, missing)), Located::Agreed);
            let wrong = nth(count, missing, pick);
            damage(&mut strips[wrong], at.index(len + 1), &error);
            let expected = match spare {
                0 => Located::Agreed,
                1 => Located::Ambiguous,
                _ => Located::Wrong(wrong),
            };
            prop_assert_eq!(code.locate(&present(&strips, missing)), expected);
        }

        #[test]
        fn two_wrong_strips_are_never_taken_for_one_with_three_spare_strips(
            (code, len) in code_and_length(),
            losses in proptest::collection::vec(any::<prop::sample::Index>(), 0..16),
            picks in any::<[prop::sample::Index; 2]>(),
            places in any::<[prop::sample::Index; 2]>(),
            errors in any::<[[u8; 7]; 2]>(),
        ) {
            prop_assume!(code.parity >= 3);
            let (count, mut strips) = (code.data + code.parity, stripe(&code, len + 1));
            let missing = missing(count, code.parity - 3, &losses);
            let wrong = picks.map(|pick| nth(count, missing, pick));
            prop_assume!(wrong[0] != wrong[1]);
            for i in 0..2 {
                damage(&mut strips[wrong[i]], places[i].index(len + 1), &errors[i]);
            }
            prop_assert_eq!(code.locate(&present(&strips, missing)), Located::Ambiguous);
        }

        #[test]
        fn two_wrong_strips_are_never_taken_for_one_where_their_errors_are_in_different_bytes(
            (code, len) in code_and_length(),
            picks in any::<[prop::sample::Index; 2]>(),
        ) {
            prop_assume!(code.parity >= 2);
            let (count, mut strips) = (code.data + code.parity, stripe(&code, len + 2));
            let wrong = picks.map(|pick| nth(count, 0, pick));
            prop_assume!(wrong[0] != wrong[1]);
            strips[wrong[0]][0] ^= 7;
            strips[wrong[1]][1] ^= 7;
            prop_assert_eq!(code.locate(&present(&strips, 0)), Located::Ambiguous);
        }
    }

    #[test]
    fn strips_longer_than_a_piece_are_compared_to_their_end() {
        let code = Code::new(Matrix::Powers, 4, 3).unwrap();
        let len = 2 * PIECE_BYTES + 5;
        for wrong in 0..7 {
            let mut strips = stripe(&code, len);
            strips[wrong][len - 1] ^= 1;
            assert_eq!(code.locate(&present(&strips, 0)), Located::Wrong(wrong));
        }
    }

    #[test]
    fn copies_are_compared_with_the_first_of_them() {
        let code = Code::new(Matrix::Copies, 1, 2).unwrap();
        let mut strips = stripe(&code, 64);
        strips[2][9] ^= 1;
        assert_eq!(code.locate(&present(&strips, 0)), Located::Wrong(2));
        assert_eq!(code.locate(&present(&strips, 0b1)), Located::Ambiguous);
        assert_eq!(code.locate(&present(&strips, 0b11)), Located::Agreed);
    }
}
