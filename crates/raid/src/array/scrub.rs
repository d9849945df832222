//! Comparing parity with data, and telling which strip is wrong where parity says enough.
//!
//! The locator (`crate::parity::Located`) names the one wrong strip of a row with two parities or
//! more.

use super::remote::LocalFuture;
use super::scratch::Scratch;
use super::spare::{Checks, Place, rows_of};
use super::stop::Stop;
use super::stripe_owner::StripeOwner;
use crate::config::ROW_BYTES;
use crate::metadata::intent_bitmap::STALE;
use crate::mutant::{self, Mutant};
use crate::parity::Located;
use crate::stripe::plan::{Strips, lowest, ones};
use block::{IoError, IoResult};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// The result of a scrub of a stripe.
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

/// Strips of a stripe that could not be read and were brought back.
#[derive(Default)]
struct Mended {
    /// All of them, as a mask.
    strips: u64,
    /// Strips that were computed from the others, as masks, and their bytes.
    computed: Vec<(u64, Range<u32>)>,
    /// How often strips were brought back.
    times: u32,
}

/// How often a scrub brings strips of one stripe back before it reports them as unreadable. More
/// blocks may become unreadable meanwhile, but a broken medium must not hold it for ever.
const MOST_MENDS: u32 = 8;

impl Mended {
    /// Strips with bytes in a row that were computed.
    fn computed_in(&self, row: &Range<usize>) -> u64 {
        let is_in = |rows: &Range<u32>| (rows.start as usize) < row.end && row.start < rows.end as usize;
        self.computed.iter().filter(|(_, rows)| is_in(rows)).fold(0, |mask, (strips, _)| mask | strips)
    }
}

impl StripeOwner {
    /// Compares parity with data in a stripe. With `is_repairing` it rewrites the wrong strip where
    /// parity tells which one that is, and otherwise the parity.
    ///
    /// # Errors
    /// When the stripe cannot be read or written.
    pub async fn scrub(&self, stripe: u64, is_repairing: bool) -> Result<ScrubResult, IoError> {
        let inside = self.enter().await;
        if !self.owns(stripe) {
            drop(inside);
            let work = move |owner: Rc<StripeOwner>| -> LocalFuture<Result<ScrubResult, IoError>> {
                Box::pin(async move { owner.scrub(stripe, is_repairing).await })
            };
            return self.forward(stripe, work).await;
        }
        let geometry = &self.shared.config.geometry;
        let _rows = self.locks.lock(stripe, 0..geometry.strip_bytes).await;
        let _memory = self.grant(2 * geometry.group_members(), geometry.strip_bytes as usize).await;
        let mut scratch = self.scratch();
        let (mut unreadable, mut mended) = (0, Mended::default());
        let mut result = ScrubResult::default();
        let end = loop {
            let tried =
                self.try_scrub(&mut scratch, stripe, is_repairing, &mut unreadable, &mut mended, &mut result);
            match tried.await {
                Ok(()) if is_repairing => break self.mark_absent(stripe).await.map(|()| result),
                Ok(()) => break Ok(result),
                Err(Stop::Again) => {}
                Err(Stop::TooLarge | Stop::Halve | Stop::Moved) => break Err(IoError::Invalid),
                Err(Stop::Error(error)) => break Err(error),
            }
        };
        self.recycle(scratch);
        end
    }

    /// Marks the region of a stripe that was synced without some member: when that one is
    /// re-added, it lacks the parity. If the member is failing, waits until that is recorded:
    /// otherwise the next start would take its old parity for new.
    async fn mark_absent(&self, stripe: u64) -> IoResult {
        let strips = self.strips(stripe, 0);
        if strips.is_synced || !strips.is_degraded() {
            return Ok(());
        }
        self.set_region(stripe, STALE).await?;
        self.wait_until_out(stripe).await
    }

    async fn try_scrub(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        is_repairing: bool,
        unreadable: &mut u64,
        mended: &mut Mended,
        result: &mut ScrubResult,
    ) -> Result<(), Stop> {
        self.shared.common.check_frozen()?;
        let len = self.shared.config.geometry.strip_bytes;
        let strips = self.strips(stripe, *unreadable);
        // Strips that cannot be read are brought back first.
        let lost = strips.live & !strips.readable;
        if lost != 0 {
            let data = lost & strips.data_mask();
            // A strip that has just been written may become unreadable again.
            mended.times += 1;
            if mended.times > MOST_MENDS {
                return Err(Stop::Error(IoError::Medium));
            }
            let is_open = !self.shared.can_compute(stripe);
            let computed = match data != 0 && is_open {
                true => Err(IoError::Medium),
                false => self.mend(stripe, *unreadable).await,
            };
            match computed {
                // Data may have become unreadable since the stripe was read.
                Err(IoError::Medium) if is_open => {
                    self.give_up_unreadable(stripe).await?;
                    mended.strips |= data;
                }
                computed => {
                    mended.computed.extend(computed?);
                    result.unreadable += (lost & !mended.strips).count_ones();
                    mended.strips |= lost;
                }
            }
            *unreadable &= !mended.strips;
            return Err(Stop::Again);
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
        let wrong = self.judge(scratch, &strips, mended, result)?;
        if is_repairing {
            for strip in ones(wrong) {
                self.repair(scratch, stripe, strip, 0).await?;
            }
        }
        Ok(())
    }

    /// Computes unreadable parts of a stripe, and writes them again. Before a sync these are single
    /// blocks: parity may contradict the others. Returns the computed strips, as masks, and their
    /// bytes. The caller holds the rows.
    ///
    /// # Errors
    /// [`IoError::Medium`] when some block cannot be computed. All others are mended then.
    async fn mend(&self, stripe: u64, unreadable: u64) -> Result<Vec<(u64, Range<u32>)>, IoError> {
        let geometry = &self.shared.config.geometry;
        let (mended, is_lost) = (RefCell::new(Vec::new()), Cell::new(false));
        let work = async |scratch: &mut Scratch, rows: &Range<u32>, unreadable: &mut u64| {
            let result = self.try_mend(scratch, stripe, rows, unreadable, &mended).await;
            let is_block = rows.len() as u32 <= self.shared.config.block_size;
            if is_block && matches!(result, Err(Stop::Error(IoError::Medium))) {
                is_lost.set(true);
                return Ok(());
            }
            result
        };
        self.by_halves(0..geometry.strip_bytes, unreadable, work).await?;
        if is_lost.get() { Err(IoError::Medium) } else { Ok(mended.into_inner()) }
    }

    /// Mends some rows. If another strip turns out to be unreadable, the next try reads those that
    /// have been mended.
    async fn try_mend(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        rows: &Range<u32>,
        unreadable: &mut u64,
        mended: &RefCell<Vec<(u64, Range<u32>)>>,
    ) -> Result<(), Stop> {
        self.shared.common.check_frozen()?;
        let place = Place { stripe, offset: rows.start, len: rows.len() as u32 };
        let strips = self.strips(stripe, *unreadable);
        let lost = strips.live & !strips.readable;
        if lost & strips.data_mask() != 0 && !self.shared.can_compute(stripe) {
            return Err(Stop::Error(IoError::Medium));
        }
        self.halve_around(&strips, place.len)?;
        self.read_strips(scratch, stripe, place.offset, place.len, strips.readable, unreadable).await?;
        for strip in ones(lost) {
            self.compute(scratch, place, strip, &strips, unreadable, Checks::All).await?;
            self.correct(scratch, stripe, strip, place.offset).await?;
            *unreadable &= !(1 << strip);
            mended.borrow_mut().push((1 << strip, rows.clone()));
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

    /// Finds rows that do not fit and puts their right content into the scratch. Returns the strips
    /// that changed there. Parts that were made from the other strips just now are no evidence.
    fn judge(
        &self,
        scratch: &mut Scratch,
        strips: &Strips,
        mended: &Mended,
        result: &mut ScrubResult,
    ) -> Result<u64, IoError> {
        let data = strips.data_mask();
        // After a crash data has been read as it is: parity follows it.
        let is_tellable = strips.is_synced && !mutant::is(Mutant::ScrubTrustsData);
        let (mut wrong, mut mismatches, mut rows, mut named) = (0u64, 0u64, 0, 0u64);
        for row in rows_of(self.shared.config.geometry.strip_bytes) {
            // Before a sync other blocks of the row are compared, too.
            let computed = if strips.is_synced { mended.computed_in(&row) } else { 0 };
            let evidence = strips.live & !computed;
            let parity = evidence & !data;
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
