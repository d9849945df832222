//! A small piece of metadata with two copies on every member.
//!
//! It is changed in memory. Then one write puts it into the older copy of all members at once. A
//! task that changes it while a write is in flight waits for that write and shares the next one:
//! many changes, one write. Any core may write; it holds no lock meanwhile.

use super::io::{self, MemberFailures, Targets};
use super::layout::Layout;
use reactor::sync::{Mutex, MutexGuard};
use std::sync::PoisonError;
use std::task::{Poll, Waker};

pub(super) struct Replicated<T> {
    state: Mutex<State<T>>,
}

pub(super) struct State<T> {
    /// The content that the next write stores.
    pub wanted: T,
    /// The content on all members.
    pub durable: T,
    /// The generation of the last write that began; grows with each write.
    pub generation: u64,
    /// The generation of `durable`.
    durable_generation: u64,
    /// The copy with `durable`; the next write goes to the other one.
    copy: usize,
    /// The content and generation of the write in flight.
    in_flight: Option<(T, u64)>,
    /// The last write failed: some members may have its content, so a crash may restore it instead
    /// of `durable`.
    is_uncertain: bool,
    /// Number of writes that have ended.
    writes: u64,
    waiters: Vec<Waker>,
}

/// The on-disk format of the content.
pub(super) trait Format<T> {
    /// The bytes of a generation.
    fn encode(&self, content: &T, generation: u64) -> Vec<u8>;
    /// Offset of a copy.
    fn place(&self, layout: &Layout, copy: usize) -> u64;
}

enum Turn {
    Done,
    Wait(u64),
    Write { bytes: Vec<u8>, copy: usize },
}

impl<T: Clone> Replicated<T> {
    /// The content found on the members, with its generation and copy.
    pub fn new(content: T, generation: u64, copy: usize) -> Replicated<T> {
        Replicated {
            state: Mutex::new(State {
                wanted: content.clone(),
                durable: content,
                generation,
                durable_generation: generation,
                copy,
                in_flight: None,
                is_uncertain: false,
                writes: 0,
                waiters: Vec::new(),
            }),
        }
    }

    /// The state, to read it or to change `wanted`. The guard must not be held across an await.
    pub fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Code under the lock never leaves a partial change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies `change` to `wanted` and waits until `is_done` accepts `durable`. Both run under the
    /// lock, perhaps several times.
    ///
    /// # Errors
    /// The members that could not be written. `wanted` stays changed.
    pub async fn change(
        &self,
        format: &impl Format<T>,
        members: &(impl Targets + ?Sized),
        mut change: impl FnMut(&mut T),
        mut is_done: impl FnMut(&T) -> bool,
    ) -> Result<(), MemberFailures> {
        loop {
            let turn = {
                let mut state = self.lock();
                change(&mut state.wanted);
                state.turn(format, &mut is_done)
            };
            match turn {
                Turn::Done => return Ok(()),
                Turn::Wait(writes) => self.wait(writes).await,
                Turn::Write { bytes, copy } => self.write(format, members, &bytes, copy).await?,
            }
        }
    }

    async fn wait(&self, writes: u64) {
        std::future::poll_fn(|cx| {
            let mut state = self.lock();
            if state.writes != writes {
                return Poll::Ready(());
            }
            if !state.waiters.iter().any(|waker| waker.will_wake(cx.waker())) {
                state.waiters.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    async fn write(
        &self,
        format: &impl Format<T>,
        members: &(impl Targets + ?Sized),
        bytes: &[u8],
        copy: usize,
    ) -> Result<(), MemberFailures> {
        let mut write = InFlight { of: self, is_durable: false };
        let targets = members.targets();
        let writes = targets.iter().map(|t| io::write(&*t.channel, format.place(&t.layout, copy), bytes));
        let results = io::all(writes).await;
        let failed = |(i, result): (usize, block::IoResult)| Some((targets[i].slot, result.err()?));
        let failures: Vec<_> = results.into_iter().enumerate().filter_map(failed).collect();
        // Without members nothing becomes durable.
        write.is_durable = failures.is_empty() && !targets.is_empty();
        if write.is_durable { Ok(()) } else { Err(MemberFailures(failures)) }
    }

    /// Writes `durable` to both copies of a member that joins the others; its old content may look
    /// newer. A write that is in flight, or has failed on some members, has its own generation, and
    /// the other members may have it. The difference between that write and `durable` must not
    /// matter, as when it only clears bits.
    ///
    /// # Errors
    /// When the member cannot be written.
    pub async fn write_to(&self, format: &impl Format<T>, target: &io::Target) -> block::IoResult {
        let (bytes, copy) = {
            let state = self.lock();
            let mut bytes = format.encode(&state.durable, state.durable_generation);
            if state.durable_generation == 0 {
                bytes.fill(0); // as on the other members, never written
            }
            (bytes, state.copy)
        };
        for copy in [1 - copy, copy] {
            io::write(&*target.channel, format.place(&target.layout, copy), &bytes).await?;
        }
        Ok(())
    }
}

/// The write in flight. If its core ends before it, some members may have its content.
struct InFlight<'a, T: Clone> {
    of: &'a Replicated<T>,
    is_durable: bool,
}

impl<T: Clone> Drop for InFlight<'_, T> {
    fn drop(&mut self) {
        let waiters = self.of.lock().end_write(self.is_durable);
        waiters.into_iter().for_each(Waker::wake);
    }
}

impl<T: Clone> State<T> {
    fn turn(&mut self, format: &impl Format<T>, is_done: &mut impl FnMut(&T) -> bool) -> Turn {
        if self.in_flight.is_some() {
            return Turn::Wait(self.writes);
        }
        if !self.is_uncertain && is_done(&self.durable) {
            return Turn::Done;
        }
        // A write that fails on some members uses up its generation: others may have it.
        self.generation += 1;
        self.in_flight = Some((self.wanted.clone(), self.generation));
        Turn::Write { bytes: format.encode(&self.wanted, self.generation), copy: 1 - self.copy }
    }

    fn end_write(&mut self, is_durable: bool) -> Vec<Waker> {
        let written = self.in_flight.take();
        if let (Some((written, generation)), true) = (written, is_durable) {
            (self.durable, self.durable_generation) = (written, generation);
            self.copy = 1 - self.copy;
        }
        self.is_uncertain = !is_durable;
        self.writes += 1;
        std::mem::take(&mut self.waiters)
    }
}
