//! Beginning a change of shape of an array that nobody uses: more data strips, more parity, or both. Data is moved once
//! the array is served; here everything is made ready for it ([`super::superblock::Reshape`]).
//!
//! ```text
//!   1  new devices: cleared
//!   2  members: region map as long as it will be, every region written: as right for the shape before
//!   3  new devices: region map, superblocks with the new table, "being created"
//!   4  all: superblocks with the new table and data that begins lower
//! ```
//!
//! Power may go anywhere: see [`super::newcomers`]. New devices' data is left as it is, since every row is written.

use super::Assembly;
use super::bad_blocks::{BadBlocks, LoadError};
use super::create::{Candidate, CreateError, fit, refuse_twice, refuse_used};
use super::io::{MemberFailures, Target};
use super::layout::{Layout, LayoutError, PAGE_BYTES};
use super::newcomers::{self, AddOptions, Newcomers, Unready, check_ready, store_of};
use super::region_map::{NEED_SYNC, OPEN, RegionMap, WRITTEN};
use super::shape::matrix_of;
use super::superblock::{Reshape, Table};
use crate::{ArrayConfig, ConfigError, Geometry, Level};
use block::Device;
use std::sync::Arc;

/// What an array shall be. What is `None` follows from what it is and the devices that it gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goal {
    /// The level: 5, 6, 7.3, or n+m, which leaves parity as it is.
    pub level: Option<Level>,
    /// Members in all, without spares.
    pub members: Option<usize>,
}

/// Why no change of shape begins. The array is as it was, unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum RestripeError {
    /// The array cannot be changed as it is.
    #[error(transparent)]
    Unready(#[from] Unready),
    /// It has several groups, or stripes in zones.
    #[error("array {array}: it has {groups} groups: only an array of one can change its shape")]
    Groups {
        /// The array.
        array: String,
        /// Groups.
        groups: usize,
    },
    /// It is a mirror, or has no parity.
    #[error("array {array}: of level {}: only one with parity can change its shape", .level.name())]
    NoParity {
        /// The array.
        array: String,
        /// Its level.
        level: Level,
    },
    /// The level that is wanted is none of one group with parity.
    #[error("array {array}: it cannot become one of level {}: 5, 6, 7.3 and n+m can be had", .level.name())]
    Level {
        /// The array.
        array: String,
        /// The level.
        level: Level,
    },
    /// There are not as many devices as the goal needs.
    #[error("array {array}: {members} members are wanted: it has {own}, and {given} devices are given")]
    Count {
        /// The array.
        array: String,
        /// Members that are wanted.
        members: usize,
        /// Members that it has.
        own: usize,
        /// Devices.
        given: usize,
    },
    /// A stripe would hold less data than before.
    #[error(
        "array {array}: {parity} of {members} members for parity leave {data} for data, and it has {before}: it needs \
         {missing} devices more"
    )]
    LessData {
        /// The array.
        array: String,
        /// Members that there would be.
        members: usize,
        /// Parity strips that there would be.
        parity: usize,
        /// Data strips that there would be.
        data: usize,
        /// Data strips that there are.
        before: usize,
        /// Devices that would have to be given beside those that are.
        missing: usize,
    },
    /// The shape is what is wanted already.
    #[error("array {array}: it has {data} data and {parity} parity strips already")]
    Same {
        /// The array.
        array: String,
        /// Data strips.
        data: usize,
        /// Parity strips.
        parity: usize,
    },
    /// A member's reserve is too small: earlier changes have used it.
    #[error("array {array}: slot {slot} has {room} bytes of reserve before its data: {needed} are needed")]
    Reserve {
        /// The array.
        array: String,
        /// The member.
        slot: usize,
        /// What it has.
        room: u64,
        /// What is needed.
        needed: u64,
    },
    /// A member's log is too small.
    #[error(
        "array {array}: slot {slot} has a log of {bytes} bytes: two lanes of {lane_bytes} bytes are needed at least"
    )]
    Log {
        /// The array.
        array: String,
        /// The member.
        slot: usize,
        /// Bytes of its log.
        bytes: u64,
        /// Bytes of a lane.
        lane_bytes: u32,
    },
    /// A member has no room for what the new shape needs.
    #[error("array {array}: slot {slot}: {error}")]
    Member {
        /// The array.
        array: String,
        /// The member.
        slot: usize,
        /// What it lacks.
        error: LayoutError,
    },
    /// The new shape makes no sense.
    #[error("array {array}: {error}")]
    Config {
        /// The array.
        array: String,
        /// What is wrong.
        error: ConfigError,
    },
    /// Parity is not right everywhere.
    #[error(
        "array {array}: parity of {regions} regions is yet to be made: assemble it, and wait for the sync"
    )]
    OutOfSync {
        /// The array.
        array: String,
        /// Regions.
        regions: u64,
    },
    /// Blocks are lost, and noted by their places in the shape before.
    #[error(
        "array {array}: {ranges} ranges of blocks are lost, the first in stripe {stripe}: write them anew before it changes \
         its shape"
    )]
    BadBlocks {
        /// The array.
        array: String,
        /// Ranges.
        ranges: usize,
        /// The first one's stripe.
        stripe: u64,
    },
    /// Devices cannot be members.
    #[error(transparent)]
    Device(#[from] CreateError),
    /// Members could not be read or written before the change began.
    #[error(transparent)]
    Members(#[from] MemberFailures),
    /// The list of bad blocks cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Members failed while the last superblocks were written.
    #[error(
        "array {array}: {failures}, and it cannot do without them: whether it changes its shape is decided when it is \
         assembled"
    )]
    Unfinished {
        /// The array.
        array: String,
        /// Who failed.
        failures: MemberFailures,
    },
}

/// Begins to change an array's shape to `goal`, with `devices` as new members, slot by slot in their order, and returns
/// its new table. `own` are its members, all of them. Data is moved once the array is served. On a core.
///
/// # Errors
/// See [`RestripeError`].
pub async fn begin_restripe(
    assembly: &Assembly,
    own: &[Target],
    devices: &[Arc<dyn Device>],
    goal: Goal,
    options: &AddOptions,
) -> Result<Table, RestripeError> {
    let candidates: Vec<Candidate> = devices.iter().map(Candidate::open).collect::<Result<_, _>>()?;
    refuse_twice(&candidates)?;
    begin_of(assembly, own, &candidates, goal, options).await
}

async fn begin_of(
    assembly: &Assembly,
    own: &[Target],
    candidates: &[Candidate],
    goal: Goal,
    options: &AddOptions,
) -> Result<Table, RestripeError> {
    let old = &assembly.table;
    let Plan { config, reshape, members } = plan(assembly, own, candidates.len(), goal)?;
    // Room for both logs.
    let with_logs = ArrayConfig { lanes: 2 * config.lanes, ..config.clone() };
    let layouts: Vec<Layout> =
        candidates.iter().map(|device| fit(device, &with_logs, "a member")).collect::<Result<_, _>>()?;
    if !options.force {
        refuse_used(candidates.iter()).await?;
    }
    let regions = RegionMap::load(&old.config, old.initial_region, own).await?;
    let bad = BadBlocks::load(old.config.uuid, own, false).await?;
    refuse_unsound(&old.config.name, &regions, &bad)?;
    let new = Newcomers::new(old.members.len(), candidates, layouts);
    new.clear().await?;
    regions.prepare(config.regions(), WRITTEN, own).await?;
    regions.grow(config.regions());
    regions.change_all(own, |_, _| WRITTEN).await?;
    new.inform(&regions, &bad).await?;
    let store = store_of(assembly, config.geometry.members());
    // Settled stays what members stand at: they will never have this table.
    let next = assembly.next_table(options.now_ns);
    let reshape = Some(reshape);
    let change = Table {
        config,
        reshape,
        resync_cursor: None,
        scrub_cursor: None,
        scrub_repairs: false,
        scrub_is_scheduled: false,
        ..next
    };
    let creating = new.creating(change, options.identities);
    new.write(&store, &creating).await?;
    let created = Table { is_creating: false, ..creating.retry(options.now_ns) };
    let targets = members.into_iter().chain(new.targets).collect();
    let finished = newcomers::finish(&store, targets, created, options).await;
    let array = old.config.name.clone();
    finished.map_err(|failures| RestripeError::Unfinished { array, failures })
}

/// What does not fit a shape that changes.
fn refuse_unsound(array: &str, regions: &RegionMap, bad: &BadBlocks) -> Result<(), RestripeError> {
    let is_unsound = |region: &u64| regions.get(*region) & (NEED_SYNC | OPEN) != 0;
    let unsound = (0..regions.regions()).filter(is_unsound).count() as u64;
    if unsound > 0 {
        return Err(RestripeError::OutOfSync { array: array.to_owned(), regions: unsound });
    }
    match bad.ranges()[..] {
        [] => Ok(()),
        [first, ..] => {
            let (ranges, stripe) = (bad.ranges().len(), first.stripe);
            Err(RestripeError::BadBlocks { array: array.to_owned(), ranges, stripe })
        }
    }
}

/// What an array is to be, and where things lie on its members then.
struct Plan {
    config: ArrayConfig,
    reshape: Reshape,
    members: Vec<Target>,
}

fn plan(assembly: &Assembly, own: &[Target], given: usize, goal: Goal) -> Result<Plan, RestripeError> {
    check_ready(assembly)?;
    let old = &assembly.table.config;
    let array = || old.name.clone();
    let Geometry { groups, data, parity, zones, .. } = old.geometry;
    if groups != 1 || !zones.is_empty() {
        return Err(RestripeError::Groups { array: array(), groups });
    }
    if data < 2 || parity == 0 {
        return Err(RestripeError::NoParity { array: array(), level: old.level });
    }
    let (level, data, parity) = shape(old, given, goal)?;
    let lanes = lanes(old, own)?;
    let config = ArrayConfig {
        level,
        geometry: Geometry { data, parity, ..old.geometry },
        matrix: matrix_of(data, parity),
        lanes,
        ..old.clone()
    };
    let (least, most) = shifts(old, data, own)?;
    // The region map may have no room for more rows than it must.
    shifted(old, &config, own, most).or_else(|_| shifted(old, &config, own, least))
}

/// Level, data and parity strips that are wanted.
fn shape(old: &ArrayConfig, given: usize, goal: Goal) -> Result<(Level, usize, usize), RestripeError> {
    let array = || old.name.clone();
    let Geometry { data: before, parity: parity_before, .. } = old.geometry;
    let (level, parity) = match goal.level {
        None => (old.level, parity_before),
        Some(level @ Level::Raid5) => (level, 1),
        Some(level @ Level::Raid6) => (level, 2),
        Some(level @ Level::Raid7) => (level, 3),
        Some(level @ Level::NPlusM) => (level, parity_before),
        Some(level) => return Err(RestripeError::Level { array: array(), level }),
    };
    let own = old.geometry.members();
    let members = goal.members.unwrap_or(own + given);
    if members != own + given {
        return Err(RestripeError::Count { array: array(), members, own, given });
    }
    let data = members.saturating_sub(parity);
    if data < before {
        let missing = before + parity - members;
        return Err(RestripeError::LessData { array: array(), members, parity, data, before, missing });
    }
    if (data, parity) == (before, parity_before) {
        return Err(RestripeError::Same { array: array(), data, parity });
    }
    Ok((level, data, parity))
}

/// Lanes of each of two logs.
fn lanes(old: &ArrayConfig, own: &[Target]) -> Result<u16, RestripeError> {
    let lanes_of = |target: &Target| target.layout.log_bytes / u64::from(old.lane_bytes);
    if let Some(target) = own.iter().find(|target| lanes_of(target) < 2) {
        let (slot, bytes) = (target.slot, target.layout.log_bytes);
        return Err(RestripeError::Log { array: old.name.clone(), slot, bytes, lane_bytes: old.lane_bytes });
    }
    let room = own.iter().map(lanes_of).min().unwrap_or(0) / 2;
    Ok(old.lanes.min(room.min(u64::from(u16::MAX / 2)) as u16))
}

/// By how much data must begin lower at least, and by how much it is to: the more, the more units can be moved between
/// two superblocks. Half of the reserve stays for a later change.
fn shifts(old: &ArrayConfig, data: usize, own: &[Target]) -> Result<(u64, u64), RestripeError> {
    let strip = u64::from(old.geometry.strip_bytes);
    let alignments = own.iter().map(|target| u64::from(target.layout.alignment));
    // All are powers of two.
    let alignment = alignments.fold(strip.max(PAGE_BYTES), u64::max);
    let least =
        (Reshape::unit_strips(old.geometry.data, data) / data as u64 * strip).next_multiple_of(alignment);
    let Some(narrowest) = own.iter().min_by_key(|target| target.layout.reserve_room()) else {
        return Ok((least, least));
    };
    let room = narrowest.layout.reserve_room();
    if room < least {
        let (array, slot) = (old.name.clone(), narrowest.slot);
        return Err(RestripeError::Reserve { array, slot, room, needed: least });
    }
    Ok((least, least.max(room / 2 / alignment * alignment)))
}

/// The plan with data that begins so much lower.
fn shifted(
    old: &ArrayConfig,
    config: &ArrayConfig,
    own: &[Target],
    shift: u64,
) -> Result<Plan, RestripeError> {
    let array = || old.name.clone();
    let reshape = Reshape {
        old_level: old.level,
        old_matrix: old.matrix,
        old_geometry: old.geometry,
        cursor: 0,
        shift,
    };
    let mut config = config.clone();
    config.geometry.group_stripes += reshape.shift_rows();
    let checked = config.check().and_then(|()| reshape.check(&config));
    checked.map_err(|error| RestripeError::Config { array: array(), error })?;
    let lower = |target: &Target| {
        let (slot, room) = (target.slot, target.layout.reserve_room());
        let Some(layout) = target.layout.shifted(shift) else {
            return Err(RestripeError::Reserve { array: array(), slot, room, needed: shift });
        };
        let checked = layout.check(&config);
        checked.map_err(|error| RestripeError::Member { array: array(), slot, error })?;
        Ok(Target { layout, ..target.clone() })
    };
    let members = own.iter().map(lower).collect::<Result<_, _>>()?;
    Ok(Plan { config, reshape, members })
}

#[cfg(test)]
mod tests;
