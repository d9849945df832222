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

use super::background::Background;
use super::file::File;
use super::marks::{Mark, SnapshotPlace};
use super::metadata::{Metadata, WORD};
use super::refcounts::{Clusters, Refcounts};
use super::restart::{Log, RestartLog};
use crate::entry::{BadEntry, COPIED, Entry, Geometry, Place};
use crate::header::{be_bytes, be64};
use crate::mutant::{self, Mutant};
use block::{Channel, DeviceError, Flags, IoError, IoResult, Request};
use mapping::{ENTRIES, Format, Leaf, Slot, View};
use reactor::{Permits, yield_now};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Most clusters of one change.
pub(super) const MOST_CLUSTERS: u64 = 64;
/// Most clusters that a core has ahead of its need.
pub(super) const MOST_LENT: u64 = 64;
/// A core has at most this part of the clusters that the file still has room for.
const LENT_PART: u64 = 16;
/// Old clusters after which the home flushes without being asked.
const MOST_DROPPED: usize = 4096;

/// A view of an image's entries.
pub(super) type Entries = Rc<View<Metadata>>;

/// See the module.
pub(super) struct Home {
    pub(super) file: Rc<File>,
    /// The external data file, if there is one.
    data: Option<Rc<dyn Channel>>,
    pub(super) refcounts: Refcounts,
    /// One L2 table is made at a time.
    making: Permits,
    /// Clusters for L2 tables that will be written with their first entry, by index in the L1
    /// table.
    pub(super) reserved: RefCell<BTreeMap<usize, u64>>,
    settling: Permits,
    pub(super) flushing: Permits,
    /// Flushes that have begun.
    begun: Cell<u64>,
    /// Number of the last flush that has ended well, counted from 1.
    ended: Cell<u64>,
    pub(super) changes: RefCell<BTreeMap<u64, Open>>,
    /// Clusters that cores have, or that a change has, and no entry refers to yet.
    pub(super) lent: RefCell<HashSet<u64>>,
    /// Clusters whose reference was removed from an entry, since the last flush began.
    pub(super) dropped: RefCell<Vec<u64>>,
    /// Such clusters whose removal is durable, until a grace period has passed.
    pub(super) quarantine: RefCell<BTreeMap<u64, Vec<u64>>>,
    /// One quarantine ends at a time.
    releasing: Permits,
    pub(super) background: Background,
    next_number: Cell<u64>,
    /// Entries that were set, and not flushed, for the case of a kill.
    pub(super) log: OnceCell<Log>,
    pub(super) mark: Cell<Mark>,
    /// The features that the header has: incompatible, compatible, autoclear.
    pub(super) written: Cell<Option<[u64; 3]>>,
    pub(super) snapshots: Cell<SnapshotPlace>,
    /// One change of snapshots, or search for leaks, at a time.
    pub(super) holding: Permits,
    /// Refcounts are too high, or COPIED bits do not fit them.
    pub(super) is_unsettled: Cell<bool>,
    /// Number of changes of COPIED bits that were already in memory.
    pub(super) refreshes: Cell<u64>,
    /// During a search for clusters that leak: those that are in use, or were, and may be in no
    /// table.
    pub(super) in_use: RefCell<Option<HashSet<u64>>>,
}

/// A change that has begun and not ended.
pub(super) struct Open {
    slots: Vec<Locked>,
    pub(super) clusters: Clusters,
    is_new: bool,
    /// The bytes that are written, from the first cluster on.
    range: Range<u64>,
}

/// A locked entry.
pub(super) struct Locked {
    cluster: u64,
    slot: Slot<Metadata>,
    pub(super) entry: Entry,
}

/// A change as the core that asked for it sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// First byte in the file for the first cluster.
    pub offset: u64,
    /// Clusters, one behind the other; at least one.
    pub count: u64,
    /// Whether the clusters in the file read as zeroes.
    pub are_zero: bool,
    /// Whether the disk has these clusters already.
    pub are_kept: bool,
    /// The entries of the first and the last cluster.
    pub old: [Entry; 2],
}

/// The purpose of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChangeKind {
    /// New bytes.
    Write,
    /// The bytes that the disk has already, which only the backing device has.
    Populate,
}

/// The home of an image, on its core.
///
/// # Panics
/// On another core.
pub(super) fn home(view: &Entries) -> Rc<Home> {
    view.local().get().expect("the image has its home here").clone()
}

/// Has the home do `work` that no request waits for. The close of the image does.
pub(super) fn in_background(view: &Entries, work: impl AsyncFnOnce(&Home, &Entries) + 'static) {
    let view = view.clone();
    reactor::current().spawn(async move {
        let home = home(&view);
        // A search for leaks is a large future, which each call that passes it on has on its stack.
        home.background.run(Box::pin(work(&home, &view))).await;
    });
}

/// The place of a cluster of the disk that no snapshot shares: that of its entry, or the one in an
/// external data file.
pub(super) fn own_place(geometry: &Geometry, entry: Entry, cluster: u64) -> Option<u64> {
    if geometry.has_data_file {
        return Some(cluster * geometry.cluster_size());
    }
    geometry.data_place(entry).filter(|_| entry.word & COPIED != 0)
}

/// The entry of a cluster of the disk, if it is on this core.
#[inline]
pub(super) fn entry(view: &Entries, cluster: u64) -> Option<Entry> {
    if view.format().geometry.has_extended_l2 {
        let (word, bitmap) = view.entry_pair(cluster * 2)?;
        return Some(Entry { word, bitmap });
    }
    Some(Entry { word: view.entry(cluster)?, bitmap: 0 })
}

/// Brings the entry of a cluster of the disk to this core. It may have to be asked for again.
///
/// # Errors
/// [`IoError::Corrupt`] if its table is damaged; the device's.
pub(super) async fn fetch(view: &Entries, cluster: u64) -> IoResult {
    view.fetch(cluster * view.format().geometry.entry_words()).await?;
    if entry(view, cluster).is_none() {
        // It is being changed.
        yield_now().await;
    }
    Ok(())
}

/// Locks the entry of a cluster of the disk.
///
/// # Errors
/// [`IoError::Corrupt`] if it is invalid; the device's.
pub(super) async fn lock(view: &Entries, cluster: u64) -> Result<Locked, IoError> {
    let geometry = view.format().geometry;
    let slot = view.lock(cluster * geometry.entry_words()).await?;
    let entry = loop {
        match entry(view, cluster) {
            Some(entry) => break entry,
            None => fetch(view, cluster).await?,
        }
    };
    match geometry.place(entry, cluster * geometry.cluster_size(), 0) {
        Ok(_) => Ok(Locked { cluster, slot, entry }),
        Err(BadEntry) => Err(IoError::Corrupt),
    }
}

/// Whether a cluster has the entry of the first one of a change.
fn is_like_first(slots: &[Locked], locked: &Locked) -> bool {
    slots.first().is_none_or(|first| first.entry == locked.entry)
}

impl Home {
    /// Opens the home on the calling core, which the table of `view` belongs to. Entries of an
    /// earlier process that `log` has are in the image then.
    ///
    /// # Errors
    /// When the metadata or the log cannot be read, or is invalid.
    pub(super) async fn open(view: &Entries, log: Option<RestartLog>) -> IoResult {
        let metadata = view.format();
        let cluster_size = metadata.geometry.cluster_size();
        let refused = |error: DeviceError| {
            tracing::error!(%error, "an image cannot be opened for writing");
            IoError::DeviceGone
        };
        let file = File::open(&metadata.image, cluster_size, &metadata.capacity);
        let file = Rc::new(file.map_err(refused)?);
        let data = metadata.data_file.as_ref().map(|device| device.open_channel());
        let data = data.transpose().map_err(refused)?;
        metadata.fixed.iter().for_each(|(offset, bytes)| file.note_metadata(*offset, *bytes));
        for index in 0..metadata.l1.len() {
            if let Some((table, _)) = metadata.table(index)? {
                file.note_metadata(table, cluster_size);
            }
        }
        let refcounts = Refcounts::open(&file, &metadata.header, metadata.block_size).await?;
        file.complete_last_cluster();
        let header = &metadata.header;
        let home = Rc::new(Home {
            file,
            data,
            refcounts,
            making: Permits::new(1),
            reserved: RefCell::default(),
            settling: Permits::new(1),
            flushing: Permits::new(1),
            begun: Cell::new(0),
            ended: Cell::new(0),
            changes: RefCell::default(),
            lent: RefCell::default(),
            dropped: RefCell::default(),
            quarantine: RefCell::default(),
            releasing: Permits::new(1),
            background: Background::new(),
            next_number: Cell::new(0),
            log: OnceCell::new(),
            mark: Cell::default(),
            written: Cell::new(Some([header.incompatible, header.compatible, header.autoclear])),
            snapshots: Cell::new(SnapshotPlace::of(header)),
            holding: Permits::new(1),
            is_unsettled: Cell::new(false),
            refreshes: Cell::new(0),
            in_use: RefCell::default(),
        });
        // Version 2 has no place for the session of a log.
        let needs_dirty = home.snapshots.get().is_used();
        let has_place = !needs_dirty || header.may_be_marked_dirty();
        let log = log.filter(|_| header.version >= 3 && has_place);
        view.local().get_or_init(|| home).begin_session(view, log).await
    }

    fn number(&self) -> u64 {
        self.next_number.replace(self.next_number.get() + 1)
    }

    /// Whether the data of an entry is in a cluster with metadata.
    pub(super) fn overlaps(&self, metadata: &Metadata, entry: Entry) -> bool {
        let place = metadata.geometry.data_place(entry).filter(|_| metadata.data_file.is_none());
        place.is_some_and(|offset| self.file.is_metadata(offset / self.file.cluster_size()))
    }

    /// Begins a write of `len` bytes of the disk, from byte `within` of the cluster `first` on. The
    /// clusters that it changes, at least one, are locked then. Those that cannot be written in
    /// place get new clusters in the file. If they are populated, all have the same entry. Also
    /// returns the number of the change. `None` if the first byte can be written in place, or has a
    /// place and is populated.
    ///
    /// # Errors
    /// [`IoError::NoSpace`], [`IoError::Corrupt`], the device's.
    pub(super) async fn begin(
        &self,
        view: &Entries,
        first: u64,
        within: u64,
        len: u64,
        kind: ChangeKind,
    ) -> Result<Option<(u64, Change)>, IoError> {
        if view.format().is_corrupt() {
            return Err(IoError::Corrupt);
        }
        let cluster_size = self.file.cluster_size();
        let count = (within + len).div_ceil(cluster_size).min(MOST_CLUSTERS);
        let mut slots: Vec<Locked> = Vec::new();
        let mut kept = None;
        for cluster in first..first + count {
            let locked = lock(view, cluster).await?;
            let at = if slots.is_empty() { within } else { 0 };
            let found = self.place(view, locked.entry, cluster, at)?;
            let is_done = match kind {
                ChangeKind::Write => {
                    view.format().geometry.is_own(locked.entry) && matches!(found, Place::Data(_))
                }
                ChangeKind::Populate => found != Place::Unallocated || !is_like_first(&slots, &locked),
            };
            if is_done {
                break;
            }
            // A place of its own without data is used again.
            let place = own_place(&view.format().geometry, locked.entry, cluster);
            let continues = kept.is_none_or(|kept| place == Some(kept + slots.len() as u64 * cluster_size));
            if !slots.is_empty() && (kept.is_some() != place.is_some() || !continues) {
                break;
            }
            kept = kept.or(place);
            slots.push(locked);
        }
        if slots.is_empty() {
            return Ok(None);
        }
        self.reserve_tables(view, first..first + slots.len() as u64).await?;
        let (clusters, is_new) = match kept {
            Some(offset) => {
                let count = slots.len() as u64;
                (Clusters { first: offset / cluster_size, count, are_zero: false }, false)
            }
            None => (self.allocate(view, slots.len() as u64).await?, true),
        };
        let Clusters { first, count, are_zero } = clusters;
        slots.truncate(count as usize);
        let old = [0, slots.len() - 1].map(|at| slots[at].entry);
        let number = self.number();
        let range = within..(within + len).min(count * cluster_size);
        self.changes.borrow_mut().insert(number, Open { slots, clusters, is_new, range });
        let offset = first * cluster_size;
        Ok(Some((number, Change { offset, count, are_zero, are_kept: !is_new, old })))
    }

    /// The place of byte `within` of a cluster of the disk.
    fn place(&self, view: &Entries, entry: Entry, cluster: u64, within: u64) -> Result<Place, IoError> {
        let geometry = view.format().geometry;
        let place = geometry.place(entry, cluster * geometry.cluster_size(), within);
        place.map(|(place, _)| place).map_err(|BadEntry| IoError::Corrupt)
    }

    /// Ends a change whose data was written: the entries point to it.
    ///
    /// # Errors
    /// [`IoError::DeviceGone`] when there is no such change; as [`Home::set`], for the rest of the
    /// clusters.
    pub(super) async fn commit(&self, view: &Entries, number: u64) -> IoResult {
        let open = self.changes.borrow_mut().remove(&number);
        let Some(Open { mut slots, clusters, is_new, range }) = open else { return Err(IoError::DeviceGone) };
        let (geometry, cluster_size) = (view.format().geometry, self.file.cluster_size());
        let taken = if is_new { clusters.first..clusters.first + clusters.count } else { 0..0 };
        self.lent.borrow_mut().extend(taken.clone());
        for (number, locked) in (0..).zip(&mut slots) {
            let place = (clusters.first + number) * cluster_size;
            let old = locked.entry;
            let new = geometry.written(old, place, geometry.subclusters_in(number, &range));
            if let Err(error) = self.set(view, locked, new).await {
                self.note_failure(view, is_new);
                // Those before it have an entry.
                for cluster in taken.clone().take(number as usize) {
                    self.lent.borrow_mut().remove(&cluster);
                }
                self.take_back(view, taken.skip(number as usize).collect()).await;
                return Err(error);
            }
            if is_new {
                self.drop_place(view, old);
            }
        }
        for cluster in taken {
            self.lent.borrow_mut().remove(&cluster);
        }
        drop(slots);
        self.tidy(view);
        Ok(())
    }

    /// Ends a change whose data could not be written: nothing has changed.
    pub(super) async fn abort(&self, view: &Entries, number: u64) {
        let Some(open) = self.changes.borrow_mut().remove(&number) else { return };
        self.note_failure(view, open.is_new);
        if open.is_new && !mutant::is(Mutant::FailedWriteLeaks) {
            let Clusters { first, count, .. } = open.clusters;
            let clusters: Vec<u64> = (first..first + count).collect();
            let _ = self.drop_references(view, &clusters).await;
        }
    }

    /// Notes that a change has failed, before its entries are unlocked. In clusters that the disk
    /// has, it may have written over data of other writes that are not committed.
    fn note_failure(&self, view: &Entries, is_new: bool) {
        if !is_new {
            view.format().failed.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Gives a core up to `count` clusters, one behind the other, for data that it will write. The
    /// first is for the cluster `first` of the disk.
    ///
    /// # Errors
    /// As [`Home::begin`].
    pub(super) async fn lend(&self, view: &Entries, first: u64, count: u64) -> Result<Clusters, IoError> {
        if view.format().is_corrupt() {
            return Err(IoError::Corrupt);
        }
        self.reserve_tables(view, first..first + 1).await?;
        let room = self.refcounts.room() / LENT_PART + 1;
        let clusters = self.allocate(view, count.min(room)).await?;
        self.lent.borrow_mut().extend(clusters.first..clusters.first + clusters.count);
        Ok(clusters)
    }

    /// Takes back clusters that a core had and has not used.
    pub(super) async fn take_back(&self, view: &Entries, mut clusters: Vec<u64>) {
        clusters.retain(|cluster| self.lent.borrow_mut().remove(cluster));
        if mutant::is(Mutant::LentClustersLeak) {
            return;
        }
        let _ = self.drop_references(view, &clusters).await;
    }

    /// Sets an entry, whose data was written. The log has it first: others may complete writes to
    /// its place as soon as it is set. The log knows until then that a flush may lack it.
    ///
    /// # Errors
    /// When the log has no room, and a flush fails; when it cannot be written: nothing has changed.
    pub(super) async fn set(&self, view: &Entries, locked: &mut Locked, entry: Entry) -> IoResult {
        if let Some(log) = self.log.get() {
            while log.is_full() {
                self.flush(view).await?;
                // Entries that the log has may have to be set first.
                yield_now().await;
            }
            log.note(locked.cluster, entry).await?;
        }
        self.note_setting(view, entry);
        locked.entry = entry;
        match view.format().geometry.has_extended_l2 {
            true => locked.slot.set_pair(entry.word, entry.bitmap).await,
            false => locked.slot.set(entry.word).await,
        }
    }

    /// Notes that an entry that the log has, if there is one, is about to be set.
    pub(super) fn note_setting(&self, view: &Entries, entry: Entry) {
        self.log.get().into_iter().for_each(Log::note_set);
        self.note_use(view.format().geometry.host_clusters(entry));
        view.format().set.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that an entry no longer refers to its clusters. Those of a data file have no
    /// refcounts.
    pub(super) fn drop_place(&self, view: &Entries, old: Entry) {
        if mutant::is(Mutant::NeverDropped) || view.format().data_file.is_some() {
            return;
        }
        let clusters = view.format().geometry.host_clusters(old);
        self.note_use(clusters.clone());
        let mut dropped = self.dropped.borrow_mut();
        dropped.extend(clusters.clone());
        if mutant::is(Mutant::DroppedTwice) {
            dropped.extend(clusters);
        }
    }

    /// Flushes when many clusters or records of the log wait for it.
    pub(super) fn tidy(&self, view: &Entries) {
        let is_log_full = self.log.get().is_some_and(Log::is_half_full);
        let is_full = self.dropped.borrow().len() >= MOST_DROPPED || is_log_full;
        if is_full && self.flushing.waiting() == 0 {
            in_background(view, async |home, view| {
                // The next flush of a client reports a failure.
                let _ = home.flush(view).await;
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
    pub(super) async fn settle_all(&self, view: &Entries) -> IoResult {
        self.settling.during(1, self.settle_now(view)).await
    }

    async fn settle_now(&self, view: &Entries) -> IoResult {
        let metadata = view.format();
        let now = metadata.set.load(Ordering::Acquire);
        if !mutant::is(Mutant::EntryBeforeRefcount) {
            self.refcounts.write().await?;
        }
        if !mutant::is(Mutant::EntryBeforeData) {
            if let Some(data) = &self.data {
                data.submit(&Request::flush(), 0).await?;
            }
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

    /// Takes the clusters for the L2 tables of some clusters of the disk, so that a flush needs no
    /// room for them.
    ///
    /// # Errors
    /// [`IoError::NoSpace`], [`IoError::Corrupt`], the device's.
    pub(super) async fn reserve_tables(&self, view: &Entries, clusters: Range<u64>) -> IoResult {
        let metadata = view.format();
        let entries = metadata.geometry.l2_entries();
        for index in (clusters.start / entries) as usize..clusters.end.div_ceil(entries) as usize {
            if self.has_table(view, index)? {
                continue;
            }
            let reserve = async {
                if !self.has_table(view, index)? {
                    let cluster = self.allocate(view, 1).await?.first;
                    self.reserved.borrow_mut().insert(index, cluster);
                }
                Ok(())
            };
            self.making.during(1, reserve).await?;
        }
        Ok(())
    }

    /// Whether the L2 table at `index` of the L1 table is there for the disk alone, or will be
    /// without further room.
    ///
    /// # Errors
    /// [`IoError::Corrupt`].
    pub(super) fn has_table(&self, view: &Entries, index: usize) -> Result<bool, IoError> {
        let is_own = view.format().table(index)?.is_some_and(|(_, is_own)| is_own);
        Ok(is_own || self.reserved.borrow().contains_key(&index))
    }

    /// Takes up to `wanted` clusters, as [`Refcounts::allocate`].
    pub(super) async fn allocate(&self, view: &Entries, wanted: u64) -> Result<Clusters, IoError> {
        let taken = self.refcounts.allocate(wanted).await;
        if let Ok(Clusters { first, count, .. }) = taken {
            self.note_use(first..first + count);
        }
        self.note_corruption(view, taken).await
    }

    /// Removes a reference to each of some clusters, as [`Refcounts::drop_references`].
    pub(super) async fn drop_references(&self, view: &Entries, clusters: &[u64]) -> IoResult {
        self.note_use(clusters.iter().copied());
        let dropped = self.refcounts.drop_references(clusters).await;
        self.note_corruption(view, dropped).await
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
        for entry in bytes.chunks_exact_mut(metadata.geometry.entry_bytes()) {
            let word = be64(entry, 0) & !COPIED;
            entry[..8].copy_from_slice(&word.to_be_bytes());
        }
        // It counts as reserved until the L1 table names it.
        let reserved = self.reserved.borrow().get(&index).copied();
        let first = match reserved {
            Some(cluster) => cluster,
            None => self.allocate(view, 1).await?.first,
        };
        self.reserved.borrow_mut().insert(index, first);
        let table = first * cluster_size;
        self.file.write(table, &bytes, Flags::NONE).await?;
        if !mutant::is(Mutant::L1BeforeL2) {
            self.settle_all(view).await?;
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
        self.reserved.borrow_mut().remove(&index);
        self.file.note_metadata(table, cluster_size);
        if let Some(shared) = shared {
            let cluster = shared / cluster_size;
            if self.refcounts.counts(&[cluster]).await? == [1] {
                // It may be taken as soon as it is free.
                self.file.forget_metadata(shared, cluster_size);
            }
            self.drop_references(view, &[cluster]).await?;
        }
        Ok(table)
    }

    /// Makes everything durable that completed before the call. Old clusters become free soon after
    /// it. Calls that wait for one flush share the next one.
    ///
    /// # Errors
    /// The device's. The next call writes the rest.
    pub(super) async fn flush(&self, view: &Entries) -> IoResult {
        let begun = self.begun.get();
        let flush = async {
            // A flush that began before the call may lack what completed meanwhile.
            // The broken variant must not wait for ever for room in the log.
            let is_broken =
                mutant::is(Mutant::FlushThatBeganBefore) && !self.log.get().is_some_and(Log::is_full);
            let least = if is_broken { begun } else { begun + 1 };
            if self.ended.get() >= least { Ok(()) } else { self.flush_now(view).await }
        };
        self.flushing.during(1, flush).await
    }

    async fn flush_now(&self, view: &Entries) -> IoResult {
        let metadata = view.format();
        let number = self.begun.get() + 1;
        self.begun.set(number);
        let now = metadata.set.load(Ordering::Acquire);
        let dropped = self.dropped.take();
        let logged = self.log.get().map_or(0, Log::set_end);
        if mutant::is(Mutant::ReleaseBeforeFlush) {
            self.quarantine(view, dropped.clone());
        }
        if mutant::is(Mutant::LogForgottenEarly) {
            self.forget(logged)?;
        }
        let written = self.write_all(view).await.and_then(|()| self.forget(logged));
        written.inspect_err(|_| self.dropped.borrow_mut().extend(&dropped))?;
        metadata.flushed.fetch_max(now, Ordering::AcqRel);
        self.ended.set(number);
        if !dropped.is_empty() && !mutant::is(Mutant::ReleaseBeforeFlush) {
            self.quarantine(view, dropped);
        }
        Ok(())
    }

    /// Has the log begin at a record: the entries before it are durable. Their old clusters are
    /// used again only after that.
    fn forget(&self, record: u64) -> IoResult {
        let Some(log) = self.log.get() else { return Ok(()) };
        log.forget(record).map_err(|error| {
            tracing::error!(%error, "the restart log of an image cannot be written");
            IoError::Medium
        })
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
            let home = home(&view);
            home.background.run(home.release(&view, number)).await;
        });
    }

    /// Frees the clusters of a quarantine, if they are still there.
    async fn release(&self, view: &Entries, number: u64) {
        let release = async {
            let clusters = self.quarantine.borrow_mut().remove(&number);
            if let Some(clusters) = clusters.filter(|_| !self.background.is_closed()) {
                let _ = self.drop_references(view, &clusters).await;
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
        // Another flush may add a quarantine, for which this grace period is too early.
        let numbers = self.quarantines();
        view.grace().await;
        for number in numbers {
            self.release(view, number).await;
        }
        // One that had begun is in no list.
        if !mutant::is(Mutant::DiscardedClusterLowered) {
            self.releasing.during(1, async {}).await;
        }
        Ok(())
    }

    fn quarantines(&self) -> Vec<u64> {
        self.quarantine.borrow().keys().copied().collect()
    }

    /// Writes everything, and cuts off the end of the file that is not used, down to `least` bytes.
    /// No request is in flight then, and none follows, as the core may end.
    ///
    /// # Errors
    /// The device's. The image is valid, and may have clusters that are not free and not used.
    pub(super) async fn close(&self, view: &Entries, least: u64) -> IoResult {
        self.changes.take();
        self.background.ended().await;
        // A search for leaks, or a change of snapshots, ends first.
        let flushed = self.holding.during(1, self.flush(view)).await;
        // A core that still has a view may be waiting for this.
        if flushed.is_ok() && view.is_alone() {
            for number in self.quarantines() {
                self.release(view, number).await;
            }
        }
        let finish = async {
            self.background.close();
            flushed?;
            self.finish(view, least).await
        };
        // One that has begun changes refcounts.
        let finished = self.releasing.during(1, finish).await;
        self.background.ended().await;
        finished
    }

    /// Writes refcounts, and cuts off the end of the file.
    async fn finish(&self, view: &Entries, least: u64) -> IoResult {
        let lent = self.lent.borrow().iter().copied().collect();
        self.take_back(view, lent).await;
        let unused: Vec<u64> = self.reserved.take().into_values().collect();
        self.drop_references(view, &unused).await?;
        if let Err(error) = self.save_bitmaps(view).await {
            let image = view.format().image.name();
            tracing::error!(image, %error, "the dirty bitmaps of an image were not written: they stay in use");
        }
        if !mutant::is(Mutant::CloseWithoutRefcounts) {
            self.settle_all(view).await?;
        }
        self.write_mark(view, 0, self.is_unsettled.get()).await?;
        if let Some(log) = self.log.get() {
            log.close();
        }
        let mut end = self.refcounts.end().await?.max(least);
        // A file that ended inside its last cluster ends there again, unless data came behind it.
        if end - least < self.file.cluster_size() && end > least {
            let tail = self.file.reader.read(least, end - least).await?;
            if tail.iter().all(|byte| *byte == 0) {
                end = least;
            }
        }
        if end < self.file.capacity() {
            self.file.resize(end).map_err(|error| {
                tracing::warn!(%error, "the end of an image stays");
                IoError::Medium
            })?;
        }
        Ok(())
    }

    /// Whether a shared table has these words at byte `place` of the file.
    async fn has_words(&self, metadata: &Metadata, place: u64, words: &[u64]) -> Result<bool, IoError> {
        let bytes = self.file.reader.read_named(place, words.len() as u64 * WORD).await?;
        let each = metadata.geometry.entry_words() as usize;
        let own = |at: usize, word: u64| if at.is_multiple_of(each) { word & !COPIED } else { word };
        let mut found =
            bytes.chunks_exact(WORD as usize).enumerate().map(|(at, word)| own(at, be64(word, 0)));
        Ok(words.iter().all(|word| found.next() == Some(*word)))
    }

    /// Reads the entries of a leaf.
    async fn load_leaf(&self, view: &Entries, leaf: u64, entries: &Leaf) -> IoResult {
        let metadata = view.format();
        let (geometry, words) = (metadata.geometry, metadata.geometry.entry_words());
        for (index, at, slots) in metadata.parts(leaf, 0..ENTRIES) {
            let Some((table, is_own)) = metadata.table(index)? else { continue };
            let bytes = self.file.reader.read_named(table + at, slots.len() as u64 * WORD).await?;
            for (slot, bytes) in slots.step_by(words as usize).zip(bytes.chunks_exact(geometry.entry_bytes()))
            {
                let mut entry = geometry.entry(bytes, 0);
                // The bits of a table that a snapshot shares are not up to date. No valid entry has
                // all bits.
                if !is_own || entry.word == u64::MAX {
                    entry.word &= !COPIED;
                }
                if self.overlaps(metadata, entry) {
                    let cluster = (leaf * ENTRIES as u64 + slot as u64) / words;
                    let word = entry.word;
                    let text = format!("cluster {cluster} of the disk is in metadata: entry {word:#x}");
                    self.set_corrupt(view, &text).await;
                }
                entries.set(slot, entry.word);
                if words > 1 {
                    entries.set(slot + 1, entry.bitmap);
                }
            }
        }
        Ok(())
    }

    /// Writes the dirty bitmaps, unless another core may still write to the disk.
    async fn save_bitmaps(&self, view: &Entries) -> IoResult {
        let Some(bitmaps) = &view.format().bitmaps else { return Ok(()) };
        if !view.is_alone() || view.format().is_corrupt() {
            let image = view.format().image.name();
            tracing::warn!(image, "the dirty bitmaps of an image stay in use: it was not closed cleanly");
            return Ok(());
        }
        let entries = bitmaps.write_bits(&self.file, &self.refcounts).await?;
        if !mutant::is(Mutant::BitmapTableBeforeRefcount) {
            self.settle_all(view).await?;
        }
        bitmaps.write_tables(&self.file, &entries).await
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
        if let Err(error) = self.write_mark(view, self.mark.get().session, self.mark.get().is_dirty).await {
            tracing::error!(image = metadata.image.name(), %error, "cannot mark the image as corrupt");
        }
    }
}

impl Format for Metadata {
    type Local = OnceCell<Rc<Home>>;

    fn open(&self) -> Result<Self::Local, DeviceError> {
        Ok(OnceCell::new())
    }

    async fn load(view: &Rc<View<Metadata>>, leaf: u64, entries: &Leaf) -> IoResult {
        let home = home(view);
        loop {
            let refreshes = home.refreshes.get();
            home.load_leaf(view, leaf, entries).await?;
            // COPIED bits that change meanwhile may be missing.
            if home.refreshes.get() == refreshes {
                return Ok(());
            }
        }
    }

    async fn save(view: &Rc<View<Metadata>>, leaf: u64, entries: &Leaf, slots: Range<usize>) -> IoResult {
        let (metadata, home) = (view.format(), home(view));
        // Whole blocks of the device.
        let unit = (metadata.block_size / WORD) as usize;
        let slots = slots.start / unit * unit..slots.end.next_multiple_of(unit);
        let words: Vec<u64> = slots.clone().map(|slot| entries.get(slot)).collect();
        home.settle(view).await?;
        for (index, at, part) in metadata.parts(leaf, slots.clone()) {
            let words = &words[part.start - slots.start..part.end - slots.start];
            // The slots between those that have changed may be of a table that has no change.
            match metadata.table(index)? {
                None if words.iter().all(|word| *word == 0) => continue,
                Some((table, false)) if home.has_words(metadata, table + at, words).await? => continue,
                _ => {}
            }
            let table = home.own_table(view, index).await?;
            let bytes = be_bytes(words.iter().copied());
            home.file.write(table + at, &bytes, Flags::NONE).await?;
        }
        Ok(())
    }
}
