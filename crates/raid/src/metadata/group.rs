//! Adding groups of new members to an array that nobody uses. No data moves: the new groups' stripes come behind all that
//! there are ([`crate::Geometry::with_groups_added`]).
//!
//! ```text
//!   1  new devices: cleared, data zeroed, region map and bad blocks as the members have them
//!   2  new devices: superblocks with the new shape, "being created"
//!   3  all: superblocks with the new shape                ◄─ the array is larger as soon as one has it
//! ```
//!
//! Each step is durable on every device before the next one begins, so power may go anywhere. In 2 no member knows the
//! new devices: they are left out, and the array is as it was ([`super::assemble()`]). In 3 whoever has the new table
//! speaks for those that do not have it: old members stand at the table before, which is what was durable on all of them,
//! and new ones at 2, with everything in its place. Without 2 there could be a table that counts on a group that has no
//! superblocks.

use super::Assembly;
use super::bad_blocks::BadBlocks;
use super::create::{Candidate, CreateError, Identities, clear, fit, refuse_twice, refuse_used, zero_data};
use super::io::{self, MemberFailures, Target};
use super::layout::Layout;
use super::region_map::RegionMap;
use super::store::Store;
use super::superblock::{Member, Reason, Table};
use crate::config::MAX_MEMBERS;
use crate::geometry::MAX_ZONES;
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, ConfigError, Level};
use block::Device;
use std::sync::Arc;

/// How groups are added.
#[derive(Clone, Debug)]
pub struct AddOptions {
    /// Take devices that hold something.
    pub force: bool,
    /// Nanoseconds since 1970.
    pub now_ns: u64,
    /// Where identities come from.
    pub identities: Identities,
}

/// Why no group is added. The array is as it was, unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// Members are missing or being filled.
    #[error("array {array}: slots {slots:?} are not live: it grows only when all members are")]
    NotWhole {
        /// The array.
        array: String,
        /// The slots.
        slots: Vec<usize>,
    },
    /// The log must be replayed first.
    #[error("array {array}: it was not stopped in good order: assemble it first")]
    NotClean {
        /// The array.
        array: String,
    },
    /// It is changing its shape already.
    #[error("array {array}: it is changing its shape")]
    Reshaping {
        /// The array.
        array: String,
    },
    /// Devices do not make whole groups.
    #[error("array {array}: {given} devices: groups of {group_members} are needed")]
    Count {
        /// The array.
        array: String,
        /// Devices.
        given: usize,
        /// Members of a group.
        group_members: usize,
    },
    /// There would be too many members.
    #[error("array {array}: {members} members: at most {MAX_MEMBERS}")]
    TooMany {
        /// The array.
        array: String,
        /// Members that there would be.
        members: usize,
    },
    /// The superblock has no room for another zone.
    #[error(
        "array {array}: groups have been added to it too often: a superblock has room for {MAX_ZONES} zones of \
         stripes (add several groups at once)"
    )]
    NoZone {
        /// The array.
        array: String,
    },
    /// The shape that it would have makes no sense.
    #[error("array {array}: {error}")]
    Config {
        /// The array.
        array: String,
        /// What is wrong.
        error: ConfigError,
    },
    /// Devices cannot be members.
    #[error(transparent)]
    Device(#[from] CreateError),
    /// Members could not be read or written before anything was changed.
    #[error(transparent)]
    Members(#[from] MemberFailures),
    /// Members failed while the last superblocks were written.
    #[error(
        "array {array}: {failures}, and it cannot do without them: whether the groups are part of it is decided when it is \
         assembled"
    )]
    Unfinished {
        /// The array.
        array: String,
        /// Who failed.
        failures: MemberFailures,
    },
}

/// Adds `devices` to an array as new groups, slot by slot in their order, and returns its new table. `own` are its
/// members, all of them. On a core.
///
/// Devices that do not zero themselves cheaply are sent the zeroes, which takes as long as to write them whole.
///
/// # Errors
/// See [`AddError`].
pub async fn add_groups(
    assembly: &Assembly,
    own: &[Target],
    devices: &[Arc<dyn Device>],
    options: &AddOptions,
) -> Result<Table, AddError> {
    let candidates: Vec<Candidate> = devices.iter().map(Candidate::open).collect::<Result<_, _>>()?;
    refuse_twice(&candidates)?;
    add_of(assembly, own, &candidates, options).await
}

async fn add_of(
    assembly: &Assembly,
    own: &[Target],
    candidates: &[Candidate],
    options: &AddOptions,
) -> Result<Table, AddError> {
    let old = &assembly.table;
    let config = plan(assembly, candidates.len())?;
    let layouts: Vec<Layout> =
        candidates.iter().map(|device| fit(device, &config, "a member")).collect::<Result<_, _>>()?;
    if !options.force {
        refuse_used(candidates.iter()).await?;
    }
    let regions = RegionMap::load(&old.config, old.initial_region, own).await?;
    let bad = BadBlocks::load(old.config.uuid, own).await?;
    let first = old.members.len();
    let target = |(i, (device, layout)): (usize, (&Candidate, &Layout))| Target {
        slot: first + i,
        channel: device.channel.clone(),
        layout: *layout,
    };
    let new: Vec<Target> = candidates.iter().zip(&layouts).enumerate().map(target).collect();
    prepare(candidates, &layouts).await?;
    for (device, target) in candidates.iter().zip(&new) {
        regions.write_to(target).await.map_err(device.failed("cannot take the region map"))?;
        bad.write_to(target).await.map_err(device.failed("cannot take the list of bad blocks"))?;
    }
    let store = Store::new(config.geometry.members());
    for (slot, found) in assembly.members.iter().enumerate() {
        found.iter().for_each(|found| store.note(slot, found));
    }
    // Settled stays what members stand at: they will never have this table.
    let mut creating = Table { config, is_creating: true, ..assembly.next_table(options.now_ns) };
    creating.members.extend(candidates.iter().map(|_| Member::live(options.identities.uuid())));
    let newcomers = if mutant::is(Mutant::GroupInOneStep) { &[] } else { &new[..] };
    for (slot, result) in store.commit(newcomers, &creating).await {
        result.map_err(candidates[slot - first].failed("cannot write the superblock"))?;
    }
    let created = Table { is_creating: false, ..creating.retry(options.now_ns) };
    finish(&store, own.iter().chain(&new).cloned().collect(), created, options).await
}

/// Clears the devices and makes their data zeroes: every region map is right about that, and parity fits.
async fn prepare(candidates: &[Candidate], layouts: &[Layout]) -> Result<(), CreateError> {
    let all = || candidates.iter().zip(layouts);
    io::all(all().map(|(device, layout)| clear(device, layout)))
        .await
        .into_iter()
        .collect::<Result<(), CreateError>>()?;
    if zero_data(candidates, layouts).await? {
        return Ok(());
    }
    let slowly = all().map(|(device, layout)| async move {
        let Layout { data_offset, data_bytes, .. } = *layout;
        let zeroed = io::zero(&*device.channel, &device.limits, data_offset, data_bytes).await;
        zeroed.map_err(device.failed("cannot be zeroed"))
    });
    io::all(slowly).await.into_iter().collect()
}

/// Commits the table that makes members of the new devices. Who fails is out.
async fn finish(
    store: &Store,
    mut targets: Vec<Target>,
    mut table: Table,
    options: &AddOptions,
) -> Result<Table, AddError> {
    loop {
        table.begin_unserved_epoch(epoch_id(options.identities));
        let results = store.commit(&targets, &table).await;
        let failed = results.into_iter().filter_map(|(slot, result)| Some((slot, result.err()?)));
        let failures = MemberFailures(failed.collect());
        if failures.0.is_empty() {
            return Ok(table);
        }
        table = table.retry(options.now_ns);
        for (slot, error) in &failures.0 {
            tracing::error!(array = table.config.name, slot, %error, "a superblock cannot be written");
            table.take_out(*slot, Reason::WriteError);
        }
        if !table.is_alive() {
            return Err(AddError::Unfinished { array: table.config.name, failures });
        }
        targets.retain(|target| table.members[target.slot].is_in());
    }
}

fn epoch_id(identities: Identities) -> u64 {
    u128::from_le_bytes(identities.bits()) as u64
}

/// What the array is to be with so many devices more.
fn plan(assembly: &Assembly, given: usize) -> Result<ArrayConfig, AddError> {
    let Assembly { table, members, .. } = assembly;
    let array = table.config.name.clone();
    let is_missing = |slot: &usize| members[*slot].is_none() || !table.members[*slot].is_live();
    let slots: Vec<usize> = (0..members.len()).filter(is_missing).collect();
    if !slots.is_empty() {
        return Err(AddError::NotWhole { array, slots });
    }
    if !table.is_clean {
        return Err(AddError::NotClean { array });
    }
    if table.reshape.is_some() {
        return Err(AddError::Reshaping { array });
    }
    let geometry = &table.config.geometry;
    let group_members = geometry.group_members();
    if given == 0 || !given.is_multiple_of(group_members) {
        return Err(AddError::Count { array, given, group_members });
    }
    if members.len() + given > MAX_MEMBERS {
        return Err(AddError::TooMany { array, members: members.len() + given });
    }
    let Some(geometry) = geometry.with_groups_added(given / group_members) else {
        return Err(AddError::NoZone { array });
    };
    let config = ArrayConfig { geometry, level: grouped(table.config.level), ..table.config.clone() };
    config.check().map_err(|error| AddError::Config { array, error })?;
    Ok(config)
}

/// What a level is called when there are several groups of it.
const fn grouped(level: Level) -> Level {
    match level {
        Level::Raid1 => Level::Raid10,
        Level::Raid5 => Level::Raid50,
        Level::Raid6 => Level::Raid60,
        Level::Raid7 => Level::Raid70,
        other => other,
    }
}

#[cfg(test)]
mod tests;
