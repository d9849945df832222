//! Verifies an array that is not in use: superblocks, write-intent bitmap, bad blocks, and parity
//! of all written regions.
//!
//! Assembly replays the log after a crash; until then parity may differ, and nothing is wrong.

use super::open::Selection;
use super::verify::{Expectation, Findings, Observer, Subject, verify};
use crate::log::{self, Nonce, PendingWrite, RecoverError, Recovery, RecoveryMember, Report};
use crate::metadata::store::Copy;
use crate::metadata::{
    BadBlocks, BadRange, IntentBitmap, Layout, LoadError, MemberFailures, MemberState, Store, Table, Target,
    intent_bitmap,
};
use block::{Channel, DeviceError};
use serde::Serialize;
use std::collections::HashSet;
use std::rc::Rc;

/// The findings of a check.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// Superblock copies that are broken, as sentences.
    pub superblocks: Vec<String>,
    /// Whether broken copies were rewritten.
    pub superblocks_repaired: bool,
    /// Regions that were ever written.
    pub regions_written: u64,
    /// Regions whose parity is known not to be right.
    pub regions_out_of_sync: u64,
    /// Ranges that nothing can bring back.
    pub bad_blocks: Vec<BadRange>,
    /// Parity.
    pub parity: Findings,
}

impl Checked {
    /// Whether nothing is wrong (any more).
    pub fn is_clean(&self) -> bool {
        (self.superblocks.is_empty() || self.superblocks_repaired)
            && self.bad_blocks.is_empty()
            && self.parity.is_clean()
    }
}

/// Why a check could not continue.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// A crash has left something to be replayed.
    #[error("array {array}: it was not stopped cleanly; assemble it first, or check it with --repair")]
    NotClean {
        /// The array.
        array: String,
    },
    /// Its stripes have two shapes.
    #[error(
        "array {array}: it is being reshaped: serve it until the reshape has ended, and check it afterwards"
    )]
    Reshaping {
        /// The array.
        array: String,
    },
    /// The log cannot be read.
    #[error("array {array}: {error}")]
    Log {
        /// The array.
        array: String,
        /// Why.
        error: RecoverError,
    },
    /// The list of bad blocks cannot be read.
    #[error("array {array}: {error}")]
    BadBlocks {
        /// The array.
        array: String,
        /// Why.
        error: LoadError,
    },
    /// A member cannot be opened on this core.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Members failed.
    #[error("array {array}: {failures}")]
    Members {
        /// The array.
        array: String,
        /// Which ones, and how.
        failures: MemberFailures,
    },
}

/// Checks what was selected; with `repair` makes right what can be. On a core, with the members
/// claimed.
///
/// # Errors
/// When the array has to be recovered first, or a member fails.
pub async fn check(
    selection: &Selection,
    repair: bool,
    observer: &mut dyn Observer,
) -> Result<Checked, CheckError> {
    let table = &selection.assembly.table;
    let config = &table.config;
    refuse_reshape(table)?;
    if !table.is_clean {
        return Err(CheckError::NotClean { array: config.name.clone() });
    }
    let failed = |failures| CheckError::Members { array: config.name.clone(), failures };
    let targets = targets(selection)?;
    // Members that hold older copies of these get the newest ones only when something may be
    // written.
    let (regions, bad) = match repair {
        true => (
            IntentBitmap::load(config, table.initial_region, &targets).await,
            BadBlocks::load(config.uuid, &targets, false).await,
        ),
        false => (
            IntentBitmap::look(config, table.initial_region, &targets).await,
            BadBlocks::look(config.uuid, &targets, false).await,
        ),
    };
    let regions = regions.map_err(failed)?;
    let bad = bad.map_err(|error| CheckError::BadBlocks { array: config.name.clone(), error })?;
    let superblocks = broken_copies(selection);
    let superblocks_repaired = repair && !superblocks.is_empty();
    if superblocks_repaired {
        rewrite_superblocks(selection, &targets).await.map_err(failed)?;
    }
    let bad_blocks = bad.ranges();
    let bad_stripes: HashSet<u64> = bad_blocks.iter().map(|range| range.stripe).collect();
    let expect = |stripe: u64| {
        let bits = regions.get(config.region_of(stripe));
        if bits & intent_bitmap::WRITTEN == 0 || bad_stripes.contains(&stripe) {
            Expectation::Nothing
        } else if bits & intent_bitmap::OPEN != 0 {
            Expectation::Open
        } else if bits & intent_bitmap::NEED_SYNC != 0 {
            Expectation::OutOfSync
        } else {
            Expectation::InSync
        }
    };
    let mut members: Vec<Option<(Rc<dyn Channel>, u64)>> = vec![None; config.geometry.members()];
    for target in &targets {
        members[target.slot] = Some((target.channel.clone(), target.layout.data_offset));
    }
    let parity = match config.geometry.parity {
        0 => Findings::default(),
        _ => verify(&Subject { config, members: &members, expect: &expect }, repair, observer).await,
    };
    Ok(Checked {
        superblocks,
        superblocks_repaired,
        regions_written: regions.count(intent_bitmap::WRITTEN),
        regions_out_of_sync: regions.count(intent_bitmap::NEED_SYNC),
        bad_blocks,
        parity,
    })
}

/// Returns the log's content after a crash: the writes that assembly would replay, in its order,
/// and how many entries it would not. Writes nothing. On a core, with the members claimed.
///
/// # Errors
/// When a member fails, or the log contradicts itself.
pub async fn pending(selection: &Selection) -> Result<(Vec<PendingWrite>, Report), CheckError> {
    let table = &selection.assembly.table;
    let config = &table.config;
    refuse_reshape(table)?;
    if table.is_clean || !table.is_logging {
        return Ok(Default::default()); // whatever lies there is of no account
    }
    let mut members = Vec::new();
    for (slot, device) in selection.devices.iter().enumerate() {
        members.push(match (device, selection.layout(slot)) {
            (Some(device), Some(Layout { log_offset, data_offset, .. })) if table.members[slot].is_in() => {
                Some(RecoveryMember { channel: device.open_channel()?, log_offset, data_offset })
            }
            _ => None,
        });
    }
    let is_live = |stripe: u64, slot: usize| match table.members[slot].state {
        MemberState::Live => true,
        MemberState::Rebuilding { cursor } => config.geometry.member_offset(stripe) < cursor,
        MemberState::Missing { .. } => false,
    };
    let nonce = Nonce(table.nonce);
    let recovery =
        Recovery { config, nonce, members: &members, is_live: &is_live, first_stripe: 0, noted: &[] };
    let array = config.name.clone();
    log::list(&recovery).await.map_err(|error| CheckError::Log { array, error })
}

fn refuse_reshape(table: &Table) -> Result<(), CheckError> {
    match table.reshape {
        None => Ok(()),
        Some(_) => Err(CheckError::Reshaping { array: table.config.name.clone() }),
    }
}

/// The members that hold everything.
fn targets(selection: &Selection) -> Result<Vec<Target>, DeviceError> {
    let mut targets = Vec::new();
    for (slot, member) in selection.assembly.table.members.iter().enumerate() {
        let layout = selection.layout(slot);
        if let (true, Some(device), Some(layout)) = (member.is_live(), &selection.devices[slot], layout) {
            targets.push(Target { slot, channel: device.open_channel()?, layout });
        }
    }
    Ok(targets)
}

fn broken_copies(selection: &Selection) -> Vec<String> {
    let mut broken = Vec::new();
    for (slot, found) in selection.assembly.members.iter().enumerate() {
        let copies = found.iter().flat_map(|found| found.copies.iter().enumerate());
        for (number, copy) in copies {
            let why = match copy {
                Copy::Valid(_) => continue,
                Copy::Bad(error) => error.to_string(),
                Copy::Unreadable(error) => error.to_string(),
            };
            let name = found.as_ref().map_or("", |found| &found.name);
            broken.push(format!("slot {slot} ({name}): superblock copy {number}: {why}"));
        }
    }
    broken
}

/// Commits the table twice, so that every copy is written.
async fn rewrite_superblocks(selection: &Selection, targets: &[Target]) -> Result<(), MemberFailures> {
    let store = Store::new(selection.assembly.members.len());
    for (slot, found) in selection.assembly.members.iter().enumerate() {
        found.iter().for_each(|found| store.note(slot, found));
    }
    let mut table = selection.assembly.table.clone();
    for _ in 0..2 {
        table = table.next(table.updated_ns);
        let results = store.commit(targets, &table).await;
        let failures: Vec<_> =
            results.into_iter().filter_map(|(slot, result)| Some((slot, result.err()?))).collect();
        if !failures.is_empty() {
            return Err(MemberFailures(failures));
        }
    }
    Ok(())
}
