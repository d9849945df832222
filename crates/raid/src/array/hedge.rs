//! Members that answer late. A read that takes too long is raced against the other members.
//!
//! ```text
//!   read ─► member, into memory of its own ─┬─ in time ──────────────────────► copied, acknowledged
//!                                           └─ soft deadline ─► computed from the others, into memory of its own
//!                                                               first answer: copied, acknowledged
//!           no answer by the hard deadline ─► the member has failed, if the array can do without it
//! ```
//!
//! A request to a member cannot be called back. The slower one continues in a task which owns its
//! memory, so that nothing is written to the caller's after the acknowledgement. While a member
//! owes an answer, other reads do not ask it at all. Memory for late answers is limited: beyond
//! that reads wait, as they do without deadlines.
//!
//! The adaptive soft deadline is a multiple of the median. One slow member among many does not move
//! the median, while load that slows all members down does.

use super::deadlines::buffer_bytes;
use super::members::{MemberChannel, MemberRole};
use super::remote::LocalFuture;
use super::scratch::Scratch;
use super::spare::{self, Checks};
use super::stop::Stop;
use super::stripe_owner::StripeOwner;
use block::{Channel, IoError, IoResult, Op, Request};
use reactor::{Buffer, Sleep};
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

/// Reads of a core that are raced at a time: more would load the other members when all are slow.
const RACES: usize = 64;
/// How often it is looked whether late requests have ended.
const LOOK_NS: u64 = 10_000_000;

/// Memory that a read holds; given back when dropped.
struct Held(Rc<StripeOwner>, usize);

impl Held {
    fn take(owner: &Rc<StripeOwner>, len: u64) -> Held {
        let bytes = buffer_bytes(len as usize);
        owner.waiting.bytes.set(owner.waiting.bytes.get() + bytes);
        Held(owner.clone(), bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.waiting.bytes.set(self.0.waiting.bytes.get() - self.1);
    }
}

/// A part of a strip that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub stripe: u64,
    pub strip: usize,
    pub offset: u32,
    pub len: u32,
    pub slot: usize,
    pub role: MemberRole,
}

/// The data of a read, in memory that is no caller's.
enum Bytes {
    Read(Buffer),
    Computed(Vec<u8>),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Read(buffer) => buffer.as_slice(),
            Bytes::Computed(bytes) => bytes,
        }
    }
}

type Outcome = Result<Bytes, IoError>;

/// An answer that a task brings.
#[derive(Default)]
struct Answer {
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

type SharedAnswer = Rc<RefCell<Answer>>;

fn send(answer: &SharedAnswer, outcome: Outcome) {
    let mut answer = answer.borrow_mut();
    answer.outcome = Some(outcome);
    if let Some(waker) = answer.waker.take() {
        waker.wake();
    }
}

fn poll_answer(answer: &SharedAnswer, cx: &mut Context<'_>) -> Option<Outcome> {
    let mut answer = answer.borrow_mut();
    answer.waker = Some(cx.waker().clone());
    answer.outcome.take()
}

/// Polls a request until it has ended or time is up.
async fn until(request: &mut LocalFuture<Outcome>, mut timer: Sleep) -> Option<Outcome> {
    std::future::poll_fn(|cx| match request.as_mut().poll(cx) {
        Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
        Poll::Pending => Pin::new(&mut timer).poll(cx).map(|()| None),
    })
    .await
}

/// Reads a part of a strip from its member, or from the others when that takes too long, into the
/// request's memory. There is room for it ([`Waiting::has_room`]).
pub(crate) async fn read(
    owner: Rc<StripeOwner>,
    member: MemberChannel,
    place: Place,
    req: &Request<'_>,
) -> IoResult {
    if owner.waiting.is_late(place.slot) && owner.waiting.races.get() < RACES {
        // Asked once more it would be late again.
        let held = Held::take(&owner, req.len);
        if let Ok(bytes) = around(owner.clone(), place, held).await {
            req.data.copy_from(bytes.as_slice());
            return Ok(());
        }
    }
    let held = Held::take(&owner, req.len);
    let started_ns = owner.core.now_ns();
    let position = owner.position(&member, place.stripe, place.offset);
    let (buffer, flags) = (owner.waiting.pool.take(place.len as usize).await, req.flags);
    let channel = member.channel.clone();
    let mut direct: LocalFuture<Outcome> = Box::pin(async move {
        let (buffer, result) = buffer.transfer(&*member.channel, Op::Read, flags, position).await;
        result.map(|()| Bytes::Read(buffer))
    });
    let soft_ns = owner.waiting.soft_ns(&owner.shared.common.deadlines);
    let outcome = match until(&mut direct, owner.core.sleep(soft_ns)).await {
        Some(outcome) => {
            owner.waiting.note(owner.core.now_ns().saturating_sub(started_ns));
            outcome
        }
        None => race(&owner, place, channel, direct, started_ns, held).await,
    };
    req.data.copy_from(outcome?.as_slice());
    Ok(())
}

/// Waits for a late answer, and computes it meanwhile.
async fn race(
    owner: &Rc<StripeOwner>,
    place: Place,
    channel: Rc<dyn Channel>,
    direct: LocalFuture<Outcome>,
    started_ns: u64,
    held: Held,
) -> Outcome {
    let counters = &owner.shared.common.counters;
    counters.late_reads.fetch_add(1, Ordering::Relaxed);
    let (late, computed) = (SharedAnswer::default(), SharedAnswer::default());
    owner.waiting.change_late(place.slot, 1);
    owner.core.spawn(watch(owner.clone(), place, channel, direct, started_ns, held, late.clone()));
    let mut is_racing = owner.waiting.races.get() < RACES && owner.waiting.has_room(place.len.into());
    if is_racing {
        let (held, answer) = (Held::take(owner, place.len.into()), computed.clone());
        let racer = around(owner.clone(), place, held);
        owner.core.spawn(async move { send(&answer, racer.await) });
    }
    let mut failed = None;
    std::future::poll_fn(|cx| {
        if is_racing && let Some(outcome) = poll_answer(&computed, cx) {
            is_racing = false;
            if outcome.is_ok() {
                counters.raced_reads.fetch_add(1, Ordering::Relaxed);
                return Poll::Ready(outcome);
            }
        }
        if failed.is_none() {
            match poll_answer(&late, cx) {
                Some(Err(error)) => failed = Some(error),
                Some(outcome) => return Poll::Ready(outcome),
                None => {}
            }
        }
        match failed {
            Some(error) if !is_racing => Poll::Ready(Err(error)),
            _ => Poll::Pending,
        }
    })
    .await
}

/// Waits for a late answer to its end, however long that takes. A member that has none at the hard
/// deadline has failed, unless another device has its slot by then.
async fn watch(
    owner: Rc<StripeOwner>,
    place: Place,
    channel: Rc<dyn Channel>,
    mut direct: LocalFuture<Outcome>,
    started_ns: u64,
    held: Held,
    answer: SharedAnswer,
) {
    let passed_ns = owner.core.now_ns().saturating_sub(started_ns);
    let hard_ns = owner.shared.common.deadlines.hard_ns();
    let timer = owner.core.sleep(hard_ns.saturating_sub(passed_ns));
    let outcome = match until(&mut direct, timer).await {
        Some(outcome) => outcome,
        None => {
            let (slot, role) = (place.slot, place.role);
            if let Some(device) = owner.channels.device(slot, role, &channel)
                && let Err(error) = owner.shared.take_out_late(slot, role, device).await
            {
                let (array, slot) = (&owner.shared.config.name, place.slot);
                tracing::error!(array, slot, %error, "a member does not answer, and cannot be marked as failed");
            }
            direct.await
        }
    };
    owner.waiting.note(owner.core.now_ns().saturating_sub(started_ns));
    owner.waiting.change_late(place.slot, -1);
    send(&answer, outcome);
    drop(held);
}

/// Computes a part of a strip from the other members, as if its own could not be read.
async fn around(owner: Rc<StripeOwner>, place: Place, held: Held) -> Outcome {
    owner.waiting.races.set(owner.waiting.races.get() + 1);
    let Place { stripe, strip, offset, len, .. } = place;
    let result = owner.read_around(stripe, strip, offset, len).await;
    owner.waiting.races.set(owner.waiting.races.get() - 1);
    drop(held);
    result.map(Bytes::Computed)
}

impl StripeOwner {
    /// Waits for requests that were given up, for as long as a member may take.
    pub async fn wait_for_late(&self) {
        let until_ns = self.core.now_ns().saturating_add(self.shared.common.deadlines.hard_ns());
        while !self.waiting.is_idle() && self.core.now_ns() < until_ns {
            self.core.sleep(LOOK_NS).await;
        }
    }

    /// Reads a part of a strip without its member; nothing is written. On any core.
    ///
    /// # Errors
    /// When the others do not have what it takes.
    async fn read_around(
        &self,
        stripe: u64,
        strip: usize,
        offset: u32,
        len: u32,
    ) -> Result<Vec<u8>, IoError> {
        let inside = self.enter().await;
        if !self.owns(stripe) {
            drop(inside);
            let work = move |owner: Rc<StripeOwner>| -> LocalFuture<Result<Vec<u8>, IoError>> {
                Box::pin(async move { owner.read_around(stripe, strip, offset, len).await })
            };
            return self.forward(stripe, work).await;
        }
        let _rows = self.locks.lock(stripe, offset..offset + len).await;
        self.shared.check_bad(stripe, strip, offset, len)?;
        let _memory = self.grant(self.shared.config.geometry.group_members() + 1, len as usize).await;
        let mut scratch = self.scratch();
        let mut unreadable = 1 << strip;
        let result = loop {
            match self.try_around(&mut scratch, stripe, strip, offset, len, &mut unreadable).await {
                Ok(()) => break Ok(scratch.bytes(strip).to_vec()),
                Err(Stop::Again | Stop::TooLarge | Stop::Halve | Stop::Moved) => {}
                Err(Stop::Error(error)) => break Err(error),
            }
        };
        self.recycle(scratch);
        result
    }

    async fn try_around(
        &self,
        scratch: &mut Scratch,
        stripe: u64,
        strip: usize,
        offset: u32,
        len: u32,
        unreadable: &mut u64,
    ) -> Result<(), Stop> {
        self.shared.common.check_frozen()?;
        let strips = self.strips(stripe, *unreadable);
        // Before a sync, parity may contradict what the member is about to answer.
        if !strips.is_synced {
            return Err(Stop::Error(IoError::Medium));
        }
        let place = spare::Place { stripe, offset, len };
        self.compute(scratch, place, strip, &strips, unreadable, Checks::None).await
    }
}

#[cfg(test)]
mod tests;
