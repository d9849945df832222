//! New members of an array that nobody uses: what every change that brings some has in common.
//!
//! ```text
//!   1  new devices: cleared, region map and bad blocks as the members have them
//!   2  new devices: superblocks with the new table, "being created"
//!   3  all: superblocks with the new table                ◄─ the change is made as soon as one has it
//! ```
//!
//! Each step is durable on every device before the next one begins, so power may go anywhere. In 2 no member knows the
//! new devices: they are left out, and the array is as it was ([`super::assemble()`]). In 3 whoever has the new table
//! speaks for those that do not have it: old members stand at the table before, which is what was durable on all of them,
//! and new ones at 2, with everything in its place. Without 2 there could be a table that counts on devices that have no
//! superblocks.

use super::Assembly;
use super::bad_blocks::BadBlocks;
use super::create::{Candidate, CreateError, Identities, clear};
use super::io::{self, MemberFailures, Target};
use super::layout::Layout;
use super::region_map::RegionMap;
use super::store::Store;
use super::superblock::{Member, Reason, Table};

/// How new members are taken.
#[derive(Clone, Debug)]
pub struct AddOptions {
    /// Take devices that hold something.
    pub force: bool,
    /// Nanoseconds since 1970.
    pub now_ns: u64,
    /// Where identities come from.
    pub identities: Identities,
}

/// Why an array cannot be changed as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unready {
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
}

/// Whether an array is whole, was stopped in good order, and is not changing already.
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

/// Devices that become members, and where things will lie on them.
pub(super) struct Newcomers<'a> {
    candidates: &'a [Candidate],
    pub layouts: Vec<Layout>,
    pub targets: Vec<Target>,
}

impl<'a> Newcomers<'a> {
    /// For the slots from `first` on.
    pub fn new(first: usize, candidates: &'a [Candidate], layouts: Vec<Layout>) -> Newcomers<'a> {
        let target = |(i, (device, layout)): (usize, (&Candidate, &Layout))| Target {
            slot: first + i,
            channel: device.channel.clone(),
            layout: *layout,
        };
        let targets = candidates.iter().zip(&layouts).enumerate().map(target).collect();
        Newcomers { candidates, layouts, targets }
    }

    /// Clears everything but the data.
    pub async fn clear(&self) -> Result<(), CreateError> {
        let all = self.candidates.iter().zip(&self.layouts);
        io::all(all.map(|(device, layout)| clear(device, layout))).await.into_iter().collect()
    }

    /// Writes region map and bad blocks to them.
    pub async fn inform(&self, regions: &RegionMap, bad: &BadBlocks) -> Result<(), CreateError> {
        for (device, target) in self.candidates.iter().zip(&self.targets) {
            regions.write_to(target).await.map_err(device.failed("cannot take the region map"))?;
            bad.write_to(target).await.map_err(device.failed("cannot take the list of bad blocks"))?;
        }
        Ok(())
    }

    /// The table that they get first: `change`, with them as members, being created.
    pub fn creating(&self, change: Table, identities: Identities) -> Table {
        let mut creating = Table { is_creating: true, ..change };
        creating.members.extend(self.candidates.iter().map(|_| Member::live(identities.uuid())));
        creating
    }

    /// Writes that table to them.
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

/// Commits the table that makes the change. Who fails is out. The error: members failed that the array cannot do
/// without.
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
            tracing::error!(array = table.config.name, slot, %error, "a superblock cannot be written");
            table.take_out(*slot, Reason::WriteError);
        }
        if !table.is_alive() {
            return Err(failures);
        }
        targets.retain(|target| table.members[target.slot].is_in());
    }
}
