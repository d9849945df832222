//! Growth by size: members have become larger, or parts of them are unused.
//!
//! The array adds stripes at the end of every member's data, so no address changes, and requests
//! continue meanwhile.
//!
//! ```text
//!   1  superblocks, twice: same array, larger members      both sets of copies are at the new ends
//!   2  the added range reads as zeroes, or up to the start of the next region
//!   3  write-intent bitmap: new regions unwritten, or written and without parity
//!   4  superblock: more stripes                            ◄─ the growth is done
//!   5  requests beyond the old end are accepted
//! ```
//!
//! Each step is durable on every member before the next one begins, so the power may fail at any
//! point. Before step 4 the array has its old size: the results of steps 1 to 3 have no effect.
//! From step 4 on, a member that lacks step 4 has at least steps 1 and 3 (an older one is below
//! `settled`), and enough room for the table. The last superblock copies move in step 1, one set
//! after the other. [`Layout::grown`] ensures that new copies lie behind the old ones. So at each
//! moment one set is complete at the front and at one of the ends. Step 2 turns the old places into
//! data, when no superblock refers to them any more.

use super::Array;
use super::committer::MetadataCommitter;
use super::members::SlotState;
use super::shared::Shared;
use super::stripe_owner::StripeOwner;
use super::turns::Turn;
use crate::ArrayConfig;
use crate::metadata::intent_bitmap::{NEED_SYNC, WRITTEN};
use crate::metadata::layout::{COPY_BYTES, Layout};
use crate::metadata::{MemberFailures, Targets, all, zero, zero_cheaply};
use crate::mutant::{self, Mutant};
use block::{DeviceError, IoError, IoResult, Limits};
use std::rc::Rc;

/// Why an array does not grow. The array is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// Members are missing or being rebuilt.
    #[error("array {array}: slots {slots:?} are not live: all members must be live")]
    NotWhole {
        /// The array.
        array: String,
        /// The slots.
        slots: Vec<usize>,
    },
    /// A member has no room.
    #[error(
        "array {array}: {member} has {usable} usable bytes, the array uses {used} of each member: {needed} are needed \
         for another stripe"
    )]
    NoRoom {
        /// The array.
        array: String,
        /// The smallest member.
        member: String,
        /// Its usable bytes.
        usable: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes that are needed to grow at all.
        needed: u64,
    },
    /// The write-intent bitmap has no room.
    #[error(
        "array {array}: its write-intent bitmap covers at most {most} bytes of each member, not {wanted}: grow it with \
         a size of at most {most}"
    )]
    MapFull {
        /// The array.
        array: String,
        /// Most usable bytes of each member.
        most: u64,
        /// Bytes of the smallest member.
        wanted: u64,
    },
    /// A reshape is in progress.
    #[error("array {array}: a reshape is in progress: grow the array after it")]
    Reshaping {
        /// The array.
        array: String,
    },
    /// The array was started for reading only.
    #[error("array {array}: the array is read-only")]
    ReadOnly {
        /// The array.
        array: String,
    },
    /// The size of a member cannot be read.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Another command has changed the array meanwhile.
    #[error("array {array}: another command changed it meanwhile: try again")]
    Changed {
        /// The array.
        array: String,
    },
    /// Members failed during the growth.
    #[error("array {array}: growth failed: {error}")]
    Io {
        /// The array.
        array: String,
        /// The error.
        error: IoError,
    },
}

/// The result of a growth, in bytes of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Capacity before.
    pub before: u64,
    /// Capacity after.
    pub after: u64,
}

/// The planned growth.
struct Plan {
    config: ArrayConfig,
    /// The new layouts, by slot.
    layouts: Vec<Layout>,
    /// The members' limits, by slot.
    limits: Vec<Limits>,
}

/// A member with its present usable size.
struct Room {
    name: String,
    usable: u64,
    layout: Layout,
    limits: Limits,
}

impl Array {
    /// Grows the array to the present size of its members, or to members of `size` bytes. Requests
    /// continue meanwhile. If members cannot zero themselves, a later sync computes the parity of
    /// the added range, as for a new array. Must run on a core.
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
        let grown =
            shared.on_committer(move |committer| Box::pin(async move { committer.grow(&plan).await })).await;
        let array = shared.config.name.clone();
        match grown {
            Ok(()) => {}
            Err(IoError::Invalid) => return Err(GrowError::Changed { array }),
            Err(error) => return Err(GrowError::Io { array, error }),
        }
        tracing::info!(array = shared.config.name, before, after, "array has grown");
        Ok(Growth { before, after })
    }
}

/// Slots that prevent growth.
fn not_whole(shared: &Shared) -> Vec<usize> {
    let members = &shared.members;
    let is_whole = |slot: &usize| members.state(*slot) == SlotState::Live && !members.is_filling(*slot);
    (0..shared.config.geometry.members()).filter(|slot| !is_whole(slot)).collect()
}

fn plan(shared: &Shared, size: Option<u64>) -> Result<Plan, GrowError> {
    let mut config = ArrayConfig::clone(shared.configs.newest());
    let array = config.name.clone();
    if shared.common.is_read_only {
        return Err(GrowError::ReadOnly { array });
    }
    note_capacities(shared);
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
        // The last superblock copies move by at least their own length.
        let needed = (used + strip + tail).max(smallest.layout.member_bytes + 2 * COPY_BYTES);
        return Err(GrowError::NoRoom { array, member, usable, used: used + tail, needed });
    }
    let mapped = |room: &Room| room.layout.most_mapped(config.region_bytes);
    let mapped =
        rooms.iter().map(mapped).min().unwrap_or(0).min(shared.common.regions.room() * config.region_bytes);
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

/// Superblocks of members on larger devices need more care, also where the array cannot grow.
fn note_capacities(shared: &Shared) {
    for slot in 0..shared.config.geometry.members() {
        let [own, _] = shared.members.attached(slot);
        if let Some(Ok(limits)) = own.map(|own| own.device.refresh()) {
            shared.common.store.note_capacity(slot, limits.capacity);
        }
    }
}

/// The members with their present sizes.
fn rooms(shared: &Shared, size: Option<u64>) -> Result<Vec<Room>, GrowError> {
    let room = |slot: usize| {
        let [own, _] = shared.members.attached(slot);
        let Some(own) = own else {
            return Err(GrowError::NotWhole { array: shared.config.name.clone(), slots: vec![slot] });
        };
        let limits = own.device.refresh()?;
        let usable = size.map_or(limits.capacity, |size| size.min(limits.capacity));
        let mut layout = own.layout.grown(usable);
        // If the size is smaller than the used part, the end stays, and the rest behind `size` is
        // not used.
        let most = usable.saturating_sub(layout.data_offset + 2 * COPY_BYTES);
        layout.data_bytes = layout.data_bytes.min(most);
        Ok(Room { name: own.device.name().to_owned(), usable, layout, limits })
    };
    (0..shared.config.geometry.members()).map(room).collect()
}

impl MetadataCommitter {
    /// Executes the plan; see the module.
    async fn grow(&self, plan: &Plan) -> IoResult {
        let shared = self.shared().clone();
        let owner = self.owner().ok_or(IoError::DeviceGone)?;
        // No core or member joins meanwhile; a member that fails ends the growth early.
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
        while let Err(MemberFailures(failures)) = shared.common.regions.prepare(regions, bits, &*owner).await
        {
            owner.members_failed(failures).await?;
            check_whole(&shared)?;
        }
        check_whole(&shared)?;
        let group_stripes = plan.config.geometry.group_stripes;
        self.note(move |table| table.config.geometry.group_stripes = group_stripes).await?;
        shared.common.regions.grow(regions);
        shared.configs.push(plan.config.clone());
        shared.common.limits.set_capacity(plan.config.geometry.capacity());
        Ok(())
    }
}

fn check_whole(shared: &Shared) -> IoResult {
    if not_whole(shared).is_empty() { Ok(()) } else { Err(IoError::DeviceGone) }
}

/// Zeroes the added range of each member; returns whether all of it is zero. If a member cannot
/// zero itself, it zeroes only the part in a region with old data, and the places of the old
/// superblocks.
async fn zero_added(
    owner: &Rc<StripeOwner>,
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
