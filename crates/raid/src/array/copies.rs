//! Writes to a mirror all of whose copies take them: no parity, no plan, no entry in the log.
//!
//! The steps and their order are those of every write (`write.rs`): rows, snapshot, write-intent
//! bitmap, members, acknowledgement. Any core takes them, as there is no log whose lane has an
//! owner.
//!
//! A write that needs more takes the long way instead, before anything has changed. It does so if
//!
//! - a copy is missing or incoming,
//! - the mark of the region is not durable yet,
//! - the gate is closed, or
//! - the owner of the stripe, another core, works on it.

use super::members::{MemberChannel, MemberRole};
use super::request::{Source, WriteRequest};
use super::scratch::NewData;
use super::steps::tag_of;
use super::stripe_owner::StripeOwner;
use crate::metadata::intent_bitmap::{DIRTY, WRITTEN};
use crate::mutant::{self, Mutant};
use arrayvec::ArrayVec;
use block::{Data, IoError, IoFuture, Request};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Limit of copies that are written this way. Their requests are inside the future.
const MAX_COPIES: usize = 4;

/// The channels to the members of a stripe, and their slots.
type Copies = ArrayVec<(usize, MemberChannel), MAX_COPIES>;

impl StripeOwner {
    /// Writes a rectangle to all copies of a mirror's stripe. Returns false if the write needs the
    /// long way; nothing has changed then.
    pub async fn write_copies(&self, request: &WriteRequest<'_>) -> Result<bool, IoError> {
        let (shared, rect) = (&self.shared, &request.rect);
        let Source::Data(data) = request.source else { return Ok(false) };
        let Some(_inside) = self.gate.try_enter() else { return Ok(false) };
        // No device comes in before the write has left the gate.
        let is_settled = shared.members.is_settled(rect.stripe) || mutant::is(Mutant::IncomingCopyForgotten);
        if !self.is_owner() || !is_settled {
            return Ok(false);
        }
        let Some(_rows) = self.lock_rows(rect).await else { return Ok(false) };
        let mut _memory = None;
        let mut new = self.in_place(rect, 0, request.source).map(NewData::InPlace);
        if new.is_none() {
            _memory = Some(self.grant(1, rect.len as usize).await);
            let mut copy = self.buffer(rect.len).await;
            data.part(rect.at as usize, rect.len as usize).copy_to(copy.as_mut_slice());
            new = Some(NewData::Copy(copy));
        }
        let segment = new.as_ref().expect("just set").segment();
        // From here to the requests nothing is awaited, so that what is checked stays true.
        let mut copies = Copies::new();
        if !self.take_copies(rect.stripe, &mut copies) {
            return Ok(false);
        }
        let mut region = shared.begin_write(rect.stripe, self.here.index());
        let marks = if region.is_dirty() { WRITTEN | DIRTY } else { WRITTEN };
        if shared.common.is_frozen() || shared.region(rect.stripe) & marks != marks {
            return Ok(false);
        }
        region.change();
        // SAFETY: the memory is a copy of this write's own, or the caller's, which stays valid and
        // is free of references until its request has completed.
        let request = Request::write(unsafe { Data::one(&segment) }, self.member_flags(request.flags));
        let mut failed = ArrayVec::<(u32, IoError), MAX_COPIES>::new();
        let mut running = ArrayVec::<(usize, IoFuture<'_>), MAX_COPIES>::new();
        for (slot, copy) in &copies {
            let position = self.position(copy, rect.stripe, rect.offset);
            running.push((*slot, copy.channel.submit(&request, position)));
        }
        poll_fn(|cx| {
            running.retain(|(slot, write)| match Pin::new(write).poll(cx) {
                Poll::Pending => true,
                Poll::Ready(result) => {
                    failed.extend(result.err().map(|error| (tag_of(*slot, MemberRole::Current), error)));
                    false
                }
            });
            if running.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        if !failed.is_empty() {
            Box::pin(self.members_missed(rect.stripe, &failed)).await?;
        }
        self.wait_until_out(rect.stripe).await?;
        self.clear_bad(rect).await?;
        region.end();
        Ok(true)
    }

    /// Takes the channels of a stripe's members. Returns false if a member is not live.
    fn take_copies(&self, stripe: u64, copies: &mut Copies) -> bool {
        let members = &self.shared.members;
        let slots = members.group_slots(stripe);
        if slots.len() > MAX_COPIES {
            return false;
        }
        for slot in slots {
            match self.channels.get(slot, MemberRole::Current) {
                Some(channel) if members.is_live(slot) => copies.push((slot, channel)),
                _ => return false,
            }
        }
        true
    }
}
