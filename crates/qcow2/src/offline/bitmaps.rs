//! Dirty bitmaps: added, removed and changed while nothing else has the image open.
//!
//! ```text
//!   bits and tables of changed bitmaps │ new directory ─► one write of the first sector
//! ```
//!
//! Everything new is behind the last used cluster. The first sector has the place of the directory,
//! and its write makes all changes count. So a crash leaves the old bitmaps, or the new ones.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Bitmaps*.

use super::Offline;
use super::backing::with_extension;
use crate::bitmap::{self, Bitmap, GRANULARITY_BITS, MAX_BYTES, MAX_NAME};
use crate::bits::{self, Bits};
use crate::error::{Error, Problem};
use crate::header::{BITMAPS, Bitmaps, MAX_BITMAP_DIRECTORY, MAX_BITMAPS, at, autoclear, be_bytes};
use block::{Device, DirtyBitmap};
use std::sync::Arc;

/// Least and largest granularity of a new bitmap whose granularity is not chosen: that of a cluster
/// between these, as in QEMU.
const DEFAULT_GRANULARITY: std::ops::RangeInclusive<u64> = 4096..=65536;

/// A change of a bitmap.
#[derive(Clone)]
pub enum Change {
    /// Adds the bitmap, enabled and without a bit, with so many bytes of the disk for each bit.
    /// `None`: a cluster, and 4 to 64 KiB.
    Add(Option<u64>),
    /// Removes it.
    Remove,
    /// Clears all bits.
    Clear,
    /// Has programs that write to the disk set its bits.
    Enable,
    /// Keeps its bits as they are.
    Disable,
    /// Sets the bits that another bitmap has.
    Merge(Source),
}

/// The bitmap that another one gets the bits of.
#[derive(Clone)]
pub enum Source {
    /// One of the same image, by name.
    Own(String),
    /// One of another disk, which has so many bytes.
    Other(Arc<dyn DirtyBitmap>, u64),
}

/// Makes some changes of a bitmap of the image on `device`, in their order, on the calling core.
/// All of them count or none.
///
/// # Errors
/// When the image has errors, or a change is impossible: there is no such bitmap, or one already,
/// or a bitmap is in use, as after a crash; the device's.
pub async fn change(device: &Arc<dyn Device>, name: &str, changes: &[Change]) -> Result<(), Error> {
    let run = async {
        let (mut image, found) = Offline::open_clean(device).await?;
        let mut list = image.read_bitmaps().await?;
        for change in changes {
            image.change_bitmap(&mut list, name, change).await?;
        }
        let start = found.report.image_end_offset / image.header.cluster_size();
        image.replace_bitmaps(start, &list).await
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

/// A bitmap of the new directory.
struct Entry {
    bitmap: Bitmap,
    /// New bits; else those that its table names.
    bits: Option<Bits>,
}

impl Offline {
    /// The bitmaps as they are now.
    async fn read_bitmaps(&self) -> Result<Vec<Entry>, Problem> {
        let Some(directory) = self.header.bitmaps else { return Ok(Vec::new()) };
        let list = bitmap::read(self.reader(), &self.header, directory).await?;
        Ok(list.into_iter().map(|bitmap| Entry { bitmap, bits: None }).collect())
    }

    async fn change_bitmap(&self, list: &mut Vec<Entry>, name: &str, change: &Change) -> Result<(), Problem> {
        match change {
            Change::Add(granularity) => self.add_bitmap(list, name, *granularity)?,
            Change::Remove => {
                let index = position(list, name)?;
                list.remove(index);
            }
            Change::Clear => {
                let index = usable(list, name)?;
                list[index].bits = Some(self.empty_bits(list[index].bitmap.granularity));
            }
            Change::Enable | Change::Disable => {
                let index = usable(list, name)?;
                list[index].bitmap.is_auto = matches!(change, Change::Enable);
            }
            Change::Merge(source) => {
                let index = usable(list, name)?;
                list[index].bits = Some(self.merged(list, index, source).await?);
            }
        }
        Ok(())
    }

    fn add_bitmap(&self, list: &mut Vec<Entry>, name: &str, granularity: Option<u64>) -> Result<(), Problem> {
        let cluster_size = self.header.cluster_size();
        let (least, most) = DEFAULT_GRANULARITY.into_inner();
        let granularity = granularity.unwrap_or(cluster_size.clamp(least, most));
        let range = 1 << GRANULARITY_BITS.start()..=1 << GRANULARITY_BITS.end();
        let is_granularity = granularity.is_power_of_two() && range.contains(&granularity);
        let bitmap = Bitmap::new(name, granularity);
        let clusters = bitmap::clusters(self.header.size, granularity.max(1), cluster_size);
        let bytes = clusters.saturating_mul(cluster_size);
        let refusals = [
            (self.header.version < 3, "version 2 has no dirty bitmaps".to_owned()),
            (
                !(1..=MAX_NAME).contains(&name.len()),
                format!("name of {} bytes: want 1 to {MAX_NAME}", name.len()),
            ),
            (
                !is_granularity,
                format!(
                    "granularity {granularity}: want a power of two, {} to {}",
                    range.start(),
                    range.end()
                ),
            ),
            (position(list, name).is_ok(), format!("bitmap {name:?}: the image has one with this name")),
            (
                list.len() as u64 >= MAX_BITMAPS.into(),
                format!("the image has {MAX_BITMAPS} bitmaps: no more fit"),
            ),
            (
                bytes > MAX_BYTES,
                format!(
                    "granularity {granularity}: the bitmap would have {bytes} bytes, more than {MAX_BYTES}"
                ),
            ),
        ];
        if let Some((_, why)) = refusals.into_iter().find(|(is_so, _)| *is_so) {
            return Err(Problem::Refused(why));
        }
        let bits = Some(self.empty_bits(granularity));
        list.push(Entry { bitmap, bits });
        Ok(())
    }

    /// No bit is set.
    fn empty_bits(&self, granularity: u64) -> Bits {
        Bits::new(granularity, self.header.size, self.header.cluster_size())
    }

    /// The bits of a bitmap of the list.
    async fn bits_of(&self, entry: &Entry) -> Result<Bits, Problem> {
        let bits = self.empty_bits(entry.bitmap.granularity);
        match &entry.bits {
            Some(now) => mark(&bits, self.header.size, |offset, len| now.run(offset, len)),
            None => {
                let mut room = self.reader().capacity();
                let parts = bitmap::read_parts(self.reader(), &self.header, &entry.bitmap, &mut room).await?;
                let loaded =
                    bits::load_bits(self.reader(), &self.header, entry.bitmap.clone(), parts).await?;
                return Ok(loaded.bits);
            }
        }
        Ok(bits)
    }

    /// The bits of a bitmap of the list, and those of another one.
    async fn merged(&self, list: &[Entry], index: usize, source: &Source) -> Result<Bits, Problem> {
        let (bits, size) = (self.bits_of(&list[index]).await?, self.header.size);
        match source {
            Source::Own(name) => {
                let source = self.bits_of(&list[usable(list, name)?]).await?;
                mark(&bits, size, |offset, len| source.run(offset, len));
            }
            Source::Other(source, bytes) if *bytes == size => {
                mark(&bits, size, |offset, len| source.run(offset, len));
            }
            Source::Other(source, bytes) => {
                let name = source.name();
                let text = format!("bitmap {name:?}: of a disk of {bytes} bytes, which has {size} here");
                return Err(Problem::Refused(text));
            }
        }
        Ok(bits)
    }

    /// Writes a new directory, and the bitmaps that have new bits, to clusters from cluster `start`
    /// on. Then the old ones are free.
    async fn replace_bitmaps(&mut self, start: u64, list: &[Entry]) -> Result<(), Problem> {
        let size = self.header.cluster_size();
        let mut next = start * size;
        let mut place = |bytes: &[u8]| {
            let at = next;
            next += (bytes.len() as u64).next_multiple_of(size);
            at
        };
        let (mut parts, mut directory) = (Vec::new(), Vec::new());
        for Entry { bitmap, bits } in list {
            let mut bitmap = bitmap.clone();
            if let Some(bits) = bits {
                let mut table = Vec::new();
                for bytes in bits.parts() {
                    table.push(bytes.as_ref().map_or(0, |bytes| place(bytes)));
                    parts.extend(bytes);
                }
                let table = be_bytes(table);
                (bitmap.table_offset, bitmap.table_entries) = (place(&table), (table.len() / 8) as u32);
                parts.push(table);
            }
            bitmap.append_to(&mut directory);
        }
        if directory.len() as u64 > MAX_BITMAP_DIRECTORY {
            let text =
                format!("a bitmap directory of {} bytes: at most {MAX_BITMAP_DIRECTORY}", directory.len());
            return Err(Problem::Refused(text));
        }
        let bitmaps = Bitmaps {
            count: list.len() as u32,
            directory_bytes: directory.len() as u64,
            directory_offset: place(&directory),
        };
        parts.push(directory);
        if !list.is_empty() {
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            self.append(start, &parts).await?;
        }
        self.commit_bitmaps((!list.is_empty()).then_some(bitmaps)).await?;
        self.settle().await
    }

    /// Has the header name a directory, or none.
    async fn commit_bitmaps(&mut self, bitmaps: Option<Bitmaps>) -> Result<(), Problem> {
        self.begin().await?;
        let old = self.first_cluster().await?;
        let mut new = with_extension(&old, &self.header, BITMAPS, bitmaps.map(Bitmaps::bytes), None)?
            .ok_or_else(|| Problem::Refused("no room for the bitmaps extension in the header".into()))?;
        let features = self.header.known_autoclear() & !autoclear::BITMAPS;
        let features = features | if bitmaps.is_some() { autoclear::BITMAPS } else { 0 };
        new[at::AUTOCLEAR..at::AUTOCLEAR + 8].copy_from_slice(&features.to_be_bytes());
        self.write_first_cluster(&old, &new).await
    }
}

/// The place of a bitmap in the list.
fn position(list: &[Entry], name: &str) -> Result<usize, Problem> {
    let found = list.iter().position(|entry| entry.bitmap.raw_name == name.as_bytes());
    found.ok_or_else(|| {
        let known: Vec<&str> = list.iter().map(|entry| entry.bitmap.name.as_str()).collect();
        Problem::Refused(format!("no bitmap {name:?}: the image has [{}]", known.join(", ")))
    })
}

/// The place of a bitmap that is not in use.
fn usable(list: &[Entry], name: &str) -> Result<usize, Problem> {
    let index = position(list, name)?;
    match list[index].bitmap.is_in_use {
        true => {
            Err(Problem::Refused(format!("bitmap {name:?}: in use since a crash: it can only be removed")))
        }
        false => Ok(index),
    }
}

/// Sets the bits of those bytes of a disk that `run` says are dirty.
fn mark(bits: &Bits, size: u64, run: impl Fn(u64, u64) -> (bool, u64)) {
    let mut at = 0;
    while at < size {
        let (is_dirty, len) = run(at, size - at);
        if is_dirty {
            bits.mark(at, len);
        }
        at += len;
    }
}
