//! Repairs the metadata of an image that nothing else has open, as `qemu-img check -r` does.
//!
//! ```text
//!   zeroes with an invalid place ─► refcounts: in place, or all of them in a new place ─► COPIED bits ─► feature bits
//! ```
//!
//! References are the truth: refcounts become what the tables refer to. If their blocks cannot be
//! used, all refcounts are written behind the end of the file, and one write of the header replaces
//! the old ones. Each step moves one value from wrong to right, and each later step needs the
//! earlier one to be durable. So a crash leaves an image that is no worse than before.
//!
//! Source: QEMU `docs/interop/qcow2.rst`.

use super::Offline;
use crate::check::{Check, Report};
use crate::entry::{COPIED, Entry};
use crate::error::{Error, Problem};
use crate::header::{MAX_REFCOUNT_TABLE_BYTES, at, be_bytes, incompatible};
use block::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Which problems a repair ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Refcounts that are too high, and then COPIED bits if nothing else was wrong.
    Leaks,
    /// All that can be repaired.
    All,
}

/// The result of a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The check before it.
    pub before: Report,
    /// The check after it.
    pub after: Report,
}

impl Repaired {
    /// Leaked clusters that the repair has freed.
    pub fn leaks_fixed(&self) -> u64 {
        self.before.leaks.saturating_sub(self.after.leaks)
    }

    /// Errors that the repair has ended.
    pub fn corruptions_fixed(&self) -> u64 {
        self.before.corruptions.saturating_sub(self.after.corruptions)
    }
}

/// Repairs the image on `device`, on the calling core. Nothing else may have the image open.
///
/// # Errors
/// When the header is invalid, a table cannot be read that all others depend on, or a write fails.
pub async fn repair(device: &Arc<dyn Device>, level: Level) -> Result<Repaired, Error> {
    let run = async {
        let (before, found) = repair_image(&mut Offline::open(device).await?, level).await?;
        Ok(Repaired { before, after: found.report })
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

/// Repairs an image. Returns the report of the check before, and the check after it.
///
/// # Errors
/// As [`repair`].
pub(crate) async fn repair_image(image: &mut Offline, level: Level) -> Result<(Report, Check), Problem> {
    let mut found = image.check().await?;
    let before = found.report.clone();
    if level == Level::All && image.clear_misplaced(&found).await? {
        found = image.check().await?;
    }
    let has_changed = match level == Level::All && found.needs_new_refcounts {
        true => image.replace_refcounts(&found).await?,
        false => image.correct_refcounts(&found, level).await?,
    };
    if has_changed {
        found = image.check().await?;
    }
    // A refcount that fell to 1 needs its COPIED bit.
    let are_copied_ours = level == Level::All || has_changed && before.corruptions == 0;
    if are_copied_ours && image.correct_copied(&found).await? {
        found = image.check().await?;
    }
    if level == Level::All {
        image.clear_features(&found).await?;
    }
    Ok((before, found))
}

impl Offline {
    /// Takes the place from entries for zeroes whose place is invalid. Returns whether there were
    /// some.
    async fn clear_misplaced(&mut self, found: &Check) -> Result<bool, Problem> {
        let mut tables: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        found
            .misplaced_zeroes
            .iter()
            .for_each(|(table, index)| tables.entry(*table).or_default().push(*index));
        // Version 2 has no entry for zeroes.
        tables.retain(|table, _| {
            let uses = found.tables.get(table).map_or(0, |uses| uses.all);
            !found.geometry.is_v2 && found.is_alone(*table, 1, uses)
        });
        let Entry { word, bitmap } = found.geometry.zeroed(Entry::NONE, u32::MAX);
        let zeroes = be_bytes([word, bitmap]);
        for (table, indices) in &tables {
            self.begin().await?;
            for index in indices {
                let at = table + (index * found.geometry.entry_bytes()) as u64;
                self.write("an L2 table", at, &zeroes[..found.geometry.entry_bytes()]).await?;
            }
        }
        self.flush().await?;
        Ok(!tables.is_empty())
    }

    /// Writes the right refcounts to blocks that can be used. Returns whether one was wrong.
    pub(super) async fn correct_refcounts(&mut self, found: &Check, level: Level) -> Result<bool, Problem> {
        let size = found.geometry.cluster_size();
        let in_block = found.width.entries(size);
        let mut has_changed = false;
        for first in (0..found.clusters).step_by(in_block as usize) {
            let Some((offset, mut block)) = found.read_block(first / in_block).await? else { continue };
            let mut changed: Option<std::ops::Range<usize>> = None;
            for cluster in first..(first + in_block).min(found.clusters) {
                let index = (cluster - first) as usize;
                let (now, wanted) = (found.width.get(&block, index), found.counts.get(cluster));
                let is_ours = match now > wanted {
                    true => !found.is_incomplete,
                    false => level == Level::All && now < wanted,
                };
                if is_ours {
                    found.width.set(&mut block, index, wanted);
                    let bytes = found.width.bytes_of(index);
                    changed = Some(changed.map_or(bytes.start, |range| range.start)..bytes.end);
                }
            }
            if let Some(range) = changed.filter(|_| found.is_alone(offset, 1, 1)) {
                self.begin().await?;
                let at = offset + range.start as u64;
                self.write("a refcount block", at, &block[range]).await?;
                has_changed = true;
            }
        }
        self.flush().await?;
        Ok(has_changed)
    }

    /// Writes a new refcount table and its blocks behind everything else, and has the header name
    /// them. Returns `true`.
    async fn replace_refcounts(&mut self, found: &Check) -> Result<bool, Problem> {
        self.begin().await?;
        let mut needed = Check::references(self.reader(), &self.header).await?;
        if found.is_incomplete {
            keep_refcounts(found, &mut needed).await?;
        }
        let size = found.geometry.cluster_size();
        let behind = needed.clusters.max(self.file.capacity().div_ceil(size));
        let mut plan = Plan::new(&needed, behind, size)?;
        if let Err(problem) = self.make_room(plan.end() * size) {
            // A device of a fixed size can have room behind the last cluster that is used.
            let last = found.counts.referenced(0..found.clusters).last();
            plan = Plan::new(&needed, last.map_or(1, |(cluster, _)| cluster + 1), size)?;
            if found.is_incomplete || plan.end() * size > self.file.capacity() {
                return Err(problem);
            }
        }
        let start = plan.start;
        let in_block = found.width.entries(size);
        let mut table = vec![0; (plan.table * size / 8) as usize];
        for (cluster, number) in (start + plan.table..).zip(&plan.blocks) {
            let first = number * in_block;
            let mut block = vec![0; size as usize];
            let own = start.max(first)..plan.end().min(first + in_block);
            let own = own.map(|cluster| (cluster, 1));
            for (cluster, count) in needed.counts.referenced(first..first + in_block).chain(own) {
                needed.width.set(&mut block, (cluster - first) as usize, count);
            }
            self.write("a refcount block", cluster * size, &block).await?;
            table[*number as usize] = cluster * size;
        }
        self.write("the refcount table", start * size, &be_bytes(table)).await?;
        let mut fields = (start * size).to_be_bytes().to_vec();
        fields.extend((plan.table as u32).to_be_bytes());
        self.write_header(at::REFCOUNT_TABLE, &fields).await?;
        Ok(true)
    }

    /// Corrects the COPIED bits of the active tables. Returns whether one was wrong.
    pub(super) async fn correct_copied(&mut self, found: &Check) -> Result<bool, Problem> {
        let mut has_changed = false;
        // A cluster with too many references must not be written in place.
        let may_change = |word: u64| word & COPIED != 0 || !found.has_overflow;
        let l1_offset = found.header.l1_offset;
        if found.is_alone(l1_offset, found.l1.len() as u64 * 8, 1) {
            for (index, word) in found.wrong_in_l1().into_iter().filter(|(_, word)| may_change(*word)) {
                self.begin().await?;
                let at = l1_offset + index as u64 * 8;
                self.write("the L1 table", at, &(word ^ COPIED).to_be_bytes()).await?;
                has_changed = true;
            }
        }
        for table in found.active_tables() {
            let uses = found.tables.get(&table).map_or(0, |uses| uses.all);
            if !found.is_alone(table, 1, uses) {
                continue;
            }
            for (index, word) in found.wrong_in_l2(table).await? {
                if may_change(word) {
                    self.begin().await?;
                    let at = table + (index * found.geometry.entry_bytes()) as u64;
                    self.write("an L2 table", at, &(word ^ COPIED).to_be_bytes()).await?;
                    has_changed = true;
                }
            }
        }
        self.flush().await?;
        Ok(has_changed)
    }

    /// Removes the marks of an image that is dirty or corrupt, if nothing is wrong any more.
    async fn clear_features(&mut self, found: &Check) -> Result<(), Problem> {
        let features = self.header.incompatible & !(incompatible::DIRTY | incompatible::CORRUPT);
        let is_right = found.report.corruptions == 0 && found.report.check_errors == 0;
        if features == self.header.incompatible || !is_right || found.header.version < 3 {
            return Ok(());
        }
        self.begin().await?;
        self.write_header(at::INCOMPATIBLE, &features.to_be_bytes()).await
    }
}

/// Counts for each cluster at least the refcount that it has.
async fn keep_refcounts(found: &Check, needed: &mut Check) -> Result<(), Problem> {
    let in_block = found.width.entries(found.geometry.cluster_size());
    for first in (0..found.clusters).step_by(in_block as usize) {
        let Some((_, block)) = found.read_block(first / in_block).await? else { continue };
        for cluster in first..(first + in_block).min(found.clusters) {
            let now = found.width.get(&block, (cluster - first) as usize);
            let more = now.saturating_sub(needed.counts.get(cluster));
            if more > 0 {
                needed.counts.add(cluster, more, found.width.most());
            }
        }
    }
    Ok(())
}

/// Where new refcounts are: a table, and then its blocks.
struct Plan {
    /// First cluster of the table.
    start: u64,
    /// Clusters of the table.
    table: u64,
    /// Places in the table that have a block.
    blocks: BTreeSet<u64>,
}

impl Plan {
    /// The places for the refcounts of `needed` from cluster `start` on.
    fn new(needed: &Check, start: u64, size: u64) -> Result<Plan, Problem> {
        let in_block = needed.width.entries(size);
        let used = needed.counts.referenced(0..start).map(|(cluster, _)| cluster / in_block);
        let mut plan = Plan { start, table: 1, blocks: used.collect() };
        // The blocks count the table and themselves.
        loop {
            let last = (plan.end() - 1) / in_block;
            let table = ((last + 1) * 8).div_ceil(size);
            let blocks = plan.blocks.len();
            plan.blocks.extend(start / in_block..=last);
            if table <= plan.table && blocks == plan.blocks.len() {
                break;
            }
            plan.table = plan.table.max(table);
        }
        match plan.table * size {
            0..=MAX_REFCOUNT_TABLE_BYTES => Ok(plan),
            bytes => Err(Problem::Refused(format!(
                "a refcount table of {bytes} bytes would be needed: at most {MAX_REFCOUNT_TABLE_BYTES}"
            ))),
        }
    }

    /// The cluster behind the last block.
    fn end(&self) -> u64 {
        self.start + self.table + self.blocks.len() as u64
    }
}
