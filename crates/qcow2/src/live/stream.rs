//! Copies the data of the backing file into an image that is in use. The image then needs no
//! backing file.
//!
//! ```text
//!   clusters without a place ─► locked ─► new clusters ◄─ data of the backing device ─► entries
//!   all done ─► hold, grace, flush ─► header without the backing file ─► release ─► grace
//! ```
//!
//! Data moves under the locks of its entries, as in a write that keeps all bytes: the disk has the
//! same content at each moment. Parts of the backing device that read as zeroes are not copied:
//! clusters without a place read as zeroes, too, once there is no backing file. A crash leaves the
//! name of the backing file, and the data that was copied so far.
//!
//! An internal snapshot reads the backing file wherever it has no cluster. So an image with
//! snapshots keeps its backing file.

use super::channel::{LiveChannel, Piece};
use super::clear::Clear;
use super::home::{Entries, Home, entry, home};
use super::metadata::{BackingJob, BackingState, Metadata};
use super::snapshots::{read_error, write_error};
use crate::content::Places;
use crate::entry::Place;
use crate::error::Problem;
use crate::header::{at, be32};
use crate::mutant::{self, Mutant};
use crate::offline::backing::{in_two_writes, new_cluster};
use block::{Flags, IoError, IoFuture, Status, StatusReport, join_all};
use reactor::yield_now;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Parts that are copied at a time.
const DEPTH: u64 = 4;

/// A [`Stream`](super::Stream) on one core.
pub struct StreamChannel {
    channel: LiveChannel,
    backing: Arc<BackingState>,
}

impl StreamChannel {
    pub(super) fn new(channel: LiveChannel, backing: Arc<BackingState>) -> StreamChannel {
        StreamChannel { channel, backing }
    }

    /// Copies the next `bytes` bytes of the disk, rounded up to whole clusters, or the rest.
    /// Returns how many are left.
    ///
    /// # Errors
    /// As a write: the next call continues there.
    pub async fn copy(&self, bytes: u64) -> Result<u64, IoError> {
        let (size, cluster_size) = self.channel.size();
        let part = (bytes / DEPTH).max(1).next_multiple_of(cluster_size);
        let start = self.backing.copied.load(Ordering::Relaxed);
        let end = start.saturating_add(DEPTH * part).min(size);
        let parts = (start..end).step_by(part as usize).map(|at| at..end.min(at + part));
        join_all(parts.map(|part| IoFuture::new(self.channel.populate(part, Zeroes::Skipped)))).await?;
        // A part without data has not waited.
        yield_now().await;
        self.backing.copied.store(end, Ordering::Relaxed);
        Ok(size - end)
    }
}

/// Parts without a place that read as zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeroes {
    /// Have no place after the copy.
    Skipped,
    /// Are zeroes in the image after the copy.
    Placed,
}

impl LiveChannel {
    /// Copies the data of the backing device into parts of `range` that have no place. The range
    /// begins with a cluster or subcluster, and ends with one or with the disk.
    pub(super) async fn populate(&self, range: Range<u64>, zeroes: Zeroes) -> Result<(), IoError> {
        let mut at = range.start;
        while at < range.end {
            let rest = range.end - at;
            at += self.change(async || self.populate_next(at, rest, zeroes).await).await?;
        }
        Ok(())
    }

    /// As [`LiveChannel::populate`], for the first of `rest` bytes. Returns how many are done.
    async fn populate_next(&self, at: u64, rest: u64, zeroes: Zeroes) -> Result<u64, IoError> {
        let run = self.content.places.run(at, rest).await?;
        if run.place != Place::Unallocated {
            return Ok(run.len);
        }
        let report = StatusReport::new();
        self.content.status(&report, at, run.len).await?;
        let first = report.extents().next();
        let len = first.map_or(run.len, |extent| extent.len);
        if first.is_some_and(|extent| extent.status.contains(Status::ZERO)) {
            if zeroes == Zeroes::Skipped {
                return Ok(len);
            }
            if let Some(done) = self.place_zeroes(at, len).await? {
                return Ok(done.min(rest));
            }
        }
        // Whole clusters, or subclusters: zeroes before and behind the data are copied with it.
        let unit = self.content.places.geometry().unit();
        let start = at / unit * unit;
        let end = (at + len).next_multiple_of(unit).min(self.content.limits().capacity);
        let piece = Piece { offset: start, len: end - start, req: None };
        // 0 if an entry has changed since it was looked at.
        let done = self.write_locked(piece).await?;
        Ok((start + done).saturating_sub(at).min(rest))
    }

    /// Lets the first of `len` bytes, which have no place and read as zeroes, be zeroes by their
    /// entry. Returns how many: 0 if the entry was another one meanwhile, and `None` if these bytes
    /// are not the whole of a subcluster, or the version has no zeroes.
    async fn place_zeroes(&self, at: u64, len: u64) -> Result<Option<u64>, IoError> {
        let geometry = *self.content.places.geometry();
        let (cluster_size, unit) = (geometry.cluster_size(), geometry.unit());
        let is_to_the_end = at + len == self.content.limits().capacity;
        let end = if is_to_the_end { (at + len).next_multiple_of(unit) } else { (at + len) / unit * unit };
        let zeroes = at..end.min((at / cluster_size + 1) * cluster_size);
        if geometry.is_v2 || !at.is_multiple_of(unit) || zeroes.is_empty() {
            return Ok(None);
        }
        let Some(old) = entry(self.view(), at / cluster_size) else { return Ok(Some(0)) };
        let (place, run) = self.content.places.place(old, at)?;
        if place != Place::Unallocated || run < zeroes.end - at {
            return Ok(Some(0));
        }
        let bytes = zeroes.clone();
        let clear =
            move |view: Entries| async move { home(&view).clear_if(&view, bytes, old, Clear::Zero).await };
        Ok(Some(if self.ask(clear).await? { zeroes.end - at } else { 0 }))
    }
}

impl Home {
    /// Begins a job on the image and its backing file.
    pub(super) async fn begin_job(&self, view: &Entries, job: BackingJob) -> Result<(), Problem> {
        let refused = |text: String| Err(Problem::Refused(text));
        let begin = async {
            let Metadata { backing, header, disk_bytes, bitmaps, .. } = view.format();
            if !backing.is_used() {
                return refused("the image has no backing file".into());
            }
            self.header_without_snapshots(view).await?;
            if header.size != *disk_bytes {
                // Requests do not reach them.
                let (size, behind) = (header.size, header.size - disk_bytes);
                return refused(format!("size {size}: the last {behind} bytes are no whole block"));
            }
            if job == BackingJob::Commit && bitmaps.is_some() {
                return refused("the image has dirty bitmaps, which the backing file would lack".into());
            }
            match backing.job() {
                None => {}
                Some(BackingJob::Stream) => {
                    return refused("the data of the backing file is copied at the moment".into());
                }
                Some(BackingJob::Commit) => {
                    return refused("the backing file gets the data of the image at the moment".into());
                }
            }
            backing.copied.store(0, Ordering::Relaxed);
            backing.set_job(Some(job));
            Ok(())
        };
        self.holding.during(1, begin).await
    }

    pub(super) async fn end_stream(&self, view: &Entries) -> Result<(), Problem> {
        let backing = &view.format().backing;
        let forget = async {
            let (copied, size) = (backing.copied.load(Ordering::Relaxed), view.format().disk_bytes);
            if copied < size {
                let text = format!("{copied} of {size} bytes of the backing file were copied");
                return Err(Problem::Refused(text));
            }
            self.refcounts.with_header(self.forget_backing(view)).await?;
            backing.is_used.store(false, Ordering::Release);
            Ok(())
        };
        self.while_held(view, forget).await?;
        // Requests that began before may read it.
        if !mutant::is(Mutant::StreamWithoutGrace) {
            view.grace().await;
        }
        Ok(())
    }

    /// The first cluster of the file, whose header must name no snapshot. It may name one whose
    /// creation is thought to have failed.
    async fn header_without_snapshots(&self, view: &Entries) -> Result<Vec<u8>, Problem> {
        check_may_stream(self.snapshots.get().count)?;
        let cluster_size = view.format().header.cluster_size();
        let header = self.file.reader.read_padded(0, cluster_size).await.map_err(read_error)?;
        check_may_stream(be32(&header, at::SNAPSHOTS))?;
        Ok(header)
    }

    /// Writes the header without the name and the format of the backing file. Its first sector is
    /// replaced at once, after what is behind it.
    async fn forget_backing(&self, view: &Entries) -> Result<(), Problem> {
        let header = &view.format().header;
        let old = self.header_without_snapshots(view).await?;
        let new = new_cluster(&old, header, None)?;
        let (behind, sector) = in_two_writes(&old, &new);
        if let Some((at, bytes)) = behind {
            self.file.patch(at, bytes, Flags::FUA).await.map_err(write_error)?;
        }
        self.file.patch(0, sector, Flags::FUA).await.map_err(write_error)
    }
}

/// Refuses to remove the backing file of an image with so many internal snapshots.
fn check_may_stream(snapshots: u32) -> Result<(), Problem> {
    match snapshots {
        0 => Ok(()),
        _ if mutant::is(Mutant::StreamUnderSnapshots) => Ok(()),
        count => Err(Problem::Refused(format!("{count} internal snapshots need the backing file"))),
    }
}
