//! A dirty bitmap of the image. While it is not in use, its bits are those of the granules that
//! were written since it was made.

use super::file::{append, word};
use super::plan::Shape;
use crate::disk::SimDisk;
use crate::oracle::{Oracle, SECTOR};
use std::cell::Cell;

/// Name of the bitmap.
pub const NAME: &str = "b";
/// Place of the first extension in a header of version 3.
const EXTENSIONS: usize = 112;
/// Length of the bitmaps extension with its type and length.
const EXTENSION: usize = 32;
/// Flag of an entry of the directory: programs that open the image keep the bitmap up to date.
const AUTO: u32 = 2;
/// Byte of the flags in the entry.
const FLAGS: u64 = 12;
/// Bytes of the entry.
const ENTRY: u64 = 32;

/// See the module.
pub struct Bitmap {
    granularity: u64,
    /// First byte of the directory, and of the table.
    directory: u64,
    table: u64,
    /// Time of the oracle at which no bit was set.
    since: Cell<u64>,
    /// Whether it was not in use when the image was closed last.
    pub is_saved: Cell<bool>,
}

impl Bitmap {
    /// Adds a bitmap to a new image whose refcounts have 16 bits, if its last refcount block has
    /// room.
    pub fn add(image: &mut Vec<u8>, shape: &Shape, granularity_bits: u8) -> Option<Bitmap> {
        let cluster = 1 << shape.cluster_bits;
        let directory = append(image, cluster, 2)?;
        let table = directory + cluster;
        let mut entry = table.to_be_bytes().to_vec();
        entry.extend(1u32.to_be_bytes());
        entry.extend(AUTO.to_be_bytes());
        entry.extend([1, granularity_bits]);
        entry.extend((NAME.len() as u16).to_be_bytes());
        entry.extend([0; 4]);
        entry.extend(NAME.as_bytes());
        image[directory as usize..][..entry.len()].copy_from_slice(&entry);
        let mut extension = 0x2385_2875_u32.to_be_bytes().to_vec();
        extension.extend(24u32.to_be_bytes());
        extension.extend(1u32.to_be_bytes());
        extension.extend([0; 4]);
        extension.extend(ENTRY.to_be_bytes());
        extension.extend(directory.to_be_bytes());
        let first = cluster as usize;
        image.copy_within(EXTENSIONS..first - EXTENSION, EXTENSIONS + EXTENSION);
        image[EXTENSIONS..][..EXTENSION].copy_from_slice(&extension);
        let backing = word(image, 8);
        if backing != 0 {
            image[8..16].copy_from_slice(&(backing + EXTENSION as u64).to_be_bytes());
        }
        image[95] |= 1; // the autoclear bit of bitmaps
        let granularity = 1 << granularity_bits;
        Some(Bitmap { granularity, directory, table, since: Cell::new(0), is_saved: Cell::new(true) })
    }

    /// No bit is set at this time of the oracle.
    pub fn begin(&self, oracle: &Oracle) {
        self.since.set(oracle.now());
        self.is_saved.set(true);
    }

    /// Clears a bitmap that a crash has left in use. Power is off.
    pub fn clear(&self, file: &SimDisk, cluster: u64, oracle: &Oracle) {
        let mut entry = [0; 8];
        file.peek(self.table, &mut entry);
        let place = u64::from_be_bytes(entry);
        if place != 0 {
            file.poke(place, &vec![0; cluster as usize]);
        }
        file.poke(self.directory + FLAGS, &AUTO.to_be_bytes());
        self.begin(oracle);
    }

    /// The first byte of the disk whose bit is wrong. `run` says whether the bit of a byte is set,
    /// and for how many bytes that is so.
    pub fn wrong(&self, oracle: &Oracle, mut run: impl FnMut(u64, u64) -> (bool, u64)) -> Option<u64> {
        let size = oracle.sectors() * SECTOR as u64;
        (0..size).step_by(self.granularity as usize).find(|start| {
            let end = (start + self.granularity).min(size);
            let mut sectors = start / SECTOR as u64..end / SECTOR as u64;
            let is_written = sectors.any(|lba| oracle.is_written_since(lba, self.since.get()));
            run(*start, end - start) != (is_written, end - start)
        })
    }
}
