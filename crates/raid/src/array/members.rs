//! The members of a running array: the states of their devices, shared by all cores, and each
//! core's channels to them.
//!
//! A slot has a *device*, which is live or not. It may also have an *incoming* device that is being
//! filled: for an empty slot (a rebuild) or next to a live device (a replacement). An incoming
//! device counts for the completed stripes (`progress.rs`). Steps are those of the walk over all
//! stripes, row by row ([`Geometry::stripe_at_step`]).
//!
//! Only the owner of a stripe sets its bit, while it holds the stripe's rows. So the answer is
//! exact for the owner; other cores may see a stripe as not done that already is.

use super::progress::Progress;
use crate::metadata::Layout;
use crate::{ArrayConfig, Geometry, Uuid};
use block::{Channel, Device, DeviceError};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use super::progress::WINDOW;

/// The permitted uses of a slot's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SlotState {
    /// Reads and writes.
    Live = 0,
    /// No use, but superblocks may still call the device live: a write that skipped it must not be
    /// acknowledged.
    Failing = 1,
    /// No use, and every live member has a table that calls it failed.
    Out = 2,
}

/// A member's device with its layout.
#[derive(Clone)]
pub struct Attached {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The layout of the member.
    pub layout: Layout,
}

/// No incoming device.
const NONE: u8 = 0;
/// An incoming device takes writes.
const FILLING: u8 = 1;
/// The incoming device takes no more writes, but superblocks may still record its progress.
const LEAVING: u8 = 2;

#[derive(Default)]
struct Slot {
    state: AtomicU8,
    /// Whether there is an incoming device: `NONE`, `FILLING` or `LEAVING`.
    incoming: AtomicU8,
    progress: Progress,
    /// During a reshape: the difference between the number of a stripe of the old geometry and its
    /// step of the walk.
    skipped: AtomicU64,
    /// The UUID of the incoming device, also once it is the slot's own.
    uuid: Mutex<Option<Uuid>>,
    devices: Mutex<[Option<Attached>; 2]>,
}

/// The members of a running array, shared by all cores.
pub struct Members {
    config: Arc<ArrayConfig>,
    slots: Arc<[Slot]>,
    /// Changes whenever a device is added or removed.
    generation: Arc<AtomicU64>,
    shift: Shift,
    /// Whether these are the members in the old geometry of a reshape.
    is_old: bool,
}

/// Distance of the old geometry's areas behind those of the new one on every member, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shift {
    pub log: u64,
    pub data: u64,
}

impl Shift {
    /// The layout of the old geometry.
    pub fn apply(self, layout: Layout) -> Layout {
        let (log_offset, data_offset) = (layout.log_offset + self.log, layout.data_offset + self.data);
        Layout { log_offset, data_offset, ..layout }
    }
}

impl Members {
    /// One slot for each of `devices`; slots without a device count as failed.
    pub fn new(config: Arc<ArrayConfig>, devices: Vec<Option<Attached>>) -> Members {
        assert_eq!(devices.len(), config.geometry.members());
        let slot = |device: Option<Attached>| {
            let state = if device.is_some() { SlotState::Live } else { SlotState::Out };
            Slot { state: AtomicU8::new(state as u8), devices: Mutex::new([device, None]), ..Slot::default() }
        };
        let slots = devices.into_iter().map(slot).collect();
        Members {
            config,
            slots,
            generation: Arc::new(AtomicU64::new(1)),
            shift: Shift::default(),
            is_old: false,
        }
    }

    /// The same members for another geometry, `config`, which uses the first of them.
    pub(crate) fn of_shape(&self, config: Arc<ArrayConfig>, shift: Shift) -> Members {
        assert!(config.geometry.members() <= self.slots.len(), "an old shape has no members of its own");
        Members {
            config,
            slots: self.slots.clone(),
            generation: self.generation.clone(),
            shift,
            is_old: true,
        }
    }

    /// The shift of this geometry's areas.
    pub(crate) fn shift(&self) -> Shift {
        self.shift
    }

    /// Number of slots: metadata is written to all of them, even if the geometry uses fewer.
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// The array's geometry.
    #[inline]
    pub fn geometry(&self) -> &Geometry {
        &self.config.geometry
    }

    /// The permitted uses of a slot's device.
    #[inline]
    pub fn state(&self, slot: usize) -> SlotState {
        match self.slots[slot].state.load(Ordering::Acquire) {
            0 => SlotState::Live,
            1 => SlotState::Failing,
            _ => SlotState::Out,
        }
    }

    /// Whether a slot's own device reads and writes.
    #[inline]
    pub fn is_live(&self, slot: usize) -> bool {
        self.state(slot) == SlotState::Live
    }

    /// The device that counts in a slot: its member while that is live, else the one that fills it.
    #[inline]
    pub fn role(&self, slot: usize) -> MemberRole {
        if self.is_live(slot) { MemberRole::Current } else { MemberRole::Replacement }
    }

    /// The devices of a slot that take writes to a stripe.
    #[inline]
    pub fn takers(&self, slot: usize, stripe: u64) -> impl Iterator<Item = MemberRole> + use<> {
        let own = self.is_live(slot).then_some(MemberRole::Current);
        let incoming = self.is_done(slot, stripe).then_some(MemberRole::Replacement);
        own.into_iter().chain(incoming)
    }

    /// Whether every slot is live.
    pub fn is_healthy(&self) -> bool {
        (0..self.slots.len()).all(|slot| self.state(slot) == SlotState::Live)
    }

    /// Marks a live device as failing.
    pub(crate) fn announce_failure(&self, slot: usize) {
        let (live, failing) = (SlotState::Live as u8, SlotState::Failing as u8);
        let _ = self.slots[slot].state.compare_exchange(live, failing, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Changes the permitted uses of a slot's device. A failed device is detached.
    pub(crate) fn set_state(&self, slot: usize, state: SlotState) {
        self.slots[slot].state.store(state as u8, Ordering::Release);
        if state == SlotState::Out {
            self.devices(slot)[0] = None;
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// Adds an incoming device to a slot, filled up to step `cursor` of the walk. `skipped`: see
    /// [`Walk::skipped`](super::reshape_router::Walk::skipped); 0 without a reshape.
    pub(crate) fn start_filling(
        &self,
        slot: usize,
        uuid: Uuid,
        incoming: Attached,
        cursor: u64,
        skipped: u64,
    ) {
        let place = &self.slots[slot];
        *self.uuid(slot) = Some(uuid);
        place.skipped.store(skipped, Ordering::Relaxed);
        self.devices(slot)[1] = Some(incoming);
        place.progress.reset(cursor);
        self.generation.fetch_add(1, Ordering::Release);
        place.incoming.store(FILLING, Ordering::Release);
    }

    /// Makes the incoming device the slot's own, live device. No request may run meanwhile.
    pub(crate) fn finish_filling(&self, slot: usize) {
        let place = &self.slots[slot];
        let mut devices = self.devices(slot);
        devices[0] = devices[1].take();
        place.incoming.store(NONE, Ordering::Release);
        place.state.store(SlotState::Live as u8, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Changes the layout of a slot's device, except for the offset of its data.
    pub(crate) fn set_layout(&self, slot: usize, layout: Layout) {
        if let Some(own) = &mut self.devices(slot)[0] {
            assert_eq!(own.layout.data_offset, layout.data_offset, "data stays where it is");
            own.layout = layout;
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Detaches the incoming device. No superblock may record any progress of it.
    pub(crate) fn stop_filling(&self, slot: usize) {
        self.let_go(slot, NONE);
    }

    /// Stops writes to the incoming device of an empty slot. Until a commit marks it as failed, a
    /// write that skipped it must not be acknowledged.
    pub(crate) fn announce_leaving(&self, slot: usize) {
        self.let_go(slot, LEAVING);
    }

    fn let_go(&self, slot: usize, incoming: u8) {
        self.slots[slot].incoming.store(incoming, Ordering::Release);
        self.devices(slot)[1] = None;
        *self.uuid(slot) = None;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The UUID of a slot's incoming device, also once it is the slot's own.
    pub fn incoming_uuid(&self, slot: usize) -> Option<Uuid> {
        *self.uuid(slot)
    }

    /// Whether a slot's incoming device takes no more writes, while superblocks may record its
    /// progress.
    #[inline]
    pub fn is_leaving(&self, slot: usize) -> bool {
        self.slots[slot].incoming.load(Ordering::Acquire) == LEAVING
    }

    /// Whether a slot has an incoming device.
    #[inline]
    pub fn is_filling(&self, slot: usize) -> bool {
        self.slots[slot].incoming.load(Ordering::Acquire) == FILLING
    }

    /// Whether a slot has an incoming device, or one that leaves.
    #[inline]
    fn has_incoming(&self, slot: usize) -> bool {
        self.slots[slot].incoming.load(Ordering::Acquire) != NONE
    }

    /// Whether every slot of a stripe's group has its live device and no incoming one.
    #[inline]
    pub fn is_settled(&self, stripe: u64) -> bool {
        self.group_slots(stripe).all(|slot| self.is_live(slot) && !self.has_incoming(slot))
    }

    /// Steps below this one are done on the incoming device.
    pub fn cursor(&self, slot: usize) -> u64 {
        self.slots[slot].progress.cursor()
    }

    /// Whether the incoming device has a stripe.
    #[inline]
    pub fn is_done(&self, slot: usize, stripe: u64) -> bool {
        self.is_filling(slot) && self.slots[slot].progress.is_done(self.step(slot, stripe))
    }

    /// The step of a stripe on the walk that fills a slot.
    #[inline]
    fn step(&self, slot: usize, stripe: u64) -> u64 {
        let step = self.config.geometry.step_of(stripe);
        match self.is_old {
            true => step.wrapping_sub(self.slots[slot].skipped.load(Ordering::Relaxed)),
            false => step,
        }
    }

    /// Whether any slot has an incoming device.
    pub fn is_any_filling(&self) -> bool {
        (0..self.slots.len()).any(|slot| self.is_filling(slot))
    }

    /// Marks a stripe as done on the incoming device. Called by its owner, which holds its rows.
    pub(crate) fn set_done(&self, slot: usize, stripe: u64) {
        self.slots[slot].progress.set_done(self.step(slot, stripe));
    }

    /// Moves the cursor; every step below it is done. Called by one task at a time.
    pub(crate) fn advance(&self, slot: usize, cursor: u64) {
        self.slots[slot].progress.advance(cursor);
    }

    /// The slots of a stripe's group.
    #[inline]
    pub fn group_slots(&self, stripe: u64) -> std::ops::Range<usize> {
        self.group_slots_of(self.config.geometry.group(stripe))
    }

    /// The slots of a group.
    #[inline]
    pub fn group_slots_of(&self, group: usize) -> std::ops::Range<usize> {
        let size = self.config.geometry.group_members();
        group * size..(group + 1) * size
    }

    /// The strips of a stripe that can be written and read, as a mask.
    #[inline]
    pub fn live_strips(&self, stripe: u64) -> u64 {
        let geometry = &self.config.geometry;
        if self.group_slots(stripe).all(|slot| self.is_live(slot)) {
            return u64::MAX >> (64 - geometry.group_members());
        }
        let mut live = 0;
        for strip in 0..geometry.group_members() {
            let slot = geometry.member(stripe, strip);
            if self.state(slot) == SlotState::Live || self.is_done(slot, stripe) {
                live |= 1 << strip;
            }
        }
        live
    }

    /// A slot's device and the incoming one, with the layouts of this geometry.
    pub fn attached(&self, slot: usize) -> [Option<Attached>; 2] {
        let place = |attached: Attached| Attached { layout: self.shift.apply(attached.layout), ..attached };
        self.devices(slot).clone().map(|attached| attached.map(place))
    }

    /// Calls `work` with every device that takes requests.
    ///
    /// # Errors
    /// The first error of a call.
    pub fn each_device(
        &self,
        work: impl Fn(&dyn Device) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut attached = (0..self.slots.len()).flat_map(|slot| self.attached(slot)).flatten();
        attached.try_for_each(|attached| work(&*attached.device))
    }

    fn devices(&self, slot: usize) -> MutexGuard<'_, [Option<Attached>; 2]> {
        self.slots[slot].devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uuid(&self, slot: usize) -> MutexGuard<'_, Option<Uuid>> {
        self.slots[slot].uuid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A channel to a member. Small: each request takes copies of it.
#[derive(Clone)]
pub struct MemberChannel {
    /// The channel.
    pub channel: Rc<dyn Channel>,
    /// Where the member's log begins.
    pub log_offset: u64,
    /// Where its strips begin.
    pub data_offset: u64,
}

/// A member's device, its layout, and the channel to it.
type Opened = (Attached, MemberChannel);

/// One core's channels to the members.
pub struct MemberChannels {
    members: Arc<Members>,
    generation: Cell<u64>,
    slots: RefCell<Vec<[Option<Opened>; 2]>>,
}

/// One of the devices of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberRole {
    /// The slot's own.
    Current = 0,
    /// The incoming one.
    Replacement = 1,
}

impl MemberChannels {
    /// Channels that are opened when they are needed.
    pub fn new(members: Arc<Members>) -> MemberChannels {
        let slots = RefCell::new(vec![[const { None }; 2]; members.slots.len()]);
        MemberChannels { members, generation: Cell::new(0), slots }
    }

    /// A channel; `None` if the slot has no such device, or its channel cannot be opened.
    #[inline]
    pub fn get(&self, slot: usize, role: MemberRole) -> Option<MemberChannel> {
        let generation = self.members.generation.load(Ordering::Acquire);
        if generation != self.generation.get() {
            self.update(generation);
        }
        self.slots.borrow()[slot][role as usize].as_ref().map(|(_, channel)| channel.clone())
    }

    /// A channel and the layout of its member; see [`MemberChannels::get`].
    pub fn with_layout(&self, slot: usize, role: MemberRole) -> Option<(Rc<dyn Channel>, Layout)> {
        let member = self.get(slot, role)?;
        let slots = self.slots.borrow();
        let (attached, _) = slots[slot][role as usize].as_ref()?;
        Some((member.channel, attached.layout))
    }

    /// The device of a channel; `None` if the slot has another device by now.
    pub(crate) fn device(
        &self,
        slot: usize,
        role: MemberRole,
        channel: &Rc<dyn Channel>,
    ) -> Option<Arc<dyn Device>> {
        let member = self.get(slot, role)?;
        let slots = self.slots.borrow();
        let (attached, _) = slots[slot][role as usize].as_ref()?;
        Rc::ptr_eq(&member.channel, channel).then(|| attached.device.clone())
    }

    #[cold]
    fn update(&self, generation: u64) {
        self.generation.set(generation);
        let mut slots = self.slots.borrow_mut();
        for (slot, mine) in slots.iter_mut().enumerate() {
            for (mine, theirs) in mine.iter_mut().zip(self.members.attached(slot)) {
                match (&mut *mine, theirs) {
                    (Some((own, member)), Some(attached)) if Arc::ptr_eq(&own.device, &attached.device) => {
                        let Layout { log_offset, data_offset, .. } = attached.layout;
                        (member.log_offset, member.data_offset) = (log_offset, data_offset);
                        own.layout = attached.layout;
                    }
                    (None, None) => {}
                    (_, theirs) => *mine = theirs.and_then(open),
                }
            }
        }
    }
}

fn open(attached: Attached) -> Option<Opened> {
    match attached.device.open_channel() {
        Ok(channel) => {
            let Layout { log_offset, data_offset, .. } = attached.layout;
            Some((attached, MemberChannel { channel, log_offset, data_offset }))
        }
        Err(error) => {
            tracing::error!(device = attached.device.name(), %error, "channel of the member cannot be opened");
            None
        }
    }
}
