//! Parity: sums of data strips over GF(2^8), and what they bring back.
//!
//! A stripe has `k` data strips and `m` parity strips. Parity `j` is `Σ c_ji · D_i` over GF(2^8) with the
//! polynomial 0x11d. [`Matrix`] says what the coefficients are; any `m` strips of a stripe can be lost.
//!
//! Strips are numbered as in [`crate::geometry`]: data `0..k`, parity `k..k+m`.

mod decoder;
mod gf;
mod matrix;
#[cfg(test)]
mod tests;

pub use decoder::Decoder;
pub use matrix::Matrix;

/// Why there is no such code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no code of {data} data and {parity} parity strips with matrix {matrix:?}")]
pub struct CodeError {
    matrix: Matrix,
    data: usize,
    parity: usize,
}

/// More strips are missing than parity can bring back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many strips are missing")]
pub struct TooManyLost;

/// A code: how parity of a stripe is computed.
#[derive(Clone, Debug)]
pub struct Code {
    data: usize,
    parity: usize,
    /// Row by row: parity `j` of data `i` at `j * data + i`.
    coefficients: Vec<u8>,
}

impl Code {
    /// The code of `data` and `parity` strips.
    ///
    /// # Errors
    /// When the matrix cannot protect such a stripe.
    pub fn new(matrix: Matrix, data: usize, parity: usize) -> Result<Code, CodeError> {
        if !matrix.fits(data, parity) {
            return Err(CodeError { matrix, data, parity });
        }
        let cells = (0..parity).flat_map(|j| (0..data).map(move |i| matrix.coefficient(data, j, i)));
        Ok(Code { data, parity, coefficients: cells.collect() })
    }

    /// What data strip `data` is multiplied with in parity `parity`.
    #[inline]
    pub fn coefficient(&self, parity: usize, data: usize) -> u8 {
        self.coefficients[parity * self.data + data]
    }

    /// Computes all parity strips (`parity[j]`) from all data strips (`data[i]`), all of one length.
    ///
    /// # Panics
    /// When the number of strips or their lengths differ.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert!(data.len() == self.data && parity.len() == self.parity);
        combine(&self.coefficients, data, parity);
    }

    /// Sets each parity `(j, bytes)` to the sum of the given data strips `(i, bytes)` alone: a partial parity.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn encode_some(&self, data: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])]) {
        parity.iter_mut().for_each(|(_, target)| target.fill(0));
        self.update(data, parity);
    }

    /// Adds the given data strips `(i, bytes)` to each parity `(j, bytes)`. Adding is taking away.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn update(&self, changes: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])]) {
        for (j, target) in parity {
            for (i, source) in changes {
                accumulate(target, self.coefficient(*j, *i), source);
            }
        }
    }

    /// How the strips in `lost` are computed from those in `available` (bit `s` for strip `s`; a strip in `lost` is
    /// not available). Data strips serve before parity, and as few strips as do.
    ///
    /// # Errors
    /// When fewer than `k` strips are available.
    ///
    /// # Panics
    /// When a lost strip is none of the stripe's.
    pub fn decoder(&self, lost: &[usize], available: u64) -> Result<Decoder, TooManyLost> {
        Decoder::new(self, lost, available)
    }
}

/// Sets each target to the sum of the sources by its row of coefficients.
fn combine(coefficients: &[u8], sources: &[&[u8]], targets: &mut [&mut [u8]]) {
    for (t, target) in targets.iter_mut().enumerate() {
        target.fill(0);
        for (s, source) in sources.iter().enumerate() {
            accumulate(target, coefficients[t * sources.len() + s], source);
        }
    }
}

/// `target ^= coefficient · source`.
fn accumulate(target: &mut [u8], coefficient: u8, source: &[u8]) {
    assert_eq!(target.len(), source.len());
    let table = &gf::NIBBLES.0[coefficient as usize];
    let product = |s: u8| table[s as usize & 15] ^ table[16 + (s as usize >> 4)];
    target.iter_mut().zip(source).for_each(|(t, s)| *t ^= product(*s));
}
