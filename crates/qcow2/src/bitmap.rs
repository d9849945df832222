//! Dirty bitmaps: the directory of them, and their tables.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Bitmaps*.

use crate::entry::OFFSET;
use crate::error::{Problem, invalid};
use crate::header::{Bitmaps, Header, be32, be64};
use crate::reader::Reader;

/// Length of the fixed part of an entry of the directory.
const ENTRY: usize = 24;
/// Largest bitmap in bytes, as in QEMU.
pub(crate) const MAX_BYTES: u64 = 512 << 20;
/// Sizes of a granule, as powers of two.
pub(crate) const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// Longest name in bytes.
pub(crate) const MAX_NAME: usize = 1023;
/// Byte of the flags in an entry.
const FLAGS: usize = 12;
/// Flag: the bitmap was not saved after its last change.
const IN_USE: u32 = 1;
/// Flag: the bitmap is kept up to date by programs that open the image.
const AUTO: u32 = 2;
/// Type of a dirty bitmap.
const DIRTY_TRACKING: u8 = 1;
/// Entry of a table: all bits of the cluster are set, and it has no place.
const ONES: u64 = 1;

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
    /// Its name as it stands in the directory.
    pub(crate) raw_name: Vec<u8>,
    /// Byte of its entry in the directory.
    at: usize,
}

impl Bitmap {
    /// An enabled bitmap without a table.
    pub(crate) fn new(name: &str, granularity: u64) -> Bitmap {
        let (raw_name, name) = (name.as_bytes().to_vec(), name.to_owned());
        let (is_in_use, is_auto, table_offset, table_entries, at) = (false, true, 0, 0, 0);
        Bitmap { name, granularity, is_in_use, is_auto, table_offset, table_entries, raw_name, at }
    }

    /// Bytes of its table.
    pub(crate) fn table_bytes(&self) -> u64 {
        u64::from(self.table_entries) * 8
    }

    /// Clusters that the bits of a disk of `size` bytes need.
    pub(crate) fn clusters(&self, size: u64, cluster_size: u64) -> u64 {
        clusters(size, self.granularity, cluster_size)
    }

    /// Appends its entry to a directory.
    pub(crate) fn append_to(&self, directory: &mut Vec<u8>) {
        directory.extend(self.table_offset.to_be_bytes());
        directory.extend(self.table_entries.to_be_bytes());
        directory.extend(flags(self.is_in_use, self.is_auto).to_be_bytes());
        directory.extend([DIRTY_TRACKING, self.granularity.trailing_zeros() as u8]);
        directory.extend((self.raw_name.len() as u16).to_be_bytes());
        directory.extend(0u32.to_be_bytes()); // no extra data
        directory.extend(&self.raw_name);
        directory.resize(directory.len().next_multiple_of(8), 0);
    }

    /// Byte of its flags in the directory.
    pub(crate) fn flags_at(&self) -> u64 {
        (self.at + FLAGS) as u64
    }
}

/// Clusters that the bits of a disk of `size` bytes need; a table has at least one entry.
pub(crate) fn clusters(size: u64, granularity: u64, cluster_size: u64) -> u64 {
    size.div_ceil(granularity).div_ceil(8).div_ceil(cluster_size).max(1)
}

/// The flags of an entry.
pub(crate) fn flags(is_in_use: bool, is_auto: bool) -> u32 {
    let set = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    set(is_in_use, IN_USE) | set(is_auto, AUTO)
}

/// A part of a bitmap that fits in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// No bit is set.
    Zeroes,
    /// All bits are set.
    Ones,
    /// The bits are in the cluster at this byte of the file.
    Stored(u64),
}

impl Part {
    /// The meaning of an entry of a table; `None` if it is invalid.
    pub(crate) fn of(entry: u64, cluster_size: u64) -> Option<Part> {
        match entry & OFFSET {
            _ if entry & !OFFSET & !ONES != 0 => None,
            0 => Some(if entry == ONES { Part::Ones } else { Part::Zeroes }),
            place if entry == place && place.is_multiple_of(cluster_size) => Some(Part::Stored(place)),
            _ => None,
        }
    }
}

/// Reads the directory of bitmaps.
pub(crate) async fn read(reader: &Reader, header: &Header, bitmaps: Bitmaps) -> Result<Vec<Bitmap>, Problem> {
    let Bitmaps { directory_offset: offset, directory_bytes: len, .. } = bitmaps;
    let directory = reader.read(offset, len).await;
    let part = "the bitmap directory";
    let directory = directory.map_err(|error| Problem::Io { part, offset, error })?;
    parse(&directory, header.cluster_size(), bitmaps.count)
}

/// Reads the entries of a bitmap's table. `room` is the number of bytes that tables which have not
/// been read can have: together they are smaller than the file.
pub(crate) async fn read_table(
    reader: &Reader,
    bitmap: &Bitmap,
    room: &mut u64,
) -> Result<Vec<u64>, Problem> {
    let (offset, bytes) = (bitmap.table_offset, bitmap.table_bytes());
    let overlap = || invalid(format!("bitmap table at byte {offset}: tables overlap"));
    *room = room.checked_sub(bytes).ok_or_else(overlap)?;
    let table = reader.read(offset, bytes).await;
    let table = table.map_err(|error| Problem::Io { part: "a bitmap table", offset, error })?;
    Ok(table.chunks_exact(8).map(|entry| be64(entry, 0)).collect())
}

/// Reads the parts of a bitmap. `room`: as in [`read_table`].
///
/// # Errors
/// When an entry is invalid; the device's.
pub(crate) async fn read_parts(
    reader: &Reader,
    header: &Header,
    bitmap: &Bitmap,
    room: &mut u64,
) -> Result<Vec<Part>, Problem> {
    let mut parts = Vec::new();
    for entry in read_table(reader, bitmap, room).await? {
        let part = Part::of(entry, header.cluster_size());
        let is_inside = |part: &Part| !matches!(part, Part::Stored(offset) if *offset >= reader.capacity());
        let bad = || invalid(format!("bitmap {:?}: table entry {entry:#x}: invalid", bitmap.name));
        parts.push(part.filter(is_inside).ok_or_else(bad)?);
    }
    Ok(parts)
}

fn parse(directory: &[u8], cluster_size: u64, count: u32) -> Result<Vec<Bitmap>, Problem> {
    let mut list = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let failed = || invalid(format!("bitmap directory: invalid entry at byte {at}"));
        let entry = &directory[at..];
        let bitmap = parse_entry(entry, at, cluster_size).ok_or_else(failed)?;
        at += (ENTRY + bitmap.raw_name.len()).next_multiple_of(8);
        list.push(bitmap);
    }
    if at != directory.len() || list.len() as u64 != u64::from(count) {
        return Err(invalid(format!("bitmap directory: {} entries of {count}", list.len())));
    }
    Ok(list)
}

/// The bitmap at the start of `entry`, which is byte `at` of the directory, if it is valid. Extra
/// data is not supported, as in QEMU.
fn parse_entry(entry: &[u8], at: usize, cluster_size: u64) -> Option<Bitmap> {
    let fixed = entry.get(..ENTRY)?;
    let (table_offset, table_entries, flags) = (be64(fixed, 0), be32(fixed, 8), be32(fixed, FLAGS));
    let name_len = usize::from(u16::from_be_bytes([fixed[18], fixed[19]]));
    let name = entry.get(ENTRY..ENTRY + name_len)?;
    let is_valid = (1..=MAX_BYTES / cluster_size).contains(&u64::from(table_entries))
        && table_offset != 0
        && table_offset.is_multiple_of(cluster_size)
        && flags & !(IN_USE | AUTO) == 0
        && fixed[16] == DIRTY_TRACKING
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
        raw_name: name.to_vec(),
        at,
    })
}
