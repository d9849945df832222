//! The channel of one core to an array. Healthy reads go directly to a member, all other requests
//! to the stripe's owner.

use super::batch::{Batch, all};
use super::boundary::Shape;
use super::coalesce::{RunWriter, WriteCoalescer, write_in_stream};
use super::hedge::{self, Place};
use super::members::{MemberChannel, MemberRole};
use super::request::{Caller, Source, StripeRequest, WriteRequest};
use super::shared::{Shapes, Shared};
use super::stripe_owner::StripeOwner;
use crate::Geometry;
use crate::config::Consistency;
use crate::metadata::intent_bitmap::NEED_SYNC;
use crate::stripe::rect::{Rect, Run, runs};
use crate::stripe::streams::StreamId;
use arrayvec::ArrayVec;
use block::{Channel, Flags, IoError, IoFuture, IoResult, MAX_JOINED, Op, Request, StatusReport, join_all};
use reactor::Core;
use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of plain reads for each one whose latency is measured.
const READS_PER_SAMPLE: u32 = 64;
/// Reads in flight by which a copy of a mirror exceeds another one before that is read instead.
const COPY_LEAD: u32 = 4;

/// The channel of one core to an array.
pub(crate) struct ArrayChannel {
    pub(super) owner: Rc<StripeOwner>,
    pub(super) shared: Arc<Shared>,
    /// The channel of the old geometry during a reshape.
    old: Option<Box<ArrayChannel>>,
    /// Plain reads while latencies are measured.
    reads: Cell<u32>,
    /// Counted reads in flight on each slot; all reads of a mirror are counted.
    in_flight: Box<[Cell<u32>]>,
}

impl ArrayChannel {
    pub fn new(owner: Rc<StripeOwner>) -> ArrayChannel {
        let old = owner.old.clone().map(|old| Box::new(ArrayChannel::new(old)));
        let in_flight = vec![Cell::new(0); owner.shared.config.geometry.members()].into_boxed_slice();
        ArrayChannel { shared: owner.shared.clone(), owner, old, reads: Cell::new(0), in_flight }
    }

    /// The channel of the old geometry during a reshape.
    pub(super) fn old(&self) -> Option<&ArrayChannel> {
        self.old.as_deref()
    }

    /// The place and channel of a plain request to one data strip; `None` if the request cannot be
    /// plain.
    #[inline]
    fn plain_place(&self, offset: u64, len: u64) -> Option<(Place, MemberChannel)> {
        let shared = &self.shared;
        let geometry = &shared.config.geometry;
        let located = geometry.locate(offset);
        let stripe = located.stripe;
        let (strip, slot, role) = match shared.config.is_mirror() {
            // Copies may differ: the owner makes them equal before it returns one.
            true if shared.region(stripe) & NEED_SYNC != 0 => return None,
            true => self.copy_to_read(stripe, offset)?,
            false => {
                let slot = geometry.member(stripe, located.strip);
                (located.strip, slot, self.role_of(slot, stripe)?)
            }
        };
        if shared.common.is_frozen() || shared.has_bad(stripe) {
            return None;
        }
        let place = Place { stripe, strip, offset: located.offset, len: len as u32, slot, role };
        Some((place, self.owner.channels.get(slot, role)?))
    }

    /// The device of a slot that has the data of a stripe; `None` if the slot lacks it.
    #[inline]
    fn role_of(&self, slot: usize, stripe: u64) -> Option<MemberRole> {
        match self.shared.members.is_live(slot) {
            true => Some(MemberRole::Current),
            false => self.shared.members.is_done(slot, stripe).then_some(MemberRole::Replacement),
        }
    }

    /// The copy of a mirror's stripe that a read at `offset` of the array goes to. Copies alternate
    /// every 64 KiB, so that neighbouring blocks are read from one copy. Another one is read if the
    /// slot lacks the data, or if its reads take longer, so that more of them are in flight.
    #[inline]
    fn copy_to_read(&self, stripe: u64, offset: u64) -> Option<(usize, usize, MemberRole)> {
        let geometry = &self.shared.config.geometry;
        let copies = geometry.group_members();
        let first = ((offset >> 16) % copies as u64) as usize;
        let mut best = None;
        let mut least = u32::MAX;
        for strip in (first..copies).chain(0..first) {
            let slot = geometry.member(stripe, strip);
            let reads = self.in_flight[slot].get();
            if reads.saturating_add(COPY_LEAD) < least
                && let Some(role) = self.role_of(slot, stripe)
            {
                (best, least) = (Some((strip, slot, role)), reads);
            }
        }
        best
    }

    /// Counts a read as in flight on a slot until the result is dropped.
    #[inline]
    fn begin_read(&self, slot: usize) -> Reading<'_> {
        let reads = &self.in_flight[slot];
        reads.set(reads.get() + 1);
        Reading(reads)
    }

    /// A request inside one strip that needs no parity: a read, or any request of an array without
    /// redundancy.
    #[inline]
    fn plain<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let Some((place, member)) = self.plain_place(offset, req.len) else {
            return IoFuture::new(self.slow(req, offset, None));
        };
        if self.shared.common.deadlines.is_limited()
            && self.shared.config.geometry.parity > 0
            && self.owner.waiting.has_room(req.len)
        {
            return IoFuture::new(self.limited(req, offset, place, member));
        }
        let position = self.owner.position(&member, place.stripe, place.offset);
        let is_sampled = self.shared.common.samples.is_watched() && self.is_sampled();
        if is_sampled || self.shared.config.is_mirror() {
            let read = async move { member.channel.submit(req, position).await };
            return IoFuture::new(self.counted(req, offset, (place.stripe, place.slot), is_sampled, read));
        }
        IoFuture::new(async move {
            let result = member.channel.submit(req, position).await;
            self.end_plain(result, req, offset, place.stripe).await
        })
    }

    /// Runs a plain request that counts as in flight on its slot; its latency is measured if it is
    /// a sample.
    async fn counted(
        &self,
        req: &Request<'_>,
        offset: u64,
        (stripe, slot): (u64, usize),
        is_sampled: bool,
        request: impl Future<Output = IoResult>,
    ) -> IoResult {
        let started_ns = if is_sampled { self.owner.core.now_ns() } else { 0 };
        let reading = self.begin_read(slot);
        let result = request.await;
        drop(reading);
        if is_sampled {
            self.shared.common.samples.note(self.owner.core.now_ns().saturating_sub(started_ns));
        }
        self.end_plain(result, req, offset, stripe).await
    }

    /// Ends a plain request: returns success, or repeats it on the slow path.
    #[inline]
    async fn end_plain(&self, result: IoResult, req: &Request<'_>, offset: u64, stripe: u64) -> IoResult {
        // Blocks of the stripe may have been lost meanwhile, and zeroed.
        if result.is_ok() && !self.shared.has_bad(stripe) {
            return Ok(());
        }
        IoFuture::new(self.slow(req, offset, result.err())).await
    }

    /// A read with a timeout for a late member.
    async fn limited(&self, req: &Request<'_>, offset: u64, place: Place, member: MemberChannel) -> IoResult {
        let is_sampled = self.shared.common.samples.is_watched() && self.is_sampled();
        let at = (place.stripe, place.slot);
        let read = hedge::read(self.owner.clone(), member, place, req);
        self.counted(req, offset, at, is_sampled, read).await
    }

    /// Whether to measure the latency of this read: one in [`READS_PER_SAMPLE`].
    fn is_sampled(&self) -> bool {
        let reads = self.reads.get().wrapping_add(1);
        self.reads.set(reads);
        reads.is_multiple_of(READS_PER_SAMPLE)
    }

    /// A write with a measured latency.
    async fn timed(&self, write: impl Future<Output = IoResult>) -> IoResult {
        let started_ns = self.owner.core.now_ns();
        let result = write.await;
        self.shared.common.samples.note(self.owner.core.now_ns().saturating_sub(started_ns));
        result
    }

    /// Handles requests that cannot be plain.
    async fn slow(&self, req: &Request<'_>, offset: u64, error: Option<IoError>) -> IoResult {
        let place = self.shared.config.geometry.locate(offset);
        if self.shared.config.geometry.parity == 0 || req.op != Op::Read {
            return Err(error.unwrap_or(IoError::Medium));
        }
        if let Some(IoError::Invalid | IoError::Misaligned | IoError::OutOfRange) = error {
            return Err(error.expect("just matched")); // an error of the request, not of the member
        }
        let (stripe, strip, offset) = (place.stripe, place.strip, place.offset);
        self.shared.check_bad(stripe, strip, offset, req.len as u32)?;
        // SAFETY: the request completes after this future does.
        let data = unsafe { Caller::new(req.data) };
        self.owner.on_owner(StripeRequest::Read { stripe, strip, offset, data }).await
    }

    /// A request that spans strips, executed strip by strip.
    async fn by_strips(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let strip_bytes = u64::from(self.shared.config.geometry.strip_bytes);
        let mut at = 0;
        while at < req.len {
            let mut parts = ArrayVec::<(Request<'_>, u64), MAX_JOINED>::new();
            while at < req.len && !parts.is_full() {
                let position = offset + at;
                let len = (strip_bytes - position % strip_bytes).min(req.len - at);
                parts.push((req.part(at, len), position));
                at += len;
            }
            join_all(parts.iter().map(|(part, position)| self.in_strip(part, *position))).await?;
        }
        Ok(())
    }

    /// The stream of a write, if it belongs to one and does not fit stripes.
    #[inline]
    fn stream_of(&self, offset: u64, len: u64) -> Option<StreamId> {
        if self.shared.config.geometry.data == 1 {
            return None;
        }
        self.owner.coalescer.stream_of(offset, len, || self.owner.core.now_ns())
    }

    async fn write(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let geometry = &self.shared.config.geometry;
        if req.op == Op::Write
            && let Some(stream) = self.stream_of(offset, req.len)
        {
            return Box::pin(write_in_stream(self, req, offset, stream)).await;
        }
        let source = if req.op == Op::Write { Source::Data(req.data) } else { Source::Zeroes };
        let mut runs = runs(geometry, offset, req.len);
        let first = runs.next().expect("a request is not empty");
        if first.len == req.len {
            return self.write_run(first, source, req.flags).await;
        }
        let rects = std::iter::once(first).chain(runs).flat_map(|run| run.rects(geometry));
        Box::pin(all(rects.map(|rect| self.write_rect(rect, source, req.flags)))).await
    }

    async fn write_rect(&self, rect: Rect, source: Source<'_>, flags: Flags) -> IoResult {
        // SAFETY: the request completes after this future does.
        self.owner.on_owner(unsafe { StripeRequest::write(WriteRequest { rect, source, flags }) }).await
    }

    /// A request inside one strip: a plain one, or a write to a mirror.
    #[inline]
    fn in_strip<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if req.op == Op::Read || self.shared.config.geometry.parity == 0 {
            return self.plain(req, offset);
        }
        match self.shared.common.samples.is_watched() {
            true => IoFuture::new(self.timed(self.write_mirror(req, offset))),
            false => IoFuture::new(self.write_mirror(req, offset)),
        }
    }

    /// A write inside one strip of a mirror.
    async fn write_mirror(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let place = self.shared.config.geometry.locate(offset);
        let (stripe, offset_in_strip, len) = (place.stripe, place.offset, req.len as u32);
        let rect = Rect { stripe, first: 0, count: 1, offset: offset_in_strip, len, at: 0 };
        let request = WriteRequest { rect, source: Source::Data(req.data), flags: req.flags };
        if self.owner.write_copies(&request).await? {
            return Ok(());
        }
        IoFuture::new(self.write_rect(rect, request.source, request.flags)).await
    }

    /// Zeroes whole stripes, so that parity stays valid; a discard guarantees nothing for the rest.
    async fn discard(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let stripe_bytes = self.shared.config.geometry.stripe_bytes();
        let from = offset.next_multiple_of(stripe_bytes);
        let end = (offset + req.len) / stripe_bytes * stripe_bytes;
        if from >= end {
            return Ok(());
        }
        let zeroes = Request::write_zeroes(end - from, Flags::NONE);
        self.write(&zeroes, from).await
    }

    async fn flush(&self) -> IoResult {
        if self.shared.config.consistency != Consistency::None {
            return Ok(()); // every acknowledged write is durable
        }
        let mut batch = Batch::default();
        for slot in 0..self.shared.config.geometry.members() {
            let member = self.owner.channels.get(slot, MemberRole::Current).ok_or(IoError::DeviceGone)?;
            batch.add_plain(slot as u32, member.channel, Request::flush(), 0);
        }
        batch.run().await;
        batch.failures().next().map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl RunWriter for ArrayChannel {
    fn coalescer(&self) -> &WriteCoalescer {
        &self.owner.coalescer
    }

    fn geometry(&self) -> &Geometry {
        &self.shared.config.geometry
    }

    fn core(&self) -> &Core {
        &self.owner.core
    }

    fn count_joined(&self) {
        self.shared.common.counters.joined_writes.fetch_add(1, Ordering::Relaxed);
    }

    async fn write_run(&self, run: Run, source: Source<'_>, flags: Flags) -> IoResult {
        let rects = run.rects(&self.shared.config.geometry);
        match rects[..] {
            [rect] => self.write_rect(rect, source, flags).await,
            _ => Box::pin(all(rects.into_iter().map(|rect| self.write_rect(rect, source, flags)))).await,
        }
    }
}

/// A read in flight, until this is dropped.
struct Reading<'a>(&'a Cell<u32>);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Channel for ArrayChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.shared.common.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        if req.op == Op::Flush {
            return IoFuture::new(self.flush());
        }
        if req.len == 0 {
            return IoFuture::ready(Ok(()));
        }
        match &self.old {
            Some(old) => IoFuture::new(self.across(old, req, offset)),
            None => self.in_shape(req, offset),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.shared.common.limits.answer_data(report, offset, len)
    }
}

impl ArrayChannel {
    /// A request during a reshape. Each part waits until its bytes are not being moved, and uses
    /// their geometry.
    async fn across(&self, old: &ArrayChannel, req: &Request<'_>, offset: u64) -> IoResult {
        let Shapes::Two(router) = self.shared.common.shapes() else {
            return self.in_shape(req, offset).await;
        };
        let mut at = 0;
        while at < req.len {
            let tracker = &self.owner.tracker;
            let rest = (offset + at, req.len - at);
            let entered = tracker.enter(router, rest, || self.shared.common.is_frozen()).await;
            let (shape, len, _inside) = entered.ok_or(IoError::Medium)?;
            let part = req.part(at, len);
            match shape {
                Shape::New => self.in_shape(&part, offset + at).await?,
                Shape::Old => old.in_shape(&part, offset + at).await?,
            }
            at += len;
        }
        Ok(())
    }

    /// A request to bytes in this geometry.
    #[inline]
    pub(super) fn in_shape<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let geometry = &self.shared.config.geometry;
        let is_mirrored = req.op == Op::Write && self.shared.config.is_mirror();
        if req.op == Op::Read || geometry.parity == 0 || is_mirrored {
            let strip_bytes = u64::from(geometry.strip_bytes);
            let is_one = offset / strip_bytes == (offset + req.len - 1) / strip_bytes;
            return if is_one {
                self.in_strip(req, offset)
            } else {
                IoFuture::new(self.by_strips(req, offset))
            };
        }
        match req.op {
            Op::Discard => IoFuture::new(self.discard(req, offset)),
            _ if self.shared.common.samples.is_watched() => {
                IoFuture::new(self.timed(self.write(req, offset)))
            }
            _ => IoFuture::new(self.write(req, offset)),
        }
    }
}
