//! Parity: sums of data strips over GF(2^8), and the reconstruction of lost strips.
//!
//! A stripe has `k` data strips and `m` parity strips. Parity `j` is `Σ c_ji · D_i` over GF(2^8)
//! with the polynomial 0x11d. [`Matrix`] defines the coefficients; any `m` strips of a stripe can
//! be lost.
//!
//! Strips are numbered as in [`crate::geometry`]: data `0..k`, parity `k..k+m`.

mod decoder;
mod gf;
mod kernels;
mod locate;
mod matrix;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;
use kernels::{Job, Kernels};

pub use decoder::Decoder;
pub use locate::{Located, Present};
pub use matrix::Matrix;

/// Why a code does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no code of {data} data and {parity} parity strips with matrix {matrix:?}")]
pub struct CodeError {
    matrix: Matrix,
    data: usize,
    parity: usize,
}

/// More strips are missing than the parities can reconstruct.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many strips are missing")]
pub struct TooManyLost;

/// The instructions that compute parity on this processor, such as `avx2`.
pub fn instructions() -> &'static str {
    Kernels::chosen().name
}

/// Selects other instructions than the processor's best, for comparisons. Returns false if the
/// processor lacks them, or parity was already computed with others.
pub fn use_instructions(name: &str) -> bool {
    Kernels::choose(name)
}

/// Bytes of the strips of a stripe, of one length.
type Slices<'a> = ArrayVec<&'a [u8], MAX_STRIPS>;
/// As [`Slices`], writable.
type SlicesMut<'a> = ArrayVec<&'a mut [u8], MAX_STRIPS>;

/// Most strips of a stripe.
const MAX_STRIPS: usize = 64;
/// Most coefficients of a code: of 32 data and 32 parity strips.
const MAX_COEFFICIENTS: usize = 32 * 32;

/// A code: computes the parity of a stripe, and decoders.
#[derive(Clone, Debug)]
pub struct Code {
    matrix: Matrix,
    data: usize,
    parity: usize,
    /// Row by row: parity `j` of data `i` at `j * data + i`.
    coefficients: Vec<u8>,
}

impl Code {
    /// The code of `data` and `parity` strips.
    ///
    /// # Errors
    /// If the matrix cannot protect such a stripe.
    pub fn new(matrix: Matrix, data: usize, parity: usize) -> Result<Code, CodeError> {
        if !matrix.fits(data, parity) {
            return Err(CodeError { matrix, data, parity });
        }
        let cells = (0..parity).flat_map(|j| (0..data).map(move |i| matrix.coefficient(data, j, i)));
        Ok(Code { matrix, data, parity, coefficients: cells.collect() })
    }

    /// The coefficient of data strip `data` in parity `parity`.
    #[inline]
    pub fn coefficient(&self, parity: usize, data: usize) -> u8 {
        self.coefficients[parity * self.data + data]
    }

    /// Computes all parity strips (`parity[j]`) from all data strips (`data[i]`), all of one
    /// length.
    ///
    /// # Panics
    /// If the number of strips or their lengths differ.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert!(data.len() == self.data && parity.len() == self.parity);
        let job = Job {
            coefficients: &self.coefficients,
            is_powers: self.matrix == Matrix::Powers,
            is_added: false,
        };
        Kernels::chosen().run(&job, data.iter().copied(), parity.iter_mut().map(|parity| &mut **parity));
    }

    /// Sets each parity `(j, bytes)` to the sum of the given data strips `(i, bytes)` alone: a
    /// partial parity.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn encode_some(&self, data: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])]) {
        self.add(data, parity, false);
    }

    /// Adds the given data strips `(i, bytes)` to each parity `(j, bytes)`. Addition and
    /// subtraction are the same.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn update(&self, changes: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])]) {
        self.add(changes, parity, true);
    }

    fn add(&self, data: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])], is_added: bool) {
        let mut coefficients = ArrayVec::<u8, MAX_COEFFICIENTS>::new();
        for (j, _) in parity.iter() {
            for (i, _) in data {
                coefficients.push(self.coefficient(*j, *i));
            }
        }
        let job = Job { coefficients: &coefficients, is_powers: false, is_added };
        let targets = parity.iter_mut().map(|(_, bytes)| &mut **bytes);
        Kernels::chosen().run(&job, data.iter().map(|(_, bytes)| *bytes), targets);
    }

    /// The decoder of the strips in `lost` from those in `available` (bit `s` for strip `s`; a
    /// strip in `lost` is not available). It prefers data strips to parity, and uses as few strips
    /// as possible.
    ///
    /// # Errors
    /// If fewer than `k` strips are available.
    ///
    /// # Panics
    /// If a lost strip is not one of the stripe.
    pub fn decoder(&self, lost: &[usize], available: u64) -> Result<Decoder, TooManyLost> {
        Decoder::new(self, lost, available)
    }
}
