//! Another size of the disk.
//!
//! A disk grows in this order: a longer L1 table, entries for zeroes where the new part would show
//! old data or the backing file, and then its size. It shrinks in the reverse order: the clusters
//! behind the new end are discarded before the size is written. So a crash leaves the old size, and
//! new bytes always read as zeroes.

use super::disk::Disk;
use super::{Offline, SECTOR, add, refuse_first};
use crate::below::Others;
use crate::device::DEFAULT_CACHE_BYTES;
use crate::entry::Place;
use crate::error::{Error, Problem};
use crate::header::{MAX_L1_BYTES, at, be_bytes};
use crate::image::Image;
use crate::live::LiveImage;
use crate::map::Map;
use crate::offline::repair::{Level, repair_image};
use block::Device;
use std::ops::Range;
use std::sync::Arc;

/// Lets the disk of the image on `device` have `size` bytes. `backing` is the device of its backing
/// file, which a disk needs to grow if it has one. Runs cores, and must not be called on one.
///
/// # Errors
/// When the image has a property that does not allow another size, or the disk would shrink without
/// `may_shrink`; the device's. The disk then has its old size.
pub fn resize(
    device: &Arc<dyn Device>,
    backing: Option<Arc<dyn Device>>,
    size: u64,
    may_shrink: bool,
) -> Result<(), Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let backing_bytes = backing.as_ref().map(|backing| backing.limits().capacity);
    let prepared = device.clone();
    let change = reactor::run(async move { prepare(&prepared, backing_bytes, size, may_shrink).await });
    let Some(change) = change.map_err(failed)? else { return Ok(()) };
    if !change.ranges.is_empty() {
        clear(device, backing, &change)?;
    }
    let device_to_end = device.clone();
    reactor::run(async move { finish(&device_to_end, &change).await }).map_err(failed)
}

/// The steps that are left.
struct Change {
    old: u64,
    new: u64,
    /// Bytes of the disk that must not keep their clusters, or must read as zeroes.
    ranges: Vec<Range<u64>>,
}

impl Change {
    fn is_growth(&self) -> bool {
        self.new > self.old
    }

    /// Size of a disk that has the old and the new part.
    fn larger(&self, cluster_size: u64) -> u64 {
        if self.is_growth() { self.new } else { self.old.next_multiple_of(cluster_size) }
    }
}

async fn prepare(
    device: &Arc<dyn Device>,
    backing_bytes: Option<u64>,
    size: u64,
    may_shrink: bool,
) -> Result<Option<Change>, Problem> {
    let mut image = Offline::open(device).await?;
    let old = image.header.size;
    image.check_size(size, may_shrink)?;
    let mut change = Change { old, new: size, ranges: Vec::new() };
    if change.is_growth() && image.header.backing_file.is_some() && backing_bytes.is_none() {
        let name = image.header.backing_file.as_deref().unwrap_or_default();
        return Err(Problem::Refused(format!("the backing file {name:?} is not open")));
    }
    let hides_backing = backing_bytes.is_some_and(|bytes| bytes > old);
    if change.is_growth() && hides_backing && image.header.version < 3 {
        let text = "version 2 has no entry that hides the backing file, which is longer than the disk";
        return Err(Problem::Unsupported(text.into()));
    }
    if image.header.is_dirty() {
        repair_image(&mut image, Level::All).await?;
    }
    if size == old {
        return Ok(None);
    }
    change.ranges = to_clear(device, &change, backing_bytes.unwrap_or(0)).await?;
    if !change.ranges.is_empty() {
        // Clusters are about to be taken and given back.
        Offline::open_clean(device).await?;
    }
    let needed = size.div_ceil(image.header.l2_table_span());
    if needed > image.header.l1_entries.into() {
        image.grow_l1(device, needed).await?;
    }
    Ok(Some(change))
}

impl Offline {
    /// Refuses a size that the image cannot have.
    fn check_size(&self, size: u64, may_shrink: bool) -> Result<(), Problem> {
        let header = &self.header;
        let old = header.size;
        let needed = size.div_ceil(header.l2_table_span()) * 8;
        let refusals = [
            (
                size == 0 || !size.is_multiple_of(SECTOR),
                format!("size {size}: want a multiple of {SECTOR} bytes"),
            ),
            (
                needed > MAX_L1_BYTES,
                format!("size {size}: too large for clusters of {} bytes", header.cluster_size()),
            ),
            (size < old && !may_shrink, format!("size {size}: less than {old} (--shrink allows that)")),
            (
                header.version < 3 && header.snapshot_count > 0,
                "version 2 with snapshots, which do not state their size".into(),
            ),
        ];
        refuse_first("resized", refusals)?;
        self.check_plain("resized")
    }

    /// Lets the L1 table have `needed` entries.
    async fn grow_l1(&mut self, device: &Arc<dyn Device>, needed: u64) -> Result<(), Problem> {
        let (offset, bytes) = (self.header.l1_offset, u64::from(self.header.l1_entries) * 8);
        // The rest of its last cluster belongs to the table.
        if needed * 8 <= bytes.next_multiple_of(self.header.cluster_size()) {
            self.begin().await?;
            self.write("the L1 table", offset + bytes, &vec![0; (needed * 8 - bytes) as usize]).await?;
            return self.commit_l1(self.header.size, needed as u32, offset).await;
        }
        let (mut image, found) = Offline::open_clean(device).await?;
        let mut table = be_bytes(found.l1.iter().copied());
        table.resize((needed * 8) as usize, 0);
        let start = found.report.image_end_offset / image.header.cluster_size();
        let place = image.append(start, &[&table]).await?[0];
        image.commit_l1(image.header.size, needed as u32, place).await?;
        image.settle().await
    }
}

/// The image as it is while the disk has the old and the new part.
async fn open(device: &Arc<dyn Device>, change: &Change) -> Result<Image, Error> {
    let mut image = Image::open(device.clone()).await?;
    image.size = change.larger(image.header.cluster_size());
    image.header.size = image.size;
    if !change.is_growth() {
        // A cluster that is discarded needs no entry that hides the backing file.
        image.header.backing_file = None;
    }
    Ok(image)
}

/// The ranges of a growing disk that do not read as zeroes, or those of a shrinking disk that have
/// clusters.
async fn to_clear(
    device: &Arc<dyn Device>,
    change: &Change,
    backing_bytes: u64,
) -> Result<Vec<Range<u64>>, Problem> {
    let mut image = open(device, change).await.map_err(|error| error.problem)?;
    // The L1 table may be too short yet.
    image.size = image.size.min(u64::from(image.header.l1_entries) * image.header.l2_table_span());
    let map = Map::open(&image).map_err(|error| error.problem)?;
    let mut at = match change.is_growth() {
        true => change.old / SECTOR * SECTOR,
        false => change.new.next_multiple_of(image.header.cluster_size()),
    };
    let mut ranges: Vec<Range<u64>> = Vec::new();
    while at < map.size() {
        let run = map.run(at, map.size() - at).await;
        let run = run.map_err(|error| Problem::Io { part: "the map of the disk", offset: at, error })?;
        let end = match run.place {
            Place::Data(_) | Place::Compressed(_) => at + run.len,
            Place::Zero(Some(_)) if !change.is_growth() => at + run.len,
            Place::Unallocated if change.is_growth() => (at + run.len).min(backing_bytes),
            Place::Zero(_) | Place::Unallocated => at,
        };
        add(&mut ranges, at..end);
        at += run.len;
    }
    if change.is_growth() {
        add(&mut ranges, at..backing_bytes.min(change.new));
    }
    Ok(ranges)
}

/// Discards the ranges of a shrinking disk, or writes zeroes to those of a growing one.
fn clear(device: &Arc<dyn Device>, backing: Option<Arc<dyn Device>>, change: &Change) -> Result<(), Error> {
    let (opened, larger) = (device.clone(), Change { ranges: Vec::new(), ..*change });
    let image = reactor::run(async move { open(&opened, &larger).await })?;
    let is_growth = change.is_growth();
    let backing = backing.filter(|_| is_growth);
    let live =
        Arc::new(LiveImage::open(image, Others { backing, data_file: None }, DEFAULT_CACHE_BYTES, None)?);
    let (used, ranges, old) = (live.clone(), change.ranges.clone(), change.old);
    let cleared = reactor::run(async move {
        let disk = Disk::open(&*used)?;
        let failed = |error| Problem::Write { part: "the part behind the end", offset: old, error };
        for range in ranges {
            match is_growth {
                true => disk.write_zeroes(range).await.map_err(failed)?,
                false => disk.discard(range).await.map_err(failed)?,
            }
        }
        disk.flush().await.map_err(failed)
    });
    cleared.map_err(|problem| Error::new(device.name(), problem))
}

/// Writes the new size, and cuts off the end of the file that is not used.
async fn finish(device: &Arc<dyn Device>, change: &Change) -> Result<(), Problem> {
    let mut image = Offline::open(device).await?;
    image.begin().await?;
    image.write_header(at::SIZE, &change.new.to_be_bytes()).await?;
    if change.is_growth() {
        return Ok(());
    }
    image.cut_end(&image.check().await?.report);
    Ok(())
}
