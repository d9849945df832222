//! Decoders compute lost strips from other strips.
//!
//! With `e` unavailable data strips, `e` available parities give `e` equations. The inverse of
//! their coefficients gives each unavailable data strip as a sum of parities and of available data.
//! A lost parity is a sum of data strips, with these sums substituted for the unavailable ones.

use super::gf::multiply;
use super::kernels::{Job, Kernels};
use super::matrix::invert;
use super::{Code, TooManyLost};

/// Computes lost strips from others.
#[derive(Clone, Debug)]
pub struct Decoder {
    sources: Vec<usize>,
    /// Row by row: lost strip `l` of source `s` at `l * sources + s`.
    coefficients: Vec<u8>,
}

impl Decoder {
    /// The source strips that the decoder reads, ascending; data strips come first.
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// The coefficient of source `source` in lost strip `lost`, both as positions in their order.
    pub fn coefficient(&self, lost: usize, source: usize) -> u8 {
        self.coefficients[lost * self.sources.len() + source]
    }

    /// Computes the lost strips, in the order passed to [`Code::decoder`], from the sources in the
    /// order of [`Decoder::sources`]. All have one length.
    ///
    /// # Panics
    /// If the number of strips or their lengths differ.
    pub fn decode(&self, sources: &[&[u8]], lost: &mut [&mut [u8]]) {
        assert_eq!(sources.len(), self.sources.len(), "the decoder's sources");
        let job = Job { coefficients: &self.coefficients, is_powers: false, is_added: false };
        Kernels::chosen().run(&job, sources.iter().copied(), lost.iter_mut().map(|lost| &mut **lost));
    }

    /// See [`Code::decoder`].
    pub(super) fn new(code: &Code, lost: &[usize], available: u64) -> Result<Decoder, TooManyLost> {
        let (k, strips) = (code.data, code.data + code.parity);
        assert!(lost.iter().all(|strip| *strip < strips), "strips {lost:?} of {strips}");
        let has = |strip: usize| available >> strip & 1 != 0 && !lost.contains(&strip);
        let unknown: Vec<usize> = (0..k).filter(|i| !has(*i)).collect();
        let parities: Vec<usize> = (0..code.parity).filter(|j| has(k + j)).take(unknown.len()).collect();
        if parities.len() < unknown.len() {
            return Err(TooManyLost);
        }
        let size = unknown.len();
        let part = parities.iter().flat_map(|j| unknown.iter().map(|i| code.coefficient(*j, *i))).collect();
        let inverse = invert(part, size).expect("every square part of the matrix can be inverted");

        let sources: Vec<usize> = (0..k).filter(|i| has(*i)).chain(parities.iter().map(|j| k + j)).collect();
        // The unknown data strip `u` as a sum of the sources.
        let data_row = |u: usize| -> Vec<u8> {
            let weight = |p: usize| inverse[u * size + p];
            let of_data = |i: usize| {
                (0..size).fold(0, |sum, p| sum ^ multiply(weight(p), code.coefficient(parities[p], i)))
            };
            let data = sources[..k - size].iter().map(|i| of_data(*i));
            data.chain((0..size).map(weight)).collect()
        };
        let rows: Vec<Vec<u8>> = (0..size).map(data_row).collect();
        let parity_row = |j: usize| -> Vec<u8> {
            let mut row: Vec<u8> = sources[..k - size].iter().map(|i| code.coefficient(j, *i)).collect();
            row.resize(k, 0);
            for (u, i) in unknown.iter().enumerate() {
                let factor = code.coefficient(j, *i);
                row.iter_mut().zip(&rows[u]).for_each(|(cell, other)| *cell ^= multiply(factor, *other));
            }
            row
        };
        let lost_rows: Vec<Vec<u8>> = lost
            .iter()
            .map(|strip| match unknown.iter().position(|i| i == strip) {
                Some(u) => rows[u].clone(),
                None => parity_row(strip - k),
            })
            .collect();
        Ok(Decoder::of_needed(sources, &lost_rows))
    }

    /// Drops sources that no row needs.
    fn of_needed(sources: Vec<usize>, rows: &[Vec<u8>]) -> Decoder {
        let needed: Vec<usize> = (0..sources.len()).filter(|s| rows.iter().any(|row| row[*s] != 0)).collect();
        Decoder {
            coefficients: rows.iter().flat_map(|row| needed.iter().map(|s| row[*s])).collect(),
            sources: needed.into_iter().map(|s| sources[s]).collect(),
        }
    }
}
