//! Internal snapshots of an image that is in use.
//!
//! ```text
//!   create: hold, grace, flush ─► refcounts rise ─► L1 copy, snapshot table, COPIED bits ─► header ─► release
//!   delete: hold, grace, flush ─► snapshot table ─► header ─► refcounts fall ─► COPIED bits ─► release
//! ```
//!
//! Requests that change the disk wait from the hold to the release, so the snapshot is the disk at
//! one moment; reads do not wait. Everything before the write of the header is durable before it.
//! The image is marked as dirty meanwhile: a crash leaves refcounts that are too high and COPIED
//! bits that do not fit them, which the next writable open repairs. No crash leaves a COPIED bit
//! for a cluster that two tables refer to.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Snapshots*.

use super::home::{Entries, Home};
use super::marks::SnapshotPlace;
use super::metadata::BackingJob;
use super::refcounts::repeated;
use crate::check::Check;
use crate::entry::{COPIED, OFFSET};
use crate::error::Problem;
use crate::header::{Header, at, be_bytes, be64};
use crate::mutant::{self, Mutant};
use crate::refcount::Counts;
use crate::snapshot::{self, Snapshot};
use block::{Flags, IoError};
use mapping::ENTRIES;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Entries of a leaf.
const LEAF: u64 = ENTRIES as u64;
/// Clusters whose references change at a time.
const PART: u64 = 1 << 16;

impl Home {
    /// The snapshots of the image.
    ///
    /// # Errors
    /// When their table cannot be read.
    pub(super) async fn list_snapshots(&self, view: &Entries) -> Result<Vec<Snapshot>, Problem> {
        Ok(snapshot::read(&self.file.reader, &self.header_now(view)).await?.snapshots)
    }

    /// Makes a snapshot of the disk. `now` is the time since 1970. Returns its identifier.
    ///
    /// # Errors
    /// When the image cannot have it, or has errors: nothing has changed. The device's.
    pub(super) async fn create_snapshot(
        &self,
        view: &Entries,
        name: &str,
        now: Duration,
    ) -> Result<String, Problem> {
        self.while_held(view, self.create_now(view, name, now)).await
    }

    /// Deletes the snapshot with the identifier or name `wanted`.
    ///
    /// # Errors
    /// As [`Home::create_snapshot`].
    pub(super) async fn delete_snapshot(&self, view: &Entries, wanted: &str) -> Result<(), Problem> {
        self.while_held(view, self.delete_now(view, wanted)).await
    }

    /// Runs `change` while no request changes the disk, and the file has all of it. One runs at a
    /// time.
    pub(super) async fn while_held<R>(
        &self,
        view: &Entries,
        change: impl Future<Output = Result<R, Problem>>,
    ) -> Result<R, Problem> {
        self.holding.during(1, self.held(view, change)).await
    }

    /// As [`Home::while_held`], for a caller that has the permit.
    pub(super) async fn held<R>(
        &self,
        view: &Entries,
        change: impl Future<Output = Result<R, Problem>>,
    ) -> Result<R, Problem> {
        let held = match mutant::is(Mutant::SnapshotWithoutHold) {
            true => None,
            false => Some(view.hold().await),
        };
        if !mutant::is(Mutant::SnapshotWithoutGrace) {
            view.grace().await;
        }
        if !(mutant::is(Mutant::StreamWithoutFlush) && view.format().backing.is_streaming()) {
            self.flush(view).await.map_err(write_error)?;
        }
        if view.format().is_corrupt() {
            return Err(Problem::Refused("the image is corrupt: it is no longer written".into()));
        }
        let changed = change.await;
        drop(held);
        changed
    }

    /// The header of the image with its snapshots as they are now.
    pub(super) fn header_now(&self, view: &Entries) -> Header {
        let SnapshotPlace { count, offset } = self.snapshots.get();
        Header { snapshot_count: count, snapshots_offset: offset, ..view.format().header.clone() }
    }

    async fn create_now(&self, view: &Entries, name: &str, now: Duration) -> Result<String, Problem> {
        if let Some(job) = view.format().backing.job() {
            let text = match job {
                BackingJob::Stream => {
                    "the data of the backing file is copied at the moment, which snapshots would still need"
                }
                BackingJob::Commit => {
                    "the backing file, which snapshots would read, gets the data of the image at the moment"
                }
            };
            return Err(Problem::Refused(text.into()));
        }
        let header = self.header_now(view);
        let (list, mut table) = snapshot::read_bytes(&self.file.reader, &header).await?;
        let id = list.check_new(&header, name)?;
        let used = self.tree(&header, header.l1_offset, header.l1_entries, true).await?;
        let l1 = be_bytes(used.l1.iter().map(|entry| entry & !COPIED));
        let l1_run = self.take_run(view, l1.len() as u64).await?;
        table.extend(snapshot::entry(l1_run.start, header.l1_entries, &id, name, now, header.size));
        let table_run = match self.take_run(view, table.len() as u64).await {
            Ok(run) => run,
            Err(problem) => {
                self.free_table(&l1_run).await?;
                return Err(problem);
            }
        };
        let was_unsettled = self.begin_change_of_snapshots(view).await?;
        let prepared = async {
            for part in used.parts() {
                self.refcounts.add_references(&part).await.map_err(write_error)?;
            }
            self.write_table(view, l1_run.start, &l1).await?;
            self.write_table(view, table_run.start, &table).await?;
            if !mutant::is(Mutant::CopiedBitsStay) {
                self.refresh_copied(view).await?;
            }
            Ok(())
        };
        // After an error, the repair of the dirty image frees clusters and lowers refcounts.
        prepared.await?;
        let place = SnapshotPlace { count: header.snapshot_count + 1, offset: table_run.start };
        self.commit_snapshots(view, place, table_run, list.bytes).await?;
        self.file.note_metadata(l1_run.start, l1_run.end - l1_run.start);
        self.end_change_of_snapshots(view, was_unsettled).await?;
        Ok(id)
    }

    async fn delete_now(&self, view: &Entries, wanted: &str) -> Result<(), Problem> {
        let header = self.header_now(view);
        let (list, table) = snapshot::read_bytes(&self.file.reader, &header).await?;
        let (deleted, rest) = list.without(&table, wanted)?;
        deleted.check(&header)?;
        let used = self.tree(&header, deleted.l1_offset, deleted.l1_entries, false).await?;
        let run = self.take_run(view, rest.len() as u64).await?;
        let was_unsettled = self.begin_change_of_snapshots(view).await?;
        self.write_table(view, run.start, &rest).await?;
        let place = SnapshotPlace { count: header.snapshot_count - 1, offset: run.start };
        self.commit_snapshots(view, place, run, list.bytes).await?;
        for part in used.parts() {
            // L2 tables without other uses: their clusters may be taken as soon as they are free.
            for ((cluster, uses), refcount) in part.iter().zip(self.refcounts_of(&part).await?) {
                if *uses == refcount {
                    self.file.forget_metadata(cluster * self.file.cluster_size(), 1);
                }
            }
            self.refcounts.drop_references(&repeated(&part)).await.map_err(write_error)?;
        }
        let l1_end = deleted.l1_offset + u64::from(deleted.l1_entries) * 8;
        self.free_table(&(deleted.l1_offset..l1_end)).await?;
        self.refresh_copied(view).await?;
        self.end_change_of_snapshots(view, was_unsettled).await
    }

    /// The clusters that an L1 table refers to.
    ///
    /// # Errors
    /// When there are errors in the tables, or a refcount is lower than the number of references;
    /// if these `are_doubled`, when a refcount has no room.
    async fn tree(
        &self,
        header: &Header,
        l1_offset: u64,
        l1_entries: u32,
        are_doubled: bool,
    ) -> Result<Tree, Problem> {
        let Check { counts, clusters, l1, report, .. } =
            Check::tree(&self.file.reader, header, l1_offset, l1_entries).await?;
        let (tree, most) = (Tree { l1, counts, clusters }, self.refcounts.most());
        let mut errors = report.corruptions + report.check_errors;
        for part in tree.parts() {
            for ((cluster, uses), refcount) in part.iter().zip(self.refcounts_of(&part).await?) {
                errors += u64::from(refcount < *uses);
                if are_doubled && refcount.saturating_add(*uses) > most {
                    let text = format!("cluster {cluster} would have more than {most} references");
                    return Err(Problem::Refused(text));
                }
            }
        }
        match errors {
            0 => Ok(tree),
            count => Err(Problem::Refused(format!(
                "{count} errors in the metadata (freestone image repair may end that)"
            ))),
        }
    }

    /// The refcounts of clusters of a tree.
    async fn refcounts_of(&self, part: &[(u64, u64)]) -> Result<Vec<u64>, Problem> {
        let clusters: Vec<u64> = part.iter().map(|(cluster, _)| *cluster).collect();
        self.refcounts.counts(&clusters).await.map_err(read_error)
    }

    /// Marks the image as dirty, also as the mark of a restart log. With another mark, in autoclear
    /// bits, a repair by QEMU would drop the snapshots. Returns whether an earlier change has left
    /// something to repair.
    pub(super) async fn begin_change_of_snapshots(&self, view: &Entries) -> Result<bool, Problem> {
        let was_unsettled = self.is_unsettled.replace(true);
        if mutant::is(Mutant::SnapshotNotMarked) {
            return Ok(was_unsettled);
        }
        let has_place = view.format().header.may_be_marked_dirty();
        let session = if has_place { self.mark.get().session } else { 0 };
        self.write_mark(view, session, true).await.map_err(write_error)?;
        Ok(was_unsettled)
    }

    pub(super) async fn end_change_of_snapshots(
        &self,
        view: &Entries,
        was_unsettled: bool,
    ) -> Result<(), Problem> {
        self.settle_all(view).await.map_err(write_error)?;
        self.is_unsettled.set(was_unsettled);
        let session = self.mark.get().session;
        self.write_mark(view, session, session > 0 || was_unsettled).await.map_err(write_error)
    }

    /// Takes clusters for a table of `bytes` bytes, one behind the other. Returns their place, in
    /// bytes; an empty one for an empty table.
    async fn take_run(&self, view: &Entries, bytes: u64) -> Result<Range<u64>, Problem> {
        let (cluster_size, longest) = (self.file.cluster_size(), self.refcounts.longest_run());
        let wanted = bytes.div_ceil(cluster_size);
        if wanted > longest {
            let most = longest * cluster_size;
            let text = format!("a table of {bytes} bytes: at most {most} while the image is in use");
            return Err(Problem::Refused(text));
        }
        if wanted == 0 {
            return Ok(0..0);
        }
        let mut others = Vec::new();
        let found = loop {
            match self.allocate(view, wanted).await {
                Ok(taken) if taken.count == wanted => break Ok(taken.first),
                Ok(taken) => others.extend(taken.first..taken.first + taken.count),
                Err(error) => break Err(error),
            }
        };
        self.drop_references(view, &others).await.map_err(write_error)?;
        let first = found.map_err(write_error)?;
        Ok(first * cluster_size..(first + wanted) * cluster_size)
    }

    /// Writes a table to its place.
    async fn write_table(&self, view: &Entries, place: u64, bytes: &[u8]) -> Result<(), Problem> {
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(view.format().block_size as usize), 0);
        self.file.write(place, &padded, Flags::NONE).await.map_err(write_error)
    }

    /// Lets the header name another snapshot table, in the clusters of `run`, after everything else
    /// is durable. Frees the old table, which has `old_bytes` bytes.
    async fn commit_snapshots(
        &self,
        view: &Entries,
        place: SnapshotPlace,
        run: Range<u64>,
        old_bytes: u64,
    ) -> Result<(), Problem> {
        if !mutant::is(Mutant::HeaderBeforeSnapshot) {
            self.settle_all(view).await.map_err(write_error)?;
        }
        let fields = [&place.count.to_be_bytes()[..], &place.offset.to_be_bytes()].concat();
        // A write that failed may have happened: the next open says whether it has.
        self.refcounts.write_header(at::SNAPSHOTS, &fields).await.map_err(write_error)?;
        self.file.note_metadata(run.start, run.end - run.start);
        let old = self.snapshots.replace(place);
        self.free_table(&(old.offset..old.offset + old_bytes)).await
    }

    /// Frees the clusters of a table that nothing refers to any more.
    async fn free_table(&self, place: &Range<u64>) -> Result<(), Problem> {
        if place.is_empty() {
            return Ok(());
        }
        let cluster_size = self.file.cluster_size();
        let clusters: Vec<u64> = (place.start / cluster_size..place.end.div_ceil(cluster_size)).collect();
        self.file.forget_metadata(place.start, place.end - place.start);
        self.refcounts.drop_references(&clusters).await.map_err(write_error)
    }

    /// Lets the COPIED bits of the disk's tables say which clusters have one reference, in the file
    /// and in memory.
    pub(super) async fn refresh_copied(&self, view: &Entries) -> Result<(), Problem> {
        let metadata = view.format();
        let unit = (metadata.block_size / 8) as usize;
        for (number, block) in metadata.l1.chunks(unit).enumerate() {
            for (at, entry) in block.iter().enumerate() {
                let word = entry.load(Ordering::Acquire);
                if let Some((table, _)) = metadata.table(number * unit + at).map_err(read_error)? {
                    let cluster = table / self.file.cluster_size();
                    let is_one = self.refcounts.counts(&[cluster]).await.map_err(read_error)? == [1];
                    self.refresh_table(view, number * unit + at, with_copied(word, is_one)).await?;
                }
            }
            let mut words: Vec<u64> = block.iter().map(|entry| entry.load(Ordering::Acquire)).collect();
            words.resize(unit, 0);
            let (place, bytes) = (metadata.header.l1_offset + (number * unit) as u64 * 8, be_bytes(words));
            // A write that failed before leaves other words in the file than in memory.
            let in_file =
                self.file.reader.read_padded(place, bytes.len() as u64).await.map_err(read_error)?;
            if in_file != bytes {
                self.file.write(place, &bytes, Flags::NONE).await.map_err(write_error)?;
            }
        }
        Ok(())
    }

    /// As [`Home::refresh_copied`], for the entries of an L2 table. `l1_entry` names the table. In
    /// memory it becomes the entry at `index` of the L1 table.
    async fn refresh_table(&self, view: &Entries, index: usize, l1_entry: u64) -> Result<(), Problem> {
        let (geometry, cluster_size) = (view.format().geometry, self.file.cluster_size());
        let table = l1_entry & OFFSET;
        let mut bytes = self.file.reader.read_named(table, cluster_size).await.map_err(read_error)?;
        let entries: Vec<_> = (0..bytes.len() / geometry.entry_bytes())
            .map(|number| (number, geometry.entry(&bytes, number * geometry.entry_bytes())))
            .filter_map(|(number, entry)| Some((number, entry, geometry.data_place(entry)? / cluster_size)))
            .collect();
        let clusters: Vec<u64> = entries.iter().map(|(.., cluster)| *cluster).collect();
        let counts = self.refcounts.counts(&clusters).await.map_err(read_error)?;
        let mut has_changed = false;
        for ((number, entry, _), count) in entries.into_iter().zip(counts) {
            let word = with_copied(entry.word, count == 1);
            has_changed |= word != entry.word;
            bytes[number * geometry.entry_bytes()..][..8].copy_from_slice(&word.to_be_bytes());
        }
        if has_changed {
            self.file.write(table, &bytes, Flags::NONE).await.map_err(write_error)?;
        }
        // Entries in memory have none of the bits of a table that was shared. From here on no task
        // runs in between: a load that has begun before begins again.
        view.format().l1[index].store(l1_entry, Ordering::Release);
        let words: Vec<u64> = bytes.chunks_exact(8).map(|word| be64(word, 0)).collect();
        let first = (index * words.len()) as u64;
        let end = first + words.len() as u64;
        for number in first / LEAF..end.div_ceil(LEAF) {
            let Some(leaf) = view.loaded(number) else { continue };
            let part = first.max(number * LEAF)..end.min((number + 1) * LEAF);
            for at in part.step_by(geometry.entry_words() as usize) {
                let (slot, word) = ((at % LEAF) as usize, (at - first) as usize);
                match geometry.has_extended_l2 {
                    true => leaf.set_pair(slot, words[word], words[word + 1]),
                    false => leaf.set(slot, words[word]),
                }
            }
        }
        self.refreshes.set(self.refreshes.get() + 1);
        Ok(())
    }
}

/// An L1 table, and the clusters that it refers to.
struct Tree {
    l1: Vec<u64>,
    counts: Counts,
    /// Clusters of the file.
    clusters: u64,
}

impl Tree {
    /// The clusters and the number of references to each, in parts of a bounded length.
    fn parts(&self) -> impl Iterator<Item = Vec<(u64, u64)>> {
        let starts = (0..self.clusters).step_by(PART as usize);
        starts.map(|start| self.counts.referenced(start..(start + PART).min(self.clusters)).collect())
    }
}

/// A word of an L1 or L2 entry with the COPIED bit, or without it.
fn with_copied(word: u64, is_copied: bool) -> u64 {
    word & !COPIED | if is_copied { COPIED } else { 0 }
}

pub(super) fn read_error(error: IoError) -> Problem {
    Problem::Io { part: "the metadata", offset: 0, error }
}

pub(super) fn write_error(error: IoError) -> Problem {
    match error {
        IoError::NoSpace => Problem::Refused("no room in the file".into()),
        error => Problem::Write { part: "the metadata", offset: 0, error },
    }
}
