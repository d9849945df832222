//! Dirty bitmaps: the directory of them.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Bitmaps*.

use crate::error::{Problem, invalid};
use crate::header::{Bitmaps, Header, be32, be64};
use crate::reader::Reader;

/// Length of the fixed part of an entry of the directory.
const ENTRY: usize = 24;
/// Largest table of a bitmap in entries.
const MAX_TABLE: u32 = 0x0800_0000;
/// Sizes of a granule, as powers of two.
const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// Longest name in bytes.
const MAX_NAME: usize = 1023;
/// Flag: the bitmap was not saved after its last change.
const IN_USE: u32 = 1;
/// Flag: the bitmap is kept up to date by programs that open the image.
const AUTO: u32 = 2;

/// A dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// Whether its content is stale, because it was not saved after its last change.
    pub is_in_use: bool,
    /// Whether programs that open the image keep it up to date.
    pub is_auto: bool,
    pub(crate) table_offset: u64,
    pub(crate) table_entries: u32,
}

/// Reads the directory of bitmaps.
pub(crate) async fn read(reader: &Reader, header: &Header, bitmaps: Bitmaps) -> Result<Vec<Bitmap>, Problem> {
    let Bitmaps { directory_offset: offset, directory_bytes: len, .. } = bitmaps;
    let directory = reader.read(offset, len).await;
    let part = "the bitmap directory";
    let directory = directory.map_err(|error| Problem::Io { part, offset, error })?;
    parse(&directory, header.cluster_size(), bitmaps.count)
}

fn parse(directory: &[u8], cluster_size: u64, count: u32) -> Result<Vec<Bitmap>, Problem> {
    let mut list = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let failed = || invalid(format!("bitmap directory: invalid entry at byte {at}"));
        let entry = &directory[at..];
        list.push(parse_entry(entry, cluster_size).ok_or_else(failed)?);
        let name_len = usize::from(u16::from_be_bytes([entry[18], entry[19]]));
        at += (ENTRY + name_len).next_multiple_of(8);
    }
    if at != directory.len() || list.len() as u64 != u64::from(count) {
        return Err(invalid(format!("bitmap directory: {} entries of {count}", list.len())));
    }
    Ok(list)
}

/// The bitmap at the start of `entry`, if it is valid. Extra data is not supported, as in QEMU.
fn parse_entry(entry: &[u8], cluster_size: u64) -> Option<Bitmap> {
    let fixed = entry.get(..ENTRY)?;
    let (table_offset, table_entries, flags) = (be64(fixed, 0), be32(fixed, 8), be32(fixed, 12));
    let name_len = usize::from(u16::from_be_bytes([fixed[18], fixed[19]]));
    let name = entry.get(ENTRY..ENTRY + name_len)?;
    let is_valid = (1..=MAX_TABLE).contains(&table_entries)
        && table_offset != 0
        && table_offset.is_multiple_of(cluster_size)
        && flags & !(IN_USE | AUTO) == 0
        && fixed[16] == 1
        && GRANULARITY_BITS.contains(&fixed[17])
        && (1..=MAX_NAME).contains(&name_len)
        && be32(fixed, 20) == 0;
    is_valid.then(|| Bitmap {
        name: String::from_utf8_lossy(name).into_owned(),
        granularity: 1 << fixed[17],
        is_in_use: flags & IN_USE != 0,
        is_auto: flags & AUTO != 0,
        table_offset,
        table_entries,
    })
}
