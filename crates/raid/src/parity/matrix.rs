//! The coefficients of a code, and the matrix inversion for decoders.
//!
//! Both matrices are MDS: every square part of them can be inverted, so any `m` strips can be lost.
//!
//! * [`Matrix::Powers`]: the rows `1`, `x`, `x²` over distinct `x = 2^i`. Every part of up to three
//!   rows is a Vandermonde matrix, or one with its rows or columns scaled. (For `x` and `x²` alone:
//!   squares are distinct too.) A fourth row would break that.
//! * [`Matrix::Cauchy`]: `1 / (x_j + y_i)` over distinct x and y; scaling columns keeps parts
//!   invertible.

use super::gf::{inverse, multiply, power};

/// The matrix of a code's coefficients. The superblock stores its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Matrix {
    /// Copies: `k = 1`, every coefficient 1. Mirrors, and `m = 0`.
    Copies = 0,
    /// Rows `1`, `g^i`, `g^2i` with g = 2: RAID 5, 6 and 7.3 (`m` ≤ 3).
    Powers = 1,
    /// Cauchy, normalised to a first row of ones: any `k + m` ≤ 64.
    Cauchy = 2,
}

impl Matrix {
    /// The matrix with this number.
    pub fn from_number(number: u8) -> Option<Matrix> {
        [Matrix::Copies, Matrix::Powers, Matrix::Cauchy].into_iter().find(|matrix| *matrix as u8 == number)
    }

    /// Whether `parity` strips by this matrix can restore any set of that many strips of a stripe.
    pub(super) fn fits(self, data: usize, parity: usize) -> bool {
        let matrix_fits = match self {
            Matrix::Copies => data == 1 || parity == 0,
            Matrix::Powers => (1..=3).contains(&parity),
            Matrix::Cauchy => parity > 0,
        };
        matrix_fits && data > 0 && data.saturating_add(parity) <= 64
    }

    /// The coefficient of data strip `i` of `data` in parity `j`.
    pub(super) fn coefficient(self, data: usize, j: usize, i: usize) -> u8 {
        match self {
            Matrix::Copies => 1,
            Matrix::Powers => power(2, (i * j) as u32),
            // 1 / (x_j + y_i) with x from k on and y below it; each column is divided by its first
            // row.
            Matrix::Cauchy => multiply((data ^ i) as u8, inverse(((data + j) ^ i) as u8)),
        }
    }
}

/// Inverts a square matrix of `size` rows by Gauss and Jordan; `None` when it is singular.
pub(super) fn invert(mut matrix: Vec<u8>, size: usize) -> Option<Vec<u8>> {
    assert_eq!(matrix.len(), size * size);
    let mut inverted = vec![0; size * size];
    (0..size).for_each(|i| inverted[i * size + i] = 1);
    for column in 0..size {
        let pivot = (column..size).find(|row| matrix[row * size + column] != 0)?;
        let scale = inverse(matrix[pivot * size + column]);
        for half in [&mut matrix, &mut inverted] {
            (0..size).for_each(|i| half.swap(pivot * size + i, column * size + i));
            (0..size).for_each(|i| half[column * size + i] = multiply(half[column * size + i], scale));
        }
        for row in (0..size).filter(|row| *row != column) {
            let factor = matrix[row * size + column];
            for half in [&mut matrix, &mut inverted] {
                (0..size).for_each(|i| half[row * size + i] ^= multiply(factor, half[column * size + i]));
            }
        }
    }
    Some(inverted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(matrix: Matrix, data: usize, rows: &[usize], columns: &[usize]) -> Vec<u8> {
        rows.iter().flat_map(|j| columns.iter().map(|i| matrix.coefficient(data, *j, *i))).collect()
    }

    /// Every set of `size` numbers below `end`.
    fn choose(end: usize, size: usize) -> Vec<Vec<usize>> {
        if size == 0 {
            return vec![Vec::new()];
        }
        let with_last = |last: usize| {
            choose(last, size - 1).into_iter().map(move |mut set| {
                set.push(last);
                set
            })
        };
        (size - 1..end).flat_map(with_last).collect()
    }

    fn assert_mds(matrix: Matrix, data: usize, parity: usize, largest_part: usize) {
        for size in 1..=parity.min(data).min(largest_part) {
            for rows in choose(parity, size) {
                for columns in choose(data, size) {
                    let singular = invert(part(matrix, data, &rows, &columns), size).is_none();
                    assert!(!singular, "{matrix:?} {data}+{parity}: rows {rows:?}, columns {columns:?}");
                }
            }
        }
    }

    #[test]
    fn any_strips_of_up_to_three_parities_can_be_lost_up_to_64_members() {
        // A narrower stripe has a part of the same matrix.
        assert_mds(Matrix::Powers, 61, 3, 3);
        assert_mds(Matrix::Powers, 62, 2, 2);
        assert_mds(Matrix::Powers, 63, 1, 1);
    }

    #[test]
    fn every_part_of_a_cauchy_matrix_can_be_inverted() {
        for (data, parity) in [(1, 4), (2, 4), (4, 4), (8, 4), (6, 6), (3, 9), (10, 4)] {
            assert_mds(Matrix::Cauchy, data, parity, 16);
        }
        for (data, parity) in [(61, 3), (40, 4), (1, 63), (63, 1), (16, 8)] {
            assert_mds(Matrix::Cauchy, data, parity, 2);
            let all: Vec<usize> = (0..data.min(parity)).collect();
            assert!(invert(part(Matrix::Cauchy, data, &all, &all), all.len()).is_some());
        }
    }

    #[test]
    fn the_first_parity_is_a_plain_sum() {
        for (matrix, data, parity) in
            [(Matrix::Powers, 61, 3), (Matrix::Cauchy, 60, 4), (Matrix::Copies, 1, 5)]
        {
            assert!(matrix.fits(data, parity));
            assert!((0..data).all(|i| matrix.coefficient(data, 0, i) == 1));
        }
    }

    #[test]
    fn an_inverse_times_its_matrix_is_one() {
        let matrix = part(Matrix::Cauchy, 8, &[0, 2, 3, 5], &[1, 2, 6, 7]);
        let inverted = invert(matrix.clone(), 4).unwrap();
        for row in 0..4 {
            for column in 0..4 {
                let cell =
                    (0..4).fold(0, |sum, i| sum ^ multiply(matrix[row * 4 + i], inverted[i * 4 + column]));
                assert_eq!(cell, u8::from(row == column));
            }
        }
        assert_eq!(invert(vec![1, 2, 2, 4], 2), None);
    }
}
