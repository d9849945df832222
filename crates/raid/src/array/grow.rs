//! Growth by size: members have become larger, or were larger than what is used of them.
//!
//! Stripes are added at the end of every member's data, so no address changes and requests go on meanwhile.
//!
//! ```text
//!   1  superblocks, twice: same array, larger members      both sets of copies stand at the new ends
//!   2  what is added reads as zeroes, or up to the next region's beginning
//!   3  region map: new regions unwritten, or written and without parity
//!   4  superblock: more stripes                            ◄─ the growth has happened
//!   5  requests beyond the old end are let in
//! ```
//!
//! Each step is durable on every member before the next one begins, so power may go anywhere. Before 4 the array is as
//! large as it was: nothing that 1 to 3 write is looked at. From 4 on, a member that lacks 4 holds at least 1 and 3 (an
//! older one is below `settled`), and its room is as large as the table needs. The last superblock copies move in 1, the
//! two sets one after the other, and [`Layout::grown`] sees to it that new copies lie behind the old ones: at each moment
//! a set is whole at the front and at one of the ends. Their old places become data in 2, when nothing points there.

use super::Array;
use super::home::{Home, Turn};
use super::members::SlotState;
use super::owner::Owner;
use super::shared::Shared;
use crate::ArrayConfig;
use crate::metadata::layout::{COPY_BYTES, Layout};
use crate::metadata::region_map::{NEED_SYNC, WRITTEN};
use crate::metadata::{MemberFailures, Targets, all, zero, zero_cheaply};
use crate::mutant::{self, Mutant};
use block::{DeviceError, IoError, IoResult, Limits};
use std::rc::Rc;

/// Why an array does not grow. It is as it was.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// Members are missing or being filled.
    #[error("array {array}: slots {slots:?} are not live: it grows only when all members are")]
    NotWhole {
        /// The array.
        array: String,
        /// The slots.
        slots: Vec<usize>,
    },
    /// Some member has no room.
    #[error(
        "array {array}: {member} has {usable} bytes that may be used, the array uses {used} of each member: \
         {needed} would be needed for one stripe more"
    )]
    NoRoom {
        /// The array.
        array: String,
        /// The smallest member.
        member: String,
        /// Bytes of it that may be used.
        usable: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes that are needed to grow at all.
        needed: u64,
    },
    /// The region map has no room.
    #[error(
        "array {array}: its region map has room for {most} bytes of each member, {wanted} are there: grow it with a \
         size of {most} at most"
    )]
    MapFull {
        /// The array.
        array: String,
        /// Bytes of each member that can be used.
        most: u64,
        /// Bytes of the smallest member.
        wanted: u64,
    },
    /// It is changing its shape.
    #[error("array {array}: it is changing its shape: it can grow when that is over")]
    Reshaping {
        /// The array.
        array: String,
    },
    /// The array was started to be read only.
    #[error("array {array}: it is read-only")]
    ReadOnly {
        /// The array.
        array: String,
    },
    /// A member cannot tell its size.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Somebody else has changed the array meanwhile.
    #[error("array {array}: it was changed meanwhile: look at it and try again")]
    Changed {
        /// The array.
        array: String,
    },
    /// Members failed meanwhile.
    #[error("array {array}: it could not grow: {error}")]
    Io {
        /// The array.
        array: String,
        /// What went wrong.
        error: IoError,
    },
}

/// What growing came to, in bytes of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Before.
    pub before: u64,
    /// Now.
    pub after: u64,
}

/// What is to be done.
struct Plan {
    config: ArrayConfig,
    /// Where things lie from now on, by slot.
    layouts: Vec<Layout>,
    /// The members' limits, by slot.
    limits: Vec<Limits>,
}

/// A member as it is, with what may be used of it now.
struct Room {
    name: String,
    usable: u64,
    layout: Layout,
    limits: Limits,
}

impl Array {
    /// Makes the array as large as its members are now, or as members of `size` bytes would be. Requests go on
    /// meanwhile. Where members do not zero themselves cheaply, parity of what is added is made later, as for a new
    /// array. On a core.
    ///
    /// # Errors
    /// See [`GrowError`].
    pub async fn grow(&self, size: Option<u64>) -> Result<Growth, GrowError> {
        let shared = &self.shared;
        let before = self.config().geometry.capacity();
        if self.is_reshaping() {
            return Err(GrowError::Reshaping { array: shared.config.name.clone() });
        }
        let plan = plan(shared, size)?;
        let after = plan.config.geometry.capacity();
        self.owner();
        let grown = shared.at_home(move |home| Box::pin(async move { home.grow(&plan).await })).await;
        let array = shared.config.name.clone();
        match grown {
            Ok(()) => {}
            Err(IoError::Invalid) => return Err(GrowError::Changed { array }),
            Err(error) => return Err(GrowError::Io { array, error }),
        }
        tracing::info!(array = shared.config.name, before, after, "the array has grown");
        Ok(Growth { before, after })
    }
}

/// Slots that keep an array from growing.
fn not_whole(shared: &Shared) -> Vec<usize> {
    let members = &shared.members;
    let is_whole = |slot: &usize| members.state(*slot) == SlotState::Live && !members.is_filling(*slot);
    (0..shared.config.geometry.members()).filter(|slot| !is_whole(slot)).collect()
}

fn plan(shared: &Shared, size: Option<u64>) -> Result<Plan, GrowError> {
    let mut config = ArrayConfig::clone(shared.configs.newest());
    let array = config.name.clone();
    if shared.is_read_only {
        return Err(GrowError::ReadOnly { array });
    }
    let slots = not_whole(shared);
    if !slots.is_empty() {
        return Err(GrowError::NotWhole { array, slots });
    }
    let rooms = rooms(shared, size)?;
    let strip = u64::from(config.geometry.strip_bytes);
    let used = config.geometry.group_stripes * strip;
    let Some(smallest) = rooms.iter().min_by_key(|room| room.layout.data_bytes / strip) else {
        return Err(GrowError::NotWhole { array, slots });
    };
    let stripes = smallest.layout.data_bytes / strip;
    if stripes <= config.geometry.group_stripes {
        let tail = smallest.layout.data_offset + 2 * COPY_BYTES;
        let (member, usable) = (smallest.name.clone(), smallest.usable);
        // The last copies do not move by less than their own length.
        let needed = (used + strip + tail).max(smallest.layout.member_bytes + 2 * COPY_BYTES);
        return Err(GrowError::NoRoom { array, member, usable, used: used + tail, needed });
    }
    let mapped = |room: &Room| room.layout.most_mapped(config.region_bytes);
    let mapped = rooms.iter().map(mapped).min().unwrap_or(0).min(shared.regions.room() * config.region_bytes);
    if stripes > mapped / strip {
        let most = mapped / strip * strip + 2 * COPY_BYTES;
        let data_offset = rooms.iter().map(|room| room.layout.data_offset).max().unwrap_or(0);
        return Err(GrowError::MapFull { array, most: most + data_offset, wanted: smallest.usable });
    }
    config.geometry.group_stripes = stripes;
    let layout = |room: &Room| Layout { data_bytes: stripes * strip, ..room.layout };
    let layouts: Vec<Layout> = rooms.iter().map(layout).collect();
    let is_sound = config.check().is_ok() && layouts.iter().all(|layout| layout.check(&config).is_ok());
    if !is_sound {
        return Err(GrowError::Io { array, error: IoError::Invalid });
    }
    Ok(Plan { config, layouts, limits: rooms.into_iter().map(|room| room.limits).collect() })
}

/// The members with the sizes that they have now.
fn rooms(shared: &Shared, size: Option<u64>) -> Result<Vec<Room>, GrowError> {
    let room = |slot: usize| {
        let [own, _] = shared.members.attached(slot);
        let Some(own) = own else {
            return Err(GrowError::NotWhole { array: shared.config.name.clone(), slots: vec![slot] });
        };
        let limits = own.device.refresh()?;
        let usable = size.map_or(limits.capacity, |size| size.min(limits.capacity));
        let mut layout = own.layout.grown(usable);
        // A smaller size than what is in use already: the end stays, what is behind `size` is not used.
        let most = usable.saturating_sub(layout.data_offset + 2 * COPY_BYTES);
        layout.data_bytes = layout.data_bytes.min(most);
        Ok(Room { name: own.device.name().to_owned(), usable, layout, limits })
    };
    (0..shared.config.geometry.members()).map(room).collect()
}

impl Home {
    /// See the module.
    async fn grow(&self, plan: &Plan) -> IoResult {
        let shared = self.shared().clone();
        let owner = self.owner().ok_or(IoError::DeviceGone)?;
        // Nobody joins meanwhile; who goes makes the growth end where it is.
        let _quiet = Turn::take(self.quiet()).await;
        let old = ArrayConfig::clone(shared.configs.newest());
        let was_planned = |(slot, layout): (usize, &Layout)| {
            shared.members.attached(slot)[0].as_ref().is_some_and(|own| {
                let Layout { data_offset, member_bytes, .. } = own.layout;
                (data_offset, layout.member_bytes >= member_bytes) == (layout.data_offset, true)
            })
        };
        let is_as_planned = plan.layouts.iter().enumerate().all(was_planned)
            && old.geometry.group_stripes < plan.config.geometry.group_stripes;
        if !is_as_planned {
            return Err(IoError::Invalid);
        }
        check_whole(&shared)?;
        let ends: Vec<u64> = owner.targets().iter().map(|target| target.layout.member_bytes).collect();
        plan.layouts.iter().enumerate().for_each(|(slot, layout)| shared.members.set_layout(slot, *layout));
        let rounds = if mutant::is(Mutant::GrowInOneStep) { 0 } else { 2 };
        for _ in 0..rounds {
            self.note(|_| ()).await?;
            check_whole(&shared)?;
        }
        let is_zero = zero_added(&owner, plan, &old, &ends).await?;
        let bits = match (is_zero, old.geometry.parity) {
            (true, _) => 0,
            (false, 0) => WRITTEN,
            (false, _) => WRITTEN | NEED_SYNC,
        };
        let regions = plan.config.regions();
        while let Err(MemberFailures(failures)) = shared.regions.prepare(regions, bits, &*owner).await {
            owner.members_failed(failures).await?;
            check_whole(&shared)?;
        }
        check_whole(&shared)?;
        let group_stripes = plan.config.geometry.group_stripes;
        self.note(move |table| table.config.geometry.group_stripes = group_stripes).await?;
        shared.regions.grow(regions);
        shared.configs.push(plan.config.clone());
        shared.limits.set_capacity(plan.config.geometry.capacity());
        Ok(())
    }
}

fn check_whole(shared: &Shared) -> IoResult {
    if not_whole(shared).is_empty() { Ok(()) } else { Err(IoError::DeviceGone) }
}

/// Zeroes what is added to each member; whether all of it. Where members do not do that cheaply, only what shares a
/// region with data that is there already, and the places of the old superblocks.
async fn zero_added(
    owner: &Rc<Owner>,
    plan: &Plan,
    old: &ArrayConfig,
    ends: &[u64],
) -> Result<bool, IoError> {
    let strip = u64::from(old.geometry.strip_bytes);
    if mutant::is(Mutant::GrowWithoutZeroes) {
        return Ok(true);
    }
    let (from, to) = (old.geometry.group_stripes * strip, plan.config.geometry.group_stripes * strip);
    let targets = owner.targets();
    let cheaply = targets.iter().map(|target| {
        let (limits, offset) = (&plan.limits[target.slot], target.layout.data_offset + from);
        async move { (target.slot, zero_cheaply(&*target.channel, limits, offset, to - from).await) }
    });
    let results = all(cheaply).await;
    let is_zero = results.iter().all(|(_, result)| result.is_ok());
    let mut failures: Vec<(usize, IoError)> = results.into_iter().filter_map(failed).collect();
    failures.retain(|(_, error)| *error != IoError::Unsupported);
    if !is_zero && failures.is_empty() {
        let shared_end = from.next_multiple_of(old.region_bytes).min(to);
        let slowly = targets.iter().zip(ends).map(|(target, end)| {
            let (limits, data) = (&plan.limits[target.slot], target.layout.data_offset);
            let copies = end - 2 * COPY_BYTES..(*end).min(data + to);
            async move {
                let result = match zero(&*target.channel, limits, data + from, shared_end - from).await {
                    Ok(()) if copies.start >= data + from && !copies.is_empty() => {
                        zero(&*target.channel, limits, copies.start, copies.end - copies.start).await
                    }
                    result => result,
                };
                (target.slot, result)
            }
        });
        failures.extend(all(slowly).await.into_iter().filter_map(failed));
    }
    match failures.first().map(|(_, error)| *error) {
        None => Ok(is_zero),
        Some(error) => {
            owner.members_failed(failures).await?;
            Err(error)
        }
    }
}

fn failed((slot, result): (usize, IoResult)) -> Option<(usize, IoError)> {
    Some((slot, result.err()?))
}

#[cfg(test)]
mod tests;
