//! Checks all metadata of an image, as `qemu-img check` does without repair.
//!
//! ```text
//!   header, L1, L2, snapshots, bitmaps ─► references to each cluster ─┐
//!   refcount table ─► refcount blocks ─► refcount of each cluster ────┴─► leak, too low, COPIED bits
//! ```
//!
//! A table that several entries point to is read once and counted several times. So the work is
//! bounded by the length of the file, whatever the entries say.

use crate::bitmap::{self, Part};
use crate::entry::{COPIED, Cluster, Entry, Geometry, L1_RESERVED, L2_RESERVED, OFFSET};
use crate::error::{Error, Problem};
use crate::header::{Bitmaps, Header, MAX_L1_BYTES, be64};
use crate::image::{open_reader, read_header};
use crate::reader::Reader;
use crate::refcount::{BLOCK_OFFSET, Counts, Width};
use crate::snapshot::{self, Snapshot};
use block::Device;
use std::collections::{BTreeMap, BTreeSet};

/// Most messages in a report; further problems are counted.
const MAX_MESSAGES: usize = 1000;
/// Most clusters of a file that can be checked, as in QEMU.
const MAX_CLUSTERS: u64 = i32::MAX as u64;
/// Largest offset of a file, less a cluster of any size.
const MAX_OFFSET: u64 = i64::MAX as u64 - (2 << 20);
/// Most entries with an invalid place that a check notes for a repair.
const MAX_MISPLACED: usize = 1 << 20;
/// Extra data that every snapshot of a version 3 image has, in bytes.
const V3_SNAPSHOT_EXTRA: u32 = 16;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Errors that may lose data: refcounts that are too low, invalid pointers, wrong COPIED bits.
    pub corruptions: u64,
    /// Of those, wrong COPIED bits of entries whose cluster has one reference. In an image that is
    /// dirty they lose no data.
    pub wrong_copied: u64,
    /// Clusters whose refcount is too high: lost space, no lost data.
    pub leaks: u64,
    /// Clusters that could not be checked.
    pub check_errors: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Clusters of the disk that have a place.
    pub allocated_clusters: u64,
    /// Clusters of the disk that are not behind the one before them.
    pub fragmented_clusters: u64,
    /// Clusters of the disk that are compressed.
    pub compressed_clusters: u64,
    /// The end of the last used cluster in bytes.
    pub image_end_offset: u64,
    /// Names of dirty bitmaps that a crash has left in use: they lack writes, which is no error.
    pub bitmaps_in_use: Vec<String>,
    /// A line for each problem, but for very many.
    pub messages: Vec<String>,
}

impl Report {
    fn corrupt(&mut self, message: impl FnOnce() -> String) {
        self.corruptions += 1;
        self.note(message);
    }

    fn note(&mut self, message: impl FnOnce() -> String) {
        if self.messages.len() < MAX_MESSAGES {
            self.messages.push(message());
        }
    }
}

/// Checks the image on `device`, on the calling core. Changes nothing.
///
/// # Errors
/// When the header is invalid, or a table that all others depend on cannot be read.
pub async fn check(device: &dyn Device) -> Result<Report, Error> {
    let run = async {
        let reader = open_reader(device)?;
        let header = read_header(&reader).await?;
        Ok(Check::run(&reader, &header).await?.report)
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

/// References to an L2 table.
#[derive(Clone, Copy, Default)]
pub(crate) struct Uses {
    /// By all L1 tables.
    pub all: u64,
    /// Whether the active L1 table is among them.
    pub is_active: bool,
}

/// Everything that a check finds. A repair works with it.
pub(crate) struct Check {
    reader: Reader,
    pub header: Header,
    pub geometry: Geometry,
    pub width: Width,
    /// References to each cluster, up to the largest refcount.
    pub counts: Counts,
    /// Clusters of the file, and behind it if a reference ends inside the next one.
    pub clusters: u64,
    /// The active L1 table.
    pub l1: Vec<u64>,
    /// The L2 tables by their first byte.
    pub tables: BTreeMap<u64, Uses>,
    refcount_table: Vec<u64>,
    /// Clusters whose refcount is 1.
    ones: Counts,
    /// Places in the refcount table with an invalid pointer.
    invalid_blocks: BTreeSet<u64>,
    /// L2 entries for zeroes with an invalid place: first byte of the table and index.
    pub misplaced_zeroes: Vec<(u64, usize)>,
    /// A refcount block is missing, invalid or used for something else.
    pub needs_new_refcounts: bool,
    /// A table or an entry is not counted or leads nowhere, so that there may be more references.
    pub is_incomplete: bool,
    /// A cluster has more references than a refcount can count.
    pub has_overflow: bool,
    pub report: Report,
}

impl Check {
    /// An empty check of the image that `reader` reads.
    ///
    /// # Errors
    /// When the image is too large.
    fn new(reader: &Reader, header: &Header) -> Result<Check, Problem> {
        let clusters = reader.capacity().div_ceil(header.cluster_size());
        if clusters > MAX_CLUSTERS {
            return Err(Problem::Refused(format!("{clusters} clusters: at most {MAX_CLUSTERS} are checked")));
        }
        let disk = (header.size / 512 * 512).div_ceil(header.cluster_size());
        Ok(Check {
            geometry: Geometry::of(header),
            width: Width { order: header.refcount_order },
            counts: Counts::default(),
            clusters,
            l1: Vec::new(),
            tables: BTreeMap::new(),
            refcount_table: Vec::new(),
            ones: Counts::default(),
            invalid_blocks: BTreeSet::new(),
            misplaced_zeroes: Vec::new(),
            needs_new_refcounts: false,
            is_incomplete: false,
            has_overflow: false,
            report: Report { total_clusters: disk, ..Report::default() },
            reader: reader.clone(),
            header: header.clone(),
        })
    }

    /// Checks everything.
    ///
    /// # Errors
    /// When a table that all others depend on cannot be read.
    pub(crate) async fn run(reader: &Reader, header: &Header) -> Result<Check, Problem> {
        let mut check = Check::references(reader, header).await?;
        check.read_refcount_table().await?;
        check.check_refcount_blocks();
        check.compare().await?;
        check.check_copied().await?;
        Ok(check)
    }

    /// Counts all references but those to the refcount table and its blocks.
    ///
    /// # Errors
    /// As [`Check::run`].
    pub(crate) async fn references(reader: &Reader, header: &Header) -> Result<Check, Problem> {
        let mut check = Check::new(reader, header)?;
        let snapshots = check.read_snapshots().await?;
        check.count(0, header.cluster_size(), 1);
        check.count(header.l1_offset, u64::from(header.l1_entries) * 8, 1);
        check.l1 = check.read_l1(header.l1_offset, header.l1_entries, true).await?;
        check.read_snapshot_l1s(&snapshots.snapshots).await?;
        check.read_l2_tables().await?;
        check.count(header.snapshots_offset, snapshots.bytes, 1);
        if let Some(bitmaps) = header.bitmaps {
            check.read_bitmaps(bitmaps).await?;
        }
        Ok(check)
    }

    /// Counts the references of an L1 table and its L2 tables.
    ///
    /// # Errors
    /// As [`Check::run`].
    pub(crate) async fn tree(
        reader: &Reader,
        header: &Header,
        l1_offset: u64,
        l1_entries: u32,
    ) -> Result<Check, Problem> {
        let mut check = Check::new(reader, header)?;
        check.l1 = check.read_l1(l1_offset, l1_entries, false).await?;
        check.read_l2_tables().await?;
        Ok(check)
    }

    /// Counts `uses` references to the clusters of a range of the file.
    fn count(&mut self, offset: u64, len: u64, uses: u64) {
        if len == 0 || uses == 0 {
            return;
        }
        let (file, cluster_size) = (self.reader.capacity(), self.geometry.cluster_size());
        // The last cluster of a file may be incomplete.
        let end = offset.saturating_add(len);
        if end >= file.saturating_add(cluster_size) {
            self.is_incomplete = true;
            self.report.corrupt(|| format!("bytes {offset} to {end} are used: the file ends at {file}"));
            return;
        }
        for cluster in offset / cluster_size..end.div_ceil(cluster_size) {
            self.clusters = self.clusters.max(cluster + 1);
            if !self.counts.add(cluster, uses, self.width.most()) {
                let most = self.width.most();
                self.has_overflow = true;
                self.report.corrupt(|| format!("cluster {cluster}: more references than {most}"));
            }
        }
    }

    async fn read_snapshots(&mut self) -> Result<snapshot::Table, Problem> {
        let table = snapshot::read(&self.reader, &self.header).await?;
        let is_incomplete = |snapshot: &&Snapshot| snapshot.extra_bytes < V3_SNAPSHOT_EXTRA;
        if self.header.version >= 3 {
            for snapshot in table.snapshots.iter().filter(is_incomplete) {
                self.report.corrupt(|| format!("snapshot {}: the table entry is incomplete", snapshot.id));
            }
            // Entries behind the file are empty.
            let missing = u64::from(self.header.snapshot_count) - table.snapshots.len() as u64;
            self.report.corruptions += missing;
            self.is_incomplete |= missing > 0;
        }
        if self.header.has_data_file() && self.header.snapshot_count > 0 {
            self.report.corrupt(|| "snapshots in an image with an external data file".into());
        }
        Ok(table)
    }

    async fn read_refcount_table(&mut self) -> Result<(), Problem> {
        let offset = self.header.refcount_table_offset;
        let bytes = u64::from(self.header.refcount_table_clusters) << self.header.cluster_bits;
        let inside = self.reader.capacity().saturating_sub(offset).min(bytes);
        let table = self.reader.read_padded(offset, inside).await;
        let table = table.map_err(|error| Problem::Io { part: "the refcount table", offset, error })?;
        self.refcount_table = table.chunks_exact(8).map(|entry| be64(entry, 0)).collect();
        let is_incomplete = self.is_incomplete;
        self.count(offset, bytes, 1);
        // A table that is not in the file hides no references to anything else.
        self.needs_new_refcounts |= self.is_incomplete && !is_incomplete;
        self.is_incomplete = is_incomplete;
        Ok(())
    }

    /// Reads an L1 table and notes its L2 tables. Entries behind the file are empty.
    async fn read_l1(&mut self, offset: u64, entries: u32, is_active: bool) -> Result<Vec<u64>, Problem> {
        let bytes = u64::from(entries) * 8;
        let inside = self.reader.capacity().saturating_sub(offset).min(bytes);
        let table = self.reader.read_padded(offset, inside).await;
        let table = table.map_err(|error| Problem::Io { part: "an L1 table", offset, error })?;
        let table: Vec<u64> = table.chunks_exact(8).map(|entry| be64(entry, 0)).collect();
        for (index, entry) in table.iter().copied().enumerate().filter(|(_, entry)| *entry != 0) {
            if entry & L1_RESERVED != 0 {
                self.report.corrupt(|| format!("L1 entry {index} ({entry:#x}): reserved bits are set"));
            }
            let uses = self.tables.entry(entry & OFFSET).or_default();
            uses.all += 1;
            uses.is_active |= is_active;
        }
        Ok(table)
    }

    async fn read_snapshot_l1s(&mut self, snapshots: &[Snapshot]) -> Result<(), Problem> {
        let mut room = self.reader.capacity();
        for snapshot in snapshots {
            let (id, offset) = (&snapshot.id, snapshot.l1_offset);
            let bytes = u64::from(snapshot.l1_entries) * 8;
            if !offset.is_multiple_of(self.geometry.cluster_size()) {
                self.is_incomplete = true;
                self.report.corrupt(|| format!("snapshot {id}: L1 table at byte {offset}: not aligned"));
            } else if bytes > MAX_L1_BYTES {
                self.is_incomplete = true;
                self.report.corrupt(|| format!("snapshot {id}: L1 table of {bytes} bytes"));
            } else {
                let inside = self.reader.capacity().saturating_sub(offset).min(bytes);
                // Tables that do not overlap are together smaller than the file.
                room = room.checked_sub(inside).ok_or_else(|| {
                    Problem::Invalid(format!("snapshot {id}: L1 tables of snapshots overlap"))
                })?;
                self.count(offset, bytes, 1);
                self.read_l1(offset, snapshot.l1_entries, false).await?;
            }
        }
        Ok(())
    }

    /// Reads every L2 table once, and counts it and its clusters for each use.
    async fn read_l2_tables(&mut self) -> Result<(), Problem> {
        let cluster_size = self.geometry.cluster_size();
        for (offset, uses) in std::mem::take(&mut self.tables) {
            self.count(offset, cluster_size, uses.all);
            if !offset.is_multiple_of(cluster_size) {
                self.is_incomplete = true;
                self.report.corrupt(|| format!("L2 table at byte {offset}: not aligned"));
                continue;
            }
            self.tables.insert(offset, uses);
            let mut next = None;
            for (index, entry) in self.read_l2(offset).await? {
                let is_right = self.count_entry(entry, uses, &mut next);
                if !is_right && self.misplaced_zeroes.len() < MAX_MISPLACED {
                    self.misplaced_zeroes.push((offset, index));
                }
            }
        }
        Ok(())
    }

    /// The entries of an L2 table that are not empty, with their indices.
    pub(crate) async fn read_l2(&self, offset: u64) -> Result<Vec<(usize, Entry)>, Problem> {
        let inside = self.reader.capacity().saturating_sub(offset).min(self.geometry.cluster_size());
        let table = self.reader.read_padded(offset, inside).await;
        let table = table.map_err(|error| Problem::Io { part: "an L2 table", offset, error })?;
        let bytes = self.geometry.entry_bytes();
        let entry = |index| (index, self.geometry.entry(&table, index * bytes));
        let is_empty = |entry: Entry| entry == Entry { word: 0, bitmap: 0 };
        Ok((0..table.len() / bytes).map(entry).filter(|(_, entry)| !is_empty(*entry)).collect())
    }

    /// Returns `false` for an entry that has no data and an invalid place.
    fn count_entry(&mut self, entry: Entry, uses: Uses, next: &mut Option<u64>) -> bool {
        let (word, bitmap) = (entry.word, entry.bitmap);
        let cluster_size = self.geometry.cluster_size();
        let cluster = self.geometry.cluster(entry);
        if !matches!(cluster, Cluster::Compressed(_)) && word & L2_RESERVED != 0 {
            self.report.corrupt(|| format!("L2 entry {word:#x}: reserved bits are set"));
        }
        match cluster {
            Cluster::Compressed(data) => {
                if word & COPIED != 0 {
                    self.report.corrupt(|| format!("L2 entry {word:#x}: compressed, with the COPIED bit"));
                }
                if self.geometry.has_data_file || bitmap != 0 {
                    self.is_incomplete = true;
                    self.report.corrupt(|| format!("L2 entry {word:#x}: compressed in such an image"));
                    return true;
                }
                self.count(data.offset, data.len, uses.all);
                self.report.allocated_clusters += u64::from(uses.is_active);
                self.report.compressed_clusters += u64::from(uses.is_active);
                self.report.fragmented_clusters += u64::from(uses.is_active);
            }
            Cluster::Data(_) | Cluster::ZeroAllocated(_) if (bitmap >> 32) & bitmap != 0 => {
                self.is_incomplete = true;
                self.report.corrupt(|| format!("L2 entry {word:#x}: invalid subclusters {bitmap:#x}"));
            }
            Cluster::Data(offset) | Cluster::ZeroAllocated(offset) => {
                let is_aligned = offset.is_multiple_of(cluster_size);
                if !is_aligned {
                    self.report.corrupt(|| format!("L2 entry {word:#x}: the cluster is not aligned"));
                }
                if uses.is_active {
                    self.report.allocated_clusters += 1;
                    let is_behind = next.is_none_or(|next| next == offset);
                    self.report.fragmented_clusters += u64::from(!is_behind);
                    *next = Some(offset + cluster_size);
                }
                if !self.geometry.has_data_file {
                    self.count(offset, cluster_size, uses.all);
                }
                let has_data = match self.geometry.has_extended_l2 {
                    true => bitmap as u32 != 0,
                    false => matches!(cluster, Cluster::Data(_)),
                };
                return is_aligned || has_data;
            }
            Cluster::Unallocated if bitmap as u32 != 0 => {
                self.report.corrupt(|| format!("L2 entry {word:#x}: subclusters {bitmap:#x} without data"));
            }
            Cluster::Unallocated | Cluster::Zero => {}
        }
        true
    }

    async fn read_bitmaps(&mut self, bitmaps: Bitmaps) -> Result<(), Problem> {
        self.count(bitmaps.directory_offset, bitmaps.directory_bytes, 1);
        let list = bitmap::read(&self.reader, &self.header, bitmaps).await?;
        let mut room = self.reader.capacity();
        let cluster_size = self.geometry.cluster_size();
        for bitmap in list {
            if bitmap.is_in_use {
                self.report.bitmaps_in_use.push(bitmap.name.clone());
            }
            self.count(bitmap.table_offset, bitmap.table_bytes(), 1);
            for entry in bitmap::read_table(&self.reader, &bitmap, &mut room).await? {
                match Part::of(entry, cluster_size) {
                    None => self.report.corrupt(|| format!("bitmap table entry {entry:#x}: invalid")),
                    Some(Part::Stored(place)) => self.count(place, cluster_size, 1),
                    Some(Part::Zeroes | Part::Ones) => {}
                }
            }
        }
        Ok(())
    }

    /// Checks the pointers to refcount blocks, and counts the blocks.
    fn check_refcount_blocks(&mut self) {
        let cluster_size = self.geometry.cluster_size();
        for (index, entry) in std::mem::take(&mut self.refcount_table).into_iter().enumerate() {
            let block = entry & BLOCK_OFFSET;
            self.refcount_table.push(block);
            if entry != block || !block.is_multiple_of(cluster_size) || block > MAX_OFFSET {
                self.needs_new_refcounts = true;
                self.report.corrupt(|| format!("refcount table entry {index} ({entry:#x}): invalid"));
                if !block.is_multiple_of(cluster_size) || block > MAX_OFFSET {
                    self.invalid_blocks.insert(index as u64);
                }
            } else if block / cluster_size >= self.clusters {
                self.needs_new_refcounts = true;
                self.report.corrupt(|| format!("refcount block {index} at byte {block}: behind the file"));
            } else if block != 0 {
                self.count(block, cluster_size, 1);
                let uses = self.counts.get(block / cluster_size);
                if uses != 1 {
                    self.needs_new_refcounts = true;
                    self.report.corrupt(|| format!("refcount block {index}: {uses} references"));
                }
            }
        }
    }

    /// Compares the refcount of each cluster with its references.
    async fn compare(&mut self) -> Result<(), Problem> {
        let cluster_size = self.geometry.cluster_size();
        let in_block = self.width.entries(cluster_size);
        let mut highest = 0;
        for first in (0..self.clusters).step_by(in_block as usize) {
            let last = (first + in_block).min(self.clusters);
            let index = first / in_block;
            if self.invalid_blocks.contains(&index) {
                self.report.check_errors += last - first;
                self.report.note(|| format!("refcounts of clusters {first} to {last}: invalid block"));
                let referenced = self.counts.referenced(first..last).last();
                highest = referenced.map_or(highest, |(cluster, _)| cluster);
                continue;
            }
            let Some((_, refcounts)) = self.read_block(index).await? else {
                let wrong: Vec<_> = self.counts.referenced(first..last).collect();
                for (cluster, references) in wrong {
                    self.needs_new_refcounts = true;
                    self.compare_one(cluster, 0, references);
                    highest = cluster;
                }
                continue;
            };
            for cluster in first..last {
                let refcount = self.width.get(&refcounts, (cluster - first) as usize);
                let references = self.counts.get(cluster);
                if refcount > 0 || references > 0 {
                    highest = cluster;
                }
                if refcount == 1 {
                    self.ones.add(cluster, 1, 1);
                }
                self.compare_one(cluster, refcount, references);
            }
        }
        self.report.image_end_offset = (highest + 1) * cluster_size;
        Ok(())
    }

    /// The refcount block at `index` of the refcount table with its first byte, if it is in the
    /// file.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn read_block(&self, index: u64) -> Result<Option<(u64, Vec<u8>)>, Problem> {
        let block = self.refcount_table.get(index as usize).copied().unwrap_or(0);
        if block == 0 || block >= self.reader.capacity() || self.invalid_blocks.contains(&index) {
            return Ok(None);
        }
        let refcounts = self.reader.read_padded(block, self.geometry.cluster_size()).await;
        let failed = |error| Problem::Io { part: "a refcount block", offset: block, error };
        Ok(Some((block, refcounts.map_err(failed)?)))
    }

    /// Whether a table has its clusters for itself, so that a write to it changes nothing else.
    /// `uses` is the number of references to the table.
    pub(crate) fn is_alone(&self, offset: u64, bytes: u64, uses: u64) -> bool {
        let size = self.geometry.cluster_size();
        let mut clusters = offset / size..(offset + bytes).div_ceil(size);
        clusters.all(|cluster| self.counts.get(cluster) == uses)
    }

    /// A table that something else uses, too: its name and its first byte. Refcounts count such
    /// references, so they are no error of a check; those to refcount blocks are.
    pub(crate) fn crossed_table(&self) -> Option<(&'static str, u64)> {
        let header = &self.header;
        let refcount_bytes = u64::from(header.refcount_table_clusters) * self.geometry.cluster_size();
        let single = [
            ("header", 0, 1, 1),
            ("L1 table", header.l1_offset, self.l1.len() as u64 * 8, 1),
            ("refcount table", header.refcount_table_offset, refcount_bytes, 1),
        ];
        let l2 = self.tables.iter().map(|(table, uses)| ("L2 table", *table, 1, uses.all));
        let is_crossed =
            |(_, offset, bytes, uses): &(_, u64, u64, u64)| !self.is_alone(*offset, *bytes, *uses);
        single.into_iter().chain(l2).find(is_crossed).map(|(name, offset, ..)| (name, offset))
    }

    fn compare_one(&mut self, cluster: u64, refcount: u64, references: u64) {
        if refcount < references {
            self.report
                .corrupt(|| format!("cluster {cluster}: refcount {refcount}, references {references}"));
        } else if refcount > references {
            self.report.leaks += 1;
            self.report.note(|| format!("cluster {cluster}: refcount {refcount}, references {references}"));
        }
    }

    /// Whether the refcount of the cluster at this byte is 1; `None` if it is unknown.
    fn is_one(&self, offset: u64) -> Option<bool> {
        let cluster = offset >> self.header.cluster_bits;
        let block = cluster / self.width.entries(self.geometry.cluster_size());
        (!self.invalid_blocks.contains(&block)).then(|| self.ones.get(cluster) == 1)
    }

    /// Checks the COPIED bits of the active tables.
    async fn check_copied(&mut self) -> Result<(), Problem> {
        for (index, entry) in self.wrong_in_l1() {
            self.note_wrong_copied(entry, || format!("L1 entry {index} ({entry:#x}): wrong COPIED bit"));
        }
        for table in self.active_tables() {
            for (_, word) in self.wrong_in_l2(table).await? {
                self.note_wrong_copied(word, || format!("L2 entry {word:#x}: wrong COPIED bit"));
            }
        }
        Ok(())
    }

    fn note_wrong_copied(&mut self, word: u64, message: impl FnOnce() -> String) {
        self.report.corrupt(message);
        // A write in place would change what another table refers to.
        let cluster = (word & OFFSET) / self.geometry.cluster_size();
        let is_shared = word & COPIED != 0 && self.counts.get(cluster) > 1;
        self.report.wrong_copied += u64::from(!is_shared);
    }

    /// The L2 tables that the disk uses.
    pub(crate) fn active_tables(&self) -> Vec<u64> {
        self.tables.iter().filter(|(_, uses)| uses.is_active).map(|(at, _)| *at).collect()
    }

    /// Entries of the active L1 table with a wrong COPIED bit, with their indices.
    pub(crate) fn wrong_in_l1(&self) -> Vec<(usize, u64)> {
        let is_wrong = |entry: u64| {
            let is_one = if entry & OFFSET == 0 { None } else { self.is_one(entry & OFFSET) };
            is_one.is_some_and(|is_one| is_one != (entry & COPIED != 0))
        };
        self.l1.iter().copied().enumerate().filter(|(_, entry)| is_wrong(*entry)).collect()
    }

    /// Entries of an active L2 table with a wrong COPIED bit, with their indices.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn wrong_in_l2(&self, table: u64) -> Result<Vec<(usize, u64)>, Problem> {
        let is_wrong = |entry: Entry| {
            let (Cluster::Data(offset) | Cluster::ZeroAllocated(offset)) = self.geometry.cluster(entry)
            else {
                return false;
            };
            let is_one = if self.geometry.has_data_file { Some(true) } else { self.is_one(offset) };
            is_one.is_some_and(|is_one| is_one != (entry.word & COPIED != 0))
        };
        let entries = self.read_l2(table).await?.into_iter();
        Ok(entries.filter(|(_, entry)| is_wrong(*entry)).map(|(index, entry)| (index, entry.word)).collect())
    }
}
