//! Comparing a strip's sources with spare parity before the strip is computed from them.
//!
//! A lost strip takes `k` others. Where more can be read, each further one is a check: one check shows that a strip is
//! wrong, two name it. The strip without which all others agree is the wrong one, and is written anew. Where that is
//! unknown, the lost strip is not computed: either result could be the wrong one.

use super::owner::{Owner, Scratch};
use super::write::{Stop, decode, ones};
use crate::config::ROW_BYTES;
use crate::stripe::plan::Strips;
use block::IoError;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// How many of the spare strips are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Checks {
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

impl Owner {
    /// Computes a part of a strip from others into the scratch, after comparing them with spare parity. The wrong one is
    /// written anew where it can be named. The caller holds the rows alone.
    ///
    /// # Errors
    /// [`IoError::Medium`] when strips contradict each other and the wrong one is unknown. Parity follows data then,
    /// where all data can be read.
    pub(super) async fn compute_checked(
        &self,
        scratch: &mut Scratch,
        place: Place,
        strip: usize,
        strips: &Strips,
        unreadable: &mut u64,
        checks: Checks,
    ) -> Result<(), Stop> {
        let Place { stripe, offset, len } = place;
        let others = strips.readable & !(1 << strip);
        let decoder = self.decoder(1 << strip, others)?;
        let sources = decoder.sources().iter().fold(0, |mask, source| mask | 1 << source);
        // Copies of a mirror have no parity, and after a crash parity may be old.
        let is_checked = strips.data > 1 && strips.is_synced;
        let mut spares = if is_checked { others & !sources } else { 0 };
        if checks == Checks::One {
            spares &= spares.wrapping_neg();
        }
        self.read_strips(scratch, stripe, offset, len, sources | spares, unreadable).await?;
        if !self.agree(scratch, sources, spares, 0..len as usize)? {
            self.read_strips(scratch, stripe, offset, len, others, unreadable).await?;
            self.settle_contradiction(scratch, place, strip, strips, others).await?;
        }
        let target = scratch.strip_mut(strip);
        if target.is_none() {
            *target = Some(self.buffer(len).await);
        }
        decode(&decoder, scratch, 1 << strip);
        Ok(())
    }

    /// Mends the wrong strips in the scratch and on their members, row by row.
    async fn settle_contradiction(
        &self,
        scratch: &mut Scratch,
        place: Place,
        strip: usize,
        strips: &Strips,
        others: u64,
    ) -> Result<(), Stop> {
        let Place { stripe, offset, len } = place;
        let array = &self.shared.config.name;
        let (mut mended, mut unknown) = (0u64, None);
        for start in (0..len as usize).step_by(ROW_BYTES as usize) {
            let row = start..(start + ROW_BYTES as usize).min(len as usize);
            let base = lowest(others, strips.data);
            if self.agree(scratch, base, others & !base, row.clone())? {
                continue;
            }
            self.shared.counters.contradictions.fetch_add(1, Ordering::Relaxed);
            match self.wrong_strip(scratch, strips, others, row.clone())? {
                Some(wrong) => {
                    self.recompute(scratch, wrong, lowest(others & !(1 << wrong), strips.data), row)?;
                    mended |= 1 << wrong;
                }
                None => unknown = unknown.or(Some(offset + start as u32)),
            }
        }
        for wrong in ones(mended) {
            let slot = self.shared.config.geometry.member(stripe, wrong);
            tracing::error!(array, stripe, offset, slot, "wrong strip {wrong} is computed from the others");
            if !self.shared.is_read_only {
                self.repair(scratch, stripe, wrong, offset).await?;
            }
        }
        let Some(offset) = unknown else { return Ok(()) };
        let has_all_data = strips.data_mask() & !others == 0;
        tracing::error!(array, stripe, offset, "strips contradict each other and the wrong one is unknown");
        if strip >= strips.data && has_all_data { Ok(()) } else { Err(Stop::Error(IoError::Medium)) }
    }

    /// The one strip without which the others agree.
    fn wrong_strip(
        &self,
        scratch: &Scratch,
        strips: &Strips,
        others: u64,
        row: Range<usize>,
    ) -> Result<Option<usize>, IoError> {
        if (others.count_ones() as usize) < strips.data + 2 {
            return Ok(None);
        }
        let mut found = None;
        for suspect in ones(others) {
            let rest = others & !(1 << suspect);
            let base = lowest(rest, strips.data);
            if self.agree(scratch, base, rest & !base, row.clone())? {
                if found.is_some() {
                    return Ok(None);
                }
                found = Some(suspect);
            }
        }
        Ok(found)
    }

    /// Whether some bytes of the strips in `checks` are those that the strips in `base` make.
    fn agree(&self, scratch: &Scratch, base: u64, checks: u64, bytes: Range<usize>) -> Result<bool, IoError> {
        let mut computed = [0; ROW_BYTES as usize];
        for check in ones(checks) {
            for start in bytes.clone().step_by(ROW_BYTES as usize) {
                let range = start..bytes.end.min(start + ROW_BYTES as usize);
                let computed = &mut computed[..range.len()];
                self.compute_row(scratch, check, base, range.clone(), computed)?;
                if computed != &scratch.bytes(check)[range] {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Makes some bytes of a strip what the strips in `base` say.
    fn recompute(
        &self,
        scratch: &mut Scratch,
        strip: usize,
        base: u64,
        row: Range<usize>,
    ) -> Result<(), IoError> {
        let mut computed = [0; ROW_BYTES as usize];
        let computed = &mut computed[..row.len()];
        self.compute_row(scratch, strip, base, row.clone(), computed)?;
        scratch.strip_mut(strip).as_mut().expect("just read").as_mut_slice()[row].copy_from_slice(computed);
        Ok(())
    }

    fn compute_row(
        &self,
        scratch: &Scratch,
        strip: usize,
        base: u64,
        row: Range<usize>,
        target: &mut [u8],
    ) -> Result<(), IoError> {
        let decoder = self.decoder(1 << strip, base)?;
        let sources: arrayvec::ArrayVec<&[u8], { crate::config::MAX_GROUP_MEMBERS }> =
            decoder.sources().iter().map(|source| &scratch.bytes(*source)[row.clone()]).collect();
        decoder.decode(&sources, &mut [target]);
        Ok(())
    }
}

/// The lowest `count` strips of a mask.
fn lowest(mask: u64, count: usize) -> u64 {
    ones(mask).take(count).fold(0, |lowest, strip| lowest | 1 << strip)
}
