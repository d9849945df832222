//! Begins a reshape of an array that is not in use: more data strips, more parity, or both. Data is
//! moved once the array is served; this module prepares it ([`super::superblock::Reshape`]).
//!
//! ```text
//!   1  new devices: cleared
//!   2  members: write-intent bitmap of the final length, every region marked as written
//!   3  new devices: write-intent bitmap, superblocks with the new table, "being created"
//!   4  all: superblocks with the new table and data that begins lower
//! ```
//!
//! The power may fail at any point: see [`super::newcomers`]. The data of new devices is not
//! zeroed, since the reshape writes every row.

use super::Assembly;
use super::bad_blocks::{BadBlocks, LoadError};
use super::create::{Candidate, fit, refuse_twice, refuse_used};
use super::create_error::CreateError;
use super::intent_bitmap::{IntentBitmap, NEED_SYNC, OPEN, WRITTEN};
use super::io::{MemberFailures, Target};
use super::layout::{Layout, LayoutError, PAGE_BYTES};
use super::newcomers::{self, AddOptions, Newcomers, Unready, check_ready, store_of};
use super::shape::matrix_of;
use super::superblock::{Reshape, Table};
use crate::{ArrayConfig, ConfigError, Geometry, Level};
use block::Device;
use std::sync::Arc;

/// The target of a reshape. A field that is `None` follows from the array and the new devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goal {
    /// The level: 5, 6, 7.3, or n+m, which keeps the number of parity strips.
    pub level: Option<Level>,
    /// Total members, without spares.
    pub members: Option<usize>,
}

/// Why no reshape begins. The array is unchanged unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum RestripeError {
    /// The state of the array does not allow a reshape.
    #[error(transparent)]
    Unready(#[from] Unready),
    /// The array has several groups, or stripes in zones.
    #[error("array {array}: {groups} groups: only an array of one group can be reshaped")]
    Groups {
        /// The array.
        array: String,
        /// Groups.
        groups: usize,
    },
    /// The array is a mirror, or has no parity.
    #[error("array {array}: level {}: only an array with parity can be reshaped", .level.name())]
    NoParity {
        /// The array.
        array: String,
        /// Its level.
        level: Level,
    },
    /// The requested level has no single group with parity.
    #[error("array {array}: a reshape to level {} is unsupported: supported are 5, 6, 7.3 and n+m", .level.name())]
    Level {
        /// The array.
        array: String,
        /// The level.
        level: Level,
    },
    /// The number of devices does not match the goal.
    #[error(
        "array {array}: {members} members requested: the array has {own}, and {given} devices were given"
    )]
    Count {
        /// The array.
        array: String,
        /// Requested members.
        members: usize,
        /// Members of the array.
        own: usize,
        /// Given devices.
        given: usize,
    },
    /// A stripe would hold less data than before.
    #[error(
        "array {array}: {parity} of {members} members for parity leave {data} for data, the array has {before}: \
         {missing} more devices are needed"
    )]
    LessData {
        /// The array.
        array: String,
        /// Members after the reshape.
        members: usize,
        /// Parity strips after the reshape.
        parity: usize,
        /// Data strips after the reshape.
        data: usize,
        /// Data strips of the array.
        before: usize,
        /// Number of additional devices that are needed.
        missing: usize,
    },
    /// The array already has the requested geometry.
    #[error("array {array}: the array already has {data} data and {parity} parity strips")]
    Same {
        /// The array.
        array: String,
        /// Data strips.
        data: usize,
        /// Parity strips.
        parity: usize,
    },
    /// A member's reserve is too small: earlier reshapes have used it.
    #[error("array {array}: slot {slot} has {room} bytes of reserve before its data: {needed} are needed")]
    Reserve {
        /// The array.
        array: String,
        /// The member.
        slot: usize,
        /// Bytes of its reserve.
        room: u64,
        /// Bytes needed.
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
    /// A member has no room for the new geometry.
    #[error("array {array}: slot {slot}: {error}")]
    Member {
        /// The array.
        array: String,
        /// The member.
        slot: usize,
        /// The area that lacks room.
        error: LayoutError,
    },
    /// The new configuration is invalid.
    #[error("array {array}: {error}")]
    Config {
        /// The array.
        array: String,
        /// The rule that it violates.
        error: ConfigError,
    },
    /// Parity is not in sync everywhere.
    #[error(
        "array {array}: parity of {regions} regions is not in sync: assemble the array, and wait for the sync"
    )]
    OutOfSync {
        /// The array.
        array: String,
        /// Regions.
        regions: u64,
    },
    /// Blocks are lost, and recorded by their stripes in the old geometry.
    #[error(
        "array {array}: {ranges} ranges of blocks are lost, the first in stripe {stripe}: write them again before the \
         reshape"
    )]
    BadBlocks {
        /// The array.
        array: String,
        /// Ranges.
        ranges: usize,
        /// The first one's stripe.
        stripe: u64,
    },
    /// Devices are not suitable as members.
    #[error(transparent)]
    Device(#[from] CreateError),
    /// Members could not be read or written before the reshape began.
    #[error(transparent)]
    Members(#[from] MemberFailures),
    /// The bad-block list cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Members failed while the last superblocks were written.
    #[error(
        "array {array}: {failures}: the array cannot run without them; the next assembly decides whether the reshape \
         has begun"
    )]
    Unfinished {
        /// The array.
        array: String,
        /// The failed members.
        failures: MemberFailures,
    },
}

/// Begins to reshape an array to `goal`, with `devices` as new members, slot by slot in their
/// order, and returns its new table. `own` are all of its members. Data is moved once the array is
/// served. Must run on a core.
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
    let regions = IntentBitmap::load(&old.config, old.initial_region, own).await?;
    let bad = BadBlocks::load(old.config.uuid, own, false).await?;
    refuse_unsound(&old.config.name, &regions, &bad)?;
    let new = Newcomers::new(old.members.len(), candidates, layouts);
    new.clear().await?;
    regions.prepare(config.regions(), WRITTEN, own).await?;
    regions.grow(config.regions());
    regions.change_all(own, |_, _| WRITTEN).await?;
    new.inform(&regions, &bad).await?;
    let store = store_of(assembly, config.geometry.members());
    // `settled` stays at the generation of the members: they never get this table.
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

/// Refuses an array with states that a reshape cannot keep.
fn refuse_unsound(array: &str, regions: &IntentBitmap, bad: &BadBlocks) -> Result<(), RestripeError> {
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

/// The new configuration of an array, and the layouts of its members.
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
    // The write-intent bitmap may have no room for more than the least rows.
    shifted(old, &config, own, most).or_else(|_| shifted(old, &config, own, least))
}

/// The requested level, data strips and parity strips.
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

/// Lanes of each of the two logs.
fn lanes(old: &ArrayConfig, own: &[Target]) -> Result<u16, RestripeError> {
    let lanes_of = |target: &Target| target.layout.log_bytes / u64::from(old.lane_bytes);
    if let Some(target) = own.iter().find(|target| lanes_of(target) < 2) {
        let (slot, bytes) = (target.slot, target.layout.log_bytes);
        return Err(RestripeError::Log { array: old.name.clone(), slot, bytes, lane_bytes: old.lane_bytes });
    }
    let room = own.iter().map(lanes_of).min().unwrap_or(0) / 2;
    Ok(old.lanes.min(room.min(u64::from(u16::MAX / 2)) as u16))
}

/// Least and chosen distance by which data begins lower. A larger distance allows more units
/// between two superblock commits. Half of the reserve stays for a later reshape.
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

/// The plan with data that begins `shift` bytes lower.
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
