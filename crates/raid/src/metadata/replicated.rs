//! A small piece of metadata of which every member has two copies.
//!
//! It is changed in memory and then written beside the newest copy, on all members at once. Whoever changes it while a
//! write is in flight waits for that one and shares the next: many changes, one write. Any core may be the one that
//! writes; no lock is held meanwhile.

use super::io::{self, MemberFailures, Targets};
use super::layout::Layout;
use reactor::sync::{Mutex, MutexGuard};
use std::sync::PoisonError;
use std::task::{Poll, Waker};

pub(super) struct Replicated<T> {
    state: Mutex<State<T>>,
}

pub(super) struct State<T> {
    /// What it shall be.
    pub wanted: T,
    /// What it is on all members.
    pub durable: T,
    /// Grows with each write: that of the last one that began.
    pub generation: u64,
    /// The generation of `durable`.
    durable_generation: u64,
    /// The copy that holds `durable`; the other one is written next.
    copy: usize,
    /// What is being written, and its generation.
    in_flight: Option<(T, u64)>,
    /// The last write failed: some members may hold it, so that `durable` is not what would be found after a crash.
    is_uncertain: bool,
    /// Writes that have ended.
    writes: u64,
    waiters: Vec<Waker>,
}

/// How it is written.
pub(super) trait Format<T> {
    /// The bytes of a generation.
    fn encode(&self, content: &T, generation: u64) -> Vec<u8>;
    /// Where a copy lies.
    fn place(&self, layout: &Layout, copy: usize) -> u64;
}

enum Turn {
    Done,
    Wait(u64),
    Write { bytes: Vec<u8>, copy: usize },
}

impl<T: Clone> Replicated<T> {
    /// As it was found: of that generation, in that copy.
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

    /// The state, to look at or to change what is wanted. Never across an await.
    pub fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing that runs under the lock can leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies `change` to what is wanted and waits until `is_done` of what is durable. Both run under the lock,
    /// perhaps several times.
    ///
    /// # Errors
    /// The members that could not be written. What is wanted stays changed.
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

    /// Waits for the end of the write that is in flight.
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
        let targets = members.targets();
        let writes = targets.iter().map(|t| io::write(&*t.channel, format.place(&t.layout, copy), bytes));
        let results = io::all(writes).await;
        let failed = |(i, result): (usize, block::IoResult)| Some((targets[i].slot, result.err()?));
        let failures: Vec<_> = results.into_iter().enumerate().filter_map(failed).collect();
        // Without a member to write to nothing becomes durable.
        let is_durable = failures.is_empty() && !targets.is_empty();
        let waiters = self.lock().end_write(is_durable);
        waiters.into_iter().for_each(Waker::wake);
        if is_durable { Ok(()) } else { Err(MemberFailures(failures)) }
    }

    /// Writes what is durable to a member that is to become one of those it is durable on. Both copies: what they held
    /// before may look newer. A write that is in flight, or has failed on some, has a generation of its own, with which
    /// the others may be found: what that one adds must not matter, as when it only takes bits away.
    ///
    /// # Errors
    /// When the member cannot be written.
    pub async fn write_to(&self, format: &impl Format<T>, target: &io::Target) -> block::IoResult {
        let (bytes, copy) = {
            let state = self.lock();
            let mut bytes = format.encode(&state.durable, state.durable_generation);
            if state.durable_generation == 0 {
                bytes.fill(0); // never written, there as elsewhere
            }
            (bytes, state.copy)
        };
        for copy in [1 - copy, copy] {
            io::write(&*target.channel, format.place(&target.layout, copy), &bytes).await?;
        }
        Ok(())
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
        // A write that fails on some members uses its generation up: others may hold it.
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
