//! Devices that become members: spares, former members that are re-added, replacements.

use super::{Shared, State};
use crate::array::Before;
use crate::array::members::Attached;
use crate::log::{self, Nonce, RecoveryMember};
use crate::metadata::{
    Found, Label, Layout, LayoutError, MemberState, ReadError, Spare, Superblock, Table, read_superblock,
    write_label,
};
use crate::{ArrayConfig, Uuid};
use block::{Channel, Device, DeviceError, IoError};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why a device is refused that the array uses.
const HAS_IT: &str = "the array has it already";

/// A device that waits to be filled.
#[derive(Clone)]
pub struct Incoming {
    /// The device, and where things lie on it, or will.
    pub attached: Attached,
    /// The member that it becomes.
    pub uuid: Uuid,
    /// The known content of the device.
    pub before: Before,
}

/// A former member of an empty slot, as its superblock and the array's table have it.
pub(super) struct Former {
    attached: Attached,
    channel: Rc<dyn Channel>,
    superblock: Box<Superblock>,
    table: Table,
    slot: usize,
    uuid: Uuid,
    /// The generation of the table that first had the slot without it.
    since: u64,
}

/// Why a device cannot become a member.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// There is no such slot.
    #[error("slot {0}: the array has no such slot")]
    NoSuchSlot(usize),
    /// The slot has a member already, or a device that fills it.
    #[error("slot {0} already has a member, or a device that fills it")]
    Busy(usize),
    /// The device is too small.
    #[error("{device}: {error}")]
    Layout {
        /// The device.
        device: String,
        /// The reason.
        error: LayoutError,
    },
    /// The device does not take what members get.
    #[error("{device}: {what}")]
    Unfit {
        /// The device.
        device: String,
        /// The reason.
        what: String,
    },
    /// The device has no superblock that says what it was.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device or the array cannot be read or written.
    #[error("{device}: {error:?}")]
    Io {
        /// The device, or the array.
        device: String,
        /// Its error.
        error: IoError,
    },
}

/// Spares that several arrays share. All handles are to one pool.
#[derive(Clone, Default)]
pub struct SparePool(Arc<Mutex<Vec<Incoming>>>);

impl SparePool {
    pub(super) fn add(&self, spare: Incoming) {
        self.lock().push(spare);
    }

    /// The spares' names.
    pub fn names(&self) -> Vec<String> {
        self.lock().iter().map(|spare| spare.attached.device.name().to_owned()).collect()
    }

    /// Takes the first spare that fits.
    pub(super) fn take(&self, fits: impl Fn(&Incoming) -> bool) -> Option<Incoming> {
        let mut spares = self.lock();
        let place = spares.iter().position(fits)?;
        Some(spares.remove(place))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Incoming>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Checks a new device and makes it a spare: whatever superblock it has is overwritten.
    pub(super) async fn prepare(
        &self,
        device: Arc<dyn Device>,
        is_dedicated: bool,
    ) -> Result<Incoming, JobError> {
        let attached = self.attach(&device)?;
        self.refuse_own(&device)?;
        let config = self.array.config();
        let uuid = self.array.new_uuid();
        self.label(&device, uuid, is_dedicated.then_some(config.uuid)).await?;
        Ok(Incoming { attached, uuid, before: Before::Anything })
    }

    /// Overwrites all superblocks of a device: an old one must not look newer than those that it
    /// gets.
    async fn label(&self, device: &Arc<dyn Device>, uuid: Uuid, array: Option<Uuid>) -> Result<(), JobError> {
        let array = array.map(|_| &**self.array.config());
        label_spare(device, uuid, array, self.array.wall_ns()).await
    }

    /// Takes a spare that waits back, by its UUID or its device's name: the array's own first.
    pub(super) fn take_spare(&self, name: &str) -> Option<Incoming> {
        let uuid = Uuid::parse(name);
        let is_it =
            |spare: &Incoming| is_called(spare.attached.device.name(), name) || Some(spare.uuid) == uuid;
        {
            let mut state = self.lock();
            if let Some(place) = state.dedicated.iter().position(is_it) {
                return Some(state.dedicated.remove(place));
            }
        }
        self.options.spares.take(is_it)
    }

    /// Whether a spare has this UUID or is on this device.
    pub(super) fn has_spare_called(&self, name: &str) -> bool {
        let uuid = Uuid::parse(name);
        let is_it =
            |spare: &Incoming| is_called(spare.attached.device.name(), name) || Some(spare.uuid) == uuid;
        self.lock().dedicated.iter().any(is_it) || self.options.spares.lock().iter().any(is_it)
    }

    /// A spare by its label, and whether it is this array's alone.
    pub(super) fn found_spare(
        &self,
        device: Arc<dyn Device>,
        found: &Found,
    ) -> Result<(Incoming, bool), JobError> {
        let attached = self.attach(&device)?;
        let own = self.array.config().uuid;
        match &found.label {
            Label::Spare(spare) if spare.array.is_none_or(|array| array == own) => {
                if self.has(spare.member) {
                    return Err(unfit(&device, HAS_IT));
                }
                let incoming = Incoming { attached, uuid: spare.member, before: Before::Anything };
                Ok((incoming, spare.array.is_some()))
            }
            _ => Err(unfit(&device, "no spare for this array")),
        }
    }

    /// Reads the superblock of a former member of an empty slot. Writes nothing.
    pub(super) async fn former(&self, device: &Arc<dyn Device>) -> Result<Former, JobError> {
        let attached = self.attach(device)?;
        let (name, channel) = (device.name().to_owned(), device.open_channel()?);
        let found = read_superblock(&name, &*channel, device.limits().capacity).await?;
        let Label::Member(superblock) = found.label else {
            return Err(unfit(device, "no former member of an array"));
        };
        let table = self.array.table();
        let slot = usize::from(superblock.slot);
        let member = table
            .members
            .get(slot)
            .filter(|member| superblock.array() == table.config.uuid && member.uuid == superblock.member);
        let Some(member) = member else {
            return Err(unfit(device, "the slot belongs to another member, or the device to another array"));
        };
        let MemberState::Missing { since } = member.state else { return Err(JobError::Busy(slot)) };
        if self.array.members().is_filling(slot) || self.array.members().is_live(slot) {
            return Err(JobError::Busy(slot));
        }
        let uuid = member.uuid;
        Ok(Former { attached, channel, superblock, table, slot, uuid, since })
    }

    /// A former member: its slot, and whether it lacks only what was written since it was taken
    /// out.
    pub(super) async fn returning(
        &self,
        device: Arc<dyn Device>,
    ) -> Result<(usize, Incoming, bool), JobError> {
        let Former { mut attached, channel, superblock, table, slot, uuid, since } =
            self.former(&device).await?;
        let is_known = table.history.iter().any(|epoch| Some(epoch) == superblock.table.history.last());
        // The array may have grown since, or been reshaped: then everything on the device gets a
        // new place.
        let is_laid_out = superblock.layout.check(&table.config).is_ok()
            && table.reshape.is_none()
            && superblock.table.has_shape_of(&table);
        let is_partial = is_known && is_laid_out && since > 0 && superblock.table.generation + 1 >= since;
        let is_partial = is_partial && self.mark_unfinished(&superblock, &channel).await;
        let before = match is_partial {
            true => {
                attached.layout = superblock.layout;
                Before::Member
            }
            false => {
                self.label(&device, uuid, Some(table.config.uuid)).await?;
                Before::Anything
            }
        };
        Ok((slot, Incoming { attached, uuid, before }, is_partial))
    }

    /// Marks the regions of writes that only this former member's log names; whether that could be
    /// done. Such writes exist if power failed while the member was live, and the array then
    /// started without it. Other members may hold their data, and this one may not.
    async fn mark_unfinished(&self, superblock: &Superblock, channel: &Rc<dyn Channel>) -> bool {
        let Layout { log_offset, data_offset, .. } = superblock.layout;
        let (table, slot) = (&superblock.table, usize::from(superblock.slot));
        let member = RecoveryMember { channel: channel.clone(), log_offset, data_offset };
        match log::unfinished(&table.config, Nonce(table.nonce), slot, member).await {
            Ok(stripes) => self.array.mark_stale(stripes).await.is_ok(),
            Err(_) => false,
        }
    }

    /// Where things will lie on a device.
    pub(super) fn attach(&self, device: &Arc<dyn Device>) -> Result<Attached, JobError> {
        // As many lanes as members have: an array uses fewer during a reshape and just after it.
        let config = self.array.config();
        let lanes = self.array.log_lanes();
        Ok(Attached {
            device: device.clone(),
            layout: fit(device, &ArrayConfig { lanes, ..ArrayConfig::clone(config) })?,
        })
    }

    /// A device that is a member or a spare cannot be another one.
    pub(super) fn refuse_own(&self, device: &Arc<dyn Device>) -> Result<(), JobError> {
        let members = self.array.members();
        let is_it = |attached: &Attached| Arc::ptr_eq(&attached.device, device);
        // The keeper hands no device on while the state is locked.
        let is_own = self.look(|state| {
            (0..members.count()).flat_map(|slot| members.attached(slot)).flatten().any(|own| is_it(&own))
                || state.held().any(|(_, held)| is_it(held))
                || self.options.spares.lock().iter().any(|spare| is_it(&spare.attached))
        });
        if is_own { Err(unfit(device, HAS_IT)) } else { Ok(()) }
    }

    /// Whether a member, a spare, or an incoming device has this UUID.
    fn has(&self, uuid: Uuid) -> bool {
        let members = self.array.members();
        // The keeper hands no device on while the state is locked.
        self.look(|state| {
            let table = self.array.table();
            // A full device is live before the table has its UUID.
            let is_used = |slot: usize| {
                let is_filled = members.is_filling(slot) || members.is_live(slot);
                members.is_live(slot) && table.members[slot].uuid == uuid
                    || is_filled && members.incoming_uuid(slot) == Some(uuid)
            };
            (0..members.count()).any(is_used)
                || state.held().any(|(held, _)| held == uuid)
                || self.options.spares.lock().iter().any(|spare| spare.uuid == uuid)
        })
    }

    /// The device to fill a slot with, which the keeper does at once: one that was given for it, a
    /// spare of the array's, a global one.
    pub(super) fn take_device(&self, slot: usize) -> Option<Incoming> {
        let fits = |spare: &Incoming| self.attach(&spare.attached.device).is_ok();
        self.take_given(slot).or_else(|| {
            self.take(|state| match state.dedicated.iter().position(fits) {
                Some(place) => Some(state.dedicated.remove(place)),
                None => self.options.spares.take(fits),
            })
        })
    }

    /// A device laid out for the array as it is now: it may have grown since the device was given.
    fn laid_out(&self, mut incoming: Incoming) -> Option<Incoming> {
        if incoming.attached.layout.check(self.array.config()).is_err() {
            incoming.attached = self.attach(&incoming.attached.device).ok()?;
            incoming.before = Before::Anything;
        }
        Some(incoming)
    }

    /// The device that was given for a slot, which the keeper fills at once.
    pub(super) fn take_given(&self, slot: usize) -> Option<Incoming> {
        self.take(|state| {
            let place = state.given.iter().position(|(other, _)| *other == slot)?;
            Some(state.given.remove(place).1)
        })
    }

    /// Takes a device that the keeper begins to fill a slot with.
    fn take(&self, take: impl FnOnce(&mut State) -> Option<Incoming>) -> Option<Incoming> {
        self.look(|state| {
            state.starting = self.laid_out(take(state)?);
            state.starting.clone()
        })
    }
}

impl State {
    /// The devices that wait to fill slots, and those that the keeper has taken and may let wait
    /// again, with their UUIDs. The array may not have attached the latter, or not any more.
    fn held(&self) -> impl Iterator<Item = (Uuid, &Attached)> {
        let given = self.given.iter().map(|(_, incoming)| incoming);
        let waiting = given.chain(&self.dedicated).chain(&self.starting);
        let copies = self.filling.values().filter_map(|filler| Some((filler.uuid, filler.copy.as_ref()?)));
        waiting.map(|incoming| (incoming.uuid, &incoming.attached)).chain(copies)
    }
}

/// Whether a device of that name is what a person calls `name`: its name, or the path in it.
pub fn is_called(device: &str, name: &str) -> bool {
    device == name || device.split_once(':').is_some_and(|(_, path)| path == name)
}

/// Where things will lie on a device that becomes a member or spare of an array.
///
/// # Errors
/// When it does not fit.
pub fn fit(device: &Arc<dyn Device>, config: &ArrayConfig) -> Result<Layout, JobError> {
    let limits = device.limits();
    let layout = Layout::new(limits.capacity, config)
        .map_err(|error| JobError::Layout { device: device.name().to_owned(), error })?;
    if limits.read_only {
        return Err(unfit(device, "the device is read-only"));
    }
    if limits.block_size > config.block_size {
        return Err(unfit(device, "blocks are larger than the array's"));
    }
    if limits.max_transfer < config.geometry.strip_bytes {
        return Err(unfit(device, "transfers of a strip's size are not supported"));
    }
    Ok(layout)
}

/// Makes a device a spare, of one array or of any: all its superblocks are overwritten. On a core.
///
/// # Errors
/// When it cannot be written.
pub async fn label_spare(
    device: &Arc<dyn Device>,
    member: Uuid,
    array: Option<&ArrayConfig>,
    created_ns: u64,
) -> Result<(), JobError> {
    let capacity = device.limits().capacity;
    let label = Label::Spare(Spare {
        member,
        array: array.map(|config| config.uuid),
        array_name: array.map_or_else(String::new, |config| config.name.clone()),
        member_bytes: capacity,
        created_ns,
        owner: String::new(),
    });
    let channel = device.open_channel()?;
    let written = write_label(&*channel, capacity, &label).await;
    written.map_err(|error| JobError::Io { device: device.name().to_owned(), error })
}

fn unfit(device: &Arc<dyn Device>, what: &str) -> JobError {
    JobError::Unfit { device: device.name().to_owned(), what: what.to_owned() }
}

impl Shared {
    /// Whether a device waits that can fill a slot: one that was given for it, or a spare.
    pub(super) fn has_device(&self, slot: usize) -> bool {
        self.lock().given.iter().any(|(other, _)| *other == slot) || self.has_spare()
    }

    /// Whether some spare fits.
    pub(super) fn has_spare(&self) -> bool {
        let fits = |spare: &Incoming| self.attach(&spare.attached.device).is_ok();
        self.lock().dedicated.iter().any(fits) || self.options.spares.lock().iter().any(fits)
    }
}
