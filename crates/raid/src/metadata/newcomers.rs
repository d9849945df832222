//! New members of an array that is not in use: the common steps of every change that adds some.
//!
//! ```text
//!   1  new devices: cleared, the members' write-intent bitmap and bad blocks
//!   2  new devices: superblocks with the new table, "being created"
//!   3  all: superblocks with the new table                ◄─ the change is done as soon as one has it
//! ```
//!
//! Each step is durable on every device before the next one begins, so the power may fail at any
//! point. In step 2 no member knows the new devices: assembly ignores them, and the array is
//! unchanged ([`super::assemble()`]). In step 3 each device with the new table vouches for those
//! without it. Old members have the previous table, which was durable on all of them. New ones have
//! the table of step 2, with all other metadata in place. Without step 2 a table could refer to
//! devices without superblocks.

use super::Assembly;
use super::bad_blocks::BadBlocks;
use super::create::{Candidate, Identities, clear};
use super::create_error::CreateError;
use super::intent_bitmap::IntentBitmap;
use super::io::{self, MemberFailures, Target};
use super::layout::Layout;
use super::store::Store;
use super::superblock::{Member, Reason, Table};

/// Options for new members.
#[derive(Clone, Debug)]
pub struct AddOptions {
    /// Whether to overwrite devices with known content.
    pub force: bool,
    /// Nanoseconds since 1970.
    pub now_ns: u64,
    /// Source of identities.
    pub identities: Identities,
}

/// Why the state of an array does not allow a change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unready {
    /// Members are missing or being rebuilt.
    #[error("array {array}: slots {slots:?} are not live: all members must be live")]
    NotWhole {
        /// The array.
        array: String,
        /// The slots.
        slots: Vec<usize>,
    },
    /// The log must be replayed first.
    #[error("array {array}: not stopped cleanly: assemble it first")]
    NotClean {
        /// The array.
        array: String,
    },
    /// A reshape is in progress.
    #[error("array {array}: a reshape is in progress")]
    Reshaping {
        /// The array.
        array: String,
    },
}

/// Checks that an array is complete, was stopped cleanly, and has no reshape in progress.
pub(super) fn check_ready(assembly: &Assembly) -> Result<(), Unready> {
    let Assembly { table, members, .. } = assembly;
    let array = table.config.name.clone();
    let is_missing = |slot: &usize| members[*slot].is_none() || !table.members[*slot].is_live();
    let slots: Vec<usize> = (0..members.len()).filter(is_missing).collect();
    if !slots.is_empty() {
        return Err(Unready::NotWhole { array, slots });
    }
    if !table.is_clean {
        return Err(Unready::NotClean { array });
    }
    if table.reshape.is_some() {
        return Err(Unready::Reshaping { array });
    }
    Ok(())
}

/// Devices that become members, and their layouts.
pub(super) struct Newcomers<'a> {
    candidates: &'a [Candidate],
    pub layouts: Vec<Layout>,
    pub targets: Vec<Target>,
}

impl<'a> Newcomers<'a> {
    /// `first` is the slot of the first device.
    pub fn new(first: usize, candidates: &'a [Candidate], layouts: Vec<Layout>) -> Newcomers<'a> {
        let target = |(i, (device, layout)): (usize, (&Candidate, &Layout))| Target {
            slot: first + i,
            channel: device.channel.clone(),
            layout: *layout,
        };
        let targets = candidates.iter().zip(&layouts).enumerate().map(target).collect();
        Newcomers { candidates, layouts, targets }
    }

    /// Clears all areas but the data.
    pub async fn clear(&self) -> Result<(), CreateError> {
        let all = self.candidates.iter().zip(&self.layouts);
        io::all(all.map(|(device, layout)| clear(device, layout))).await.into_iter().collect()
    }

    /// Writes write-intent bitmap and bad blocks to the new devices.
    pub async fn inform(&self, regions: &IntentBitmap, bad: &BadBlocks) -> Result<(), CreateError> {
        for (device, target) in self.candidates.iter().zip(&self.targets) {
            regions.write_to(target).await.map_err(device.failed("cannot store the write-intent bitmap"))?;
            bad.write_to(target).await.map_err(device.failed("cannot store the bad-block list"))?;
        }
        Ok(())
    }

    /// The first table of the new devices: `change`, with them as members, in the state "being
    /// created".
    pub fn creating(&self, change: Table, identities: Identities) -> Table {
        let mut creating = Table { is_creating: true, ..change };
        creating.members.extend(self.candidates.iter().map(|_| Member::live(identities.uuid())));
        creating
    }

    /// Writes that table to the new devices.
    pub async fn write(&self, store: &Store, creating: &Table) -> Result<(), CreateError> {
        let results = store.commit(&self.targets, creating).await;
        for (device, (_, result)) in self.candidates.iter().zip(results) {
            result.map_err(device.failed("cannot write the superblock"))?;
        }
        Ok(())
    }
}

/// The store of an array that gets `slots` slots.
pub(super) fn store_of(assembly: &Assembly, slots: usize) -> Store {
    let store = Store::new(slots);
    for (slot, found) in assembly.members.iter().enumerate() {
        found.iter().for_each(|found| store.note(slot, found));
    }
    store
}

/// Commits the table that makes the change, without members that fail. Returns an error if the
/// array cannot run without the failed members.
pub(super) async fn finish(
    store: &Store,
    mut targets: Vec<Target>,
    mut table: Table,
    options: &AddOptions,
) -> Result<Table, MemberFailures> {
    loop {
        table.begin_unserved_epoch(options.identities.epoch_id());
        let results = store.commit(&targets, &table).await;
        let failed = results.into_iter().filter_map(|(slot, result)| Some((slot, result.err()?)));
        let failures = MemberFailures(failed.collect());
        if failures.0.is_empty() {
            return Ok(table);
        }
        table = table.retry(options.now_ns);
        for (slot, error) in &failures.0 {
            tracing::error!(array = table.config.name, slot, %error, "superblock cannot be written");
            table.take_out(*slot, Reason::WriteError);
        }
        if !table.is_alive() {
            return Err(failures);
        }
        targets.retain(|target| table.members[target.slot].is_in());
    }
}
