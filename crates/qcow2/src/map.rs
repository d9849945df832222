//! Where each byte of a disk is, for tools. Requests do not come here.

use crate::error::{Error, Problem};
use crate::image::{Image, open_reader};
use crate::lookup::{Lookup, Run, Tables};
use crate::reader::Reader;
use block::IoError;

/// Bytes of tables that a map keeps.
const CACHE_BYTES: u64 = 1 << 20;

/// The map of an image on one core.
pub struct Map {
    tables: Tables,
    lookup: Lookup,
    reader: Reader,
    size: u64,
}

impl Map {
    /// The map of `image`, on the calling core.
    ///
    /// # Errors
    /// When the device refuses a channel.
    pub fn open(image: &Image) -> Result<Map, Error> {
        let failed = |problem: Problem| Error::new(&image.name, problem);
        let reader = open_reader(&*image.device).map_err(failed)?;
        let tables = Tables::new(image, CACHE_BYTES);
        Ok(Map { lookup: Lookup::new(&tables), tables, reader, size: image.size })
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The run that starts at byte `offset` of the disk, at most `len` bytes. The range is on the
    /// disk.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`] when the range is not on the disk, [`IoError::Corrupt`] when a table
    /// is invalid, or the device's error.
    pub async fn run(&self, offset: u64, len: u64) -> Result<Run, IoError> {
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(IoError::OutOfRange);
        }
        self.lookup.run(&self.tables, &self.reader, offset, len).await
    }
}
