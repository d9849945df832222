//! A change of shape, window by window, while the array is served.
//!
//! ```text
//!   1  requests to the window wait, those under way end      the other bytes are served meanwhile
//!   2  its bytes are read as the old shape has them, and written as whole stripes of the new one
//!   3  superblock: the cursor is behind the window           ◄─ the window has the new shape
//!   4  requests go on
//! ```
//!
//! New stripes lie where no byte of the old shape is needed any more ([`Reshape::most_units`](crate::metadata::Reshape::most_units)), so power may go anywhere: before
//! 3 the old stripes of the window are whole, after it the new ones are. A window is as large as that allows.
//!
//! Both shapes have rows, locks, parity and a log of their own, and share members, region map, bad blocks and superblocks.
//! What a crash has left in the old shape's log of stripes that were moved since is void.

use super::Array;
use super::channel::{ArrayChannel, all};
use super::crossing::Crossing;
use super::home::Home;
use super::owner::Source;
use super::shared::OLD_STRIPES;
use crate::metadata::{BadBlocksError, BadRange, MemberFailures, MemberState, Table};
use crate::mutant::{self, Mutant};
use crate::stripe::rect::Run;
use block::{Data, Flags, IoError, IoResult, Request, Segment};
use reactor::{Buffer, BufferPool};
use std::ops::Range;

/// How far a change of shape is, in bytes of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes that have the new shape.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

impl Array {
    /// Whether the array changes its shape.
    pub fn is_reshaping(&self) -> bool {
        self.crossing().is_some()
    }

    /// How far the change of shape is; `None` when there is none.
    pub fn moved(&self) -> Option<Moved> {
        self.crossing().map(|crossing| {
            let total = crossing.new_bytes;
            Moved { done: crossing.moved().min(total), total }
        })
    }

    pub(super) fn crossing(&self) -> Option<&Crossing> {
        self.shared.crossing.as_ref().filter(|crossing| crossing.is_on())
    }

    /// Gives the next `bytes` of the array their new shape, or as many as can be moved at a time; whether there were any.
    /// Called by one task at a time. On a core.
    ///
    /// # Errors
    /// When they could not be moved: they have their old shape. [`IoError::Invalid`] while a slot is being filled.
    pub async fn move_window(&self, bytes: u64) -> Result<bool, IoError> {
        let Some(crossing) = self.crossing() else { return Ok(false) };
        let Some(end) = crossing.next_end(bytes) else { return Ok(false) };
        let (lead, begin) = (self.shared.lead, crossing.moved());
        let channel = ArrayChannel::new(self.owner());
        let moving = Moving::new(&channel, crossing).ok_or(IoError::Invalid)?;
        crossing.open_window(lead, end).await;
        let moved = match self.shared.members.is_any_filling() {
            true => Err(IoError::Invalid), // how far that is counts stripes of both shapes
            false => moving.all(begin..end.min(crossing.new_bytes)).await,
        };
        if let Err(error) = moved {
            crossing.close_window(lead, begin).await;
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
            // Members may hold the new cursor, so the old shape must not change any more.
            self.shared.freeze("it is not known how far its change of shape is");
            crossing.wake(lead).await;
            return Err(error);
        }
        crossing.close_window(lead, end).await;
        Ok(true)
    }

    /// The change of shape is over: everything was moved. On a core.
    ///
    /// # Errors
    /// What the commit says; [`IoError::Invalid`] while a slot is being filled.
    pub async fn end_reshape(&self) -> IoResult {
        let is_moved = self.crossing().is_some_and(|crossing| crossing.next_end(0).is_none());
        if !is_moved || self.shared.members.is_any_filling() {
            return Err(IoError::Invalid);
        }
        self.forget_old_bad().await?;
        self.shared.at_home(|home| Box::pin(async move { home.end_reshape().await })).await
    }

    /// Bad blocks of the old shape are of no meaning any more.
    async fn forget_old_bad(&self) -> IoResult {
        let (owner, bad) = (self.owner(), &self.shared.bad);
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

/// A window that is being moved.
struct Moving<'a> {
    new: &'a ArrayChannel,
    old: &'a ArrayChannel,
    crossing: &'a Crossing,
    pool: BufferPool,
}

/// Memory for the bytes of a stripe, in strips of the new shape.
struct Stripe {
    segments: Vec<Segment>,
    /// What the segments are.
    _buffers: Vec<Buffer>,
}

impl<'a> Moving<'a> {
    fn new(new: &'a ArrayChannel, crossing: &'a Crossing) -> Option<Moving<'a>> {
        let pool = BufferPool::new(MEMORY.max(new.shared.config.geometry.stripe_bytes() as usize * 2));
        Some(Moving { new, old: new.old()?, crossing, pool })
    }

    /// Moves whole stripes of the new shape.
    async fn all(&self, bytes: Range<u64>) -> IoResult {
        let stripe_bytes = self.new.shared.config.geometry.stripe_bytes();
        let stripes = bytes.start / stripe_bytes..bytes.end / stripe_bytes;
        all(stripes.map(|stripe| self.stripe(stripe))).await
    }

    async fn stripe(&self, stripe: u64) -> IoResult {
        let geometry = &self.new.shared.config.geometry;
        let (at, len) = (stripe * geometry.stripe_bytes(), geometry.stripe_bytes());
        let run = Run { stripe, offset: 0, len, at: 0 };
        let old_len = self.crossing.old_bytes.saturating_sub(at).min(len);
        if old_len == 0 {
            return self.new.write_run(run, Source::Zeroes, Flags::NONE).await; // the array grows
        }
        let held = self.memory().await;
        // SAFETY: `held` lives until the last request has ended, and nobody else knows its buffers.
        let data = unsafe { Data::new(&held.segments) };
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

    /// Reads bytes as the old shape has them. What nothing can bring back becomes zeroes, and is bad in the new shape:
    /// these ranges.
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
                Err(IoError::Medium | IoError::Corrupt) => self.old.shared.check_frozen()?,
                Err(error) => return Err(error),
            }
            part.fill(0);
            let place = shared.config.geometry.locate(at + from as u64);
            bad.push(shared.bad_range(place.stripe, 1 << place.strip, place.offset, block as u32));
        }
        Ok(bad)
    }
}

/// Bytes that a window's stripes take while they are moved.
const MEMORY: usize = 16 << 20;

impl Home {
    /// Commits that the array has its new shape.
    async fn end_reshape(&self) -> IoResult {
        let shared = self.shared().clone();
        let change = |table: &mut Table| {
            table.reshape = None;
            for member in &mut table.members {
                // Who was away has everything in the old shape.
                if let MemberState::Missing { since } = &mut member.state {
                    *since = 0;
                }
            }
        };
        let apply = async || {
            let Some(crossing) = &shared.crossing else { return };
            crossing.end();
            shared.limits.set_capacity(crossing.new_bytes);
        };
        self.quietly(async || Ok(()), change, apply, None).await
    }
}

#[cfg(test)]
mod tests;
