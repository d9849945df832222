//! The home of an image: the one core that changes its metadata.
//!
//! ```text
//!   a core              home
//!   change  ──────────► locks entries, takes new clusters
//!   writes the data
//!   commit  ──────────► sets the entries; the old clusters wait
//!   flush   ──────────► data and refcounts ► L2 tables ► L1 table ► grace ► old clusters are free
//! ```
//!
//! The order on the disk: data and refcounts before the entry that needs them, and a table before
//! the entry that names it. A cluster is free after the entry that named it has changed there. So
//! the image is valid at every moment. A crash leaves clusters that are not free and not used, at
//! most.

use super::file::File;
use super::metadata::{ENTRY, Metadata};
use super::refcounts::{Clusters, Refcounts};
use crate::entry::{BadEntry, COMPRESSED, COPIED, Cluster, Entry, OFFSET, ZERO};
use crate::header::{autoclear, be_bytes, be64, incompatible};
use crate::mutant::{self, Mutant};
use block::{DeviceError, Flags, IoError, IoResult};
use mapping::{ENTRIES, Format, Leaf, Slot, View};
use reactor::{Permits, yield_now};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Most clusters of one change.
pub(super) const MOST_CLUSTERS: u64 = 64;
/// Old clusters after which the home flushes without being asked.
const MOST_DROPPED: usize = 4096;
/// Places of the incompatible and the autoclear features in the header.
const INCOMPATIBLE: usize = 72;
const AUTOCLEAR: usize = 88;

/// A view of an image's entries.
pub(super) type Entries = Rc<View<Metadata>>;

/// See the module.
pub(super) struct Home {
    file: Rc<File>,
    refcounts: Refcounts,
    /// One L2 table is made at a time.
    making: Permits,
    settling: Permits,
    flushing: Permits,
    changes: RefCell<BTreeMap<u64, Open>>,
    /// Clusters whose reference was removed from an entry, since the last flush began.
    dropped: RefCell<Vec<u64>>,
    /// Such clusters whose removal is durable, until a grace period has passed.
    quarantine: RefCell<BTreeMap<u64, Vec<u64>>>,
    /// One quarantine ends at a time.
    releasing: Permits,
    next_number: Cell<u64>,
}

/// A change that has begun and not ended.
struct Open {
    slots: Vec<Slot<Metadata>>,
    clusters: Clusters,
    is_new: bool,
}

/// A change as the core that asked for it sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// Identifies it.
    pub number: u64,
    /// First byte in the file for the first cluster.
    pub offset: u64,
    /// Clusters, one behind the other; at least one.
    pub count: u64,
    /// Whether the clusters in the file read as zeroes.
    pub are_zero: bool,
    /// The entries of the first and the last cluster.
    pub old: [u64; 2],
}

/// How clusters lose their content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clear {
    Discard,
    Zero,
    /// Zeroes, and the clusters keep their places.
    ZeroInPlace,
}

/// The home of an image, on its core.
///
/// # Panics
/// On another core.
pub(super) fn home(view: &Entries) -> Rc<Home> {
    view.local().get().expect("the image has its home here").clone()
}

/// Whether a cluster with this entry can be written in place.
#[inline]
pub(super) fn is_own(word: u64) -> bool {
    let is_data = word & (COMPRESSED | ZERO) == 0 && word & OFFSET != 0;
    is_data && (word & COPIED != 0 || mutant::is(Mutant::SharedClusterInPlace))
}

/// The place in the file that an entry names.
fn place(metadata: &Metadata, word: u64) -> Option<u64> {
    match metadata.geometry.cluster(Entry { word, bitmap: 0 }) {
        Cluster::Data(offset) | Cluster::ZeroAllocated(offset) => Some(offset),
        _ => None,
    }
}

/// Locks the entry of a cluster of the disk.
///
/// # Errors
/// [`IoError::Corrupt`] if it is invalid; the device's.
async fn lock(view: &Entries, cluster: u64) -> Result<Slot<Metadata>, IoError> {
    let slot = view.lock(cluster).await?;
    let geometry = view.format().geometry;
    let entry = Entry { word: slot.entry(), bitmap: 0 };
    match geometry.place(entry, cluster * geometry.cluster_size(), 0) {
        Ok(_) => Ok(slot),
        Err(BadEntry) => Err(IoError::Corrupt),
    }
}

impl Home {
    /// Opens the home on the calling core, which the table of `view` belongs to.
    ///
    /// # Errors
    /// When the metadata cannot be read, or is invalid.
    pub(super) async fn open(view: &Entries) -> Result<Rc<Home>, IoError> {
        let metadata = view.format();
        let cluster_size = metadata.geometry.cluster_size();
        let file = File::open(&metadata.image, cluster_size, &metadata.capacity);
        let file = Rc::new(file.map_err(|error| {
            tracing::error!(%error, "an image cannot be opened for writing");
            IoError::DeviceGone
        })?);
        metadata.fixed.iter().for_each(|(offset, bytes)| file.note_metadata(*offset, *bytes));
        for index in 0..metadata.l1.len() {
            if let Some((table, _)) = metadata.table(index)? {
                file.note_metadata(table, cluster_size);
            }
        }
        let refcounts = Refcounts::open(&file, &metadata.header, metadata.block_size).await?;
        // A writer clears the bits that it does not know before its first write.
        let known = metadata.header.autoclear & (autoclear::BITMAPS | autoclear::RAW_DATA);
        if known != metadata.header.autoclear {
            refcounts.write_header(AUTOCLEAR, &known.to_be_bytes()).await?;
        }
        // The file may end inside its last cluster.
        let end = metadata.capacity.load(Ordering::Relaxed).next_multiple_of(cluster_size);
        if let Err(error) = file.resize(end) {
            tracing::debug!(%error, "an image has a fixed size");
        }
        let home = Rc::new(Home {
            file,
            refcounts,
            making: Permits::new(1),
            settling: Permits::new(1),
            flushing: Permits::new(1),
            changes: RefCell::default(),
            dropped: RefCell::default(),
            quarantine: RefCell::default(),
            releasing: Permits::new(1),
            next_number: Cell::new(0),
        });
        Ok(view.local().get_or_init(|| home).clone())
    }

    fn number(&self) -> u64 {
        self.next_number.replace(self.next_number.get() + 1)
    }

    /// Whether the data of an entry is in a cluster with metadata.
    fn overlaps(&self, metadata: &Metadata, word: u64) -> bool {
        let place = place(metadata, word);
        place.is_some_and(|offset| self.file.is_metadata(offset / self.file.cluster_size()))
    }

    /// Begins to change up to `count` clusters of the disk from `first` on, which are then locked:
    /// those that cannot be written in place get new clusters in the file. `None` if the first one
    /// can.
    ///
    /// # Errors
    /// [`IoError::NoSpace`], [`IoError::Corrupt`], the device's.
    pub(super) async fn begin(
        &self,
        view: &Entries,
        first: u64,
        count: u64,
    ) -> Result<Option<Change>, IoError> {
        if view.format().is_corrupt() {
            return Err(IoError::Corrupt);
        }
        let mut slots = Vec::new();
        let mut kept = None;
        for cluster in first..first + count.min(MOST_CLUSTERS) {
            let slot = lock(view, cluster).await?;
            let word = slot.entry();
            if is_own(word) {
                break;
            }
            // Zeroes with a place of their own: it is used again.
            let place = self.own_place(view, word);
            if place.is_some() && !slots.is_empty() {
                break;
            }
            slots.push(slot);
            if place.is_some() {
                kept = place;
                break;
            }
        }
        if slots.is_empty() {
            return Ok(None);
        }
        let cluster_size = self.file.cluster_size();
        let (clusters, is_new) = match kept {
            Some(offset) => (Clusters { first: offset / cluster_size, count: 1, are_zero: false }, false),
            None => {
                let taken = self.refcounts.allocate(slots.len() as u64).await;
                (self.note_corruption(view, taken).await?, true)
            }
        };
        let Clusters { first, count, are_zero } = clusters;
        slots.truncate(count as usize);
        let old = [0, slots.len() - 1].map(|at| slots[at].entry());
        let number = self.number();
        self.changes.borrow_mut().insert(number, Open { slots, clusters, is_new });
        Ok(Some(Change { number, offset: first * cluster_size, count, are_zero, old }))
    }

    /// The place that an entry for zeroes keeps, if no snapshot shares it.
    fn own_place(&self, view: &Entries, word: u64) -> Option<u64> {
        match view.format().geometry.cluster(Entry { word, bitmap: 0 }) {
            Cluster::ZeroAllocated(offset) if word & COPIED != 0 => Some(offset),
            _ => None,
        }
    }

    /// Ends a change whose data was written: the entries point to it.
    ///
    /// # Errors
    /// [`IoError::DeviceGone`] when there is no such change.
    pub(super) async fn commit(&self, view: &Entries, number: u64) -> IoResult {
        let open = self.changes.borrow_mut().remove(&number);
        let Some(Open { mut slots, clusters, is_new }) = open else { return Err(IoError::DeviceGone) };
        for (cluster, slot) in (clusters.first..).zip(&mut slots) {
            let old = slot.entry();
            self.set(view, slot, (cluster * self.file.cluster_size()) | COPIED).await?;
            if is_new {
                self.drop_place(view, old);
            }
        }
        drop(slots);
        self.tidy(view);
        Ok(())
    }

    /// Ends a change whose data could not be written: nothing has changed.
    pub(super) async fn abort(&self, view: &Entries, number: u64) {
        let Some(open) = self.changes.borrow_mut().remove(&number) else { return };
        if open.is_new && !mutant::is(Mutant::FailedWriteLeaks) {
            let Clusters { first, count, .. } = open.clusters;
            let clusters: Vec<u64> = (first..first + count).collect();
            let dropped = self.refcounts.drop_references(&clusters).await;
            let _ = self.note_corruption(view, dropped).await;
        }
    }

    /// Clears clusters of the disk.
    ///
    /// # Errors
    /// [`IoError::Corrupt`], the device's. Some clusters may be clear then.
    pub(super) async fn clear(&self, view: &Entries, clusters: Range<u64>, how: Clear) -> IoResult {
        for (done, cluster) in clusters.enumerate() {
            if view.format().is_corrupt() {
                return Err(IoError::Corrupt);
            }
            let mut slot = lock(view, cluster).await?;
            let old = slot.entry();
            let new = self.cleared(view, old, how);
            if new != old {
                self.set(view, &mut slot, new).await?;
                if place(view.format(), new).is_none() {
                    self.drop_place(view, old);
                }
            }
            drop(slot);
            if done % 64 == 63 {
                self.tidy(view);
                yield_now().await;
            }
        }
        self.tidy(view);
        Ok(())
    }

    /// The entry of a cluster after it was cleared.
    fn cleared(&self, view: &Entries, old: u64, how: Clear) -> u64 {
        let metadata = view.format();
        // Without a backing file a cluster without a place reads as zeroes.
        let no_place = if metadata.has_backing { ZERO } else { 0 };
        match metadata.geometry.cluster(Entry { word: old, bitmap: 0 }) {
            Cluster::Unallocated if how == Clear::Discard => old,
            Cluster::Zero => old,
            Cluster::Data(_) | Cluster::ZeroAllocated(_)
                if how == Clear::ZeroInPlace && old & COPIED != 0 =>
            {
                old | ZERO
            }
            _ => no_place,
        }
    }

    /// Sets an entry, whose data was written.
    async fn set(&self, view: &Entries, slot: &mut Slot<Metadata>, word: u64) -> IoResult {
        view.format().set.fetch_add(1, Ordering::AcqRel);
        slot.set(word).await
    }

    /// Notes that an entry no longer refers to its clusters.
    fn drop_place(&self, view: &Entries, old: u64) {
        if mutant::is(Mutant::NeverDropped) {
            return;
        }
        let clusters = view.format().geometry.host_clusters(Entry { word: old, bitmap: 0 });
        let mut dropped = self.dropped.borrow_mut();
        dropped.extend(clusters.clone());
        if mutant::is(Mutant::DroppedTwice) {
            dropped.extend(clusters);
        }
    }

    /// Flushes when many clusters wait for it.
    fn tidy(&self, view: &Entries) {
        let is_full = self.dropped.borrow().len() >= MOST_DROPPED;
        if is_full && self.flushing.waiting() == 0 {
            let view = view.clone();
            reactor::current().spawn(async move {
                // The next flush of a client reports a failure.
                let _ = home(&view).flush(&view).await;
            });
        }
    }

    /// Makes data and refcounts durable of all entries that were set before the call.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn settle(&self, view: &Entries) -> IoResult {
        let metadata = view.format();
        let wanted = metadata.set.load(Ordering::Acquire);
        if metadata.settled.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        let settle = async {
            match metadata.settled.load(Ordering::Acquire) >= wanted {
                true => Ok(()),
                false => self.settle_now(view).await,
            }
        };
        self.settling.during(1, settle).await
    }

    /// Makes data and all refcounts durable.
    ///
    /// # Errors
    /// The device's.
    async fn settle_all(&self, view: &Entries) -> IoResult {
        self.settling.during(1, self.settle_now(view)).await
    }

    async fn settle_now(&self, view: &Entries) -> IoResult {
        let metadata = view.format();
        let now = metadata.set.load(Ordering::Acquire);
        if !mutant::is(Mutant::EntryBeforeRefcount) {
            self.refcounts.write().await?;
        }
        if !mutant::is(Mutant::EntryBeforeData) {
            self.file.flush().await?;
        }
        metadata.settled.fetch_max(now, Ordering::AcqRel);
        Ok(())
    }

    /// The L2 table at `index` of the L1 table, which only the disk refers to. It is made, or
    /// copied, if there is none.
    ///
    /// # Errors
    /// [`IoError::NoSpace`], [`IoError::Corrupt`], the device's.
    pub(super) async fn own_table(&self, view: &Entries, index: usize) -> Result<u64, IoError> {
        if let Some((table, true)) = view.format().table(index)? {
            return Ok(table);
        }
        self.making.during(1, self.make_table(view, index)).await
    }

    async fn make_table(&self, view: &Entries, index: usize) -> Result<u64, IoError> {
        let metadata = view.format();
        let shared = match metadata.table(index)? {
            Some((table, true)) => return Ok(table),
            Some((table, false)) => Some(table),
            None => None,
        };
        let cluster_size = self.file.cluster_size();
        let mut bytes = match shared {
            Some(table) => self.file.reader.read_named(table, cluster_size).await?,
            None => vec![0; cluster_size as usize],
        };
        // Its clusters are shared, too.
        for entry in bytes.chunks_exact_mut(8) {
            let word = be64(entry, 0) & !COPIED;
            entry.copy_from_slice(&word.to_be_bytes());
        }
        let taken = self.refcounts.allocate(1).await;
        let Clusters { first, .. } = self.note_corruption(view, taken).await?;
        let table = first * cluster_size;
        let written = async {
            self.file.write(table, &bytes, Flags::NONE).await?;
            if !mutant::is(Mutant::L1BeforeL2) {
                self.settle_all(view).await?;
            }
            Ok(())
        };
        if let Err(error) = written.await {
            let dropped = self.refcounts.drop_references(&[first]).await;
            self.note_corruption(view, dropped).await?;
            return Err(error);
        }
        let in_block = (metadata.block_size / 8) as usize;
        let start = index / in_block * in_block;
        let words = (start..start + in_block).map(|at| match metadata.l1.get(at) {
            _ if at == index => table | COPIED,
            Some(entry) => entry.load(Ordering::Acquire),
            None => 0,
        });
        let block = be_bytes(words);
        self.file.write(metadata.header.l1_offset + start as u64 * 8, &block, Flags::FUA).await?;
        metadata.l1[index].store(table | COPIED, Ordering::Release);
        self.file.note_metadata(table, cluster_size);
        if let Some(shared) = shared {
            let dropped = self.refcounts.drop_references(&[shared / cluster_size]).await;
            self.note_corruption(view, dropped).await?;
        }
        Ok(table)
    }

    /// Makes everything durable that completed before the call. Old clusters become free soon after
    /// it.
    ///
    /// # Errors
    /// The device's. The next call writes the rest.
    pub(super) async fn flush(&self, view: &Entries) -> IoResult {
        self.flushing.during(1, self.flush_now(view)).await
    }

    async fn flush_now(&self, view: &Entries) -> IoResult {
        let metadata = view.format();
        let now = metadata.set.load(Ordering::Acquire);
        let dropped = self.dropped.take();
        if mutant::is(Mutant::ReleaseBeforeFlush) {
            self.quarantine(view, dropped.clone());
        }
        self.write_all(view).await.inspect_err(|_| self.dropped.borrow_mut().extend(&dropped))?;
        metadata.flushed.fetch_max(now, Ordering::AcqRel);
        if !dropped.is_empty() && !mutant::is(Mutant::ReleaseBeforeFlush) {
            self.quarantine(view, dropped);
        }
        Ok(())
    }

    /// Makes data, refcounts and then tables durable.
    async fn write_all(&self, view: &Entries) -> IoResult {
        self.settle_all(view).await?;
        if !mutant::is(Mutant::FlushWithoutTables) {
            view.flush().await?;
        }
        if mutant::is(Mutant::TablesNotDurable) {
            return Ok(());
        }
        self.file.flush().await
    }

    /// Has clusters become free when requests have ended that may use them.
    fn quarantine(&self, view: &Entries, clusters: Vec<u64>) {
        let number = self.number();
        self.quarantine.borrow_mut().insert(number, clusters);
        let view = view.clone();
        reactor::current().spawn(async move {
            if !mutant::is(Mutant::ReleaseBeforeGrace) {
                view.grace().await;
            }
            home(&view).release(&view, number).await;
        });
    }

    /// Frees the clusters of a quarantine, if they are still there.
    async fn release(&self, view: &Entries, number: u64) {
        let release = async {
            let clusters = self.quarantine.borrow_mut().remove(&number);
            if let Some(clusters) = clusters {
                let dropped = self.refcounts.drop_references(&clusters).await;
                let _ = self.note_corruption(view, dropped).await;
            }
        };
        self.releasing.during(1, release).await;
    }

    /// Frees as many clusters as possible. The caller has no request in flight.
    ///
    /// # Errors
    /// As [`Home::flush`].
    pub(super) async fn reclaim(&self, view: &Entries) -> IoResult {
        self.flush(view).await?;
        view.grace().await;
        self.release_all(view).await;
        Ok(())
    }

    /// Frees the clusters of all quarantines.
    async fn release_all(&self, view: &Entries) {
        let numbers: Vec<u64> = self.quarantine.borrow().keys().copied().collect();
        for number in numbers {
            self.release(view, number).await;
        }
    }

    /// Writes everything, and cuts off the end of the file that is not used, down to `least` bytes.
    ///
    /// # Errors
    /// The device's. The image is valid, and may have clusters that are not free and not used.
    pub(super) async fn close(&self, view: &Entries, least: u64) -> IoResult {
        self.changes.take();
        self.flush(view).await?;
        // A core that still has a view may be waiting for this.
        if view.is_alone() {
            self.release_all(view).await;
        }
        // One that has begun changes refcounts.
        self.releasing.during(1, self.finish(view, least)).await
    }

    /// Writes refcounts, and cuts off the end of the file.
    async fn finish(&self, view: &Entries, least: u64) -> IoResult {
        if !mutant::is(Mutant::CloseWithoutRefcounts) {
            self.settle_all(view).await?;
        }
        let end = self.refcounts.end().await?.max(least);
        if end < self.file.capacity() {
            self.file.resize(end).map_err(|error| {
                tracing::warn!(%error, "the end of an image stays");
                IoError::Medium
            })?;
        }
        Ok(())
    }

    /// Refuses writes from now on if `result` is [`IoError::Corrupt`].
    async fn note_corruption<T>(&self, view: &Entries, result: Result<T, IoError>) -> Result<T, IoError> {
        if let Err(IoError::Corrupt) = &result {
            self.set_corrupt(view, "a refcount is too low").await;
        }
        result
    }

    /// Refuses writes from now on, and says so in the image.
    pub(super) async fn set_corrupt(&self, view: &Entries, why: &str) {
        let metadata = view.format();
        if metadata.is_corrupt.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::error!(image = metadata.image.name(), why, "an image is corrupt: it is no longer written");
        if metadata.header.version >= 3 {
            let features = metadata.header.incompatible | incompatible::CORRUPT;
            if let Err(error) = self.refcounts.write_header(INCOMPATIBLE, &features.to_be_bytes()).await {
                tracing::error!(image = metadata.image.name(), %error, "cannot mark the image as corrupt");
            }
        }
    }
}

impl Format for Metadata {
    type Local = OnceCell<Rc<Home>>;

    fn open(&self) -> Result<Self::Local, DeviceError> {
        Ok(OnceCell::new())
    }

    async fn load(view: &Rc<View<Metadata>>, leaf: u64, entries: &Leaf) -> IoResult {
        let (metadata, home) = (view.format(), home(view));
        for (index, at, slots) in metadata.parts(leaf, 0..ENTRIES) {
            let Some((table, is_own)) = metadata.table(index)? else { continue };
            let bytes = home.file.reader.read_named(table + at, slots.len() as u64 * ENTRY).await?;
            for (slot, word) in slots.zip(bytes.chunks_exact(8)) {
                let mut word = be64(word, 0);
                // The bits of a table that a snapshot shares are not up to date.
                if !is_own {
                    word &= !COPIED;
                }
                if home.overlaps(metadata, word) {
                    let cluster = leaf * ENTRIES as u64 + slot as u64;
                    let text = format!("cluster {cluster} of the disk is in metadata: entry {word:#x}");
                    home.set_corrupt(view, &text).await;
                }
                entries.set(slot, word);
            }
        }
        Ok(())
    }

    async fn save(view: &Rc<View<Metadata>>, leaf: u64, entries: &Leaf, slots: Range<usize>) -> IoResult {
        let (metadata, home) = (view.format(), home(view));
        // Whole blocks of the device.
        let unit = (metadata.block_size / ENTRY) as usize;
        let slots = slots.start / unit * unit..slots.end.next_multiple_of(unit);
        let words: Vec<u64> = slots.clone().map(|slot| entries.get(slot)).collect();
        home.settle(view).await?;
        for (index, at, part) in metadata.parts(leaf, slots.clone()) {
            let words = &words[part.start - slots.start..part.end - slots.start];
            if metadata.table(index)?.is_none() && words.iter().all(|word| *word == 0) {
                continue;
            }
            let table = home.own_table(view, index).await?;
            let bytes = be_bytes(words.iter().copied());
            home.file.write(table + at, &bytes, Flags::NONE).await?;
        }
        Ok(())
    }
}
