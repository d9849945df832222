//! Commands that change an image which nothing else has open.
//!
//! ```text
//!   references are counted ─► refcounts rise ─► new tables behind the end ─► one write of the header
//!                                                        refcounts fall, COPIED bits are set ◄─┘
//! ```
//!
//! The write of the header's first sector makes a change count. Everything before it is durable
//! then, and leaves the old tables as they were. Everything after it is the [`repair`] of leaks and
//! COPIED bits, which a later repair can do as well.
//!
//! | module | purpose |
//! |---|---|
//! | [`repair`](mod@repair) | makes refcounts and COPIED bits right |
//! | [`area`] | new clusters behind the end, with their refcounts |
//! | [`snapshots`] | makes, applies and deletes internal snapshots |
//! | [`bitmaps`] | adds, removes and changes dirty bitmaps |
//! | [`resize`](mod@resize) | another size of the disk |
//! | [`backing`] | another name of the backing file |
//! | [`rebase`](mod@rebase) | another backing file, over which the disk has the same bytes |
//! | [`commit`](mod@commit) | moves what the image has to its backing file |
//! | [`disk`] | the bytes of a disk |

pub(crate) mod area;
pub mod backing;
pub mod bitmaps;
pub mod commit;
mod disk;
pub mod rebase;
pub mod repair;
pub mod resize;
pub mod snapshots;

use crate::check::{Check, Report};
use crate::error::Problem;
use crate::header::{Header, at};
use crate::image::{open_reader, read_header};
use crate::live::file::File;
use crate::reader::Reader;
use block::{Device, Flags};
use repair::{Level, repair_image};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Unit of the size of a disk in bytes.
const SECTOR: u64 = 512;

/// An image that a command changes.
pub(crate) struct Offline {
    file: File,
    /// The header as it stands in the file.
    header: Header,
    /// Whether the image was prepared for writes.
    has_begun: bool,
}

impl Offline {
    /// Reads the header. Changes nothing.
    ///
    /// # Errors
    /// When it is invalid or cannot be read, or the file is open for reading only.
    pub(crate) async fn open(device: &Arc<dyn Device>) -> Result<Offline, Problem> {
        let limits = device.limits();
        if limits.read_only {
            return Err(Problem::Refused("the file is open for reading only".into()));
        }
        let header = read_header(&open_reader(&**device)?).await?;
        let capacity = Arc::new(AtomicU64::new(limits.capacity));
        let file = File::open(device, header.cluster_size(), &capacity);
        let file = file.map_err(|error| Problem::Refused(error.to_string()))?;
        Ok(Offline { file, header, has_begun: false })
    }

    /// Opens an image whose metadata is to change. One that is dirty is repaired, and leaks are
    /// freed. Also returns what it refers to.
    ///
    /// # Errors
    /// When the image has errors, or a table in a cluster with other uses, which a repair could not
    /// change; as [`Offline::open`].
    pub(crate) async fn open_clean(device: &Arc<dyn Device>) -> Result<(Offline, Check), Problem> {
        let mut image = Offline::open(device).await?;
        image.check_not_corrupt()?;
        let errors = |found: &Check| found.report.corruptions + found.report.check_errors;
        let mut found = image.check().await?;
        if image.header.is_dirty() || errors(&found) == 0 && found.report.leaks > 0 {
            found = repair_image(&mut image, Level::All).await?.1;
        }
        let count = errors(&found) + found.report.leaks;
        if count > 0 {
            let text = format!("{count} errors in the metadata (freestone image repair may end that)");
            return Err(Problem::Refused(text));
        }
        if let Some((table, offset)) = found.crossed_table() {
            return Err(Problem::Refused(format!("{table} at byte {offset}: its cluster has other uses")));
        }
        Ok((image, found))
    }

    /// Refuses an image that says that it is damaged.
    fn check_not_corrupt(&self) -> Result<(), Problem> {
        let text = "marked as corrupt (freestone image repair ends that)";
        if self.header.is_corrupt() { Err(Problem::Refused(text.into())) } else { Ok(()) }
    }

    /// Refuses an image with a property that a change of its disk does not keep. `change`: the
    /// command as a participle.
    fn check_plain(&self, change: &str) -> Result<(), Problem> {
        self.check_not_corrupt()?;
        let bitmaps = self.header.bitmaps.map_or(0, |bitmaps| bitmaps.count);
        let refusals = [
            (self.header.has_data_file(), format!("images with an external data file are not {change} yet")),
            (bitmaps > 0, format!("{bitmaps} dirty bitmaps, which are not {change} yet")),
        ];
        refuse_first(change, refusals)
    }

    fn reader(&self) -> &Reader {
        &self.file.reader
    }

    /// Checks everything.
    async fn check(&self) -> Result<Check, Problem> {
        Check::run(self.reader(), &self.header).await
    }

    /// Prepares the first write: the file ends with a whole cluster, and features are cleared that
    /// writers must know.
    async fn begin(&mut self) -> Result<(), Problem> {
        if self.has_begun {
            return Ok(());
        }
        self.has_begun = true;
        self.file.complete_last_cluster();
        let known = self.header.known_autoclear();
        if known != self.header.autoclear {
            self.write_header(at::AUTOCLEAR, &known.to_be_bytes()).await?;
        }
        Ok(())
    }

    /// Lets the file have at least `end` bytes.
    fn make_room(&self, end: u64) -> Result<(), Problem> {
        if end <= self.file.capacity() {
            return Ok(());
        }
        let grown = self.file.resize(end);
        grown.map_err(|error| Problem::Refused(format!("no room for {end} bytes: {error}")))
    }

    /// Cuts off the end of the file that is not used, unless the image has errors.
    fn cut_end(&self, report: &Report) {
        let is_right = report.corruptions == 0 && report.check_errors == 0;
        if is_right
            && report.image_end_offset < self.file.capacity()
            && let Err(error) = self.file.resize(report.image_end_offset)
        {
            tracing::debug!(%error, "the end of an image stays");
        }
    }

    /// Replaces bytes of a part of the image.
    async fn write(&self, part: &'static str, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        debug_assert!(self.has_begun);
        let written = self.file.patch(offset, bytes, Flags::NONE).await;
        written.map_err(|error| Problem::Write { part, offset, error })
    }

    /// Replaces bytes of the header's first sector, all at once, and makes them durable. Everything
    /// that was written before is durable first.
    async fn write_header(&mut self, at: usize, bytes: &[u8]) -> Result<(), Problem> {
        debug_assert!(self.has_begun && at as u64 + bytes.len() as u64 <= SECTOR, "one sector");
        self.flush().await?;
        let written = self.file.patch(at as u64, bytes, Flags::FUA).await;
        written.map_err(|error| Problem::Write { part: "the header", offset: at as u64, error })?;
        self.header = read_header(self.reader()).await?;
        Ok(())
    }

    /// Makes everything durable that was written.
    async fn flush(&self) -> Result<(), Problem> {
        let flushed = self.file.flush().await;
        flushed.map_err(|error| Problem::Write { part: "the file's cache", offset: 0, error })
    }
}

/// Refuses a change for the first reason that holds.
fn refuse_first(change: &str, reasons: impl IntoIterator<Item = (bool, String)>) -> Result<(), Problem> {
    match reasons.into_iter().find(|(is_so, _)| *is_so) {
        Some((_, why)) => Err(Problem::Refused(format!("cannot be {change}: {why}"))),
        None => Ok(()),
    }
}

/// Adds a range behind the others, or makes the last one longer.
fn add(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}
