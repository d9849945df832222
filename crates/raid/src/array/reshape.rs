//! A reshape, window by window, while the array is served.
//!
//! ```text
//!   1  requests to the window wait, those in flight end      other bytes are served meanwhile
//!   2  its bytes are read in the old geometry, and written as whole stripes of the new one
//!   3  superblock: the cursor is behind the window           ◄─ the window has the new geometry
//!   4  requests continue
//! ```
//!
//! New stripes are written only over bytes that the old geometry does not need any more
//! ([`Reshape::most_units`](crate::metadata::Reshape::most_units)). So the power may fail at any
//! point: before step 3 the old stripes of the window are complete, after it the new ones are. A
//! window is as large as that allows.
//!
//! Each geometry has its own rows, locks, parity and log. They share members, write-intent bitmap,
//! bad blocks and superblocks. Entries that a crash leaves in the old geometry's log are void for
//! stripes that were moved.

use super::Array;
use super::batch::all;
use super::channel::ArrayChannel;
use super::coalesce::RunWriter;
use super::committer::MetadataCommitter;
use super::registry;
use super::remote::LocalFuture;
use super::request::Source;
use super::reshape_router::ReshapeRouter;
use super::shared::{OLD_STRIPES, Shapes};
use super::stripe_owner::StripeOwner;
use crate::metadata::{BadBlocksError, BadRange, MemberFailures, MemberState, Table};
use crate::mutant::{self, Mutant};
use crate::stripe::rect::Run;
use block::{Data, Flags, IoError, IoResult, Request, Segment};
use reactor::{Buffer, BufferPool};
use std::ops::Range;
use std::rc::Rc;

/// The progress of a reshape, in bytes of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes in the new geometry.
    pub done: u64,
    /// Total bytes.
    pub total: u64,
}

impl Array {
    /// Whether a reshape is in progress.
    pub fn is_reshaping(&self) -> bool {
        self.router().is_some()
    }

    /// The progress of the reshape; `None` without one.
    pub fn moved(&self) -> Option<Moved> {
        self.router().map(|router| {
            let total = router.new_bytes;
            Moved { done: router.moved().min(total), total }
        })
    }

    pub(super) fn router(&self) -> Option<&ReshapeRouter> {
        match self.shared.common.shapes() {
            Shapes::One => None,
            Shapes::Two(router) => Some(router),
        }
    }

    /// Moves the next `bytes` of the array to the new geometry, or as many as can be moved at a
    /// time. Returns false if none are left. Called by one task at a time. Must run on a core.
    ///
    /// # Errors
    /// If they could not be moved: they keep the old geometry. [`IoError::Invalid`] while a slot
    /// has an incoming device.
    pub async fn move_window(&self, bytes: u64) -> Result<bool, IoError> {
        let Some(router) = self.router() else { return Ok(false) };
        let Some(end) = router.next_end(bytes) else { return Ok(false) };
        let begin = router.moved();
        let channel = ArrayChannel::new(self.owner());
        let moving = Moving::new(&channel, router).ok_or(IoError::Invalid)?;
        router.open_window(end, || self.drain(router, begin, end)).await;
        let moved = match self.shared.members.is_any_filling() {
            true => Err(IoError::Invalid), // its cursor counts stripes of both geometries
            false => moving.all(begin..end.min(router.new_bytes)).await,
        };
        if let Err(error) = moved {
            router.close_window(begin);
            self.wake(router).await;
            return Err(error);
        }
        let set_cursor = move |table: &mut Table| {
            if let Some(reshape) = &mut table.reshape {
                reshape.cursor = end;
            }
        };
        if !mutant::is(Mutant::CursorNotAwaited)
            && let Err(error) = self.note(set_cursor).await
        {
            // Members may have the new cursor, so the old geometry must not be written any more.
            self.shared.freeze("the position of the reshape is unknown");
            self.wake(router).await;
            return Err(error);
        }
        router.close_window(end);
        self.wake(router).await;
        Ok(true)
    }

    /// Waits for the requests in a window that cores have let in before it was opened.
    async fn drain(&self, router: &ReshapeRouter, begin: u64, end: u64) {
        let drain = move |owner: Rc<StripeOwner>| -> LocalFuture<()> {
            Box::pin(async move { owner.tracker.drain(begin, end).await })
        };
        registry::run_each(&router.trackers(), self.shared.common.lead, drain).await;
    }

    /// Wakes requests that wait for the end of a window.
    async fn wake(&self, router: &ReshapeRouter) {
        let wake =
            |owner: Rc<StripeOwner>| -> LocalFuture<()> { Box::pin(async move { owner.tracker.wake() }) };
        registry::run_each(&router.trackers(), self.shared.common.lead, wake).await;
    }

    /// Ends the reshape after all bytes were moved. Must run on a core.
    ///
    /// # Errors
    /// An error of the commit; [`IoError::Invalid`] while a slot has an incoming device.
    pub async fn end_reshape(&self) -> IoResult {
        let is_moved = self.router().is_some_and(|router| router.next_end(0).is_none());
        if !is_moved || self.shared.members.is_any_filling() {
            return Err(IoError::Invalid);
        }
        self.forget_old_bad().await?;
        self.shared.on_committer(|committer| Box::pin(async move { committer.end_reshape().await })).await
    }

    /// Removes the bad blocks of the old geometry, which have no use any more.
    async fn forget_old_bad(&self) -> IoResult {
        let (owner, bad) = (self.owner(), &self.shared.common.bad);
        while let Some(range) = bad.ranges().into_iter().find(|range| range.stripe >= OLD_STRIPES) {
            match bad.remove(range, &*owner).await {
                Ok(()) => {}
                Err(BadBlocksError::Members(MemberFailures(failures))) => {
                    owner.members_failed(failures).await?;
                }
                Err(BadBlocksError::Full(_)) => return Err(IoError::NoSpace),
            }
        }
        Ok(())
    }
}

/// A window during its move.
struct Moving<'a> {
    new: &'a ArrayChannel,
    old: &'a ArrayChannel,
    router: &'a ReshapeRouter,
    pool: BufferPool,
}

/// Memory for the bytes of a stripe, in strips of the new geometry.
struct Stripe {
    segments: Vec<Segment>,
    /// The memory of the segments.
    _buffers: Vec<Buffer>,
}

impl<'a> Moving<'a> {
    fn new(new: &'a ArrayChannel, router: &'a ReshapeRouter) -> Option<Moving<'a>> {
        let pool = BufferPool::new(MEMORY.max(new.shared.config.geometry.stripe_bytes() as usize * 2));
        Some(Moving { new, old: new.old()?, router, pool })
    }

    /// Moves whole stripes of the new geometry.
    async fn all(&self, bytes: Range<u64>) -> IoResult {
        let stripe_bytes = self.new.shared.config.geometry.stripe_bytes();
        let stripes = bytes.start / stripe_bytes..bytes.end / stripe_bytes;
        all(stripes.map(|stripe| self.stripe(stripe))).await
    }

    async fn stripe(&self, stripe: u64) -> IoResult {
        let geometry = &self.new.shared.config.geometry;
        let (at, len) = (stripe * geometry.stripe_bytes(), geometry.stripe_bytes());
        let run = Run { stripe, offset: 0, len, at: 0 };
        let old_len = self.router.old_bytes.saturating_sub(at).min(len);
        if old_len == 0 {
            return self.new.write_run(run, Source::Zeroes, Flags::NONE).await; // added capacity
        }
        let held = self.memory().await;
        // SAFETY: `held` lives until the last request has ended, and no other code uses its
        // buffers.
        let data = unsafe { Data::new(&held.segments).stable() };
        data.part(old_len as usize, (len - old_len) as usize).fill(0);
        let bad = self.read(data.part(0, old_len as usize), at).await?;
        self.new.write_run(run, Source::Data(data), Flags::NONE).await?;
        for range in bad {
            self.new.owner.note_bad(range).await?;
        }
        drop(held);
        Ok(())
    }

    async fn memory(&self) -> Stripe {
        let geometry = &self.new.shared.config.geometry;
        let strip_bytes = geometry.strip_bytes as usize;
        let mut buffers = Vec::new();
        for _ in 0..geometry.data {
            buffers.push(self.pool.take(strip_bytes).await);
        }
        let segment =
            |buffer: &mut Buffer| Segment { base: buffer.as_mut_slice().as_mut_ptr(), len: strip_bytes };
        let segments = buffers.iter_mut().map(segment).collect();
        Stripe { segments, _buffers: buffers }
    }

    /// Reads bytes in the old geometry. Lost blocks become zeroes; returns their ranges, which are
    /// bad in the new geometry.
    async fn read(&self, data: Data<'_>, at: u64) -> Result<Vec<BadRange>, IoError> {
        match self.old.in_shape(&Request::read(data), at).await {
            Err(IoError::Medium | IoError::Corrupt) => {}
            result => return result.map(|()| Vec::new()),
        }
        let (shared, mut bad) = (&self.new.shared, Vec::new());
        let block = shared.config.block_size as usize;
        for from in (0..data.len()).step_by(block) {
            let part = data.part(from, block);
            match self.old.in_shape(&Request::read(part), at + from as u64).await {
                Ok(()) => continue,
                Err(IoError::Medium | IoError::Corrupt) => self.old.shared.common.check_frozen()?,
                Err(error) => return Err(error),
            }
            part.fill(0);
            let place = shared.config.geometry.locate(at + from as u64);
            bad.push(shared.bad_range(place.stripe, 1 << place.strip, place.offset, block as u32));
        }
        Ok(bad)
    }
}

/// Memory for the stripes of a window during their move.
const MEMORY: usize = 16 << 20;

impl MetadataCommitter {
    /// Commits the end of the reshape.
    async fn end_reshape(&self) -> IoResult {
        let shared = self.shared().clone();
        let change = |table: &mut Table| {
            table.reshape = None;
            for member in &mut table.members {
                // The data of an absent member has the old geometry, so it is rebuilt completely.
                if let MemberState::Missing { since } = &mut member.state {
                    *since = 0;
                }
            }
        };
        let apply = async || {
            let Shapes::Two(router) = shared.common.shapes() else { return };
            router.end();
            shared.common.limits.set_capacity(router.new_bytes);
        };
        self.while_quiesced(async || Ok(()), change, apply, None).await
    }
}

#[cfg(test)]
mod tests;
