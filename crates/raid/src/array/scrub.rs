//! Comparing parity with data, and telling which strip is wrong where parity says enough.
//!
//! What parity found and parity expected differ by is the *syndrome*. One wrong parity strip shows in its own syndrome
//! alone; one wrong data strip shows in all, each the error times the strip's coefficient. With two parities or more
//! that tells the one wrong strip of a row from the others.

use super::owner::{Owner, Scratch};
use super::remote::LocalFuture;
use super::write::{Stop, ones, strips_of};
use crate::config::{MAX_PARITY, ROW_BYTES};
use crate::mutant::{self, Mutant};
use crate::stripe::plan::Strips;
use arrayvec::ArrayVec;
use block::IoError;
use reactor::Buffer;
use std::rc::Rc;

/// What a scrub of a stripe found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubResult {
    /// Parity strips that do not fit the data, as a mask of strips.
    pub mismatches: u64,
    /// Rows in which something does not fit.
    pub rows: u32,
    /// Strips that are wrong, as far as parity tells.
    pub named: u64,
    /// Strips that could not be read and were brought back.
    pub unreadable: u32,
    /// Nothing could be compared: data is missing.
    pub is_incomplete: bool,
}

impl Owner {
    /// Compares parity with data in a stripe, and makes it fit if told: the strip that is wrong is mended where parity
    /// tells which one, otherwise parity is made to fit the data.
    ///
    /// # Errors
    /// When the stripe cannot be read or written.
    pub async fn scrub(&self, stripe: u64, is_repairing: bool) -> Result<ScrubResult, IoError> {
        let inside = self.gate.enter().await;
        if !self.owns(stripe) {
            drop(inside);
            let work = move |owner: Rc<Owner>| -> LocalFuture<Result<ScrubResult, IoError>> {
                Box::pin(async move { owner.scrub(stripe, is_repairing).await })
            };
            return self.forward(stripe, work).await;
        }
        let geometry = &self.shared.config.geometry;
        let _rows = self.locks.lock(stripe, 0..geometry.strip_bytes).await;
        let _memory = self.grant(2 * geometry.group_members(), geometry.strip_bytes as usize).await;
        let mut scratch = self.scratch();
        let (mut unreadable, mut mended) = (0, 0);
        let mut result = ScrubResult::default();
        let end = loop {
            let tried =
                self.try_scrub(&mut scratch, stripe, is_repairing, &mut unreadable, &mut mended, &mut result);
            match tried.await {
                Ok(()) => break Ok(result),
                Err(Stop::Again) => {}
                Err(Stop::TooLarge | Stop::Moved) => break Err(IoError::Invalid),
                Err(Stop::Error(error)) => break Err(error),
            }
        };
        self.recycle(scratch);
        end
    }

    async fn try_scrub(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        is_repairing: bool,
        unreadable: &mut u64,
        mended: &mut u64,
        result: &mut ScrubResult,
    ) -> Result<(), Stop> {
        self.shared.check_frozen()?;
        let len = self.shared.config.geometry.strip_bytes;
        let mut strips = self.strips(stripe, *unreadable);
        let lost = strips.live & !strips.readable;
        if lost & strips.data_mask() & !*mended != 0 && !self.shared.can_compute(stripe) {
            self.give_up_unreadable(stripe).await?;
            *mended |= lost & strips.data_mask();
            *unreadable &= !*mended;
            return Err(Stop::Again);
        }
        // Strips that cannot be read are brought back first.
        for strip in ones(strips.live & !strips.readable) {
            if *mended >> strip & 1 == 1 {
                return Err(Stop::Error(IoError::Medium)); // what was just written cannot be read
            }
            self.compute(scratch, stripe, strip, 0, len, &strips, unreadable).await?;
            self.correct(scratch, stripe, strip, 0).await?;
            *mended |= 1 << strip;
            *unreadable &= !(1 << strip);
            strips = self.strips(stripe, *unreadable);
            result.unreadable += 1;
        }
        let live_parity = strips.live & !strips.data_mask();
        if strips.data == 1 && strips.live & 1 == 0 && live_parity != 0 {
            return self.compare_copies(scratch, stripe, &strips, is_repairing, unreadable, result).await;
        }
        result.is_incomplete = strips.live & strips.data_mask() != strips.data_mask();
        if result.is_incomplete || live_parity == 0 {
            return Ok(());
        }
        self.read_strips(scratch, stripe, 0, len, strips.live, unreadable).await?;
        let mut syndromes: Vec<Buffer> = Vec::new();
        for strip in ones(live_parity) {
            let mut buffer = self.buffer(len).await;
            let found = scratch.parity[strip - strips.data].as_ref().expect("just read");
            buffer.as_mut_slice().copy_from_slice(found.as_slice());
            syndromes.push(buffer);
        }
        {
            let data = strips_of(&scratch.old, strips.data_mask());
            let mut targets: ArrayVec<(usize, &mut [u8]), MAX_PARITY> = ones(live_parity)
                .map(|s| s - strips.data)
                .zip(syndromes.iter_mut().map(|b| b.as_mut_slice()))
                .collect();
            self.shared.code.update(&data, &mut targets);
        }
        let parities: ArrayVec<usize, MAX_PARITY> = ones(live_parity).map(|s| s - strips.data).collect();
        let wrong = self.judge(scratch, &parities, &syndromes, strips.is_synced, result);
        if is_repairing {
            for strip in ones(wrong) {
                self.repair(scratch, stripe, strip, 0).await?;
            }
        }
        Ok(())
    }

    /// A mirror without its first copy: the first that is there stands for it.
    async fn compare_copies(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strips: &Strips,
        is_repairing: bool,
        unreadable: &mut u64,
        result: &mut ScrubResult,
    ) -> Result<(), Stop> {
        let len = self.shared.config.geometry.strip_bytes;
        self.read_strips(scratch, stripe, 0, len, strips.live, unreadable).await?;
        let mut copies = ones(strips.live).map(|strip| strip - 1);
        let first = copies.next().expect("the caller has looked");
        let expected = scratch.parity[first].take().expect("just read");
        let mut wrong = 0u64;
        for copy in copies {
            let found = scratch.parity[copy].as_mut().expect("just read").as_mut_slice();
            if found != expected.as_slice() {
                wrong |= 1 << (copy + 1);
                let rows =
                    found.chunks(ROW_BYTES as usize).zip(expected.as_slice().chunks(ROW_BYTES as usize));
                result.rows += rows.filter(|(found, expected)| found != expected).count() as u32;
                found.copy_from_slice(expected.as_slice());
            }
        }
        scratch.parity[first] = Some(expected);
        result.mismatches |= wrong;
        if is_repairing {
            for strip in ones(wrong) {
                self.repair(scratch, stripe, strip, 0).await?;
            }
        }
        Ok(())
    }

    /// Row by row: what does not fit, and what it should be, into the scratch. The strips that changed there.
    fn judge(
        &self,
        scratch: &mut Scratch,
        parities: &[usize],
        syndromes: &[Buffer],
        is_synced: bool,
        result: &mut ScrubResult,
    ) -> u64 {
        let data = self.shared.config.geometry.data;
        let len = self.shared.config.geometry.strip_bytes as usize;
        let (mut wrong, mut mismatches, mut rows, mut named) = (0u64, 0u64, 0, 0u64);
        for at in (0..len).step_by(ROW_BYTES as usize) {
            let range = at..len.min(at + ROW_BYTES as usize);
            let row: ArrayVec<&[u8], MAX_PARITY> =
                syndromes.iter().map(|s| &s.as_slice()[range.clone()]).collect();
            let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
            let differing = row.iter().zip(parities).filter(|(s, _)| !is_zero(s));
            let differing = differing.fold(0u64, |mask, (_, j)| mask | 1 << (data + j));
            if differing == 0 {
                continue;
            }
            (mismatches, rows) = (mismatches | differing, rows + 1);
            // What a crash left open is decided already: data has been read as it is.
            let is_tellable = parities.len() > 1 && is_synced && !mutant::is(Mutant::ScrubTrustsData);
            if is_tellable && differing.count_ones() as usize == parities.len() {
                if let Some((strip, error)) = self.wrong_data(parities, &row) {
                    let buffer = scratch.old[strip].as_mut().expect("all data was read");
                    add(&mut buffer.as_mut_slice()[range], &error);
                    (named, wrong) = (named | 1 << strip, wrong | 1 << strip);
                    continue;
                }
            } else if is_tellable && differing.count_ones() == 1 {
                named |= differing;
            }
            for (syndrome, j) in row.iter().zip(parities) {
                let buffer = scratch.parity[*j].as_mut().expect("all live parity was read");
                add(&mut buffer.as_mut_slice()[range.clone()], syndrome);
            }
            wrong |= differing;
        }
        (result.mismatches, result.rows, result.named) = (mismatches, rows, named);
        wrong
    }

    /// The one data strip whose error explains all syndromes of a row, and the error.
    fn wrong_data(&self, parities: &[usize], row: &[&[u8]]) -> Option<(usize, Vec<u8>)> {
        let geometry = &self.shared.config.geometry;
        let (data, len) = (geometry.data, row[0].len());
        let mut candidates = (0..data).filter_map(|strip| {
            // The error alone is a stripe whose other data is zeroes and whose parities are the syndromes.
            let first = data + parities[0];
            let others = (u64::MAX >> (64 - data)) & !(1 << strip);
            let decoder = self.shared.code.decoder(&[strip], others | 1 << first).ok()?;
            let zeroes = vec![0; len];
            let sources: Vec<&[u8]> =
                decoder.sources().iter().map(|s| if *s == first { row[0] } else { &zeroes[..] }).collect();
            let mut error = vec![0; len];
            decoder.decode(&sources, &mut [&mut error]);
            let is_explained = parities.iter().zip(row).all(|(j, syndrome)| {
                let mut expected = vec![0; len];
                self.shared.code.encode_some(&[(strip, &error)], &mut [(*j, &mut expected)]);
                expected == *syndrome
            });
            is_explained.then_some((strip, error))
        });
        let found = candidates.next()?;
        candidates.next().is_none().then_some(found)
    }
}

fn add(target: &mut [u8], other: &[u8]) {
    target.iter_mut().zip(other).for_each(|(byte, other)| *byte ^= other);
}
