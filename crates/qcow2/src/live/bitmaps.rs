//! The dirty bitmaps of an image that is written.
//!
//! ```text
//!   open  ─► IN_USE is durable
//!   write ─► bits in memory ─► data
//!   close ─► clusters of bits ─► their refcounts ─► tables ─► IN_USE is cleared
//! ```
//!
//! Each arrow waits until the step before it is durable. So a bitmap without IN_USE has a bit for
//! each granule that was written since it was made. After a crash IN_USE stays set, and the bitmap
//! is kept as it is.

use super::file::File;
use super::refcounts::Refcounts;
use crate::bitmap::{self, Part};
use crate::bits::{self, Loaded};
use crate::error::Problem;
use crate::image::{Image, open_reader};
use crate::mutant::{self, Mutant};
use block::{Flags, IoError, IoResult, Op, Request};
use std::sync::Arc;

/// See the module.
pub(super) struct LiveBitmaps {
    /// First byte of their directory.
    directory: u64,
    /// Those that writes mark.
    enabled: Box<[Arc<Loaded>]>,
    /// Those that are not in use.
    pub(super) loaded: Vec<Arc<Loaded>>,
    /// As [`bits::Bitmaps::places`].
    pub(super) places: Vec<(u64, u64)>,
}

impl LiveBitmaps {
    /// Reads the bitmaps of an image; `None` if it has none.
    ///
    /// # Errors
    /// As [`bits::load`].
    pub(super) async fn open(image: &Image) -> Result<Option<LiveBitmaps>, Problem> {
        let Some(directory) = image.header.bitmaps else { return Ok(None) };
        let bits::Bitmaps { loaded, places } =
            bits::load(&open_reader(&*image.device)?, &image.header).await?;
        let enabled = loaded.iter().filter(|loaded| loaded.bitmap.is_auto).cloned().collect();
        Ok(Some(LiveBitmaps { directory: directory.directory_offset, enabled, loaded, places }))
    }

    /// Marks the bytes of the disk that a request is about to change. It has some.
    pub(super) fn mark(&self, req: &Request<'_>, offset: u64) {
        let is_unmarked = match req.op {
            Op::Write => mutant::is(Mutant::WriteNotMarked),
            _ => mutant::is(Mutant::ClearNotMarked),
        };
        if !is_unmarked {
            self.enabled.iter().for_each(|loaded| loaded.bits.mark(offset, req.len));
        }
    }

    /// Has the image say that the enabled bitmaps are not up to date. Durable when this returns.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn begin(&self, file: &File) -> IoResult {
        if mutant::is(Mutant::BitmapNotInUse) {
            return Ok(());
        }
        self.set_in_use(file, true).await
    }

    /// Writes the bits that were set, to new clusters where there are none. The data of all writes
    /// is in the file, and none follows. Returns the entries of tables that have changed, with
    /// their bytes in the file.
    ///
    /// # Errors
    /// [`IoError::NoSpace`], [`IoError::Corrupt`], the device's. All new clusters are free then.
    pub(super) async fn write_bits(
        &self,
        file: &File,
        refcounts: &Refcounts,
    ) -> Result<Vec<(u64, u64)>, IoError> {
        let mut entries = Vec::new();
        for loaded in &self.enabled {
            if let Err(error) = write_parts(loaded, file, refcounts, &mut entries).await {
                let clusters = entries.iter().map(|(_, offset)| offset / file.cluster_size());
                let _ = refcounts.drop_references(&clusters.collect::<Vec<_>>()).await;
                return Err(error);
            }
        }
        Ok(entries)
    }

    /// Writes entries of tables, whose clusters and refcounts are durable. Then the bitmaps are no
    /// longer in use.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn write_tables(&self, file: &File, entries: &[(u64, u64)]) -> IoResult {
        for (at, entry) in entries {
            file.patch(*at, &entry.to_be_bytes(), Flags::NONE).await?;
        }
        if !mutant::is(Mutant::BitmapSavedBeforeTable) {
            file.flush().await?;
        }
        self.set_in_use(file, false).await
    }

    /// Sets or clears IN_USE of the enabled bitmaps.
    async fn set_in_use(&self, file: &File, is_in_use: bool) -> IoResult {
        for loaded in &self.enabled {
            let bitmap = &loaded.bitmap;
            let flags = bitmap::flags(is_in_use, bitmap.is_auto);
            file.patch(self.directory + bitmap.flags_at(), &flags.to_be_bytes(), Flags::NONE).await?;
        }
        if mutant::is(Mutant::BitmapInUseNotDurable) {
            return Ok(());
        }
        file.flush().await
    }
}

/// Writes the parts of a bitmap that have changed. Adds entries of its table that have changed.
async fn write_parts(
    loaded: &Loaded,
    file: &File,
    refcounts: &Refcounts,
    entries: &mut Vec<(u64, u64)>,
) -> IoResult {
    let Loaded { bitmap, parts, bits } = loaded;
    for (number, bytes) in bits.changed() {
        let place = match parts[number] {
            Part::Stored(place) => place,
            // All bits of `Ones` were set before.
            Part::Zeroes | Part::Ones => {
                let place = refcounts.allocate(1).await?.first * file.cluster_size();
                entries.push((bitmap.table_offset + number as u64 * 8, place));
                place
            }
        };
        file.write(place, &bytes, Flags::NONE).await?;
    }
    Ok(())
}
