//! An image that is read and written, on any number of cores.
//!
//! ```text
//!   a core: LiveChannel ─► entries (mapping::View) ─┬─ own data     ─► the same window to the file
//!                                                   ├─ other reads  ─► content
//!                                                   └─ other writes ─► home: changes, flushes
//!   home, a thread of the image: refcounts, L1 and L2 tables
//! ```
//!
//! Requests to clusters that the disk alone refers to need neither lock nor message. All others
//! change metadata, and one core does that: the [`home`] of the image.
//!
//! | module | purpose |
//! |---|---|
//! | [`channel`] | the requests of a core |
//! | [`batch`] | entries that a core has the home set together |
//! | [`home`] | changes of metadata, in an order that survives a crash |
//! | [`clear`] | discards and writes of zeroes |
//! | [`marks`] | fields of the header that change |
//! | [`bitmaps`] | dirty bitmaps: marks of writes |
//! | [`metadata`] | the properties that all cores know |
//! | [`refcounts`] | which clusters are free |
//! | [`restart`] | entries that outlive a kill of the process |
//! | [`background`] | work that no request waits for |
//! | [`session`] | the mark of a writer, and what an earlier one has left |
//! | [`leaks`] | frees what a crash has left |
//! | [`stream`] | data of the backing file, copied while the image is in use |
//! | [`commit`] | data of the image, written to the backing file while the image is in use |
//! | [`snapshots`] | internal snapshots, made and deleted while the image is in use |
//! | [`file`](mod@file) | reads and writes of metadata |

mod background;
mod batch;
mod bitmaps;
mod channel;
mod clear;
mod commit;
pub(crate) mod file;
mod home;
mod leaks;
mod marks;
mod metadata;
mod refcounts;
mod restart;
mod session;
mod snapshots;
mod stream;

use crate::below::{Others, check_others, each_mapped, limits};
use crate::bits::Loaded;
use crate::content::Content;
use crate::entry::Geometry;
use crate::error::{Error, Problem};
use crate::header::Header;
use crate::image::Image;
use crate::mutant::{self, Mutant};
use crate::offline::repair::{Level, Repaired, repair};
use crate::snapshot::Snapshot;
use bitmaps::LiveBitmaps;
use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoError, IoResult, KernelBacking, Limits, MemoryRegion,
};
use channel::{Live, LiveChannel};
pub use commit::CommitChannel;
use home::{Entries, Home, home};
use mapping::{Config, Table};
use metadata::{BackingJob, BackingState, Metadata};
use reactor::{CoreConfig, CoreRef, Cores, yield_now};
pub use restart::{RESTART_RECORDS, RestartLog};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
pub use stream::StreamChannel;

/// Turns of the home core that the drop of an image waits for its view.
const MOST_TURNS: u32 = 100;
/// Longest discard, and longest write of zeroes.
const MOST_CLEARED: u64 = 1 << 40;

/// A qcow2 image as a device that is read and written. Its drop writes all metadata, and waits for
/// that.
pub struct LiveImage {
    name: String,
    limits: Limits,
    image: Arc<dyn Device>,
    others: Others,
    /// `None` after the image was closed.
    table: Option<Arc<Table<Metadata>>>,
    home: CoreRef,
    /// The image's own thread, if it has one. Ends after everything else.
    _thread: Option<Cores>,
    /// Bytes that the file had when it was opened.
    file_bytes: u64,
    bitmaps: Vec<Arc<Loaded>>,
    backing: Arc<BackingState>,
    cluster_size: u64,
}

impl LiveImage {
    /// The disk of `image`, with a thread of its own for metadata. Keeps `cache_bytes` of tables in
    /// memory. With `log` completed writes survive a kill of the process, if the image has version
    /// 3: those of an earlier process are in the image before this returns. Must not be called on a
    /// core.
    ///
    /// # Errors
    /// When the image has a property that writes do not support, `others` or `log` does not fit it,
    /// or no thread can be started.
    pub fn open(
        image: Image,
        others: Others,
        cache_bytes: u64,
        log: Option<RestartLog>,
    ) -> Result<LiveImage, Error> {
        let fail = |text: String| Error::new(&image.name, Problem::Refused(text));
        let thread = Cores::start(&[CoreConfig::default()]);
        let thread = thread.map_err(|error| fail(format!("cannot start a thread: {error}")))?;
        let home = thread.get(0);
        LiveImage::with(image, others, cache_bytes, log, home, Some(thread))
    }

    /// As [`LiveImage::open`], with metadata on the core `home`, which must not end before the drop
    /// of the image.
    ///
    /// # Errors
    /// As [`LiveImage::open`].
    pub fn open_on(
        home: CoreRef,
        image: Image,
        others: Others,
        cache_bytes: u64,
        log: Option<RestartLog>,
    ) -> Result<LiveImage, Error> {
        LiveImage::with(image, others, cache_bytes, log, home, None)
    }

    fn with(
        image: Image,
        others: Others,
        cache_bytes: u64,
        log: Option<RestartLog>,
        home: CoreRef,
        thread: Option<Cores>,
    ) -> Result<LiveImage, Error> {
        let name = format!("qcow2({})", image.name);
        let image_name = image.name.clone();
        let fail = |text: String| Error::new(&image_name, Problem::Refused(text));
        check_can_write(&image, log.as_ref()).map_err(fail)?;
        check_snapshots(&image).map_err(fail)?;
        check_others(&image, &others).map_err(fail)?;
        let limits = writable(limits(&image, &others).map_err(fail)?, &image);
        let (device, file_bytes) = (image.device.clone(), image.device.limits().capacity);
        check_data_file(&image, &others).map_err(fail)?;
        let read = home.block_on(move |_| async move {
            let bitmaps = LiveBitmaps::open(&image).await;
            (image, bitmaps)
        });
        let (image, bitmaps) = read.map_err(|_| fail("the core for metadata has ended".into()))?;
        let bitmaps = bitmaps.map_err(|problem| Error::new(&image.name, problem))?;
        let loaded = bitmaps.as_ref().map(|bitmaps| bitmaps.loaded.clone()).unwrap_or_default();
        let backing = Arc::new(BackingState::new(others.backing.is_some()));
        let metadata = metadata_of(image, &others, limits.capacity, backing.clone(), bitmaps);
        let cluster_size = metadata.geometry.cluster_size();
        let clusters = metadata.header.size.div_ceil(cluster_size);
        let entries = clusters * metadata.geometry.entry_words();
        let table = Table::open(metadata, std::slice::from_ref(&home), Config { entries, cache_bytes });
        let table = Arc::new(table.map_err(|error| fail(error.to_string()))?);
        let opening = table.clone();
        let opened = home.block_on(move |_| async move {
            let view = opening.view().map_err(|error| error.to_string())?;
            Home::open(&view, log).await.map_err(|error| match error {
                IoError::Corrupt => "the metadata is damaged, or the file was cut short".to_owned(),
                _ => format!("cannot read the metadata: {error}"),
            })
        });
        opened.unwrap_or_else(|_| Err("the core for metadata has ended".into())).map_err(fail)?;
        let (table, bitmaps) = (Some(table), loaded);
        Ok(LiveImage {
            name,
            limits,
            image: device,
            others,
            table,
            home,
            _thread: thread,
            file_bytes,
            bitmaps,
            backing,
            cluster_size,
        })
    }

    /// The internal snapshots. Must not be called on a core.
    ///
    /// # Errors
    /// When their table cannot be read.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, Error> {
        self.at_home(|home, view| async move { home.list_snapshots(&view).await })
    }

    /// Makes an internal snapshot of the disk as it is at one moment of the call: it has all writes
    /// that completed before, and no write that begins after. `now` is the time since 1970. Returns
    /// its identifier; the snapshot is durable then. Requests that change the disk wait meanwhile.
    /// Must not be called on a core.
    ///
    /// # Errors
    /// When the image cannot have it: nothing has changed. The device's.
    pub fn create_snapshot(&self, name: &str, now: Duration) -> Result<String, Error> {
        let name = name.to_owned();
        self.at_home(move |home, view| async move { home.create_snapshot(&view, &name, now).await })
    }

    /// Deletes an internal snapshot, which is named by identifier or name. Requests that change the
    /// disk wait meanwhile. Must not be called on a core.
    ///
    /// # Errors
    /// When there is no such snapshot, or the metadata has errors: nothing has changed. The
    /// device's.
    pub fn delete_snapshot(&self, wanted: &str) -> Result<(), Error> {
        let wanted = wanted.to_owned();
        self.at_home(move |home, view| async move { home.delete_snapshot(&view, &wanted).await })
    }

    /// Whether clusters without a place are read from a backing file.
    pub fn has_backing(&self) -> bool {
        self.backing.is_used()
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.cluster_size
    }

    /// Begins to copy the backing file's data. Must not be called on a core.
    ///
    /// # Errors
    /// When there is no backing file, the image has internal snapshots, or a stream or commit is in
    /// progress.
    pub fn begin_stream(self: &Arc<Self>) -> Result<Stream, Error> {
        Ok(Stream(self.begin_job(BackingJob::Stream)?))
    }

    /// Begins to write the image's data to its backing file. Must not be called on a core.
    ///
    /// # Errors
    /// As [`LiveImage::begin_stream`]; when the image has dirty bitmaps.
    pub fn begin_commit(self: &Arc<Self>) -> Result<Commit, Error> {
        Ok(Commit(self.begin_job(BackingJob::Commit)?))
    }

    fn begin_job(self: &Arc<Self>, job: BackingJob) -> Result<Arc<Job>, Error> {
        self.at_home(move |home, view| async move { home.begin_job(&view, job).await })?;
        Ok(Arc::new(Job(self.clone())))
    }

    /// Runs `work` on the home core.
    fn at_home<R, W>(&self, work: impl FnOnce(Rc<Home>, Entries) -> W + Send + 'static) -> Result<R, Error>
    where
        R: Send + 'static,
        W: Future<Output = Result<R, Problem>> + 'static,
    {
        let fail = |problem| Error::new(self.image.name(), problem);
        let closed = || Problem::Refused("the image is closed".into());
        let table = self.table.clone().ok_or_else(|| fail(closed()))?;
        let done = self.home.block_on(move |_| async move {
            let view = table.view().map_err(|error| Problem::Refused(error.to_string()))?;
            work(home(&view), view).await
        });
        done.unwrap_or_else(|_| Err(closed())).map_err(fail)
    }

    fn open_live(&self) -> Result<LiveChannel, DeviceError> {
        let closed = || DeviceError::new(&self.name, "the image is closed");
        let view = self.table.as_ref().ok_or_else(closed)?.view()?;
        let compression = view.format().header.compression;
        let content =
            Content::open(self.limits.clone(), compression, &*self.image, &self.others, |_| Live(view));
        Ok(LiveChannel::new(content?))
    }

    fn children(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        let others = [&self.others.backing, &self.others.data_file];
        [&self.image].into_iter().chain(others.into_iter().flatten())
    }
}

/// A copy of the backing file's data into an image that is in use. There is one at a time. The drop
/// of its last clone, which must not happen on a core, ends it; data that was copied so far stays
/// in the image.
///
/// ```no_run
/// # use std::{error::Error, sync::Arc};
/// # type Done = Result<(), Box<dyn Error + Send + Sync>>;
/// # fn stream(image: Arc<qcow2::LiveImage>, core: reactor::CoreRef) -> Done {
/// let stream = image.begin_stream()?;
/// let copy = stream.clone();
/// core.block_on(move |_| async move {
///     let channel = copy.open_channel()?;
///     while channel.copy(8 << 20).await? > 0 {}
///     Done::Ok(())
/// })??;
/// stream.finish()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Stream(Arc<Job>);

/// A commit of an image that is in use to its backing file: it says what the image has. There is
/// one at a time. The drop of its last clone, which must not happen on a core, ends it.
#[derive(Clone)]
pub struct Commit(Arc<Job>);

/// A job on an image and its backing file, which ends with the drop.
struct Job(Arc<LiveImage>);

impl Drop for Job {
    fn drop(&mut self) {
        self.0.backing.set_job(None);
    }
}

impl Commit {
    /// Opens the commit on the calling core. The backing file has clusters of `cluster_size` bytes;
    /// 1 if it is raw.
    ///
    /// # Errors
    /// When a channel below is refused.
    pub fn open_channel(&self, cluster_size: u64) -> Result<CommitChannel, DeviceError> {
        Ok(CommitChannel::new(self.0.0.open_live()?, cluster_size))
    }
}

impl Stream {
    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.0.0.limits.capacity
    }

    /// Opens the stream on the calling core. One channel copies at a time.
    ///
    /// # Errors
    /// When a channel below is refused.
    pub fn open_channel(&self) -> Result<StreamChannel, DeviceError> {
        Ok(StreamChannel::new(self.0.0.open_live()?, self.0.0.backing.clone()))
    }

    /// Lets the image have no backing file, durably. Nothing reads the backing device after this.
    /// Must not be called on a core.
    ///
    /// # Errors
    /// When not all of it was copied; the device's. The image may then still name its backing file.
    pub fn finish(self) -> Result<(), Error> {
        self.0.0.at_home(|home, view| async move { home.end_stream(&view).await })
    }
}

/// Repairs the image on `device`, on the calling core, if its last writer did not close it and had
/// left refcounts or COPIED bits behind. An image with writes that only `log` has is left as it is:
/// [`LiveImage::open`] restores those. Returns what was repaired.
///
/// # Errors
/// As [`crate::repair`]; when the log cannot be read.
pub async fn recover(device: &Arc<dyn Device>, log: Option<&RestartLog>) -> Result<Option<Repaired>, Error> {
    let header = Image::open_header(&**device).await?;
    if !header.is_dirty() || header.is_corrupt() {
        return Ok(None);
    }
    let has_writes = has_writes(&header, log).map_err(|why| Error::new(device.name(), Problem::Refused(why)));
    if has_writes? && !mutant::is(Mutant::RepairBeforeRestore) {
        return Ok(None);
    }
    repair(device, Level::All).await.map(Some)
}

/// Whether a log has writes that the image with this header lacks.
fn has_writes(header: &Header, log: Option<&RestartLog>) -> Result<bool, String> {
    let clusters = log.map(|log| log.clusters_of(header)).transpose();
    let clusters = clusters.map_err(|error| format!("cannot read the restart log: {error}"))?;
    Ok(clusters.is_some_and(|clusters| clusters > 0))
}

/// Refuses an image with a property that writes do not support.
fn check_can_write(image: &Image, log: Option<&RestartLog>) -> Result<(), String> {
    let header = &image.header;
    // Also where nothing depends on the answer: a log that cannot be read is found now, and not by
    // the first write.
    let has_writes = has_writes(header, log)?;
    let is_dirty = header.is_dirty() && !has_writes;
    let refusals = [
        (image.device.limits().read_only, "the file is open for reading only".to_owned()),
        (header.is_corrupt(), "marked as corrupt (freestone image repair ends that)".into()),
        (is_dirty, "marked as dirty (freestone image repair ends that)".into()),
        (image.size != header.size || image.is_snapshot, "a snapshot is only read".into()),
    ];
    match refusals.into_iter().find(|(is_so, _)| *is_so) {
        Some((_, why)) => Err(format!("cannot be written: {why} (readonly=on only reads)")),
        None => Ok(()),
    }
}

/// Lets an external data file have all bytes of the disk: each has the same place there.
fn check_data_file(image: &Image, others: &Others) -> Result<(), String> {
    let Some(file) = &others.data_file else { return Ok(()) };
    let (name, limits) = (file.name(), file.limits());
    if limits.read_only {
        return Err(format!("cannot be written: the data file {name} is open for reading only"));
    }
    if limits.capacity >= image.size {
        return Ok(());
    }
    let cannot =
        |error| format!("data file {name} has {} bytes, not {}: {error}", limits.capacity, image.size);
    file.resize(image.size).map(drop).map_err(cannot)
}

/// Refuses L1 tables of snapshots that are not in the file, or overlap: they would need much time
/// and memory.
fn check_snapshots(image: &Image) -> Result<(), String> {
    let file = image.device.limits().capacity;
    let mut sum = 0u64;
    for Snapshot { name, l1_offset, l1_entries, .. } in &image.snapshots {
        let bytes = u64::from(*l1_entries) * 8;
        sum = sum.saturating_add(bytes);
        if l1_offset.checked_add(bytes).is_none_or(|end| end > file) || sum > file {
            return Err(format!(
                "snapshot {name:?}: L1 table at byte {l1_offset}, {bytes} bytes: not in the file"
            ));
        }
    }
    Ok(())
}

/// The limits of a disk that is written.
fn writable(limits: Limits, image: &Image) -> Limits {
    let cluster_size = image.header.cluster_size() as u32;
    let is_v2 = image.header.version == 2;
    Limits {
        read_only: false,
        volatile_cache: true,
        native_fua: false,
        discard_alignment: cluster_size,
        // Version 2 has no entry that hides a backing file's data with zeroes.
        max_discard: if is_v2 && image.header.backing_file.is_some() { 0 } else { MOST_CLEARED },
        max_write_zeroes: if is_v2 { 0 } else { MOST_CLEARED },
        ..limits
    }
}

fn metadata_of(
    image: Image,
    others: &Others,
    disk_bytes: u64,
    backing: Arc<BackingState>,
    bitmaps: Option<LiveBitmaps>,
) -> Metadata {
    let Image { device, header, snapshots, snapshot_bytes, l1, .. } = image;
    let mut fixed = vec![
        (0, header.cluster_size()),
        (header.l1_offset, u64::from(header.l1_entries) * 8),
        (header.snapshots_offset, snapshot_bytes),
    ];
    fixed.extend(snapshots.iter().map(|snapshot| (snapshot.l1_offset, u64::from(snapshot.l1_entries) * 8)));
    fixed.extend(bitmaps.iter().flat_map(|bitmaps| &bitmaps.places));
    fixed.retain(|(offset, bytes)| *bytes > 0 && offset.checked_add(*bytes).is_some());
    let limits = device.limits();
    Metadata {
        geometry: Geometry::of(&header),
        backing,
        disk_bytes,
        data_file: others.data_file.clone(),
        data_bytes: others.data_file.as_ref().map(|file| file.limits().capacity),
        block_size: u64::from(limits.block_size),
        l1: l1.iter().map(|entry| AtomicU64::new(*entry)).collect(),
        fixed,
        bitmaps,
        capacity: Arc::new(AtomicU64::new(limits.capacity)),
        set: AtomicU64::new(0),
        settled: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        flushed: AtomicU64::new(0),
        is_corrupt: AtomicBool::new(false),
        image: device,
        header,
    }
}

impl Drop for LiveImage {
    fn drop(&mut self) {
        let Some(table) = self.table.take() else { return };
        let least = self.file_bytes;
        let closed = self.home.block_on(move |_| async move {
            let view = table.view().map(|view| Rc::downgrade(&view));
            let result = close(&table, least).await;
            drop(table);
            // The view ends in a turn of its own, and with it the file is closed. A grace period
            // that waits for this thread can hold it longer.
            for _ in 0..MOST_TURNS {
                if view.as_ref().is_ok_and(|view| view.strong_count() > 0) {
                    yield_now().await;
                }
            }
            result
        });
        match closed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(image = self.name, %error, "the last metadata of an image was not written");
            }
            Err(_) => tracing::error!(image = self.name, "an image was not closed: its core has ended"),
        }
    }
}

async fn close(table: &Table<Metadata>, least: u64) -> IoResult {
    let Ok(view) = table.view() else { return Ok(()) };
    // An image that could not be opened has no home.
    match view.local().get().cloned() {
        Some(home) => home.close(&view, least).await,
        None => Ok(()),
    }
}

impl Device for LiveImage {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(self.open_live()?))
    }

    /// The size of the disk is in the image, which nothing else changes.
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        each_mapped(self.children(), region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.children().for_each(|child| child.unmap_region(region));
    }

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        self.bitmaps.iter().map(|bitmap| bitmap.clone() as _).collect()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(&self.name))
    }
}
