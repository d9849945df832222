//! Writes in sequence that do not fit stripes: neighbours in one stripe become one write.
//!
//! ```text
//!   requests      ├── 1 ──┤├── 2 ──┤├── 3 ──┤├── 4 ──┤        in flight at the same time
//!   stripes     │    a    │    b    │    c    │    d    │
//!   written          1       1+2       2+3     3+4            the whole stripe, with nothing read
//! ```
//!
//! A part of a stripe is written by reading first, under a lock of its rows; parts of one stripe
//! would do that one after the other. So what is written in a stream (`stripe/streams.rs`) looks
//! for company:
//!
//! 1. It joins the write before it if that one still waits.
//! 2. It waits behind a write of the same rows, which it would do anyway; meanwhile others join it.
//! 3. It waits for the rest of its stripe if a steady stream will bring that soon. The wait ends
//!    when the stripe is full, or when nothing else of the stream is in flight and nothing comes.
//!    It lasts at most as long as a write of the stream takes.
//! 4. Otherwise it goes at once. Writes of no stream, writes that come one at a time, and streams
//!    too thin to fill a stripe never wait for company that does not come.
//!
//! A joint write is a write like any other, with data in several places. It is copied when its rows
//! are locked, logged, and durable as a whole before any of its requests is acknowledged. It has
//! FUA if one of them has it. No memory is held but the requests' own, whose callers wait. When it
//! fails, each request is tried by itself and ends as it would have ended alone.

use super::batch::all;
use super::request::{Caller, Source};
use crate::Geometry;
use crate::mutant::{self, Mutant};
use crate::stripe::rect::{Run, runs};
use crate::stripe::streams::{StreamId, Streams, Waiting};
use block::{Data, Flags, IoResult, Request, Segment};
use reactor::Core;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Requests that are joined, at most.
const MOST_PARTS: usize = 256;
/// Writes of streams that are looked after at a time; more go without.
const MOST_WRITES: usize = 64;

/// The channel whose writes are joined, and which writes them. One for each shape of a core.
pub(super) trait RunWriter {
    /// The joint writes of this core.
    fn coalescer(&self) -> &WriteCoalescer;

    /// The stripes.
    fn geometry(&self) -> &Geometry;

    /// This core.
    fn core(&self) -> &Core;

    /// Writes a part of a stripe. The memory of `source` is valid until the future ends.
    fn write_run(&self, run: Run, source: Source<'_>, flags: Flags) -> impl Future<Output = IoResult>;

    /// Counts a part of a request that was written together with others.
    fn count_joined(&self);
}

/// The joint writes of one core.
#[derive(Default)]
pub(crate) struct WriteCoalescer {
    streams: Streams,
    /// Writes that wait for company.
    open: RefCell<Vec<Rc<Joint>>>,
    /// Parts of stripes that are being written, with the numbers of their writes.
    busy: RefCell<Vec<(u64, Run)>>,
    next: Cell<u64>,
}

/// A write that waits for others to join it, and then for its end. The first request writes it.
struct Joint {
    stripe: u64,
    /// First byte in the stripe's data.
    from: u64,
    stream: StreamId,
    /// Writes with lower numbers were there before.
    number: u64,
    /// Since when no other write holds its rows.
    since_ns: Cell<u64>,
    is_blocked: Cell<bool>,
    /// The byte behind the last.
    to: Cell<u64>,
    /// Bytes of the requests in it, as far as they reach into other stripes, too.
    held: Cell<u64>,
    /// In the order of their places.
    parts: RefCell<Vec<Part>>,
    /// Of the first part, while it waits.
    leader: RefCell<Option<Waker>>,
    result: Cell<Option<IoResult>>,
}

struct Part {
    data: Caller<'static>,
    flags: Flags,
    /// The task that waits for the end.
    waker: Option<Waker>,
}

/// The way in which a part of a stripe is written.
enum Placed {
    /// It is the part with that number of a joint write.
    Joined(Rc<Joint>, usize),
    /// It waits for others.
    Leads(Rc<Joint>),
    /// It is written at once.
    Alone,
}

impl Joint {
    fn run(&self) -> Run {
        Run { stripe: self.stripe, offset: self.from, len: self.to.get() - self.from, at: 0 }
    }

    fn is_single(&self) -> bool {
        self.parts.borrow().len() == 1
    }

    fn waiting(&self, geometry: &Geometry) -> Waiting {
        let missing = geometry.stripe_bytes() - self.to.get();
        Waiting { stream: self.stream, held: self.held.get(), missing, since_ns: self.since_ns.get() }
    }

    fn is_complete(&self, geometry: &Geometry) -> bool {
        self.to.get() == geometry.stripe_bytes() || self.parts.borrow().len() == MOST_PARTS
    }

    fn add(&self, run: &Run, request: &Request<'_>) -> usize {
        // SAFETY: the request ends after the joint write, of which its future waits for the end.
        let data = unsafe { Caller::new(request.data.part(run.at as usize, run.len as usize)) };
        self.to.set(run.offset + run.len);
        self.held.set(self.held.get() + request.len);
        let parts = &mut *self.parts.borrow_mut();
        parts.push(Part { data, flags: request.flags, waker: None });
        parts.len() - 1
    }

    /// The memory of all parts, whether all of it is stable, and flags that do for each.
    fn content(&self) -> (Vec<Segment>, bool, Flags) {
        let parts = self.parts.borrow();
        let segments = parts.iter().flat_map(|part| part.data.data().iter()).collect();
        let is_stable = parts.iter().all(|part| part.data.data().is_stable());
        (segments, is_stable, parts.iter().fold(Flags::NONE, |flags, part| flags.with(part.flags)))
    }

    fn wake_leader(&self) {
        if let Some(waker) = self.leader.take() {
            waker.wake();
        }
    }

    fn finish(&self, result: IoResult) {
        self.result.set(Some(result));
        self.parts.borrow_mut().iter_mut().filter_map(|part| part.waker.take()).for_each(Waker::wake);
    }

    /// Waits until the part with that number has been written with the others.
    async fn end(&self, number: usize) -> IoResult {
        poll_fn(|cx| match self.result.get() {
            Some(result) => Poll::Ready(result),
            None => {
                self.parts.borrow_mut()[number].waker = Some(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

impl WriteCoalescer {
    /// The stream of a write, if it belongs to one and does not fit stripes.
    #[inline]
    pub fn stream_of(&self, offset: u64, len: u64, now_ns: impl FnOnce() -> u64) -> Option<StreamId> {
        self.streams.begin(offset, len, now_ns)
    }

    /// Finds the stream of a write that begins.
    fn place(
        &self,
        run: &Run,
        request: &Request<'_>,
        stream: StreamId,
        geometry: &Geometry,
        now_ns: u64,
    ) -> Placed {
        let mut open = self.open.borrow_mut();
        let joined = open.iter().find(|joint| joint.stripe == run.stripe && joint.to.get() == run.offset);
        if let Some(joint) = joined.filter(|joint| !joint.is_complete(geometry)) {
            let number = joint.add(run, request);
            if joint.is_complete(geometry) {
                self.streams.came(&joint.waiting(geometry), now_ns);
                joint.wake_leader();
            }
            return Placed::Joined(joint.clone(), number);
        }
        let end = run.offset + run.len;
        let waiting =
            Waiting { stream, held: request.len, missing: geometry.stripe_bytes() - end, since_ns: now_ns };
        let is_blocked = self.is_busy(run, self.next.get(), geometry);
        let has_company = waiting.missing > 0 && self.streams.deadline_ns(&waiting, now_ns).is_some();
        if open.len() == MOST_WRITES || !(is_blocked || has_company) {
            return Placed::Alone;
        }
        let joint = Rc::new(Joint {
            stripe: run.stripe,
            from: run.offset,
            stream,
            number: self.next.get(),
            since_ns: Cell::new(now_ns),
            is_blocked: Cell::new(is_blocked),
            to: Cell::new(run.offset),
            held: Cell::new(0),
            parts: RefCell::default(),
            leader: RefCell::default(),
            result: Cell::new(None),
        });
        joint.add(run, request);
        open.push(joint.clone());
        Placed::Leads(joint)
    }

    /// Whether a write that began before has rows of a part.
    fn is_busy(&self, run: &Run, before: u64, geometry: &Geometry) -> bool {
        let busy = self.busy.borrow();
        busy.iter().any(|(number, other)| *number < before && have_common_rows(run, other, geometry))
    }

    /// Notes that a part is being written.
    fn begin(&self, run: Run) -> Option<Busy<'_>> {
        let busy = &mut *self.busy.borrow_mut();
        (busy.len() < MOST_WRITES).then(|| {
            let number = self.next.replace(self.next.get() + 1);
            busy.push((number, run));
            Busy(self, number, run)
        })
    }

    /// Waits for company, as long as there is reason to; no request joins afterwards.
    async fn close(&self, joint: &Rc<Joint>, geometry: &Geometry, core: &Core) {
        let mut timer = None;
        poll_fn(|cx| self.poll_ready(joint, geometry, core, &mut timer, cx)).await;
        self.open.borrow_mut().retain(|other| !Rc::ptr_eq(joint, other));
    }

    fn poll_ready(
        &self,
        joint: &Joint,
        geometry: &Geometry,
        core: &Core,
        timer: &mut Option<(u64, reactor::Sleep)>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        if joint.is_complete(geometry) {
            return Poll::Ready(());
        }
        joint.leader.replace(Some(cx.waker().clone()));
        let is_blocked = self.is_busy(&joint.run(), joint.number, geometry);
        if is_blocked {
            joint.is_blocked.set(true);
            return Poll::Pending;
        }
        if joint.is_blocked.take() {
            joint.since_ns.set(core.now_ns());
        }
        loop {
            let now_ns = core.now_ns();
            let Some(deadline_ns) = self.streams.deadline_ns(&joint.waiting(geometry), now_ns) else {
                return Poll::Ready(());
            };
            if timer.as_ref().is_none_or(|(other, _)| *other != deadline_ns) {
                *timer = Some((deadline_ns, core.sleep(deadline_ns - now_ns)));
            }
            let (_, sleep) = timer.as_mut().expect("just set");
            if Pin::new(sleep).poll(cx).is_pending() {
                return Poll::Pending;
            }
            *timer = None; // time has passed: asked again, the answer is no
        }
    }

    /// A write of a stream has ended: who waits for the next may have to wait less.
    fn end(&self, stream: StreamId, len: u64, taken_ns: u64, now_ns: u64, geometry: &Geometry) {
        self.streams.end(stream, len, taken_ns, now_ns);
        for joint in self.open.borrow().iter().filter(|joint| joint.stream == stream) {
            if self.streams.is_quiet(&joint.waiting(geometry)) {
                joint.wake_leader();
            }
        }
    }
}

/// A part that is being written, until this is dropped.
struct Busy<'a>(&'a WriteCoalescer, u64, Run);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let Busy(coalescer, number, run) = self;
        coalescer.busy.borrow_mut().retain(|(other, _)| other != number);
        let open = coalescer.open.borrow();
        open.iter().filter(|joint| joint.stripe == run.stripe).for_each(|joint| joint.wake_leader());
    }
}

fn have_common_rows(run: &Run, other: &Run, geometry: &Geometry) -> bool {
    run.stripe == other.stripe
        && run.rects(geometry).iter().any(|a| {
            let overlaps =
                |b: &crate::stripe::rect::Rect| a.offset < b.offset + b.len && b.offset < a.offset + a.len;
            other.rects(geometry).iter().any(overlaps)
        })
}

/// Writes what belongs to a stream.
pub(super) async fn write_in_stream(
    channel: &impl RunWriter,
    request: &Request<'_>,
    offset: u64,
    stream: StreamId,
) -> IoResult {
    let geometry = channel.geometry();
    let started_ns = channel.core().now_ns();
    let stripe_bytes = geometry.stripe_bytes();
    let is_partial = |run: &Run| run.len < stripe_bytes;
    // Parts of stripes first: those before and behind wait for them.
    let parts = || runs(geometry, offset, request.len);
    let first = parts().next().expect("a request is not empty");
    let result = match first.len == request.len {
        true => write_part(channel, first, request, stream).await,
        false => {
            let (edges, whole) = (parts().filter(is_partial), parts().filter(|run| !is_partial(run)));
            let ordered = edges.chain(whole);
            all(ordered.map(|run| write_part(channel, run, request, stream))).await
        }
    };
    let now_ns = channel.core().now_ns();
    channel.coalescer().end(stream, request.len, now_ns.saturating_sub(started_ns), now_ns, geometry);
    result
}

async fn write_part(channel: &impl RunWriter, run: Run, request: &Request<'_>, stream: StreamId) -> IoResult {
    let (coalescer, geometry) = (channel.coalescer(), channel.geometry());
    let source = Source::Data(request.data);
    if run.len == geometry.stripe_bytes() {
        return channel.write_run(run, source, request.flags).await;
    }
    let result = match coalescer.place(&run, request, stream, geometry, channel.core().now_ns()) {
        Placed::Joined(joint, number) => joint.end(number).await,
        Placed::Leads(joint) => {
            coalescer.close(&joint, geometry, channel.core()).await;
            if joint.is_single() {
                let _busy = coalescer.begin(run);
                return channel.write_run(run, source, request.flags).await;
            }
            write_joint(channel, &joint).await
        }
        Placed::Alone => {
            let _busy = coalescer.begin(run);
            return channel.write_run(run, source, request.flags).await;
        }
    };
    match result {
        Ok(()) => {
            channel.count_joined();
            Ok(())
        }
        // Alone it may do well: the others may be what cannot be written.
        Err(_) => channel.write_run(run, source, request.flags).await,
    }
}

async fn write_joint(channel: &impl RunWriter, joint: &Joint) -> IoResult {
    let _busy = channel.coalescer().begin(joint.run());
    let (mut segments, is_stable, flags) = joint.content();
    let mut copy = Vec::new();
    if mutant::is(Mutant::AckBeforeJointWrite) {
        copy = bytes_of(&segments);
        segments = vec![Segment { base: copy.as_mut_ptr(), len: copy.len() }];
        joint.finish(Ok(()));
    }
    // SAFETY: the list lives until the write has ended, and the memory until its requests have,
    // which is later.
    let data = unsafe { Data::new(&segments) };
    // SAFETY: each part has the mark.
    let data = if is_stable { unsafe { data.stable() } } else { data };
    let result = channel.write_run(joint.run(), Source::Data(data), flags).await;
    joint.finish(result);
    drop(copy);
    result
}

/// A copy of what callers' memory holds.
fn bytes_of(segments: &[Segment]) -> Vec<u8> {
    // SAFETY: the memory is valid until the requests have ended, whose futures wait.
    let data = unsafe { Data::new(segments) };
    let mut bytes = vec![0; data.len()];
    data.copy_to(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
