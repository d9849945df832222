//! Comparing parity with data, and telling which strip is wrong where parity says enough.
//!
//! The locator (`crate::parity::Located`) names the one wrong strip of a row with two parities or more.

use super::owner::{Owner, Scratch};
use super::remote::LocalFuture;
use super::spare::{Checks, Place, lowest, rows_of};
use super::write::{Stop, ones};
use crate::config::ROW_BYTES;
use crate::mutant::{self, Mutant};
use crate::parity::Located;
use crate::stripe::plan::Strips;
use block::IoError;
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
                Err(Stop::TooLarge | Stop::Halve | Stop::Moved) => break Err(IoError::Invalid),
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
            let place = Place { stripe, offset: 0, len };
            self.compute(scratch, place, strip, &strips, unreadable, Checks::All).await?;
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
        let wrong = self.judge(scratch, &strips, *mended, result)?;
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

    /// Finds rows that do not fit and puts their right content into the scratch. Returns the strips that changed there.
    /// Strips in `computed` were made from the others just now, and are no evidence.
    fn judge(
        &self,
        scratch: &mut Scratch,
        strips: &Strips,
        computed: u64,
        result: &mut ScrubResult,
    ) -> Result<u64, IoError> {
        let data = strips.data_mask();
        let evidence = strips.live & !computed;
        let parity = evidence & !data;
        // After a crash data has been read as it is: parity follows it.
        let is_tellable = strips.is_synced && !mutant::is(Mutant::ScrubTrustsData);
        let (mut wrong, mut mismatches, mut rows, mut named) = (0u64, 0u64, 0, 0u64);
        for row in rows_of(self.shared.config.geometry.strip_bytes) {
            if self.agree(scratch, data, parity, row.clone())? {
                continue;
            }
            let mut differing = 0;
            for strip in ones(parity) {
                differing |= u64::from(!self.agree(scratch, data, 1 << strip, row.clone())?) << strip;
            }
            (mismatches, rows) = (mismatches | differing, rows + 1);
            let located = match is_tellable {
                true => self.shared.code.locate(&scratch.present(evidence, row.clone())),
                false => Located::Ambiguous,
            };
            let to_mend = match located {
                Located::Wrong(strip) => 1 << strip,
                Located::Agreed | Located::Ambiguous => differing,
            };
            if located != Located::Ambiguous {
                named |= to_mend;
            }
            let base = lowest((data | evidence) & !to_mend, strips.data);
            for strip in ones(to_mend) {
                self.recompute(scratch, strip, base, row.clone())?;
            }
            wrong |= to_mend;
        }
        (result.mismatches, result.rows, result.named) = (mismatches, rows, named);
        Ok(wrong)
    }
}
