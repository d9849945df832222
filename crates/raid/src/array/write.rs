//! Writes of a rectangle: the one path by which data and parity change.
//!
//! ```text
//!   rows ─► snapshot ─► bitmap ─────► read old ─► partial parity ─► log ─► parity ─► write data and parity ─► retire
//!             ▲                          │ failed         │ failed           │ failed
//!             └────── again, without ◄───┴────────────────┘                  └─► member out, durably ─► acknowledge
//! ```
//!
//! The order is the whole point. The log entry is durable on every live parity member before a byte
//! of the stripe changes, so that a crash leaves either nothing or all that recovery needs. Every
//! live member knows which member missed a write before the write is acknowledged.

use super::members::{MemberChannel, MemberRole, SlotState};
use super::request::{Source, StripeRequest, WriteRequest};
use super::scratch::{
    NewData, Scratch, StripList, add_new_strips, add_strips, decode, new_strips, parities_of, strips_of,
};
use super::shared::{RegionWrite, Shared};
use super::spare::{Checks, Compared, Place, rows_of};
use super::steps::{halved, of_tag, tag_of};
use super::stop::Stop;
use super::stripe_owner::StripeOwner;
use crate::config::{Consistency, MAX_GROUP_MEMBERS, MAX_PARITY};
use crate::log::{AppendError, Entry, Payload, Redo, Target, Ticket};
use crate::metadata::intent_bitmap::{DIRTY, STALE, WRITTEN};
use crate::mutant::{self, Mutant};
use crate::parity::Matrix;
use crate::stripe::lock_words::LockedRows;
use crate::stripe::plan::{Method, Plan, Strips, ones};
use crate::stripe::rect::Rect;
use crate::stripe::rows::RowGuard;
use arrayvec::ArrayVec;
use block::{Flags, IoError, IoResult, Op};
use std::cell::RefCell;
use std::ops::Range;

/// The state of a rectangle's rows when its write fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// Nothing was written, as strips could not be read.
    Untouched,
    /// Something may have been.
    Perhaps,
}

/// Rows that a write holds until this is dropped.
#[expect(dead_code, reason = "held, not read")]
pub(super) enum HeldRows<'a> {
    /// In the lock word of the stripe.
    InWord(LockedRows<'a>),
    /// Among the locks of the stripe's owner.
    Owned(RowGuard<'a>),
}

impl StripeOwner {
    /// Writes a rectangle of a stripe that this core owns, in as many parts as the log asks for.
    pub async fn write(&self, request: &WriteRequest<'_>) -> IoResult {
        let rect = &request.rect;
        let is_full = rect.count == self.shared.config.geometry.data && self.shared.is_whole(rect.stripe);
        let mut limit = if is_full { rect.len } else { self.shared.entry_limit(rect.count).min(rect.len) };
        let mut done = 0;
        while done < rect.len {
            let len = limit.min(rect.len - done);
            let (offset, at) = (rect.offset + done, rect.at + u64::from(done));
            let part = WriteRequest { rect: Rect { offset, len, at, ..*rect }, ..*request };
            match self.write_part(&part).await {
                Ok(()) => done += len,
                // A member has gone since, and a degraded write keeps more in the log.
                Err(Stop::TooLarge) if limit > self.shared.entry_limit(rect.count) => {
                    limit = self.shared.entry_limit(rect.count);
                }
                Err(Stop::Halve) => limit = halved(limit, self.shared.config.block_size),
                Err(Stop::Moved) => {
                    let rest = Rect { len: rect.len - done, ..part.rect };
                    // SAFETY: the request completes after this future does.
                    let rest = unsafe { StripeRequest::write(WriteRequest { rect: rest, ..*request }) };
                    return Box::pin(self.forward_request(rest)).await;
                }
                Err(Stop::Error(error)) => return Err(error),
                Err(Stop::TooLarge | Stop::Again) => return Err(IoError::Invalid),
            }
        }
        Ok(())
    }

    async fn write_part(&self, request: &WriteRequest<'_>) -> Result<(), Stop> {
        let rect = &request.rect;
        let _inside = self.enter().await;
        let is_own = self.owns(rect.stripe);
        if !is_own && !self.is_writer(rect.stripe) {
            return Err(Stop::Moved);
        }
        let Some(_rows) = self.lock_rows(rect).await else { return Err(Stop::Moved) };
        match self.write_rows(request).await {
            // Blocks that are lost are the owner's to give up.
            Err((Stop::Error(IoError::Medium), Rows::Untouched)) if !is_own => Err(Stop::Moved),
            // Blocks of other strips are lost. Once that is noted, these can be written.
            Err((Stop::Error(IoError::Medium), Rows::Untouched)) => {
                let rows = rect.offset..rect.offset + rect.len;
                Box::pin(self.give_up_lost(rect.stripe, rows)).await?;
                self.write_rows(request).await.map_err(|(stop, _)| stop)
            }
            result => result.map_err(|(stop, _)| stop),
        }
    }

    /// Locks the rows of a rectangle in the lock word of its stripe. Where that has none, or is
    /// taken, only the owner waits for the rows; other cores get `None`.
    pub(super) async fn lock_rows(&self, rect: &Rect) -> Option<HeldRows<'_>> {
        let is_unlocked = mutant::is(Mutant::NoRowLock)
            || mutant::is(Mutant::OtherCoresUnlocked) && !self.owns(rect.stripe);
        let rows = if is_unlocked { 0..0 } else { rect.offset..rect.offset + rect.len };
        let words = self.shared.lock_words.as_deref();
        if let Some(locked) = words.and_then(|words| words.try_lock(rect.stripe, rows.clone())) {
            return Some(HeldRows::InWord(locked));
        }
        match self.owns(rect.stripe) {
            true => Some(HeldRows::Owned(self.locks.lock(rect.stripe, rows).await)),
            false => None,
        }
    }

    /// The flags of a write's requests to members.
    pub(super) fn member_flags(&self, flags: Flags) -> Flags {
        match self.shared.config.consistency {
            Consistency::None => flags,
            _ if mutant::is(Mutant::NoFua) => Flags::NONE,
            _ => Flags::FUA,
        }
    }

    /// Members failed to take a write, or were skipped; the others have it. `failed` has the tags
    /// of those that failed.
    pub(super) async fn members_missed(&self, stripe: u64, failed: &[(u32, IoError)]) -> IoResult {
        let shared = &self.shared;
        if let (Consistency::None, Some((_, error))) = (shared.config.consistency, failed.first()) {
            return Err(*error);
        }
        // The stripe is consistent on the others. The mark of missing data must be durable before
        // a member's failure is committed and before the write is acknowledged.
        self.set_region(stripe, WRITTEN | STALE).await?;
        for (tag, error) in failed {
            let (slot, role) = of_tag(*tag);
            if mutant::is(Mutant::AckBeforeMemberOut) {
                shared.members.announce_failure(slot);
            } else {
                shared.member_failed(slot, role, *error).await?;
            }
        }
        Ok(())
    }

    /// Writes a rectangle whose rows the caller holds. An error says whether anything of it may
    /// have been written.
    async fn write_rows(&self, request: &WriteRequest<'_>) -> Result<(), (Stop, Rows)> {
        let rect = &request.rect;
        let geometry = &self.shared.config.geometry;
        let _memory = self.grant(rect.count + geometry.group_members(), rect.len as usize).await;
        let mut scratch = self.scratch();
        self.snapshot(&mut scratch, rect, request.source).await;
        let mut unreadable = 0;
        let result = loop {
            match self.try_write(&mut scratch, request, &mut unreadable).await {
                Err(Stop::Again) => {}
                result => break result,
            }
        };
        if result.is_ok() {
            self.count_answered(rect.stripe, unreadable);
        }
        let has_lost = unreadable != 0 || scratch.is_ambiguous;
        let rows = if scratch.is_logged || !has_lost { Rows::Perhaps } else { Rows::Untouched };
        self.recycle(scratch);
        result.map_err(|stop| (stop, rows))
    }

    /// Tries to write a rectangle whose rows the caller holds and whose new data is in the scratch:
    /// the protocol of a write.
    pub(super) async fn try_write(
        &self,
        scratch: &mut Scratch,
        request: &WriteRequest<'_>,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        // Without a live parity member nothing is logged: a member that is skipped then must be out
        // before.
        self.wait_until_out(request.rect.stripe).await?;
        let mut write = StripeWrite::begin(self, scratch, request, unreadable)?;
        write.mark_region().await?;
        write.read_old().await?;
        match write.entry_content() {
            Some(content) => {
                write.partial_parity();
                write.log(content).await?;
                write.new_parity();
            }
            None => write.whole_parity(),
        }
        write.check_unlogged()?;
        write.write_new().await?;
        // Until then a member that was skipped may be assembled as a live one: recovery needs the
        // entry.
        self.wait_until_out(request.rect.stripe).await?;
        write.retire();
        write.clear_bad().await?;
        write.end()
    }
}

/// A try to write a rectangle. Dropped before its end, it leaves its region marked if members may
/// hold some of it.
struct StripeWrite<'a> {
    owner: &'a StripeOwner,
    scratch: &'a mut Scratch,
    request: &'a WriteRequest<'a>,
    /// Strips that turned out to be unreadable in these rows, in this try or an earlier one.
    unreadable: &'a mut u64,
    /// The strips as they were when the plan was made.
    strips: Strips,
    plan: Plan,
    /// An earlier try has left the partial parity in the scratch.
    has_partial: bool,
    /// The write gives strips up that are lost, and fails all the same: no read could compute the
    /// data from parity.
    is_in_vain: bool,
    region: RegionWrite<'a>,
    /// Its entry in the log.
    ticket: Option<Ticket>,
}

/// The part of a write's entry in the log that depends on the write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryContent {
    /// The partial parity.
    Parity,
    /// The new data, and the partial parity unless the stripe is full.
    NewData,
    /// The checksums of a full stripe.
    Checksums,
}

impl<'a> StripeWrite<'a> {
    /// Plans a try.
    ///
    /// # Errors
    /// When the rectangle cannot be written, or not as a whole.
    fn begin(
        owner: &'a StripeOwner,
        scratch: &'a mut Scratch,
        request: &'a WriteRequest<'a>,
        unreadable: &'a mut u64,
    ) -> Result<StripeWrite<'a>, Stop> {
        let (shared, rect) = (&owner.shared, &request.rect);
        shared.common.check_frozen()?;
        let strips = owner.strips(rect.stripe, *unreadable);
        // Before a sync, parity may contradict strips that can be read: only blocks that cannot be
        // read are computed from it.
        let others = *unreadable & strips.live & strips.data_mask() & !rect.mask();
        let has_blocks = rect.len > shared.config.block_size;
        let is_lost = matches!(request.source, Source::Lost);
        if others != 0 && !strips.is_synced && has_blocks && !is_lost && !scratch.is_logged {
            return Err(Stop::Halve);
        }
        let mut plan = strips.plan(rect.mask()).map_err(|_| IoError::Medium)?;
        let lost = strips.data_mask() & !strips.live;
        // Parity follows data where data is given up.
        plan.is_checked &= !is_lost;
        // An earlier try has computed and logged it, and nothing has changed these rows since. The
        // strips that it was made of may be unreadable by now, while recovery could replay the
        // entry.
        let has_partial = scratch.partial != 0 && (plan.parity >> strips.data) & !scratch.partial == 0;
        match has_partial {
            true => plan = Plan { read: 0, lost: 0, is_checked: false, ..plan },
            false => scratch.partial = 0,
        }
        // Only parity could hold the data, and no read could compute it from that.
        let is_in_vain = rect.mask() & lost != 0 && !is_lost && !shared.can_compute(rect.stripe);
        if is_in_vain && !scratch.is_logged {
            return Err(Stop::Error(IoError::Medium));
        }
        let region = shared.begin_write(rect.stripe, owner.here.index());
        // The lane of a stripe's log has one writer.
        if region.is_logged() && !owner.owns(rect.stripe) && !mutant::is(Mutant::OtherCoresLog) {
            return Err(Stop::Moved);
        }
        let ticket = None;
        Ok(StripeWrite {
            owner,
            scratch,
            request,
            unreadable,
            strips,
            plan,
            has_partial,
            is_in_vain,
            region,
            ticket,
        })
    }

    /// Sets the marks of the write in the write-intent bitmap, durably.
    fn mark_region(&self) -> impl Future<Output = IoResult> {
        self.owner.set_region(self.request.rect.stripe, self.marks())
    }

    /// The marks that the write-intent bitmap needs before the stripe changes.
    fn marks(&self) -> u8 {
        let dirty = if self.region.is_dirty() { DIRTY } else { 0 };
        let is_unmarked = mutant::is(Mutant::StaleNotMarked)
            || matches!(self.request.source, Source::Zeroes) && mutant::is(Mutant::ZeroesNotStale);
        let stale = if self.strips.is_degraded() && !is_unmarked { STALE } else { 0 };
        WRITTEN | dirty | stale
    }

    /// Checks a write that has no entry in the log and is about to change its stripe.
    ///
    /// # Errors
    /// [`Stop::Again`] when a member has gone meanwhile, and the write can still be logged.
    fn check_unlogged(&self) -> Result<(), Stop> {
        let has_parity = self.strips.data > 1;
        match !self.region.is_logged() && has_parity && self.owner.shared.common.is_logging() {
            true => Err(Stop::Again),
            false => Ok(()),
        }
    }

    /// Lets the log use the space of the write's entry again.
    fn retire(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.owner.log.retire(ticket);
        }
    }

    /// Blocks that were written can be read again.
    #[inline]
    async fn clear_bad(&self) -> IoResult {
        match matches!(self.request.source, Source::Lost) || self.is_in_vain {
            true => Ok(()),
            false => self.owner.clear_bad(&self.request.rect).await,
        }
    }

    /// The write is durable on every member that takes it.
    fn end(self) -> Result<(), Stop> {
        self.region.end();
        if self.is_in_vain { Err(Stop::Error(IoError::Medium)) } else { Ok(()) }
    }

    /// Reads or computes the strips that new parity is made of.
    async fn read_old(&mut self) -> Result<(), Stop> {
        let (owner, rect) = (self.owner, &self.request.rect);
        if owner.shared.config.matrix != Matrix::Copies {
            for strip in ones(self.plan.parity) {
                let place = &mut self.scratch.parity[strip - self.strips.data];
                if place.is_none() {
                    *place = Some(owner.buffer(rect.len).await);
                }
            }
        }
        self.scratch.kept.clear();
        if self.plan.read == 0 {
            return Ok(());
        }
        if self.plan.method == Method::Rows {
            return Ok(Box::pin(self.read_by_halves()).await?);
        }
        let decoder = match self.plan.method {
            Method::Decode => Some(owner.decoder(self.plan.lost, self.plan.read)?),
            _ => None,
        };
        match &decoder {
            _ if self.plan.is_checked => self.compare_old().await?,
            Some(decoder) => {
                let others = self.plan.read & self.strips.data_mask() & !rect.mask();
                let read = decoder.sources().iter().fold(others, |mask, strip| mask | 1 << strip);
                self.read_strips(read).await?;
            }
            None => self.read_strips(self.plan.read).await?,
        }
        if let Some(decoder) = decoder {
            for strip in 0..self.strips.data {
                if self.plan.lost >> strip & 1 == 1 && self.scratch.old[strip].is_none() {
                    self.scratch.old[strip] = Some(owner.buffer(rect.len).await);
                }
            }
            decode(&decoder, self.scratch, self.plan.lost);
        }
        Ok(())
    }

    /// Reads the rows of the rectangle from strips.
    fn read_strips(&mut self, mask: u64) -> impl Future<Output = Result<(), Stop>> {
        let Rect { stripe, offset, len, .. } = self.request.rect;
        self.owner.read_strips(self.scratch, stripe, offset, len, mask, self.unreadable)
    }

    /// Reads or computes old data into `scratch.old` in parts: strips are unreadable in different
    /// rows.
    async fn read_by_halves(&mut self) -> IoResult {
        let (owner, rect, wanted) = (self.owner, &self.request.rect, self.plan.read);
        for strip in ones(wanted) {
            self.scratch.old[strip] = Some(owner.buffer(rect.len).await);
        }
        let old = RefCell::new(&mut self.scratch.old);
        let work = async |part: &mut Scratch, rows: &Range<u32>, unreadable: &mut u64| {
            owner.shared.common.check_frozen()?;
            let place = Place { stripe: rect.stripe, offset: rows.start, len: rows.len() as u32 };
            let strips = owner.strips(rect.stripe, *unreadable);
            owner.halve_around(&strips, place.len)?;
            let known = wanted & strips.readable;
            owner.read_strips(part, place.stripe, place.offset, place.len, known, unreadable).await?;
            for strip in ones(wanted & !known) {
                owner.compute(part, place, strip, &strips, unreadable, Checks::One).await?;
            }
            let at = (rows.start - rect.offset) as usize;
            let old = &mut *old.borrow_mut();
            for strip in ones(wanted) {
                let whole = old[strip].as_mut().expect("just set").as_mut_slice();
                whole[at..at + rows.len()].copy_from_slice(part.bytes(strip));
            }
            Ok(())
        };
        owner.by_halves(rect.offset..rect.offset + rect.len, 0, work).await
    }

    /// Reads what parity is to be made of, compared with spare strips: a wrong strip is not hidden
    /// in new parity.
    ///
    /// # Errors
    /// [`IoError::Medium`] when strips contradict each other, so that lost data that is not
    /// replaced has two versions.
    async fn compare_old(&mut self) -> Result<(), Stop> {
        let StripeWrite { owner, request: WriteRequest { rect, .. }, ref plan, ref strips, .. } = *self;
        let scratch = &mut *self.scratch;
        let place = Place { stripe: rect.stripe, offset: rect.offset, len: rect.len };
        let replaced = rect.mask() | plan.parity;
        let compared = Compared { readable: plan.read, replaced, checks: Checks::One };
        let unknown = owner.read_compared(scratch, place, strips, compared, self.unreadable).await?;
        let lost = strips.data_mask() & !strips.readable;
        if !unknown.is_empty() && lost & !rect.mask() != 0 {
            scratch.is_ambiguous = true;
            return Err(Stop::Error(IoError::Medium));
        }
        // A lost strip that is replaced must be readable again: parity has to follow data there.
        if lost == 0 {
            scratch.kept = unknown;
        }
        Ok(())
    }

    /// Parity of the strips that do not change, in `scratch.parity`: what the log keeps.
    fn partial_parity(&mut self) {
        if self.has_partial {
            return;
        }
        let StripeWrite { owner, request: WriteRequest { rect, .. }, plan, strips, .. } = *self;
        let (code, parities) = (&owner.shared.code, plan.parity >> strips.data);
        let Scratch { old, parity, kept, .. } = &mut *self.scratch;
        match plan.method {
            Method::Direct | Method::Full => {}
            Method::Modify => {
                let changes = strips_of(old, rect.mask());
                code.update(&changes, &mut parities_of(parity, parities));
            }
            Method::Reconstruct | Method::Decode | Method::Rows if !kept.is_empty() => {
                self.keep_contradictions();
            }
            Method::Reconstruct | Method::Decode | Method::Rows => {
                let others = strips_of(old, !rect.mask());
                code.encode_some(&others, &mut parities_of(parity, parities));
            }
        }
    }

    /// Partial parity row by row. Where strips contradict each other for an unknown reason, the old
    /// parity takes the change alone, as with read-modify-write: the contradiction stays for a
    /// scrub to see.
    fn keep_contradictions(&mut self) {
        let StripeWrite { owner, request: WriteRequest { rect, .. }, plan, strips, .. } = *self;
        let parities = plan.parity;
        let code = &owner.shared.code;
        let Scratch { old, parity, kept, .. } = &mut *self.scratch;
        for row in rows_of(rect.len) {
            let part = |mask: u64| -> ArrayVec<(usize, &[u8]), MAX_GROUP_MEMBERS> {
                strips_of(old, mask).into_iter().map(|(i, bytes)| (i, &bytes[row.clone()])).collect()
            };
            let modified = if kept.contains(&row) { parities & strips.readable } else { 0 };
            for (mask, data, is_added) in
                [(modified, rect.mask(), true), (parities & !modified, !rect.mask(), false)]
            {
                let mut targets: ArrayVec<(usize, &mut [u8]), MAX_PARITY> =
                    parities_of(parity, mask >> strips.data)
                        .into_iter()
                        .map(|(j, bytes)| (j, &mut bytes[row.clone()]))
                        .collect();
                match (targets.is_empty(), is_added) {
                    (true, _) => {}
                    (false, true) => code.update(&part(data), &mut targets),
                    (false, false) => code.encode_some(&part(data), &mut targets),
                }
            }
        }
    }

    /// New parity in `scratch.parity`.
    fn new_parity(&mut self) {
        let StripeWrite { owner, request: WriteRequest { rect, .. }, plan, strips, .. } = *self;
        let (code, parities) = (&owner.shared.code, plan.parity >> strips.data);
        self.scratch.partial = 0;
        let Scratch { new, parity, encoded, .. } = &mut *self.scratch;
        let is_copy = owner.shared.config.matrix == Matrix::Copies;
        match plan.method {
            Method::Direct => {}
            Method::Full if is_copy || parities & !*encoded == 0 => {}
            Method::Full => {
                code.encode_some(&new_strips(new, rect.mask()), &mut parities_of(parity, parities));
            }
            Method::Modify | Method::Reconstruct | Method::Decode | Method::Rows => {
                code.update(&new_strips(new, rect.mask()), &mut parities_of(parity, parities));
            }
        }
    }

    /// New parity in `scratch.parity` of a write without an entry in the log. Old and new strips
    /// are summed in one pass, as nothing keeps the partial parity.
    fn whole_parity(&mut self) {
        let StripeWrite { owner, request: WriteRequest { rect, .. }, plan, strips, .. } = *self;
        let is_modified = plan.method == Method::Modify;
        let old_strips = if is_modified { rect.mask() } else { strips.data_mask() & !rect.mask() };
        let fits = old_strips.count_ones() as usize + rect.count <= MAX_GROUP_MEMBERS;
        let has_old = !matches!(plan.method, Method::Direct | Method::Full) && !self.has_partial;
        if !has_old || !fits || !self.scratch.kept.is_empty() {
            self.partial_parity();
            self.new_parity();
            return;
        }
        let (code, parities) = (&owner.shared.code, plan.parity >> strips.data);
        let Scratch { old, new, parity, .. } = &mut *self.scratch;
        let mut list = StripList::new();
        add_strips(&mut list, old, old_strips);
        add_new_strips(&mut list, new, rect.mask());
        let targets = &mut parities_of(parity, parities);
        if is_modified { code.update(&list, targets) } else { code.encode_some(&list, targets) }
    }

    /// Makes the entry of this write durable.
    async fn log(&mut self, content: EntryContent) -> Result<(), Stop> {
        self.ticket = Some(self.append(content).await?);
        if mutant::is(Mutant::RetireEarly) {
            self.retire();
        }
        Ok(())
    }

    /// The content of the write's entry in the log; `None` if it needs no entry.
    fn entry_content(&self) -> Option<EntryContent> {
        let (shared, rect) = (&self.owner.shared, &self.request.rect);
        let has_parity = self.strips.data > 1 && self.plan.parity != 0;
        if !self.region.is_logged() || !has_parity || mutant::is(Mutant::BitmapOnly) {
            return None;
        }
        let is_full = self.plan.method == Method::Full;
        // Without new data in its entry replay computes a lost strip from parity as it is. After a
        // creation without zeroes that is what a degraded read returned before, so nothing is lost.
        // A start by force may trust parity that is wrong under written blocks: there only new data
        // in the entry keeps a block that is being written.
        let is_whole = shared.is_whole(rect.stripe) && self.strips.is_synced;
        if is_full && is_whole && mutant::is(Mutant::FullStripesUnlogged) {
            return None;
        }
        let has_redo = (!is_whole || (rect.count > 1 && !is_full)) && !mutant::is(Mutant::NoRedo);
        Some(match (has_redo, is_full) {
            (true, _) => EntryContent::NewData,
            (false, true) => EntryContent::Checksums,
            (false, false) => EntryContent::Parity,
        })
    }

    /// Appends the entry of this write to the logs of the parity members.
    async fn append(&mut self, content: EntryContent) -> Result<Ticket, Stop> {
        let (owner, rect, data) = (self.owner, &self.request.rect, self.strips.data);
        let scratch = &mut *self.scratch;
        scratch.targets.clear();
        scratch.roles.clear();
        for strip in ones(self.plan.parity) {
            let Some((slot, role, member)) = owner.reader(rect.stripe, strip) else {
                owner.gone(rect.stripe, strip).await?;
                return Err(Stop::Again);
            };
            let MemberChannel { channel, log_offset, .. } = member;
            let parity = strip - data;
            scratch.targets.push(Target { parity, slot, channel, log_offset });
            scratch.roles.push(role);
        }
        if content == EntryContent::Checksums {
            owner.sum(scratch);
        }
        // Recovery may find it where it can be written: what is read from then on must not be
        // older.
        scratch.is_logged = true;
        if self.plan.method != Method::Full {
            scratch.partial = self.plan.parity >> data;
        }
        let scratch = &*scratch;
        let kept = Kept {
            scratch,
            redo: if content == EntryContent::NewData { rect.mask() } else { 0 },
            is_full: self.plan.method == Method::Full,
        };
        let entry = Entry {
            stripe: rect.stripe,
            offset: rect.offset,
            len: rect.len,
            modified: rect.mask(),
            checksums: if content == EntryContent::Checksums { &scratch.checksums } else { &[] },
            targets: &scratch.targets,
            payload: &kept,
        };
        match owner.log.append(&entry).await {
            Ok(ticket) => Ok(ticket),
            Err(AppendError::Members(failed)) => {
                for (slot, error) in failed {
                    let target = scratch.targets.iter().position(|target| target.slot == slot);
                    let role = target.map_or(MemberRole::Current, |target| scratch.roles[target]);
                    owner.shared.member_failed(slot, role, error).await?;
                }
                Err(Stop::Again)
            }
            Err(AppendError::TooLarge(_)) => Err(Stop::TooLarge),
            Err(AppendError::Stuck(lane)) => {
                owner.shared.freeze(&format!("log lane {lane} is full of writes that failed"));
                Err(Stop::Error(IoError::Medium))
            }
        }
    }

    /// Writes data and parity to every member that takes them.
    async fn write_new(&mut self) -> Result<(), Stop> {
        let (owner, rect) = (self.owner, &self.request.rect);
        let shared = &owner.shared;
        let config = &shared.config;
        let data = config.geometry.data;
        if mutant::is(Mutant::BadClearedEarly) {
            self.clear_bad().await?;
        }
        let flags = owner.member_flags(self.request.flags);
        let Scratch { batch, new, parity, .. } = &mut *self.scratch;
        batch.clear();
        // A member that began to fail after the plan was made misses this write, too.
        let mut is_skipped = false;
        for strip in ones(rect.mask() | self.plan.parity) {
            let segment = match strip < data {
                true => new[strip].as_ref().map(NewData::segment),
                false if config.matrix == Matrix::Copies => new[0].as_ref().map(NewData::segment),
                false => parity[strip - data].as_ref().map(reactor::Buffer::segment),
            };
            let segment = segment.expect("computed or copied before");
            let slot = config.geometry.member(rect.stripe, strip);
            is_skipped |= shared.members.takers(slot, rect.stripe).next().is_none();
            for role in shared.members.takers(slot, rect.stripe) {
                let tag = tag_of(slot, role);
                let Some(member) = owner.channels.get(slot, role) else {
                    is_skipped = true;
                    shared.member_failed(slot, role, IoError::DeviceGone).await?;
                    continue;
                };
                let position = owner.position(&member, rect.stripe, rect.offset);
                // SAFETY: the buffer is in the scratch, which stays untouched until the batch has
                // run. A caller's memory stays valid until its request has completed, which is
                // later.
                unsafe { batch.add(tag, member.channel, Op::Write, flags, segment, position) };
            }
        }
        if is_skipped {
            check_skipped(shared, rect.stripe, &self.region)?;
        }
        shared.common.check_frozen()?;
        self.region.change();
        batch.run().await;
        let failed: Vec<(u32, IoError)> = batch.failures().collect();
        if failed.is_empty() && !is_skipped {
            return Ok(());
        }
        Ok(owner.members_missed(rect.stripe, &failed).await?)
    }
}

/// The part of a write that the log keeps.
struct Kept<'a> {
    scratch: &'a Scratch,
    /// The strips whose new data it keeps, bit `i` for strip `i`.
    redo: u64,
    /// Whether the write replaces the whole stripe, so that no partial parity is left.
    is_full: bool,
}

impl Payload for Kept<'_> {
    fn partial(&self, parity: usize) -> &[u8] {
        match self.is_full {
            true => &[],
            false => self.scratch.parity[parity].as_ref().expect("just computed").as_slice(),
        }
    }

    fn redo(&self) -> Redo<'_> {
        let mut redo = Redo::new();
        for strip in ones(self.redo) {
            redo.extend(self.scratch.new[strip].as_ref().map(NewData::as_slice));
        }
        redo
    }
}

/// Checks before a write that skips members. If a further failure freezes the array, the
/// failures before it are not recorded, and the next start takes these members for live.
/// Without an entry in the log, their old strips then contradict those of this write.
fn check_skipped(shared: &Shared, stripe: u64, write: &RegionWrite<'_>) -> Result<(), Stop> {
    let (members, data) = (&shared.members, shared.config.geometry.data);
    if (members.live_strips(stripe).count_ones() as usize) < data {
        return Err(Stop::Error(IoError::Medium)); // another core is about to freeze the array
    }
    let is_failing = |slot| members.state(slot) == SlotState::Failing;
    let must_wait = data > 1 && !write.is_logged() && members.group_slots(stripe).any(is_failing);
    if must_wait && !mutant::is(Mutant::AckBeforeMemberOut) { Err(Stop::Again) } else { Ok(()) }
}
