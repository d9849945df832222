//! The requests of one core to an image that is written.

use super::batch::{Batches, Commit, Target};
use super::clear::Clear;
use super::home::{Change, ChangeKind, Entries, MOST_LENT, entry, fetch, home, in_background, own_place};
use super::metadata::Metadata;
use super::refcounts::Clusters;
use crate::content::{Content, Places};
use crate::entry::{BadEntry, Entry, Geometry, Place};
use crate::lookup::Run;
use crate::mutant::{self, Mutant};
use block::{Channel, Flags, IoError, IoFuture, IoResult, Op, Request, Status, StatusReport};
use reactor::{BufferPool, MAX_BUFFER, Permits};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

/// Longest transfer of bytes that are copied.
const PART: u64 = 128 << 10;

/// Where the bytes of the disk are, as the table of the image says now.
pub(super) struct Live(pub Entries);

impl Live {
    pub(super) fn place(&self, entry: Entry, at: u64) -> Result<(Place, u64), IoError> {
        let geometry = self.geometry();
        let within = at % geometry.cluster_size();
        geometry.place(entry, at - within, within).map_err(|BadEntry| IoError::Corrupt)
    }

    fn entry(&self, at: u64) -> Option<Entry> {
        entry(&self.0, at / self.geometry().cluster_size())
    }

    /// The place at which the byte `at` of the disk can be written, and the length of its run.
    fn own_place(&self, at: u64) -> Option<Result<(Place, u64), IoError>> {
        let entry = self.entry(at).filter(|entry| self.geometry().is_own(*entry))?;
        Some(self.place(entry, at))
    }

    /// The byte of the file for whole subclusters of the disk that have neither data nor zeroes
    /// yet, in a cluster with this entry, which only the disk refers to. While the cluster has its
    /// place, they have neither until they are written or zeroed, and never again. The cluster
    /// gets no place twice before the requests of now have ended, but for one in an external data
    /// file.
    fn unwritten(&self, entry: Entry, offset: u64, len: u64) -> Option<u64> {
        let geometry = self.geometry();
        let cluster = geometry.data_place(entry)?;
        let may_write = geometry.is_own(entry) && !geometry.has_data_file;
        let is_whole = offset.is_multiple_of(geometry.unit()) && len.is_multiple_of(geometry.unit());
        let (place, run) = self.place(entry, offset).ok()?;
        let is_unwritten = place == Place::Unallocated && len <= run;
        (may_write && is_whole && is_unwritten).then_some(cluster + offset % geometry.cluster_size())
    }

    /// The byte of the file, and the length of the run from there, at which the disk's bytes at
    /// `offset` can be written in place. `None` if the first one has no place of its own, or its
    /// entry is not here.
    fn own_run(&self, offset: u64, len: u64) -> Option<Result<(u64, u64), IoError>> {
        let (start, mut run) = match self.own_place(offset)? {
            Ok((Place::Data(start), run)) => (start, run),
            Ok(_) => return None,
            Err(error) => return Some(Err(error)),
        };
        while run < len {
            match self.own_place(offset + run) {
                Some(Ok((place, more))) if Place::Data(start).continues(run, place) => run += more,
                _ => break,
            }
        }
        Some(Ok((start, run.min(len))))
    }
}

impl Places for Live {
    fn geometry(&self) -> &Geometry {
        &self.0.format().geometry
    }

    fn data_end(&self) -> u64 {
        self.0.format().data_end()
    }

    fn has_backing(&self) -> bool {
        self.0.format().backing.is_used()
    }

    #[inline]
    fn try_run(&self, offset: u64, len: u64) -> Option<Result<Run, IoError>> {
        let (place, mut run) = match self.place(self.entry(offset)?, offset) {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        while run < len {
            // An entry that is damaged is an error of the requests that reach it.
            match self.entry(offset + run).map(|entry| self.place(entry, offset + run)) {
                Some(Ok((next, more))) if place.continues(run, next) => run += more,
                _ => break,
            }
        }
        Some(Ok(Run { place, len: run.min(len) }))
    }

    async fn run(&self, offset: u64, len: u64) -> Result<Run, IoError> {
        loop {
            if let Some(run) = self.try_run(offset, len) {
                return run;
            }
            fetch(&self.0, offset / self.geometry().cluster_size()).await?;
        }
    }
}

/// Clusters that a core has ahead of its need.
struct Lent {
    clusters: Cell<Clusters>,
    /// How many it asked for last.
    count: Cell<u64>,
    /// One task asks at a time.
    refill: Permits,
}

impl Lent {
    fn new() -> Lent {
        let none = Clusters { first: 0, count: 0, are_zero: false };
        Lent { clusters: Cell::new(none), count: Cell::new(0), refill: Permits::new(1) }
    }

    fn is_empty(&self) -> bool {
        self.clusters.get().count == 0
    }

    /// Takes the first cluster.
    fn take(&self) -> Option<(u64, bool)> {
        let Clusters { first, count, are_zero } = self.clusters.get();
        let rest = count.checked_sub(1)?;
        self.clusters.set(Clusters { first: first + 1, count: rest, are_zero });
        Some((first, are_zero))
    }

    /// How many to ask for: twice as many as the last time.
    fn next_count(&self) -> u64 {
        self.count.set((self.count.get() * 2).clamp(1, MOST_LENT));
        self.count.get()
    }
}

/// See the module.
pub(super) struct LiveChannel {
    pub(super) content: Content<Live>,
    buffers: BufferPool,
    lent: Lent,
    batches: Batches,
    /// Clusters of the disk that get a place.
    placing: RefCell<HashSet<u64>>,
    /// Writes that wait for that.
    waiting: RefCell<Vec<Waker>>,
}

/// A part of the disk that gets a place.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    /// Its first byte on the disk, and its length.
    pub offset: u64,
    pub len: u64,
    /// A request whose first bytes are written there. Without one, the part keeps its bytes.
    pub req: Option<&'a Request<'a>>,
}

impl Piece<'_> {
    fn kind(&self) -> ChangeKind {
        if self.req.is_some() { ChangeKind::Write } else { ChangeKind::Populate }
    }
}

/// A write gives a cluster its place, for as long as this lives.
struct Placing<'c> {
    channel: &'c LiveChannel,
    cluster: u64,
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        self.channel.placing.borrow_mut().remove(&self.cluster);
        self.channel.waiting.take().into_iter().for_each(Waker::wake);
    }
}

impl Drop for LiveChannel {
    fn drop(&mut self) {
        let Clusters { first, count, .. } = self.lent.clusters.get();
        if count == 0 {
            return;
        }
        // The end of the image frees those that are not returned.
        self.view().post(0, move |view| {
            let clusters = (first..first + count).collect();
            in_background(&view, async move |home, view| home.take_back(view, clusters).await);
        });
    }
}

impl LiveChannel {
    pub(super) fn new(content: Content<Live>) -> LiveChannel {
        LiveChannel {
            batches: Batches::new(&content.places.0),
            content,
            buffers: BufferPool::new(4 * MAX_BUFFER),
            lent: Lent::new(),
            placing: RefCell::default(),
            waiting: RefCell::default(),
        }
    }

    /// Bytes of the disk, and of a cluster.
    pub(super) fn size(&self) -> (u64, u64) {
        (self.content.limits().capacity, self.content.places.geometry().cluster_size())
    }

    pub(super) fn view(&self) -> &Entries {
        &self.content.places.0
    }

    fn metadata(&self) -> &Metadata {
        self.view().format()
    }

    /// Asks the home of the image. The work has memory of its own: a request has no room for it.
    pub(super) async fn ask<R, W>(
        &self,
        work: impl FnOnce(Entries) -> W + Send + 'static,
    ) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: Future<Output = Result<R, IoError>> + 'static,
    {
        self.view().at_owner(0, |view| Box::pin(work(view))).await?
    }

    async fn read(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let _running = self.view().begin();
        self.content.serve(req, offset).await
    }

    /// Runs work that changes the disk or its places. When no cluster is free, clusters that wait
    /// for the end of earlier requests may help.
    pub(super) async fn change<R>(&self, work: impl AsyncFn() -> Result<R, IoError>) -> Result<R, IoError> {
        let mut has_reclaimed = false;
        loop {
            let running = self.view().begin_change().await;
            let result = work().await;
            drop(running);
            if has_reclaimed || !matches!(result, Err(IoError::NoSpace)) {
                return result;
            }
            has_reclaimed = true;
            self.ask(|view| async move { home(&view).reclaim(&view).await }).await?;
        }
    }

    /// Runs a request that changes the disk.
    async fn modify(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let change = async || match req.op {
            Op::Write => self.write(req, offset).await,
            _ => self.clear(req, offset).await,
        };
        self.change(change).await?;
        match req.is_fua() && req.op != Op::Discard && !mutant::is(Mutant::FuaWithoutTables) {
            true => self.flush().await,
            false => Ok(()),
        }
    }

    async fn write(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let cluster_size = self.content.places.geometry().cluster_size();
        let mut done = 0;
        while done < req.len {
            // An entry that was loaded meanwhile may have shown it.
            if self.metadata().is_corrupt() {
                return Err(IoError::Corrupt);
            }
            let (at, rest) = (offset + done, req.len - done);
            if let Some(own) = self.content.places.own_run(at, rest) {
                let (place, len) = own?;
                self.check_inside(place, len)?;
                self.content.data.channel.submit(&req.part(done, len), place).await?;
                done += len;
                continue;
            }
            // The entry may have to be loaded first.
            match entry(self.view(), at / cluster_size) {
                Some(_) => done += self.write_elsewhere(&req.part(done, rest), at).await?,
                None => fetch(self.view(), at / cluster_size).await?,
            }
        }
        Ok(())
    }

    /// A cluster behind the end of the file is missing: the file was cut.
    fn check_inside(&self, place: u64, len: u64) -> IoResult {
        let is_inside = place.checked_add(len).is_some_and(|end| end <= self.content.places.data_end());
        if is_inside { Ok(()) } else { Err(IoError::Corrupt) }
    }

    /// Writes the first bytes of a request, at byte `offset` of the disk, to new clusters. Returns
    /// how many: 0 if it must be tried again, because the entry is another one meanwhile.
    async fn write_elsewhere(&self, req: &Request<'_>, offset: u64) -> Result<u64, IoError> {
        let geometry = *self.content.places.geometry();
        let cluster_size = geometry.cluster_size();
        let (cluster, within) = (offset / cluster_size, offset % cluster_size);
        let entry = self.content.places.entry(offset);
        if let Some(old) = entry
            && let Some(place) = self.content.places.unwritten(old, offset, req.len)
        {
            return self.write_subclusters(req, offset, old, place).await;
        }
        match entry {
            Some(old) if within + req.len <= cluster_size && own_place(&geometry, old, cluster).is_none() => {
                // Another write on this core may give the cluster a place, which this one then has.
                let is_first = self.placing.borrow_mut().insert(cluster);
                if !is_first {
                    self.placed(cluster).await;
                    return Ok(0);
                }
                let placing = Placing { channel: self, cluster };
                let written = self.write_lent(req, offset, old).await;
                drop(placing);
                written
            }
            _ => self.write_locked(Piece { offset, len: req.len, req: Some(req) }).await,
        }
    }

    /// Waits until no write on this core gives a cluster of the disk its place.
    async fn placed(&self, cluster: u64) {
        poll_fn(|cx| {
            if !self.placing.borrow().contains(&cluster) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Writes bytes of one cluster of the disk, which has the entry `old`, to a cluster that this
    /// core has. The bytes of the old cluster cannot change while its entry does not.
    async fn write_lent(&self, req: &Request<'_>, offset: u64, old: Entry) -> Result<u64, IoError> {
        let cluster_size = self.content.places.geometry().cluster_size();
        let (cluster, within) = (offset / cluster_size, offset % cluster_size);
        // An entry that is damaged is an error of the write.
        self.content.places.place(old, offset)?;
        let (place, are_zero) = self.lent_cluster(cluster).await?;
        let change =
            Change { offset: place * cluster_size, count: 1, are_zero, are_kept: false, old: [old; 2] };
        let len = req.len;
        if let Err(error) = self.fill(&change, Piece { offset, len, req: Some(req) }).await {
            let take_back = move |view: Entries| async move {
                home(&view).take_back(&view, vec![place]).await;
                Ok(())
            };
            self.ask(take_back).await?;
            return Err(error);
        }
        let commit = Commit { cluster, old, target: Target::New(place), range: within..within + len };
        Ok(if self.commit(commit).await? { len } else { 0 })
    }

    /// Ends a write whose data is in its place: its entry is set, if it still is the same. Returns
    /// whether it was.
    async fn commit(&self, commit: Commit) -> Result<bool, IoError> {
        if self.batches.commit(commit.clone()).await? {
            return Ok(true);
        }
        self.ask(move |view| async move { home(&view).commit_alone(&view, commit).await }).await
    }

    /// Writes whole subclusters to their place, which no read uses yet. They had neither data nor
    /// zeroes when their cluster had the entry `old`. Other writes may use the place, too; the one
    /// whose bits are set first is done, and the others begin again. So do those during which a
    /// change of such a cluster has failed.
    async fn write_subclusters(
        &self,
        req: &Request<'_>,
        offset: u64,
        old: Entry,
        place: u64,
    ) -> Result<u64, IoError> {
        let cluster_size = self.content.places.geometry().cluster_size();
        let (cluster, within, len) = (offset / cluster_size, offset % cluster_size, req.len);
        self.check_inside(place, len)?;
        let target = Target::Kept { failed: self.metadata().failed.load(Ordering::Acquire) };
        let commit = Commit { cluster, old, target, range: within..within + len };
        if mutant::is(Mutant::SubclustersBeforeData) && !self.commit(commit.clone()).await? {
            return Ok(0);
        }
        // Data is durable together with its entry, not before.
        let data = req.with_flags(Flags::NONE);
        self.content.data.channel.submit(&data, place).await?;
        let is_set = mutant::is(Mutant::SubclustersBeforeData) || self.commit(commit).await?;
        Ok(if is_set { len } else { 0 })
    }

    /// A cluster in the file for new data, and whether it reads as zeroes. This core gets several
    /// at a time, the more the more it needs. `cluster`: of the disk, for which it is.
    async fn lent_cluster(&self, cluster: u64) -> Result<(u64, bool), IoError> {
        loop {
            if let Some(found) = self.lent.take() {
                return Ok(found);
            }
            let refill = async {
                if self.lent.is_empty() {
                    let count = self.lent.next_count();
                    let ask =
                        move |view: Entries| async move { home(&view).lend(&view, cluster, count).await };
                    self.lent.clusters.set(self.ask(ask).await?);
                }
                Ok(())
            };
            self.lent.refill.during(1, refill).await?;
        }
    }

    /// As [`LiveChannel::write_elsewhere`], with the entries locked meanwhile.
    pub(super) async fn write_locked(&self, piece: Piece<'_>) -> Result<u64, IoError> {
        let cluster_size = self.content.places.geometry().cluster_size();
        let (first, within) = (piece.offset / cluster_size, piece.offset % cluster_size);
        let (wanted, kind) = (piece.len, piece.kind());
        let begin =
            move |view: Entries| async move { home(&view).begin(&view, first, within, wanted, kind).await };
        let Some((number, change)) = self.ask(begin).await? else { return Ok(0) };
        let len = piece.len.min(change.count * cluster_size - within);
        match self.fill(&change, Piece { len, ..piece }).await {
            Ok(()) => {
                let commit = move |view: Entries| async move { home(&view).commit(&view, number).await };
                self.ask(commit).await?;
                Ok(len)
            }
            Err(error) => {
                let abort = move |view: Entries| async move {
                    home(&view).abort(&view, number).await;
                    Ok(())
                };
                self.ask(abort).await?;
                Err(error)
            }
        }
    }

    /// Writes the clusters of a change: the piece, and what the disk has before and behind it, as
    /// far as it must have a place there.
    async fn fill(&self, change: &Change, Piece { offset, len, req }: Piece<'_>) -> IoResult {
        let cluster_size = self.content.places.geometry().cluster_size();
        let (within, end) = (offset % cluster_size, change.count * cluster_size);
        let start = offset - within;
        let unit = self.content.places.geometry().unit();
        let touched = within / unit * unit..(within + len).next_multiple_of(unit);
        let Some(req) = req else {
            // All clusters have the entry of the first.
            return self.rest(change, change.old[0], start, &touched, 0..end).await;
        };
        // Data is durable together with its entry, not before.
        let data = req.part(0, len).with_flags(Flags::NONE);
        self.content.data.channel.submit(&data, change.offset + within).await?;
        self.rest(change, change.old[0], start, &touched, 0..within).await?;
        self.rest(change, change.old[1], start, &touched, within + len..end).await
    }

    /// Writes bytes of the clusters of a change, which begin at byte `start` of the disk. `old`:
    /// their entry. `touched`: the subclusters that are written in part.
    async fn rest(
        &self,
        change: &Change,
        old: Entry,
        start: u64,
        touched: &Range<u64>,
        bytes: Range<u64>,
    ) -> IoResult {
        // Bytes behind the end of the disk are zeroes.
        let disk_end = self.content.limits().capacity - start;
        let mut at = bytes.start;
        while at < bytes.end {
            let (place, run) = self.content.places.place(old, start + at)?;
            let part = at..(at + run).min(bytes.end);
            at = part.end;
            let part = match place {
                // It has its place.
                Place::Data(place) if place == change.offset + part.start => continue,
                Place::Data(_) if part.end <= touched.start && mutant::is(Mutant::SubclustersNotCopied) => {
                    continue;
                }
                Place::Data(_) | Place::Compressed(_) => part,
                Place::Zero(_) | Place::Unallocated => {
                    part.start.max(touched.start)..part.end.min(touched.end)
                }
            };
            let inside = part.end.min(disk_end).max(part.start);
            if part.start < inside {
                self.copy(change, place, start, part.start..inside).await?;
            }
            if inside < part.end && !change.are_zero && !self.content.places.geometry().has_data_file {
                self.zero(change, inside..part.end).await?;
            }
        }
        Ok(())
    }

    /// Writes bytes of the disk, which have this place, to the clusters of a change.
    async fn copy(&self, change: &Change, place: Place, start: u64, bytes: Range<u64>) -> IoResult {
        if self.content.is_zero(place, start + bytes.start) {
            return match change.are_zero || mutant::is(Mutant::RestNotZeroed) {
                true => Ok(()),
                false => self.zero(change, bytes).await,
            };
        }
        if mutant::is(Mutant::RestNotCopied) {
            return Ok(());
        }
        for at in bytes.clone().step_by(PART as usize) {
            let len = (bytes.end - at).min(PART);
            let buffer = self.buffers.take(len as usize).await;
            let (buffer, read) = buffer.transfer(self, Op::Read, Flags::NONE, start + at).await;
            read?;
            let target = &*self.content.data.channel;
            buffer.transfer(target, Op::Write, Flags::NONE, change.offset + at).await.1?;
        }
        Ok(())
    }

    /// Writes zeroes to the clusters of a change. Those that the disk had before keep their room.
    async fn zero(&self, change: &Change, bytes: Range<u64>) -> IoResult {
        let kept = if change.are_kept { Flags::NO_UNMAP } else { Flags::NONE };
        self.zero_file(change.offset + bytes.start, bytes.end - bytes.start, kept).await
    }

    /// Writes zeroes to the data's device.
    async fn zero_file(&self, offset: u64, len: u64, flags: Flags) -> IoResult {
        let target = &*self.content.data.channel;
        let zeroes = Request::write_zeroes(len, flags.with(Flags::NO_FALLBACK));
        let zeroed = target.submit(&zeroes, offset).await;
        if zeroed != Err(IoError::Unsupported) {
            return zeroed;
        }
        for at in (0..len).step_by(PART as usize) {
            let mut buffer = self.buffers.take((len - at).min(PART) as usize).await;
            buffer.as_mut_slice().fill(0);
            buffer.transfer(target, Op::Write, Flags::NONE, offset + at).await.1?;
        }
        Ok(())
    }

    /// Discards or zeroes: whole clusters and subclusters by their entries, the parts of others by
    /// writing zeroes.
    async fn clear(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let geometry = *self.content.places.geometry();
        let cluster_size = geometry.cluster_size();
        let end = offset + req.len;
        let how = match req.op {
            Op::Discard => Clear::Discard,
            _ if req.flags.contains(Flags::NO_UNMAP) => Clear::ZeroInPlace,
            _ => Clear::Zero,
        };
        // The bytes of the disk are those of a raw data file, whatever the entries say.
        if self.metadata().has_raw_data() {
            return self.clear_part(offset..end, how).await;
        }
        // The last cluster of a disk may be incomplete.
        let end_in = |unit: u64| match end == self.content.limits().capacity {
            true => end.next_multiple_of(unit),
            false => end / unit * unit,
        };
        // The end of the part in the first cluster, and the start of that in the last one.
        let has_parts = geometry.has_extended_l2 && how != Clear::Discard;
        let last = if has_parts { end / cluster_size * cluster_size } else { end_in(cluster_size) };
        let first = offset.next_multiple_of(cluster_size);
        if first > last {
            return self.clear_subclusters(offset..end, offset..end_in(geometry.unit()), how).await;
        }
        let stop = last.min(end);
        self.clear_subclusters(offset..first.min(end), offset..first, how).await?;
        if first < last {
            self.clear_entries(first..last, how).await?;
        }
        self.clear_subclusters(stop..end, stop..end_in(geometry.unit()), how).await
    }

    /// Clears whole clusters, or subclusters.
    async fn clear_entries(&self, range: Range<u64>, how: Clear) -> IoResult {
        let bytes = range.clone();
        self.ask(move |view| async move { home(&view).clear(&view, range, how).await }).await?;
        if self.metadata().data_file.is_none() || how == Clear::ZeroInPlace {
            return Ok(());
        }
        // The room in the data file has no other use. Only a loss of room if that fails.
        let end = bytes.end.min(self.content.places.data_end());
        let most = self.metadata().most_data_discard();
        let mut at = bytes.start;
        while at < end && most > 0 {
            let len = (end - at).min(most);
            let _ = self.content.data.channel.submit(&Request::discard(len), at).await;
            at += len;
        }
        Ok(())
    }

    /// Zeroes a part of a cluster, as far as possible by its entry. `known`: the part whose end is
    /// the end of a subcluster.
    async fn clear_subclusters(&self, range: Range<u64>, known: Range<u64>, how: Clear) -> IoResult {
        let geometry = *self.content.places.geometry();
        let whole = known.start.next_multiple_of(geometry.unit())..known.end;
        if how == Clear::Discard || !geometry.has_extended_l2 || whole.is_empty() {
            return self.clear_ends(range, how).await;
        }
        // A write to one end stores a compressed cluster without compression.
        let stop = whole.end.min(range.end);
        self.clear_ends(range.start..whole.start, how).await?;
        self.clear_ends(stop..range.end, how).await?;
        let run = self.content.places.run(whole.start, geometry.unit()).await?;
        match run.place {
            Place::Compressed(_) => self.clear_part(whole.start..stop, how).await,
            _ => self.clear_entries(whole, how).await,
        }
    }

    /// Zeroes a part of a cluster that has no whole subcluster.
    async fn clear_ends(&self, range: Range<u64>, how: Clear) -> IoResult {
        let unit = self.content.places.geometry().unit();
        let mut at = range.start;
        while at < range.end {
            let end = (at / unit + 1) * unit;
            let part = at..end.min(range.end);
            at = part.end;
            if !self.clear_around(&part, how).await? {
                self.clear_part(part, how).await?;
            }
        }
        Ok(())
    }

    /// Zeroes a part of a subcluster, of which the rest reads as zeroes, by its entry. Returns
    /// whether that was so. Only for one that the backing device has: its content cannot change
    /// while its entry does not.
    async fn clear_around(&self, part: &Range<u64>, how: Clear) -> Result<bool, IoError> {
        let geometry = *self.content.places.geometry();
        let cluster = part.start / geometry.cluster_size();
        if entry(self.view(), cluster).is_none() {
            fetch(self.view(), cluster).await?;
        }
        let Some(old) = entry(self.view(), cluster) else { return Ok(false) };
        let (place, _) = self.content.places.place(old, part.start)?;
        if how == Clear::Discard || place != Place::Unallocated || geometry.is_v2 || part.is_empty() {
            return Ok(false);
        }
        let start = part.start / geometry.unit() * geometry.unit();
        let unit = start..start + geometry.unit();
        let disk_end = unit.end.min(self.content.limits().capacity);
        for rest in [start..part.start, part.end..disk_end] {
            let report = StatusReport::new();
            self.content.status(&report, rest.start, rest.end - rest.start).await?;
            let is_zero = report.extents().all(|extent| extent.status.contains(Status::ZERO));
            if !is_zero || report.covered() < rest.end - rest.start {
                return Ok(false);
            }
        }
        self.ask(move |view| async move { home(&view).clear_if(&view, unit, old, how).await }).await
    }

    /// Zeroes bytes of the disk by writing them, unless they read as zeroes.
    async fn clear_part(&self, range: Range<u64>, how: Clear) -> IoResult {
        if how == Clear::Discard {
            return Ok(());
        }
        let mut at = range.start;
        while at < range.end {
            let rest = range.end - at;
            let run = self.content.places.run(at, rest).await?;
            let mut len = run.len.min(PART);
            match self.content.places.own_run(at, rest) {
                Some(own) if self.metadata().has_raw_data() => {
                    let (place, own_len) = own?;
                    len = own_len;
                    let kept = if how == Clear::ZeroInPlace { Flags::NO_UNMAP } else { Flags::NONE };
                    self.check_inside(place, len)?;
                    self.zero_file(place, len, kept).await?;
                }
                _ if self.content.is_zero(run.place, at) && !self.metadata().has_raw_data() => {}
                _ => {
                    let mut buffer = self.buffers.take(len as usize).await;
                    buffer.as_mut_slice().fill(0);
                    buffer.transfer(&Plain(self), Op::Write, Flags::NONE, at).await.1?;
                }
            }
            at += len;
        }
        Ok(())
    }

    async fn flush(&self) -> IoResult {
        if !self.metadata().is_dirty() {
            return self.content.data.channel.submit(&Request::flush(), 0).await;
        }
        self.ask(|view| async move { home(&view).flush(&view).await }).await
    }

    async fn status(&self, report: &StatusReport, offset: u64, len: u64) -> IoResult {
        let _running = self.view().begin();
        self.content.status(report, offset, len).await
    }

    /// A write that goes to its place without any change of the tables.
    #[inline]
    fn in_place<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> Option<IoFuture<'a>> {
        let is_plain = req.op == Op::Write && !(req.is_fua() && self.metadata().is_dirty());
        if !is_plain || self.metadata().is_corrupt() {
            return None;
        }
        let running = self.view().try_begin_change()?;
        let (place, len) = self.content.places.own_run(offset, req.len)?.ok()?;
        if len < req.len || self.check_inside(place, len).is_err() {
            return None;
        }
        Some(IoFuture::new(async move {
            let _running = running;
            self.content.data.channel.submit(req, place).await
        }))
    }
}

/// The writes of a request that has begun already.
struct Plain<'c>(&'c LiveChannel);

impl Channel for Plain<'_> {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(self.0.write(req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

impl Channel for LiveChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.content.limits().check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        match req.op {
            Op::Flush => IoFuture::new(self.flush()),
            _ if req.len == 0 => IoFuture::ready(Ok(())),
            Op::Read => {
                let running = self.view().begin();
                if let Some(Ok(run)) = self.content.places.try_run(offset, req.len)
                    && let Some(at) = self.content.in_place(run, req)
                {
                    return IoFuture::new(async move {
                        let _running = running;
                        self.content.data.channel.submit(req, at).await
                    });
                }
                drop(running);
                IoFuture::new(self.read(req, offset))
            }
            _ => {
                if let Some(bitmaps) = &self.metadata().bitmaps {
                    bitmaps.mark(req, offset);
                }
                match self.in_place(req, offset) {
                    Some(future) => future,
                    None if self.metadata().is_corrupt() => IoFuture::ready(Err(IoError::Corrupt)),
                    None => IoFuture::new(self.modify(req, offset)),
                }
            }
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match self.content.limits().check_range(offset, len) {
            Ok(()) => IoFuture::new(self.status(report, offset, len)),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}
