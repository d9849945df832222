//! The life of a running array: members are filled, parity is made to fit after a crash, scrubs
//! run. One task, the *keeper*, runs on the core that started it; a [`Jobs`] handle takes requests
//! from any core.
//!
//! ```text
//!   condition ─► action, most urgent first
//!     a reshape                      move window after window; fill slots afterwards, or first
//!                                    when the reshape met an error or no redundancy is left
//!     slots without a live member    fill them, those of one group in one pass, with devices
//!                                    given for them, spares of the array's, global spares
//!     a live member to be replaced   copy it, then detach it: one that a device was given for,
//!                                    or one with more corrected read errors than its budget
//!     regions that need a sync       make parity fit, region by region
//!     a scrub that was asked for     compare, count, repair if told
//!     a scrub that is due            compare and count, while its window is open and every
//!                                    member is live
//! ```
//!
//! One job runs at a time, a window of stripes in flight. A job may be interrupted by a more urgent
//! one, a pause or a crash, and then continues at its durable cursor. The cursor of a rebuild or a
//! scrub is in the superblock, that of a sync in the write-intent bitmap. Nothing here touches a
//! member's data: stripes are worked on by their owners ([`crate::array`]).

mod budget;
mod contradictions;
mod fill;
mod keeper;
mod logs;
mod pump;
mod reshape;
mod scrub;
mod spares;
mod status;
#[cfg(test)]
mod tests;
mod throttle;

pub use spares::{Incoming, JobError, SparePool, fit, is_called, label_spare};
pub use status::{Event, Kind, Progress, ScrubReport, Status};
pub use throttle::{Pace, Throttle};

use crate::array::Array;
use crate::array::members::SlotState;
use crate::metadata::{Found, zero_superblock};
use block::Device;
use keeper::Filler;
use status::Log;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// How an array is kept.
#[derive(Clone)]
pub struct Options {
    /// Bytes of stripes that a job works on at a time.
    pub window_bytes: usize,
    /// Nanoseconds between two durable cursors.
    pub checkpoint_ns: u64,
    /// Bytes between two durable cursors.
    pub checkpoint_bytes: u64,
    /// How jobs and foreground requests share the array.
    pub pace: Pace,
    /// Spares that any array may take.
    pub spares: SparePool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            window_bytes: 16 << 20,
            checkpoint_ns: 5_000_000_000,
            checkpoint_bytes: 4 << 30,
            pace: Pace::default(),
            spares: SparePool::default(),
        }
    }
}

/// Handle of an array's keeper. The keeper ends at its next step after this is dropped;
/// [`Jobs::stop`] waits for that.
pub struct Jobs {
    shared: Arc<Shared>,
}

/// The state that the handle and the keeper share.
struct Shared {
    array: Arc<Array>,
    options: Options,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_paused: bool,
    is_stopping: bool,
    has_ended: bool,
    /// The job that runs is to be given up.
    is_cancelled: bool,
    /// A scrub that is wanted; whether it mends.
    scrub: Option<bool>,
    /// Devices for particular slots.
    given: Vec<(usize, Incoming)>,
    /// Spares of this array alone.
    dedicated: Vec<Incoming>,
    /// The device with which the keeper begins to fill a slot.
    starting: Option<Incoming>,
    /// The devices that fill slots, by slot, until the keeper sees that they are detached.
    filling: HashMap<usize, Filler>,
    log: Log,
    /// Another pace than the options'.
    pace: Option<Pace>,
    /// Tasks that wait for a change of the above.
    wakers: Vec<Waker>,
}

impl Array {
    /// Starts the upkeep of the array on the calling core.
    ///
    /// # Errors
    /// When the core cannot open the array.
    pub fn keep(self: &Arc<Self>, options: Options) -> Result<Jobs, block::DeviceError> {
        let channel = self.open_channel()?;
        let shared = Arc::new(Shared { array: self.clone(), options, state: Mutex::default() });
        reactor::current().spawn(keeper::keep(shared.clone(), channel));
        Ok(Jobs { shared })
    }
}

impl Jobs {
    /// Returns the present state of all jobs.
    pub fn status(&self) -> Status {
        let state = self.shared.lock();
        let mut status = state.log.status();
        if let Some(pace) = state.pace {
            // Progress is from the last look of the keeper, perhaps before the pace was set.
            status.running.iter_mut().for_each(|job| job.is_urgent = pace.is_urgent);
        }
        status.is_paused = state.is_paused;
        status.spares = state.dedicated.iter().map(|spare| spare.attached.device.name().to_owned()).collect();
        status.global_spares = self.shared.options.spares.names();
        status
    }

    /// Holds all jobs until [`Jobs::resume`]; stripes that are being worked on are finished.
    pub fn pause(&self) {
        self.shared.change(|state| state.is_paused = true);
    }

    /// Lets jobs continue.
    pub fn resume(&self) {
        self.shared.change(|state| state.is_paused = false);
    }

    /// How jobs and foreground requests share the array from now on.
    pub fn set_pace(&self, pace: Pace) {
        self.shared.change(|state| state.pace = Some(pace));
    }

    /// Gives the running scrub or replacement up. A rebuild or a sync is not given up: the array
    /// needs it.
    pub fn cancel(&self) {
        self.shared.change(|state| (state.is_cancelled, state.scrub) = (true, None));
    }

    /// Compares parity with data everywhere, soon; mends what does not fit if told.
    pub fn scrub(&self, is_repairing: bool) {
        self.shared.change(|state| (state.is_cancelled, state.scrub) = (false, Some(is_repairing)));
    }

    /// Checks what [`Jobs::add`] and [`Jobs::add_global_spare`] check. Nothing is written.
    ///
    /// # Errors
    /// When the device does not fit, or is a member or spare already.
    pub fn check_new(&self, device: &Arc<dyn Device>) -> Result<(), JobError> {
        self.shared.attach(device)?;
        self.shared.refuse_own(device)
    }

    /// Whether a spare has this UUID or is on this device.
    pub fn has_spare_called(&self, name: &str) -> bool {
        self.shared.has_spare_called(name)
    }

    /// Checks what [`Jobs::re_add`] checks. Nothing is written. On a core.
    ///
    /// # Errors
    /// When the device is no former member of an empty slot.
    pub async fn check_returning(&self, device: &Arc<dyn Device>) -> Result<(), JobError> {
        self.shared.former(device).await.map(drop)
    }

    /// Adds a device: to fill an empty slot now, or the next one that is. The device's content is
    /// lost. On a core.
    ///
    /// # Errors
    /// When it does not fit.
    pub async fn add(&self, device: Arc<dyn Device>) -> Result<(), JobError> {
        let incoming = self.shared.prepare(device, true).await?;
        self.shared.change(|state| state.dedicated.push(incoming));
        Ok(())
    }

    /// Adds a spare for any array of the options' pool. The device's content is lost. On a core.
    ///
    /// # Errors
    /// When this array could not use it.
    pub async fn add_global_spare(&self, device: Arc<dyn Device>) -> Result<(), JobError> {
        let incoming = self.shared.prepare(device, false).await?;
        self.shared.options.spares.add(incoming);
        self.shared.change(|_| ());
        Ok(())
    }

    /// Adds a spare that was found by its label, as assembling lists it.
    ///
    /// # Errors
    /// When it does not fit or is no spare of this array.
    pub fn add_found_spare(&self, device: Arc<dyn Device>, found: &Found) -> Result<(), JobError> {
        let (incoming, is_dedicated) = self.shared.found_spare(device, found)?;
        match is_dedicated {
            true => self.shared.change(|state| state.dedicated.push(incoming)),
            false => self.shared.options.spares.add(incoming),
        }
        self.shared.change(|_| ());
        Ok(())
    }

    /// Lets a spare go, named by its UUID or its device: its superblock is erased. Says which
    /// device it was; `None` when there is no such spare. On a core.
    ///
    /// # Errors
    /// When its superblock cannot be erased. It is no spare any more, until its array is served
    /// again.
    pub async fn remove_spare(&self, name: &str) -> Result<Option<String>, JobError> {
        let Some(spare) = self.shared.take_spare(name) else { return Ok(None) };
        let device = spare.attached.device;
        let channel = device.open_channel()?;
        let erased = zero_superblock(&*channel, device.limits().capacity).await;
        let failed = |error| JobError::Io { device: device.name().to_owned(), error };
        erased.map_err(failed)?;
        Ok(Some(device.name().to_owned()))
    }

    /// Takes a former member back into its slot. When it has seen everything until it was taken
    /// out, it gets only what was written since; otherwise everything. Says which: `true` for the
    /// former. On a core.
    ///
    /// # Errors
    /// When it is no former member of an empty slot.
    pub async fn re_add(&self, device: Arc<dyn Device>) -> Result<bool, JobError> {
        let (slot, incoming, is_partial) = self.shared.returning(device).await?;
        self.shared.change(|state| state.given.push((slot, incoming)));
        Ok(is_partial)
    }

    /// Puts a device into a slot: a live member is copied onto it, and detached afterwards. On a
    /// core.
    ///
    /// # Errors
    /// When the slot or the device cannot take part.
    pub async fn replace(&self, slot: usize, device: Arc<dyn Device>) -> Result<(), JobError> {
        let array = &self.shared.array;
        if slot >= array.config().geometry.members() {
            return Err(JobError::NoSuchSlot(slot));
        }
        if array.members().is_filling(slot)
            || self.shared.lock().given.iter().any(|(other, _)| *other == slot)
        {
            return Err(JobError::Busy(slot));
        }
        if array.config().geometry.parity == 0 && array.members().is_live(slot) {
            let what =
                format!("slot {slot} is live, and an array without redundancy cannot copy a live member");
            return Err(JobError::Unfit { device: device.name().to_owned(), what });
        }
        let incoming = self.shared.prepare(device, true).await?;
        self.shared.change(|state| state.given.push((slot, incoming)));
        Ok(())
    }

    /// Waits until nothing is left to be done: no job runs, none is due. Not while paused. On a
    /// core.
    pub async fn idle(&self) {
        self.shared.change(|_| ()); // it looks once more
        self.shared.wait(|state| state.has_ended || state.log.is_idle()).await;
    }

    /// Ends the keeper, and returns when it has ended: before the array is stopped, and before its
    /// core ends. On a core.
    pub async fn stop(&self) {
        self.shared.change(|state| state.is_stopping = true);
        self.shared.wait(|state| state.has_ended).await;
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.shared.change(|state| state.is_stopping = true);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes something that others may be waiting for.
    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let (result, wakers) = {
            let mut state = self.lock();
            let result = change(&mut state);
            state.log.is_stale = true;
            (result, std::mem::take(&mut state.wakers))
        };
        wakers.into_iter().for_each(Waker::wake);
        result
    }

    async fn wait(&self, mut is_ready: impl FnMut(&State) -> bool) {
        std::future::poll_fn(|cx| {
            let mut state = self.lock();
            if is_ready(&state) {
                return std::task::Poll::Ready(());
            }
            state.wakers.push(cx.waker().clone());
            std::task::Poll::Pending
        })
        .await;
    }

    /// Slots without a live member, of the groups that have lost most first.
    fn empty_slots(&self) -> Vec<usize> {
        let members = self.array.members();
        let size = self.array.config().geometry.group_members();
        let is_out = |slot: &usize| members.state(*slot) == SlotState::Out;
        let lost = |slot: &usize| {
            let group = slot / size * size;
            (group..group + size).filter(|slot| !members.is_live(*slot)).count()
        };
        let mut slots: Vec<usize> = (0..self.array.config().geometry.members()).filter(is_out).collect();
        slots.sort_by_key(|slot| std::cmp::Reverse(lost(slot)));
        slots
    }
}
