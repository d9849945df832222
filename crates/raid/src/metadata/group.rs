//! Adds groups of new members to an array that is not in use. No data moves: the new groups'
//! stripes follow all existing ones ([`crate::Geometry::with_groups_added`]).
//!
//! The data of new devices is zeroed before they become members. So every write-intent bitmap
//! matches it, and parity fits. [`super::newcomers`] describes the steps.

use super::Assembly;
use super::bad_blocks::{BadBlocks, LoadError};
use super::create::{Candidate, fit, refuse_twice, refuse_used, zero_data};
use super::create_error::CreateError;
use super::intent_bitmap::IntentBitmap;
use super::io::{self, MemberFailures, Target};
use super::layout::Layout;
use super::newcomers::{self, AddOptions, Newcomers, Unready, check_ready, store_of};
use super::store::Store;
use super::superblock::Table;
use crate::config::MAX_MEMBERS;
use crate::geometry::MAX_ZONES;
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, ConfigError, Level};
use block::Device;
use std::sync::Arc;

/// Why no group is added. The array is unchanged unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// The state of the array does not allow the change.
    #[error(transparent)]
    Unready(#[from] Unready),
    /// The devices do not form complete groups.
    #[error("array {array}: {given} devices: groups of {group_members} are needed")]
    Count {
        /// The array.
        array: String,
        /// Number of devices.
        given: usize,
        /// Members of a group.
        group_members: usize,
    },
    /// The array would have too many members.
    #[error("array {array}: {members} members: at most {MAX_MEMBERS}")]
    TooMany {
        /// The array.
        array: String,
        /// Members after the change.
        members: usize,
    },
    /// The superblock has no room for another zone.
    #[error(
        "array {array}: groups were added too often: a superblock has room for {MAX_ZONES} zones of stripes \
         (add several groups at once)"
    )]
    NoZone {
        /// The array.
        array: String,
    },
    /// The resulting configuration is invalid.
    #[error("array {array}: {error}")]
    Config {
        /// The array.
        array: String,
        /// The rule that it violates.
        error: ConfigError,
    },
    /// Devices are not suitable as members.
    #[error(transparent)]
    Device(#[from] CreateError),
    /// Members could not be read or written, before any change.
    #[error(transparent)]
    Members(#[from] MemberFailures),
    /// The bad-block list cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Members failed while the last superblocks were written.
    #[error(
        "array {array}: {failures}: the array cannot run without them; the next assembly decides whether the groups \
         are part of it"
    )]
    Unfinished {
        /// The array.
        array: String,
        /// The failed members.
        failures: MemberFailures,
    },
}

/// Adds `devices` to an array as new groups, slot by slot in their order, and returns its new
/// table. `own` are all of its members. Must run on a core.
///
/// A device that cannot zero itself is sent zeroes, which takes as long as to write it completely.
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
    let regions = IntentBitmap::load(&old.config, old.initial_region, own).await?;
    let bad = BadBlocks::load(old.config.uuid, own, false).await?;
    let new = Newcomers::new(old.members.len(), candidates, layouts);
    new.clear().await?;
    zero(candidates, &new.layouts).await?;
    new.inform(&regions, &bad).await?;
    let store = store_of(assembly, config.geometry.members());
    // `settled` stays at the generation of the members: they never get this table.
    let change = Table { config, ..assembly.next_table(options.now_ns) };
    let creating = new.creating(change, options.identities);
    if !mutant::is(Mutant::GroupInOneStep) {
        new.write(&store, &creating).await?;
    }
    let created = Table { is_creating: false, ..creating.retry(options.now_ns) };
    finish(&store, own.iter().chain(&new.targets).cloned().collect(), created, options).await
}

/// Zeroes the devices' data: every write-intent bitmap matches that, and parity fits.
async fn zero(candidates: &[Candidate], layouts: &[Layout]) -> Result<(), CreateError> {
    if zero_data(candidates, layouts).await? {
        return Ok(());
    }
    let slowly = candidates.iter().zip(layouts).map(|(device, layout)| async move {
        let Layout { data_offset, data_bytes, .. } = *layout;
        let zeroed = io::zero(&*device.channel, &device.limits, data_offset, data_bytes).await;
        zeroed.map_err(device.failed("cannot be zeroed"))
    });
    io::all(slowly).await.into_iter().collect()
}

async fn finish(
    store: &Store,
    targets: Vec<Target>,
    table: Table,
    options: &AddOptions,
) -> Result<Table, AddError> {
    let array = table.config.name.clone();
    let finished = newcomers::finish(store, targets, table, options).await;
    finished.map_err(|failures| AddError::Unfinished { array, failures })
}

/// The configuration of the array with `given` more devices.
fn plan(assembly: &Assembly, given: usize) -> Result<ArrayConfig, AddError> {
    check_ready(assembly)?;
    let Assembly { table, members, .. } = assembly;
    let array = table.config.name.clone();
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

/// The level's name for several groups of it.
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
pub(super) mod tests;
