//! Parity: sums of data strips over GF(2^8), and what they bring back.
//!
//! A stripe has `k` data strips and `m` parity strips. Parity `j` is `Σ c_ji · D_i` over GF(2^8) with the
//! polynomial 0x11d. [`Matrix`] says what the coefficients are; any `m` strips of a stripe can be lost.
//!
//! Strips are numbered as in [`crate::geometry`]: data `0..k`, parity `k..k+m`.

/// Where the coefficients come from. Its number stands in the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Matrix {
    /// Copies: `k = 1`, every coefficient 1. Mirrors, and `m = 0`.
    Copies = 0,
    /// Rows `1`, `g^i`, `g^2i` with g = 2: RAID 5, 6 and 7.3 (`m` ≤ 3, `k` ≤ 255).
    Powers = 1,
    /// Cauchy, normalised to a first row of ones: any `k + m` ≤ 64.
    Cauchy = 2,
}

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

impl Matrix {
    /// The matrix of that number.
    pub fn from_number(number: u8) -> Option<Matrix> {
        [Matrix::Copies, Matrix::Powers, Matrix::Cauchy].into_iter().find(|matrix| *matrix as u8 == number)
    }
}

impl Code {
    /// The code of `data` and `parity` strips.
    ///
    /// # Errors
    /// When the matrix cannot protect such a stripe.
    pub fn new(matrix: Matrix, data: usize, parity: usize) -> Result<Code, CodeError> {
        let fits = match matrix {
            Matrix::Copies => data == 1 || parity == 0,
            Matrix::Powers => (1..=3).contains(&parity) && data <= 255,
            Matrix::Cauchy => parity > 0 && data + parity <= 64,
        };
        if !fits || data == 0 {
            return Err(CodeError { matrix, data, parity });
        }
        let coefficient = |j: usize, i: usize| match matrix {
            Matrix::Copies => 1,
            Matrix::Powers => power(2, (i * j) as u32),
            // 1 / (x_j + y_i) with x from k on and y below it, each column divided by its first row.
            Matrix::Cauchy => multiply((data ^ i) as u8, inverse(((data + j) ^ i) as u8)),
        };
        let coefficients = (0..parity).flat_map(|j| (0..data).map(move |i| coefficient(j, i))).collect();
        Ok(Code { data, parity, coefficients })
    }

    /// What data strip `data` is multiplied with in parity `parity`.
    #[inline]
    pub fn coefficient(&self, parity: usize, data: usize) -> u8 {
        self.coefficients[parity * self.data + data]
    }

    /// Computes all parity strips (`parity[j]`) from all data strips (`data[i]`), all of one length.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert!(data.len() == self.data && parity.len() == self.parity);
        for (j, target) in parity.iter_mut().enumerate() {
            target.fill(0);
            for (i, source) in data.iter().enumerate() {
                accumulate(target, self.coefficient(j, i), source);
            }
        }
    }

    /// Sets each parity `(j, bytes)` to the sum of the given data strips `(i, bytes)` alone: a partial parity.
    pub fn encode_some(&self, data: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])]) {
        parity.iter_mut().for_each(|(_, target)| target.fill(0));
        self.update(data, parity);
    }

    /// Adds the given data strips `(i, bytes)` to each parity `(j, bytes)`. Adding is taking away.
    pub fn update(&self, changes: &[(usize, &[u8])], parity: &mut [(usize, &mut [u8])]) {
        for (j, target) in parity {
            for (i, source) in changes {
                accumulate(target, self.coefficient(*j, *i), source);
            }
        }
    }

    /// How the strips in `lost` are computed from those in `available` (bit `s` for strip `s`).
    ///
    /// # Errors
    /// When fewer than `k` strips are available.
    pub fn decoder(&self, lost: &[usize], available: u64) -> Result<Decoder, TooManyLost> {
        let _ = (lost, available);
        todo!()
    }
}

/// How lost strips are computed from others.
#[derive(Clone, Debug)]
pub struct Decoder {
    sources: Vec<usize>,
    /// Row by row: lost strip `l` of source `s` at `l * sources + s`.
    coefficients: Vec<u8>,
}

impl Decoder {
    /// The strips that are needed, ascending; data strips come first.
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// Computes the lost strips, in the order in which [`Code::decoder`] was told of them, from the sources in the
    /// order of [`Decoder::sources`]. All have one length.
    pub fn decode(&self, sources: &[&[u8]], lost: &mut [&mut [u8]]) {
        let _ = (sources, lost, &self.coefficients);
        todo!()
    }
}

/// `target ^= coefficient · source`.
fn accumulate(target: &mut [u8], coefficient: u8, source: &[u8]) {
    assert_eq!(target.len(), source.len());
    target.iter_mut().zip(source).for_each(|(t, s)| *t ^= multiply(coefficient, *s));
}

/// The product in GF(2^8), polynomial 0x11d.
fn multiply(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a = (a << 1) ^ if a & 0x80 != 0 { 0x1d } else { 0 };
        b >>= 1;
    }
    product
}

fn power(base: u8, exponent: u32) -> u8 {
    (0..exponent % 255).fold(1, |product, _| multiply(product, base))
}

fn inverse(a: u8) -> u8 {
    power(a, 254)
}
