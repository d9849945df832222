//! Comparing strips with spare parity before anything is computed from them.
//!
//! A lost strip takes `k` others. Where more can be read, each further one is a check: one check
//! shows that a strip is wrong, two name it. The strip without which all others agree is the wrong
//! one, and is rewritten. Where that is unknown, nothing is computed from a guess: the caller gets
//! the rows and decides.

use super::contradictions::Found;
use super::scratch::{Scratch, decode};
use super::stop::Stop;
use super::stripe_owner::StripeOwner;
use crate::config::{MAX_GROUP_MEMBERS, ROW_BYTES};
use crate::parity::Located;
use crate::stripe::plan::{Strips, lowest, ones};
use arrayvec::ArrayVec;
use block::IoError;
use std::ops::Range;

/// How many of the spare strips are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Checks {
    /// None: the strips are used as they are.
    None,
    /// One, which costs a read: a single wrong strip never agrees with it.
    One,
    /// All.
    All,
}

/// The same bytes of every strip of a stripe.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub stripe: u64,
    /// First byte in each strip.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Strips that are read and compared.
#[derive(Clone, Copy)]
pub(super) struct Compared {
    /// Strips that may be read.
    pub readable: u64,
    /// Strips that the caller writes anyway: they are not mended on their members.
    pub replaced: u64,
    /// How many spare strips are compared.
    pub checks: Checks,
}

impl StripeOwner {
    /// Computes a part of a strip from others into the scratch, after comparing them with spare
    /// parity. The caller holds the rows alone.
    ///
    /// # Errors
    /// [`IoError::Medium`] when strips contradict each other and the wrong one is unknown. Parity
    /// follows data then, where all data can be read.
    pub(super) async fn compute(
        &self,
        scratch: &mut Scratch,
        place: Place,
        strip: usize,
        strips: &Strips,
        unreadable: &mut u64,
        checks: Checks,
    ) -> Result<(), Stop> {
        let readable = strips.readable & !(1 << strip);
        let decoder = self.decoder(1 << strip, readable)?;
        let compared = Compared { readable, replaced: 0, checks };
        let unknown = self.read_compared(scratch, place, strips, compared, unreadable).await?;
        let has_all_data = strips.data_mask() & !readable == 0;
        let follows_data = strip >= strips.data && has_all_data;
        if !unknown.is_empty() && !follows_data {
            return Err(Stop::Error(IoError::Medium));
        }
        let target = scratch.strip_mut(strip);
        if target.is_none() {
            *target = Some(self.buffer(place.len).await);
        }
        decode(&decoder, scratch, 1 << strip);
        Ok(())
    }

    /// Reads the first `k` readable strips and compares them with spare ones. A wrong strip that
    /// can be named is mended in the scratch and on its member. Returns the rows whose wrong strip
    /// is unknown, as bytes of the place. All readable strips have been read then.
    pub(super) async fn read_compared(
        &self,
        scratch: &mut Scratch,
        place: Place,
        strips: &Strips,
        compared: Compared,
        unreadable: &mut u64,
    ) -> Result<Vec<Range<usize>>, Stop> {
        let Place { stripe, offset, len } = place;
        let base = lowest(compared.readable, strips.data);
        // Copies of a mirror have no parity, and after a crash parity may be old.
        let is_comparable = strips.data > 1 && strips.is_synced;
        let spares = match compared.checks {
            Checks::All if is_comparable => compared.readable & !base,
            Checks::One if is_comparable => lowest(compared.readable & !base, 1),
            _ => 0,
        };
        self.read_strips(scratch, stripe, offset, len, base | spares, unreadable).await?;
        if self.agree(scratch, base, spares, 0..len as usize)? {
            return Ok(Vec::new());
        }
        self.read_strips(scratch, stripe, offset, len, compared.readable, unreadable).await?;
        self.settle_contradictions(scratch, place, strips, compared).await
    }

    /// Mends the wrong strips row by row. Returns the rows whose wrong strip is unknown.
    async fn settle_contradictions(
        &self,
        scratch: &mut Scratch,
        place: Place,
        strips: &Strips,
        compared: Compared,
    ) -> Result<Vec<Range<usize>>, Stop> {
        let Place { stripe, offset, len } = place;
        let (mut first, mut rows, mut mended, mut unknown) = (None, 0, 0u64, Vec::new());
        for row in rows_of(len) {
            let located = self.shared.code.locate(&scratch.present(compared.readable, row.clone()));
            if located == Located::Agreed {
                continue;
            }
            (first, rows) = (first.or(Some(offset + row.start as u32)), rows + 1);
            match located {
                Located::Wrong(wrong) => {
                    let base = lowest(compared.readable & !(1 << wrong), strips.data);
                    self.recompute(scratch, wrong, base, row)?;
                    mended |= 1 << wrong;
                }
                _ => unknown.push(row),
            }
        }
        if let Some(offset) = first {
            let unknown = unknown.len() as u64;
            let found = Found { stripe, offset, rows, mended, unknown };
            self.shared.common.counters.contradictions.report(&found, &self.shared.config);
        }
        if !self.shared.common.is_read_only {
            for wrong in ones(mended & !compared.replaced) {
                self.repair(scratch, stripe, wrong, offset).await?;
            }
        }
        Ok(unknown)
    }

    /// Whether some bytes of the strips in `spares` are those that the strips in `base` make. All
    /// are in the scratch.
    pub(super) fn agree(
        &self,
        scratch: &Scratch,
        base: u64,
        spares: u64,
        bytes: Range<usize>,
    ) -> Result<bool, IoError> {
        if spares == 0 {
            return Ok(true);
        }
        let decoder = self.decoder(spares, base)?;
        let list: ArrayVec<usize, MAX_GROUP_MEMBERS> = ones(spares).collect();
        Ok(decoder.agrees(&list, &scratch.present(base | spares, bytes)))
    }

    /// Makes some bytes of a strip in the scratch, at most a row, what the strips in `base` say.
    pub(super) fn recompute(
        &self,
        scratch: &mut Scratch,
        strip: usize,
        base: u64,
        row: Range<usize>,
    ) -> Result<(), IoError> {
        let mut computed = [0; ROW_BYTES as usize];
        let computed = &mut computed[..row.len()];
        {
            let decoder = self.decoder(1 << strip, base)?;
            let sources: ArrayVec<&[u8], MAX_GROUP_MEMBERS> =
                decoder.sources().iter().map(|source| &scratch.bytes(*source)[row.clone()]).collect();
            decoder.decode(&sources, &mut [&mut *computed]);
        }
        scratch.strip_mut(strip).as_mut().expect("just read").as_mut_slice()[row].copy_from_slice(computed);
        Ok(())
    }
}

/// The rows of `len` bytes of a strip.
pub(super) fn rows_of(len: u32) -> impl Iterator<Item = Range<usize>> {
    let (len, row) = (len as usize, ROW_BYTES as usize);
    (0..len).step_by(row).map(move |start| start..len.min(start + row))
}

#[cfg(test)]
mod tests;
