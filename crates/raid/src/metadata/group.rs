//! Adding groups of new members to an array that nobody uses. No data moves: the new groups' stripes come behind all that
//! there are ([`crate::Geometry::with_groups_added`]).
//!
//! New devices' data is zeroed before they become members, so that every region map is right about it and parity fits.
//! How they do, [`super::newcomers`] says.

use super::Assembly;
use super::bad_blocks::{BadBlocks, LoadError};
use super::create::{Candidate, CreateError, fit, refuse_twice, refuse_used, zero_data};
use super::io::{self, MemberFailures, Target};
use super::layout::Layout;
use super::newcomers::{self, AddOptions, Newcomers, Unready, check_ready, store_of};
use super::region_map::RegionMap;
use super::store::Store;
use super::superblock::Table;
use crate::config::MAX_MEMBERS;
use crate::geometry::MAX_ZONES;
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, ConfigError, Level};
use block::Device;
use std::sync::Arc;

/// Why no group is added. The array is as it was, unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// The array cannot be changed as it is.
    #[error(transparent)]
    Unready(#[from] Unready),
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
    /// The list of bad blocks cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
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
    let bad = BadBlocks::load(old.config.uuid, own, false).await?;
    let new = Newcomers::new(old.members.len(), candidates, layouts);
    new.clear().await?;
    zero(candidates, &new.layouts).await?;
    new.inform(&regions, &bad).await?;
    let store = store_of(assembly, config.geometry.members());
    // Settled stays what members stand at: they will never have this table.
    let change = Table { config, ..assembly.next_table(options.now_ns) };
    let creating = new.creating(change, options.identities);
    if !mutant::is(Mutant::GroupInOneStep) {
        new.write(&store, &creating).await?;
    }
    let created = Table { is_creating: false, ..creating.retry(options.now_ns) };
    finish(&store, own.iter().chain(&new.targets).cloned().collect(), created, options).await
}

/// Makes the devices' data zeroes: every region map is right about that, and parity fits.
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

/// What the array is to be with so many devices more.
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
pub(super) mod tests;
